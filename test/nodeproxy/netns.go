// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// home is the network namespace of this process.
var home = sync.OnceValues(func() (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	// A new goroutine is on a thread that nobody locked and took elsewhere.
	opened := make(chan result)
	go func() {
		f, err := os.Open("/proc/thread-self/ns/net")
		opened <- result{f, err}
	}()
	r := <-opened
	return r.f, r.err
})

// netns is a pod's network namespace.
type netns struct {
	fd     int
	ino    uint64
	cookie uint64
	home   *os.File
}

// newNetNS takes over fd, also when it fails.
func newNetNS(fd int) (*netns, error) {
	n := &netns{fd: fd}
	if err := n.init(); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return n, nil
}

func (n *netns) init() error {
	kind, err := unix.IoctlRetInt(n.fd, unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		return errors.New("the file descriptor is no network namespace")
	}
	if n.ino, err = inode(n.fd); err != nil {
		return err
	}
	if n.home, err = home(); err != nil {
		return fmt.Errorf("open this process's network namespace: %w", err)
	}
	homeIno, err := inode(int(n.home.Fd()))
	if err != nil {
		return err
	}
	if n.ino == homeIno {
		return errors.New("this is the network namespace of the node proxy itself")
	}
	return n.do(func() error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		n.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE) // 5.14
		return os.NewSyscallError("getsockopt SO_NETNS_COOKIE", err)
	})
}

func inode(fd int) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("stat network namespace: %w", err)
	}
	return st.Ino, nil
}

func (n *netns) close() { _ = unix.Close(n.fd) }

// do runs fn on a thread that is in the namespace. fn must not block: it holds the
// thread. It runs on a goroutine of its own, so that the thread can be given up
// with it should there be no way back.
func (n *netns) do(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		leave, err := n.enter()
		if err == nil {
			err = errors.Join(fn(), leave())
		}
		done <- err
	}()
	return <-done
}

// enter locks the goroutine to its thread and takes that into the namespace; leave
// undoes both. If leave fails, the thread stays locked and must end with its
// goroutine.
func (n *netns) enter() (leave func() error, err error) {
	runtime.LockOSThread()
	if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("enter the pod's network namespace: %w", err)
	}
	return func() error {
		if err := unix.Setns(int(n.home.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("leave the pod's network namespace: %w", err)
		}
		runtime.UnlockOSThread()
		return nil
	}, nil
}

// listen listens on port of all addresses of both families.
func (n *netns) listen(port int) (*net.TCPListener, error) {
	var l *net.TCPListener
	err := n.do(func() error {
		fd, err := listenSocket(port)
		if err != nil {
			return fmt.Errorf("listen on port %d: %w", port, err)
		}
		// FileListener makes its own duplicate.
		f := os.NewFile(uintptr(fd), fmt.Sprintf("listener:%d", port))
		defer f.Close()
		listener, err := net.FileListener(f)
		if err != nil {
			return err
		}
		l, _ = listener.(*net.TCPListener) // of a TCP socket it is one
		return nil
	})
	return l, err
}

// listenSocket makes a listening socket in the thread's namespace. It is not for
// net.Listen: that makes MPTCP sockets, which a SOCKHASH refuses, judges by its
// own namespace whether there is IPv6, and it binds before a mark can be set.
func listenSocket(port int) (fd int, err error) {
	family, addr := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: port})
	if !haveIPv6() {
		family, addr = unix.AF_INET, &unix.SockaddrInet4{Port: port}
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := startListening(fd, family, addr); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func startListening(fd, family int, addr unix.Sockaddr) error {
	if err := setProxyOptions(fd, family); err != nil {
		return err
	}
	if family == unix.AF_INET6 {
		if err := setsockopt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 0, "IPV6_V6ONLY"); err != nil {
			return err
		}
	}
	// Two proxies listen side by side during an update.
	if err := setsockopt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1, "SO_REUSEPORT"); err != nil {
		return err
	}
	if err := setsockopt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1, "SO_REUSEADDR"); err != nil {
		return err
	}
	if err := unix.Bind(fd, addr); err != nil {
		return os.NewSyscallError("bind", err)
	}
	// The kernel cuts it down to net.core.somaxconn of the namespace.
	return os.NewSyscallError("listen", unix.Listen(fd, 1<<15))
}

// haveIPv6 tells of the thread's namespace; /proc/sys/net shows the reader's own.
func haveIPv6() bool {
	disabled, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	return err == nil && strings.TrimSpace(string(disabled)) == "0"
}

// setProxyOptions marks a socket as the proxy's, and lets it have and take
// connections to addresses that are not the pod's.
func setProxyOptions(fd, family int) error {
	if err := setsockopt(fd, unix.SOL_SOCKET, unix.SO_MARK, Mark, "SO_MARK"); err != nil {
		return err
	}
	if family == unix.AF_INET6 {
		return setsockopt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1, "IPV6_TRANSPARENT")
	}
	return setsockopt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1, "IP_TRANSPARENT")
}

func setsockopt(fd, level, opt, value int, name string) error {
	return os.NewSyscallError("setsockopt "+name, unix.SetsockoptInt(fd, level, opt, value))
}

// dial connects from the namespace to dst, with src as the source address if it
// is valid. The error is the kernel's, without Go's repetition of the addresses.
func (n *netns) dial(ctx context.Context, src netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	type result struct {
		conn *net.TCPConn
		err  error
	}
	done := make(chan result, 1)
	go func() {
		conn, err := n.dialHere(ctx, src, dst)
		done <- result{conn, err}
	}()
	r := <-done
	if r.err != nil {
		return nil, plainError(r.err)
	}
	return r.conn, nil
}

// dialHere is dial on a goroutine that may end with its thread. Go makes the socket
// on the calling thread, then calls Control, then connects: the thread is in the
// namespace for the first of the three only, while the connect may take long and
// needs no thread at all.
func (n *netns) dialHere(ctx context.Context, src netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	leave, err := n.enter()
	if err != nil {
		return nil, err
	}
	inside := true
	leaveOnce := func() error {
		if !inside {
			return nil
		}
		inside = false
		return leave()
	}
	d := net.Dialer{
		KeepAlive: -1,
		Control: func(_, _ string, c syscall.RawConn) error {
			if !inside {
				// Go's second try, on finding no free port. Its socket is not in the pod.
				return unix.EADDRNOTAVAIL
			}
			var err error
			ctlErr := c.Control(func(fd uintptr) { err = n.prepare(int(fd), dst.Addr()) })
			return errors.Join(ctlErr, err, leaveOnce())
		},
	}
	d.SetMultipathTCP(false)
	network := "tcp4"
	if dst.Addr().Is6() {
		network = "tcp6"
	}
	conn, err := d.DialTCP(ctx, network, netip.AddrPortFrom(src, 0), dst)
	if leaveErr := leaveOnce(); leaveErr != nil {
		err = errors.Join(err, leaveErr)
	}
	if err != nil {
		if conn != nil {
			_ = conn.Close()
		}
		return nil, err
	}
	return conn, nil
}

// prepare makes sure that a socket is in the namespace, and sets its options.
func (n *netns) prepare(fd int, dst netip.Addr) error {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return os.NewSyscallError("getsockopt SO_NETNS_COOKIE", err)
	}
	if cookie != n.cookie {
		return fmt.Errorf("the socket is in network namespace %d, not in the pod's %d", cookie, n.cookie)
	}
	family := unix.AF_INET
	if dst.Is6() {
		family = unix.AF_INET6
	}
	if err := setProxyOptions(fd, family); err != nil {
		return err
	}
	// The port is chosen at connect(), when the destination is known: more are free.
	return setsockopt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1, "IP_BIND_ADDRESS_NO_PORT")
}

// owns reports whether addr is an address of the pod itself.
func (n *netns) owns(addr netip.Addr) (own bool, err error) {
	family, sa := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Addr: [4]byte{}})
	if addr.Is4() {
		sa = &unix.SockaddrInet4{Addr: addr.As4()}
	} else {
		family, sa = unix.AF_INET6, &unix.SockaddrInet6{Addr: addr.As16(), ZoneId: zoneID(addr)}
	}
	err = n.do(func() error {
		fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer func() { _ = unix.Close(fd) }()
		// An address can be bound though the pod has run out of ports.
		if err := setsockopt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1, "IP_BIND_ADDRESS_NO_PORT"); err != nil {
			return err
		}
		// Without the transparent option only a local address can be bound.
		switch err := unix.Bind(fd, sa); {
		case err == nil:
			own = true
			return nil
		case errors.Is(err, unix.EADDRNOTAVAIL):
			return nil
		default:
			return os.NewSyscallError("bind", err)
		}
	})
	return own, err
}

// plainError returns what the kernel said, in a word.
func plainError(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		if op.Timeout() {
			return errors.New("connection timed out")
		}
		err = op.Err
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	return err
}
