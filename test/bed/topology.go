// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The addresses of a bed. They are the same in every bed: beds do not see each other.
var (
	nodeV4     = netip.MustParsePrefix("10.88.0.1/24")
	nodeV6     = netip.MustParsePrefix("fd00:88::1/64")
	outsideV4  = netip.MustParsePrefix("10.88.0.2/24")
	outsideV6  = netip.MustParsePrefix("fd00:88::2/64")
	gatewayV4  = netip.MustParsePrefix("10.88.1.1/24")
	gatewayV6  = netip.MustParsePrefix("fd00:88:1::1/64")
	anyV4      = netip.MustParsePrefix("0.0.0.0/0")
	anyV6      = netip.MustParsePrefix("::/0")
	bridgeName = "br0"
)

// maxPods is the number of addresses left in the pods' /24 on a bridge: without its network, gateway and broadcast address.
// maxRoutedPods is what a kernel can be asked for of namespaces and links; routed pods take the addresses that follow.
const (
	maxPods       = 253
	maxRoutedPods = 4000
)

// linkPatience is how long a new link may take to be usable: the kernel reports a carrier at most once a second.
const linkPatience = 5 * time.Second

// PodOptions says how a pod differs from one with both families and everything up.
type PodOptions struct {
	// V4Only gives the pod no IPv6 address and route; its interface still has a link-local address.
	V4Only bool
	// V6Only gives the pod no IPv4 address and route.
	V6Only bool
	// V6Disabled turns IPv6 off by sysctl (disable_ipv6), also for lo. It implies V4Only.
	V6Disabled bool
	// LoDown leaves lo down, as in a namespace that no runtime has prepared.
	LoDown bool
}

var podName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// Pod makes a pod: a namespace with lo and eth0, connected to Node. It returns when the pod's link is up and its
// addresses are usable.
func (b *Bed) Pod(name string, opts PodOptions) (*NS, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, errClosed
	}
	if !podName.MatchString(name) {
		return nil, fmt.Errorf("pod name %q is not a DNS label", name)
	}
	for _, ns := range b.ns {
		if ns.Name == name {
			return nil, fmt.Errorf("there is a namespace %s already", name)
		}
	}
	room := maxRoutedPods
	if b.opts.Bridge {
		room = maxPods
	}
	if b.podCount >= room {
		return nil, fmt.Errorf("no address left for pod %s: a bed has room for %d", name, room)
	}
	// A node that routes carries nothing of a family that it has not; one that bridges does.
	carried := b.nodeV6 || b.opts.Bridge && HasIPv6()
	if opts.V6Disabled || !carried {
		opts.V4Only = true
	}
	if opts.V4Only && opts.V6Only {
		return nil, fmt.Errorf("pod %s would have no address", name)
	}
	b.podCount++
	ns, err := b.newNS(name)
	if err == nil {
		err = b.connectPod(ns, b.podCount, opts)
		if err != nil {
			err = errors.Join(err, ns.remove())
		}
	}
	if err != nil {
		return nil, fmt.Errorf("make pod %s: %w", name, err)
	}
	return ns, nil
}

// Bare makes a namespace with nothing but lo, as a runtime does before it calls the plugins that connect a pod. Its addresses are not
// known here: V4 and V6 may be set when it has some.
func (b *Bed) Bare(name string) (*NS, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, errClosed
	}
	if !podName.MatchString(name) {
		return nil, fmt.Errorf("pod name %q is not a DNS label", name)
	}
	ns, err := b.newNS(name)
	if err != nil {
		return nil, err
	}
	if err := ns.prepare(PodOptions{}); err != nil {
		return nil, errors.Join(err, ns.remove())
	}
	return ns, nil
}

// RemovePod removes a pod as a runtime does when the pod ends: its link, the bind mount and with it the namespace, unless
// a socket, a process or an open file still keeps that. The pod's addresses are not given to another.
func (b *Bed) RemovePod(ns *NS) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errClosed
	}
	if ns.HostLink == "" || !slices.Contains(b.ns, ns) {
		return fmt.Errorf("netns %s is no pod of this bed", ns.Name)
	}
	return ns.remove()
}

// remove undoes newNS and connectPod. The caller holds b.mu.
func (n *NS) remove() error {
	b := n.bed
	b.ns = slices.DeleteFunc(b.ns, func(o *NS) bool { return o == n })
	errs := []error{n.closeFile()}
	if h, err := b.Node.Handle(); err != nil {
		errs = append(errs, err)
	} else {
		defer h.Close()
		if l, err := h.LinkByName(n.HostLink); err == nil {
			errs = append(errs, h.LinkDel(l))
		}
	}
	errs = append(errs, unmountBelow(n.Path), os.Remove(n.Path))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove pod %s: %w", n.Name, err)
	}
	return nil
}

// connectPod connects a new namespace to Node as the pod of that number.
func (b *Bed) connectPod(ns *NS, index int, opts PodOptions) error {
	ns.HostLink = fmt.Sprintf("veth%d", index)
	if err := ns.prepare(opts); err != nil {
		return err
	}
	if err := b.Node.connect(ns.HostLink, ns); err != nil {
		return err
	}
	host, err := b.Node.Handle()
	if err != nil {
		return err
	}
	defer host.Close()
	pod, err := ns.Handle()
	if err != nil {
		return err
	}
	defer pod.Close()

	if b.opts.Bridge {
		err = enslave(host, ns.HostLink, bridgeName)
	} else {
		// Every pod's link has the gateway addresses, so that each can be reached without knowing the others.
		for _, gateway := range b.families(gatewayV4, gatewayV6) {
			err = errors.Join(err, addAddr(host, ns.HostLink, single(gateway)))
		}
	}
	if err != nil {
		return err
	}
	if !opts.V6Only {
		ns.V4 = nth(gatewayV4, index)
		if err := b.addFamily(host, pod, ns, ns.V4, gatewayV4, anyV4); err != nil {
			return err
		}
	}
	if !opts.V4Only {
		ns.V6 = nth(gatewayV6, index)
		if err := b.addFamily(host, pod, ns, ns.V6, gatewayV6, anyV6); err != nil {
			return err
		}
	}
	if b.opts.Bridge {
		if err := waitUp(host, bridgeName, b.nodeV6); err != nil {
			return err
		}
	}
	return errors.Join(waitUp(host, ns.HostLink, b.nodeV6), waitUp(pod, ns.Link, !opts.V6Disabled && HasIPv6()))
}

// families are an address of each family that the node has.
func (b *Bed) families(v4, v6 netip.Prefix) []netip.Prefix {
	if b.nodeV6 {
		return []netip.Prefix{v4, v6}
	}
	return []netip.Prefix{v4}
}

// HasIPv6 says whether the kernel has IPv6: it may lack it, or have been booted with ipv6.disable=1.
func HasIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return err == nil
}

// addFamily gives the pod its address of one family and the routes there and back. Both ends of its link are up.
func (b *Bed) addFamily(host, pod *netlink.Handle, ns *NS, addr netip.Addr, gateway, all netip.Prefix) error {
	own := netip.PrefixFrom(addr, gateway.Bits())
	if !b.opts.Bridge {
		own = single(own)
	}
	if err := addAddr(pod, ns.Link, own); err != nil {
		return err
	}
	if b.opts.Bridge {
		return addRoute(pod, ns.Link, all, gateway.Addr())
	}
	return errors.Join(
		addRoute(pod, ns.Link, single(gateway), netip.Addr{}),
		addRoute(pod, ns.Link, all, gateway.Addr()),
		addRoute(host, ns.HostLink, own, netip.Addr{}),
	)
}

// makeNetwork makes Node, Outside and the link between them.
func (b *Bed) makeNetwork() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, n := range []struct {
		ns     **NS
		name   string
		v4, v6 netip.Prefix
	}{
		{&b.Node, "node", nodeV4, nodeV6},
		{&b.Outside, "outside", outsideV4, outsideV6},
	} {
		ns, err := b.newNS(n.name)
		if err != nil {
			return err
		}
		ns.V4 = n.v4.Addr()
		if b.nodeV6 {
			ns.V6 = n.v6.Addr()
		}
		if err := ns.prepare(PodOptions{V6Disabled: !b.nodeV6}); err != nil {
			return err
		}
		*n.ns = ns
	}
	forwarding := []string{"net.ipv4.ip_forward"}
	if b.nodeV6 {
		forwarding = append(forwarding, "net.ipv6.conf.all.forwarding", "net.ipv6.conf.default.forwarding")
	}
	for _, name := range forwarding {
		if err := b.Node.SetSysctl(name, "1"); err != nil {
			return err
		}
	}
	if err := b.Node.connect(b.Node.Link, b.Outside); err != nil {
		return err
	}
	node, err := b.Node.Handle()
	if err != nil {
		return err
	}
	defer node.Close()
	outside, err := b.Outside.Handle()
	if err != nil {
		return err
	}
	defer outside.Close()
	if b.opts.Bridge {
		if err := b.makeBridge(node); err != nil {
			return err
		}
	}
	var errs []error
	for _, p := range b.families(nodeV4, nodeV6) {
		errs = append(errs, addAddr(node, b.Node.Link, p))
	}
	for _, p := range b.families(outsideV4, outsideV6) {
		errs = append(errs, addAddr(outside, b.Outside.Link, p))
	}
	errs = append(errs, addRoute(outside, b.Outside.Link, anyV4, nodeV4.Addr()))
	if b.nodeV6 {
		errs = append(errs, addRoute(outside, b.Outside.Link, anyV6, nodeV6.Addr()))
	}
	errs = append(errs, waitUp(node, b.Node.Link, b.nodeV6), waitUp(outside, b.Outside.Link, b.nodeV6))
	return errors.Join(errs...)
}

// prepare sets the sysctls that must stand before links are there, and brings lo up.
func (n *NS) prepare(opts PodOptions) error {
	// Without duplicate address detection and router solicitation an address is usable at once and a namespace that
	// nobody touches does not change. 3 lets tests use TCP Fast Open on both sides.
	sysctls := [][2]string{{"net.ipv4.tcp_fastopen", "3"}}
	if HasIPv6() {
		sysctls = append(sysctls,
			[2]string{"net.ipv6.conf.all.accept_dad", "0"},
			[2]string{"net.ipv6.conf.default.accept_dad", "0"},
			[2]string{"net.ipv6.conf.default.accept_ra", "0"},
			[2]string{"net.ipv6.conf.default.router_solicitations", "0"})
	}
	if opts.V6Disabled && HasIPv6() {
		sysctls = append(sysctls,
			[2]string{"net.ipv6.conf.all.disable_ipv6", "1"},
			[2]string{"net.ipv6.conf.default.disable_ipv6", "1"},
			[2]string{"net.ipv6.conf.lo.disable_ipv6", "1"})
	}
	for _, s := range sysctls {
		if err := n.SetSysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	if opts.LoDown {
		return nil
	}
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	return setUp(h, "lo")
}

// connect makes a veth pair with one end here and the other as peer's Link, both up.
func (n *NS) connect(name string, peer *NS) error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	p, err := peer.Handle()
	if err != nil {
		return err
	}
	defer p.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	veth := netlink.NewVeth(attrs)
	veth.PeerName = peer.Link
	veth.PeerNamespace = netlink.NsFd(int(peer.file.Fd()))
	if err := h.LinkAdd(veth); err != nil {
		return fmt.Errorf("make a veth pair between netns %s and %s: %w", n.Name, peer.Name, err)
	}
	return errors.Join(setUp(p, peer.Link), setUp(h, name))
}

func (b *Bed) makeBridge(h *netlink.Handle) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = bridgeName
	if err := h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return fmt.Errorf("make bridge %s (needs a kernel with bridges): %w", bridgeName, err)
	}
	var errs []error
	for _, gateway := range b.families(gatewayV4, gatewayV6) {
		errs = append(errs, addAddr(h, bridgeName, gateway))
	}
	return errors.Join(append(errs, setUp(h, bridgeName))...)
}

func enslave(h *netlink.Handle, link, bridge string) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s: %w", link, err)
	}
	m, err := h.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("find link %s: %w", bridge, err)
	}
	if err := h.LinkSetMaster(l, m); err != nil {
		return fmt.Errorf("put link %s into bridge %s: %w", link, bridge, err)
	}
	return nil
}

func setUp(h *netlink.Handle, link string) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s: %w", link, err)
	}
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("bring link %s up: %w", link, err)
	}
	return nil
}

func addAddr(h *netlink.Handle, link string, p netip.Prefix) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s: %w", link, err)
	}
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD
	}
	if err := h.AddrAdd(l, a); err != nil {
		return fmt.Errorf("add address %s to link %s: %w", p, link, err)
	}
	return nil
}

// addRoute adds a route by way of a gateway, or straight to the link when there is none.
func addRoute(h *netlink.Handle, link string, dst netip.Prefix, gateway netip.Addr) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return fmt.Errorf("find link %s: %w", link, err)
	}
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(dst), Scope: netlink.SCOPE_UNIVERSE}
	if gateway.IsValid() {
		r.Gw = gateway.AsSlice()
	} else {
		r.Scope = netlink.SCOPE_LINK
	}
	if err := h.RouteAdd(r); err != nil {
		return fmt.Errorf("add route to %s on link %s: %w", dst, link, err)
	}
	return nil
}

// WaitUp waits until a link that somebody has made in the namespace is usable, with the IPv6 addresses that it has.
func (n *NS) WaitUp(link string) error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	return waitUp(h, link, true)
}

// waitUp waits until the link has a carrier and the kernel has done all that it does for its IPv6 addresses behind
// the scenes: the link-local one that comes with the carrier, and the local route of each, without which nothing is
// received. A link without IPv6 has v6 false.
func waitUp(h *netlink.Handle, link string, v6 bool) error {
	deadline := time.Now().Add(linkPatience)
	for {
		missing, err := notYet(h, link, v6)
		switch {
		case errors.Is(err, netlink.ErrDumpInterrupted): // look again
		case err != nil:
			return fmt.Errorf("wait for link %s: %w", link, err)
		case missing == "":
			// What goes with the last of these routes (a router's anycast address) is done under the same lock, which this
			// waits for.
			return setUp(h, link)
		case time.Now().After(deadline):
			return fmt.Errorf("link %s is not usable after %s: %s", link, linkPatience, missing)
		}
		time.Sleep(time.Millisecond)
	}
}

// notYet says what keeps the link from being usable; nothing if it is.
func notYet(h *netlink.Handle, link string, v6 bool) (string, error) {
	l, err := h.LinkByName(link)
	if err != nil {
		return "", err
	}
	if state := l.Attrs().OperState; state != netlink.OperUp {
		return "its state is " + state.String(), nil
	}
	if !v6 {
		return "", nil
	}
	addrs, err := h.AddrList(l, netlink.FAMILY_V6)
	if err != nil {
		return "", err
	}
	routes, err := h.RouteListFiltered(netlink.FAMILY_V6,
		&netlink.Route{Table: unix.RT_TABLE_LOCAL, LinkIndex: l.Attrs().Index}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF)
	if err != nil {
		return "", err
	}
	linkLocal := false
	for _, a := range addrs {
		linkLocal = linkLocal || a.IP.IsLinkLocalUnicast()
		if a.Flags&unix.IFA_F_TENTATIVE != 0 {
			return fmt.Sprintf("address %s is tentative", a.IP), nil
		}
		if !slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst != nil && r.Dst.IP.Equal(a.IP) }) {
			return fmt.Sprintf("address %s has no local route", a.IP), nil
		}
	}
	if !linkLocal {
		return "it has no link-local address", nil
	}
	return "", nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// single is the prefix of the one address of p.
func single(p netip.Prefix) netip.Prefix {
	return netip.PrefixFrom(p.Addr(), p.Addr().BitLen())
}

// nth returns the address n after that of p.
func nth(p netip.Prefix, n int) netip.Addr {
	a := p.Addr()
	for range n {
		a = a.Next()
	}
	return a
}
