// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// unmountBelow unmounts what is mounted at dir or below it, the last mounted first.
func unmountBelow(dir string) error {
	points, err := mountPoints()
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range slices.Backward(points) {
		if p != dir && !strings.HasPrefix(p, dir+"/") {
			continue
		}
		err := unix.Unmount(p, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			// Someone still has a file open there: the mount goes as soon as that is closed.
			err = unix.Unmount(p, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		// Two sweeps may meet: EINVAL is "not a mount point" (any more).
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("unmount %s: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

// removeDir removes a bed's directory, and refuses to cross into a mount that could not be unmounted.
func removeDir(dir string) error {
	points, err := mountPoints()
	if err != nil {
		return err
	}
	for _, p := range points {
		if p == dir || strings.HasPrefix(p, dir+"/") {
			return fmt.Errorf("keep %s: %s is still mounted", dir, p)
		}
	}
	return os.RemoveAll(dir)
}

// mountPoints returns the mount points of this mount namespace in the order they were mounted.
func mountPoints() ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	defer f.Close()
	var points []string
	s := bufio.NewScanner(f)
	for s.Scan() {
		if fields := strings.Fields(s.Text()); len(fields) > 4 {
			points = append(points, unescape(fields[4]))
		}
	}
	return points, s.Err()
}

// cgroup2Mount returns the first cgroup2 mount.
func cgroup2Mount() (string, error) {
	data, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return "", fmt.Errorf("find the cgroup2 mount: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[2] == "cgroup2" {
			return filepath.Clean(unescape(fields[1])), nil
		}
	}
	return "", errors.New("no cgroup2 in /proc/self/mounts: mount one (type cgroup2 at /sys/fs/cgroup)")
}

// unescape undoes the octal escapes of the kernel's mount tables.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				out.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		out.WriteByte(s[i])
	}
	return out.String()
}
