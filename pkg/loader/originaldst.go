// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/cgroups"
)

// originalDst begins the names of the pins of the program that answers SO_ORIGINAL_DST: the number of its cgroup follows. It is
// attached to single cgroups, for it costs every getsockopt() below them.
const originalDst = "original_dst-"

// AnswerOriginalDst has getsockopt(SO_ORIGINAL_DST) answered for the processes below a cgroup, on connections that were steered to
// them. It stays so, also without this process, until the cgroup is gone. That
// they get one already is no error.
func (d *Datapath) AnswerOriginalDst(cgroup string) error {
	id, err := cgroups.ID(cgroup)
	if err != nil {
		return fmt.Errorf("answer SO_ORIGINAL_DST in cgroup %s: %w", cgroup, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	name := originalDst + strconv.FormatUint(id, 10)
	if d.links[name] == nil {
		l, err := attachCgroup(d.shared[bpf.RedirectorProgRedirOriginalDst], ebpf.AttachCGroupGetsockopt, cgroup,
			filepath.Join(d.bpffs, linksDir, name))
		if err != nil {
			return err
		}
		d.links[name] = l
	}
	d.answering[name] = cgroup
	return nil
}

// AnswerOriginalDstOnly ends what AnswerOriginalDst has begun, here or in an earlier process, for all cgroups but those that
// keep wants, given their numbers as cgroups.ID tells them.
func (d *Datapath) AnswerOriginalDstOnly(keep func(id uint64) bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for name := range d.answering {
		// The name was made, or looked at, by this package.
		if id, _ := strconv.ParseUint(strings.TrimPrefix(name, originalDst), 10, 64); !keep(id) {
			errs = append(errs, d.endOriginalDst(name))
		}
	}
	return errors.Join(errs...)
}

// endOriginalDst detaches the program from a cgroup. The mutex is held.
func (d *Datapath) endOriginalDst(name string) error {
	if err := detach(filepath.Join(d.bpffs, linksDir, name)); err != nil {
		return err
	}
	// Unpinned by somebody, it is not detached yet.
	err := d.links[name].Close()
	delete(d.links, name)
	delete(d.answering, name)
	return err
}

// adoptOriginalDst puts this version's program where an earlier process has attached its own. What is on no cgroup any more is
// left for removeUnknown.
func (d *Datapath) adoptOriginalDst() error {
	pins, err := filepath.Glob(filepath.Join(d.bpffs, linksDir, originalDst+"*"))
	if err != nil {
		return err
	}
	for _, pin := range pins {
		name := filepath.Base(pin)
		id, err := strconv.ParseUint(strings.TrimPrefix(name, originalDst), 10, 64)
		if err != nil {
			continue
		}
		l, err := link.LoadPinnedLink(pin, nil)
		if err != nil {
			return fmt.Errorf("open pinned link %s: %w", pin, err)
		}
		info, err := l.Info()
		if err == nil && (info.Cgroup() == nil || info.Cgroup().CgroupId != id) {
			_ = l.Close()
			continue
		}
		if err == nil {
			err = l.Update(d.shared[bpf.RedirectorProgRedirOriginalDst])
		}
		if err != nil {
			return errors.Join(fmt.Errorf("replace the program of pinned link %s: %w", pin, err), l.Close())
		}
		d.links[name], d.answering[name] = l, ""
	}
	return nil
}

// healOriginalDst puts the program back on a cgroup of which somebody has detached it, and ends what belongs to a cgroup that is
// gone. Where an earlier process has attached it, the cgroup's name is not known, and its number tells enough.
func (d *Datapath) healOriginalDst(name, cgroup string) (bool, error) {
	info, err := d.links[name].Info()
	if err != nil {
		return false, err
	}
	attached := info.Cgroup() != nil && info.Cgroup().CgroupId != 0
	there := attached
	if cgroup != "" {
		id, err := cgroups.ID(cgroup)
		there = err == nil && name == originalDst+strconv.FormatUint(id, 10)
	}
	if !there {
		if err := d.endOriginalDst(name); err != nil {
			return false, err
		}
		return false, nil
	}
	if cgroup == "" {
		return d.healLinkPin(name)
	}
	did, err := d.healLink(name, cgroup, ebpf.AttachCGroupGetsockopt, d.shared[bpf.RedirectorProgRedirOriginalDst])
	if err != nil {
		return did, err
	}
	pinned, err := d.healLinkPin(name)
	return did || pinned, err
}
