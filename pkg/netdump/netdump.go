// SPDX-License-Identifier: Apache-2.0

// Package netdump asks the kernel for lists of what is in a network namespace.
package netdump

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// tries is how often a list is asked for. A namespace in which others add and remove things all the time interrupts some.
const tries = 10

// Whole returns what list does, and asks again when something has changed meanwhile, for then the kernel may have left things out. If
// that does not end, the error is netlink.ErrDumpInterrupted, as any other of the list's.
func Whole[T any](list func() ([]T, error)) ([]T, error) {
	for try := 1; ; try++ {
		all, err := list()
		if try < tries && errors.Is(err, netlink.ErrDumpInterrupted) {
			continue
		}
		return all, err
	}
}
