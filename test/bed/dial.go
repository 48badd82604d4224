// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// dialTimeout is the limit of a Dial without one of its own. It is longer than the three retransmissions of a SYN (1, 2
// and 4 s) so that a lost SYN shows as a slow connection, not as a failed one.
const dialTimeout = 10 * time.Second

// FastOpen is a way to use TCP Fast Open (RFC 7413). The first connection to a server only fetches its cookie; later ones
// carry data in their SYN. See [SynData].
type FastOpen int

// The ways to use TCP Fast Open.
const (
	// NoFastOpen is an ordinary connection.
	NoFastOpen FastOpen = iota
	// FastOpenSendto connects by sendto with MSG_FASTOPEN.
	FastOpenSendto
	// FastOpenConnect sets TCP_FASTOPEN_CONNECT, so that connect waits for the first write.
	FastOpenConnect
)

func (f FastOpen) String() string {
	switch f {
	case NoFastOpen:
		return "none"
	case FastOpenSendto:
		return "sendto"
	case FastOpenConnect:
		return "connect"
	}
	return "FastOpen(" + strconv.Itoa(int(f)) + ")"
}

// DialSpec says how a client connects. Only Remote is needed.
type DialSpec struct {
	// Remote is the address to connect to. An IPv4 address is connected to by an AF_INET socket unless V4Mapped is set.
	Remote netip.AddrPort
	// Local is the source to bind before connecting, with SO_REUSEADDR. With a port only (an invalid or unspecified
	// address), the kernel chooses the address; with port 0, the port. A connection that the peer has closed first keeps
	// its port until the peer has acknowledged our close as well: until then the same port to the same peer gives
	// EADDRNOTAVAIL.
	Local netip.AddrPort
	// V4Mapped connects an AF_INET6 socket to ::ffff:Remote, which must be an IPv4 address.
	V4Mapped bool
	// FastOpen selects a variant of TCP Fast Open. It needs Data.
	FastOpen FastOpen
	// Data is sent with the SYN, where FastOpen makes that possible, or else right after the connection is made.
	Data []byte
	// MPTCP makes an MPTCP socket (kernel 5.6); without, it is always plain TCP.
	// [net.TCPConn.MultipathTCP] tells whether the peer took part.
	MPTCP bool
	// BindToDevice is an interface to bind the socket to (SO_BINDTODEVICE); empty for none.
	BindToDevice string
	// Mark is the socket's mark (SO_MARK); 0 for none.
	Mark uint32
	// Transparent sets IP_TRANSPARENT, so that Local may be an address that is not the namespace's.
	Transparent bool
	// Timeout limits the whole Dial; 0 is 10 s. A deadline of the context counts too.
	Timeout time.Duration
}

// Dial makes a TCP connection from the namespace. The socket is made, set up and connected by plain system calls, so
// nothing but what spec says happens to it. Errors wrap the kernel's errno, [os.ErrDeadlineExceeded] for Timeout, or
// the cause of ctx's end.
func (n *NS) Dial(ctx context.Context, spec DialSpec) (*net.TCPConn, error) {
	c, err := n.dial(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("dial %s from netns %s: %w", spec.Remote, n.Name, err)
	}
	return c, nil
}

func (n *NS) dial(ctx context.Context, spec DialSpec) (*net.TCPConn, error) {
	if spec.V4Mapped && !spec.Remote.Addr().Is4() {
		return nil, errors.New("V4Mapped needs an IPv4 address")
	}
	if spec.FastOpen != NoFastOpen && len(spec.Data) == 0 {
		return nil, errors.New("FastOpen needs data for the SYN")
	}
	if spec.Timeout == 0 {
		spec.Timeout = dialTimeout
	}
	deadline := time.Now().Add(spec.Timeout)
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}

	var file *os.File
	var rest []byte
	err := n.Do(func() error {
		var err error
		file, rest, err = spec.begin()
		return err
	})
	if err != nil {
		return nil, err
	}
	// net.FileConn works on a copy of the descriptor.
	defer file.Close()
	if err := file.SetDeadline(deadline); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = file.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err = waitConnected(file, rest)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err != nil {
		return nil, err
	}
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		_ = conn.Close()
		return nil, fmt.Errorf("the socket became a %T", conn)
	}
	return tcp, nil
}

// begin makes the socket in the namespace of the calling thread and begins to connect. It returns the data that is
// still to be sent.
func (s DialSpec) begin() (*os.File, []byte, error) {
	domain := unix.AF_INET6
	if s.Remote.Addr().Is4() && !s.V4Mapped {
		domain = unix.AF_INET
	}
	proto := unix.IPPROTO_TCP
	if s.MPTCP {
		proto = unix.IPPROTO_MPTCP
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
	if err != nil {
		return nil, nil, os.NewSyscallError("socket", err)
	}
	file := os.NewFile(uintptr(fd), "tcp "+s.Remote.String())
	rest, err := s.connect(fd, domain)
	if err != nil {
		_ = file.Close()
		return nil, nil, err
	}
	return file, rest, nil
}

func (s DialSpec) connect(fd, domain int) ([]byte, error) {
	o := sockopts{fd: fd, domain: domain}
	o.common(s.BindToDevice, s.Mark, s.Transparent)
	if s.FastOpen == FastOpenConnect {
		o.set("TCP_FASTOPEN_CONNECT", unix.IPPROTO_TCP, unix.TCP_FASTOPEN_CONNECT, 1)
	}
	if s.Local.IsValid() || s.Local.Port() != 0 {
		o.set("SO_REUSEADDR", unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		if o.err == nil {
			o.err = bind(fd, domain, s.Local)
		}
	}
	if o.err != nil {
		return nil, o.err
	}
	remote, err := sockaddr(domain, s.Remote)
	if err != nil {
		return nil, err
	}
	rest := s.Data
	if s.FastOpen == FastOpenSendto {
		var sent int
		sent, err = unix.SendmsgN(fd, rest, nil, remote, unix.MSG_FASTOPEN|unix.MSG_NOSIGNAL)
		if err == nil {
			rest = rest[sent:]
		}
	} else {
		err = unix.Connect(fd, remote)
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return nil, os.NewSyscallError("connect", err)
	}
	if s.FastOpen == FastOpenConnect && err == nil {
		// With a cookie at hand connect has sent nothing yet: the SYN goes out with this write.
		sent, err := unix.SendmsgN(fd, rest, nil, nil, unix.MSG_NOSIGNAL)
		if err != nil && !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EAGAIN) {
			return nil, os.NewSyscallError("send", err)
		}
		rest = rest[max(0, sent):]
	}
	return rest, nil
}

// waitConnected waits until the socket is connected and sends the rest of the data.
func waitConnected(file *os.File, rest []byte) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = raw.Write(func(fd uintptr) bool {
		// Level-triggered and without waiting: the runtime's own events may be from before the connect.
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, err := unix.Poll(fds, 0); n <= 0 {
			if err != nil && !errors.Is(err, unix.EINTR) {
				result = os.NewSyscallError("poll", err)
				return true
			}
			return false
		}
		errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			result = os.NewSyscallError("getsockopt SO_ERROR", err)
		case errno != 0:
			result = os.NewSyscallError("connect", unix.Errno(errno))
		}
		return true
	})
	if err := errors.Join(result, err); err != nil || len(rest) == 0 {
		return err
	}
	_, err = file.Write(rest)
	return err
}

// sockopts sets options until the first that fails.
type sockopts struct {
	fd, domain int
	err        error
}

func (o *sockopts) set(name string, level, opt, value int) {
	if o.err == nil {
		o.err = os.NewSyscallError("setsockopt "+name, unix.SetsockoptInt(o.fd, level, opt, value))
	}
}

func (o *sockopts) common(device string, mark uint32, transparent bool) {
	if device != "" && o.err == nil {
		o.err = os.NewSyscallError("setsockopt SO_BINDTODEVICE "+device, unix.BindToDevice(o.fd, device))
	}
	if mark != 0 {
		o.set("SO_MARK", unix.SOL_SOCKET, unix.SO_MARK, int(mark))
	}
	if transparent {
		o.set("IP_TRANSPARENT", unix.SOL_IP, unix.IP_TRANSPARENT, 1)
		if o.domain == unix.AF_INET6 {
			o.set("IPV6_TRANSPARENT", unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
		}
	}
}

func bind(fd, domain int, local netip.AddrPort) error {
	if !local.Addr().IsValid() {
		local = netip.AddrPortFrom(netip.IPv4Unspecified(), local.Port())
	}
	if domain == unix.AF_INET6 && local.Addr() == netip.IPv4Unspecified() {
		local = netip.AddrPortFrom(netip.IPv6Unspecified(), local.Port())
	}
	sa, err := sockaddr(domain, local)
	if err != nil {
		return err
	}
	return os.NewSyscallError("bind "+local.String(), unix.Bind(fd, sa))
}

// sockaddr makes the kernel's form of an address; an IPv4 address for an AF_INET6 socket becomes v4-mapped. A zone is
// looked up in the namespace of the calling thread.
func sockaddr(domain int, a netip.AddrPort) (unix.Sockaddr, error) {
	if domain == unix.AF_INET {
		addr := a.Addr().Unmap()
		if !addr.Is4() {
			return nil, fmt.Errorf("%s is no IPv4 address", a.Addr())
		}
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: addr.As4()}, nil
	}
	sa := &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	if zone := a.Addr().Zone(); zone != "" {
		iface, err := net.InterfaceByName(zone)
		if err != nil {
			return nil, fmt.Errorf("find the zone of %s: %w", a.Addr(), err)
		}
		sa.ZoneId = uint32(iface.Index)
	}
	return sa, nil
}

// Sockname returns the socket's own address by getsockname, v4-mapped addresses as IPv4.
func Sockname(c syscall.Conn) (netip.AddrPort, error) { return sockName(c, unix.Getsockname) }

// Peername returns the address of the socket's peer by getpeername, v4-mapped addresses as IPv4.
func Peername(c syscall.Conn) (netip.AddrPort, error) { return sockName(c, unix.Getpeername) }

func sockName(c syscall.Conn, get func(int) (unix.Sockaddr, error)) (netip.AddrPort, error) {
	var addr netip.AddrPort
	err := control(c, func(fd int) error {
		sa, err := get(fd)
		if err != nil {
			return err
		}
		switch sa := sa.(type) {
		case *unix.SockaddrInet4:
			addr = netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
		case *unix.SockaddrInet6:
			ip := netip.AddrFrom16(sa.Addr).Unmap()
			if sa.ZoneId != 0 {
				ip = ip.WithZone(strconv.Itoa(int(sa.ZoneId)))
			}
			addr = netip.AddrPortFrom(ip, uint16(sa.Port))
		default:
			return fmt.Errorf("address is a %T", sa)
		}
		return nil
	})
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("read the name of a socket: %w", err)
	}
	return addr, nil
}

// tcpiOptSynData is TCPI_OPT_SYN_DATA of linux/tcp.h: the peer has acknowledged data that was in the SYN.
const tcpiOptSynData = 1 << 5

// SynData reports whether the peer took data out of the connection's SYN, that is, whether TCP Fast Open was at work.
func SynData(c syscall.Conn) (bool, error) {
	var used bool
	err := control(c, func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			used = info.Options&tcpiOptSynData != 0
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("read TCP_INFO: %w", err)
	}
	return used, nil
}

// control runs fn on the descriptor of a socket.
func control(c syscall.Conn, fn func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	if err := raw.Control(func(fd uintptr) { result = fn(int(fd)) }); err != nil {
		return err
	}
	return result
}
