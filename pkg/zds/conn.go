// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// conn is one connection of a node proxy. Its goroutine, serve, is the only one
// that reads, writes, and replaces what the peer knows.
type conn struct {
	s     *Server
	id    uint64
	uc    *net.UnixConn
	raw   syscall.RawConn
	pid   int32
	uid   uint32
	since time.Time
	buf   [maxMessage]byte

	// Server.mu guards the rest.
	state  ConnState
	closed bool
	// idle says that serve sleeps, or is about to, until the read deadline.
	idle  bool
	known map[string]*knowledge
	// todo has every UID for which the peer may lack something. It may have
	// others; next sorts them out.
	todo    map[string]struct{}
	lastErr string
}

// knowledge is what a peer knows of a pod. From the moment an add or a keep is
// sent until a del is answered there is one, since the peer may act on any of it.
type knowledge struct {
	gen      uint64 // of the pod that was sent
	netnsID  fileID // that was sent with it; zero for a keep, and if only presumed
	answered bool
	acked    bool
	err      error     // the refusal, if it was one
	retry    time.Time // when to offer it again after err
	stale    bool      // Removed, or has another namespace, since it was sent
}

func newConn(s *Server, uc *net.UnixConn) *conn {
	c := &conn{
		s:     s,
		uc:    uc,
		since: time.Now(),
		state: StateHello,
		known: make(map[string]*knowledge),
		todo:  make(map[string]struct{}),
	}
	// Neither fails on a connection that is open; if one did, reads would as well.
	c.raw, _ = uc.SyscallConn()
	_ = c.raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			c.pid, c.uid = cred.Pid, cred.Uid
		}
	})
	return c
}

// has reports whether the peer acked the pod as it is wanted now.
func (c *conn) has(p *pod) bool {
	k := c.known[p.uid]
	return k != nil && k.gen == p.gen && k.acked && !k.stale && k.netnsID != fileID{}
}

// touch makes the connection look at a pod.
func (c *conn) touch(uid string) {
	if c.state == StateHello {
		return // it looks at all of them after its hello
	}
	c.todo[uid] = struct{}{}
	c.wake()
}

// touchAll makes the connection look at all wanted pods.
func (c *conn) touchAll() {
	for uid := range c.s.pods {
		c.todo[uid] = struct{}{}
	}
	c.wake()
}

// wake ends serve's sleep by a read deadline that has passed.
func (c *conn) wake() {
	if c.idle {
		c.idle = false
		_ = c.uc.SetReadDeadline(time.Unix(1, 0))
	}
}

// drop takes the connection out of the server; false if it was out. The caller
// holds the lock, and logs after giving it up.
func (c *conn) drop() bool {
	if c.closed {
		return false
	}
	c.closed = true
	delete(c.s.conns, c.id)
	_ = c.uc.Close()
	c.s.retarget()
	return true
}

// close drops the connection and logs why.
func (c *conn) close(level slog.Level, why error) {
	c.s.mu.Lock()
	first := c.drop()
	c.s.mu.Unlock()
	if first {
		c.logClosed(level, why)
	}
}

func (c *conn) logClosed(level slog.Level, why error) {
	c.s.log.Log(context.Background(), level, "closed node proxy's connection", "conn", c.id, "pid", c.pid, "why", why)
}

// serve talks to the peer until it or we end the connection.
func (c *conn) serve() {
	err := c.hello()
	for err == nil {
		var r *request
		switch r, err = c.nextOrIdle(); {
		case err != nil:
		case r == nil:
			err = c.sleep()
		default:
			err = c.do(r)
		}
	}
	level := slog.LevelWarn
	if errors.Is(err, errGone) {
		level = slog.LevelInfo
	}
	c.close(level, err)
}

// errGone is the ordinary end of a connection.
var errGone = errors.New("node proxy closed it")

// hello waits for the peer's hello and starts its snapshot.
func (c *conn) hello() error {
	_ = c.uc.SetReadDeadline(time.Now().Add(c.s.opts.HelloTimeout))
	msg, err := c.recv()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("no hello within %v", c.s.opts.HelloTimeout)
	}
	if err != nil {
		return err
	}
	if err := parseHello(msg); err != nil {
		return err
	}
	if c.s.opts.OnHello != nil {
		if err := c.s.opts.OnHello(c.pid); err != nil {
			return err
		}
	}
	c.s.log.Info("node proxy connected", "conn", c.id, "pid", c.pid)

	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.state = StateSnapshot
	c.touchAll()
	return nil
}

// recv reads one message, which is good until the next call.
func (c *conn) recv() ([]byte, error) {
	// Without room for ancillary data the kernel discards file descriptors that the
	// peer sends, so they never get into our table.
	n, _, flags, _, err := c.uc.ReadMsgUnix(c.buf[:], nil)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET):
		return nil, errGone
	case err != nil:
		return nil, err
	case flags&unix.MSG_CTRUNC != 0:
		return nil, errors.New("sent file descriptors, which no node proxy does")
	case flags&unix.MSG_TRUNC != 0:
		return nil, fmt.Errorf("sent a message of more than %d bytes", maxMessage)
	}
	return c.buf[:n], nil
}

// sleep waits for the deadline that nextOrIdle set, or wake. The peer has nothing
// to say in that time.
func (c *conn) sleep() error {
	msg, err := c.recv()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil
	case err != nil:
		return err
	}
	return unexpected(msg)
}

func unexpected(msg []byte) error {
	return fmt.Errorf("sent %d bytes while no request was in flight", len(msg))
}

// need is what a peer has to be told.
type need int

const (
	needNothing need = iota
	needAdd
	needKeep
	needDel
	needSnapshotSent
)

func (n need) String() string {
	return [...]string{"nothing", "add", "keep", "del", "snapshot sent"}[n]
}

// request is a message to the peer.
type request struct {
	kind  need
	uid   string // "" for the end of the snapshot
	msg   []byte
	netns *netnsRef  // sent with an add
	k     *knowledge // what the peer knows by an add or a keep
}

func (r *request) String() string {
	if r.uid == "" {
		return r.kind.String()
	}
	return r.kind.String() + " " + r.uid
}

// needs compares what is wanted for a pod with what the peer knows. An add may
// have to wait until the time returned.
func (c *conn) needs(uid string) (need, time.Time) {
	p, k := c.s.pods[uid], c.known[uid]
	// Adds go to the target, and to all that are to learn everything.
	takesAdds := c.state == StateSnapshot || c == c.s.target
	switch {
	case p == nil && k == nil:
		return needNothing, time.Time{}
	case p == nil:
		return needDel, time.Time{}
	case k == nil && !takesAdds:
		return needNothing, time.Time{}
	case k == nil && p.netns != nil:
		return needAdd, time.Time{}
	case k == nil && c.state == StateSnapshot:
		return needKeep, time.Time{}
	case k == nil:
		return needNothing, time.Time{} // keep is not allowed any more
	case k.stale && takesAdds && p.netns != nil:
		return needAdd, time.Time{} // it replaces what the peer has
	case k.stale:
		return needDel, time.Time{}
	case !takesAdds || p.netns == nil:
		return needNothing, time.Time{}
	case k.gen != p.gen:
		return needAdd, time.Time{}
	case k.err != nil && c.state == StateReady:
		return needAdd, k.retry
	default:
		return needNothing, time.Time{}
	}
}

// nextOrIdle returns the next request. When there is none it makes the connection
// idle and sets the deadline at which to look again, zero if only when woken.
func (c *conn) nextOrIdle() (*request, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	r, again, err := c.next(time.Now())
	c.idle = err == nil && r == nil
	if c.idle {
		// Under the lock, so that wake comes either before the look or after this.
		_ = c.uc.SetReadDeadline(again)
	}
	return r, err
}

// next picks what to send: first a del, since somebody waits for it and it is
// quick, then the pod that was set first, then the end of the snapshot. Without
// anything to send now, it says when a refused add is due again, if one is.
func (c *conn) next(now time.Time) (r *request, again time.Time, err error) {
	var first *pod
	var firstNeed need
	for uid := range c.todo {
		switch n, notBefore := c.needs(uid); {
		case n == needNothing:
			delete(c.todo, uid)
		case n == needDel:
			msg, err := encodeDel(uid)
			return &request{kind: needDel, uid: uid, msg: msg}, time.Time{}, err
		case notBefore.After(now):
			if again.IsZero() || notBefore.Before(again) {
				again = notBefore
			}
		case first == nil || c.s.pods[uid].gen < first.gen:
			first, firstNeed = c.s.pods[uid], n
		}
	}
	if first == nil {
		if c.state != StateSnapshot {
			return nil, again, nil
		}
		msg, err := encodeSnapshotSent()
		return &request{kind: needSnapshotSent, msg: msg}, time.Time{}, err
	}

	r = &request{kind: firstNeed, uid: first.uid, k: &knowledge{gen: first.gen}}
	if firstNeed == needKeep {
		r.msg, err = encodeKeep(first.uid)
	} else {
		r.msg, r.netns = first.add, first.netns.ref()
		r.k.netnsID = first.netns.id
	}
	if err == nil {
		c.known[first.uid] = r.k
	}
	return r, time.Time{}, err
}

// do sends a request, waits for the answer and writes down what the peer knows
// then. A refusal is no error; everything that makes the connection useless is.
func (c *conn) do(r *request) error {
	start := time.Now()
	refusal, err := c.exchange(r)
	c.observe(r, refusal, err, time.Since(start))
	pods := c.settle(r, refusal, err)
	if err != nil {
		return err
	}
	switch log := c.s.log.With("conn", c.id, "pid", c.pid); {
	case refusal != "":
		log.Warn("node proxy refused", "request", r.String(), "err", refusal)
	case r.kind == needSnapshotSent:
		log.Info("node proxy is ready", "pods", pods)
	default:
		log.Debug("node proxy acked", "request", r.String())
	}
	return nil
}

// observe tells OnAnswer of a request.
func (c *conn) observe(r *request, refusal string, err error, took time.Duration) {
	if c.s.opts.OnAnswer == nil {
		return
	}
	outcome := OutcomeAcked
	switch {
	case err != nil:
		outcome = OutcomeLost
	case refusal != "":
		outcome = OutcomeRefused
	}
	request := map[need]Request{needAdd: RequestAdd, needKeep: RequestKeep, needDel: RequestDel, needSnapshotSent: RequestSnapshotSent}[r.kind]
	c.s.opts.OnAnswer(request, outcome, took)
}

// settle writes down the outcome of a request, and returns how many pods the peer
// knows.
func (c *conn) settle(r *request, refusal string, err error) (pods int) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if r.netns != nil {
		r.netns.unref()
	}
	if err != nil {
		return len(c.known)
	}
	if refusal != "" {
		c.lastErr = r.String() + ": " + refusal
	}
	switch r.kind {
	case needDel:
		// If the proxy will not delete it there is nothing more that we could do.
		delete(c.known, r.uid)
	case needSnapshotSent:
		c.state = StateReady
		c.s.retarget()
	default:
		c.settlePod(r, refusal)
	}
	c.s.wakeWaiters(r.uid)
	return len(c.known)
}

// settlePod writes down the outcome of an add or a keep.
func (c *conn) settlePod(r *request, refusal string) {
	k, p := r.k, c.s.pods[r.uid]
	k.answered = true
	if refusal == "" {
		k.acked = true
	} else {
		k.err = &NackError{UID: r.uid, PID: c.pid, Text: refusal}
		k.retry = time.Now().Add(c.s.opts.RetryAfter)
	}
	if p != nil && p.gen == k.gen {
		p.err, p.errAt = k.err, time.Now()
	}
}

// exchange sends a request and returns the text of the peer's refusal, if any.
func (c *conn) exchange(r *request) (refusal string, err error) {
	// What is there before the request was sent cannot be its answer.
	_ = c.uc.SetReadDeadline(time.Now().Add(c.s.opts.AckTimeout))
	if c.readable() {
		msg, err := c.recv()
		if err == nil {
			err = unexpected(msg)
		}
		return "", err
	}

	var rights []byte
	if r.netns != nil {
		rights = unix.UnixRights(r.netns.fd)
	}
	_ = c.uc.SetWriteDeadline(time.Now().Add(c.s.opts.WriteTimeout))
	_, _, err = c.uc.WriteMsgUnix(r.msg, rights, nil)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "", fmt.Errorf("no room for %s within %v", r, c.s.opts.WriteTimeout)
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
		return "", errGone
	case err != nil:
		return "", fmt.Errorf("send %s: %w", r, err)
	}

	_ = c.uc.SetReadDeadline(time.Now().Add(c.s.opts.AckTimeout))
	msg, err := c.recv()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		// Were it kept open, a late answer would pass for the next request's.
		return "", fmt.Errorf("no answer to %s within %v", r, c.s.opts.AckTimeout)
	case errors.Is(err, errGone):
		return "", fmt.Errorf("%w before it answered %s", errGone, r)
	case err != nil:
		return "", err
	}
	return parseAck(msg)
}

// readable reports whether a message, or the peer's end, is waiting.
func (c *conn) readable() bool {
	var n int
	_ = c.raw.Control(func(fd uintptr) {
		n, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	})
	return n > 0
}
