// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func snapshot(t *testing.T, ns *NS) string {
	t.Helper()
	s, err := ns.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSnapshotDoesNotChangeByTraffic(t *testing.T) {
	for _, opts := range []Options{{}, {Bridge: true}} {
		t.Run(fmt.Sprintf("bridge=%v", opts.Bridge), func(t *testing.T) {
			b := newBed(t, opts)
			p, other := pod(t, b, "a", PodOptions{}), pod(t, b, "b", PodOptions{})
			all := []*NS{p, other, b.Node, b.Outside}
			before := map[*NS]string{}
			for _, ns := range all {
				before[ns] = snapshot(t, ns)
			}
			for _, server := range all {
				app := serve(t, server, AppOptions{Listen: ListenOptions{FastOpen: true}})
				for range 3 {
					for _, addr := range []netip.Addr{server.V4, server.V6} {
						checkConnection(t, p, DialSpec{
							Remote: addrPort(addr, app.Port), FastOpen: FastOpenSendto, Data: []byte("x"),
						}, netip.Addr{})
					}
				}
			}
			for _, ns := range all {
				if diff := cmp.Diff(strings.Split(before[ns], "\n"), strings.Split(snapshot(t, ns), "\n")); diff != "" {
					t.Errorf("%s differs:\n%s", ns.Name, diff)
				}
			}
		})
	}
}

func TestSnapshotShowsEveryKindOfChange(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	h, err := p.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	lo, err := h.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	clsact := func(link netlink.Link) *netlink.Clsact {
		return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}}
	}
	tc := program(t, ebpf.SchedCLS, ebpf.AttachNone)
	filter := func(parent uint32) *netlink.BpfFilter {
		return &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: eth0.Attrs().Index, Parent: parent, Handle: 1, Priority: 7, Protocol: unix.ETH_P_ALL,
			},
			Fd: tc.FD(), Name: "seal", DirectAction: true,
		}
	}
	rule := func(family int) *netlink.Rule {
		r := netlink.NewRule()
		mask := uint32(0xffc)
		r.Family, r.Priority, r.Mark, r.Mask, r.Table = family, 9, 0x110, &mask, 9000
		return r
	}
	route := func(dst string, table int) *netlink.Route {
		return &netlink.Route{
			LinkIndex: lo.Attrs().Index, Dst: ipNet(netip.MustParsePrefix(dst)), Table: table, Type: unix.RTN_LOCAL,
			Scope: netlink.SCOPE_HOST,
		}
	}
	addr := &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("10.77.0.1/32"))}
	neighbour := &netlink.Neigh{
		LinkIndex: eth0.Attrs().Index, State: netlink.NUD_PERMANENT, IP: netip.MustParseAddr("10.88.1.99").AsSlice(),
		HardwareAddr: eth0.Attrs().HardwareAddr,
	}
	sysctl := func(name, value string) func() error {
		return func() error { return p.SetSysctl(name, value) }
	}

	for _, c := range []struct {
		name     string
		do, undo func() error
		line     string // begins a line that is new
	}{
		{"rule", func() error { return h.RuleAdd(rule(unix.AF_INET)) }, func() error { return h.RuleDel(rule(unix.AF_INET)) },
			"rule inet "},
		{"rule v6", func() error { return h.RuleAdd(rule(unix.AF_INET6)) }, func() error { return h.RuleDel(rule(unix.AF_INET6)) },
			"rule inet6 "},
		{"route of another table", func() error { return h.RouteAdd(route("0.0.0.0/0", 9000)) },
			func() error { return h.RouteDel(route("0.0.0.0/0", 9000)) }, "route inet "},
		{"route of another table, v6", func() error { return h.RouteAdd(route("::/0", 9000)) },
			func() error { return h.RouteDel(route("::/0", 9000)) }, "route inet6 "},
		{"route of the local table", func() error { return h.RouteAdd(route("10.9.9.0/24", unix.RT_TABLE_LOCAL)) },
			func() error { return h.RouteDel(route("10.9.9.0/24", unix.RT_TABLE_LOCAL)) }, "route inet "},
		{"address", func() error { return h.AddrAdd(lo, addr) }, func() error { return h.AddrDel(lo, addr) }, "address inet dev lo "},
		{"neighbour", func() error { return h.NeighAdd(neighbour) }, func() error { return h.NeighDel(neighbour) },
			"neighbour inet dev eth0 "},
		{"mtu", func() error { return h.LinkSetMTU(eth0, 1400) }, func() error { return h.LinkSetMTU(eth0, 1500) }, "link eth0 "},
		{"link", func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "late0"
			veth := netlink.NewVeth(attrs)
			veth.PeerName = "late1"
			return h.LinkAdd(veth)
		}, func() error { return delLink(h, "late0") }, "link late0 "},
		{"sysctl v4", sysctl("net.ipv4.tcp_fwmark_accept", "1"), sysctl("net.ipv4.tcp_fwmark_accept", "0"),
			"sysctl net.ipv4.tcp_fwmark_accept = 1"},
		{"sysctl v6", sysctl("net.ipv6.fwmark_reflect", "1"), sysctl("net.ipv6.fwmark_reflect", "0"),
			"sysctl net.ipv6.fwmark_reflect = 1"},
		{"sysctl of a link", sysctl("net.ipv4.conf.eth0.src_valid_mark", "1"), sysctl("net.ipv4.conf.eth0.src_valid_mark", "0"),
			"sysctl net.ipv4.conf.eth0.src_valid_mark = 1"},
		{"qdisc of lo", func() error { return h.QdiscAdd(clsact(lo)) }, func() error { return h.QdiscDel(clsact(lo)) },
			"qdisc dev lo "},
		{"egress filter", func() error {
			if err := h.QdiscAdd(clsact(eth0)); err != nil {
				return err
			}
			return h.FilterAdd(filter(netlink.HANDLE_MIN_EGRESS))
		}, func() error { return h.QdiscDel(clsact(eth0)) }, "filter dev eth0 handle 1 parent fffffff3 priority 7 protocol 0x0003"},
		{"ingress filter", func() error {
			if err := h.QdiscAdd(clsact(eth0)); err != nil {
				return err
			}
			return h.FilterAdd(filter(netlink.HANDLE_MIN_INGRESS))
		}, func() error { return h.QdiscDel(clsact(eth0)) }, "filter dev eth0 handle 1 parent fffffff2 priority 7 protocol 0x0003"},
		attachment(t, p, "sk_lookup", ebpf.SkLookup, ebpf.AttachSkLookup),
	} {
		t.Run(c.name, func(t *testing.T) {
			before := snapshot(t, p)
			if again := snapshot(t, p); again != before {
				t.Fatalf("two snapshots differ:\n%s", cmp.Diff(strings.Split(before, "\n"), strings.Split(again, "\n")))
			}
			if err := c.do(); err != nil {
				t.Fatal(err)
			}
			changed := snapshot(t, p)
			if !hasNewLine(before, changed, c.line) {
				t.Errorf("no new line begins with %q:\n%s", c.line, cmp.Diff(strings.Split(before, "\n"), strings.Split(changed, "\n")))
			}
			if err := c.undo(); err != nil {
				t.Fatal(err)
			}
			if after := snapshot(t, p); after != before {
				t.Errorf("undone, it differs from before:\n%s", cmp.Diff(strings.Split(before, "\n"), strings.Split(after, "\n")))
			}
		})
	}
}

func hasNewLine(before, after, prefix string) bool {
	for line := range strings.Lines(after) {
		if strings.HasPrefix(line, prefix) && !strings.Contains(before, line) {
			return true
		}
	}
	return false
}

func delLink(h *netlink.Handle, name string) error {
	l, err := h.LinkByName(name)
	if err != nil {
		return err
	}
	return h.LinkDel(l)
}

// program loads a program that does nothing.
func program(t *testing.T, typ ebpf.ProgramType, attach ebpf.AttachType) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: typ, AttachType: attach, License: "Apache-2.0",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// attachment is the change of attaching a program to the namespace.
func attachment(t *testing.T, ns *NS, name string, typ ebpf.ProgramType, attach ebpf.AttachType) struct {
	name     string
	do, undo func() error
	line     string
} {
	p := program(t, typ, attach)
	var l *link.NetNsLink
	return struct {
		name     string
		do, undo func() error
		line     string
	}{
		name,
		func() error {
			var err error
			l, err = link.AttachNetNs(int(ns.file.Fd()), p)
			return err
		},
		func() error { return l.Close() },
		"netns " + name + " programs 1",
	}
}
