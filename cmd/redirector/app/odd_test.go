// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// oddVar says what is odd for roleOdd.
const oddVar = "REDIRECTOR_APP_ODD"

const (
	oddReadOnlySysctls = "/proc/sys is read-only"
	oddNoCgroup2       = "cgroup2 is mounted nowhere"
)

// execOdd runs this program as roleRedirector in a mount namespace of its own that is odd.
func execOdd(what string) error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	switch what {
	case oddReadOnlySysctls:
		if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind /proc/sys: %w", err)
		}
		if err := unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("make /proc/sys read-only: %w", err)
		}
	case oddNoCgroup2:
		for {
			dir, err := loader.FindCgroup2()
			if err != nil {
				break
			}
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				return fmt.Errorf("unmount %s: %w", dir, err)
			}
		}
	default:
		return fmt.Errorf("nothing is odd about %q", what)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := os.Setenv(roleVar, roleRedirector); err != nil {
		return err
	}
	return unix.Exec(self, os.Args, os.Environ())
}

// odd runs a command to its end where something is odd.
func (m *machine) odd(what string, args ...string) result {
	m.t.Helper()
	return m.commandIn(m.Node, roleOdd, args, oddVar+"="+what)
}

// Where sysctls cannot be set the agent starts, for a pod may have them already, and says of the others what is wrong.
func TestSysctlsThatCannotBeSet(t *testing.T) {
	m := newMachine(t)
	pod, ready := m.pod("web"), m.pod("ready")
	for _, name := range []string{"net.ipv4.tcp_fwmark_accept", "net.ipv4.fwmark_reflect", "net.ipv6.fwmark_reflect"} {
		if strings.Contains(name, "ipv6") && !bed.HasIPv6() {
			continue
		}
		if err := ready.SetSysctl(name, "1"); err != nil {
			t.Fatal(err)
		}
	}
	r := m.odd(oddReadOnlySysctls, "check", "--bpffs", m.BPFFS, "--cgroup", m.Cgroup)
	if r.code != exitFailed || !strings.Contains(r.stderr, "what the agent needs: the sysctls of network namespaces, writable:") {
		t.Errorf("check ends with %d: %s", r.code, r.stderr)
	}

	// A container that is given the node's has sysctls to write to.
	proc := filepath.Join(m.Dir, "proc")
	bind(t, "/proc", proc, 0)
	r = m.odd(oddReadOnlySysctls, "check", "--bpffs", m.BPFFS, "--cgroup", m.Cgroup, "--proc", proc)
	if said := r.stdout + r.stderr; r.code == exitFailed || strings.Contains(said, "missing: the sysctls") {
		t.Errorf("with --proc check ends with %d: %s", r.code, said)
	}

	p := m.start(m.Node, roleOdd, "agent", m.agentFlags(), oddVar+"="+oddReadOnlySysctls)
	m.eventually("the agent is ready", func() bool { return strings.Contains(p.Output(), "msg=ready") })
	before := m.state(pod)
	run(t, nil, m.enrollFlags(pod)...).wantFailure(t, exitFailed, "set a sysctl", "is it writable here?", "read-only file system")
	m.wantState(before, pod)
	run(t, nil, m.enrollFlags(ready)...).wantDone(t)
	run(t, nil, "unenroll", "--run-dir", m.RunDir, "--uid", "uid-ready").wantDone(t)
	m.stop(p)
}

func TestNoCgroup2(t *testing.T) {
	m := newMachine(t)
	before := m.state()
	r := m.odd(oddNoCgroup2, "check", "--bpffs", m.BPFFS)
	if r.code != exitFailed || !strings.Contains(r.stderr, "what the agent needs: a cgroup2 mount:") {
		t.Errorf("check ends with %d: %s", r.code, r.stderr)
	}
	m.odd(oddNoCgroup2, "agent", "--standalone", "--run-dir", m.RunDir, "--bpffs", m.BPFFS, "--zds-socket", m.ZDSSocket).
		wantFailure(t, exitFailed, "no cgroup2 filesystem is mounted", "mount -t cgroup2", "--cgroup")
	m.wantState(before)
}

// A machine that has cgroup version 1 alone is refused with a remedy, and the remedy works; then all processes are in the root of
// version 2.
func TestCgroupsOfVersion1Alone(t *testing.T) {
	if _, err := loader.FindCgroup2(); err == nil {
		t.Skip("cgroup2 is mounted here")
	}
	dir := filepath.Join(t.TempDir(), "cgroup2")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	scratch := t.TempDir()
	var stderr strings.Builder
	code := Main(t.Context(), []string{
		"agent", "--standalone", "--run-dir", filepath.Join(scratch, "run"), "--zds-socket", filepath.Join(scratch, "z.sock"),
		"--bpffs", "/sys/fs/bpf/redirector",
	}, Env{Stdout: io.Discard, Stderr: &stderr, Getenv: func(string) string { return "" }})
	result{code: code, stderr: stderr.String()}.
		wantFailure(t, exitFailed, "no cgroup2 filesystem is mounted", "mount -t cgroup2", "--cgroup")
	if left := tree(t, filepath.Join(scratch, "run")); left != "" {
		t.Errorf("it leaves %s", left)
	}
	r := run(t, nil, "check")
	if r.code != exitFailed || !strings.Contains(r.stdout, "missing: a cgroup2 mount") {
		t.Errorf("check ends with %d:\n%s", r.code, r.stdout)
	}

	// As the message says.
	if err := unix.Mount("cgroup2", dir, "cgroup2", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	r = run(t, nil, "check")
	for _, words := range []string{
		"missing: processes in cgroups of version 2", "falls back to the mark alone", "kubepods/pod1", "cgroup_no_v1=all",
	} {
		if r.code != exitLimited || !strings.Contains(r.stdout, words) {
			t.Errorf("check ends with %d, and does not say %q:\n%s", r.code, words, r.stdout)
		}
	}
	m := newMachine(t)
	agent := m.agent("--cgroup", dir)
	// A proxy of this container runtime is in the root of version 2, as all others are.
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	argv := []string{self, "--zds-socket", m.ZDSSocket}
	proxy, err := m.Bed.Start(m.Node, false, "proxy", argv, []string{roleVar + "=" + roleNodeproxy})
	if err != nil {
		t.Fatal(err)
	}
	err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, proxy.Pid), 0o600)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		t.Fatal(err)
	}
	m.eventually("the agent says that a mark is enough", func() bool {
		for _, w := range m.status().Warnings {
			if strings.Contains(w.Message, "root of cgroup2") {
				return true
			}
		}
		return false
	})
	m.stop(agent)
}
