// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// newMap makes one of the dataplane's maps, changed by edit.
func newMap(t *testing.T, name string, edit func(*ebpf.MapSpec)) *ebpf.Map {
	t.Helper()
	spec, err := bpf.LoadRedirector()
	if err != nil {
		t.Fatal(err)
	}
	m := spec.Maps[name]
	if edit != nil {
		edit(m)
	}
	made, err := ebpf.NewMap(m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = made.Close() })
	return made
}

// Counts move from one map to the other, however often it is done, and only for entries that both have.
func TestCountersAreAddedUp(t *testing.T) {
	if err := CheckFeatures(); err != nil {
		t.Skip(err)
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		t.Fatal(err)
	}
	grown := func(m *ebpf.MapSpec) {
		m.Key, m.Value = nil, nil
		m.ValueSize += 16
	}
	for name, edit := range map[string]func(*ebpf.MapSpec){"the new one is larger": grown, "the new one is smaller": nil} {
		t.Run(name, func(t *testing.T) {
			to := newMap(t, "counters", edit)
			other := grown
			if edit != nil {
				other = nil
			}
			from := newMap(t, "counters", other)
			put := func(m *ebpf.Map, key uint64, first, second byte) {
				values := make([][]byte, cpus)
				for i := range values {
					values[i] = make([]byte, m.ValueSize())
					values[i][0], values[i][8] = first, second
				}
				if err := m.Put(key, values); err != nil {
					t.Fatal(err)
				}
			}
			put(to, 1, 5, 0)
			put(from, 1, 10, 7)
			put(from, 2, 1, 1)
			put(to, 3, 1, 1)
			for range 2 {
				if err := addCounters(to, from); err != nil {
					t.Fatal(err)
				}
			}
			want := func(m *ebpf.Map, key uint64, first, second byte) {
				t.Helper()
				var values [][]byte
				if err := m.Lookup(key, &values); err != nil {
					t.Fatal(err)
				}
				for cpu, v := range values {
					if v[0] != first || v[8] != second {
						t.Errorf("on CPU %d, counters of %d are %d and %d, want %d and %d", cpu, key, v[0], v[8], first, second)
					}
				}
			}
			want(to, 1, 15, 7)
			want(from, 1, 0, 0)
			want(from, 2, 1, 1)
			want(to, 3, 1, 1)
		})
	}
}

// larger makes a spec one of a later version.
func larger(m *ebpf.MapSpec) {
	m.Key, m.Value = nil, nil
	m.ValueSize += 8
	m.MaxEntries += 10
}

// Listening sockets are copied from one map to another, to the keys that are free there.
func TestListenersAreCopied(t *testing.T) {
	if err := CheckFeatures(); err != nil {
		t.Skip(err)
	}
	if err := ProbeIterators(); err != nil {
		t.Skipf("needs iterators over maps of sockets: %v", err)
	}
	b := bed.ForTest(t, bed.Options{})
	sockets := make([]uint64, 3)
	fds := make([]uint64, 3)
	for i := range sockets {
		l, err := b.Node.Listen("tcp", 0, bed.ListenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		file, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = file.Close() })
		fds[i] = uint64(file.Fd())
		if sockets[i], err = unix.GetsockoptUint64(int(file.Fd()), unix.SOL_SOCKET, unix.SO_COOKIE); err != nil {
			t.Fatal(err)
		}
	}
	key := func(slot uint32) bpf.RedirectorListenerKey {
		return bpf.RedirectorListenerKey{NetnsCookie: 42, Port: 15001, Slot: slot}
	}
	from := newMap(t, "listeners", nil)
	to := newMap(t, "listeners", func(m *ebpf.MapSpec) { m.MaxEntries += 10 })
	for i := range uint32(2) {
		if err := from.Put(key(i), fds[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := to.Put(key(1), fds[2]); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := copyListeners(to, from); err != nil {
			t.Fatal(err)
		}
	}
	for slot, want := range map[uint32]uint64{0: sockets[0], 1: sockets[2]} {
		var got uint64
		if err := to.Lookup(key(slot), &got); err != nil || got != want {
			t.Errorf("in slot %d is socket %d, %v; want %d", slot, got, err, want)
		}
	}

	small := newMap(t, "listeners", func(m *ebpf.MapSpec) { m.MaxEntries = 1 })
	if err := copyListeners(small, from); err == nil {
		t.Error("it is not said that a map is too small")
	}
}

// So is what is noted of sockets, unless there is a newer note.
func TestNotesOfSocketsAreCopied(t *testing.T) {
	if err := CheckFeatures(); err != nil {
		t.Skip(err)
	}
	if err := ProbeIterators(); err != nil {
		t.Skipf("needs iterators over maps of sockets: %v", err)
	}
	from, to := newMap(t, "sockets", nil), newMap(t, "sockets", nil)
	var fds []int32
	for range 2 {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		fds = append(fds, int32(fd))
	}
	put := func(m *ebpf.Map, fd int32, target uint64) {
		if err := m.Put(fd, bpf.RedirectorSocketVerdict{ProbeTarget: target, ByProxy: 1}); err != nil {
			t.Fatal(err)
		}
	}
	put(from, fds[0], 1)
	put(from, fds[1], 2)
	put(to, fds[1], 3)
	if err := copySockets(to, from); err != nil {
		t.Fatal(err)
	}
	for i, want := range []uint64{1, 3} {
		var got bpf.RedirectorSocketVerdict
		if err := to.Lookup(fds[i], &got); err != nil || got.ProbeTarget != want || got.ByProxy != 1 {
			t.Errorf("of socket %d is noted %+v, %v", i, got, err)
		}
	}
}

// Entries are carried over field by field into a map of another layout, and back.
func TestEntriesAreCarriedOver(t *testing.T) {
	if err := CheckFeatures(); err != nil {
		t.Skip(err)
	}
	spec, err := bpf.LoadRedirector()
	if err != nil {
		t.Fatal(err)
	}
	old := newMap(t, "own_addrs", nil)
	key := bpf.RedirectorOwnAddrKey{NetnsCookie: 42, Addr: [16]uint8{1, 2, 3}}
	if err := old.Put(key, bpf.RedirectorOwnAddr{Ifindex: 7}); err != nil {
		t.Fatal(err)
	}
	grown := spec.Maps["own_addrs"].Copy()
	larger(grown)
	there, err := carryOver(grown, old)
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	if value, err := there.LookupBytes(key); err != nil || !bytes.Equal(value, []byte{7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}) {
		t.Errorf("the larger map has %v, %v", value, err)
	}
	back, err := carryOver(spec.Maps["own_addrs"], there)
	if err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	var value bpf.RedirectorOwnAddr
	if err := back.Lookup(key, &value); err != nil || value.Ifindex != 7 {
		t.Errorf("the smaller map has %+v, %v", value, err)
	}

	full := spec.Maps["own_addrs"].Copy()
	full.MaxEntries = 1
	if err := there.Put(bpf.RedirectorOwnAddrKey{NetnsCookie: 43}, make([]byte, 12)); err != nil {
		t.Fatal(err)
	}
	if m, err := carryOver(full, there); !errors.Is(err, unix.E2BIG) {
		t.Errorf("into a map that is too small: %v, %v", m, err)
	}
}

// Two layouts of a struct fit when one is the other with something behind it, or in what was reserved.
func TestWhichLayoutsFit(t *testing.T) {
	number := func(size uint32) btf.Type { return &btf.Int{Name: "number", Size: size} }
	layout := func(fields ...btf.Member) *btf.Struct {
		s := &btf.Struct{Name: "s"}
		for _, f := range fields {
			size, err := btf.Sizeof(f.Type)
			if err != nil {
				t.Fatal(err)
			}
			f.Offset = btf.Bits(s.Size * 8)
			s.Members = append(s.Members, f)
			s.Size += uint32(size)
		}
		return s
	}
	field := func(name string, size uint32) btf.Member { return btf.Member{Name: name, Type: number(size)} }
	base := layout(field("a", 8), field("b", 1), field("reserved", 7))
	for name, c := range map[string]struct {
		other *btf.Struct
		fits  bool
	}{
		"the same":                 {base, true},
		"one more":                 {layout(field("a", 8), field("b", 1), field("reserved", 7), field("c", 8)), true},
		"reserved bytes are used":  {layout(field("a", 8), field("b", 1), field("c", 1), field("reserved", 6)), true},
		"fewer reserved bytes":     {layout(field("a", 8), field("b", 1)), true},
		"another size":             {layout(field("a", 4), field("b", 1)), false},
		"another order":            {layout(field("b", 1), field("a", 8)), false},
		"another name":             {layout(field("x", 8), field("b", 1), field("reserved", 7)), false},
		"across the other's end":   {layout(field("a", 8), field("b", 1), field("reserved", 3), field("c", 8)), false},
		"one is gone from between": {layout(field("a", 8), field("c", 1), field("reserved", 7)), false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, pair := range [][2]*btf.Struct{{base, c.other}, {c.other, base}} {
				if err := prefixes(pair[0], pair[1]); (err == nil) != c.fits {
					t.Errorf("they fit: %v, want %v", err, c.fits)
				}
			}
		})
	}
}

// Which versions take over from which.
func TestWhoTakesOver(t *testing.T) {
	for _, c := range []struct {
		mine, other Layout
		want        bool
	}{
		{Layout{Version: 1, Oldest: 0}, Layout{Version: 1, Oldest: 0}, true},
		{Layout{Version: 1, Oldest: 0}, Layout{}, true}, // from before there were versions
		{Layout{Version: 2, Oldest: 1}, Layout{}, false},
		{Layout{Version: 2, Oldest: 1}, Layout{Version: 1}, true},
		{Layout{Version: 1, Oldest: 0}, Layout{Version: 2, Oldest: 1}, true},
		{Layout{Version: 1, Oldest: 0}, Layout{Version: 3, Oldest: 2}, false},
	} {
		if got := c.mine.takesOver(c.other); got != c.want {
			t.Errorf("%+v takes over %+v: %v, want %v", c.mine, c.other, got, c.want)
		}
	}
}

// A dataplane from before layouts had versions says nothing of itself, and is taken over.
func TestADataplaneWithoutALayoutIsTakenOver(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	closeNow(t, open(t, b))
	if err := os.Remove(filepath.Join(b.BPFFS, mapsDir, "layout")); err != nil {
		t.Fatal(err)
	}
	d := open(t, b)
	if l, err := readLayout(d.maps.Layout); err != nil || l.Version != layoutVersion {
		t.Errorf("then it has %+v, %v", l, err)
	}
}
