// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// call is one call of the plugin by a runtime.
type call struct {
	command, container string
	pod                string // NAMESPACE/NAME
	stdin              []byte
	binary             string   // "": the test binary, which is the plugin, too
	env                []string // in place of the usual
	netns              string   // "": one that is not the plugin's own
}

// reply is what came of it.
type reply struct {
	code           int
	stdout, stderr string
}

// run calls the plugin in a process of its own, with nothing in its environment but what the specification has.
func (c call) run(t *testing.T) reply {
	t.Helper()
	if c.binary == "" {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		c.binary = self
	}
	if c.container == "" {
		c.container = "c1"
	}
	if c.netns == "" {
		c.netns = otherNetNS(t)
	}
	if c.env == nil {
		c.env = []string{
			"CNI_COMMAND=" + c.command, "CNI_CONTAINERID=" + c.container, "CNI_IFNAME=eth0", "CNI_NETNS=" + c.netns, "CNI_PATH=/opt/cni/bin",
		}
		if namespace, name, ok := strings.Cut(c.pod, "/"); ok {
			c.env = append(c.env, "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE="+namespace+";K8S_POD_NAME="+name+";K8S_POD_UID=uid-"+name)
		}
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), c.binary)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = c.env, bytes.NewReader(c.stdin), &stdout, &stderr
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return reply{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// otherNetNS makes a network namespace, and returns a path to it that is good until the end of the test.
func otherNetNS(t *testing.T) string {
	t.Helper()
	file := make(chan *os.File)
	go func() {
		// The thread is not given back, and so ends with this goroutine.
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(err)
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			t.Error(err)
		}
		file <- f
	}()
	f := <-file
	if f == nil {
		t.FailNow()
	}
	t.Cleanup(func() { f.Close() })
	return "/proc/" + itoa(os.Getpid()) + "/fd/" + itoa(int(f.Fd()))
}

func confText(t *testing.T, conf pluginConf) []byte {
	t.Helper()
	conf.Type = PluginType
	data, err := json.Marshal(struct {
		Name string `json:"name"`
		pluginConf
	}{"k8s", conf})
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// wantError checks that there is nothing but one error of the CNI on standard output.
func (r reply) wantError(t *testing.T, code uint, words ...string) {
	t.Helper()
	if r.code != 1 {
		t.Errorf("exit status %d, want 1", r.code)
	}
	var e struct {
		Code uint   `json:"code"`
		Msg  string `json:"msg"`
	}
	if err := json.Unmarshal([]byte(r.stdout), &e); err != nil {
		t.Fatalf("standard output has %q: %v", r.stdout, err)
	}
	if e.Code != code {
		t.Errorf("code %d, want %d: %s", e.Code, code, e.Msg)
	}
	for _, word := range words {
		if !strings.Contains(e.Msg, word) {
			t.Errorf("%q does not say %q", e.Msg, word)
		}
	}
	if strings.Contains(e.Msg, "\n") {
		t.Errorf("%q is several lines", e.Msg)
	}
}

const prevResult = `{ "cniVersion":"1.0.0","unknown" : [1.0, {"a":"b"}],
 "interfaces":[{"name":"eth0","sandbox":"/run/netns/x"}],
 "ips":[{"interface":0,"address":"10.1.2.3/24","gateway":"10.1.2.1"},{"interface":0,"address":"fd00::3/64"}], "dns":{} }`

func TestTheResultIsPassedOnUnchanged(t *testing.T) {
	agent := serve(t, nil)
	r := call{command: "ADD", pod: "shop/web", stdin: confText(t, pluginConf{
		Entry: Entry{RunDir: agent.runDir}, CNIVersion: "1.0.0", PrevResult: json.RawMessage(prevResult),
	})}.run(t)
	if r.code != 0 || compact(t, r.stdout) != compact(t, prevResult) || r.stderr != "" {
		t.Errorf("it says %+v, want %s", r, prevResult)
	}
	requests := agent.requests()
	if len(requests) != 1 {
		t.Fatalf("the agent was asked %d times", len(requests))
	}
	req := requests[0]
	if req.PodNamespace != "shop" || req.PodName != "web" || req.PodUID != "uid-web" || !strings.HasPrefix(req.Netns, "/proc/") ||
		len(req.IPs) != 2 || req.IPs[0].String() != "10.1.2.3" || req.IPs[1].String() != "fd00::3" {
		t.Errorf("the agent was asked for %+v", req)
	}

	// A result of another version is converted; no result is an empty one.
	for in, want := range map[string]string{
		`{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.1.2.3/24"}],"dns":{}}`: `{"cniVersion":"1.0.0","ips":[{"address":"10.1.2.3/24"}]}`,
		`null`: `{"cniVersion":"1.0.0"}`,
	} {
		r := call{command: "ADD", pod: "shop/web", stdin: confText(t, pluginConf{
			Entry: Entry{RunDir: agent.runDir}, CNIVersion: "1.0.0", PrevResult: json.RawMessage(in),
		})}.run(t)
		if r.code != 0 || compact(t, r.stdout) != want {
			t.Errorf("%s becomes %+v, want %s", in, r, want)
		}
	}
}

func compact(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Compact(&b, []byte(text)); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return b.String()
}

func TestEachVersion(t *testing.T) {
	for _, version := range []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		prev := `{"cniVersion":"` + version + `","ips":[{"version":"4","address":"10.1.2.3/24"}],"dns":{}}`
		conf := confText(t, pluginConf{CNIVersion: version, PrevResult: json.RawMessage(prev)})
		for _, command := range []string{"ADD", "CHECK", "GC", "STATUS", "DEL"} {
			r := call{command: command, stdin: conf}.run(t)
			switch {
			case command == "ADD":
				if r.code != 0 || r.stdout != prev {
					t.Errorf("%s %s: %+v", version, command, r)
				}
			case command == "CHECK" && version < "0.4.0", (command == "GC" || command == "STATUS") && version < "1.1.0":
				r.wantError(t, 1)
			case r != reply{}:
				t.Errorf("%s %s: %+v", version, command, r)
			}
		}
	}
	var info struct {
		CNIVersion        string
		SupportedVersions []string
	}
	r := call{command: "VERSION"}.run(t)
	if err := json.Unmarshal([]byte(r.stdout), &info); err != nil || r.code != 0 ||
		!slices.Equal(info.SupportedVersions, []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}) {
		t.Errorf("VERSION says %+v, %v", r, err)
	}
}

func TestWhatPluginsAreNotCalledWith(t *testing.T) {
	good := confText(t, pluginConf{CNIVersion: "1.0.0"})
	full := []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_NETNS=/run/netns/none", "CNI_PATH=/opt/cni/bin"}
	for i, variable := range full[1:] {
		name, _, _ := strings.Cut(variable, "=")
		call{stdin: good, env: slices.Delete(slices.Clone(full), i+1, i+2)}.run(t).wantError(t, 4, name)
	}
	call{stdin: good, env: append(slices.Clone(full), "CNI_CONTAINERID=../x")}.run(t).wantError(t, 4)
	call{stdin: good, env: append(slices.Clone(full), "CNI_COMMAND=GUESS")}.run(t).wantError(t, 4, "GUESS")
	call{stdin: good, env: append(slices.Clone(full), "CNI_ARGS=K8S_POD_NAME")}.run(t).wantError(t, 4, "CNI_ARGS")
	call{stdin: good, env: append(slices.Clone(full), "CNI_ARGS=K8S_POD_NAME=web")}.run(t).wantError(t, 4, "K8S_POD_NAMESPACE")

	big := bytes.Repeat([]byte("x"), 1<<20)
	for name, c := range map[string]struct {
		stdin []byte
		code  uint
	}{
		"nothing":             {nil, 6},
		"garbage":             {[]byte("\x00\xff{[garbage"), 6},
		"half":                {good[:len(good)/2], 6},
		"1 MB of garbage":     {big, 6},
		"another type":        {[]byte(`[1]`), 6},
		"no name":             {[]byte(`{"cniVersion":"1.0.0"}`), 7},
		"a version too old":   {[]byte(`{"cniVersion":"0.2.0","name":"x"}`), 1},
		"a version too new":   {[]byte(`{"cniVersion":"9.0.0","name":"x"}`), 1},
		"a bad timeout":       {[]byte(`{"cniVersion":"1.0.0","name":"x","timeout":"soon"}`), 7},
		"a negative timeout":  {[]byte(`{"cniVersion":"1.0.0","name":"x","timeout":"-1s"}`), 7},
		"a bad result":        {[]byte(`{"cniVersion":"1.0.0","name":"x","prevResult":{"ips":3}}`), 7},
		"a result of no kind": {[]byte(`{"cniVersion":"1.0.0","name":"x","prevResult":"x"}`), 7},
	} {
		t.Run(name, func(t *testing.T) { call{command: "ADD", stdin: c.stdin}.run(t).wantError(t, c.code) })
	}
	// 1 MB of what is right is right.
	conf := slices.Concat(good[:len(good)-1], []byte(`,"more":"`), big, []byte(`"}`))
	if r := (call{command: "ADD", stdin: conf}).run(t); r.code != 0 {
		t.Errorf("1 MB of configuration: %+v", r)
	}
	// Its own namespace is never a pod's.
	call{command: "ADD", stdin: good, netns: "/proc/self/ns/net"}.run(t).wantError(t, 8, "/proc/self/ns/net")

	for _, stdin := range [][]byte{nil, good, big, []byte("garbage")} {
		if r := (call{env: []string{"CNI_COMMAND=DEL"}, stdin: stdin}).run(t); r != (reply{}) {
			t.Errorf("DEL: %+v", r)
		}
	}
}

// Without an agent.
func TestNoAgentAnswers(t *testing.T) {
	t.Parallel() // it waits more than it works
	state := NodeState{EnrolledNamespaces: []string{"mesh"}, ExcludedNamespaces: []string{"out"}}
	entry := Entry{Timeout: "300ms", AgentNamespace: "istio-system", AgentPodPrefix: "redirector-node-", ExcludeNamespaces: []string{"kube-system"}}
	const passes = ""
	for name, c := range map[string]struct {
		state string // "": as above
		pod   string
		words string
	}{
		"in the mesh":                 {pod: "mesh/web", words: "is in the mesh"},
		"not in the mesh":             {pod: "other/web", words: passes},
		"excluded by the state":       {pod: "out/web", words: passes},
		"excluded by the conf":        {pod: "kube-system/dns", words: passes},
		"the agent's own":             {pod: "istio-system/redirector-node-abcde", words: passes},
		"like the agent's own":        {pod: "mesh/redirector-node-abcde", words: "is in the mesh"},
		"no state":                    {state: "-", pod: "other/web", words: "not known"},
		"no state, excluded":          {state: "-", pod: "kube-system/dns", words: passes},
		"no state, the agent's own":   {state: "-", pod: "istio-system/redirector-node-abcde", words: passes},
		"an empty state":              {state: " ", pod: "other/web", words: "not known"},
		"a state cut off":             {state: `{"enrolledNamespaces":["me`, pod: "other/web", words: "not known"},
		"a state without namespaces":  {state: `{}`, pod: "other/web", words: "not known"},
		"a state of something else":   {state: `{"enrolledNamespaces":null,"excludedNamespaces":null}`, pod: "other/web", words: "not known"},
		"a state with nobody in it":   {state: `{"enrolledNamespaces":[],"excludedNamespaces":[]}`, pod: "other/web", words: passes},
		"not a pod":                   {state: "-", pod: "", words: passes},
		"a state of a newer version":  {state: `{"enrolledNamespaces":["mesh"],"excludedNamespaces":[],"new":1}`, pod: "other/web", words: passes},
		"no state, the agent's other": {state: "-", pod: "istio-system/ztunnel-abcde", words: "not known"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runDir := t.TempDir()
			switch c.state {
			case "":
				if err := state.Write(runDir); err != nil {
					t.Fatal(err)
				}
			case "-":
			default:
				if err := os.WriteFile(filepath.Join(runDir, stateName), []byte(c.state), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			entry := entry
			entry.RunDir = runDir
			r := call{command: "ADD", pod: c.pod, stdin: confText(t, pluginConf{Entry: entry, CNIVersion: "1.0.0"})}.run(t)
			if c.words != passes {
				r.wantError(t, 11, c.pod, "no redirector agent answers", filepath.Join(runDir, SocketName), c.words)
			} else if r.code != 0 {
				t.Errorf("it does not start: %+v", r)
			}
		})
	}
}

func TestNoRunDirIsNotMade(t *testing.T) {
	runDir := filepath.Join(t.TempDir(), "run")
	r := call{command: "ADD", pod: "shop/web", stdin: confText(t, pluginConf{Entry: Entry{RunDir: runDir, Timeout: "10ms"}, CNIVersion: "1.0.0"})}.run(t)
	r.wantError(t, 11, "no redirector agent answers")
	if r.stderr == "" {
		t.Error("it logs nothing")
	}
	if _, err := os.Stat(runDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the run-dir: %v", err)
	}
}
