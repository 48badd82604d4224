// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// Mute is a way to misbehave as a ZDS peer. A proxy that does runs no pods, so that
// what a test sees is the server's doing alone.
type Mute string

// The ways.
const (
	MuteNo    Mute = ""      // behaves
	MuteHello Mute = "hello" // connects and never says hello
	MuteAck   Mute = "ack"   // never acks
	MuteLate  Mute = "late"  // acks after 6 s, a second too late
	// MuteGarbage sends random bytes instead of its hello, and the next time when it
	// has its snapshot; and so on in turns.
	MuteGarbage Mute = "garbage"
	// MuteHuge sends 10 MB, or as much as the kernel takes in one message, instead of
	// its hello, and the next time instead of its first ack; and so on in turns.
	MuteHuge Mute = "huge"
	// MuteVanish closes the connection on receiving an add, and connects again.
	MuteVanish Mute = "vanish"
	// MuteListen acks and listens nowhere, for another proxy to do that.
	MuteListen Mute = "listen"
)

var mutes = []Mute{MuteHello, MuteAck, MuteLate, MuteGarbage, MuteHuge, MuteVanish, MuteListen}

// lateAck is when a MuteLate acks; a ZDS server waits 5 s.
const lateAck = 6 * time.Second

// Defaults of Config.
const (
	DefaultZDSSocket   = "/var/run/ztunnel/ztunnel.sock"
	DefaultDrain       = 5 * time.Second
	DefaultDialTimeout = 10 * time.Second // ztunnel's
)

// Config configures a node proxy. The zero value of each field is a default.
type Config struct {
	ZDSSocket string       // path of the agent's socket; DefaultZDSSocket if ""
	Log       io.Writer    // gets one line of JSON, a Record, for each connection; os.Stdout if nil
	Logger    *slog.Logger // for everything else; nowhere if nil
	// Hold accepts connections and never proxies them; the record's error is "held".
	Hold bool
	// HelloDelay is waited for between connecting to the agent and the hello.
	HelloDelay time.Duration
	Mute       Mute
	// Drain is how long connections may take to finish once the context of Run is
	// done; DefaultDrain if zero, not at all if negative.
	Drain time.Duration
	// DialTimeout is how long a connection's other side may take to answer;
	// DefaultDialTimeout if zero.
	DialTimeout time.Duration
	// DNSUpstream is the server that is asked for names below UpstreamDomain, from a pod's port DNSUpstreamPort, or any if that
	// is 0; without, there is no answer to them.
	DNSUpstream     netip.AddrPort
	DNSUpstreamPort uint16
}

// Run runs a node proxy until ctx is done. Then it accepts what its listeners have
// waiting, closes them, lets connections finish for Config.Drain, and returns nil.
// While the agent is away it goes on with the pods it has, and tries to connect.
func Run(ctx context.Context, cfg Config) error {
	x, err := newProxy(cfg)
	if err != nil {
		return err
	}
	x.run(ctx)
	return nil
}

func newProxy(cfg Config) (*proxy, error) {
	cfg.ZDSSocket = cmp.Or(cfg.ZDSSocket, DefaultZDSSocket)
	cfg.Drain = cmp.Or(cfg.Drain, DefaultDrain)
	cfg.DialTimeout = cmp.Or(cfg.DialTimeout, DefaultDialTimeout)
	if cfg.Log == nil {
		cfg.Log = os.Stdout
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if err := checkMute(cfg.Mute); err != nil {
		return nil, err
	}
	return &proxy{cfg: &cfg, log: &connLog{w: cfg.Log, log: cfg.Logger}, pods: make(map[string]*pod)}, nil
}

func checkMute(m Mute) error {
	if m == MuteNo || slices.Contains(mutes, m) {
		return nil
	}
	var names []string
	for _, m := range mutes {
		names = append(names, string(m))
	}
	return fmt.Errorf("unknown mute %q: it is one of %s", m, strings.Join(names, ", "))
}

// proxy is a node proxy's pods.
type proxy struct {
	cfg *Config
	log *connLog

	mu   sync.Mutex
	pods map[string]*pod // by UID
}

func (x *proxy) run(ctx context.Context) {
	session := x.session
	if x.cfg.Mute != MuteNo {
		session = (&mutePeer{cfg: x.cfg}).session
	}
	x.keepConnected(ctx, session)
	x.drain()
}

// add starts a pod, or goes on with it if it runs in this namespace already. It
// takes over netnsFD.
func (x *proxy) add(uid, name string, netnsFD int) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if old := x.pods[uid]; old != nil {
		if ino, err := inode(netnsFD); err == nil && ino == old.ns.ino {
			old.name.Store(&name)
			return closeFD(netnsFD)
		}
		delete(x.pods, uid)
		old.stop()
	}
	p, err := startPod(x.cfg, x.log, uid, name, netnsFD)
	if err != nil {
		return fmt.Errorf("start pod %s (%s): %w", uid, name, err)
	}
	x.pods[uid] = p
	x.cfg.Logger.Info("started pod", "uid", uid, "pod", name)
	return nil
}

// del stops a pod at once.
func (x *proxy) del(uid string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if p := x.pods[uid]; p != nil {
		delete(x.pods, uid)
		p.stop()
		x.cfg.Logger.Info("stopped pod", "uid", uid, "pod", *p.name.Load())
	}
}

// keepOnly stops all pods but those named.
func (x *proxy) keepOnly(named map[string]bool) {
	x.mu.Lock()
	var others []string
	for uid := range x.pods {
		if !named[uid] {
			others = append(others, uid)
		}
	}
	x.mu.Unlock()
	for _, uid := range others {
		x.del(uid)
	}
}

// drain retires all pods at the same time.
func (x *proxy) drain() {
	ctx, cancel := context.WithTimeout(context.Background(), max(x.cfg.Drain, 0))
	defer cancel()
	x.mu.Lock()
	defer x.mu.Unlock()
	var all sync.WaitGroup
	for _, p := range x.pods {
		all.Go(func() { p.drain(ctx) })
	}
	all.Wait()
}

// Reconnecting starts with firstBackoff and doubles up to lastBackoff; a connection on
// which the agent said something starts it anew.
const (
	firstBackoff = 50 * time.Millisecond
	lastBackoff  = time.Second
)

// keepConnected holds sessions with the agent until ctx is done. session reports
// whether the agent said anything.
func (x *proxy) keepConnected(ctx context.Context, session func(context.Context, *zdsConn) (spoke bool, err error)) {
	backoff := firstBackoff
	for ctx.Err() == nil {
		spoke, err := x.connect(ctx, session)
		if ctx.Err() != nil {
			return
		}
		if spoke {
			backoff = firstBackoff
		}
		x.cfg.Logger.Warn("not connected to the agent", "err", err, "again_in", backoff)
		select {
		case <-ctx.Done():
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, lastBackoff)
	}
}

func (x *proxy) connect(ctx context.Context, session func(context.Context, *zdsConn) (bool, error)) (spoke bool, err error) {
	c, err := dialZDS(x.cfg.ZDSSocket)
	if err != nil {
		return false, err
	}
	defer func() { _ = c.Close() }()
	// Ends a read that goes on.
	release := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer release()
	if x.cfg.HelloDelay > 0 {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(x.cfg.HelloDelay):
		}
	}
	return session(ctx, c)
}

// session is one connection of a proxy that behaves.
func (x *proxy) session(_ context.Context, c *zdsConn) (spoke bool, err error) {
	if err := c.sendHello(); err != nil {
		return false, err
	}
	named := make(map[string]bool) // nil after the snapshot
	for {
		r, err := c.recv()
		if err != nil {
			return spoke, err
		}
		spoke = true
		switch {
		case r.add != nil:
			if named != nil {
				named[r.add.GetUid()] = true
			}
			info := r.add.GetWorkloadInfo()
			err = x.add(r.add.GetUid(), podName(info.GetNamespace(), info.GetName()), r.netnsFD)
		case r.del != "":
			x.del(r.del)
			delete(named, r.del)
		case r.keep != "" && named != nil:
			named[r.keep] = true
		case r.snapshotSent && named != nil:
			x.keepOnly(named)
			named = nil
			x.cfg.Logger.Info("node proxy is ready", "socket", x.cfg.ZDSSocket)
		default:
			return spoke, errors.New("the agent sent a snapshot's message after the snapshot")
		}
		if err != nil {
			x.cfg.Logger.Warn("cannot do what the agent asks for", "err", err)
		}
		if err := c.sendAck(err); err != nil {
			return spoke, err
		}
	}
}
