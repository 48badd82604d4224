// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/explain"
)

// Marks, as in bpf/redirector.h.
const (
	markMask    = 0xfff
	markProxy   = 0x539
	markCapture = 0x112
)

// dialled is what became of a socket that was connected in the pod.
type dialled struct {
	mark  int
	local netip.Addr
	err   error
}

// accepted says whether somebody has accepted, be it to reset at once.
func (d *dialled) accepted() bool { return d.err == nil || errors.Is(d.err, unix.ECONNRESET) }

func (d *dialled) words() string {
	switch {
	case d.err == nil:
		return "it was accepted"
	case errors.Is(d.err, unix.EINPROGRESS):
		return fmt.Sprintf("nobody answers within %s", patience)
	default:
		return d.err.Error()
	}
}

func domainOf(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	default:
		return netip.AddrPort{}
	}
}

// socket makes a socket whose calls take no longer than patience.
func socket(domain, kind, protocol int) (int, error) {
	fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return -1, fmt.Errorf("make a socket: %w", err)
	}
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	err = errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
	)
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("limit a socket's time: %w", err)
	}
	return fd, nil
}

// reset closes a connection at once and leaves nothing of it.
func reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	_ = unix.Close(fd)
}

// dial connects from within the pod, with a mark, by TCP.
func (c *checker) dial(to netip.AddrPort, mark int) (*dialled, error) {
	var d dialled
	err := c.NS.Do(func() error {
		fd, err := socket(domainOf(to.Addr()), unix.SOCK_STREAM, unix.IPPROTO_TCP)
		if err != nil {
			return err
		}
		defer reset(fd)
		if mark != 0 {
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark); err != nil {
				return fmt.Errorf("set a socket's mark: %w", err)
			}
		}
		d.err = unix.Connect(fd, sockaddr(to))
		if d.mark, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK); err != nil {
			return fmt.Errorf("read a socket's mark: %w", err)
		}
		local, err := unix.Getsockname(fd)
		if err != nil {
			return fmt.Errorf("read a socket's address: %w", err)
		}
		d.local = addrOf(local).Addr()
		return nil
	})
	return &d, err
}

// dialUDP connects from within the pod by UDP and sends one byte, which is no query; err is what comes back.
func (c *checker) dialUDP(to netip.AddrPort) (*dialled, error) {
	var d dialled
	err := c.NS.Do(func() error {
		fd, err := socket(domainOf(to.Addr()), unix.SOCK_DGRAM, unix.IPPROTO_UDP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Connect(fd, sockaddr(to)); err != nil {
			return err
		}
		local, err := unix.Getsockname(fd)
		if err != nil {
			return fmt.Errorf("read a socket's address: %w", err)
		}
		if d.local = addrOf(local).Addr(); !d.local.IsLoopback() {
			return nil // the byte would leave
		}
		_, d.err = unix.Write(fd, []byte{0})
		// Over loopback, that nobody listens is known when the write returns.
		if pending, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && pending != 0 {
			d.err = unix.Errno(pending)
		}
		return nil
	})
	return &d, err
}

// dialFrom connects from the host, bound to an address before.
func dialFrom(from, to netip.AddrPort) error {
	fd, err := socket(domainOf(to.Addr()), unix.SOCK_STREAM, unix.IPPROTO_TCP)
	if err != nil {
		return err
	}
	defer reset(fd)
	if err := unix.Bind(fd, sockaddr(from)); err != nil {
		return fmt.Errorf("bind to %s: %w", from, err)
	}
	return unix.Connect(fd, sockaddr(to))
}

// Dial connects from the calling process's network namespace and returns the kernel's error.
func Dial(to netip.AddrPort) error {
	fd, err := socket(domainOf(to.Addr()), unix.SOCK_STREAM, unix.IPPROTO_TCP)
	if err != nil {
		return err
	}
	defer reset(fd)
	return unix.Connect(fd, sockaddr(to))
}

// withClosedPort runs a check with a port of the pod that is taken, and on which nobody listens.
func (c *checker) withClosedPort(check func(port uint16) (Result, string)) (Result, string) {
	var fd int
	var port uint16
	err := c.NS.Do(func() (err error) {
		if fd, err = socket(domainOf(c.pod), unix.SOCK_STREAM, unix.IPPROTO_TCP); err != nil {
			return err
		}
		if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(c.pod, 0))); err != nil {
			_ = unix.Close(fd)
			return fmt.Errorf("take a port of the pod's: %w", err)
		}
		name, err := unix.Getsockname(fd)
		port = addrOf(name).Port()
		return err
	})
	if err != nil {
		return Failed, err.Error()
	}
	defer unix.Close(fd)
	return check(port)
}

// seal sends a SYN that no socket of TCP's has made, to a port of the node's. If it leaves, the node answers.
func (c *checker) seal() (Result, string) {
	to := netip.AddrPortFrom(c.node, portDiscard)
	if want, err := c.expect(explain.Query{To: to}); err != nil || want.Verdict == explain.Out {
		return Skipped, "connections to the node itself are excluded for the pod"
	}
	before, err := c.Maps.Counters(c.NS.Cookie())
	if err != nil {
		return Failed, err.Error()
	}
	answered := false
	err = c.NS.Do(func() error {
		answered, err = sendSYN(c.pod, to)
		return err
	})
	if err != nil {
		return Failed, fmt.Sprintf("a SYN past the kernel's TCP to %s: %v", to, err)
	}
	if answered {
		return Failed, fmt.Sprintf("a SYN past the kernel's TCP to %s has left the pod, and was answered", to)
	}
	after, err := c.Maps.Counters(c.NS.Cookie())
	if err != nil {
		return Failed, err.Error()
	}
	if after.SealDropped == before.SealDropped {
		return Failed, fmt.Sprintf("a SYN past the kernel's TCP to %s was not dropped by the seal", to)
	}
	return Passed, fmt.Sprintf("a SYN past the kernel's TCP to %s was dropped by the seal", to)
}

// sealPatience is how long an answer of the node itself may take.
const sealPatience = 100 * time.Millisecond

// rawPort is the source port of a SYN that nobody's socket has.
const rawPort = 15999

// sendSYN sends a SYN by a raw socket, and says whether an answer came.
func sendSYN(from netip.Addr, to netip.AddrPort) (answered bool, err error) {
	fd, err := socket(domainOf(to.Addr()), unix.SOCK_RAW, unix.IPPROTO_TCP)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval((10 * time.Millisecond).Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return false, fmt.Errorf("limit a socket's time: %w", err)
	}
	if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0))); err != nil {
		return false, fmt.Errorf("bind to %s: %w", from, err)
	}
	syn := synHeader(from, to)
	if err := unix.Sendto(fd, syn, 0, sockaddr(netip.AddrPortFrom(to.Addr(), 0))); err != nil {
		// The seal's refusal may be said to the sender.
		if errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EPERM) {
			return false, nil
		}
		return false, fmt.Errorf("send: %w", err)
	}
	buf := make([]byte, 256)
	for deadline := time.Now().Add(sealPatience); time.Now().Before(deadline); {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			continue
		}
		segment := buf[:n]
		if to.Addr().Is4() && n > 0 { // with its IP header
			segment = segment[min(int(segment[0]&0xf)*4, n):]
		}
		if len(segment) >= 4 && binary.BigEndian.Uint16(segment) == to.Port() && binary.BigEndian.Uint16(segment[2:]) == rawPort {
			return true, nil
		}
	}
	return false, nil
}

// synHeader is the TCP header of a SYN.
func synHeader(from netip.Addr, to netip.AddrPort) []byte {
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h, rawPort)
	binary.BigEndian.PutUint16(h[2:], to.Port())
	binary.BigEndian.PutUint32(h[4:], uint32(time.Now().UnixNano()))
	h[12] = 5 << 4 // its length, in words
	h[13] = 2      // SYN
	binary.BigEndian.PutUint16(h[14:], 1024)

	var sum uint32
	add := func(b []byte) {
		for i := 0; i+1 < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	add(from.AsSlice())
	add(to.Addr().AsSlice())
	sum += uint32(len(h)) + unix.IPPROTO_TCP
	add(h)
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(h[16:], ^uint16(sum))
	return h
}
