// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	gomaps "maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/journal"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// inspectPatience is how long Inspect waits for work on the pod that is under way.
const inspectPatience = 3 * time.Second

// ErrBusy says that a pod is being worked on.
var ErrBusy = errors.New("the pod is being enrolled, moved or removed: ask again in a few seconds")

// ObjectKind is what sort of thing an Object is.
type ObjectKind string

// The kinds of objects.
const (
	ObjectMapEntry ObjectKind = "map entry"
	ObjectListener ObjectKind = "listener"
	ObjectLink     ObjectKind = "link"
	ObjectFilter   ObjectKind = "filter"
	ObjectRule     ObjectKind = "rule"
	ObjectRoute    ObjectKind = "route"
	ObjectSysctl   ObjectKind = "sysctl"
)

// Object is something that the kernel must have for a pod.
type Object struct {
	Kind ObjectKind `json:"kind"`
	// Name tells it from the pod's other objects of its kind.
	Name string `json:"name"`
	// ID is the number of its program or map, as bpftool shows it; 0: it has none, or is not there.
	ID uint32 `json:"id,omitempty"`
	// Link is the number of the link that keeps the program where it is.
	Link uint32 `json:"link,omitempty"`
	// Want is what should be so, Have what is.
	Want string `json:"want"`
	Have string `json:"have"`
	OK   bool   `json:"ok"`
	// Show is a command that shows it, for root on the node.
	Show string `json:"show"`
}

// Inspection is all that is known of one pod.
type Inspection struct {
	Pod
	// Captured is whether the kernel has the entry that switches capture on.
	Captured bool `json:"captured"`
	// Failing says why things cannot be kept as they should be; empty if they can.
	Failing string `json:"failing,omitempty"`
	// Proxies says how the pod stands with the node proxies.
	Proxies zds.PodStatus `json:"proxies"`
	// Objects are what the kernel must have for the pod, and has.
	Objects []Object `json:"objects"`
	// Events are the last things that happened to the pod, oldest first.
	Events []journal.Event `json:"events"`
}

// Drift are the objects that are not as they should be.
func (i *Inspection) Drift() []Object {
	return slices.DeleteFunc(slices.Clone(i.Objects), func(o Object) bool { return o.OK })
}

// Inspect looks at everything that the kernel has of one pod, and repairs nothing. The error wraps ErrNotEnrolled if there is no
// such pod, and ErrBusy when it is being worked on for longer than a few seconds.
func (e *Enroller) Inspect(ctx context.Context, uid string) (*Inspection, error) {
	shown, err := e.Pod(uid)
	if err != nil {
		return nil, err
	}
	p, err := e.claimWithin(ctx, uid, inspectPatience)
	if err != nil {
		return nil, err
	}
	defer e.release(p)
	if p.ns == nil {
		return nil, ErrNotEnrolled
	}
	i := &Inspection{Pod: shown, Failing: p.failing, Events: e.journal.Of(uid)}
	i.Proxies, _ = e.Proxies.Pod(uid)
	n, err := openPodNet(p.ns)
	if err != nil {
		return nil, err
	}
	defer n.close()
	look := inspector{e, p, n, i}
	for _, at := range []func() error{look.entries, look.listeners, look.programs, look.routing, look.sysctls} {
		if err := at(); err != nil {
			return nil, err
		}
	}
	return i, nil
}

// InterfaceIndex finds an interface of a pod by its name. The error wraps ErrNotEnrolled if there is no such pod, ErrBusy when it is being
// worked on for longer than a few seconds; it is an *InvalidError when it has no such interface.
func (e *Enroller) InterfaceIndex(ctx context.Context, uid, name string) (int, error) {
	p, err := e.claimWithin(ctx, uid, inspectPatience)
	if err != nil {
		return 0, err
	}
	defer e.release(p)
	if p.ns == nil {
		return 0, ErrNotEnrolled
	}
	n, err := openPodNet(p.ns)
	if err != nil {
		return 0, err
	}
	defer n.close()
	link, err := n.handle.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return 0, &InvalidError{fmt.Errorf("pod %s has no interface %q: see `nsenter --net=%s ip link`", p.uid, name, p.ns.Path())}
	}
	if err != nil {
		return 0, fmt.Errorf("look for interface %q of pod %s: %w", name, p.uid, err)
	}
	return link.Attrs().Index, nil
}

// claimWithin is tryClaim again and again until that works, the pod is no more, or time is up.
func (e *Enroller) claimWithin(ctx context.Context, uid string, patience time.Duration) (*pod, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		if p := e.tryClaim(uid); p != nil {
			return p, nil
		}
		if e.shown(uid) == nil {
			return nil, ErrNotEnrolled
		}
		select {
		case <-ctx.Done():
			return nil, ErrBusy
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// inspector looks at one pod, whose mutex is held.
type inspector struct {
	e *Enroller
	p *pod
	n *podNet
	i *Inspection
}

func (l *inspector) add(o Object) { l.i.Objects = append(l.i.Objects, o) }

// inNetNS is a command that is run in the pod's network namespace.
func (l *inspector) inNetNS(command string) string {
	return "nsenter --net=" + shellWord(l.p.ns.Path()) + " " + command
}

// shellWord quotes what a shell would not leave alone.
func shellWord(s string) string {
	if strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-:") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// lookUp is the command that shows a map's entry.
func (l *inspector) lookUp(name string, key ...[]byte) string {
	var b strings.Builder
	fmt.Fprintf(&b, "bpftool map lookup pinned %s key hex", shellWord(l.e.Datapath.PinOfMap(name)))
	for _, part := range key {
		for _, one := range part {
			fmt.Fprintf(&b, " %02x", one)
		}
	}
	return b.String()
}

func bytes64(v uint64) []byte { return binary.NativeEndian.AppendUint64(nil, v) }

func bytes32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// mapID is the number of a map.
func mapID(m *ebpf.Map) uint32 {
	info, err := m.Info()
	if err != nil {
		return 0
	}
	id, _ := info.ID()
	return uint32(id)
}

// entries looks at what the maps have of the pod.
func (l *inspector) entries() error {
	m, cookie := l.e.Datapath.Maps(), l.p.ns.Cookie()
	entry, err := m.Pod(cookie)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	l.i.Captured = err == nil
	o := Object{
		Kind: ObjectMapEntry, Name: bpf.RedirectorMapPods, ID: mapID(m.RedirectorMaps.Pods), OK: entry == l.p.entry,
		Want: entryText(&l.p.entry), Have: "missing: new connections are not captured, and the seal drops them",
		Show: l.lookUp(bpf.RedirectorMapPods, bytes64(cookie)),
	}
	if l.i.Captured {
		o.Have = entryText(&entry)
	}
	l.add(o)

	_, err = m.Counters(cookie)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	l.add(Object{
		Kind: ObjectMapEntry, Name: bpf.RedirectorMapCounters, ID: mapID(m.RedirectorMaps.Counters), OK: err == nil,
		Want: "present", Have: present(err == nil), Show: l.lookUp(bpf.RedirectorMapCounters, bytes64(cookie)),
	})
	return errors.Join(l.ownAddrs(), l.probeTargets(), l.exceptions())
}

func entryText(p *maps.Pod) string {
	return fmt.Sprintf("uid %s, inode %d, dns %s, bypass-inbound %s", p.UID, p.NetNSInode, onOff(p.DNSCapture), onOff(p.BypassInbound))
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

func present(b bool) string {
	if b {
		return "present"
	}
	return "missing"
}

// ownAddrs compares the addresses of the pod's interfaces with the map's.
func (l *inspector) ownAddrs() error {
	m, cookie := l.e.Datapath.Maps(), l.p.ns.Cookie()
	want, err := l.n.addrs()
	if err != nil {
		return err
	}
	all, err := m.OwnAddrs()
	if err != nil {
		return err
	}
	have := all[cookie]
	both := gomaps.Clone(want)
	gomaps.Copy(both, have)
	for _, addr := range slices.SortedFunc(gomaps.Keys(both), netip.Addr.Compare) {
		key := addr.As16()
		l.add(Object{
			Kind: ObjectMapEntry, Name: bpf.RedirectorMapOwnAddrs + " " + addr.String(), ID: mapID(m.RedirectorMaps.OwnAddrs),
			OK: want[addr] == have[addr], Want: onInterface(want[addr]), Have: onInterface(have[addr]),
			Show: l.lookUp(bpf.RedirectorMapOwnAddrs, bytes64(cookie), key[:]),
		})
	}
	return nil
}

func onInterface(index int) string {
	if index == 0 {
		return "missing"
	}
	return fmt.Sprintf("on interface %d", index)
}

func (l *inspector) probeTargets() error {
	m := l.e.Datapath.Maps()
	targets, err := m.ProbeTargets()
	if err != nil {
		return err
	}
	want := maps.ProbeTarget{NetNSCookie: l.p.ns.Cookie(), UID: l.p.uid}
	for _, addr := range slices.SortedFunc(gomaps.Keys(l.p.probed), netip.Addr.Compare) {
		key := addr.As16()
		target, ok := targets[addr]
		o := Object{
			Kind: ObjectMapEntry, Name: bpf.RedirectorMapProbeTargets + " " + addr.String(), ID: mapID(m.RedirectorMaps.ProbeTargets),
			OK: target == want, Want: "of this pod", Have: "of this pod", Show: l.lookUp(bpf.RedirectorMapProbeTargets, key[:]),
		}
		switch {
		case !ok:
			o.Have = "missing: probes are captured as any other connection"
		case target.UID != want.UID: // of two pods that have an address, the last to come has its probes
			o.Have, o.OK = "of pod "+target.UID, true
		case target != want:
			o.Have = "of a network namespace that the pod has no more"
		}
		l.add(o)
	}
	return nil
}

// exceptions looks at what the pod has its own way.
func (l *inspector) exceptions() error {
	m := l.e.Datapath.Maps()
	all, err := m.Exceptions()
	if err != nil {
		return err
	}
	want, have := l.p.excepted, all[l.p.ns.Cookie()]
	count := func(e maps.Exceptions) string {
		return fmt.Sprintf("%d ports and interfaces, %d ranges", len(e.Values), len(e.CIDRs))
	}
	o := Object{
		Kind: ObjectMapEntry, Name: bpf.RedirectorMapExceptions + ", " + bpf.RedirectorMapCidrs, ID: mapID(m.RedirectorMaps.Exceptions),
		OK: have.Equal(want), Want: count(want), Have: count(have),
		Show: "bpftool map dump pinned " + shellWord(l.e.Datapath.PinOfMap(bpf.RedirectorMapExceptions)),
	}
	if !o.OK && o.Have == o.Want {
		o.Have += ", but others"
	}
	l.add(o)
	return nil
}

// listenerNames say what the proxy's ports are for.
var listenerNames = []struct {
	port uint16
	name string
}{
	{maps.PortOutbound, "outbound"}, {maps.PortInbound, "inbound"}, {maps.PortHBONE, "mesh"},
}

func (l *inspector) listeners() error {
	m := l.e.Datapath.Maps()
	for _, want := range listenerNames {
		n := l.i.Listeners[want.port]
		o := Object{
			Kind: ObjectListener, Name: fmt.Sprintf("%d (%s)", want.port, want.name), ID: mapID(m.RedirectorMaps.Listeners), OK: n > 0,
			Want: "a socket of the node proxy's", Have: "none: connections are dropped",
			Show: l.lookUp(bpf.RedirectorMapListeners, bytes64(l.p.ns.Cookie()), bytes32(uint32(want.port)), bytes32(0)),
		}
		if n > 0 {
			o.Have = fmt.Sprintf("%d", n)
		}
		l.add(o)
	}
	return nil
}

// programs looks at the steer program and at the seals.
func (l *inspector) programs() error {
	linkID, prog, err := l.e.Datapath.SteerLink(l.p.ns, l.p.uid)
	if err != nil {
		return err
	}
	o := Object{
		Kind: ObjectLink, Name: "steer", ID: uint32(prog), Link: uint32(linkID), OK: prog != 0 && prog == l.p.steer,
		Want: fmt.Sprintf("sk_lookup program %d on the network namespace", l.p.steer),
		Have: "missing: connections reach no proxy", Show: "bpftool link show pinned " + shellWord(l.e.Datapath.PinOfSteer(l.p.uid)),
	}
	if prog != 0 {
		o.Have = fmt.Sprintf("sk_lookup program %d", prog)
	}
	l.add(o)
	for _, link := range l.n.links {
		prog, first, err := loader.SealProgram(l.n.handle, link)
		if err != nil {
			return err
		}
		name := link.Attrs().Name
		o := Object{
			Kind: ObjectFilter, Name: "seal on " + name, ID: uint32(prog), OK: first, Want: "the first filter on egress", Have: "the first filter on egress",
			Show: l.inNetNS("tc filter show dev " + shellWord(name) + " egress"),
		}
		switch {
		case prog == 0:
			o.Have = "missing: what is not captured can leave"
		case !first:
			o.Have = "behind another filter, which may keep it from being asked"
		}
		l.add(o)
	}
	return nil
}

// routing looks at the rules and routes that lead marked connections to lo, and those of machines behind the pod.
func (l *inspector) routing() error {
	for _, family := range families {
		name, flag := familyName(family), "-4"
		if name == "IPv6" {
			if !l.n.ipv6 {
				continue
			}
			flag = "-6"
		}
		table, err := l.n.findTable(family)
		if err != nil {
			return err
		}
		have, err := l.n.listRules(family)
		if err != nil {
			return fmt.Errorf("list the %s rules: %w", name, err)
		}
		for _, want := range rules(family, table, l.p.reroutes) {
			there := slices.ContainsFunc(have, func(r netlink.Rule) bool { return sameRule(&r, want) })
			l.add(Object{
				Kind: ObjectRule, Name: name + " for " + about(want), OK: there, Want: "present", Have: present(there),
				Show: l.inNetNS("ip " + flag + " rule"),
			})
		}
		if name == "IPv6" && !l.n.ipv6Lo {
			continue // there can be no route
		}
		routes, err := l.n.routesIn(family, table)
		if err != nil {
			return err
		}
		want := localRoute(family, table)
		there := slices.ContainsFunc(routes, func(r netlink.Route) bool {
			return r.Protocol == want.Protocol && r.Type == want.Type && r.LinkIndex == want.LinkIndex
		})
		l.add(Object{
			Kind: ObjectRoute, Name: name + " local default dev lo", OK: there, Want: "present", Have: present(there),
			Show: l.inNetNS(fmt.Sprintf("ip %s route show table %d", flag, table)),
		})
	}
	return nil
}

// sameRule says whether a rule that is there is the one wanted.
func sameRule(have, want *netlink.Rule) bool {
	mask := func(r *netlink.Rule) uint32 {
		if r.Mask == nil {
			return 0
		}
		return *r.Mask
	}
	return have.Priority == want.Priority && have.Mark == want.Mark && mask(have) == mask(want) && have.Table == want.Table &&
		have.IifName == want.IifName && have.Protocol == want.Protocol
}

// sysctls reads those that carry the mark of a connection to the app's side of it.
func (l *inspector) sysctls() error {
	var unused maps.Restore
	return l.p.ns.Do(func() error {
		for _, s := range sysctls(l.n.ipv6, &unused) {
			value, err := readSysctl(s.name)
			if err != nil {
				return err
			}
			name := strings.ReplaceAll(s.name, "/", ".")
			l.add(Object{
				Kind: ObjectSysctl, Name: name, OK: value != "0", Want: "not 0", Have: value, Show: l.inNetNS("sysctl " + name),
			})
		}
		return nil
	})
}
