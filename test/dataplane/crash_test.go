// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
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
	b := bed.ForTest(t, bed.Options{})
	if err := b.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	if err := loader.CheckFeatures(); err != nil {
		t.Skip(err)
	}
	n := &node{Bed: b, t: t}
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
