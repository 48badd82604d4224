// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// clientKind is a way to connect.
type clientKind struct {
	name string
	// spec changes a plain spec; from is where the client is.
	spec func(s *bed.DialSpec, from *bed.NS)
	// families names those that the kind exists for; "" is both.
	family string
	// again says that only a second connection shows it (Fast Open: the first fetches the cookie).
	again bool
}

func clientKinds() []clientKind {
	data := []byte("data that may travel in the SYN")
	return []clientKind{
		{name: "plain", spec: func(*bed.DialSpec, *bed.NS) {}},
		{name: "v4-mapped", spec: func(s *bed.DialSpec, _ *bed.NS) { s.V4Mapped = true }, family: "IPv4"},
		{name: "Fast Open by sendto", spec: func(s *bed.DialSpec, _ *bed.NS) { s.FastOpen, s.Data = bed.FastOpenSendto, data }, again: true},
		{name: "Fast Open by connect", spec: func(s *bed.DialSpec, _ *bed.NS) { s.FastOpen, s.Data = bed.FastOpenConnect, data }, again: true},
		{name: "MPTCP", spec: func(s *bed.DialSpec, _ *bed.NS) { s.MPTCP = true }},
		{name: "v4-mapped MPTCP", spec: func(s *bed.DialSpec, _ *bed.NS) { s.V4Mapped, s.MPTCP = true, true }, family: "IPv4"},
		{name: "bound to a device", spec: func(s *bed.DialSpec, from *bed.NS) { s.BindToDevice = from.Link }},
		{name: "bound to a source port", spec: func(s *bed.DialSpec, from *bed.NS) {
			s.Local = netip.AddrPortFrom(addrLike(from, s.Remote.Addr()), 23456)
		}},
		{name: "bound to source and device", spec: func(s *bed.DialSpec, from *bed.NS) {
			s.Local = netip.AddrPortFrom(addrLike(from, s.Remote.Addr()), 23457)
			s.BindToDevice = from.Link
		}},
		{name: "with a mark of its own", spec: func(s *bed.DialSpec, _ *bed.NS) { s.Mark = 0xabcde042 }},
	}
}

// addrLike is the namespace's address of the same family.
func addrLike(ns *bed.NS, a netip.Addr) netip.Addr {
	if a.Is4() {
		return ns.V4
	}
	return ns.V6
}

// eachClient runs a test for each kind of client and each family that has it.
func eachClient(t *testing.T, run func(t *testing.T, family string, kind clientKind)) {
	eachFamily(t, func(t *testing.T, family string) {
		for _, kind := range clientKinds() {
			if kind.family != "" && kind.family != family {
				continue
			}
			t.Run(kind.name, func(t *testing.T) {
				if strings.HasPrefix(kind.name, "v4-mapped") {
					needsIPv6(t)
				}
				run(t, family, kind)
			})
		}
	})
}

func TestOutbound(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	app := n.serve(n.Outside, 8080, bed.AppOptions{})
	eachClient(t, func(t *testing.T, family string, kind clientKind) {
		remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
		times := 1
		if kind.again {
			times = 2
		}
		for range times {
			spec := bed.DialSpec{Remote: remote}
			kind.spec(&spec, pod)
			before := app.Accepts()
			id, local := ask(t, pod, spec)
			if t.Failed() {
				return
			}
			// The app sees the pod's address, by a connection of the proxy's.
			if id.Peer.Addr() != local.Addr() || id.Local != remote {
				t.Errorf("the app sees %s at %s, want %s at %s", id.Peer, id.Local, local.Addr(), remote)
			}
			if local.Addr() != addr(pod, family) {
				t.Errorf("the client's own address is %s, want %s", local, addr(pod, family))
			}
			if got := app.Accepts() - before; got != 1 {
				t.Errorf("the app has accepted %d connections, want 1", got)
			}
			p.saw(pod, "outbound", local, remote)
		}
	})
	if c := n.counters(pod); c.SealDropped > 0 || c.CaptureFailed > 0 || c.OutboundCaptured == 0 || c.OutboundCaptured != c.ProxyOutbound {
		t.Errorf("counters are %+v", c)
	}
}

func TestInbound(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(pod, 8080, bed.AppOptions{})
	eachClient(t, func(t *testing.T, family string, kind clientKind) {
		remote := netip.AddrPortFrom(addr(pod, family), 8080)
		times := 1
		if kind.again {
			times = 2
		}
		for range times {
			spec := bed.DialSpec{Remote: remote}
			kind.spec(&spec, n.Outside)
			id, local := ask(t, n.Outside, spec)
			if t.Failed() {
				return
			}
			if id.Peer.Addr() != local.Addr() || id.Local != remote {
				t.Errorf("the app sees %s at %s, want %s at %s", id.Peer, id.Local, local.Addr(), remote)
			}
			p.saw(pod, "inbound", local, remote)
		}
	})
	c := n.counters(pod)
	if c.InboundSteered == 0 || c.InboundSteered < c.ProxyToApp || c.OutboundCaptured > 0 {
		t.Errorf("counters are %+v", c)
	}
	eventually(t, "no flow is admitted any more", func() bool {
		flows, err := n.Datapath.Maps().Admitted()
		return err == nil && flows == 0
	})
}

func TestFromPodToPod(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	from, to := n.enrolledPod("from"), n.enrolledPod("to")
	n.serve(to, 8080, bed.AppOptions{})
	eachClient(t, func(t *testing.T, family string, kind clientKind) {
		spec := bed.DialSpec{Remote: netip.AddrPortFrom(addr(to, family), 8080)}
		kind.spec(&spec, from)
		id, local := ask(t, from, spec)
		if t.Failed() {
			return
		}
		if id.Peer.Addr() != local.Addr() || id.Local != spec.Remote {
			t.Errorf("the app sees %s at %s, want %s at %s", id.Peer, id.Local, local.Addr(), spec.Remote)
		}
		p.saw(from, "outbound", local, spec.Remote)
	})
}

// Where all listeners take Fast Open, the proxy's do too, and its SYN-ACK is of the accepted socket, not of the listener.
func TestFastOpenToTheProxy(t *testing.T) {
	n := newNode(t)
	// Not by the mark alone, as the seal has to know the accepted socket for the proxy's.
	if err := n.Datapath.Maps().SetConfig(maps.Config{ProxyIdentity: maps.ProxyIdentityCgroup}); err != nil {
		t.Fatal(err)
	}
	id, err := cgroups.ID(n.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Datapath.Maps().PutCgroup(id, maps.CgroupProxy); err != nil {
		t.Fatal(err)
	}
	n.startProxy()
	pod := n.plainPod("pod")
	if err := pod.SetSysctl("net.ipv4.tcp_fastopen", "1027"); err != nil { // 0x403: client, server, without a socket option
		t.Fatal(err)
	}
	n.enrol(pod)
	n.serve(pod, 8080, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		repeated := synRetransmissions(t, n.Outside)
		for range 4 {
			ask(t, n.Outside, bed.DialSpec{
				Remote: netip.AddrPortFrom(addr(pod, family), 8080), FastOpen: bed.FastOpenSendto, Data: []byte("in the SYN"),
			})
		}
		if repeated = synRetransmissions(t, n.Outside) - repeated; repeated > 0 {
			t.Errorf("%d SYNs had to be sent again", repeated)
		}
	})
	if c := n.counters(pod); c.SealDroppedSynack > 0 || c.InboundSteered == 0 {
		t.Errorf("counters are %+v", c)
	}
}

// Whoever sets marks must leave the bits that are others'.
func TestCaptureKeepsTheUpperBitsOfAMark(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		c, err := pod.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(addr(n.Outside, family), 8080), Mark: 0xabcde042})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var mark int
		if errControl := raw.Control(func(fd uintptr) { mark, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK) }); errControl != nil || err != nil {
			t.Fatal(errControl, err)
		}
		if uint32(mark) != 0xabcde112 {
			t.Errorf("the mark is %#x, want 0xabcde112", uint32(mark))
		}
	})
}

// A peer that closes first leaves TIME_WAIT behind, which the next SYN from the same port meets.
func TestOneSourcePort(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{CloseFirst: true})
	n.serve(pod, 8080, bed.AppOptions{CloseFirst: true})
	for _, way := range []struct {
		name     string
		from, to *bed.NS
	}{{"outbound", pod, n.Outside}, {"inbound", n.Outside, pod}} {
		t.Run(way.name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) {
				var slowest time.Duration
				repeated := synRetransmissions(t, way.from)
				spec := bed.DialSpec{
					Remote: netip.AddrPortFrom(addr(way.to, family), 8080),
					Local:  netip.AddrPortFrom(addr(way.from, family), 34567),
				}
				for i := range 50 {
					waitUntilFree(t, way.from, spec)
					start := time.Now()
					askToTheEnd(t, way.from, spec)
					slowest = max(slowest, time.Since(start))
					if t.Failed() {
						t.Fatalf("connection %d of 50", i+1)
					}
				}
				t.Logf("the slowest of 50 connections took %v", slowest)
				// A SYN that is lost is sent again after a second.
				if repeated = synRetransmissions(t, way.from) - repeated; repeated > 0 {
					t.Errorf("%d SYNs had to be sent again", repeated)
				}
			})
		})
	}
}

// synRetransmissions returns how many SYNs have been sent again in the namespace so far.
func synRetransmissions(t *testing.T, ns *bed.NS) int {
	t.Helper()
	var stat []byte
	err := ns.Do(func() (err error) {
		stat, err = os.ReadFile("/proc/thread-self/net/netstat")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	// Two lines for each kind: names, values.
	lines := strings.Split(string(stat), "\n")
	for i := 0; i+1 < len(lines); i += 2 {
		names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
		for k, name := range names {
			if name != "TCPSynRetrans" {
				continue
			}
			n, err := strconv.Atoi(values[k])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("the kernel does not count SYNs that are sent again")
	return 0
}

// waitUntilFree waits until the client's own last socket has given back the connection's ports, which takes it until the
// peer has acknowledged its FIN.
func waitUntilFree(t *testing.T, from *bed.NS, spec bed.DialSpec) {
	t.Helper()
	eventually(t, "the last socket is gone", func() bool {
		var sockets []*netlink.InetDiagTCPInfoResp
		err := from.Do(func() (err error) {
			for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
				found, errFamily := netlink.SocketDiagTCPInfo(family)
				sockets, err = append(sockets, found...), errors.Join(err, errFamily)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range sockets {
			id := s.InetDiagMsg.ID
			if id.SourcePort == spec.Local.Port() && id.DestinationPort == spec.Remote.Port() && id.Source.Equal(spec.Local.Addr().AsSlice()) {
				return false
			}
		}
		return true
	})
}

// One source port to two servers at once: the proxy's listener has both under one local port.
func TestOneSourcePortToTwoServers(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(n.Outside, 8081, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		local := netip.AddrPortFrom(addr(pod, family), 34568)
		for _, port := range []uint16{8080, 8081} {
			c, err := pod.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(addr(n.Outside, family), port), Local: local})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			if id, err := bed.ReadIdentity(c); err != nil || id.Local.Port() != port {
				t.Errorf("server %d says %+v, %v", port, id, err)
			}
			p.saw(pod, "outbound", local, netip.AddrPortFrom(addr(n.Outside, family), port))
		}
	})
}

func TestSyncookies(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	if err := pod.SetSysctl("net.ipv4.tcp_syncookies", "2"); err != nil {
		t.Fatal(err)
	}
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(pod, 8080, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		for _, way := range []struct {
			direction nodeproxy.Direction
			from, to  *bed.NS
		}{{"outbound", pod, n.Outside}, {"inbound", n.Outside, pod}} {
			remote := netip.AddrPortFrom(addr(way.to, family), 8080)
			_, local := ask(t, way.from, bed.DialSpec{Remote: remote})
			p.saw(pod, way.direction, local, remote)
		}
		// To itself: loopback, and its own address.
		ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(pod, family), 8080)})
	})
}

func TestManyConnectionsAtOnce(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.enrolledPod("pod")
	app := n.serve(n.Outside, 8080, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		before := app.Accepts()
		var group sync.WaitGroup
		for range 500 {
			group.Go(func() {
				ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(n.Outside, family), 8080), Timeout: 3 * patience})
			})
		}
		group.Wait()
		if got := app.Accepts() - before; got != 500 {
			t.Errorf("the app has accepted %d connections, want 500", got)
		}
	})
	if c := n.counters(pod); c.OutboundCaptured != 1000 {
		t.Errorf("counters are %+v", c)
	}
}

// Nobody but enrolled pods is touched, and of those only what leaves or enters.
func TestUntouched(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	enrolled, plain := n.enrolledPod("enrolled"), n.plainPod("plain")
	for _, ns := range []*bed.NS{enrolled, plain, n.Node, n.Outside} {
		n.serve(ns, 8080, bed.AppOptions{})
	}
	loopback := map[string]netip.Addr{"IPv4": netip.MustParseAddr("127.0.0.1"), "IPv6": netip.IPv6Loopback()}
	eachFamily(t, func(t *testing.T, family string) {
		for name, c := range map[string]struct {
			from *bed.NS
			to   netip.Addr
		}{
			"a plain pod to outside":             {plain, addr(n.Outside, family)},
			"outside to a plain pod":             {n.Outside, addr(plain, family)},
			"the host to outside":                {n.Node, addr(n.Outside, family)},
			"the host to a plain pod":            {n.Node, addr(plain, family)},
			"a plain pod to the host":            {plain, addr(n.Node, family)},
			"an enrolled pod to loopback":        {enrolled, loopback[family]},
			"an enrolled pod to its own address": {enrolled, addr(enrolled, family)},
		} {
			t.Run(name, func(t *testing.T) {
				remote := netip.AddrPortFrom(c.to, 8080)
				id, local := ask(t, c.from, bed.DialSpec{Remote: remote})
				if id.Peer != local {
					t.Errorf("the app sees %s, the client is %s", id.Peer, local)
				}
			})
		}
	})
	if saw := p.connections(); len(saw) > 0 {
		t.Errorf("the proxy saw %+v", saw)
	}
	c := n.counters(enrolled)
	if c.OwnAddress != 2*families() || c.OutboundCaptured+c.OutboundSteered+c.InboundSteered+c.ProxyToApp+c.ProxyOutbound+c.SealDropped > 0 {
		t.Errorf("the enrolled pod's counters are %+v", c)
	}
}

// 127.0.0.0/8 is all loopback, whatever address of it.
func TestLoopbackBeyondItsFirstAddress(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(pod, 8080, bed.AppOptions{})
	ask(t, pod, bed.DialSpec{Remote: netip.MustParseAddrPort("127.1.2.3:8080")})
	// From a loopback source to an own address: it comes with the index of the address's interface.
	ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(pod.V4, 8080), Local: netip.MustParseAddrPort("127.0.0.1:0")})
	if c := n.counters(pod); c.OutboundCaptured+c.InboundSteered > 0 || c.OwnAddress != 2 {
		t.Errorf("counters are %+v", c)
	}
}

// The mesh tunnel's port is the proxy's, even for an app that listens there.
func TestHBONEPort(t *testing.T) {
	n := newNode(t)
	p := n.startProxy("--hold")
	pod := n.enrolledPod("pod")
	app := n.serve(pod, 15008, bed.AppOptions{Listen: bed.ListenOptions{ReusePort: true}})
	eachFamily(t, func(t *testing.T, family string) {
		remote := netip.AddrPortFrom(addr(pod, family), 15008)
		c, err := n.Outside.Dial(t.Context(), bed.DialSpec{Remote: remote})
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	})
	if c := n.counters(pod); c.HboneSteered < families() || c.InboundSteered > 0 {
		t.Errorf("counters are %+v", c)
	}
	p.stop()
	eachFamily(t, func(t *testing.T, family string) {
		blocked(t, n.Outside, netip.AddrPortFrom(addr(pod, family), 15008))
	})
	if c := n.counters(pod); c.HboneNoListener == 0 {
		t.Errorf("counters are %+v", c)
	}
	if got := app.Accepts(); got > 0 {
		t.Errorf("the app on the tunnel's port has accepted %d connections", got)
	}
}

// An app's closed port must be told to the peer at once: the RST has to find its way back to the proxy.
func TestAClosedPortIsRefusedAtOnce(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.enrolledPod("pod")
	eachFamily(t, func(t *testing.T, family string) {
		start := time.Now()
		c, err := n.Outside.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(addr(pod, family), 9), Timeout: 5 * time.Second})
		if err == nil {
			// The proxy accepts before it knows; then it must hang up.
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			if _, err = c.Read(make([]byte, 1)); err == nil {
				t.Error("a closed port sends data")
			}
			_ = c.Close()
		}
		// The proxy would try for 10 s.
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}
