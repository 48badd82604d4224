// SPDX-License-Identifier: Apache-2.0

package flock

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTheHolderIsKnown(t *testing.T) {
	dir := t.TempDir()
	open := func() *os.File {
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	first, second := open(), open()
	if pid := Holder(second); pid != 0 {
		t.Errorf("a file that nobody has locked is locked by %d", pid)
	}
	if err := Try(first); err != nil {
		t.Fatal(err)
	}
	if err := Try(second); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("the second lock: %v", err)
	}
	if pid := Holder(second); pid != os.Getpid() {
		t.Errorf("the holder is %d, want %d", pid, os.Getpid())
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Try(second); err != nil {
		t.Errorf("after the first is closed: %v", err)
	}
}
