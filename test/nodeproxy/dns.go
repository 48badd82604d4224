// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// What the proxy's DNS server says of every name but those below UpstreamDomain: nobody else answers with these addresses.
var (
	DNSAnswerV4 = netip.MustParseAddr("240.0.0.53")
	DNSAnswerV6 = netip.MustParseAddr("2001:db8:ffff::53")
)

// UpstreamDomain is the domain that the proxy's DNS server does not answer for itself: it asks Config.DNSUpstream.
const UpstreamDomain = "upstream.test."

// dnsTTL is short enough to be of no use, and long enough to be no special case.
const dnsTTL = 1

// upstreamTimeout is how long the upstream server may take.
const upstreamTimeout = 2 * time.Second

// dnsServer answers on the loopback addresses of a pod, by UDP and TCP.
type dnsServer struct {
	packets []net.PacketConn
	streams []net.Listener
}

// startDNS listens on port PortDNS of the pod's loopback addresses.
func startDNS(ns *netns) (*dnsServer, error) {
	s := new(dnsServer)
	err := ns.do(func() error {
		families := []int{unix.AF_INET}
		if haveIPv6() {
			families = append(families, unix.AF_INET6)
		}
		for _, family := range families {
			packet, err := dnsSocket(family, unix.SOCK_DGRAM)
			if err != nil {
				return fmt.Errorf("listen for DNS by UDP: %w", err)
			}
			p, err := net.FilePacketConn(packet) // makes its own duplicate
			if err := errors.Join(err, packet.Close()); err != nil {
				return err
			}
			s.packets = append(s.packets, p)
			stream, err := dnsSocket(family, unix.SOCK_STREAM)
			if err != nil {
				return fmt.Errorf("listen for DNS by TCP: %w", err)
			}
			l, err := net.FileListener(stream)
			if err := errors.Join(err, stream.Close()); err != nil {
				return err
			}
			s.streams = append(s.streams, l)
		}
		return nil
	})
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// dnsSocket makes a socket of the thread's namespace that is bound, marked and, if it is one for streams, listening.
func dnsSocket(family, kind int) (*os.File, error) {
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), fmt.Sprintf("dns:%d", PortDNS))
	addr := unix.Sockaddr(&unix.SockaddrInet4{Port: PortDNS, Addr: [4]byte{127, 0, 0, 1}})
	if family == unix.AF_INET6 {
		addr = &unix.SockaddrInet6{Port: PortDNS, Addr: netip.IPv6Loopback().As16()}
	}
	err = setsockopt(fd, unix.SOL_SOCKET, unix.SO_MARK, Mark, "SO_MARK")
	if err == nil {
		// Two proxies listen side by side during an update.
		err = setsockopt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1, "SO_REUSEPORT")
	}
	if err == nil {
		err = setsockopt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1, "SO_REUSEADDR")
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, addr))
	}
	if err == nil && kind == unix.SOCK_STREAM {
		err = os.NewSyscallError("listen", unix.Listen(fd, 1<<10))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// close ends the server; what is under way is not answered.
func (s *dnsServer) close() {
	for _, p := range s.packets {
		_ = p.Close()
	}
	for _, l := range s.streams {
		_ = l.Close()
	}
}

// serveDNS starts the loops that answer, which end when the server is closed.
func (p *pod) serveDNS(s *dnsServer) {
	for _, c := range s.packets {
		p.running.Go(func() {
			query := make([]byte, 64<<10)
			for {
				n, from, err := c.ReadFrom(query)
				if err != nil {
					return
				}
				message := append([]byte(nil), query[:n]...)
				p.running.Go(func() {
					if answer := p.answerDNS(message); answer != nil {
						_, _ = c.WriteTo(answer, from)
					}
				})
			}
		})
	}
	for _, l := range s.streams {
		p.running.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				p.running.Go(func() { p.serveDNSStream(c) })
			}
		})
	}
}

// serveDNSStream answers the queries of one TCP connection, each with its length before it.
func (p *pod) serveDNSStream(c net.Conn) {
	defer c.Close()
	for {
		_ = c.SetDeadline(time.Now().Add(2 * upstreamTimeout))
		var length [2]byte
		if _, err := io.ReadFull(c, length[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(c, query); err != nil {
			return
		}
		answer := p.answerDNS(query)
		if answer == nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil {
			return
		}
	}
}

// answerDNS makes the answer to a query; nil if there is none.
func (p *pod) answerDNS(query []byte) []byte {
	var parser dnsmessage.Parser
	header, err := parser.Start(query)
	if err != nil || header.Response {
		return nil
	}
	question, err := parser.Question()
	if err != nil {
		return nil
	}
	if name := strings.ToLower(question.Name.String()); name == UpstreamDomain || strings.HasSuffix(name, "."+UpstreamDomain) {
		if answer, err := p.askUpstream(query); err == nil {
			return answer
		}
		return buildAnswer(header.ID, question, dnsmessage.RCodeServerFailure, netip.Addr{}, netip.Addr{})
	}
	return buildAnswer(header.ID, question, dnsmessage.RCodeSuccess, DNSAnswerV4, DNSAnswerV6)
}

// AnswerDNS makes a DNS server's answer to a query: the address of the family that it asks for. It returns nil if the query is
// none.
func AnswerDNS(query []byte, v4, v6 netip.Addr) []byte {
	var parser dnsmessage.Parser
	header, err := parser.Start(query)
	if err != nil || header.Response {
		return nil
	}
	question, err := parser.Question()
	if err != nil {
		return nil
	}
	return buildAnswer(header.ID, question, dnsmessage.RCodeSuccess, v4, v6)
}

func buildAnswer(id uint16, question dnsmessage.Question, code dnsmessage.RCode, v4, v6 netip.Addr) []byte {
	m := dnsmessage.Message{
		Header: dnsmessage.Header{
			ID: id, Response: true, RecursionDesired: true, RecursionAvailable: true, RCode: code,
		},
		Questions: []dnsmessage.Question{question},
	}
	header := dnsmessage.ResourceHeader{Name: question.Name, Class: question.Class, TTL: dnsTTL}
	switch {
	case question.Type == dnsmessage.TypeA && v4.IsValid():
		m.Answers = []dnsmessage.Resource{{Header: header, Body: &dnsmessage.AResource{A: v4.As4()}}}
	case question.Type == dnsmessage.TypeAAAA && v6.IsValid():
		m.Answers = []dnsmessage.Resource{{Header: header, Body: &dnsmessage.AAAAResource{AAAA: v6.As16()}}}
	}
	answer, err := m.Pack()
	if err != nil {
		return nil
	}
	return answer
}

// askUpstream passes a query on, by a socket of the pod's namespace with the proxy's mark.
func (p *pod) askUpstream(query []byte) ([]byte, error) {
	if !p.cfg.DNSUpstream.IsValid() {
		return nil, errors.New("no upstream server")
	}
	var c net.Conn
	err := p.ns.do(func() error {
		family := unix.AF_INET
		if p.cfg.DNSUpstream.Addr().Is6() {
			family = unix.AF_INET6
		}
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		f := os.NewFile(uintptr(fd), "upstream")
		defer f.Close()
		if err := connectUpstream(fd, family, p.cfg.DNSUpstream, p.cfg.DNSUpstreamPort); err != nil {
			return err
		}
		c, err = net.FileConn(f)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(upstreamTimeout))
	if _, err := c.Write(query); err != nil {
		return nil, err
	}
	answer := make([]byte, 64<<10)
	n, err := c.Read(answer)
	return answer[:n], err
}

func connectUpstream(fd, family int, server netip.AddrPort, port uint16) error {
	if err := setsockopt(fd, unix.SOL_SOCKET, unix.SO_MARK, Mark, "SO_MARK"); err != nil {
		return err
	}
	if err := setsockopt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1, "SO_REUSEPORT"); err != nil {
		return err
	}
	var local, remote unix.Sockaddr
	if family == unix.AF_INET6 {
		local = &unix.SockaddrInet6{Port: int(port)}
		remote = &unix.SockaddrInet6{Port: int(server.Port()), Addr: server.Addr().As16()}
	} else {
		local = &unix.SockaddrInet4{Port: int(port)}
		remote = &unix.SockaddrInet4{Port: int(server.Port()), Addr: server.Addr().As4()}
	}
	if err := unix.Bind(fd, local); err != nil {
		return os.NewSyscallError("bind", err)
	}
	return os.NewSyscallError("connect", unix.Connect(fd, remote))
}
