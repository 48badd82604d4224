// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// pods asks the agent about the enrolled pods.
func (m *machine) pods() []enroll.Pod {
	m.t.Helper()
	var pods []enroll.Pod
	out := run(m.t, nil, "pods", "--run-dir", m.RunDir, "-o", "json").wantDone(m.t)
	if err := json.Unmarshal([]byte(out), &pods); err != nil {
		m.t.Fatalf("%v: %s", err, out)
	}
	return pods
}

func (m *machine) status() api.Status {
	m.t.Helper()
	var status api.Status
	out := run(m.t, nil, "status", "--run-dir", m.RunDir, "-o", "json").wantDone(m.t)
	if err := json.Unmarshal([]byte(out), &status); err != nil {
		m.t.Fatalf("%v: %s", err, out)
	}
	return status
}

func (m *machine) cleanup() result {
	m.t.Helper()
	return m.command("cleanup", "--run-dir", m.RunDir, "--bpffs", m.BPFFS, "--zds-socket", m.ZDSSocket)
}

func (m *machine) wantCleanedUp(before string, namespaces ...*bed.NS) {
	m.t.Helper()
	for range 2 { // it may be repeated
		m.cleanup().wantDone(m.t)
		// It takes the run-dir away, too; what was there before was empty.
		if err := os.MkdirAll(m.RunDir, 0o700); err != nil {
			m.t.Fatal(err)
		}
		m.wantState(before, namespaces...)
	}
}

// runFiles describes the run-dir's files that an agent has only while it runs.
func (m *machine) runFiles() string {
	m.t.Helper()
	var b strings.Builder
	for line := range strings.Lines(tree(m.t, m.RunDir)) {
		if strings.Contains(line, ".sock") || strings.Contains(line, lockName) {
			b.WriteString(line)
		}
	}
	return b.String()
}

func TestAnAgentIsStoppedAndAnotherTakesOver(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	before, untouched := m.state(pod), m.state()

	agent := m.agent()
	if out := run(t, nil, m.enrollFlags(pod)...).wantDone(t); !strings.Contains(out, "shop/web (uid-web) is pending") {
		t.Errorf("enroll says %q", out)
	}
	first := m.pods()
	if len(first) != 1 || first[0].String() != "shop/web" || first[0].State != enroll.StatePending {
		t.Fatalf("pods are %+v", first)
	}
	if status := m.status(); status.Agent.PID != agent.Pid || status.Agent.Version != "v0.0.0-test" || status.Agent.Cgroup != m.Cgroup {
		t.Errorf("the agent is said to be %+v, its pid is %d", status.Agent, agent.Pid)
	}
	for _, mode := range []string{"Srw------- " + m.RunDir + "/agent.sock", "Srw------- " + m.ZDSSocket, "-rw------- " + m.RunDir + "/agent.lock"} {
		if files := m.runFiles(); !strings.Contains(files, mode+"\n") {
			t.Errorf("there is no %s in:\n%s", mode, files)
		}
	}

	m.stop(agent)
	if files := m.runFiles(); files != "" {
		t.Errorf("a stopped agent leaves %s", files)
	}
	stopped := m.state(pod)
	if stopped == before {
		t.Error("a stopped agent has taken its dataplane away")
	}

	agent = m.agent()
	if !strings.Contains(agent.Output(), "adopted=true") {
		t.Errorf("the second agent has not taken over: %s", agent.Output())
	}
	second := m.pods()
	if len(second) != 1 || second[0].String() != "shop/web" || !second[0].Since.Equal(first[0].Since) {
		t.Errorf("the second agent's pods are %+v, the first's were %+v", second, first)
	}
	m.stop(agent)
	m.wantState(stopped, pod)

	agent = m.agent()
	for range 2 { // what is absent is removed already
		if out := run(t, nil, "unenroll", "--run-dir", m.RunDir, "--uid", "uid-web").wantDone(t); !strings.Contains(out, "uid-web") {
			t.Errorf("unenroll says %q", out)
		}
	}
	if out := run(t, nil, "pods", "--run-dir", m.RunDir).wantDone(t); !strings.Contains(out, "no pod is enrolled") {
		t.Errorf("pods says %q", out)
	}
	m.stop(agent)
	text, err := pod.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if got := untouched + text; got != before {
		t.Error("the pod's namespace is not as it was")
	}
	m.wantCleanedUp(before, pod)
}

func TestAKilledAgentLeavesAllInPlaceForTheNext(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	before := m.state(pod)
	m.kill(m.agent())
	agent := m.agent() // with nothing enrolled yet
	run(t, nil, m.enrollFlags(pod)...).wantDone(t)
	pins := tree(t, filepath.Dir(m.BPFFS))
	m.kill(agent)
	if got := tree(t, filepath.Dir(m.BPFFS)); got != pins {
		t.Errorf("pins are\n%s\nand were\n%s", got, pins)
	}

	agent = m.agent()
	if pods := m.pods(); len(pods) != 1 || pods[0].UID != "uid-web" {
		t.Errorf("pods are %+v", pods)
	}
	m.kill(agent)
	if files := m.runFiles(); !strings.Contains(files, "agent.sock") || !strings.Contains(files, lockName) || !strings.Contains(files, "zds.sock") {
		t.Fatalf("a killed agent has left only:\n%s", files)
	}
	run(t, nil, "pods", "--run-dir", m.RunDir).wantFailure(t, exitFailed, "no agent answers", m.RunDir)
	m.wantCleanedUp(before, pod)
}

func TestOneAgentAtATime(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	agent := m.agent()
	run(t, nil, m.enrollFlags(pod)...).wantDone(t)
	running := m.state(pod)
	elsewhere := filepath.Join(m.Dir, "elsewhere")

	pid := fmt.Sprintf("pid %d", agent.Pid)
	m.command(m.agentFlags()...).wantFailure(t, exitFailed, pid, m.RunDir, "stop it")
	m.command(m.agentFlags("--run-dir", elsewhere, "--zds-socket", m.ZDSSocket+"2")...).wantFailure(t, exitFailed, m.BPFFS, "stop")
	m.command(m.agentFlags("--run-dir", elsewhere, "--bpffs", m.BPFFS+"2")...).wantFailure(t, exitFailed, m.ZDSSocket, "stop")
	m.cleanup().wantFailure(t, exitFailed, pid, m.RunDir, "stop it")
	m.command("cleanup", "--run-dir", elsewhere, "--bpffs", m.BPFFS, "--zds-socket", m.ZDSSocket).wantFailure(t, exitFailed, m.BPFFS, "stop")

	m.wantState(running, pod)
	if left := tree(t, elsewhere); left != "" {
		t.Errorf("those that were refused have left %s", left)
	}
	if pods := m.pods(); len(pods) != 1 {
		t.Errorf("pods are %+v", pods)
	}
	m.stop(agent)
}

// An agent that cannot start has made the dataplane already when it finds that out.
func TestAStartThatFailsLateLeavesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(*testing.T, *machine) []string
		words []string
	}{
		"somebody listens on the ZDS socket": {func(t *testing.T, m *machine) []string {
			l, err := net.Listen("unixpacket", m.ZDSSocket)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
			return nil
		}, []string{"zds.sock", "stop that one or choose another"}},
		"the ZDS socket's path is too long": {func(_ *testing.T, m *machine) []string {
			return []string{"--zds-socket", filepath.Join(m.Dir, "new", "dir", strings.Repeat("x", 100))}
		}, []string{"xxx", "shorter"}},
		"the ZDS socket's directory is a file": {func(t *testing.T, m *machine) []string {
			file := filepath.Join(m.RunDir, "file")
			write(t, file)
			return []string{"--zds-socket", filepath.Join(file, "zds.sock")}
		}, []string{"file", "not a directory", "--zds-socket"}},
		"the agent's socket is a file": {func(t *testing.T, m *machine) []string {
			write(t, filepath.Join(m.RunDir, socketName))
			return nil
		}, []string{"agent.sock", "remove it"}},
		"somebody else listens on the agent's socket": {func(t *testing.T, m *machine) []string {
			l, err := net.Listen("unix", filepath.Join(m.RunDir, socketName))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
			return nil
		}, []string{"agent.sock", "stop"}},
		"what is known of pods is a file": {func(t *testing.T, m *machine) []string {
			write(t, filepath.Join(m.RunDir, podsName))
			return nil
		}, []string{"pods", "not a directory"}},
		"the run-dir's path is too long": {func(_ *testing.T, m *machine) []string {
			return []string{"--run-dir", filepath.Join(m.Dir, strings.Repeat("y", 100))}
		}, []string{"yyy", "shorter"}},
		"the pins' place is another's": {func(t *testing.T, m *machine) []string {
			if err := os.MkdirAll(filepath.Join(m.BPFFS, "cilium"), 0o700); err != nil {
				t.Fatal(err)
			}
			return nil
		}, []string{"/redirector", "remove"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			flags := c.spoil(t, m)
			before, dir := m.state(), tree(t, m.Dir)
			// Twice: the first leaves nothing that would make a difference.
			for range 2 {
				m.command(m.agentFlags(flags...)...).wantFailure(t, exitFailed, c.words...)
				m.wantNoDataplane()
				m.wantState(before)
			}
			for line := range strings.Lines(tree(t, m.Dir)) {
				if !strings.Contains(dir, line) && !strings.Contains(line, "/log/") {
					t.Errorf("it leaves %s", line)
				}
			}
		})
	}
}

func TestAStartThatFailsLateLeavesAnAdoptedDataplane(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	agent := m.agent()
	run(t, nil, m.enrollFlags(pod)...).wantDone(t)
	m.stop(agent)
	enrolled := m.state(pod)

	write(t, filepath.Join(m.RunDir, socketName))
	m.command(m.agentFlags()...).wantFailure(t, exitFailed, "agent.sock")
	if err := os.Remove(filepath.Join(m.RunDir, socketName)); err != nil {
		t.Fatal(err)
	}
	m.wantState(enrolled, pod)
	agent = m.agent()
	if pods := m.pods(); len(pods) != 1 {
		t.Errorf("pods are %+v", pods)
	}
	m.stop(agent)
}

func TestAFailedStartIsLoggedAsJSONForWhoReadsJSON(t *testing.T) {
	m := newMachine(t)
	file := filepath.Join(m.Dir, "file")
	write(t, file)
	r := m.command(m.agentFlags("--run-dir", file, "--log-format", "json")...)
	var line struct{ Level, Msg, Error string }
	if err := json.Unmarshal([]byte(r.stderr), &line); err != nil || r.code != exitFailed {
		t.Fatalf("exit status %d, %v: %s", r.code, err, r.stderr)
	}
	if line.Level != "ERROR" || !strings.Contains(line.Error, file) {
		t.Errorf("it logs %+v", line)
	}
}

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, []byte("another's\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// wantNoDataplane waits for the kernel to let go of programs whose last link is gone.
func (m *machine) wantNoDataplane() {
	m.t.Helper()
	m.eventually("no program is on the cgroup", func() bool { return m.sockOps() == 0 })
}
