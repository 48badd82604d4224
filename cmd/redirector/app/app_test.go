// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func TestWrongUse(t *testing.T) {
	enroll := []string{"enroll", "--uid", "1", "--name", "shop/web", "--service-account", "web", "--netns", "/run/netns/web"}
	with := func(more ...string) []string { return append(append([]string{}, enroll...), more...) }
	for name, c := range map[string]struct {
		args  []string
		words []string
	}{
		"unknown command":             {[]string{"frobnicate"}, []string{`"frobnicate"`, "see redirector --help"}},
		"misspelled command":          {[]string{"enrol"}, []string{`"enrol"`, "enroll"}},
		"unknown flag":                {[]string{"pods", "--frob"}, []string{"--frob", "see redirector pods --help"}},
		"unknown short flag":          {[]string{"pods", "-x"}, []string{"-x"}},
		"unknown flag of no command":  {[]string{"--frob"}, []string{"--frob", "see redirector --help"}},
		"flag without its value":      {[]string{"pods", "--run-dir"}, []string{"--run-dir"}},
		"empty path":                  {[]string{"pods", "--run-dir="}, []string{"--run-dir", "empty"}},
		"argument":                    {[]string{"status", "web"}, []string{`"web"`}},
		"argument of several lines":   {[]string{"status", "a\nb\x1b[2J"}, []string{`"a\nb\x1b[2J"`}},
		"flag of several lines":       {[]string{"pods", "--a\nb\x1b[2J"}, []string{"--a; b?[2J"}},
		"unknown output":              {[]string{"pods", "-o", "toml"}, []string{"toml", "table", "json", "wide", "yaml"}},
		"unknown output of status":    {[]string{"status", "-o", "xml"}, []string{"xml", "table", "json"}},
		"unknown output of version":   {[]string{"version", "-o", ""}, []string{"table", "json"}},
		"unknown topic":               {[]string{"help", "frobnicate"}, []string{`"frobnicate"`}},
		"agent without standalone":    {[]string{"agent"}, []string{"--standalone"}},
		"agent with a bad level":      {[]string{"agent", "--standalone", "--log-level", "loud"}, []string{"loud", "debug"}},
		"agent with a bad port":       {[]string{"agent", "--standalone", "--metrics-addr", "65536"}, []string{"65536", "port", "--metrics-addr"}},
		"agent with no port":          {[]string{"agent", "--standalone", "--metrics-addr", "here"}, []string{"here", ":15014", "off"}},
		"agent with a bad format":     {[]string{"agent", "--standalone", "--log-format", "xml"}, []string{"xml", "json"}},
		"enroll without flags":        {[]string{"enroll"}, []string{"--uid", "--name", "--service-account", "--netns"}},
		"enroll without a namespace":  {enroll[:len(enroll)-2], []string{"--netns"}},
		"enroll with an empty flag":   {with("--service-account", ""), []string{"--service-account"}},
		"name without namespace":      {with("--name", "web"), []string{`"web"`, "shop/web"}},
		"name with an empty part":     {with("--name", "/web"), []string{"namespace", `""`}},
		"name with two slashes":       {with("--name", "a/b/c"), []string{`"b/c"`}},
		"name in capitals":            {with("--name", "shop/Web"), []string{`"Web"`, "lower-case"}},
		"bad service account":         {with("--service-account", "a b"), []string{`"a b"`}},
		"empty UID":                   {with("--uid", ""), []string{"--uid"}},
		"UID with a slash":            {with("--uid", "a/b"), []string{`"a/b"`}},
		"UID that leads up":           {with("--uid", "../x"), []string{`"../x"`}},
		"long UID":                    {with("--uid", strings.Repeat("x", 64)), []string{"63"}},
		"IP that is none":             {with("--ip", "10.0.0"), []string{`"10.0.0"`}},
		"IP with a prefix length":     {with("--ip", "10.0.0.7/24"), []string{`"10.0.0.7/24"`, "prefix"}},
		"IP with a zone":              {with("--ip", "fe80::1%eth0"), []string{"zone"}},
		"second IP is none":           {with("--ip", "10.0.0.7,x"), []string{`"x"`}},
		"IP that no pod has":          {with("--ip", "127.0.0.1"), []string{"127.0.0.1", "loopback"}},
		"timeout that is none":        {with("--timeout", "soon"), []string{"--timeout", "soon"}},
		"no time to wait":             {with("--timeout", "0s"), []string{"--timeout", "0s"}},
		"too long a wait":             {with("--timeout", "1h"), []string{"--timeout", "5m0s"}},
		"unenroll without flags":      {[]string{"unenroll"}, []string{"--uid"}},
		"unenroll with a bad UID":     {[]string{"unenroll", "--uid", "1", "--uid", "a/b"}, []string{`"a/b"`}},
		"unenroll with an empty UID":  {[]string{"unenroll", "--uid", ""}, []string{`""`}},
		"pods in no state":            {[]string{"pods", "--state", "lost"}, []string{"lost", "enrolled", "pending"}},
		"pods without a pause":        {[]string{"pods", "--watch", "--interval", "1ms"}, []string{"--interval", "1ms"}},
		"no pod":                      {[]string{"pod"}, []string{"name one pod"}},
		"two pods":                    {[]string{"pod", "a", "b"}, []string{"name one pod"}},
		"nothing to explain":          {[]string{"explain", "--pod", "web"}, []string{"--pod", "--to"}},
		"explain without a port":      {[]string{"explain", "--pod", "web", "--to", "10.0.0.1"}, []string{`"10.0.0.1"`, "--to"}},
		"explain port 0":              {[]string{"explain", "--pod", "web", "--to", "10.0.0.1:0"}, []string{"--to", ":443"}},
		"explain from nowhere":        {[]string{"explain", "--pod", "web", "--from", "here", "--to", "10.0.0.1:80"}, []string{`"here"`, "--from"}},
		"explain nobody":              {[]string{"explain", "--pod", "web", "--by", "me", "--to", "10.0.0.1:80"}, []string{"me", "app", "kubelet"}},
		"completion for no shell":     {[]string{"completion"}, []string{"bash", "zsh", "fish"}},
		"completion for another":      {[]string{"completion", "tcsh"}, []string{"bash", "zsh", "fish"}},
		"cleanup with a bad argument": {[]string{"cleanup", "all"}, []string{`"all"`}},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, nil, c.args...).wantFailure(t, exitUsage, append(c.words, "(see redirector ", " --help)")...)
		})
	}
}

func TestWithoutAnAgent(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{
		{"pods"},
		{"status"},
		{"unenroll", "--uid", "1", "--uid", "2"},
		{"enroll", "--uid", "1", "--name", "shop/web", "--service-account", "web", "--netns", "/run/netns/web"},
	} {
		r := run(t, nil, append(args, "--run-dir", dir)...)
		r.wantFailure(t, exitFailed, "no agent answers at "+dir+"/agent.sock", "redirector agent --standalone")
	}
}

func TestHelpExplainsEverything(t *testing.T) {
	env := Env{Getenv: func(string) string { return "" }}
	root := newRoot(&env)
	for _, cmd := range append([]*cobra.Command{root}, root.Commands()...) {
		t.Run(cmd.Name(), func(t *testing.T) {
			args := strings.Fields(strings.TrimPrefix(cmd.CommandPath(), "redirector"))
			out := run(t, nil, append(args, "--help")...).wantDone(t)
			if cmd.Name() == "help" {
				return
			}
			if d := cmp.Diff(out, run(t, nil, append([]string{"help"}, args...)...).wantDone(t)); d != "" {
				t.Errorf("help and --help differ: %s", d)
			}
			for what, text := range map[string]string{"a description": cmd.Long, "examples": cmd.Example, "a summary": cmd.Short} {
				if text == "" || what != "a summary" && !strings.Contains(out, text) {
					t.Errorf("there is no %s", what)
				}
			}
			cmd.Flags().VisitAll(func(f *pflag.Flag) {
				if f.Usage == "" || !strings.Contains(out, "--"+f.Name) {
					t.Errorf("--%s is not explained", f.Name)
				}
			})
			for line := range strings.Lines(out) {
				if strings.HasSuffix(strings.TrimSuffix(line, "\n"), " ") {
					t.Errorf("%q ends with blanks", line)
				}
			}
		})
	}
}

func TestWithoutACommandThereIsHelp(t *testing.T) {
	if out := run(t, nil).wantDone(t); !strings.Contains(out, "Available Commands:") {
		t.Errorf("it says %q", out)
	}
}

func TestVersion(t *testing.T) {
	table := run(t, nil, "version").wantDone(t)
	var got map[string]string
	if err := json.Unmarshal([]byte(run(t, nil, "version", "-o", "json").wantDone(t)), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"version": "v0.0.0-test", "commit": "unknown", "go": runtime.Version(), "kernel": kernelRelease(), "zds": "V1",
	}
	if got["commit"] != "" { // whatever the go command notes for tests
		want["commit"] = got["commit"]
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for name, value := range want {
		if !strings.Contains(table, value) {
			t.Errorf("the table lacks %s %q: %s", name, value, table)
		}
	}
	if out := run(t, nil, "--version").wantDone(t); !strings.Contains(out, "v0.0.0-test") {
		t.Errorf("--version says %q", out)
	}
}

func TestOutputThatCannotBeWrittenIsAFailure(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("there is no /dev/full here")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	var stderr strings.Builder
	code := Main(t.Context(), []string{"version"}, Env{Stdout: full, Stderr: &stderr, Getenv: os.Getenv})
	result{code: code, stderr: stderr.String()}.wantFailure(t, exitFailed, "standard output", "no space")
}

func TestOneLine(t *testing.T) {
	err := errors.Join(errors.New("one"), errors.Join(fmt.Errorf("%s", "two\n\n  three\n"), errors.New("\a")))
	if got, want := oneLine(err), "one; two; three; ?"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
