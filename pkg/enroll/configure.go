// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/redirector-dataplane/redirector/pkg/fault"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// InvalidError says that what was asked for makes no sense, whatever the state of things.
type InvalidError struct{ Err error }

func (e *InvalidError) Error() string { return e.Err.Error() }

// Unwrap returns what is wrong.
func (e *InvalidError) Unwrap() error { return e.Err }

// Configure changes the settings of an enrolled pod: for connections that are made from then on, and in one step or not at all.
// change is given those that are in force. The error is an *InvalidError if change has one, or what it has made is not valid; it
// wraps ErrNotEnrolled if there is no such pod.
func (e *Enroller) Configure(uid string, change func(*Settings) error) error {
	if err := ValidateUID(uid); err != nil {
		return &InvalidError{err}
	}
	p := e.claim(uid)
	defer e.release(p)
	if p.ns == nil {
		return fmt.Errorf("pod %s: %w", uid, ErrNotEnrolled)
	}
	spec := p.spec
	err := change(&spec.Settings)
	if err == nil {
		err = spec.Validate()
	}
	if err != nil {
		return &InvalidError{err}
	}
	if reflect.DeepEqual(spec.Settings, p.spec.Settings) {
		return nil
	}
	if err := e.reconfigure(p, spec.Settings); err != nil {
		return fmt.Errorf("change the settings of pod %s (%s), which are as before: %w", &spec, uid, err)
	}
	return nil
}

// reconfigure makes other settings so for the pod. On failure it has those from before.
func (e *Enroller) reconfigure(p *pod, next Settings) (err error) {
	n, err := openPodNet(p.ns)
	if err != nil {
		return err
	}
	defer n.close()
	var undos undoList
	defer func() {
		if err != nil {
			err = errors.Join(err, undos.run())
		}
	}()

	old := p.spec.Settings
	p.spec.Settings = next
	undos.add(func() error { p.spec.Settings = old; return e.saveState(p) })
	if err := e.saveState(p); err != nil {
		return err
	}
	fault.Point("set: state file")
	p.reroutes, _ = p.rerouted(n)
	for _, family := range families {
		undo, err := n.addRouting(family, p.reroutes)
		undos.add(undo)
		if err != nil {
			return err
		}
	}
	fault.Point("set: routing")
	undo, err := e.applyExceptions(p, n)
	undos.add(undo)
	if err != nil {
		return err
	}
	fault.Point("set: exceptions")
	entry := p.entry
	e.putSettings(p, &entry)
	if err := e.Datapath.Maps().PutPod(p.ns.Cookie(), entry); err != nil {
		return err
	}
	p.entry = entry
	fault.Point("set: map entry")
	return nil
}

// putSettings puts into the pod's entry of map pods what it has of the settings.
func (e *Enroller) putSettings(p *pod, entry *maps.Pod) {
	entry.BypassInbound = p.spec.Settings.BypassInbound
	entry.DNSCapture = e.DNSCapture
	if own := p.spec.Settings.DNSCapture; own != nil {
		entry.DNSCapture = *own
	}
	entry.HasExceptions = len(p.excepted.Values)+len(p.excepted.CIDRs) > 0
}

// applyExceptions makes maps exceptions and cidrs have what the settings say.
func (e *Enroller) applyExceptions(p *pod, n *podNet) (undo func() error, err error) {
	m, cookie := e.Datapath.Maps(), p.ns.Cookie()
	_, indices := p.rerouted(n)
	before, want := p.excepted, p.spec.Settings.exceptions(indices)
	if want.Equal(before) {
		return nil, nil
	}
	back := func() error {
		p.excepted = before
		return m.SetExceptions(cookie, want, before)
	}
	if err := m.SetExceptions(cookie, before, want); err != nil {
		return nil, errors.Join(err, back())
	}
	p.excepted = want
	return back, nil
}

// rerouted returns the interfaces of machines behind the pod: the names of all, and the indices of those that are there.
func (p *pod) rerouted(n *podNet) (names []string, indices []int) {
	auto := map[string]bool{}
	for _, l := range n.carryNone(p.spec.IPs, p.ownAddrs) {
		auto[l.Attrs().Name] = slices.Contains(p.spec.Settings.RerouteInterfaces, AutoInterfaces)
	}
	for _, name := range p.spec.Settings.RerouteInterfaces {
		if name != AutoInterfaces {
			names = append(names, name)
		}
	}
	for _, l := range n.links {
		name := l.Attrs().Name
		switch {
		case slices.Contains(names, name):
		case auto[name]:
			names = append(names, name)
		default:
			continue
		}
		indices = append(indices, l.Attrs().Index)
	}
	return names, indices
}

// repairExceptions puts right what maps exceptions and cidrs have of the pod. The mutex is held.
func (e *Enroller) repairExceptions(p *pod, have *inMaps) error {
	m, cookie := e.Datapath.Maps(), p.ns.Cookie()
	if p.excepted.Equal(have.excepted[cookie]) {
		return nil
	}
	now, err := m.Exceptions()
	if err != nil || p.excepted.Equal(now[cookie]) {
		return err
	}
	if err := m.SetExceptions(cookie, now[cookie], p.excepted); err != nil {
		return err
	}
	e.repaired(p, RepairException)
	return nil
}
