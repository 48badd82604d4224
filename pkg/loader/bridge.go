// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/redirector-dataplane/redirector/bpf"
)

// Three maps are written by programs and read by others: while an upgrade replaces them, there are programs that use the old
// map and programs that use the new one, and what one has written the other must find.
//
//	sockets    For as long as it takes, both the old and the new programs that leave notes are attached, so that a new
//	           socket has its note in both maps; of older ones the notes are copied before anything reads the new map.
//	           Programs of pods read neither.
//	admitted   Flows of the old map are copied. Until all pods have new programs, another copy of the new sock_ops program,
//	           for which there are no pods, so that it acts for the host alone, writes the old map.
//	listeners  They are copied. One that is made before its pod has the new program is found by that.
//
// What sockets know of their DNS queries, dns_notes and dns_bounds, is copied when all programs that write it are replaced. An
// answer that comes within the milliseconds before that may be taken for one from the proxy: the resolver asks again.
//
// bridge holds what is attached for that. It is pinned, to outlive an agent that is killed; the next makes its own, and takes
// away what it does not know.
type bridge struct {
	links map[string]link.Link // by the paths of their pins
	// copied are the flows of older maps that were put into the new one.
	copied [][]byte
}

// bridgePrefix is what the names of pins below links begin with that are there for the time of an upgrade.
const bridgePrefix = "upgrade-"

// attach attaches a program beside those that are on the cgroup, and pins its link in a directory.
func (b *bridge) attach(cgroup, dir string, prog *ebpf.Program, attach ebpf.AttachType) error {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: attach, Program: prog})
	if err != nil {
		return fmt.Errorf("attach a program to cgroup %s for the time of the upgrade: %w", cgroup, err)
	}
	info, err := l.Info()
	if err != nil {
		return errors.Join(fmt.Errorf("look at a link: %w", err), l.Close())
	}
	pin := filepath.Join(dir, fmt.Sprintf("%s%d", bridgePrefix, info.ID))
	if err := pinLink(l, pin); err != nil {
		return errors.Join(err, l.Close())
	}
	if b.links == nil {
		b.links = map[string]link.Link{}
	}
	b.links[pin] = l
	return nil
}

// close gives the process's handles back. What is attached stays.
func (b *bridge) close() error {
	var errs []error
	for _, l := range b.links {
		errs = append(errs, l.Close())
	}
	b.links = nil
	return errors.Join(errs...)
}

// end takes the bridge away.
func (b *bridge) end() error {
	var errs []error
	for pin := range b.links {
		errs = append(errs, detach(pin))
	}
	return errors.Join(append(errs, b.close())...)
}

// previous opens the maps of that name which an upgrade has replaced, and which programs of pods may still use.
func (d *Datapath) previous(name string) ([]*ebpf.Map, error) {
	dir := filepath.Join(d.bpffs, previousDir)
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for an older dataplane's maps: %w", err)
	}
	var all []*ebpf.Map
	for _, file := range files {
		if of, _, _ := strings.Cut(file.Name(), "-"); of != name {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, file.Name()), nil)
		if err != nil {
			for _, m := range all {
				_ = m.Close()
			}
			return nil, fmt.Errorf("open an older dataplane's map %s: %w", file.Name(), err)
		}
		all = append(all, m)
	}
	return all, nil
}

// eachPrevious calls do with each map that previous opens.
func (d *Datapath) eachPrevious(name string, do func(old *ebpf.Map) error) error {
	all, err := d.previous(name)
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range all {
		if err := do(m); err != nil {
			errs = append(errs, fmt.Errorf("carry over map %s: %w", name, err))
		}
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// bridgeSockets has the new programs leave their notes beside the old ones, until these are replaced too and notes is closed,
// and copies the older notes.
func (d *Datapath) bridgeSockets(notes *bridge) error {
	for _, p := range nodePrograms {
		if !p.notes {
			continue
		}
		if err := notes.attach(d.cgroup, filepath.Join(d.bpffs, linksDir), d.shared[p.program], p.attach); err != nil {
			return err
		}
	}
	return d.eachPrevious(bpf.RedirectorMapSockets, func(old *ebpf.Map) error {
		return copySockets(d.maps.RedirectorMaps.Sockets, old)
	})
}

// bridgeAdmitted has flows that are admitted from now on written into older maps too.
func (d *Datapath) bridgeAdmitted(spec *ebpf.CollectionSpec) error {
	return d.eachPrevious(bpf.RedirectorMapAdmitted, func(old *ebpf.Map) error {
		// Without replacements for the maps of pods, the program gets its own, which are empty.
		replace := d.byName()
		replace[bpf.RedirectorMapAdmitted] = old
		delete(replace, bpf.RedirectorMapPods)
		delete(replace, bpf.RedirectorMapCounters)
		only := spec.Copy()
		admitted := only.Maps[bpf.RedirectorMapAdmitted]
		admitted.KeySize, admitted.ValueSize, admitted.MaxEntries = old.KeySize(), old.ValueSize(), old.MaxEntries()
		for name := range only.Programs {
			if name != bpf.RedirectorProgRedirMark {
				delete(only.Programs, name)
			}
		}
		programs, err := ebpf.NewCollectionWithOptions(only, ebpf.CollectionOptions{MapReplacements: replace})
		if err != nil {
			return fmt.Errorf("load a program: %w", err)
		}
		defer programs.Close()
		return d.bridge.attach(d.cgroup, filepath.Join(d.bpffs, linksDir), programs.Programs[bpf.RedirectorProgRedirMark], ebpf.AttachCGroupSockOps)
	})
}

// copyAdmitted copies the flows of older maps. Those that end meanwhile are taken out again when the bridge goes.
func (d *Datapath) copyAdmitted() error {
	return d.eachPrevious(bpf.RedirectorMapAdmitted, func(old *ebpf.Map) error {
		copied, err := copyMissing(d.maps.RedirectorMaps.Admitted, old)
		d.bridge.copied = append(d.bridge.copied, copied...)
		return err
	})
}

// copyDNSNotes copies what sockets know of their DNS queries. Nothing writes the older maps any more.
func (d *Datapath) copyDNSNotes() error {
	return errors.Join(
		d.eachPrevious(bpf.RedirectorMapDnsNotes, func(old *ebpf.Map) error {
			return copySockets(d.maps.RedirectorMaps.DnsNotes, old)
		}),
		d.eachPrevious(bpf.RedirectorMapDnsBounds, func(old *ebpf.Map) error {
			_, err := copyMissing(d.maps.RedirectorMaps.DnsBounds, old)
			return err
		}))
}

// copyMissing copies the entries of a map that programs write into another, where that has none under their keys yet, and returns
// the old map's keys of those that are there now.
func copyMissing(to, from *ebpf.Map) (copied [][]byte, err error) {
	err = eachEntry(from, func(key, value []byte) error {
		newKey, ok := fit(key, to.KeySize())
		if !ok {
			return nil
		}
		newValue, _ := fit(value, to.ValueSize())
		if err := to.Update(newKey, newValue, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return fmt.Errorf("copy: %w", err)
		}
		copied = append(copied, key)
		return nil
	})
	return copied, err
}

// dropEnded takes out copied flows that have ended since: the bridge has taken them out of the older maps.
func (d *Datapath) dropEnded() error {
	to := d.maps.RedirectorMaps.Admitted
	for _, key := range d.bridge.copied {
		there := false
		err := d.eachPrevious(bpf.RedirectorMapAdmitted, func(old *ebpf.Map) error {
			value, err := old.LookupBytes(key)
			there = there || value != nil
			return err
		})
		if err != nil {
			return err
		}
		if newKey, _ := fit(key, to.KeySize()); !there {
			if err := to.Delete(newKey); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("map admitted: delete: %w", err)
			}
		}
	}
	d.bridge.copied = nil
	return nil
}

// eachEntry walks through a map that others may change. Entries that come or go meanwhile may be missed.
func eachEntry(m *ebpf.Map, do func(key, value []byte) error) error {
	var key, value []byte
	it := m.Iterate()
	for it.Next(&key, &value) {
		if err := do(key, value); err != nil {
			return err
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("iterate: %w", err)
	}
	return nil
}

// copyListeners puts the sockets of one map into another, under the same keys, if these are free. Only a program can do
// that. Needs kernel 5.10 (iterators of socket maps).
func copyListeners(to, from *ebpf.Map) error {
	const contextKey, contextSocket = 16, 24 // offsets in struct bpf_iter__sockmap
	ins := asm.Instructions{
		asm.LoadMem(asm.R7, asm.R1, contextSocket, asm.DWord),
		asm.LoadMem(asm.R8, asm.R1, contextKey, asm.DWord),
		asm.JEq.Imm(asm.R7, 0, done),
		asm.JEq.Imm(asm.R8, 0, done),
	}
	ins, at := toStack(ins, from.KeySize(), to.KeySize())
	ins = append(ins,
		asm.LoadMapPtr(asm.R1, to.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, at),
		asm.Mov.Reg(asm.R3, asm.R7), asm.Mov.Imm(asm.R4, int32(ebpf.UpdateNoExist)), asm.FnMapUpdateElem.Call())
	if err := iterate(iterSockets, ins, from); err != nil {
		return err
	}
	// The program cannot tell what did not fit.
	return eachEntry(from, func(key, _ []byte) error {
		newKey, _ := fit(key, to.KeySize())
		if value, err := to.LookupBytes(newKey); value != nil || err != nil {
			return err
		}
		if value, err := from.LookupBytes(key); value == nil || err != nil {
			return err // closed meanwhile
		}
		return errors.New("a listener was not copied: has the map become too small?")
	})
}

// copySockets puts what is noted of sockets in one map into another. Needs kernel 5.11 (sk_storage in iterators).
func copySockets(to, from *ebpf.Map) error {
	const contextSocket, contextValue = 16, 24 // offsets in struct bpf_iter__bpf_sk_storage_map
	const create = 1                           // BPF_SK_STORAGE_GET_F_CREATE
	ins := asm.Instructions{
		asm.LoadMem(asm.R7, asm.R1, contextSocket, asm.DWord),
		asm.LoadMem(asm.R8, asm.R1, contextValue, asm.DWord),
		asm.JEq.Imm(asm.R7, 0, done),
		asm.JEq.Imm(asm.R8, 0, done),
	}
	ins, at := toStack(ins, from.ValueSize(), to.ValueSize())
	ins = append(ins,
		asm.LoadMapPtr(asm.R1, to.FD()), asm.Mov.Reg(asm.R2, asm.R7),
		asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, at), asm.Mov.Imm(asm.R4, create), asm.FnSkStorageGet.Call())
	return iterate(iterNotes, ins, from)
}

// done is where a program of this file ends.
const done = "done"

// toStack copies what R8 points to onto the stack, cut off or filled up with zeros, and returns where it is there.
func toStack(ins asm.Instructions, from, to uint32) (asm.Instructions, int32) {
	at := -int32(to+7) / 8 * 8
	ins = append(ins, asm.Mov.Imm(asm.R1, 0))
	for i := at; i < 0; i += 8 {
		ins = append(ins, asm.StoreMem(asm.RFP, int16(i), asm.R1, asm.DWord))
	}
	// Sizes are multiples of four: no struct has padding.
	for i := uint32(0); i+4 <= min(from, to); i += 4 {
		ins = append(ins, asm.LoadMem(asm.R1, asm.R8, int16(i), asm.Word), asm.StoreMem(asm.RFP, int16(at+int32(i)), asm.R1, asm.Word))
	}
	return ins, at
}

// The kernel's names of iterators: over the sockets in a map, and over what a map holds of sockets.
const (
	iterSockets = "sockmap"
	iterNotes   = "bpf_sk_storage_map"
)

// loadIterator loads a program that runs on every entry of a map.
func loadIterator(kind string, ins asm.Instructions) (*ebpf.Program, error) {
	ins = append(ins, asm.Mov.Imm(asm.R0, 0).WithSymbol(done), asm.Return())
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "redir_copy", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceIter, AttachTo: kind, License: "Dual BSD/GPL", Instructions: ins,
	})
}

// iterate runs a program on every entry of a map; kind is the iterator's name in the kernel.
func iterate(kind string, ins asm.Instructions, m *ebpf.Map) (err error) {
	prog, err := loadIterator(kind, ins)
	if err != nil {
		return fmt.Errorf("load the program that copies (`redirector check` knows of it as iterators over maps of sockets): %w: "+
			"run the version before again, or drain the node and run its `redirector cleanup`", err)
	}
	defer prog.Close()
	l, err := link.AttachIter(link.IterOptions{Program: prog, Map: m})
	if err != nil {
		return fmt.Errorf("iterate over a map: %w", err)
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	run, err := l.Open()
	if err != nil {
		return fmt.Errorf("iterate over a map: %w", err)
	}
	defer run.Close()
	if _, err := io.Copy(io.Discard, run); err != nil {
		return fmt.Errorf("iterate over a map: %w", err)
	}
	return nil
}
