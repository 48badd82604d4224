// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/netdump"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// What enrolment adds to a pod's routing. One rule per family sends the local marks (0x112 CAPTURE, 0x111 REPLY and 0x113 ACCEPT
// of bpf/redirector.h) to a table that delivers everything to this very namespace, by lo. What comes by TCP from machines behind
// the pod is sent there too, by a rule per interface; and then there is one that has the proxy's answers to them take the pod's
// main table, as long as they are for no address of the pod's.
const (
	ruleMark   = 0x110
	ruleMask   = 0xffc
	acceptMark = 0x113
	acceptMask = 0xfff
	// These priorities come before any rule that a pod usually has, but for the one of the local table.
	acceptPriority = 1
	rulePriority   = 2
	// routeProtocol marks our rules and routes as ours: a number that rtnetlink.h leaves to administrators.
	routeProtocol = 0x72
	// firstTable is where to look for a routing table that the pod does not use. It is beyond what people choose by hand.
	firstTable = 0x72647200
	tables     = 16
)

// netlinkTimeout is how long an answer of the kernel may take.
const netlinkTimeout = 10 * time.Second

// families are the address families of rules and routes.
var families = []int{unix.AF_INET, unix.AF_INET6}

func familyName(family int) string {
	if family == unix.AF_INET {
		return "IPv4"
	}
	return "IPv6"
}

// podNet is a pod's network namespace, open for changes.
type podNet struct {
	ns     *podns.NetNS
	handle *netlink.Handle
	// links are the interfaces that need a seal: all but lo.
	links []netlink.Link
	loUp  bool
	// ipv6 says whether the kernel has IPv6 here at all, ipv6Lo whether the loopback device does.
	ipv6, ipv6Lo bool
}

// openPodNet opens a netlink socket in the namespace.
func openPodNet(ns *podns.NetNS) (*podNet, error) {
	n := &podNet{ns: ns}
	err := ns.Do(func() (err error) {
		if n.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return fmt.Errorf("open a netlink socket in %s: %w", ns.Path(), err)
		}
		// The kernel answers at once, unless something is badly wrong; that must not hold up other pods.
		if err := n.handle.SetSocketTimeout(netlinkTimeout); err != nil {
			return fmt.Errorf("bound the wait for answers of netlink in %s: %w", ns.Path(), err)
		}
		disabled, err := readSysctl("net/ipv6/conf/lo/disable_ipv6")
		n.ipv6 = err == nil
		n.ipv6Lo = n.ipv6 && disabled == "0"
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	if err == nil {
		err = n.listLinks()
	}
	if err != nil {
		n.close()
		return nil, fmt.Errorf("look at network namespace %s: %w", ns.Path(), err)
	}
	return n, nil
}

func (n *podNet) close() {
	if n.handle != nil {
		n.handle.Close()
	}
}

// addRouting adds the rules and the route of one family and returns how to undo that: nil if all were there. reroute names the
// interfaces of machines behind the pod, be they there or not.
func (n *podNet) addRouting(family int, reroute []string) (undo func() error, err error) {
	if family == unix.AF_INET6 && !n.ipv6 {
		return nil, nil
	}
	if !n.loUp {
		return nil, fmt.Errorf("the loopback device of %s is down: bring it up with `ip link set lo up`", n.ns.Path())
	}
	table, err := n.findTable(family)
	if err != nil {
		return nil, err
	}

	var undos undoList
	fail := func(err error) (func() error, error) { return nil, errors.Join(err, undos.run()) }
	route := localRoute(family, table)
	switch err := n.handle.RouteAdd(route); {
	case err == nil:
		undos.add(func() error { return n.handle.RouteDel(route) })
	case errors.Is(err, unix.EEXIST):
	case family == unix.AF_INET6 && !n.ipv6Lo:
		// Without IPv6 on lo there is no such route. The rule alone makes the kernel look further, and then the seal
		// drops what it finds; when IPv6 comes to lo, its address does, and with that event we come here again.
	default:
		return fail(fmt.Errorf("add the %s route to lo in table %d: %w", familyName(family), table, err))
	}

	for _, rule := range rules(family, table, reroute) {
		switch err := n.handle.RuleAdd(rule); {
		case err == nil:
			undos.add(func() error { return n.handle.RuleDel(rule) })
		case errors.Is(err, unix.EEXIST):
		default:
			return fail(fmt.Errorf("add the %s rule for %s: %w", familyName(family), about(rule), err))
		}
	}
	return undos.orNil(), nil
}

// about says what a rule of ours is there for.
func about(rule *netlink.Rule) string {
	switch {
	case rule.IifName != "":
		return "machines behind " + rule.IifName
	case rule.Mark == acceptMark:
		return "answers to machines"
	default:
		return "marked connections"
	}
}

// ours says whether a rule is one that enrolment adds.
func ours(rule *netlink.Rule) bool {
	return rule.Protocol == routeProtocol &&
		(rule.Mark == ruleMark || rule.Mark == acceptMark || rule.Mark == 0 && rule.IifName != "" && rule.IPProto == unix.IPPROTO_TCP)
}

// dropRules removes rules of interfaces that are gone and are not to be rerouted. Those of an interface that is there stay when it
// is to be rerouted no more: connections that the proxy has through it go on.
func (n *podNet) dropRules(family int, reroute []string) error {
	if family == unix.AF_INET6 && !n.ipv6 {
		return nil
	}
	return n.removeRules(family, func(r *netlink.Rule) bool {
		there := func(l netlink.Link) bool { return l.Attrs().Name == r.IifName }
		return r.IifName != "" && !slices.Contains(reroute, r.IifName) && !slices.ContainsFunc(n.links, there)
	})
}

// listRules lists all rules.
func (n *podNet) listRules(family int) ([]netlink.Rule, error) {
	return netdump.Whole(func() ([]netlink.Rule, error) { return n.handle.RuleList(family) })
}

// removeRules removes those of our rules that are to go.
func (n *podNet) removeRules(family int, goes func(*netlink.Rule) bool) error {
	list, err := n.listRules(family)
	if err != nil {
		return fmt.Errorf("list the %s rules: %w", familyName(family), err)
	}
	var errs []error
	for _, r := range list {
		if !ours(&r) || !goes(&r) {
			continue
		}
		r.Family = family
		if err := n.handle.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove the %s rule for %s: %w", familyName(family), about(&r), err))
		}
	}
	return errors.Join(errs...)
}

// findTable returns a routing table with nothing in it but what is ours.
func (n *podNet) findTable(family int) (int, error) {
	for table := firstTable; table < firstTable+tables; table++ {
		routes, err := n.routesIn(family, table)
		if err != nil {
			return 0, err
		}
		foreign := false
		for _, r := range routes {
			foreign = foreign || r.Protocol != routeProtocol
		}
		if !foreign {
			return table, nil
		}
	}
	return 0, fmt.Errorf("%s has routes of its own in all tables from %d to %d: remove them from one", n.ns.Path(), firstTable, firstTable+tables-1)
}

// listRoutes lists the routes that are like one.
func (n *podNet) listRoutes(family int, like *netlink.Route, by uint64) ([]netlink.Route, error) {
	return netdump.Whole(func() ([]netlink.Route, error) { return n.handle.RouteListFiltered(family, like, by) })
}

// routesIn lists the routes of a table.
func (n *podNet) routesIn(family, table int) ([]netlink.Route, error) {
	routes, err := n.listRoutes(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("list the %s routes of table %d: %w", familyName(family), table, err)
	}
	return routes, nil
}

// removeRouting removes our rules and routes of one family, wherever they are.
func (n *podNet) removeRouting(family int) error {
	if family == unix.AF_INET6 && !n.ipv6 {
		return nil
	}
	errs := []error{n.removeRules(family, func(*netlink.Rule) bool { return true })}
	routes, err := n.listRoutes(family, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("list the %s routes: %w", familyName(family), err))...)
	}
	for _, r := range routes {
		if !ourTable(r.Table) {
			continue
		}
		if err := n.handle.RouteDel(localRoute(family, r.Table)); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove the %s route to lo in table %d: %w", familyName(family), r.Table, err))
		}
	}
	return errors.Join(errs...)
}

// localRoute is `local default dev lo`: whatever the destination, it is here.
func localRoute(family, table int) *netlink.Route {
	everything := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if family == unix.AF_INET6 {
		everything = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &netlink.Route{
		Family:    family,
		LinkIndex: 1, // lo, in every network namespace
		Dst:       everything,
		Scope:     netlink.SCOPE_HOST,
		Type:      unix.RTN_LOCAL,
		Protocol:  routeProtocol,
		Table:     table,
	}
}

// rules are those of one family: the one for marks, and if there are interfaces to reroute, those for machines behind them.
func rules(family, table int, reroute []string) []*netlink.Rule {
	rule := func(priority, table int, mark, mask uint32) *netlink.Rule {
		r := netlink.NewRule()
		r.Family, r.Priority, r.Table, r.Protocol = family, priority, table, routeProtocol
		if mark != 0 {
			r.Mark, r.Mask = mark, &mask
		}
		return r
	}
	all := []*netlink.Rule{rule(rulePriority, table, ruleMark, ruleMask)}
	if len(reroute) > 0 {
		all = append(all, rule(acceptPriority, unix.RT_TABLE_MAIN, acceptMark, acceptMask))
	}
	for _, name := range reroute {
		r := rule(rulePriority, table, 0, 0)
		r.IifName, r.IPProto = name, unix.IPPROTO_TCP
		all = append(all, r)
	}
	return all
}

// look notes what is so now and enrolment may change.
func (n *podNet) look(open *openSysctls) (was before, err error) {
	for _, l := range n.links {
		was.Links = append(was.Links, l.Attrs().Index)
	}
	if was.Clsact, err = loader.HasClsact(n.handle); err != nil {
		return was, err
	}
	was.Restore, err = open.zero(n.ns, n.ipv6)
	return was, err
}

// addrs lists the addresses of all interfaces, with the index of the interface that carries each.
func (n *podNet) addrs() (map[netip.Addr]int, error) {
	list, err := netdump.Whole(func() ([]netlink.Addr, error) { return n.handle.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list the addresses of %s: %w", n.ns.Path(), err)
	}
	addrs := make(map[netip.Addr]int, len(list))
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			addrs[ip.Unmap()] = a.LinkIndex
		}
	}
	return addrs, nil
}

func (n *podNet) listLinks() error {
	links, err := netdump.Whole(n.handle.LinkList)
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Attrs().Flags&net.FlagLoopback == 0 {
			n.links = append(n.links, l)
		} else {
			n.loUp = l.Attrs().Flags&net.FlagUp != 0
		}
	}
	return nil
}

// onlyInterface is the name of the interface besides lo, if there is exactly one.
func (n *podNet) onlyInterface() string {
	if len(n.links) != 1 {
		return ""
	}
	return n.links[0].Attrs().Name
}

// exit is the interface to bind the proxy's connections out to, so that they take no local route: one over which the pod is
// reached. It is empty if there is no interface, or no route by which something is local that is no address of the pod's.
func (n *podNet) exit(ips []netip.Addr, own map[netip.Addr]int) (string, error) {
	if len(n.links) == 0 {
		return "", nil
	}
	for _, family := range families {
		if family == unix.AF_INET6 && !n.ipv6 {
			continue
		}
		back, err := n.leadsBack(family, own)
		if err != nil {
			return "", err
		}
		if back {
			return n.mainLink(ips, own).Attrs().Name, nil
		}
	}
	return "", nil
}

// leadsBack says whether routes or rules of the pod's make more local than its addresses.
func (n *podNet) leadsBack(family int, own map[netip.Addr]int) (bool, error) {
	routes, err := n.listRoutes(family, &netlink.Route{Type: unix.RTN_LOCAL}, netlink.RT_FILTER_TYPE|netlink.RT_FILTER_TABLE)
	if err != nil {
		return false, fmt.Errorf("list the local %s routes of %s: %w", familyName(family), n.ns.Path(), err)
	}
	for _, r := range routes {
		if r.Protocol == routeProtocol && ourTable(r.Table) {
			continue
		}
		if r.Dst == nil {
			return true, nil
		}
		ip, _ := netip.AddrFromSlice(r.Dst.IP)
		ones, bits := r.Dst.Mask.Size()
		ip = ip.Unmap()
		if _, known := own[ip]; !ip.IsLoopback() && (!known || ones < bits) {
			return true, nil
		}
	}
	rules, err := n.listRules(family)
	if err != nil {
		return false, fmt.Errorf("list the %s rules of %s: %w", familyName(family), n.ns.Path(), err)
	}
	return slices.ContainsFunc(rules, func(r netlink.Rule) bool {
		if r.IifName != "" && r.IifName != "lo" {
			return false // about what comes in
		}
		return ourTable(r.Table) && (r.Mark != ruleMark || r.Mask == nil || *r.Mask != ruleMask)
	}), nil
}

// carryNone returns the interfaces that have none of these addresses, and that packets come in by: those that are part of a bridge
// or a bond, say, come in by that. As long as none has any of the addresses, it is not known which.
func (n *podNet) carryNone(ips []netip.Addr, own map[netip.Addr]int) []netlink.Link {
	carry := map[int]bool{}
	for _, ip := range ips {
		if index, ok := own[ip.Unmap()]; ok {
			carry[index] = true
		}
	}
	if len(carry) == 0 {
		return nil
	}
	separate := map[int]bool{0: true}
	for _, l := range n.links {
		separate[l.Attrs().Index] = l.Type() == "vrf"
	}
	return slices.DeleteFunc(slices.Clone(n.links), func(l netlink.Link) bool {
		return carry[l.Attrs().Index] || !separate[l.Attrs().MasterIndex]
	})
}

func ourTable(table int) bool { return table >= firstTable && table < firstTable+tables }

// mainLink is the interface with the addresses that the pod was enrolled with, or with the first of its global ones, or the first
// of all; there is one.
func (n *podNet) mainLink(ips []netip.Addr, own map[netip.Addr]int) netlink.Link {
	for _, ip := range ips {
		is := func(l netlink.Link) bool { return l.Attrs().Index == own[ip.Unmap()] }
		if i := slices.IndexFunc(n.links, is); i >= 0 {
			return n.links[i]
		}
	}
	for _, l := range n.links {
		for addr, index := range own {
			if index == l.Attrs().Index && addr.IsGlobalUnicast() {
				return l
			}
		}
	}
	return n.links[0]
}

// strip removes from a namespace all that enrolment may have put there, and makes it as it was. It goes on after a
// failure. What is absent is no failure.
func strip(ns *podns.NetNS, was before) error {
	n, err := openPodNet(ns)
	if err != nil {
		return err
	}
	defer n.close()
	var errs []error
	for _, l := range n.links {
		errs = append(errs, loader.Unseal(n.handle, l))
		if index := l.Attrs().Index; slices.Contains(was.Links, index) && !slices.Contains(was.Clsact, index) {
			errs = append(errs, loader.RemoveUnusedClsact(n.handle, l))
		}
	}
	errs = append(errs, restoreSysctls(ns, n.ipv6, was.Restore))
	for _, family := range families {
		errs = append(errs, n.removeRouting(family))
	}
	return errors.Join(errs...)
}

// undoList remembers how to undo what was done, to be run in reverse.
type undoList []func() error

func (u *undoList) add(undo func() error) {
	if undo != nil {
		*u = append(*u, undo)
	}
}

// orNil returns run, or nil if there is nothing to undo.
func (u *undoList) orNil() func() error {
	if len(*u) == 0 {
		return nil
	}
	return u.run
}

// run undoes everything, the last first, and returns what went wrong with it.
func (u *undoList) run() error {
	var errs []error
	for _, undo := range slices.Backward(*u) {
		errs = append(errs, undo())
	}
	*u = nil
	return errors.Join(errs...)
}
