// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	gomaps "maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/fault"
	"github.com/redirector-dataplane/redirector/pkg/journal"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// Errors that callers act on.
var (
	// ErrPending says that a pod is captured, and that no proxy runs for it yet. It will be handed to one that comes.
	ErrPending = errors.New("the pod is captured, and nothing of it passes until a proxy runs for it")
	// ErrTaken says that a network namespace belongs to another enrolled pod.
	ErrTaken = errors.New("unenroll that one first")
)

// Config is what an Enroller works with. All fields are needed but those whose names begin with Observe.
type Config struct {
	Datapath *loader.Datapath
	Proxies  *zds.Server
	// StateDir is the directory for one small file per pod.
	StateDir string
	Log      *slog.Logger
	// DNSCapture says whether to capture the DNS queries of pods that do not say it themselves.
	DNSCapture bool
	// Observe is told how long each step of an enrolment took. It may be nil.
	Observe func(step string, took time.Duration)
	// ObserveEnrolment is told how long each enrolment, or its repetition, took without the wait for a proxy, and how it ended.
	// It may be nil.
	ObserveEnrolment func(took time.Duration, err error)
	// ObserveReconcile is told how long each look of Reconcile at all pods took. It may be nil.
	ObserveReconcile func(took time.Duration)
	// ObserveRepair is told of each repair, and of which pod by its UID; "": of what all pods share, or of none. It is called while
	// the pod is being worked on, and must not ask the Enroller for anything. It may be nil.
	ObserveRepair func(uid string, kind Repair)
}

// Enroller enrols pods and takes them out again. Its methods may be called from several goroutines; work on one pod never
// waits for another.
type Enroller struct {
	Config

	mu sync.Mutex
	// byUID has an entry for each pod that is enrolled, or is being worked on.
	byUID map[string]*pod
	// byCookie says which pod has a network namespace.
	byCookie map[uint64]*pod
	repairs  map[Repair]uint64
	// journal remembers what happened to pods.
	journal journal.Journal
	// changing has the pods that the reconcile loop is moving or removing.
	changing map[string]bool

	// counted is held while counters are summed or removed, so that they are in exactly one of map counters and past.
	counted sync.Mutex
	// past sums the counters of pods that have left.
	past maps.Counters
}

// pod is one pod. The mutex is held during any work on it.
type pod struct {
	uid string

	mu sync.Mutex
	// users counts who has a claim on the entry in byUID; guarded by Enroller.mu.
	users int
	// ns is nil while the pod is not enrolled.
	ns       *podns.NetNS
	spec     Spec
	since    time.Time
	ownAddrs map[netip.Addr]int
	// before is what the namespace was like before.
	before before
	// probed are the addresses under which the host's probes find the pod.
	probed map[netip.Addr]bool
	// excepted is what maps exceptions and cidrs are to have of the pod, and reroutes are the interfaces that there are rules for.
	excepted maps.Exceptions
	reroutes []string
	watch    *watch
	// offered says that the proxy was asked to start anew for the pod, as its listeners could not be found.
	offered bool
	// shown is what Pod says of the pod without waiting for the mutex: what was so when it was last released. Nil: nothing.
	shown atomic.Pointer[Pod]
	// entry is what map pods is to have, and steer the program that is to run. ipv6 says whether the namespace has IPv6.
	entry maps.Pod
	steer ebpf.ProgramID
	ipv6  bool
	// lead is a path that leads to the namespace now that the one in spec does not; unused counts looks that have found none.
	lead   string
	unused int
	// failing is the last failure to keep things as they should be, "" if the last try went well.
	failing string
}

// New returns an Enroller that knows no pods yet; see Restore.
func New(c Config) *Enroller {
	if c.Observe == nil {
		c.Observe = func(string, time.Duration) {}
	}
	if c.ObserveEnrolment == nil {
		c.ObserveEnrolment = func(time.Duration, error) {}
	}
	if c.ObserveReconcile == nil {
		c.ObserveReconcile = func(time.Duration) {}
	}
	if c.ObserveRepair == nil {
		c.ObserveRepair = func(string, Repair) {}
	}
	return &Enroller{Config: c, byUID: map[string]*pod{}, byCookie: map[uint64]*pod{}, repairs: map[Repair]uint64{}, changing: map[string]bool{}}
}

// Close ends what the Enroller does by itself, and gives back its handles. The pods stay as they are.
func (e *Enroller) Close() {
	for _, uid := range e.uids() {
		p := e.claim(uid)
		p.stopWatch()
		if p.ns != nil {
			e.leave(p)
			_ = p.ns.Close()
			p.ns = nil
		}
		e.release(p)
	}
}

// uids lists the pods that are enrolled or being worked on.
func (e *Enroller) uids() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(gomaps.Keys(e.byUID))
}

// claim returns the pod's entry, made if need be, locked for the caller, who must release it.
func (e *Enroller) claim(uid string) *pod {
	e.mu.Lock()
	p := e.byUID[uid]
	if p == nil {
		p = &pod{uid: uid}
		e.byUID[uid] = p
	}
	p.users++
	e.mu.Unlock()
	p.mu.Lock()
	return p
}

func (e *Enroller) release(p *pod) {
	enrolled := p.ns != nil
	p.show()
	p.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	p.users--
	if p.users == 0 && !enrolled {
		delete(e.byUID, p.uid)
	}
}

// Enroll captures a pod and hands it to the proxy. It may be repeated, to repair or to wait again. When it fails before
// capture is on, nothing is left of it. When only the proxy is missing or refuses, the error wraps ErrPending and the pod
// stays captured; with wait false the proxy is not waited for.
func (e *Enroller) Enroll(ctx context.Context, spec Spec, wait bool) error {
	if err := spec.Validate(); err != nil {
		return err
	}
	start := time.Now()
	err := e.capture(spec)
	e.ObserveEnrolment(time.Since(start), err)
	if err != nil {
		return fmt.Errorf("enrol pod %s (%s): %w", &spec, spec.UID, err)
	}
	if !wait {
		return nil
	}
	if err := e.Proxies.Wait(ctx, spec.UID); err != nil {
		if errors.Is(err, zds.ErrNotSet) {
			return fmt.Errorf("enrol pod %s (%s): it was unenrolled meanwhile: enroll it again if that was not meant", &spec, spec.UID)
		}
		return fmt.Errorf("enrol pod %s (%s): %w: %w", &spec, spec.UID, ErrPending, err)
	}
	e.takeOverListeners()
	return nil
}

// capture does all of an enrolment but waiting for the proxy.
func (e *Enroller) capture(spec Spec) error {
	ns, err := podns.Open(spec.NetNS)
	if err != nil {
		return err
	}
	return e.captureIn(ns, spec, leftovers{}, time.Now())
}

// leftovers are a pod's entries in maps that an earlier agent has made.
type leftovers struct {
	ownAddrs map[netip.Addr]int
	probed   map[netip.Addr]bool
	excepted maps.Exceptions
	// captured says that the pod was captured when that agent ended.
	captured bool
}

// captureIn is capture in an open namespace, which is closed unless it is kept for the pod.
func (e *Enroller) captureIn(ns *podns.NetNS, spec Spec, left leftovers, since time.Time) error {
	p := e.claim(spec.UID)
	defer e.release(p)

	if err := e.take(ns, p); err != nil {
		return errors.Join(err, ns.Close())
	}
	if p.ns != nil && p.ns.Cookie() != ns.Cookie() {
		e.Log.Info("pod has another network namespace now", "pod", spec.String(), "uid", spec.UID, "netns", ns.Path())
		// Its file stays, for an agent that is killed meanwhile is followed by one that must know of the pod.
		if err := e.vacate(context.Background(), p); err != nil {
			e.drop(ns, p)
			return errors.Join(fmt.Errorf("leave the network namespace that it had: %w", err), ns.Close())
		}
		if err := e.letGo(p); err != nil {
			e.Log.Warn("cannot close a network namespace that a pod has no more", "pod", spec.String(), "uid", spec.UID, "error", err)
		}
	}

	if p.ns != nil { // enrolled before, to be repaired or renamed
		old := p.spec
		p.spec = spec
		err := e.apply(p)
		if err != nil {
			p.spec = old
			err = errors.Join(err, e.saveState(p))
		}
		return errors.Join(err, ns.Close())
	}
	p.ns, p.spec, p.ownAddrs, p.probed, p.excepted, p.since = ns, spec, left.ownAddrs, left.probed, left.excepted, since
	p.failing, p.lead, p.unused = "", "", 0
	if left.captured {
		// An address that is not in the map as the pod's has become another's: it is not new for this one.
		p.probed = p.probeAddrs()
		gomaps.Copy(p.probed, left.probed)
	}
	if err := e.apply(p); err != nil {
		e.leave(p)
		p.forget()
		return errors.Join(err, ns.Close())
	}
	if left.captured {
		e.happened(p, journal.Adopted, "", "this agent has taken over the pod")
	} else {
		e.happened(p, journal.Enrolled, "", "the pod is captured")
	}
	return nil
}

// forget makes it a pod that is not enrolled. Its namespace is the caller's to close.
func (p *pod) forget() {
	p.ns, p.ownAddrs, p.probed, p.excepted = nil, nil, nil, maps.Exceptions{}
}

// take notes that the pod has the network namespace, and fails if another pod does.
func (e *Enroller) take(ns *podns.NetNS, p *pod) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if other := e.byCookie[ns.Cookie()]; other != nil && other != p {
		return fmt.Errorf("network namespace %s belongs to the enrolled pod with UID %s: %w", ns.Path(), other.uid, ErrTaken)
	}
	e.byCookie[ns.Cookie()] = p
	return nil
}

func (e *Enroller) leave(p *pod) { e.drop(p.ns, p) }

// drop undoes take.
func (e *Enroller) drop(ns *podns.NetNS, p *pod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.byCookie[ns.Cookie()] == p {
		delete(e.byCookie, ns.Cookie())
	}
}

// apply makes everything so for the pod. On failure, what it has added is gone again.
func (e *Enroller) apply(p *pod) (err error) {
	var undos undoList
	var n *podNet
	defer func() {
		if err != nil {
			err = errors.Join(err, undos.run())
		}
		// Not before: a closed netlink handle acts on the namespace of whoever calls, which is the host's.
		if n != nil {
			n.close()
		}
	}()
	step := func(name string, do func() (func() error, error)) {
		if err != nil {
			return
		}
		start := time.Now()
		var undo func() error
		undo, err = do()
		undos.add(undo)
		e.Observe(name, time.Since(start))
		fault.Point("enrol: " + name)
	}

	// Loading takes long enough to be done beside all the rest.
	steer := make(chan steerProgram, 1)
	go func() { steer <- e.loadSteer(p) }()
	defer func() {
		if s, ok := <-steer; ok && s.prog != nil {
			s.prog.Close()
		}
	}()

	// Before anything is looked at: what changes from then on is not missed.
	step("watch", func() (func() error, error) {
		if p.watch != nil {
			return nil, nil
		}
		var err error
		p.watch, err = e.startWatch(p)
		return func() error { p.stopWatch(); return nil }, err
	})
	step("open", func() (func() error, error) {
		n, err = openPodNet(p.ns)
		return nil, err
	})
	if err != nil {
		return err
	}

	known, errKnown := e.Datapath.Maps().Pod(p.ns.Cookie())
	enrolled := errKnown == nil
	if !enrolled && !errors.Is(errKnown, ebpf.ErrKeyNotExist) {
		return errKnown
	}

	// The note of what was so before is written before anything is changed.
	step("state file", func() (func() error, error) {
		var noted bool
		if p.before, noted = e.stateBefore(p); !noted {
			if p.before, err = n.look(&p.watch.sysctls); err != nil {
				return nil, err
			}
		}
		if enrolled {
			p.before.Restore = known.Restore
		}
		if err := e.saveState(p); err != nil || enrolled || noted {
			return nil, err
		}
		return func() error { return e.removeState(p.uid) }, nil
	})
	step("own addresses", func() (func() error, error) { return e.applyOwnAddrs(p, n) })
	for _, family := range families {
		step("routing "+familyName(family), func() (func() error, error) {
			p.reroutes, _ = p.rerouted(n)
			return n.addRouting(family, p.reroutes)
		})
	}
	var changed maps.Restore
	step("sysctls", func() (func() error, error) {
		var err error
		changed, err = p.watch.sysctls.switchOn(p.ns, n.ipv6)
		return func() error { return restoreSysctls(p.ns, n.ipv6, changed) }, err
	})
	step("seal", func() (func() error, error) { return e.applySeals(p, n, true) })
	step("steer", func() (func() error, error) {
		s := <-steer
		close(steer)
		if s.err != nil {
			return nil, s.err
		}
		if s.prog == nil {
			p.steer = s.current
			return nil, nil
		}
		defer s.prog.Close()
		if err := e.Datapath.AttachSteer(p.ns, p.uid, s.prog); err != nil {
			return nil, err
		}
		var err error
		if p.steer, err = e.Datapath.SteerProgram(p.ns, p.uid); enrolled {
			return nil, err
		}
		return func() error { return e.Datapath.DetachSteer(p.uid) }, err
	})
	// Before the entry, which has the programs look for them.
	step("exceptions", func() (func() error, error) { return e.applyExceptions(p, n) })
	step("map entry", func() (func() error, error) {
		exit, err := n.exit(p.spec.IPs, p.ownAddrs)
		if err != nil {
			return nil, err
		}
		entry := maps.Pod{
			UID: p.uid, NetNSInode: p.ns.Inode(), Interface: n.onlyInterface(), Exit: exit, Restore: p.before.Restore,
		}
		e.putSettings(p, &entry)
		entry.Restore.TCPFwmarkAccept = entry.Restore.TCPFwmarkAccept || changed.TCPFwmarkAccept
		entry.Restore.FwmarkReflect = entry.Restore.FwmarkReflect || changed.FwmarkReflect
		entry.Restore.FwmarkReflectV6 = entry.Restore.FwmarkReflectV6 || changed.FwmarkReflectV6
		if err := e.Datapath.Maps().PutPod(p.ns.Cookie(), entry); err != nil {
			return nil, err
		}
		p.entry, p.ipv6 = entry, n.ipv6
		if enrolled {
			return func() error { return e.Datapath.Maps().PutPod(p.ns.Cookie(), known) }, nil
		}
		return func() error { return e.Datapath.Maps().DeletePod(p.ns.Cookie()) }, nil
	})
	// After the entry that switches capture on: the seal holds from either on, and would drop what is not captured yet.
	step("counters", func() (func() error, error) {
		made, err := e.Datapath.Maps().CreateCounters(p.ns.Cookie())
		if err != nil || !made || enrolled {
			return nil, err
		}
		return func() error { return e.deleteCounters(p.ns.Cookie()) }, nil
	})
	step("probe targets", func() (func() error, error) { return e.applyProbeTargets(p) })
	step("proxy", func() (func() error, error) {
		p.offered = false
		return nil, e.Proxies.Set(p.zdsPod())
	})
	return err
}

// zdsPod is what proxies are told of the pod.
func (p *pod) zdsPod() zds.Pod {
	return zds.Pod{
		UID:            p.uid,
		Name:           p.spec.Name,
		Namespace:      p.spec.Namespace,
		ServiceAccount: p.spec.ServiceAccount,
		NetNS:          p.ns,
	}
}

// steerProgram is the steer program to attach; nil: the one that runs is right, with this id.
type steerProgram struct {
	prog    *ebpf.Program
	current ebpf.ProgramID
	err     error
}

// loadSteer loads the pod's steer program unless an earlier agent has left the same one.
func (e *Enroller) loadSteer(p *pod) (s steerProgram) {
	if s.current, s.err = e.Datapath.CurrentSteer(p.ns, p.uid); s.err == nil && s.current == 0 {
		s.prog, s.err = e.Datapath.LoadSteer(p.ns)
	}
	return s
}

// applyOwnAddrs makes the map hold exactly the addresses that the pod has.
func (e *Enroller) applyOwnAddrs(p *pod, n *podNet) (undo func() error, err error) {
	have, err := n.addrs()
	if err != nil {
		return nil, err
	}
	if len(p.spec.IPs) > 0 && !slices.ContainsFunc(p.spec.IPs, func(ip netip.Addr) bool { _, ok := have[ip.Unmap()]; return ok }) {
		return nil, fmt.Errorf("network namespace %s owns none of the pod's addresses %s: name the pod's own", p.ns.Path(), joinAddrs(p.spec.IPs))
	}

	cookie := p.ns.Cookie()
	var undos undoList
	before := p.ownAddrs
	for addr, ifindex := range have {
		if old, ok := before[addr]; ok && old == ifindex {
			continue
		}
		if err := e.Datapath.Maps().PutOwnAddr(cookie, addr, ifindex); err != nil {
			return nil, errors.Join(err, undos.run())
		}
		if _, ok := before[addr]; !ok {
			undos.add(func() error { return e.Datapath.Maps().DeleteOwnAddr(cookie, addr) })
		}
	}
	for addr := range before {
		if _, ok := have[addr]; ok {
			continue
		}
		if err := e.Datapath.Maps().DeleteOwnAddr(cookie, addr); err != nil {
			return nil, errors.Join(err, undos.run())
		}
	}
	p.ownAddrs = have
	undos.add(func() error { p.ownAddrs = before; return nil })
	return undos.run, nil
}

// probeAddrs are the addresses under which probes may come: those that the pod is known by, or if there are none, all of its
// own that others can reach.
func (p *pod) probeAddrs() map[netip.Addr]bool {
	addrs := map[netip.Addr]bool{}
	for _, ip := range p.spec.IPs {
		addrs[ip.Unmap()] = true
	}
	if len(addrs) == 0 {
		for addr := range p.ownAddrs {
			if addr.IsGlobalUnicast() {
				addrs[addr] = true
			}
		}
	}
	return addrs
}

// applyProbeTargets makes the map hold the addresses under which probes may come. An address that is new for the pod becomes
// the pod's. One that another pod has taken since stays that one's for as long as it has it.
func (e *Enroller) applyProbeTargets(p *pod) (undo func() error, err error) {
	m := e.Datapath.Maps()
	want := p.probeAddrs()
	target := maps.ProbeTarget{NetNSCookie: p.ns.Cookie(), UID: p.uid}
	before := p.probed
	var undos undoList
	for addr := range want {
		if before[addr] {
			made, err := m.KeepProbeTarget(addr, target)
			if err != nil {
				return nil, errors.Join(err, undos.run())
			}
			if made {
				e.repaired(p, RepairProbeTarget)
			}
			continue
		}
		if err := m.PutProbeTarget(addr, target); err != nil {
			return nil, errors.Join(err, undos.run())
		}
		undos.add(func() error { return m.DeleteProbeTarget(addr, p.uid) })
	}
	for addr := range before {
		if want[addr] {
			continue
		}
		if err := m.DeleteProbeTarget(addr, p.uid); err != nil {
			return nil, errors.Join(err, undos.run())
		}
	}
	p.probed = want
	undos.add(func() error { p.probed = before; return nil })
	return undos.run, nil
}

// hadClsact says whether a clsact qdisc that the interface has now may be another's: it was there before enrolment, or the
// interface was not.
func (p *pod) hadClsact(l netlink.Link) bool {
	return slices.Contains(p.before.Clsact, l.Attrs().Index) || !slices.Contains(p.before.Links, l.Attrs().Index)
}

// applySeals gives every interface its seal: this version's to each, or one only to those that have none.
func (e *Enroller) applySeals(p *pod, n *podNet, renew bool) (undo func() error, err error) {
	var undos undoList
	for _, l := range n.links {
		var sealed, right bool
		var err error
		if renew {
			sealed, right, err = e.Datapath.CurrentSeal(p.ns, n.handle, l)
		} else {
			sealed, err = loader.Sealed(n.handle, l)
			right = sealed
		}
		if err == nil && !right {
			err = e.Datapath.Seal(p.ns, n.handle, l, p.hadClsact(l))
		}
		if err != nil {
			return nil, errors.Join(err, undos.run())
		}
		if !sealed {
			undos.add(func() error { return loader.Unseal(n.handle, l) })
		}
	}
	return undos.orNil(), nil
}

// Unenroll takes a pod out: from then on its new connections are its own, as before Enroll, and its namespace is as it was.
// That there is no such pod is no error. It waits for the proxies' answers, but goes on without those that do not come.
func (e *Enroller) Unenroll(ctx context.Context, uid string) error {
	if err := ValidateUID(uid); err != nil {
		return err
	}
	p := e.claim(uid)
	defer e.release(p)
	var err error
	if p.ns != nil {
		err = e.remove(ctx, p)
	} else {
		err = e.removeUnknown(ctx, uid)
	}
	if err != nil {
		return fmt.Errorf("unenrol pod %s: %w", uid, err)
	}
	return nil
}

// remove undoes apply. When it fails the pod is still there, captured, for another try; but when its file alone cannot be
// removed, it is out.
func (e *Enroller) remove(ctx context.Context, p *pod) error {
	if err := e.vacate(ctx, p); err != nil {
		return err
	}
	err := e.removeState(p.uid)
	if err != nil {
		err = fmt.Errorf("it is out, but would be enrolled again by the next agent: %w: remove that file", err)
	}
	fault.Point("unenrol: state file removed")
	e.happened(p, journal.Unenrolled, "", "the pod is captured no more")
	return errors.Join(err, e.letGo(p))
}

// vacate takes all of a pod but its file out of its network namespace, the maps and the proxies. When it fails the pod is still
// captured.
func (e *Enroller) vacate(ctx context.Context, p *pod) error {
	// If its file stays as it is, the next agent enrols it again.
	if err := unix.Access(e.StateDir, unix.W_OK); err != nil {
		return fmt.Errorf("forget the pod: %s: %w: make it writable", e.StateDir, err)
	}
	if err := e.Proxies.Remove(ctx, p.uid); err != nil {
		// They have been told, and hear it again when they connect: no reason to keep the pod.
		e.Log.Warn("a proxy has not confirmed that it left the pod", "pod", p.spec.String(), "uid", p.uid, "error", err)
	}
	fault.Point("unenrol: proxies told")
	p.stopWatch()
	return e.clear(p.uid, p.ns.Cookie(), p.ns, leftovers{ownAddrs: p.ownAddrs, probed: p.probed, excepted: p.excepted}, p.before)
}

// letGo gives back the network namespace that the pod has left.
func (e *Enroller) letGo(p *pod) error {
	e.leave(p)
	err := p.ns.Close()
	p.forget()
	return err
}

// clear removes what the kernel has of a pod. ns is nil when the namespace is gone, and all in it.
func (e *Enroller) clear(uid string, cookie uint64, ns *podns.NetNS, left leftovers, was before) error {
	m := e.Datapath.Maps()
	known, err := m.Pod(cookie)
	enrolled := err == nil
	if !enrolled && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	// Capture ends first, so that no connection is marked for a route that is gone. When the rest fails it is switched on
	// again: a pod is either out or captured, and the entry is what remembers the sysctls to restore. Before that the counters
	// go, with which the seal holds.
	if err := errors.Join(e.deleteCounters(cookie), m.DeletePod(cookie)); err != nil {
		return err
	}
	fault.Point("unenrol: capture off")
	err = e.Datapath.DetachSteer(uid)
	fault.Point("unenrol: steer detached")
	if ns != nil {
		if enrolled {
			was.Restore = known.Restore
		}
		err = errors.Join(err, strip(ns, was))
	}
	fault.Point("unenrol: namespace restored")
	if err != nil {
		if enrolled {
			_, errCounters := m.CreateCounters(cookie)
			err = errors.Join(err, m.PutPod(cookie, known), errCounters)
		}
		return err
	}
	errs := []error{m.DeleteListeners(cookie)}
	for addr := range left.ownAddrs {
		errs = append(errs, m.DeleteOwnAddr(cookie, addr))
	}
	for addr := range left.probed {
		errs = append(errs, m.DeleteProbeTarget(addr, uid))
	}
	errs = append(errs, m.SetExceptions(cookie, left.excepted, maps.Exceptions{}))
	fault.Point("unenrol: map entries removed")
	return errors.Join(errs...)
}

func joinAddrs(addrs []netip.Addr) string {
	var b strings.Builder
	for i, a := range addrs {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(a.String())
	}
	return b.String()
}
