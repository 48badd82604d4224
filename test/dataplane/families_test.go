// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// enrolWith enrols a pod with an agent that is a process, and waits for the proxy.
func (a *agentProcess) enrolWith(t *testing.T, pod *bed.NS) {
	t.Helper()
	request := api.EnrollRequest{Spec: agent.Spec(pod), Wait: true, Timeout: api.Duration(patience)}
	if _, err := a.client.Enroll(t.Context(), request); err != nil {
		t.Fatal(err)
	}
}

// wantNoComplaint checks that nothing of what the agent has done has failed, and that it sees nothing to warn of.
func (a *agentProcess) wantNoComplaint(t *testing.T) {
	t.Helper()
	for line := range strings.Lines(a.Output()) {
		if strings.Contains(line, "level=ERROR") || strings.Contains(line, "level=WARN") {
			t.Errorf("the agent says %s", line)
		}
	}
	status, err := a.client.Status(t.Context())
	if err != nil || len(status.Warnings) > 0 {
		t.Errorf("the agent warns of %+v, %v", status.Warnings, err)
	}
}

// wantThrough connects, and checks that the proxy has seen it.
func wantThrough(t *testing.T, p *proxy, pod, from *bed.NS, direction nodeproxy.Direction, remote netip.AddrPort) {
	t.Helper()
	_, local := ask(t, from, bed.DialSpec{Remote: remote, Data: []byte("hello")})
	p.saw(pod, direction, local, remote)
}

// A host that has no IPv6, for it was booted so, or by sysctl. The agent starts as on any other, and all that is IPv4 works.
func TestAHostWithoutIPv6(t *testing.T) {
	n := newBareNodeOn(t, bed.Options{NodeV6Disabled: true})
	a := startAgent(t, n.Bed)
	p := n.startProxyProcess()
	pod := n.plainPod("pod")
	before, err := pod.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	n.serve(n.Outside, 8080, bed.AppOptions{})
	app := n.serve(pod, 8080, bed.AppOptions{})
	a.enrolWith(t, pod)
	out, in := netip.AddrPortFrom(n.Outside.V4, 8080), netip.AddrPortFrom(pod.V4, 8080)
	wantThrough(t, p, pod, pod, nodeproxy.Outbound, out)
	wantThrough(t, p, pod, n.Outside, nodeproxy.Inbound, in)

	// A probe finds its address on the host's lo, without one for IPv6 beside it.
	accepted := app.Accepts()
	if _, local := ask(t, n.Node, bed.DialSpec{Remote: in}); local.Addr() != probeAddrs["IPv4"] {
		t.Errorf("a probe comes from %s", local)
	}
	if got := app.Accepts(); got != accepted+1 {
		t.Errorf("the app has accepted %d connections of a probe", got-accepted)
	}

	// It takes over, and repairs, where there is no IPv6.
	if err := a.Kill(); err != nil {
		t.Fatal(err)
	}
	a = startAgent(t, n.Bed)
	n.damage(pod, "reconcile: routing")
	eventually(t, "the rule is put back", func() bool {
		status, err := a.client.Status(t.Context())
		return err == nil && len(status.Proxies) > 0 && status.Repairs["routing"] > 0
	})
	wantThrough(t, p, pod, pod, nodeproxy.Outbound, out)
	if err := a.client.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	n.wantUntouched(pod, before)
	for line := range strings.Lines(a.Output()) {
		if strings.Contains(line, "level=ERROR") || strings.Contains(line, "IPv6") {
			t.Errorf("the agent says %s", line)
		}
	}
}

// Pods of one family work as those of both do, whether the node has the other, and the pod's own, or not.
func TestPodsOfOneFamily(t *testing.T) {
	for name, c := range map[string]struct {
		node     bed.Options
		pod      bed.PodOptions
		families []string
	}{
		"IPv4 only":                           {pod: bed.PodOptions{V4Only: true}, families: []string{"IPv4"}},
		"IPv6 only":                           {pod: bed.PodOptions{V6Only: true}, families: []string{"IPv6"}},
		"IPv6 disabled":                       {pod: bed.PodOptions{V6Disabled: true}, families: []string{"IPv4"}},
		"IPv6 only, on a host without it":     {bed.Options{Bridge: true, NodeV6Disabled: true}, bed.PodOptions{V6Only: true}, []string{"IPv6"}},
		"both, on a host without IPv6":        {bed.Options{Bridge: true, NodeV6Disabled: true}, bed.PodOptions{}, []string{"IPv4", "IPv6"}},
		"IPv6 disabled, on a host without it": {bed.Options{Bridge: true, NodeV6Disabled: true}, bed.PodOptions{V6Disabled: true}, []string{"IPv4"}},
	} {
		t.Run(name, func(t *testing.T) {
			needsIPv6(t)
			n := newBareNodeOn(t, c.node)
			a := startAgent(t, n.Bed)
			p := n.startProxyProcess()
			var pods []*bed.NS
			var before []string
			for _, name := range []string{"client", "server"} {
				pod, err := n.Pod(name, c.pod)
				if err != nil {
					t.Fatal(err)
				}
				state, err := pod.Snapshot()
				if err != nil {
					t.Fatal(err)
				}
				pods, before = append(pods, pod), append(before, state)
			}
			client, server := pods[0], pods[1]
			n.serve(server, 8080, bed.AppOptions{})
			a.enrolWith(t, client)
			a.enrolWith(t, server)
			for _, family := range c.families {
				remote := netip.AddrPortFrom(addr(server, family), 8080)
				_, local := ask(t, client, bed.DialSpec{Remote: remote, Data: []byte("hello")})
				p.saw(client, nodeproxy.Outbound, local, remote)
				// What the client's proxy sends has the pod's address, and a port of its own.
				eventually(t, "the server's proxy sees it, too", func() bool {
					for _, r := range p.connections() {
						if r.UID == "uid-server" && r.Direction == nodeproxy.Inbound && r.OriginalDestination == remote &&
							r.Source.Addr() == addr(client, family) {
							return true
						}
					}
					return false
				})
			}
			a.wantNoComplaint(t)
			if err := p.Kill(); err != nil {
				t.Fatal(err)
			}
			for _, family := range c.families {
				blocked(t, client, netip.AddrPortFrom(addr(server, family), 8080))
			}
			for i, pod := range pods {
				if err := a.client.Unenroll(t.Context(), "uid-"+pod.Name); err != nil {
					t.Fatal(err)
				}
				after, err := pod.Snapshot()
				if err != nil || after != before[i] {
					t.Errorf("pod %s is not as it was, %v", pod.Name, err)
				}
			}
		})
	}
}
