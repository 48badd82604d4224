// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/fault"
)

// More directories below the BPFFS directory, while a layout is changed.
const (
	// nextDir has the pins of maps that are being filled.
	nextDir = "next"
	// previousDir has those of maps that programs of pods may still use, and that are needed as long as they do: the counters, to
	// be added up; the tail calls, which the kernel empties when nothing in user space holds the map; and what programs write.
	previousDir = "previous"
)

// carryOver makes a map as the spec says and puts in what the old one has: fields that only one of them knows are left out,
// or zero. Counters begin at zero, and are added up by addCounters when nothing counts in the old map any more. The other maps
// that programs write begin empty, see bridge, and so do the tail calls, which are the loader's to put in.
func carryOver(spec *ebpf.MapSpec, old *ebpf.Map) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create: %w", err)
	}
	if err := copyEntries(m, old); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

func copyEntries(to, from *ebpf.Map) error {
	var zero any
	switch from.Type() {
	default:
		return nil
	case ebpf.Hash, ebpf.Array, ebpf.LPMTrie:
	case ebpf.PerCPUHash:
		cpus, err := ebpf.PossibleCPU()
		if err != nil {
			return err
		}
		values := make([][]byte, cpus)
		for i := range values {
			values[i] = make([]byte, to.ValueSize())
		}
		zero = values
	}
	var key []byte
	for {
		next, err := from.NextKeyBytes(keyOrNil(key))
		if err != nil {
			return fmt.Errorf("iterate: %w", err)
		}
		if next == nil {
			return nil
		}
		key = next
		newKey, ok := fit(key, to.KeySize())
		if !ok {
			continue // it means something that this version does not know
		}
		value := zero
		if value == nil {
			old, err := from.LookupBytes(key)
			if err != nil {
				return fmt.Errorf("look up: %w", err)
			}
			value, _ = fit(old, to.ValueSize())
		}
		if err := to.Put(newKey, value); err != nil {
			if errors.Is(err, unix.E2BIG) {
				err = fmt.Errorf("it has more entries than the %d that this version has room for: %w", to.MaxEntries(), err)
			}
			return fmt.Errorf("copy: %w", err)
		}
	}
}

// keyOrNil is the key as NextKeyBytes wants it: no key is not an empty one.
func keyOrNil(key []byte) any {
	if key == nil {
		return nil
	}
	return key
}

// fit cuts off what is beyond size, or fills up with zeros. It says whether nothing but zeros was cut off.
func fit(b []byte, size uint32) ([]byte, bool) {
	out := make([]byte, size)
	n := copy(out, b)
	return out, !slices.ContainsFunc(b[n:], func(c byte) bool { return c != 0 })
}

// keep pins a map that is being replaced where it will be found until it is not needed any more.
func keep(bpffs, name string, m *ebpf.Map) error {
	dir := filepath.Join(bpffs, previousDir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	// There may be some of an upgrade that was interrupted.
	pin := filepath.Join(dir, name)
	for i := 2; ; i++ {
		if _, err := os.Lstat(pin); errors.Is(err, fs.ErrNotExist) {
			break
		}
		pin = filepath.Join(dir, fmt.Sprintf("%s-%d", name, i))
	}
	// A map that knows of one pin moves it instead of making another.
	again, err := m.Clone()
	if err != nil {
		return fmt.Errorf("keep map %s: %w", name, err)
	}
	defer again.Close()
	if err := again.Pin(pin); err != nil {
		return fmt.Errorf("keep map %s: %w", name, err)
	}
	return nil
}

// Settle ends an upgrade, when the pods have been taken over: what was counted in an older map of counters is added to those of
// the new one. If all pods have this version's programs, all says so, what was kept for the older ones is let go.
func (d *Datapath) Settle(all bool) error {
	fault.Point("upgrade: pods taken over")
	err := d.eachPrevious(bpf.RedirectorMapCounters, func(old *ebpf.Map) error { return addCounters(d.maps.RedirectorMaps.Counters, old) })
	if err != nil {
		return err
	}
	fault.Point("upgrade: counters added up")
	if !all {
		return nil
	}
	if err := errors.Join(d.dropEnded(), d.bridge.end()); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(d.bpffs, previousDir)); err != nil {
		return fmt.Errorf("let go of an older dataplane's maps: %w", err)
	}
	return nil
}

// addCounters moves the counts of one per-CPU map to another, where the same entries are. No count is lost or doubled,
// whoever counts meanwhile and whenever this process is killed: a program does it on each CPU, one counter at a time. Counts
// of CPUs that are offline stay behind. Needs kernel 5.12 (atomic exchange).
func addCounters(to, from *ebpf.Map) error {
	words := int(max(to.KeySize(), from.KeySize())+7) / 8
	prog, err := counterMover(to, from, words)
	if err != nil {
		return err
	}
	defer prog.Close()
	var keys [][]byte
	for key, err := from.NextKeyBytes(nil); key != nil || err != nil; key, err = from.NextKeyBytes(key) {
		if err != nil {
			return fmt.Errorf("map %s: iterate: %w", from, err)
		}
		padded, _ := fit(key, uint32(words)*8)
		keys = append(keys, padded)
	}
	return onEachCPU(func() error {
		for _, key := range keys {
			if _, err := prog.Run(&ebpf.RunOptions{Context: key}); err != nil {
				return fmt.Errorf("add up counters: %w", err)
			}
		}
		return nil
	})
}

// onEachCPU calls do on each CPU that this process may use. A program that is run there, and not by an interrupt from
// elsewhere, cannot fall into the middle of an addition of another.
func onEachCPU(do func() error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return fmt.Errorf("ask for the CPUs of this process: %w", err)
	}
	defer func() {
		if errSet := unix.SchedSetaffinity(0, &before); errSet != nil {
			err = errors.Join(err, fmt.Errorf("go back to all CPUs: %w", errSet))
		}
	}()
	for cpu := range len(before) * 64 {
		if !before.IsSet(cpu) {
			continue
		}
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return fmt.Errorf("go to CPU %d: %w", cpu, err)
		}
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

// counterMover makes a program that takes all counters of one entry, whose key of so many words is its context, out of one map
// and adds them to the same entry of another, on the CPU that it runs on.
func counterMover(to, from *ebpf.Map, words int) (*ebpf.Program, error) {
	const out = "out"
	key := int16(-8 * words)
	ins := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	for i := range int16(words) {
		ins = append(ins, asm.LoadMem(asm.R1, asm.R6, i*8, asm.DWord), asm.StoreMem(asm.RFP, key+i*8, asm.R1, asm.DWord))
	}
	for _, find := range []struct {
		m  *ebpf.Map
		at asm.Register
	}{{from, asm.R7}, {to, asm.R8}} {
		ins = append(ins,
			asm.LoadMapPtr(asm.R1, find.m.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, int32(key)), asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, out), asm.Mov.Reg(find.at, asm.R0))
	}
	for at := uint32(0); at+8 <= min(to.ValueSize(), from.ValueSize()); at += 8 {
		exchange := asm.Xchg.Mem(asm.R7, asm.R1, asm.DWord, int16(at))
		exchange.Constant = int64(asm.Xchg) >> 8 // what the instruction says it does; the library writes this field as it is
		ins = append(ins, asm.Mov.Imm(asm.R1, 0), exchange, asm.AddAtomic.Mem(asm.R8, asm.R1, asm.DWord, int16(at)))
	}
	ins = append(ins, asm.Mov.Imm(asm.R0, 0).WithSymbol(out), asm.Return())
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "redir_move", Type: ebpf.RawTracepoint, License: "Dual BSD/GPL", Instructions: ins,
	})
	if err != nil {
		return nil, fmt.Errorf("load the program that adds up counters: %w", err)
	}
	return prog, nil
}
