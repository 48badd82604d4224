// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// The agent and the check must not disagree about a kernel, for both ask the same table.
func TestTheCheckSaysOfTheKernelWhatTheAgentSays(t *testing.T) {
	var missing []string
	for _, r := range Run(Options{BPFFS: "/sys/fs/bpf/redirector"}).Checks {
		if r.Group == GroupKernel && r.State != OK && r.Needed {
			missing = append(missing, r.Name)
		}
	}
	err := loader.CheckFeatures()
	if err == nil && len(missing) > 0 {
		t.Errorf("the agent starts here, and the check says that %v is missing", missing)
	}
	if err != nil && (len(missing) == 0 || !strings.Contains(err.Error(), missing[0])) {
		t.Errorf("the agent says %q, and the check that %v is missing", err, missing)
	}
	t.Logf("the agent: %v; missing: %v", err, missing)
}

func TestEveryCheckSaysWhatHappensWithoutIt(t *testing.T) {
	names := map[string]bool{}
	for _, c := range Checks() {
		if c.Name == "" || c.Without == "" || names[c.Name] {
			t.Errorf("%+v has no name, or that of another, or does not say what happens without it", c)
		}
		names[c.Name] = true
		r := Result{Since: c.Since, Option: c.Option, Remedy: c.Remedy}
		if r.Needs() == "" {
			t.Errorf("%s: nothing says how to get it", c.Name)
		}
		if c.Since == "" {
			continue
		}
		for part := range strings.SplitSeq(c.Since, ".") {
			if _, err := strconv.Atoi(part); err != nil {
				t.Errorf("%s: %q is no kernel version", c.Name, c.Since)
			}
		}
	}
}

func TestVerdict(t *testing.T) {
	needed := func(s State) Result { return Result{State: s, Needed: true} }
	optional := func(s State) Result { return Result{State: s} }
	for name, c := range map[string]struct {
		results []Result
		want    Verdict
	}{
		"all is there":                {[]Result{needed(OK), optional(OK)}, Good},
		"an optional one is missing":  {[]Result{needed(OK), optional(Missing)}, Limited},
		"an optional one is unknown":  {[]Result{optional(Unknown), needed(OK)}, Limited},
		"a needed one is unknown":     {[]Result{needed(Unknown), optional(Missing)}, Doubtful},
		"a needed one is missing":     {[]Result{needed(Missing), needed(Unknown)}, Bad},
		"missing counts, wherever":    {[]Result{needed(Unknown), needed(Missing), optional(Missing)}, Bad},
		"unknown is worse than lacks": {[]Result{optional(Missing), needed(Unknown)}, Doubtful},
	} {
		if got := verdict(c.results); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func TestJudge(t *testing.T) {
	for err, want := range map[error]State{
		nil: OK, unix.EPERM: Unknown, unix.EMFILE: Unknown, unix.ENOMEM: Unknown, unix.EINVAL: Missing, unix.EACCES: Missing,
	} {
		if state, found := judge(err); state != want || found == "" {
			t.Errorf("%v: %s, %q; want %s", err, state, found, want)
		}
	}
}

func TestNeeds(t *testing.T) {
	for want, r := range map[string]Result{
		"run kernel 5.9 or later with CONFIG_X": {Since: "5.9", Option: "CONFIG_X"},
		"run kernel 5.9 or later":               {Since: "5.9"},
		"do it":                                 {Remedy: "do it"},
		"do it; it needs kernel 4.4 or later with CONFIG_X": {Remedy: "do it", Since: "4.4", Option: "CONFIG_X"},
		"do it; it needs a kernel with CONFIG_X":            {Remedy: "do it", Option: "CONFIG_X"},
	} {
		if got := r.Needs(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The shape is an interface: each name is there, whatever was found.
func TestTheShapeOfTheJSON(t *testing.T) {
	b, err := json.Marshal(Report{Checks: []Result{{}}})
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"kernel":"","verdict":"","checks":[{"group":"","name":"","state":"","needed":false,"found":"",` +
		`"since":"","option":"","without":"","remedy":""}]}`
	if string(b) != want {
		t.Errorf("%s, want %s", b, want)
	}
}

func TestCgroupsTell(t *testing.T) {
	const legacy = "4:memory:%\n1:name=systemd:/\n"
	version1 := func(path string) string { return strings.ReplaceAll(legacy, "%", path) }
	for name, c := range map[string]struct {
		processes []string // what their files say
		want      State
		words     string
	}{
		"version 2": {
			[]string{"0::/init.scope\n", "0::/kubepods.slice/pod1/c\n", "0::/\n"}, OK, "2 processes",
		},
		"version 2, from a cgroup namespace": {[]string{"0::/\n", "0::/../../kubepods/pod1\n"}, OK, "1 processes"},
		"version 1 and all in the root": {
			[]string{version1("/") + "0::/\n", version1("/docker/c") + "0::/\n"}, Missing, "version 1 is in use",
		},
		"version 1 for pods": {
			[]string{version1("/") + "0::/init.scope\n", version1("/kubepods/pod1/c") + "0::/system.slice/containerd.service\n"},
			Missing, "/kubepods/pod1/c",
		},
		"both for pods": {
			[]string{version1("/kubepods/pod1/c") + "0::/kubepods/pod1/c\n"}, OK, "1 processes",
		},
		"version 1 alone":    {[]string{version1("/kubepods/pod1/c")}, Missing, "kubepods"},
		"no cgroup2":         {[]string{version1("/")}, Missing, "no process"},
		"nobody uses groups": {[]string{"0::/\n", "0::/\n"}, Missing, "root group"},
		"no processes":       {nil, Unknown, "no process"},
	} {
		t.Run(name, func(t *testing.T) {
			proc := t.TempDir()
			for i, text := range c.processes {
				dir := filepath.Join(proc, strconv.Itoa(i+1))
				if err := os.Mkdir(dir, 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, "cgroup"), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if state, found := cgroupsTell(proc); state != c.want || !strings.Contains(found, c.words) {
				t.Errorf("%s, %q; want %s, %q", state, found, c.want, c.words)
			}
		})
	}
}

// What the check says of this machine must be what can be seen in other ways.
func TestTheMachineIsAsTheCheckSays(t *testing.T) {
	state := map[string]State{}
	for _, r := range Run(Options{BPFFS: "/sys/fs/bpf/redirector"}).Checks {
		state[r.Name] = r.State
	}
	_, err := loader.FindCgroup2()
	if got := state["a cgroup2 mount"]; (err == nil) != (got == OK) {
		t.Errorf("cgroup2 is %s, and looking for it says %v", got, err)
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet6{Addr: [16]byte{}})
		_ = unix.Close(fd)
	}
	if got := state["IPv6"]; err != nil && got == OK {
		t.Errorf("IPv6 is %s, and a socket of it says %v", got, err)
	}
	var st unix.Statfs_t
	mounted := unix.Statfs("/sys/fs/bpf", &st) == nil && st.Type == unix.BPF_FS_MAGIC
	if got := state["a BPF filesystem"]; mounted != (got == OK) {
		t.Errorf("the BPF filesystem is %s, and mounted: %t", got, mounted)
	}
}

func TestThePageNamesEverything(t *testing.T) {
	page := Markdown()
	for _, c := range Checks() {
		if !strings.Contains(page, "| "+c.Name) {
			t.Errorf("the page does not name %q", c.Name)
		}
	}
	groups := slices.Collect(func(yield func(Group) bool) {
		for _, c := range Checks() {
			if !yield(c.Group) {
				return
			}
		}
	})
	if len(slices.Compact(groups)) != len(tables) {
		t.Errorf("checks are of the groups %v, and the page has %d tables", slices.Compact(groups), len(tables))
	}
}
