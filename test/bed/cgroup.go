// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroupPatience is how long a cgroup may stay busy after its last process was killed: a process leaves its cgroup only
// when it is dead and its threads are gone.
const cgroupPatience = 5 * time.Second

func (b *Bed) makeCgroups() error {
	mount, err := cgroup2Mount()
	if err != nil {
		return err
	}
	b.cgroupMount = mount
	b.cgroupTop = filepath.Join(mount, filepath.Base(b.Dir))
	b.Cgroup = filepath.Join(b.cgroupTop, "node")
	b.cgroupOther = filepath.Join(b.cgroupTop, "other")
	for _, d := range []string{b.cgroupTop, b.Cgroup, b.cgroupOther} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return fmt.Errorf("make a cgroup (needs root and a writable cgroup2 mount): %w", err)
		}
	}
	return nil
}

func (b *Bed) removeCgroups() error {
	if b.cgroupTop == "" {
		return nil
	}
	return removeCgroup(b.cgroupTop)
}

// removeCgroup kills what is in a bed's cgroup and removes it.
func removeCgroup(top string) error {
	self, err := ownCgroup()
	if err != nil {
		return err
	}
	if strings.HasPrefix(self+"/", "/"+filepath.Base(top)+"/") {
		return fmt.Errorf("keep cgroup %s: the calling process is in it", top)
	}
	deadline := time.Now().Add(cgroupPatience)
	for {
		err := removeCgroupTree(top)
		if err == nil || !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// removeCgroupTree kills the processes of a cgroup and of those below it, which others may have made, and removes those
// that are empty. EBUSY says that one is not yet.
func removeCgroupTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if isGone(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list a cgroup: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroupTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	pids, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil && !isGone(err) {
		return fmt.Errorf("list the processes of a cgroup: %w", err)
	}
	for line := range strings.Lines(string(pids)) {
		// 0 is a process of another pid namespace.
		if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 0 {
			_ = unix.Kill(pid, unix.SIGKILL) // one that is gone is what we want
		}
	}
	// Not os.Remove: it tries unlink too and hides EBUSY behind the error of that.
	if err := unix.Rmdir(dir); err != nil && !isGone(err) {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}

// JoinCgroup moves the calling process into the bed's cgroup, for what is attached there to see sockets that this
// process makes from now on: a socket belongs to the cgroup its creator was in when it made it. Close moves the process
// back. A process can be in one bed's cgroup at a time.
func (b *Bed) JoinCgroup() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errClosed
	}
	if b.oldCgroup != "" {
		return nil
	}
	old, err := ownCgroup()
	if err != nil {
		return err
	}
	if _, ok := parseOwner(strings.Split(strings.TrimPrefix(old, "/"), "/")[0]); ok {
		return fmt.Errorf("this process is in cgroup %s of another bed: close that first", old)
	}
	if err := enterCgroup(b.Cgroup); err != nil {
		return err
	}
	b.oldCgroup = old
	return nil
}

func (b *Bed) leaveCgroup() error {
	if b.oldCgroup == "" {
		return nil
	}
	err := enterCgroup(filepath.Join(b.cgroupMount, b.oldCgroup))
	if err != nil {
		// The old group may be gone, or above the root of our cgroup namespace.
		err = enterCgroup(b.cgroupMount)
	}
	if err == nil {
		b.oldCgroup = ""
	}
	return err
}

func enterCgroup(dir string) error {
	if err := writeKernelFile(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(os.Getpid())); err != nil {
		return fmt.Errorf("move this process to cgroup %s: %w", dir, err)
	}
	return nil
}

// ownCgroup returns the cgroup2 group of this process, as a path from the root of the cgroup namespace.
func ownCgroup() (string, error) {
	return cgroupOf("self")
}

func cgroupOf(pid string) (string, error) {
	data, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		return "", fmt.Errorf("find the cgroup of process %s: %w", pid, err)
	}
	for line := range strings.Lines(string(data)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(path, "\n"), nil
		}
	}
	return "", fmt.Errorf("process %s is in no cgroup2 group: the kernel lacks cgroup2", pid)
}

// isGone reports whether err says that a file or cgroup is not there: ENODEV comes from a file of a removed cgroup.
func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV)
}

// writeKernelFile writes to a file that a file system of the kernel's own has; os.WriteFile would try to make it.
func writeKernelFile(path, data string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(data)
	return errors.Join(err, f.Close())
}
