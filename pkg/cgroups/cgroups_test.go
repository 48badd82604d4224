// SPDX-License-Identifier: Apache-2.0

package cgroups_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// sleepVariable makes a process of the test binary do nothing until it is killed.
const sleepVariable = "TEST_CGROUPS_SLEEP"

func TestMain(m *testing.M) {
	if os.Getenv(sleepVariable) != "" {
		for {
			time.Sleep(time.Hour)
		}
	}
	os.Exit(m.Run())
}

func group(t *testing.T, b *bed.Bed, name string) string {
	t.Helper()
	dir, err := b.Group(name)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// sleeper starts a process with that name in a cgroup.
func sleeper(t *testing.T, b *bed.Bed, dir, name string) *bed.Proc {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(b.Dir, name)
	if err := os.Symlink(self, program); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	p, err := b.StartIn(b.Node, dir, name, []string{program}, []string{sleepVariable + "=1"})
	if err != nil {
		t.Fatal(err)
	}
	// Between fork and exec it has this process's name.
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.Pid))
		if err != nil {
			t.Fatal(err)
		}
		if string(comm) == name+"\n" {
			return p
		}
		if time.Now().After(deadline) {
			t.Fatalf("the process is called %q, want %q", comm, name)
		}
	}
}

func TestThePodsGroupsAreFoundInEveryLayout(t *testing.T) {
	for name, c := range map[string]struct{ make, want []string }{
		"none": {[]string{"system.slice/kubelet.service", "user.slice"}, nil},
		"the cgroupfs driver": {
			[]string{"kubepods/burstable/pod1/c", "kubepods/besteffort/pod2/c", "kubepods/pod3/c"},
			[]string{"kubepods"},
		},
		"the systemd driver": {
			[]string{"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-1.scope", "system.slice/kubelet.service"},
			[]string{"kubepods.slice"},
		},
		"a kubelet in a container, cgroupfs": {[]string{"a/b/kubepods/burstable/pod1"}, []string{"a/b/kubepods"}},
		"a kubelet in a container, systemd": {
			[]string{"docker/1/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod1.slice"},
			[]string{"docker/1/kubelet.slice/kubelet-kubepods.slice"},
		},
		"as deep as it is looked for": {[]string{"1/2/3/4/kubepods/pod1", "1/2/3/4/5/kubepods"}, []string{"1/2/3/4/kubepods"}},
		"two kubelets": {
			[]string{"kubepods/pod1", "k3s/kubepods/pod2"},
			[]string{"k3s/kubepods", "kubepods"},
		},
		"names that only look like it": {
			[]string{"kubepods-burstable.slice", "mykubepods", "kubepods.slice.d", "kubepods.service/kubepods"},
			nil,
		},
		"within a service, which is one program's own": {[]string{"system.slice/containerd.service/kubepods/pod1"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := bed.ForTest(t, bed.Options{})
			for _, dir := range c.make {
				group(t, b, dir)
			}
			got, err := cgroups.Pods(b.Cgroup)
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			for _, dir := range c.want {
				want = append(want, filepath.Join(b.Cgroup, dir))
			}
			if !slices.Equal(got, want) {
				t.Errorf("found %v, want %v", got, want)
			}
		})
	}
}

func TestTheGroupOfAProcess(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	for _, name := range []string{"a", "a/b", "a/b/c/d/e/f/g"} {
		dir := group(t, b, name)
		p := sleeper(t, b, dir, "sleeper")
		// From the mount, from the bed's group, and from right above.
		for _, root := range []string{filepath.Dir(filepath.Dir(b.Cgroup)), b.Cgroup, filepath.Dir(dir), dir} {
			if got, err := cgroups.Of(root, p.Pid); err != nil || got != dir {
				t.Errorf("from %s, the process in %s is in %q, %v", root, dir, got, err)
			}
		}
		if got, err := cgroups.Of(group(t, b, "elsewhere"), p.Pid); err == nil || errors.Is(err, cgroups.ErrRoot) {
			t.Errorf("from beside it, the process is in %q, %v", got, err)
		}
	}
	if _, err := cgroups.Of(b.Cgroup, 1<<22+1); !errors.Is(err, os.ErrNotExist) { // beyond PID_MAX_LIMIT
		t.Errorf("of a process that is not there: %v", err)
	}
}

func TestAProcessInTheRootIsNobodysInParticular(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	root := filepath.Dir(filepath.Dir(b.Cgroup))
	p := sleeper(t, b, root, "sleeper")
	if own, err := os.ReadFile("/proc/self/cgroup"); err != nil || !slices.Contains(strings.Split(string(own), "\n"), "0::/") {
		t.Skipf("cgroup2 is mounted from within a cgroup namespace whose root is another: %s", own)
	}
	if got, err := cgroups.Of(root, p.Pid); !errors.Is(err, cgroups.ErrRoot) {
		t.Errorf("it is in %q, %v", got, err)
	}
}

func TestKubeletsAreKnownByTheNameOfTheirProcess(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	if got, err := cgroups.Kubelets(b.Cgroup); err != nil || len(got) > 0 {
		t.Errorf("without any there are %v, %v", got, err)
	}
	sleeper(t, b, group(t, b, "others"), "kubelets")
	sleeper(t, b, group(t, b, "others"), "my-kubelet")
	var want []string
	for _, name := range []string{"kubelet", "kubelite", "k3s-server", "rke2"} {
		dir := group(t, b, "system/"+name+".service")
		sleeper(t, b, dir, name)
		want = append(want, dir)
	}
	sleeper(t, b, want[0], "kubelet") // two in one group
	got, err := cgroups.Kubelets(b.Cgroup)
	slices.Sort(got)
	slices.Sort(want)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("found %v, %v; want %v", got, err, want)
	}
}

func TestIDsAreOfTheDirectory(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	first, err := cgroups.ID(group(t, b, "a"))
	if err != nil {
		t.Fatal(err)
	}
	if again, err := cgroups.ID(group(t, b, "a")); err != nil || again != first {
		t.Errorf("the same group has the ids %d and %d, %v", first, again, err)
	}
	if err := unix.Rmdir(group(t, b, "a")); err != nil {
		t.Fatal(err)
	}
	if next, err := cgroups.ID(group(t, b, "a")); err != nil || next == first {
		t.Errorf("a new group by the same name has the old one's id %d, %v", next, err)
	}
	if _, err := cgroups.ID(filepath.Join(b.Cgroup, "none")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("of a group that is not there: %v", err)
	}
}
