// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

// action is something that happens to the node, or to one pod.
type action struct {
	name string
	// often is how often it is drawn, against the others'.
	often int
	node  func(s *soak)
	// pod happens to a pod that is in one of the phases, none meaning any.
	pod    func(s *soak, sl *slot)
	phases []phase
	// fills says that it takes an address of the bed's for a new pod.
	fills bool
}

// maxFills is how many pods there can be one after another: a bed has addresses for 253.
const maxFills = 250

func actions() []action {
	return []action{
		{name: "enrol", often: 6, pod: func(_ *soak, sl *slot) { sl.enrol() }, phases: []phase{plain}},
		{name: "enrol again", often: 1, pod: (*soak).enrolAgain, phases: []phase{enrolled}},
		{name: "take out", often: 3, pod: func(_ *soak, sl *slot) { sl.unenrol() }, phases: []phase{enrolled}},
		{name: "restart the agent", often: 3, node: func(s *soak) { s.restartAgent(unix.SIGTERM) }},
		{name: "kill the agent", often: 3, node: func(s *soak) { s.restartAgent(unix.SIGKILL) }},
		{name: "kill the agent at work", often: 4, pod: (*soak).killAtWork, phases: []phase{plain, enrolled}},
		{name: "replace the proxy", often: 2, node: (*soak).replaceProxy},
		{name: "kill the proxy", often: 2, node: (*soak).killProxy},
		{name: "replace the namespace", often: 2, pod: (*soak).replaceNamespace, phases: []phase{enrolled}, fills: true},
		{name: "replace the namespace while no agent runs", often: 1, pod: (*soak).replaceUnseen, phases: []phase{enrolled}, fills: true},
		{name: "remove the namespace", often: 1, pod: (*soak).removeNamespace, phases: []phase{enrolled}, fills: true},
		{name: "add and remove an interface", often: 1, pod: (*soak).passingInterface, phases: []phase{plain, enrolled}},
		{name: "damage", often: 8, pod: (*soak).damage, phases: []phase{enrolled}},
		{name: "damage while no agent runs", often: 3, pod: (*soak).damageUnseen, phases: []phase{enrolled}},
	}
}

// act draws something that can happen, does it, and sees whether what stays is still there.
func (s *soak) act() {
	type choice struct {
		action
		sl *slot
	}
	var all []choice
	for _, a := range actions() {
		switch {
		case a.fills && s.filled == maxFills:
		case a.node != nil:
			all = append(all, slices.Repeat([]choice{{a, nil}}, a.often)...)
		default:
			for _, sl := range s.slots {
				if slices.Contains(a.phases, sl.now().phase) {
					all = append(all, slices.Repeat([]choice{{a, sl}}, a.often)...)
				}
			}
		}
	}
	c := all[s.random.IntN(len(all))]
	s.done[c.name]++
	if c.sl == nil {
		s.note("%s", c.name)
		c.node(s)
	} else {
		s.note("%s: %s", c.sl.name, c.name)
		c.pod(s, c.sl)
	}
	s.checkLong()
}

func (s *soak) enrolAgain(sl *slot) { s.must(sl.tryEnrol(s.t.Context()), "enrol "+sl.name+" again") }

// restartAgent must not be noticed by any connection.
func (s *soak) restartAgent(sig unix.Signal) {
	s.endAgent(sig)
	s.startAgent()
	s.proxyHasAll()
}

// killAtWork kills the agent somewhere in an enrolment, or in its undoing. The next has the pod either wholly or not at all.
func (s *soak) killAtWork(sl *slot) {
	was := sl.now().phase
	if was == plain {
		var err error
		sl.before, err = sl.pod.Snapshot()
		s.must(err, "look at "+sl.name)
	}
	sl.change(func(s *situation) { s.phase, s.epoch, s.cuts = changing, s.epoch+1, s.cuts+1 })
	after := time.Duration(s.random.IntN(30)) * time.Millisecond
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if was == plain {
			_ = sl.tryEnrol(ctx) // it may fail
		} else {
			_ = s.client.Unenroll(ctx, sl.uid())
		}
	}()
	time.Sleep(after)
	s.endAgent(unix.SIGKILL)
	cancel()
	<-ended
	s.startAgent()
	s.proxyHasAll()
	pods, err := s.client.Pods(s.t.Context())
	s.must(err, "list the pods")
	if !slices.ContainsFunc(pods, func(p enroll.Pod) bool { return p.UID == sl.uid() }) {
		s.note("%s: killed after %v, it is out", sl.name, after)
		sl.wantAsBefore()
		sl.become(plain)
		return
	}
	s.note("%s: killed after %v, it is captured", sl.name, after)
	sl.enrol()
}

// cutAll says that connections through the proxy end.
func (s *soak) cutAll() {
	for _, sl := range s.slots {
		sl.change(func(s *situation) { s.cuts++ })
	}
}

// replaceProxy is a rolling update: no new connection is lost.
func (s *soak) replaceProxy() {
	next := s.startProxy()
	s.proxyHasAll()
	s.cutAll()
	for _, sl := range s.slots {
		sl.closeLong() // for the old one not to wait for them
	}
	s.endProxy(s.proxy, unix.SIGTERM)
	s.proxy = next
}

// killProxy leaves pods without a proxy for a while. Nothing passes.
func (s *soak) killProxy() {
	for _, sl := range s.slots {
		sl.trouble()
	}
	s.endProxy(s.proxy, unix.SIGKILL)
	time.Sleep(time.Duration(s.random.IntN(300)) * time.Millisecond)
	s.proxy = s.startProxy()
	s.proxyHasAll()
	for _, sl := range s.slots {
		sl.calm()
	}
}

// replaceNamespace gives a pod another network namespace under the same UID, and at the same path. The agent finds out, or is told.
func (s *soak) replaceNamespace(sl *slot) {
	sl.empty()
	told := s.random.IntN(2) == 0
	sl.fill()
	if told {
		sl.enrol()
		return
	}
	before, err := sl.pod.Snapshot()
	s.must(err, "look at "+sl.name)
	s.finds(sl, before)
}

// replaceUnseen has the next agent find out.
func (s *soak) replaceUnseen(sl *slot) {
	s.endAgent(unix.SIGKILL)
	sl.empty()
	sl.fill()
	before, err := sl.pod.Snapshot()
	s.must(err, "look at "+sl.name)
	s.startAgent()
	s.finds(sl, before)
}

// finds waits until the agent has the pod in its new namespace, which was so before.
func (s *soak) finds(sl *slot, before string) {
	s.t.Helper()
	sl.become(changing)
	s.eventually(sl.name+" is enrolled in its new namespace", func() bool {
		p, err := s.client.Pod(s.t.Context(), sl.uid())
		return err == nil && p.NetNSCookie == sl.pod.Cookie && p.State == enroll.StateEnrolled
	})
	sl.before = before
	sl.become(enrolled)
}

// removeNamespace ends a pod without telling the agent.
func (s *soak) removeNamespace(sl *slot) {
	sl.empty()
	s.eventually(sl.name+" is forgotten", func() bool {
		pods, err := s.client.Pods(s.t.Context())
		return err == nil && !slices.ContainsFunc(pods, func(p enroll.Pod) bool { return p.UID == sl.uid() })
	})
	sl.fill()
}

// passingInterface gives a pod an interface with an address, and takes it away.
func (s *soak) passingInterface(sl *slot) {
	h, err := sl.pod.Handle()
	s.must(err, "open "+sl.name)
	defer h.Close()
	s.must(h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "passing"}, PeerName: "peer"}), "add an interface")
	l, err := h.LinkByName("passing")
	s.must(err, "find the interface")
	address := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(198, 18, 0, 1).To4(), Mask: net.CIDRMask(32, 32)}}
	s.must(h.AddrAdd(l, address), "add an address")
	if sl.is(enrolled) {
		s.eventually("the interface is sealed", func() bool {
			filters, err := h.FilterList(l, netlink.HANDLE_MIN_EGRESS)
			return err == nil && len(filters) == 1
		})
	}
	s.must(h.LinkDel(l), "remove the interface")
}

// damage takes something away. Until the agent has put it back, nothing gets past the proxy.
func (s *soak) damage(sl *slot) {
	d := s.drawDamage(sl)
	before := s.repairs(d.kind)
	calm := s.troubleBy(d, sl)
	s.must(d.do(s, sl.pod), d.name)
	start := time.Now()
	s.eventually(fmt.Sprintf("it is repaired: %s", d.name), func() bool { return s.repairs(d.kind) > before })
	s.note("%s: repaired after %v", sl.name, time.Since(start).Round(time.Millisecond))
	calm()
}

// damageUnseen has the next agent find what was taken away.
func (s *soak) damageUnseen(sl *slot) {
	d := s.drawDamage(sl)
	calm := s.troubleBy(d, sl)
	s.endAgent(unix.SIGKILL)
	s.must(d.do(s, sl.pod), d.name)
	time.Sleep(time.Duration(s.random.IntN(200)) * time.Millisecond)
	s.startAgent()
	s.proxyHasAll()
	calm()
}

// troubleBy has connections fail that damage is to, until calm is called.
func (s *soak) troubleBy(d damage, sl *slot) (calm func()) {
	if !d.node {
		sl.trouble()
		return sl.calm
	}
	for _, sl := range s.slots {
		sl.trouble()
	}
	return func() {
		for _, sl := range s.slots {
			sl.calm()
		}
	}
}

func (s *soak) drawDamage(sl *slot) damage {
	all := damages()
	d := all[s.random.IntN(len(all))]
	s.note("%s: without %s", sl.name, d.name)
	s.done["without "+d.name]++
	return d
}

func (s *soak) repairs(kind enroll.Repair) uint64 {
	s.t.Helper()
	status, err := s.client.Status(s.t.Context())
	s.must(err, "ask for the status")
	return status.Repairs[kind]
}

// changes are the lines in which two snapshots differ.
func changes(before, after string) string {
	return cmp.Diff(strings.Split(before, "\n"), strings.Split(after, "\n"))
}

// entriesLeft lists maps that have entries of pods.
func entriesLeft(bpffs string) (left []string, err error) {
	for _, name := range []string{"pods", "own_addrs", "counters", "probe_targets", "listeners", "exceptions", "cidrs"} {
		m, err := openMap(bpffs, name)
		if err != nil {
			return nil, err
		}
		key, err := m.NextKeyBytes(nil)
		if err := errors.Join(err, m.Close()); err != nil {
			return nil, fmt.Errorf("map %s: %w", name, err)
		}
		if key != nil {
			left = append(left, fmt.Sprintf("%s has an entry for %x", name, key))
		}
	}
	return left, nil
}

// programsOn lists the programs that are attached to a cgroup by links.
func programsOn(cgroup string) (found []string, err error) {
	var st unix.Stat_t
	if err := unix.Stat(cgroup, &st); err != nil {
		return nil, err
	}
	it := new(link.Iterator)
	for it.Next() {
		info, err := it.Link.Info()
		if err != nil {
			return nil, err
		}
		if on := info.Cgroup(); on != nil && on.CgroupId == st.Ino {
			found = append(found, fmt.Sprintf("link %d, program %d", it.ID, info.Program))
		}
	}
	return found, it.Err()
}
