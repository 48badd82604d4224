// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// bind bind-mounts a file; the mount goes with the bed.
func bind(t *testing.T, from, to string, flags uintptr) {
	t.Helper()
	if info, err := os.Stat(from); err == nil && info.IsDir() {
		err = os.Mkdir(to, 0o700)
		if err != nil {
			t.Fatal(err)
		}
	} else {
		write(t, to)
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if flags != 0 {
		if err := unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|flags, ""); err != nil {
			t.Fatal(err)
		}
	}
}

func TestEnrolRefusals(t *testing.T) {
	m := newMachine(t)
	agent := m.agent()
	web, other := m.pod("web"), m.pod("other")
	run(t, nil, m.enrollFlags(web)...).wantDone(t)

	at := func(name string) string { return filepath.Join(m.Dir, name) }
	write(t, at("file"))
	if err := os.Mkdir(at("dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(at("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/self/ns/net", at("self")); err != nil {
		t.Fatal(err)
	}
	bind(t, m.Node.Path, at("node"), 0)
	host := map[string]string{ // where the agent runs, and where pid 1 does
		"the agent's namespace":             m.Node.Path,
		"a bind mount of the agent's":       at("node"),
		"the agent's namespace by its pid":  fmt.Sprintf("/proc/%d/ns/net", agent.Pid),
		"a link to what the agent is in":    at("self"),
		"pid 1's namespace":                 "/proc/1/ns/net",
		"pid 1's namespace, in another way": "/proc/../proc/1/ns/./net",
	}
	// Some sandboxes let nobody look at pid 1.
	if _, err := os.Stat("/proc/1/ns/net"); err == nil {
		bind(t, "/proc/1/ns/net", at("init"), 0)
		host["a bind mount of pid 1's"] = at("init")
	}

	cases := map[string]struct {
		args  []string
		code  int
		words []string
	}{
		"a file":                        {[]string{"--netns", at("file")}, exitFailed, []string{at("file"), "not a network namespace", "/run/netns/NAME"}},
		"a directory":                   {[]string{"--netns", at("dir")}, exitFailed, []string{at("dir"), "not a network namespace", "/run/netns/NAME"}},
		"a FIFO":                        {[]string{"--netns", at("fifo")}, exitFailed, []string{at("fifo"), "not a network namespace", "/run/netns/NAME"}},
		"a namespace of another kind":   {[]string{"--netns", "/proc/self/ns/mnt"}, exitFailed, []string{"/ns/mnt", "not a network namespace", "/run/netns/NAME"}},
		"a missing path":                {[]string{"--netns", at("missing")}, exitFailed, []string{at("missing"), "no such file", "/run/netns/NAME"}},
		"a path below a file":           {[]string{"--netns", at("file") + "/x"}, exitFailed, []string{at("file") + "/x", "not a directory"}},
		"a process that is none":        {[]string{"--netns", "/proc/4194305/ns/net"}, exitFailed, []string{"/proc/4194305/ns/net", "no such file"}},
		"another pod's namespace":       {[]string{"--netns", web.Path}, exitFailed, []string{web.Path, "uid-web", "unenroll"}},
		"another pod's, with no IP":     {[]string{"--netns", web.Path, "--ip", web.V4.String()}, exitFailed, []string{web.Path, "uid-web", "unenroll"}},
		"an IP that is another pod's":   {[]string{"--ip", web.V4.String()}, exitFailed, []string{other.Path, web.V4.String(), "name the pod's own"}},
		"a UID with a slash":            {[]string{"--uid", "a/b"}, exitUsage, []string{`"a/b"`, "letters, digits"}},
		"a UID that leads up":           {[]string{"--uid", ".."}, exitUsage, []string{`".."`, "letters, digits"}},
		"a UID with a control sequence": {[]string{"--uid", "\x1b[2J\n"}, exitUsage, []string{"UID", "letters, digits"}},
		"a UID that is too long":        {[]string{"--uid", strings.Repeat("u", 64)}, exitUsage, []string{"63", "letters, digits"}},
		"an empty UID":                  {[]string{"--uid", ""}, exitUsage, []string{"--uid"}},
		"a name that is none":           {[]string{"--name", "shop/../web"}, exitUsage, []string{`"../web"`, "lower-case"}},
		"a name without a namespace":    {[]string{"--name", "web"}, exitUsage, []string{`"web"`, "shop/web"}},
		"an IP that is none":            {[]string{"--ip", "10.88.1.256"}, exitUsage, []string{"10.88.1.256", "as in"}},
		"an IP for everybody":           {[]string{"--ip", "0.0.0.0"}, exitUsage, []string{"0.0.0.0", "own address"}},
	}
	for name, path := range host {
		words := []string{"is the host's network namespace", "name the pod's own", "/run/netns/NAME"}
		cases[name] = struct {
			args  []string
			code  int
			words []string
		}{[]string{"--netns", path}, exitFailed, words}
	}
	all := []*bed.NS{m.Node, m.Outside, web, other}
	before, beforeAll := m.state(other), m.state(all...)
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			run(t, nil, m.enrollFlags(other, c.args...)...).wantFailure(t, c.code, c.words...)
			(&machine{m.Bed, t}).wantState(before, other)
		})
	}
	m.wantState(beforeAll, all...)
	if pods := m.pods(); len(pods) != 1 || pods[0].UID != "uid-web" {
		t.Errorf("pods are %+v", pods)
	}
	// The agent does not mind: it enrols what is right.
	run(t, nil, m.enrollFlags(other)...).wantDone(t)
}

// The test for this is a kernel that lacks something, as 5.10 does.
func TestAKernelThatLacksAFeatureIsRefused(t *testing.T) {
	var lacks *loader.FeatureError
	if err := loader.CheckFeatures(); err == nil {
		t.Skip("this kernel lacks nothing")
	} else if !errors.As(err, &lacks) {
		t.Fatal(err)
	}
	run, sockets := filepath.Join(t.TempDir(), "run"), filepath.Join(t.TempDir(), "sockets")
	var stderr strings.Builder
	code := Main(t.Context(), []string{
		"agent", "--standalone", "--run-dir", run, "--zds-socket", filepath.Join(sockets, "zds.sock"), "--bpffs", "/sys/fs/bpf/none",
	}, Env{Stdout: io.Discard, Stderr: &stderr, Getenv: func(string) string { return "" }})
	result{code: code, stderr: stderr.String()}.wantFailure(t, exitFailed, lacks.Feature.Name, "run kernel "+lacks.Feature.Since+" or later")
	for _, dir := range []string{run, sockets, "/sys/fs/bpf/none"} {
		if left := tree(t, dir); left != "" {
			t.Errorf("it leaves %s", left)
		}
	}
}

func TestStartRefusals(t *testing.T) {
	m := newMachine(t)
	at := func(name string) string { return filepath.Join(m.Dir, name) }
	write(t, at("file"))
	if err := os.Mkdir(at("dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	bind(t, at("dir"), at("readonly"), unix.MS_RDONLY)
	if err := os.Mkdir(at("open"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(at("open"), 0o777); err != nil {
		t.Fatal(err)
	}
	before, beforeAll := m.state(), m.state(m.Node, m.Outside)
	for name, c := range map[string]struct {
		drop  string // capabilities
		args  []string
		words []string
	}{
		"run-dir is a file":                    {args: []string{"--run-dir", at("file")}, words: []string{at("file"), "not a directory", "--run-dir"}},
		"run-dir is in a file":                 {args: []string{"--run-dir", at("file/x")}, words: []string{at("file/x"), "not a directory", "--run-dir"}},
		"run-dir is read-only":                 {args: []string{"--run-dir", at("readonly")}, words: []string{at("readonly"), "read-only", "--run-dir"}},
		"run-dir is on a read-only filesystem": {args: []string{"--run-dir", at("readonly/x/y")}, words: []string{at("readonly/x"), "read-only", "--run-dir"}},
		"run-dir is for everybody":             {args: []string{"--run-dir", at("open")}, words: []string{at("open"), "0777", "--run-dir"}},
		"bpffs is on no BPF filesystem":        {args: []string{"--bpffs", at("dir/pins")}, words: []string{at("dir/pins"), "not on a BPF filesystem", "mount -t bpf"}},
		"bpffs is in no directory":             {args: []string{"--bpffs", at("missing/pins")}, words: []string{at("missing/pins"), "no such file", "mount -t bpf"}},
		"bpffs is in a file":                   {args: []string{"--bpffs", at("file/pins")}, words: []string{at("file/pins"), "not on a BPF filesystem", "mount -t bpf"}},
		"cgroup is a plain directory":          {args: []string{"--cgroup", at("dir")}, words: []string{at("dir"), "not on a cgroup2 filesystem", "findmnt"}},
		"cgroup is a file":                     {args: []string{"--cgroup", at("file")}, words: []string{at("file"), "not on a cgroup2 filesystem", "findmnt"}},
		"cgroup is missing":                    {args: []string{"--cgroup", m.Cgroup + "/missing"}, words: []string{m.Cgroup + "/missing", "no such file", "cgroup2"}},
		"cgroup is a file of one":              {args: []string{"--cgroup", m.Cgroup + "/cgroup.procs"}, words: []string{m.Cgroup + "/cgroup.procs", "directory"}},
		"no CAP_BPF":                           {drop: fmt.Sprint(unix.CAP_BPF, " ", unix.CAP_SYS_ADMIN), words: []string{"CAP_BPF", "run it as root"}},
		"no CAP_NET_ADMIN":                     {drop: fmt.Sprint(unix.CAP_NET_ADMIN), words: []string{"CAP_NET_ADMIN", "run it as root"}},
		"no CAP_SYS_ADMIN":                     {drop: fmt.Sprint(unix.CAP_SYS_ADMIN), words: []string{"CAP_SYS_ADMIN", "run it as root"}},
		"no capability at all":                 {drop: allCapabilities(), words: []string{"CAP_", "run it as root"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := &machine{m.Bed, t}
			dir := tree(t, m.Dir)
			role, env := roleRedirector, ""
			if c.drop != "" {
				role, env = roleWithout, dropVar+"="+c.drop
			}
			m.commandIn(m.Node, role, m.agentFlags(c.args...), env).wantFailure(t, exitFailed, c.words...)
			m.wantState(before)
			for line := range strings.Lines(tree(t, m.Dir)) {
				if !strings.Contains(dir, line) && !strings.Contains(line, "/log/") {
					t.Errorf("it leaves %s", line)
				}
			}
		})
	}
	m.wantState(beforeAll, m.Node, m.Outside)
	m.agent() // on the same bed nothing is in its way
}

func allCapabilities() string {
	var all []string
	for c := range unix.CAP_LAST_CAP + 1 {
		if c != unix.CAP_SETPCAP {
			all = append(all, fmt.Sprint(c))
		}
	}
	// What dropping takes is dropped last.
	return strings.Join(append(all, fmt.Sprint(unix.CAP_SETPCAP)), " ")
}

func TestCleanupRefusals(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	agent := m.agent()
	run(t, nil, m.enrollFlags(pod)...).wantDone(t)
	m.stop(agent)
	enrolled := m.state(pod)
	plain := filepath.Join(m.Dir, "plain")
	if err := os.MkdirAll(filepath.Join(plain, "maps"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(plain, "file"))

	for name, c := range map[string]struct {
		args  []string
		words []string
	}{
		"bpffs is no BPF filesystem": {[]string{"--bpffs", plain}, []string{plain, "not on a BPF filesystem", "name the directory"}},
		"bpffs is a file":            {[]string{"--bpffs", filepath.Join(plain, "file")}, []string{plain, "not on a BPF filesystem", "name the directory"}},
		"run-dir is a file":          {[]string{"--run-dir", filepath.Join(plain, "file")}, []string{plain, "not a directory"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := &machine{m.Bed, t}
			args := append([]string{"cleanup", "--run-dir", m.RunDir, "--bpffs", m.BPFFS, "--zds-socket", m.ZDSSocket}, c.args...)
			m.command(args...).wantFailure(t, exitFailed, c.words...)
			m.wantState(enrolled, pod)
			for _, kept := range []string{"maps", "file"} {
				if _, err := os.Stat(filepath.Join(plain, kept)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
