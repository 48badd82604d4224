// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// slots is how many pods there are at a time, and appPort where their apps and the one outside listen.
const (
	slots   = 4
	appPort = 8080
)

// soak is a node with an agent, a proxy, pods and traffic, and what has happened to it.
type soak struct {
	*bed.Bed
	t      *testing.T
	seed   uint64
	random *rand.Rand
	start  time.Time
	// node is what the host's network namespace was like before there was an agent.
	node string

	agent   *bed.Proc // nil while none runs
	client  *api.Client
	proxy   *bed.Proc
	proxies atomic.Int64 // how many there have been
	slots   []*slot
	filled  int            // how many pods there have been
	done    map[string]int // how often each thing has been done

	stop    context.CancelFunc
	traffic sync.WaitGroup

	mu       sync.Mutex
	history  []string
	failures []string
	counts   counts
}

// counts is what became of connections.
type counts struct {
	made, proxied, direct, probes, unjudged int
}

func newSoak(t *testing.T, seed uint64) *soak {
	t.Helper()
	if err := loader.CheckFeatures(); err != nil {
		t.Skip(err)
	}
	b := bed.ForTest(t, bed.Options{})
	if err := b.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	node, err := b.Node.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return &soak{
		Bed: b, t: t, seed: seed, random: rand.New(rand.NewPCG(seed, seed)), start: time.Now(), node: node,
		client: api.NewClient(filepath.Join(b.RunDir, "agent.sock")), done: map[string]int{},
	}
}

// note adds to the history.
func (s *soak) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history = append(s.history, fmt.Sprintf("%9.3f s  ", time.Since(s.start).Seconds())+fmt.Sprintf(format, args...))
}

// fail notes that something is not as it must be. The test goes on, to the end of what is being done.
func (s *soak) fail(format string, args ...any) {
	s.note("WRONG: "+format, args...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = append(s.failures, fmt.Sprintf(format, args...))
}

func (s *soak) failed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.failures) > 0
}

// must ends the test: without this, nothing that follows means anything.
func (s *soak) must(err error, what string) {
	s.t.Helper()
	if err != nil {
		s.fail("%s: %v", what, err)
		s.t.FailNow()
	}
}

// report prints what has happened, and all of it if something was wrong.
func (s *soak) report() {
	s.stopTraffic()
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Printf("soak: done %v\n", s.done)
	fmt.Printf("soak: %+v\n", s.counts)
	if len(s.failures) == 0 && !s.t.Failed() {
		return
	}
	s.t.Errorf("SEED=%d; %d things were wrong, the first: %s", s.seed, len(s.failures), strings.Join(s.failures[:min(1, len(s.failures))], ""))
	s.t.Logf("what happened:\n%s", strings.Join(s.history, "\n"))
}

// begin starts all and enrols every other pod.
func (s *soak) begin() {
	s.startAgent()
	s.proxy = s.startProxy()
	if _, err := s.Outside.ServeApp(appPort, bed.AppOptions{}); err != nil {
		s.must(err, "serve an app outside")
	}
	for i := range slots {
		sl := &slot{soak: s, name: fmt.Sprintf("pod%d", i)}
		s.slots = append(s.slots, sl)
		sl.fill()
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	for _, sl := range s.slots {
		for _, way := range ways {
			s.traffic.Go(func() { sl.connect(ctx, way) })
		}
	}
	for i, sl := range s.slots {
		if i%2 == 0 {
			sl.enrol()
		}
	}
}

func (s *soak) stopTraffic() {
	if s.stop != nil {
		s.stop()
		s.traffic.Wait()
		s.stop = nil
	}
}

// run starts a process of the test binary on the node.
func (s *soak) run(name, role string, args ...string) *bed.Proc {
	s.t.Helper()
	self, err := os.Executable()
	s.must(err, "find the test binary")
	p, err := s.Start(s.Node, true, name, append([]string{self}, args...), []string{roleVariable + "=" + role})
	s.must(err, "start "+name)
	return p
}

func (s *soak) startAgent() {
	s.t.Helper()
	s.agent = s.run("agent", "redirector",
		"agent", "--standalone", "--run-dir", s.RunDir, "--bpffs", s.BPFFS, "--cgroup", s.Cgroup, "--zds-socket", s.ZDSSocket)
	s.eventually("the agent answers", func() bool {
		select {
		case <-s.agent.Done():
			s.must(errors.New(s.agent.Output()), "the agent has ended")
		default:
		}
		_, err := s.client.Status(s.t.Context())
		return err == nil
	})
}

// endAgent ends the agent and waits until it is gone.
func (s *soak) endAgent(sig os.Signal) {
	s.t.Helper()
	s.must(s.agent.Signal(sig), "signal the agent")
	select {
	case <-s.agent.Done():
	case <-time.After(patience):
		s.must(fmt.Errorf("it runs on, %v after %v", patience, sig), "end the agent")
	}
	s.agent = nil
}

// startProxy starts a proxy and returns when it runs for all pods that it is told of.
func (s *soak) startProxy() *bed.Proc {
	s.t.Helper()
	name := fmt.Sprintf("proxy%d", s.proxies.Add(1))
	p := s.run(name, "nodeproxy", "--zds-socket", s.ZDSSocket, "--log", filepath.Join(s.Dir, name+".json"))
	s.eventually("the proxy is ready", func() bool {
		status, err := s.client.Status(s.t.Context())
		return err == nil && slices.ContainsFunc(status.Proxies, func(c zds.ConnStatus) bool {
			return c.State == zds.StateReady && int(c.PID) == p.Pid
		})
	})
	return p
}

// proxyHasAll waits until the proxy runs for all enrolled pods again, after a new agent has told it of them.
func (s *soak) proxyHasAll() {
	s.t.Helper()
	s.eventually("a proxy runs for all pods", func() bool {
		pods, err := s.client.Pods(s.t.Context())
		return err == nil && !slices.ContainsFunc(pods, func(p enroll.Pod) bool { return p.State != enroll.StateEnrolled })
	})
}

func (s *soak) endProxy(p *bed.Proc, sig os.Signal) {
	s.t.Helper()
	s.must(p.Signal(sig), "signal the proxy")
	select {
	case <-p.Done():
	case <-time.After(2 * patience):
		s.must(fmt.Errorf("it runs on, %v after %v", 2*patience, sig), "end the proxy")
	}
}

func (s *soak) eventually(what string, so func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.must(fmt.Errorf("not so after %v", patience), what)
		}
	}
}

// carried says whether a proxy has noted that it carried a connection.
func (s *soak) carried(want nodeproxy.Record) (bool, error) {
	for i := range s.proxies.Load() {
		f, err := os.Open(filepath.Join(s.Dir, fmt.Sprintf("proxy%d.json", i+1)))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, err
		}
		found, err := noted(f, want)
		if err := errors.Join(err, f.Close()); err != nil || found {
			return found, err
		}
	}
	return false, nil
}

func noted(f *os.File, want nodeproxy.Record) (bool, error) {
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var c nodeproxy.Record
		// A proxy that is killed may leave half a line.
		if json.Unmarshal(lines.Bytes(), &c) == nil && c.UID == want.UID && c.Direction == want.Direction && c.Error == "" &&
			c.Source == want.Source && c.OriginalDestination == want.OriginalDestination {
			return true, nil
		}
	}
	return false, lines.Err()
}

// settle has everything in good order again and all pods taken out.
func (s *soak) settle() {
	for _, sl := range s.slots {
		if sl.is(enrolled) {
			sl.unenrol()
		}
	}
	s.checkLong()
	s.stopTraffic()
	for _, sl := range s.slots {
		sl.closeLong()
	}
	pods, err := s.client.Pods(s.t.Context())
	s.must(err, "list the pods")
	if len(pods) > 0 {
		s.fail("pods are left: %+v", pods)
	}
}

// size is what the agent takes of the machine.
type size struct {
	fds, threads, rss int // rss in KiB
}

func (s *soak) agentSize() size {
	s.t.Helper()
	dir := fmt.Sprintf("/proc/%d/", s.agent.Pid)
	fds, err := os.ReadDir(dir + "fd")
	s.must(err, "count the agent's descriptors")
	status, err := os.ReadFile(dir + "status")
	s.must(err, "read the agent's size")
	got := size{fds: len(fds)}
	for line := range strings.Lines(string(status)) {
		for field, to := range map[string]*int{"VmRSS:": &got.rss, "Threads:": &got.threads} {
			if rest, ok := strings.CutPrefix(line, field); ok {
				_, err := fmt.Sscan(rest, to)
				s.must(err, "read the agent's size")
			}
		}
	}
	return got
}

// flatRounds are made before the agent is measured, and moreRounds after, for it to be measured again.
const (
	flatRounds = 5
	moreRounds = 20
	// moreRSS is how much the agent's memory may grow in moreRounds, in KiB: less than a page for each descriptor, program and
	// pod that was made would come to more.
	moreRSS = 8 << 10
)

// wantFlat has pods come and go, and checks that an agent that has seen many has no more open than one that has seen few.
func (s *soak) wantFlat() {
	s.t.Helper()
	round := func() {
		for _, sl := range s.slots {
			sl.enrol()
		}
		for _, sl := range s.slots {
			sl.unenrol()
		}
	}
	for range flatRounds {
		round()
	}
	before := s.agentSize()
	for range moreRounds {
		round()
	}
	var after size
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		after = s.agentSize()
		if after.fds <= before.fds || time.Now().After(deadline) {
			break
		}
	}
	fmt.Printf("soak: the agent after %d enrolments %+v, after %d more %+v\n", flatRounds*slots, before, moreRounds*slots, after)
	if after.fds > before.fds {
		s.fail("the agent's descriptors grow from %d to %d", before.fds, after.fds)
	}
	if after.rss > before.rss+moreRSS {
		s.fail("the agent's memory grows from %d to %d KiB", before.rss, after.rss)
	}
}

// wantNothingLeft ends all and looks at what is left: in maps and pins, after cleanup on the host.
func (s *soak) wantNothingLeft() {
	s.t.Helper()
	left, err := entriesLeft(s.BPFFS)
	s.must(err, "read the maps")
	for _, what := range left {
		s.fail("map %s", what)
	}
	for _, dir := range []string{filepath.Join(s.BPFFS, "pods"), filepath.Join(s.RunDir, "pods")} {
		if found, err := os.ReadDir(dir); len(found) > 0 || err != nil {
			s.fail("%s has %v, %v", dir, found, err)
		}
	}
	s.endAgent(unix.SIGTERM)
	cleanup := s.run("cleanup", "redirector", "cleanup", "--run-dir", s.RunDir, "--bpffs", s.BPFFS, "--zds-socket", s.ZDSSocket)
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if err := cleanup.Wait(ctx); err != nil {
		s.fail("cleanup: %v: %s", err, cleanup.Output())
	}
	if _, err := os.Stat(s.BPFFS); !errors.Is(err, fs.ErrNotExist) {
		s.fail("%s is there still, %v", s.BPFFS, err)
	}
	for _, sl := range s.slots {
		sl.empty()
	}
	if node, err := s.Node.Snapshot(); err != nil || node != s.node {
		s.fail("the host's namespace is not as it was, %v: %s", err, changes(s.node, node))
	}
	programs, err := programsOn(s.Cgroup)
	s.must(err, "list the programs on the cgroup")
	if len(programs) > 0 {
		s.fail("programs are left on the cgroup: %v", programs)
	}
}
