// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// intrusion is a way to have peers reach a pod's app past the proxy.
type intrusion struct {
	name string
	// before has the app do something before enrolment, after has it afterwards; it returns what must accept nothing that
	// the proxy does not know. One of the two may be nil.
	before, after func(t *testing.T, a *attempt) *bed.App
	// times is how often the peer connects, if more than once: where the kernel may choose among listeners.
	times int
	// reached says that the app is, through the proxy.
	reached bool
	// target is the port that the peer connects to; 0 is the app's.
	target uint16
	// counter must have risen.
	counter string
}

func listening(port uint16, opts bed.ListenOptions) func(t *testing.T, a *attempt) *bed.App {
	return func(t *testing.T, a *attempt) *bed.App {
		t.Helper()
		app, err := a.pod.ServeApp(port, bed.AppOptions{Listen: opts})
		if err != nil {
			t.Fatal(err)
		}
		return app
	}
}

func intrusions() []intrusion {
	reuse := bed.ListenOptions{ReusePort: true, Transparent: true}
	asProxy := reuse
	asProxy.Mark = 0x539
	marked := func(mark uint32) func(t *testing.T, a *attempt) *bed.App {
		return listening(evasionPort, bed.ListenOptions{Mark: mark})
	}
	toDevice := bed.ListenOptions{BindToDevice: "eth0"}
	return []intrusion{
		{name: "a listener on the inbound port before the proxy's", times: 12, before: listening(15006, asProxy), counter: "inbound_steered"},
		{name: "a listener on the inbound port after the proxy's", times: 12, after: listening(15006, asProxy), counter: "foreign_marks"},
		{name: "a listener on the inbound port without a mark", after: listening(15006, reuse), counter: "inbound_steered"},
		{name: "a listener on the inbound port, asked for", after: listening(15006, asProxy), target: 15006, counter: "inbound_steered"},
		{name: "a listener on the outbound port, asked for", after: listening(15001, asProxy), target: 15001, counter: "inbound_steered"},
		{name: "a listener on the tunnel's port before the proxy's", before: listening(15008, asProxy), target: 15008, counter: "hbone_steered"},
		{name: "a listener on the tunnel's port after the proxy's", times: 12, after: listening(15008, asProxy), target: 15008, counter: "hbone_steered"},
		{name: "an app with the proxy's mark", after: marked(0x539), counter: "marked_listeners"},
		{name: "an app with the reply mark", reached: true, after: marked(0x111), counter: "marked_listeners"},
		{name: "an app with the capture mark", reached: true, after: marked(0x112), counter: "marked_listeners"},
		{name: "an app with the proxy's mark since before enrolment", before: marked(0x539), counter: "inbound_steered"},
		{name: "a transparent listener", reached: true, after: listening(evasionPort, bed.ListenOptions{Transparent: true}), counter: "inbound_steered"},
		{name: "a transparent listener for somebody else's address", after: anyIP, counter: "unowned_dropped"},
		{name: "a listener bound to the device", reached: true, after: listening(evasionPort, toDevice), counter: "inbound_steered"},
		{name: "a listener from before enrolment", reached: true, before: listening(evasionPort, bed.ListenOptions{}), counter: "inbound_steered"},
		{name: "an own address that goes and comes", reached: true, after: addressAgain, counter: "inbound_steered"},
		{name: "a program of the pod's that finds it another listener", after: ownSteer, target: 9998, counter: "seal_dropped_synack"},
		{
			name: "a program of the pod's that finds it a listener with the accept mark, before machines", after: ownSteerAccepting,
			target: 9998, counter: "seal_dropped_synack",
		},
	}
}

// Whatever a pod does, no peer reaches its app un-proxied.
func TestNothingEntersPastTheProxy(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	for _, i := range intrusions() {
		t.Run(i.name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) { s.intrude(t, i, family) })
		})
	}
}

func (s *evasionStage) intrude(t *testing.T, i intrusion, family string) {
	t.Helper()
	s.t = t
	begin := func(enrol bool) (*attempt, *bed.App) {
		a := s.newAttempt(t, family)
		a.local = netip.AddrPortFrom(addr(s.Outside, family), a.local.Port())
		a.remote = netip.AddrPortFrom(addr(a.pod, family), evasionPort)
		var app *bed.App
		if i.before != nil {
			app = i.before(t, a)
		}
		if enrol {
			s.enrolPod(t, a.pod)
			a.enrolled = true
		}
		if i.after != nil {
			app = i.after(t, a)
		}
		if i.target != 0 {
			a.remote = netip.AddrPortFrom(a.remote.Addr(), i.target)
		}
		return a, app
	}
	ask := func(a *attempt) {
		patience := evasionPatience
		if i.reached || !a.enrolled {
			patience = 5 * time.Second // as long as it takes
		}
		a.open(t, s.Outside)
		_ = connectWithin(a.socket, a.remote, patience)
		// The app says something on its own: time for the proxy to connect to it.
		fds := []unix.PollFd{{Fd: int32(a.socket), Events: unix.POLLIN}}
		_, _ = unix.Poll(fds, int(patience.Milliseconds()))
	}

	free, app := begin(false)
	if app.Port != evasionPort && i.target == 0 {
		free.remote = netip.AddrPortFrom(free.remote.Addr(), app.Port)
	}
	ask(free)
	if app.Accepts() == 0 {
		t.Error("it is not reached in a pod that is not enrolled either: the test proves nothing")
	}

	a, app := begin(true)
	for range max(i.times, 1) {
		ask(a)
		a.local = netip.AddrPortFrom(a.local.Addr(), s.nextPort())
	}
	proxied := int64(0)
	for _, c := range s.proxy.connections() {
		if c.UID == "uid-"+a.pod.Name && c.Direction == nodeproxy.Inbound && c.Error == "" && c.OriginalDestination.Port() == app.Port {
			proxied++
		}
	}
	if got := app.Accepts(); got > proxied {
		t.Errorf("the app has accepted %d connections, of which the proxy knows %d", got, proxied)
	}
	if i.reached && app.Accepts() == 0 {
		t.Error("the app is not reached by way of the proxy either")
	}
	if got := s.counter(t, a.pod, i.counter); got == 0 {
		t.Errorf("it is not counted as %s: %+v", i.counter, s.podStatus(t, a.pod).Counters)
	}
	if got := s.counter(t, a.pod, "seal_dropped_synack"); i.times > 0 && got > 0 {
		t.Errorf("%d answers of a listener that is not the proxy's were dropped: it has got what is the proxy's", got)
	}
}

// anyIP listens on an address that is the pod's by a route only, and has the node send it there.
func anyIP(t *testing.T, a *attempt) *bed.App {
	t.Helper()
	ip := netip.MustParseAddr("10.88.201.7")
	if a.family == "IPv6" {
		ip = netip.MustParseAddr("fd00:88:201::7")
	}
	for ns, route := range map[*bed.NS]*netlink.Route{
		a.pod:  {LinkIndex: 1, Dst: hostNet(ip), Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Table: unix.RT_TABLE_LOCAL},
		a.Node: {LinkIndex: linkOf(t, a.Node, a.pod.HostLink).Attrs().Index, Dst: hostNet(ip), Gw: addr(a.pod, a.family).AsSlice(), Flags: int(netlink.FLAG_ONLINK)},
	} {
		h, err := ns.Handle()
		if err != nil {
			t.Fatal(err)
		}
		if err := h.RouteReplace(route); err != nil {
			t.Fatalf("in %s: %v", ns.Name, err)
		}
		h.Close()
	}
	a.remote = netip.AddrPortFrom(ip, evasionPort)
	return listening(evasionPort, bed.ListenOptions{Transparent: true, Addr: ip})(t, a)
}

// addressAgain takes the pod's address away and gives it back.
func addressAgain(t *testing.T, a *attempt) *bed.App {
	t.Helper()
	app := listening(evasionPort, bed.ListenOptions{})(t, a)
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	l, ip := linkOf(t, a.pod, a.pod.Link), addr(a.pod, a.family)
	family := netlink.FAMILY_V4
	if ip.Is6() {
		family = netlink.FAMILY_V6
	}
	routes, err := h.RouteList(l, family)
	if err != nil {
		t.Fatal(err)
	}
	address := &netlink.Addr{IPNet: hostNet(ip), Flags: unix.IFA_F_NODAD}
	if ip.Is4() {
		address.Flags = 0
	}
	if err := h.AddrDel(l, address); err != nil {
		t.Fatal(err)
	}
	known := func(want bool) func() bool {
		return func() bool {
			return !a.enrolled || slices.Contains(a.podStatus(t, a.pod).Addresses, ip) == want
		}
	}
	eventually(t, "the agent knows that the address is gone", known(false))
	if err := h.AddrAdd(l, address); err != nil {
		t.Fatal(err)
	}
	// Those that name it have gone with the address; those to a gateway need the others.
	for _, gateways := range []bool{false, true} {
		for _, r := range routes {
			if r.Protocol == unix.RTPROT_KERNEL || gateways != (r.Gw != nil) {
				continue
			}
			if err := h.RouteReplace(&r); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "the agent knows the address again", known(true))
	return app
}

// ownSteer has a program of the pod's own answer, after the agent's, for whom a SYN is.
func ownSteer(t *testing.T, a *attempt) *bed.App {
	t.Helper()
	return steerTo(t, a, bed.ListenOptions{})
}

// ownSteerAccepting has the mark of what the proxy accepts, in a pod whose answers with that mark leave: to machines behind it.
func ownSteerAccepting(t *testing.T, a *attempt) *bed.App {
	t.Helper()
	if a.enrolled {
		if _, err := a.agent.client.Set(t.Context(), "uid-"+a.pod.Name, api.SettingsRequest{"reroute-interfaces": "br0"}); err != nil {
			t.Fatal(err)
		}
	}
	return steerTo(t, a, bed.ListenOptions{Mark: 0x113})
}

func steerTo(t *testing.T, a *attempt, opts bed.ListenOptions) *bed.App {
	t.Helper()
	l, err := a.pod.Listen("tcp", evasionPort, opts)
	if err != nil {
		t.Fatal(err)
	}
	sockets, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.SockMap, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sockets.Close() })
	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if errControl := raw.Control(func(fd uintptr) { err = sockets.Put(uint32(0), uint64(fd)) }); errControl != nil || err != nil {
		t.Fatal(errControl, err)
	}
	const replace = 1 // BPF_SK_LOOKUP_F_REPLACE
	steer, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, sockets.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "pass"),
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Reg(asm.R2, asm.R7),
			asm.Mov.Imm(asm.R3, replace),
			asm.FnSkAssign.Call(),
			asm.Mov.Reg(asm.R1, asm.R7),
			asm.FnSkRelease.Call(),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = steer.Close() })
	ns, err := os.Open(a.pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	attached, err := link.AttachNetNs(int(ns.Fd()), steer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = attached.Close() })
	app := bed.NewApp(l, bed.AppOptions{})
	t.Cleanup(func() { _ = app.Close() })
	return app
}

// A program with a TCP stack of its own answers a peer's SYN itself. The answer does not leave the pod.
func TestAStackOfThePodsOwnGetsNoAnswerOut(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy("--hold")
	// The answers are told from the proxy's by a sequence number that is no stack's.
	const sequence = 0x7abc0de5
	answer := func(t *testing.T, a *attempt, mark uint32, bySocket bool) {
		t.Helper()
		in := packetSocket(t, a.pod, linkOf(t, a.pod, a.pod.Link).Attrs().Index, unix.ETH_P_ALL)
		if err := unix.SetsockoptTimeval(in, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
			t.Fatal(err)
		}
		a.open(t, a.Outside)
		if err := unix.Connect(a.socket, sockaddrOf(a.remote)); err != nil && err != unix.EINPROGRESS {
			t.Fatal(err)
		}
		ports := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, a.local.Port()), a.remote.Port())
		buf := make([]byte, 2048)
		for {
			n, _, err := unix.Recvfrom(in, buf, 0)
			if err != nil {
				t.Fatalf("the peer's SYN has not come: %v", err)
			}
			at := bytes.Index(buf[:n], ports)
			if at < 0 || buf[at+13]&(syn|ack) != syn {
				continue
			}
			p := packet(a.remote, a.local, syn|ack)
			header := p[len(p)-20:]
			binary.BigEndian.PutUint32(header[4:], sequence)
			binary.BigEndian.PutUint32(header[8:], binary.BigEndian.Uint32(buf[at+4:])+1)
			if bySocket {
				a.sendRaw(t, mark, p)
			} else {
				a.sendFrame(t, a.pod.Link, mark, a.frame(t, a.pod.Link, p))
			}
			return
		}
	}
	// left says whether the answer is on the wire.
	left := func(t *testing.T, a *attempt) bool {
		t.Helper()
		found := false
		a.eachFrame(t, func(frame []byte) {
			found = found || bytes.Contains(frame, binary.BigEndian.AppendUint32(nil, sequence))
		})
		return found
	}
	for name, how := range map[string]struct {
		mark     uint32
		bySocket bool
	}{
		"a raw socket":                          {0, true},
		"a raw socket with the proxy's mark":    {0x539, true},
		"a packet socket":                       {0, false},
		"a packet socket with the proxy's mark": {0x539, false},
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) {
				s.t = t
				for _, enrol := range []bool{false, true} {
					a := s.newAttempt(t, family)
					a.local = netip.AddrPortFrom(addr(s.Outside, family), a.local.Port())
					a.remote = netip.AddrPortFrom(addr(a.pod, family), evasionPort)
					if enrol {
						s.enrolPod(t, a.pod)
					}
					answer(t, a, how.mark, how.bySocket)
					if got := left(t, a); got == enrol {
						t.Errorf("enrolled: %v, the answer has left the pod: %v", enrol, got)
					}
					if enrol && s.counter(t, a.pod, "seal_dropped_synack") == 0 {
						t.Errorf("it is not counted: %+v", s.podStatus(t, a.pod).Counters)
					}
				}
			})
		})
	}
}

// A peer that says it is the pod itself gets no answer, and so no connection. What it sends with its SYN does not reach an app that
// takes Fast Open without a cookie.
func TestAPeerThatUsesThePodsAddressGetsNoConnection(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	eachFamily(t, func(t *testing.T, family string) {
		for name, data := range map[string]string{"a SYN": "", "a SYN with data": "data"} {
			t.Run(name, func(t *testing.T) {
				s.t = t
				a := s.newAttempt(t, family)
				// 0x2: for servers. 0x200: without a cookie. 0x400: for all listeners.
				if err := a.pod.SetSysctl("net.ipv4.tcp_fastopen", "1538"); err != nil {
					t.Fatal(err)
				}
				if seen, accepts := a.spoofOwn(t, []byte(data)...); seen.synAck > 0 || accepts > 0 {
					t.Errorf("%d SYN-ACKs have left the pod, and the app has accepted %d connections", seen.synAck, accepts)
				}
				// The pod itself is heard, and leaves nothing behind.
				ask(t, a.pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(a.pod, family), evasionPort)})
				eventually(t, "no flow is admitted any more", func() bool {
					status, err := s.agent.client.Status(t.Context())
					return err == nil && status.AdmittedFlows == 0
				})
			})
		}
	})
}

// spoofOwn has the node put a SYN on the pod's link that says it comes from the pod, and returns what the pod makes of it: how often an
// answer left it, and what its app has accepted.
func (a *attempt) spoofOwn(t *testing.T, data ...byte) (seen opened, accepts int64) {
	t.Helper()
	app, err := a.pod.ServeApp(evasionPort, bed.AppOptions{})
	if err != nil {
		t.Fatal(err)
	}
	a.enrolPod(t, a.pod)
	own := addr(a.pod, a.family)
	src, dst := netip.AddrPortFrom(own, a.local.Port()), netip.AddrPortFrom(own, evasionPort)
	out := linkOf(t, a.Node, a.pod.HostLink)
	w := wire{podMAC: out.Attrs().HardwareAddr, hostMAC: linkOf(t, a.pod, a.pod.Link).Attrs().HardwareAddr}
	kind := uint16(typeIPv4)
	if own.Is6() {
		kind = typeIPv6
	}
	frame := w.ethernet(kind, nil, packet(src, dst, syn, data...))
	sendFrameBy(t, packetSocket(t, a.Node, out.Attrs().Index, 0), out.Attrs().Index, frame)
	seen = a.portsOnTheWire(t, dst.Port(), src.Port())
	time.Sleep(evasionPatience)
	return seen, app.Accepts()
}
