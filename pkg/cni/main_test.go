// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// patience is how long what should happen may take before it counts as not happening. An emulated processor needs more.
var patience = func() time.Duration {
	if os.Getenv("VMTEST_IN_VM") != "" {
		return time.Minute
	}
	return 20 * time.Second
}()

// TestMain makes the test binary the plugin when a test calls it as a runtime does.
func TestMain(m *testing.M) {
	if os.Getenv("CNI_COMMAND") != "" {
		os.Exit(Main())
	}
	os.Exit(m.Run())
}

// node is the part of a node's file system that the installer works on.
type node struct {
	t                              *testing.T
	netDir, binDir, cacheDir, file string
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{t: t, netDir: filepath.Join(dir, "net.d"), binDir: filepath.Join(dir, "bin"), cacheDir: filepath.Join(dir, "cache")}
	for _, d := range []string{n.netDir, n.binDir} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.file = filepath.Join(dir, "plugin")
	if err := os.WriteFile(n.file, []byte("#!plugin"), 0o755); err != nil {
		t.Fatal(err)
	}
	return n
}

// installer returns an installer that chains, unless change says otherwise.
func (n *node) installer(change func(*Options)) *Installer {
	n.t.Helper()
	opts := Options{
		NetDir: n.netDir, BinDir: n.binDir, CacheDir: n.cacheDir, Binary: n.file, Chained: true,
		Entry: Entry{ExcludeNamespaces: []string{"kube-system"}},
		Log:   slog.New(slog.NewTextHandler(n.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	if change != nil {
		change(&opts)
	}
	in, err := NewInstaller(opts)
	if err != nil {
		n.t.Fatal(err)
	}
	return in
}

// write puts a configuration into the directory that has been there for a while.
func (n *node) write(name, text string) {
	n.t.Helper()
	path := filepath.Join(n.netDir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		n.t.Fatal(err)
	}
	n.age(name)
}

// age makes a file one that nobody is writing.
func (n *node) age(name string) {
	n.t.Helper()
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(n.netDir, name), old, old); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) read(name string) string {
	n.t.Helper()
	text, err := os.ReadFile(filepath.Join(n.netDir, name))
	if err != nil {
		n.t.Fatal(err)
	}
	return string(text)
}

// tree lists the files below a directory with their modes and, up to a length, contents.
func tree(t *testing.T, dirs ...string) string {
	t.Helper()
	var b strings.Builder
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			b.WriteString(info.Mode().String() + " " + path)
			switch {
			case info.Mode().IsRegular():
				text, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				b.WriteString("\n" + string(text))
			case info.Mode()&fs.ModeSymlink != 0:
				to, err := os.Readlink(path)
				if err != nil {
					return err
				}
				b.WriteString(" -> " + to)
			}
			b.WriteString("\n")
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}
