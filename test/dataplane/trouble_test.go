// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// What the agent needs of the machine may fail it at any time. Then an enrolment fails with the name of what is in the way, and
// nothing of it is left; when the cause is gone, the same works.
func TestTroubleIsNamedAndLeavesNothing(t *testing.T) {
	type trouble struct {
		begin, end func(t *testing.T, n *node)
		words      []string
		unenrol    bool // an enrolled pod cannot be taken out either, and stays captured
	}
	remount := func(dir func(n *node) string, flags uintptr) func(t *testing.T, n *node) {
		return func(t *testing.T, n *node) {
			t.Helper()
			if err := unix.Mount("", dir(n), "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""); err != nil {
				t.Fatal(err)
			}
		}
	}
	runDir := func(n *node) string { return n.RunDir }
	bpffs := func(n *node) string { return filepath.Dir(n.BPFFS) }
	filler := func(n *node) string { return filepath.Join(n.RunDir, "filler") }
	// full fills a map with entries that nobody looks up.
	full := func(m func(n *node) *ebpf.Map) trouble {
		return trouble{
			begin: func(t *testing.T, n *node) { fillMap(t, m(n)) },
			end:   func(t *testing.T, n *node) { emptyMap(t, m(n)) },
			words: []string{"full"},
		}
	}
	for name, c := range map[string]trouble{
		"a run-dir on a full disk": {
			begin: func(t *testing.T, n *node) { fillDisk(t, filler(n)) },
			end: func(t *testing.T, n *node) {
				if err := os.Remove(filler(n)); err != nil {
					t.Fatal(err)
				}
			},
			words: []string{"no space left on device", "run/pods"},
		},
		"a read-only run-dir": {
			begin: remount(runDir, unix.MS_RDONLY), end: remount(runDir, 0),
			words: []string{"read-only file system", "run/pods"}, unenrol: true,
		},
		"a read-only BPF filesystem": {
			begin: remount(bpffs, unix.MS_RDONLY), end: remount(bpffs, 0),
			words: []string{"read-only file system", "bpf"}, unenrol: true,
		},
		"map pods":          full(func(n *node) *ebpf.Map { return n.Datapath.Maps().RedirectorMaps.Pods }),
		"map own_addrs":     full(func(n *node) *ebpf.Map { return n.Datapath.Maps().RedirectorMaps.OwnAddrs }),
		"map counters":      full(func(n *node) *ebpf.Map { return n.Datapath.Maps().RedirectorMaps.Counters }),
		"map probe_targets": full(func(n *node) *ebpf.Map { return n.Datapath.Maps().RedirectorMaps.ProbeTargets }),
	} {
		t.Run(name, func(t *testing.T) {
			if strings.HasPrefix(name, "map") {
				c.words = append(c.words, name)
			}
			b := bed.ForTest(t, bed.Options{})
			if err := b.JoinCgroup(); err != nil {
				t.Fatal(err)
			}
			if err := unix.Mount("tmpfs", b.RunDir, "tmpfs", 0, "size=256k"); err != nil {
				t.Fatal(err)
			}
			n := &node{Bed: b, Agent: agent.Start(t, b, nil), t: t}
			n.startProxy()
			n.serve(n.Outside, 8080, bed.AppOptions{})
			old, pod := n.enrolledPod("old"), n.plainPod("pod")
			before, err := pod.Snapshot()
			if err != nil {
				t.Fatal(err)
			}
			pins := tree(t, n.BPFFS)

			c.begin(t, n)
			wantNamed(t, n.Enroll(t.Context(), agent.Spec(pod), false), c.words)
			if after, err := pod.Snapshot(); err != nil || after != before {
				t.Errorf("the namespace is not as it was, %v: %s", err, cmp.Diff(before, after))
			}
			if after := tree(t, n.BPFFS); after != pins {
				t.Errorf("pins are not as they were: %s", cmp.Diff(pins, after))
			}
			if left, err := filepath.Glob(filepath.Join(n.RunDir, "pods", "*uid-pod*")); len(left) > 0 || err != nil {
				t.Errorf("the run-dir has %v, %v", left, err)
			}
			if c.unenrol {
				wantNamed(t, n.Unenroll(t.Context(), "uid-old"), c.words)
			}
			ask(t, old, bed.DialSpec{Remote: netip.AddrPortFrom(n.Outside.V4, 8080)})
			if captured := n.counters(old).OutboundCaptured; captured != 1 {
				t.Errorf("meanwhile %d connections of a pod are captured, want 1", captured)
			}

			c.end(t, n)
			n.enrol(pod)
			ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(n.Outside.V4, 8080)})
			if captured := n.counters(pod).OutboundCaptured; captured != 1 {
				t.Errorf("then %d connections of the pod are captured, want 1", captured)
			}
			for _, uid := range []string{"uid-old", "uid-pod"} {
				if err := n.Unenroll(t.Context(), uid); err != nil {
					t.Error(err)
				}
			}
			if after, err := pod.Snapshot(); err != nil || after != before {
				t.Errorf("in the end the namespace is not as it was, %v: %s", err, cmp.Diff(before, after))
			}
		})
	}
}

func wantNamed(t *testing.T, err error, words []string) {
	t.Helper()
	if err == nil {
		t.Error("it is done all the same")
		return
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
}

// fillDisk writes a file until there is no room.
func fillDisk(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
}

// tree lists the files below a directory.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		all = append(all, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(all, "\n")
}

// foreign is what the keys of entries begin with that are there to fill a map. No cookie and no address does.
const foreign = 0xee

func fillMap(t *testing.T, m *ebpf.Map) {
	t.Helper()
	cpus := ebpf.MustPossibleCPU()
	var value any = make([]byte, m.ValueSize())
	if m.Type() == ebpf.PerCPUHash {
		values := make([][]byte, cpus)
		for i := range values {
			values[i] = make([]byte, m.ValueSize())
		}
		value = values
	}
	for i := uint32(0); ; i++ {
		key := slices.Repeat([]byte{foreign}, int(m.KeySize()))
		key[4], key[5], key[6] = byte(i), byte(i>>8), byte(i>>16)
		err := m.Put(key, value)
		for end := time.Now().Add(patience); errors.Is(err, unix.ENOMEM) && time.Now().Before(end); time.Sleep(time.Millisecond) {
			err = m.Put(key, value) // memory for all CPUs comes in portions, a moment after it is needed
		}
		if errors.Is(err, unix.E2BIG) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func emptyMap(t *testing.T, m *ebpf.Map) {
	t.Helper()
	var keys [][]byte
	key, err := m.NextKeyBytes(nil)
	for ; key != nil && err == nil; key, err = m.NextKeyBytes(key) {
		if key[0] == foreign && key[1] == foreign {
			keys = append(keys, key)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if err := m.Delete(key); err != nil {
			t.Fatal(err)
		}
	}
}

// The kernel drops events that nobody reads in time (ENOBUFS). What they told of is seen all the same.
func TestLostEventsAreMadeGood(t *testing.T) {
	n := newBareNode(t)
	b := n.Bed
	a := startAgent(t, b)
	pod := n.plainPod("pod")
	if _, err := a.client.Enroll(t.Context(), api.EnrollRequest{Spec: agent.Spec(pod)}); err != nil {
		t.Fatal(err)
	}
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	eth0, err := h.LinkByName(pod.Link)
	if err != nil {
		t.Fatal(err)
	}
	addr := func(i int) *netlink.Addr {
		a, err := netlink.ParseAddr(fmt.Sprintf("198.18.%d.%d/32", i/250, 1+i%250))
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	if err := a.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	const many = 2000
	for i := range many { // each makes two events, of an address and of a route
		if err := h.AddrAdd(eth0, addr(i)); err != nil {
			t.Fatal(err)
		}
		if i == many-1 {
			continue
		}
		if err := h.AddrDel(eth0, addr(i)); err != nil {
			t.Fatal(err)
		}
	}
	if !eventsWereLost(t, pod) {
		t.Error("no event was lost: the test tests nothing")
	}
	if err := a.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	want := netip.MustParseAddr(addr(many - 1).IP.String())
	eventually(t, "the last address is known", func() bool {
		pods, err := a.client.Pods(t.Context())
		return err == nil && len(pods) == 1 && slices.Contains(pods[0].Addresses, want) && len(pods[0].Addresses) < 10
	})
}

// eventsWereLost says whether the kernel has dropped messages for a netlink socket in the namespace.
func eventsWereLost(t *testing.T, ns *bed.NS) bool {
	t.Helper()
	var table []byte
	err := ns.Do(func() (err error) {
		table, err = os.ReadFile("/proc/thread-self/net/netlink")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	const drops = 8 // the column
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > drops && fields[drops] != "0" && fields[drops] != "Drops" {
			return true
		}
	}
	return false
}

// What keeps the agent from putting something right is named in its log, once; the pod stays closed meanwhile, and is whole again when
// the cause is gone.
func TestTroubleWithARepairIsNamedAndPasses(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	m := s.pinnedMaps(t)
	bpffs := filepath.Dir(s.BPFFS)
	remount := func(t *testing.T, flags uintptr) {
		t.Helper()
		if err := unix.Mount("", bpffs, "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		drift      string // that is to be put right
		begin, end func(t *testing.T)
		words      []string
	}{
		"a read-only BPF filesystem": {
			"the steer link is detached",
			func(t *testing.T) { remount(t, unix.MS_RDONLY) }, func(t *testing.T) { remount(t, 0) },
			[]string{"read-only file system", "steer"},
		},
		"map pods is full": {
			"the entry in pods is removed",
			func(t *testing.T) { fillMap(t, m.RedirectorMaps.Pods) }, func(t *testing.T) { emptyMap(t, m.RedirectorMaps.Pods) },
			[]string{"map pods", "full"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s.t = t
			i := slices.IndexFunc(drifts(), func(d drift) bool { return d.name == c.drift })
			if i < 0 {
				t.Fatalf("there is no drift %q", c.drift)
			}
			d := drifts()[i]
			pod := s.newPod(t)
			s.enrolPod(t, pod)
			s.serve(pod, evasionPort, bed.AppOptions{})
			before := s.repairs(t, d.kind)
			// The agent sees both at once.
			if err := errors.Join(s.agent.Signal(unix.SIGSTOP), d.spoil(s, m, pod)); err != nil {
				t.Fatal(err)
			}
			c.begin(t)
			if err := s.agent.Signal(unix.SIGCONT); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			complaints := func() (found []string) {
				for line := range strings.Lines(s.agent.Output()) {
					if strings.Contains(line, "level=ERROR") && strings.Contains(line, "uid-"+pod.Name+" ") {
						found = append(found, line)
					}
				}
				return found
			}
			for tries := 0; len(complaints()) == 0; tries++ {
				if time.Since(start) > patience {
					t.Fatal("the agent does not say what is in the way")
				}
				s.triesToLeave(t, pod, tries, start)
			}
			time.Sleep(4 * time.Second) // for another look
			s.triesToLeave(t, pod, 0, start)
			if all := complaints(); len(all) != 1 {
				t.Errorf("it is said %d times: %s", len(all), all)
			}
			for _, word := range c.words {
				if !strings.Contains(complaints()[0], word) {
					t.Errorf("%q does not say %q", complaints()[0], word)
				}
			}
			c.end(t)
			eventually(t, "it is put right", func() bool { return d.healed(s, m, pod) && s.repairs(t, d.kind) == before+1 })
			s.bothWays(t, pod)
			if err := s.agent.client.Unenroll(t.Context(), "uid-"+pod.Name); err != nil {
				t.Error(err)
			}
		})
	}
}
