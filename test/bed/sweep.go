// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// dirPrefix begins the name of a bed's directory and of its cgroup; the owner and a random number follow.
const dirPrefix = "redirector-bed-"

// owner is the process that made a bed. A pid alone would be taken for alive once the kernel gives it to another process.
type owner struct {
	pid   int
	start uint64 // clock ticks since boot: field 22 of /proc/PID/stat in proc(5)
}

func (o owner) prefix() string {
	return fmt.Sprintf("%s%d-%d-", dirPrefix, o.pid, o.start)
}

// parseOwner reads the owner from the name of a bed's directory or cgroup.
func parseOwner(name string) (owner, bool) {
	rest, ok := strings.CutPrefix(name, dirPrefix)
	if !ok {
		return owner{}, false
	}
	parts := strings.Split(rest, "-")
	if len(parts) != 3 {
		return owner{}, false
	}
	pid, err := strconv.Atoi(parts[0])
	if err != nil || pid <= 0 {
		return owner{}, false
	}
	start, err := strconv.ParseUint(parts[1], 10, 64)
	if err != nil {
		return owner{}, false
	}
	return owner{pid: pid, start: start}, true
}

func thisProcess() (owner, error) {
	start, err := startTime(os.Getpid())
	if err != nil {
		return owner{}, err
	}
	return owner{pid: os.Getpid(), start: start}, nil
}

// startTime returns when the process started, in clock ticks since boot.
func startTime(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("find the start time of process %d: %w", pid, err)
	}
	// The command's name may hold blanks and parentheses: count from behind its last one, where field 3 begins.
	line := string(data)
	fields := strings.Fields(line[strings.LastIndexByte(line, ')')+1:])
	if len(fields) < 20 {
		return 0, fmt.Errorf("find the start time of process %d: /proc/%d/stat is too short", pid, pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// dead reports whether the process is known to be gone.
func (o owner) dead() bool {
	start, err := startTime(o.pid)
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	return start != o.start
}

// Sweep removes the beds of processes that died before they could close them: it kills what is in their cgroups,
// unmounts, and removes the cgroups and directories. New calls it. It looks in the directory for temporary
// files and below the cgroup2 mount, and touches only what is named after a process that is dead.
func Sweep() error {
	var errs []error
	if mount, err := cgroup2Mount(); err == nil {
		tops, err := leftovers(mount)
		errs = append(errs, err)
		for _, top := range tops {
			errs = append(errs, removeCgroup(top))
		}
	}
	dirs, err := leftovers(os.TempDir())
	errs = append(errs, err)
	for _, dir := range dirs {
		if err := unmountBelow(dir); err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, removeDir(dir))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sweep the beds of dead processes: %w", err)
	}
	return nil
}

// leftovers returns the directories in dir that are named after dead processes.
func leftovers(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var found []string
	for _, e := range entries {
		if o, ok := parseOwner(e.Name()); ok && e.IsDir() && o.dead() {
			found = append(found, filepath.Join(dir, e.Name()))
		}
	}
	return found, nil
}
