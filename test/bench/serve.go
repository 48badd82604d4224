// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/rpc"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ports and the mark are those of the node proxy.
const (
	portOutbound = 15001
	portInbound  = 15006
	portDNS      = 15053
	portApp      = 8080
	proxyMark    = 0x539
)

// A connection begins with one byte that says what is wanted, and four for the size of messages, big endian.
const (
	wantEcho   = 'e' // each message comes back
	wantDrain  = 'd' // all is read; at the end the number of bytes comes back, in eight bytes
	headerSize = 5
	maxMessage = 1 << 20
)

// Seen is what a listener has accepted so far.
type Seen struct {
	Count uint64
	// Source and Destination are those of the last connection; the destination is the original one.
	Source, Destination netip.AddrPort
}

// Stats is what a server or a client has done so far.
type Stats struct {
	Outbound, Inbound, DNS, App Seen
	// CPU is the processor time of the process, of the kernel on its behalf, too.
	CPU time.Duration
	// Err is the first failure that no client can know of.
	Err string
}

// server is the proxy or the app of a subject. It does as little as either can.
type server struct {
	mu    sync.Mutex
	stats Stats
	spoof bool // connect to the app with the peer's address
}

// Stats is called by the benchmark.
func (s *server) Stats(_ struct{}, out *Stats) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	*out = s.stats
	out.CPU = cpuTime()
	return nil
}

func (s *server) saw(where *Seen, src, dst netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	where.Count++
	where.Source, where.Destination = src, dst
}

func (s *server) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stats.Err == "" {
		s.stats.Err = err.Error()
	}
}

// serveProxy listens where a node proxy does. The outbound port answers by itself: what is measured is the way there.
func serveProxy(ctx context.Context, control string, spoof bool) error {
	s := &server{spoof: spoof}
	if err := s.listen(ctx, portOutbound, true, &s.stats.Outbound, func(c *net.TCPConn, _, _ netip.AddrPort) { echo(c) }); err != nil {
		return err
	}
	if err := s.listen(ctx, portInbound, true, &s.stats.Inbound, s.forward); err != nil {
		return err
	}
	for _, addr := range []string{"127.0.0.1", "::1"} {
		if err := s.listenDNS(ctx, netip.AddrPortFrom(netip.MustParseAddr(addr), portDNS)); err != nil {
			return err
		}
	}
	return serveControl(ctx, control, s)
}

// serveApp listens as the pod's app.
func serveApp(ctx context.Context, control string) error {
	s := &server{}
	if err := s.listen(ctx, portApp, false, &s.stats.App, func(c *net.TCPConn, _, _ netip.AddrPort) { echo(c) }); err != nil {
		return err
	}
	return serveControl(ctx, control, s)
}

// serveControl answers the benchmark until ctx is done.
func serveControl(ctx context.Context, path string, receiver any) error {
	r := rpc.NewServer()
	if err := r.RegisterName("Bench", receiver); err != nil {
		return err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = l.Close() })
	r.Accept(l)
	return nil
}

// listen serves all addresses of both families. Go would make an MPTCP socket of its own accord.
func (s *server) listen(
	ctx context.Context, port int, proxy bool, where *Seen, serve func(c *net.TCPConn, src, dst netip.AddrPort),
) error {
	lc := net.ListenConfig{KeepAlive: -1}
	lc.SetMultipathTCP(false)
	if proxy {
		lc.Control = asProxy
	}
	l, err := lc.Listen(ctx, "tcp", fmt.Sprintf(":%d", port))
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				s.failed(fmt.Errorf("accept on port %d: %w", port, err))
				return
			}
			c, ok := conn.(*net.TCPConn)
			if !ok {
				s.failed(fmt.Errorf("port %d accepted a %T", port, conn))
				return
			}
			go func() {
				defer c.Close()
				src, dst, err := endpoints(c)
				if err != nil {
					s.failed(err)
					return
				}
				s.saw(where, src, dst)
				serve(c, src, dst)
			}()
		}
	}()
	return nil
}

// listenDNS sends each query back as it came.
func (s *server) listenDNS(ctx context.Context, addr netip.AddrPort) error {
	lc := net.ListenConfig{Control: asProxy}
	pc, err := lc.ListenPacket(ctx, "udp", addr.String())
	if err != nil {
		return err
	}
	c, ok := pc.(*net.UDPConn)
	if !ok {
		return fmt.Errorf("listening at %s made a %T", addr, pc)
	}
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				s.failed(fmt.Errorf("read a query: %w", err))
				return
			}
			s.saw(&s.stats.DNS, from, addr)
			if _, err := c.WriteToUDPAddrPort(buf[:n], from); err != nil {
				s.failed(fmt.Errorf("answer a query: %w", err))
			}
		}
	}()
	return nil
}

// asProxy sets what a node proxy sets: its mark, and that addresses may be others'.
func asProxy(network, _ string, c syscall.RawConn) error {
	level, option := unix.SOL_IP, unix.IP_TRANSPARENT
	if network == "tcp6" || network == "udp6" {
		level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	var err error
	ctlErr := c.Control(func(fd uintptr) {
		err = errors.Join(
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, proxyMark),
			unix.SetsockoptInt(int(fd), level, option, 1),
			unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1),
		)
	})
	return errors.Join(ctlErr, err)
}

// forward carries a peer's connection to the app, as the peer if the subject has a way back for that.
func (s *server) forward(c *net.TCPConn, src, dst netip.AddrPort) {
	if dst.Port() == portInbound { // nothing has redirected it
		dst = netip.AddrPortFrom(dst.Addr(), portApp)
	}
	d := net.Dialer{KeepAlive: -1, Control: asProxy}
	d.SetMultipathTCP(false)
	if s.spoof {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(src.Addr(), 0))
	}
	conn, err := d.Dial("tcp", dst.String())
	if err != nil {
		s.failed(fmt.Errorf("connect to the app at %s as %s: %w", dst, src.Addr(), err))
		_ = c.SetLinger(0)
		return
	}
	defer conn.Close()
	up, ok := conn.(*net.TCPConn)
	if !ok {
		s.failed(fmt.Errorf("connecting to the app made a %T", conn))
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		copyOneWay(up, c)
	}()
	copyOneWay(c, up)
	<-done
}

func copyOneWay(dst, src *net.TCPConn) {
	if _, err := io.Copy(dst, src); err != nil {
		// The client ends its connections by resetting them: so do we.
		_, _ = dst.SetLinger(0), src.SetLinger(0)
		_, _ = dst.Close(), src.Close()
		return
	}
	_ = dst.CloseWrite()
}

// echo does what the connection's first bytes ask for, until it ends.
func echo(c *net.TCPConn) {
	var header [headerSize]byte
	if _, err := io.ReadFull(c, header[:]); err != nil {
		return
	}
	size := binary.BigEndian.Uint32(header[1:])
	if size == 0 || size > maxMessage {
		return
	}
	switch header[0] {
	case wantEcho:
		buf := make([]byte, size)
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	case wantDrain:
		// Not io.Copy to nowhere: that would read in pieces of another size.
		buf, total := make([]byte, 256<<10), uint64(0)
		for {
			n, err := c.Read(buf)
			total += uint64(n)
			if errors.Is(err, io.EOF) {
				_, _ = c.Write(binary.BigEndian.AppendUint64(nil, total))
				return
			}
			if err != nil {
				return
			}
		}
	}
}

// endpoints says where a connection comes from and where it was to go: netfilter is asked first, as proxies do, and where it knows
// nothing the socket's local address is the original destination.
func endpoints(c *net.TCPConn) (src, dst netip.AddrPort, err error) {
	remote, okRemote := c.RemoteAddr().(*net.TCPAddr)
	local, okLocal := c.LocalAddr().(*net.TCPAddr)
	if !okRemote || !okLocal {
		return src, dst, fmt.Errorf("connection between a %T and a %T", c.RemoteAddr(), c.LocalAddr())
	}
	src, dst = unmap(remote.AddrPort()), unmap(local.AddrPort())
	raw, err := c.SyscallConn()
	if err != nil {
		return src, dst, err
	}
	ctlErr := raw.Control(func(fd uintptr) {
		if original, ok := originalDst(int(fd), dst.Addr().Is4()); ok {
			dst = original
		}
	})
	return src, dst, ctlErr
}

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// originalDst is getsockopt SO_ORIGINAL_DST, which has the same number in both families.
func originalDst(fd int, v4 bool) (netip.AddrPort, bool) {
	const soOriginalDst = 80
	if v4 {
		var sa unix.RawSockaddrInet4
		if !getsockopt(fd, unix.SOL_IP, soOriginalDst, unsafe.Pointer(&sa), unsafe.Sizeof(sa)) {
			return netip.AddrPort{}, false
		}
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), networkOrder(&sa.Port)), true
	}
	var sa unix.RawSockaddrInet6
	if !getsockopt(fd, unix.SOL_IPV6, soOriginalDst, unsafe.Pointer(&sa), unsafe.Sizeof(sa)) {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), networkOrder(&sa.Port)), true
}

func networkOrder(port *uint16) uint16 {
	return binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(port))[:])
}

func getsockopt(fd, level, option int, value unsafe.Pointer, size uintptr) bool {
	length := uint32(size)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(value), uintptr(unsafe.Pointer(&length)), 0)
	return errno == 0
}

func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
