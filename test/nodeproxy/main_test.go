// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// asProgram makes the test binary the node proxy itself.
const asProgram = "NODEPROXY_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(Main(os.Args[1:]))
	}
	// These are opened once and stay.
	if _, err := home(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// patience bounds every wait for something that must happen. It is no measure.
const patience = 30 * time.Second

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

// checkProcess fails the test if it leaves file descriptors open, or a thread in
// another network namespace.
func checkProcess(t *testing.T) {
	t.Helper()
	fds := func() []string {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		var open []string
		for _, e := range entries {
			// The runtime's, and those of splice's pool of pipes.
			target, err := os.Readlink("/proc/self/fd/" + e.Name())
			if err == nil && !strings.HasPrefix(target, "anon_inode:") && !strings.HasPrefix(target, "pipe:") {
				open = append(open, e.Name()+" "+target)
			}
		}
		return open
	}
	before := fds()
	t.Cleanup(func() {
		eventually(t, func() error {
			if after := fds(); len(after) != len(before) {
				return fmt.Errorf("file descriptors before: %q, after: %q", before, after)
			}
			return nil
		})
		h, err := home()
		if err != nil {
			t.Fatal(err)
		}
		want, err := inode(int(h.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		threads, err := filepath.Glob("/proc/self/task/*/ns/net")
		if err != nil || len(threads) == 0 {
			t.Fatalf("threads: %v, %v", threads, err)
		}
		for _, thread := range threads {
			var st unix.Stat_t
			if err := unix.Stat(thread, &st); err == nil && st.Ino != want {
				t.Errorf("%s is network namespace %d, want %d", thread, st.Ino, want)
			}
		}
	})
}

// The addresses of a testPod, all of them on its lo. Those of strangers are not the
// pod's, but its packets to them come back to it.
var (
	app4, app6           = netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd09::1")
	client4, client6     = netip.MustParseAddr("10.9.0.9"), netip.MustParseAddr("fd09::9")
	stranger4, stranger6 = netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")
)

// testPod is a network namespace with the addresses above.
type testPod struct {
	t  *testing.T
	ns *netns
}

// FD implements zds.NetNS.
func (n *testPod) FD() int { return n.ns.fd }

// skipWithoutCookies skips on kernels where namespaces have no cookies, by which the proxy tells them apart.
func skipWithoutCookies(t *testing.T) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("needs kernel 5.14: SO_NETNS_COOKIE")
	}
}

func newTestPod(t *testing.T) *testPod {
	t.Helper()
	skipWithoutCookies(t)
	fd := -1
	made := make(chan error)
	go func() {
		// A namespace of its own for a moment; newNetNS needs one to start from.
		made <- func() error {
			h, err := home()
			if err != nil {
				return err
			}
			leave, err := (&netns{fd: int(h.Fd()), home: h}).enter()
			if err != nil {
				return err
			}
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return errors.Join(err, leave())
			}
			fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			return errors.Join(err, leave())
		}()
	}()
	if err := <-made; err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	ns, err := newNetNS(fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ns.close)

	h, err := netlink.NewHandleAt(vnetns.NsHandle(fd), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{app4, app6, client4, client6} {
		addr := &netlink.Addr{IPNet: hostNet(a), Flags: unix.IFA_F_NODAD}
		if err := h.AddrAdd(lo, addr); err != nil {
			t.Fatalf("add address %s: %v", a, err)
		}
	}
	if err := h.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{stranger4, stranger6} {
		// In a table of its own: delivered here, but no address of ours.
		const table = 77
		route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: hostNet(a), Type: unix.RTN_LOCAL, Table: table, Scope: netlink.SCOPE_HOST}
		if err := h.RouteAdd(route); err != nil {
			t.Fatalf("add route to %s: %v", a, err)
		}
		rule := netlink.NewRule()
		rule.Dst, rule.Table, rule.Family = hostNet(a), table, netlink.FAMILY_V6
		if a.Is4() {
			rule.Family = netlink.FAMILY_V4
		}
		if err := h.RuleAdd(rule); err != nil {
			t.Fatalf("add rule for %s: %v", a, err)
		}
	}
	n := &testPod{t: t, ns: ns}
	for _, a := range []netip.Addr{app6, client6} {
		// The kernel takes its time with new IPv6 addresses, and loses packets until
		// then: wait until a closed port says that it is closed.
		eventually(t, func() error {
			d := net.Dialer{Timeout: 50 * time.Millisecond}
			err := ns.do(func() error {
				c, err := d.Dial("tcp", netip.AddrPortFrom(a, 9).String())
				if err == nil {
					_ = c.Close()
				}
				return err
			})
			if errors.Is(err, unix.ECONNREFUSED) {
				return nil
			}
			return fmt.Errorf("connect to a closed port of %s: %w", a, err)
		})
	}
	return n
}

func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// serve runs an application on an address of the pod; it handles each connection
// with handle, and closes it then.
func (n *testPod) serve(at netip.AddrPort, handle func(*net.TCPConn)) {
	n.t.Helper()
	var l *net.TCPListener
	if err := n.ns.do(func() (err error) {
		l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			all.Go(func() {
				handle(c)
				_ = c.Close()
			})
		}
	})
	n.t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
}

// dial connects from an application of the pod, or from a stranger.
func (n *testPod) dial(from, to netip.AddrPort) (*net.TCPConn, error) {
	var c *net.TCPConn
	err := n.ns.do(func() error {
		d := net.Dialer{
			Timeout: patience,
			Control: func(_, _ string, raw rawConn) error {
				var err error
				ctlErr := raw.Control(func(fd uintptr) {
					if from.Addr() == stranger4 {
						err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
					}
					if from.Addr() == stranger6 {
						err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
					}
					// The same port is used again and again.
					err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
				})
				return errors.Join(err, ctlErr)
			},
		}
		var err error
		c, err = d.DialTCP(context.Background(), "tcp", from, to)
		return err
	})
	if err != nil {
		return nil, err
	}
	n.t.Cleanup(func() { _ = c.Close() })
	err = c.SetDeadline(time.Now().Add(patience))
	return c, err
}

func (n *testPod) mustDial(from, to netip.AddrPort) *net.TCPConn {
	n.t.Helper()
	c, err := n.dial(from, to)
	if err != nil {
		n.t.Fatal(err)
	}
	return c
}

// testAgent is a real ZDS server.
type testAgent struct {
	*zds.Server
	t    *testing.T
	path string
	log  *lines
	stop func()
}

func startAgent(t *testing.T, opts zds.Options) *testAgent {
	t.Helper()
	if opts.Path == "" {
		opts.Path = filepath.Join(t.TempDir(), "zds.sock")
	}
	a := &testAgent{t: t, path: opts.Path, log: &lines{}}
	opts.Log = slog.New(slog.NewTextHandler(a.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var err error
	if a.Server, err = zds.Listen(opts); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- a.Serve(ctx) }()
	a.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		a.stop()
		if t.Failed() {
			t.Logf("log of the agent:\n%s", strings.Join(a.log.all(), ""))
		}
	})
	return a
}

func podOf(uid string, ns zds.NetNS) zds.Pod {
	return zds.Pod{UID: uid, Namespace: "shop", Name: "pod-" + uid, ServiceAccount: "default", NetNS: ns}
}

// set makes a pod wanted and waits for a proxy to run it.
func (a *testAgent) set(uid string, ns zds.NetNS) {
	a.t.Helper()
	if err := a.Set(podOf(uid, ns)); err != nil {
		a.t.Fatal(err)
	}
	a.wait(uid)
}

func (a *testAgent) wait(uid string) {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := a.Wait(ctx, uid); err != nil {
		a.t.Fatal(err)
	}
}

func (a *testAgent) remove(uid string) {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := a.Remove(ctx, uid); err != nil {
		a.t.Fatal(err)
	}
}

// ready waits until n proxies are ready.
func (a *testAgent) ready(n int) {
	a.t.Helper()
	eventually(a.t, func() error {
		status := a.Status()
		ready := 0
		for _, c := range status {
			if c.State == zds.StateReady {
				ready++
			}
		}
		if ready != n || len(status) != n {
			return fmt.Errorf("connections are %+v, want %d that are ready", status, n)
		}
		return nil
	})
}

// lines collects what is written, which has to be whole lines.
type lines struct {
	mu   sync.Mutex
	text []string
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := string(b); strings.Count(s, "\n") != 1 || !strings.HasSuffix(s, "\n") {
		return 0, fmt.Errorf("not a line: %q", s)
	}
	l.text = append(l.text, string(b))
	return len(b), nil
}

func (l *lines) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.text...)
}

// expect waits for a line that contains all of words.
func (l *lines) expect(t *testing.T, words ...string) {
	t.Helper()
	eventually(t, func() error {
	next:
		for _, line := range l.all() {
			for _, w := range words {
				if !strings.Contains(line, w) {
					continue next
				}
			}
			return nil
		}
		return fmt.Errorf("no line with %q in %q", words, l.all())
	})
}

// testProxy is a node proxy inside the test process.
type testProxy struct {
	t       *testing.T
	x       *proxy
	records *lines
	log     *lines
	stop    func() // as on SIGTERM; returns when it has ended
}

func startProxy(t *testing.T, a *testAgent, cfg Config) *testProxy {
	t.Helper()
	p := &testProxy{t: t, records: &lines{}, log: &lines{}}
	cfg.ZDSSocket, cfg.Log = a.path, p.records
	cfg.Logger = slog.New(slog.NewTextHandler(p.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var err error
	if p.x, err = newProxy(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.x.run(ctx)
	}()
	p.stop = sync.OnceFunc(func() {
		cancel()
		<-ended
	})
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			t.Logf("log of the proxy:\n%s%s", strings.Join(p.log.all(), ""), strings.Join(p.records.all(), ""))
		}
	})
	return p
}

// expectRecord waits for the record of a connection, and there must be just one.
func (p *testProxy) expectRecord(want Record) {
	p.t.Helper()
	eventually(p.t, func() error {
		n := 0
		var all []Record
		for _, line := range p.records.all() {
			var r Record
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				return fmt.Errorf("record %q: %w", line, err)
			}
			if time.Since(r.Time) > time.Hour {
				return fmt.Errorf("record %q: the time is wrong", line)
			}
			r.Time = time.Time{}
			all = append(all, r)
			if r == want {
				n++
			}
		}
		if n != 1 {
			return fmt.Errorf("records are %+v, want one like %+v", all, want)
		}
		return nil
	})
}

func addrPortOf(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := tcp.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// echo says who connected, and then sends back what it gets.
func echo(c *net.TCPConn) {
	fmt.Fprintf(c, "%s\n", addrPortOf(c.RemoteAddr()).Addr())
	_, _ = io.Copy(c, c)
}
