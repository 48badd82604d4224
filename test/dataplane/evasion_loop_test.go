// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// An address that the node routes to the pod, and that the pod has by a route only, as some load balancers do it, would lead the
// proxy that connects to it back to itself.
func TestAnAddressThatLeadsBackMakesNoLoop(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		a := s.newAttempt(t, family)
		s.enrolPod(t, a.pod)
		a.enrolled = true
		anyIP(t, a)
		a.local = netip.AddrPortFrom(addr(s.Outside, family), a.local.Port())
		a.open(t, s.Outside)
		_ = connectWithin(a.socket, a.remote, evasionPatience)
		time.Sleep(time.Second)
		if got := len(s.proxy.connections()); got > 1 {
			t.Errorf("a peer has made one connection, and the proxy has seen %d", got)
		}
		if s.counter(t, a.pod, "unowned_dropped") == 0 {
			t.Errorf("it is not counted: %+v", s.podStatus(t, a.pod).Counters)
		}
	})
}

// What a pod makes local by a route of its own, and what it sends by our table, leads the proxy back to where the app's
// connections come from. It is not followed, whatever source address the route gives.
func TestALocalRouteOfThePodsMakesNoLoop(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	prefixes := map[string]string{"IPv4": "192.0.2.0/24", "IPv6": "2001:db8:2::/64"}
	prefix := func(a *attempt) *net.IPNet {
		p := netip.MustParsePrefix(prefixes[a.family])
		return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	}
	for name, lead := range map[string]func(t *testing.T, a *attempt, h *netlink.Handle){
		"a prefix": func(t *testing.T, a *attempt, h *netlink.Handle) {
			localRoute(t, h, 1, prefix(a), nil)
		},
		"one address": func(t *testing.T, a *attempt, h *netlink.Handle) {
			localRoute(t, h, 1, hostNet(a.remote.Addr()), nil)
		},
		"a prefix with a source": func(t *testing.T, a *attempt, h *netlink.Handle) {
			localRoute(t, h, 1, prefix(a), addr(a.pod, a.family).AsSlice())
		},
		"a prefix on the interface": func(t *testing.T, a *attempt, h *netlink.Handle) {
			localRoute(t, h, linkOf(t, a.pod, a.pod.Link).Attrs().Index, prefix(a), nil)
		},
		"a rule for the proxy's mark": ruleToOurTable,
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) {
				s.t = t
				a := s.newAttempt(t, family)
				s.enrolPod(t, a.pod)
				a.enrolled = true
				a.remote = netip.AddrPortFrom(netip.MustParsePrefix(prefixes[family]).Addr().Next(), evasionPort)
				a.inPod(t, func(t *testing.T, _ *bed.NS, h *netlink.Handle) { lead(t, a, h) })
				time.Sleep(evasionPatience) // for the agent to have seen it
				a.open(t, a.pod)
				_ = connectWithin(a.socket, a.remote, evasionPatience)
				time.Sleep(time.Second)
				if got := s.counter(t, a.pod, "outbound_captured"); got != 1 {
					t.Errorf("the app has made one connection, and %d were captured", got)
				}
				if got := a.proxied(); got > 1 {
					t.Errorf("the app has made one connection, and the proxy has seen %d", got)
				}
			})
		})
	}
}

func localRoute(t *testing.T, h *netlink.Handle, link int, to *net.IPNet, source net.IP) {
	t.Helper()
	route := &netlink.Route{LinkIndex: link, Dst: to, Src: source, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Table: unix.RT_TABLE_LOCAL}
	if err := h.RouteReplace(route); err != nil {
		t.Fatal(err)
	}
}

// ruleToOurTable sends what has the proxy's mark where enrolment sends what is captured.
func ruleToOurTable(t *testing.T, a *attempt, h *netlink.Handle) {
	t.Helper()
	family := unix.AF_INET
	if a.family == "IPv6" {
		family = unix.AF_INET6
	}
	rules, err := h.RuleList(family)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rules {
		if r.Mark != 0x110 {
			continue
		}
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Mark, rule.Table = family, 2, 0x539, r.Table
		if err := h.RuleAdd(rule); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatal("there is no rule of the dataplane's")
}

// proxied is how many connections of the pod the proxy has noted.
func (a *attempt) proxied() (n int) {
	for _, c := range a.proxy.connections() {
		if c.UID == "uid-"+a.pod.Name {
			n++
		}
	}
	return n
}
