// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/redirector-dataplane/redirector/bpf"
)

// OthersAtWork says whether there is another dataplane than d on this machine: one whose sock_ops program is attached and
// uses other maps. d may be nil, for none. Needs kernel 5.8 (BPF_LINK_GET_NEXT_ID).
func (d *Datapath) OthersAtWork() (bool, error) {
	var links link.Iterator
	defer links.Close()
	for links.Next() {
		info, err := links.Link.Info()
		if err != nil || info.Type != link.CgroupType {
			continue // that of a link to a cgroup is always to be had
		}
		name, ours, err := d.inspect(info.Program)
		if err != nil {
			return false, fmt.Errorf("look for other dataplanes: %w", err)
		}
		if name == bpf.RedirectorProgRedirMark && !ours {
			return true, nil
		}
	}
	if err := links.Err(); err != nil {
		return false, fmt.Errorf("look for other dataplanes: %w", err)
	}
	return false, nil
}

// HasSealed says whether the interface has a seal of this dataplane, and not of another one. d may be nil, for none.
func (d *Datapath) HasSealed(handle *netlink.Handle, l netlink.Link) (bool, error) {
	found, _, err := seals(handle, l)
	if err != nil {
		return false, err
	}
	for _, seal := range found {
		if _, ours, err := d.inspect(ebpf.ProgramID(seal.Id)); err != nil || ours {
			return ours, err
		}
	}
	return false, nil
}

// inspect returns the name of a program and whether it uses a map of d. A program that is gone has no name.
func (d *Datapath) inspect(id ebpf.ProgramID) (name string, ours bool, err error) {
	prog, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("open program %d: %w", id, err)
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return "", false, fmt.Errorf("look at program %d: %w", id, err)
	}
	if d == nil {
		return info.Name, false, nil
	}
	used, _ := info.MapIDs()
	for _, m := range d.byName() {
		about, err := m.Info()
		if err != nil {
			return "", false, fmt.Errorf("look at map %s: %w", m, err)
		}
		own, _ := about.ID()
		for _, u := range used {
			ours = ours || u == own
		}
	}
	return info.Name, ours, nil
}
