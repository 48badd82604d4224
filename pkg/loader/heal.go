// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Heal looks whether all that Open has put in place for the whole node is there still: the programs on the cgroup, the
// programs that others call, and the pins. It puts back what somebody has taken away and returns in words what that was.
// As long as this process holds a map or link, it works on without its pin.
func (d *Datapath) Heal() (healed []string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	try := func(what string, heal func() (bool, error)) {
		did, err := heal()
		if err != nil {
			errs = append(errs, fmt.Errorf("put back %s: %w", what, err))
		} else if did {
			healed = append(healed, what)
		}
	}
	try("the directory "+d.bpffs, d.healDirs)
	for _, p := range nodePrograms {
		try("the "+p.pin+" program on the cgroup", func() (bool, error) { return d.healLink(p.pin, d.cgroup, p.attach, d.shared[p.program]) })
		try("the pin of link "+p.pin, func() (bool, error) { return d.healLinkPin(p.pin) })
	}
	for name, cgroup := range d.answering {
		try("the answer to SO_ORIGINAL_DST on a cgroup", func() (bool, error) { return d.healOriginalDst(name, cgroup) })
	}
	again, err := d.pinMaps()
	errs = append(errs, err)
	for _, name := range again {
		healed = append(healed, "the pin of map "+name)
	}
	for _, t := range tailCalls {
		try("program "+t.program+" in map tail_calls", func() (bool, error) { return d.healTailCall(uint32(t.index), d.shared[t.program]) })
	}
	return healed, errors.Join(errs...)
}

// healDirs makes the directories anew when they are gone, and locks the new one before it is filled.
func (d *Datapath) healDirs() (did bool, err error) {
	held, err := d.lock.Stat()
	if err != nil {
		return false, fmt.Errorf("look at the lock: %w", err)
	}
	there, err := os.Stat(d.bpffs)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := os.Mkdir(d.bpffs, 0o700); err != nil {
			return false, err
		}
	case err != nil:
		return false, err
	}
	if there == nil || !os.SameFile(held, there) {
		lock, err := lockDir(d.bpffs)
		if err != nil {
			return false, err
		}
		if err := d.lock.Close(); err != nil {
			return false, errors.Join(err, lock.Close())
		}
		d.lock, did = lock, true
	}
	for _, dir := range madeDirs {
		switch err := os.Mkdir(filepath.Join(d.bpffs, dir), 0o700); {
		case err == nil:
			did = true
		case !errors.Is(err, fs.ErrExist):
			return did, err
		}
	}
	return did, nil
}

// healLink attaches a program again that has been detached, and puts it in the place of another that its link has been given.
func (d *Datapath) healLink(name, cgroup string, attach ebpf.AttachType, prog *ebpf.Program) (bool, error) {
	l := d.links[name]
	on, err := isOnCgroup(l, cgroup)
	if err != nil {
		return false, err
	}
	if !on {
		again, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: attach, Program: prog})
		if err != nil {
			return false, err
		}
		if err := pinLink(again, filepath.Join(d.bpffs, linksDir, name)); err != nil {
			return false, errors.Join(err, again.Close())
		}
		d.links[name] = again
		return true, l.Close()
	}
	info, err := l.Info()
	if err != nil {
		return false, err
	}
	about, err := prog.Info()
	if err != nil {
		return false, err
	}
	if id, _ := about.ID(); info.Program != id {
		return true, l.Update(prog)
	}
	return false, nil
}

// healLinkPin pins a link whose pin is gone.
func (d *Datapath) healLinkPin(name string) (bool, error) {
	pin := filepath.Join(d.bpffs, linksDir, name)
	if _, err := os.Lstat(pin); !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	info, err := d.links[name].Info()
	if err != nil {
		return false, err
	}
	// The link that is held believes to have a pin still.
	again, err := link.NewFromID(info.ID)
	if err != nil {
		return false, err
	}
	return true, errors.Join(pinLink(again, pin), again.Close())
}

// healTailCall puts a program back into the map, where its absence closes all pods.
func (d *Datapath) healTailCall(index uint32, prog *ebpf.Program) (bool, error) {
	var there uint32
	err := d.maps.TailCalls.Lookup(index, &there)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, err
	}
	about, errInfo := prog.Info()
	if errInfo != nil {
		return false, errInfo
	}
	if id, _ := about.ID(); err == nil && ebpf.ProgramID(there) == id {
		return false, nil
	}
	return true, d.maps.TailCalls.Put(index, prog)
}
