// SPDX-License-Identifier: Apache-2.0

package identity_test

import (
	"context"
	"errors"
	"log/slog"
	gomaps "maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/pkg/hostprobe"
	"github.com/redirector-dataplane/redirector/pkg/identity"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// sleepVariable makes a process of the test binary do nothing until it is killed.
const sleepVariable = "TEST_IDENTITY_SLEEP"

func TestMain(m *testing.M) {
	if os.Getenv(sleepVariable) != "" {
		for {
			time.Sleep(time.Hour)
		}
	}
	os.Exit(m.Run())
}

// host is a bed with a dataplane. What runs on it, runs in the bed's node.
type host struct {
	*bed.Bed
	maps *maps.Maps
	t    *testing.T
}

func newHost(t *testing.T) *host {
	t.Helper()
	b := bed.ForTest(t, bed.Options{})
	d, err := loader.Open(loader.Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup})
	if _, lacks := errors.AsType[*loader.FeatureError](err); lacks {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return &host{b, d.Maps(), t}
}

// identity makes an Identity as an agent on the node does.
func (h *host) identity(opts identity.Options) *identity.Identity {
	h.t.Helper()
	opts.Maps, opts.Cgroup, opts.Log = h.maps, h.Cgroup, slog.New(slog.NewTextHandler(h.t.Output(), nil))
	var i *identity.Identity
	err := h.Node.Do(func() (err error) {
		i, err = identity.New(opts)
		return err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return i
}

// run has an Identity look around until the end of the test.
func (h *host) run(i *identity.Identity) {
	h.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- h.Node.Do(func() error { return i.Run(ctx) }) }()
	h.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			h.t.Error(err)
		}
	})
}

func (h *host) group(name string) (dir string, id uint64) {
	h.t.Helper()
	dir, err := h.Group(name)
	if err == nil {
		id, err = cgroups.ID(dir)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return dir, id
}

// sleeper starts a process with that name in a cgroup.
func (h *host) sleeper(dir, name string) *bed.Proc {
	h.t.Helper()
	self, err := os.Executable()
	if err != nil {
		h.t.Fatal(err)
	}
	program := filepath.Join(h.Dir, name)
	if err := os.Symlink(self, program); err != nil && !errors.Is(err, os.ErrExist) {
		h.t.Fatal(err)
	}
	p, err := h.StartIn(h.Node, dir, name, []string{program}, []string{sleepVariable + "=1"})
	if err != nil {
		h.t.Fatal(err)
	}
	return p
}

func (h *host) eventually(what string, so func() bool) {
	h.t.Helper()
	for deadline := time.Now().Add(time.Minute); !so(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			h.t.Fatalf("not so after a minute: %s", what)
		}
	}
}

func (h *host) hasRoles(want map[uint64]maps.CgroupRole) bool {
	h.t.Helper()
	got, err := h.maps.Cgroups()
	if err != nil {
		h.t.Fatal(err)
	}
	return gomaps.Equal(got, want)
}

func (h *host) wantRoles(want map[uint64]maps.CgroupRole) {
	h.t.Helper()
	if !h.hasRoles(want) {
		got, err := h.maps.Cgroups()
		h.t.Errorf("the roles are %v, %v; want %v", got, err, want)
	}
}

// wantWarning checks that there is one warning with these words, or with none that there is no warning.
func wantWarning(t *testing.T, i *identity.Identity, words ...string) {
	t.Helper()
	got := i.Warnings()
	if len(words) == 0 {
		if len(got) > 0 {
			t.Errorf("it warns of %q", got)
		}
		return
	}
	if len(got) != 1 {
		t.Fatalf("it warns of %q, want one warning", got)
	}
	for _, word := range words {
		if !strings.Contains(got[0], word) {
			t.Errorf("the warning %q does not say %q", got[0], word)
		}
	}
}

func TestTheProgramsAreToldTheSettings(t *testing.T) {
	h := newHost(t)
	for _, opts := range []identity.Options{
		{Probes: hostprobe.Defaults},
		{ProbeSource: maps.ProbeSourceHost, ProbeIdentity: maps.ProbeIdentityFlow, ProxyIdentity: maps.ProxyIdentityMark},
	} {
		i := h.identity(opts)
		want := maps.Config{
			HostNetNSCookie: h.Node.Cookie,
			ProbeSource:     opts.ProbeSource,
			ProbeIdentity:   opts.ProbeIdentity,
			ProxyIdentity:   opts.ProxyIdentity,
			ProbeV4:         opts.Probes.V4,
			ProbeV6:         opts.Probes.V6,
		}
		if got, err := h.maps.Config(); err != nil || got != want || i.Config() != want {
			t.Errorf("the programs go by %+v, %v; Config says %+v; want %+v", got, err, i.Config(), want)
		}
		wantWarning(t, i)
	}
}

func TestThePodsCgroupIsFoundInEveryLayout(t *testing.T) {
	for name, dirs := range map[string][2]string{
		"cgroupfs": {"kubepods", "burstable/pod1/c"},
		"systemd":  {"kubepods.slice", "kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-1.scope"},
		"nested":   {"a/b/kubepods", "burstable/pod1/c"},
		"kind":     {"docker/1/kubelet.slice/kubelet-kubepods.slice", "kubelet-kubepods-pod1.slice"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.group(filepath.Join(dirs[0], dirs[1]))
			_, id := h.group(dirs[0])
			i := h.identity(identity.Options{Kubernetes: true})
			h.wantRoles(map[uint64]maps.CgroupRole{id: maps.CgroupPods})
			wantWarning(t, i)
		})
	}
}

func TestThePodsCgroupMayComeAndGo(t *testing.T) {
	t.Parallel() // it waits more than it works
	h := newHost(t)
	i := h.identity(identity.Options{Kubernetes: true})
	wantWarning(t, i, "kubepods", "counts as a probe")
	h.run(i)
	dir, id := h.group("kubepods")
	h.eventually("the group is known", func() bool { return h.hasRoles(map[uint64]maps.CgroupRole{id: maps.CgroupPods}) })
	h.eventually("nothing is to be warned of", func() bool { return len(i.Warnings()) == 0 })
	if err := unix.Rmdir(dir); err != nil {
		t.Fatal(err)
	}
	h.eventually("the group is forgotten", func() bool { return h.hasRoles(nil) })
	_, again := h.group("kubepods")
	h.eventually("the new one is known", func() bool { return h.hasRoles(map[uint64]maps.CgroupRole{again: maps.CgroupPods}) })
}

func TestTheKubeletsCgroupIsThatOfItsProcess(t *testing.T) {
	t.Parallel() // it waits more than it works
	h := newHost(t)
	i := h.identity(identity.Options{ProbeSource: maps.ProbeSourceKubelet, Kubernetes: true})
	wantWarning(t, i, "no kubelet", "--probe-source=node")
	h.run(i)
	dir, id := h.group("system/kubelet.service")
	p := h.sleeper(dir, "kubelet")
	h.eventually("the group is known", func() bool { return h.hasRoles(map[uint64]maps.CgroupRole{id: maps.CgroupKubelet}) })
	h.eventually("nothing is to be warned of", func() bool { return len(i.Warnings()) == 0 })
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	h.eventually("the group is forgotten", func() bool { return h.hasRoles(nil) })
}

// With other sources, it does not matter who is the kubelet.
func TestAKubeletThatIsNotAskedForHasNoRole(t *testing.T) {
	h := newHost(t)
	dir, _ := h.group("system/kubelet.service")
	p := h.sleeper(dir, "kubelet")
	h.eventually("the process has its name", func() bool {
		found, err := cgroups.Kubelets(h.Cgroup)
		return err == nil && len(found) == 1
	})
	h.identity(identity.Options{})
	h.wantRoles(nil)
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
}

func TestAProxysCgroupIsKnownFromItsConnectionOn(t *testing.T) {
	t.Parallel() // it waits more than it works
	h := newHost(t)
	i := h.identity(identity.Options{})
	dir, id := h.group("kubepods/podproxy/container")
	_, pods := h.group("kubepods")
	p := h.sleeper(dir, "proxy")
	if err := i.ProxyConnected(int32(p.Pid)); err != nil {
		t.Fatal(err)
	}
	if got, err := h.maps.Cgroups(); err != nil || got[id] != maps.CgroupProxy {
		t.Errorf("the roles are %v, %v; want the proxy's to be %d's", got, err, id)
	}
	wantWarning(t, i)

	// The next agent knows it at once, for the proxy has its connection to the last one.
	next := h.identity(identity.Options{})
	h.wantRoles(map[uint64]maps.CgroupRole{id: maps.CgroupProxy, pods: maps.CgroupPods})
	if err := next.ProxyConnected(int32(p.Pid)); err != nil {
		t.Fatal(err)
	}
	h.run(next)
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	h.eventually("its group can be removed", func() bool { return unix.Rmdir(dir) == nil })
	h.eventually("its group is forgotten", func() bool { return h.hasRoles(map[uint64]maps.CgroupRole{pods: maps.CgroupPods}) })
}

func TestAProxyThatIsGoneIsNoProxy(t *testing.T) {
	h := newHost(t)
	i := h.identity(identity.Options{})
	dir, _ := h.group("proxy")
	p := h.sleeper(dir, "proxy")
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	err := i.ProxyConnected(int32(p.Pid))
	if err == nil || !strings.Contains(err.Error(), "find the cgroup of the node proxy") {
		t.Errorf("of a process that is gone it says %v", err)
	}
	h.wantRoles(nil)
	if i.Config().ProxyIdentity != maps.ProxyIdentityCgroup {
		t.Error("it makes do with the mark")
	}
}

// Beside the group that the agent looks at: its sockets would be seen by no program.
func TestAProxyInACgroupThatIsNotLookedAtIsRefused(t *testing.T) {
	h := newHost(t)
	i := h.identity(identity.Options{})
	p := h.sleeper(filepath.Dir(h.Cgroup)+"/other", "proxy")
	err := i.ProxyConnected(int32(p.Pid))
	if err == nil || !strings.Contains(err.Error(), "is in no cgroup below "+h.Cgroup) {
		t.Errorf("it says %v", err)
	}
	h.wantRoles(nil)
	if i.Config().ProxyIdentity != maps.ProxyIdentityCgroup {
		t.Error("it makes do with the mark")
	}
}

// Where the runtime uses cgroup v1, all are in the root of cgroup2.
func TestAProxyInTheRootIsKnownByItsMarkAlone(t *testing.T) {
	h := newHost(t)
	root := filepath.Dir(filepath.Dir(h.Cgroup))
	p := h.sleeper(root, "proxy")
	if _, err := cgroups.Of(root, p.Pid); !errors.Is(err, cgroups.ErrRoot) {
		t.Skipf("what cgroup2's mount shows is not its root: %v", err)
	}
	i := h.identity(identity.Options{Probes: hostprobe.Defaults})
	before := i.Config()
	if err := i.ProxyConnected(int32(p.Pid)); err != nil {
		t.Fatal(err)
	}
	want := before
	want.ProxyIdentity = maps.ProxyIdentityMark
	if got, err := h.maps.Config(); err != nil || got != want || i.Config() != want {
		t.Errorf("the programs go by %+v, %v; Config says %+v; want %+v", got, err, i.Config(), want)
	}
	wantWarning(t, i, "root of cgroup2", "0x539", "run it in a cgroup of its own")
	h.wantRoles(nil)
}

func TestByMarkNobodysCgroupMatters(t *testing.T) {
	h := newHost(t)
	i := h.identity(identity.Options{ProxyIdentity: maps.ProxyIdentityMark})
	dir, _ := h.group("proxy")
	p := h.sleeper(dir, "proxy")
	if err := i.ProxyConnected(int32(p.Pid)); err != nil {
		t.Fatal(err)
	}
	h.wantRoles(nil)
	wantWarning(t, i)
}

func TestTheProbesAddressesAreKeptOnLo(t *testing.T) {
	t.Parallel() // it waits more than it works
	h := newHost(t)
	h.run(h.identity(identity.Options{Probes: hostprobe.Defaults}))
	handle, err := h.Node.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	h.eventually("lo has both", func() bool {
		list, err := handle.AddrList(lo, unix.AF_UNSPEC)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, a := range list {
			if a.IP.Equal(hostprobe.Defaults.V4.AsSlice()) || a.IP.Equal(hostprobe.Defaults.V6.AsSlice()) {
				n++
			}
		}
		return n == 2
	})
}
