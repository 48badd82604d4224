// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/redirector-dataplane/redirector/pkg/zds/zdsapi"
)

// shortDeadline is one that tests wait for. A peer that keeps it must manage to, also on an emulated processor.
var shortDeadline = func() time.Duration {
	if os.Getenv("VMTEST_IN_VM") != "" {
		return 2 * time.Second
	}
	return 200 * time.Millisecond
}()

// patience bounds every wait for something that must happen. It is no measure.
const patience = 30 * time.Second

// testNS is a network namespace that nothing but its file descriptor keeps.
type testNS struct {
	*os.File
	id fileID
}

func (n testNS) FD() int { return int(n.Fd()) }

// newNetNS makes a network namespace.
func newNetNS(t *testing.T) testNS {
	t.Helper()
	type result struct {
		f   *os.File
		err error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			made <- result{err: err}
			return
		}
		defer func() { _ = home.Close() }()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			made <- result{err: err}
			return
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		if backErr := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); backErr != nil {
			// Locked as it is, the thread ends with this goroutine.
			err = errors.Join(err, backErr)
		} else {
			runtime.UnlockOSThread()
		}
		made <- result{f, err}
	}()
	r := <-made
	if r.err != nil {
		t.Fatalf("make a network namespace: %v", r.err)
	}
	t.Cleanup(func() { _ = r.f.Close() })
	return testNS{File: r.f, id: idOf(t, int(r.f.Fd()))}
}

func idOf(t *testing.T, fd int) fileID {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatalf("fstat %d: %v", fd, err)
	}
	return fileIDOf(&st)
}

// checkFDs fails the test if it ends with other file descriptors than it began.
func checkFDs(t *testing.T) {
	t.Helper()
	list := func() map[string]string {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		fds := make(map[string]string)
		for _, e := range entries {
			// The runtime's own, and the one that reads the directory, come and go.
			target, err := os.Readlink("/proc/self/fd/" + e.Name())
			if err == nil && !strings.HasPrefix(target, "anon_inode:") {
				fds[e.Name()] = target
			}
		}
		return fds
	}
	before := list()
	t.Cleanup(func() {
		eventually(t, func() error {
			after := list()
			if len(after) != len(before) {
				return fmt.Errorf("file descriptors: %d before, %d after: %v", len(before), len(after), after)
			}
			return nil
		})
	})
}

// eventually waits until check has nothing to object to.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// logLines collects a server's log.
type logLines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logLines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// with returns the lines that contain all of words.
func (l *logLines) with(words ...string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []string
lines:
	for line := range strings.Lines(l.text.String()) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue lines
			}
		}
		found = append(found, line)
	}
	return found
}

// expect waits until n lines contain all of words.
func (l *logLines) expect(t *testing.T, n int, words ...string) {
	t.Helper()
	eventually(t, func() error {
		if lines := l.with(words...); len(lines) != n {
			return fmt.Errorf("log lines with %q: %q, want %d", words, lines, n)
		}
		return nil
	})
}

// testServer is a server that serves until the test ends.
type testServer struct {
	*Server
	path string
	log  *logLines
	stop func()
}

func startServer(t *testing.T, opts Options) *testServer {
	t.Helper()
	checkFDs(t)
	lines := &logLines{}
	if opts.Path == "" {
		opts.Path = filepath.Join(t.TempDir(), "zds.sock")
	}
	opts.Log = slog.New(slog.NewTextHandler(lines, &slog.HandlerOptions{Level: slog.LevelDebug}))
	s, err := Listen(opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("log of the server:\n%s", lines.text.String())
		}
	})
	return &testServer{Server: s, path: opts.Path, log: lines, stop: stop}
}

// set makes a pod wanted.
func (s *testServer) set(t *testing.T, uid string, ns NetNS) {
	t.Helper()
	if err := s.Set(testPod(uid, ns)); err != nil {
		t.Fatal(err)
	}
}

func testPod(uid string, ns NetNS) Pod {
	return Pod{UID: uid, Name: "name-" + uid, Namespace: "ns-" + uid, ServiceAccount: "sa-" + uid, NetNS: ns}
}

// wait waits for a pod's ack.
func (s *testServer) wait(t *testing.T, uid string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Wait(ctx, uid); err != nil {
		t.Fatal(err)
	}
}

// remove removes a pod.
func (s *testServer) remove(t *testing.T, uid string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := s.Remove(ctx, uid); err != nil {
		t.Fatal(err)
	}
}

// states waits until the connections are in these states, oldest first.
func (s *testServer) states(t *testing.T, want ...ConnState) []ConnStatus {
	t.Helper()
	var status []ConnStatus
	eventually(t, func() error {
		status = s.Status()
		var got []ConnState
		for _, c := range status {
			got = append(got, c.State)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("connections are %v, want %v", got, want)
		}
		return nil
	})
	return status
}

// peer is the client side, message by message.
type peer struct {
	t  *testing.T
	uc *net.UnixConn
}

func dial(t *testing.T, path string) *peer {
	t.Helper()
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{t: t, uc: uc}
	t.Cleanup(p.close)
	return p
}

func (p *peer) close() { _ = p.uc.Close() }

func (p *peer) send(msg []byte) {
	p.t.Helper()
	if _, err := p.uc.Write(msg); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) hello() {
	p.t.Helper()
	p.send(marshal(p.t, &zdsapi.ZdsHello{Version: zdsapi.Version_V1}))
}

func (p *peer) answer(refusal string) {
	p.t.Helper()
	p.send(ackMessage(p.t, refusal))
}

func ackMessage(t *testing.T, refusal string) []byte {
	t.Helper()
	return marshal(t, &zdsapi.WorkloadResponse{Payload: &zdsapi.WorkloadResponse_Ack{Ack: &zdsapi.Ack{Error: refusal}}})
}

func marshal(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// got is one request as it was received.
type got struct {
	req *zdsapi.WorkloadRequest
	ns  fileID // of the file descriptor that came with it
}

// read reads one request; io.EOF when the server closed the connection.
func (p *peer) read() (got, error) { return p.readWithin(patience) }

func (p *peer) readWithin(d time.Duration) (got, error) {
	_ = p.uc.SetReadDeadline(time.Now().Add(d))
	buf, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4*4))
	n, oobn, flags, _, err := p.uc.ReadMsgUnix(buf, oob)
	if err != nil {
		if errors.Is(err, unix.ECONNRESET) {
			err = io.EOF // closed with something of ours unread
		}
		return got{}, err
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return got{}, fmt.Errorf("request is truncated, flags %#x", flags)
	}
	var fds []int
	cmsgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return got{}, err
	}
	for _, m := range cmsgs {
		more, err := unix.ParseUnixRights(&m)
		if err != nil {
			return got{}, err
		}
		fds = append(fds, more...)
	}
	g := got{req: &zdsapi.WorkloadRequest{}}
	for _, fd := range fds {
		g.ns = idOf(p.t, fd)
		_ = unix.Close(fd)
	}
	if err := proto.Unmarshal(buf[:n], g.req); err != nil {
		return got{}, err
	}
	if want := map[bool]int{true: 1}[g.req.GetAdd() != nil]; len(fds) != want {
		return got{}, fmt.Errorf("%d file descriptors came with %v, want %d", len(fds), g.req, want)
	}
	return g, nil
}

// expect reads a request and compares it with "add UID", "keep UID", "del UID" or
// "snapshot sent".
func (p *peer) expect(want string) got {
	p.t.Helper()
	g, err := p.read()
	if err != nil {
		p.t.Fatalf("wait for %q: %v", want, err)
	}
	if s := g.String(); s != want {
		p.t.Fatalf("received %q, want %q", s, want)
	}
	return g
}

func (g got) String() string {
	switch r := g.req.GetPayload().(type) {
	case *zdsapi.WorkloadRequest_Add:
		return "add " + r.Add.GetUid()
	case *zdsapi.WorkloadRequest_Keep:
		return "keep " + r.Keep.GetUid()
	case *zdsapi.WorkloadRequest_Del:
		return "del " + r.Del.GetUid()
	case *zdsapi.WorkloadRequest_SnapshotSent:
		return "snapshot sent"
	}
	return g.req.String()
}

// expectClosed waits for the server to end the connection.
func (p *peer) expectClosed() {
	p.t.Helper()
	for {
		g, err := p.read()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			p.t.Fatal(err)
		}
		p.t.Logf("on a connection that should end: received %q", g)
	}
}

// proxy is a well-behaved peer in the background.
type proxy struct {
	t      *testing.T
	path   string
	answer func(got) string // nil accepts everything
	stay   bool             // connect again when the connection ends
	done   chan struct{}    // closed when it has ended

	mu      sync.Mutex
	uc      *net.UnixConn
	stopped bool
	runs    map[string]fileID // by UID
}

// startProxy starts a proxy that has one connection.
func startProxy(t *testing.T, path string, answer func(got) string) *proxy {
	t.Helper()
	return start(&proxy{t: t, path: path, answer: answer})
}

// startSurvivor starts a proxy that connects again when it is thrown out.
func startSurvivor(t *testing.T, path string, answer func(got) string) *proxy {
	t.Helper()
	return start(&proxy{t: t, path: path, answer: answer, stay: true})
}

func start(p *proxy) *proxy {
	p.t.Helper()
	p.done, p.runs = make(chan struct{}), make(map[string]fileID)
	first, err := p.connect()
	if err != nil {
		p.t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		err := p.live(first)
		for err == nil && p.stay {
			var c *peer
			if c, err = p.connect(); c == nil {
				break
			}
			err = p.live(c)
		}
		if err != nil {
			p.t.Errorf("proxy: %v", err)
		}
	}()
	p.t.Cleanup(p.stop)
	return p
}

// connect returns nil if the proxy shall stop.
func (p *proxy) connect() (*peer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return nil, nil
	}
	uc, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: p.path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	p.uc = uc
	return &peer{t: p.t, uc: uc}, nil
}

func (p *proxy) stop() {
	p.mu.Lock()
	p.stopped = true
	_ = p.uc.Close()
	p.mu.Unlock()
	<-p.done
}

// live serves one connection until it ends.
func (p *proxy) live(c *peer) error {
	defer c.close()
	if _, err := c.uc.Write(marshal(p.t, &zdsapi.ZdsHello{Version: zdsapi.Version_V1})); err != nil {
		return nil
	}
	snapshot := make(map[string]bool)
	for {
		g, err := c.read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		refusal := ""
		if p.answer != nil {
			refusal = p.answer(g)
		}
		if refusal == "" || g.req.GetSnapshotSent() != nil {
			p.carryOut(g, snapshot)
		}
		if _, err := c.uc.Write(ackMessage(p.t, refusal)); err != nil {
			return nil
		}
	}
}

func (p *proxy) carryOut(g got, snapshot map[string]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch r := g.req.GetPayload().(type) {
	case *zdsapi.WorkloadRequest_Add:
		snapshot[r.Add.GetUid()] = true
		p.runs[r.Add.GetUid()] = g.ns
	case *zdsapi.WorkloadRequest_Keep:
		snapshot[r.Keep.GetUid()] = true
	case *zdsapi.WorkloadRequest_Del:
		delete(p.runs, r.Del.GetUid())
	case *zdsapi.WorkloadRequest_SnapshotSent:
		maps.DeleteFunc(p.runs, func(uid string, _ fileID) bool { return !snapshot[uid] })
	}
}

// running returns what the proxy runs.
func (p *proxy) running() map[string]fileID {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.runs)
}

// expectRunning compares with what the proxy has come to run.
func (p *proxy) expectRunning(want map[string]fileID) {
	p.t.Helper()
	eventually(p.t, func() error {
		if got := p.running(); !maps.Equal(got, want) {
			return fmt.Errorf("proxy runs %d pods %v,\nwant %d pods %v", len(got), got, len(want), want)
		}
		return nil
	})
}
