// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestProcessRunsInItsNamespaceAndCgroup(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	argv, env := role(t, "hello")
	env = append(env, "GREETING=good day")
	for _, c := range []struct {
		ns     *NS
		cgroup bool
		group  string
	}{{b.Node, true, b.Cgroup}, {p, true, b.Cgroup}, {p, false, b.cgroupOther}} {
		proc, err := b.Start(c.ns, c.cgroup, "hello", argv, env)
		if err != nil {
			t.Fatal(err)
		}
		var status *exec.ExitError
		if err := proc.Wait(within(t)); !errors.As(err, &status) || status.ExitCode() != 3 {
			t.Errorf("it ended with %v, want exit status 3", err)
		}
		want := fmt.Sprintf("cgroup %s <nil>\nnetns net:[%d] <nil>\ngreeting good day\n",
			strings.TrimPrefix(c.group, b.cgroupMount), c.ns.Inode)
		if got := proc.Output(); got != want {
			t.Errorf("it wrote %q, want %q", got, want)
		}
	}
}

func TestProcessSignals(t *testing.T) {
	b := ForTest(t, Options{})
	argv, env := role(t, "sleep")
	p, err := b.Start(b.Node, true, "sleeper", argv, env)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process says so", func() bool { return p.Output() == "asleep\n" })
	if group, err := cgroupOf(fmt.Sprint(p.Pid)); filepath.Join(b.cgroupMount, group) != b.Cgroup || err != nil {
		t.Errorf("it is in cgroup %s, %v", group, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting for a process that goes on: %v", err)
	}
	if err := p.Signal(unix.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := p.Wait(within(t)); err == nil || !strings.Contains(err.Error(), "terminated") {
		t.Errorf("after SIGTERM: %v", err)
	}
	if err := p.Kill(); err != nil {
		t.Errorf("killing it when it has ended: %v", err)
	}
	if err := p.Signal(unix.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("signalling it when it has ended: %v", err)
	}
	if p, err = b.Start(b.Node, false, "sleeper", argv, env); err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Error(err)
	}
	if err := p.Wait(within(t)); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("after Kill: %v", err)
	}
}

func TestStartRefusesWhatCannotRun(t *testing.T) {
	b := ForTest(t, Options{})
	for _, argv := range [][]string{nil, {"/nonexistent"}, {b.Dir}} {
		if _, err := b.Start(b.Node, true, "nothing", argv, nil); err == nil {
			t.Errorf("%q was started", argv)
		}
	}
	argv, env := role(t, "hello")
	if _, err := b.Start(nil, true, "nowhere", argv, env); err == nil {
		t.Error("a process was started in no namespace")
	}
}

func TestCloseEndsProcessesAndTheirOrphans(t *testing.T) {
	b := ForTest(t, Options{})
	argv, env := role(t, "parent")
	var orphans []int
	for _, cgroup := range []bool{true, false} {
		p, err := b.Start(b.Node, cgroup, "parent", argv, env)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(within(t)); err != nil {
			t.Fatal(err, p.Output())
		}
		var orphan int
		if _, err := fmt.Sscanf(p.Output(), "child %d", &orphan); err != nil {
			t.Fatal(err, p.Output())
		}
		orphans = append(orphans, orphan)
	}
	argv, env = role(t, "sleep")
	p, err := b.Start(b.Outside, true, "sleeper", argv, env)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process says so", func() bool { return p.Output() == "asleep\n" })
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	for _, pid := range append(orphans, p.Pid) {
		if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) && !zombie(pid) {
			t.Errorf("process %d is still there: %v", pid, err)
		}
	}
	if got := p.Output(); got != "asleep\n" {
		t.Errorf("after Close its output is %q", got)
	}
}

// zombie reports whether a process is dead and only its parent, which is not us, has not looked.
func zombie(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(data), ") Z ")
}

func TestJoinCgroupLastsUntilClose(t *testing.T) {
	before, err := ownCgroup()
	if err != nil {
		t.Fatal(err)
	}
	b, other := ForTest(t, Options{}), ForTest(t, Options{})
	for range 2 {
		if err := b.JoinCgroup(); err != nil {
			t.Fatal(err)
		}
		if group, err := ownCgroup(); filepath.Join(b.cgroupMount, group) != b.Cgroup || err != nil {
			t.Errorf("it is in cgroup %s, %v", group, err)
		}
	}
	if err := other.JoinCgroup(); err == nil {
		t.Error("the process joined a second bed's cgroup")
	}
	// What is to be outside the cgroup is outside also when its parent is in.
	argv, env := role(t, "hello")
	p, err := b.Start(b.Node, false, "hello", argv, env)
	if err != nil {
		t.Fatal(err)
	}
	_ = p.Wait(within(t)) // with status 3
	if want := "cgroup " + strings.TrimPrefix(b.cgroupOther, b.cgroupMount); !strings.Contains(p.Output(), want+" ") {
		t.Errorf("it wrote %q, want %q", p.Output(), want)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if group, err := ownCgroup(); group != before || err != nil {
		t.Errorf("after Close it is in cgroup %s, %v, want %s", group, err, before)
	}
	if err := b.JoinCgroup(); err == nil {
		t.Error("the process joined a closed bed's cgroup")
	}
	if err := other.JoinCgroup(); err != nil {
		t.Errorf("once free, it could not join another's: %v", err)
	}
}
