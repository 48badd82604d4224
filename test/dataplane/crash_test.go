// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/fault"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
	"github.com/redirector-dataplane/redirector/test/rebuild"
)

// agentProcess is an agent as it is run on a node.
type agentProcess struct {
	*bed.Proc
	client *api.Client
}

func startAgent(t *testing.T, b *bed.Bed) *agentProcess {
	t.Helper()
	return startAgentOf(t, b, "")
}

// startAgentOf starts an agent of that binary, "" for this one, and returns when it answers.
func startAgentOf(t *testing.T, b *bed.Bed, binary string) *agentProcess {
	t.Helper()
	a := launchAgent(t, b, binary)
	eventually(t, "the agent answers", func() bool {
		select {
		case <-a.Done():
			t.Fatalf("the agent has ended: %s", a.Output())
		default:
		}
		_, err := a.client.Status(t.Context())
		return err == nil
	})
	return a
}

// launchAgent starts an agent and does not wait for it.
func launchAgent(t *testing.T, b *bed.Bed, binary string, env ...string) *agentProcess {
	t.Helper()
	if binary == "" {
		var err error
		if binary, err = os.Executable(); err != nil {
			t.Fatal(err)
		}
		env = append(env, roleVariable+"=agent")
	}
	proc, err := b.Start(b.Node, true, "agent", []string{
		binary, "agent", "--standalone", "--run-dir", b.RunDir, "--bpffs", b.BPFFS, "--cgroup", b.Cgroup, "--zds-socket", b.ZDSSocket,
	}, env)
	if err != nil {
		t.Fatal(err)
	}
	return &agentProcess{proc, api.NewClient(filepath.Join(b.RunDir, "agent.sock"))}
}

// The agent is killed under load: what is established goes on, what is new is steered, and the next agent takes over without
// a connection noticing.
func TestTheAgentIsKilledUnderLoad(t *testing.T) {
	n := newBareNode(t)
	b := n.Bed
	a := startAgent(t, b)
	p := n.startProxyProcess()
	pod := n.plainPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(pod, 8080, bed.AppOptions{})
	enrol := func() {
		t.Helper()
		request := api.EnrollRequest{Spec: agent.Spec(pod), Wait: true, Timeout: api.Duration(10 * time.Second)}
		if _, err := a.client.Enroll(t.Context(), request); err != nil {
			t.Fatal(err)
		}
	}
	enrol()

	var established []net.Conn
	var loads []*load
	for _, family := range []string{"IPv4", "IPv6"} {
		for _, way := range [][2]*bed.NS{{pod, n.Outside}, {n.Outside, pod}} {
			remote := netip.AddrPortFrom(addr(way[1], family), 8080)
			c, err := way[0].Dial(t.Context(), bed.DialSpec{Remote: remote})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			if _, err := bed.ReadIdentity(c); err != nil {
				t.Fatal(err)
			}
			established = append(established, c)
			loads = append(loads, startLoad(t, way[0], remote, 2))
		}
	}
	still := func(when string) {
		t.Helper()
		for _, c := range established {
			if err := echo(c, []byte("still there")); err != nil {
				t.Errorf("%s, %s to %s: %v", when, c.LocalAddr(), c.RemoteAddr(), err)
			}
		}
	}

	for range short(3, 1) {
		loads[0].waitFor(t, 20)
		if err := a.Kill(); err != nil {
			t.Fatal(err)
		}
		before := len(p.connections())
		loads[0].waitFor(t, 20)
		if len(p.connections()) == before {
			t.Error("without an agent the proxy sees no new connection")
		}
		still("without an agent")
		a = startAgent(t, b)
		loads[0].waitFor(t, 20)
		still("with the next agent")
	}
	for _, l := range loads {
		l.end(t)
	}
	enrol() // the proxy has come back, and has the pod
	pods, err := a.client.Pods(t.Context())
	if err != nil || len(pods) != 1 || pods[0].UID != "uid-pod" || pods[0].State != "enrolled" {
		t.Errorf("the last agent has %+v, %v", pods, err)
	}
	if c := pods[0].Counters; c.OutboundNoListener+c.InboundNoListener+c.SealDropped > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// crashAt has this process killed at a point of package fault, or, with "#2" behind it, when that is passed for the second time; see
// rebuild.CrashVariable. A point that is not on the list is a mistake that no test would find.
func crashAt(at string) {
	known := map[string]bool{}
	for _, points := range fault.Points {
		for _, p := range points {
			known[p] = true
		}
	}
	if at == "" {
		return
	}
	at, count, _ := strings.Cut(at, "#")
	times := int64(1)
	if count != "" {
		var err error
		if times, err = strconv.ParseInt(count, 10, 64); err != nil {
			panic(err)
		}
	}
	var passed atomic.Int64
	fault.Hook = func(point string) {
		if !known[point] {
			panic("fault.Points does not list " + point)
		}
		if point == at && passed.Add(1) == times {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
}

// died waits for an agent to be killed where it was to be.
func (a *agentProcess) died(t *testing.T, point string) {
	t.Helper()
	select {
	case <-a.Done():
	case <-time.After(patience):
		t.Fatalf("the agent is not killed at %q: %s", point, a.Output())
	}
}

// An agent is killed wherever it can be with something half done. The next makes it so that the pod is either captured, wholly,
// or as it was before, wholly.
func TestTheAgentIsKilledAtEveryStep(t *testing.T) {
	type attempt func(t *testing.T, a *agentProcess, pod *bed.NS, point string)
	enrolPod := func(t *testing.T, a *agentProcess, pod *bed.NS, wait bool) error {
		t.Helper()
		request := api.EnrollRequest{Spec: agent.Spec(pod), Wait: wait, Timeout: api.Duration(patience)}
		_, err := a.client.Enroll(t.Context(), request)
		return err
	}
	for kind, try := range map[string]attempt{
		"create": nil,
		"enrol": func(t *testing.T, a *agentProcess, pod *bed.NS, _ string) {
			_ = enrolPod(t, a, pod, true)
		},
		"unenrol": func(t *testing.T, a *agentProcess, pod *bed.NS, _ string) {
			_ = a.client.Unenroll(t.Context(), "uid-"+pod.Name)
		},
		"set": func(t *testing.T, a *agentProcess, pod *bed.NS, _ string) {
			_, _ = a.client.Set(t.Context(), "uid-"+pod.Name, api.SettingsRequest{
				"exclude-outbound-cidrs": "192.0.2.0/24", "reroute-interfaces": "br0",
			})
		},
		"reconcile": nil, // see below
	} {
		for i, point := range fault.Points[kind] {
			if point == "reconcile: netns" || point == "reconcile: gone" {
				continue // TestTheAgentIsKilledWhenANamespaceIsGone
			}
			if testing.Short() && i%4 != 0 {
				continue // what kernel it is makes no difference to most
			}
			t.Run(point, func(t *testing.T) {
				n := newBareNode(t)
				b := n.Bed
				pod := n.plainPod("pod")
				n.serve(n.Outside, 8080, bed.AppOptions{})
				n.serve(pod, 8080, bed.AppOptions{})
				before, err := pod.Snapshot()
				if err != nil {
					t.Fatal(err)
				}
				proxy := n.startProxyProcess()

				if kind == "unenrol" || kind == "set" || kind == "reconcile" {
					a := startAgent(t, b)
					if err := enrolPod(t, a, pod, true); err != nil {
						t.Fatal(err)
					}
					if err := a.Kill(); err != nil {
						t.Fatal(err)
					}
				}
				dying := launchAgent(t, b, "", rebuild.CrashVariable+"="+point)
				if try != nil {
					eventually(t, "the agent answers", func() bool {
						_, err := dying.client.Status(t.Context())
						return err == nil
					})
					try(t, dying, pod, point)
				}
				if kind == "reconcile" {
					eventually(t, "the agent answers", func() bool {
						_, err := dying.client.Status(t.Context())
						return err == nil
					})
					n.damage(pod, point)
				}
				dying.died(t, point)

				a := startAgent(t, b)
				pods, err := a.client.Pods(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				switch len(pods) {
				case 0:
					t.Log("as before")
					n.wantUntouched(pod, before)
				case 1:
					t.Log("captured")
					// A change that was begun is completed.
					if settings := pods[0].Settings; kind == "set" && len(settings.ExcludeOutboundCIDRs)*len(settings.RerouteInterfaces) != 1 {
						t.Errorf("its settings are %+v", settings)
					}
				default:
					t.Fatalf("pods are %+v", pods)
				}
				// Whichever it is, it can be enrolled, and be taken out.
				if err := enrolPod(t, a, pod, true); err != nil {
					t.Fatal(err)
				}
				eachFamily(t, func(t *testing.T, family string) {
					for _, way := range [][2]*bed.NS{{pod, n.Outside}, {n.Outside, pod}} {
						remote := netip.AddrPortFrom(addr(way[1], family), 8080)
						_, local := ask(t, way[0], bed.DialSpec{Remote: remote})
						direction := nodeproxy.Outbound
						if way[1] == pod {
							direction = nodeproxy.Inbound
						}
						proxy.saw(pod, direction, local, remote)
					}
				})
				if err := a.client.Unenroll(t.Context(), "uid-pod"); err != nil {
					t.Fatal(err)
				}
				n.wantUntouched(pod, before)
			})
		}
	}
}

// damage takes away what is put back at that point.
func (n *node) damage(pod *bed.NS, point string) {
	n.t.Helper()
	h, err := pod.Handle()
	if err != nil {
		n.t.Fatal(err)
	}
	defer h.Close()
	kind := enroll.Repair(strings.TrimPrefix(point, "reconcile: "))
	for _, r := range removals() {
		if r.kind == kind {
			r.remove(n.t, pod, h)
			return
		}
	}
	s := &evasionStage{node: n}
	for _, d := range drifts() {
		if d.kind != kind {
			continue
		}
		if err := d.spoil(s, s.pinnedMaps(n.t), pod); err != nil {
			n.t.Fatal(err)
		}
		return
	}
	n.t.Fatalf("nothing is known to damage for %q", point)
}

// A pod's network namespace goes, with another in its place or none, and the agent is killed anywhere while it sees to that. The
// next has the pod in the new namespace, or knows of it no more.
func TestTheAgentIsKilledWhenANamespaceIsGone(t *testing.T) {
	moving := []string{"", "reconcile: netns"}
	for _, point := range fault.Points["unenrol"] {
		if point != "unenrol: state file removed" { // it stays
			moving = append(moving, point)
		}
	}
	// Of an enrolment, whose points the agent passes once as it takes the pod over, those where something is decided.
	moving = append(moving, "enrol: open#2", "enrol: state file#2", "enrol: map entry#2", "enrol: proxy#2")
	leaving := []string{"", "reconcile: gone", "unenrol: capture off", "unenrol: map entries removed", "unenrol: state file removed"}
	if testing.Short() {
		moving, leaving = moving[:3], leaving[:2]
	}
	for name, c := range map[string]struct {
		points  []string
		another bool
	}{
		"another in its place": {moving, true},
		"none in its place":    {leaving, false},
	} {
		for _, point := range c.points {
			t.Run(name+"/"+point, func(t *testing.T) { namespaceGoes(t, point, c.another) })
		}
	}
}

// namespaceGoes has it happen while an agent runs that is killed at that point, or, with none, while no agent runs.
func namespaceGoes(t *testing.T, point string, another bool) {
	n := newBareNode(t)
	pod := n.plainPod("pod")
	a := startAgent(t, n.Bed)
	proxy := n.startProxyProcess()
	n.serve(n.Outside, 8080, bed.AppOptions{})
	request := api.EnrollRequest{Spec: agent.Spec(pod), Wait: true, Timeout: api.Duration(patience)}
	if _, err := a.client.Enroll(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	if err := a.Kill(); err != nil {
		t.Fatal(err)
	}
	var dying *agentProcess
	if point != "" {
		dying = launchAgent(t, n.Bed, "", rebuild.CrashVariable+"="+point)
		eventually(t, "the agent has the pod", func() bool {
			pods, err := dying.client.Pods(t.Context())
			return err == nil && len(pods) == 1
		})
	}
	if err := n.RemovePod(pod); err != nil {
		t.Fatal(err)
	}
	before := ""
	if another {
		pod = n.plainPod("pod")
		n.serve(pod, 8080, bed.AppOptions{})
		var err error
		if before, err = pod.Snapshot(); err != nil {
			t.Fatal(err)
		}
	}
	if dying != nil && !another {
		// It looks twice before it forgets a pod, and then waits for the proxy.
		time.Sleep(2 * 3 * time.Second)
	}
	if dying != nil {
		dying.died(t, point)
	}

	a = startAgent(t, n.Bed)
	if !another {
		n.wantForgotten(a)
		return
	}
	eventually(t, "the pod is enrolled in the new namespace", func() bool {
		p, err := a.client.Pod(t.Context(), "uid-pod")
		return err == nil && p.NetNSCookie == pod.Cookie && p.State == enroll.StateEnrolled
	})
	n.bothWays(proxy, pod)
	if err := a.client.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	n.wantUntouched(pod, before)
}

// wantForgotten waits until nothing is known of any pod, and checks that nothing is left.
func (n *node) wantForgotten(a *agentProcess) {
	n.t.Helper()
	eventually(n.t, "the pod is forgotten", func() bool {
		pods, err := a.client.Pods(n.t.Context())
		return err == nil && len(pods) == 0
	})
	n.wantNoneLeft()
}

// bothWays has a connection each way and family go by the proxy.
func (n *node) bothWays(p *proxy, pod *bed.NS) {
	n.t.Helper()
	for _, family := range []string{"IPv4", "IPv6"} {
		remote := netip.AddrPortFrom(addr(n.Outside, family), 8080)
		_, local := ask(n.t, pod, bed.DialSpec{Remote: remote})
		p.saw(pod, nodeproxy.Outbound, local, remote)
		remote = netip.AddrPortFrom(addr(pod, family), 8080)
		_, local = ask(n.t, n.Outside, bed.DialSpec{Remote: remote})
		p.saw(pod, nodeproxy.Inbound, local, remote)
	}
}

// wantUntouched checks that nothing is left of a pod: in its namespace, in the maps, in bpffs and in the run-dir.
func (n *node) wantUntouched(pod *bed.NS, before string) {
	n.t.Helper()
	if after, err := pod.Snapshot(); err != nil || after != before {
		n.t.Errorf("the namespace is not as it was, %v: %s", err, cmp.Diff(before, after))
	}
	n.wantNoneLeft()
}

// wantNoneLeft checks that nothing is left of any pod in the maps, in bpffs and in the run-dir.
func (n *node) wantNoneLeft() {
	n.t.Helper()
	for _, name := range []string{"pods", "own_addrs", "counters", "probe_targets", "exceptions", "cidrs"} {
		m, err := ebpf.LoadPinnedMap(filepath.Join(n.BPFFS, "maps", name), nil)
		if err != nil {
			n.t.Fatal(err)
		}
		if key, err := m.NextKeyBytes(nil); key != nil || err != nil {
			n.t.Errorf("map %s has an entry, %v", name, err)
		}
		_ = m.Close()
	}
	for _, dir := range []string{filepath.Join(n.BPFFS, "pods"), filepath.Join(n.RunDir, "pods"), n.BPFFS + "-unfinished"} {
		if left, err := os.ReadDir(dir); len(left) > 0 {
			n.t.Errorf("%s has %v, %v", dir, left, err)
		}
	}
}
