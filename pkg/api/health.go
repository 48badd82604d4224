// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/journal"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Health says in one word how things are.
type Health string

// The words, from good to bad.
const (
	Green  Health = "green"  // nothing needs attention
	Yellow Health = "yellow" // everything works as it should, and something needs attention
	Red    Health = "red"    // something does not work as it should
)

// healthOf is the worst of all warnings.
func healthOf(warnings []Warning) Health {
	health := Green
	for _, w := range warnings {
		if w.Severity == Red {
			return Red
		}
		health = Yellow
	}
	return health
}

// next is the remedy to begin with; empty when nothing needs attention.
func next(warnings []Warning) string {
	for _, w := range warnings {
		if w.Severity == Red {
			return w.Remedy
		}
	}
	if len(warnings) > 0 {
		return warnings[0].Remedy
	}
	return ""
}

// sortWarnings puts what does not work before what needs attention.
func sortWarnings(warnings []Warning) {
	slices.SortStableFunc(warnings, func(a, b Warning) int {
		return cmp.Compare(btoi(a.Severity != Red), btoi(b.Severity != Red))
	})
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// recently is how long a repair needs attention.
const recently = 10 * time.Minute

// uidEvent is what repairs are told apart by.
type uidEvent struct{ uid, what string }

// repaired are warnings of what had to be put back lately: somebody takes it away. Each kind is said once for each pod.
func (s *Server) repaired(about func(uidEvent) bool) []Warning {
	type row struct {
		n    int
		last journal.Event
	}
	rows := map[uidEvent]*row{}
	var order []uidEvent
	for _, e := range s.Enroller.Journal().Since(time.Now().Add(-recently)) {
		key := uidEvent{e.UID, e.What}
		if e.Kind != journal.Repaired || !about(key) {
			continue
		}
		if rows[key] == nil {
			rows[key] = &row{}
			order = append(order, key)
		}
		rows[key].n++
		rows[key].last = e
	}
	var warnings []Warning
	for _, key := range order {
		r := rows[key]
		times := "once"
		if r.n > 1 {
			times = fmt.Sprintf("%d times", r.n)
		}
		warnings = append(warnings, Warning{
			Reason: ReasonRepaired, Severity: Yellow, Pod: r.last.Pod, UID: r.last.UID,
			Message: fmt.Sprintf("%s (%s in the last %s, last at %s)", r.last.Message, times, shortDuration(recently), r.last.Time.Format(time.TimeOnly)),
			Remedy:  s.repairRemedy(enroll.Repair(key.what), key.uid),
		})
	}
	return warnings
}

func shortDuration(d time.Duration) string { return strings.TrimSuffix(d.String(), "0s") }

// repairRemedy says what to do about what had to be put back.
func (s *Server) repairRemedy(kind enroll.Repair, uid string) string {
	netns := "PATH"
	if pod, ok := s.Enroller.Brief(uid); ok {
		netns = pod.NetNS
	}
	switch kind {
	case enroll.RepairSeal:
		return fmt.Sprintf("nothing, if the pod got an interface; else find who removes tc filters: `nsenter --net=%s tc monitor`", netns)
	case enroll.RepairRouting:
		return fmt.Sprintf("find who removes rules and routes in the pod: `nsenter --net=%s ip monitor rule route`", netns)
	case enroll.RepairSysctl:
		return "find who sets net.ipv4.tcp_fwmark_accept or fwmark_reflect to 0 in the pod, and have it leave them alone"
	case enroll.RepairNetNS:
		return "nothing, if the pod's sandbox was made anew; else see who replaces " + netns
	case enroll.RepairGone, enroll.RepairStale:
		return "nothing: what is left of a pod that is gone has been removed"
	default:
		return fmt.Sprintf("find who removes pins or entries of maps below %s: `bpftool map show` names the processes that have them open", s.Agent.BPFFS)
	}
}

// hookWarnings are about programs that are not where they should be.
func hookWarnings(hooks []Hook) []Warning {
	var warnings []Warning
	for _, h := range hooks {
		if h.Problem == "" {
			continue
		}
		warnings = append(warnings, Warning{
			Reason: ReasonHook, Severity: Red,
			Message: fmt.Sprintf("program %s (%s): %s", h.Name, h.Program, h.Problem),
			Remedy:  "the agent puts it back within seconds; if it is gone again, find who takes it away: `bpftool cgroup tree`",
		})
	}
	return warnings
}

// nearlyFull is the share of a map's capacity, in percent, from which on it needs attention.
const nearlyFull = 90

// mapWarnings are about maps that have no room.
func mapWarnings(usages []MapUsage) []Warning {
	var warnings []Warning
	for _, u := range usages {
		if u.Evicts || u.Entries*100 < u.Capacity*nearlyFull {
			continue
		}
		w := Warning{
			Reason: ReasonMapFull, Severity: Yellow,
			Message: fmt.Sprintf("map %s is nearly full: %d of %d entries", u.Map, u.Entries, u.Capacity),
			Remedy:  fmt.Sprintf("move pods off this node; see whose the entries are with `bpftool map dump pinned %s`", u.Pin),
		}
		if u.Entries >= u.Capacity {
			w.Severity = Red
			w.Message = fmt.Sprintf("map %s is full (%d entries): pods that need another cannot be enrolled", u.Map, u.Capacity)
		}
		warnings = append(warnings, w)
	}
	return warnings
}

// conditionWarnings are about what the agent needs and does not have.
func conditionWarnings(conditions []Condition) []Warning {
	var warnings []Warning
	for _, c := range conditions {
		if c.Problem == "" {
			continue
		}
		w := Warning{Reason: ReasonNotReady, Severity: Red, Message: c.Name + " is not ready: " + c.Problem, Remedy: "see the agent's log"}
		switch {
		case strings.Contains(c.Problem, "service account"):
			w.Remedy = "give the agent's service account its rights again: apply the ClusterRole and ClusterRoleBinding that it was installed with"
		case c.Name == "cni":
			w.Remedy = "make the CNI's directories as the message says; the plugin is installed again within seconds"
		case c.Name == "kubernetes":
			w.Remedy = "see that the API server can be reached from this node; it is tried again all the time"
		}
		warnings = append(warnings, w)
	}
	return warnings
}

// usages is how full the maps are.
func (s *Server) usages() ([]MapUsage, error) {
	all, err := s.Enroller.Datapath.Maps().Usage()
	if err != nil {
		return nil, err
	}
	usages := make([]MapUsage, 0, len(all))
	for _, u := range all {
		usages = append(usages, MapUsage{
			Map: u.Map, Entries: u.Entries, Capacity: u.Capacity, Evicts: maps.Evicts(u.Map), Pin: s.Enroller.Datapath.PinOfMap(u.Map),
		})
	}
	return usages, nil
}

// hooks is what works for the whole node.
func (s *Server) hooks() ([]Hook, error) {
	all, err := s.Enroller.Datapath.Hooks()
	if err != nil {
		return nil, err
	}
	hooks := make([]Hook, 0, len(all))
	for _, h := range all {
		show := fmt.Sprintf("bpftool prog show id %d", h.ID)
		if h.Pin != "" {
			show = "bpftool link show pinned " + h.Pin
		}
		hooks = append(hooks, Hook{
			Name: h.Name, Program: h.Program, ID: uint32(h.ID), Link: uint32(h.Link), Pin: h.Pin, Problem: h.Problem,
			Runs: h.Runs, RunTime: Duration(h.RunTime), Show: show,
		})
	}
	return hooks, nil
}

// features are those that the kernel has: without one of them no agent runs.
func features() []Feature {
	var all []Feature
	for _, f := range loader.Features() {
		if f.Optional {
			continue
		}
		all = append(all, Feature{Name: f.Name, Since: f.Since})
	}
	return all
}
