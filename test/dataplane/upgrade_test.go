// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/fault"
	"github.com/redirector-dataplane/redirector/pkg/hostprobe"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/rebuild"
)

// site is a node with a proxy, some enrolled pods and connections that never stop: so many new ones per second, in both
// directions and families, and some that stay.
type site struct {
	*node
	agent *agentProcess
	proxy *proxy
	pods  []*bed.NS
	apps  []*bed.App

	stop     chan struct{}
	group    sync.WaitGroup
	mu       sync.Mutex
	made     int
	probes   int // of these
	failures []error
	long     []net.Conn
}

// longLived is how many connections stay.
const longLived = 50

// pause is that between new connections: 200 per second, or as many as do not overrun an emulated processor.
var pause = func() time.Duration {
	if os.Getenv("VMTEST_IN_VM") != "" {
		return 50 * time.Millisecond
	}
	return 5 * time.Millisecond
}()

// newSite starts it all with an agent of that binary; "" stands for this one.
func newSite(t *testing.T, binary string) *site {
	t.Helper()
	n := newBareNode(t)
	b := n.Bed
	s := &site{node: n, stop: make(chan struct{})}
	s.agent = startAgentOf(t, b, binary)
	s.proxy = s.startProxyProcess()
	s.apps = append(s.apps, s.serve(s.Outside, 8080, bed.AppOptions{}))
	for i := range 3 {
		pod := s.plainPod(fmt.Sprintf("pod%d", i))
		s.pods = append(s.pods, pod)
		s.apps = append(s.apps, s.serve(pod, 8080, bed.AppOptions{}))
		s.enrolBy(pod)
	}
	ways := s.ways()
	ways = slices.DeleteFunc(ways, func(w way) bool { return w.probe })
	for i := range longLived {
		way := ways[i%len(ways)]
		c, err := way.from.Dial(t.Context(), bed.DialSpec{Remote: way.to})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := bed.ReadIdentity(c); err != nil {
			t.Fatal(err)
		}
		s.long = append(s.long, c)
	}
	s.group.Go(s.connect)
	t.Cleanup(s.end)
	return s
}

// way is from where to where a connection is made.
type way struct {
	from *bed.NS
	to   netip.AddrPort
	// probe says that it is made by the host, and must reach the app without the proxy.
	probe bool
}

func (s *site) ways() (all []way) {
	for _, pod := range s.pods {
		for _, family := range []string{"IPv4", "IPv6"} {
			all = append(all,
				way{from: pod, to: netip.AddrPortFrom(addr(s.Outside, family), 8080)},
				way{from: s.Outside, to: netip.AddrPortFrom(addr(pod, family), 8080)},
				way{from: s.Node, to: netip.AddrPortFrom(addr(pod, family), 8080), probe: true})
		}
	}
	return all
}

func (s *site) connect() {
	ways := s.ways()
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	// A machine that cannot make so many is not to drown in them.
	underWay := make(chan struct{}, 50)
	for i := 0; ; i++ {
		select {
		case <-s.stop:
			return
		case <-ticker.C:
		}
		underWay <- struct{}{}
		s.group.Go(func() {
			defer func() { <-underWay }()
			way := ways[i%len(ways)]
			err := way.try()
			s.mu.Lock()
			defer s.mu.Unlock()
			s.made++
			if way.probe {
				s.probes++
			}
			if err != nil {
				s.failures = append(s.failures, fmt.Errorf("%s to %s: %w", way.from.Name, way.to, err))
			}
		})
	}
}

// try makes one connection.
func (w *way) try() error {
	if !w.probe {
		return exchange(w.from, w.to)
	}
	c, err := w.from.Dial(context.Background(), bed.DialSpec{Remote: w.to, Timeout: patience})
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	id, err := bed.ReadIdentity(c)
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if peer := id.Peer.Addr(); peer != hostprobe.Defaults.V4 && peer != hostprobe.Defaults.V6 {
		return fmt.Errorf("the app takes a probe for one from %s", peer)
	}
	return nil
}

// end stops making connections; it may be called again.
func (s *site) end() {
	select {
	case <-s.stop:
	default:
		close(s.stop)
	}
	s.group.Wait()
}

// still lets some connections be made, and talks on those that stay.
func (s *site) still(when string) {
	s.t.Helper()
	count := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.made
	}
	target := count() + 40
	eventually(s.t, "connections are made", func() bool { return count() >= target })
	for _, c := range s.long {
		_ = c.SetDeadline(time.Now().Add(patience))
		if err := echo(c, []byte("still there")); err != nil {
			s.t.Errorf("%s, %s to %s: %v", when, c.LocalAddr(), c.RemoteAddr(), err)
		}
	}
}

// verdict ends the load and fails the test if a connection failed, or came to an app past the proxy.
func (s *site) verdict() {
	s.t.Helper()
	s.end()
	if len(s.failures) > 0 {
		s.t.Errorf("%d of %d connections failed, the first: %v", len(s.failures), s.made, s.failures[0])
	}
	var accepted int64
	for _, app := range s.apps {
		accepted += app.Accepts()
	}
	proxied := 0
	eventually(s.t, "the proxy has noted what it carried", func() bool {
		proxied = 0
		for _, c := range s.proxy.connections() {
			if c.Error == "" {
				proxied++
			}
		}
		return proxied >= s.made-s.probes+len(s.long)
	})
	if int64(proxied+s.probes) != accepted {
		s.t.Errorf("the apps have accepted %d connections, the proxy has carried %d, and %d were probes", accepted, proxied, s.probes)
	}
	s.t.Logf("%d connections, %d of them probes, and %d that stayed", s.made, s.probes, len(s.long))
}

func (s *site) enrolBy(pod *bed.NS) {
	s.t.Helper()
	request := api.EnrollRequest{Spec: agent.Spec(pod), Wait: true, Timeout: api.Duration(patience)}
	if _, err := s.agent.client.Enroll(s.t.Context(), request); err != nil {
		s.t.Fatal(err)
	}
}

// restart ends the agent and starts another.
func (s *site) restart(sig os.Signal, binary string) {
	s.t.Helper()
	if err := s.agent.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
	<-s.agent.Done()
	s.agent = startAgentOf(s.t, s.Bed, binary)
}

// captured is how many connections of all pods the dataplane has captured, as the agent says.
func (s *site) captured() (n uint64) {
	s.t.Helper()
	pods, err := s.agent.client.Pods(s.t.Context())
	if err != nil || len(pods) != len(s.pods) {
		s.t.Fatalf("the agent has %+v, %v", pods, err)
	}
	for _, p := range pods {
		n += p.Counters.OutboundCaptured
		if c := p.Counters; c.OutboundNoListener+c.InboundNoListener+c.SealDropped+c.LoopsDropped+c.UnownedDropped > 0 {
			s.t.Errorf("counters of %s are %+v", p.Name, c)
		}
	}
	return n
}

// wantCounted checks that no count was lost: each outbound connection that was made was counted once.
func (s *site) wantCounted() {
	s.t.Helper()
	want := uint64(0)
	for _, c := range s.proxy.connections() {
		if c.Direction == "outbound" {
			want++
		}
	}
	if got := s.captured(); got != want {
		s.t.Errorf("%d connections were counted as captured, the proxy saw %d", got, want)
	}
}

// wantLayout checks that the dataplane has a layout, and nothing of others.
func (s *site) wantLayout(version uint32) {
	s.t.Helper()
	for _, dir := range []string{"next", "previous"} {
		if _, err := os.Stat(filepath.Join(s.BPFFS, dir)); !errors.Is(err, os.ErrNotExist) {
			s.t.Errorf("with layout %d, pins are left in %s (%v)", version, dir, err)
		}
	}
	sizes := map[string]uint32{}
	for _, name := range []string{"layout", "pods", "counters", "sockets"} {
		m, err := ebpf.LoadPinnedMap(filepath.Join(s.BPFFS, "maps", name), nil)
		if err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() { _ = m.Close() })
		sizes[name] = m.ValueSize()
		if name == "layout" {
			var record bpf.RedirectorLayoutRecord
			if err := m.Lookup(uint32(0), &record); err != nil || record.Version != version {
				s.t.Errorf("the layout is %+v, %v; want version %d", record, err, version)
			}
		}
	}
	grown := uint32(8) * (version - 1)
	if want := uint32(binary.Size(bpf.RedirectorPod{})) + grown; sizes["pods"] != want {
		s.t.Errorf("with layout %d, pods has values of %d bytes, want %d", version, sizes["pods"], want)
	}
	if want := uint32(binary.Size(bpf.RedirectorSocketVerdict{})) + grown; sizes["sockets"] != want {
		s.t.Errorf("with layout %d, sockets has values of %d bytes, want %d", version, sizes["sockets"], want)
	}
	if want := uint32(binary.Size(bpf.RedirectorPodCounters{})) + grown; sizes["counters"] != want {
		s.t.Errorf("with layout %d, counters has values of %d bytes, want %d", version, sizes["counters"], want)
	}
}

// Restarts are not noticed, in whatever way the agent ends.
func TestRestartsUnderLoad(t *testing.T) {
	rounds := 50
	if testing.Short() {
		rounds = 4
	}
	s := newSite(t, "")
	for i := range rounds {
		sig := unix.SIGTERM
		if i%2 == 0 {
			sig = unix.SIGKILL
		}
		s.restart(sig, "")
		s.still(fmt.Sprintf("after restart %d, by %v", i+1, sig))
	}
	s.verdict()
	s.wantCounted()
}

// buildAgents builds this version and others, and skips the test where that cannot be done.
func buildAgents(t *testing.T, versions map[string][]rebuild.Edit) map[string]string {
	t.Helper()
	dir := t.TempDir()
	all := map[string]string{}
	for version, edits := range versions {
		binary, err := rebuild.Agent(t.Context(), dir, version, edits)
		if errors.Is(err, rebuild.ErrMissing) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		all[version] = binary
	}
	return all
}

// Upgrades to a version whose maps have grown, and back, are not noticed either, and no entry and no count is lost.
func TestUpgradesUnderLoad(t *testing.T) {
	if testing.Short() {
		t.Skip("a soak test")
	}
	if err := loader.ProbeIterators(); err != nil {
		t.Skipf("needs iterators over maps of sockets: %v", err)
	}
	agents := buildAgents(t, map[string][]rebuild.Edit{"v1": nil, "v2": rebuild.Grown()})
	s := newSite(t, agents["v1"])
	for i := range 10 {
		sig := unix.SIGTERM
		if i%3 == 0 {
			sig = unix.SIGKILL
		}
		version := []string{"v2", "v1"}[i%2]
		s.restart(sig, agents[version])
		s.still(fmt.Sprintf("after upgrade %d, to %s", i+1, version))
		if status, err := s.agent.client.Status(t.Context()); err != nil || status.Agent.Version != version {
			t.Errorf("the agent is %+v, %v", status.Agent, err)
		}
		s.wantLayout(uint32(2 - i%2))
	}
	s.verdict()
	s.wantCounted()
	for _, pod := range s.pods { // and what it has can be taken out
		if err := s.agent.client.Unenroll(t.Context(), "uid-"+pod.Name); err != nil {
			t.Error(err)
		}
	}
}

// An agent that is killed anywhere in an upgrade leaves a dataplane that works, and the next goes on from there.
func TestAnUpgradeIsInterrupted(t *testing.T) {
	if testing.Short() {
		t.Skip("a soak test")
	}
	if err := loader.ProbeIterators(); err != nil {
		t.Skipf("needs iterators over maps of sockets: %v", err)
	}
	agents := buildAgents(t, map[string][]rebuild.Edit{"v1": nil, "v2": append(rebuild.Grown(), rebuild.Crashing()...)})
	s := newSite(t, agents["v1"])
	var points []string
	for _, point := range fault.Points["upgrade"] {
		points = append(points, point)
		if point == "upgrade: map replaced" || point == "upgrade: program replaced" {
			for n := 2; n <= 5; n++ {
				points = append(points, fmt.Sprintf("%s#%d", point, n))
			}
		}
	}
	for _, point := range points {
		s.kill()
		dying := launchAgent(t, s.Bed, agents["v2"], rebuild.CrashVariable+"="+point)
		eventually(t, "the agent dies at "+point, func() bool {
			select {
			case <-dying.Done():
				return true
			default:
				return false
			}
		})
		s.still("killed at " + point)
		s.agent = startAgentOf(t, s.Bed, agents["v2"])
		s.still("after " + point)
		s.wantLayout(2)
		s.restart(unix.SIGTERM, agents["v1"])
		s.wantLayout(1)
	}
	s.verdict()
	s.wantCounted()
}

func (s *site) kill() {
	s.t.Helper()
	if err := s.agent.Kill(); err != nil {
		s.t.Fatal(err)
	}
}

// A version that cannot take over says so, and leaves the dataplane to those that can.
func TestAnUpgradeIsRefused(t *testing.T) {
	if testing.Short() {
		t.Skip("a soak test")
	}
	agents := buildAgents(t, map[string][]rebuild.Edit{"v1": nil, "v9": rebuild.Strange()})
	s := newSite(t, agents["v1"])
	s.kill()
	pins := func() string { return mapIDs(t, s.BPFFS) }
	before := pins()
	refused := launchAgent(t, s.Bed, agents["v9"])
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := refused.Wait(ctx); err == nil {
		t.Error("an agent of a strange version runs")
	}
	for _, want := range []string{"layout 1 of v1", "layout 9 of v9", "cleanup"} {
		if out := refused.Output(); !strings.Contains(out, want) {
			t.Errorf("the agent says %q, and not %q", out, want)
		}
	}
	if after := pins(); after != before {
		t.Errorf("the dataplane was\n%s\nand is\n%s", before, after)
	}
	s.still("refused")
	s.agent = startAgentOf(t, s.Bed, agents["v1"])
	s.still("taken over")
	s.verdict()
	s.wantCounted()
}

// mapIDs describes what is pinned, and which programs the links have.
func mapIDs(t *testing.T, bpffs string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(bpffs, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if filepath.Base(filepath.Dir(path)) == "maps" {
			m, err := ebpf.LoadPinnedMap(path, nil)
			if err != nil {
				return err
			}
			defer m.Close()
			info, err := m.Info()
			if err != nil {
				return err
			}
			id, _ := info.ID()
			fmt.Fprintln(&all, path, "map", id)
			return nil
		}
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return err
		}
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return err
		}
		fmt.Fprintln(&all, path, "link", info.ID, "program", info.Program)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

// Pins that somebody removes are put back, and meanwhile no connection notices: the agent holds what they led to.
func TestPinsAreRemovedUnderLoad(t *testing.T) {
	s := newSite(t, "")
	removed := uint64(0)
	for _, dir := range []string{"links", "maps"} {
		pins, err := filepath.Glob(filepath.Join(s.BPFFS, dir, "*"))
		if err != nil || len(pins) == 0 {
			t.Fatalf("the pins are %v, %v", pins, err)
		}
		for _, pin := range pins {
			if err := os.Remove(pin); err != nil {
				t.Fatal(err)
			}
			removed++
		}
	}
	eventually(t, "all pins are there again", func() bool {
		status, err := s.agent.client.Status(t.Context())
		return err == nil && status.Repairs[enroll.RepairNode] == removed
	})
	s.still("with new pins")
	s.restart(unix.SIGKILL, "")
	s.still("with an agent that has found them")
	s.verdict()
	s.wantCounted()
}
