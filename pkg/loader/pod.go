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
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/netdump"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// The seal's filter. It comes before any that the pod may have. Its handle remembers, for as long as the filter lives,
// whether the clsact qdisc under it is ours to remove.
const (
	sealPriority       = 1
	sealOnForeignQdisc = 1
	sealOnOwnQdisc     = 2
)

const ethernetHeader = 14

// LoadSteer loads the pod's copy of the steer program. It is the slowest part of an enrolment and needs nothing but the
// namespace's cookie, so callers do it beside other work. The caller closes it after AttachSteer.
func (d *Datapath) LoadSteer(ns *podns.NetNS) (*ebpf.Program, error) {
	return d.steer.load(ns.Cookie(), 0)
}

// CurrentSteer returns the id of the program that the pod's pinned link runs in the namespace, if it is what LoadSteer would load;
// 0: it is not, or there is none.
func (d *Datapath) CurrentSteer(ns *podns.NetNS, uid string) (ebpf.ProgramID, error) {
	id, err := d.SteerProgram(ns, uid)
	if err != nil || id == 0 {
		return 0, err
	}
	if same, err := d.steer.is(id, ns.Cookie(), 0); err != nil || !same {
		return 0, err
	}
	return id, nil
}

// AttachSteer makes the program decide about new connections in the pod's network namespace, and pins the link. A program
// that is there already is replaced without a gap. On failure nothing is left.
func (d *Datapath) AttachSteer(ns *podns.NetNS, uid string, prog *ebpf.Program) (err error) {
	dir := filepath.Join(d.bpffs, podsDir, uid)
	pin := filepath.Join(dir, steerLink)
	old, err := link.LoadPinnedLink(pin, nil)
	if err == nil {
		err = old.Update(prog)
		if info, errInfo := old.Info(); err == nil && errInfo == nil {
			if on := info.NetNs(); on != nil && uint64(on.NetnsInode) == ns.Inode() {
				return old.Close()
			}
		}
		// It is on another namespace than the pod has now, or on one that is gone.
		if err := errors.Join(old.Close(), detach(pin)); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("open pinned link %s: %w", pin, err)
	}

	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	l, err := link.AttachNetNs(ns.FD(), prog)
	if err != nil {
		return errors.Join(fmt.Errorf("attach the steer program to %s: %w", ns.Path(), err), os.Remove(dir))
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if err := l.Pin(pin); err != nil {
		return errors.Join(fmt.Errorf("pin the link of the steer program: %w", err), os.Remove(dir))
	}
	return nil
}

// SteerProgram returns the id of the program that the pod's pinned link runs in the namespace; 0: there is no such pin, or its
// link runs nothing there.
func (d *Datapath) SteerProgram(ns *podns.NetNS, uid string) (ebpf.ProgramID, error) {
	_, prog, err := d.SteerLink(ns, uid)
	return prog, err
}

// SteerLink is SteerProgram with the id of the link, too.
func (d *Datapath) SteerLink(ns *podns.NetNS, uid string) (link.ID, ebpf.ProgramID, error) {
	pin := d.PinOfSteer(uid)
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, fmt.Errorf("open pinned link %s: %w", pin, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return 0, 0, fmt.Errorf("look at pinned link %s: %w", pin, err)
	}
	if on := info.NetNs(); on == nil || uint64(on.NetnsInode) != ns.Inode() {
		return 0, 0, nil
	}
	return info.ID, info.Program, nil
}

// DetachSteer takes the pod's steer program away. That there is none is no error.
func (d *Datapath) DetachSteer(uid string) error {
	dir := filepath.Join(d.bpffs, podsDir, uid)
	if err := detach(filepath.Join(dir, steerLink)); err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the pod's pins: %w", err)
	}
	return nil
}

// Seal closes an interface of the pod for fresh connections that bypass the proxy. handle is a netlink handle in the pod's
// namespace. A seal that is there already is replaced without a gap; on failure nothing is left. The loopback device needs
// none and must not have one. foreignQdisc says that a clsact qdisc that is there already is not ours, from an attempt that was
// interrupted: then it stays when the seal goes.
func (d *Datapath) Seal(ns *podns.NetNS, handle *netlink.Handle, l netlink.Link, foreignQdisc bool) error {
	attrs := l.Attrs()
	prog, err := d.seal.load(ns.Cookie(), linkHeaderOf(l))
	if err != nil {
		return err
	}
	defer prog.Close()

	clsact := clsactOf(l)
	handleID := uint32(sealOnOwnQdisc)
	err = handle.QdiscAdd(clsact)
	existed := errors.Is(err, unix.EEXIST)
	if existed {
		if foreignQdisc {
			handleID = sealOnForeignQdisc
		}
		old, first, err := seals(handle, l)
		if err != nil {
			return err
		}
		for _, filter := range old {
			handleID = filter.Attrs().Handle
			if first {
				continue
			}
			// Replaced, it would stay behind the other. Of filters with one priority, the newest is asked first.
			if err := handle.FilterDel(filter); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("move the seal of %s before other filters: %w", attrs.Name, err)
			}
		}
	} else if err != nil {
		return fmt.Errorf("add a clsact qdisc to %s: %w", attrs.Name, err)
	}

	err = handle.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: attrs.Index,
			Parent:    netlink.HANDLE_MIN_EGRESS,
			Handle:    handleID,
			Protocol:  unix.ETH_P_ALL,
			Priority:  sealPriority,
		},
		Fd:           prog.FD(),
		Name:         bpf.RedirectorProgRedirSeal,
		DirectAction: true,
	})
	if err != nil {
		err = fmt.Errorf("add the seal to %s: %w", attrs.Name, err)
		if !existed {
			err = errors.Join(err, handle.QdiscDel(clsact))
		}
	}
	return err
}

// linkHeaderOf is the length, in bytes, of what comes before the IP packet.
func linkHeaderOf(l netlink.Link) int {
	// Of the kinds of link that pods have, these alone have a header of their own.
	if l.Attrs().EncapType == "ether" {
		return ethernetHeader
	}
	return 0
}

// CurrentSeal says whether the interface is sealed as Sealed says, and whether its seal is the one that Seal would give it, with
// nothing besides that Seal would change.
func (d *Datapath) CurrentSeal(ns *podns.NetNS, handle *netlink.Handle, l netlink.Link) (sealed, current bool, err error) {
	found, first, err := seals(handle, l)
	sealed = len(found) > 0 && first
	if err != nil || !sealed || len(found) != 1 {
		return sealed, false, err
	}
	current, err = d.seal.is(ebpf.ProgramID(found[0].Id), ns.Cookie(), linkHeaderOf(l))
	return sealed, current, err
}

// Sealed says whether the interface has its seal, and no filter before it, which could keep it from being asked.
func Sealed(handle *netlink.Handle, l netlink.Link) (bool, error) {
	found, first, err := seals(handle, l)
	return len(found) > 0 && first, err
}

// Unseal removes the seal from an interface, and the qdisc if Seal made it and nobody else uses it. That there is none is
// no error.
func Unseal(handle *netlink.Handle, l netlink.Link) error {
	found, _, err := seals(handle, l)
	if err != nil {
		return err
	}
	for _, filter := range found {
		if err := handle.FilterDel(filter); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove the seal from %s: %w", l.Attrs().Name, err)
		}
		if filter.Attrs().Handle != sealOnOwnQdisc {
			continue
		}
		if err := RemoveUnusedClsact(handle, l); err != nil {
			return err
		}
	}
	return nil
}

// RemoveUnusedClsact removes the clsact qdisc of an interface: when its seal is gone, or for one that an interrupted attempt to
// seal it has left. That there is none, or that it is used, is no error.
func RemoveUnusedClsact(handle *netlink.Handle, l netlink.Link) error {
	used, err := clsactUsed(handle, l)
	if err != nil || used {
		return err
	}
	err = handle.QdiscDel(clsactOf(l))
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("remove the clsact qdisc from %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// HasClsact returns the indices of the interfaces that have a clsact qdisc.
func HasClsact(handle *netlink.Handle) ([]int, error) {
	qdiscs, err := netdump.Whole(func() ([]netlink.Qdisc, error) { return handle.QdiscList(nil) })
	if err != nil {
		return nil, fmt.Errorf("list the queueing disciplines: %w", err)
	}
	var found []int
	for _, q := range qdiscs {
		if q.Type() == "clsact" {
			found = append(found, q.Attrs().LinkIndex)
		}
	}
	return found, nil
}

func listFilters(handle *netlink.Handle, l netlink.Link, parent uint32) ([]netlink.Filter, error) {
	return netdump.Whole(func() ([]netlink.Filter, error) { return handle.FilterList(l, parent) })
}

// seals lists our filters on the interface, and says whether one is the first of all there.
func seals(handle *netlink.Handle, l netlink.Link) (found []*netlink.BpfFilter, first bool, err error) {
	filters, err := listFilters(handle, l, netlink.HANDLE_MIN_EGRESS)
	if err != nil {
		return nil, false, fmt.Errorf("list the filters of %s: %w", l.Attrs().Name, err)
	}
	for i, filter := range filters {
		if f, ok := filter.(*netlink.BpfFilter); ok && f.Name == bpf.RedirectorProgRedirSeal {
			found = append(found, f)
			first = first || i == 0
		}
	}
	return found, first, nil
}

func clsactUsed(handle *netlink.Handle, l netlink.Link) (bool, error) {
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := listFilters(handle, l, parent)
		if err != nil {
			return false, fmt.Errorf("list the filters of %s: %w", l.Attrs().Name, err)
		}
		if len(filters) > 0 {
			return true, nil
		}
	}
	return false, nil
}

func clsactOf(l netlink.Link) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: l.Attrs().Index,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}}
}
