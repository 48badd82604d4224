// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
)

// AppOptions says how an App behaves and, for ServeApp, what it listens on.
type AppOptions struct {
	// Network is "tcp" (both families, the default), "tcp4" or "tcp6".
	Network string
	// Listen says how it listens.
	Listen ListenOptions
	// CloseFirst has the app close a connection right after its line, before the client does, so that TIME_WAIT is on
	// the app's side.
	CloseFirst bool
}

// App is a TCP server that tells each client who it is: it writes one line, "PEER LOCAL", its getpeername and getsockname
// with v4-mapped addresses as IPv4, and then echoes until the client is done. [ReadIdentity] reads the line.
type App struct {
	// Port is the port it listens on.
	Port uint16

	opts     AppOptions
	listener net.Listener
	accepts  atomic.Int64
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    map[*net.TCPConn]struct{} // nil when closed
	peers    map[netip.Addr]int64
}

// ServeApp runs an App in the namespace, by goroutines of the calling process; with port 0 the kernel chooses one. What
// is attached to the bed's cgroup sees its sockets only when the process has called JoinCgroup before. Closing the bed
// closes it.
func (n *NS) ServeApp(port uint16, opts AppOptions) (*App, error) {
	if opts.Network == "" {
		opts.Network = "tcp"
	}
	l, err := n.listen(opts.Network, port, opts.Listen)
	if err != nil {
		return nil, fmt.Errorf("serve an app on port %d in netns %s: %w", port, n.Name, err)
	}
	a := NewApp(l, opts)
	if err := n.bed.addCloser(a); err != nil {
		_ = a.Close()
		return nil, err
	}
	return a, nil
}

// NewApp runs an App on a listener made elsewhere, in a process of its own for example. The App closes it.
func NewApp(l *net.TCPListener, opts AppOptions) *App {
	a := &App{
		opts:     opts,
		listener: l,
		conns:    map[*net.TCPConn]struct{}{},
		peers:    map[netip.Addr]int64{},
	}
	if addr, ok := l.Addr().(*net.TCPAddr); ok { // always, of a TCPListener
		a.Port = addr.AddrPort().Port()
	}
	a.wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // closed
			}
			a.accepts.Add(1)
			if !a.add(c) {
				_ = c.Close()
				return
			}
			a.wg.Go(func() { a.serve(c) })
		}
	})
	return a
}

// Accepts returns the number of connections accepted so far.
func (a *App) Accepts() int64 { return a.accepts.Load() }

// AcceptsFrom returns how many of them came from an address.
func (a *App) AcceptsFrom(peer netip.Addr) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.peers[peer]
}

// Close stops the app and cuts its connections. It may be called again.
func (a *App) Close() error {
	a.mu.Lock()
	conns := a.conns
	a.conns = nil
	a.mu.Unlock()
	if conns == nil {
		return nil
	}
	err := a.listener.Close()
	for c := range conns {
		_ = c.Close() // its goroutine may have closed it
	}
	a.wg.Wait()
	return err
}

func (a *App) add(c *net.TCPConn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.conns == nil {
		return false
	}
	a.conns[c] = struct{}{}
	if peer, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		a.peers[peer.AddrPort().Addr().Unmap()]++
	}
	return true
}

func (a *App) serve(c *net.TCPConn) {
	defer func() {
		_ = c.Close()
		a.mu.Lock()
		delete(a.conns, c)
		a.mu.Unlock()
	}()
	peer, err := Peername(c)
	if err != nil {
		return // the client has reset the connection
	}
	local, err := Sockname(c)
	if err != nil {
		return
	}
	if _, err := fmt.Fprintf(c, "%s %s\n", peer, local); err != nil || a.opts.CloseFirst {
		return
	}
	// Not plainly from c to c: that splices, and the pipes for it stay open for later and look like leaks. The client
	// sees what goes wrong.
	_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
}

// Identity is what an App says about a connection.
type Identity struct {
	// Peer is the client's address as the app sees it (getpeername).
	Peer netip.AddrPort
	// Local is the app's own address of the connection (getsockname).
	Local netip.AddrPort
}

// maxIdentity bounds an Identity's line, in bytes: two IPv6 addresses with zones and ports.
const maxIdentity = 256

// ReadIdentity reads the line of an App from r and nothing behind it.
func ReadIdentity(r io.Reader) (Identity, error) {
	var line []byte
	for one := make([]byte, 1); one[0] != '\n'; {
		if _, err := io.ReadFull(r, one); err != nil {
			return Identity{}, fmt.Errorf("read the app's line after %q: %w", line, err)
		}
		if line = append(line, one[0]); len(line) > maxIdentity {
			return Identity{}, fmt.Errorf("read the app's line: %q is too long", line)
		}
	}
	peer, local, _ := strings.Cut(strings.TrimSuffix(string(line), "\n"), " ")
	var id Identity
	var err error
	if id.Peer, err = netip.ParseAddrPort(peer); err != nil {
		return Identity{}, fmt.Errorf("read the app's line %q: %w", line, err)
	}
	if id.Local, err = netip.ParseAddrPort(local); err != nil {
		return Identity{}, fmt.Errorf("read the app's line %q: %w", line, err)
	}
	return id, nil
}
