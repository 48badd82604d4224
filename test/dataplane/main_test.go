// SPDX-License-Identifier: Apache-2.0

// Package dataplane tests what becomes of real connections: pods as network namespaces, the agent's parts in this process,
// the node proxy as a process of its own.
package dataplane

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
	"github.com/redirector-dataplane/redirector/test/rebuild"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// patience is how long what should happen may take before it counts as not happening. An emulated processor needs more.
var patience = func() time.Duration {
	if os.Getenv("VMTEST_IN_VM") != "" {
		return time.Minute
	}
	return 10 * time.Second
}()

// short is how many there are to be of something, and how many in a short test, as on an emulated processor.
func short(usual, short int) int {
	if testing.Short() {
		return short
	}
	return usual
}

// roleVariable makes a process of the test binary something else.
const roleVariable = "TEST_DATAPLANE_ROLE"

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "nodeproxy":
		os.Exit(nodeproxy.Main(os.Args[1:]))
	case "agent":
		crashAt(os.Getenv(rebuild.CrashVariable))
		os.Exit(app.Main(context.Background(), os.Args[1:], app.Env{
			Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Version: "test",
		}))
	case "client":
		os.Exit(client(os.Args[1]))
	case "prober":
		os.Exit(prober(os.Args[1:]))
	case "asking":
		os.Exit(askingProxy(os.Args[1:]))
	case "evade":
		os.Exit(evade(os.Args[1:]))
	case "sleeper": // a process that is in a namespace, and nothing else
		time.Sleep(time.Hour)
	case untraced:
		fmt.Fprintln(os.Stderr, dropPtrace())
		os.Exit(2)
	default:
		fmt.Fprintf(os.Stderr, "unknown role %q\n", role)
		os.Exit(2)
	}
}

// client connects to an address and says "connected", or why not.
func client(remote string) int {
	c, err := net.DialTimeout("tcp", remote, time.Second)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("connected")
	_ = c.Close()
	return 0
}

// node is a bed with an agent on it. Every process of the test is in the bed's cgroup.
type node struct {
	*bed.Bed
	*agent.Agent
	t       *testing.T
	proxies int
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := newBareNode(t)
	n.Agent = agent.Start(t, n.Bed, nil)
	return n
}

// newBareNode is newNode before an agent is started.
func newBareNode(t *testing.T) *node {
	t.Helper()
	return newBareNodeOn(t, bed.Options{})
}

func newBareNodeOn(t *testing.T, opts bed.Options) *node {
	t.Helper()
	if err := loader.CheckFeatures(); err != nil {
		t.Skip(err)
	}
	b := bed.ForTest(t, opts)
	if err := b.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	return &node{Bed: b, t: t}
}

// enrolledPod makes a pod and enrols it; when a proxy runs, it has the pod on return.
func (n *node) enrolledPod(name string) *bed.NS {
	n.t.Helper()
	pod := n.plainPod(name)
	n.enrol(pod)
	return pod
}

func (n *node) plainPod(name string) *bed.NS {
	n.t.Helper()
	pod, err := n.Pod(name, bed.PodOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	return pod
}

func (n *node) enrol(pod *bed.NS) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 10*time.Second)
	defer cancel()
	if err := n.Enroll(ctx, agent.Spec(pod), n.proxies > 0); err != nil {
		n.t.Fatal(err)
	}
}

// Pod is the bed's, not the agent's.
func (n *node) Pod(name string, opts bed.PodOptions) (*bed.NS, error) { return n.Bed.Pod(name, opts) }

// Close is that of neither: both close themselves at the end of the test.
func (n *node) Close() {}

func (n *node) serve(ns *bed.NS, port uint16, opts bed.AppOptions) *bed.App {
	n.t.Helper()
	app, err := ns.ServeApp(port, opts)
	if err != nil {
		n.t.Fatal(err)
	}
	return app
}

func (n *node) counters(pod *bed.NS) maps.Counters {
	n.t.Helper()
	c, err := n.Datapath.Maps().Counters(pod.Cookie)
	if err != nil {
		n.t.Fatal(err)
	}
	return c
}

// proxy is a running node proxy and the file of its connections.
type proxy struct {
	*bed.Proc
	log string
	t   *testing.T
}

// startProxyProcess starts a node proxy.
func (n *node) startProxyProcess(args ...string) *proxy {
	n.t.Helper()
	n.proxies++
	p := &proxy{log: filepath.Join(n.Dir, fmt.Sprintf("proxy%d.json", n.proxies)), t: n.t}
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	argv := append([]string{self, "--zds-socket", n.ZDSSocket, "--log", p.log}, args...)
	if p.Proc, err = n.Start(n.Node, true, fmt.Sprintf("proxy%d", n.proxies), argv, []string{roleVariable + "=nodeproxy"}); err != nil {
		n.t.Fatal(err)
	}
	return p
}

// startProxy starts a node proxy and returns when it is connected and ready.
func (n *node) startProxy(args ...string) *proxy {
	n.t.Helper()
	p := n.startProxyProcess(args...)
	eventually(n.t, "the node proxy is ready", func() bool {
		for _, c := range n.Proxies.Status() {
			if c.State == zds.StateReady && int(c.PID) == p.Pid {
				return true
			}
		}
		return false
	})
	return p
}

// stop ends the proxy as an update would.
func (p *proxy) stop() {
	p.t.Helper()
	if err := p.Signal(os.Interrupt); err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := p.Wait(ctx); err != nil {
		p.t.Errorf("the proxy ended with %v", err)
	}
}

// connections are what the proxy has noted so far.
func (p *proxy) connections() []nodeproxy.Record {
	p.t.Helper()
	f, err := os.Open(p.log)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	var all []nodeproxy.Record
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var c nodeproxy.Record
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			p.t.Fatalf("the proxy's log has %q: %v", lines.Text(), err)
		}
		all = append(all, c)
	}
	return all
}

// saw waits for the proxy to note a connection, and fails if there is none or it has an error.
func (p *proxy) saw(pod *bed.NS, direction nodeproxy.Direction, source, destination netip.AddrPort) {
	p.t.Helper()
	want := nodeproxy.Record{UID: "uid-" + pod.Name, Direction: direction, Source: source, OriginalDestination: destination}
	var last []nodeproxy.Record
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		last = p.connections()
		for _, c := range last {
			if c.UID == want.UID && c.Direction == direction && c.Source == source && c.OriginalDestination == destination {
				if c.Error != "" {
					p.t.Errorf("the proxy could not serve %+v", c)
				}
				return
			}
		}
	}
	p.t.Errorf("the proxy has not seen %+v but %+v", want, last)
}

// ask connects, checks that the socket says it is connected to remote, and returns what the app there says.
func ask(t *testing.T, from *bed.NS, spec bed.DialSpec) (bed.Identity, netip.AddrPort) {
	t.Helper()
	c, err := from.Dial(t.Context(), spec)
	if err != nil {
		t.Errorf("connect from %s to %s: %v", from.Name, spec.Remote, err)
		return bed.Identity{}, netip.AddrPort{}
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	id, err := bed.ReadIdentity(c)
	if err != nil {
		t.Errorf("read from %s: %v", spec.Remote, err)
		return id, netip.AddrPort{}
	}
	if peer, err := bed.Peername(c); err != nil || peer != spec.Remote {
		t.Errorf("the client's getpeername is %s, %v; want %s", peer, err, spec.Remote)
	}
	local, err := bed.Sockname(c)
	if err != nil {
		t.Error(err)
	}
	if len(spec.Data) > 0 {
		got := make([]byte, len(spec.Data))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, spec.Data) {
			t.Errorf("the app returned %q, %v; want %q", got, err, spec.Data)
		}
	}
	return id, local
}

// askToTheEnd is ask of an app that closes first, and waits for it to do so.
func askToTheEnd(t *testing.T, from *bed.NS, spec bed.DialSpec) {
	t.Helper()
	c, err := from.Dial(t.Context(), spec)
	if err != nil {
		t.Errorf("connect from %s to %s: %v", from.Name, spec.Remote, err)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := bed.ReadIdentity(c); err != nil {
		t.Errorf("read from %s: %v", spec.Remote, err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the app at %s does not close: %v", spec.Remote, err)
	}
}

// blocked fails the test if a connection can be made and used.
func blocked(t *testing.T, from *bed.NS, remote netip.AddrPort) {
	t.Helper()
	c, err := from.Dial(t.Context(), bed.DialSpec{Remote: remote, Timeout: 500 * time.Millisecond})
	if err != nil {
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(500 * time.Millisecond))
	if id, err := bed.ReadIdentity(c); err == nil {
		t.Errorf("a connection from %s to %s goes through: %+v", from.Name, remote, id)
	}
}

func eventually(t testing.TB, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so after %v: %s", patience, what)
		}
	}
}

// addr is one of a namespace's two addresses.
func addr(ns *bed.NS, family string) netip.Addr {
	if family == "IPv4" {
		return ns.V4
	}
	return ns.V6
}

// eachFamily runs a test once per family.
func eachFamily(t *testing.T, run func(t *testing.T, family string)) {
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			if family == "IPv6" {
				needsIPv6(t)
			}
			run(t, family)
		})
	}
}

// families is how many eachFamily runs a test for.
func families() uint64 {
	if bed.HasIPv6() {
		return 2
	}
	return 1
}

// needsIPv6 skips what needs a socket of IPv6, if only to talk IPv4 by it.
func needsIPv6(t *testing.T) {
	t.Helper()
	if !bed.HasIPv6() {
		t.Skip("the kernel has no IPv6, or was booted with ipv6.disable=1")
	}
}
