// SPDX-License-Identifier: Apache-2.0

// Package flock takes locks on files and directories (flock(2)) and tells who has them.
package flock

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Try takes the lock for this process, which keeps it until it closes the file or ends. The error is unix.EWOULDBLOCK when
// another has it.
func Try(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }

// Holder returns the pid of the process that has locked the file, from /proc/locks; 0 if there is none, or none that this
// process can see: the kernel lists no locks of other PID namespaces.
func Holder(f *os.File) int {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0
	}
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(locks)) {
		// number, FLOCK, ADVISORY, WRITE, pid, device and inode, from, to
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[1] != "FLOCK" || fields[5] != file {
			continue
		}
		if pid, err := strconv.Atoi(fields[4]); err == nil && pid > 0 {
			return pid
		}
	}
	return 0
}
