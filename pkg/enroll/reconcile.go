// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/pkg/fault"
	"github.com/redirector-dataplane/redirector/pkg/journal"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

const (
	// reconcileEvery is how often what no event tells of is looked at: maps, the steer program, sysctls, where paths lead.
	reconcileEvery = 3 * time.Second
	// fullLookEvery is at every how many of these looks a pod's interfaces, rules and routes are listed, though netlink has told
	// of no change. The pods take turns.
	fullLookEvery = 100
	// unnamedEvery is at every how many looks pods are looked for that the kernel alone knows, and whose namespace is gone. That takes
	// a look at all processes for each.
	unnamedEvery = 3
	// lookers bounds how many pods are looked at side by side, and changers how many are being moved or removed, which may have to
	// wait for a proxy.
	lookers  = 4
	changers = 16
)

// Reconcile looks after all pods until ctx is done. What netlink tells of is repaired at once, without it.
func (e *Enroller) Reconcile(ctx context.Context) error {
	ticker := time.NewTicker(reconcileEvery)
	defer ticker.Stop()
	r := &reconciler{Enroller: e, ctx: ctx, slots: make(chan struct{}, changers)}
	defer r.changes.Wait() //nolint:errcheck // they return none
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		r.round++
		start := time.Now()
		r.look()
		r.ObserveReconcile(time.Since(start))
		for _, uid := range e.takeOverListeners() {
			r.change(uid, func() { e.offerAnew(ctx, uid) })
		}
	}
}

// reconciler is one run of Reconcile.
type reconciler struct {
	*Enroller
	ctx     context.Context
	round   uint64
	changes errgroup.Group
	slots   chan struct{}
	// gone has those network namespaces of pods that the kernel alone knows to which nothing led when that was last looked at.
	gone map[uint64]bool
	// failing is the last failure to read the maps, "" if the last try went well.
	failing string
}

// change does what may take long, for one pod. The next look comes before it has ended.
func (r *reconciler) change(uid string, do func()) {
	if !r.begin(uid) {
		return
	}
	r.changes.Go(func() error {
		defer r.end(uid)
		select {
		case r.slots <- struct{}{}:
		case <-r.ctx.Done():
			return nil
		}
		defer func() { <-r.slots }()
		do()
		return nil
	})
}

// begin notes that a change of the pod is under way; false: one is already.
func (e *Enroller) begin(uid string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.changing[uid] {
		return false
	}
	e.changing[uid] = true
	return true
}

func (e *Enroller) end(uid string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.changing, uid)
}

// look compares what is wanted with what is so, for all pods.
func (r *reconciler) look() {
	have, err := r.readMaps()
	switch {
	case err == nil:
		r.failing = ""
	case err.Error() != r.failing:
		r.failing = err.Error()
		r.Log.Error("cannot compare the maps with the pods: it is tried again", "error", err)
	}
	uids := r.uids()
	var next atomic.Int64
	var group sync.WaitGroup
	for range min(lookers, len(uids)) {
		group.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(uids)); i = next.Add(1) - 1 {
				r.lookAt(uids[i], have)
			}
		})
	}
	group.Wait()
	if have != nil {
		r.removeStale(have)
		if r.round%unnamedEvery == 0 {
			r.forgetUnnamed(have)
		}
	}
}

// lookAt looks at one pod. One that is being worked on is left for the next look.
func (r *reconciler) lookAt(uid string, have *inMaps) {
	p := r.tryClaim(uid)
	if p == nil {
		return
	}
	defer r.release(p)
	if p.ns == nil {
		return
	}
	if p.watch == nil { // an attempt to remove the pod has failed
		var err error
		if p.watch, err = r.startWatch(p); err != nil {
			r.failed(p, err)
			return
		}
	}
	full := p.failing != "" || (p.ns.Cookie()+r.round)%fullLookEvery == 0
	r.repair(p, have, full)
	r.follows(p)
}

// tryClaim is claim of an entry that is there and that nobody holds; nil: there is none such.
func (e *Enroller) tryClaim(uid string) *pod {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.byUID[uid]
	if p == nil || !p.mu.TryLock() {
		return nil
	}
	p.users++
	return p
}

// inMaps is what the maps had, read for all pods at once. It may be out of date: what differs is looked up again under the
// pod's mutex before anything is done about it.
type inMaps struct {
	pods     map[uint64]maps.Pod
	ownAddrs map[uint64]map[netip.Addr]int
	targets  map[netip.Addr]maps.ProbeTarget
	excepted map[uint64]maps.Exceptions
	counted  map[uint64]bool
}

func (e *Enroller) readMaps() (*inMaps, error) {
	m := e.Datapath.Maps()
	var have inMaps
	var errs [5]error
	// The pods last: one whose entry is not there has none of the others for long.
	have.ownAddrs, errs[0] = m.OwnAddrs()
	have.targets, errs[1] = m.ProbeTargets()
	have.counted, errs[2] = m.Counted()
	have.excepted, errs[3] = m.Exceptions()
	have.pods, errs[4] = m.Pods()
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	return &have, nil
}

// repairMaps puts right what the maps have of the pod. The mutex is held.
func (e *Enroller) repairMaps(p *pod, have *inMaps) error {
	m, cookie := e.Datapath.Maps(), p.ns.Cookie()
	var errs []error
	if have.pods[cookie] != p.entry {
		now, err := m.Pod(cookie)
		if errors.Is(err, ebpf.ErrKeyNotExist) || err == nil && now != p.entry {
			if err = m.PutPod(cookie, p.entry); err == nil {
				e.repaired(p, RepairEntry)
			}
		}
		errs = append(errs, err)
	}
	if !have.counted[cookie] {
		made, err := m.CreateCounters(cookie)
		if made {
			e.repaired(p, RepairCounters)
		}
		errs = append(errs, err)
	}
	errs = append(errs, e.repairOwnAddrs(p, have), e.repairTargets(p, have), e.repairExceptions(p, have))
	return errors.Join(errs...)
}

func (e *Enroller) repairOwnAddrs(p *pod, have *inMaps) error {
	m, cookie := e.Datapath.Maps(), p.ns.Cookie()
	found := false
	for addr, ifindex := range p.ownAddrs {
		if have.ownAddrs[cookie][addr] == ifindex {
			continue
		}
		now, err := m.OwnAddr(cookie, addr)
		if err != nil {
			return err
		}
		if now == ifindex {
			continue
		}
		if err := m.PutOwnAddr(cookie, addr, ifindex); err != nil {
			return err
		}
		found = true
	}
	for addr := range have.ownAddrs[cookie] {
		if _, ok := p.ownAddrs[addr]; ok {
			continue
		}
		now, err := m.OwnAddr(cookie, addr)
		if err != nil {
			return err
		}
		if now == 0 {
			continue
		}
		if err := m.DeleteOwnAddr(cookie, addr); err != nil {
			return err
		}
		found = true
	}
	if found {
		e.repaired(p, RepairOwnAddr)
	}
	return nil
}

// repairTargets leaves an address alone that another pod has taken.
func (e *Enroller) repairTargets(p *pod, have *inMaps) error {
	m := e.Datapath.Maps()
	want := maps.ProbeTarget{NetNSCookie: p.ns.Cookie(), UID: p.uid}
	found := false
	for addr := range p.probed {
		now, ok := have.targets[addr]
		if ok && (now == want || now.UID != p.uid) {
			continue
		}
		if ok {
			// It leads to a namespace that the pod has no more.
			if err := m.PutProbeTarget(addr, want); err != nil {
				return err
			}
			found = true
			continue
		}
		made, err := m.KeepProbeTarget(addr, want)
		if err != nil {
			return err
		}
		found = found || made
	}
	if found {
		e.repaired(p, RepairProbeTarget)
	}
	return nil
}

// repairSteer puts the steer program back: its link, the link's pin, or the program that the link runs.
func (e *Enroller) repairSteer(p *pod) error {
	if p.steer != 0 && e.Datapath.Steers(p.ns, p.uid, p.steer) {
		return nil
	}
	id, err := e.Datapath.SteerProgram(p.ns, p.uid)
	if err != nil || id != 0 && id == p.steer {
		return err
	}
	prog, err := e.Datapath.LoadSteer(p.ns)
	if err != nil {
		return err
	}
	defer prog.Close()
	if err := e.Datapath.AttachSteer(p.ns, p.uid, prog); err != nil {
		return err
	}
	if p.steer, err = e.Datapath.SteerProgram(p.ns, p.uid); err != nil {
		return err
	}
	e.repaired(p, RepairSteer)
	return nil
}

// removeStale removes entries of namespaces that no pod has. A pod that the kernel alone knows keeps its own.
func (e *Enroller) removeStale(have *inMaps) {
	m := e.Datapath.Maps()
	stale := map[uint64]bool{}
	// No pod can take a namespace meanwhile.
	e.mu.Lock()
	defer e.mu.Unlock()
	unknown := func(cookie uint64) bool {
		_, captured := have.pods[cookie]
		return !captured && e.byCookie[cookie] == nil
	}
	var errs []error
	for cookie, addrs := range have.ownAddrs {
		if !unknown(cookie) {
			continue
		}
		for addr := range addrs {
			errs = append(errs, m.DeleteOwnAddr(cookie, addr))
		}
		stale[cookie] = true
	}
	for cookie := range have.counted {
		if unknown(cookie) {
			errs = append(errs, e.deleteCounters(cookie))
			stale[cookie] = true
		}
	}
	for addr, target := range have.targets {
		if unknown(target.NetNSCookie) {
			errs = append(errs, m.DeleteProbeTarget(addr, target.UID))
			stale[target.NetNSCookie] = true
		}
	}
	for cookie, excepted := range have.excepted {
		if unknown(cookie) {
			errs = append(errs, m.SetExceptions(cookie, excepted, maps.Exceptions{}))
			stale[cookie] = true
		}
	}
	for cookie := range stale {
		errs = append(errs, m.DeleteListeners(cookie))
		e.repairs[RepairStale]++
		e.Log.Warn("entries in maps were of no pod, and are removed", "what", string(RepairStale), "netns_cookie", cookie)
		e.journal.Add(journal.Event{
			Kind: journal.Repaired, What: string(RepairStale), Message: fmt.Sprintf("entries of network namespace %d were of no pod, and are removed", cookie),
		})
	}
	if err := errors.Join(errs...); err != nil {
		e.Log.Error("cannot remove entries that are of no pod: it is tried again", "error", err)
	}
}

// forgetUnnamed removes pods that the kernel alone knows when nothing leads to their network namespaces any more.
func (r *reconciler) forgetUnnamed(have *inMaps) {
	gone := map[uint64]bool{}
	for cookie, entry := range have.pods {
		r.mu.Lock()
		known := r.byCookie[cookie] != nil
		r.mu.Unlock()
		if known || entry.UID == "" {
			continue
		}
		ns, err := podns.Find(entry.NetNSInode, cookie)
		switch {
		case err == nil:
			_ = ns.Close()
		case !errors.Is(err, podns.ErrGone): // when it cannot be told, it is not gone
		case !r.gone[cookie]: // twice, as a thread may have been on its way in
			gone[cookie] = true
		default:
			r.change(entry.UID, func() { r.removeUnnamed(entry.UID, cookie) })
		}
	}
	r.gone = gone
}

// removeUnnamed removes a pod that the kernel alone knows, unless it has been enrolled meanwhile.
func (r *reconciler) removeUnnamed(uid string, cookie uint64) {
	p := r.claim(uid)
	defer r.release(p)
	if p.ns != nil {
		return
	}
	r.Log.Warn("something was not as it should be for a pod, and is again", "what", string(RepairGone), "uid", uid, "netns_cookie", cookie)
	fault.Point("reconcile: " + string(RepairGone))
	r.journal.Add(journal.Event{Kind: journal.Repaired, UID: uid, What: string(RepairGone), Message: RepairGone.message()})
	r.mu.Lock()
	r.repairs[RepairGone]++
	r.mu.Unlock()
	r.ObserveRepair(uid, RepairGone)
	if err := r.removeUnknown(r.ctx, uid); err != nil {
		r.Log.Error("cannot remove a pod whose network namespace is gone: it is tried again", "uid", uid, "error", err)
	}
}

// follows sees whether the pod's path still leads to its network namespace. If it leads to another, the pod is moved there; if
// nothing leads to the pod's any more, the pod is removed. The mutex is held.
func (r *reconciler) follows(p *pod) {
	if p.ns.LedToBy(p.spec.NetNS) || p.lead != "" && p.ns.LedToBy(p.lead) && !mayMove(p.spec.NetNS) {
		p.unused = 0
		return
	}
	uid, spec, since := p.uid, p.spec, p.since
	if mayMove(spec.NetNS) {
		ns, err := podns.Open(spec.NetNS)
		if err == nil {
			if r.fit(ns, &spec) {
				r.change(uid, func() { r.move(spec, since) })
			}
			_ = ns.Close()
			return
		}
		if errors.Is(err, podns.ErrHost) && p.failing == "" {
			r.failed(p, err)
		}
	}
	if p.lead != "" && p.ns.LedToBy(p.lead) {
		return
	}
	var err error
	p.lead, err = p.ns.Lead()
	if err != nil || p.lead != "" {
		p.unused = 0
		return // when it cannot be told, it is not gone
	}
	// Twice, as a thread may have been on its way in.
	p.unused++
	if p.unused < 2 {
		return
	}
	cookie := p.ns.Cookie()
	r.change(uid, func() { r.forget(uid, cookie) })
}

// mayMove says whether a path may be followed to another namespace. That of a process may not: its number may be another's now.
func mayMove(path string) bool { return !strings.HasPrefix(path, "/proc/") }

// fit says whether a namespace can be enrolled already. The pod may have other addresses there.
func (e *Enroller) fit(ns *podns.NetNS, spec *Spec) bool {
	n, err := openPodNet(ns)
	if err != nil {
		return false
	}
	defer n.close()
	addrs, err := n.addrs()
	if err != nil || !n.loUp {
		return false
	}
	if !slices.ContainsFunc(spec.IPs, func(ip netip.Addr) bool { _, ok := addrs[ip.Unmap()]; return ok }) {
		spec.IPs = nil
	}
	return true
}

// move enrols a pod in the namespace that its path leads to now.
func (r *reconciler) move(spec Spec, since time.Time) {
	ns, err := podns.Open(spec.NetNS)
	if err != nil {
		r.changeFailed(spec.UID, err)
		return
	}
	if old := r.shown(spec.UID); old == nil || old.NetNSCookie == ns.Cookie() {
		_ = ns.Close()
		return
	}
	if err := r.captureIn(ns, spec, leftovers{}, since); err != nil {
		r.changeFailed(spec.UID, err)
		return
	}
	p := r.claim(spec.UID)
	defer r.release(p)
	if p.ns != nil {
		r.repaired(p, RepairNetNS)
	}
}

// forget removes a pod whose namespace nothing leads to.
func (r *reconciler) forget(uid string, cookie uint64) {
	p := r.claim(uid)
	defer r.release(p)
	if p.ns == nil || p.ns.Cookie() != cookie {
		return
	}
	r.repaired(p, RepairGone)
	if err := r.remove(r.ctx, p); err != nil {
		r.failed(p, err)
	}
}

func (e *Enroller) changeFailed(uid string, err error) {
	p := e.claim(uid)
	defer e.release(p)
	if p.ns == nil {
		e.Log.Error("cannot follow a pod into its new network namespace: enroll it again", "uid", uid, "error", err)
		return
	}
	e.failed(p, err)
}
