// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// served is a server with a real agent behind it, on a bed.
type served struct {
	*Client
	bed    *bed.Bed
	agent  *agent.Agent
	socket string
	stop   context.CancelFunc
	done   chan error
}

func serve(t *testing.T, adjust func(*Server)) *served {
	t.Helper()
	b := bed.ForTest(t, bed.Options{})
	a := agent.Start(t, b, nil)
	s := &served{bed: b, agent: a, socket: filepath.Join(b.RunDir, "agent.sock"), done: make(chan error, 1)}
	server := NewServer(Options{
		Enroller: a.Enroller,
		Agent: Agent{
			Version: "v1.2.3", PID: os.Getpid(), Started: time.Now().Add(-90 * time.Second), Kernel: "6.1.0", RunDir: b.RunDir,
			BPFFS: b.BPFFS, Cgroup: b.Cgroup, ZDSSocket: b.ZDSSocket,
		},
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if adjust != nil {
		adjust(server)
	}
	l, err := Listen(s.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() { s.done <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-s.done; err != nil {
			t.Error(err)
		}
	})
	s.Client = NewClient(s.socket)
	return s
}

func (s *served) pod(t *testing.T, name string) *bed.NS {
	t.Helper()
	pod, err := s.bed.Pod(name, bed.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}

func snapshot(t *testing.T, ns *bed.NS) string {
	t.Helper()
	text, err := ns.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// wantError checks that the agent has refused in that way, on one line that has all the words.
func wantError(t *testing.T, err error, kind Kind, status int, words ...string) {
	t.Helper()
	var refused *Error
	if !errors.As(err, &refused) {
		t.Fatalf("got error %v, want one from the agent", err)
	}
	if refused.Kind != kind || refused.Status != status {
		t.Errorf("got kind %q and status %d, want %q and %d: %v", refused.Kind, refused.Status, kind, status, err)
	}
	for _, word := range words {
		if !strings.Contains(refused.Message, word) {
			t.Errorf("%q does not say %q", refused.Message, word)
		}
	}
	if strings.Contains(refused.Message, "\n") {
		t.Errorf("%q is not one line", refused.Message)
	}
}

func TestAPodComesAndGoes(t *testing.T) {
	s := serve(t, nil)
	dialPeer(t, s.bed.ZDSSocket, "")
	ns := s.pod(t, "web")
	before := snapshot(t, ns)

	if pods, err := s.Pods(t.Context()); err != nil || len(pods) != 0 {
		t.Errorf("at first there are pods %v, %v", pods, err)
	}
	spec := agent.Spec(ns)
	enrolled, err := s.Enroll(t.Context(), EnrollRequest{Spec: spec, Wait: true, Timeout: Duration(10 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(spec.String()+" enrolled", enrolled.String()+" "+string(enrolled.State)); d != "" {
		t.Error(d)
	}
	if enrolled.NetNSCookie != ns.Cookie || enrolled.NetNSInode != ns.Inode {
		t.Errorf("the pod is said to have netns %d:%d, it has %d:%d", enrolled.NetNSCookie, enrolled.NetNSInode, ns.Cookie, ns.Inode)
	}
	one, err := s.Pod(t.Context(), spec.UID)
	if err != nil {
		t.Fatal(err)
	}
	all, err := s.Pods(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	addrs := cmp.Comparer(func(a, b interface{ String() string }) bool { return a.String() == b.String() })
	if d := cmp.Diff([]enroll.Pod{one}, all, addrs); d != "" {
		t.Errorf("the pod and the list of pods differ: %s", d)
	}

	for range 2 { // what is absent is removed already
		if err := s.Unenroll(t.Context(), spec.UID); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(before, snapshot(t, ns)); d != "" {
			t.Errorf("the namespace is not as it was: %s", d)
		}
	}
	_, err = s.Pod(t.Context(), spec.UID)
	wantError(t, err, KindNotEnrolled, http.StatusNotFound, spec.UID)
}

func TestEnrolSaysWhyThePodIsPending(t *testing.T) {
	s := serve(t, nil)
	ns := s.pod(t, "web")
	request := EnrollRequest{Spec: agent.Spec(ns), Wait: true, Timeout: Duration(50 * time.Millisecond)}

	_, err := s.Enroll(t.Context(), request)
	wantError(t, err, KindPending, http.StatusGatewayTimeout, "default/web", "uid-web", "captured and pending", s.bed.ZDSSocket, "50ms", "start one")
	pod, err := s.Pod(t.Context(), request.UID)
	if err != nil || pod.State != enroll.StatePending {
		t.Errorf("the pod is %q, %v", pod.State, err)
	}

	dialPeer(t, s.bed.ZDSSocket, "no identity for it")
	request.Timeout = Duration(10 * time.Second)
	_, err = s.Enroll(t.Context(), request)
	wantError(t, err, KindPending, http.StatusGatewayTimeout, "captured and pending", "no identity for it", fmt.Sprintf("pid %d", os.Getpid()), "log")

	status, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(status.Warnings) != 1 || status.Warnings[0].Reason != ReasonPending || !strings.Contains(status.Warnings[0].Message, "no identity for it") {
		t.Errorf("status warns of %+v, want the refusal", status.Warnings)
	}

	request.Wait = false
	if pod, err := s.Enroll(t.Context(), request); err != nil || pod.State != enroll.StatePending {
		t.Errorf("without waiting: %q, %v", pod.State, err)
	}
}

func TestEnrolRefuses(t *testing.T) {
	s := serve(t, nil)
	web, other := s.pod(t, "web"), s.pod(t, "other")
	if _, err := s.Enroll(t.Context(), EnrollRequest{Spec: agent.Spec(web)}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, other)

	for name, c := range map[string]struct {
		change func(*EnrollRequest)
		kind   Kind
		status int
		words  []string
	}{
		"another pod's namespace": {func(r *EnrollRequest) { r.NetNS = web.Path }, KindTaken, http.StatusConflict, []string{"uid-web", "unenroll"}},
		"the host's namespace":    {func(r *EnrollRequest) { r.NetNS = "/proc/1/ns/net" }, KindNetNS, http.StatusUnprocessableEntity, []string{"/proc/1/ns/net", "host"}},
		"a missing path":          {func(r *EnrollRequest) { r.NetNS = file + ".not" }, KindNetNS, http.StatusUnprocessableEntity, []string{file + ".not", "/run/netns"}},
		"a plain file":            {func(r *EnrollRequest) { r.NetNS = file }, KindNetNS, http.StatusUnprocessableEntity, []string{file, "/run/netns"}},
		"a relative path":         {func(r *EnrollRequest) { r.NetNS = "run/netns/x" }, KindInvalid, http.StatusBadRequest, []string{"absolute"}},
		"the agent's files":       {func(r *EnrollRequest) { r.NetNS = "/proc/./self//fd/3" }, KindInvalid, http.StatusBadRequest, []string{"/proc/PID"}},
		"the agent's input":       {func(r *EnrollRequest) { r.NetNS = "/dev/stdin" }, KindInvalid, http.StatusBadRequest, []string{"/proc/PID"}},
		"a bad UID":               {func(r *EnrollRequest) { r.UID = "../x" }, KindInvalid, http.StatusBadRequest, []string{`"../x"`}},
		"no time to wait":         {func(r *EnrollRequest) { r.Wait = true }, KindInvalid, http.StatusBadRequest, []string{"0s"}},
		"too long a wait": {func(r *EnrollRequest) { r.Wait, r.Timeout = true, Duration(MaxTimeout+1) }, KindInvalid, http.StatusBadRequest,
			[]string{MaxTimeout.String()}},
	} {
		t.Run(name, func(t *testing.T) {
			request := EnrollRequest{Spec: agent.Spec(other)}
			c.change(&request)
			_, err := s.Enroll(t.Context(), request)
			wantError(t, err, c.kind, c.status, c.words...)
		})
	}
	if d := cmp.Diff(before, snapshot(t, other)); d != "" {
		t.Errorf("the namespace is not as it was: %s", d)
	}
	if pods, err := s.Pods(t.Context()); err != nil || len(pods) != 1 {
		t.Errorf("pods are %v, %v", pods, err)
	}
}

// raw sends bytes that no Client would, and returns the answer.
func (s *served) raw(t *testing.T, method, path, body string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, "http://agent"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	response, err := s.http.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(answer)
}

func TestRequestsThatNoClientSends(t *testing.T) {
	s := serve(t, nil)
	for name, c := range map[string]struct {
		method, path, body string
		status             int
		words              []string
	}{
		"an unknown path":       {"GET", "/v2/pods", "", http.StatusNotFound, []string{"/v2/pods", "/v1/pods"}},
		"the root":              {"GET", "/", "", http.StatusNotFound, []string{"/v1/pods"}},
		"a wrong method":        {"PUT", "/v1/pods", "{}", http.StatusMethodNotAllowed, []string{"PUT", "GET, POST"}},
		"a wrong method of one": {"POST", "/v1/pods/x", "{}", http.StatusMethodNotAllowed, []string{"POST", "DELETE, GET"}},
		"a change of status":    {"DELETE", "/v1/status", "", http.StatusMethodNotAllowed, []string{"DELETE", "GET"}},
		"no JSON":               {"POST", "/v1/pods", "uid=1", http.StatusBadRequest, []string{"read the request"}},
		"nothing":               {"POST", "/v1/pods", "", http.StatusBadRequest, []string{"read the request"}},
		"an unknown field":      {"POST", "/v1/pods", `{"uid":"1","nesn":"/x"}`, http.StatusBadRequest, []string{`"nesn"`, "v1.2.3"}},
		"two pods":              {"POST", "/v1/pods", `{"uid":"1"}{"uid":"2"}`, http.StatusBadRequest, []string{"one pod"}},
		"a list":                {"POST", "/v1/pods", `[]`, http.StatusBadRequest, []string{"array"}},
		"a bad address":         {"POST", "/v1/pods", `{"ips":["10.0.0"]}`, http.StatusBadRequest, []string{"10.0.0"}},
		"a bad time":            {"POST", "/v1/pods", `{"timeout":"soon"}`, http.StatusBadRequest, []string{`"soon"`, "10s"}},
		"a number for a time":   {"POST", "/v1/pods", `{"timeout":10}`, http.StatusBadRequest, []string{"timeout"}},
		"a long body":           {"POST", "/v1/pods", `{"uid":"` + strings.Repeat("x", maxBody) + `"}`, http.StatusRequestEntityTooLarge, []string{"65536"}},
		"a UID with a slash":    {"DELETE", "/v1/pods/a%2Fb", "", http.StatusBadRequest, []string{`"a/b"`}},
		"a UID of dots":         {"GET", "/v1/pods/%2E%2E", "", http.StatusBadRequest, []string{`".."`}},
		"a UID with a newline":  {"GET", "/v1/pods/a%0Ab", "", http.StatusBadRequest, []string{`"a\nb"`}},
		"a long UID":            {"GET", "/v1/pods/" + strings.Repeat("x", 64), "", http.StatusBadRequest, []string{"63"}},
	} {
		t.Run(name, func(t *testing.T) {
			response, body := s.raw(t, c.method, c.path, c.body)
			if response.StatusCode != c.status || response.Header.Get("Content-Type") != "application/json" {
				t.Errorf("got %s, %s", response.Status, response.Header.Get("Content-Type"))
			}
			refused := Error{Status: response.StatusCode}
			if err := json.Unmarshal([]byte(body), &refused); err != nil {
				t.Fatalf("%v: %s", err, body)
			}
			wantError(t, &refused, KindInvalid, c.status, c.words...)
		})
	}
}

func TestWhoeverAskedGoesAway(t *testing.T) {
	s := serve(t, nil)
	ns := s.pod(t, "web")
	before := snapshot(t, ns)
	request := EnrollRequest{Spec: agent.Spec(ns), Wait: true, Timeout: Duration(time.Minute)}
	ctx, leave := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() {
		_, err := s.Enroll(ctx, request)
		asked <- err
	}()
	eventually(t, "the pod is captured", func() bool {
		_, err := s.Pod(t.Context(), request.UID)
		return err == nil
	})
	leave()
	if err := <-asked; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "redirector pods") {
		t.Errorf("the client says %v", err)
	}

	// What is there is a whole enrolment: another adds nothing to it.
	pod, err := s.Pod(t.Context(), request.UID)
	if err != nil || pod.State != enroll.StatePending {
		t.Errorf("the pod is %q, %v", pod.State, err)
	}
	enrolled := snapshot(t, ns)
	request.Wait = false
	if _, err := s.Enroll(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(enrolled, snapshot(t, ns)); d != "" {
		t.Errorf("the enrolment was half done: %s", d)
	}
	if err := s.Unenroll(t.Context(), request.UID); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, snapshot(t, ns)); d != "" {
		t.Errorf("the namespace is not as it was: %s", d)
	}
}

func TestAnUnenrolIsFinishedWhenWhoeverAskedGoesAway(t *testing.T) {
	s := serve(t, nil)
	ns := s.pod(t, "web")
	before := snapshot(t, ns)
	if _, err := s.Enroll(t.Context(), EnrollRequest{Spec: agent.Spec(ns)}); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "DELETE /v1/pods/uid-web HTTP/1.1\r\nHost: agent\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pod is gone", func() bool {
		_, err := s.Pod(t.Context(), "uid-web")
		return err != nil
	})
	if d := cmp.Diff(before, snapshot(t, ns)); d != "" {
		t.Errorf("the namespace is not as it was: %s", d)
	}
}

func TestAWaitMayBeLongerThanARequestMayTakeToArrive(t *testing.T) {
	s := serve(t, func(s *Server) { s.readTimeout = 50 * time.Millisecond })
	request := EnrollRequest{Spec: agent.Spec(s.pod(t, "web")), Wait: true, Timeout: Duration(300 * time.Millisecond)}
	_, err := s.Enroll(t.Context(), request)
	wantError(t, err, KindPending, http.StatusGatewayTimeout, "300ms")
}

func TestARequestThatDoesNotArriveIsGivenUp(t *testing.T) {
	s := serve(t, func(s *Server) { s.readTimeout = 50 * time.Millisecond })
	for name, begin := range map[string]string{
		"no header": "POST /v1/pods HTTP/1.1\r\nHost:",
		"no body":   "POST /v1/pods HTTP/1.1\r\nHost: agent\r\nContent-Length: 100\r\n\r\n{",
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := net.Dial("unix", s.socket)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := io.WriteString(conn, begin); err != nil {
				t.Fatal(err)
			}
			if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			// Whatever the server answers, it does not wait for more.
			if answer, err := io.ReadAll(conn); err != nil {
				t.Errorf("the server still holds the connection after 10 s: %q, %v", answer, err)
			}
		})
	}
}

func TestAServerThatStopsAnswersWhoStillWaits(t *testing.T) {
	s := serve(t, func(s *Server) { s.stopGrace = 50 * time.Millisecond })
	request := EnrollRequest{Spec: agent.Spec(s.pod(t, "web")), Wait: true, Timeout: Duration(time.Minute)}
	asked := make(chan error, 1)
	go func() {
		_, err := s.Enroll(t.Context(), request)
		asked <- err
	}()
	eventually(t, "the pod is captured", func() bool {
		_, err := s.Pod(t.Context(), request.UID)
		return err == nil
	})
	s.stop()
	wantError(t, <-asked, KindPending, http.StatusGatewayTimeout, "uid-web", "the agent stops")
	err := <-s.done
	s.done <- err // for the clean-up
	if err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(s.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if _, err := s.Status(t.Context()); !errors.Is(err, ErrNoAgent) {
		t.Errorf("after the end: %v", err)
	}
}

func TestARequestInFlightIsFinishedWhenTheServerStops(t *testing.T) {
	s := serve(t, nil)
	request := EnrollRequest{Spec: agent.Spec(s.pod(t, "web")), Wait: true, Timeout: Duration(500 * time.Millisecond)}
	asked := make(chan error, 1)
	go func() {
		_, err := s.Enroll(t.Context(), request)
		asked <- err
	}()
	eventually(t, "the pod is captured", func() bool {
		_, err := s.Pod(t.Context(), request.UID)
		return err == nil
	})
	s.stop()
	wantError(t, <-asked, KindPending, http.StatusGatewayTimeout, "500ms")
}

func TestStatus(t *testing.T) {
	s := serve(t, nil)
	ns := s.pod(t, "web")
	if _, err := s.Enroll(t.Context(), EnrollRequest{Spec: agent.Spec(ns)}); err != nil {
		t.Fatal(err)
	}
	got, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got.Agent.PID != os.Getpid() || got.Agent.BPFFS != s.bed.BPFFS || time.Duration(got.Agent.Uptime) < 90*time.Second {
		t.Errorf("the agent is said to be %+v", got.Agent)
	}
	if want := (PodCounts{Pending: 1}); got.Pods != want || len(got.Proxies) != 0 {
		t.Errorf("pods %+v and proxies %+v, want %+v and none", got.Pods, got.Proxies, want)
	}
	if len(got.Warnings) != 1 || got.Warnings[0].Reason != ReasonNoProxy {
		t.Errorf("warnings are %+v, want that there is no proxy", got.Warnings)
	}

	dialPeer(t, s.bed.ZDSSocket, "")
	eventually(t, "the pod is enrolled", func() bool {
		got, err = s.Status(t.Context())
		return err == nil && got.Pods == PodCounts{Enrolled: 1}
	})
	if len(got.Proxies) != 1 || got.Proxies[0].PID != int32(os.Getpid()) {
		t.Errorf("proxies are %+v", got.Proxies)
	}
	// It says that it runs for the pod, and does not listen there.
	if len(got.Warnings) != 1 || got.Warnings[0].Reason != ReasonNoListener || got.Warnings[0].Pod != "default/web" {
		t.Errorf("warnings are %+v, want that there is no listener", got.Warnings)
	}
}

func TestStatusCountsAndTellsOfAPodWithoutAName(t *testing.T) {
	s := serve(t, nil)
	if _, err := s.Enroll(t.Context(), EnrollRequest{Spec: agent.Spec(s.pod(t, "web"))}); err != nil {
		t.Fatal(err)
	}
	// Another agent, whose notes are lost, takes over.
	s.agent.Stop()
	if err := os.RemoveAll(filepath.Join(s.bed.RunDir, "pods")); err != nil {
		t.Fatal(err)
	}
	next := agent.Start(t, s.bed, nil)
	server := NewServer(Options{Enroller: next.Enroller, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	got, err := server.status(nil)
	if err != nil {
		t.Fatal(err)
	}
	status, ok := got.(Status)
	if want := (PodCounts{Unnamed: 1}); !ok || status.Pods != want {
		t.Errorf("pods are %+v, want %+v", status.Pods, want)
	}
	if len(status.Warnings) != 1 || status.Warnings[0].Reason != ReasonUnnamed || status.Warnings[0].UID != "uid-web" {
		t.Errorf("warnings are %+v", status.Warnings)
	}
}

func TestAnswersKeepTheirFieldNames(t *testing.T) {
	s := serve(t, nil)
	dialPeer(t, s.bed.ZDSSocket, "")
	if _, err := s.Enroll(t.Context(), EnrollRequest{Spec: agent.Spec(s.pod(t, "web")), Wait: true, Timeout: Duration(10 * time.Second)}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string][]string{
		"/v1/status": {
			"admittedFlows", "agent", "agent.bpffs", "agent.cgroup", "agent.kernel", "agent.pid", "agent.runDir", "agent.started", "agent.uptime",
			"agent.version", "agent.zdsSocket", "conditions", "counters", "features", "health", "hooks", "kernelStats", "maps", "next", "pods", "pods.enrolled", "pods.pending", "pods.unnamed", "proxies", "repairs", "warnings",
		},
		"/v1/pods/uid-web": {
			"addresses", "bypassInbound", "counters", "dnsCapture", "ips", "listeners", "name", "namespace", "netns", "netnsCookie", "netnsInode", "serviceAccount", "since",
			"state", "uid",
		},
	} {
		_, body := s.raw(t, http.MethodGet, path, "")
		if got := fieldNames(t, body); !cmp.Equal(want, got) {
			t.Errorf("%s: %s", path, cmp.Diff(want, got))
		}
	}
}

// fieldNames lists the fields of an object and of objects in it, but not the counters, whose names are those of the map.
func fieldNames(t *testing.T, object string) []string {
	t.Helper()
	var names []string
	var walk func(prefix string, data []byte)
	walk = func(prefix string, data []byte) {
		var fields map[string]json.RawMessage
		if !bytes.HasPrefix(data, []byte("{")) {
			return
		}
		if err := json.Unmarshal(data, &fields); err != nil {
			t.Fatal(err)
		}
		for name, value := range fields {
			names = append(names, prefix+name)
			if name != "counters" && name != "listeners" {
				walk(prefix+name+".", value)
			}
		}
	}
	walk("", []byte(strings.TrimSpace(object)))
	slices.Sort(names)
	return names
}

func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so after 10 s: %s", what)
		}
	}
}
