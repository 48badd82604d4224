// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/redirector-dataplane/redirector/bpf"
)

// The version of the maps' layout, and the oldest that this version of redirector takes over and is taken over by. Raise the
// first with each change of a map's key, value or capacity, and with each map that comes or goes; the second when what
// a field or a map means has changed, so that entries cannot be carried over as they are. A dataplane from before layouts had
// versions counts as 0. See docs/decisions/0006-adoption.md.
const (
	layoutVersion = 1
	layoutOldest  = 0
)

// Layout says how the maps of a dataplane are laid out.
type Layout struct {
	// Version is that of the layout, and Oldest the oldest version whose agents may take it over.
	Version, Oldest uint32
	// Release names the version of redirector that made it so; empty if it did not say.
	Release string
}

func (l Layout) String() string {
	release := l.Release
	if release == "" {
		release = "an unnamed version"
	}
	return fmt.Sprintf("layout %d of %s", l.Version, release)
}

// LayoutError says that a pinned dataplane cannot be taken over.
type LayoutError struct {
	BPFFS        string
	Pinned, Mine Layout
	// Err says which map is in the way; nil if the versions alone are.
	Err error
}

func (e *LayoutError) Error() string {
	why := ""
	if e.Err != nil {
		why = ": " + e.Err.Error()
	}
	return fmt.Sprintf("the dataplane at %s has %s, which this agent with %s cannot take over%s: "+
		"run an agent of a version in between, or drain the node and run the other version's `redirector cleanup`", e.BPFFS, e.Pinned, e.Mine, why)
}

func (e *LayoutError) Unwrap() error { return e.Err }

// takesOver says whether an agent with layout l may take over a dataplane with the other.
func (l Layout) takesOver(other Layout) bool {
	if other.Version <= l.Version {
		return other.Version >= l.Oldest
	}
	return l.Version >= other.Oldest
}

// readLayout reads what a dataplane says of itself. m is nil for one that says nothing.
func readLayout(m *ebpf.Map) (Layout, error) {
	if m == nil {
		return Layout{}, nil
	}
	b, err := m.LookupBytes(uint32(0))
	if err != nil {
		return Layout{}, fmt.Errorf("map layout: look up: %w", err)
	}
	var value bpf.RedirectorLayoutRecord
	// The fields that are there in all versions come first.
	if len(b) < 8+len(value.Release) {
		return Layout{}, fmt.Errorf("map layout: its value of %d bytes is too short: it is not redirector's", len(b))
	}
	if err := m.Lookup(uint32(0), &value); err != nil {
		return Layout{}, fmt.Errorf("map layout: look up: %w", err)
	}
	var release strings.Builder
	for _, c := range value.Release {
		if c == 0 {
			break
		}
		release.WriteByte(byte(c))
	}
	return Layout{Version: value.Version, Oldest: value.Oldest, Release: release.String()}, nil
}

// writeLayout has the dataplane say what it is.
func writeLayout(m *ebpf.Map, l Layout) error {
	value := bpf.RedirectorLayoutRecord{Version: l.Version, Oldest: l.Oldest}
	for i := range min(len(l.Release), len(value.Release)-1) {
		value.Release[i] = int8(l.Release[i])
	}
	if err := m.Put(uint32(0), value); err != nil {
		return fmt.Errorf("map layout: put: %w", err)
	}
	return nil
}

// errMeaning says that two layouts of a map have different things in the same place.
var errMeaning = errors.New("its entries cannot be carried over")

// sameLayout says whether a pinned map is what the spec wants. The error says why its entries could not be carried over into
// one that is.
func sameLayout(spec *ebpf.MapSpec, pinned *ebpf.Map) (bool, error) {
	if pinned.Type() != spec.Type || pinned.Flags() != spec.Flags {
		return false, fmt.Errorf("it is a %s with flags %#x, not a %s with flags %#x: %w",
			pinned.Type(), pinned.Flags(), spec.Type, spec.Flags, errMeaning)
	}
	same := pinned.KeySize() == spec.KeySize && pinned.ValueSize() == spec.ValueSize && pinned.MaxEntries() == spec.MaxEntries
	types, err := typesOf(pinned)
	if err != nil {
		return false, err
	}
	if types == nil {
		return same, nil // of a kind that has no types in the kernel, or made by hand
	}
	for _, want := range []btf.Type{spec.Key, spec.Value} {
		mine, ok := btf.As[*btf.Struct](want)
		if !ok {
			continue // a number
		}
		var theirs *btf.Struct
		if err := types.TypeByName(mine.Name, &theirs); err != nil {
			return false, fmt.Errorf("it does not hold a struct %s: %w", mine.Name, errMeaning)
		}
		if err := prefixes(theirs, mine); err != nil {
			return false, fmt.Errorf("%w: %w", err, errMeaning)
		}
	}
	return same, nil
}

// typesOf returns the types of a map's keys and values, nil if the kernel knows none.
func typesOf(m *ebpf.Map) (types *btf.Spec, err error) {
	handle, err := m.Handle()
	if errors.Is(err, ebpf.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at its types: %w", err)
	}
	defer func() { err = errors.Join(err, handle.Close()) }()
	if types, err = handle.Spec(nil); err != nil {
		return nil, fmt.Errorf("look at its types: %w", err)
	}
	return types, nil
}

// prefixes says what keeps one of two structs from being the other with fields added to its end, or in bytes that are
// reserved in the other.
func prefixes(a, b *btf.Struct) error {
	if err := fieldsWithin(a, b); err != nil {
		return err
	}
	return fieldsWithin(b, a)
}

// fieldsWithin checks that each field of a is in b too, or in a place that b does not use.
func fieldsWithin(a, b *btf.Struct) error {
	for _, m := range a.Members {
		if reserved(m) {
			continue
		}
		from, to, err := extent(m)
		if err != nil {
			return err
		}
		for _, other := range b.Members {
			otherFrom, otherTo, err := extent(other)
			if err != nil {
				return err
			}
			if reserved(other) || otherTo <= from || to <= otherFrom {
				continue
			}
			if other.Name != m.Name || otherFrom != from || otherTo != to {
				return fmt.Errorf("struct %s has %s (bytes %d to %d) where another version has %s (bytes %d to %d)",
					a.Name, m.Name, from, to-1, other.Name, otherFrom, otherTo-1)
			}
		}
		if from < b.Size && to > b.Size {
			return fmt.Errorf("struct %s has %s across the end of another version's", a.Name, m.Name)
		}
	}
	return nil
}

// reserved says whether a field is there for later versions to use, and zero until then.
func reserved(m btf.Member) bool { return strings.HasPrefix(m.Name, "reserved") }

// extent returns the bytes that a field has.
func extent(m btf.Member) (from, to uint32, err error) {
	size, err := btf.Sizeof(m.Type)
	if err != nil {
		return 0, 0, fmt.Errorf("field %s: %w", m.Name, err)
	}
	from = m.Offset.Bytes()
	return from, from + uint32(size), nil
}
