// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMakeDirsUndoesWhatItDid(t *testing.T) {
	top := t.TempDir()
	before := tree(t, top)
	deep := filepath.Join(top, "a", "b", "c")
	undo, err := makeDirs(deep, 0o700)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(deep); err != nil || info.Mode() != os.ModeDir|0o700 {
		t.Errorf("made %v, %v", info, err)
	}
	undo()
	if got := tree(t, top); got != before {
		t.Errorf("it leaves %s", got)
	}

	// What is there, or is used by then, stays.
	for _, dir := range []string{filepath.Join(top, "old"), filepath.Join(top, "new", "used")} {
		if err := os.MkdirAll(filepath.Join(top, "old"), 0o700); err != nil {
			t.Fatal(err)
		}
		if undo, err = makeDirs(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(dir, "used") {
			if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		undo()
		if _, err := os.Stat(dir); err != nil {
			t.Error(err)
		}
	}

	file := filepath.Join(top, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	before = tree(t, top)
	if _, err := makeDirs(filepath.Join(file, "x", "y"), 0o700); err == nil {
		t.Error("a directory was made in a file")
	}
	if got := tree(t, top); got != before {
		t.Errorf("it leaves %s", got)
	}
}

func TestTheLockIsForOne(t *testing.T) {
	dir := t.TempDir()
	lock, err := lockRunDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = lockRunDir(dir)
	var running *runningError
	if !errors.As(err, &running) || running.pid != os.Getpid() || running.runDir != dir {
		t.Errorf("a second lock: %v", err)
	}
	if err := lock.release(); err != nil {
		t.Fatal(err)
	}
	if left := tree(t, dir); strings.Contains(left, lockName) {
		t.Errorf("it leaves %s", left)
	}
}

func TestALockThatADeadAgentLeftIsTaken(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, lockName), []byte("4711 and more than any pid has\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	lock, err := lockRunDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if pid := notedPID(lock.file); pid != os.Getpid() {
		t.Errorf("the pid in it is %d, want %d", pid, os.Getpid())
	}
	if err := lock.release(); err != nil {
		t.Fatal(err)
	}
}

func TestALockIsReleasedWhereItIsOnly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	first, err := lockRunDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, lockName)); err != nil {
		t.Fatal(err)
	}
	second, err := lockRunDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.release(); err != nil {
		t.Error(err)
	}
	var running *runningError
	if _, err := lockRunDir(dir); !errors.As(err, &running) {
		t.Errorf("the first has taken the second's file away: %v", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := second.release(); err != nil {
		t.Errorf("with the directory gone: %v", err)
	}
}

func TestRunDirsThatAreNotTrusted(t *testing.T) {
	top := t.TempDir()
	open, foreign := filepath.Join(top, "open"), filepath.Join(top, "foreign")
	for _, dir := range []string{open, foreign} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(foreign, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	for dir, word := range map[string]string{open: "0777", foreign: "user 1000"} {
		if _, err := useRunDir(dir); err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
