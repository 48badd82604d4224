// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// driftPatience is how long it may take until what has drifted is right again.
const driftPatience = 10 * time.Second

// pinnedMaps opens the maps of an agent that runs, for a test to spoil them.
func (s *evasionStage) pinnedMaps(t *testing.T) *maps.Maps {
	t.Helper()
	var m maps.Maps
	for name, to := range map[string]**ebpf.Map{
		bpf.RedirectorMapPods:         &m.RedirectorMaps.Pods,
		bpf.RedirectorMapOwnAddrs:     &m.RedirectorMaps.OwnAddrs,
		bpf.RedirectorMapCounters:     &m.RedirectorMaps.Counters,
		bpf.RedirectorMapProbeTargets: &m.RedirectorMaps.ProbeTargets,
		bpf.RedirectorMapExceptions:   &m.RedirectorMaps.Exceptions,
		bpf.RedirectorMapCidrs:        &m.RedirectorMaps.Cidrs,
	} {
		opened, err := ebpf.LoadPinnedMap(filepath.Join(s.BPFFS, "maps", name), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = opened.Close() })
		*to = opened
	}
	return &m
}

// drift is something of the agent's outside of pods' network namespaces that somebody else changes.
type drift struct {
	name  string
	kind  enroll.Repair
	spoil func(s *evasionStage, m *maps.Maps, pod *bed.NS) error
	// healed says whether it is as it should be.
	healed func(s *evasionStage, m *maps.Maps, pod *bed.NS) bool
}

func drifts() []drift {
	steer := func(s *evasionStage, pod *bed.NS) string {
		return filepath.Join(s.BPFFS, "pods", "uid-"+pod.Name, "steer")
	}
	steers := func(s *evasionStage, _ *maps.Maps, pod *bed.NS) bool {
		l, err := link.LoadPinnedLink(steer(s, pod), nil)
		if err != nil {
			return false
		}
		defer l.Close()
		info, err := l.Info()
		return err == nil && info.NetNs() != nil && uint64(info.NetNs().NetnsInode) == pod.Inode
	}
	entry := func(_ *evasionStage, m *maps.Maps, pod *bed.NS) bool {
		p, err := m.Pod(pod.Cookie)
		return err == nil && p.NetNSInode == pod.Inode && p.UID == "uid-"+pod.Name
	}
	all := []drift{
		{
			name: "the steer link is detached", kind: enroll.RepairSteer,
			spoil: func(s *evasionStage, _ *maps.Maps, pod *bed.NS) error {
				l, err := link.LoadPinnedLink(steer(s, pod), nil)
				if err != nil {
					return err
				}
				return errors.Join(l.Detach(), l.Close())
			},
			healed: steers,
		},
		{
			name: "the steer link's pin is removed", kind: enroll.RepairSteer,
			spoil:  func(s *evasionStage, _ *maps.Maps, pod *bed.NS) error { return os.Remove(steer(s, pod)) },
			healed: steers,
		},
		{
			name: "the entry in pods is removed", kind: enroll.RepairEntry,
			spoil:  func(_ *evasionStage, m *maps.Maps, pod *bed.NS) error { return m.DeletePod(pod.Cookie) },
			healed: entry,
		},
		{
			name: "the entry in pods is changed", kind: enroll.RepairEntry,
			spoil: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) error {
				return m.PutPod(pod.Cookie, maps.Pod{UID: "another", NetNSInode: 1})
			},
			healed: entry,
		},
		{
			name: "the entry in counters is removed", kind: enroll.RepairCounters,
			spoil: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) error { return m.DeleteCounters(pod.Cookie) },
			healed: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) bool {
				_, err := m.Counters(pod.Cookie)
				return err == nil
			},
		},
		{
			name: "an address of another's becomes the pod's", kind: enroll.RepairOwnAddr,
			spoil: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) error {
				return errors.Join(m.PutOwnAddr(pod.Cookie, netip.MustParseAddr("192.0.2.7"), 1),
					m.PutOwnAddr(pod.Cookie, netip.MustParseAddr("2001:db8::7"), 1))
			},
			healed: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) bool {
				v4, err4 := m.OwnAddr(pod.Cookie, netip.MustParseAddr("192.0.2.7"))
				v6, err6 := m.OwnAddr(pod.Cookie, netip.MustParseAddr("2001:db8::7"))
				return err4 == nil && err6 == nil && v4 == 0 && v6 == 0
			},
		},
	}
	all = append(all, drift{
		name: "a port is excluded that the pod has not asked for", kind: enroll.RepairException,
		spoil: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) error {
			port := maps.Exception{Kind: maps.ExceptionOutboundPort, Value: 9}
			return m.SetExceptions(pod.Cookie, maps.Exceptions{}, maps.Exceptions{Values: map[maps.Exception]bool{port: true}})
		},
		healed: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) bool {
			all, err := m.Exceptions()
			return err == nil && len(all[pod.Cookie].Values) == 0
		},
	})
	for _, family := range []string{"IPv4", "IPv6"} {
		all = append(all, drift{
			name: "the " + family + " address in own_addrs is removed", kind: enroll.RepairOwnAddr,
			spoil: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) error {
				return m.DeleteOwnAddr(pod.Cookie, addr(pod, family))
			},
			healed: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) bool {
				index, err := m.OwnAddr(pod.Cookie, addr(pod, family))
				return err == nil && index > 0
			},
		}, drift{
			name: "the " + family + " address in probe_targets is removed", kind: enroll.RepairProbeTarget,
			spoil: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) error {
				return m.DeleteProbeTarget(addr(pod, family), "uid-"+pod.Name)
			},
			healed: func(_ *evasionStage, m *maps.Maps, pod *bed.NS) bool {
				all, err := m.ProbeTargets()
				return err == nil && all[addr(pod, family)].NetNSCookie == pod.Cookie
			},
		})
	}
	return all
}

// findings counts the agent's log lines about a repair of the pod.
func (s *evasionStage) findings(kind enroll.Repair, pod *bed.NS) int {
	n := 0
	for line := range strings.Lines(s.agent.Output()) {
		if strings.Contains(line, "what="+string(kind)+" ") && strings.Contains(line, "uid-"+pod.Name+" ") {
			n++
		}
	}
	return n
}

// bothWays has a connection each way and family go by the proxy.
func (s *evasionStage) bothWays(t *testing.T, pod *bed.NS) {
	t.Helper()
	n, p := *s.node, *s.proxy
	n.t, p.t = t, t
	n.bothWays(&p, pod)
}

// What somebody takes out of bpffs and maps is there again within seconds, counted and logged once. Until then no connection
// of the pod gets past the proxy.
func TestWhatDriftsIsRightAgain(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	m := s.pinnedMaps(t)
	for _, d := range drifts() {
		t.Run(d.name, func(t *testing.T) {
			s.t = t
			pod := s.newPod(t)
			s.enrolPod(t, pod)
			s.serve(pod, evasionPort, bed.AppOptions{})
			before := s.repairs(t, d.kind)
			if err := d.spoil(s, m, pod); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			for tries := 0; !d.healed(s, m, pod) || s.repairs(t, d.kind) == before; tries++ {
				time.Sleep(20 * time.Millisecond) // each connection that goes through stays open
				if time.Since(start) > driftPatience {
					t.Fatal("it is not put right")
				}
				s.triesToLeave(t, pod, tries, start)
			}
			t.Logf("it is right again after %v at most", time.Since(start))
			s.bothWays(t, pod)
			if got := s.repairs(t, d.kind) - before; got != 1 {
				t.Errorf("it is counted %d times", got)
			}
			if n := s.findings(d.kind, pod); n != 1 {
				t.Errorf("it is logged %d times", n)
			}
		})
	}
}

// Entries of a network namespace that no pod has are removed.
func TestStaleEntriesAreRemoved(t *testing.T) {
	s := newEvasionStage(t)
	m := s.pinnedMaps(t)
	const cookie = 1 << 60
	target := maps.ProbeTarget{NetNSCookie: cookie, UID: "nobody"}
	_, err := m.CreateCounters(cookie)
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")}
	for _, a := range addrs {
		err = errors.Join(err, m.PutOwnAddr(cookie, a, 1), m.PutProbeTarget(a, target))
	}
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "all are gone", func() bool {
		own, errOwn := m.OwnAddrs()
		targets, errTargets := m.ProbeTargets()
		_, err := m.Counters(cookie)
		return errOwn == nil && errTargets == nil && own[cookie] == nil && len(targets) == 0 && errors.Is(err, ebpf.ErrKeyNotExist)
	})
	if got := s.repairs(t, enroll.RepairStale); got != 1 {
		t.Errorf("it is counted %d times", got)
	}
}

// A runtime that makes a pod's sandbox anew makes a network namespace under the same path.
func TestAPodMovesToTheNamespaceThatItsPathLeadsTo(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	old := s.newPod(t)
	s.enrolPod(t, old)
	if err := s.RemovePod(old); err != nil {
		t.Fatal(err)
	}
	pod, err := s.Pod(old.Name, bed.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if pod.Path != old.Path {
		t.Fatalf("the new namespace is at %s, the old was at %s", pod.Path, old.Path)
	}
	s.serve(pod, evasionPort, bed.AppOptions{})
	eventually(t, "the pod is enrolled in the new namespace", func() bool {
		p := s.podStatus(t, pod)
		return p.NetNSCookie == pod.Cookie && p.State == enroll.StateEnrolled
	})
	s.bothWays(t, pod)
	if got := s.repairs(t, enroll.RepairNetNS); got != 1 {
		t.Errorf("it is counted %d times", got)
	}
	m := s.pinnedMaps(t)
	pods, err := m.Pods()
	if err != nil || len(pods) != 1 {
		t.Errorf("captured are %v, %v", pods, err)
	}
}

// What keeps a namespace alive is who is in it, not the handles that the agent and the proxy have on it.
func TestAPodWhoseNamespaceIsGoneIsForgotten(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	pod := s.newPod(t)
	s.enrolPod(t, pod)
	m := s.pinnedMaps(t)
	if err := s.RemovePod(pod); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is out of the maps and pins", func() bool {
		pods, err := m.Pods()
		own, errOwn := m.OwnAddrs()
		_, errPin := os.Stat(filepath.Join(s.BPFFS, "pods", "uid-"+pod.Name))
		return err == nil && len(pods) == 0 && errOwn == nil && len(own) == 0 && errors.Is(errPin, os.ErrNotExist)
	})
	eventually(t, "the agent does not list it", func() bool {
		pods, err := s.agent.client.Pods(t.Context())
		return err == nil && len(pods) == 0
	})
	if got := s.repairs(t, enroll.RepairGone); got != 1 {
		t.Errorf("it is counted %d times", got)
	}
}

// A pod that was enrolled by one process stays when that ends and another is in its namespace.
func TestAPodStaysWhileAProcessIsInItsNamespace(t *testing.T) {
	s := newEvasionStage(t)
	pod := s.newPod(t)
	s.startIn("kubepods/podX", pod, "sleeper", "sleeper")
	s.enrolPod(t, pod)
	if err := s.RemovePod(pod); err != nil {
		t.Fatal(err)
	}
	// Twice the time in which one whose namespace is gone is forgotten.
	time.Sleep(4 * 3 * time.Second)
	if p := s.podStatus(t, pod); p.NetNSCookie != pod.Cookie {
		t.Errorf("the pod has another namespace: %+v", p)
	}
	if got := s.repairs(t, enroll.RepairGone); got != 0 {
		t.Errorf("it is forgotten")
	}
}

// The kernel drops messages about changes when there are too many to be read. The agent looks at all, then.
func TestTooManyChangesAreSurvived(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	pod := s.newPod(t)
	s.enrolPod(t, pod)
	s.serve(pod, evasionPort, bed.AppOptions{})
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	lo := linkOf(t, pod, "lo")
	// The agent reads nothing meanwhile.
	if err := s.agent.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for i := range 4000 {
		address := &netlink.Addr{IPNet: hostNet(netip.AddrFrom4([4]byte{10, 77, byte(i >> 8), byte(i)}))}
		if err := errors.Join(h.AddrAdd(lo, address), h.AddrDel(lo, address)); err != nil {
			t.Fatal(err)
		}
	}
	removeSeal(t, pod, h)
	if err := s.agent.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the seal is there again", func() bool { return s.repairs(t, enroll.RepairSeal) > 0 })
	s.bothWays(t, pod)
}

// An interface keeps or gets its seal, by whatever name and from wherever it comes.
func TestAnInterfaceThatMovesAwayAndBackIsSealed(t *testing.T) {
	s := newEvasionStage(t)
	pod := s.newPod(t)
	s.enrolPod(t, pod)
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	out, err := s.Outside.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	sealed := func(name string) bool {
		l, err := h.LinkByName(name)
		if err != nil {
			return false
		}
		filters, err := h.FilterList(l, netlink.HANDLE_MIN_EGRESS)
		return err == nil && len(filters) == 1
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "added"}, PeerName: "peer"}))
	eventually(t, "the added interface is sealed", func() bool { return sealed("added") })
	must(h.LinkSetName(linkOf(t, pod, "added"), "renamed"))
	eventually(t, "the renamed interface is sealed", func() bool { return sealed("renamed") })
	must(s.moveLink(h, "renamed", s.Outside))
	must(s.moveLink(out, "renamed", pod))
	eventually(t, "the interface that came back is sealed", func() bool { return sealed("renamed") })
	must(h.LinkDel(linkOf(t, pod, "renamed")))
	eventually(t, "the pod has one interface again", func() bool {
		p, err := s.pinnedMaps(t).Pod(pod.Cookie)
		return err == nil && p.Interface == pod.Link
	})
}

// moveLink moves an interface to another namespace.
func (s *evasionStage) moveLink(from *netlink.Handle, name string, to *bed.NS) error {
	l, err := from.LinkByName(name)
	if err != nil {
		return err
	}
	f, err := os.Open(to.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	return from.LinkSetNsFd(l, int(f.Fd()))
}
