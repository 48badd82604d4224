// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/redirector-dataplane/redirector/pkg/sockfile"
)

func itoa(n int) string { return strconv.Itoa(n) }

// testAgent is a server whose adder notes what it is asked for.
type testAgent struct {
	runDir string
	stop   func()

	mu    sync.Mutex
	asked []AddRequest
	add   func(ctx context.Context, req AddRequest) error
}

func (a *testAgent) AddPod(ctx context.Context, req AddRequest) error {
	a.mu.Lock()
	a.asked = append(a.asked, req)
	a.mu.Unlock()
	if a.add == nil {
		return nil
	}
	return a.add(ctx, req)
}

func (a *testAgent) requests() []AddRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]AddRequest(nil), a.asked...)
}

// serve runs a server until the end of the test. add may be nil: all is well.
func serve(t *testing.T, add func(ctx context.Context, req AddRequest) error) *testAgent {
	t.Helper()
	a := &testAgent{runDir: t.TempDir(), add: add}
	a.start(t, nil)
	return a
}

func (a *testAgent) start(t *testing.T, change func(*Server)) {
	t.Helper()
	l, err := ListenSocket(filepath.Join(a.runDir, SocketName))
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(a, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if change != nil {
		change(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }()
	var once sync.Once
	a.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(a.stop)
}

// post sends a request and returns the answer's status and body.
func (a *testAgent) post(t *testing.T, method, path string, body []byte) (status int, text string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(a.runDir, SocketName))
		},
	}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://unix"+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(answer)
}

// What istio-cni's plugin sends, as encoding/json writes its types.
const istioBody = `{"Netns":"/var/run/netns/cni-1","PodName":"web","PodNamespace":"shop","IPs":[` +
	`{"Interface":2,"Address":{"IP":"::ffff:10.1.2.3","Mask":"////AA=="},"Gateway":"10.1.2.1"},` +
	`{"Interface":null,"Address":{"IP":"fd00::3","Mask":"//////////8AAAAAAAAAAA=="}}]}`

func TestTheServerUnderstandsIstiosPlugin(t *testing.T) {
	a := serve(t, nil)
	if status, body := a.post(t, http.MethodPost, addPath, []byte(istioBody)); status != http.StatusOK {
		t.Fatalf("%d %s", status, body)
	}
	want := AddRequest{
		Netns: "/var/run/netns/cni-1", PodName: "web", PodNamespace: "shop",
		IPs: []netip.Addr{netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fd00::3")},
	}
	if got := a.requests(); len(got) != 1 || fmt.Sprint(got[0]) != fmt.Sprint(want) {
		t.Errorf("asked for %+v, want %+v", got, want)
	}
	if info, err := os.Stat(filepath.Join(a.runDir, SocketName)); err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("the socket is %v, %v", info.Mode(), err)
	}
}

func TestWhatTheServerAnswers(t *testing.T) {
	a := serve(t, func(_ context.Context, req AddRequest) error {
		switch req.PodName {
		case "out":
			return fmt.Errorf("look: %w", &NotEligibleError{Reason: "its namespace is not labelled"})
		case "bad":
			return errors.Join(errors.New("no proxy"), errors.New("at all"))
		case "bug":
			panic("oh")
		default:
			return nil
		}
	})
	body := func(name string) []byte {
		return []byte(`{"Netns":"/run/netns/x","PodName":"` + name + `","PodNamespace":"shop"}`)
	}
	for name, c := range map[string]struct {
		method, path string
		body         []byte
		status       int
		words        string
	}{
		"captured":          {body: body("web"), status: 200, words: `"enrolled":true`},
		"not eligible":      {body: body("out"), status: 200, words: `"enrolled":false,"reason":"its namespace is not labelled"`},
		"failed":            {body: body("bad"), status: 500, words: "no proxy; at all"},
		"a bug":             {body: body("bug"), status: 500, words: "panic: oh"},
		"nothing":           {status: 400, words: "JSON"},
		"garbage":           {body: []byte("\xff{"), status: 400},
		"half":              {body: body("web")[:20], status: 400},
		"two":               {body: append(body("a"), body("b")...), status: 400},
		"an empty object":   {body: []byte("{}"), status: 400, words: "PodName"},
		"null":              {body: []byte("null"), status: 400, words: "PodName"},
		"no namespace":      {body: []byte(`{"Netns":"/x","PodName":"a"}`), status: 400, words: "PodNamespace"},
		"no netns":          {body: []byte(`{"PodName":"a","PodNamespace":"b"}`), status: 400, words: "Netns"},
		"a relative netns":  {body: []byte(`{"Netns":"x","PodName":"a","PodNamespace":"b"}`), status: 400, words: `"x"`},
		"a bad address":     {body: []byte(`{"Netns":"/x","PodName":"a","PodNamespace":"b","IPs":[{"Address":{"IP":"10.0.0.256"}}]}`), status: 400},
		"no address in one": {body: []byte(`{"Netns":"/x","PodName":"a","PodNamespace":"b","IPs":[{}]}`), status: 400, words: "address"},
		"too much":          {body: bytes.Repeat([]byte(" "), maxBody+1), status: 400, words: "too large"},
		"GET":               {method: http.MethodGet, status: 405},
		"another path":      {path: "/other", body: body("web"), status: 404},
	} {
		t.Run(name, func(t *testing.T) {
			if c.method == "" {
				c.method = http.MethodPost
			}
			if c.path == "" {
				c.path = addPath
			}
			status, text := a.post(t, c.method, c.path, c.body)
			if status != c.status || !strings.Contains(text, c.words) {
				t.Errorf("%d %s, want %d with %q", status, text, c.status, c.words)
			}
		})
	}
}

// More clients than the server takes at once connect and say nothing; a plugin still gets its answer.
func TestClientsThatHang(t *testing.T) {
	a := &testAgent{runDir: t.TempDir()}
	a.start(t, func(s *Server) { s.readTimeout = 200 * time.Millisecond })
	for i := range maxClients + 10 {
		c, err := net.Dial("unix", filepath.Join(a.runDir, SocketName))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		switch i % 3 {
		case 1:
			fmt.Fprint(c, "POST /cmdadd HTTP/1.1\r\nHost: x\r\n")
		case 2:
			fmt.Fprint(c, "POST /cmdadd HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
		}
	}
	if status, body := a.post(t, http.MethodPost, addPath, []byte(istioBody)); status != http.StatusOK {
		t.Errorf("%d %s", status, body)
	}
}

func TestWhoHasGoneIsNotWaitedFor(t *testing.T) {
	ended := make(chan struct{})
	a := serve(t, func(ctx context.Context, _ AddRequest) error {
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	})
	c, err := net.Dial("unix", filepath.Join(a.runDir, SocketName))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", addPath, len(istioBody), istioBody)
	eventually(t, "the adder is asked", func() bool { return len(a.requests()) == 1 })
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(patience):
		t.Error("the adder still waits")
	}
}

func TestAnAgentThatIsSlow(t *testing.T) {
	a := serve(t, func(ctx context.Context, req AddRequest) error {
		wait := 300 * time.Millisecond
		if req.PodName == "late" {
			wait = time.Hour
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
			return nil
		}
	})
	if err := (NodeState{}).Write(a.runDir); err != nil { // no namespace is in the mesh
		t.Fatal(err)
	}
	add := func(pod, timeout string) reply {
		return call{command: "ADD", pod: pod, stdin: confText(t, pluginConf{Entry: Entry{RunDir: a.runDir, Timeout: timeout}, CNIVersion: "1.0.0"})}.run(t)
	}
	if r := add("shop/web", "20s"); r.code != 0 {
		t.Errorf("with time to wait: %+v", r)
	}
	// Too slow is not away: it may be about to capture the pod.
	add("shop/late", "3s").wantError(t, 11, "shop/late", "500", "not captured and served within")
	a.stop()
	if r := add("shop/web", "50ms"); r.code != 0 {
		t.Errorf("with the agent away: %+v", r)
	}
	// Nor is one that is stopped by a debugger, say: it takes questions, but answers none.
	l, err := ListenSocket(filepath.Join(a.runDir, SocketName))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	add("shop/web", "50ms").wantError(t, 11, "shop/web", a.runDir, "does not answer")
}

func TestAnAgentThatComesWhileAPodWaits(t *testing.T) {
	a := serve(t, nil)
	a.stop()
	if err := (NodeState{EnrolledNamespaces: []string{"shop"}}).Write(a.runDir); err != nil {
		t.Fatal(err)
	}
	done := make(chan reply, 1)
	stdin := confText(t, pluginConf{Entry: Entry{RunDir: a.runDir, Timeout: "50s"}, CNIVersion: "1.0.0"})
	go func() { done <- call{command: "ADD", pod: "shop/web", stdin: stdin}.run(t) }()
	log := filepath.Join(a.runDir, logName)
	eventually(t, "the plugin waits", func() bool {
		text, err := os.ReadFile(log)
		return err == nil && strings.Contains(string(text), "waiting for the agent")
	})
	select {
	case r := <-done:
		t.Fatalf("it has not waited: %+v", r)
	default:
	}
	a.start(t, nil)
	if r := <-done; r.code != 0 || len(a.requests()) != 1 {
		t.Errorf("%+v, the agent was asked for %v", r, a.requests())
	}
}

// An agent that dies with the question in its hands: the next is asked.
func TestAnAgentThatDiesWhileAPodWaits(t *testing.T) {
	a := &testAgent{runDir: t.TempDir()}
	l, err := ListenSocket(filepath.Join(a.runDir, SocketName))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan reply, 1)
	stdin := confText(t, pluginConf{Entry: Entry{RunDir: a.runDir, Timeout: "50s"}, CNIVersion: "1.0.0"})
	go func() { done <- call{command: "ADD", pod: "shop/web", stdin: stdin}.run(t) }()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	l.Close()
	a.start(t, nil)
	if r := <-done; r.code != 0 || len(a.requests()) != 1 {
		t.Errorf("%+v, the agent was asked for %v", r, a.requests())
	}
}

func TestAnAgentThatRefuses(t *testing.T) {
	a := serve(t, func(context.Context, AddRequest) error { return errors.New("no node proxy is connected") })
	call{command: "ADD", pod: "shop/web", stdin: confText(t, pluginConf{Entry: Entry{RunDir: a.runDir}, CNIVersion: "1.0.0"})}.run(t).
		wantError(t, 11, "shop/web", "500", "no node proxy is connected")
	b := serve(t, func(context.Context, AddRequest) error { return &NotEligibleError{Reason: "not labelled"} })
	if r := (call{command: "ADD", pod: "shop/web", stdin: confText(t, pluginConf{Entry: Entry{RunDir: b.runDir}, CNIVersion: "1.0.0"})}).run(t); r.code != 0 {
		t.Errorf("not eligible: %+v", r)
	}
}

func TestAPanicIsAnErrorOfTheCNI(t *testing.T) {
	err := guard(func() *types.Error { panic("oh") })
	if err == nil || err.Code != types.ErrInternal || !strings.Contains(err.Msg, "panic: oh") {
		t.Errorf("error %v", err)
	}
}

func TestSocketsThatAreTaken(t *testing.T) {
	a := serve(t, nil)
	if _, err := ListenSocket(filepath.Join(a.runDir, SocketName)); !errors.Is(err, sockfile.ErrInUse) {
		t.Errorf("in use: %v", err)
	}
	long := filepath.Join(t.TempDir(), strings.Repeat("x", sockfile.MaxPath))
	if _, err := ListenSocket(long); err == nil || !strings.Contains(err.Error(), "run-dir") {
		t.Errorf("too long: %v", err)
	}
}

func TestRemoveRunFiles(t *testing.T) {
	dir := t.TempDir()
	if err := (NodeState{}).Write(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{logName, "plugin-2026-01-02T03-04-05.678.log", "agent.sock"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := RemoveRunFiles(dir); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != "agent.sock" {
		t.Errorf("it leaves %v, %v", left, err)
	}
	if err := RemoveRunFiles(filepath.Join(dir, "none")); err != nil {
		t.Error(err)
	}
}
