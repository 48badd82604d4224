// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// carry serves a connection that was steered here: its local address is where the
// client wanted to go.
func (p *pod) carry(client *net.TCPConn, dir Direction) {
	src, dst, err := endpoints(client)
	if err != nil {
		p.log.write(p.record(dir, src, dst, err))
		reset(client)
		return
	}
	up, err := p.connect(src.Addr(), dst)
	p.log.write(p.record(dir, src, dst, err))
	if err != nil {
		// As the client would have learnt it without us, and at once.
		reset(client)
		return
	}
	relay(p.ctx, client, up)
}

// connect connects to dst with the client's address as the source.
func (p *pod) connect(client netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	switch dst.Port() {
	case PortOutbound, PortInbound, PortHBONE:
		own, err := p.ns.owns(dst.Addr())
		if err != nil {
			return nil, fmt.Errorf("is %s the pod's own: %w", dst.Addr(), err)
		}
		if own {
			return nil, errors.New("refused: it would be a connection to the proxy's own port")
		}
	}
	src := client
	if client == dst.Addr() || client.Is4() != dst.Addr().Is4() {
		src = netip.Addr{} // the kernel chooses
	}
	ctx, cancel := context.WithTimeout(p.ctx, p.cfg.DialTimeout)
	defer cancel()
	return p.ns.dial(ctx, src, dst)
}

// endpoints returns where a connection comes from and where it went to. It asks the
// kernel, since Go names an address's zone after the interface with that index in
// its own network namespace.
func endpoints(c *net.TCPConn) (src, dst netip.AddrPort, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return src, dst, err
	}
	var local, remote unix.Sockaddr
	if ctlErr := raw.Control(func(fd uintptr) {
		if local, err = unix.Getsockname(int(fd)); err != nil {
			err = os.NewSyscallError("getsockname", err)
		} else if remote, err = unix.Getpeername(int(fd)); err != nil {
			// The client has reset it already.
			err = os.NewSyscallError("getpeername", err)
		}
	}); ctlErr != nil {
		return src, dst, ctlErr
	}
	return addrPort(remote), addrPort(local), err
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		addr := netip.AddrFrom16(sa.Addr).Unmap()
		if sa.ZoneId != 0 && addr.Is6() {
			addr = addr.WithZone(strconv.FormatUint(uint64(sa.ZoneId), 10))
		}
		return netip.AddrPortFrom(addr, uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// zoneID is the interface index in an address that addrPort made.
func zoneID(addr netip.Addr) uint32 {
	id, err := strconv.ParseUint(addr.Zone(), 10, 32)
	if err != nil {
		return 0
	}
	return uint32(id)
}

// relay copies both ways until both are finished, then closes both connections.
// The end of one way is passed on as such; a failure, and the end of ctx, resets
// both connections.
func relay(ctx context.Context, client, up *net.TCPConn) {
	release := context.AfterFunc(ctx, func() {
		reset(client)
		reset(up)
	})
	defer release()
	done := make(chan struct{})
	go func() {
		defer close(done)
		copyOneWay(up, client)
	}()
	copyOneWay(client, up)
	<-done
	_ = client.Close()
	_ = up.Close()
}

// copyOneWay goes through splice(2): nothing here may hide that both are TCP.
func copyOneWay(dst, src *net.TCPConn) {
	if _, err := io.Copy(dst, src); err != nil {
		reset(dst)
		reset(src)
		return
	}
	// It fails if the connection is gone; the other way will find out.
	_ = dst.CloseWrite()
}

// reset closes a connection so that the other end gets a RST.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}
