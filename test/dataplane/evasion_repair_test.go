// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// removal is something of the agent's that a pod with CAP_NET_ADMIN can take out of its network namespace.
type removal struct {
	name   string
	kind   enroll.Repair
	remove func(t *testing.T, pod *bed.NS, h *netlink.Handle)
}

func removals() []removal {
	rules := func(family int) func(t *testing.T, pod *bed.NS, h *netlink.Handle) {
		return func(t *testing.T, _ *bed.NS, h *netlink.Handle) {
			found, err := h.RuleList(family)
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for _, r := range found {
				if r.Mark == 0x110 {
					r.Family = family
					n++
					if err := h.RuleDel(&r); err != nil {
						t.Fatal(err)
					}
				}
			}
			if n != 1 {
				t.Fatalf("there were %d rules", n)
			}
		}
	}
	routes := func(family int) func(t *testing.T, pod *bed.NS, h *netlink.Handle) {
		return func(t *testing.T, _ *bed.NS, h *netlink.Handle) {
			found, err := h.RouteListFiltered(family, &netlink.Route{Protocol: 0x72}, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
			if err != nil || len(found) != 1 {
				t.Fatalf("there are %d routes, %v", len(found), err)
			}
			if err := h.RouteDel(&found[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	sysctl := func(name string) func(t *testing.T, pod *bed.NS, h *netlink.Handle) {
		return func(t *testing.T, pod *bed.NS, _ *netlink.Handle) {
			if err := pod.SetSysctl(name, "0"); err != nil {
				t.Fatal(err)
			}
		}
	}
	return []removal{
		{"the IPv4 rule", enroll.RepairRouting, rules(unix.AF_INET)},
		{"the IPv6 rule", enroll.RepairRouting, rules(unix.AF_INET6)},
		{"the IPv4 route", enroll.RepairRouting, routes(unix.AF_INET)},
		{"the IPv6 route", enroll.RepairRouting, routes(unix.AF_INET6)},
		{"tcp_fwmark_accept", enroll.RepairSysctl, sysctl("net.ipv4.tcp_fwmark_accept")},
		{"fwmark_reflect", enroll.RepairSysctl, sysctl("net.ipv4.fwmark_reflect")},
		{"fwmark_reflect for IPv6", enroll.RepairSysctl, sysctl("net.ipv6.fwmark_reflect")},
		{"the seal", enroll.RepairSeal, removeSeal},
		{"the seal with its queueing discipline", enroll.RepairSeal, removeClsact},
	}
}

func removeSeal(t *testing.T, pod *bed.NS, h *netlink.Handle) {
	t.Helper()
	filters, err := h.FilterList(linkOf(t, pod, pod.Link), netlink.HANDLE_MIN_EGRESS)
	if err != nil || len(filters) != 1 {
		t.Fatalf("there are %d filters, %v", len(filters), err)
	}
	if err := h.FilterDel(filters[0]); err != nil {
		t.Fatal(err)
	}
}

func removeClsact(t *testing.T, pod *bed.NS, h *netlink.Handle) {
	t.Helper()
	err := h.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: linkOf(t, pod, pod.Link).Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err != nil {
		t.Fatal(err)
	}
}

// triesToLeave has a pod connect outwards, by turns over IPv4 and IPv6. Nothing of it may be on the wire, though something that was
// there was spoilt at start, and may not have been put right yet.
func (s *evasionStage) triesToLeave(t *testing.T, pod *bed.NS, try int, start time.Time) {
	t.Helper()
	family := []string{"IPv4", "IPv6"}[try%2]
	a := &attempt{
		evasionStage: s, pod: pod, family: family, uplink: pod.Link,
		local:  netip.AddrPortFrom(addr(pod, family), s.nextPort()),
		remote: netip.AddrPortFrom(addr(s.Outside, family), evasionPort),
	}
	a.open(t, pod)
	_ = connectWithin(a.socket, a.remote, 50*time.Millisecond)
	if seen := a.onTheWire(t); seen.syn+seen.synAck > 0 {
		t.Errorf("%v after it was spoilt, a connection has left the pod past the proxy", time.Since(start))
	}
}

// What a pod takes out of its network namespace is there again within seconds, and counted. Until then its sockets do not get
// past the proxy.
func TestWhatAPodTakesAwayIsPutBack(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	for _, r := range removals() {
		t.Run(r.name, func(t *testing.T) {
			s.t = t
			pod := s.newPod(t)
			s.enrolPod(t, pod)
			inside := s.serve(pod, evasionPort, bed.AppOptions{})
			h, err := pod.Handle()
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			before := s.repairs(t, r.kind)
			r.remove(t, pod, h)
			start := time.Now()
			for tries := 0; s.repairs(t, r.kind) == before; tries++ {
				if time.Since(start) > 10*time.Second {
					t.Fatal("it is not put back")
				}
				s.triesToLeave(t, pod, tries, start)
			}
			t.Logf("it is there again after %v at most", time.Since(start))
			if n := s.findings(r.kind, pod); n != 1 {
				t.Errorf("it is logged %d times", n)
			}
			eachFamily(t, func(t *testing.T, family string) {
				s.t = t
				p := *s.proxy
				p.t = t
				remote := netip.AddrPortFrom(addr(s.Outside, family), evasionPort)
				_, local := ask(t, pod, bed.DialSpec{Remote: remote})
				p.saw(pod, "outbound", local, remote)
				remote = netip.AddrPortFrom(addr(pod, family), evasionPort)
				_, local = ask(t, s.Outside, bed.DialSpec{Remote: remote})
				p.saw(pod, "inbound", local, remote)
			})
			if inside.Accepts() != 2 {
				t.Errorf("the app has accepted %d connections, want 2", inside.Accepts())
			}
		})
	}
}

// A pod that makes so many changes that they never pause does not keep the agent from looking.
func TestANoisyPodIsRepairedToo(t *testing.T) {
	s := newEvasionStage(t)
	pod := s.newPod(t)
	s.enrolPod(t, pod)
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	lo := linkOf(t, pod, "lo")
	stop := make(chan struct{})
	var noise sync.WaitGroup
	noise.Go(func() {
		address := &netlink.Addr{IPNet: hostNet(netip.MustParseAddr("10.9.9.9"))}
		for {
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
			if err := errors.Join(h.AddrAdd(lo, address), h.AddrDel(lo, address)); err != nil {
				t.Error(err)
				return
			}
		}
	})
	defer noise.Wait()
	defer close(stop)
	own, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	// What is looked at every three seconds anyway would take six for these, by and large.
	const rounds = 4
	start := time.Now()
	for range rounds {
		before := s.repairs(t, enroll.RepairSeal)
		removeSeal(t, pod, own)
		eventually(t, "the seal is there again", func() bool { return s.repairs(t, enroll.RepairSeal) > before })
	}
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("%d repairs took %v", rounds, took)
	}
}

// While the seal is away, what passes by no socket hook gets out: as measured here, for some milliseconds. Then it is counted
// that the seal was missing, and nothing gets out.
func TestTheSealIsSoonThereAgain(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	for name, breakSeal := range map[string]func(t *testing.T, a *attempt){
		"removed":                              func(t *testing.T, a *attempt) { a.inPod(t, removeSeal) },
		"removed with its queueing discipline": func(t *testing.T, a *attempt) { a.inPod(t, removeClsact) },
		// Of the filters of one priority the last that came is the first that is asked.
		"kept from being asked": func(t *testing.T, a *attempt) {
			a.filter(t, a.pod.Link, netlink.HANDLE_MIN_EGRESS, 1, acceptAll(t))
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) {
				s.t = t
				a := s.newAttempt(t, family)
				s.enrolPod(t, a.pod)
				a.enrolled = true
				frame := a.frame(t, a.pod.Link, packet(a.local, a.remote, syn))
				index := linkOf(t, a.pod, a.pod.Link).Attrs().Index
				fd := packetSocket(t, a.pod, index, 0)
				before := s.repairs(t, enroll.RepairSeal)
				breakSeal(t, a)
				start := time.Now()
				sent := 0
				for ; s.repairs(t, enroll.RepairSeal) == before; sent++ {
					if time.Since(start) > 10*time.Second {
						t.Fatal("it is not repaired")
					}
					sendFrameBy(t, fd, index, frame)
				}
				seen := a.onTheWire(t)
				t.Logf("of %d SYNs %d got out, until %v after", sent, seen.syn, time.Since(start))
				for range 10 {
					sendFrameBy(t, fd, index, frame)
				}
				if seen := a.onTheWire(t); seen.syn > 0 {
					t.Errorf("%d of 10 SYNs get out of a pod whose seal is there again", seen.syn)
				}
			})
		})
	}
}

func (a *attempt) inPod(t *testing.T, do func(t *testing.T, pod *bed.NS, h *netlink.Handle)) {
	t.Helper()
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	do(t, a.pod, h)
}
