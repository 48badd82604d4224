// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// Nobody in the pod reaches the proxy's own ports there: it would be proxied to them, for ever.
func TestALoopCannotArise(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	loopback := map[string]netip.Addr{"IPv4": netip.MustParseAddr("127.0.0.1"), "IPv6": netip.IPv6Loopback()}
	probe := map[string]string{"IPv4": "169.254.7.127", "IPv6": "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"}
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		pod := s.newPod(t)
		s.enrolPod(t, pod)
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		// connect is by a process of an app, or of the proxy's cgroup with its mark.
		connect := func(group, mark string, remote netip.AddrPort) error {
			t.Helper()
			dir, err := s.Group(group)
			if err != nil {
				t.Fatal(err)
			}
			unspecified := netip.IPv4Unspecified()
			if remote.Addr().Is6() {
				unspecified = netip.IPv6Unspecified()
			}
			argv := []string{self, remote.String(), netip.AddrPortFrom(unspecified, 0).String(), mark}
			proc, err := s.StartIn(pod, dir, "looper", argv, []string{roleVariable + "=evade"})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			return proc.Wait(ctx)
		}
		before := len(s.proxy.connections())
		dropped := uint64(0)
		for _, who := range []struct{ group, mark string }{{"proxy", "0x539"}, {"kubepods/podY", "0"}, {"kubepods/podY", "0x539"}} {
			for _, to := range []netip.Addr{addr(pod, family), loopback[family]} {
				for _, port := range []uint16{15001, 15006} {
					if err := connect(who.group, who.mark, netip.AddrPortFrom(to, port)); err == nil {
						t.Errorf("%s with mark %s has connected to %s port %d", who.group, who.mark, to, port)
					}
					now := s.counter(t, pod, "loops_dropped")
					if now == dropped {
						t.Errorf("%s with mark %s to %s port %d: not counted as a loop", who.group, who.mark, to, port)
					}
					dropped = now
				}
			}
		}
		if got := len(s.proxy.connections()) - before; got > 0 {
			t.Errorf("the proxy has seen %d connections", got)
		}
		// The probe address is the node's: one connection, refused there.
		for _, who := range []struct{ group, mark string }{{"kubepods/podY", "0"}, {"proxy", "0x539"}} {
			_ = connect(who.group, who.mark, netip.AddrPortFrom(netip.MustParseAddr(probe[family]), evasionPort))
		}
		time.Sleep(evasionPatience)
		if got := len(s.proxy.connections()) - before; got > 1 {
			t.Errorf("the proxy has seen %d connections, want 1", got)
		}
	})
}

// A proxy that runs before the dataplane is there has its listeners already: they are taken over, and traffic goes both ways.
func TestListenersFromBeforeAreTakenOver(t *testing.T) {
	s := newEvasionStage(t)
	p := s.startNodeProxy()
	pod := s.newPod(t)
	s.enrolPod(t, pod)
	inside := s.serve(pod, evasionPort, bed.AppOptions{})
	bothWays := func(when string) {
		t.Helper()
		for _, family := range []string{"IPv4", "IPv6"} {
			remote := netip.AddrPortFrom(addr(s.Outside, family), evasionPort)
			_, local := ask(t, pod, bed.DialSpec{Remote: remote})
			p.saw(pod, "outbound", local, remote)
			remote = netip.AddrPortFrom(addr(pod, family), evasionPort)
			_, local = ask(t, s.Outside, bed.DialSpec{Remote: remote})
			p.saw(pod, "inbound", local, remote)
		}
		if t.Failed() {
			t.Fatalf("%s: counters are %+v", when, s.podStatus(t, pod).Counters)
		}
	}
	bothWays("before")
	if c := s.podStatus(t, pod).Counters; c.ListenersAdded == 0 {
		t.Errorf("counters are %+v", c)
	}

	s.replaceAgent(t, "agent", func() {
		// The pod is its own again.
		for _, family := range []string{"IPv4", "IPv6"} {
			ask(t, s.Outside, bed.DialSpec{Remote: netip.AddrPortFrom(addr(pod, family), evasionPort)})
		}
	}, pod)
	eventually(t, "the listeners are known", func() bool {
		l := s.podStatus(t, pod).Listeners
		return l[15001] > 0 && l[15006] > 0
	})
	bothWays("with the next agent")
	status := s.podStatus(t, pod)
	if status.Counters.ListenersAdded > 0 {
		t.Errorf("the proxy has listened anew, so nothing was taken over: %+v", status.Counters)
	}
	if out := s.agent.Output(); !strings.Contains(out, "listeners that the node proxy had before") {
		t.Errorf("the agent does not say so: %s", out)
	}
	if inside.Accepts() != 6 {
		t.Errorf("the app has accepted %d connections, want 6", inside.Accepts())
	}
}

// A proxy that another agent has told of the pod has listeners that no program of ours has ever seen.
func TestListenersOfAnotherAgentAreTakenOver(t *testing.T) {
	s := newEvasionStage(t)
	s.cleanUp(t)
	if err := os.MkdirAll(s.RunDir, 0o700); err != nil {
		t.Fatal(err)
	}
	pod := s.newPod(t)
	ns, err := podns.Open(pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	other, err := zds.Listen(zds.Options{Path: s.ZDSSocket, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- other.Serve(ctx) }()
	err = other.Set(zds.Pod{UID: "uid-" + pod.Name, Name: pod.Name, Namespace: "default", ServiceAccount: "default", NetNS: ns})
	if err != nil {
		t.Fatal(err)
	}
	p := s.startNodeProxyProcess()
	if err := other.Wait(ctx, "uid-"+pod.Name); err != nil {
		t.Fatal(err)
	}
	if err := p.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := errors.Join(<-served, ns.Close()); err != nil {
		t.Fatal(err)
	}
	s.startAgent()
	if _, err := s.agent.client.Enroll(t.Context(), api.EnrollRequest{Spec: agent.Spec(pod)}); err != nil {
		t.Fatal(err)
	}
	if err := p.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	s.waitProxy(p)
	s.enrolPod(t, pod)
	s.serve(pod, evasionPort, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		s.proxyHearsThatAClientIsGone(t, pod, family)
		remote := netip.AddrPortFrom(addr(pod, family), evasionPort)
		_, local := ask(t, s.Outside, bed.DialSpec{Remote: remote})
		p.saw(pod, "inbound", local, remote)
	})
	if c := s.podStatus(t, pod).Counters; c.ListenersAdded > 0 {
		t.Errorf("the proxy has listened anew, so nothing was taken over: %+v", c)
	}
}

// proxyHearsThatAClientIsGone has a client of the pod end without a word, and then the server speak to it: the proxy is to be
// told by a reset that nobody is there, which needs its listener's mark to be as if it had been seen made.
func (s *evasionStage) proxyHearsThatAClientIsGone(t *testing.T, pod *bed.NS, family string) {
	t.Helper()
	l, err := s.Outside.Listen("tcp", 0, bed.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	at, err := bed.Sockname(l)
	if err != nil {
		t.Fatal(err)
	}
	client := dial(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(s.Outside, family), at.Port())})
	server := accept(t, l)
	raw, err := client.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// In repair mode a socket closes without a word.
	if errControl := raw.Control(func(fd uintptr) { err = option(unix.SOL_TCP, unix.TCP_REPAIR, 1)(int(fd)) }); errControl != nil || err != nil {
		t.Fatal(errControl, err)
	}
	_ = client.Close()
	if _, err := server.Write([]byte("anybody there?")); err != nil {
		t.Fatal(err)
	}
	if _, err := server.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the proxy does not hear that its client is gone: the server reads %v", err)
	}
}

// replaceAgent stops the agent, takes its dataplane away, and starts another by a role, which enrols the pod. The proxy is
// stopped meanwhile: it would leave the pod when it heard from an agent that does not know it.
func (s *evasionStage) replaceAgent(t *testing.T, role string, without func(), pod *bed.NS) {
	t.Helper()
	if err := s.proxy.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s.cleanUp(t)
	without()
	s.startAgentAs(role)
	if _, err := s.agent.client.Enroll(t.Context(), api.EnrollRequest{Spec: agent.Spec(pod)}); err != nil {
		t.Fatal(err)
	}
	if err := s.proxy.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	s.waitProxy(s.proxy)
	s.enrolPod(t, pod)
}

// stopAgent stops the agent; its dataplane stays.
func (s *evasionStage) stopAgent(t *testing.T) {
	t.Helper()
	if err := s.agent.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := s.agent.Wait(ctx); err != nil {
		t.Fatalf("the agent ended with %v", err)
	}
}

// cleanUp stops the agent and takes its dataplane away.
func (s *evasionStage) cleanUp(t *testing.T) {
	t.Helper()
	s.stopAgent(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cleanup := s.startIn("system/agent", s.Node, "cleanup", "agent",
		"cleanup", "--run-dir", s.RunDir, "--bpffs", s.BPFFS, "--zds-socket", s.ZDSSocket)
	if err := cleanup.Wait(ctx); err != nil {
		t.Fatalf("cleanup ended with %v: %s", err, cleanup.Output())
	}
}

// Where the agent may not look into the proxy's files, it has the proxy listen anew.
func TestListenersThatCannotBeTakenOverAreMadeAnew(t *testing.T) {
	s := newEvasionStage(t)
	p := s.startNodeProxy()
	pod := s.newPod(t)
	s.enrolPod(t, pod)
	s.replaceAgent(t, untraced, func() {}, pod)
	eventually(t, "the proxy listens anew", func() bool { return s.podStatus(t, pod).Counters.ListenersAdded > 0 })
	inside := s.serve(pod, evasionPort, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		remote := netip.AddrPortFrom(addr(s.Outside, family), evasionPort)
		_, local := ask(t, pod, bed.DialSpec{Remote: remote})
		p.saw(pod, "outbound", local, remote)
		remote = netip.AddrPortFrom(addr(pod, family), evasionPort)
		_, local = ask(t, s.Outside, bed.DialSpec{Remote: remote})
		p.saw(pod, "inbound", local, remote)
	})
	if inside.Accepts() != 2 {
		t.Errorf("the app has accepted %d connections, want 2", inside.Accepts())
	}
	out := s.agent.Output()
	for _, want := range []string{"cannot look for listeners", "asked to start anew"} {
		if !strings.Contains(out, want) {
			t.Errorf("the agent does not say %q: %s", want, out)
		}
	}
}

// What is not TCP is nobody's business here.
func TestUDPIsUntouched(t *testing.T) {
	s := newEvasionStage(t)
	pod := s.newPod(t)
	s.enrolPod(t, pod)
	eachFamily(t, func(t *testing.T, family string) {
		for _, way := range [][2]*bed.NS{{pod, s.Outside}, {s.Outside, pod}} {
			to := netip.AddrPortFrom(addr(way[1], family), 9000)
			listener := udpSocket(t, way[1], to)
			from := udpSocket(t, way[0], netip.AddrPortFrom(addr(way[0], family), 9001))
			if err := unix.Sendto(from, []byte("a datagram"), 0, sockaddrOf(to)); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 100)
			if n, _, err := unix.Recvfrom(listener, buf, 0); err != nil || string(buf[:n]) != "a datagram" {
				t.Errorf("%s has received %q from %s, %v", way[1].Name, buf[:max(n, 0)], way[0].Name, err)
			}
			_ = unix.Close(listener)
			_ = unix.Close(from)
		}
	})
}

// udpSocket makes a socket that waits no longer than five seconds for a datagram.
func udpSocket(t *testing.T, ns *bed.NS, at netip.AddrPort) (fd int) {
	t.Helper()
	err := ns.Do(func() (err error) {
		domain := unix.AF_INET
		if at.Addr().Is6() {
			domain = unix.AF_INET6
		}
		if fd, err = unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
			return err
		}
		return unix.Bind(fd, sockaddrOf(at))
	})
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// Of several listeners on one port the newest gets every connection: an older one may be about to close.
func TestTheNewestListenerGetsAll(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	older, newer := proxyListener(t, pod, 15001), proxyListener(t, pod, 15001)
	eachFamily(t, func(t *testing.T, family string) {
		for range 8 {
			dial(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(n.Outside, family), evasionPort)})
			accept(t, newer)
		}
	})
	_ = older.SetDeadline(time.Now().Add(10 * time.Millisecond))
	if c, err := older.Accept(); err == nil {
		_ = c.Close()
		t.Error("the older listener has accepted a connection")
	}
}

// The upper bits of a mark are others', the proxy's mark is the lower twelve.
func TestAProxyMayHaveUpperBitsInItsMark(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, evasionPort, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(n.Outside, family), evasionPort), Mark: 0xabcd0539})
	})
	if c := n.counters(pod); c.ProxyOutbound != 2 || c.OutboundCaptured > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// The proxy may speak to an app of the pod as the pod itself, not as a client.
func TestTheProxyMaySpeakAsThePod(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	n.serve(pod, evasionPort, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		// Whether it says so itself or leaves it to the kernel.
		for _, source := range []netip.AddrPort{{}, netip.AddrPortFrom(addr(pod, family), 0)} {
			id, local := ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(pod, family), evasionPort), Mark: 0x539, Local: source})
			if id.Peer != local || local.Addr() != addr(pod, family) {
				t.Errorf("the app sees %s, the proxy is %s", id.Peer, local)
			}
		}
	})
	if c := n.counters(pod); c.OwnAddress != 4 || c.ProxyToApp > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// A group with another role, which the pods' own is, makes nobody a proxy.
func TestWhoIsInThePodsCgroupItselfIsNoProxy(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	s.joinGroup("kubepods")
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		s.run(t, evasion{try: func(t *testing.T, a *attempt) {
			a.open(t, a.pod, marked(0x539))
			a.connect()
		}, proxied: true, counter: "foreign_marks"}, family)
	})
}

// An address that was the pod's and is no more is like any other.
func TestAnAddressThatIsGoneIsNotThePods(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		a := s.newAttempt(t, family)
		s.enrolPod(t, a.pod)
		h, err := a.pod.Handle()
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		known := func() bool { return slices.Contains(s.podStatus(t, a.pod).Addresses, a.remote.Addr()) }
		claim(t, h, a.remote.Addr())
		eventually(t, "the agent knows the address", known)
		if err := h.AddrDel(linkOf(t, a.pod, "lo"), &netlink.Addr{IPNet: hostNet(a.remote.Addr())}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the agent knows that it is gone", func() bool { return !known() })
		_, local := ask(t, a.pod, bed.DialSpec{Remote: a.remote, Timeout: 3 * time.Second})
		p := *s.proxy
		p.t = t
		p.saw(a.pod, "outbound", local, a.remote)
	})
}
