// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/flock"
)

// ErrInUse says that another process has the dataplane open.
var ErrInUse = errors.New("another agent uses it")

// InUseError is the ErrInUse that says which process it is.
type InUseError struct {
	// BPFFS is the dataplane's directory.
	BPFFS string
	// PID is the process's; 0 if it is not known, for it is in another PID namespace, say.
	PID int
}

func (e *InUseError) Error() string {
	who := ""
	if e.PID != 0 {
		who = fmt.Sprintf(" (pid %d)", e.PID)
	}
	return fmt.Sprintf("dataplane %s: %v%s: stop that one first", e.BPFFS, ErrInUse, who)
}

// Is says that it is ErrInUse.
func (e *InUseError) Is(target error) bool { return target == ErrInUse }

// CheckBPFFS says what is wrong with a directory for pins, if anything.
func CheckBPFFS(dir string) error {
	if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
		return fmt.Errorf("bpffs %q is not a clean absolute path: use one like /sys/fs/bpf/redirector", dir)
	}
	if strings.Contains(filepath.Base(dir), ".") {
		return fmt.Errorf("bpffs %s: the BPF filesystem allows no '.' in names: use another", dir)
	}
	parent := filepath.Dir(dir)
	var st unix.Statfs_t
	if err := unix.Statfs(parent, &st); err != nil {
		return fmt.Errorf("bpffs %s: %s: %w: mount a BPF filesystem there with `mount -t bpf none DIR`", dir, parent, err)
	}
	if st.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("bpffs %s: %s is not on a BPF filesystem: mount one with `mount -t bpf none %s`", dir, parent, parent)
	}
	return nil
}

// CheckCgroup says what is wrong with a cgroup2 directory, if anything.
func CheckCgroup(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("cgroup %q: %w: name a directory of the cgroup2 filesystem", dir, err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("cgroup %q is not on a cgroup2 filesystem: name the mount that `findmnt -t cgroup2` shows", dir)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return fmt.Errorf("cgroup %q is not a directory: name the cgroup, not a file of it", dir)
	}
	return nil
}

// FindCgroup2 returns where cgroup2 is mounted, as the calling thread sees it: threads may be in mount namespaces of their own.
func FindCgroup2() (string, error) {
	f, err := os.Open("/proc/thread-self/mounts")
	if err != nil {
		return "", fmt.Errorf("find the cgroup2 mount: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// device, mount point, type, options
		if fields := strings.Fields(lines.Text()); len(fields) > 2 && fields[2] == "cgroup2" {
			return fields[1], nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("find the cgroup2 mount: %w", err)
	}
	return "", errors.New("no cgroup2 filesystem is mounted: mount one with `mount -t cgroup2 none DIR`, or name it with --cgroup")
}

// lockDir holds a directory for this process, until the file is closed or the process ends.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open for locking: %w", err)
	}
	if err := flock.Try(f); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(&InUseError{BPFFS: dir, PID: flock.Holder(f)}, f.Close())
		}
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return f, nil
}
