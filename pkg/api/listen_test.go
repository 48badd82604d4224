// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestListenLetsRootOnlyIn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("the socket has mode %s, want 0600", info.Mode())
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after Close there still is the file: %v", err)
	}
}

func TestListenReplacesAStaleSocketOnly(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale")
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := Listen(stale)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()

	file, full := filepath.Join(dir, "file"), filepath.Join(dir, "packets")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	packets, err := net.Listen("unixpacket", full)
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	for path, words := range map[string]string{
		stale:                              "in use",
		full:                               "in use",
		file:                               "no socket",
		dir:                                "no socket",
		filepath.Join(dir, "missing", "s"): "no such file",
		filepath.Join(dir, strings.Repeat("x", 200)): "shorter",
	} {
		if l, err := Listen(path); err == nil {
			_ = l.Close()
			t.Errorf("Listen(%s) went well", path)
		} else if !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), words) {
			t.Errorf("Listen(%s): %q does not name it and say %q", path, err, words)
		}
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}
