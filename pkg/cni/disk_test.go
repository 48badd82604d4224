// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// mount mounts a tmpfs over a directory of the node's until the end of the test.
func (n *node) mount(dir, options string) {
	n.t.Helper()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			n.t.Error(err)
		}
	})
}

// fillUp leaves no room on the filesystem of a directory.
func fillUp(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "ballast")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 1<<10))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// ways are the ways of installation.
var ways = map[string]func(*Options){
	"chained": nil,
	"owned":   func(o *Options) { o.Owned = true },
	"Multus":  func(o *Options) { o.Chained = false },
}

func TestAFullDiskLeavesConfigurationsAsTheyAre(t *testing.T) {
	for way, change := range ways {
		for _, name := range []string{"10-net.conflist", "10-net.conf"} {
			t.Run(way+", "+name, func(t *testing.T) {
				n := newNode(t)
				n.mount(n.netDir, "size=64k")
				text := lists["indented"]
				if strings.HasSuffix(name, ".conf") {
					text = singles["indented"]
				}
				n.write(name, text)
				untouched := tree(t, n.netDir)
				free := fillUp(t, n.netDir)
				full := tree(t, n.netDir)
				wantOneLine(t, "installing", func() error { _, err := n.installer(change).Install(); return err }, unix.ENOSPC, n.netDir)
				if d := cmp.Diff(full, tree(t, n.netDir)); d != "" {
					t.Errorf("what could not be installed leaves (-was +is):\n%s", d)
				}
				free()
				n.install(change)
				installed := tree(t, n.netDir)

				free = fillUp(t, n.netDir)
				full = tree(t, n.netDir)
				_, err := n.installer(nil).Uninstall(KeepIfCached)
				if err != nil { // to remove a file takes no room
					wantOneLine(t, "uninstalling", func() error { return err }, unix.ENOSPC, n.netDir)
					if d := cmp.Diff(full, tree(t, n.netDir)); d != "" {
						t.Errorf("what could not be uninstalled is half there (-was +is):\n%s", d)
					}
				}
				free()
				if err != nil {
					if d := cmp.Diff(installed, tree(t, n.netDir)); d != "" {
						t.Errorf("(-was +is):\n%s", d)
					}
				}
				n.uninstall()
				if d := cmp.Diff(untouched, tree(t, n.netDir)); d != "" {
					t.Errorf("it is not as it was (-was +is):\n%s", d)
				}
			})
		}
	}
}

func TestAFullDiskLeavesTheOldBinary(t *testing.T) {
	n := newNode(t)
	n.write("10-net.conflist", lists["compact"])
	n.mount(n.binDir, "size=256k")
	small, large := filepath.Join(t.TempDir(), "small"), filepath.Join(t.TempDir(), "large")
	for path, size := range map[string]int{small: 1 << 10, large: 1 << 20} {
		if err := os.WriteFile(path, make([]byte, size), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.install(func(o *Options) { o.Binary = small })
	before := tree(t, n.binDir)
	wantOneLine(t, "installing", func() error {
		_, err := n.installer(func(o *Options) { o.Binary = large }).Install()
		return err
	}, unix.ENOSPC, n.binDir)
	if d := cmp.Diff(before, tree(t, n.binDir)); d != "" {
		t.Errorf("the binary is not the old one (-was +is):\n%s", d)
	}
	n.wantChain("10-net.conflist", "ptp", PluginType)
}

func TestWhatCannotBeWrittenIsLeftAndSaid(t *testing.T) {
	for way, change := range ways {
		t.Run(way, func(t *testing.T) {
			n := newNode(t)
			n.mount(n.netDir, "size=64k")
			n.write("10-net.conflist", lists["indented"])
			remount := func(flags uintptr) {
				if err := unix.Mount("", n.netDir, "", unix.MS_REMOUNT|flags, ""); err != nil {
					t.Fatal(err)
				}
			}
			untouched := tree(t, n.netDir)
			remount(unix.MS_RDONLY)
			wantOneLine(t, "installing", func() error { _, err := n.installer(change).Install(); return err }, unix.EROFS, n.netDir)
			remount(0)
			n.install(change)
			installed := tree(t, n.netDir)
			remount(unix.MS_RDONLY)
			wantOneLine(t, "uninstalling", func() error { _, err := n.installer(nil).Uninstall(KeepIfCached); return err }, unix.EROFS, n.netDir)
			if _, err := os.Stat(filepath.Join(n.binDir, PluginType)); err != nil {
				t.Errorf("a configuration names the plugin, and it is gone: %v", err)
			}
			remount(0)
			if d := cmp.Diff(installed, tree(t, n.netDir)); d != "" {
				t.Errorf("what could not be uninstalled is half there (-was +is):\n%s", d)
			}
			n.uninstall()
			if d := cmp.Diff(untouched, tree(t, n.netDir)); d != "" {
				t.Errorf("it is not as it was (-was +is):\n%s", d)
			}
		})
	}
}

// TestThingsInTheWay has what nobody expects where the installer's own files go.
func TestThingsInTheWay(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Options)
		make   func(n *node) error
		words  string // of the error, "" if it is to work
	}{
		"a directory as the plugin":       {nil, func(n *node) error { return os.MkdirAll(filepath.Join(n.binDir, PluginType, "x"), 0o755) }, "redirector"},
		"a link as the plugin":            {nil, func(n *node) error { return os.Symlink("/bin/true", filepath.Join(n.binDir, PluginType)) }, ""},
		"a link to nowhere as the plugin": {nil, func(n *node) error { return os.Symlink("nowhere", filepath.Join(n.binDir, PluginType)) }, ""},
		"a directory as the owned list": {ways["owned"], func(n *node) error {
			return os.Mkdir(filepath.Join(n.netDir, DefaultOwnedName), 0o755)
		}, DefaultOwnedName},
		"a link to nowhere as the owned list": {ways["owned"], func(n *node) error {
			return os.Symlink("nowhere", filepath.Join(n.netDir, DefaultOwnedName))
		}, ""},
		"garbage as the owned list": {ways["owned"], func(n *node) error {
			n.write(DefaultOwnedName, "{]")
			return nil
		}, ""},
		"another's list as the owned one": {ways["owned"], func(n *node) error {
			return os.WriteFile(filepath.Join(n.netDir, DefaultOwnedName), []byte(lists["compact"]), 0o600)
		}, "another"},
		"a directory as Multus' configuration": {ways["Multus"], func(n *node) error {
			return os.Mkdir(filepath.Join(n.netDir, DefaultOwnConf), 0o755)
		}, DefaultOwnConf},
		"no directory of configurations": {nil, func(n *node) error { return os.RemoveAll(n.netDir) }, "name the directory"},
		"no directory of plugins":        {nil, func(n *node) error { return os.RemoveAll(n.binDir) }, "name the directory"},
		"a file as the directory of plugins": {nil, func(n *node) error {
			return errors.Join(os.RemoveAll(n.binDir), os.WriteFile(n.binDir, nil, 0o600))
		}, "name the directory"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.write("10-net.conflist", lists["indented"])
			if err := c.make(n); err != nil {
				t.Fatal(err)
			}
			confs := func() string {
				if _, err := os.Stat(n.netDir); err != nil {
					return ""
				}
				return tree(t, n.netDir)
			}
			before := confs()
			_, err := n.installer(c.change).Install()
			switch {
			case c.words == "":
				if err != nil {
					t.Fatal(err)
				}
				n.install(c.change)
			case err == nil || !strings.Contains(err.Error(), c.words) || strings.Contains(err.Error(), "\n"):
				t.Errorf("the error is %v, want one line with %q", err, c.words)
			}
			if c.words == "" {
				return
			}
			if d := cmp.Diff(before, confs()); d != "" {
				t.Errorf("what could not be installed leaves (-was +is):\n%s", d)
			}
		})
	}
}

// wantOneLine checks that something fails for a reason, and says where, on one line.
func wantOneLine(t *testing.T, what string, do func() error, reason error, where string) {
	t.Helper()
	err := do()
	if err == nil || !errors.Is(err, reason) || !strings.Contains(err.Error(), where) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%s: %v, want one line about %s that says %v", what, err, where, reason)
	}
}
