// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
)

func TestWhatPodACommandIsAbout(t *testing.T) {
	for _, c := range []struct{ line, pod, run string }{
		{"status", "", "status"},
		{"status -o json", "", "status -o json"},
		{"pods -o wide", "", "pods -o wide"},
		{"pod web", "shop/web", "pod shop/web"},
		{"pod other/web -o json", "other/web", "pod other/web -o json"},
		{"pod -o json web", "shop/web", "pod -o json shop/web"},
		{"pod --output=json web", "shop/web", "pod --output=json shop/web"},
		{"verify", "", "verify"},
		{"verify -o json", "", "verify -o json"},
		{"verify web", "shop/web", "verify shop/web"},
		{"monitor --pod web", "shop/web", "monitor --pod shop/web"},
		{"monitor --pod=other/web --port 80", "other/web", "monitor --pod=other/web --port 80"},
		{"explain --from 10.0.0.1 --pod web --to 10.0.0.2:80", "shop/web", "explain --from 10.0.0.1 --pod shop/web --to 10.0.0.2:80"},
		{"explain --pod", "", "explain --pod"},
	} {
		args := strings.Fields(c.line)
		run, pod := aboutPod(args, "shop")
		if pod != c.pod || strings.Join(run, " ") != c.run {
			t.Errorf("%q is about %q, and runs %q", c.line, pod, run)
		}
		if diff := cmp.Diff(strings.Fields(c.line), args); diff != "" {
			t.Errorf("%q is changed itself:\n%s", c.line, diff)
		}
	}
}

func TestWhatDoesNotEnd(t *testing.T) {
	for line, want := range map[string]bool{"monitor": true, "pods -w": true, "pods --watch": true, "pods": false, "status": false} {
		if got := endless(strings.Fields(line)); got != want {
			t.Errorf("%q is endless: %v", line, got)
		}
	}
}

// The plugin's lists are of commands and flags that redirector has.
func TestTheCommandsAreRedirectors(t *testing.T) {
	known := map[string]bool{}
	for _, cmd := range app.Commands().Commands() {
		known[cmd.Name()] = true
		for _, name := range named {
			if cmd.Name() != name {
				continue
			}
			if !strings.Contains(cmd.Use, "NAME") {
				t.Errorf("redirector %s takes no name: %s", name, cmd.Use)
			}
			for _, flag := range withValues {
				if strings.HasPrefix(flag, "--") && cmd.Flags().Lookup(strings.TrimPrefix(flag, "--")) == nil {
					t.Errorf("redirector %s has no flag %s", name, flag)
				}
			}
		}
	}
	for _, name := range commands {
		if !known[name] {
			t.Errorf("redirector has no command %s", name)
		}
	}
}

// What cannot be done is said before any cluster is asked.
func TestBadCallsAreRefused(t *testing.T) {
	nowhere := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(nowhere, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]struct {
		text   string
		status int
	}{
		"cleanup":                             {`"cleanup" is none of the commands that are run in agents: status, `, 2},
		"--nod=x status":                      {"unknown flag: --nod", 2},
		"--kubeconfig=" + nowhere + " status": {"read the kubeconfig: ", 1},
	} {
		cmd := newCommand()
		cmd.SetArgs(strings.Fields(line))
		err := cmd.ExecuteContext(t.Context())
		if err == nil || !strings.Contains(err.Error(), want.text) {
			t.Errorf("%s: %v", line, err)
		}
		var usage *usageError
		if errors.As(err, &usage) != (want.status == 2) {
			t.Errorf("%s: %T", line, err)
		}
	}
}
