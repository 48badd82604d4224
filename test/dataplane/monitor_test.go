// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/monitor"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// watching is somebody who watches.
type watching struct {
	mu     sync.Mutex
	events []monitor.Event
	stop   func() error
	// cutOff says that the agent ends before it does.
	cutOff bool
}

// watch watches from when it returns.
func (n *probeNode) watch(t *testing.T, filter monitor.Filter) *watching {
	t.Helper()
	w := &watching{}
	ctx, cancel := context.WithCancel(t.Context())
	begun, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- n.agent.client.Monitor(ctx, filter, func() { close(begun) }, func(e monitor.Event) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.events = append(w.events, e)
			return nil
		})
	}()
	select {
	case <-begun:
	case err := <-done:
		t.Fatal(err)
	}
	w.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := w.stop(); err != nil && !w.cutOff {
			t.Error(err)
		}
	})
	return w
}

func (w *watching) all() []monitor.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.events)
}

// told is an event in short.
func told(e *monitor.Event) string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %s %s", e.Kind, e.Direction, e.Verdict, e.Reason))
}

// wants waits until events came in short, to some address if it is valid, and says which came else.
func (w *watching) wants(t *testing.T, to netip.AddrPort, shorts ...string) {
	t.Helper()
	var last []string
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		last = nil
		for _, e := range w.all() {
			if !to.IsValid() || e.To == to {
				last = append(last, told(&e))
			}
		}
		if !slices.ContainsFunc(shorts, func(s string) bool { return !slices.Contains(last, s) }) {
			return
		}
	}
	t.Errorf("to %s it is told of %q, want %q", to, last, shorts)
}

// Each connection is told of once, with what becomes of it.
func TestMonitorTellsOfConnections(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	serveDNS(t, n.Outside, netip.Addr{}, 53)
	w := n.watch(t, monitor.Filter{})
	eachFamily(t, func(t *testing.T, family string) {
		outside, own := addr(n.Outside, family), addr(pod, family)
		at := netip.AddrPortFrom
		ask(t, pod, bed.DialSpec{Remote: at(outside, 8080)})
		w.wants(t, at(outside, 8080), "connection outbound proxy captured", "connection outbound out proxy")
		ask(t, n.Outside, bed.DialSpec{Remote: at(own, 8080)})
		w.wants(t, at(own, 8080), "connection inbound proxy inbound", "connection inbound app proxy-to-app")
		ask(t, pod, bed.DialSpec{Remote: at(own, 8080)})
		w.wants(t, at(own, 8080), "connection outbound app own-address")
		n.probe(groupKubelet, 1, at(own, 8080).String())
		w.wants(t, at(own, 8080), "connection inbound app probe")
		if got := n.dnsOverTCP("", pod, at(outside, 53), family).connect(); got != fmt.Sprintf("proxy %d", maps.PortDNS) {
			t.Errorf("a DNS query is %s", got)
		}
		loopback := map[string]string{"IPv4": "127.0.0.1", "IPv6": "::1"}[family]
		w.wants(t, at(netip.MustParseAddr(loopback), maps.PortDNS), "connection outbound proxy dns")

		n.change(pod, api.SettingsRequest{"exclude-outbound-ports": "8080", "exclude-inbound-ports": "8080"})
		ask(t, pod, bed.DialSpec{Remote: at(outside, 8080)})
		w.wants(t, at(outside, 8080), "connection outbound out excluded")
		ask(t, n.Outside, bed.DialSpec{Remote: at(own, 8080)})
		w.wants(t, at(own, 8080), "connection inbound app asked")
		n.change(pod, api.SettingsRequest{"exclude-outbound-ports": "", "exclude-inbound-ports": ""})

		counts := map[string]int{}
		for _, e := range w.all() {
			if e.To.Addr() == outside || e.To.Addr() == own || e.To.Addr().IsLoopback() && e.To.Addr().Is4() == own.Is4() {
				counts[told(&e)]++
			}
			if e.Kind == monitor.Connection && (e.Pod != "default/pod" || e.UID != "uid-pod" || !e.From.IsValid() || time.Since(e.Time).Abs() > time.Minute) {
				t.Errorf("an event is %+v", e)
			}
		}
		for short, count := range counts {
			if count != 1 {
				t.Errorf("%q was told of %d times, want once", short, count)
			}
		}
	})

	other, _ := n.enrolledPod("other")
	w.wants(t, netip.AddrPort{}, "enrolled")
	// Packets that are dropped, whose ends are not told.
	if c, err := other.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(other.V4, maps.PortOutbound), Timeout: 300 * time.Millisecond}); err == nil {
		_ = c.Close()
		t.Error("the proxy's own port is reached")
	}
	w.wants(t, netip.AddrPort{}, "drop  dropped loops_dropped")
}

// Who asks for less is told of that alone.
func TestMonitorFilters(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	other, _ := n.enrolledPod("other")
	n.serve(n.Outside, 8080, bed.AppOptions{})
	n.serve(n.Outside, 9090, bed.AppOptions{})
	cidr, _ := n.Outside.V6.Prefix(128)
	everything := n.watch(t, monitor.Filter{})
	watchers := map[string]*watching{}
	for name, f := range map[string]monitor.Filter{
		"pod": {UIDs: []string{"uid-other"}}, "port": {Port: 9090}, "cidr": {CIDR: cidr}, "verdict": {Verdict: "out"},
		"direction": {Direction: "inbound"}, "kind": {Kinds: []string{"repaired"}},
	} {
		watchers[name] = n.watch(t, f)
	}
	for _, from := range []*bed.NS{pod, other} {
		for _, a := range []netip.Addr{n.Outside.V4, n.Outside.V6} {
			for _, port := range []uint16{8080, 9090} {
				ask(t, from, bed.DialSpec{Remote: netip.AddrPortFrom(a, port)})
			}
		}
	}
	eventually(t, "all is told", func() bool { return len(everything.all()) >= 16 }) // the app's connection and the proxy's, each
	time.Sleep(50 * time.Millisecond)
	for name, want := range map[string]struct {
		count int
		fits  func(e monitor.Event) bool
	}{
		"pod":       {8, func(e monitor.Event) bool { return e.UID == "uid-other" }},
		"port":      {8, func(e monitor.Event) bool { return e.To.Port() == 9090 }},
		"cidr":      {8, func(e monitor.Event) bool { return e.To.Addr() == n.Outside.V6 }},
		"verdict":   {8, func(e monitor.Event) bool { return e.Verdict == "out" }},
		"direction": {0, nil},
		"kind":      {0, nil},
	} {
		got := watchers[name].all()
		if len(got) != want.count || slices.ContainsFunc(got, func(e monitor.Event) bool { return !want.fits(e) }) {
			t.Errorf("by %s %d events are told, want %d: %+v", name, len(got), want.count, got)
		}
	}
}

// While nobody watches there is no program for it, and afterwards there is none again.
func TestMonitorCostsNothingWhileNobodyWatches(t *testing.T) {
	n := newProbeNode(t, bed.Options{})
	programs := func() int {
		t.Helper()
		dir, err := os.Open(n.Cgroup)
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		found, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: ebpf.AttachCGroupSockOps})
		if err != nil {
			t.Fatal(err)
		}
		return len(found.Programs)
	}
	if got := programs(); got != 1 {
		t.Fatalf("before, there are %d sock_ops programs, want 1", got)
	}
	first, second := n.watch(t, monitor.Filter{}), n.watch(t, monitor.Filter{})
	if got := programs(); got != 2 {
		t.Errorf("while two watch there are %d sock_ops programs, want 2", got)
	}
	for _, w := range []*watching{first, second} {
		if got := programs(); got != 2 {
			t.Errorf("while somebody watches there are %d sock_ops programs, want 2", got)
		}
		if err := w.stop(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "the program is gone", func() bool { return programs() == 1 })
	// It goes with the agent, too.
	n.watch(t, monitor.Filter{}).cutOff = true
	if err := n.agent.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the program is gone with the agent", func() bool { return programs() == 1 })
}

// Of many connections each is told of, or counted as lost.
func TestMonitorLosesNothingUncounted(t *testing.T) {
	const workers = 8
	total := short(4000, 400)
	n := newProbeNode(t, bed.Options{})
	pod, _ := n.enrolledPod("pod")
	n.serve(n.Outside, 8080, bed.AppOptions{CloseFirst: true})
	w := n.watch(t, monitor.Filter{Kinds: []string{"connection"}})
	before := n.counters(pod)
	start := time.Now()
	var group sync.WaitGroup
	for range workers {
		group.Go(func() {
			for i := range total / workers {
				askToTheEnd(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom([]netip.Addr{n.Outside.V4, n.Outside.V6}[i%2], 8080)})
			}
		})
	}
	group.Wait()
	took := time.Since(start)
	after := n.counters(pod)
	want := after.OutboundCaptured - before.OutboundCaptured + after.ProxyOutbound - before.ProxyOutbound
	var got, lost uint64
	eventually(t, "all are told of or lost", func() bool {
		got, lost = 0, 0
		for _, e := range w.all() {
			if e.Kind == monitor.Lost {
				lost += e.Count
			} else {
				got++
			}
		}
		return got+lost >= want
	})
	if got+lost != want || want < 2*uint64(total) {
		t.Errorf("of %d connections %d are told of and %d are lost", want, got, lost)
	}
	t.Logf("%d connections at %.0f/s: %d told of, %d lost", want, float64(want)/took.Seconds(), got, lost)
}
