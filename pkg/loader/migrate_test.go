// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/redirector-dataplane/redirector/bpf"
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
