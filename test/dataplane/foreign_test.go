// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The first two of the routing tables that an enrolment looks for a free one in.
const (
	firstTable  = 0x72647200
	secondTable = firstTable + 1
)

// foreignRouting is what a pod's own software may put beside what enrolment does: rules of the same priority, and routes in a table.
func foreignRouting(link, table int) (rules []*netlink.Rule, routes []*netlink.Route) {
	for family, to := range map[int]netip.Prefix{
		unix.AF_INET: netip.MustParsePrefix("192.0.2.0/24"), unix.AF_INET6: netip.MustParsePrefix("2001:db8:1::/64"),
	} {
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Mark, rule.Table = family, 2, uint32(table), 100
		rules = append(rules, rule)
		routes = append(routes, &netlink.Route{
			Family: family, LinkIndex: link, Table: table, Protocol: unix.RTPROT_STATIC,
			Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())},
		})
	}
	return rules, routes
}

// What others have of rules and routes stays: beside what enrolment adds, when that is put back, and when it goes. Nor does it keep
// enrolment from its own.
func TestRulesAndRoutesOfOthersStay(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	pod := s.newPod(t)
	s.serve(pod, evasionPort, bed.AppOptions{})
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	link := linkOf(t, pod, pod.Link).Attrs().Index
	change := func(table int, rule func(*netlink.Rule) error, route func(*netlink.Route) error) {
		t.Helper()
		var errs []error
		rules, routes := foreignRouting(link, table)
		for _, r := range rules {
			errs = append(errs, rule(r))
		}
		for _, r := range routes {
			errs = append(errs, route(r))
		}
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	snapshot := func() string {
		t.Helper()
		all, err := pod.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	// Something is there before enrolment, and more comes after it, also into the table that enrolment has found free.
	change(firstTable, h.RuleAdd, h.RouteAdd)
	change(secondTable, h.RuleAdd, h.RouteAdd)
	want := snapshot()
	change(secondTable, h.RuleDel, h.RouteDel)

	alone := func() {
		t.Helper()
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			want := &netlink.Route{Protocol: 0x72, Table: firstTable}
			routes, err := h.RouteListFiltered(family, want, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
			if err != nil || len(routes) > 0 {
				t.Errorf("the table of others has the routes %v of enrolment's, %v", routes, err)
			}
		}
	}
	s.enrolPod(t, pod)
	alone()
	change(secondTable, h.RuleAdd, h.RouteAdd)
	s.bothWays(t, pod)
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		before := s.repairs(t, enroll.RepairRouting)
		removeOurs(t, h, family)
		eventually(t, "what enrolment has added is put back", func() bool { return s.repairs(t, enroll.RepairRouting) > before })
		alone()
		s.bothWays(t, pod)
	}
	if err := s.agent.client.Unenroll(t.Context(), "uid-"+pod.Name); err != nil {
		t.Fatal(err)
	}
	if after := snapshot(); after != want {
		t.Errorf("what others have is not as it was: %s", cmp.Diff(want, after))
	}
}

// removeOurs removes all rules and routes of one family that enrolment has added.
func removeOurs(t *testing.T, h *netlink.Handle, family int) {
	t.Helper()
	rules, errRules := h.RuleList(family)
	routes, errRoutes := h.RouteListFiltered(family, &netlink.Route{Protocol: 0x72}, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
	errs := []error{errRules, errRoutes}
	removed := 0
	for _, r := range rules {
		if r.Mark == 0x110 {
			r.Family = family
			errs = append(errs, h.RuleDel(&r))
			removed++
		}
	}
	for _, r := range routes {
		errs = append(errs, h.RouteDel(&r))
		removed++
	}
	if err := errors.Join(errs...); err != nil || removed < 2 {
		t.Fatalf("%d rules and routes are removed, %v", removed, err)
	}
}
