// SPDX-License-Identifier: Apache-2.0

// Package podwatch tests the agent in Kubernetes: the real agent as a process on a bed's node, with the rights that it has in a
// cluster, against a real API server; pods are real network namespaces with real processes; and what is wanted of them is compared
// with what the kernel has.
package podwatch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/kube"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// roleVar makes the test binary play a part in a test instead of running tests.
const roleVar = "REDIRECTOR_PODWATCH_ROLE"

// patience is how long what should happen may take before it counts as not happening.
const patience = 30 * time.Second

// The label and the annotations that the tests set.
const (
	mode        = "istio.io/dataplane-mode"
	redirection = "ambient.istio.io/redirection"
	bypass      = "ambient.istio.io/bypass-inbound-capture"
	dnsCapture  = "ambient.istio.io/dns-capture"
	sidecar     = "sidecar.istio.io/status"
)

func TestMain(m *testing.M) {
	switch os.Getenv(roleVar) {
	case "redirector":
		os.Exit(app.Main(context.Background(), os.Args[1:], app.Env{
			Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Version: "v0.0.0-test",
		}))
	case "nodeproxy":
		os.Exit(nodeproxy.Main(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// node is a bed with a control plane, a node proxy and an agent on it.
type node struct {
	*kube.Cluster
	b     *bed.Bed
	t     testing.TB
	env   []string
	agent *bed.Proc
	proxy *bed.Proc
	pods  *maps.Maps
	log   string
	app   *bed.App // outside of the node
	count int
	// binary is the agent's; "": this one.
	binary string
	// whileStopping, if not nil, is called when the agent was told to stop.
	whileStopping func()
}

// newNode makes a node without an agent. env is added to the agent's environment.
func newNode(t testing.TB, env ...string) *node {
	t.Helper()
	b := bed.ForTest(t, bed.Options{})
	if err := b.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	n := &node{b: b, t: t, env: env, log: filepath.Join(b.Dir, "connections")}
	var err error
	if n.app, err = b.Outside.ServeApp(0, bed.AppOptions{}); err != nil {
		t.Fatal(err)
	}
	n.Cluster = kube.Start(t, b)
	n.CreateNamespace("mesh", map[string]string{mode: "ambient"})
	n.startProxy()
	return n
}

// in has a subtest's failures be its own.
func (n *node) in(t testing.TB, fn func(*node)) {
	t.Helper()
	inner := *n
	inner.t = t
	inner.Cluster = n.For(t)
	fn(&inner)
	n.agent, n.proxy, n.count = inner.agent, inner.proxy, inner.count
}

func (n *node) start(role, group string, args, env []string) *bed.Proc {
	n.t.Helper()
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	if role == "redirector" && n.binary != "" {
		self = n.binary
	}
	dir, err := n.b.Group(group)
	if err != nil {
		n.t.Fatal(err)
	}
	p, err := n.b.StartIn(n.b.Node, dir, group, append([]string{self}, args...), append(env, roleVar+"="+role))
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

func (n *node) startProxy() {
	n.t.Helper()
	n.proxy = n.start("nodeproxy", "nodeproxy", []string{"--zds-socket", n.b.ZDSSocket, "--log", n.log}, nil)
}

// launchAgent starts an agent. The flags come after those that all agents here have, and win.
func (n *node) launchAgent(flags ...string) {
	n.t.Helper()
	n.agent = n.start("redirector", "agent", append([]string{
		"agent", "--run-dir", n.b.RunDir, "--bpffs", n.b.BPFFS, "--cgroup", n.b.Cgroup, "--zds-socket", n.b.ZDSSocket,
		"--log-level", "debug", "--kubeconfig", n.Kubeconfig, "--exclude-namespaces", "kube-system", "--install-cni=false",
		"--dns-capture=false", // so that an annotation says otherwise
	}, flags...), append([]string{
		"NODE_NAME=" + kube.NodeName, "POD_NAMESPACE=" + kube.AgentNamespace, "POD_NAME=redirector-node-bed",
	}, n.env...))
}

// startAgent starts an agent and waits until it has started. It may not know anything yet.
func (n *node) startAgent(flags ...string) {
	n.t.Helper()
	n.launchAgent(flags...)
	n.eventually("the agent has started", func() error {
		select {
		case <-n.agent.Done():
			n.t.Fatalf("the agent has ended; it wrote:\n%s", n.agent.Output())
		default:
		}
		if !strings.Contains(n.agent.Output(), "msg=ready") {
			return errors.New("it has not said so")
		}
		return nil
	})
	if n.pods == nil {
		pinned, err := ebpf.LoadPinnedMap(filepath.Join(n.b.BPFFS, "maps", "pods"), &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			n.t.Fatal(err)
		}
		n.t.Cleanup(func() { _ = pinned.Close() })
		n.pods = &maps.Maps{RedirectorMaps: bpf.RedirectorMaps{Pods: pinned}}
	}
}

// stopAgent ends the agent as the system does.
func (n *node) stopAgent() {
	n.t.Helper()
	if err := n.agent.Signal(unix.SIGTERM); err != nil {
		n.t.Fatal(err)
	}
	if n.whileStopping != nil {
		n.whileStopping()
	}
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	if err := n.agent.Wait(ctx); err != nil {
		n.t.Fatalf("after SIGTERM the agent ended with %v; it wrote:\n%s", err, n.agent.Output())
	}
}

// ready is what /readyz says: nil, or why not.
func (n *node) ready() error {
	client := http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return n.b.Node.Dial(ctx, bed.DialSpec{Remote: netip.MustParseAddrPort("127.0.0.1:8000")})
			},
		},
	}
	resp, err := client.Get("http://127.0.0.1:8000/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, bytes.TrimSpace(body))
	}
	return nil
}

// wantStatus waits for status to warn of something in these words.
func (n *node) wantStatus(reason api.Reason, words ...string) {
	n.t.Helper()
	agent := api.NewClient(filepath.Join(n.b.RunDir, "agent.sock"))
	n.eventually(fmt.Sprintf("status is red, and says %q", words), func() error {
		status, err := agent.Status(n.t.Context())
		if err != nil {
			return err
		}
		said := func(w api.Warning) bool {
			text := w.Message + " -> " + w.Remedy
			return w.Reason == reason && !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) })
		}
		if status.Health != api.Red || !slices.ContainsFunc(status.Warnings, said) {
			return fmt.Errorf("it is %s, and says %+v", status.Health, status.Warnings)
		}
		// Who asks about a pod is told of it, too.
		pods, err := agent.Pods(n.t.Context())
		if err != nil || len(pods) == 0 {
			return fmt.Errorf("there are %d pods to ask about, %w", len(pods), err)
		}
		found, err := agent.Inspect(n.t.Context(), pods[0].UID)
		if err != nil || !slices.ContainsFunc(found.Node, said) {
			return fmt.Errorf("of pod %s it says %+v, %w", pods[0].UID, found.Node, err)
		}
		verified, err := agent.Verify(n.t.Context(), pods[0].UID)
		if err != nil || !slices.ContainsFunc(verified.Node, said) {
			return fmt.Errorf("verify of %s says %+v, %w", pods[0].UID, verified.Node, err)
		}
		return nil
	})
}

func (n *node) wantReady() {
	n.t.Helper()
	n.eventually("the agent says that it is ready", n.ready)
}

func (n *node) wantNotReady(words ...string) {
	n.t.Helper()
	n.eventually(fmt.Sprintf("the agent says that it is not ready, and %q", words), func() error {
		err := n.ready()
		if err == nil {
			return errors.New("it says that it is")
		}
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				return err
			}
		}
		return nil
	})
}

func (n *node) eventually(what string, fn func() error) {
	n.t.Helper()
	n.within(patience, what, fn)
}

// within waits until fn returns nil, for so long.
func (n *node) within(limit time.Duration, what string, fn func() error) {
	n.t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		err := fn()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("not so after %s: %s: %v", limit, what, err)
		}
	}
}

// kernel returns the entries of the kernel's map of pods, by netns cookie.
func (n *node) kernel() map[uint64]maps.Pod {
	n.t.Helper()
	all, err := n.pods.Pods()
	if err != nil {
		n.t.Fatal(err)
	}
	return all
}

// captured returns nil if the kernel captures the pod, in its own namespace and no other.
func (n *node) captured(p *kube.Pod) error {
	found := false
	for cookie, entry := range n.kernel() {
		switch {
		case cookie == p.NS.Cookie && entry.UID == p.UID() && entry.NetNSInode == p.NS.Inode:
			found = true
		case cookie == p.NS.Cookie:
			return fmt.Errorf("the namespace is captured as UID %q, inode %d", entry.UID, entry.NetNSInode)
		case entry.UID == p.UID():
			return fmt.Errorf("the UID is captured in another namespace, inode %d", entry.NetNSInode)
		}
	}
	if !found {
		return fmt.Errorf("the kernel does not capture UID %s", p.UID())
	}
	return nil
}

// wantIn waits until the pod is captured and says so.
func (n *node) wantIn(p *kube.Pod) {
	n.t.Helper()
	n.eventually("pod "+p.Object.Name+" is captured", func() error { return n.captured(p) })
	n.wantAnnotation(p, "enabled")
}

// wantOut waits until neither the UID nor the namespace of the pod is captured. For one that was never in, call settle before.
func (n *node) wantOut(p *kube.Pod) {
	n.t.Helper()
	n.eventually("pod "+p.Object.Name+" is not captured", func() error {
		for cookie, entry := range n.kernel() {
			if entry.UID == p.UID() || p.NS != nil && p.NS != n.b.Node && cookie == p.NS.Cookie {
				return fmt.Errorf("the kernel has UID %s, inode %d", entry.UID, entry.NetNSInode)
			}
		}
		return nil
	})
	n.wantAnnotation(p, "")
}

func (n *node) wantAnnotation(p *kube.Pod, want string) {
	n.t.Helper()
	n.eventually(fmt.Sprintf("pod %s has annotation %q", p.Object.Name, want), func() error {
		if got := p.Annotation(redirection); got != want {
			return fmt.Errorf("it has %q", got)
		}
		return nil
	})
}

// settle returns when what was told to the API server before must have had its effect: a pod made now is captured. The watch of
// namespaces is another than that of pods, and there are several workers, so it waits a little more.
func (n *node) settle() {
	n.t.Helper()
	p := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: n.name("settle")})
	n.eventually("a new pod is captured", func() error { return n.captured(p) })
	time.Sleep(300 * time.Millisecond)
	p.Delete()
	p.Stop()
}

// name makes a name unique.
func (n *node) name(base string) string {
	n.count++
	return fmt.Sprintf("%s-%d", base, n.count)
}

// wantConnection connects from the pod to outside, and checks whether it went through the node proxy.
func (n *node) wantConnection(p *kube.Pod, captured bool) {
	n.t.Helper()
	for _, to := range []netip.Addr{n.b.Outside.V4, n.b.Outside.V6} {
		if to.Is4() && !p.NS.V4.IsValid() || to.Is6() && !p.NS.V6.IsValid() {
			continue
		}
		source := n.connect(p, netip.AddrPortFrom(to, n.app.Port))
		if !source.IsValid() {
			continue
		}
		// The proxy writes its line before it carries anything.
		if got := n.proxied(p, source); got != captured {
			n.t.Errorf("the connection from %s (pod %s) to %s: through the proxy %t, want %t", source, p.Object.Name, to, got, captured)
		}
	}
}

// connect connects to the app outside, hears what it says, and returns the source.
func (n *node) connect(p *kube.Pod, to netip.AddrPort) netip.AddrPort {
	n.t.Helper()
	conn, err := p.NS.Dial(n.t.Context(), bed.DialSpec{Remote: to})
	if err != nil {
		n.t.Error(err)
		return netip.AddrPort{}
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		n.t.Fatal(err)
	}
	if _, err := bed.ReadIdentity(conn); err != nil {
		n.t.Errorf("pod %s to %s: %v", p.Object.Name, to, err)
		return netip.AddrPort{}
	}
	source, err := bed.Sockname(conn)
	if err != nil {
		n.t.Fatal(err)
	}
	return source
}

// proxied says whether the node proxy has carried a connection of the pod from the source.
func (n *node) proxied(p *kube.Pod, source netip.AddrPort) bool {
	n.t.Helper()
	data, err := os.ReadFile(n.log)
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		var r nodeproxy.Record
		if err := json.Unmarshal(line, &r); err != nil {
			n.t.Fatalf("the proxy's log has the line %q: %v", line, err)
		}
		if r.UID == p.UID() && r.Source == source && r.Direction == nodeproxy.Outbound {
			return true
		}
	}
	return false
}

// cniAdd tells the agent of a pod that is about to start, as the CNI plugin does, and returns its answer.
func (n *node) cniAdd(p *kube.Pod) error {
	type ip struct{ Address net.IPNet }
	body := struct {
		Netns, PodName, PodNamespace string
		IPs                          []ip
		Timeout                      time.Duration
	}{Netns: p.NS.Path, PodName: p.Object.Name, PodNamespace: p.Object.Namespace, Timeout: patience}
	for _, addr := range p.IPs() {
		body.IPs = append(body.IPs, ip{net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}})
	}
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	client := http.Client{
		Timeout: patience + time.Second,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, "unix", filepath.Join(n.b.RunDir, "cni.sock"))
			},
		},
	}
	resp, err := client.Post("http://unix/cmdadd", "application/json", bytes.NewReader(data))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the agent answers %s: %s", resp.Status, answer)
	}
	return nil
}
