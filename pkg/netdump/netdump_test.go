// SPDX-License-Identifier: Apache-2.0

package netdump

import (
	"errors"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestAnInterruptedListIsAskedForAgain(t *testing.T) {
	other := errors.New("other")
	for _, c := range []struct {
		name        string
		err         error
		interrupted int // how often it is, before err
		calls       int
		want        error
	}{
		{"at once", nil, 0, 1, nil},
		{"after some", nil, 3, 4, nil},
		{"for ever", nil, 1 << 20, tries, netlink.ErrDumpInterrupted},
		{"another error", other, 0, 1, other},
		{"another error after some", other, 2, 3, other},
	} {
		t.Run(c.name, func(t *testing.T) {
			calls := 0
			got, err := Whole(func() ([]int, error) {
				calls++
				if calls <= c.interrupted {
					return nil, netlink.ErrDumpInterrupted
				}
				return []int{7}, c.err
			})
			if calls != c.calls || !errors.Is(err, c.want) || err == nil && !slices.Equal(got, []int{7}) {
				t.Errorf("%d calls, %v, %v", calls, got, err)
			}
		})
	}
}
