// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// pod is what the proxy runs for one pod.
type pod struct {
	uid  string
	name atomic.Pointer[string] // NAMESPACE/NAME
	ns   *netns
	cfg  *Config
	log  *connLog

	ctx      context.Context // done: everything of the pod ends at once
	cancel   context.CancelFunc
	retiring chan struct{} // closed: no more connections are accepted
	retire   func()
	running  sync.WaitGroup // accept loops and connections
	ended    chan struct{}  // closed when nothing runs any more

	listeners map[Direction]*net.TCPListener
	dns       *dnsServer
}

// startPod listens in the pod's namespace. It takes over netnsFD, also when it
// fails.
func startPod(cfg *Config, log *connLog, uid, name string, netnsFD int) (*pod, error) {
	ns, err := newNetNS(netnsFD)
	if err != nil {
		return nil, err
	}
	p := &pod{
		uid:       uid,
		ns:        ns,
		cfg:       cfg,
		log:       log,
		retiring:  make(chan struct{}),
		ended:     make(chan struct{}),
		listeners: make(map[Direction]*net.TCPListener),
	}
	p.retire = sync.OnceFunc(func() { close(p.retiring) })
	p.name.Store(&name)
	for dir, port := range map[Direction]int{Outbound: PortOutbound, Inbound: PortInbound, HBONE: PortHBONE} {
		l, err := ns.listen(port)
		if err != nil {
			for _, l := range p.listeners {
				_ = l.Close()
			}
			ns.close()
			return nil, err
		}
		p.listeners[dir] = l
	}
	if p.dns, err = startDNS(ns); err != nil {
		for _, l := range p.listeners {
			_ = l.Close()
		}
		ns.close()
		return nil, err
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	for dir, l := range p.listeners {
		p.running.Go(func() { p.accept(l, dir) })
	}
	p.serveDNS(p.dns)
	go func() {
		p.running.Wait()
		p.cancel()
		ns.close()
		close(p.ended)
	}()
	return p, nil
}

// stop ends the pod's listeners and connections at once.
func (p *pod) stop() {
	p.cancel()
	p.dns.close()
	for _, l := range p.listeners {
		_ = l.Close()
	}
	// Connections end by themselves then, unless one is stuck in writing its log line.
	select {
	case <-p.ended:
	case <-time.After(time.Second):
	}
}

// drain accepts what is waiting, then no more, and lets connections finish until
// ctx is done.
func (p *pod) drain(ctx context.Context) {
	p.retire()
	p.dns.close()
	for _, l := range p.listeners {
		// Ends the accept loops' sleep; they do the rest.
		_ = l.SetDeadline(time.Unix(1, 0))
	}
	select {
	case <-p.ended:
	case <-ctx.Done():
		p.stop()
	}
}

// accept serves a listener until the pod retires or stops.
func (p *pod) accept(l *net.TCPListener, dir Direction) {
	defer l.Close()
	for {
		c, err := l.AcceptTCP()
		if err == nil {
			p.running.Go(func() { p.serve(c, dir) })
			continue
		}
		select {
		case <-p.retiring:
			p.acceptRest(l, dir)
			return
		case <-p.ctx.Done():
			return
		case <-time.After(10 * time.Millisecond):
			// Out of file descriptors, perhaps: give connections time to end.
		}
	}
}

// acceptRest empties a listener's queue before it is closed: what is in the queue
// of a listener is reset with it. A connection whose handshake is completed
// between the last look and the close, or under way then, would be lost too; where
// another proxy listens already, this one gets no new ones any more.
func (p *pod) acceptRest(l *net.TCPListener, dir Direction) {
	raw, err := l.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(listener uintptr) {
		for {
			fd, _, err := unix.Accept4(int(listener), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			if errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return
			}
			f := os.NewFile(uintptr(fd), "connection")
			c, err := net.FileConn(f) // makes its own duplicate
			_ = f.Close()
			if tcp, ok := c.(*net.TCPConn); err == nil && ok {
				p.running.Go(func() { p.serve(tcp, dir) })
			}
		}
	})
}

// serve serves one connection.
func (p *pod) serve(c *net.TCPConn, dir Direction) {
	switch {
	case p.cfg.Hold:
		src, dst, err := endpoints(c)
		if err == nil {
			err = errors.New("held")
		}
		p.log.write(p.record(dir, src, dst, err))
		select {
		case <-p.ctx.Done():
		case <-p.retiring:
		}
		reset(c)
	case dir == HBONE:
		release := context.AfterFunc(p.ctx, func() { reset(c) })
		defer release()
		p.tunnel(c)
	default:
		p.carry(c, dir)
	}
}

// record makes a connection's log record.
func (p *pod) record(dir Direction, src, dst netip.AddrPort, err error) Record {
	r := Record{UID: p.uid, Pod: *p.name.Load(), Direction: dir, Source: src, OriginalDestination: dst}
	if err != nil {
		r.Error = err.Error()
	}
	return r
}

func podName(namespace, name string) string { return fmt.Sprintf("%s/%s", namespace, name) }
