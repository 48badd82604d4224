// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// roleVar makes the test binary play a part in a test instead of running tests.
const roleVar = "REDIRECTOR_BED_ROLE"

var roles = map[string]func() int{
	"hello":  hello,
	"sleep":  sleep,
	"parent": parent,
	"crash":  crash,
	"new":    newOnly,
}

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVar); role != "" {
		os.Exit(roles[role]())
	}
	os.Exit(m.Run())
}

// role returns the command line and environment of this binary in the given role.
func role(t *testing.T, name string) (argv, env []string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return []string{exe}, []string{roleVar + "=" + name}
}

// hello says where it runs, then exits with status 3.
func hello() int {
	group, err := ownCgroup()
	fmt.Println("cgroup", group, err)
	ns, err := os.Readlink("/proc/self/ns/net")
	fmt.Println("netns", ns, err)
	fmt.Println("greeting", os.Getenv("GREETING"))
	return 3
}

func sleep() int {
	fmt.Println("asleep")
	time.Sleep(time.Hour)
	return 0
}

// parent leaves a sleeping child in a session of its own, says its pid, and ends.
func parent() int {
	exe, err := os.Executable()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	c := exec.Command(exe)
	c.Env = append(os.Environ(), roleVar+"=sleep")
	c.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	if err := c.Start(); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("child", c.Process.Pid)
	return 0
}

// crash makes a bed with a pod and a process, says what it has, and is killed.
func crash() int {
	b, err := New(Options{})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	if _, err := b.Pod("a", PodOptions{}); err != nil {
		fmt.Println(err)
		return 1
	}
	if err := b.JoinCgroup(); err != nil {
		fmt.Println(err)
		return 1
	}
	exe, err := os.Executable()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	p, err := b.Start(b.Node, false, "sleeper", []string{exe}, []string{roleVar + "=sleep"})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(b.Dir, b.cgroupTop, p.Pid)
	bufio.NewScanner(os.Stdin).Scan() // until the test has looked
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	return 1
}

// newOnly makes a bed, which the test has made impossible, and says why not and what is left of it.
func newOnly() int {
	me, err := thisProcess()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	_, err = New(Options{})
	fmt.Println("New:", err)
	for _, dir := range []string{os.TempDir(), cgroupMountOrEmpty()} {
		left, err := filepath.Glob(filepath.Join(dir, me.prefix()+"*"))
		if len(left) > 0 || err != nil {
			fmt.Println("LEFT:", left, err)
		}
	}
	points, err := mountPoints()
	if err != nil {
		fmt.Println("LEFT:", err)
	}
	for _, p := range points {
		if strings.Contains(p, me.prefix()) {
			fmt.Println("LEFT:", p)
		}
	}
	return 0
}

func cgroupMountOrEmpty() string {
	mount, err := cgroup2Mount()
	if err != nil {
		return "/nonexistent"
	}
	return mount
}

func addrPort(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

func pod(t *testing.T, b *Bed, name string, opts PodOptions) *NS {
	t.Helper()
	ns, err := b.Pod(name, opts)
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

func serve(t *testing.T, ns *NS, opts AppOptions) *App {
	t.Helper()
	a, err := ns.ServeApp(0, opts)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// within returns a context that ends with the test or after the time that is long for anything done here.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for a condition that the kernel brings about in its own time.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not so after 10 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// closeAtEnd closes c when the test ends, before the bed that was made earlier.
func closeAtEnd(t *testing.T, c io.Closer) {
	t.Helper()
	t.Cleanup(func() { _ = c.Close() })
}
