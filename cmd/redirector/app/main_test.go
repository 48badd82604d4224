// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// roleVar makes the test binary play a part in a test instead of running tests.
const roleVar = "REDIRECTOR_APP_ROLE"

// dropVar lists the capabilities that roleWithout drops, as numbers.
const dropVar = "REDIRECTOR_APP_DROP"

const (
	roleRedirector = "redirector"
	// roleWithout is roleRedirector without some capabilities.
	roleWithout   = "without"
	roleNodeproxy = "nodeproxy"
	// roleOdd is roleRedirector where some mounts are other than usual; see oddVar.
	roleOdd = "odd"
)

func TestMain(m *testing.M) {
	switch os.Getenv(roleVar) {
	case roleRedirector:
		os.Exit(Main(context.Background(), os.Args[1:], Env{Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Version: "v0.0.0-test"}))
	case roleWithout:
		fmt.Println(execWithout(strings.Fields(os.Getenv(dropVar))))
		os.Exit(99)
	case roleOdd:
		fmt.Println(execOdd(os.Getenv(oddVar)))
		os.Exit(99)
	case roleNodeproxy:
		os.Exit(nodeproxy.Main(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// execWithout runs this program as roleRedirector, with capabilities taken out of the bounding set, and so of those it gets.
func execWithout(capabilities []string) error {
	runtime.LockOSThread()
	for _, number := range capabilities {
		n, err := strconv.Atoi(number)
		if err != nil {
			return err
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", n, err)
		}
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

// result is what became of a command.
type result struct {
	code           int
	stdout, stderr string
}

// run runs a command in this process. env has the environment's variables.
func run(t *testing.T, env map[string]string, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := Main(t.Context(), args, Env{
		Stdout:  &stdout,
		Stderr:  &stderr,
		Getenv:  func(name string) string { return env[name] },
		Version: "v0.0.0-test",
	})
	return result{code, stdout.String(), stderr.String()}
}

// wantFailure checks the exit status, and that there is one line on standard error that has all the words.
func (r result) wantFailure(t *testing.T, code int, words ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit status %d, want %d", r.code, code)
	}
	if r.stdout != "" {
		t.Errorf("standard output has %q, want nothing", r.stdout)
	}
	line, rest, ended := strings.Cut(r.stderr, "\n")
	if !ended || rest != "" || !strings.HasPrefix(line, "redirector: ") {
		t.Errorf("standard error has %q, want one line", r.stderr)
	}
	for _, word := range words {
		if !strings.Contains(line, word) {
			t.Errorf("%q does not say %q", line, word)
		}
	}
	if t.Failed() {
		t.Logf("standard error: %s", r.stderr)
	}
}

// wantDone checks that the command did it, without complaints, and returns its output.
func (r result) wantDone(t *testing.T) string {
	t.Helper()
	if r.code != exitDone || r.stderr != "" {
		t.Fatalf("exit status %d, standard error %q", r.code, r.stderr)
	}
	return r.stdout
}

// machine is a bed with what the commands are told about it.
type machine struct {
	*bed.Bed
	t *testing.T
}

// newMachine skips the test on a kernel that no agent runs on; see pkg/loader for what becomes of it there.
func newMachine(t *testing.T) *machine {
	t.Helper()
	var lacks *loader.FeatureError
	if err := loader.CheckFeatures(); errors.As(err, &lacks) {
		t.Skip(err)
	}
	return &machine{bed.ForTest(t, bed.Options{}), t}
}

func (m *machine) pod(name string) *bed.NS {
	m.t.Helper()
	pod, err := m.Pod(name, bed.PodOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	return pod
}

// agentFlags are the flags of an agent on the bed; those given come after them, and win.
func (m *machine) agentFlags(more ...string) []string {
	return append([]string{
		"agent", "--standalone", "--run-dir", m.RunDir, "--bpffs", m.BPFFS, "--cgroup", m.Cgroup, "--zds-socket", m.ZDSSocket,
	}, more...)
}

// start starts this binary in a role, in the node's network namespace and cgroup, or in another namespace.
func (m *machine) start(ns *bed.NS, role, name string, args []string, env ...string) *bed.Proc {
	m.t.Helper()
	self, err := os.Executable()
	if err != nil {
		m.t.Fatal(err)
	}
	p, err := m.Bed.Start(ns, true, name, append([]string{self}, args...), append(env, roleVar+"="+role))
	if err != nil {
		m.t.Fatal(err)
	}
	return p
}

// wait waits for the end of a process that has begun to end, and returns its exit status.
func (m *machine) wait(p *bed.Proc) int {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), 20*time.Second)
	defer cancel()
	var status interface{ ExitCode() int }
	switch err := p.Wait(ctx); {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return status.ExitCode()
	default:
		m.t.Fatal(err)
		return -1
	}
}

// command runs a command as a process of the node, to its end. A process writes to one log, so what should be nothing but
// an error is in stderr, and all else in stdout.
func (m *machine) command(args ...string) result {
	m.t.Helper()
	return m.commandIn(m.Node, roleRedirector, args)
}

func (m *machine) commandIn(ns *bed.NS, role string, args []string, env ...string) result {
	m.t.Helper()
	p := m.start(ns, role, "redirector-"+args[0], args, env...)
	r := result{code: m.wait(p)}
	if r.code == exitDone {
		r.stdout = p.Output()
	} else {
		r.stderr = p.Output()
	}
	return r
}

// agent starts an agent that must come up.
func (m *machine) agent(more ...string) *bed.Proc {
	m.t.Helper()
	p := m.start(m.Node, roleRedirector, "agent", m.agentFlags(more...))
	m.eventually("the agent is ready", func() bool {
		select {
		case <-p.Done():
			m.t.Fatalf("the agent has ended: %s", p.Output())
		default:
		}
		return strings.Contains(p.Output(), "msg=ready")
	})
	return p
}

// stop ends an agent as the system does.
func (m *machine) stop(agent *bed.Proc) {
	m.t.Helper()
	if err := agent.Signal(unix.SIGTERM); err != nil {
		m.t.Fatal(err)
	}
	if code := m.wait(agent); code != exitDone {
		m.t.Errorf("after SIGTERM the agent ended with status %d: %s", code, agent.Output())
	}
}

func (m *machine) kill(p *bed.Proc) {
	m.t.Helper()
	if err := p.Kill(); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) eventually(what string, so func() bool) {
	m.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			m.t.Fatalf("not so after 20 s: %s", what)
		}
	}
}

// enrollFlags are those that enrol a pod of the bed without waiting for a proxy; those given come after them, and win.
func (m *machine) enrollFlags(pod *bed.NS, more ...string) []string {
	flags := []string{
		"enroll", "--run-dir", m.RunDir, "--uid", "uid-" + pod.Name, "--name", "shop/" + pod.Name, "--service-account", "default",
		"--netns", pod.Path, "--wait-proxy=false",
	}
	if !slices.Contains(more, "--ip") { // it may be given several times, and all count
		addresses := pod.V4.String()
		if pod.V6.IsValid() {
			addresses += "," + pod.V6.String()
		}
		flags = append(flags, "--ip", addresses)
	}
	return append(flags, more...)
}

// state describes all that a command could have left: files in the run-dir, pins, programs on the cgroup, and what is in the
// namespaces given.
func (m *machine) state(namespaces ...*bed.NS) string {
	m.t.Helper()
	var b strings.Builder
	for _, dir := range []string{m.RunDir, filepath.Dir(m.BPFFS)} {
		b.WriteString(tree(m.t, dir))
	}
	fmt.Fprintf(&b, "sock_ops programs on the cgroup: %d\n", m.sockOps())
	for _, ns := range namespaces {
		text, err := ns.Snapshot()
		if err != nil {
			m.t.Fatal(err)
		}
		b.WriteString(text)
	}
	return b.String()
}

func (m *machine) wantState(want string, namespaces ...*bed.NS) {
	m.t.Helper()
	if d := cmp.Diff(want, m.state(namespaces...)); d != "" {
		m.t.Errorf("it is not as it was (-was +is):\n%s", d)
	}
}

// sockOps counts the programs on the bed's cgroup. A program leaves a moment after its last link.
func (m *machine) sockOps() int {
	m.t.Helper()
	dir, err := os.Open(m.Cgroup)
	if err != nil {
		m.t.Fatal(err)
	}
	defer dir.Close()
	programs, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		m.t.Fatal(err)
	}
	return len(programs.Programs)
}

// tree lists what is in a directory, with modes.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "%s %s\n", info.Mode(), path)
		return nil
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return b.String()
}
