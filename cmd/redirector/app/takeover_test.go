// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A second agent is refused with the pid of the first, whether it wants the same run-dir or only the same dataplane, and
// takes its place when it is told to.
func TestTwoAgents(t *testing.T) {
	for name, elsewhere := range map[string]bool{"in the same run-dir": false, "in another run-dir": true} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			pod := m.pod("pod")
			first := m.agent()
			run(t, nil, m.enrollFlags(pod)...).wantDone(t)
			var flags []string
			runDir := m.RunDir
			if elsewhere {
				runDir = filepath.Join(m.Dir, "other")
				flags = []string{"--run-dir", runDir, "--zds-socket", filepath.Join(runDir, "zds.sock")}
			}
			before := m.state(pod)
			refused := m.command(m.agentFlags(flags...)...)
			refused.wantFailure(t, exitFailed, fmt.Sprintf("pid %d", first.Pid), "stop")
			m.wantState(before, pod)

			second := m.agent(append(flags, "--take-over")...)
			if code := m.wait(first); code != exitDone {
				t.Errorf("the first agent ended with status %d: %s", code, first.Output())
			}
			run(t, nil, "unenroll", "--run-dir", runDir, "--uid", "uid-pod").wantDone(t)
			m.stop(second)
		})
	}
}

// An agent that waits for another that does not stop can be stopped itself, and has changed nothing.
func TestTakingOverFromOneThatHangs(t *testing.T) {
	m := newMachine(t)
	first := m.agent()
	if err := first.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	before := m.state()
	second := m.start(m.Node, roleRedirector, "agent", m.agentFlags("--take-over"))
	m.eventually("the second agent waits", func() bool { return strings.Contains(second.Output(), "asked to stop") })
	time.Sleep(100 * time.Millisecond)
	if err := second.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := m.wait(second); code != exitFailed {
		t.Errorf("the second agent ended with status %d", code)
	}
	for _, word := range []string{"wait for the other agent to stop", fmt.Sprintf("pid %d", first.Pid)} {
		if out := second.Output(); !strings.Contains(out, word) {
			t.Errorf("the second agent says %q, and not %q", out, word)
		}
	}
	m.wantState(before)
	if err := first.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if code := m.wait(first); code != exitDone {
		t.Errorf("the first agent ended with status %d", code)
	}
}

// An agent finds the place of one that was killed free.
func TestTakingOverFromNobody(t *testing.T) {
	m := newMachine(t)
	m.kill(m.agent())
	m.stop(m.agent("--take-over"))
}
