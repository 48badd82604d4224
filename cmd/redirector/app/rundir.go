// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/flock"
)

// Names in the run-dir.
const (
	socketName = "agent.sock"
	lockName   = "agent.lock"
	podsName   = "pods"
)

func socketIn(runDir string) string { return filepath.Join(runDir, socketName) }

// makeDirs makes a directory and those above it that are missing. undo removes those that it has made, unless something is in
// them by then.
func makeDirs(dir string, mode os.FileMode) (undo func(), err error) {
	var made []string
	undo = func() {
		for _, d := range slices.Backward(made) {
			_ = os.Remove(d) // fails if it is used, and then it must stay
		}
	}
	var missing []string
	for d := dir; ; d = filepath.Dir(d) {
		info, err := os.Stat(d)
		if err == nil && !info.IsDir() {
			err = &fs.PathError{Op: "mkdir", Path: d, Err: unix.ENOTDIR}
		}
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		missing = append(missing, d)
	}
	for _, d := range slices.Backward(missing) {
		switch err := os.Mkdir(d, mode); {
		case err == nil:
			made = append(made, d)
		case !errors.Is(err, fs.ErrExist):
			undo()
			return nil, err
		}
	}
	return undo, nil
}

// useRunDir makes the run-dir, if need be, and checks that an agent can trust it.
func useRunDir(dir string) (undo func(), err error) {
	undo, err = makeDirs(dir, 0o700)
	if err == nil {
		if err = checkRunDir(dir); err != nil {
			undo()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("run-dir %s cannot be used: %w: choose another with --run-dir, or put this one right", dir, err)
	}
	return undo, nil
}

// checkRunDir refuses what could not hold the agent's files, and a directory in which others than root could put some.
func checkRunDir(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return unix.ENOTDIR
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return fmt.Errorf("it belongs to user %d", st.Uid)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("others than its owner may write to it (mode %04o)", st.Mode&0o7777)
	}
	return nil
}

// lockFile is the run-dir's lock, held. The kernel lets go of it when the process ends, however it ends.
type lockFile struct{ file *os.File }

// runningError says that an agent holds the lock.
type runningError struct {
	runDir string
	pid    int // as it is noted in the file; 0 if it is not
	holder int // as the kernel says; 0 if it is in another PID namespace
}

func (e *runningError) Error() string {
	who := "an agent"
	if e.pid != 0 {
		who = fmt.Sprintf("an agent (pid %d)", e.pid)
	}
	return fmt.Sprintf("%s runs with run-dir %s: stop it first", who, e.runDir)
}

// lockRunDir takes the run-dir's lock for this process and notes its pid there. The error is a *runningError if another holds it.
func lockRunDir(dir string) (*lockFile, error) {
	path := filepath.Join(dir, lockName)
	for {
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, fmt.Errorf("run-dir %s cannot be used: %w: choose another with --run-dir, or put this one right", dir, err)
		}
		ours, err := lockAndNote(file, path)
		if ours {
			return &lockFile{file}, nil
		}
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			err = &runningError{runDir: dir, pid: notedPID(file), holder: flock.Holder(file)}
		case err == nil:
			_ = file.Close()
			continue // removed by who held it, between our open and our lock
		default:
			err = fmt.Errorf("lock %s: %w", path, err)
		}
		_ = file.Close()
		return nil, err
	}
}

// lockAndNote says whether the lock is ours: not if the file is at its path no more.
func lockAndNote(file *os.File, path string) (bool, error) {
	if err := flock.Try(file); err != nil {
		return false, err
	}
	locked, err := file.Stat()
	if err != nil {
		return false, err
	}
	if same, err := isAt(locked, path); !same {
		return false, err
	}
	if err := file.Truncate(0); err != nil {
		return false, err
	}
	if _, err := file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return false, err
	}
	return true, nil
}

// notedPID returns the pid in a lock file, 0 if there is none.
func notedPID(file *os.File) int {
	b := make([]byte, 32)
	n, _ := file.ReadAt(b, 0)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	if err != nil {
		return 0
	}
	return pid
}

// release removes the lock's file and gives the lock back, in this order: who opens the file after that makes a new one.
func (l *lockFile) release() error {
	locked, err := l.file.Stat()
	if err == nil {
		// By now it may be another's, if somebody has removed the directory meanwhile.
		var ours bool
		if ours, err = isAt(locked, l.file.Name()); ours {
			err = os.Remove(l.file.Name())
		}
	}
	return errors.Join(err, l.file.Close())
}

// isAt says whether the file is the one at that path.
func isAt(file fs.FileInfo, path string) (bool, error) {
	there, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(file, there), err
}
