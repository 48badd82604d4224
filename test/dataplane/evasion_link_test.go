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

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// linkEvasions are what a program can do by making interfaces, which takes CAP_NET_ADMIN.
func linkEvasions() []evasion {
	return []evasion{
		{name: "a second interface", try: secondInterface, counter: "seal_dropped"},
		{name: "a socket bound to a second interface", try: boundToSecondInterface, proxied: true, counter: "outbound_captured"},
		{name: "a macvlan", try: overLink("macvlan", &netlink.Macvlan{Mode: netlink.MACVLAN_MODE_BRIDGE}), counter: "seal_dropped"},
		{name: "a VLAN interface", try: overLink("vlan", &netlink.Vlan{VlanId: 7}), counter: "seal_dropped"},
		{name: "a bridge", try: bridge, counter: "seal_dropped"},
		{name: "a tun device", try: tun, counter: "seal_dropped"},
		{name: "a filter of the pod's own", try: ownFilter, counter: "seal_dropped"},
		{name: "a network namespace in the pod", try: nested, counter: "seal_dropped"},
		{name: "a forwarded SYN-ACK with the proxy's mark", try: forwardedAnswer, counter: "seal_dropped_synack"},
		{name: "a network namespace in the pod by macvlan", try: nestedMacvlan, counter: "seal_dropped"},
	}
}

func claim(t *testing.T, h *netlink.Handle, ip netip.Addr) {
	t.Helper()
	lo, err := h.LinkByName("lo")
	if err == nil {
		err = h.AddrAdd(lo, &netlink.Addr{IPNet: hostNet(ip), Flags: unix.IFA_F_NODAD})
	}
	if err != nil {
		t.Fatal(err)
	}
}

func hostNet(ip netip.Addr) *net.IPNet {
	return &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())}
}

// add makes a link in the pod, brings it up and waits for its seal. A kernel without links of that kind skips the test.
func (a *attempt) add(t *testing.T, l netlink.Link, name string) {
	t.Helper()
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	l.Attrs().Name = name
	if err := h.LinkAdd(l); errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("the kernel has no such links: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	if err := h.LinkSetUp(l); err != nil {
		t.Fatal(err)
	}
	a.waitSealed(t, name)
}

func (a *attempt) waitSealed(t *testing.T, link string) {
	t.Helper()
	if !a.enrolled {
		return
	}
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	eventually(t, "link "+link+" is sealed", func() bool {
		l, err := h.LinkByName(link)
		if err != nil {
			t.Fatal(err)
		}
		sealed, err := loader.Sealed(h, l)
		return err == nil && sealed
	})
}

// newUplink makes a second link from the pod to the node.
func (a *attempt) newUplink(t *testing.T) {
	t.Helper()
	node, err := os.Open(a.Node.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	other := a.pod.HostLink + "b"
	veth := netlink.NewVeth(netlink.NewLinkAttrs())
	veth.PeerName, veth.PeerNamespace = other, netlink.NsFd(int(node.Fd()))
	a.add(t, veth, "eth1")
	up(t, a.Node, other)
	waitUp(t, a.pod, "eth1")
	waitUp(t, a.Node, other)
	a.uplink = "eth1"
}

// waitUp waits for the kernel to notice a link's carrier, before which it sends nothing.
func waitUp(t *testing.T, ns *bed.NS, link string) {
	t.Helper()
	eventually(t, link+" is up", func() bool { return linkOf(t, ns, link).Attrs().OperState == netlink.OperUp })
}

func up(t *testing.T, ns *bed.NS, link string) {
	t.Helper()
	h, err := ns.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	l, err := h.LinkByName(link)
	if err == nil {
		err = h.LinkSetUp(l)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func secondInterface(t *testing.T, a *attempt) {
	a.newUplink(t)
	a.sendFrame(t, "eth1", 0, a.frame(t, "eth1", packet(a.local, a.remote, syn)))
}

func boundToSecondInterface(t *testing.T, a *attempt) {
	a.newUplink(t)
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	l := linkOf(t, a.pod, "eth1")
	// A neighbour that need not be asked for, so that the SYN goes out at once.
	gateway := netip.MustParseAddr("10.99.0.1")
	if a.family == "IPv6" {
		gateway = netip.MustParseAddr("fd99::1")
	}
	mac := linkOf(t, a.Node, a.pod.HostLink+"b").Attrs().HardwareAddr
	err = errors.Join(
		h.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: gateway.AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT}),
		h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: hostNet(gateway), Scope: netlink.SCOPE_LINK}),
		h.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: hostNet(a.remote.Addr()), Gw: gateway.AsSlice(), Priority: 1, Table: 99}),
		h.RuleAdd(ruleByDevice(a.remote.Addr(), "eth1")),
	)
	if err != nil {
		t.Fatal(err)
	}
	a.open(t, a.pod, func(fd int) error { return unix.BindToDevice(fd, "eth1") })
	a.connect()
}

func ruleByDevice(of netip.Addr, device string) *netlink.Rule {
	r := netlink.NewRule()
	r.Family = unix.AF_INET
	if of.Is6() {
		r.Family = unix.AF_INET6
	}
	r.OifName, r.Table, r.Priority = device, 99, 100
	return r
}

// overLink sends a frame out by a link that is made on top of the pod's own.
func overLink(name string, l netlink.Link) func(t *testing.T, a *attempt) {
	return func(t *testing.T, a *attempt) {
		fresh := copyOf(l)
		fresh.Attrs().ParentIndex = linkOf(t, a.pod, a.pod.Link).Attrs().Index
		a.add(t, fresh, name)
		a.sendFrame(t, name, 0, a.frame(t, name, packet(a.local, a.remote, syn)))
	}
}

func copyOf(l netlink.Link) netlink.Link {
	switch l := l.(type) {
	case *netlink.Macvlan:
		c := *l
		c.LinkAttrs = netlink.NewLinkAttrs()
		return &c
	case *netlink.Vlan:
		c := *l
		c.LinkAttrs = netlink.NewLinkAttrs()
		return &c
	}
	return l
}

// bridge puts the pod's link into a bridge.
func bridge(t *testing.T, a *attempt) {
	a.add(t, &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}, "br0")
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.LinkSetMaster(linkOf(t, a.pod, a.pod.Link), linkOf(t, a.pod, "br0")); err != nil {
		t.Fatal(err)
	}
	a.sendFrame(t, "br0", 0, a.frame(t, "br0", packet(a.local, a.remote, syn)))
}

// tun has a program's packets come in by a tun device, to be forwarded out.
func tun(t *testing.T, a *attempt) {
	fd := a.openTun(t)
	forward(t, a.pod)
	// Somebody else's, or it would be dropped for coming from outside with an own address.
	source := netip.MustParseAddr("10.77.0.2")
	if a.family == "IPv6" {
		source = netip.MustParseAddr("fd77::2")
	}
	if _, err := unix.Write(fd, packet(netip.AddrPortFrom(source, a.local.Port()), a.remote, syn)); err != nil {
		t.Fatal(err)
	}
}

// openTun makes a tun device in the pod, tun0, and waits for its seal.
func (a *attempt) openTun(t *testing.T) (fd int) {
	t.Helper()
	err := a.pod.Do(func() (err error) {
		if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
			return err
		}
		request, err := unix.NewIfreq("tun0")
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		t.Skipf("the kernel has no tun devices: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	up(t, a.pod, "tun0")
	a.waitSealed(t, "tun0")
	return fd
}

// A link without Ethernet headers is sealed as well.
func TestTheSealOfALinkWithoutEthernet(t *testing.T) {
	s := newEvasionStage(t)
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		for _, enrol := range []bool{false, true} {
			a := s.newAttempt(t, family)
			if enrol {
				s.enrolPod(t, a.pod)
				a.enrolled = true
			}
			fd := a.openTun(t)
			index := linkOf(t, a.pod, "tun0").Attrs().Index
			out := packetSocket(t, a.pod, index, 0)
			for _, flags := range []byte{syn, syn | ack} {
				sendFrameBy(t, out, index, packet(a.local, a.remote, flags))
			}
			// What is no opening comes out last, whatever became of the others.
			sendFrameBy(t, out, index, packet(a.local, a.remote, ack))
			passed := 0
			buf := make([]byte, 2048)
			for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
				n, err := unix.Read(fd, buf)
				if err != nil || n < 20 {
					time.Sleep(time.Millisecond)
					continue
				}
				at := bytes.Index(buf[:n], binary.BigEndian.AppendUint16(nil, a.local.Port()))
				if at < 0 {
					continue
				}
				if buf[at+13]&syn == 0 {
					break
				}
				passed++
			}
			if want := map[bool]int{false: 2, true: 0}[enrol]; passed != want {
				t.Errorf("enrolled: %v, %d of 2 packets have come out, want %d", enrol, passed, want)
			}
			if enrol {
				if c := s.podStatus(t, a.pod).Counters; c.SealDropped != 1 || c.SealDroppedSynack != 1 {
					t.Errorf("counters are %+v", c)
				}
			}
		}
	})
}

func forward(t *testing.T, ns *bed.NS) {
	t.Helper()
	for _, name := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
		if err := ns.SetSysctl(name, "1"); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"net.ipv4.conf.all.rp_filter", "net.ipv4.conf.default.rp_filter"} {
		if err := ns.SetSysctl(name, "0"); err != nil {
			t.Fatal(err)
		}
	}
}

// child is a network namespace that a program in the pod has made, with nothing but lo.
func (a *attempt) child(t *testing.T) *bed.NS {
	t.Helper()
	ns := a.newPod(t)
	h, err := ns.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.LinkDel(linkOf(t, ns, ns.Link)); err != nil {
		t.Fatal(err)
	}
	return ns
}

// nested connects from a network namespace within the pod, whose traffic the pod forwards.
func nested(t *testing.T, a *attempt) {
	child, inner := a.nest(t)
	a.connectFrom(t, child, inner)
}

// nest makes a network namespace within the pod, whose traffic the pod forwards, and returns its address.
func (a *attempt) nest(t *testing.T) (*bed.NS, netip.Addr) {
	t.Helper()
	child := a.child(t)
	file, err := os.Open(child.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	veth := netlink.NewVeth(netlink.NewLinkAttrs())
	veth.PeerName, veth.PeerNamespace = "eth0", netlink.NsFd(int(file.Fd()))
	forward(t, a.pod)
	a.add(t, veth, "child")
	inner, outer := netip.MustParsePrefix("10.66.0.2/24"), netip.MustParsePrefix("10.66.0.1/24")
	if a.family == "IPv6" {
		inner, outer = netip.MustParsePrefix("fd66::2/64"), netip.MustParsePrefix("fd66::1/64")
	}
	address(t, a.pod, "child", outer)
	address(t, child, "eth0", inner)
	waitUp(t, child, "eth0")
	waitUp(t, a.pod, "child")
	gateway(t, child, "eth0", outer.Addr(), linkOf(t, a.pod, "child").Attrs().HardwareAddr)
	return child, inner.Addr()
}

// nestedMacvlan connects from a network namespace within the pod, by a macvlan of the pod's link.
func nestedMacvlan(t *testing.T, a *attempt) {
	child := a.child(t)
	file, err := os.Open(child.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.ParentIndex = linkOf(t, a.pod, a.pod.Link).Attrs().Index
	a.add(t, &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE}, "macvlan")
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.LinkSetNsFd(linkOf(t, a.pod, "macvlan"), int(file.Fd())); err != nil {
		t.Fatal(err)
	}
	up(t, child, "macvlan")
	waitUp(t, child, "macvlan")
	// The node knows nothing of the child, and answers no question of its for a hardware address.
	inner, outer := netip.MustParsePrefix("10.66.0.2/24"), netip.MustParsePrefix("10.66.0.1/24")
	if a.family == "IPv6" {
		inner, outer = netip.MustParsePrefix("fd66::2/64"), netip.MustParsePrefix("fd66::1/64")
	}
	address(t, child, "macvlan", inner)
	gateway(t, child, "macvlan", outer.Addr(), linkOf(t, a.Node, a.pod.HostLink).Attrs().HardwareAddr)
	a.connectFrom(t, child, inner.Addr())
}

// connectFrom connects from another network namespace and address.
func (a *attempt) connectFrom(t *testing.T, ns *bed.NS, source netip.Addr) {
	t.Helper()
	a.local = netip.AddrPortFrom(source, a.local.Port())
	a.open(t, ns)
	a.connect()
}

func address(t *testing.T, ns *bed.NS, link string, p netip.Prefix) {
	t.Helper()
	h, err := ns.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	l := linkOf(t, ns, link)
	n := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	if err := errors.Join(h.LinkSetUp(l), h.AddrAdd(l, &netlink.Addr{IPNet: n, Flags: unix.IFA_F_NODAD})); err != nil {
		t.Fatal(err)
	}
}

// gateway makes a default route by way of a neighbour whose hardware address is known beforehand, so that the first packet
// goes out at once.
func gateway(t *testing.T, ns *bed.NS, link string, via netip.Addr, mac net.HardwareAddr) {
	t.Helper()
	h, err := ns.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	everything := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if via.Is6() {
		everything = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	index := linkOf(t, ns, link).Attrs().Index
	err = errors.Join(
		h.NeighSet(&netlink.Neigh{LinkIndex: index, IP: via.AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT}),
		h.RouteAdd(&netlink.Route{LinkIndex: index, Dst: everything, Gw: via.AsSlice()}),
	)
	if err != nil {
		t.Fatal(err)
	}
}

// forwardedAnswer forwards a SYN-ACK that no socket of the pod has made, with the proxy's mark: so looks one that the kernel
// makes with a syncookie.
func forwardedAnswer(t *testing.T, a *attempt) {
	child, inner := a.nest(t)
	setMark, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R0, 0x539),
			asm.StoreMem(asm.R1, markOffset, asm.R0, asm.Word),
			asm.Mov.Imm(asm.R0, 0), // TC_ACT_OK
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer setMark.Close()
	a.filter(t, "child", netlink.HANDLE_MIN_INGRESS, 1, setMark)
	a.local = netip.AddrPortFrom(inner, a.local.Port())
	outer := a.pod
	a.pod = child
	a.sendRaw(t, 0, packet(a.local, a.remote, syn|ack))
	a.pod = outer
}

// markOffset is that of the mark in struct __sk_buff.
const markOffset = 8

// filter puts a program on one of the pod's links. With priority 0 the kernel chooses.
func (a *attempt) filter(t *testing.T, link string, parent uint32, priority uint16, program *ebpf.Program) {
	t.Helper()
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	index := linkOf(t, a.pod, link).Attrs().Index
	err = h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err == nil || errors.Is(err, unix.EEXIST) {
		err = h.FilterAdd(&netlink.BpfFilter{
			FilterAttrs:  netlink.FilterAttrs{LinkIndex: index, Parent: parent, Protocol: unix.ETH_P_ALL, Priority: priority},
			Fd:           program.FD(),
			Name:         "evader",
			DirectAction: true,
		})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// acceptAll is a filter that has no other asked.
func acceptAll(t *testing.T) *ebpf.Program {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}, // TC_ACT_OK
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = program.Close() })
	return program
}

// ownFilter puts a filter of the pod's own on its link, which says yes to everything, at a priority of the kernel's choice.
func ownFilter(t *testing.T, a *attempt) {
	a.filter(t, a.pod.Link, netlink.HANDLE_MIN_EGRESS, 0, acceptAll(t))
	a.sendFrame(t, a.pod.Link, 0, a.frame(t, a.pod.Link, packet(a.local, a.remote, syn)))
}
