// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// listenBacklog is the backlog of a Listen without one of its own: enough for 500 connections at once. The
// namespace's net.core.somaxconn (4096 since kernel 5.4) bounds it.
const listenBacklog = 1024

// ListenOptions says how a listener differs from a plain TCP one on all addresses.
type ListenOptions struct {
	// Addr is the address to listen on; the zero Addr is all addresses of the network's family.
	Addr netip.Addr
	// Backlog is the length of the accept queue; 0 is 1024.
	Backlog int
	// Transparent sets IP_TRANSPARENT.
	Transparent bool
	// Mark is the listener's mark (SO_MARK); 0 for none.
	Mark uint32
	// ReusePort sets SO_REUSEPORT.
	ReusePort bool
	// BindToDevice is an interface to bind the listener to (SO_BINDTODEVICE); empty for none.
	BindToDevice string
	// MPTCP makes an MPTCP listener (kernel 5.6); without, it is always plain TCP.
	MPTCP bool
	// FastOpen accepts data in a SYN (TCP_FASTOPEN). The namespaces of a bed have net.ipv4.tcp_fastopen=3.
	FastOpen bool
}

// Listen makes a TCP listener in the namespace: on IPv4 ("tcp4"), IPv6 ("tcp6") or both by one IPv6 socket ("tcp"). With
// port 0 the kernel chooses one. Closing the bed closes it.
func (n *NS) Listen(network string, port uint16, opts ListenOptions) (*net.TCPListener, error) {
	l, err := n.listen(network, port, opts)
	if err != nil {
		return nil, fmt.Errorf("listen on %s port %d in netns %s: %w", network, port, n.Name, err)
	}
	if err := n.bed.addCloser(l); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func (n *NS) listen(network string, port uint16, opts ListenOptions) (*net.TCPListener, error) {
	domain, v6only := unix.AF_INET6, 0
	switch network {
	case "tcp":
		if !HasIPv6() {
			domain = unix.AF_INET
		}
	case "tcp4":
		domain = unix.AF_INET
	case "tcp6":
		v6only = 1
	default:
		return nil, fmt.Errorf("unknown network %q: want tcp, tcp4 or tcp6", network)
	}
	proto := unix.IPPROTO_TCP
	if opts.MPTCP {
		proto = unix.IPPROTO_MPTCP
	}
	if opts.Backlog == 0 {
		opts.Backlog = listenBacklog
	}
	var file *os.File
	err := n.Do(func() error {
		fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		file = os.NewFile(uintptr(fd), network)
		o := sockopts{fd: fd, domain: domain}
		o.set("SO_REUSEADDR", unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		if domain == unix.AF_INET6 {
			o.set("IPV6_V6ONLY", unix.SOL_IPV6, unix.IPV6_V6ONLY, v6only)
		}
		if opts.ReusePort {
			o.set("SO_REUSEPORT", unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		}
		o.common(opts.BindToDevice, opts.Mark, opts.Transparent)
		if opts.FastOpen {
			o.set("TCP_FASTOPEN", unix.IPPROTO_TCP, unix.TCP_FASTOPEN, opts.Backlog)
		}
		if o.err != nil {
			return o.err
		}
		if err := bind(fd, domain, netip.AddrPortFrom(opts.Addr, port)); err != nil {
			return err
		}
		return os.NewSyscallError("listen", unix.Listen(fd, opts.Backlog))
	})
	if file != nil {
		// net.FileListener works on a copy of the descriptor.
		defer file.Close()
	}
	if err != nil {
		return nil, err
	}
	l, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("the socket became a %T", l), l.Close())
	}
	return tcp, nil
}

func isClosed(err error) bool {
	return errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed)
}
