// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// set changes settings of an enrolled pod, each given as KEY=VALUE.
func (n *node) set(pod *bed.NS, settings ...string) {
	n.t.Helper()
	err := n.Configure("uid-"+pod.Name, func(s *enroll.Settings) error {
		for _, setting := range settings {
			key, value, _ := strings.Cut(setting, "=")
			if err := s.Set(key, value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
}

// connection is an established connection to an App, whose line has been read.
type connection struct{ net.Conn }

func establish(t *testing.T, from *bed.NS, remote netip.AddrPort) (connection, bed.Identity) {
	t.Helper()
	c, err := from.Dial(t.Context(), bed.DialSpec{Remote: remote})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	id, err := bed.ReadIdentity(c)
	if err != nil {
		t.Fatal(err)
	}
	return connection{c}, id
}

// works fails the test if the connection has ended.
func (c connection) works(t *testing.T) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("more")); err != nil {
		t.Errorf("an established connection has ended: %v", err)
		return
	}
	if _, err := c.Read(make([]byte, 4)); err != nil {
		t.Errorf("an established connection has ended: %v", err)
	}
}

// proxied says how many connections the proxy has had for the pod in one direction. It waits for those that are under way.
func (p *proxy) proxied(pod *bed.NS, direction nodeproxy.Direction) int {
	p.t.Helper()
	count := 0
	for _, c := range p.connections() {
		if c.UID == "uid-"+pod.Name && c.Direction == direction {
			count++
		}
	}
	return count
}

func TestBypassInbound(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.dnsPod("pod", true)
	n.serve(pod, 8080, bed.AppOptions{})
	n.serve(n.Outside, 8080, bed.AppOptions{})
	onTunnel := n.serve(pod, 15008, bed.AppOptions{Listen: bed.ListenOptions{ReusePort: true}})
	serveDNS(t, n.Outside, netip.Addr{}, 53)
	eachFamily(t, func(t *testing.T, family string) {
		app := netip.AddrPortFrom(addr(pod, family), 8080)
		byProxy, _ := establish(t, n.Outside, app)
		if got := p.proxied(pod, nodeproxy.Inbound); got == 0 {
			t.Error("before, the proxy has no connection")
		}
		n.set(pod, "bypass-inbound=true")
		before, seen := n.counters(pod), p.proxied(pod, nodeproxy.Inbound)

		// To the app, from the client itself.
		past, id := establish(t, n.Outside, app)
		if id.Peer.String() != past.LocalAddr().String() || id.Local != app {
			t.Errorf("the app was reached at %s from %s, want %s from %s", id.Local, id.Peer, app, past.LocalAddr())
		}
		// A SYN may be repeated: these count packets.
		if after := n.counters(pod); after.BypassedInbound == before.BypassedInbound {
			t.Errorf("counters were %+v and are %+v", before, after)
		}
		if got := p.proxied(pod, nodeproxy.Inbound); got != seen {
			t.Errorf("the proxy has had %d connections more", got-seen)
		}

		// The mesh tunnel is still the proxy's, and so are its own ports.
		c, err := n.Outside.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(app.Addr(), 15008)})
		if err != nil {
			t.Errorf("the mesh tunnel: %v", err)
		} else {
			_ = c.Close()
		}
		for _, port := range []uint16{nodeproxy.PortOutbound, nodeproxy.PortInbound} {
			blocked(t, n.Outside, netip.AddrPortFrom(app.Addr(), port))
		}
		if got := n.counters(pod); got.HboneSteered == before.HboneSteered || got.LoopsDropped == before.LoopsDropped {
			t.Errorf("counters were %+v and are %+v", before, got)
		}

		// Way out and DNS are captured.
		remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
		_, local := ask(t, pod, bed.DialSpec{Remote: remote})
		p.saw(pod, nodeproxy.Outbound, local, remote)
		server := netip.AddrPortFrom(addr(n.Outside, family), 53)
		s := openUDP(t, pod, dnsSocketSpec{family: family})
		if err := s.sendTo(query(1, "name.test.", family), server); err != nil {
			t.Fatal(err)
		}
		s.expect(t, 1, proxyAnswer(family), server)

		byProxy.works(t)
		n.set(pod, "bypass-inbound=false")
		_, local = ask(t, n.Outside, bed.DialSpec{Remote: app})
		p.saw(pod, nodeproxy.Inbound, local, app)
		past.works(t)
		byProxy.works(t)
	})
	if got := onTunnel.Accepts(); got > 0 {
		t.Errorf("the app on the tunnel's port has accepted %d connections", got)
	}
}

// A program may not use what is let through to apps for connections of its own: a SYN-ACK leaves only when the kernel has made it,
// for a SYN that has come.
func TestOnlyTheKernelAnswersForAnApp(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	w := newWire(t, n.Bed, pod)
	answers := map[string][]byte{
		"IPv4": w.ethernet(typeIPv4, nil, ipv4(pod.V4, n.Outside.V4, 6, nil, 0, tcpHeader(syn|ack, 1))),
		"IPv6": w.ethernet(typeIPv6, nil, ipv6(pod.V6, n.Outside.V6, 6, nil, tcpHeader(syn|ack, 1))),
	}
	// 40000 is the frames' source port.
	for _, setting := range []string{"bypass-inbound=true", "exclude-inbound-ports=40000"} {
		n.set(pod, setting)
		for family, frame := range answers {
			if w.passes(t, frame) {
				t.Errorf("%s, %s: a packet socket's SYN-ACK passes", setting, family)
			}
		}
		n.set(pod, "bypass-inbound=false", "exclude-inbound-ports=")
	}
}

func TestExcludedInboundPorts(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(pod, 8080, bed.AppOptions{})
	n.serve(pod, 9100, bed.AppOptions{})
	eachFamily(t, func(t *testing.T, family string) {
		at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(addr(pod, family), port) }
		byProxy, _ := establish(t, n.Outside, at(9100))
		n.set(pod, "exclude-inbound-ports=9100,9101")
		before, seen := n.counters(pod), p.proxied(pod, nodeproxy.Inbound)
		past, id := establish(t, n.Outside, at(9100))
		if id.Peer.String() != past.LocalAddr().String() {
			t.Errorf("the app was reached from %s, want %s", id.Peer, past.LocalAddr())
		}
		if got := p.proxied(pod, nodeproxy.Inbound); got != seen {
			t.Errorf("the proxy has had %d connections more", got-seen)
		}
		if c := n.counters(pod); c.ExcludedInbound == before.ExcludedInbound || c.SealDroppedSynack != before.SealDroppedSynack {
			t.Errorf("counters were %+v and are %+v", before, c)
		}
		_, local := ask(t, n.Outside, bed.DialSpec{Remote: at(8080)})
		p.saw(pod, nodeproxy.Inbound, local, at(8080))
		n.set(pod, "exclude-inbound-ports=")
		_, local = ask(t, n.Outside, bed.DialSpec{Remote: at(9100)})
		p.saw(pod, nodeproxy.Inbound, local, at(9100))
		past.works(t)
		byProxy.works(t)
	})
}

// With Fast Open the SYN-ACK is of the connection itself, and under a flood of SYNs it is of no socket.
func TestExcludedInboundPortsInOtherWays(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(pod, 9100, bed.AppOptions{Listen: bed.ListenOptions{FastOpen: true}})
	n.set(pod, "exclude-inbound-ports=9100")
	eachFamily(t, func(t *testing.T, family string) {
		remote := netip.AddrPortFrom(addr(pod, family), 9100)
		for range 2 { // the first fetches a cookie
			c, err := n.Outside.Dial(t.Context(), bed.DialSpec{Remote: remote, FastOpen: bed.FastOpenSendto, Data: []byte("early")})
			if err != nil {
				t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			id, err := bed.ReadIdentity(c)
			if err != nil || id.Peer.String() != c.LocalAddr().String() {
				t.Errorf("by Fast Open, the app was reached from %s, %v; want %s", id.Peer, err, c.LocalAddr())
			}
			_ = c.Close()
		}
		if err := pod.SetSysctl("net.ipv4.tcp_syncookies", "2"); err != nil {
			t.Fatal(err)
		}
		_, id := establish(t, n.Outside, remote)
		if id.Peer.Addr() != addr(n.Outside, family) {
			t.Errorf("by a syncookie, the app was reached from %s", id.Peer)
		}
	})
	if c := n.counters(pod); c.SealDroppedSynack > 0 || c.InboundSteered > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// isProxied connects from the pod, and says whether the connection went through the proxy.
func (n *node) isProxied(t *testing.T, p *proxy, pod *bed.NS, remote netip.AddrPort, spec bed.DialSpec) bool {
	t.Helper()
	before := n.counters(pod)
	spec.Remote = remote
	_, local := ask(t, pod, spec)
	after := n.counters(pod)
	captured, excluded := after.OutboundCaptured-before.OutboundCaptured, after.ExcludedOutbound-before.ExcludedOutbound
	sealed := after.SealExcluded - before.SealExcluded
	switch {
	case captured == 1 && excluded == 0 && sealed == 0:
		p.saw(pod, nodeproxy.Outbound, local, remote)
		return true
	case captured == 0 && excluded == 1 && sealed > 0:
	default:
		t.Errorf("to %s: %d captured, %d excluded, %d past the seal", remote, captured, excluded, sealed)
	}
	for _, c := range p.connections() {
		if c.OriginalDestination == remote && c.Source == local {
			t.Errorf("to %s: the proxy has seen what is counted as excluded: %+v", remote, c)
		}
	}
	return false
}

func TestExclusions(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	for _, port := range []uint16{8080, 9000} {
		n.serve(n.Outside, port, bed.AppOptions{})
	}
	// Some more addresses outside, by which prefixes of several lengths can be told apart.
	others := map[string][]netip.Addr{
		"IPv4": {netip.MustParseAddr("198.18.1.1"), netip.MustParseAddr("198.18.2.1"), netip.MustParseAddr("198.18.2.2")},
		"IPv6": {netip.MustParseAddr("2001:db8:18:1::1"), netip.MustParseAddr("2001:db8:18:2::1"), netip.MustParseAddr("2001:db8:18:2::2")},
	}
	n.reachable(t, others["IPv4"]...)
	n.reachable(t, others["IPv6"]...)

	ranges := map[string][3]string{ // each within the one before; the addresses above are in the first one, two, and three
		"IPv4": {"198.18.0.0/16", "198.18.2.0/24", "198.18.2.2/32"},
		"IPv6": {"2001:db8:18::/48", "2001:db8:18:2::/64", "2001:db8:18:2::2/128"},
	}
	all := "0.0.0.0/0"
	eachFamily(t, func(t *testing.T, family string) {
		to := func(i int) netip.AddrPort { return netip.AddrPortFrom(others[family][i], 8080) }
		wide, narrow, single := ranges[family][0], ranges[family][1], ranges[family][2]
		check := func(setting string, proxied ...bool) {
			t.Helper()
			n.set(pod, setting)
			for i, want := range proxied {
				if got := n.isProxied(t, p, pod, to(i), bed.DialSpec{}); got != want {
					t.Errorf("%s: to %s: by the proxy: %v, want %v", setting, to(i), got, want)
				}
			}
		}
		check("exclude-outbound-cidrs=", true, true, true)
		byProxy, _ := establish(t, pod, to(0))
		check("exclude-outbound-cidrs="+wide, false, false, false)
		past, _ := establish(t, pod, to(0))
		check("exclude-outbound-cidrs="+wide+",!"+narrow, false, true, true)
		check("exclude-outbound-cidrs="+wide+",!"+narrow+","+single, false, true, false)
		check("exclude-outbound-cidrs="+narrow+",!"+single, true, false, true)
		check("exclude-outbound-cidrs="+single, true, true, false)
		check("exclude-outbound-cidrs=", true, true, true)
		byProxy.works(t)
		past.works(t)

		// All of one family is nothing of the other.
		if family == "IPv6" {
			all = "::/0"
		}
		check("exclude-outbound-cidrs="+all, false, false, false)
		otherFamily := netip.AddrPortFrom(n.Outside.V6, 8080)
		if family == "IPv6" {
			otherFamily = netip.AddrPortFrom(n.Outside.V4, 8080)
		}
		if !n.isProxied(t, p, pod, otherFamily, bed.DialSpec{}) {
			t.Errorf("%s excludes %s", all, otherFamily)
		}
		n.set(pod, "exclude-outbound-cidrs=")

		// Ports.
		port := netip.AddrPortFrom(addr(n.Outside, family), 9000)
		n.set(pod, "exclude-outbound-ports=9000,9001")
		if n.isProxied(t, p, pod, port, bed.DialSpec{}) {
			t.Error("an excluded port goes to the proxy")
		}
		if !n.isProxied(t, p, pod, netip.AddrPortFrom(port.Addr(), 8080), bed.DialSpec{}) {
			t.Error("another port goes past the proxy")
		}
		n.set(pod, "exclude-outbound-ports=")
		if !n.isProxied(t, p, pod, port, bed.DialSpec{}) {
			t.Error("a port that is excluded no more goes past the proxy")
		}

		// Sockets of all kinds.
		n.set(pod, "exclude-outbound-cidrs="+single)
		for name, spec := range map[string]bed.DialSpec{
			"bound to the device":  {BindToDevice: pod.Link},
			"bound to its address": {Local: netip.AddrPortFrom(addr(pod, family), 0)},
			"Fast Open":            {FastOpen: bed.FastOpenSendto, Data: []byte("early")},
			"MPTCP":                {MPTCP: true},
			"with a mark":          {Mark: 0xabc0042},
			"v4-mapped":            {V4Mapped: family == "IPv4"},
		} {
			if n.isProxied(t, p, pod, to(2), spec) {
				t.Errorf("%s: it goes to the proxy", name)
			}
		}
		n.set(pod, "exclude-outbound-cidrs=")
	})
}

// reachable gives Outside more addresses. The node routes there whatever it does not know.
func (n *node) reachable(t *testing.T, addrs ...netip.Addr) {
	t.Helper()
	outside, err := n.Outside.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	node, err := n.Node.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	link := linkOf(t, n.Node, n.Node.Link)
	for _, a := range addrs {
		claim(t, outside, a)
		gateway := n.Outside.V4
		if a.Is6() {
			gateway = n.Outside.V6
		}
		if err := node.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: hostNet(a), Gw: gateway.AsSlice()}); err != nil {
			t.Fatal(err)
		}
	}
}

// The seal lets pass what is excluded, and not a packet more.
func TestAnExclusionIsNoWiderThanItSays(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	w := newWire(t, n.Bed, pod)
	v4 := func(dst netip.Addr, options []byte, fragment uint16, payload []byte) []byte {
		return w.ethernet(typeIPv4, nil, ipv4(pod.V4, dst, 6, options, fragment, payload))
	}
	v6 := func(dst netip.Addr, extensions []extension, payload []byte) []byte {
		return w.ethernet(typeIPv6, nil, ipv6(pod.V6, dst, 6, extensions, payload))
	}
	const moreFragments = 0x2000
	opening := tcpHeader(syn, 1)
	hops := []byte{131, 7, 4, 10, 88, 0, 9, 0} // loose source routing, to 10.88.0.9
	route := extension{routing, append([]byte{0, 1, 0, 0, 0, 0}, n.Outside.V6.Next().AsSlice()...)}
	check := func(setting string, frames map[string][]byte, want bool) {
		t.Helper()
		n.set(pod, setting)
		before := n.counters(pod)
		for name, frame := range frames {
			if got := w.passes(t, frame); got != want {
				t.Errorf("%s: %s: passes: %v, want %v", setting, name, got, want)
			}
		}
		after := n.counters(pod)
		dropped := after.SealDropped - before.SealDropped + after.SealDroppedSynack - before.SealDroppedSynack
		if excluded := after.SealExcluded - before.SealExcluded; want != (excluded == uint64(len(frames))) || want != (dropped == 0) {
			t.Errorf("%s: of %d packets, %d are counted as excluded and %d as dropped", setting, len(frames), excluded, dropped)
		}
		n.set(pod, "exclude-outbound-cidrs=", "exclude-outbound-ports=", "exclude-inbound-ports=")
	}
	excluded := map[string][]byte{
		"IPv4":                         v4(n.Outside.V4, nil, 0, opening),
		"IPv6":                         v6(n.Outside.V6, nil, opening),
		"IPv6 with hop-by-hop options": v6(n.Outside.V6, []extension{padded(hopByHop)}, opening),
	}
	both := fmt.Sprintf("exclude-outbound-cidrs=%s/32,%s/128", n.Outside.V4, n.Outside.V6)
	check(both, excluded, true)
	check("exclude-outbound-ports=80", excluded, true) // the frames' destination port
	check("exclude-outbound-ports=81", excluded, false)
	// The source port of one way is no destination port of the other.
	check("exclude-outbound-ports=40000", excluded, false)
	check("exclude-inbound-ports=80,40000", excluded, false)
	check(both, map[string][]byte{
		"the next IPv4 address":        v4(n.Outside.V4.Next(), nil, 0, opening),
		"the next IPv6 address":        v6(n.Outside.V6.Next(), nil, opening),
		"IPv4 by hops":                 v4(n.Outside.V4, hops, 0, opening),
		"IPv6 by hops":                 v6(n.Outside.V6, []extension{route}, opening),
		"an answer, IPv4":              v4(n.Outside.V4, nil, 0, tcpHeader(syn|ack, 1)),
		"an answer, IPv6":              v6(n.Outside.V6, nil, tcpHeader(syn|ack, 1)),
		"IPv4 without flags":           v4(n.Outside.V4, nil, moreFragments, opening[:8]),
		"IPv6 without flags":           v6(n.Outside.V6, []extension{fragmentHeader(0, true)}, opening[:8]),
		"IPv6 behind too many headers": v6(n.Outside.V6, []extension{padded(destOptions), padded(destOptions), padded(destOptions), padded(destOptions), padded(destOptions), padded(destOptions), padded(destOptions), padded(destOptions), padded(destOptions)}, opening),
	}, false)
	check("exclude-outbound-ports=80", map[string][]byte{
		"IPv4 by hops": v4(n.Outside.V4, hops, 0, opening),
		"IPv6 by hops": v6(n.Outside.V6, []extension{route}, opening),
	}, false)
}

// What one pod has excluded is not so for another.
func TestExclusionsAreAPodsOwn(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod, other := n.enrolledPod("pod"), n.enrolledPod("other")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.set(pod, "exclude-outbound-cidrs=0.0.0.0/0,::/0")
	n.set(other, "exclude-outbound-ports=9999")
	eachFamily(t, func(t *testing.T, family string) {
		remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
		if n.isProxied(t, p, pod, remote, bed.DialSpec{}) {
			t.Error("what is excluded goes to the proxy")
		}
		if !n.isProxied(t, p, other, remote, bed.DialSpec{}) {
			t.Error("what another pod has excluded goes past the proxy")
		}
	})
}

// Captured DNS goes to the proxy whatever is excluded.
func TestExclusionsDoNotReachDNS(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.dnsPod("pod", true)
	outside := serveDNS(t, n.Outside, netip.Addr{}, 53)
	n.set(pod, "exclude-outbound-cidrs=0.0.0.0/0,::/0", "exclude-outbound-ports=53")
	eachFamily(t, func(t *testing.T, family string) {
		server := netip.AddrPortFrom(addr(n.Outside, family), 53)
		s := openUDP(t, pod, dnsSocketSpec{family: family})
		if err := s.sendTo(query(1, "name.test.", family), server); err != nil {
			t.Fatal(err)
		}
		s.expect(t, 1, proxyAnswer(family), server)
		c, err := pod.Dial(t.Context(), bed.DialSpec{Remote: server})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if err := writeStream(c, query(2, "name.test.", family)); err != nil {
			t.Fatal(err)
		}
		reply, err := readStream(c)
		if err != nil {
			t.Fatal(err)
		}
		if _, got, err := answered(reply); err != nil || got != proxyAnswer(family) {
			t.Errorf("by TCP, the answer is %s, %v", got, err)
		}
	})
	if got := outside.queries.Load(); got > 0 {
		t.Errorf("the server has got %d queries", got)
	}
}

// Settings outlive the agent, and the file that it keeps of the pod outlives the maps.
func TestSettingsAreKept(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(pod, 9100, bed.AppOptions{})
	n.set(pod, "exclude-outbound-cidrs=0.0.0.0/0,::/0", "exclude-inbound-ports=9100")
	want, err := n.Enroller.Pod("uid-pod")
	if err != nil {
		t.Fatal(err)
	}
	for _, lose := range []bool{false, true} {
		n.Agent.Stop()
		if lose {
			if err := loader.Unload(n.BPFFS); err != nil {
				t.Fatal(err)
			}
		}
		n.Agent = agent.Start(t, n.Bed, nil)
		n.startProxy() // the one before has lost its agent, and is connected again some time later
		got, err := n.Enroller.Pod("uid-pod")
		if err != nil || fmt.Sprint(got.Settings) != fmt.Sprint(want.Settings) {
			t.Errorf("the next agent has the settings %+v, %v; want %+v", got.Settings, err, want.Settings)
		}
		eachFamily(t, func(t *testing.T, family string) {
			if n.isProxied(t, p, pod, netip.AddrPortFrom(addr(n.Outside, family), 8080), bed.DialSpec{}) {
				t.Error("what is excluded goes to the proxy")
			}
			before := n.counters(pod)
			establish(t, n.Outside, netip.AddrPortFrom(addr(pod, family), 9100))
			if c := n.counters(pod); c.ExcludedInbound == before.ExcludedInbound {
				t.Errorf("counters are %+v", c)
			}
		})
	}
	if err := n.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	left, err := n.Datapath.Maps().Exceptions()
	if err != nil || len(left) > 0 {
		t.Errorf("after unenrolment the maps have %+v, %v", left, err)
	}
}

// What others do to the maps is undone.
func TestExceptionsAreRepaired(t *testing.T) {
	n := newNode(t)
	go n.Reconcile(t.Context()) //nolint:errcheck // it returns none
	pod := n.enrolledPod("pod")
	n.set(pod, "exclude-outbound-cidrs=10.0.0.0/8,!10.1.0.0/16,fd00::/8", "exclude-inbound-ports=9100")
	m := n.Datapath.Maps()
	all, err := m.Exceptions()
	if err != nil {
		t.Fatal(err)
	}
	want := all[pod.Cookie]
	prefix := netip.MustParsePrefix
	for name, change := range map[string]func() error{
		"an exclusion more":      func() error { return m.PutCIDR(pod.Cookie, prefix("192.0.2.0/24"), true) },
		"a range not taken back": func() error { return m.PutCIDR(pod.Cookie, prefix("10.1.0.0/16"), true) },
		"an exclusion less":      func() error { return m.DeleteCIDR(pod.Cookie, prefix("fd00::/8")) },
		"a port more": func() error {
			return m.PutException(pod.Cookie, maps.Exception{Kind: maps.ExceptionOutboundPort, Value: 80})
		},
		"a port less": func() error {
			return m.DeleteException(pod.Cookie, maps.Exception{Kind: maps.ExceptionInboundPort, Value: 9100})
		},
		"a pod that is not there": func() error { return m.PutCIDR(1<<40, prefix("192.0.2.0/24"), true) },
	} {
		t.Run(name, func(t *testing.T) {
			repaired := func() uint64 { r := n.Repairs(); return r[enroll.RepairException] + r[enroll.RepairStale] }
			before := repaired()
			if err := change(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the maps are as before, and that is counted", func() bool {
				all, err := m.Exceptions()
				return err == nil && len(all) == 1 && all[pod.Cookie].Equal(want) && repaired() > before
			})
		})
	}
	if got := n.Repairs()[enroll.RepairException]; got != 5 {
		t.Errorf("%d repairs of a pod's are counted, want 5", got)
	}
}

// A change that fails half way is undone: here, there is room for one range more, and two are asked for.
func TestASettingThatDoesNotFitChangesNothing(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.set(pod, "exclude-outbound-ports=9999")
	m := n.Datapath.Maps()
	room := int(m.RedirectorMaps.Cidrs.MaxEntries())
	for i := range room - 1 {
		if err := m.PutCIDR(1<<40+uint64(i), netip.MustParsePrefix("10.0.0.0/8"), true); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(n.RunDir, "pods", "uid-pod.json")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	err = n.Configure("uid-pod", func(s *enroll.Settings) error {
		return errors.Join(s.Set("exclude-outbound-cidrs", "0.0.0.0/0,::/0"), s.Set("bypass-inbound", "true"), s.Set("exclude-outbound-ports", ""))
	})
	if err == nil || !strings.Contains(err.Error(), "the map is full") || !strings.Contains(err.Error(), "as before") {
		t.Errorf("the error is %v", err)
	}
	got, err := n.Enroller.Pod("uid-pod")
	if err != nil || fmt.Sprint(got.Settings) != fmt.Sprint(enroll.Settings{ExcludeOutboundPorts: []uint16{9999}}) {
		t.Errorf("the settings are %+v, %v", got.Settings, err)
	}
	if after, err := os.ReadFile(file); err != nil || !bytes.Equal(after, before) {
		t.Errorf("the pod's file is %s, %v; it was %s", after, err, before)
	}
	if entry, err := m.Pod(pod.Cookie); err != nil || entry.BypassInbound {
		t.Errorf("the pod's entry is %+v, %v", entry, err)
	}
	all, err := m.Exceptions()
	if have := all[pod.Cookie]; err != nil || len(have.CIDRs) != 0 || len(have.Values) != 1 {
		t.Errorf("the maps have %+v, %v", have, err)
	}
	eachFamily(t, func(t *testing.T, family string) {
		if !n.isProxied(t, p, pod, netip.AddrPortFrom(addr(n.Outside, family), 8080), bed.DialSpec{}) {
			t.Error("what could not be excluded goes past the proxy")
		}
	})
}

func TestBadSettingsAreRefused(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.set(pod, "exclude-outbound-cidrs=0.0.0.0/0,::/0")
	many := func(of string) string { return strings.TrimSuffix(strings.Repeat(of+",", 10_000), ",") }
	for setting, words := range map[string]string{
		"exclude-outbound=80":                            "exclude-outbound",
		"exclude-outbound-cidrs=10.0.0.0/33":             "10.0.0.0/33",
		"exclude-outbound-cidrs=10.0.0.1/8":              "write 10.0.0.0/8",
		"exclude-outbound-ports=0":                       `"0" is no port`,
		"exclude-inbound-ports=65536":                    `"65536" is no port`,
		"exclude-outbound-ports=" + many("80"):           "10000 entries",
		"exclude-outbound-cidrs=" + many("10.0.0.0/8"):   "10000 entries",
		"reroute-interfaces=" + strings.Repeat("x", 300): "300 bytes",
		"bypass-inbound=perhaps":                         `"perhaps" is neither true nor false`,
	} {
		key, value, _ := strings.Cut(setting, "=")
		err := n.Configure("uid-pod", func(s *enroll.Settings) error {
			if err := s.Set("exclude-outbound-cidrs", ""); err != nil { // which comes to nothing, with the other
				return err
			}
			return s.Set(key, value)
		})
		if err == nil || !strings.Contains(err.Error(), key) || !strings.Contains(err.Error(), words) {
			t.Errorf("%.60s: the error is %v; it has to name the key, and %q", setting, err, words)
		}
	}
	eachFamily(t, func(t *testing.T, family string) {
		if n.isProxied(t, p, pod, netip.AddrPortFrom(addr(n.Outside, family), 8080), bed.DialSpec{}) {
			t.Error("the setting from before is gone")
		}
	})
}
