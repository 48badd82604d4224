// SPDX-License-Identifier: Apache-2.0

package app

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/explain"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/bed"
)

func TestAPodIsFoundByWhatItIsCalled(t *testing.T) {
	m := newMachine(t)
	m.agent()
	for _, pod := range []*bed.NS{m.pod("web"), m.pod("web2")} {
		run(t, nil, m.enrollFlags(pod)...).wantDone(t)
	}
	run(t, nil, m.enrollFlags(m.pod("other"), "--name", "store/web")...).wantDone(t)
	pod := func(args ...string) result {
		return run(t, nil, append([]string{"pod", "--run-dir", m.RunDir}, args...)...)
	}

	for who, uid := range map[string]string{"uid-web": "uid-web", "shop/web": "uid-web", "store/web": "uid-other", "web2": "uid-web2"} {
		var found api.Inspection
		if err := json.Unmarshal([]byte(pod(who, "-o", "json").wantDone(t)), &found); err != nil {
			t.Fatal(err)
		}
		if found.UID != uid || !found.Captured || found.Health != api.Red || len(found.Objects) < 10 {
			t.Errorf("as %s there is %+v", who, found)
		}
	}
	pod("web").wantFailure(t, exitFailed, "more than one", "shop/web", "store/web")
	pod("cart").wantFailure(t, exitFailed, "cart", "redirector pods")
	out := pod("web2").wantDone(t)
	for _, words := range []string{
		"health             red", "nothing of it passes", "map entry pods", "bpftool map lookup pinned " + m.BPFFS, "enrolled  the pod is captured",
		"-> start a node proxy that connects to " + m.ZDSSocket,
	} {
		if !strings.Contains(out, words) {
			t.Errorf("there is no %q in\n%s", words, out)
		}
	}

	list := func(args ...string) (names []string) {
		t.Helper()
		var pods []enroll.Pod
		out := run(t, nil, append([]string{"pods", "--run-dir", m.RunDir, "-o", "yaml"}, args...)...).wantDone(t)
		if err := yaml.UnmarshalStrict([]byte(out), &pods); err != nil {
			t.Fatal(err)
		}
		for i := range pods {
			names = append(names, pods[i].String())
		}
		return names
	}
	for want, args := range map[string][]string{
		"shop/web shop/web2 store/web": {},
		"shop/web store/web":           {"web"},
		"shop/web shop/web2":           {"-n", "shop", "--state", "pending"},
		"store/web":                    {"-n", "store", "web", "web2"},
		"":                             {"--dropping"},
	} {
		if got := strings.Join(list(args...), " "); got != want {
			t.Errorf("pods %q lists %q, want %q", args, got, want)
		}
	}
	if out := run(t, nil, "pods", "--run-dir", m.RunDir, "--state", "enrolled").wantDone(t); !strings.Contains(out, "of 3 enrolled pods none") {
		t.Errorf("where none is asked for, pods says %q", out)
	}
}

func TestExplainSaysItInATable(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	m.agent()
	run(t, nil, m.enrollFlags(pod)...).wantDone(t)
	explains := func(args ...string) result {
		return run(t, nil, append([]string{"explain", "--run-dir", m.RunDir}, args...)...)
	}
	out := explains("--pod", "web", "--to", "198.51.100.7:443").wantDone(t)
	for _, words := range []string{
		"dropped, outbound tcp of pod web: its own address -> 198.51.100.7:443, by app\n", "   1  is the pod in map pods?", "=> 7  everything else",
		"no node proxy listens on port 15001", "\ncounted as outbound_no_listener\n",
	} {
		if !strings.Contains(out, words) {
			t.Errorf("there is no %q in\n%s", words, out)
		}
	}
	var answer explain.Answer
	out = explains("--pod", "uid-web", "--from", pod.V6.String(), "--to", "["+pod.V6.String()+"]:80", "-o", "json").wantDone(t)
	if err := json.Unmarshal([]byte(out), &answer); err != nil || answer.Verdict != explain.ToApp || answer.Direction != "outbound" {
		t.Errorf("of a connection with itself it says %+v, %v", answer, err)
	}
	explains("--pod", "web", "--from", pod.V4.String(), "--to", "[2001:db8::1]:80").wantFailure(t, exitFailed, "families")
	explains("--pod", "cart", "--to", "198.51.100.7:443").wantFailure(t, exitFailed, "cart")
}

// A shell is told the names of the pods that are enrolled.
func TestCompletion(t *testing.T) {
	for shell, word := range map[string]string{"bash": "__start_redirector", "zsh": "#compdef redirector", "fish": "complete -c redirector"} {
		if script := run(t, nil, "completion", shell).wantDone(t); !strings.Contains(script, word) {
			t.Errorf("the script for %s has no %q", shell, word)
		}
	}
	m := newMachine(t)
	m.agent()
	run(t, nil, m.enrollFlags(m.pod("web"))...).wantDone(t)
	run(t, nil, m.enrollFlags(m.pod("cart"))...).wantDone(t)
	for begun, want := range map[string]string{"": "shop/cart\tpending\nshop/web\tpending\n:4\n", "shop/w": "shop/web\tpending\n:4\n"} {
		r := run(t, map[string]string{"RUN_DIR": m.RunDir}, "__complete", "pod", begun)
		if r.code != exitDone || r.stdout != want {
			t.Errorf("%q is completed with status %d, %q, want %q", begun, r.code, r.stdout, want)
		}
	}
}

// Colours are for terminals, and for those who have not said that they want none.
func TestColoursAreForTerminals(t *testing.T) {
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("there are no pseudo-terminals here: %v", err)
	}
	defer terminal.Close()
	number, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(terminal.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil || number < 0 {
		t.Fatal(number, err)
	}
	file, err := os.Create(t.TempDir() + "/out")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for name, c := range map[string]struct {
		env  Env
		vars map[string]string
		want bool
	}{
		"a terminal":                {Env{Stdout: terminal}, nil, true},
		"with NO_COLOR":             {Env{Stdout: terminal}, map[string]string{"NO_COLOR": "1"}, false},
		"one that knows none":       {Env{Stdout: terminal}, map[string]string{"TERM": "dumb"}, false},
		"a file":                    {Env{Stdout: file}, nil, false},
		"something that is no file": {Env{Stdout: &strings.Builder{}}, nil, false},
	} {
		c.env.Getenv = func(name string) string { return c.vars[name] }
		if got := c.env.styleOf().on; got != c.want {
			t.Errorf("%s: colours %t, want %t", name, got, c.want)
		}
	}
}

// Without an agent, commands say what keeps one from running here, and else what goes on without.
func TestCommandsSayWhyThereIsNoAgent(t *testing.T) {
	var lacks *loader.FeatureError
	missing := errors.As(loader.CheckFeatures(), &lacks)
	for _, args := range [][]string{{"status"}, {"pod", "web"}, {"verify"}} {
		r := run(t, nil, append(args, "--run-dir", t.TempDir())...)
		if missing {
			r.wantFailure(t, exitFailed, "no agent answers", "none can run here", lacks.Feature.Name, lacks.Feature.Since)
			continue
		}
		r.wantFailure(t, exitFailed, "no agent answers", "the dataplane works on without", "nothing is repaired")
	}
}

// readReport returns the files of a report by name.
func readReport(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	plain, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for archive := tar.NewReader(plain); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(header.Name, "redirector-bugreport/")] = string(content)
	}
}

func TestABugreportHasAllThatCanBeHad(t *testing.T) {
	m := newMachine(t)
	file := filepath.Join(t.TempDir(), "report.tar.gz")
	args := []string{"bugreport", "--run-dir", m.RunDir, "--bpffs", m.BPFFS, "--file", file}
	// Without an agent there is a report, too, which says what is missing.
	run(t, nil, args...).wantDone(t)
	files := readReport(t, file)
	if files["version.json"] == "" || !strings.Contains(files["errors.txt"], "status.json: no agent answers") {
		t.Errorf("without an agent there is %v", files)
	}

	m.agent()
	run(t, nil, m.enrollFlags(m.pod("web"))...).wantDone(t)
	if out := run(t, nil, args...).wantDone(t); out != file+"\n" {
		t.Errorf("it says %q", out)
	}
	files = readReport(t, file)
	for name, words := range map[string]string{"status.json": `"no_proxy"`, "pods.json": `"uid-web"`, "pods/uid-web.json": `"objects"`} {
		if !json.Valid([]byte(files[name])) || !strings.Contains(files[name], words) {
			t.Errorf("%s has no %s: %q", name, words, files[name])
		}
	}
	if _, err := exec.LookPath("bpftool"); err == nil {
		if !strings.Contains(files["bpftool/map-pods.txt"], "netns_cookie") || files["errors.txt"] != "" {
			t.Errorf("of map pods there is %q, and errors are %q", files["bpftool/map-pods.txt"], files["errors.txt"])
		}
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v", info, err)
	}
	run(t, nil, "bugreport", "--run-dir", m.RunDir, "--file", "/proc/nowhere/x").wantFailure(t, exitFailed, "/proc/nowhere", "--file")

	piped := run(t, nil, "bugreport", "--run-dir", m.RunDir, "--bpffs", m.BPFFS, "--stdout").wantDone(t)
	if err := os.WriteFile(file, []byte(piped), 0o600); err != nil {
		t.Fatal(err)
	}
	if again := readReport(t, file); len(again) != len(files) {
		t.Errorf("on standard output there are %d files, and in a file %d", len(again), len(files))
	}
}
