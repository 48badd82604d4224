// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// What somebody removes by hand is put back, and named.
func TestHeal(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	d := open(t, b)
	remove := func(path ...string) func() error {
		return func() error { return os.Remove(filepath.Join(append([]string{b.BPFFS}, path...)...)) }
	}
	pins := func() (all []string) {
		for _, dir := range madeDirs {
			found, err := filepath.Glob(filepath.Join(b.BPFFS, dir, "*"))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, found...)
		}
		return all
	}
	want := pins()
	cases := map[string]func() error{
		"the directory": func() error { return os.RemoveAll(b.BPFFS) },
		"program redir_seal_pkt": func() error {
			return d.maps.TailCalls.Delete(uint32(0))
		},
		"the sock_ops program": func() error { // detached
			l, err := link.LoadPinnedLink(filepath.Join(b.BPFFS, linksDir, "sock_ops"), nil)
			if err != nil {
				return err
			}
			defer l.Close()
			return l.Detach()
		},
		"the connect4 program": func() error { // given another program
			l, err := link.LoadPinnedLink(filepath.Join(b.BPFFS, linksDir, "connect4"), nil)
			if err != nil {
				return err
			}
			defer l.Close()
			other, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
				Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
			})
			if err != nil {
				return err
			}
			defer other.Close()
			return l.Update(other)
		},
	}
	for _, p := range nodePrograms {
		cases["the pin of link "+p.pin] = remove(linksDir, p.pin)
	}
	for name := range d.byName() {
		cases["the pin of map "+name] = remove(mapsDir, name)
	}
	for what, breakIt := range cases {
		t.Run(what, func(t *testing.T) {
			if err := breakIt(); err != nil {
				t.Fatal(err)
			}
			healed, err := d.Heal()
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(healed, func(h string) bool { return strings.HasPrefix(h, what) }) {
				t.Errorf("put back were %q", healed)
			}
			if got := pins(); !slices.Equal(got, want) {
				t.Errorf("pinned are %v, want %v", got, want)
			}
			for _, p := range nodePrograms {
				l, err := link.LoadPinnedLink(filepath.Join(b.BPFFS, linksDir, p.pin), nil)
				if err != nil {
					t.Fatal(err)
				}
				info, err := l.Info()
				if err != nil {
					t.Fatal(err)
				}
				about, err := d.shared[p.program].Info()
				if err != nil {
					t.Fatal(err)
				}
				id, _ := about.ID()
				if on, err := isOnCgroup(l, b.Cgroup); !on || err != nil || info.Program != id {
					t.Errorf("link %s is on the cgroup: %v, %v; its program is %d, want %d", p.pin, on, err, info.Program, id)
				}
				_ = l.Close()
			}
			if n := len(sockOpsPrograms(t, b.Cgroup)); n != 1 {
				t.Errorf("%d programs are on the cgroup, want 1", n)
			}
			if again, err := d.Heal(); len(again) > 0 || err != nil {
				t.Errorf("put back once more were %q, %v", again, err)
			}
			// What is pinned is what is used, for the next agent to find.
			for name, m := range d.byName() {
				pinned, err := ebpf.LoadPinnedMap(filepath.Join(b.BPFFS, mapsDir, name), nil)
				if err != nil {
					t.Fatal(err)
				}
				if !sameMap(t, m, pinned) {
					t.Errorf("map %s is pinned, and another is used", name)
				}
				_ = pinned.Close()
			}
			if _, err := OpenMaps(b.BPFFS); err == nil {
				t.Error("the lock is lost")
			}
		})
	}
}

func sameMap(t *testing.T, a, b *ebpf.Map) bool {
	t.Helper()
	var ids [2]ebpf.MapID
	for i, m := range []*ebpf.Map{a, b} {
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		ids[i], _ = info.ID()
	}
	return ids[0] == ids[1]
}

// A map whose pin is gone when no agent runs is found by the programs that use it.
func TestAMapWithoutAPinIsFound(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	d := open(t, b)
	if _, err := d.Maps().CreateCounters(42); err != nil {
		t.Fatal(err)
	}
	closeNow(t, d)
	for _, name := range []string{"counters", "pods", "listeners"} {
		if err := os.Remove(filepath.Join(b.BPFFS, mapsDir, name)); err != nil {
			t.Fatal(err)
		}
	}
	d = open(t, b)
	if _, err := d.Maps().Counters(42); err != nil {
		t.Errorf("the counters are gone: %v", err)
	}
	for _, name := range []string{"counters", "pods", "listeners"} {
		if _, err := os.Stat(filepath.Join(b.BPFFS, mapsDir, name)); err != nil {
			t.Error(err)
		}
	}
}
