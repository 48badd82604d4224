// SPDX-License-Identifier: Apache-2.0

// Package monitor tells those who watch of what happens now: new connections of enrolled pods and what becomes of them, packets
// that are dropped, and what package journal notes of pods and the node. While nobody watches there is no program of its in the
// kernel, and nothing of it runs.
package monitor

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/journal"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Kind is what sort of thing an Event is: one of these, or a journal.Kind.
type Kind string

// The kinds of events that are not of the journal.
const (
	// Connection: a new connection.
	Connection Kind = "connection"
	// Drop: packets or connections were dropped, Count of them, for a Reason that is the name of the counter.
	Drop Kind = "drop"
	// Lost: there was no room for Count events.
	Lost Kind = "lost"
)

// Event is something that happened.
type Event struct {
	Time time.Time `json:"time"`
	Kind Kind      `json:"kind"`
	// Pod is its namespace and name, UID its own; empty for what is about the node.
	Pod string `json:"pod,omitempty"`
	UID string `json:"uid,omitempty"`
	// Direction is outbound or inbound, as the pod sees it; of connections, and of drops that have one.
	Direction string `json:"direction,omitempty"`
	// Verdict is proxy, app, out or dropped, as in package explain; of connections and drops.
	Verdict string `json:"verdict,omitempty"`
	// Reason says in a word why.
	Reason string         `json:"reason,omitempty"`
	From   netip.AddrPort `json:"from,omitzero"`
	To     netip.AddrPort `json:"to,omitzero"`
	Count  uint64         `json:"count,omitempty"`
	// Message is the journal's.
	Message string `json:"message,omitempty"`
}

const (
	// behind is how many events somebody who watches may have to read yet. More are lost to him, and counted.
	behind = 8192
	// drops is how often counters are looked at while somebody watches.
	dropsEvery = 250 * time.Millisecond
)

// Hub tells all who watch. Its methods may be called from several goroutines.
type Hub struct {
	enroller *enroll.Enroller
	log      *slog.Logger

	mu       sync.Mutex
	watchers map[*Watcher]bool
	// stop ends what runs while somebody watches; nil while nobody does.
	stop func()
}

// New returns a Hub that nobody watches yet.
func New(enroller *enroll.Enroller, log *slog.Logger) *Hub {
	return &Hub{enroller: enroller, log: log, watchers: map[*Watcher]bool{}}
}

// Watcher is somebody who watches.
type Watcher struct {
	hub    *Hub
	filter Filter
	events chan Event
	lost   uint64 // guarded by the hub's mutex
}

// Watch begins to tell of what passes the filter, until Close. The first one has the program attached.
func (h *Hub) Watch(filter Filter) (*Watcher, error) {
	w := &Watcher{hub: h, filter: filter, events: make(chan Event, behind)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stop == nil {
		if err := h.start(); err != nil {
			return nil, err
		}
	}
	h.watchers[w] = true
	return w, nil
}

// Close ends it. After the last one the program is detached.
func (w *Watcher) Close() {
	w.hub.mu.Lock()
	delete(w.hub.watchers, w)
	var stop func()
	if len(w.hub.watchers) == 0 {
		stop, w.hub.stop = w.hub.stop, nil
	}
	w.hub.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// Events are what happens from now on.
func (w *Watcher) Events() <-chan Event { return w.events }

// TakeLost returns how many events there was no room for since it was last asked.
func (w *Watcher) TakeLost() uint64 {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	lost := w.lost
	w.lost = 0
	return lost
}

// start attaches the program and begins to look. The mutex is held.
func (h *Hub) start() error {
	m, err := h.enroller.Datapath.OpenMonitor()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { h.connections(m) })
	running.Go(func() { h.counters(ctx, m) })
	follower := h.enroller.Journal().Follow(ctx)
	running.Go(func() { h.follow(ctx, follower) })
	h.stop = func() {
		cancel()
		if err := m.Close(); err != nil {
			h.log.Warn("cannot detach what tells of connections: it goes with this agent", "error", err)
		}
		running.Wait()
	}
	return nil
}

// tell hands an event to all whose filters it passes, and blocks for none.
func (h *Hub) tell(e *Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		if !w.filter.passes(e) {
			continue
		}
		select {
		case w.events <- *e:
		default:
			w.lost++
		}
	}
}

// verdicts say what a connection's verdict means in the words of package explain.
var verdicts = map[loader.Verdict]struct{ direction, verdict, reason string }{
	loader.VerdictCaptured:   {"outbound", "proxy", "captured"},
	loader.VerdictOwn:        {"outbound", "app", "own-address"},
	loader.VerdictExcluded:   {"outbound", "out", "excluded"},
	loader.VerdictProxyOut:   {"outbound", "out", "proxy"},
	loader.VerdictProxyToApp: {"inbound", "app", "proxy-to-app"},
	loader.VerdictInbound:    {"inbound", "proxy", "inbound"},
	loader.VerdictToApp:      {"inbound", "app", "asked"},
	loader.VerdictProbe:      {"inbound", "app", "probe"},
	loader.VerdictRerouted:   {"outbound", "proxy", "rerouted"},
	loader.VerdictUncaptured: {"outbound", "dropped", "capture-failed"},
	loader.VerdictDNS:        {"outbound", "proxy", "dns"},
}

// connections tells of connections until the monitor is closed.
func (h *Hub) connections(m *loader.Monitor) {
	for {
		c, err := m.Read()
		if err != nil {
			return
		}
		v := verdicts[c.Verdict]
		e := Event{Time: c.Time, Kind: Connection, Direction: v.direction, Verdict: v.verdict, Reason: v.reason, From: c.From, To: c.To}
		if v.reason == "inbound" && c.To.Port() == maps.PortHBONE {
			e.Reason = "mesh"
		}
		e.Pod, e.UID = h.enroller.Named(c.NetNSCookie)
		h.tell(&e)
	}
}

// dropCounters are those that count what did not pass, with its direction.
var dropCounters = map[string]string{
	"outbound_no_listener": "outbound", "inbound_no_listener": "inbound", "hbone_no_listener": "inbound", "seal_dropped": "outbound",
	"seal_dropped_synack": "outbound", "loops_dropped": "", "unowned_dropped": "inbound", "strays_dropped": "outbound",
	"dns_refused": "outbound", "raw_bypass_refused": "outbound",
}

// counters tells of drops, and of connections that there was no room for in the kernel.
func (h *Hub) counters(ctx context.Context, m *loader.Monitor) {
	ticker := time.NewTicker(dropsEvery)
	defer ticker.Stop()
	before := h.dropsNow()
	var lostBefore uint64
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := h.dropsNow()
		for key, n := range now {
			// Of a pod that was enrolled meanwhile all count, and fewer are of one that was enrolled anew.
			if n <= before[key] {
				continue
			}
			e := Event{
				Time: time.Now(), Kind: Drop, UID: key.uid, Direction: dropCounters[key.counter], Verdict: "dropped", Reason: key.counter,
				Count: n - before[key],
			}
			if pod, ok := h.enroller.Brief(key.uid); ok {
				e.Pod = pod.String()
			}
			h.tell(&e)
		}
		before = now
		if lost, err := m.Lost(); err == nil && lost > lostBefore {
			h.tell(&Event{Time: time.Now(), Kind: Lost, Count: lost - lostBefore})
			lostBefore = lost
		}
	}
}

// dropKey names a counter of a pod.
type dropKey struct{ uid, counter string }

func (h *Hub) dropsNow() map[dropKey]uint64 {
	now := map[dropKey]uint64{}
	pods, err := h.enroller.Pods()
	if err != nil {
		return now
	}
	for i := range pods {
		pods[i].Counters.Each(func(name string, value uint64) {
			if _, ok := dropCounters[name]; ok {
				now[dropKey{pods[i].UID, name}] = value
			}
		})
	}
	return now
}

// follow tells of what the journal notes.
func (h *Hub) follow(ctx context.Context, f *journal.Follower) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-f.Events():
			h.tell(&Event{Time: e.Time, Kind: Kind(e.Kind), Pod: e.Pod, UID: e.UID, Reason: e.What, Message: e.Message})
		}
	}
}
