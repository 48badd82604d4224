// SPDX-License-Identifier: Apache-2.0

// Package cgroups finds out which cgroup2 groups of the node are what: the pods', the kubelet's, a process's. It only reads.
// A group's id, as BPF programs see it, is the inode number of its directory.
package cgroups

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxDepth is how deep below the root the pods' group may be: kubelets in containers nest it.
const maxDepth = 5

// kubeletNames are the processes that are or contain a kubelet, as /proc/PID/comm has them.
var kubeletNames = []string{"kubelet", "kubelite", "k3s", "k3s-server", "k3s-agent", "rke2"}

// ErrRoot says that a process is in the root group, as all are where the runtime uses cgroup v1: its group tells nothing.
var ErrRoot = errors.New("the process is in the root of cgroup2, so its cgroup tells nothing about it")

// ID returns the id of a group.
func ID(dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, fmt.Errorf("cgroup %s: %w", dir, err)
	}
	return st.Ino, nil
}

// Pods returns the groups that hold the node's pods: those called kubepods, with the cgroupfs driver, or kubepods.slice, with
// systemd's, wherever below root they are.
func Pods(root string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // gone meanwhile
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		}
		name := d.Name()
		if path != root && (name == "kubepods" || strings.HasSuffix(name, "-kubepods.slice") || name == "kubepods.slice") {
			found = append(found, path)
			return fs.SkipDir
		}
		depth := strings.Count(strings.TrimPrefix(path, root), "/")
		if depth >= maxDepth || strings.HasSuffix(name, ".service") || strings.HasSuffix(name, ".scope") {
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for the pods' cgroups: %w", err)
	}
	return found, nil
}

// Kubelets returns the groups of the processes that are a kubelet.
func Kubelets(root string) ([]string, error) {
	comms, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return nil, fmt.Errorf("look for the kubelet: %w", err)
	}
	var found []string
	for _, comm := range comms {
		name, err := os.ReadFile(comm)
		if err != nil || !slices.Contains(kubeletNames, strings.TrimSpace(string(name))) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(comm)))
		if err != nil {
			continue
		}
		dir, err := Of(root, pid)
		if err != nil || slices.Contains(found, dir) {
			continue
		}
		found = append(found, dir)
	}
	return found, nil
}

// Of returns the group that a process is in. root is where cgroup2 is mounted, or a group above that of the process. The
// error wraps ErrRoot if the process is in the root of all groups.
func Of(root string, pid int) (string, error) {
	path, err := pathOf(pid)
	if err != nil {
		return "", err
	}
	if path == "/" {
		return "", fmt.Errorf("process %d: %w", pid, ErrRoot)
	}
	// The path is as this process's cgroup namespace has it, and root may be something else than its root: take it for a
	// hint, and look.
	for rest := path; rest != "/"; {
		dir := filepath.Join(root, rest)
		if isIn, err := holds(dir, pid); err == nil && isIn {
			return dir, nil
		}
		_, after, ok := strings.Cut(rest[1:], "/")
		if !ok {
			break
		}
		rest = "/" + after
	}
	var found string
	err = filepath.WalkDir(root, func(dir string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil //nolint:nilerr // gone meanwhile
		}
		if isIn, err := holds(dir, pid); err == nil && isIn {
			found = dir
			return fs.SkipAll
		}
		return nil
	})
	if err != nil || found == "" {
		return "", errors.Join(fmt.Errorf("process %d is in no cgroup below %s", pid, root), err)
	}
	return found, nil
}

// pathOf is the process's group in the hierarchy of version 2.
func pathOf(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", fmt.Errorf("find the cgroup of process %d: %w", pid, err)
	}
	for line := range strings.Lines(string(b)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return path, nil
		}
	}
	return "", fmt.Errorf("process %d is in no cgroup of version 2", pid)
}

func holds(dir string, pid int) (bool, error) {
	f, err := os.Open(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return false, err
	}
	defer f.Close()
	want := strconv.Itoa(pid)
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if lines.Text() == want {
			return true, nil
		}
	}
	return false, lines.Err()
}
