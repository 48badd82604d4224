// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"cmp"
	"errors"
	gomaps "maps"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// State is how far a pod has come.
type State string

// The states of a pod that Pods lists.
const (
	// StateEnrolled: captured, and a proxy runs for it.
	StateEnrolled State = "enrolled"
	// StatePending: captured, but no proxy runs for it, so nothing passes.
	StatePending State = "pending"
)

// Pod is what is so for an enrolled pod.
type Pod struct {
	Spec
	State State `json:"state"`
	// Reason says why a pod is pending, if a proxy has given a reason.
	Reason      string    `json:"reason,omitempty"`
	Since       time.Time `json:"since"`
	NetNSCookie uint64    `json:"netnsCookie"`
	NetNSInode  uint64    `json:"netnsInode"`
	// Addresses are the pod's own, which are reached without the proxy from within the pod.
	Addresses []netip.Addr `json:"addresses"`
	// Listeners says on which ports the proxy listens, and with how many sockets that are steered to.
	Listeners map[uint16]int `json:"listeners"`
	// DNSCapture and BypassInbound are the settings that the pod has, whoever gave them.
	DNSCapture    bool          `json:"dnsCapture"`
	BypassInbound bool          `json:"bypassInbound"`
	Counters      maps.Counters `json:"counters"`
}

// Pods lists the enrolled pods by namespace and name.
func (e *Enroller) Pods() ([]Pod, error) {
	uids := e.uids()
	pods := make([]Pod, 0, len(uids))
	for _, uid := range uids {
		p, err := e.Pod(uid)
		if errors.Is(err, ErrNotEnrolled) {
			continue
		}
		if err != nil {
			return nil, err
		}
		pods = append(pods, p)
	}
	slices.SortFunc(pods, func(a, b Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	return pods, nil
}

// ErrNotEnrolled says that there is no such pod.
var ErrNotEnrolled = errors.New("no such pod is enrolled")

// show notes for Pod what is so now. The mutex is held.
func (p *pod) show() {
	if p.ns == nil {
		p.shown.Store(nil)
		return
	}
	p.shown.Store(&Pod{
		Spec:        p.spec,
		State:       StatePending,
		Since:       p.since,
		NetNSCookie: p.ns.Cookie(),
		NetNSInode:  p.ns.Inode(),
		Addresses:   slices.SortedFunc(gomaps.Keys(p.ownAddrs), netip.Addr.Compare),

		DNSCapture:    p.entry.DNSCapture,
		BypassInbound: p.entry.BypassInbound,
	})
}

// shown is what was so for a pod when work on it last ended; nil if it is not enrolled.
func (e *Enroller) shown(uid string) *Pod {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.byUID[uid]; p != nil {
		return p.shown.Load()
	}
	return nil
}

// Brief is Pod without Listeners and Counters, for which the kernel has to be asked; false if the pod is not enrolled.
func (e *Enroller) Brief(uid string) (Pod, bool) {
	shown := e.shown(uid)
	if shown == nil {
		return Pod{}, false
	}
	out := *shown
	if proxied, ok := e.Proxies.Pod(uid); ok {
		out.Reason = proxied.LastError
		if len(proxied.Acked) > 0 {
			out.State = StateEnrolled
		}
	}
	return out, true
}

// Pod describes one enrolled pod; the error wraps ErrNotEnrolled if it is not. It does not wait for work on the pod that is
// under way.
func (e *Enroller) Pod(uid string) (Pod, error) {
	out, ok := e.Brief(uid)
	if !ok {
		return Pod{}, ErrNotEnrolled
	}
	var err error
	if out.Listeners, err = e.Datapath.Maps().Listeners(out.NetNSCookie); err != nil {
		return Pod{}, err
	}
	if out.Counters, err = e.Datapath.Maps().Counters(out.NetNSCookie); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return Pod{}, err
	}
	return out, nil
}
