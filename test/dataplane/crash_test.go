// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
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

	for range 3 {
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

// crashAt has this process killed at a point of package fault; see rebuild.CrashVariable. A point that is not on the list is a
// mistake that no test would find.
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
	fault.Hook = func(point string) {
		if !known[point] {
			panic("fault.Points does not list " + point)
		}
		if point == at {
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
		"reconcile": func(t *testing.T, _ *agentProcess, pod *bed.NS, point string) {
			t.Helper()
			damage(t, pod, point)
		},
	} {
		for _, point := range fault.Points[kind] {
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
func damage(t *testing.T, pod *bed.NS, point string) {
	t.Helper()
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	switch point {
	case "reconcile: seal":
		var eth0 netlink.Link
		if eth0, err = h.LinkByName(pod.Link); err == nil {
			err = h.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
				LinkIndex: eth0.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
			}})
		}
	case "reconcile: routing":
		var rules []netlink.Rule
		if rules, err = h.RuleList(unix.AF_INET); err == nil {
			for _, r := range rules {
				if r.Mark != 0 {
					r.Family = unix.AF_INET
					err = h.RuleDel(&r)
				}
			}
		}
	case "reconcile: sysctl":
		err = pod.SetSysctl("net.ipv4.fwmark_reflect", "0")
	default:
		t.Fatalf("nothing is known to damage for %q", point)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// wantUntouched checks that nothing is left of a pod: in its namespace, in the maps, in bpffs and in the run-dir.
func (n *node) wantUntouched(pod *bed.NS, before string) {
	n.t.Helper()
	if after, err := pod.Snapshot(); err != nil || after != before {
		n.t.Errorf("the namespace is not as it was, %v: %s", err, cmp.Diff(before, after))
	}
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
