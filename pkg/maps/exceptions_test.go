// SPDX-License-Identifier: Apache-2.0

package maps

import (
	gomaps "maps"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// excludes is what the kernel's trie makes of ranges.
func excludes(ranges map[netip.Prefix]bool, addr netip.Addr) bool {
	longest, excluded := -1, false
	for prefix, is := range ranges {
		if prefix.Contains(addr) && prefix.Bits() > longest {
			longest, excluded = prefix.Bits(), is
		}
	}
	return excluded
}

// Whatever is changed into whatever: on the way, nothing is excluded that is so neither before nor after.
func TestNothingElseIsExcludedOnTheWay(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	ranges := func() map[netip.Prefix]bool {
		all := map[netip.Prefix]bool{}
		for range random.IntN(6) {
			prefix, err := netip.AddrFrom4([4]byte{10, 0, 0, byte(random.IntN(16))}).Prefix(28 + random.IntN(5))
			if err != nil {
				t.Fatal(err)
			}
			all[prefix] = random.IntN(2) == 0
		}
		return all
	}
	changed := 0
	for range 20_000 {
		have, want := ranges(), ranges()
		now := gomaps.Clone(have)
		for _, step := range cidrSteps(have, want) {
			changed++
			if step.remove {
				delete(now, step.prefix)
			} else {
				now[step.prefix] = step.excluded
			}
			for i := range byte(16) {
				addr := netip.AddrFrom4([4]byte{10, 0, 0, i})
				if excludes(now, addr) && !excludes(have, addr) && !excludes(want, addr) {
					t.Fatalf("from %v to %v: by way of %v, %s is excluded", have, want, now, addr)
				}
			}
		}
		if !gomaps.Equal(now, want) {
			t.Fatalf("from %v to %v: it ends as %v", have, want, now)
		}
	}
	if changed < 20_000 {
		t.Errorf("%d steps are not enough to show anything", changed)
	}
}
