// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/net/dns/dnsmessage"
	netipv4 "golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// What a server outside of the pod says of every name.
var (
	serverAnswerV4 = netip.MustParseAddr("192.0.2.53")
	serverAnswerV6 = netip.MustParseAddr("2001:db8:1::53")
)

// proxyAnswer and serverAnswer are what the proxy and a server say to a query for an address of that family.
func proxyAnswer(family string) netip.Addr {
	if family == "IPv4" {
		return nodeproxy.DNSAnswerV4
	}
	return nodeproxy.DNSAnswerV6
}

func serverAnswer(family string) netip.Addr {
	if family == "IPv4" {
		return serverAnswerV4
	}
	return serverAnswerV6
}

// dnsServer is a DNS server on a namespace's addresses, by UDP and TCP.
type dnsServer struct {
	queries atomic.Int64
	ports   sync.Map // the clients' ports
}

// serveDNS serves at addr, or at all addresses if it is the zero one.
func serveDNS(t *testing.T, ns *bed.NS, addr netip.Addr, port uint16) *dnsServer {
	t.Helper()
	s := new(dnsServer)
	at := net.UDPAddr{Port: int(port)}
	if addr.IsValid() {
		at.IP = addr.AsSlice()
	}
	var packets *net.UDPConn
	var streams *net.TCPListener
	err := ns.Do(func() (err error) {
		if packets, err = net.ListenUDP("udp", &at); err != nil {
			return err
		}
		streams, err = net.ListenTCP("tcp", &net.TCPAddr{IP: at.IP, Port: at.Port})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = packets.Close(), streams.Close() })
	go func() {
		query := make([]byte, 4096)
		for {
			n, from, err := packets.ReadFromUDPAddrPort(query)
			if err != nil {
				return
			}
			s.queries.Add(1)
			s.ports.Store(from.Port(), true)
			_, _ = packets.WriteToUDPAddrPort(nodeproxy.AnswerDNS(query[:n], serverAnswerV4, serverAnswerV6), from)
		}
	}()
	go func() {
		for {
			c, err := streams.Accept()
			if err != nil {
				return
			}
			s.queries.Add(1)
			go func() {
				defer c.Close()
				if query, err := readStream(c); err == nil {
					_ = writeStream(c, nodeproxy.AnswerDNS(query, serverAnswerV4, serverAnswerV6))
				}
			}()
		}
	}()
	return s
}

// readStream reads one message with its length before it.
func readStream(r io.Reader) ([]byte, error) {
	var length [2]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, err
	}
	message := make([]byte, binary.BigEndian.Uint16(length[:]))
	_, err := io.ReadFull(r, message)
	return message, err
}

func writeStream(w io.Writer, message []byte) error {
	_, err := w.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(message))), message...))
	return err
}

// query asks for a name's address of that family.
func query(id uint16, name, family string) []byte {
	typ := dnsmessage.TypeA
	if family == "IPv6" {
		typ = dnsmessage.TypeAAAA
	}
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: id, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: typ, Class: dnsmessage.ClassINET}},
	}
	b, err := m.Pack()
	if err != nil {
		panic(err) // the names are the tests' own
	}
	return b
}

// answered reads the one address in an answer.
func answered(message []byte) (id uint16, addr netip.Addr, err error) {
	var m dnsmessage.Message
	if err := m.Unpack(message); err != nil {
		return 0, addr, err
	}
	if len(m.Answers) != 1 {
		return m.ID, addr, fmt.Errorf("%d answers, code %v", len(m.Answers), m.RCode)
	}
	switch body := m.Answers[0].Body.(type) {
	case *dnsmessage.AResource:
		addr = netip.AddrFrom4(body.A)
	case *dnsmessage.AAAAResource:
		addr = netip.AddrFrom16(body.AAAA)
	}
	return m.ID, addr, nil
}

// dnsSocket is a client's socket, used by plain system calls.
type dnsSocket struct {
	fd     int
	mapped bool // it is of AF_INET6, and talks IPv4
	domain int
	closed bool
}

// close may be called again.
func (s *dnsSocket) close() {
	if !s.closed {
		s.closed = true
		_ = unix.Close(s.fd)
	}
}

// dnsSocketSpec says how to make one; the zero value is an unbound socket of IPv4.
type dnsSocketSpec struct {
	family string
	mapped bool
	local  netip.AddrPort
	device string
	mark   int
}

// check skips the test where there are no such sockets.
func (s *dnsSocketSpec) check(t *testing.T) {
	t.Helper()
	if s.mapped {
		needsIPv6(t)
	}
}

func openUDP(t *testing.T, ns *bed.NS, spec dnsSocketSpec) *dnsSocket {
	t.Helper()
	s := &dnsSocket{domain: unix.AF_INET, mapped: spec.mapped}
	if spec.family == "IPv6" || spec.mapped {
		s.domain = unix.AF_INET6
	}
	err := ns.Do(func() (err error) {
		s.fd, err = unix.Socket(s.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	timeout := unix.NsecToTimeval(patience.Nanoseconds())
	err = unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout)
	if err == nil && spec.mark != 0 {
		err = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_MARK, spec.mark)
	}
	if err == nil && spec.device != "" {
		err = unix.BindToDevice(s.fd, spec.device)
	}
	if err == nil && spec.local.IsValid() {
		// Not without: the kernel would choose ports that other such sockets have.
		err = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err == nil && spec.local.IsValid() {
		err = unix.Bind(s.fd, s.sockaddr(spec.local))
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *dnsSocket) sockaddr(a netip.AddrPort) unix.Sockaddr {
	if s.domain == unix.AF_INET {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()} // As16 maps IPv4
}

func (s *dnsSocket) connect(server netip.AddrPort) error {
	return unix.Connect(s.fd, s.sockaddr(server))
}

// disconnect connects to nobody, which no program is told of.
func (s *dnsSocket) disconnect() error {
	nobody := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(s.fd), uintptr(unsafe.Pointer(&nobody)), unsafe.Sizeof(nobody))
	if errno != 0 {
		return errno
	}
	return nil
}

func (s *dnsSocket) sendTo(message []byte, server netip.AddrPort) error {
	return unix.Sendto(s.fd, message, 0, s.sockaddr(server))
}

func (s *dnsSocket) send(message []byte) error {
	_, err := unix.Write(s.fd, message)
	return err
}

// receive returns an answer's id, the address in it, and whom the socket says it is from.
func (s *dnsSocket) receive() (id uint16, addr netip.Addr, from netip.AddrPort, err error) {
	message := make([]byte, 4096)
	n, sa, err := unix.Recvfrom(s.fd, message, 0)
	for errors.Is(err, unix.EINTR) {
		n, sa, err = unix.Recvfrom(s.fd, message, 0)
	}
	if err != nil {
		return 0, addr, from, err
	}
	id, addr, err = answered(message[:n])
	return id, addr, addrPortOf(sa), err
}

func addrPortOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// expect receives one answer and compares.
func (s *dnsSocket) expect(t *testing.T, id uint16, answer netip.Addr, server netip.AddrPort) {
	t.Helper()
	gotID, got, from, err := s.receive()
	if err != nil || gotID != id || got != answer || from != server {
		t.Errorf("received %d: %s from %s, %v; want %d: %s from %s", gotID, got, from, err, id, answer, server)
	}
}

// dnsPod is an enrolled pod whose DNS is captured, or is not.
func (n *node) dnsPod(name string, capture bool) *bed.NS {
	n.t.Helper()
	pod := n.plainPod(name)
	n.setDNS(pod, capture)
	return pod
}

func (n *node) setDNS(pod *bed.NS, capture bool) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	spec := agent.Spec(pod)
	spec.Settings.DNSCapture = &capture
	if err := n.Enroll(ctx, spec, n.proxies > 0); err != nil {
		n.t.Fatal(err)
	}
}

func TestDNSIsCaptured(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.dnsPod("pod", true)
	outside := serveDNS(t, n.Outside, netip.Addr{}, 53)
	eachFamily(t, func(t *testing.T, family string) {
		server := netip.AddrPortFrom(addr(n.Outside, family), 53)
		own := addr(pod, family)
		answer := proxyAnswer(family)
		for _, kind := range []struct {
			name   string
			spec   dnsSocketSpec
			family string
		}{
			{name: "unbound"},
			{name: "bound to a port", spec: dnsSocketSpec{local: netip.AddrPortFrom(unspecified(own), 5353)}},
			{name: "bound to the servers' own port", spec: dnsSocketSpec{local: netip.AddrPortFrom(unspecified(own), 53)}},
			{name: "bound to the proxy's port", spec: dnsSocketSpec{local: netip.AddrPortFrom(own, nodeproxy.PortDNS)}},
			{name: "bound to an address", spec: dnsSocketSpec{local: netip.AddrPortFrom(own, 0)}},
			{name: "v4-mapped", spec: dnsSocketSpec{mapped: true}, family: "IPv4"},
			{name: "v4-mapped, bound to an address", spec: dnsSocketSpec{mapped: true, local: netip.AddrPortFrom(own, 0)}, family: "IPv4"},
			{name: "with a mark of its own", spec: dnsSocketSpec{mark: 0xabc0042}},
		} {
			if kind.family != "" && kind.family != family {
				continue
			}
			kind.spec.family = family
			t.Run(kind.name, func(t *testing.T) {
				kind.spec.check(t)
				s := openUDP(t, pod, kind.spec)
				for id := range uint16(3) {
					if err := s.sendTo(query(id, "name.test.", family), server); err != nil {
						t.Fatal(err)
					}
					s.expect(t, id, answer, server)
				}
			})
			t.Run(kind.name+", connected", func(t *testing.T) {
				kind.spec.check(t)
				s := openUDP(t, pod, kind.spec)
				if err := s.connect(server); err != nil {
					t.Fatal(err)
				}
				peer, err := unix.Getpeername(s.fd)
				if err != nil || addrPortOf(peer) != server {
					t.Errorf("getpeername says %v, %v; want %s", peer, err, server)
				}
				if err := s.send(query(1, "name.test.", family)); err != nil {
					t.Fatal(err)
				}
				s.expect(t, 1, answer, server)
				// With the address, though connected.
				if err := s.sendTo(query(2, "name.test.", family), server); err != nil {
					t.Fatal(err)
				}
				s.expect(t, 2, answer, server)
			})
		}
		t.Run("bound to a device, connected", func(t *testing.T) {
			s := openUDP(t, pod, dnsSocketSpec{family: family, device: pod.Link})
			if err := s.connect(server); err != nil {
				t.Fatal(err)
			}
			if err := s.send(query(1, "name.test.", family)); err != nil {
				t.Fatal(err)
			}
			s.expect(t, 1, answer, server)
		})
		t.Run("bound to a device", func(t *testing.T) {
			s := openUDP(t, pod, dnsSocketSpec{family: family, device: pod.Link})
			err := s.sendTo(query(1, "name.test.", family), server)
			if family == "IPv6" {
				// The first goes nowhere; then the socket is unbound.
				if !errors.Is(err, unix.EPERM) {
					t.Errorf("the first send says %v, want EPERM", err)
				}
			} else {
				if err != nil {
					t.Fatal(err)
				}
				s.expect(t, 1, answer, server)
			}
			if err := s.sendTo(query(2, "name.test.", family), server); err != nil {
				t.Fatal(err)
			}
			s.expect(t, 2, answer, server)
		})
		for _, kind := range []struct {
			name string
			spec bed.DialSpec
		}{
			{"TCP", bed.DialSpec{}},
			{"TCP, v4-mapped", bed.DialSpec{V4Mapped: true}},
			{"TCP, bound to a device", bed.DialSpec{BindToDevice: pod.Link}},
			{"TCP, bound to an address", bed.DialSpec{Local: netip.AddrPortFrom(own, 0)}},
			{"TCP, MPTCP", bed.DialSpec{MPTCP: true}},
			{"TCP, Fast Open", bed.DialSpec{FastOpen: bed.FastOpenSendto}},
			{"TCP, Fast Open by connect", bed.DialSpec{FastOpen: bed.FastOpenConnect}},
		} {
			if kind.spec.V4Mapped && family == "IPv6" {
				continue
			}
			t.Run(kind.name, func(t *testing.T) {
				if kind.spec.V4Mapped {
					needsIPv6(t)
				}
				kind.spec.Remote = server
				message := query(7, "name.test.", family)
				kind.spec.Data = append(binary.BigEndian.AppendUint16(nil, uint16(len(message))), message...)
				c, err := pod.Dial(t.Context(), kind.spec)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				// The note is with the subflow, and getpeername asks the MPTCP socket: it names the proxy.
				if peer, err := bed.Peername(c); !kind.spec.MPTCP && (err != nil || peer != server) {
					t.Errorf("getpeername says %s, %v; want %s", peer, err, server)
				}
				reply, err := readStream(c)
				if err != nil {
					t.Fatal(err)
				}
				if id, got, err := answered(reply); err != nil || id != 7 || got != answer {
					t.Errorf("the answer is %d: %s, %v; want 7: %s", id, got, err, answer)
				}
			})
		}
	})
	if got := outside.queries.Load(); got != 0 {
		t.Errorf("%d queries got past the proxy", got)
	}
	// Refused is the first query of the IPv6 socket that is bound to a device.
	if c := n.counters(pod); c.DnsCaptured == 0 || c.DnsRefused != families()-1 || c.SealDropped > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// unspecified is the unspecified address of the same family.
func unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Answers come in any order, and all from the proxy: each must still say which server it is from.
func TestOneSocketAsksManyDNSServers(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.dnsPod("pod", true)
	const servers, rounds = 16, 8
	eachFamily(t, func(t *testing.T, family string) {
		for _, kind := range []struct {
			name string
			spec dnsSocketSpec
		}{
			{"unbound", dnsSocketSpec{}},
			{"bound to an address", dnsSocketSpec{local: netip.AddrPortFrom(addr(pod, family), 0)}},
			{"v4-mapped", dnsSocketSpec{mapped: true}},
		} {
			if kind.spec.mapped && family == "IPv6" {
				continue
			}
			t.Run(kind.name, func(t *testing.T) {
				kind.spec.family = family
				kind.spec.check(t)
				s := openUDP(t, pod, kind.spec)
				server := func(i int) netip.AddrPort {
					if family == "IPv4" {
						return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i + 1)}), 53)
					}
					return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: byte(i + 1)}), 53)
				}
				for round := range rounds {
					for i := range servers {
						if err := s.sendTo(query(uint16(i), "name.test.", family), server(i)); err != nil {
							t.Fatal(err)
						}
					}
					seen := map[uint16]bool{}
					for range servers {
						id, got, from, err := s.receive()
						if err != nil {
							t.Fatalf("round %d: %v after %d answers", round, err, len(seen))
						}
						if seen[id] || int(id) >= servers || from != server(int(id)) || got != proxyAnswer(family) {
							t.Fatalf("round %d: received %d: %s from %s, want it from %s", round, id, got, from, server(int(id)))
						}
						seen[id] = true
					}
				}
			})
		}
	})
}

func TestDNSThatIsLeftAlone(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.dnsPod("pod", true)
	off := n.dnsPod("off", false)
	serveDNS(t, n.Outside, netip.Addr{}, 53)
	serveDNS(t, n.Outside, netip.Addr{}, 5353)
	serveDNS(t, n.Outside, netip.Addr{}, nodeproxy.PortDNS)
	serveDNS(t, pod, netip.MustParseAddr("127.0.0.53"), 53)
	serveDNS(t, pod, netip.MustParseAddr("127.0.0.1"), 53)
	serveDNS(t, pod, netip.IPv6Loopback(), 53)
	eachFamily(t, func(t *testing.T, family string) {
		outside := addr(n.Outside, family)
		loopback := netip.MustParseAddr("127.0.0.53")
		if family == "IPv6" {
			loopback = netip.IPv6Loopback()
		}
		for _, kind := range []struct {
			name   string
			from   *bed.NS
			spec   dnsSocketSpec
			server netip.AddrPort
		}{
			{"a server on loopback", pod, dnsSocketSpec{}, netip.AddrPortFrom(loopback, 53)},
			{"another port", pod, dnsSocketSpec{}, netip.AddrPortFrom(outside, 5353)},
			{"the proxy's own query", pod, dnsSocketSpec{mark: nodeproxy.Mark}, netip.AddrPortFrom(outside, 53)},
			{"a pod that has it switched off", off, dnsSocketSpec{}, netip.AddrPortFrom(outside, 53)},
		} {
			kind.spec.family = family
			t.Run(kind.name, func(t *testing.T) {
				s := openUDP(t, kind.from, kind.spec)
				if err := s.sendTo(query(1, "name.test.", family), kind.server); err != nil {
					t.Fatal(err)
				}
				s.expect(t, 1, serverAnswer(family), kind.server)
				if err := s.connect(kind.server); err != nil {
					t.Fatal(err)
				}
				if err := s.send(query(2, "name.test.", family)); err != nil {
					t.Fatal(err)
				}
				s.expect(t, 2, serverAnswer(family), kind.server)
			})
		}
		t.Run("another's answer from the proxy's port", func(t *testing.T) {
			if family == "IPv6" {
				return // the kernel's IPv6 sockets go on hearing only whom they were connected to
			}
			s := openUDP(t, pod, dnsSocketSpec{family: family})
			if err := s.connect(netip.AddrPortFrom(outside, 53)); err != nil {
				t.Fatal(err)
			}
			if err := s.disconnect(); err != nil {
				t.Fatal(err)
			}
			other := netip.AddrPortFrom(outside, nodeproxy.PortDNS)
			if err := s.sendTo(query(1, "name.test.", family), other); err != nil {
				t.Fatal(err)
			}
			s.expect(t, 1, serverAnswer(family), other)
		})
		t.Run("no address in particular", func(t *testing.T) {
			s := openUDP(t, pod, dnsSocketSpec{family: family})
			if err := s.sendTo(query(1, "name.test.", family), netip.AddrPortFrom(unspecified(outside), 53)); err != nil {
				t.Fatal(err)
			}
			from := netip.MustParseAddr("127.0.0.1")
			if family == "IPv6" {
				from = netip.IPv6Loopback()
			}
			s.expect(t, 1, serverAnswer(family), netip.AddrPortFrom(from, 53))
		})
		t.Run("a loopback server, v4-mapped", func(t *testing.T) {
			if family == "IPv6" {
				return
			}
			s := openUDP(t, pod, dnsSocketSpec{mapped: true})
			server := netip.AddrPortFrom(loopback, 53)
			if err := s.connect(server); err != nil {
				t.Fatal(err)
			}
			if err := s.send(query(2, "name.test.", family)); err != nil {
				t.Fatal(err)
			}
			s.expect(t, 2, serverAnswer(family), server)
		})
		t.Run("the proxy's server, asked by its own address", func(t *testing.T) {
			loopback := netip.MustParseAddr("127.0.0.1")
			if family == "IPv6" {
				loopback = netip.IPv6Loopback()
			}
			proxy := netip.AddrPortFrom(loopback, nodeproxy.PortDNS)
			s := openUDP(t, pod, dnsSocketSpec{family: family})
			// After a captured connect(), too.
			for _, server := range []netip.AddrPort{netip.AddrPortFrom(outside, 53), proxy} {
				if err := s.connect(server); err != nil {
					t.Fatal(err)
				}
				if err := s.send(query(3, "name.test.", family)); err != nil {
					t.Fatal(err)
				}
				s.expect(t, 3, proxyAnswer(family), server)
				if peer, err := unix.Getpeername(s.fd); err != nil || addrPortOf(peer) != server {
					t.Errorf("getpeername says %v, %v; want %s", peer, err, server)
				}
			}
		})
	})
	if c := n.counters(off); c.DnsCaptured > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// A tuple tells nothing: the client has the very port that the proxy asks its server from.
func TestDNSOfAClientWithTheProxysUpstreamPort(t *testing.T) {
	const port = 40053
	n := newNode(t)
	server := netip.AddrPortFrom(n.Outside.V4, 53)
	n.startProxy("--dns-upstream", server.String(), "--dns-upstream-port", fmt.Sprint(port))
	pod := n.dnsPod("pod", true)
	outside := serveDNS(t, n.Outside, netip.Addr{}, 53)
	// The proxy's answers are its own, and its queries arrive.
	s := openUDP(t, pod, dnsSocketSpec{})
	if err := s.sendTo(query(1, "www.upstream.test.", "IPv4"), server); err != nil {
		t.Fatal(err)
	}
	s.expect(t, 1, serverAnswerV4, server)
	if _, ok := outside.ports.Load(uint16(port)); !ok {
		t.Error("the proxy has not asked from the port that it was told")
	}
	asked := outside.queries.Load()
	same := openUDP(t, pod, dnsSocketSpec{local: netip.AddrPortFrom(netip.IPv4Unspecified(), port)})
	for id := range uint16(5) {
		if err := same.sendTo(query(id, "name.test.", "IPv4"), server); err != nil {
			t.Fatal(err)
		}
		same.expect(t, id, nodeproxy.DNSAnswerV4, server)
	}
	if got := outside.queries.Load(); got != asked {
		t.Errorf("%d queries got past the proxy", got-asked)
	}
}

// Without a proxy queries fail.
func TestDNSWithoutAProxy(t *testing.T) {
	n := newNode(t)
	pod := n.dnsPod("pod", true)
	outside := serveDNS(t, n.Outside, netip.Addr{}, 53)
	eachFamily(t, func(t *testing.T, family string) {
		server := netip.AddrPortFrom(addr(n.Outside, family), 53)
		s := openUDP(t, pod, dnsSocketSpec{family: family})
		if err := s.sendTo(query(1, "name.test.", family), server); err != nil {
			t.Errorf("an unconnected socket's send: %v", err)
		}
		if err := s.connect(server); err != nil {
			t.Fatal(err)
		}
		if err := s.send(query(1, "name.test.", family)); err != nil {
			t.Fatal(err)
		}
		if _, _, _, err := s.receive(); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a connected socket hears %v, want ECONNREFUSED", err)
		}
		if c, err := pod.Dial(t.Context(), bed.DialSpec{Remote: server}); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a connection: %v, want ECONNREFUSED", err)
			if c != nil {
				_ = c.Close()
			}
		}
	})
	if got := outside.queries.Load(); got != 0 {
		t.Errorf("%d queries got past the absent proxy", got)
	}
}

// What answers a query that nobody waits for any more, or cannot be answered, stays in the pod; so does a query on a socket
// that insists on an interface.
func TestNothingOfCapturedDNSLeavesThePod(t *testing.T) {
	n := newNode(t)
	pod := n.dnsPod("pod", true)
	eachFamily(t, func(t *testing.T, family string) {
		server := netip.AddrPortFrom(addr(n.Outside, family), 53)
		// Nobody listens on the proxy's port: the kernel tells the tag.
		if err := openUDP(t, pod, dnsSocketSpec{family: family}).sendTo(query(1, "name.test.", family), server); err != nil {
			t.Fatal(err)
		}
		if family == "IPv6" {
			eventually(t, "the error is dropped", func() bool { return n.counters(pod).StraysDropped == 1 })
		}
	})
	t.Run("link-local server", func(t *testing.T) {
		before := n.counters(pod).StraysDropped
		s := openUDP(t, pod, dnsSocketSpec{family: "IPv6"})
		server := &unix.SockaddrInet6{Port: 53, ZoneId: uint32(linkOf(t, pod, pod.Link).Attrs().Index), Addr: netip.MustParseAddr("fe80::53").As16()}
		if err := unix.Sendto(s.fd, query(1, "name.test.", "IPv6"), 0, server); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the query is dropped", func() bool { return n.counters(pod).StraysDropped > before })
	})
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run("unicast interface/"+family, func(t *testing.T) {
			before := n.counters(pod).StraysDropped
			s := openUDP(t, pod, dnsSocketSpec{family: family})
			level, option := unix.SOL_IP, unix.IP_UNICAST_IF
			if family == "IPv6" {
				level, option = unix.SOL_IPV6, unix.IPV6_UNICAST_IF
			}
			index := binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, uint32(linkOf(t, pod, pod.Link).Attrs().Index)))
			if err := unix.SetsockoptInt(s.fd, level, option, int(index)); err != nil {
				t.Fatal(err)
			}
			server := netip.AddrPortFrom(addr(n.Outside, family), 53)
			if err := s.connect(server); err != nil {
				t.Fatal(err)
			}
			if err := s.send(query(1, "name.test.", family)); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the query is dropped", func() bool { return n.counters(pod).StraysDropped > before })
		})
	}
}

// An app that takes the proxy's DNS port gets its own pod's queries, and keeps the proxy from running for the pod, which says so. No
// query leaves. When the app is gone, the proxy has the port.
func TestAnAppOnTheProxysDNSPort(t *testing.T) {
	n := newNode(t)
	pod := n.plainPod("pod")
	outside := serveDNS(t, n.Outside, netip.Addr{}, 53)
	watch := sniff(t, n.Node, pod.HostLink, 0)
	asks := func(t *testing.T, answer func(family string) netip.Addr) {
		eachFamily(t, func(t *testing.T, family string) {
			server := netip.AddrPortFrom(addr(n.Outside, family), 53)
			s := openUDP(t, pod, dnsSocketSpec{family: family})
			if err := s.sendTo(query(1, "name.test.", family), server); err != nil {
				t.Fatal(err)
			}
			s.expect(t, 1, answer(family), server)
		})
	}
	t.Run("with the app", func(t *testing.T) {
		for _, loopback := range []string{"127.0.0.1", "::1"} {
			serveDNS(t, pod, netip.MustParseAddr(loopback), nodeproxy.PortDNS)
		}
		n.setDNS(pod, true)
		n.startProxy()
		eventually(t, "the pod is pending, and it is said why", func() bool {
			p, err := n.Enroller.Pod("uid-pod")
			if err != nil {
				t.Fatal(err)
			}
			return p.State == enroll.StatePending && strings.Contains(p.Reason, "address already in use")
		})
		asks(t, serverAnswer)
	})
	t.Run("without the app", func(t *testing.T) {
		eventually(t, "the proxy has been asked again, and runs for the pod", func() bool {
			p, err := n.Enroller.Pod("uid-pod")
			return err == nil && p.State == enroll.StateEnrolled
		})
		asks(t, proxyAnswer)
	})
	if got := outside.queries.Load(); got > 0 {
		t.Errorf("the server outside has got %d queries", got)
	}
	if got := watch.seen.Load(); got > 0 {
		t.Errorf("%d packets of port 53 have left the pod", got)
	}
}

// sendmmsg and recvmmsg pass the same programs, once per message.
func TestDNSInBatches(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.dnsPod("pod", true)
	var c net.PacketConn
	err := pod.Do(func() (err error) {
		c, err = net.ListenUDP("udp4", nil)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	batches := netipv4.NewPacketConn(c)
	const servers = 4
	var queries []netipv4.Message
	for i := range servers {
		server := &net.UDPAddr{IP: net.IPv4(198, 51, 100, byte(i)), Port: 53}
		queries = append(queries, netipv4.Message{Buffers: [][]byte{query(uint16(i), "name.test.", "IPv4")}, Addr: server})
	}
	if sent, err := batches.WriteBatch(queries, 0); err != nil || sent != servers {
		t.Fatalf("sent %d: %v", sent, err)
	}
	for got := 0; got < servers; {
		answers := make([]netipv4.Message, servers)
		for i := range answers {
			answers[i].Buffers = [][]byte{make([]byte, 512)}
		}
		read, err := batches.ReadBatch(answers, 0)
		if err != nil {
			t.Fatalf("%v after %d answers", err, got)
		}
		for _, a := range answers[:read] {
			id, addr, err := answered(a.Buffers[0][:a.N])
			if want := fmt.Sprintf("198.51.100.%d:53", id); err != nil || addr != nodeproxy.DNSAnswerV4 || a.Addr.String() != want {
				t.Errorf("received %d: %s from %s, %v; want it from %s", id, addr, a.Addr, err, want)
			}
		}
		got += read
	}
}

// Sockets that were connected before go on with whom they are connected to, both when capture begins and when it ends.
func TestDNSSocketsOutliveAChange(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.plainPod("pod")
	serveDNS(t, n.Outside, netip.Addr{}, 53)
	eachFamily(t, func(t *testing.T, family string) {
		server := netip.AddrPortFrom(addr(n.Outside, family), 53)
		connected := func() *dnsSocket {
			s := openUDP(t, pod, dnsSocketSpec{family: family})
			if err := s.connect(server); err != nil {
				t.Fatal(err)
			}
			return s
		}
		asks := func(s *dnsSocket, answer netip.Addr) {
			t.Helper()
			if err := s.send(query(1, "name.test.", family)); err != nil {
				t.Fatal(err)
			}
			s.expect(t, 1, answer, server)
		}
		before := connected()
		n.setDNS(pod, true)
		asks(before, serverAnswer(family))
		during := connected()
		asks(during, proxyAnswer(family))
		n.setDNS(pod, false)
		asks(during, proxyAnswer(family))
		asks(before, serverAnswer(family))
		asks(connected(), serverAnswer(family))
	})
}

// sniffer counts the packets to and from port 53 on a link, and the queries among them whose source port is not the proxy's.
type sniffer struct {
	fd     int
	leaked atomic.Int64
	seen   atomic.Int64
	done   chan struct{}
}

// sniff watches a link of the node.
func sniff(t *testing.T, node *bed.NS, link string, proxyPort uint16) *sniffer {
	t.Helper()
	s := &sniffer{done: make(chan struct{})}
	err := node.Do(func() error {
		l, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		all := int(binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL}))
		if s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		return unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: l.Index})
	})
	if err != nil {
		t.Fatal(err)
	}
	timeout := unix.Timeval{Usec: 50_000}
	if err := errors.Join(
		unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
	); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	go func() {
		defer close(s.done)
		packet := make([]byte, 2048)
		for {
			n, _, err := unix.Recvfrom(s.fd, packet, 0)
			if err != nil {
				if ctx.Err() != nil || !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
					return
				}
				continue
			}
			s.count(packet[:n], proxyPort)
		}
	}()
	t.Cleanup(func() { <-s.done; _ = unix.Close(s.fd) })
	return s
}

func (s *sniffer) count(packet []byte, proxyPort uint16) {
	if len(packet) < 48 {
		return
	}
	protocol, ports := packet[9], packet[20:]
	if packet[0]>>4 == 6 {
		protocol, ports = packet[6], packet[40:]
	}
	if protocol != unix.IPPROTO_UDP && protocol != unix.IPPROTO_TCP {
		return
	}
	from, to := binary.BigEndian.Uint16(ports), binary.BigEndian.Uint16(ports[2:])
	if from != 53 && to != 53 {
		return
	}
	s.seen.Add(1)
	if from != proxyPort && to != proxyPort {
		s.leaked.Add(1)
	}
}

func TestManyDNSQueries(t *testing.T) {
	const atOnce, port = 50, 40053
	queries := short(10_000, 1000)
	n := newNode(t)
	server := netip.AddrPortFrom(n.Outside.V4, 53)
	n.startProxy("--dns-upstream", server.String(), "--dns-upstream-port", fmt.Sprint(port))
	pod := n.dnsPod("pod", true)
	outside := serveDNS(t, n.Outside, netip.Addr{}, 53)
	watch := sniff(t, n.Node, pod.HostLink, port)
	// The sniffer does see what the proxy asks.
	first := openUDP(t, pod, dnsSocketSpec{})
	if err := first.sendTo(query(1, "www.upstream.test.", "IPv4"), server); err != nil {
		t.Fatal(err)
	}
	first.expect(t, 1, serverAnswerV4, server)
	eventually(t, "the sniffer has seen the proxy's query", func() bool { return watch.seen.Load() >= 2 })

	var clients sync.WaitGroup
	for client := range atOnce {
		family := []string{"IPv4", "IPv6"}[client%2]
		to := netip.AddrPortFrom(addr(n.Outside, family), 53)
		clients.Go(func() {
			for i := range queries / atOnce {
				s := openUDP(t, pod, dnsSocketSpec{family: family})
				if i%2 == 0 {
					if err := s.connect(to); err != nil {
						t.Error(err)
						return
					}
				}
				if err := s.sendTo(query(uint16(i), "name.test.", family), to); err != nil {
					t.Error(err)
					return
				}
				s.expect(t, uint16(i), proxyAnswer(family), to)
				s.close()
			}
		})
	}
	clients.Wait()
	if got := watch.leaked.Load(); got != 0 {
		t.Errorf("the sniffer has seen %d packets of port 53 that are not the proxy's", got)
	}
	if got := outside.queries.Load(); got != 1 {
		t.Errorf("the server has got %d queries, want the proxy's one", got)
	}
	if c := n.counters(pod); c.DnsCaptured < uint64(queries) {
		t.Errorf("counters are %+v", c)
	}
}

// While capture is switched on and off, every query is answered, by whoever was to answer when it was sent.
func TestDNSToggledUnderLoad(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.dnsPod("pod", false)
	serveDNS(t, n.Outside, netip.Addr{}, 53)
	var (
		mu      sync.RWMutex // held by who sends, so that the side is known at each send
		capture bool
		asked   [2]atomic.Int64
		stop    = make(chan struct{})
		clients sync.WaitGroup
	)
	for client := range 8 {
		family := []string{"IPv4", "IPv6"}[client%2]
		server := netip.AddrPortFrom(addr(n.Outside, family), 53)
		s := openUDP(t, pod, dnsSocketSpec{family: family})
		clients.Go(func() {
			for id := uint16(0); ; id++ {
				select {
				case <-stop:
					return
				default:
				}
				mu.RLock()
				answer, side := serverAnswer(family), 0
				if capture {
					answer, side = proxyAnswer(family), 1
				}
				err := s.sendTo(query(id, "name.test.", family), server)
				mu.RUnlock()
				if err != nil {
					t.Error(err)
					return
				}
				s.expect(t, id, answer, server)
				asked[side].Add(1)
			}
		})
	}
	for i := range 100 {
		on := i%2 == 0
		mu.Lock()
		err := n.Configure("uid-pod", func(s *enroll.Settings) error { return s.Set(enroll.KeyDNSCapture, strconv.FormatBool(on)) })
		capture = on
		mu.Unlock()
		if err != nil {
			t.Error(err)
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	close(stop)
	clients.Wait()
	if asked[0].Load() == 0 || asked[1].Load() == 0 {
		t.Errorf("%d queries went to the server and %d to the proxy: want some of each", asked[0].Load(), asked[1].Load())
	}
}
