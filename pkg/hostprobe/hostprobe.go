// SPDX-License-Identifier: Apache-2.0

// Package hostprobe gives the host the addresses that probes come from: on its loopback device, in the network namespace of
// this process. It touches nothing else there.
package hostprobe

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/netdump"
)

// Addrs are the addresses that probes come from; a zero one is none.
type Addrs struct {
	V4, V6 netip.Addr
}

// Defaults are istio's, so that policies which name them go on working.
var Defaults = Addrs{
	V4: netip.MustParseAddr("169.254.7.127"),
	V6: netip.MustParseAddr("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
}

// ParseV4 and ParseV6 read an address as a flag gives it, and say what is wrong with one that cannot be a probe's source.
func ParseV4(s string) (netip.Addr, error) {
	a, err := parse(s)
	if err == nil && !a.Is4() {
		err = fmt.Errorf("%q is an IPv6 address: use an IPv4 address, as %s", s, Defaults.V4)
	}
	return a, err
}

// ParseV6 is ParseV4 for IPv6.
func ParseV6(s string) (netip.Addr, error) {
	a, err := parse(s)
	if err == nil && !a.Is6() {
		err = fmt.Errorf("%q is an IPv4 address: use an IPv6 address, as %s", s, Defaults.V6)
	}
	return a, err
}

func parse(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil || a.Zone() != "":
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", s)
	case a.Is4In6():
		return netip.Addr{}, fmt.Errorf("%q is a v4-mapped address: write the IPv4 address as it is", s)
	case a.IsMulticast():
		return netip.Addr{}, fmt.Errorf("%q is a multicast address: use one that a host can have", s)
	case a.IsUnspecified(), a.IsLoopback(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return netip.Addr{}, fmt.Errorf("%q cannot be the source of a probe: use an address that nobody else has", s)
	case a.Is6() && a.IsLinkLocalUnicast():
		return netip.Addr{}, fmt.Errorf("%q is an IPv6 link-local address, which pods cannot answer: use one that is routed", s)
	}
	return a, nil
}

// Add puts the addresses on lo, or finds them there. It changes nothing when one belongs to another interface. Where the
// host has no IPv6, it returns no V6.
func Add(want Addrs) (Addrs, error) {
	// Mostly they are there, and this is asked again and again on hosts with an address or more for each pod.
	if onLo, err := listLo(); err == nil && onLo.has(want.V4) && onLo.has(want.V6) {
		return want, nil
	}
	lo, have, err := look()
	if err != nil {
		return Addrs{}, err
	}
	for _, a := range []netip.Addr{want.V4, want.V6} {
		if index, ok := have[a]; ok && index != lo.Attrs().Index {
			name := fmt.Sprintf("interface %d", index)
			if l, err := netlink.LinkByIndex(index); err == nil {
				name = l.Attrs().Name
			}
			return Addrs{}, fmt.Errorf("%s already belongs to %s: use an address that nobody has", a, name)
		}
	}
	var added []netip.Addr
	for _, a := range []*netip.Addr{&want.V4, &want.V6} {
		if _, ok := have[*a]; ok || !a.IsValid() {
			continue
		}
		err := netlink.AddrAdd(lo, onLoopback(*a))
		if a.Is6() && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM)) {
			*a = netip.Addr{} // IPv6 is off here
			continue
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			err = fmt.Errorf("add %s to lo: %w", *a, err)
			for _, a := range added {
				err = errors.Join(err, netlink.AddrDel(lo, onLoopback(a)))
			}
			return Addrs{}, err
		}
		added = append(added, *a)
	}
	return want, nil
}

// Remove takes the addresses off lo. That they are not there is no error.
func Remove(addrs Addrs) error {
	lo, have, err := look()
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range []netip.Addr{addrs.V4, addrs.V6} {
		if index, ok := have[a]; !ok || index != lo.Attrs().Index {
			continue
		}
		if err := netlink.AddrDel(lo, onLoopback(a)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			errs = append(errs, fmt.Errorf("remove %s from lo: %w", a, err))
		}
	}
	return errors.Join(errs...)
}

type addrSet map[netip.Addr]bool

// has says whether the address is in the set, or is none.
func (s addrSet) has(a netip.Addr) bool { return !a.IsValid() || s[a] }

// loIndex is the index of lo in every network namespace.
const loIndex = 1

// listLo returns the addresses of lo. A kernel that checks requests strictly sends no others; that takes as long with 1000 pods as
// with none.
func listLo() (addrSet, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	defer socket.Close()
	if err := unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return nil, fmt.Errorf("have netlink check strictly: %w", err)
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
	about := nl.NewIfAddrmsg(netlink.FAMILY_ALL)
	about.Index = loIndex
	request.AddData(about)
	messages, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWADDR)
	if err != nil {
		return nil, fmt.Errorf("list the addresses of the host's lo: %w", err)
	}
	found := addrSet{}
	for _, m := range messages {
		header := nl.DeserializeIfAddrmsg(m)
		if header.Index != loIndex {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[header.Len():])
		if err != nil {
			return nil, fmt.Errorf("read the addresses of the host's lo: %w", err)
		}
		for _, attr := range attrs {
			if ip, ok := netip.AddrFromSlice(attr.Value); ok && attr.Attr.Type == unix.IFA_ADDRESS {
				found[ip.Unmap()] = true
			}
		}
	}
	return found, nil
}

// look returns lo and the addresses of all interfaces, with their indices.
func look() (netlink.Link, map[netip.Addr]int, error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, nil, fmt.Errorf("find the host's lo: %w", err)
	}
	list, err := netdump.Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, nil, fmt.Errorf("list the host's addresses: %w", err)
	}
	have := map[netip.Addr]int{}
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			have[ip.Unmap()] = a.LinkIndex
		}
	}
	return lo, have, nil
}

func onLoopback(a netip.Addr) *netlink.Addr {
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if a.Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	return addr
}
