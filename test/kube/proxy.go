// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// FaultProxy is a TCP proxy on the node through which the agent reaches the API server, and that does to the connection what
// networks and dying servers do. It knows nothing of TLS or HTTP. As made it passes everything on.
type FaultProxy struct {
	// Addr is where it listens, on the node's loopback.
	Addr netip.AddrPort

	tb     testing.TB
	node   *bed.NS
	target netip.AddrPort
	wg     sync.WaitGroup
	stop   chan struct{}

	mu       sync.Mutex
	delay    time.Duration
	cutEvery time.Duration
	stalled  chan struct{} // not nil while nothing is passed on; closed when that ends
	listener *net.TCPListener
	pairs    map[*pair]struct{}
	accepted int
}

// pair is a client's connection and that to the server.
type pair struct {
	once   sync.Once
	client net.Conn
	server net.Conn
}

func (p *pair) close() {
	p.once.Do(func() {
		// A reset, as of a machine that is gone or a server that was killed.
		for _, c := range []net.Conn{p.client, p.server} {
			if t, ok := c.(*net.TCPConn); ok {
				_ = t.SetLinger(0)
			}
			_ = c.Close()
		}
	})
}

// newFaultProxy runs a proxy in the namespace until the end of the test.
func newFaultProxy(tb testing.TB, node *bed.NS, port uint16, target netip.AddrPort) *FaultProxy {
	tb.Helper()
	p := &FaultProxy{
		Addr:   netip.AddrPortFrom(target.Addr(), port),
		tb:     tb,
		node:   node,
		target: target,
		stop:   make(chan struct{}),
		pairs:  map[*pair]struct{}{},
	}
	p.listen()
	p.wg.Go(p.cutter)
	tb.Cleanup(func() {
		p.Stall(false)
		close(p.stop)
		p.Refuse(true)
		p.wg.Wait()
	})
	return p
}

func (p *FaultProxy) listen() {
	p.tb.Helper()
	l, err := p.node.Listen("tcp4", p.Addr.Port(), bed.ListenOptions{Addr: p.Addr.Addr()})
	if err != nil {
		p.tb.Fatal(err)
	}
	p.mu.Lock()
	p.listener = l
	p.mu.Unlock()
	p.wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // closed
			}
			p.wg.Go(func() { p.serve(l, c) })
		}
	})
}

// Delay has each answer of the server arrive that much later. It says nothing on how many are under way at once.
func (p *FaultProxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// CutEvery resets all connections again and again, at that interval; 0 ends it.
func (p *FaultProxy) CutEvery(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutEvery = d
}

// Cut resets all connections once.
func (p *FaultProxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.pairs {
		c.close()
	}
}

// Refuse resets all connections and lets no new one be made, as without a process at that port, or ends that.
func (p *FaultProxy) Refuse(refuse bool) {
	p.tb.Helper()
	p.mu.Lock()
	l := p.listener
	if refuse {
		p.listener = nil
	}
	p.mu.Unlock()
	switch {
	case refuse && l != nil:
		_ = l.Close()
		p.Cut()
	case !refuse && l == nil:
		p.listen()
	}
}

// Stall passes nothing on any more while connections stay, as when packets are lost, or ends that.
func (p *FaultProxy) Stall(stall bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case stall && p.stalled == nil:
		p.stalled = make(chan struct{})
	case !stall && p.stalled != nil:
		close(p.stalled)
		p.stalled = nil
	}
}

// Accepted is the number of connections so far.
func (p *FaultProxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

func (p *FaultProxy) cutter() {
	const tick = 50 * time.Millisecond
	last := time.Now()
	for {
		select {
		case <-p.stop:
			return
		case <-time.After(tick):
		}
		p.mu.Lock()
		every := p.cutEvery
		p.mu.Unlock()
		if every == 0 {
			last = time.Now()
		} else if time.Since(last) >= every {
			last = time.Now()
			p.Cut()
		}
	}
}

func (p *FaultProxy) serve(from *net.TCPListener, client net.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	server, err := p.node.Dial(ctx, bed.DialSpec{Remote: p.target})
	if err != nil {
		_ = client.Close() // the server is down: so is the proxy
		return
	}
	c := &pair{client: client, server: server}
	p.mu.Lock()
	p.accepted++
	alive := p.listener == from
	if alive {
		p.pairs[c] = struct{}{}
	}
	p.mu.Unlock()
	if !alive {
		c.close()
		return
	}
	var both sync.WaitGroup
	both.Go(func() { p.pass(c, server, client, false) })
	both.Go(func() { p.pass(c, client, server, true) })
	both.Wait()
	p.mu.Lock()
	delete(p.pairs, c)
	p.mu.Unlock()
}

// chunk is what was read at once, and when it may be passed on.
type chunk struct {
	data []byte
	due  time.Time
}

// pass copies until one side is closed, then closes both. Delayed data is on its way while more is read.
func (p *FaultProxy) pass(c *pair, dst, src net.Conn, answers bool) {
	defer c.close()
	chunks := make(chan chunk, 1024)
	var writer sync.WaitGroup
	writer.Go(func() {
		broken := false
		for ch := range chunks {
			if broken {
				continue
			}
			p.wait(time.Until(ch.due))
			if _, err := dst.Write(ch.data); err != nil {
				broken = true
				c.close()
			}
		}
	})
	defer writer.Wait()
	defer close(chunks)
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			p.mu.Lock()
			ch := chunk{data: append([]byte(nil), buf[:n]...), due: time.Now()}
			if answers {
				ch.due = ch.due.Add(p.delay)
			}
			p.mu.Unlock()
			chunks <- ch
		}
		if err != nil {
			return
		}
	}
}

// wait waits for d and then for as long as the proxy is stalled.
func (p *FaultProxy) wait(d time.Duration) {
	if d > 0 {
		select {
		case <-time.After(d):
		case <-p.stop:
			return
		}
	}
	p.mu.Lock()
	stalled := p.stalled
	p.mu.Unlock()
	if stalled == nil {
		return
	}
	select {
	case <-stalled:
	case <-p.stop:
	}
}
