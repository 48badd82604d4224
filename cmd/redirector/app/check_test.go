// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/preflight"
)

func TestCheckOnAMachineThatIsFit(t *testing.T) {
	m := newMachine(t)
	before := m.state(m.Node, m.Outside)
	r := m.command("check", "--bpffs", m.BPFFS, "--cgroup", m.Cgroup)
	said := r.stdout + r.stderr
	// Where the JIT is off, or there is no IPv6, the machine is fit but for that.
	limited := strings.Contains(said, "the agent works here, without: ")
	if r.code != exitDone && r.code != exitLimited || (r.code == exitLimited) != limited {
		t.Fatalf("exit status %d:\n%s", r.code, said)
	}
	said = strings.Join(strings.Fields(said), " ")
	for _, line := range []string{"ok yes sk_lookup programs", "ok yes CAP_BPF", "ok yes a BPF filesystem"} {
		if !strings.Contains(said, line) {
			t.Errorf("no line %q in\n%s", line, said)
		}
	}
	m.wantState(before, m.Node, m.Outside)
}

func TestCheckNamesWhatIsMissing(t *testing.T) {
	m := newMachine(t)
	good := []string{"check", "--bpffs", m.BPFFS, "--cgroup", m.Cgroup}
	for name, c := range map[string]struct {
		drop string // capabilities
		args []string
		code int
		says []string
	}{
		"no BPF filesystem": {
			args: []string{"--bpffs", filepath.Join(m.Dir, "pins")}, code: exitFailed,
			says: []string{"the agent needs: a BPF filesystem:", "missing: a BPF filesystem", "mount -t bpf",
				"kernel 4.4 or later with CONFIG_BPF_SYSCALL"},
		},
		"no cgroup2": {
			args: []string{"--cgroup", m.Dir}, code: exitFailed,
			says: []string{"the agent needs: a cgroup2 mount:", "missing: a cgroup2 mount", "mount -t cgroup2"},
		},
		"no right to load programs": {
			drop: fmt.Sprint(unix.CAP_BPF, " ", unix.CAP_SYS_ADMIN), code: exitFailed,
			says: []string{"the agent needs: CAP_BPF; CAP_SYS_ADMIN:", "missing yes CAP_BPF", "unknown yes sk_lookup programs",
				"securityContext"},
		},
		"no right to look at others": {
			drop: fmt.Sprint(unix.CAP_SYS_PTRACE), code: exitLimited,
			says: []string{"the agent works here, without: CAP_SYS_PTRACE", "missing no CAP_SYS_PTRACE",
				"pods that run already are not found"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := &machine{m.Bed, t}
			role, env := roleRedirector, ""
			if c.drop != "" {
				role, env = roleWithout, dropVar+"="+c.drop
			}
			r := m.commandIn(m.Node, role, append(good, c.args...), env)
			if r.code != c.code {
				t.Errorf("exit status %d, want %d", r.code, c.code)
			}
			said := strings.Join(strings.Fields(r.stdout+r.stderr), " ")
			for _, words := range c.says {
				if !strings.Contains(said, words) {
					t.Errorf("it does not say %q:\n%s", words, said)
				}
			}
		})
	}
}

// Also on a kernel that the agent refuses, where it has to name the same features.
func TestCheckAsJSON(t *testing.T) {
	r := run(t, nil, "check", "-o", "json", "--bpffs", "/no/such/pins")
	var report preflight.Report
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil {
		t.Fatalf("%v:\n%s", err, r.stdout)
	}
	if r.code != exitFailed || report.Verdict != preflight.Bad || report.Kernel != kernelRelease() {
		t.Errorf("exit status %d, verdict %q, kernel %q", r.code, report.Verdict, report.Kernel)
	}
	if len(report.Checks) != len(preflight.Checks()) {
		t.Errorf("%d lines, want %d", len(report.Checks), len(preflight.Checks()))
	}
	for _, c := range report.Checks {
		if c.Needed && c.State == preflight.Missing && !strings.Contains(r.stderr, c.Name) {
			t.Errorf("standard error does not name %q: %s", c.Name, r.stderr)
		}
	}
}

func TestTheStatusOfACheckIsThatOfTheWorst(t *testing.T) {
	some := func(needed bool, state preflight.State) []preflight.Result {
		return []preflight.Result{{Name: "good", Needed: true, State: preflight.OK}, {Name: "it", Needed: needed, State: state}}
	}
	for name, c := range map[string]struct {
		report preflight.Report
		want   int
	}{
		"missing":              {preflight.Report{Verdict: preflight.Bad, Checks: some(true, preflight.Missing)}, exitFailed},
		"unknown":              {preflight.Report{Verdict: preflight.Doubtful, Checks: some(true, preflight.Unknown)}, exitUnknown},
		"optional and missing": {preflight.Report{Verdict: preflight.Limited, Checks: some(false, preflight.Missing)}, exitLimited},
		"optional and unknown": {preflight.Report{Verdict: preflight.Limited, Checks: some(false, preflight.Unknown)}, exitLimited},
	} {
		err, ok := checkError(&c.report).(*statusError) //nolint:errorlint // it is not wrapped
		if !ok || err.status != c.want || !strings.Contains(err.Error(), ": it:") {
			t.Errorf("%s: %v, want status %d and the name", name, err, c.want)
		}
	}
	if err := checkError(&preflight.Report{Verdict: preflight.Good}); err != nil {
		t.Error(err)
	}
}
