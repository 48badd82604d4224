// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/pkg/cni"
)

const primaryList = `{"cniVersion":"1.0.0", "name":"k8s", "plugins":[ {"type":"ptp"} ]}`

// cniDirs makes the directories of a node's CNI, with a primary plugin's list.
func cniDirs(t *testing.T) (netDir, binDir string) {
	t.Helper()
	dir := t.TempDir()
	netDir, binDir = filepath.Join(dir, "net.d"), filepath.Join(dir, "bin")
	for _, d := range []string{netDir, binDir} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(netDir, "10-net.conflist"), []byte(primaryList), 0o644); err != nil {
		t.Fatal(err)
	}
	return netDir, binDir
}

func TestInstallAndUninstall(t *testing.T) {
	netDir, binDir := cniDirs(t)
	env := map[string]string{
		"MOUNTED_CNI_NET_DIR": netDir, "CNI_NET_DIR": "/etc/cni/net.d", "CNI_BIN_DIR": binDir, "CNI_CACHE_DIR": t.TempDir(),
		"EXCLUDE_NAMESPACES": " kube-system,, local ", "POD_NAMESPACE": "istio-system", "POD_NAME": "redirector-node-x7k2p", "RUN_DIR": "/run/other",
	}
	list, binary := filepath.Join(netDir, "10-net.conflist"), filepath.Join(binDir, "redirector")
	if out := run(t, env, "install").wantDone(t); out != "written "+binary+"\nwritten "+list+"\n" {
		t.Errorf("install says %q", out)
	}
	if out := run(t, env, "install").wantDone(t); !strings.Contains(out, "installed already") {
		t.Errorf("install says %q the second time", out)
	}
	var conf struct{ Plugins []cni.Entry }
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &conf); err != nil || len(conf.Plugins) != 2 {
		t.Fatalf("%s: %v", text, err)
	}
	entry, want := conf.Plugins[1], cni.Entry{
		Type: "redirector", RunDir: "/run/other", AgentNamespace: "istio-system", AgentPodPrefix: "redirector-node-",
		ExcludeNamespaces: []string{"kube-system", "local"},
	}
	if d := cmp.Diff(want, entry); d != "" {
		t.Errorf("the entry (-want +got):\n%s", d)
	}

	// A flag wins over its twin.
	run(t, env, "install", "--exclude-namespaces", "", "--cni-timeout", "5s", "--istio-owned-cni-config").wantDone(t)
	if text, err := os.ReadFile(list); err != nil || string(text) != primaryList {
		t.Errorf("the primary's list is %s, %v", text, err)
	}
	if text, err := os.ReadFile(filepath.Join(netDir, cni.DefaultOwnedName)); err != nil || !strings.Contains(string(text), `"timeout":"5s"`) ||
		strings.Contains(string(text), "kube-system") {
		t.Errorf("the list of its own is %s, %v", text, err)
	}

	out := run(t, env, "uninstall").wantDone(t)
	if out != "removed "+filepath.Join(netDir, cni.DefaultOwnedName)+"\nremoved "+binary+"\n" {
		t.Errorf("uninstall says %q", out)
	}
	if out := run(t, env, "uninstall", "--keep-binary", "never").wantDone(t); !strings.Contains(out, "no configuration") {
		t.Errorf("uninstall says %q the second time", out)
	}
	if left := tree(t, binDir); strings.Count(left, "\n") != 1 {
		t.Errorf("it leaves %s", left)
	}
}

func TestInstallRefusals(t *testing.T) {
	netDir, binDir := cniDirs(t)
	empty := t.TempDir()
	dirs := []string{"--mounted-cni-net-dir", netDir, "--cni-bin-dir", binDir}
	for name, c := range map[string]struct {
		args  []string
		env   map[string]string
		code  int
		words []string
	}{
		"no configuration":   {args: []string{"install", "--mounted-cni-net-dir", empty}, code: exitFailed, words: []string{empty, "install the cluster's network plugin"}},
		"no directory":       {args: []string{"install", "--mounted-cni-net-dir", empty + "/x"}, code: exitFailed, words: []string{empty + "/x", "no such file", "name the directory"}},
		"no plugins":         {args: []string{"install", "--cni-bin-dir", empty + "/x"}, code: exitFailed, words: []string{empty + "/x", "no such file", "name the directory"}},
		"a missing name":     {args: []string{"install", "--cni-conf-name", "x.conflist"}, code: exitFailed, words: []string{netDir + "/x.conflist", "not there"}},
		"a bad name":         {args: []string{"install", "--cni-conf-name", "../x.conflist"}, code: exitUsage, words: []string{`"../x.conflist"`, "file name"}},
		"a bad owned name":   {args: []string{"install"}, env: map[string]string{"ISTIO_OWNED_CNI_CONFIG": "true", "ISTIO_OWNED_CNI_CONFIG_FILENAME": "x.conf"}, code: exitUsage, words: []string{`"x.conf"`, ".conflist"}},
		"a late owned name":  {args: []string{"install", "--istio-owned-cni-config", "--istio-owned-cni-config-filename", "99.conflist"}, code: exitFailed, words: []string{"99.conflist", "before", "10-net.conflist"}},
		"owned, not chained": {args: []string{"install", "--istio-owned-cni-config"}, env: map[string]string{"CHAINED_CNI_PLUGIN": "false"}, code: exitUsage, words: []string{"chained"}},
		"a bad timeout":      {args: []string{"install", "--cni-timeout", "0s"}, code: exitUsage, words: []string{"--cni-timeout"}},
		"a bad boolean":      {args: []string{"install"}, env: map[string]string{"CHAINED_CNI_PLUGIN": "maybe"}, code: exitUsage, words: []string{"CHAINED_CNI_PLUGIN", "maybe"}},
		"an unknown to keep": {args: []string{"uninstall", "--keep-binary", "always"}, code: exitUsage, words: []string{"--keep-binary", "auto"}},
	} {
		t.Run(name, func(t *testing.T) {
			// What a case has comes after the directories, and wins.
			args := append([]string{c.args[0]}, append(append([]string{}, dirs...), c.args[1:]...)...)
			run(t, c.env, args...).wantFailure(t, c.code, c.words...)
			if text, err := os.ReadFile(filepath.Join(netDir, "10-net.conflist")); err != nil || string(text) != primaryList {
				t.Errorf("the primary's list is %s, %v", text, err)
			}
		})
	}
}

// The agent's own names, in whatever way its pods are called.
func TestPodPrefix(t *testing.T) {
	for pod, want := range map[string]string{"redirector-node-x7k2p": "redirector-node-", "agent": "", "": ""} {
		if got := podPrefix(pod); got != want {
			t.Errorf("%q has the prefix %q, want %q", pod, got, want)
		}
	}
}

func TestCleanupRemovesWhatThePluginUsed(t *testing.T) {
	m := newMachine(t)
	if err := (cni.NodeState{EnrolledNamespaces: []string{"shop"}}).Write(m.RunDir); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(m.RunDir, "plugin.log"))
	l, err := cni.ListenSocket(filepath.Join(m.RunDir, cni.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	m.command("cleanup", "--run-dir", m.RunDir, "--bpffs", m.BPFFS, "--zds-socket", m.ZDSSocket).wantFailure(t, exitFailed, "cni.sock", "in use")
	l.Close()
	m.command("cleanup", "--run-dir", m.RunDir, "--bpffs", m.BPFFS, "--zds-socket", m.ZDSSocket).wantDone(t)
	if left := tree(t, m.RunDir); left != "" {
		t.Errorf("it leaves %s", left)
	}
}

func TestInstallWatches(t *testing.T) {
	netDir, binDir := cniDirs(t)
	list := filepath.Join(netDir, "10-net.conflist")
	if err := os.Remove(list); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	code := make(chan int, 1)
	go func() {
		code <- Main(ctx, []string{"install", "--watch", "--mounted-cni-net-dir", netDir, "--cni-bin-dir", binDir},
			Env{Stdout: io.Discard, Stderr: t.Output(), Getenv: func(string) string { return "" }})
	}()
	installed := func() bool {
		text, err := os.ReadFile(list)
		return err == nil && strings.Contains(string(text), cni.PluginType)
	}
	for range 2 { // it waits for the first, and notices the second
		if err := os.WriteFile(list, []byte(primaryList), 0o644); err != nil {
			t.Fatal(err)
		}
		(&machine{t: t}).eventually("the plugin is in the list", installed)
	}
	cancel()
	if code := <-code; code != exitDone {
		t.Errorf("exit status %d", code)
	}
	if !installed() {
		t.Error("the plugin is gone with the watcher")
	}
}
