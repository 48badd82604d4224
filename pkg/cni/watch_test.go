// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
)

// fuzzVar says for how long a second writer works against the installer, as in 30s.
const fuzzVar = "REDIRECTOR_CNI_FUZZ"

// run runs an installer until the end of the test.
func (n *node) run(change func(*Options), observe func(error)) (stop func()) {
	n.t.Helper()
	in := n.installer(change)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- in.Run(ctx, observe) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				n.t.Error(err)
			}
		})
	}
	n.t.Cleanup(stop)
	return stop
}

// chained says whether a file has the plugin once, at the end of a valid list.
func (n *node) chained(name string) bool {
	list, err := libcni.NetworkConfFromFile(filepath.Join(n.netDir, name))
	if err != nil {
		return false
	}
	count := 0
	for _, plugin := range list.Plugins {
		if plugin.Network.Type == PluginType {
			count++
		}
	}
	return count == 1 && list.Plugins[len(list.Plugins)-1].Network.Type == PluginType
}

func TestRunPutsThePluginInAgain(t *testing.T) {
	n := newNode(t)
	var mu sync.Mutex
	var last error
	n.run(nil, func(err error) {
		mu.Lock()
		defer mu.Unlock()
		last = err
	})
	said := func() error {
		mu.Lock()
		defer mu.Unlock()
		return last
	}
	eventually(t, "it says that there is nothing to be chained into", func() bool { return errors.Is(said(), ErrNoPrimary) })

	for i, text := range []string{lists["indented"], lists["compact"], lists["odd spaces"]} {
		name := filepath.Join(n.netDir, "10-net.conflist")
		if i%2 == 0 {
			if err := os.WriteFile(name+".tmp", []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(name+".tmp", name); err != nil {
				t.Fatal(err)
			}
		} else if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the plugin is in "+text, func() bool { return n.chained("10-net.conflist") && said() == nil })
	}

	binary := filepath.Join(n.binDir, PluginType)
	if err := os.Remove(binary); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the binary is back", func() bool {
		_, err := os.Stat(binary)
		return err == nil
	})

	// The directory is replaced by another.
	if err := os.Rename(n.netDir, n.netDir+".old"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it says that the directory is gone", func() bool { return errors.Is(said(), os.ErrNotExist) })
	if err := os.Mkdir(n.netDir, 0o755); err != nil {
		t.Fatal(err)
	}
	n.write("10-net.conflist", lists["compact"])
	eventually(t, "the plugin is in the new directory", func() bool { return n.chained("10-net.conflist") })
	n.write("10-net.conflist", lists["indented"])
	eventually(t, "the new directory is watched", func() bool { return n.chained("10-net.conflist") })
}

func TestRunWritesNothingWhenNothingIsToBeDone(t *testing.T) {
	n := newNode(t)
	n.write("10-net.conflist", lists["indented"])
	looks := make(chan error, 100)
	n.run(nil, func(err error) { looks <- err })
	// The first look installs it, the second is for what the first has done; then there is a long time without any.
	for range 2 {
		select {
		case err := <-looks:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Fatal("it does not look")
		}
	}
	info, err := os.Stat(filepath.Join(n.netDir, "10-net.conflist"))
	if err != nil {
		t.Fatal(err)
	}
	n.write("unrelated.txt", "x")
	if err := <-looks; err != nil {
		t.Error(err)
	}
	now, err := os.Stat(filepath.Join(n.netDir, "10-net.conflist"))
	if err != nil || !os.SameFile(info, now) {
		t.Errorf("the list is written again: %v", err)
	}
}

// A second writer does to the directory what agents, package managers and people do, and worse. Each of its versions of the
// primary's list has a number; when it stops, the last must be there, with the plugin in it once.
func TestASecondWriter(t *testing.T) {
	t.Parallel()
	length := 3 * time.Second
	if text := os.Getenv(fuzzVar); text != "" {
		var err error
		if length, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	seed := uint64(time.Now().UnixNano())
	for name, change := range map[string]func(*Options){
		"chained": nil,
		"owned":   func(o *Options) { o.Owned = true },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			t.Logf("seed %d", seed)
			n := newNode(t)
			w := &writer{node: n, rand: rand.New(rand.NewPCG(seed, 1))}
			stop := n.run(change, nil)
			stopOther := n.run(change, nil) // an agent that is being replaced
			for deadline := time.Now().Add(length); time.Now().Before(deadline); {
				w.step()
				time.Sleep(time.Duration(w.rand.Int64N(int64(50 * time.Millisecond))))
			}
			last := w.settle()
			kept := last
			if change != nil {
				kept = DefaultOwnedName
			}
			want := fmt.Sprintf(`"version":%d,`, w.version)
			eventually(t, "the plugin is in the last version", func() bool {
				files, err := libcni.ConfFiles(n.netDir, confExts)
				if err != nil || len(files) == 0 {
					return false
				}
				// Single configurations are lists by now.
				first := filepath.Base(files[0])
				return (first == kept || change == nil && first == strings.TrimSuffix(kept, ".conf")+listExt) &&
					n.chained(first) && strings.Contains(n.read(first), want)
			})
			stop()
			stopOther()
			// Nobody else has it, and nothing is left of the fight.
			files, err := os.ReadDir(n.netDir)
			if err != nil {
				t.Fatal(err)
			}
			with := 0
			for _, file := range files {
				text, err := os.ReadFile(filepath.Join(n.netDir, file.Name()))
				if err == nil && namesPlugin.Match(text) {
					with++
				}
				if strings.HasSuffix(file.Name(), ".tmp") {
					t.Errorf("left: %s", file.Name())
				}
			}
			if with != 1 {
				t.Errorf("the plugin is in %d files", with)
			}
			t.Logf("%d versions", w.version)
		})
	}
}

// writer is the second writer.
type writer struct {
	*node
	rand    *rand.Rand
	version int
}

// list is the next version of the primary's list.
func (w *writer) list() string {
	w.version++
	return fmt.Sprintf(`{"cniVersion":"1.0.0","name":"k8s","version":%d, "plugins":[ {"type":"bridge"},{"type":"portmap"} ]}`, w.version)
}

func (w *writer) single() string {
	w.version++
	return fmt.Sprintf(`{"cniVersion":"1.0.0","name":"k8s","version":%d, "type":"bridge"}`, w.version)
}

func (w *writer) must(err error) {
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Error(err)
	}
}

const fuzzed = "10-net.conflist"

// step does one thing.
func (w *writer) step() {
	path := filepath.Join(w.netDir, fuzzed)
	put := func(text string) { // in place
		if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
			w.must(os.RemoveAll(path))
		}
		w.must(os.WriteFile(path, []byte(text), 0o644))
	}
	switch w.rand.IntN(12) {
	case 0, 1:
		put(w.list())
	case 2, 3:
		w.must(os.WriteFile(path+".new", []byte(w.list()), 0o644))
		w.must(os.RemoveAll(path))
		w.must(os.Rename(path+".new", path))
	case 4:
		put("")
	case 5:
		if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() {
			w.must(os.Truncate(path, int64(w.rand.IntN(80))))
		}
	case 6:
		put(w.list()[:w.rand.IntN(60)])
	case 7: // slowly, and in parts
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
		if err != nil {
			return
		}
		text := w.list()
		for _, part := range []string{text[:20], text[20:50], text[50:]} {
			_, err := f.WriteString(part)
			w.must(err)
			time.Sleep(time.Duration(w.rand.Int64N(int64(30 * time.Millisecond))))
		}
		w.must(f.Close())
	case 8:
		elsewhere := filepath.Join(filepath.Dir(w.netDir), "elsewhere")
		w.must(os.WriteFile(elsewhere, []byte(w.list()), 0o644))
		w.must(os.RemoveAll(path))
		w.must(os.Symlink("../elsewhere", path))
	case 9:
		w.must(os.RemoveAll(path))
	case 10:
		w.must(os.WriteFile(filepath.Join(w.netDir, "20-other.conf"), []byte(w.single()), 0o644))
	case 11:
		w.must(os.RemoveAll(path))
		w.must(os.Mkdir(path, 0o755))
	}
}

// settle writes the last version, in one of several ways, and returns the name of its file.
func (w *writer) settle() string {
	path := filepath.Join(w.netDir, fuzzed)
	w.must(os.RemoveAll(path))
	switch w.rand.IntN(3) {
	case 0:
		w.must(os.WriteFile(path, []byte(w.list()), 0o644))
	case 1:
		w.must(os.WriteFile(path+".new", []byte(w.list()), 0o644))
		w.must(os.Rename(path+".new", path))
	default:
		w.must(os.WriteFile(filepath.Join(w.netDir, "10-net.conf"), []byte(w.single()), 0o644))
		return "10-net.conf"
	}
	return fuzzed
}
