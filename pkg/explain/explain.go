// SPDX-License-Identifier: Apache-2.0

// Package explain says what the dataplane does with a new connection, and why. It goes through the same decisions as the programs
// in bpf/, in the same order, and asks the same maps of the live node; nothing is sent.
//
// It knows what the maps know. What a pod's own routes, filters or programs do besides is not among that.
package explain

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Maker is who connects.
type Maker string

// The makers of connections.
const (
	// App is a process in the pod that is not the node proxy.
	App Maker = "app"
	// Proxy is the node proxy in the pod.
	Proxy Maker = "proxy"
	// Peer is anybody elsewhere, on this node or not, that is no process of the host's.
	Peer Maker = "peer"
	// Node is a process of the host's network namespace that is in no pod's cgroup.
	Node Maker = "node"
	// Kubelet is such a process in the kubelet's cgroup.
	Kubelet Maker = "kubelet"
	// HostPod is a process of a pod with hostNetwork.
	HostPod Maker = "host-pod"
)

// Makers lists all of them.
func Makers() []Maker { return []Maker{App, Proxy, Peer, Node, Kubelet, HostPod} }

// Protocol is the transport protocol of a connection.
type Protocol string

// The protocols.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// Query is a connection that is asked about.
type Query struct {
	// Cookie is that of the pod's network namespace.
	Cookie uint64
	// From is the source; its port may be 0, for any. A zero address stands for the pod's own.
	From netip.AddrPort
	To   netip.AddrPort
	// Protocol is TCP if empty.
	Protocol Protocol
	// By is who connects; if empty, it is the app for a source of the pod's own, and a peer for any other.
	By Maker
	// Via is the name of the interface of the pod that an inbound connection comes by, and Interface its index; 0: one by which nothing
	// is rerouted. Explain goes by the index alone.
	Via       string
	Interface uint32
}

// Verdict is what becomes of a connection.
type Verdict string

// The verdicts.
const (
	// ToProxy: the node proxy gets it, on Port.
	ToProxy Verdict = "proxy"
	// ToApp: the app gets it, and the node proxy is not asked.
	ToApp Verdict = "app"
	// Out: it leaves the pod as it is.
	Out Verdict = "out"
	// Dropped: nobody gets it.
	Dropped Verdict = "dropped"
)

// Step is one line of the decision list.
type Step struct {
	// Line names it, for programs.
	Line string `json:"line"`
	// Text is what the line asks, and Found what is so for this connection.
	Text  string `json:"text"`
	Found string `json:"found"`
	// Decides is true of the last step alone.
	Decides bool `json:"decides"`
}

// Answer says what becomes of a connection.
type Answer struct {
	// Direction is "outbound" or "inbound", as the pod sees it.
	Direction string         `json:"direction"`
	Protocol  Protocol       `json:"protocol"`
	By        Maker          `json:"by"`
	From      netip.AddrPort `json:"from"`
	To        netip.AddrPort `json:"to"`
	Verdict   Verdict        `json:"verdict"`
	// Port is the node proxy's, if it gets the connection or should.
	Port uint16 `json:"port,omitempty"`
	// Reason says in a sentence why.
	Reason string `json:"reason"`
	// Counter is the counter of the pod that counts it; empty if none does.
	Counter string `json:"counter,omitempty"`
	// Steps are the lines that were gone through, in order. The last decides.
	Steps []Step `json:"steps"`
}

// Maps is what Explain asks; maps.Maps has it.
type Maps interface {
	Pod(cookie uint64) (maps.Pod, error)
	OwnAddr(cookie uint64, addr netip.Addr) (ifindex int, err error)
	HasException(cookie uint64, e maps.Exception) (bool, error)
	IsExcluded(cookie uint64, addr netip.Addr) (bool, error)
	HasListener(cookie uint64, port uint16) (bool, error)
	Config() (maps.Config, error)
	ProbeTargetOf(addr netip.Addr) (maps.ProbeTarget, error)
	IsAdmitted(cookie uint64, src, dst netip.AddrPort) (bool, error)
}

// Explain says what becomes of a connection, or what is wrong with the question.
func Explain(m Maps, q Query) (*Answer, error) {
	w := walk{m: m, q: q, answer: &Answer{Protocol: q.Protocol, By: q.By, To: unmapped(q.To)}}
	if err := w.ask(); err != nil {
		return nil, err
	}
	return w.answer, nil
}

// walk is one way through the list. A failure to ask a map ends it.
type walk struct {
	m      Maps
	q      Query
	pod    maps.Pod
	answer *Answer
	err    error
}

func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

func (w *walk) ask() error {
	q := &w.q
	q.From, q.To = unmapped(q.From), unmapped(q.To)
	if q.Protocol == "" {
		q.Protocol = TCP
	}
	if !q.To.Addr().IsValid() {
		return errors.New("no destination is given: name an address and a port")
	}
	if q.From.Addr().IsValid() && q.From.Addr().Is4() != q.To.Addr().Is4() {
		return fmt.Errorf("source %s and destination %s are of different families: name two of one", q.From.Addr(), q.To.Addr())
	}
	inside := !q.From.Addr().IsValid() || w.own(q.From.Addr())
	if q.By == "" {
		q.By = Peer
		if inside {
			q.By = App
		}
	}
	outbound := q.By == App || q.By == Proxy
	if outbound && !inside && q.By == App {
		return fmt.Errorf("source %s is none of the pod's addresses, so no app of it connects from there: name another, or who connects with --by", q.From.Addr())
	}
	if !outbound && !q.From.Addr().IsValid() {
		return fmt.Errorf("no source is given: name the address that the %s connects from", q.By)
	}
	w.answer.Protocol, w.answer.By, w.answer.From = q.Protocol, q.By, q.From
	w.answer.Direction = "inbound"
	if outbound {
		w.answer.Direction = "outbound"
	}

	pod, err := w.m.Pod(q.Cookie)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		w.decide("enrolled", "is the pod in map pods?", "no: nothing is captured, and the seal drops what leaves", Dropped, 0, "seal_dropped")
		if !outbound || w.own(q.To.Addr()) {
			w.answer.Verdict, w.answer.Counter = ToApp, ""
		}
		return w.err
	case err != nil:
		return err
	}
	w.pod = pod
	w.pass("enrolled", "is the pod in map pods?", "yes, it is captured")
	if outbound {
		w.outbound()
	} else {
		w.inbound()
	}
	return w.err
}

// pass notes a line that does not decide.
func (w *walk) pass(line, text, found string) {
	w.answer.Steps = append(w.answer.Steps, Step{Line: line, Text: text, Found: found})
}

// decide notes the line that does.
func (w *walk) decide(line, text, found string, verdict Verdict, port uint16, counter string) {
	w.answer.Steps = append(w.answer.Steps, Step{Line: line, Text: text, Found: found, Decides: true})
	w.answer.Verdict, w.answer.Port, w.answer.Reason, w.answer.Counter = verdict, port, found, counter
}

// toListener decides for the node proxy, if it listens.
func (w *walk) toListener(line, text, found string, port uint16, steered, none string) {
	has, err := w.m.HasListener(w.q.Cookie, port)
	w.fail(err)
	if !has {
		w.decide(line, text, fmt.Sprintf("%s; but no node proxy listens on port %d, so it is dropped", found, port), Dropped, port, none)
		return
	}
	w.decide(line, text, found, ToProxy, port, steered)
}

func (w *walk) fail(err error) { w.err = errors.Join(w.err, err) }

// own is addr_is_own() of bpf/redirector.h.
func (w *walk) own(addr netip.Addr) bool {
	if addr.Is4() && addr.As4()[0] == 127 {
		return true
	}
	index, err := w.m.OwnAddr(w.q.Cookie, addr)
	w.fail(err)
	return index != 0
}

// isProxyPort says whether the port is one of those in the pod that only what is steered there may reach.
func isProxyPort(port uint16) bool { return port == maps.PortOutbound || port == maps.PortInbound }

const portDomain = 53

// outbound is what redir_connect and redir_mark decide.
func (w *walk) outbound() {
	q := &w.q
	to := q.To.Addr()
	own := w.own(to)

	const dns = "a DNS query (TCP or UDP to port 53) of an app, not for loopback, with DNS capture on?"
	switch {
	case q.To.Port() != portDomain:
		w.pass("dns", dns, fmt.Sprintf("no: port %d", q.To.Port()))
	case !w.pod.DNSCapture:
		w.pass("dns", dns, "no: DNS capture is off for the pod")
	case to.IsLoopback() || to.IsUnspecified():
		w.pass("dns", dns, fmt.Sprintf("no: %s stays in the pod", to))
	case q.By == Proxy:
		w.pass("dns", dns, "no: the node proxy asks itself")
	default:
		w.decide("dns", dns, fmt.Sprintf("yes: it goes to the node proxy's DNS server on loopback, port %d", maps.PortDNS), ToProxy, maps.PortDNS, "dns_captured")
		return
	}

	const protocol = "TCP?"
	if q.Protocol != TCP {
		verdict := Out
		if own {
			verdict = ToApp
		}
		w.decide("protocol", protocol, "no: "+string(q.Protocol)+" that is no DNS query is left alone", verdict, 0, "")
		return
	}
	w.pass("protocol", protocol, "yes")

	const ownText = "to loopback, or to one of the pod's own addresses?"
	switch {
	case !own:
		w.pass("own-address", ownText, fmt.Sprintf("no: %s is not in map own_addrs for the pod", to))
	case q.By == Proxy && q.From.Addr().IsValid() && !w.own(q.From.Addr()):
		w.decide("own-address", ownText, fmt.Sprintf("yes, and it comes from %s: the node proxy speaks to the app as its client", q.From.Addr()),
			ToApp, 0, "proxy_to_app")
		return
	case isProxyPort(q.To.Port()):
		w.decide("own-address", ownText, fmt.Sprintf("yes, but port %d is the node proxy's own, for what is steered there only", q.To.Port()),
			Dropped, 0, "loops_dropped")
		return
	default:
		w.decide("own-address", ownText, "yes: what a pod sends to itself is left alone", ToApp, 0, "own_address")
		return
	}

	const proxy = "a socket of the node proxy's?"
	if q.By == Proxy {
		w.decide("proxy", proxy, "yes: it leaves, past the seal", Out, 0, "proxy_outbound")
		return
	}
	w.pass("proxy", proxy, "no, an app's")
	if w.excluded() {
		return
	}
	w.toListener("captured", "everything else", fmt.Sprintf("captured: it goes to the node proxy, port %d", maps.PortOutbound),
		maps.PortOutbound, "outbound_captured", "outbound_no_listener")
}

// excluded is is_excluded() of bpf/redirector.h, and decides if it is so.
func (w *walk) excluded() bool {
	const text = "to a port or a range of addresses that is excluded for the pod?"
	if !w.pod.HasExceptions {
		w.pass("excluded", text, "no: nothing is")
		return false
	}
	q := &w.q
	port, err := w.m.HasException(q.Cookie, maps.Exception{Kind: maps.ExceptionOutboundPort, Value: uint32(q.To.Port())})
	w.fail(err)
	addr, err := w.m.IsExcluded(q.Cookie, q.To.Addr())
	w.fail(err)
	switch {
	case port:
		w.decide("excluded", text, fmt.Sprintf("yes, port %d: it leaves, past the seal", q.To.Port()), Out, 0, "excluded_outbound")
	case addr:
		w.decide("excluded", text, fmt.Sprintf("yes, %s: it leaves, past the seal", q.To.Addr()), Out, 0, "excluded_outbound")
	default:
		w.pass("excluded", text, fmt.Sprintf("no: neither port %d nor %s", q.To.Port(), q.To.Addr()))
	}
	return port || addr
}

// rerouted decides for connections of machines behind the pod.
func (w *walk) rerouted() bool {
	const text = "by an interface with machines behind it, whose connections are the pod's?"
	q := &w.q
	is := false
	if w.pod.HasExceptions && q.Interface != 0 {
		var err error
		is, err = w.m.HasException(q.Cookie, maps.Exception{Kind: maps.ExceptionInterface, Value: q.Interface})
		w.fail(err)
	}
	switch {
	case !is && q.Interface == 0:
		w.pass("rerouted", text, "no, as far as is said")
	case !is:
		w.pass("rerouted", text, fmt.Sprintf("no: interface %d is not among them", q.Interface))
	case w.own(q.To.Addr()) && (isProxyPort(q.To.Port()) || q.To.Port() == maps.PortHBONE):
		w.decide("rerouted", text, fmt.Sprintf("yes, but port %d is the node proxy's own", q.To.Port()), Dropped, 0, "loops_dropped")
	default:
		w.toListener("rerouted", text, fmt.Sprintf("yes: it goes to the node proxy, port %d", maps.PortOutbound), maps.PortOutbound,
			"rerouted", "outbound_no_listener")
	}
	return is
}

// asked decides for connections that the pod asks for: is_left_to_app() of bpf/redirector.h.
func (w *walk) asked() bool {
	const text = "does the pod ask for its inbound connections, or for those to this port?"
	q := &w.q
	proxys := isProxyPort(q.To.Port())
	excluded := false
	if w.pod.HasExceptions {
		var err error
		excluded, err = w.m.HasException(q.Cookie, maps.Exception{Kind: maps.ExceptionInboundPort, Value: uint32(q.To.Port())})
		w.fail(err)
	}
	switch {
	case q.To.Port() == maps.PortHBONE:
		w.pass("asked", text, "no: the mesh tunnel ends at the node proxy, whatever it asks for")
		return false
	case w.pod.BypassInbound && proxys:
		w.decide("asked", text, fmt.Sprintf("yes, but port %d is the node proxy's own", q.To.Port()), Dropped, 0, "loops_dropped")
	case w.pod.BypassInbound:
		w.decide("asked", text, "yes, for all (bypass-inbound)", ToApp, 0, "bypassed_inbound")
	case excluded && !proxys:
		w.decide("asked", text, fmt.Sprintf("yes, for port %d (exclude-inbound-ports)", q.To.Port()), ToApp, 0, "excluded_inbound")
	default:
		w.pass("asked", text, "no")
		return false
	}
	return true
}

// inbound is what redir_steer decides of a SYN that has come by an interface, and the programs on the host before it.
func (w *walk) inbound() {
	q := &w.q
	const protocol = "TCP?"
	if q.Protocol != TCP {
		w.decide("protocol", protocol, "no: "+string(q.Protocol)+" is left alone", ToApp, 0, "")
		return
	}
	w.pass("protocol", protocol, "yes")

	const self = "from one of the pod's own addresses?"
	if w.own(q.From.Addr()) {
		if q.From.Addr().Is4() {
			w.decide("from-itself", self, "yes, from outside: the kernel drops IPv4 packets that say so", Dropped, 0, "")
		} else {
			w.decide("from-itself", self, "yes, but it is of no connection that the pod makes with itself", Dropped, 0, "loops_dropped")
		}
		return
	}
	w.pass("from-itself", self, "no")
	if w.rerouted() {
		return
	}

	const known = "for one of the pod's own addresses?"
	if !w.own(q.To.Addr()) {
		w.decide("own-address", known, fmt.Sprintf("no: %s is not in map own_addrs for the pod", q.To.Addr()), Dropped, 0, "unowned_dropped")
		return
	}
	w.pass("own-address", known, "yes")

	const probe = "a probe: of a process of the host's that may, or admitted already?"
	isProbe, found := w.probe()
	if isProbe {
		if isProxyPort(q.To.Port()) || q.To.Port() == maps.PortHBONE {
			w.decide("probe", probe, fmt.Sprintf("%s; but port %d is the node proxy's own", found, q.To.Port()), Dropped, 0, "loops_dropped")
		} else {
			w.decide("probe", probe, found, ToApp, 0, "probes_admitted")
		}
		return
	}
	w.pass("probe", probe, found)
	if w.asked() {
		return
	}

	mesh := fmt.Sprintf("to port %d, the mesh tunnel's?", maps.PortHBONE)
	if q.To.Port() == maps.PortHBONE {
		w.toListener("mesh", mesh, "yes: the tunnel ends at the node proxy", maps.PortHBONE, "hbone_steered", "hbone_no_listener")
		return
	}
	w.pass("mesh", mesh, fmt.Sprintf("no: port %d", q.To.Port()))
	w.toListener("inbound", "everything else", fmt.Sprintf("it goes to the node proxy, port %d", maps.PortInbound),
		maps.PortInbound, "inbound_steered", "inbound_no_listener")
}

// probe says whether the connection is let through to the app as a probe, and why or why not.
func (w *walk) probe() (is bool, found string) {
	q := &w.q
	if q.From.Port() != 0 {
		admitted, err := w.m.IsAdmitted(q.Cookie, q.From, q.To)
		w.fail(err)
		if admitted {
			return true, "yes: this very connection is in map admitted"
		}
	}
	if q.By != Node && q.By != Kubelet && q.By != HostPod {
		return false, fmt.Sprintf("no: it is of a %s", q.By)
	}
	c, err := w.m.Config()
	w.fail(err)
	if c.HostNetNSCookie == 0 {
		return false, "no: no probe is let through on this node"
	}
	target, err := w.m.ProbeTargetOf(q.To.Addr())
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return false, fmt.Sprintf("no: %s is not in map probe_targets", q.To.Addr())
	case err != nil:
		w.fail(err)
		return false, ""
	case target.NetNSCookie != q.Cookie:
		return false, fmt.Sprintf("no: probes of %s are for pod %s", q.To.Addr(), target.UID)
	}
	switch {
	case c.ProbeSource == maps.ProbeSourceHost:
	case c.ProbeSource == maps.ProbeSourceKubelet && q.By != Kubelet:
		return false, "no: with --probe-source=kubelet only the kubelet probes"
	case c.ProbeSource == maps.ProbeSourceNode && q.By == HostPod:
		return false, "no: with --probe-source=node, processes of pods do not probe"
	}
	if c.ProbeIdentity != maps.ProbeIdentitySNAT {
		return true, "yes: the host's process may probe the pod"
	}
	as := c.ProbeV6
	if q.To.Addr().Is4() {
		as = c.ProbeV4
	}
	if !as.IsValid() {
		return false, "no: the node has no probe address of this family"
	}
	return true, fmt.Sprintf("yes: the host's process may probe the pod, and does so from %s", as)
}
