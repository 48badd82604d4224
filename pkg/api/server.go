// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/identity"
	"github.com/redirector-dataplane/redirector/pkg/monitor"
	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// Bounds on what one client can take up. All clients are root: they are to stop mistakes, not attacks.
const (
	maxBody      = 64 << 10 // bytes; the longest sensible request has some hundred
	maxHeader    = 16 << 10 // bytes
	readTimeout  = 5 * time.Second
	writeTimeout = 10 * time.Second
	idleTimeout  = time.Minute
	// unenrolTimeout bounds the wait for node proxies to say that they left a pod. It is longer than each one's deadlines.
	unenrolTimeout = 30 * time.Second
	// stopGrace is how long requests may go on after the server is told to stop. After that, they wait for no proxy any more.
	stopGrace = 5 * time.Second
)

// Options say what a Server serves. All fields are needed.
type Options struct {
	Enroller *enroll.Enroller
	// Agent is what is known of the process from its start; Uptime is filled in with each answer.
	Agent Agent
	// Identity is asked what is weaker than it was meant to be; nil: nothing is.
	Identity *identity.Identity
	// Conditions are what the agent needs to be ready; nil: nothing more than to run.
	Conditions func() []Condition
	Log        *slog.Logger
}

// Server answers requests.
type Server struct {
	Options
	hub                    *monitor.Hub
	readTimeout, stopGrace time.Duration // shorter in tests
}

// NewServer returns a server that does not serve yet.
func NewServer(opts Options) *Server {
	return &Server{Options: opts, hub: monitor.New(opts.Enroller, opts.Log), readTimeout: readTimeout, stopGrace: stopGrace}
}

// Serve answers requests that come by l until ctx is done. Then it closes l and lets requests that are being worked on come
// to their end, for a while; those that only wait for a node proxy are told so after that. It returns nil when it was
// stopped by ctx.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	base, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	server := &http.Server{
		Handler: s.handler(ctx, base),
		// Not ReadTimeout, which would go on to run while a request waits for a proxy.
		ReadHeaderTimeout: s.readTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		BaseContext:       func(net.Listener) context.Context { return base },
		ErrorLog:          slog.NewLogLogger(s.Log.Handler(), slog.LevelWarn),
	}
	stopped := make(chan error, 1)
	unhook := context.AfterFunc(ctx, func() {
		defer close(stopped)
		if s.shutdown(server) {
			return
		}
		abort()
		if !s.shutdown(server) {
			stopped <- errors.Join(errors.New("requests had to be cut off: they did not end in time"), server.Close())
		}
	})
	err := server.Serve(l)
	if unhook() {
		return fmt.Errorf("serve the agent's API: %w", err)
	}
	return <-stopped
}

// shutdown says whether all requests came to their end within the grace time.
func (s *Server) shutdown(server *http.Server) bool {
	ctx, cancel := context.WithTimeout(context.Background(), s.stopGrace)
	defer cancel()
	return server.Shutdown(ctx) == nil
}

// endpoint carries out a request and returns what to answer with: a value to write as JSON, or nil for an empty answer.
type endpoint func(r *http.Request) (any, error)

// handler returns the API's endpoints. ctx is done when requests that have no end are to end, and base when all must.
func (s *Server) handler(ctx, base context.Context) http.Handler {
	unenrol := func(r *http.Request) (any, error) { return nil, s.unenrol(base, r.PathValue("uid")) }
	mux := http.NewServeMux()
	mux.Handle("/v1/pods", s.methods(map[string]endpoint{http.MethodGet: s.pods, http.MethodPost: s.enrol}))
	mux.Handle("/v1/pods/{uid}", s.methods(map[string]endpoint{http.MethodGet: s.pod, http.MethodDelete: unenrol}))
	mux.Handle("/v1/pods/{uid}/inspection", s.methods(map[string]endpoint{http.MethodGet: s.inspect}))
	mux.Handle("/v1/pods/{uid}/verification", s.methods(map[string]endpoint{http.MethodPost: s.verify}))
	mux.Handle("GET /v1/monitor", s.monitor(ctx))
	mux.Handle("/v1/explain", s.methods(map[string]endpoint{http.MethodGet: s.explain}))
	mux.Handle("/v1/pods/{uid}/settings", s.methods(map[string]endpoint{http.MethodPost: s.set}))
	mux.Handle("/v1/status", s.methods(map[string]endpoint{http.MethodGet: s.status}))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.answer(w, nil, &Error{
			Status:  http.StatusNotFound,
			Kind:    KindInvalid,
			Message: fmt.Sprintf("there is no %s: use /v1/pods, /v1/pods/UID, /v1/pods/UID/settings or /v1/status", r.URL.Path),
		})
	})
	return mux
}

// methods hands a request to the endpoint for its method.
func (s *Server) methods(endpoints map[string]endpoint) http.Handler {
	allowed := strings.Join(slices.Sorted(maps.Keys(endpoints)), ", ")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		do := endpoints[r.Method]
		if do == nil {
			w.Header().Set("Allow", allowed)
			s.answer(w, nil, &Error{
				Status:  http.StatusMethodNotAllowed,
				Kind:    KindInvalid,
				Message: fmt.Sprintf("%s cannot be asked for %s: use %s", r.URL.Path, r.Method, allowed),
			})
			return
		}
		control := http.NewResponseController(w)
		_ = control.SetReadDeadline(time.Now().Add(s.readTimeout)) // fails on a closed connection, and so does all else
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		answer, err := do(r)
		_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
		s.answer(w, answer, err)
	})
}

// answer writes the value, or the error.
func (s *Server) answer(w http.ResponseWriter, value any, err error) {
	status := http.StatusOK
	if err != nil {
		var refused *Error
		if !errors.As(err, &refused) {
			refused = refusal(err)
		}
		status, value = refused.Status, refused
	}
	if value == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	body, err := json.Marshal(value)
	if err != nil {
		s.Log.Error("cannot write an answer", "error", err)
		http.Error(w, `{"error":"the agent cannot write its answer: see its log","kind":"failed"}`, http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // whoever asked is gone if this fails
}

// refusal sorts an error of pkg/enroll and what is below it.
func refusal(err error) *Error {
	e := &Error{Message: oneLine(err), Kind: KindFailed, Status: http.StatusInternalServerError}
	_, isInvalid := errors.AsType[*enroll.InvalidError](err)
	switch {
	case isInvalid:
		e.Kind, e.Status = KindInvalid, http.StatusBadRequest
	case errors.Is(err, enroll.ErrPending):
		e.Kind, e.Status = KindPending, http.StatusGatewayTimeout
	case errors.Is(err, zds.ErrClosed):
		e.Kind, e.Status = KindStopping, http.StatusServiceUnavailable
	case errors.Is(err, enroll.ErrBusy):
		e.Kind, e.Status = KindBusy, http.StatusServiceUnavailable
	case errors.Is(err, enroll.ErrTaken):
		e.Kind, e.Status = KindTaken, http.StatusConflict
	case errors.Is(err, enroll.ErrNotEnrolled):
		e.Kind, e.Status = KindNotEnrolled, http.StatusNotFound
	case errors.Is(err, podns.ErrHost), errors.Is(err, podns.ErrNotNetNS):
		e.Kind, e.Status = KindNetNS, http.StatusUnprocessableEntity
	}
	return e
}

// oneLine writes joined errors on one line.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func invalid(err error) *Error {
	e := &Error{Message: oneLine(err), Kind: KindInvalid, Status: http.StatusBadRequest}
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		e.Message = fmt.Sprintf("the request has more than %d bytes: send one pod at a time", tooLarge.Limit)
		e.Status = http.StatusRequestEntityTooLarge
	}
	return e
}

// read reads a request's body, which is about one pod.
func (s *Server) read(r *http.Request, into any) error {
	body := json.NewDecoder(r.Body)
	body.DisallowUnknownFields()
	if err := body.Decode(into); err != nil {
		return invalid(fmt.Errorf("read the request (the agent's version is %s): %w", s.Agent.Version, err))
	}
	if _, err := body.Token(); !errors.Is(err, io.EOF) {
		return invalid(errors.New("read the request: there is something behind the pod: send one pod at a time"))
	}
	return nil
}

// enrol captures a pod and waits for a node proxy, if asked to. Capture is not interrupted when whoever asked goes away or the
// agent stops, so it is never left half done; the wait is, and then the pod is pending, as for any other reason.
func (s *Server) enrol(r *http.Request) (any, error) {
	var request EnrollRequest
	if err := s.read(r, &request); err != nil {
		return nil, err
	}
	if err := request.validate(); err != nil {
		return nil, invalid(err)
	}

	ctx := r.Context()
	if request.Wait {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(request.Timeout))
		defer cancel()
	}
	if err := s.Enroller.Enroll(ctx, request.Spec, request.Wait); err != nil {
		refused := refusal(err)
		if refused.Kind == KindPending {
			refused.Message = s.explainPending(&request, err)
		}
		if _, statErr := os.Stat(request.NetNS); statErr != nil && refused.Kind == KindFailed {
			refused.Kind, refused.Status = KindNetNS, http.StatusUnprocessableEntity
		}
		return nil, refused
	}
	return s.Enroller.Pod(request.UID)
}

func (r *EnrollRequest) validate() error {
	if err := r.Spec.Validate(); err != nil {
		return err
	}
	// The agent's own, whoever asks: its open files, for one, are namespaces of other pods.
	for _, own := range []string{"/proc/self/", "/proc/thread-self/", "/dev/fd/", "/dev/stdin", "/dev/stdout", "/dev/stderr"} {
		if strings.HasPrefix(filepath.Clean(r.NetNS)+"/", own) {
			return fmt.Errorf("bad network namespace path %q: it means another file to the agent than to you: name /proc/PID/ns/net", r.NetNS)
		}
	}
	if r.Wait && (r.Timeout <= 0 || time.Duration(r.Timeout) > MaxTimeout) {
		return fmt.Errorf("bad timeout %s: wait longer than 0s and at most %s", time.Duration(r.Timeout), MaxTimeout)
	}
	return nil
}

// explainPending says why no node proxy runs for the pod, and what to do.
func (s *Server) explainPending(request *EnrollRequest, err error) string {
	var why string
	refused := (*zds.NackError)(nil)
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, zds.ErrClosed):
		why = "the agent stops: when it is started again, the pod is handed to the node proxy"
	case errors.As(err, &refused):
		why = fmt.Sprintf("%s: see that proxy's log; the pod is offered to it again every few seconds", oneLine(refused))
	case errors.Is(err, zds.ErrNoProxy):
		why = fmt.Sprintf("no node proxy was connected to %s and ready within %s: start one, it is handed the pod when it connects",
			s.Agent.ZDSSocket, time.Duration(request.Timeout))
	default:
		why = fmt.Sprintf("the node proxy did not answer within %s: see its log, and `redirector status`", time.Duration(request.Timeout))
	}
	return fmt.Sprintf("pod %s (%s) is captured and pending, nothing of it passes: %s", &request.Spec, request.UID, why)
}

func (s *Server) pods(*http.Request) (any, error) { return s.Enroller.Pods() }

func (s *Server) pod(r *http.Request) (any, error) {
	uid := r.PathValue("uid")
	if err := enroll.ValidateUID(uid); err != nil {
		return nil, invalid(err)
	}
	pod, err := s.Enroller.Pod(uid)
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", uid, err)
	}
	return pod, nil
}

// set changes settings of a pod: all that are asked for, or none.
func (s *Server) set(r *http.Request) (any, error) {
	uid := r.PathValue("uid")
	var request SettingsRequest
	if err := s.read(r, &request); err != nil {
		return nil, err
	}
	if err := s.Enroller.Configure(uid, request.Apply); err != nil {
		return nil, err
	}
	return s.pod(r)
}

// unenrol goes on when whoever asked goes away: a pod is either in or out.
func (s *Server) unenrol(base context.Context, uid string) error {
	if err := enroll.ValidateUID(uid); err != nil {
		return invalid(err)
	}
	ctx, cancel := context.WithTimeout(base, unenrolTimeout)
	defer cancel()
	return s.Enroller.Unenroll(ctx, uid)
}
