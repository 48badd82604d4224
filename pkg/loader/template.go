// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// Constants in the programs' code that stand for what only the loader knows, as in bpf/redirector.h and bpf/tc.c.
const (
	netnsCookieImmediate = 0x72656469722e6e73
	linkHeaderImmediate  = 0x72656469722e6c32
)

// template is a program that each pod gets a copy of, made ready for quick loading: its maps are filled in, and all
// metadata is gone that the kernel does not need. With it, loading the seal's stub takes 0.2 ms longer.
type template struct {
	spec *ebpf.ProgramSpec
	// Where the constants are, by value.
	immediates map[int64][]int
}

func newTemplate(spec *ebpf.ProgramSpec, maps map[string]*ebpf.Map) (*template, error) {
	t := &template{spec: spec.Copy(), immediates: map[int64][]int{}}
	calls := slices.ContainsFunc(t.spec.Instructions, func(i asm.Instruction) bool { return i.IsFunctionReference() })
	for i, ins := range t.spec.Instructions {
		symbol, reference, fn := ins.Symbol(), ins.Reference(), btf.FuncMetadata(&ins)
		if ins.IsLoadFromMap() {
			m := maps[reference]
			if m == nil {
				return nil, fmt.Errorf("program %s uses an unknown map %q", spec.Name, reference)
			}
			ins = asm.LoadMapPtr(ins.Dst, m.FD())
		}
		isCall := ins.IsFunctionReference()
		ins.Metadata = asm.Metadata{}
		if symbol != "" {
			ins = ins.WithSymbol(symbol)
		}
		if isCall {
			ins = ins.WithReference(reference)
		}
		if calls && fn != nil {
			// Functions that are called are verified by their types.
			ins = btf.WithFuncMetadata(ins, fn)
		}
		t.spec.Instructions[i] = ins
		if ins.OpCode.IsDWordLoad() && (ins.Constant == netnsCookieImmediate || ins.Constant == linkHeaderImmediate) {
			t.immediates[ins.Constant] = append(t.immediates[ins.Constant], i)
		}
	}
	if len(t.immediates[netnsCookieImmediate]) == 0 {
		return nil, fmt.Errorf("program %s has no place for the netns cookie: the object is not of this version", spec.Name)
	}
	return t, nil
}

// load loads a copy with the given constants in it.
func (t *template) load(cookie uint64, linkHeader int) (*ebpf.Program, error) {
	spec := *t.spec
	spec.Instructions = slices.Clone(t.spec.Instructions)
	for _, i := range t.immediates[netnsCookieImmediate] {
		spec.Instructions[i].Constant = int64(cookie)
	}
	for _, i := range t.immediates[linkHeaderImmediate] {
		spec.Instructions[i].Constant = int64(linkHeader)
	}
	prog, err := ebpf.NewProgram(&spec)
	if err != nil {
		return nil, fmt.Errorf("load program %s: %w", spec.Name, err)
	}
	return prog, nil
}
