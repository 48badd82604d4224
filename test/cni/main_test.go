// SPDX-License-Identifier: Apache-2.0

// Package cni tests the CNI plugin as runtimes use it: the real binary, installed by itself, called by the CNI's own library in a
// chain with Debian's plugins, with an agent that captures pods in this machine's kernel.
package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/redirector-dataplane/redirector/pkg/cni"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// debianPlugins is where Debian's containernetworking-plugins are.
const debianPlugins = "/usr/lib/cni"

// patience is how long what should happen may take before it counts as not happening.
const patience = 20 * time.Second

// roleVariable makes a process of the test binary a node proxy.
const roleVariable = "TEST_CNI_ROLE"

// binary is the redirector that was built for the tests.
var binary string

func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) == "nodeproxy" {
		os.Exit(nodeproxy.Main(os.Args[1:]))
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "redirector-cni-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary = filepath.Join(dir, "redirector")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", binary, "github.com/redirector-dataplane/redirector/cmd/redirector")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build redirector: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// node is a bed with an agent, a node proxy and a runtime on it.
type node struct {
	*bed.Bed
	*agent.Agent
	t *testing.T

	netDir, binDir string
	runtime        *libcni.CNIConfig
	proxyLog       string
	stopSocket     func()

	mu    sync.Mutex
	asked int
	slow  time.Duration
}

// Pod and Close are the bed's, and it closes itself.
func (n *node) Pod(name string, opts bed.PodOptions) (*bed.NS, error) { return n.Bed.Pod(name, opts) }
func (n *node) Close()                                                {}

// newNode makes a node whose CNI configuration is of a bridge or ptp plugin with portmap and bandwidth, and installs the plugin.
func newNode(t *testing.T, primary string) *node {
	t.Helper()
	for _, plugin := range []string{primary, "host-local", "portmap", "bandwidth"} {
		if _, err := os.Stat(filepath.Join(debianPlugins, plugin)); err != nil {
			t.Fatalf("%v: run hack/install-deps.sh test", err)
		}
	}
	b := bed.ForTest(t, bed.Options{})
	if err := b.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	n := &node{Bed: b, Agent: agent.Start(t, b, nil), t: t, netDir: filepath.Join(b.Dir, "net.d"), binDir: filepath.Join(b.Dir, "bin")}
	for _, dir := range []string{n.netDir, n.binDir} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(n.netDir, confName), []byte(n.conf(primary)), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := n.redirector("install"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n.runtime = libcni.NewCNIConfigWithCacheDir([]string{n.binDir, debianPlugins}, filepath.Join(b.Dir, "cache"), nil)
	n.serveSocket()
	return n
}

const confName = "10-net.conflist"

// conf is what a network plugin's agent writes.
func (n *node) conf(primary string) string {
	own := `"type": "ptp"`
	if primary == "bridge" {
		own = `"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true`
	}
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "k8s",
  "plugins": [
    {
      %s,
      "ipam": {
        "type": "host-local",
        "dataDir": %q,
        "ranges": [[{"subnet": "10.89.0.0/16"}], [{"subnet": "fd00:89::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true},
    {"type": "bandwidth", "ingressRate": 1000000000, "ingressBurst": 100000000, "egressRate": 1000000000, "egressBurst": 100000000}
  ]
}
`, own, filepath.Join(n.Dir, "ipam"))
}

// redirector runs the binary with the node's directories.
func (n *node) redirector(command string, more ...string) (string, error) {
	args := []string{command, "--mounted-cni-net-dir", n.netDir, "--cni-bin-dir", n.binDir, "--cni-cache-dir", filepath.Join(n.Dir, "cache")}
	if command == "install" {
		args = append(args, "--run-dir", n.RunDir, "--cni-timeout", "3s", "--exclude-namespaces", "kube-system", "--pod-namespace", "istio-system",
			"--pod-name", "redirector-node-abcde")
	}
	out, err := exec.CommandContext(n.t.Context(), binary, append(args, more...)...).CombinedOutput()
	return string(out), err
}

// list is the configuration as a runtime loads it.
func (n *node) list() *libcni.NetworkConfigList {
	n.t.Helper()
	list, err := libcni.NetworkConfFromFile(filepath.Join(n.netDir, confName))
	if err != nil {
		n.t.Fatal(err)
	}
	return list
}

// serveSocket has the agent answer the plugin, until stopSocket or the end of the test.
func (n *node) serveSocket() {
	n.t.Helper()
	l, err := cni.ListenSocket(filepath.Join(n.RunDir, cni.SocketName))
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- cni.NewServer(n, slog.New(slog.NewTextHandler(n.t.Output(), nil))).Serve(ctx, l) }()
	n.stopSocket = sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			n.t.Error(err)
		}
	})
	n.t.Cleanup(n.stopSocket)
}

// AddPod captures pods of all namespaces but "plain".
func (n *node) AddPod(ctx context.Context, req cni.AddRequest) error {
	n.mu.Lock()
	n.asked++
	slow := n.slow
	n.mu.Unlock()
	if req.PodNamespace == "plain" {
		return &cni.NotEligibleError{Reason: "its namespace is not in the mesh"}
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(slow):
	}
	return n.Enroll(ctx, enroll.Spec{
		UID: req.PodUID, Namespace: req.PodNamespace, Name: req.PodName, ServiceAccount: "default", NetNS: req.Netns, IPs: req.IPs,
	}, true)
}

func (n *node) beSlow(d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.slow = d
}

// startProxy starts a node proxy and returns when it is ready.
func (n *node) startProxy() {
	n.t.Helper()
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	n.proxyLog = filepath.Join(n.Dir, "proxy.json")
	p, err := n.Start(n.Node, true, "proxy", []string{self, "--zds-socket", n.ZDSSocket, "--log", n.proxyLog}, []string{roleVariable + "=nodeproxy"})
	if err != nil {
		n.t.Fatal(err)
	}
	eventually(n.t, "the node proxy is ready", func() bool {
		for _, c := range n.Proxies.Status() {
			if c.State == zds.StateReady && int(c.PID) == p.Pid {
				return true
			}
		}
		return false
	})
}

// pod is a pod as a runtime knows it.
type pod struct {
	*bed.NS
	rt *libcni.RuntimeConf
}

// sandbox makes what a runtime has before it calls CNI plugins.
func (n *node) sandbox(namespace, name string) *pod {
	n.t.Helper()
	ns, err := n.Bare(name)
	if err != nil {
		n.t.Fatal(err)
	}
	return &pod{ns, &libcni.RuntimeConf{
		ContainerID: "container-" + name,
		NetNS:       ns.Path,
		IfName:      "eth0",
		Args: [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", namespace}, {"K8S_POD_NAME", name}, {"K8S_POD_INFRA_CONTAINER_ID", "container-" + name},
			{"K8S_POD_UID", "uid-" + name},
		},
	}}
}

// inNode has what a runtime does run in the node's network namespace.
func (n *node) inNode(do func(ctx context.Context) error) error {
	return n.Node.Do(func() error { return do(n.t.Context()) })
}

// add is ADD of the whole list. The pod then knows its addresses.
func (n *node) add(p *pod) error {
	return n.inNode(func(ctx context.Context) error {
		result, err := n.runtime.AddNetworkList(ctx, n.list(), p.rt)
		if err != nil {
			return err
		}
		current, err := types100.NewResultFromResult(result)
		if err != nil {
			return err
		}
		for _, ip := range current.IPs {
			if addr, ok := netip.AddrFromSlice(ip.Address.IP); ok && addr.Unmap().Is4() {
				p.V4 = addr.Unmap()
			} else if ok {
				p.V6 = addr
			}
		}
		return nil
	})
}

func (n *node) mustAdd(p *pod) {
	n.t.Helper()
	if err := n.add(p); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) del(p *pod) error {
	return n.inNode(func(ctx context.Context) error { return n.runtime.DelNetworkList(ctx, n.list(), p.rt) })
}

func (n *node) check(p *pod) error {
	return n.inNode(func(ctx context.Context) error { return n.runtime.CheckNetworkList(ctx, n.list(), p.rt) })
}

// enrolled says whether the kernel has the pod.
func (n *node) enrolled(p *pod) bool {
	n.t.Helper()
	pods, err := n.Pods()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, e := range pods {
		if e.UID == "uid-"+p.Name {
			return true
		}
	}
	return false
}

// proxied returns the client's addresses of the connections that the proxy has served.
func (n *node) proxied() map[netip.AddrPort]nodeproxy.Record {
	n.t.Helper()
	data, err := os.ReadFile(n.proxyLog)
	if err != nil {
		n.t.Fatal(err)
	}
	all := map[netip.AddrPort]nodeproxy.Record{}
	for line := range strings.Lines(string(data)) {
		if !strings.HasSuffix(line, "\n") {
			break // it is being written
		}
		var c nodeproxy.Record
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			n.t.Fatalf("the proxy's log has %q: %v", line, err)
		}
		all[c.Source] = c
	}
	return all
}

// wantCode checks that an error is the plugin's of that code, and says all the words.
func wantCode(t *testing.T, err error, code uint, words ...string) {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("error %v, want one of code %d", err, code)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
}

func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so after %v: %s", patience, what)
		}
	}
}

// firstSYN connects at once, and returns the client's own address and what the app said of it.
func firstSYN(ctx context.Context, p *pod, remote netip.AddrPort) (local netip.AddrPort, id bed.Identity, err error) {
	c, err := p.Dial(ctx, bed.DialSpec{Remote: remote, Timeout: patience})
	if err != nil {
		return local, id, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return local, id, err
	}
	if local, err = bed.Sockname(c); err != nil {
		return local, id, err
	}
	id, err = bed.ReadIdentity(c)
	return local, id, err
}
