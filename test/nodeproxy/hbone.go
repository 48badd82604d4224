// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"
)

const (
	connectTimeout = 10 * time.Second // for the request to come
	connectMaxSize = 16 << 10         // bytes of the request's head
)

// tunnel serves a connection to PortHBONE: a CONNECT to one of the pod's own
// addresses, and then what it carries.
func (p *pod) tunnel(client *net.TCPConn) {
	src, dst, err := endpoints(client)
	if err != nil {
		p.log.write(p.record(HBONE, src, dst, err))
		reset(client)
		return
	}
	target, early, err := readConnect(client)
	if err != nil {
		p.log.write(p.record(HBONE, src, dst, err))
		answer(client, http.StatusBadRequest)
		return
	}
	up, status, err := p.connectOwn(src.Addr(), target)
	p.log.write(p.record(HBONE, src, target, err))
	if err != nil {
		answer(client, status)
		return
	}
	// The client may have sent data with its request.
	_, err = up.Write(early)
	if err == nil {
		_, err = io.WriteString(client, "HTTP/1.1 200 OK\r\n\r\n")
	}
	if err != nil {
		reset(up)
		reset(client)
		return
	}
	relay(p.ctx, client, up)
}

// connectOwn connects to an address of the pod. Others are none of an inbound
// port's business.
func (p *pod) connectOwn(client netip.Addr, target netip.AddrPort) (up *net.TCPConn, status int, err error) {
	own, err := p.ns.owns(target.Addr())
	if err != nil {
		return nil, http.StatusInternalServerError, fmt.Errorf("is %s the pod's own: %w", target.Addr(), err)
	}
	if !own {
		return nil, http.StatusForbidden, fmt.Errorf("refused: %s is no address of the pod", target.Addr())
	}
	if up, err = p.connect(client, target); err != nil {
		return nil, http.StatusServiceUnavailable, err
	}
	return up, http.StatusOK, nil
}

// readConnect reads the request, and what came in one piece with it.
func readConnect(client *net.TCPConn) (target netip.AddrPort, early []byte, err error) {
	_ = client.SetReadDeadline(time.Now().Add(connectTimeout))
	br := bufio.NewReader(&io.LimitedReader{R: client, N: connectMaxSize})
	req, err := http.ReadRequest(br)
	if err != nil {
		return target, nil, fmt.Errorf("read the CONNECT request: %w", err)
	}
	if req.Method != http.MethodConnect {
		return target, nil, errors.New("the request is no CONNECT")
	}
	if target, err = netip.ParseAddrPort(req.Host); err != nil {
		return target, nil, fmt.Errorf("the CONNECT request's target: %w", err)
	}
	target = netip.AddrPortFrom(target.Addr().Unmap(), target.Port())
	if early, err = br.Peek(br.Buffered()); err != nil {
		return target, nil, err
	}
	return target, early, client.SetReadDeadline(time.Time{})
}

// answer ends the connection with a status.
func answer(client *net.TCPConn, status int) {
	_ = client.SetWriteDeadline(time.Now().Add(connectTimeout))
	_, _ = fmt.Fprintf(client, "HTTP/1.1 %d %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", status, http.StatusText(status))
	_ = client.Close()
}
