// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/net/netutil"

	"github.com/redirector-dataplane/redirector/pkg/sockfile"
)

// socketMode lets root in only: runtimes run plugins as root.
const socketMode = 0o600

// Bounds on what clients can take up.
const (
	maxClients   = 256 // connections at once; more wait to be accepted
	maxHeader    = 16 << 10
	readTimeout  = 5 * time.Second
	writeTimeout = 5 * time.Second
	// addTimeout bounds the work on one pod. The plugin waits for less unless told otherwise.
	addTimeout = 2 * time.Minute
	// stopGrace is how long requests may go on when the server is told to stop.
	stopGrace = 5 * time.Second
)

// ListenSocket makes the plugin's socket. A socket file on which nobody listens any more is replaced; one on which somebody does
// (sockfile.ErrInUse), and a file that is no socket, is left alone and an error. Closing the listener removes the file.
func ListenSocket(path string) (net.Listener, error) {
	if len(path) > sockfile.MaxPath {
		return nil, fmt.Errorf("CNI socket %s: the path has %d bytes, a Unix socket's has %d at most: choose a shorter run-dir",
			path, len(path), sockfile.MaxPath)
	}
	if err := sockfile.RemoveStale("unix", path); err != nil {
		return nil, err
	}
	l, err := sockfile.Listen("unix", path, socketMode)
	if err != nil {
		return nil, fmt.Errorf("listen on CNI socket %s: %w", path, err)
	}
	return l, nil
}

// Server answers the plugin.
type Server struct {
	adder                   Adder
	log                     *slog.Logger
	readTimeout, addTimeout time.Duration // shorter in tests
}

// NewServer returns a server that does not serve yet.
func NewServer(adder Adder, log *slog.Logger) *Server {
	return &Server{adder: adder, log: log, readTimeout: readTimeout, addTimeout: addTimeout}
}

// Serve answers requests that come by l until ctx is done. Then it closes l, lets requests that are being worked on come to their
// end for a while, and breaks off the rest: their plugins ask the next agent. It returns nil when it was stopped by ctx.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	base, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	mux := http.NewServeMux()
	mux.HandleFunc(addPath, s.add)
	server := &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: s.readTimeout,
		IdleTimeout:       s.readTimeout,
		MaxHeaderBytes:    maxHeader,
		BaseContext:       func(net.Listener) context.Context { return base },
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	stopped := make(chan error, 1)
	unhook := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.Background(), stopGrace)
		defer cancel()
		err := server.Shutdown(grace)
		if errors.Is(err, context.DeadlineExceeded) {
			err = server.Close()
		}
		stopped <- err
	})
	err := server.Serve(netutil.LimitListener(l, maxClients))
	if unhook() {
		return fmt.Errorf("serve the CNI plugin: %w", err)
	}
	return <-stopped
}

// add works on one pod.
func (s *Server) add(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, fmt.Sprintf("%s cannot be asked for %s: use POST", addPath, r.Method), http.StatusMethodNotAllowed)
		return
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(s.readTimeout)) // fails on a closed connection, and so does all else
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, oneLine(fmt.Errorf("read the request: %w", err)), http.StatusBadRequest)
		return
	}
	_ = control.SetReadDeadline(time.Time{}) // from now on reading tells whether the client is still there
	req, timeout, err := parseAdd(data)
	if err != nil {
		http.Error(w, oneLine(err), http.StatusBadRequest)
		return
	}

	if timeout <= 0 || timeout > s.addTimeout {
		timeout = s.addTimeout
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	if err = s.guardedAdd(ctx, req); err != nil && ctx.Err() != nil {
		err = fmt.Errorf("the pod was not captured and served within %s: %w", timeout, err)
	}
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
	answer := addAnswer{Enrolled: err == nil}
	if not, ok := errors.AsType[*NotEligibleError](err); ok {
		answer.Reason, err = not.Reason, nil
	}
	if err != nil {
		s.log.Warn("a pod is kept from starting", "namespace", req.PodNamespace, "pod", req.PodName, "netns", req.Netns, "error", oneLine(err))
		http.Error(w, oneLine(err), http.StatusInternalServerError)
		return
	}
	body, err := json.Marshal(answer)
	if err != nil {
		http.Error(w, oneLine(fmt.Errorf("write the answer: %w", err)), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(body, '\n')) // fails when the client is gone
}

// guardedAdd turns a panic into an error, so that one pod's misfortune is told to who asked for it.
func (s *Server) guardedAdd(ctx context.Context, req AddRequest) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			s.log.Error("adding a pod panicked", "cause", cause, "stack", string(debug.Stack()))
			err = fmt.Errorf("the agent has a bug, see its log: panic: %v", cause)
		}
	}()
	return s.adder.AddPod(ctx, req)
}

// oneLine writes joined errors on one line.
func oneLine(err error) string { return strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ") }
