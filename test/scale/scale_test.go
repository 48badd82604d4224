// SPDX-License-Identifier: Apache-2.0

// Package scale measures what an agent costs on a node with many pods: real network namespaces with a node proxy that serves
// all of them, and the real binary as a process.
package scale

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// The environment that the benchmark goes by.
const (
	// roleVariable makes a process of the test binary a node proxy.
	roleVariable = "TEST_SCALE_ROLE"
	// podsVariable is how many pods the node has, instead of manyPods, and idleVariable how long the agent is watched when it
	// has nothing to do, instead of idleTime.
	podsVariable = "REDIRECTOR_SCALE_PODS"
	idleVariable = "REDIRECTOR_SCALE_IDLE"
)

const (
	manyPods = 1000
	idleTime = 30 * time.Second
	// atOnce is how many pods are enrolled side by side: as many as a kubelet starts on a node that comes up, or more.
	atOnce = 50
	// calm is how long the agent is left alone after a start before it counts as idle.
	calm = 10 * time.Second
	// patience bounds each wait.
	patience = 2 * time.Minute
)

func TestMain(m *testing.M) {
	if os.Getenv(roleVariable) == "nodeproxy" {
		os.Exit(nodeproxy.Main(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// BenchmarkNode fills a node with enrolled pods and replaces its agent again and again. It reports, beside the time of a
// restart (from the start of the process until it answers, with every pod adopted) as ns/op:
//
//	capture-s   until all pods are captured, 50 at a time
//	maps-kB/pod, programs-kB/pod  kernel memory
//	serve-s     until a node proxy has started for each, too: that of the tests starts them one after another
//	idle-%      of one core that the agent uses when nothing happens
//	rss-MB      memory of the agent then, with the binary's pages; anon-MB without them
//	fds         of the agent then
func BenchmarkNode(b *testing.B) {
	if err := loader.CheckFeatures(); err != nil {
		b.Skip(err)
	}
	n := newNode(b)
	a := n.startAgent()
	specs := n.makePods(fromEnv(b, podsVariable, manyPods, strconv.Atoi))
	crowds := n.measureCrowds(a, specs)
	n.startProxy()
	n.enrol(a, specs[:1])
	n.whole(a, 1)
	hops := []hop{n.measureHop(1)}
	memory := n.kernelMemory()
	start := time.Now()
	n.enrol(a, specs[1:])
	captured := time.Since(start)
	n.whole(a, len(specs))
	served := time.Since(start)
	n.reaches(specs)
	hops = append(hops, n.measureHop(len(specs)))
	grown := n.kernelMemory()
	perPod := func(now, before uint64) float64 { return float64(now-before) / float64(len(specs)-1) / 1024 }

	var restarts []time.Duration
	for b.Loop() {
		b.StopTimer()
		n.stop(a)
		b.StartTimer()
		start := time.Now()
		a = n.startAgent()
		restarts = append(restarts, time.Since(start))
		b.StopTimer()
		n.whole(a, len(specs))
		n.reaches(specs)
		b.StartTimer()
	}
	slices.Sort(restarts)
	var rows [][2]string
	metric := func(what string, value float64, unit string) {
		b.ReportMetric(value, unit)
		rows = append(rows, [2]string{what, fmt.Sprintf("%.4g", value)})
	}
	metric("pods on the node", float64(len(specs)), "pods")
	metric("a restart, until the agent answers with all pods adopted, median, s", restarts[len(restarts)/2].Seconds(), "restart-p50-s")
	metric("all captured, 50 at a time, while a proxy takes them, s", captured.Seconds(), "capture-s")
	metric("and served by the proxy of the tests, which takes one after another, s", served.Seconds(), "serve-s")
	metric("kernel memory of a pod's entries in maps, kB", perPod(grown.maps, memory.maps), "maps-kB/pod")
	metric("kernel memory of a pod's programs, kB", perPod(grown.programs, memory.programs), "programs-kB/pod")

	time.Sleep(calm)
	idle := fromEnv(b, idleVariable, idleTime, time.ParseDuration)
	before := n.cpu(a)
	time.Sleep(idle)
	metric("the idle agent, % of a core", 100*(n.cpu(a)-before).Seconds()/idle.Seconds(), "idle-%")
	metric("its memory (RSS), MB", n.memory(a, "VmRSS"), "rss-MB")
	metric("of that without the binary's pages, MB", n.memory(a, "RssAnon"), "anon-MB")
	metric("its file descriptors", float64(n.descriptors(a)), "fds")
	report(b, rows, crowds, hops)
	status, err := a.client.Status(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	for kind, count := range status.Repairs {
		if count > 0 {
			b.Errorf("%d repairs of kind %s, where nothing was wrong", count, kind)
		}
	}
}

// node is a bed whose agent is the real binary.
type node struct {
	*bed.Bed
	b      *testing.B
	binary string
	pods   []*bed.NS
}

type agentProcess struct {
	*bed.Proc
	client *api.Client
}

func newNode(b *testing.B) *node {
	b.Helper()
	binary := filepath.Join(b.TempDir(), "redirector")
	build := exec.CommandContext(b.Context(), "go", "build", "-buildvcs=false", "-trimpath", "-ldflags=-s -w", "-o", binary,
		"github.com/redirector-dataplane/redirector/cmd/redirector")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("build the binary: %v\n%s", err, out)
	}
	n := &node{Bed: bed.ForTest(b, bed.Options{}), b: b, binary: binary}
	if err := n.JoinCgroup(); err != nil {
		b.Fatal(err)
	}
	return n
}

// startAgent returns when the agent answers.
func (n *node) startAgent() *agentProcess {
	n.b.Helper()
	proc, err := n.Start(n.Node, true, "agent", []string{
		n.binary, "agent", "--standalone", "--run-dir", n.RunDir, "--bpffs", n.BPFFS, "--cgroup", n.Cgroup, "--zds-socket", n.ZDSSocket,
	}, nil)
	if err != nil {
		n.b.Fatal(err)
	}
	a := &agentProcess{proc, api.NewClient(filepath.Join(n.RunDir, "agent.sock"))}
	n.wait("the agent answers", func(ctx context.Context) error {
		select {
		case <-a.Done():
			n.b.Fatalf("the agent has ended: %s", a.Output())
		default:
		}
		_, err := a.client.Status(ctx)
		return err
	})
	return a
}

func (n *node) stop(a *agentProcess) {
	n.b.Helper()
	ctx, cancel := context.WithTimeout(n.b.Context(), patience)
	defer cancel()
	if err := errors.Join(a.Signal(os.Interrupt), a.Wait(ctx)); err != nil {
		n.b.Fatalf("stop the agent: %v\n%s", err, a.Output())
	}
}

func (n *node) startProxy() {
	n.b.Helper()
	self, err := os.Executable()
	if err != nil {
		n.b.Fatal(err)
	}
	argv := []string{self, "--zds-socket", n.ZDSSocket, "--log", filepath.Join(n.Dir, "proxy.json")}
	if _, err := n.Start(n.Node, true, "proxy", argv, []string{roleVariable + "=nodeproxy"}); err != nil {
		n.b.Fatal(err)
	}
}

// makePods makes as many pods as that, and returns how to enrol them.
func (n *node) makePods(count int) []api.EnrollRequest {
	n.b.Helper()
	requests := make([]api.EnrollRequest, count)
	for i := range requests {
		pod, err := n.Pod(fmt.Sprintf("pod-%d", i), bed.PodOptions{})
		if err != nil {
			n.b.Fatal(err)
		}
		n.pods = append(n.pods, pod)
		requests[i] = api.EnrollRequest{Spec: agent.Spec(pod)}
	}
	return requests
}

func (n *node) enrol(a *agentProcess, requests []api.EnrollRequest) {
	n.b.Helper()
	var group errgroup.Group
	group.SetLimit(atOnce)
	for _, r := range requests {
		group.Go(func() error {
			_, err := a.client.Enroll(n.b.Context(), r)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		n.b.Fatal(err)
	}
}

// whole waits until the agent has all pods, and a proxy for each.
func (n *node) whole(a *agentProcess, want int) {
	n.b.Helper()
	n.wait("all pods are served", func(ctx context.Context) error {
		pods, err := a.client.Pods(ctx)
		if err != nil {
			return err
		}
		served := 0
		for _, p := range pods {
			if p.State == enroll.StateEnrolled {
				served++
			}
		}
		if served != want {
			return fmt.Errorf("%d of %d pods are enrolled", served, want)
		}
		return nil
	})
}

// reaches sees whether the first and the last pod's connections come through.
func (n *node) reaches(requests []api.EnrollRequest) {
	n.b.Helper()
	app, err := n.Outside.ServeApp(8080, bed.AppOptions{})
	if err != nil {
		n.b.Fatal(err)
	}
	defer func() { _ = app.Close() }()
	for _, pod := range []*bed.NS{n.pods[0], n.pods[len(requests)-1]} {
		c, err := pod.Dial(n.b.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(n.Outside.V4, 8080)})
		if err != nil {
			n.b.Fatalf("from %s: %v", pod.Name, err)
		}
		if _, err := bed.ReadIdentity(c); err != nil {
			n.b.Fatalf("from %s: %v", pod.Name, err)
		}
		_ = c.Close()
	}
}

func (n *node) wait(what string, try func(context.Context) error) {
	n.b.Helper()
	ctx, cancel := context.WithTimeout(n.b.Context(), patience)
	defer cancel()
	for {
		err := try(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			n.b.Fatalf("%s: not within %s: %v", what, patience, err)
		case <-time.After(time.Millisecond):
		}
	}
}

// tick is the unit of times in /proc/PID/stat: USER_HZ, which is 100 on all but one of Linux's architectures.
const tick = 10 * time.Millisecond

// cpu is how long the agent has run on a processor.
func (n *node) cpu(a *agentProcess) time.Duration {
	n.b.Helper()
	stat := string(n.read(a, "stat"))
	// Fields 14 and 15 of proc_pid_stat(5); the second, the name, may have spaces.
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	var took time.Duration
	for _, field := range fields[11:13] {
		ticks, err := strconv.Atoi(field)
		if err != nil {
			n.b.Fatal(err)
		}
		took += time.Duration(ticks) * tick
	}
	return took
}

// memory reads a line of /proc/PID/status, in MB of 1,000,000 bytes.
func (n *node) memory(a *agentProcess, name string) float64 {
	n.b.Helper()
	for line := range bytes.Lines(n.read(a, "status")) {
		rest, ok := bytes.CutPrefix(line, []byte(name+":"))
		if !ok {
			continue
		}
		kB, err := strconv.Atoi(strings.Fields(string(rest))[0])
		if err != nil {
			n.b.Fatal(err)
		}
		return float64(kB) * 1024 / 1e6
	}
	n.b.Fatalf("/proc/%d/status has no line %s", a.Pid, name)
	return 0
}

func (n *node) descriptors(a *agentProcess) int {
	n.b.Helper()
	entries, err := fs.ReadDir(os.DirFS(fmt.Sprintf("/proc/%d", a.Pid)), "fd")
	if err != nil {
		n.b.Fatal(err)
	}
	return len(entries)
}

func (n *node) read(a *agentProcess, file string) []byte {
	n.b.Helper()
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", a.Pid, file))
	if err != nil {
		n.b.Fatal(err)
	}
	return content
}

// fromEnv is a setting from the environment, or the value if it is not set.
func fromEnv[T any](b *testing.B, name string, value T, parse func(string) (T, error)) T {
	b.Helper()
	text := os.Getenv(name)
	if text == "" {
		return value
	}
	parsed, err := parse(text)
	if err != nil {
		b.Fatalf("%s: %v", name, err)
	}
	return parsed
}
