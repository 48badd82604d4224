// SPDX-License-Identifier: Apache-2.0

package podns_test

import (
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// sleepVar makes the test binary a process of a pod, that does nothing.
const sleepVar = "REDIRECTOR_PODNS_SLEEP"

func TestMain(m *testing.M) {
	if os.Getenv(sleepVar) != "" {
		time.Sleep(time.Hour)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

const (
	webUID  = "0f0c5a6e-2f5c-4c53-9c2b-1f2e3d4c5b6a"
	cartUID = "1a1c5a6e-2f5c-4c53-9c2b-1f2e3d4c5b6a"
)

// node is a bed with processes of pods.
type node struct {
	*bed.Bed
	t *testing.T
}

func newNode(t *testing.T) *node {
	t.Helper()
	return &node{bed.ForTest(t, bed.Options{}), t}
}

func (n *node) pod(name string) *bed.NS {
	n.t.Helper()
	ns, err := n.Pod(name, bed.PodOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	if ns.Cookie == 0 {
		n.t.Skip("needs kernel 5.14: SO_NETNS_COOKIE")
	}
	return ns
}

// process starts one in a namespace and in the pod's cgroup.
func (n *node) process(ns *bed.NS, group string) *bed.Proc {
	n.t.Helper()
	dir, err := n.Group(group)
	if err != nil {
		n.t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	p, err := n.StartIn(ns, dir, "process", []string{self}, []string{sleepVar + "=1"})
	if err != nil {
		n.t.Fatal(err)
	}
	// A start time has a resolution of 10 ms, and the pid that decides then may have begun again at its lowest.
	time.Sleep(20 * time.Millisecond)
	return p
}

func (n *node) look() *podns.Processes {
	n.t.Helper()
	found, err := podns.Look()
	if err != nil {
		n.t.Fatal(err)
	}
	return found
}

func (n *node) want(uid string, want *bed.NS, ips ...netip.Addr) {
	n.t.Helper()
	ns, err := n.look().Open(uid, ips)
	if err != nil {
		n.t.Error(err)
		return
	}
	defer ns.Close()
	if ns.Cookie() != want.Cookie {
		n.t.Errorf("pod %s is said to be in %s, and is in %s", uid, ns.Path(), want.Name)
	}
}

func (n *node) wantNone(uid, why string, ips ...netip.Addr) {
	n.t.Helper()
	ns, err := n.look().Open(uid, ips)
	if !errors.Is(err, podns.ErrNoProcess) || !strings.Contains(err.Error(), why) {
		n.t.Errorf("pod %s is in %v, %v", uid, ns, err)
	}
	if err == nil {
		_ = ns.Close()
	}
}

func TestAPodIsFoundByItsProcesses(t *testing.T) {
	n := newNode(t)
	web, cart := n.pod("web"), n.pod("cart")
	n.process(web, "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"+strings.ReplaceAll(webUID, "-", "_")+".slice/cri-containerd-a.scope")
	n.process(cart, "kubepods/besteffort/pod"+cartUID+"/b")

	n.want(webUID, web, web.V4)
	n.want(webUID, web, web.V6)
	n.want(webUID, web, cart.V4, web.V4)
	n.want(cartUID, cart, cart.V4, cart.V6)
	n.wantNone(webUID, "owns none", cart.V4, cart.V6)
	n.wantNone(webUID, "owns none")
	n.wantNone("2b2c5a6e-2f5c-4c53-9c2b-1f2e3d4c5b6a", "no process", web.V4)
}

func TestTheOldestProcessThatOwnsAnAddressTellsThePodsNamespace(t *testing.T) {
	n := newNode(t)
	// A process of the pod may be in a namespace that it has made, before or after.
	early, web, late := n.pod("early"), n.pod("web"), n.pod("late")
	n.process(early, "kubepods/burstable/pod"+webUID+"/a")
	n.process(web, "kubepods/burstable/pod"+webUID+"/a")
	n.process(late, "kubepods/burstable/pod"+webUID+"/b")
	n.want(webUID, web, web.V4)
	// Where all own one, it is the oldest's.
	n.want(webUID, early, early.V4, web.V4, late.V4)
}

func TestAProcessThatWentToAnotherPodIsNotLedBy(t *testing.T) {
	n := newNode(t)
	web, cart := n.pod("web"), n.pod("cart")
	n.process(cart, "kubepods/burstable/pod"+cartUID+"/b")
	n.process(cart, "kubepods/burstable/pod"+webUID+"/a")
	n.wantNone(webUID, "no process", cart.V4)
	n.process(web, "kubepods/burstable/pod"+webUID+"/a")
	n.want(webUID, web, cart.V4, web.V4)
	n.want(cartUID, cart, cart.V4)
}

func TestAProcessInTheHostsNamespaceIsNotLookedAt(t *testing.T) {
	if os.Getpid() == 1 {
		t.Fatal("the test must not be pid 1")
	}
	n := newNode(t)
	n.pod("web")
	dir, err := n.Group("kubepods/burstable/pod" + webUID + "/a")
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// A hostNetwork pod, on a node that is the machine itself.
	p := startInOwnNetNS(t, self, dir)
	if found := n.look(); found.Has(webUID) {
		t.Errorf("a hostNetwork pod's process (pid %d) is taken for one in a namespace of its own", p)
	}
}

// startInOwnNetNS starts a process in this process's network namespace, and in a cgroup, until the test ends.
func startInOwnNetNS(t *testing.T, self, group string) int {
	t.Helper()
	dir, err := os.Open(group)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), sleepVar+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	return cmd.Process.Pid
}

func TestAPodWhoseProcessesAreGoneIsNotFound(t *testing.T) {
	n := newNode(t)
	web := n.pod("web")
	p := n.process(web, "kubepods/burstable/pod"+webUID+"/a")
	before := n.look()
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if ns, err := before.Open(webUID, []netip.Addr{web.V4}); !errors.Is(err, podns.ErrNoProcess) {
		t.Errorf("a process that is gone leads to %v, %v", ns, err)
	}
}

func TestProcMayBeElsewhere(t *testing.T) {
	n := newNode(t)
	web := n.pod("web")
	n.process(web, "kubepods/burstable/pod"+webUID+"/a")
	dir := t.TempDir()
	if err := unix.Mount("/proc", dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	podns.UseProc(dir)
	t.Cleanup(func() {
		podns.UseProc("/proc")
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	ns, err := n.look().Open(webUID, []netip.Addr{web.V4})
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if !strings.HasPrefix(ns.Path(), dir+"/") || ns.Cookie() != web.Cookie {
		t.Errorf("the pod's namespace is found at %s", ns.Path())
	}
	podns.UseProc(t.TempDir())
	if n.look().Has(webUID) {
		t.Error("the pod is found where there is no process")
	}
}
