// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/hostprobe"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// pause is that between two connections of one way.
const pause = 100 * time.Millisecond

// phase says how a pod stands to the mesh.
type phase int

const (
	changing phase = iota // and may be either
	plain
	enrolled
)

// slot is a place for one pod after another.
type slot struct {
	*soak
	name string

	// long are connections that stay, by way; of the goroutine that acts.
	long map[way]*longConn
	// before is what the namespace was like when the pod was last enrolled.
	before string

	mu sync.Mutex
	situation
}

// situation is what a connection is judged by. It goes from one to another while the connection is made.
type situation struct {
	pod   *bed.NS
	app   *bed.App
	phase phase
	// epoch counts changes of all of the above.
	epoch int
	// troubled says that connections may fail now, and troubles counts how often that was so.
	troubled bool
	troubles int
	// cuts counts what a connection that stays need not survive.
	cuts int
}

func (sl *slot) now() situation {
	sl.mu.Lock()
	defer sl.mu.Unlock()
	return sl.situation
}

func (sl *slot) is(p phase) bool { return sl.now().phase == p }

func (sl *slot) change(do func(*situation)) {
	sl.mu.Lock()
	defer sl.mu.Unlock()
	do(&sl.situation)
}

func (sl *slot) become(p phase) {
	sl.change(func(s *situation) { s.phase, s.epoch = p, s.epoch+1 })
}

// trouble begins a time in which connections may fail. They may still not get past the proxy.
func (sl *slot) trouble() {
	sl.change(func(s *situation) { s.troubled, s.troubles, s.cuts = true, s.troubles+1, s.cuts+1 })
}

func (sl *slot) calm() { sl.change(func(s *situation) { s.troubled = false }) }

func (sl *slot) uid() string { return "uid-" + sl.name }

// fill makes a pod with an app in it.
func (sl *slot) fill() {
	sl.t.Helper()
	pod, err := sl.Pod(sl.name, bed.PodOptions{})
	sl.must(err, "make a pod")
	sl.filled++
	app, err := pod.ServeApp(appPort, bed.AppOptions{})
	sl.must(err, "serve an app in "+sl.name)
	sl.change(func(s *situation) { s.pod, s.app, s.phase, s.epoch = pod, app, plain, s.epoch+1 })
}

// empty removes the pod's namespace. The agent is not told.
func (sl *slot) empty() {
	sl.t.Helper()
	sl.change(func(s *situation) { s.phase, s.epoch, s.cuts = changing, s.epoch+1, s.cuts+1 })
	sl.closeLong()
	_ = sl.app.Close() // its listener may have been cut
	sl.must(sl.RemovePod(sl.pod), "remove a pod")
}

func (sl *slot) enrol() {
	sl.t.Helper()
	if sl.is(plain) {
		var err error
		sl.before, err = sl.pod.Snapshot()
		sl.must(err, "look at "+sl.name)
	}
	sl.become(changing)
	sl.must(sl.tryEnrol(sl.t.Context()), "enrol "+sl.name)
	sl.become(enrolled)
}

func (sl *slot) tryEnrol(ctx context.Context) error {
	_, err := sl.client.Enroll(ctx, api.EnrollRequest{Spec: agent.Spec(sl.pod), Wait: true, Timeout: api.Duration(patience)})
	return err
}

func (sl *slot) unenrol() {
	sl.t.Helper()
	sl.change(func(s *situation) { s.phase, s.epoch, s.cuts = changing, s.epoch+1, s.cuts+1 })
	sl.must(sl.client.Unenroll(sl.t.Context(), sl.uid()), "take out "+sl.name)
	sl.wantAsBefore()
	sl.become(plain)
}

// wantAsBefore checks that nothing is left in the namespace of a pod that has been taken out.
func (sl *slot) wantAsBefore() {
	if after, err := sl.pod.Snapshot(); err != nil || after != sl.before {
		sl.fail("the namespace of %s is not as it was before, %v: %s", sl.name, err, changes(sl.before, after))
	}
}

// way is from where to where connections are made, seen from the pod.
type way struct {
	direction nodeproxy.Direction // "": from the host, as a probe
	ipv6      bool
}

var ways = []way{
	{nodeproxy.Outbound, false}, {nodeproxy.Outbound, true}, {nodeproxy.Inbound, false}, {nodeproxy.Inbound, true}, {"", false}, {"", true},
}

func (w way) String() string {
	name := string(w.direction)
	if name == "" {
		name = "probe"
	}
	if w.ipv6 {
		return name + " IPv6"
	}
	return name + " IPv4"
}

// ends are where a connection of that way comes from and goes to.
func (sl *slot) ends(s *situation, w way) (from *bed.NS, to netip.AddrPort) {
	from, target := sl.Node, s.pod
	switch w.direction {
	case nodeproxy.Outbound:
		from, target = s.pod, sl.Outside
	case nodeproxy.Inbound:
		from = sl.Outside
	case nodeproxy.HBONE: // none of the ways
	}
	addr := target.V4
	if w.ipv6 {
		addr = target.V6
	}
	return from, netip.AddrPortFrom(addr, appPort)
}

// connect makes connections one after another, and judges each.
func (sl *slot) connect(ctx context.Context, w way) {
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		before := sl.now()
		from, to := sl.ends(&before, w)
		local, id, err := exchange(from, to)
		sl.judge(w, before, sl.now(), outcome{local, to, id, err})
	}
}

// outcome is what became of a connection: its client's own address, where it went, and what the app said.
type outcome struct {
	local, remote netip.AddrPort
	id            bed.Identity
	err           error
}

// judge says whether a connection ended as it must, by what was so before it was begun and after it had ended.
func (sl *slot) judge(w way, before, after situation, o outcome) {
	same := before.epoch == after.epoch
	calm := same && before.phase != changing && !before.troubled && before.troubles == after.troubles
	if o.err != nil {
		if calm {
			sl.fail("a connection of %s, %v, was lost: %v", sl.name, w, o.err)
		}
		sl.count(func(c *counts) { c.unjudged++ })
		return
	}
	direct := o.id.Peer == o.local
	switch {
	case w.direction == "":
		addr := o.id.Peer.Addr()
		if calm && before.phase == enrolled && addr != hostprobe.Defaults.V4 && addr != hostprobe.Defaults.V6 {
			sl.fail("the app of %s takes a probe for one from %s", sl.name, addr)
		}
		sl.count(func(c *counts) { c.made++; c.probes++ })
	case same && before.phase == enrolled:
		sl.wantCarried(w, o)
		sl.count(func(c *counts) { c.made++; c.proxied++ })
	case same && before.phase == plain:
		if !direct {
			sl.fail("%s is not enrolled, and of its connection from %s, %v, the app sees %s", sl.name, o.local, w, o.id.Peer)
		}
		sl.count(func(c *counts) { c.made++; c.direct++ })
	default:
		sl.count(func(c *counts) { c.unjudged++ })
	}
}

// wantCarried checks that a proxy has carried a connection that got through.
func (sl *slot) wantCarried(w way, o outcome) {
	want := nodeproxy.Record{UID: sl.uid(), Direction: w.direction, Source: o.local, OriginalDestination: o.remote}
	// What the app sees is the same address, but another port; the same by chance only.
	if o.id.Peer != o.local {
		return
	}
	if carried, err := sl.carried(want); err != nil || !carried {
		sl.fail("a connection of %s, %v, from %s to %s, got past the proxy (%v)", sl.name, w, o.local, o.remote, err)
	}
}

func (s *soak) count(do func(*counts)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do(&s.counts)
}

// exchange makes one connection and has something echoed.
func exchange(from *bed.NS, to netip.AddrPort) (local netip.AddrPort, id bed.Identity, err error) {
	c, err := from.Dial(context.Background(), bed.DialSpec{Remote: to, Timeout: patience})
	if err != nil {
		return local, id, err
	}
	defer c.Close()
	if local, err = bed.Sockname(c); err != nil {
		return local, id, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	if id, err = bed.ReadIdentity(c); err != nil {
		return local, id, err
	}
	return local, id, echo(c)
}

func echo(c net.Conn) error {
	words := []byte("still there")
	if _, err := c.Write(words); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	got := make([]byte, len(words))
	if _, err := io.ReadFull(c, got); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if !bytes.Equal(got, words) {
		return fmt.Errorf("got %q back, sent %q", got, words)
	}
	return nil
}

// longConn is a connection that has to stay for as long as there are so many cuts.
type longConn struct {
	net.Conn
	cuts int
}

// checkLong sees whether the connections that stay are alive, and makes new ones for those that need not be.
func (s *soak) checkLong() {
	for _, sl := range s.slots {
		sl.checkLong()
	}
}

func (sl *slot) checkLong() {
	if sl.long == nil {
		sl.long = map[way]*longConn{}
	}
	now := sl.now()
	if now.phase == changing || now.troubled {
		return
	}
	for _, w := range ways {
		if w.direction == "" {
			continue
		}
		c := sl.long[w]
		if c != nil && c.cuts == now.cuts {
			_ = c.SetDeadline(time.Now().Add(patience))
			if err := echo(c); err != nil {
				sl.fail("a connection of %s that stays, %v, was lost: %v", sl.name, w, err)
			}
			continue
		}
		if c != nil {
			_ = c.Close()
		}
		from, to := sl.ends(&now, w)
		conn, err := from.Dial(sl.t.Context(), bed.DialSpec{Remote: to, Timeout: patience})
		if err == nil {
			_ = conn.SetDeadline(time.Now().Add(patience))
			_, err = bed.ReadIdentity(conn)
		}
		if err != nil {
			sl.fail("a connection of %s that is to stay, %v, cannot be made: %v", sl.name, w, err)
			delete(sl.long, w)
			continue
		}
		sl.long[w] = &longConn{conn, now.cuts}
	}
}

func (sl *slot) closeLong() {
	for w, c := range sl.long {
		_ = c.Close()
		delete(sl.long, w)
	}
}
