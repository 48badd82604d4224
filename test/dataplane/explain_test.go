// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/explain"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// explained is a connection that is explained, and made.
type explained struct {
	name string
	q    explain.Query
	// connect makes the connection and says in explain's words what became of it: outcome() for TCP.
	connect func() string
}

// What explain says of a connection is what becomes of it, and the counter that it names counts it.
func TestExplainSaysWhatHappens(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	serveDNS(t, n.Outside, netip.Addr{}, 53)
	eachFamily(t, func(t *testing.T, family string) {
		for _, c := range append(n.outboundCases(t, pod, family), n.inboundCases(t, pod, family)...) {
			t.Run(c.name, func(t *testing.T) { n.compare(t, pod, c) })
		}
	})

	// What the pod has its own way.
	eachFamily(t, func(t *testing.T, family string) {
		outside, own := addr(n.Outside, family), addr(pod, family)
		to := func(port uint16) explain.Query { return explain.Query{To: netip.AddrPortFrom(outside, port)} }
		from := func(port uint16) explain.Query {
			return explain.Query{From: netip.AddrPortFrom(outside, 0), To: netip.AddrPortFrom(own, port)}
		}
		wide, _ := outside.Prefix(24)
		for _, c := range []struct {
			setting api.SettingsRequest
			cases   []explained
		}{
			{api.SettingsRequest{"exclude-outbound-ports": "8080"}, []explained{
				n.tcp("to an excluded port", pod, to(8080)), n.tcp("to itself, on an excluded port", pod, explain.Query{To: netip.AddrPortFrom(own, 8080)}),
			}},
			{api.SettingsRequest{"exclude-outbound-cidrs": wide.String()}, []explained{n.tcp("to an excluded range", pod, to(8080))}},
			{api.SettingsRequest{"exclude-outbound-cidrs": wide.String() + ",!" + netip.PrefixFrom(outside, outside.BitLen()).String()}, []explained{
				n.tcp("to a part of a range that is not", pod, to(8080)),
			}},
			{api.SettingsRequest{"exclude-inbound-ports": "8080"}, []explained{
				n.tcp("of a peer to an excluded port", n.Outside, from(8080)), n.tcp("of a peer to another", n.Outside, from(8099)),
			}},
			{api.SettingsRequest{"bypass-inbound": "true"}, []explained{
				n.tcp("of a peer, bypassed", n.Outside, from(8080)), n.tcp("of a peer to the mesh's port, bypassed", n.Outside, from(maps.PortHBONE)),
				n.tcp("of a peer to the proxy's port, bypassed", n.Outside, from(maps.PortInbound)),
				n.tcp("to another of a bypassed pod", pod, to(8080)),
			}},
			{api.SettingsRequest{"dns-capture": "false"}, []explained{
				n.dnsOverUDP("a DNS query that is not captured", pod, netip.AddrPortFrom(outside, 53), family),
				n.dnsOverTCP("a DNS query by TCP that is not", pod, netip.AddrPortFrom(outside, 53), family),
			}},
		} {
			n.change(pod, c.setting)
			for _, each := range c.cases {
				t.Run(each.name, func(t *testing.T) { n.compare(t, pod, each) })
			}
			n.change(pod, api.SettingsRequest{
				"exclude-outbound-ports": "", "exclude-outbound-cidrs": "", "exclude-inbound-ports": "", "bypass-inbound": "false", "dns-capture": "default",
			})
		}
	})

	// Of a machine behind the pod.
	n.change(pod, api.SettingsRequest{"reroute-interfaces": "br0"})
	m := n.machine(t, pod, "machine", "br0")
	n.routed(t, pod)
	eachFamily(t, func(t *testing.T, family string) {
		from := netip.AddrPortFrom(addr(m, family), 0)
		for name, to := range map[string]netip.AddrPort{
			"of a machine":                     netip.AddrPortFrom(addr(n.Outside, family), 8080),
			"of a machine to its pod":          netip.AddrPortFrom(addr(pod, family), 8080),
			"of a machine to the proxy's port": netip.AddrPortFrom(addr(pod, family), maps.PortInbound),
		} {
			c := n.tcp(name, m, explain.Query{From: from, To: to, Via: "br0"})
			t.Run(name, func(t *testing.T) { n.compare(t, pod, c) })
		}
	})
	q := explain.Query{From: netip.AddrPortFrom(m.V4, 0), To: netip.AddrPortFrom(n.Outside.V4, 80), Via: "br9"}
	if _, err := n.agent.client.Explain(t.Context(), "uid-pod", q); err == nil || !strings.Contains(err.Error(), `no interface "br9"`) {
		t.Errorf("by an interface that is not there: %v", err)
	}

	// Without a proxy the same goes nowhere.
	if err := n.proxy.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its listeners are gone", func() bool {
		p, err := n.agent.client.Pod(t.Context(), "uid-pod")
		return err == nil && len(p.Listeners) == 0
	})
	eachFamily(t, func(t *testing.T, family string) {
		to, own := addr(n.Outside, family), addr(pod, family)
		for _, c := range []explained{
			n.tcp("outbound without a proxy", pod, explain.Query{To: netip.AddrPortFrom(to, 8080)}),
			n.tcp("inbound without a proxy", n.Outside, explain.Query{From: netip.AddrPortFrom(to, 0), To: netip.AddrPortFrom(own, 8080)}),
			n.tcp("the mesh's port without a proxy", n.Outside, explain.Query{From: netip.AddrPortFrom(to, 0), To: netip.AddrPortFrom(own, maps.PortHBONE)}),
			n.hostProcess("a probe without a proxy", groupKubelet, explain.Kubelet, pod, family),
			n.tcp("to itself without a proxy", pod, explain.Query{To: netip.AddrPortFrom(own, 8080)}),
		} {
			t.Run(c.name, func(t *testing.T) { n.compare(t, pod, c) })
		}
	})
}

// change changes settings of a pod's.
func (n *probeNode) change(pod *bed.NS, settings api.SettingsRequest) {
	n.t.Helper()
	if _, err := n.agent.client.Set(n.t.Context(), "uid-"+pod.Name, settings); err != nil {
		n.t.Fatal(err)
	}
}

// compare asks, connects, and compares.
func (n *probeNode) compare(t *testing.T, pod *bed.NS, c explained) {
	t.Helper()
	answer, err := n.agent.client.Explain(t.Context(), "uid-"+pod.Name, c.q)
	if err != nil {
		t.Fatal(err)
	}
	said := string(answer.Verdict)
	if answer.Verdict == explain.ToProxy {
		said += fmt.Sprintf(" %d", answer.Port)
	}
	before := counterOf(n.counters(pod), answer.Counter)
	became := c.connect()
	if became != said {
		t.Errorf("explain says %q (%s), and it is %q", said, answer.Reason, became)
	}
	// Of connections that nobody answers, the outcome is there before the count of the last attempt.
	if answer.Counter != "" && counterOf(n.counters(pod), answer.Counter) == before {
		t.Errorf("explain says that %s counts it, and it does not", answer.Counter)
	}
	last := len(answer.Steps) - 1
	for i, step := range answer.Steps {
		if step.Decides != (i == last) || step.Text == "" || step.Found == "" {
			t.Errorf("step %d of %d is %+v", i, last, step)
		}
	}
}

// counterOf is a counter by its name in the map.
func counterOf(c maps.Counters, name string) (value uint64) {
	c.Each(func(each string, v uint64) {
		if each == name {
			value = v
		}
	})
	return value
}

// explainedPort is the source port of the last connection that was made to compare.
var explainedPort atomic.Uint32

// tcp is a connection of an app in a namespace.
func (n *probeNode) tcp(name string, from *bed.NS, q explain.Query) explained {
	return explained{name, q, func() string {
		// By its port it is known to the proxy, also if it is reset before connect() returns.
		source := uint16(21000 + explainedPort.Add(1))
		c, err := from.Dial(n.t.Context(), bed.DialSpec{
			Remote: q.To, Local: netip.AddrPortFrom(netip.Addr{}, source), Timeout: 700 * time.Millisecond,
		})
		if err != nil {
			return n.outcome(source, q.To, false)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if q.To.Port() == maps.PortHBONE {
			// The tunnel's end answers what is no request.
			_, err := io.WriteString(c, "nonsense\r\n\r\n")
			answer, errRead := io.ReadAll(io.LimitReader(c, 64))
			if err == nil && errRead == nil && strings.HasPrefix(string(answer), "HTTP/1.1 400") {
				return fmt.Sprintf("%s %d", explain.ToProxy, maps.PortHBONE)
			}
			return fmt.Sprintf("answered with %q, %v", answer, errors.Join(err, errRead))
		}
		_, err = bed.ReadIdentity(c)
		return n.outcome(source, q.To, err == nil)
	}}
}

// outcome says who has got a connection from a port: the proxy, which notes it, or the app at once, or nobody. The app's word, if
// there is one, comes by the proxy after that has noted the connection. Where the proxy does not reach the app, the note may be late.
func (n *probeNode) outcome(source uint16, remote netip.AddrPort, answered bool) string {
	for deadline := time.Now().Add(300 * time.Millisecond); ; time.Sleep(5 * time.Millisecond) {
		for _, r := range n.proxy.connections() {
			if r.Source.Port() == source && r.OriginalDestination == remote {
				port := map[nodeproxy.Direction]int{nodeproxy.Outbound: maps.PortOutbound, nodeproxy.Inbound: maps.PortInbound}[r.Direction]
				return fmt.Sprintf("%s %d", explain.ToProxy, port)
			}
		}
		switch {
		case answered && remote.Addr() != n.Outside.V4 && remote.Addr() != n.Outside.V6:
			return string(explain.ToApp)
		case answered:
			return string(explain.Out)
		case time.Now().After(deadline):
			return string(explain.Dropped)
		}
	}
}

// hostProcess is a connection of a process of the host's in a cgroup.
func (n *probeNode) hostProcess(name, group string, by explain.Maker, pod *bed.NS, family string) explained {
	to := netip.AddrPortFrom(addr(pod, family), 8080)
	q := explain.Query{From: netip.AddrPortFrom(nodesAddr(n.t, n.Node, to.Addr()), 0), To: to, By: by}
	return explained{name, q, func() string {
		seen := len(n.proxy.connections())
		r := n.probe(group, 1, to.String())[to.Addr()]
		proxied := func() bool {
			return slices.ContainsFunc(n.proxy.connections()[seen:], func(r nodeproxy.Record) bool {
				return r.Direction == nodeproxy.Inbound && r.OriginalDestination == to
			})
		}
		switch {
		case proxied():
			return fmt.Sprintf("%s %d", explain.ToProxy, maps.PortInbound)
		case len(r.Errors) > 0:
			return string(explain.Dropped)
		default:
			return string(explain.ToApp)
		}
	}}
}

// dnsOverUDP is a query by UDP.
func (n *probeNode) dnsOverUDP(name string, pod *bed.NS, to netip.AddrPort, family string) explained {
	return explained{name, explain.Query{To: to, Protocol: explain.UDP}, func() string {
		s := openUDP(n.t, pod, dnsSocketSpec{family: family})
		if err := s.sendTo(query(7, "name.test.", family), to); err != nil {
			return err.Error()
		}
		_, answer, _, err := s.receive()
		return dnsOutcome(family, answer, err)
	}}
}

// dnsOverTCP is a query by TCP.
func (n *probeNode) dnsOverTCP(name string, pod *bed.NS, to netip.AddrPort, family string) explained {
	return explained{name, explain.Query{To: to}, func() string {
		seen := len(n.proxy.connections())
		c, err := pod.Dial(n.t.Context(), bed.DialSpec{Remote: to})
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if err := writeStream(c, query(8, "name.test.", family)); err != nil {
			return err.Error()
		}
		message, err := readStream(c)
		if err != nil {
			return err.Error()
		}
		// The proxy may have carried it as any other connection.
		for _, r := range n.proxy.connections()[seen:] {
			if r.Direction == nodeproxy.Outbound && r.OriginalDestination == to {
				return fmt.Sprintf("%s %d", explain.ToProxy, maps.PortOutbound)
			}
		}
		_, answer, err := answered(message)
		return dnsOutcome(family, answer, err)
	}}
}

// dnsOutcome says whose answer it is: the proxy's differs from that of the server.
func dnsOutcome(family string, answer netip.Addr, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case answer == proxyAnswer(family):
		return fmt.Sprintf("%s %d", explain.ToProxy, maps.PortDNS)
	case answer == serverAnswer(family):
		return string(explain.Out)
	default:
		return "an answer of nobody's: " + answer.String()
	}
}

func (n *probeNode) outboundCases(t *testing.T, pod *bed.NS, family string) []explained {
	t.Helper()
	outside, own := addr(n.Outside, family), addr(pod, family)
	loopback := netip.MustParseAddr(map[string]string{"IPv4": "127.0.0.1", "IPv6": "::1"}[family])
	to := func(a netip.Addr, port uint16) explain.Query { return explain.Query{To: netip.AddrPortFrom(a, port)} }
	fromOwn := to(outside, 8080)
	fromOwn.From = netip.AddrPortFrom(own, 0)
	cases := []explained{
		n.tcp("to another", pod, to(outside, 8080)),
		n.tcp("to another, from its address", pod, fromOwn),
		n.tcp("to itself", pod, to(own, 8080)),
		n.tcp("to loopback", pod, to(loopback, 8080)),
		n.tcp("to the proxy's outbound port", pod, to(own, maps.PortOutbound)),
		n.tcp("to the proxy's inbound port on loopback", pod, to(loopback, maps.PortInbound)),
		n.dnsOverUDP("a DNS query by UDP", pod, netip.AddrPortFrom(outside, 53), family),
		n.dnsOverTCP("a DNS query by TCP", pod, netip.AddrPortFrom(outside, 53), family),
	}
	// The proxy's own connection, of which the app there knows.
	byProxy := to(outside, 8080)
	byProxy.By = explain.Proxy
	cases = append(cases, explained{"the proxy's to another", byProxy, func() string {
		id, _ := ask(t, pod, bed.DialSpec{Remote: byProxy.To})
		if id.Local == byProxy.To {
			return string(explain.Out)
		}
		return fmt.Sprintf("%+v", id)
	}})
	toApp := to(own, 8080)
	toApp.By, toApp.From = explain.Proxy, netip.AddrPortFrom(outside, 0)
	return append(cases, explained{"the proxy's to the app, as a client", toApp, func() string {
		id, _ := ask(t, n.Outside, bed.DialSpec{Remote: toApp.To})
		if id.Local == toApp.To && id.Peer.Addr() == outside {
			return string(explain.ToApp)
		}
		return fmt.Sprintf("%+v", id)
	}})
}

func (n *probeNode) inboundCases(t *testing.T, pod *bed.NS, family string) []explained {
	t.Helper()
	outside, own := addr(n.Outside, family), addr(pod, family)
	from := func(port uint16) explain.Query {
		return explain.Query{From: netip.AddrPortFrom(outside, 0), To: netip.AddrPortFrom(own, port)}
	}
	return []explained{
		n.tcp("of a peer", n.Outside, from(8080)),
		n.tcp("of a peer to a port where nobody listens", n.Outside, from(8099)),
		n.tcp("of a peer to the mesh's port", n.Outside, from(maps.PortHBONE)),
		n.tcp("of a peer to the proxy's outbound port", n.Outside, from(maps.PortOutbound)),
		n.hostProcess("of the kubelet", groupKubelet, explain.Kubelet, pod, family),
		n.hostProcess("of another process of the host's", groupOther, explain.Node, pod, family),
		n.hostProcess("of a pod with hostNetwork", groupHostPod, explain.HostPod, pod, family),
	}
}

// What cannot be answered says why, and what to ask instead.
func TestExplainRefusesWhatMakesNoSense(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	outside := netip.AddrPortFrom(n.Outside.V4, 8080)
	for name, c := range map[string]struct {
		uid   string
		q     explain.Query
		words []string
	}{
		"two families":    {"uid-pod", explain.Query{From: netip.AddrPortFrom(pod.V6, 0), To: outside}, []string{"families"}},
		"another's app":   {"uid-pod", explain.Query{From: outside, To: outside, By: explain.App}, []string{"none of the pod's", "--by"}},
		"a peer nowhere":  {"uid-pod", explain.Query{To: outside, By: explain.Peer}, []string{"no source"}},
		"no destination":  {"uid-pod", explain.Query{}, []string{"no destination"}},
		"an unknown pod":  {"uid-x", explain.Query{To: outside}, []string{"uid-x", "no such pod"}},
		"nobody":          {"uid-pod", explain.Query{To: outside, By: "me"}, []string{"me", "kubelet"}},
		"another network": {"uid-pod", explain.Query{To: outside, Protocol: "sctp"}, []string{"sctp", "tcp or udp"}},
	} {
		t.Run(name, func(t *testing.T) {
			answer, err := n.agent.client.Explain(t.Context(), c.uid, c.q)
			if err == nil {
				text, _ := json.Marshal(answer)
				t.Fatalf("it is answered: %s", text)
			}
			wantNamed(t, err, c.words)
		})
	}
}
