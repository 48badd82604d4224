// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// Hook is a program that works for the whole node.
type Hook struct {
	// Name is that of its pin below links/, or of its index in map tail_calls.
	Name string
	// Program is its name in the object, and ID its number, as in `bpftool prog show`; 0: there is none.
	Program string
	ID      ebpf.ProgramID
	// Link is the number of the link that keeps it attached; 0 for one that others call.
	Link link.ID
	// Pin is the path of that link's pin.
	Pin string
	// Problem says what is not as it should be; empty if nothing is. Heal puts it right.
	Problem string
	// Runs counts how often it has run, and RunTime is how long that took, while the kernel counts them
	// (kernel.bpf_stats_enabled); kernel 5.8.
	Runs    uint64
	RunTime time.Duration
}

// Hooks looks at the programs on the cgroup and at those that others call.
func (d *Datapath) Hooks() ([]Hook, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var hooks []Hook
	for _, p := range nodePrograms {
		h, err := d.hookOf(p.pin, p.program)
		if err != nil {
			return nil, err
		}
		if on, err := isOnCgroup(d.links[p.pin], d.cgroup); err != nil {
			return nil, err
		} else if !on {
			h.Problem = "it is not attached to cgroup " + d.cgroup
		}
		hooks = append(hooks, h)
	}
	names := make([]string, 0, len(d.answering))
	for name := range d.answering {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		h, err := d.hookOf(name, "redir_original_dst")
		if err != nil {
			return nil, err
		}
		hooks = append(hooks, h)
	}
	for _, t := range tailCalls {
		h := Hook{Name: strings.TrimPrefix(t.program, "redir_"), Program: t.program}
		var id uint32
		switch err := d.maps.TailCalls.Lookup(uint32(t.index), &id); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			h.Problem = "it is not in map tail_calls: nothing leaves a pod"
		case err != nil:
			return nil, fmt.Errorf("map tail_calls: look up %d: %w", t.index, err)
		}
		h.ID = ebpf.ProgramID(id)
		h.stats(d.shared[t.program])
		hooks = append(hooks, h)
	}
	return hooks, nil
}

// hookOf looks at a program that a link keeps on a cgroup. The mutex is held.
func (d *Datapath) hookOf(name, program string) (Hook, error) {
	h := Hook{Name: name, Program: program, Pin: filepath.Join(d.bpffs, linksDir, name)}
	info, err := d.links[name].Info()
	if err != nil {
		return h, fmt.Errorf("look at link %s: %w", name, err)
	}
	h.Link, h.ID = info.ID, info.Program
	if _, err := os.Lstat(h.Pin); errors.Is(err, fs.ErrNotExist) {
		h.Problem = "its pin is gone"
	}
	prog := d.shared[program]
	if about, err := prog.Info(); err == nil {
		if id, _ := about.ID(); id != h.ID {
			h.Problem = fmt.Sprintf("its link runs program %d instead of %d", h.ID, id)
		}
	}
	h.stats(prog)
	return h, nil
}

// stats notes how often the program has run, if it can be told.
func (h *Hook) stats(prog *ebpf.Program) {
	if s, err := prog.Stats(); err == nil {
		h.Runs, h.RunTime = s.RunCount, s.Runtime
	}
}

// BPFFS is the directory of the pins.
func (d *Datapath) BPFFS() string { return d.bpffs }

// PinOfMap is the path of a map's pin.
func (d *Datapath) PinOfMap(name string) string { return filepath.Join(d.bpffs, mapsDir, name) }

// PinOfSteer is the path of the pin of the link of a pod's steer program.
func (d *Datapath) PinOfSteer(uid string) string {
	return filepath.Join(d.bpffs, podsDir, uid, steerLink)
}

// SealProgram returns the number of the seal's program on an interface, 0 if there is none, and says whether no other filter is
// asked before it.
func SealProgram(handle *netlink.Handle, l netlink.Link) (id ebpf.ProgramID, first bool, err error) {
	found, first, err := seals(handle, l)
	if err != nil || len(found) == 0 {
		return 0, false, err
	}
	return ebpf.ProgramID(found[0].Id), first, nil
}
