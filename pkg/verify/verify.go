// SPDX-License-Identifier: Apache-2.0

// Package verify checks by real packets that a pod is captured: it connects from inside the pod's network namespace and from the
// host's, and looks at what becomes of that. What becomes of it should be what package explain says.
//
// It is safe where pods do their work. All connections are between the pod and the node itself, to ports on which nobody listens
// or to the node proxy's; nothing is sent over them but a single byte to the proxy's DNS port, and no app is reached.
package verify

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/explain"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// Result is how a check has ended.
type Result string

// The results.
const (
	Passed  Result = "passed"
	Failed  Result = "failed"
	Skipped Result = "skipped" // it does not apply, or cannot be checked here
)

// Check is one thing that was tried.
type Check struct {
	// Name says what: outbound, unproxied, seal, dns, inbound or probe.
	Name string `json:"name"`
	// Family is IPv4 or IPv6.
	Family string `json:"family"`
	Result Result `json:"result"`
	// Message says what was tried, and what became of it.
	Message string `json:"message"`
	// Cause and Remedy are there if it has failed.
	Cause  string `json:"cause,omitempty"`
	Remedy string `json:"remedy,omitempty"`
}

// The names of checks.
const (
	Outbound  = "outbound"  // an app's connection goes to the node proxy
	Unproxied = "unproxied" // an app that pretends to be the node proxy is captured as any other
	Seal      = "seal"      // what is not captured does not leave
	DNS       = "dns"       // a query goes to the node proxy
	Inbound   = "inbound"   // a peer's connection goes to the node proxy
	Probe     = "probe"     // a probe of the host's reaches the pod past the node proxy
)

// Target is the pod to check.
type Target struct {
	NS   *podns.NetNS
	Maps *maps.Maps
	// Addrs are those of the pod to be reached by; of each family the first is used.
	Addrs []netip.Addr
	// Prober connects as the host's probes do.
	Prober Prober
}

// Prober connects as a process of the host's that may probe pods.
type Prober struct {
	// Dial connects to an address and returns the kernel's error; nil if there is no way to do so, as Why says.
	Dial func(netip.AddrPort) error
	Why  string
	// Itself says that this process is one that may.
	Itself bool
}

// patience is how long an answer on the same machine may take.
const patience = time.Second

// portDomain is where DNS queries go, and portDiscard where nobody listens on a node in our days.
const (
	portDomain  = 53
	portDiscard = 9
)

// Run does all checks, one after the other. It takes some milliseconds, and up to a second for each that fails.
func Run(t Target) []Check {
	var checks []Check
	for _, family := range []string{"IPv4", "IPv6"} {
		c, err := prepare(t, family)
		switch {
		case err != nil:
			checks = append(checks, Check{Name: Outbound, Family: family, Result: Skipped, Message: err.Error()})
			continue
		case c == nil:
			continue
		}
		for _, check := range []struct {
			name string
			run  func() (Result, string)
		}{
			{Outbound, c.outbound}, {Unproxied, c.unproxied}, {Seal, c.seal}, {DNS, c.dns}, {Inbound, c.inbound}, {Probe, c.probe},
		} {
			result, message := check.run()
			checks = append(checks, Check{Name: check.name, Family: family, Result: result, Message: message})
		}
	}
	return checks
}

// checker checks one family.
type checker struct {
	Target
	// pod is the pod's address, and node one of the node's that it is reached from.
	pod, node netip.Addr
}

// prepare returns nil if the pod has no address of the family.
func prepare(t Target, family string) (*checker, error) {
	for _, addr := range t.Addrs {
		if addr.Is4() != (family == "IPv4") || !addr.IsGlobalUnicast() {
			continue
		}
		routes, err := netlink.RouteGet(addr.AsSlice())
		if err != nil {
			return nil, fmt.Errorf("the node has no route to the pod's address %s: %w", addr, err)
		}
		for _, r := range routes {
			if src, ok := netip.AddrFromSlice(r.Src); ok {
				return &checker{t, addr, src.Unmap()}, nil
			}
		}
		return nil, fmt.Errorf("the node has no address from which it would reach the pod's address %s", addr)
	}
	return nil, nil
}

// expect is what package explain says of a connection.
func (c *checker) expect(q explain.Query) (*explain.Answer, error) {
	q.Cookie = c.NS.Cookie()
	return explain.Explain(c.Maps, q)
}

// outbound connects as an app does.
func (c *checker) outbound() (Result, string) {
	to := netip.AddrPortFrom(c.node, portDiscard)
	want, err := c.expect(explain.Query{To: to})
	if err != nil {
		return Failed, err.Error()
	}
	if want.Verdict == explain.Out {
		return Skipped, "connections to the node itself are excluded for the pod: " + want.Reason
	}
	tried := fmt.Sprintf("an app's connection to %s ", to)
	got, err := c.dial(to, 0)
	switch {
	case err != nil:
		return Failed, err.Error()
	case got.mark&markMask != markCapture:
		return Failed, tried + fmt.Sprintf("was not marked for the node proxy (its mark is %#x)", got.mark)
	case !got.accepted():
		return Failed, tried + "was captured, but no node proxy accepted it: " + got.words()
	}
	return Passed, tried + "went to the node proxy"
}

// unproxied connects with the node proxy's mark, which this process may set and does not own.
func (c *checker) unproxied() (Result, string) {
	config, err := c.Maps.Config()
	if err != nil {
		return Failed, err.Error()
	}
	if config.ProxyIdentity == maps.ProxyIdentityMark {
		return Skipped, "with --proxy-identity=mark, or where it fell back to that, whoever has the mark is the node proxy"
	}
	to := netip.AddrPortFrom(c.node, portDiscard)
	if want, err := c.expect(explain.Query{To: to}); err != nil || want.Verdict == explain.Out {
		return Skipped, "connections to the node itself are excluded for the pod"
	}
	got, err := c.dial(to, markProxy)
	tried := fmt.Sprintf("a connection to %s with the node proxy's mark, of a process that is none, ", to)
	switch {
	case err != nil:
		return Failed, err.Error()
	case got.mark&markMask == markCapture:
		return Passed, tried + "was captured"
	default:
		return Failed, tried + fmt.Sprintf("was not captured (its mark is %#x): %s", got.mark, got.words())
	}
}

// dns connects to a DNS server, which is the node, where there need not be one.
func (c *checker) dns() (Result, string) {
	to := netip.AddrPortFrom(c.node, portDomain)
	want, err := c.expect(explain.Query{To: to, Protocol: explain.UDP})
	if err != nil {
		return Failed, err.Error()
	}
	if want.Port != maps.PortDNS {
		return Skipped, "the pod's queries are not captured: " + want.Steps[len(want.Steps)-2].Found
	}
	udp, err := c.dialUDP(to)
	if err != nil {
		return Failed, fmt.Sprintf("a query to %s: %v", to, err)
	}
	if !udp.local.IsLoopback() {
		return Failed, fmt.Sprintf("a query to %s would leave from %s instead of going to the node proxy on loopback", to, udp.local)
	}
	if errors.Is(udp.err, unix.ECONNREFUSED) {
		return Failed, fmt.Sprintf("a query to %s was captured, but no node proxy listens on UDP port %d of the pod's loopback", to, maps.PortDNS)
	}
	tcp, err := c.dial(to, 0)
	switch {
	case err != nil:
		return Failed, err.Error()
	case !tcp.local.IsLoopback():
		return Failed, fmt.Sprintf("a query by TCP to %s would leave from %s instead of going to the node proxy on loopback", to, tcp.local)
	case !tcp.accepted():
		return Failed, fmt.Sprintf("a query by TCP to %s was captured, but no node proxy accepted it on port %d: %s", to, maps.PortDNS, tcp.words())
	}
	return Passed, fmt.Sprintf("queries to %s by UDP and TCP went to the node proxy", to)
}

// inbound connects from the host in a way that is no probe: from a socket that is bound already. Nobody listens on the port: if
// somebody accepts, it is the node proxy.
func (c *checker) inbound() (Result, string) {
	config, err := c.Maps.Config()
	if err != nil {
		return Failed, err.Error()
	}
	if config.ProbeIdentity == maps.ProbeIdentityFlow && c.Prober.Itself {
		return Skipped, "with --probe-identity=flow a connection from here would be a probe"
	}
	return c.withClosedPort(func(port uint16) (Result, string) {
		to := netip.AddrPortFrom(c.pod, port)
		want, err := c.expect(explain.Query{From: netip.AddrPortFrom(c.node, 0), To: to, By: explain.Peer})
		if err != nil {
			return Failed, err.Error()
		}
		got := dialFrom(netip.AddrPortFrom(c.node, 0), to)
		tried := fmt.Sprintf("a peer's connection to port %d, where no app listens, ", port)
		switch {
		case want.Verdict == explain.ToApp && errors.Is(got, unix.ECONNREFUSED):
			return Passed, tried + "was left to the pod, as it asks for"
		case want.Verdict == explain.ToApp:
			return Failed, tried + fmt.Sprintf("was to be left to the pod: %v", got)
		case got == nil || errors.Is(got, unix.ECONNRESET):
			return Passed, tried + "went to the node proxy"
		default:
			return Failed, tried + fmt.Sprintf("was accepted by no node proxy: %v", got)
		}
	})
}

// probe connects as the kubelet does, to a port where nobody listens: the pod itself refuses, where the node proxy would accept.
func (c *checker) probe() (Result, string) {
	if c.Prober.Dial == nil {
		return Skipped, c.Prober.Why
	}
	return c.withClosedPort(func(port uint16) (Result, string) {
		to := netip.AddrPortFrom(c.pod, port)
		err := c.Prober.Dial(to)
		tried := fmt.Sprintf("a probe of port %d, where no app listens, ", port)
		switch {
		case errors.Is(err, unix.ECONNREFUSED):
			return Passed, tried + "reached the pod past the node proxy, which refused it"
		case err == nil || errors.Is(err, unix.ECONNRESET):
			return Failed, tried + "was taken for a peer's connection, and went to the node proxy"
		default:
			return Failed, tried + fmt.Sprintf("did not reach the pod: %v", err)
		}
	})
}
