// SPDX-License-Identifier: Apache-2.0

package podns

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ErrGone says that no path leads to a network namespace any more.
var ErrGone = errors.New("network namespace is gone")

// All opens every network namespace but the host's that a process is in or that is bind-mounted where this process can see
// it, each once. The handle is closed when the loop moves on. Namespaces that vanish meanwhile are left out.
func All() iter.Seq2[*NetNS, error] {
	return func(yield func(*NetNS, error) bool) {
		paths, err := candidates()
		if err != nil {
			yield(nil, err)
			return
		}
		seen := map[identity]bool{}
		for _, path := range paths {
			// To open is to enter, for the cookie: look first whether it is a new one.
			id, err := statNetNS(path)
			if err != nil || seen[id] {
				continue
			}
			seen[id] = true
			ns, err := Open(path)
			if err != nil {
				continue
			}
			more := yield(ns, nil)
			_ = ns.Close()
			if !more {
				return
			}
		}
	}
}

// Find opens the network namespace with that inode number and cookie, by whatever path leads there. The error wraps ErrGone
// if none does.
func Find(inode, cookie uint64) (*NetNS, error) {
	paths, err := candidates()
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		if id, err := statNetNS(path); err != nil || id.ino != inode {
			continue
		}
		ns, err := Open(path)
		if err != nil {
			continue
		}
		if ns.Cookie() == cookie {
			return ns, nil
		}
		_ = ns.Close()
	}
	return nil, fmt.Errorf("%w: no process is in net:[%d], and no mount holds it", ErrGone, inode)
}

// LedToBy says whether the path leads to the namespace.
func (n *NetNS) LedToBy(path string) bool {
	id, err := statNetNS(path)
	return err == nil && id == n.id
}

// Lead returns a path that leads to the namespace: a mount's, or that of a process or thread that is in it; "" if there is
// none. Descriptors and sockets that keep a namespace alive do not count, this handle being one. It fails when not all
// processes can be looked at.
func (n *NetNS) Lead() (string, error) {
	paths, err := candidates()
	if err != nil {
		return "", err
	}
	threads, err := filepath.Glob("/proc/[0-9]*/task/[0-9]*/ns/net")
	if err != nil {
		return "", fmt.Errorf("look for network namespaces: %w", err)
	}
	for _, path := range append(paths, threads...) {
		id, err := statNetNS(path)
		if err == nil && id == n.id {
			return path, nil
		}
		// That of pid 1 is the host's, which no NetNS is, and may be hidden.
		if errors.Is(err, fs.ErrPermission) && !strings.HasPrefix(path, "/proc/1/") {
			return "", fmt.Errorf("look for who is in %s: %w: run the agent with CAP_SYS_PTRACE", n.path, err)
		}
	}
	// A mount that pid 1 sees and this process does not.
	mounts, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		return "", fmt.Errorf("look for mounts of network namespaces: %w", err)
	}
	if strings.Contains(string(mounts), fmt.Sprintf(" net:[%d] ", n.id.ino)) {
		return "/proc/1/mountinfo", nil
	}
	return "", nil
}

// candidates lists paths that may lead to network namespaces: mounts first, since they stay.
func candidates() ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("look for network namespaces: %w", err)
	}
	defer f.Close()
	var paths []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// id parent major:minor root mountpoint options... - type source superoptions
		fields := strings.Fields(lines.Text())
		if len(fields) > 4 && strings.HasPrefix(fields[3], "net:[") {
			paths = append(paths, unescape(fields[4]))
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("look for network namespaces: %w", err)
	}
	procs, err := filepath.Glob(filepath.Join(proc(), "[0-9]*/ns/net"))
	if err != nil {
		return nil, fmt.Errorf("look for network namespaces: %w", err)
	}
	return append(paths, procs...), nil
}

// unescape undoes the octal escapes of blanks and backslashes in mountinfo.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
