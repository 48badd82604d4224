// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// The network behind a pod, of which the pod has the first addresses on a bridge.
var (
	machinesV4 = netip.MustParsePrefix("10.77.0.1/24")
	machinesV6 = netip.MustParsePrefix("fd77::1/64")
)

// machine puts a machine behind a pod, on a bridge that is made if it is not there: a network namespace of its own, with its own
// addresses, which the pod forwards for.
func (n *node) machine(t *testing.T, pod *bed.NS, name, bridge string) *bed.NS {
	t.Helper()
	m, err := n.Bare(name)
	if err != nil {
		t.Fatal(err)
	}
	m.Link, m.V4, m.V6 = "eth0", machinesV4.Addr().Next(), machinesV6.Addr().Next()
	inner, err := os.Open(m.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer inner.Close()
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if _, err := h.LinkByName(bridge); err != nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = bridge
		if err := h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); errors.Is(err, unix.EOPNOTSUPP) {
			t.Skipf("the kernel has no bridges: %v", err)
		} else if err != nil {
			t.Fatal(err)
		}
		address(t, pod, bridge, machinesV4)
		address(t, pod, bridge, machinesV6)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = "to-"+name, linkOf(t, pod, bridge).Attrs().Index
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = m.Link, netlink.NsFd(int(inner.Fd()))
	if err := h.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	forward(t, pod)
	up(t, pod, attrs.Name)
	address(t, m, m.Link, netip.PrefixFrom(m.V4, machinesV4.Bits()))
	address(t, m, m.Link, netip.PrefixFrom(m.V6, machinesV6.Bits()))
	mac := linkOf(t, pod, bridge).Attrs().HardwareAddr
	gateway(t, m, m.Link, machinesV4.Addr(), mac)
	gateway(t, m, m.Link, machinesV6.Addr(), mac)
	if err := errors.Join(pod.WaitUp(bridge), pod.WaitUp(attrs.Name), m.WaitUp(m.Link)); err != nil {
		t.Fatal(err)
	}
	return m
}

// routed has the node, and all beyond, know the way to the machines behind a pod.
func (n *node) routed(t *testing.T, pod *bed.NS) {
	t.Helper()
	h, err := n.Node.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	index := linkOf(t, n.Node, pod.HostLink).Attrs().Index
	for _, r := range []struct {
		machines netip.Prefix
		via      netip.Addr
	}{{machinesV4, pod.V4}, {machinesV6, pod.V6}} {
		to := &net.IPNet{IP: r.machines.Masked().Addr().AsSlice(), Mask: net.CIDRMask(r.machines.Bits(), r.machines.Addr().BitLen())}
		if err := h.RouteAdd(&netlink.Route{LinkIndex: index, Dst: to, Gw: r.via.AsSlice(), Flags: int(netlink.FLAG_ONLINK)}); err != nil {
			t.Fatal(err)
		}
	}
}

// A machine behind a bridge in the pod, as KubeVirt has it: with its own stack, and nothing of ours in it.
func TestMachinesInAPodAreRerouted(t *testing.T) {
	for _, identity := range []maps.ProxyIdentity{maps.ProxyIdentityMark, maps.ProxyIdentityCgroup} {
		for _, setting := range []string{"br0", enroll.AutoInterfaces} {
			name := map[maps.ProxyIdentity]string{maps.ProxyIdentityMark: "by mark, ", maps.ProxyIdentityCgroup: "by cgroup, "}[identity] + setting
			t.Run(name, func(t *testing.T) { testReroute(t, identity, setting) })
		}
	}
}

func testReroute(t *testing.T, identity maps.ProxyIdentity, setting string) {
	n := newNode(t)
	n.setIdentity(identity)
	p := n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(pod, 8080, bed.AppOptions{})
	n.serve(n.Outside, 8080, bed.AppOptions{})
	m := n.machine(t, pod, "machine", "br0")
	n.routed(t, pod)
	echo := echoUDP(t, n.Outside, 7)
	eachFamily(t, func(t *testing.T, family string) {
		remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
		n.set(pod, "reroute-interfaces=")
		// Before it was ever rerouted the seal drops it, and later the steer program.
		dropped := func() uint64 { c := n.counters(pod); return c.SealDropped + c.UnownedDropped }
		before := dropped()
		blocked(t, m, remote)
		if dropped() == before {
			t.Error("what a machine sends past the proxy is not counted as dropped")
		}

		n.set(pod, "reroute-interfaces="+setting)
		were := n.counters(pod)
		id, local := ask(t, m, bed.DialSpec{Remote: remote, Data: make([]byte, 100_000)})
		if local.Addr() != addr(m, family) {
			t.Errorf("the machine's own address is %s", local)
		}
		p.saw(pod, nodeproxy.Outbound, local, remote)
		if id.Peer.Addr() != addr(pod, family) || id.Local != remote {
			t.Errorf("outside, %s has connected to %s; want the pod", id.Peer, id.Local)
		}
		are := n.counters(pod)
		if are.Rerouted == were.Rerouted || are.SealDropped != were.SealDropped || are.SealDroppedSynack != were.SealDroppedSynack {
			t.Errorf("counters were %+v and are %+v", were, are)
		}

		// To the pod itself, it is like any other.
		own := netip.AddrPortFrom(addr(pod, family), 8080)
		_, local = ask(t, m, bed.DialSpec{Remote: own})
		p.saw(pod, nodeproxy.Outbound, local, own)
		loops := n.counters(pod).LoopsDropped
		for _, port := range []uint16{nodeproxy.PortOutbound, nodeproxy.PortInbound, nodeproxy.PortHBONE} {
			blocked(t, m, netip.AddrPortFrom(addr(pod, family), port))
		}
		if got := n.counters(pod).LoopsDropped; got < loops+3 {
			t.Errorf("%d of 3 connections to the proxy's own ports are dropped", got-loops)
		}

		// UDP goes its own way.
		if got := echo.from(t, m, addr(n.Outside, family)); got != addr(m, family) {
			t.Errorf("a datagram comes from %s, want %s", got, addr(m, family))
		}

		// The pod's own traffic.
		_, local = ask(t, pod, bed.DialSpec{Remote: remote})
		p.saw(pod, nodeproxy.Outbound, local, remote)
		_, local = ask(t, n.Outside, bed.DialSpec{Remote: own})
		p.saw(pod, nodeproxy.Inbound, local, own)

		// Under a flood of SYNs the proxy's answer is of no socket; with Fast Open it is of the connection.
		if err := pod.SetSysctl("net.ipv4.tcp_syncookies", "2"); err != nil {
			t.Fatal(err)
		}
		_, local = ask(t, m, bed.DialSpec{Remote: remote})
		p.saw(pod, nodeproxy.Outbound, local, remote)
		if err := pod.SetSysctl("net.ipv4.tcp_syncookies", "1"); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the first fetches a cookie, if the proxy's listener takes Fast Open
			ask(t, m, bed.DialSpec{Remote: remote, FastOpen: bed.FastOpenSendto, Data: []byte("early")})
		}

		// Off again, what is there goes on, and what is new is sealed off.
		rerouted, _ := establish(t, m, remote)
		n.set(pod, "reroute-interfaces=")
		rerouted.works(t)
		blocked(t, m, remote)
		rerouted.works(t)
	})
}

// setIdentity has the programs know the proxy in one way or another. With maps.ProxyIdentityCgroup, all processes of the test are in
// the proxy's cgroup.
func (n *node) setIdentity(identity maps.ProxyIdentity) {
	n.t.Helper()
	err := n.Datapath.Maps().SetConfig(maps.Config{ProxyIdentity: identity})
	if err == nil && identity == maps.ProxyIdentityCgroup {
		var id uint64
		if id, err = cgroups.ID(n.Cgroup); err == nil {
			err = n.Datapath.Maps().PutCgroup(id, maps.CgroupProxy)
		}
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// udpEcho answers each datagram with the address that it came from.
type udpEcho struct{ port uint16 }

func echoUDP(t *testing.T, ns *bed.NS, port uint16) udpEcho {
	t.Helper()
	var c *net.UDPConn
	err := ns.Do(func() (err error) {
		c, err = net.ListenUDP("udp", &net.UDPAddr{Port: int(port)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		buf := make([]byte, 16)
		for {
			_, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort([]byte(from.Addr().Unmap().String()), from)
		}
	}()
	return udpEcho{port}
}

// from sends a datagram from a namespace, and returns where it came from.
func (e udpEcho) from(t *testing.T, ns *bed.NS, to netip.Addr) netip.Addr {
	t.Helper()
	var c *net.UDPConn
	err := ns.Do(func() (err error) {
		c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, e.port)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("from where?")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatalf("no answer by UDP from %s: %v", to, err)
	}
	got, err := netip.ParseAddr(string(buf[:n]))
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// An interface that comes later than the setting, and one that comes again.
func TestMachinesThatComeLaterAreRerouted(t *testing.T) {
	for _, setting := range []string{"br0", enroll.AutoInterfaces} {
		t.Run(setting, func(t *testing.T) {
			n := newNode(t)
			p := n.startProxy()
			pod := n.enrolledPod("pod")
			n.serve(n.Outside, 8080, bed.AppOptions{})
			n.set(pod, "reroute-interfaces="+setting)
			for _, name := range []string{"first", "second"} {
				m := n.machine(t, pod, name, "br0")
				eachFamily(t, func(t *testing.T, family string) {
					remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
					_, local := ask(t, m, bed.DialSpec{Remote: remote})
					p.saw(pod, nodeproxy.Outbound, local, remote)
				})
				h, err := pod.Handle()
				if err != nil {
					t.Fatal(err)
				}
				err = h.LinkDel(linkOf(t, pod, "br0"))
				h.Close()
				if err != nil {
					t.Fatal(err)
				}
			}
			if setting != enroll.AutoInterfaces {
				return
			}
			if got := n.Repairs()[enroll.RepairRouting]; got > 0 {
				t.Errorf("%d rules for new interfaces are counted as repairs", got)
			}
			// What is gone leaves nothing behind.
			eventually(t, "there is no rule for br0", func() bool {
				return !hasRule(t, pod, func(r *netlink.Rule) bool { return r.IifName == "br0" })
			})
		})
	}
}

func hasRule(t *testing.T, ns *bed.NS, is func(*netlink.Rule) bool) bool {
	t.Helper()
	h, err := ns.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := h.RuleList(family)
		if err != nil {
			t.Fatal(err)
		}
		for i := range rules {
			if is(&rules[i]) {
				return true
			}
		}
	}
	return false
}

// Without a proxy, nothing of a machine's TCP leaves the pod.
func TestMachinesWithoutAProxy(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(pod, 8080, bed.AppOptions{})
	m := n.machine(t, pod, "machine", "br0")
	n.routed(t, pod)
	n.set(pod, "reroute-interfaces=br0")
	eachFamily(t, func(t *testing.T, family string) {
		before := n.counters(pod).OutboundNoListener
		blocked(t, m, netip.AddrPortFrom(addr(n.Outside, family), 8080))
		blocked(t, m, netip.AddrPortFrom(addr(pod, family), 8080))
		if got := n.counters(pod).OutboundNoListener; got < before+2 {
			t.Errorf("%d are counted, want 2 at least", got-before)
		}
	})
}

// What the agent has put into the namespace for machines is put back, and gone when the pod is.
func TestRulesForMachinesAreRepaired(t *testing.T) {
	n := newNode(t)
	p := n.startProxy()
	pod := n.plainPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	m := n.machine(t, pod, "machine", "br0")
	before, err := pod.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	n.enrol(pod)
	n.set(pod, "reroute-interfaces=br0")
	eachFamily(t, func(t *testing.T, family string) {
		number := map[string]int{"IPv4": unix.AF_INET, "IPv6": unix.AF_INET6}[family]
		h, err := pod.Handle()
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		for name, is := range map[string]func(*netlink.Rule) bool{
			"what machines send":     func(r *netlink.Rule) bool { return r.IifName == "br0" },
			"what the proxy answers": func(r *netlink.Rule) bool { return r.Mark == 0x113 },
		} {
			rules, err := h.RuleList(number)
			if err != nil {
				t.Fatal(err)
			}
			found := false
			for i := range rules {
				if is(&rules[i]) {
					found = true
					rules[i].Family = number
					if err := h.RuleDel(&rules[i]); err != nil {
						t.Fatal(err)
					}
				}
			}
			if !found {
				t.Errorf("there is no rule for %s", name)
			}
			eventually(t, "the rule is back for "+name, func() bool {
				rules, err := h.RuleList(number)
				if err != nil {
					t.Fatal(err)
				}
				for i := range rules {
					if is(&rules[i]) {
						return true
					}
				}
				return false
			})
			remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
			_, local := ask(t, m, bed.DialSpec{Remote: remote})
			p.saw(pod, nodeproxy.Outbound, local, remote)
		}
	})
	if err := n.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	n.wantUntouched(pod, before)
}

// A machine on a tun device, as a VPN or a VM has it: a link without Ethernet, on which the machine is a program that writes packets.
func TestAMachineOnATunDeviceIsRerouted(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		a := s.newAttempt(t, family)
		s.enrolPod(t, a.pod)
		a.enrolled = true
		tun := a.openTun(t)
		network := machinesV4
		if family == "IPv6" {
			network = machinesV6
		}
		address(t, a.pod, "tun0", network)
		forward(t, a.pod)
		a.local = netip.AddrPortFrom(network.Addr().Next(), a.local.Port())
		// answered says whether a SYN is answered on the device.
		answered := func() bool {
			t.Helper()
			// IPv6 drops what comes by a device whose address is not quite there yet: the SYN is repeated, as a machine would.
			for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
				if _, err := unix.Write(tun, packet(a.local, a.remote, syn)); err != nil {
					t.Fatal(err)
				}
				for buf := make([]byte, 2048); ; {
					n, err := unix.Read(tun, buf)
					if err != nil {
						break // nothing more
					}
					ip := map[string]int{"IPv4": 20, "IPv6": 40}[family]
					if n >= ip+20 && buf[ip+13] == syn|ack && bytes.Equal(buf[ip:ip+2], binary.BigEndian.AppendUint16(nil, a.remote.Port())) {
						return true
					}
				}
			}
			return false
		}
		if answered() {
			t.Error("a SYN is answered before its device is rerouted")
		}
		if _, err := a.agent.client.Set(t.Context(), "uid-"+a.pod.Name, api.SettingsRequest{"reroute-interfaces": "tun0"}); err != nil {
			t.Fatal(err)
		}
		if !answered() {
			t.Error("the proxy's answer does not come back to the device")
		}
		if c := s.podStatus(t, a.pod).Counters; c.Rerouted == 0 || c.SealDroppedSynack > 0 {
			t.Errorf("counters are %+v", c)
		}
	})
}
