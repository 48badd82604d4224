// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	gomaps "maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/hostprobe"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// probeResult is what became of a prober's connections to one address.
type probeResult struct {
	Remote netip.AddrPort
	// Peers counts the connections by the address that the app has seen.
	Peers map[netip.Addr]int
	// Errors counts those that failed, by why.
	Errors map[string]int
}

// prober is a process that connects like a kubelet: "prober COUNT REMOTE...". It connects to all remotes at once, and COUNT
// times one after the other to each, and writes a line with a probeResult per remote. With COUNT 0 it does so once, again and
// again, until it is killed.
func prober(args []string) int {
	count, err := strconv.Atoi(args[0])
	if err != nil {
		fmt.Println(err)
		return 2
	}
	for forever := count == 0; ; time.Sleep(50 * time.Millisecond) {
		results := make([]probeResult, len(args)-1)
		var group sync.WaitGroup
		for i, remote := range args[1:] {
			group.Go(func() {
				r := probeResult{netip.MustParseAddrPort(remote), map[netip.Addr]int{}, map[string]int{}}
				for range max(count, 1) {
					if peer, err := probeOnce(remote); err != nil {
						r.Errors[err.Error()]++
					} else {
						r.Peers[peer]++
					}
				}
				results[i] = r
			})
		}
		group.Wait()
		line, err := json.Marshal(results)
		if err != nil {
			fmt.Println(err)
			return 2
		}
		fmt.Println(string(line))
		if !forever {
			return 0
		}
	}
}

// probeOnce returns whom the app at an address takes this process for.
func probeOnce(remote string) (netip.Addr, error) {
	c, err := net.DialTimeout("tcp", remote, patience)
	if err != nil {
		return netip.Addr{}, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	id, err := bed.ReadIdentity(c)
	return id.Peer.Addr(), err
}

// Cgroups below the bed's, as a node has them.
const (
	groupKubelet = "system/kubelet"
	groupOther   = "system/other"
	groupHostPod = "kubepods/besteffort/podhostnet/container"
)

// probeNode is a node as it is run: the agent, the proxy and whatever probes are processes in cgroups of their own. The test's
// own process, which plays the apps, is in none of these, but in the one that they all are below.
type probeNode struct {
	*node
	agent *agentProcess
	proxy *proxy
	flags []string
	// agentGroup is the agent's cgroup; empty: one of its own, in no pod.
	agentGroup string
}

func newProbeNode(t *testing.T, opts bed.Options, flags ...string) *probeNode {
	t.Helper()
	n := newEmptyProbeNode(t, opts, flags...)
	n.startAgent()
	n.startProxyIn("proxy")
	return n
}

// newEmptyProbeNode is newProbeNode before agent and proxy are started.
func newEmptyProbeNode(t *testing.T, opts bed.Options, flags ...string) *probeNode {
	t.Helper()
	if err := loader.CheckFeatures(); err != nil {
		t.Skip(err)
	}
	b := bed.ForTest(t, opts)
	if err := b.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	n := &probeNode{node: &node{Bed: b, t: t}, flags: flags}
	for _, group := range []string{groupKubelet, groupOther, groupHostPod} {
		n.group(group)
	}
	return n
}

func (n *probeNode) group(name string) string {
	n.t.Helper()
	dir, err := n.Group(name)
	if err != nil {
		n.t.Fatal(err)
	}
	return dir
}

// process starts this binary in a role, in the node's network namespace.
func (n *probeNode) process(role, group, name string, args ...string) *bed.Proc {
	n.t.Helper()
	self, err := os.Executable()
	if err != nil {
		n.t.Fatal(err)
	}
	p, err := n.StartIn(n.Node, n.group(group), name, append([]string{self}, args...), []string{roleVariable + "=" + role})
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

func (n *probeNode) agentArgs() []string {
	return append([]string{
		"agent", "--standalone", "--run-dir", n.RunDir, "--bpffs", n.BPFFS, "--cgroup", n.Cgroup, "--zds-socket", n.ZDSSocket,
	}, n.flags...)
}

func (n *probeNode) startAgent() {
	n.t.Helper()
	proc := n.process("agent", n.agentsGroup(), "agent", n.agentArgs()...)
	n.agent = &agentProcess{proc, api.NewClient(filepath.Join(n.RunDir, "agent.sock"))}
	eventually(n.t, "the agent answers", func() bool {
		select {
		case <-proc.Done():
			n.t.Fatalf("the agent has ended: %s", proc.Output())
		default:
		}
		_, err := n.agent.client.Status(n.t.Context())
		return err == nil
	})
}

func (n *probeNode) agentsGroup() string {
	if n.agentGroup != "" {
		return n.agentGroup
	}
	return "system/agent"
}

func (n *probeNode) stopAgent() {
	n.t.Helper()
	if err := n.agent.Signal(unix.SIGTERM); err != nil {
		n.t.Fatal(err)
	}
	if code := exitStatus(n.t, n.agent.Proc); code != 0 {
		n.t.Errorf("the agent ended with status %d", code)
	}
}

// exitStatus waits for the end of a process.
func exitStatus(t *testing.T, p *bed.Proc) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	err := p.Wait(ctx)
	if status, ok := errors.AsType[*exec.ExitError](err); ok {
		return status.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0
}

// startProxyIn starts a node proxy in a cgroup and returns when the agent has it.
func (n *probeNode) startProxyIn(group string) {
	n.t.Helper()
	n.proxies++
	p := &proxy{log: filepath.Join(n.Dir, fmt.Sprintf("proxy%d.json", n.proxies)), t: n.t}
	p.Proc = n.process("nodeproxy", group, "proxy", "--zds-socket", n.ZDSSocket, "--log", p.log)
	n.proxy = p
	eventually(n.t, "the node proxy is ready", func() bool {
		return slices.ContainsFunc(n.status().Proxies, func(c zds.ConnStatus) bool {
			return c.State == zds.StateReady && int(c.PID) == p.Pid
		})
	})
}

func (n *probeNode) status() api.Status {
	n.t.Helper()
	s, err := n.agent.client.Status(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	return s
}

func (n *probeNode) enrolSpec(pod *bed.NS, ips ...netip.Addr) {
	n.t.Helper()
	spec := agent.Spec(pod)
	if len(ips) > 0 {
		spec.IPs = ips
	}
	request := api.EnrollRequest{Spec: spec, Wait: true, Timeout: api.Duration(patience)}
	if _, err := n.agent.client.Enroll(n.t.Context(), request); err != nil {
		n.t.Fatal(err)
	}
}

// enrolledPod makes a pod with an app and enrols it.
func (n *probeNode) enrolledPod(name string) (*bed.NS, *bed.App) {
	n.t.Helper()
	pod := n.plainPod(name)
	n.enrolSpec(pod)
	return pod, n.serve(pod, 8080, bed.AppOptions{})
}

func (n *probeNode) counters(pod *bed.NS) maps.Counters {
	n.t.Helper()
	p, err := n.agent.client.Pod(n.t.Context(), "uid-"+pod.Name)
	if err != nil {
		n.t.Fatal(err)
	}
	return p.Counters
}

// bothFamilies are an app's addresses as arguments of a prober.
func bothFamilies(pod *bed.NS) []string {
	remotes := []string{netip.AddrPortFrom(pod.V4, 8080).String()}
	if pod.V6.IsValid() {
		remotes = append(remotes, netip.AddrPortFrom(pod.V6, 8080).String())
	}
	return remotes
}

// probe runs a prober in a cgroup to its end, and returns what it says by remote address.
func (n *probeNode) probe(group string, count int, remotes ...string) map[netip.Addr]probeResult {
	n.t.Helper()
	p := n.process("prober", group, "prober", append([]string{strconv.Itoa(count)}, remotes...)...)
	if code := exitStatus(n.t, p); code != 0 {
		n.t.Fatalf("the prober ended with status %d: %s", code, p.Output())
	}
	return probeResults(n.t, p)
}

// probeResults are those of a prober's last whole line; nil if there is none yet.
func probeResults(t *testing.T, p *bed.Proc) map[netip.Addr]probeResult {
	t.Helper()
	lines := strings.Split(p.Output(), "\n")
	if len(lines) < 2 {
		return nil
	}
	var list []probeResult
	if err := json.Unmarshal([]byte(lines[len(lines)-2]), &list); err != nil {
		t.Fatalf("the prober says %q: %v", p.Output(), err)
	}
	all := map[netip.Addr]probeResult{}
	for _, r := range list {
		all[r.Remote.Addr()] = r
	}
	return all
}

// wantPeers checks that all connections were made, and came from the address wanted.
func wantPeers(t *testing.T, r probeResult, count int, want netip.Addr) {
	t.Helper()
	if len(r.Errors) > 0 || !gomaps.Equal(r.Peers, map[netip.Addr]int{want: count}) {
		t.Errorf("of %d connections to %s the app saw %v, errors %v; want all from %s", count, r.Remote, r.Peers, r.Errors, want)
	}
}

// wantNothingAdmitted waits until no flow is admitted any more.
func (n *probeNode) wantNothingAdmitted() {
	n.t.Helper()
	eventually(n.t, "no flow is admitted any more", func() bool { return n.status().AdmittedFlows == 0 })
}

// probeAddrs are the addresses that probes come from, unless the agent is told otherwise.
var probeAddrs = map[string]netip.Addr{"IPv4": hostprobe.Defaults.V4, "IPv6": hostprobe.Defaults.V6}

func TestProbesReachTheAppPastTheProxy(t *testing.T) {
	for name, c := range map[string]struct {
		flags []string
		seen  map[string]netip.Addr // nil: the node's own address, as without the agent
	}{
		"from the probe address": {nil, probeAddrs},
		"from probe addresses of one's own": {
			[]string{"--host-probe-snat-ip", "198.18.7.9", "--host-probe-snat-ipv6", "fd99:7::"},
			map[string]netip.Addr{"IPv4": netip.MustParseAddr("198.18.7.9"), "IPv6": netip.MustParseAddr("fd99:7::")},
		},
		"from the node's own address": {[]string{"--probe-identity", "flow"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newProbeNode(t, bed.Options{}, c.flags...)
			pod := n.plainPod("pod")
			n.serve(pod, 8080, bed.AppOptions{})
			before := n.probe(groupKubelet, 1, bothFamilies(pod)...)
			n.enrolSpec(pod)
			after := n.probe(groupKubelet, 5, bothFamilies(pod)...)
			want := func(family string) netip.Addr {
				if c.seen != nil {
					return c.seen[family]
				}
				for peer := range before[addr(pod, family)].Peers {
					return peer
				}
				t.Fatalf("before enrolment: %+v", before)
				return netip.Addr{}
			}
			eachFamily(t, func(t *testing.T, family string) {
				wantPeers(t, after[addr(pod, family)], 5, want(family))
			})
			// A socket of the other family that talks IPv4, where there is such a family.
			id, _ := ask(t, n.Node, bed.DialSpec{Remote: netip.AddrPortFrom(pod.V4, 8080), V4Mapped: bed.HasIPv6()})
			if id.Peer.Addr() != want("IPv4") {
				t.Errorf("of a v4-mapped probe the app saw %s, want %s", id.Peer, want("IPv4"))
			}
			if seen := n.proxy.connections(); len(seen) > 0 {
				t.Errorf("the proxy saw %+v", seen)
			}
			if c := n.counters(pod); c.ProbesAdmitted != 5*families()+1 || c.ProxyToApp+c.InboundNoListener+c.SealDroppedSynack > 0 {
				t.Errorf("counters are %+v", c)
			}
			n.wantNothingAdmitted()
		})
	}
}

func TestTenThousandProbes(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, app := n.enrolledPod("pod")
	each := short(5000, 500)
	all := 2 * each
	for remote, r := range n.probe(groupKubelet, each, bothFamilies(pod)...) {
		want := probeAddrs["IPv6"]
		if remote.Is4() {
			want = probeAddrs["IPv4"]
		}
		wantPeers(t, r, each, want)
	}
	if got := app.Accepts(); got != int64(all) {
		t.Errorf("the app has accepted %d connections", got)
	}
	if seen := n.proxy.connections(); len(seen) > 0 {
		t.Errorf("the proxy saw %d connections, the first %+v", len(seen), seen[0])
	}
	// Not c.InboundSteered: an acknowledgement that comes when the app's socket is gone is looked up and counted like a SYN.
	if c := n.counters(pod); c.ProbesAdmitted != uint64(all) || c.ProxyToApp+c.InboundNoListener+c.SealDropped+c.SealDroppedSynack > 0 {
		t.Errorf("counters are %+v", c)
	}
	if got := passiveOpens(t, pod); got != all {
		t.Errorf("the pod's listeners, the proxy's with the app's, have %d connections made", got)
	}
	n.wantNothingAdmitted()
}

// passiveOpens is how many connections all listeners of a namespace have had so far.
func passiveOpens(t *testing.T, ns *bed.NS) int {
	t.Helper()
	var snmp []byte
	err := ns.Do(func() (err error) {
		snmp, err = os.ReadFile("/proc/thread-self/net/snmp")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var tcp [][]string // names, values
	for line := range strings.Lines(string(snmp)) {
		if strings.HasPrefix(line, "Tcp:") {
			tcp = append(tcp, strings.Fields(line))
		}
	}
	if len(tcp) != 2 {
		t.Fatalf("the kernel counts %v", tcp)
	}
	n, err := strconv.Atoi(tcp[1][slices.Index(tcp[0], "PassiveOpens")])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A probe that the app refuses, or that nobody answers, leaves nothing behind either.
func TestAFailedProbeIsNotAdmittedForLong(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod := n.plainPod("pod")
	n.enrolSpec(pod)
	for remote, r := range n.probe(groupKubelet, 20, bothFamilies(pod)...) {
		if len(r.Peers) > 0 || len(r.Errors) == 0 {
			t.Errorf("a port of %s that nobody listens on: %+v", remote, r)
		}
		for why := range r.Errors {
			if !strings.Contains(why, "connection refused") {
				t.Errorf("a port of %s that nobody listens on: %s", remote, why)
			}
		}
	}
	if err := pod.SetSysctl("net.ipv4.tcp_abort_on_overflow", "0"); err != nil {
		t.Fatal(err)
	}
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.LinkSetDown(linkOf(t, pod, pod.Link)); err != nil {
		t.Fatal(err)
	}
	blocked(t, n.Node, netip.AddrPortFrom(pod.V4, 8080))
	blocked(t, n.Node, netip.AddrPortFrom(pod.V6, 8080))
	n.wantNothingAdmitted()
}

// captured says of a group's connections whether they went through the proxy: all, or none of them.
func (n *probeNode) captured(group string, pod *bed.NS) bool {
	n.t.Helper()
	const count = 3
	seen, probes := len(n.proxy.connections()), 0
	for _, r := range n.probe(group, count, bothFamilies(pod)...) {
		if len(r.Errors) > 0 {
			n.t.Fatalf("connections from %s failed: %+v", group, r)
		}
		probes += r.Peers[hostprobe.Defaults.V4] + r.Peers[hostprobe.Defaults.V6]
	}
	switch probes {
	case 0:
		eventually(n.t, "the proxy has noted what is no probe", func() bool { return len(n.proxy.connections()) >= seen+2*count })
		return true
	case 2 * count:
		if now := len(n.proxy.connections()); now != seen {
			n.t.Errorf("the proxy saw %d probes", now-seen)
		}
		return false
	default:
		n.t.Fatalf("of %d connections from %s %d were taken for probes", 2*count, group, probes)
		return false
	}
}

func TestWhoseConnectionsAreProbes(t *testing.T) {
	const (
		systemd = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-1.scope"
		nested  = "k3s/docker/1/kubepods/burstable/pod1/container"
		kind    = "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod1.slice/1"
	)
	for source, captured := range map[string]map[string]bool{
		"node": {groupOther: false, groupKubelet: false, groupHostPod: true, systemd: true, nested: true, kind: true},
		"host": {groupOther: false, groupKubelet: false, groupHostPod: false, systemd: false},
	} {
		t.Run(source, func(t *testing.T) {
			n := newProbeNode(t, bed.Options{}, "--probe-source", source)
			for group := range captured {
				n.group(group)
			}
			// The next agent finds the groups when it starts, without a rescan.
			n.stopAgent()
			n.startAgent()
			pod, _ := n.enrolledPod("pod")
			for group, want := range captured {
				if got := n.captured(group, pod); got != want {
					t.Errorf("connections from %s are captured: %v, want %v", group, got, want)
				}
			}
		})
	}
}

// A pods' cgroup that appears while the agent runs: the kubelet makes it when it starts.
func TestThePodsCgroupMayComeLater(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	p := n.process("prober", "late/kubepods/pod1", "prober", append([]string{"0"}, bothFamilies(pod)...)...)
	eventually(t, "its connections are no probes", func() bool {
		last := probeResults(t, p)
		return last[pod.V4].Peers[nodesAddr(t, n.Node, pod.V4)] == 1 && last[pod.V6].Peers[nodesAddr(t, n.Node, pod.V6)] == 1
	})
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if !n.captured("late/kubepods/pod1", pod) {
		t.Error("its connections pass again")
	}
}

func TestOnlyTheKubeletsCgroupMayProbe(t *testing.T) {
	n := newProbeNode(t, bed.Options{}, "--probe-source", "kubelet")
	pod, _ := n.enrolledPod("pod")
	if !slices.ContainsFunc(n.status().Warnings, func(w api.Warning) bool {
		return w.Reason == api.ReasonIdentity && strings.Contains(w.Message, "kubelet")
	}) {
		t.Errorf("without a kubelet the agent warns of %+v", n.status().Warnings)
	}
	for _, group := range []string{groupKubelet, groupOther, groupHostPod} {
		if !n.captured(group, pod) {
			t.Errorf("without a kubelet, connections from %s pass", group)
		}
	}

	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	kubelet := filepath.Join(n.Dir, "kubelet") // its name as a process
	if err := os.Symlink(self, kubelet); err != nil {
		t.Fatal(err)
	}
	var ids []uint64
	for range 2 {
		var st unix.Stat_t
		dir := n.group(groupKubelet)
		if err := unix.Stat(dir, &st); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, st.Ino)
		p, err := n.StartIn(n.Node, dir, "kubelet", append([]string{kubelet, "0"}, bothFamilies(pod)...), []string{roleVariable + "=prober"})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the kubelet's probes pass", func() bool {
			last := probeResults(t, p)
			return last[pod.V4].Peers[hostprobe.Defaults.V4] == 1 && last[pod.V6].Peers[hostprobe.Defaults.V6] == 1
		})
		for _, group := range []string{groupOther, groupHostPod} {
			// Not by n.captured: the kubelet goes on beside it.
			for _, r := range n.probe(group, 3, bothFamilies(pod)...) {
				if r.Peers[hostprobe.Defaults.V4]+r.Peers[hostprobe.Defaults.V6] > 0 || len(r.Errors) > 0 {
					t.Errorf("beside a kubelet, connections from %s: %+v", group, r)
				}
			}
		}
		if slices.ContainsFunc(n.status().Warnings, func(w api.Warning) bool { return w.Reason == api.ReasonIdentity }) {
			t.Errorf("with a kubelet the agent warns of %+v", n.status().Warnings)
		}
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the kubelet's cgroup can be removed", func() bool { return unix.Rmdir(dir) == nil })
	}
	if ids[0] == ids[1] {
		t.Error("the kubelet's second cgroup has the first one's id: this test shows nothing")
	}
}

// addAddr gives an interface an address more.
func addAddr(t *testing.T, ns *bed.NS, link string, a netip.Addr) {
	t.Helper()
	h, err := ns.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	spec := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if a.Is6() {
		spec.Flags = unix.IFA_F_NODAD
	}
	if err := h.AddrAdd(linkOf(t, ns, link), spec); err != nil {
		t.Fatalf("add %s to %s of %s: %v", a, link, ns.Name, err)
	}
}

// synPacket is a SYN with its checksum, as a peer sends it.
func synPacket(src, dst netip.AddrPort) (etherType uint16, packet []byte) {
	h := tcpHeader(syn, 1)
	binary.BigEndian.PutUint16(h[0:], src.Port())
	binary.BigEndian.PutUint16(h[2:], dst.Port())
	sum := uint32(unix.IPPROTO_TCP + len(h))
	for _, b := range [][]byte{src.Addr().AsSlice(), dst.Addr().AsSlice(), h} {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(h[16:], ^uint16(sum))
	if src.Addr().Is4() {
		return typeIPv4, ipv4(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, nil, 0, h)
	}
	return typeIPv6, ipv6(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, nil, h)
}

// injector puts frames on a link towards a namespace: at the node's end of a pod's, as what is forwarded arrives there, or at
// the far end of the node's.
type injector struct {
	fd, ifindex int
	from, to    net.HardwareAddr
}

func newInjector(t *testing.T, sender *bed.NS, link string, to *bed.NS) *injector {
	t.Helper()
	l := linkOf(t, sender, link).Attrs()
	return &injector{packetSocket(t, sender, l.Index, 0), l.Index, l.HardwareAddr, linkOf(t, to, to.Link).Attrs().HardwareAddr}
}

func (w *injector) send(t *testing.T, src, dst netip.AddrPort) {
	t.Helper()
	if err := w.trySend(src, dst); err != nil {
		t.Fatal(err)
	}
}

func (w *injector) trySend(src, dst netip.AddrPort) error {
	etherType, packet := synPacket(src, dst)
	frame := binary.BigEndian.AppendUint16(append(append([]byte(nil), w.to...), w.from...), etherType)
	return unix.Sendto(w.fd, append(frame, packet...), 0, &unix.SockaddrLinklayer{Ifindex: w.ifindex})
}

// nodesAddr is the address by which the node reaches the pod.
func nodesAddr(t *testing.T, n *bed.NS, pod netip.Addr) netip.Addr {
	t.Helper()
	var routes []netlink.Route
	err := n.Do(func() (err error) {
		routes, err = netlink.RouteGet(pod.AsSlice())
		return err
	})
	if err != nil || len(routes) != 1 {
		t.Fatalf("the node's routes to %s are %v, %v", pod, routes, err)
	}
	a, _ := netip.AddrFromSlice(routes[0].Src)
	return a.Unmap()
}

// What is forwarded has no socket on the node, whatever its source says; neither has what somebody makes up.
func TestASourceAddressAloneMakesNoProbe(t *testing.T) {
	for _, identity := range []string{"snat", "flow"} {
		t.Run(identity, func(t *testing.T) {
			n := newProbeNode(t, bed.Options{}, "--probe-identity", identity)
			pod, app := n.enrolledPod("pod")
			w := newInjector(t, n.Node, pod.HostLink, pod)
			eachFamily(t, func(t *testing.T, family string) {
				// A probe that is admitted, and stays: its neighbours are not.
				probe, err := n.Node.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(addr(pod, family), 8080)})
				if err != nil {
					t.Fatal(err)
				}
				defer probe.Close()
				if _, err := bed.ReadIdentity(probe); err != nil {
					t.Fatal(err)
				}
				if got := n.status().AdmittedFlows; got != 1 {
					t.Fatalf("%d flows are admitted, want 1", got)
				}
				local, err := bed.Sockname(probe)
				if err != nil {
					t.Fatal(err)
				}
				accepted := app.Accepts()
				for _, source := range []netip.AddrPort{
					netip.AddrPortFrom(probeAddrs[family], 40001),
					netip.AddrPortFrom(nodesAddr(t, n.Node, addr(pod, family)), 40002),
					netip.AddrPortFrom(addr(n.Node, family), 40003),
					netip.AddrPortFrom(addr(n.Outside, family), 40004),
					netip.AddrPortFrom(local.Addr(), local.Port()^1),
				} {
					before := n.counters(pod).InboundSteered
					w.send(t, source, netip.AddrPortFrom(addr(pod, family), 8080))
					eventually(t, "the SYN from "+source.String()+" is steered to the proxy", func() bool {
						return n.counters(pod).InboundSteered > before
					})
				}
				// The probe's own flow, but to another port.
				before := n.counters(pod).InboundSteered
				w.send(t, local, netip.AddrPortFrom(addr(pod, family), 8081))
				eventually(t, "the SYN to another port is steered to the proxy", func() bool { return n.counters(pod).InboundSteered > before })
				if got := app.Accepts(); got != accepted {
					t.Errorf("the app has accepted %d connections of nobody", got-accepted)
				}
				if got := n.status().AdmittedFlows; got != 1 {
					t.Errorf("%d flows are admitted, want 1", got)
				}
			})
		})
	}
}

// On a bridge pods reach each other without the node's routing, which would drop a source that is the node's own.
func TestAPodThatHasTheProbeAddressProbesNobody(t *testing.T) {
	n := newProbeNode(t, bed.Options{Bridge: true})
	target, app := n.enrolledPod("target")
	other := n.plainPod("other")
	eachFamily(t, func(t *testing.T, family string) {
		remote := netip.AddrPortFrom(addr(target, family), 8080)
		source := netip.AddrPortFrom(probeAddrs[family], 0)
		tryAs := func(what string, spec bed.DialSpec) {
			t.Helper()
			before := n.counters(target).InboundSteered
			spec.Remote, spec.Local, spec.Timeout = remote, source, 300*time.Millisecond
			if c, err := other.Dial(t.Context(), spec); err == nil {
				_ = c.Close()
				t.Errorf("%s: it is connected", what) // the answers are for the node
			}
			if n.counters(target).InboundSteered == before {
				t.Errorf("%s: its SYN was not steered to the proxy", what)
			}
		}
		tryAs("with IP_TRANSPARENT", bed.DialSpec{Transparent: true})
		addAddr(t, other, other.Link, probeAddrs[family])
		tryAs("with the address on its interface", bed.DialSpec{})
	})
	if got := app.Accepts(); got > 0 {
		t.Errorf("the app has accepted %d connections", got)
	}
	if s := n.status(); s.AdmittedFlows > 0 || s.Counters.ProbesAdmitted > 0 {
		t.Errorf("%d flows are admitted, %d were", s.AdmittedFlows, s.Counters.ProbesAdmitted)
	}
}

// A pod that has the probe address itself does not open itself to others by that.
func TestAPodThatHasTheProbeAddressIsStillProxied(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, app := n.enrolledPod("pod")
	w := newInjector(t, n.Node, pod.HostLink, pod)
	eachFamily(t, func(t *testing.T, family string) {
		addAddr(t, pod, pod.Link, probeAddrs[family])
		eventually(t, "the agent knows the address", func() bool {
			p, err := n.agent.client.Pod(t.Context(), "uid-pod")
			return err == nil && slices.Contains(p.Addresses, probeAddrs[family])
		})
		remote := netip.AddrPortFrom(addr(pod, family), 8080)
		_, local := ask(t, n.Outside, bed.DialSpec{Remote: remote})
		n.proxy.saw(pod, "inbound", local, remote)
		accepted := app.Accepts()
		w.send(t, netip.AddrPortFrom(probeAddrs[family], 40001), remote)
		_, local = ask(t, n.Outside, bed.DialSpec{Remote: remote}) // the link keeps the order
		n.proxy.saw(pod, "inbound", local, remote)
		if got := app.Accepts() - accepted; got != 1 {
			t.Errorf("the app has accepted %d connections, want only the one by the proxy", got)
		}
	})
}

// giveAddr makes the node send what is for an address to another pod.
func giveAddr(t *testing.T, n, pod *bed.NS, a netip.Addr) {
	t.Helper()
	h, err := n.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	err = h.RouteReplace(&netlink.Route{
		LinkIndex: linkOf(t, n, pod.HostLink).Attrs().Index,
		Dst:       &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())},
		Scope:     netlink.SCOPE_LINK,
	})
	if err != nil {
		t.Fatal(err)
	}
	// What the node has learnt of the last owner's hardware address does not matter: the new one is on another link.
}

// An address is given to a pod while one that had it before is still enrolled: dead, but not yet taken out.
func TestAReusedAddressIsItsNewOwners(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	old, oldApp := n.enrolledPod("old")
	young := n.plainPod("young")
	app := n.serve(young, 8080, bed.AppOptions{})
	for _, a := range []netip.Addr{old.V4, old.V6} {
		addAddr(t, young, young.Link, a)
		giveAddr(t, n.Node, young, a)
	}
	n.enrolSpec(young, old.V4, old.V6)

	want := func(when string) {
		t.Helper()
		before := n.counters(young).ProbesAdmitted
		for remote, r := range n.probe(groupKubelet, 2, bothFamilies(old)...) {
			family := "IPv6"
			if remote.Is4() {
				family = "IPv4"
			}
			wantPeers(t, r, 2, probeAddrs[family])
		}
		if got := n.counters(young).ProbesAdmitted - before; got != 4 {
			t.Errorf("%s, %d of 4 probes are admitted to the new owner", when, got)
		}
	}
	want("at once")
	n.enrolSpec(old) // repeated, as after a restart of whoever enrols
	want("when the old one is enrolled again")
	n.stopAgent()
	n.startAgent()
	eventually(t, "the proxy is back", func() bool { return n.status().Pods.Enrolled == 2 })
	want("when the agent is another")
	if err := n.agent.client.Unenroll(t.Context(), "uid-old"); err != nil {
		t.Fatal(err)
	}
	want("when the old one is gone")
	if oldApp.Accepts() > 0 || app.Accepts() == 0 {
		t.Errorf("the old pod's app has accepted %d connections, the new one's %d", oldApp.Accepts(), app.Accepts())
	}
	if seen := n.proxy.connections(); len(seen) > 0 {
		t.Errorf("the proxy saw %+v", seen)
	}
	if err := n.agent.client.Unenroll(t.Context(), "uid-young"); err != nil {
		t.Fatal(err)
	}
	if targets := n.probeTargets(); len(targets) > 0 {
		t.Errorf("probes are still expected for %v", targets)
	}
}

// Pods may be told of in the wrong order: the one that is dead after the one that lives.
func TestAnAddressComesBackToItsLivingOwner(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	living, _ := n.enrolledPod("living")
	dead := n.plainPod("dead")
	for _, a := range []netip.Addr{living.V4, living.V6} {
		addAddr(t, dead, dead.Link, a)
	}
	n.enrolSpec(dead, living.V4, living.V6)
	if err := n.agent.client.Unenroll(t.Context(), "uid-dead"); err != nil {
		t.Fatal(err)
	}
	p := n.process("prober", groupKubelet, "prober", append([]string{"0"}, bothFamilies(living)...)...)
	eventually(t, "probes reach the living pod again", func() bool {
		last := probeResults(t, p)
		return last[living.V4].Peers[hostprobe.Defaults.V4] == 1 && last[living.V6].Peers[hostprobe.Defaults.V6] == 1
	})
}

// probeTargets are the addresses that the programs let probes through to.
func (n *probeNode) probeTargets() []netip.Addr {
	n.t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(n.BPFFS, "maps", "probe_targets"), nil)
	if err != nil {
		n.t.Fatal(err)
	}
	opened := maps.Maps{RedirectorMaps: bpf.RedirectorMaps{ProbeTargets: m}}
	defer m.Close()
	all, err := opened.ProbeTargets()
	if err != nil {
		n.t.Fatal(err)
	}
	return slices.Collect(gomaps.Keys(all))
}

// Filters on the node, as network policies make them: what goes to the pod, from the node or forwarded, must have a source that
// is allowed.
func TestNetworkPolicies(t *testing.T) {
	for name, c := range map[string]struct {
		identity string
		allowed  func(t *testing.T, n *probeNode, pod netip.Addr) netip.Addr
		passes   bool
	}{
		"that allow the node's address, with flow": {"flow", nodesAddrOf, true},
		"that allow the probe address, with snat":  {"snat", probeAddrOf, true},
		"that allow the node's address, with snat": {"snat", nodesAddrOf, false},
		"that allow the probe address, with flow":  {"flow", probeAddrOf, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newProbeNode(t, bed.Options{}, "--probe-identity", c.identity)
			pod, _ := n.enrolledPod("pod")
			allowed := []netip.Addr{c.allowed(t, n, pod.V4), c.allowed(t, n, pod.V6)}
			allowOnly(t, n.Node, pod.HostLink, allowed...)
			eachFamily(t, func(t *testing.T, family string) {
				remote := netip.AddrPortFrom(addr(pod, family), 8080)
				blocked(t, n.Outside, remote)
				if !c.passes {
					blocked(t, n.Node, remote)
					return
				}
				id, _ := ask(t, n.Node, bed.DialSpec{Remote: remote})
				if !slices.Contains(allowed, id.Peer.Addr()) {
					t.Errorf("the app sees %s, want one of %v", id.Peer, allowed)
				}
			})
			if seen := n.proxy.connections(); len(seen) > 0 {
				t.Errorf("the proxy saw %+v", seen)
			}
		})
	}
}

func nodesAddrOf(t *testing.T, n *probeNode, pod netip.Addr) netip.Addr {
	return nodesAddr(t, n.Node, pod)
}

func probeAddrOf(_ *testing.T, _ *probeNode, pod netip.Addr) netip.Addr {
	if pod.Is4() {
		return hostprobe.Defaults.V4
	}
	return hostprobe.Defaults.V6
}

// allowOnly drops what goes out on a link of the node unless it comes from one of the addresses, one of each family. Neighbour
// discovery passes.
func allowOnly(t *testing.T, node *bed.NS, link string, allowed ...netip.Addr) {
	t.Helper()
	err := node.Do(func() error {
		c, err := nftables.New(nftables.AsLasting())
		if err != nil {
			return err
		}
		defer func() { _ = c.CloseLasting() }()
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "policy"})
		for name, hook := range map[string]*nftables.ChainHook{"output": nftables.ChainHookOutput, "forward": nftables.ChainHookForward} {
			chain := c.AddChain(&nftables.Chain{
				Name: name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityFilter,
			})
			for _, a := range allowed {
				proto, offset := byte(unix.NFPROTO_IPV4), uint32(12)
				if a.Is6() {
					proto, offset = unix.NFPROTO_IPV6, 8
				}
				device := make([]byte, unix.IFNAMSIZ)
				copy(device, link)
				c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
					&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
					&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: device},
					&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
					&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
					&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
					&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
					&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(a.BitLen() / 8)},
					&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: a.AsSlice()},
					&expr.Verdict{Kind: expr.VerdictDrop},
				}})
			}
		}
		return c.Flush()
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		t.Skipf("the kernel lacks nf_tables: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// wantVerdicts checks that a probe passes and that all else goes through the proxy.
func (n *probeNode) wantVerdicts(pod *bed.NS) {
	t := n.t
	t.Helper()
	eachFamily(t, func(t *testing.T, family string) {
		wantPeers(t, n.probe(groupKubelet, 2, bothFamilies(pod)...)[addr(pod, family)], 2, probeAddrs[family])
		inbound, outbound := netip.AddrPortFrom(addr(pod, family), 8080), netip.AddrPortFrom(addr(n.Outside, family), 8080)
		_, local := ask(t, n.Outside, bed.DialSpec{Remote: inbound})
		n.proxy.saw(pod, "inbound", local, inbound)
		id, local := ask(t, pod, bed.DialSpec{Remote: outbound})
		n.proxy.saw(pod, "outbound", local, outbound)
		if id.Peer.Addr() != addr(pod, family) {
			t.Errorf("the server sees %s, want the pod's %s", id.Peer, addr(pod, family))
		}
		ask(t, pod, bed.DialSpec{Remote: inbound}) // to itself
	})
	if !n.captured(groupHostPod, pod) {
		t.Error("the connections of a hostNetwork pod pass")
	}
}

func TestVerdictsWithReversePathFilters(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod := n.plainPod("pod")
	for ns, links := range map[*bed.NS][]string{n.Node: {"lo", n.Node.Link, pod.HostLink}, pod: {"lo", pod.Link}} {
		for _, where := range append(links, "all", "default") {
			if err := ns.SetSysctl("net.ipv4.conf."+where+".rp_filter", "1"); err != nil {
				t.Fatal(err)
			}
		}
	}
	n.enrolSpec(pod)
	n.serve(pod, 8080, bed.AppOptions{})
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.wantVerdicts(pod)
}

func TestVerdictsBesideOtherPrograms(t *testing.T) {
	n := newEmptyProbeNode(t, bed.Options{})
	pod := n.plainPod("pod")
	first := foreignPrograms(t, n.Cgroup, pod)
	n.startAgent()
	n.startProxyIn("proxy")
	n.enrolSpec(pod)
	last := foreignPrograms(t, n.Cgroup, pod)
	n.serve(pod, 8080, bed.AppOptions{})
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.wantVerdicts(pod)
	for as, runs := range first() {
		if runs == 0 || last()[as] == 0 {
			t.Errorf("of the other programs, those at %v ran %d and %d times: this test shows nothing", as, runs, last()[as])
		}
	}
}

// foreignPrograms attaches programs of somebody else's, which change nothing, to the hooks that the dataplane uses. ran counts
// their runs.
func foreignPrograms(t *testing.T, cgroup string, pod *bed.NS) (ran func() map[ebpf.AttachType]uint64) {
	t.Helper()
	hooks := map[ebpf.AttachType]ebpf.ProgramType{
		ebpf.AttachCGroupSockOps:        ebpf.SockOps,
		ebpf.AttachCGroupInet4Connect:   ebpf.CGroupSockAddr,
		ebpf.AttachCGroupInet6Connect:   ebpf.CGroupSockAddr,
		ebpf.AttachCGroupInetSockCreate: ebpf.CGroupSock,
		ebpf.AttachCGroupSetsockopt:     ebpf.CGroupSockopt,
		ebpf.AttachSkLookup:             ebpf.SkLookup,
	}
	netns, err := os.Open(pod.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	runs := map[ebpf.AttachType]*ebpf.Map{}
	for as, typ := range hooks {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Close() })
		runs[as] = m
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: typ, AttachType: as, License: "GPL", Instructions: asm.Instructions{
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "out"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
			asm.Return(),
		}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		var l link.Link
		if typ == ebpf.SkLookup {
			l, err = link.AttachNetNs(int(netns.Fd()), p)
		} else {
			l, err = link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: as, Program: p})
		}
		if err != nil {
			t.Fatalf("attach a program at %v: %v", as, err)
		}
		t.Cleanup(func() { _ = l.Close() })
	}
	return func() map[ebpf.AttachType]uint64 {
		all := map[ebpf.AttachType]uint64{}
		for as, m := range runs {
			var n uint64
			if err := m.Lookup(uint32(0), &n); err != nil {
				t.Fatal(err)
			}
			all[as] = n
		}
		return all
	}
}

// residentMemory is how much memory a process has, in bytes.
func residentMemory(t *testing.T, pid int) int {
	t.Helper()
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var size, resident int
	if _, err := fmt.Sscan(string(statm), &size, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * os.Getpagesize()
}

// SYNs from everywhere, which nobody will ever acknowledge, fill the proxy's queue. Connections and probes go on by syncookies,
// and nothing of the dataplane's remembers a SYN.
func TestASYNFloodKeepsNobodyOut(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, app := n.enrolledPod("pod")
	w := newInjector(t, n.Outside, n.Outside.Link, n.Node) // to the node, which forwards

	before := residentMemory(t, n.agent.Pid)
	const syns = 20000
	flooded := make(chan struct{})
	go func() {
		defer close(flooded)
		for i := range syns {
			family, source := "IPv4", netip.AddrFrom4([4]byte{198, 19, byte(i >> 8), byte(i)})
			if i%2 == 1 {
				a := netip.MustParseAddr("fd66::").As16()
				a[14], a[15] = byte(i>>8), byte(i)
				family, source = "IPv6", netip.AddrFrom16(a)
			}
			err := w.trySend(netip.AddrPortFrom(source, uint16(1024+i)), netip.AddrPortFrom(addr(pod, family), 8080))
			if err != nil && !errors.Is(err, unix.ENOBUFS) { // the link is full, as it should be
				t.Error(err)
				return
			}
		}
	}()
	legitimate := 0
	for done := false; !done || legitimate < 100; {
		select {
		case <-flooded:
			done = true
		default:
		}
		for _, family := range []string{"IPv4", "IPv6"} {
			remote := netip.AddrPortFrom(addr(pod, family), 8080)
			id, local := ask(t, n.Outside, bed.DialSpec{Remote: remote})
			if id.Peer.Addr() != local.Addr() {
				t.Errorf("the app sees %s, want %s", id.Peer, local)
			}
			if id, _ := ask(t, n.Node, bed.DialSpec{Remote: remote}); id.Peer.Addr() != probeAddrs[family] {
				t.Errorf("the app sees the probe come from %s", id.Peer)
			}
			legitimate++
			if t.Failed() {
				<-flooded
				t.Fatalf("after %d connections", legitimate)
			}
		}
	}
	t.Logf("%d connections and as many probes beside %d SYNs", legitimate, syns)
	c := n.counters(pod)
	if c.InboundSteered < syns/2 {
		t.Errorf("only %d SYNs have arrived at the pod: this test shows nothing", c.InboundSteered)
	}
	if got := app.Accepts(); got != int64(2*legitimate) || c.ProbesAdmitted != uint64(legitimate) {
		t.Errorf("the app has accepted %d connections, and %d probes were admitted; %d of each were made", got, c.ProbesAdmitted, legitimate)
	}
	n.wantNothingAdmitted()
	if grown := residentMemory(t, n.agent.Pid) - before; grown > 16<<20 {
		t.Errorf("the agent has %d bytes more than before", grown)
	}
}

func TestBadProbeAddressesAreRefused(t *testing.T) {
	n := newEmptyProbeNode(t, bed.Options{})
	before := snapshotOf(t, n.Node)
	const v4, v6 = "--host-probe-snat-ip", "--host-probe-snat-ipv6"
	for name, c := range map[string]struct {
		flag, value string
		status      int
		words       []string
	}{
		"no address":                     {v4, "localhost", 2, []string{"not an IP address"}},
		"no address, IPv6":               {v6, "fd00:::1", 2, []string{"not an IP address"}},
		"a prefix":                       {v4, "169.254.7.127/32", 2, []string{"not an IP address"}},
		"an address of the other family": {v4, "fd00::7", 2, []string{"is an IPv6 address"}},
		"an IPv4 address for IPv6":       {v6, "169.254.7.127", 2, []string{"is an IPv4 address"}},
		"v4-mapped":                      {v6, "::ffff:169.254.7.127", 2, []string{"v4-mapped"}},
		"multicast":                      {v4, "224.0.0.7", 2, []string{"multicast"}},
		"multicast, IPv6":                {v6, "ff02::7", 2, []string{"multicast"}},
		"loopback":                       {v4, "127.0.0.7", 2, []string{"cannot be the source"}},
		"loopback, IPv6":                 {v6, "::1", 2, []string{"cannot be the source"}},
		"unspecified":                    {v4, "0.0.0.0", 2, []string{"cannot be the source"}},
		"unspecified, IPv6":              {v6, "::", 2, []string{"cannot be the source"}},
		"broadcast":                      {v4, "255.255.255.255", 2, []string{"cannot be the source"}},
		"link-local":                     {v6, "fe80::7", 2, []string{"link-local"}},
		"link-local with a zone":         {v6, "fe80::7%eth0", 2, []string{"not an IP address"}},
		"another interface's":            {v4, n.Node.V4.String(), 1, []string{"already belongs to eth0"}},
		"another interface's, IPv6":      {v6, n.Node.V6.String(), 1, []string{"already belongs to eth0"}},
	} {
		for _, by := range []string{"flag", "environment"} {
			t.Run(name+" by "+by, func(t *testing.T) {
				self, err := os.Executable()
				if err != nil {
					t.Fatal(err)
				}
				variable := strings.ToUpper(strings.ReplaceAll(strings.TrimPrefix(c.flag, "--"), "-", "_"))
				argv, env := append([]string{self}, n.agentArgs()...), []string{roleVariable + "=agent"}
				named := c.flag
				if by == "flag" {
					argv = append(argv, c.flag, c.value)
				} else {
					env = append(env, variable+"="+c.value)
					if c.status == 2 {
						named = variable
					}
				}
				p, err := n.StartIn(n.Node, n.group("system/agent"), "agent", argv, env)
				if err != nil {
					t.Fatal(err)
				}
				if got := exitStatus(t, p); got != c.status {
					t.Errorf("exit status %d, want %d", got, c.status)
				}
				out := p.Output()
				if strings.Count(out, "\n") != 1 {
					t.Errorf("it says %q, want one line", out)
				}
				for _, word := range append(c.words, named, c.value) {
					if !strings.Contains(out, word) {
						t.Errorf("%q does not say %q", out, word)
					}
				}
				if now := snapshotOf(t, n.Node); now != before {
					t.Errorf("the node's network is not as it was:\n%s", cmp.Diff(before, now))
				}
				if _, err := os.Stat(n.BPFFS); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("there is something at %s: %v", n.BPFFS, err)
				}
			})
		}
	}
}

func snapshotOf(t *testing.T, ns *bed.NS) string {
	t.Helper()
	s, err := ns.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// cleanup runs "redirector cleanup".
func (n *probeNode) cleanup() {
	n.t.Helper()
	p := n.process("agent", "system/agent", "cleanup", "cleanup", "--run-dir", n.RunDir, "--bpffs", n.BPFFS, "--zds-socket", n.ZDSSocket)
	if code := exitStatus(n.t, p); code != 0 {
		n.t.Fatalf("cleanup ended with status %d: %s", code, p.Output())
	}
}

func TestTheHostIsAsItWasAfterCleanup(t *testing.T) {
	for name, flags := range map[string][]string{
		"by default":                  nil,
		"with flow":                   {"--probe-identity", "flow"},
		"with addresses of one's own": {"--host-probe-snat-ip", "198.18.7.9", "--host-probe-snat-ipv6", "fd99:7::9"},
		"after a kill":                nil,
	} {
		t.Run(name, func(t *testing.T) {
			n := newEmptyProbeNode(t, bed.Options{}, flags...)
			pod := n.plainPod("pod")
			n.serve(pod, 8080, bed.AppOptions{})
			host, inside := snapshotOf(t, n.Node), snapshotOf(t, pod)
			n.startAgent()
			n.startProxyIn("proxy")
			n.enrolSpec(pod)
			n.probe(groupKubelet, 2, bothFamilies(pod)...)
			if d := cmp.Diff(host, snapshotOf(t, n.Node)); (d == "") != slices.Contains(flags, "flow") {
				t.Errorf("the agent has changed the node's network by %q", d)
			}
			n.proxy.stop()
			if name == "after a kill" {
				if err := n.agent.Kill(); err != nil {
					t.Fatal(err)
				}
			} else {
				n.stopAgent()
			}
			n.cleanup()
			for ns, before := range map[*bed.NS]string{n.Node: host, pod: inside} {
				if d := cmp.Diff(before, snapshotOf(t, ns)); d != "" {
					t.Errorf("netns %s is not as it was (-was +is):\n%s", ns.Name, d)
				}
			}
		})
	}
}

// The next agent has other addresses: those of the last one go.
func TestProbeAddressesMayChange(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	for _, c := range []struct {
		flags []string
		want  []netip.Addr // nil: the node's own
	}{
		{[]string{"--host-probe-snat-ip", "198.18.7.9", "--host-probe-snat-ipv6", "fd99:7::9"}, []netip.Addr{netip.MustParseAddr("198.18.7.9"), netip.MustParseAddr("fd99:7::9")}},
		{[]string{"--probe-identity", "flow"}, nil},
		{nil, []netip.Addr{hostprobe.Defaults.V4, hostprobe.Defaults.V6}},
	} {
		n.stopAgent()
		n.flags = c.flags
		n.startAgent()
		if got := n.loopbackAddrs(); !slices.Equal(got, c.want) {
			t.Errorf("with %v lo has %v, want %v", c.flags, got, c.want)
		}
		want := c.want
		if want == nil {
			want = []netip.Addr{nodesAddr(t, n.Node, pod.V4), nodesAddr(t, n.Node, pod.V6)}
		}
		results := n.probe(groupKubelet, 2, bothFamilies(pod)...)
		wantPeers(t, results[pod.V4], 2, want[0])
		wantPeers(t, results[pod.V6], 2, want[1])
	}
	if seen := n.proxy.connections(); len(seen) > 0 {
		t.Errorf("the proxy saw %+v", seen)
	}
}

// loopbackAddrs are those of the node's lo besides the usual, IPv4 first.
func (n *probeNode) loopbackAddrs() []netip.Addr {
	n.t.Helper()
	h, err := n.Node.Handle()
	if err != nil {
		n.t.Fatal(err)
	}
	defer h.Close()
	list, err := h.AddrList(linkOf(n.t, n.Node, "lo"), netlink.FAMILY_ALL)
	if err != nil {
		n.t.Fatal(err)
	}
	var all []netip.Addr
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && !ip.Unmap().IsLoopback() {
			all = append(all, ip.Unmap())
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

func TestAProbeAddressThatIsTakenAwayComesBack(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	h, err := n.Node.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	eachFamily(t, func(t *testing.T, family string) {
		a := probeAddrs[family]
		err := h.AddrDel(linkOf(t, n.Node, "lo"), &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}})
		if err != nil {
			t.Fatal(err)
		}
		// Without it, the node's processes are not taken for probes, and connect all the same.
		remote := netip.AddrPortFrom(addr(pod, family), 8080)
		ask(t, n.Node, bed.DialSpec{Remote: remote})
		eventually(t, "lo has it again", func() bool { return slices.Contains(n.loopbackAddrs(), a) })
		if id, _ := ask(t, n.Node, bed.DialSpec{Remote: remote}); id.Peer.Addr() != a {
			t.Errorf("the app sees %s, want %s", id.Peer, a)
		}
	})
}
