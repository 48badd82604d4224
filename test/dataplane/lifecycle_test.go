// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

func TestWithoutAProxyNothingPasses(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	outside := n.serve(n.Outside, 8080, bed.AppOptions{})
	inside := n.serve(pod, 8080, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		blocked(t, pod, netip.AddrPortFrom(addr(n.Outside, family), 8080))
		blocked(t, n.Outside, netip.AddrPortFrom(addr(pod, family), 8080))
		blocked(t, n.Node, netip.AddrPortFrom(addr(pod, family), 8080))
	})
	if out, in := outside.Accepts(), inside.Accepts(); out > 0 || in > 0 {
		t.Errorf("outside has accepted %d connections, the pod's app %d", out, in)
	}
	if c := n.counters(pod); c.OutboundNoListener == 0 || c.InboundNoListener == 0 {
		t.Errorf("counters are %+v", c)
	}

	n.startProxy()
	if err := n.Enroll(t.Context(), agent.Spec(pod), true); err != nil { // waits for the proxy to have it
		t.Fatal(err)
	}
	eachFamily(t, func(t *testing.T, family string) {
		ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(n.Outside, family), 8080)})
		ask(t, n.Outside, bed.DialSpec{Remote: netip.AddrPortFrom(addr(pod, family), 8080)})
	})
}

// load makes connections one after another until stopped, and counts those that fail.
type load struct {
	stop     context.CancelFunc
	group    sync.WaitGroup
	made     atomic.Int64
	mu       sync.Mutex
	failures []error
}

func startLoad(t *testing.T, from *bed.NS, remote netip.AddrPort, clients int) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{stop: cancel}
	t.Cleanup(func() { // of a test that has failed before the load's end
		l.stop()
		l.group.Wait()
	})
	for range clients {
		l.group.Go(func() {
			for ctx.Err() == nil {
				if err := exchange(from, remote); err != nil {
					l.mu.Lock()
					l.failures = append(l.failures, err)
					l.mu.Unlock()
				}
				l.made.Add(1)
			}
		})
	}
	return l
}

// exchange makes one connection and has something echoed.
func exchange(from *bed.NS, remote netip.AddrPort) error {
	c, err := from.Dial(context.Background(), bed.DialSpec{Remote: remote, Timeout: patience})
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := bed.ReadIdentity(c); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	return echo(c, []byte("some words"))
}

func echo(c net.Conn, words []byte) error {
	if _, err := c.Write(words); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	got := make([]byte, len(words))
	if _, err := io.ReadFull(c, got); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if !bytes.Equal(got, words) {
		return fmt.Errorf("got %q back, sent %q", got, words)
	}
	return nil
}

// end stops the load and fails the test if a connection failed, or none was made.
func (l *load) end(t *testing.T) {
	t.Helper()
	l.stop()
	l.group.Wait()
	if made := l.made.Load(); made == 0 {
		t.Error("no connection was made")
	} else {
		t.Logf("%d connections", made)
	}
	if n := len(l.failures); n > 0 {
		t.Errorf("%d connections failed, the first: %v", n, l.failures[0])
	}
}

// waitFor lets the load make some connections.
func (l *load) waitFor(t *testing.T, connections int64) {
	t.Helper()
	target := l.made.Load() + connections
	eventually(t, fmt.Sprintf("%d more connections are made", connections), func() bool { return l.made.Load() >= target })
}

// A rolling update of the proxy: the new one joins, the old one is stopped, and no connection fails.
func TestAProxyTakesOverFromAnother(t *testing.T) {
	n := newNode(t)
	old := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(pod, 8080, bed.AppOptions{})
	var loads []*load
	for _, family := range []string{"IPv4", "IPv6"} {
		loads = append(loads,
			startLoad(t, pod, netip.AddrPortFrom(addr(n.Outside, family), 8080), 4),
			startLoad(t, n.Outside, netip.AddrPortFrom(addr(pod, family), 8080), 4))
	}
	for round := range 3 {
		loads[0].waitFor(t, 50)
		next := n.startProxy()
		loads[0].waitFor(t, 50)
		old.stop()
		old = next
		t.Logf("round %d done", round+1)
	}
	loads[0].waitFor(t, 50)
	for _, l := range loads {
		l.end(t)
	}
	if c := n.counters(pod); c.OutboundNoListener+c.InboundNoListener > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// Connections that are there before enrolment go on, in both directions, through enrolment and after it.
func TestConnectionsFromBeforeEnrolmentGoOn(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.plainPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(pod, 8080, bed.AppOptions{})
	var conns []net.Conn
	for _, family := range []string{"IPv4", "IPv6"} {
		for _, way := range [][2]*bed.NS{{pod, n.Outside}, {n.Outside, pod}} {
			c, err := way[0].Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(addr(way[1], family), 8080)})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			_ = c.SetDeadline(time.Now().Add(2 * patience))
			if _, err := bed.ReadIdentity(c); err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
	}
	talk := func(when string) {
		t.Helper()
		for _, c := range conns {
			if err := echo(c, []byte("still there")); err != nil {
				t.Errorf("%s, %s to %s: %v", when, c.LocalAddr(), c.RemoteAddr(), err)
			}
		}
	}
	talk("before enrolment")
	n.enrol(pod)
	talk("enrolled")
	if saw := p.connections(); len(saw) > 0 {
		t.Errorf("the proxy saw %+v", saw)
	}
	if err := n.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	talk("unenrolled")
}

func TestUnenrolledTrafficIsDirectAgain(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(pod, 8080, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(n.Outside, family), 8080)})
	})
	if err := n.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	seen := len(p.connections())
	eachFamily(t, func(t *testing.T, family string) {
		for _, way := range [][2]*bed.NS{{pod, n.Outside}, {n.Outside, pod}} {
			id, local := ask(t, way[0], bed.DialSpec{Remote: netip.AddrPortFrom(addr(way[1], family), 8080)})
			if id.Peer != local {
				t.Errorf("the app sees %s, the client is %s", id.Peer, local)
			}
		}
	})
	if got := len(p.connections()); got != seen {
		t.Errorf("the proxy has seen %d more connections", got-seen)
	}
}

// What is taken in and out a hundred times leaves nothing behind: descriptors, goroutines, memory, map entries.
func TestNothingLeaks(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.plainPod("pod")
	before, err := pod.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	cycle := func() {
		n.enrol(pod)
		if err := n.Unenroll(t.Context(), "uid-pod"); err != nil {
			t.Fatal(err)
		}
	}
	measure := func() (fds, goroutines int, heap uint64) {
		runtime.GC()
		runtime.GC()
		dir, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return len(dir), runtime.NumGoroutine(), m.HeapAlloc
	}
	for range 10 {
		cycle()
	}
	fds, goroutines, heap := measure()
	for range 100 {
		cycle()
	}
	eventually(t, "descriptors and goroutines are where they were", func() bool {
		f, g, _ := measure()
		return f <= fds && g <= goroutines
	})
	if _, _, h := measure(); h > heap+1<<20 {
		t.Errorf("the heap has grown from %d to %d bytes", heap, h)
	}
	if after, err := pod.Snapshot(); err != nil || after != before {
		t.Errorf("the namespace is not as it was, %v", err)
	}
	m := n.Datapath.Maps()
	pods, errPods := m.Pods()
	addrs, errAddrs := m.OwnAddrs()
	listeners, errListeners := m.Listeners(pod.Cookie)
	if len(pods)+len(addrs)+len(listeners) > 0 || errPods != nil || errAddrs != nil || errListeners != nil {
		t.Errorf("maps have %v %v %v (%v %v %v)", pods, addrs, listeners, errPods, errAddrs, errListeners)
	}
}

// A socket that the sock_ops program does not see, here of a process outside the cgroup, finds the pod sealed.
func TestTheSealStopsWhatWasNotMarked(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.plainPod("pod")
	app := n.serve(n.Outside, 8080, bed.AppOptions{})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	connect := func(t *testing.T, family string) error {
		argv := []string{self, netip.AddrPortFrom(addr(n.Outside, family), 8080).String()}
		proc, err := n.Start(pod, false, "client", argv, []string{roleVariable + "=client"})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		return proc.Wait(ctx)
	}
	eachFamily(t, func(t *testing.T, family string) {
		if err := connect(t, family); err != nil {
			t.Errorf("before enrolment: %v", err)
		}
	})
	n.enrol(pod)
	before := app.Accepts()
	eachFamily(t, func(t *testing.T, family string) {
		if err := connect(t, family); err == nil {
			t.Error("a connection that nobody marked leaves the pod")
		}
	})
	if got := app.Accepts(); got != before {
		t.Errorf("%d connections got out", got-before)
	}
	if c := n.counters(pod); c.SealDropped < 2 {
		t.Errorf("counters are %+v", c)
	}
}

// An app's listener with a mark of its own cannot be reached through the proxy: that is counted, for status to tell.
func TestAMarkedListenerIsCounted(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	for _, mark := range []uint32{0, 0x42} {
		if _, err := pod.Listen("tcp", 0, bed.ListenOptions{Mark: mark}); err != nil {
			t.Fatal(err)
		}
	}
	if c := n.counters(pod); c.MarkedListeners != 1 {
		t.Errorf("counters are %+v", c)
	}
}

// An app that listens on one device only must still hear the proxy, which speaks to it over lo.
func TestAListenerBoundToADeviceIsReached(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(pod, 8080, bed.AppOptions{Listen: bed.ListenOptions{BindToDevice: pod.Link}})
	n.serve(pod, 8081, bed.AppOptions{Listen: bed.ListenOptions{BindToDevice: "lo"}})
	eachFamily(t, func(t *testing.T, family string) {
		for _, port := range []uint16{8080, 8081} {
			remote := netip.AddrPortFrom(addr(pod, family), port)
			_, local := ask(t, n.Outside, bed.DialSpec{Remote: remote})
			p.saw(pod, "inbound", local, remote)
		}
	})
	if c := n.counters(pod); c.UnboundListeners != 1 {
		t.Errorf("counters are %+v", c)
	}
}

// Listeners of both families have slots of their own, and what cannot be steered to is counted.
func TestListenerSlots(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	listen := func(network string, opts bed.ListenOptions) *net.TCPListener {
		t.Helper()
		opts.Mark, opts.Transparent, opts.ReusePort = 0x539, true, true
		l, err := pod.Listen(network, 15001, opts)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	v4, v6 := listen("tcp4", bed.ListenOptions{}), listen("tcp6", bed.ListenOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
		c, err := pod.Dial(t.Context(), bed.DialSpec{Remote: remote, Timeout: 3 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		l := v4
		if family == "IPv6" {
			l = v6
		}
		got, err := l.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		defer got.Close()
		if local, err := bed.Sockname(got); err != nil || local != remote {
			t.Errorf("the %s listener has accepted %s, %v", family, local, err)
		}
	})

	var more []*net.TCPListener
	for range 4 {
		more = append(more, listen("tcp4", bed.ListenOptions{}))
	}
	if c := n.counters(pod); c.ListenersAdded != 6 || c.ListenersRejected != 0 {
		t.Errorf("with all slots taken, counters are %+v", c)
	}
	listen("tcp4", bed.ListenOptions{})
	if c := n.counters(pod); c.ListenersRejected != 1 {
		t.Errorf("with a listener too many, counters are %+v", c)
	}
	// A closed one makes room.
	_ = more[0].Close()
	listen("tcp4", bed.ListenOptions{})
	if c := n.counters(pod); c.ListenersAdded != 7 {
		t.Errorf("with one closed and one new, counters are %+v", c)
	}
	// Neither a port that is not the proxy's nor a socket without its mark gets in.
	for _, l := range []struct {
		port uint16
		mark uint32
	}{{15002, 0x539}, {15006, 0}, {15006, 0x538}} {
		if _, err := pod.Listen("tcp", l.port, bed.ListenOptions{Mark: l.mark, ReusePort: true}); err != nil {
			t.Fatal(err)
		}
	}
	if c := n.counters(pod); c.ListenersAdded != 7 || c.ListenersRejected != 1 {
		t.Errorf("counters are %+v", c)
	}
	// An MPTCP listener cannot be steered to.
	l, err := pod.Listen("tcp", 15006, bed.ListenOptions{Mark: 0x539, ReusePort: true, MPTCP: true})
	if err != nil {
		t.Skipf("MPTCP listeners: %v", err)
	}
	defer l.Close()
	if c := n.counters(pod); c.ListenersAdded != 7 || c.ListenersRejected != 2 {
		t.Errorf("with an MPTCP listener, counters are %+v", c)
	}
}
