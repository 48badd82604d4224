// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"

	"github.com/cilium/ebpf"

	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Totals sums the counters of all pods that are captured, and of those that have left while this Enroller was there: unlike a
// sum over Pods it never falls.
func (e *Enroller) Totals() (maps.Counters, error) {
	e.counted.Lock()
	defer e.counted.Unlock()
	sum := e.past
	m := e.Datapath.Maps()
	cookies, err := m.Counted()
	if err != nil {
		return sum, err
	}
	for cookie := range cookies {
		c, err := m.Counters(cookie)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return sum, err
		}
		sum.Add(&c)
	}
	return sum, nil
}

// deleteCounters forgets a pod's counters, but keeps them in the totals. That there are none is no error.
func (e *Enroller) deleteCounters(cookie uint64) error {
	e.counted.Lock()
	defer e.counted.Unlock()
	m := e.Datapath.Maps()
	last, err := m.Counters(cookie)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err := errors.Join(err, m.DeleteCounters(cookie)); err != nil {
		return err
	}
	e.past.Add(&last)
	return nil
}

// States counts the pods that are captured: those for which a proxy runs, those for which none does, and those that the kernel
// alone knows. It asks less than Pods.
func (e *Enroller) States() (enrolled, pending, unnamed int, err error) {
	captured, err := e.Datapath.Maps().Pods()
	if err != nil {
		return 0, 0, 0, err
	}
	for _, uid := range e.uids() {
		shown := e.shown(uid)
		if shown == nil {
			continue
		}
		delete(captured, shown.NetNSCookie)
		if proxied, ok := e.Proxies.Pod(uid); ok && len(proxied.Acked) > 0 {
			enrolled++
		} else {
			pending++
		}
	}
	return enrolled, pending, len(captured), nil
}
