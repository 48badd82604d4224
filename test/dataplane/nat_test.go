// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// natRules are what iptables would put into the nat tables of a node: per family a table with the chains PREROUTING and
// POSTROUTING.
type natRules struct {
	conn                    *nftables.Conn
	family                  string
	table                   *nftables.Table
	prerouting, postrouting *nftables.Chain
}

// changeNAT makes changes to a node's nat table of one family, which it makes if it is not there.
func changeNAT(t *testing.T, node *bed.NS, family string, change func(n *natRules)) {
	t.Helper()
	err := node.Do(func() error {
		c, err := nftables.New(nftables.AsLasting())
		if err != nil {
			return err
		}
		defer func() { _ = c.CloseLasting() }()
		table := &nftables.Table{Family: nftables.TableFamilyIPv4, Name: "nat"}
		if family == "IPv6" {
			table.Family = nftables.TableFamilyIPv6
		}
		n := &natRules{conn: c, family: family, table: c.AddTable(table)}
		n.prerouting = c.AddChain(&nftables.Chain{
			Name: "PREROUTING", Table: table, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest,
		})
		n.postrouting = c.AddChain(&nftables.Chain{
			Name: "POSTROUTING", Table: table, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
		change(n)
		return c.Flush()
	})
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT) {
		t.Skipf("the kernel lacks nf_tables with nat: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// of matches TCP from or to an address, by where it is in the header.
func (n *natRules) of(a netip.Addr, source bool) []expr.Any {
	offset := uint32(16)
	if n.family == "IPv6" {
		offset = 24
	}
	if source {
		offset -= uint32(a.BitLen() / 8)
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(a.BitLen() / 8)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: a.AsSlice()},
	}
}

// dnat sends what is for one address to another, as a service's rule does.
func (n *natRules) dnat(service netip.Addr, to netip.AddrPort) {
	family := uint32(unix.NFPROTO_IPV4)
	if n.family == "IPv6" {
		family = unix.NFPROTO_IPV6
	}
	n.conn.AddRule(&nftables.Rule{Table: n.table, Chain: n.prerouting, Exprs: append(n.of(service, false),
		&expr.Immediate{Register: 1, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: 1, RegProtoMin: 2, Specified: true},
	)})
}

// masquerade gives what goes to an address the node's own as source.
func (n *natRules) masquerade(to netip.Addr) {
	n.conn.AddRule(&nftables.Rule{Table: n.table, Chain: n.postrouting, Exprs: append(n.of(to, false), &expr.Masq{})})
}

// masqueradeHairpin does so for what a pod has sent to itself by the node.
func (n *natRules) masqueradeHairpin(pod netip.Addr) {
	match := append(n.of(pod, true), n.of(pod, false)...)
	n.conn.AddRule(&nftables.Rule{Table: n.table, Chain: n.postrouting, Exprs: append(match, &expr.Masq{})})
}

// A node's nat tables do not carry the dataplane: with rules for services and for what leaves the cluster, and with none,
// probes pass and all else goes through the proxy.
func TestVerdictsWithHostNATTablesFlushed(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod := n.plainPod("pod")
	services := map[string]string{"IPv4": "198.18.7.1", "IPv6": "fd00:7::1"}
	n.serve(pod, 8080, bed.AppOptions{})
	n.serve(n.Outside, 8080, bed.AppOptions{})
	for family, service := range services {
		changeNAT(t, n.Node, family, func(r *natRules) {
			r.dnat(netip.MustParseAddr(service), netip.AddrPortFrom(addr(n.Outside, family), 8080))
			r.masqueradeHairpin(addr(pod, family))
		})
	}
	n.enrolSpec(pod)
	n.wantVerdicts(pod)
	// The rules are in force: a service's address leads the proxy to who is behind it.
	for _, service := range services {
		ask(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(netip.MustParseAddr(service), 80)})
	}
	for family := range services {
		changeNAT(t, n.Node, family, func(r *natRules) { r.conn.DelTable(r.table) })
	}
	n.wantVerdicts(pod)
}

// Rules that give all that goes to pods the node's own address change what a pod sees a probe come from. With
// --probe-identity=flow it is that address anyway, and probes pass. With snat they are no probes any more, and go to the proxy.
func TestProbesUnderAMasqueradeOfTheHosts(t *testing.T) {
	for _, identity := range []string{"flow", "snat"} {
		t.Run(identity, func(t *testing.T) {
			n := newProbeNode(t, bed.Options{}, "--probe-identity", identity)
			pod, _ := n.enrolledPod("pod")
			eachFamily(t, func(t *testing.T, family string) {
				changeNAT(t, n.Node, family, func(r *natRules) { r.masquerade(addr(pod, family)) })
				before := len(n.proxy.connections())
				id, _ := ask(t, n.Node, bed.DialSpec{Remote: netip.AddrPortFrom(addr(pod, family), 8080)})
				if want := nodesAddr(t, n.Node, addr(pod, family)); id.Peer.Addr() != want {
					t.Errorf("the app sees %s, want the node's %s: this test shows nothing", id.Peer, want)
				}
				if got := len(n.proxy.connections()) - before; (got == 0) != (identity == "flow") {
					t.Errorf("the proxy has seen %d connections", got)
				}
			})
		})
	}
}

// A service's address may lead the proxy back to its own pod, for the app there is one of those behind it. The node rewrites the
// destination; with a rule for such hairpins the source, too. It ends there.
func TestAServiceThatLeadsBackMakesNoLoop(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	services := map[string]string{"IPv4": "198.18.7.1", "IPv6": "fd00:7::1"}
	for name, c := range map[string]struct {
		port       uint16
		masquerade bool
		// connects says whether the app is reached.
		connects bool
	}{
		"to the app":                                {evasionPort, false, false},
		"to the app, masqueraded":                   {evasionPort, true, true},
		"to the proxy's outbound port":              {15001, false, false},
		"to the proxy's outbound port, masqueraded": {15001, true, false},
		"to the proxy's inbound port":               {15006, false, false},
		"to the proxy's inbound port, masqueraded":  {15006, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) {
				s.t = t
				a := s.newAttempt(t, family)
				own, service := addr(a.pod, family), netip.MustParseAddr(services[family])
				app := s.serve(a.pod, evasionPort, bed.AppOptions{})
				changeNAT(t, s.Node, family, func(r *natRules) {
					r.dnat(service, netip.AddrPortFrom(own, c.port))
					if c.masquerade {
						r.masqueradeHairpin(own)
					}
				})
				defer changeNAT(t, s.Node, family, func(r *natRules) { r.conn.DelTable(r.table) })
				s.enrolPod(t, a.pod)
				a.remote = netip.AddrPortFrom(service, 80)
				a.open(t, a.pod)
				_ = connectWithin(a.socket, a.remote, evasionPatience)
				time.Sleep(time.Second)
				if (app.Accepts() > 0) != c.connects {
					t.Errorf("the app has accepted %d connections", app.Accepts())
				}
				// One that the app has made, and one that comes in.
				if got := a.proxied(); got > 2 {
					t.Errorf("the proxy has seen %d connections", got)
				}
				counters := s.podStatus(t, a.pod).Counters
				if counters.ProxyOutbound != 1 || counters.ProxyToApp > 1 {
					t.Errorf("for one connection of the app's the proxy has made %d out of the pod, and %d to the app",
						counters.ProxyOutbound, counters.ProxyToApp)
				}
			})
		})
	}
}
