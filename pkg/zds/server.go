// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Defaults of Options.
const (
	// DefaultMode lets root only in; node proxies run as root.
	DefaultMode os.FileMode = 0o600
	// DefaultTimeout is ZDS's usual deadline for a hello, a write and an ack.
	DefaultTimeout = 5 * time.Second
	// DefaultRetryAfter is how long a refused add rests. ztunnel itself tries a pod
	// that it could not start again after the same time.
	DefaultRetryAfter = 5 * time.Second
	// DefaultMaxConns is ample: a node has one proxy, two during an update.
	DefaultMaxConns = 16
)

// Connections are accepted no faster than one per acceptInterval once
// acceptBurst came at once, so that a flood costs next to nothing.
const (
	acceptInterval = 50 * time.Millisecond
	acceptBurst    = 8
)

var (
	// ErrNoProxy is in Wait's error when no node proxy was ready by the time its
	// context ended.
	ErrNoProxy = errors.New("no node proxy is connected and ready")
	// ErrNotSet is in Wait's error for a pod that was never Set, or is Removed.
	ErrNotSet = errors.New("pod is not set")
	// ErrNoNetNS is in Wait's error for a pod whose network namespace was unknown
	// all the time.
	ErrNoNetNS = errors.New("the pod's network namespace is unknown")
	// ErrHostNetNS is in Set's error for the network namespace of the host: this
	// process's own, or that of process 1.
	ErrHostNetNS = errors.New("this is the host's network namespace, not a pod's")
	// ErrClosed is in Wait's error when the server has stopped.
	ErrClosed = errors.New("ZDS server has stopped")
)

// NackError is a node proxy's refusal of a pod. The server tries again by itself.
type NackError struct {
	UID  string // the pod
	PID  int32  // the proxy's process id
	Text string // the proxy's words, on one line
}

// Error names the pod, the proxy, and what the proxy said.
func (e *NackError) Error() string {
	return fmt.Sprintf("node proxy (pid %d) refused pod %s: %s", e.PID, e.UID, e.Text)
}

// NetNS is an open network namespace. It is used by Set alone, which makes its
// own file descriptor of it.
type NetNS interface {
	// FD is the open file descriptor of the namespace.
	FD() int
}

// Pod is what a node proxy is told of a pod.
type Pod struct {
	UID            string
	Name           string
	Namespace      string
	ServiceAccount string
	// NetNS is nil while the pod's network namespace is not known: a proxy that
	// connects is then told to keep the pod if it has it.
	NetNS NetNS
}

// Options configure a Server. The zero value of each field but Path is a default.
type Options struct {
	// Path is the absolute path of the socket file. Its directory is created when
	// it is missing. Required.
	Path string
	// Mode is the permission of the socket file; DefaultMode if zero.
	Mode os.FileMode
	// Log is where connections and refusals are logged; nowhere if nil.
	Log *slog.Logger
	// HelloTimeout, WriteTimeout and AckTimeout bound how long a peer may take for
	// its hello, to make room for a request, and for its answer. Past it the
	// connection is closed. DefaultTimeout if zero.
	HelloTimeout, WriteTimeout, AckTimeout time.Duration
	// RetryAfter is how long after a refusal a pod is offered to the proxy again;
	// DefaultRetryAfter if zero.
	RetryAfter time.Duration
	// MaxConns is how many connections are held at once, those that have not said
	// hello included; DefaultMaxConns if zero.
	MaxConns int
	// OnHello is called with a peer's process id when it has said hello, before it is sent anything. With an error its
	// connection is closed. It may be nil.
	OnHello func(pid int32) error
	// OnAnswer is called after each request to a peer, with what it was, how it ended, and how long that took. It may be nil.
	OnAnswer func(request Request, outcome Outcome, took time.Duration)
}

// Request is what a peer was asked.
type Request string

// The requests.
const (
	RequestAdd          Request = "add"           // run this pod
	RequestKeep         Request = "keep"          // go on to run a pod whose network namespace is not known yet
	RequestDel          Request = "del"           // end this pod
	RequestSnapshotSent Request = "snapshot_sent" // these are all pods
)

// Requests lists all requests.
func Requests() []Request {
	return []Request{RequestAdd, RequestKeep, RequestDel, RequestSnapshotSent}
}

// Outcome is how a request ended.
type Outcome string

// The outcomes.
const (
	OutcomeAcked   Outcome = "acked"   // the peer has done it
	OutcomeRefused Outcome = "refused" // the peer said that it will not, or cannot
	OutcomeLost    Outcome = "lost"    // there was no answer that could be understood, in time; the connection is closed
)

// Outcomes lists all outcomes.
func Outcomes() []Outcome { return []Outcome{OutcomeAcked, OutcomeRefused, OutcomeLost} }

// Server is the server side of ZDS. Its methods may be called from any goroutine.
type Server struct {
	log      *slog.Logger
	opts     Options
	listener *net.UnixListener
	file     socketFile
	hostNS   []fileID
	peers    sync.WaitGroup // goroutines of connections

	mu     sync.Mutex
	serves bool // Serve was called
	closed bool // Serve is ending
	gen    uint64
	pods   map[string]*pod
	conns  map[uint64]*conn
	lastID uint64
	// target gets the adds: the newest connection that is ready, nil if none is.
	target  *conn
	waiters map[string]chan struct{} // by pod UID, closed when its state may have changed
}

// pod is a pod that is wanted. Server.mu guards it.
type pod struct {
	uid   string
	add   []byte    // the encoded request
	netns *netnsRef // nil: unknown
	gen   uint64    // grows with every change; which of two pods was set later
	err   error     // the last refusal of gen, nil if it was acked since
	errAt time.Time // of err
}

// netnsRef is a network namespace held open for as long as it is wanted or being
// sent. While it is open nothing else has its id. Server.mu guards refs.
type netnsRef struct {
	fd   int
	id   fileID
	refs int
}

func (n *netnsRef) ref() *netnsRef {
	n.refs++
	return n
}

func (n *netnsRef) unref() {
	n.refs--
	if n.refs == 0 {
		_ = unix.Close(n.fd)
	}
}

func (p *pod) release() {
	if p.netns != nil {
		p.netns.unref()
	}
}

// Listen creates the socket. It fails when another server listens at the path,
// when something other than a socket is there, and when it cannot be made.
// Proxies are served by Serve, which must be called to release the socket; with
// a context that is done, it does just that.
func Listen(opts Options) (*Server, error) {
	opts.Mode = cmp.Or(opts.Mode, DefaultMode)
	opts.HelloTimeout = cmp.Or(opts.HelloTimeout, DefaultTimeout)
	opts.WriteTimeout = cmp.Or(opts.WriteTimeout, DefaultTimeout)
	opts.AckTimeout = cmp.Or(opts.AckTimeout, DefaultTimeout)
	opts.RetryAfter = cmp.Or(opts.RetryAfter, DefaultRetryAfter)
	opts.MaxConns = cmp.Or(opts.MaxConns, DefaultMaxConns)
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}

	hostNS, err := hostNetNS()
	if err != nil {
		return nil, err
	}
	listener, file, err := listenSeqpacket(opts.Path, opts.Mode)
	if err != nil {
		return nil, err
	}
	return &Server{
		log:      opts.Log.With("socket", opts.Path),
		opts:     opts,
		listener: listener,
		file:     file,
		hostNS:   hostNS,
		pods:     make(map[string]*pod),
		conns:    make(map[uint64]*conn),
		waiters:  make(map[string]chan struct{}),
	}, nil
}

// hostNetNS identifies the namespaces that no pod may have.
func hostNetNS() ([]fileID, error) {
	type result struct {
		id  fileID
		err error
	}
	// A new goroutine runs on a thread that nobody locked, hence in the process's
	// namespace; the caller's thread, and even the main one, may be elsewhere.
	own := make(chan result)
	go func() {
		var st unix.Stat_t
		err := unix.Stat("/proc/thread-self/ns/net", &st)
		own <- result{fileIDOf(&st), err}
	}()
	r := <-own
	if r.err != nil {
		return nil, fmt.Errorf("find the host's network namespace: stat /proc/thread-self/ns/net: %w", r.err)
	}
	ids := []fileID{r.id}
	// Not readable without CAP_SYS_PTRACE; then our own has to do.
	var st unix.Stat_t
	if err := unix.Stat("/proc/1/ns/net", &st); err == nil {
		ids = append(ids, fileIDOf(&st))
	}
	return ids, nil
}

// Serve serves node proxies until ctx is done, then closes all connections,
// removes the socket file and returns nil. It may be called once.
func (s *Server) Serve(ctx context.Context) error {
	s.mu.Lock()
	if s.serves {
		s.mu.Unlock()
		return errors.New("serve ZDS: Serve was called before")
	}
	s.serves = true
	s.mu.Unlock()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unhook := context.AfterFunc(ctx, func() { _ = s.listener.Close() })
	defer unhook()

	err := s.accept(ctx)

	s.mu.Lock()
	s.closed = true
	conns := s.connsByID()
	s.wakeAllWaiters()
	s.mu.Unlock()
	for _, c := range conns {
		c.close(slog.LevelDebug, ErrClosed)
	}
	_ = s.listener.Close()
	s.peers.Wait()

	s.mu.Lock()
	for uid, p := range s.pods {
		p.release()
		delete(s.pods, uid)
	}
	s.mu.Unlock()
	return errors.Join(err, s.file.remove())
}

// accept takes connections until ctx is done.
func (s *Server) accept(ctx context.Context) error {
	var next, lastLog time.Time
	refused := 0
	for {
		uc, err := s.listener.AcceptUnix()
		if ctx.Err() != nil {
			if err == nil {
				_ = uc.Close()
			}
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("accept on ZDS socket: %w", err)
		}
		if err != nil {
			// Out of file descriptors or memory: it passes, or not; proxies that are
			// connected go on.
			s.log.Error("accept a node proxy's connection", "err", err)
			if !sleep(ctx, time.Second) {
				return nil
			}
			continue
		}
		if !s.admit(uc) {
			_ = uc.Close()
			refused++
			if time.Since(lastLog) > time.Second {
				lastLog = time.Now()
				s.log.Warn("refused a connection: as many node proxies as are allowed are connected",
					"allowed", s.opts.MaxConns, "refused", refused)
			}
		}

		now := time.Now()
		if earliest := now.Add(-acceptBurst * acceptInterval); next.Before(earliest) {
			next = earliest
		}
		next = next.Add(acceptInterval)
		if !sleep(ctx, next.Sub(now)) {
			return nil
		}
	}
}

// sleep reports whether ctx let it sleep for all of d.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// admit starts a connection's goroutine, if there is room for it. A connection
// that has not said hello makes room: it may be anything, and a proxy says it at
// once, so those that hold a place without it must not keep proxies out.
func (s *Server) admit(uc *net.UnixConn) bool {
	c := newConn(s, uc)
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return false
	}
	var evicted *conn
	if len(s.conns) >= s.opts.MaxConns {
		for _, other := range s.connsByID() {
			if other.state == StateHello {
				evicted = other
				break
			}
		}
		if evicted == nil {
			s.mu.Unlock()
			return false
		}
		evicted.drop()
	}
	s.lastID++
	c.id = s.lastID
	s.conns[c.id] = c
	s.peers.Add(1)
	s.mu.Unlock()

	if evicted != nil {
		evicted.logClosed(slog.LevelWarn, errors.New("made room for another connection, before it said hello"))
	}
	go func() {
		defer s.peers.Done()
		c.serve()
	}()
	return true
}

// Set makes pod wanted, or replaces what is wanted for its UID, and returns at
// once. When anything changed (the namespace's identity, not the NetNS value) the
// proxy is sent the pod again. It fails, and changes nothing, for a pod that
// cannot be sent (no UID, longer than a message may be, no UTF-8), for a NetNS
// that is no open network namespace, with ErrHostNetNS for the host's, and with
// ErrClosed when the server has stopped.
func (s *Server) Set(p Pod) error {
	if p.UID == "" {
		return errors.New("set pod: the UID is empty")
	}
	wanted := &pod{uid: p.UID}
	var err error
	// The longest message that names the pod.
	if wanted.add, err = encodeAdd(p); err != nil {
		return fmt.Errorf("set pod %.64q: %w", p.UID, err)
	}
	var id fileID
	if p.NetNS != nil {
		if wanted.netns, err = s.openNetNS(p.NetNS.FD()); err != nil {
			return fmt.Errorf("set pod %s: %w", p.UID, err)
		}
		id = wanted.netns.id
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		wanted.release()
		return fmt.Errorf("set pod %s: %w", p.UID, ErrClosed)
	}
	if old := s.pods[p.UID]; old != nil {
		if old.sameAs(wanted) {
			wanted.release()
			return nil
		}
		old.release()
	}
	s.gen++
	wanted.gen = s.gen
	s.pods[p.UID] = wanted
	for _, c := range s.conns {
		// A peer that runs the pod in a namespace that is not the pod's any more has
		// to be told. One that keeps it, or while the new one is unknown, has not.
		if k := c.known[p.UID]; k != nil && id != (fileID{}) && k.netnsID != (fileID{}) && k.netnsID != id {
			k.stale = true
		}
		c.touch(p.UID)
	}
	s.wakeWaiters(p.UID)
	return nil
}

// sameAs reports whether a proxy would be told the same of both.
func (p *pod) sameAs(other *pod) bool {
	if (p.netns == nil) != (other.netns == nil) || p.netns != nil && p.netns.id != other.netns.id {
		return false
	}
	return bytes.Equal(p.add, other.add)
}

// openNetNS duplicates fd after checking that it is a network namespace that a
// pod may have.
func (s *Server) openNetNS(fd int) (*netnsRef, error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate network namespace's file descriptor %d: %w", fd, err)
	}
	id, err := s.identify(own)
	if err != nil {
		_ = unix.Close(own)
		return nil, err
	}
	return &netnsRef{fd: own, id: id, refs: 1}, nil
}

func (s *Server) identify(fd int) (fileID, error) {
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE) // 4.11
	if err != nil {
		return fileID{}, fmt.Errorf("this is no namespace: %w", err)
	}
	if kind != unix.CLONE_NEWNET {
		return fileID{}, errors.New("this is a namespace, but not a network namespace")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fileID{}, fmt.Errorf("stat network namespace: %w", err)
	}
	id := fileIDOf(&st)
	if slices.Contains(s.hostNS, id) {
		return fileID{}, ErrHostNetNS
	}
	return id, nil
}

// Wait returns nil when a node proxy has acked the pod as it is Set now, and a
// *NackError when the proxy that should run it has refused it. When ctx ends
// first the error wraps ctx.Err() and says what was missing: ErrNoProxy, ErrNoNetNS,
// or neither, when a proxy is ready but has not answered. A pod that is not Set,
// or is Removed meanwhile, gives ErrNotSet, a stopped server ErrClosed.
func (s *Server) Wait(ctx context.Context, uid string) error {
	for {
		s.mu.Lock()
		done, err := s.outcome(uid)
		if done {
			s.mu.Unlock()
			return err
		}
		changed := s.waiter(uid)
		s.mu.Unlock()

		select {
		case <-changed:
		case <-ctx.Done():
			return s.waitError(ctx, uid)
		}
	}
}

// outcome reports whether there is anything to wait for, and how it ended.
func (s *Server) outcome(uid string) (done bool, err error) {
	p := s.pods[uid]
	switch {
	case s.closed:
		return true, fmt.Errorf("wait for pod %s: %w", uid, ErrClosed)
	case p == nil:
		return true, fmt.Errorf("wait for pod %s: %w", uid, ErrNotSet)
	}
	newest := s.target
	for _, c := range s.connsByID() {
		if c.has(p) {
			return true, nil
		}
		if s.target == nil && c.state == StateSnapshot {
			newest = c
		}
	}
	if newest != nil {
		if k := newest.known[uid]; k != nil && k.gen == p.gen && k.err != nil {
			return true, k.err
		}
	}
	return false, nil
}

func (s *Server) waitError(ctx context.Context, uid string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	// The ack and the end may have come together.
	if done, err := s.outcome(uid); done {
		return err
	}
	switch {
	case s.target == nil:
		return fmt.Errorf("wait for pod %s: %w: %w", uid, ErrNoProxy, ctx.Err())
	case s.pods[uid].netns == nil:
		return fmt.Errorf("wait for pod %s: %w: %w", uid, ErrNoNetNS, ctx.Err())
	default:
		return fmt.Errorf("wait for pod %s: node proxy (pid %d) has not answered: %w", uid, s.target.pid, ctx.Err())
	}
}

// Remove makes a pod no longer wanted, at once, and tells every proxy that knows
// it. It returns nil when all of them have answered or are gone; the deadlines of
// Options bound that. When ctx ends first it returns an error that names those
// left; they are told all the same. A pod that is not Set is no error.
func (s *Server) Remove(ctx context.Context, uid string) error {
	type told struct {
		c *conn
		k *knowledge
	}
	var waitFor []told
	s.mu.Lock()
	p := s.pods[uid]
	if p != nil {
		p.release()
		delete(s.pods, uid)
	}
	for _, c := range s.connsByID() {
		k := c.known[uid]
		if k == nil && p != nil && c.state == StateSnapshot {
			// It may run the pod from an earlier connection until its snapshot ends.
			k = &knowledge{}
			c.known[uid] = k
		}
		if k == nil {
			continue
		}
		k.stale = true
		c.touch(uid)
		waitFor = append(waitFor, told{c, k})
	}
	s.wakeWaiters(uid)
	for {
		waitFor = slices.DeleteFunc(waitFor, func(t told) bool {
			now := t.c.known[uid]
			// A new add, if the pod was Set again meanwhile, does as well as a del.
			return t.c.closed || now == nil || now != t.k && now.answered
		})
		if len(waitFor) == 0 || s.closed {
			s.mu.Unlock()
			return nil
		}
		changed := s.waiter(uid)
		s.mu.Unlock()

		select {
		case <-changed:
		case <-ctx.Done():
			var pids []string
			for _, t := range waitFor {
				pids = append(pids, fmt.Sprint(t.c.pid))
			}
			return fmt.Errorf("remove pod %s: no answer yet from node proxy with pid %s: %w",
				uid, strings.Join(pids, ", "), ctx.Err())
		}
		s.mu.Lock()
	}
}

// waiter returns a channel that is closed when something about the pod changes.
func (s *Server) waiter(uid string) <-chan struct{} {
	ch := s.waiters[uid]
	if ch == nil {
		ch = make(chan struct{})
		s.waiters[uid] = ch
	}
	return ch
}

func (s *Server) wakeWaiters(uid string) {
	if ch := s.waiters[uid]; ch != nil {
		close(ch)
		delete(s.waiters, uid)
	}
}

func (s *Server) wakeAllWaiters() {
	for uid := range s.waiters {
		s.wakeWaiters(uid)
	}
}

// retarget finds the connection that gets the adds, after one came or went, and
// sets it to look at all pods.
func (s *Server) retarget() {
	var newest *conn
	for _, c := range s.conns {
		if c.state == StateReady && (newest == nil || c.id > newest.id) {
			newest = c
		}
	}
	if newest != s.target {
		s.target = newest
		if newest != nil {
			newest.touchAll()
		}
	}
	s.wakeAllWaiters()
}

// connsByID returns the connections, oldest first.
func (s *Server) connsByID() []*conn {
	conns := make([]*conn, 0, len(s.conns))
	for _, c := range s.conns {
		conns = append(conns, c)
	}
	slices.SortFunc(conns, func(a, b *conn) int { return cmp.Compare(a.id, b.id) })
	return conns
}

// ConnState is how far a connection has come.
type ConnState string

// The states, in their order.
const (
	StateHello    ConnState = "hello"    // has not said hello
	StateSnapshot ConnState = "snapshot" // is being sent all pods
	StateReady    ConnState = "ready"    // knows all pods that were wanted when it came
)

// ConnStatus describes a connection.
type ConnStatus struct {
	ID     uint64    `json:"id"`     // counts connections since the server's start
	PID    int32     `json:"pid"`    // the peer's process id, as of its connect (0: not in our pid namespace)
	UID    uint32    `json:"uid"`    // the peer's user id, as of its connect
	Since  time.Time `json:"since"`  // when it was accepted
	State  ConnState `json:"state"`  // how far it has come
	Newest bool      `json:"newest"` // it is the one that gets the adds
	Pods   int       `json:"pods"`   // how many pods it has acked or keeps
	// LastError is the last refusal on this connection, "" if there was none.
	LastError string `json:"lastError,omitempty"`
}

// Status describes all connections, oldest first.
func (s *Server) Status() []ConnStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []ConnStatus
	for _, c := range s.connsByID() {
		st := ConnStatus{
			ID:        c.id,
			PID:       c.pid,
			UID:       c.uid,
			Since:     c.since,
			State:     c.state,
			Newest:    c == s.target,
			LastError: c.lastErr,
		}
		for _, k := range c.known {
			if k.acked {
				st.Pods++
			}
		}
		all = append(all, st)
	}
	return all
}

// PodStatus describes how a pod stands with the node proxies.
type PodStatus struct {
	UID string `json:"uid"`
	// Acked are the IDs of the connections that acked the pod as it is Set now,
	// oldest first.
	Acked []uint64 `json:"acked"`
	// LastError says why a proxy did not take the pod as it is Set now, and LastErrorAt
	// when; "" if that did not happen, or one took it since.
	LastError   string    `json:"lastError,omitempty"`
	LastErrorAt time.Time `json:"lastErrorAt,omitzero"`
}

// Taking says whether a proxy is connected that takes pods, or that is being sent its first ones: a pod that it has neither acked
// nor refused is on its way. One that does not answer is not connected for long.
func (s *Server) Taking() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.target != nil {
		return true
	}
	for _, c := range s.conns {
		if c.state == StateSnapshot {
			return true
		}
	}
	return false
}

// Pod describes one pod; false if it is not Set.
func (s *Server) Pod(uid string) (PodStatus, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[uid]
	if p == nil {
		return PodStatus{}, false
	}
	st := PodStatus{UID: uid}
	for _, c := range s.connsByID() {
		if c.has(p) {
			st.Acked = append(st.Acked, c.id)
		}
	}
	if p.err != nil {
		st.LastError, st.LastErrorAt = p.err.Error(), p.errAt
	}
	return st, true
}
