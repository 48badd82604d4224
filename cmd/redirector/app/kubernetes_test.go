// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redirector-dataplane/redirector/pkg/loader"
)

// kubeconfig names an API server at an address where there is none.
const kubeconfig = `{"apiVersion":"v1","kind":"Config","current-context":"c",
"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}],
"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{"token":"t"}}]}`

// What is wrong with the options of Kubernetes is said in one line that names the flag, before anything is made.
func TestKubernetesRefusals(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, text string) {
		if err := os.WriteFile(at(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("config", kubeconfig)
	write("rubbish", "no config")
	write("file", "")
	var listen net.ListenConfig
	taken, err := listen.Listen(t.Context(), "tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	good := []string{
		"agent", "--run-dir", at("run"), "--cgroup", at("none"), "--node-name", "node-1", "--kubeconfig", at("config"),
		"--health-addr", ":0", "--install-cni=false",
	}
	for name, c := range map[string]struct {
		args  []string
		env   map[string]string
		code  int
		words []string
	}{
		"no node":                    {args: []string{"--node-name", ""}, code: exitUsage, words: []string{"--node-name", "NODE_NAME", "--standalone"}},
		"a bad node":                 {args: []string{"--node-name", "Node_1"}, code: exitUsage, words: []string{"--node-name", "Node_1"}},
		"a bad pod namespace":        {args: []string{"--pod-namespace", "a.b"}, code: exitUsage, words: []string{"--pod-namespace", "a.b"}},
		"a bad system namespace":     {args: []string{"--system-namespace", "-"}, code: exitUsage, words: []string{"--system-namespace"}},
		"a bad pod name":             {args: []string{"--pod-name", "a b"}, code: exitUsage, words: []string{"--pod-name", "a b"}},
		"a bad DaemonSet":            {args: []string{"--daemonset", "a/b"}, code: exitUsage, words: []string{"--daemonset", "a/b"}},
		"a bad DaemonSet, by env":    {env: map[string]string{"DAEMONSET_NAME": "a/b"}, code: exitUsage, words: []string{"--daemonset", "a/b"}},
		"a bad namespace":            {args: []string{"--exclude-namespaces", "a, b_c"}, code: exitUsage, words: []string{"--exclude-namespaces", "b_c"}},
		"no YAML":                    {args: []string{"--ambient-enablement-selector", "["}, code: exitUsage, words: []string{"--ambient-enablement-selector", "YAML"}},
		"a misspelt selector":        {env: map[string]string{"AMBIENT_ENABLEMENT_SELECTOR": "[{podselectors: {}}]"}, code: exitUsage, words: []string{"--ambient-enablement-selector", "podselectors"}},
		"an empty selector list":     {args: []string{"--ambient-enablement-selector", "[]"}, code: exitUsage, words: []string{"--ambient-enablement-selector", "at least one"}},
		"a /proc that is none":       {args: []string{"--proc", dir}, code: exitUsage, words: []string{"--proc", dir}},
		"a missing /proc":            {args: []string{"--proc", at("missing")}, code: exitUsage, words: []string{"--proc", at("missing")}},
		"a missing kubeconfig":       {args: []string{"--kubeconfig", at("missing")}, code: exitUsage, words: []string{"--kubeconfig", at("missing"), "no such file"}},
		"a kubeconfig that is none":  {args: []string{"--kubeconfig", at("rubbish")}, code: exitUsage, words: []string{"--kubeconfig", at("rubbish")}},
		"a bad plugin timeout":       {args: []string{"--cni-timeout", "0s"}, code: exitUsage, words: []string{"--cni-timeout"}},
		"a health address in use":    {args: []string{"--health-addr", taken.Addr().String()}, code: exitFailed, words: []string{taken.Addr().String(), "in use", "--health-addr"}},
		"a health address of others": {args: []string{"--health-addr", "[2001:db8::1]:80"}, code: exitFailed, words: []string{"[2001:db8::1]:80", "--health-addr"}},
		"no health address at all":   {args: []string{"--health-addr", "x"}, code: exitFailed, words: []string{"--health-addr"}},
		// All is well up to there.
		"a bad cgroup": {code: exitFailed, words: []string{at("none")}},
	} {
		t.Run(name, func(t *testing.T) {
			var lacks *loader.FeatureError
			if err := loader.CheckFeatures(); len(c.args) == 0 && c.env == nil && errors.As(err, &lacks) {
				t.Skip(err) // which the agent says before anything of its cgroup
			}
			run(t, c.env, append(append([]string{}, good...), c.args...)...).wantFailure(t, c.code, c.words...)
			if _, err := os.Stat(at("run")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("it leaves its run-dir: %v", err)
			}
		})
	}

	// Outside of a pod there is no service account to take.
	run(t, map[string]string{"NODE_NAME": "node-1"}, "agent", "--run-dir", at("run"), "--health-addr", ":0").
		wantFailure(t, exitUsage, "service account", "--kubeconfig", "--standalone")
}

func TestHealth(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// Not by TCP: lo may be down.
	socket := filepath.Join(t.TempDir(), "sock")
	l, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("first\nsecond")
	ended := make(chan error, 1)
	go func() {
		ended <- serveHealth(ctx, l, []condition{
			{"one", func() error { return nil }},
			{"two", func() error { return why }},
		}, slog.New(slog.DiscardHandler))
	}()
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	get := func(path string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://agent"+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || body != "one: ok\ntwo: not ready: first; second\n" {
		t.Errorf("%d %q", code, body)
	}
	if code, _ := get("/healthz"); code != http.StatusOK {
		t.Errorf("it lives, and says %d", code)
	}
	why = nil
	if code, body := get("/readyz"); code != http.StatusOK || strings.Contains(body, "not ready") {
		t.Errorf("%d %q", code, body)
	}
	if code, _ := get("/"); code != http.StatusNotFound {
		t.Errorf("what is not there is answered with %d", code)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
