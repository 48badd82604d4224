// SPDX-License-Identifier: Apache-2.0

package enroll

import "github.com/redirector-dataplane/redirector/pkg/journal"

// Journal has what happened to pods and to what they share, while this Enroller was there.
func (e *Enroller) Journal() *journal.Journal { return &e.journal }

// happened notes what happened to a pod.
func (e *Enroller) happened(p *pod, kind journal.Kind, what, message string) {
	e.journal.Add(journal.Event{Kind: kind, Pod: p.spec.String(), UID: p.uid, What: what, Message: message})
}

// message says what was put right.
func (r Repair) message() string {
	return map[Repair]string{
		RepairSeal:        "an interface had no seal, or another filter before it, and has it now",
		RepairRouting:     "the rule or the route that leads marked connections to lo was missing, and is there again",
		RepairSysctl:      "a sysctl that carries marks was off, and is on again",
		RepairSteer:       "the steer program was not in its place, and is again",
		RepairEntry:       "the entry in map pods was missing or another, and is there again",
		RepairCounters:    "the entry in map counters was missing, and is there again",
		RepairOwnAddr:     "map own_addrs did not have what the pod's interfaces have, and has it again",
		RepairProbeTarget: "an address of the pod was missing in map probe_targets, and is there again",
		RepairException:   "maps exceptions and cidrs did not have what the pod's settings say, and have it again",
		RepairNetNS:       "the pod's path led to another network namespace: it is enrolled there now",
		RepairGone:        "nothing led to the pod's network namespace any more: it is removed",
	}[r]
}

// Failing says why a pod cannot be kept as it should be; empty if it can, or if it is being worked on.
func (e *Enroller) Failing(uid string) string {
	p := e.tryClaim(uid)
	if p == nil {
		return ""
	}
	defer e.release(p)
	return p.failing
}

// Named returns the names of the pod that has a network namespace, empty if no pod has it.
func (e *Enroller) Named(cookie uint64) (pod, uid string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.byCookie[cookie]
	if p == nil {
		return "", ""
	}
	if shown := p.shown.Load(); shown != nil {
		return shown.String(), p.uid
	}
	return "", p.uid
}
