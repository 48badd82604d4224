// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	gomaps "maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/fault"
	"github.com/redirector-dataplane/redirector/pkg/journal"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// A burst of changes is looked at when it has paused for the time of settle, for a new interface comes with several; but no
// later than burst after it began, for a pod can make one that never pauses.
const (
	settle = 10 * time.Millisecond
	burst  = 10 * settle
)

// watch tells of changes in one pod's network namespace, and holds the sysctls open of which nothing tells. It costs four file
// descriptors and a sleeping goroutine.
type watch struct {
	// events is a netlink socket. It can be waited for, with a deadline.
	events  *os.File
	sysctls openSysctls
}

// watched are the groups of what enrolment puts into a namespace, or goes by.
const watched = unix.RTMGRP_LINK | unix.RTMGRP_TC | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR |
	unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV6_ROUTE | unix.RTMGRP_IPV4_RULE | 1<<(unix.RTNLGRP_IPV6_RULE-1)

// startWatch has resync called after each change of what enrolment has put into the namespace, or goes by.
func (e *Enroller) startWatch(p *pod) (*watch, error) {
	fd := -1
	err := p.ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: watched})
		}
		return err
	})
	if err != nil {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("watch the interfaces of %s: %w", p.ns.Path(), err)
	}
	w := &watch{events: os.NewFile(uintptr(fd), "netlink")}
	go e.follow(p, w)
	return w, nil
}

// stopWatch does not wait for a resync that is under way: it will find that it is stopped.
func (p *pod) stopWatch() {
	if p.watch != nil {
		_ = p.watch.events.Close()
		p.watch.sysctls.close()
		p.watch = nil
	}
}

func (e *Enroller) follow(p *pod, w *watch) {
	for {
		// What has changed is not read from the message: it may be out of date, and messages may have been lost. So there is no
		// room for more of it than its beginning.
		var message [unix.SizeofNlMsghdr]byte
		_, err := w.events.Read(message[:])
		for end := time.Now().Add(burst); err == nil && time.Now().Before(end); {
			if err = w.events.SetReadDeadline(time.Now().Add(settle)); err == nil {
				_, err = w.events.Read(message[:])
			}
		}
		switch {
		case err == nil, errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ENOBUFS):
		default:
			return // closed
		}
		if !e.resync(p, w) || w.events.SetReadDeadline(time.Time{}) != nil {
			return
		}
	}
}

// resync makes good what a change has undone: an interface without a seal, an address that the map does not know, a rule that
// somebody has removed. It returns false when the watch has been stopped.
func (e *Enroller) resync(p *pod, w *watch) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watch != w {
		return false
	}
	e.repair(p, nil, true)
	p.show()
	return true
}

// Repair is a kind of thing that was not as it should be, and is again.
type Repair string

// The kinds of repairs.
const (
	RepairSeal        Repair = "seal"         // an interface, perhaps a new one, had none, or it was not the first to be asked
	RepairRouting     Repair = "routing"      // a rule or route to lo was missing
	RepairSysctl      Repair = "sysctl"       // one that carries marks was off
	RepairSteer       Repair = "steer"        // the steer program, its link or the link's pin was missing, or another program there
	RepairEntry       Repair = "pod-entry"    // the entry of map pods, which switches capture on, was missing or another
	RepairCounters    Repair = "counters"     // the entry of map counters was missing
	RepairOwnAddr     Repair = "own-address"  // map own_addrs did not have what the pod's interfaces have
	RepairProbeTarget Repair = "probe-target" // an address of the pod was missing in map probe_targets
	RepairException   Repair = "exception"    // maps exceptions or cidrs did not have what the pod's settings say
	RepairStale       Repair = "stale"        // maps had entries of a network namespace that no pod has
	RepairNetNS       Repair = "netns"        // the pod's path led to another network namespace, and the pod was enrolled there
	RepairGone        Repair = "gone"         // nothing led to the pod's network namespace any more, and the pod was removed
)

// RepairKinds lists all kinds of repairs.
func RepairKinds() []Repair {
	return []Repair{
		RepairSeal, RepairRouting, RepairSysctl, RepairSteer, RepairEntry, RepairCounters, RepairOwnAddr, RepairProbeTarget,
		RepairException, RepairStale, RepairNetNS, RepairGone, RepairNode,
	}
}

// Repairs returns how many repairs of each kind there were since the start.
func (e *Enroller) Repairs() map[Repair]uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return gomaps.Clone(e.repairs)
}

// repair puts right what is not as it should be for the pod: in its network namespace if full, else only what no event tells
// of; and in the maps, if have is given. A failure is logged when it is a new one; the next look tries again.
func (e *Enroller) repair(p *pod, have *inMaps, full bool) {
	var errs []error
	if full {
		errs = append(errs, e.tryRepair(p))
	} else {
		errs = append(errs, e.repairSysctls(p))
	}
	if have != nil {
		errs = append(errs, e.repairSteer(p), e.repairMaps(p, have))
	}
	e.failed(p, errors.Join(errs...))
}

// failed notes how the last try to keep things as they should be ended.
func (e *Enroller) failed(p *pod, err error) {
	switch {
	case err == nil && p.failing != "":
		p.failing = ""
		e.happened(p, journal.Recovered, "", "everything is as it should be again")
	case err == nil:
	case err.Error() != p.failing:
		p.failing = err.Error()
		e.happened(p, journal.Failing, "", strings.ReplaceAll(p.failing, "\n", "; "))
		e.Log.Error("cannot keep a pod's network namespace as it should be: it is tried again",
			"pod", p.spec.String(), "uid", p.uid, "netns", p.ns.Path(), "error", err)
	}
}

func (e *Enroller) tryRepair(p *pod) error {
	n, err := openPodNet(p.ns)
	if err != nil {
		return err
	}
	defer n.close()
	var errs []error
	done := func(kind Repair, undo func() error, err error) {
		errs = append(errs, err)
		if err == nil && undo != nil {
			e.repaired(p, kind)
		}
	}
	// The seals first: they are what keeps closed what is not steered.
	undo, err := e.applySeals(p, n, false)
	done(RepairSeal, undo, err)
	_, err = e.applyOwnAddrs(p, n)
	_, errExceptions := e.applyExceptions(p, n)
	errs = append(errs, err, errExceptions, e.applyInterface(p, n))
	if err == nil {
		_, err = e.applyProbeTargets(p)
		errs = append(errs, err)
	}
	names, _ := p.rerouted(n)
	for _, family := range families {
		undo, err = n.addRouting(family, names)
		if !slices.Equal(names, p.reroutes) {
			undo = nil // rules for interfaces that are new are no repair
		}
		done(RepairRouting, undo, err)
		if len(names) > 0 {
			errs = append(errs, n.dropRules(family, names))
		}
	}
	p.ipv6, p.reroutes = n.ipv6, names
	errs = append(errs, e.repairSysctls(p))
	return errors.Join(errs...)
}

func (e *Enroller) repairSysctls(p *pod) error {
	changed, err := p.watch.sysctls.switchOn(p.ns, p.ipv6)
	if err == nil && changed != (maps.Restore{}) {
		e.repaired(p, RepairSysctl)
	}
	return err
}

// applyInterface tells the programs which interface the pod has, whether the proxy has to be bound to one, and whether there are
// exceptions to look for, when that has changed.
func (e *Enroller) applyInterface(p *pod, n *podNet) error {
	exit, err := n.exit(p.spec.IPs, p.ownAddrs)
	if err != nil {
		return err
	}
	entry := p.entry
	entry.Interface, entry.Exit = n.onlyInterface(), exit
	e.putSettings(p, &entry)
	if entry == p.entry {
		return nil
	}
	if err := e.Datapath.Maps().PutPod(p.ns.Cookie(), entry); err != nil {
		return err
	}
	p.entry = entry
	return nil
}

func (e *Enroller) repaired(p *pod, kind Repair) {
	e.Log.Warn("something was not as it should be for a pod, and is again",
		"what", string(kind), "pod", p.spec.String(), "uid", p.uid, "netns", p.ns.Path())
	fault.Point("reconcile: " + string(kind))
	e.happened(p, journal.Repaired, string(kind), kind.message())
	e.mu.Lock()
	e.repairs[kind]++
	e.mu.Unlock()
	e.ObserveRepair(p.uid, kind)
}
