// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/redirector-dataplane/redirector/test/kube"
)

// full is how many pods a node has at most, by what clouds allow.
const full = 250

// maxMemory is how much an agent may have in memory with a full node, in kB.
const maxMemory = 40 << 10

// build builds the agent as it is delivered, since what tests bring along takes memory.
func (n *node) build() {
	n.t.Helper()
	n.binary = filepath.Join(n.t.TempDir(), "redirector")
	build := exec.CommandContext(n.t.Context(), "go", "build", "-buildvcs=false", "-trimpath", "-ldflags=-s -w", "-o", n.binary,
		"github.com/redirector-dataplane/redirector/cmd/redirector")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		n.t.Fatalf("build redirector: %v\n%s", err, out)
	}
}

// fill makes as many pods as a node has at most.
func (n *node) fill() []*kube.Pod {
	n.t.Helper()
	pods := make([]*kube.Pod, full)
	for i := range pods {
		pods[i] = n.run("mesh")
	}
	return pods
}

// BenchmarkAFullNode starts an agent on a node with 250 pods that run, and has it clean up, again and again.
func BenchmarkAFullNode(b *testing.B) {
	n := newNode(b, "AMBIENT_DISABLE_SAFE_UPGRADE=true")
	n.build()
	n.fill()
	sums := map[string]float64{}
	for b.Loop() {
		start := time.Now()
		since := func() float64 { return float64(time.Since(start).Milliseconds()) }
		n.startAgent("--log-level=info")
		sums["ms-to-start"] += since()
		n.within(2*time.Minute, "all pods are captured", func() error { return n.all(len(n.kernel())) })
		sums["ms-to-capture"] += since()
		n.within(2*time.Minute, "a proxy runs for all pods, and the annotations say so", func() error { return n.all(n.annotated()) })
		sums["ms-to-annotate"] += since()
		sums["ms-of-cpu"] += float64(n.cpu().Milliseconds())
		time.Sleep(5 * time.Second) // and what was for the start only is given back
		sums["MiB"] += float64(n.memory("VmRSS")) / 1024
		sums["MiB-at-most"] += float64(n.memory("VmHWM")) / 1024
		n.stopAgent()
		n.pods = nil // the map is another's now
	}
	for what, sum := range sums {
		b.ReportMetric(sum/float64(b.N), what)
	}
	b.ReportMetric(0, "ns/op")
}

// TestAFullNode starts an agent on a node with many pods that run, and then another after it.
func TestAFullNode(t *testing.T) {
	n := newNode(t)
	n.build()
	pods := n.fill()
	n.startAgent()
	n.within(2*time.Minute, "all pods are captured", func() error { return n.all(len(n.kernel())) })
	for _, p := range pods {
		n.wantIn(p)
	}
	if err := n.only(pods...); err != nil {
		t.Error(err)
	}
	n.wantPatches(0, pods...)
	n.wantReady()
	// Each pod ran before it was captured, and an event says so. They are sent on the side, the last after all else is done.
	n.eventually("each pod has its event", func() error { return n.all(kube.Count(n.Requests(), "create", "events")) })
	for what, count := range requestsByKind(n.Requests()) {
		switch what {
		case "patch pods/status", "create events":
			if count != full {
				t.Errorf("the API server was asked %d times to %s, want once for each of %d pods", count, what, full)
			}
		case "list pods", "watch pods", "list namespaces", "watch namespaces":
			if count > 2 {
				t.Errorf("the API server was asked %d times to %s", count, what)
			}
		case "get nodes": // for the node's container runtime
			if count > 1 {
				t.Errorf("the API server was asked %d times to %s", count, what)
			}
		default:
			t.Errorf("the API server was asked %d times to %s", count, what)
		}
	}
	n.eventually("the agent has little in memory", func() error {
		if kB := n.memory("VmRSS"); kB >= maxMemory {
			return fmt.Errorf("it has %d kB, want less than %d", kB, maxMemory)
		}
		return nil
	})
	t.Logf("with %d pods the agent has %d kB in memory, and had %d at most", full, n.memory("VmRSS"), n.memory("VmHWM"))

	before, requests := n.kernel(), len(n.Requests())
	n.steady(pods, func() {
		n.stopAgent()
		start := time.Now()
		n.startAgent()
		n.wantReady()
		t.Logf("another agent is ready after %s", time.Since(start))
		// The kernel is compared with what is wanted, and annotations with what is so, more than once.
		time.Sleep(8 * time.Second)
	})
	if after := n.kernel(); !maps.Equal(before, after) {
		t.Errorf("the kernel has\n%v\nand had\n%v", after, before)
	}
	n.wantPatches(requests)
	counts := requestsByKind(n.Requests()[requests:])
	t.Logf("requests of the second agent: %v", counts)
	// One get of its DaemonSet is the first agent's, when it ended.
	for _, what := range []string{"patch pods/status", "create events", "patch events", "get pods", "get namespaces"} {
		if counts[what] > 0 {
			t.Errorf("the API server was asked %d times to %s", counts[what], what)
		}
	}
	for what, count := range counts {
		if count > 2 {
			t.Errorf("the API server was asked %d times to %s, want at most 2", count, what)
		}
	}

	requests = len(n.Requests())
	for _, p := range pods[:10] {
		p.Label(mode, "none")
	}
	for _, p := range pods[:10] {
		n.wantOut(p)
	}
	n.settle()
	n.wantPatches(requests, pods[:10]...)
}

// all returns nil if it is all pods of a full node.
func (n *node) all(got int) error {
	if got != full {
		return fmt.Errorf("%d are, of %d", got, full)
	}
	return nil
}

// annotated counts the pods whose annotation says that they are enrolled.
func (n *node) annotated() int {
	n.t.Helper()
	list, err := n.Admin.CoreV1().Pods("mesh").List(n.t.Context(), metav1.ListOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	count := 0
	for _, p := range list.Items {
		if p.Annotations[redirection] == "enabled" {
			count++
		}
	}
	return count
}

func requestsByKind(requests []kube.Request) map[string]int {
	counts := map[string]int{}
	for _, r := range requests {
		counts[r.Verb+" "+r.Resource]++
	}
	return counts
}

// memory is a line of the agent's /proc/PID/status, in kB.
func (n *node) memory(line string) int {
	n.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.agent.Pid))
	if err != nil {
		n.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), line+":")
	var kB int
	if _, err := fmt.Sscanf(rest, "%d kB", &kB); err != nil {
		n.t.Fatalf("%s of the agent: %v", line, err)
	}
	return kB
}

// cpu is how long the agent has had a processor.
func (n *node) cpu() time.Duration {
	n.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.agent.Pid))
	if err != nil {
		n.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), ") ") // what is before may have spaces
	fields := strings.Fields(rest)
	const utime, stime, perTick = 14 - 3, 15 - 3, 10 * time.Millisecond
	user, errUser := strconv.Atoi(fields[utime])
	system, errSystem := strconv.Atoi(fields[stime])
	if err := errors.Join(errUser, errSystem); err != nil {
		n.t.Fatal(err)
	}
	return time.Duration(user+system) * perTick
}

// wantPatches checks that since then each of the pods was patched once, and no other but what settle has made.
func (n *node) wantPatches(since int, pods ...*kube.Pod) {
	n.t.Helper()
	want := map[string]int{}
	for _, p := range pods {
		want[p.Object.Name] = 1
	}
	got := map[string]int{}
	for _, r := range n.Requests()[since:] {
		if r.Verb != "patch" || r.Resource != "pods/status" {
			continue
		}
		got[r.Name]++
		if r.Code != 200 {
			n.t.Errorf("a patch of the status of pod %s was answered with %d", r.Name, r.Code)
		}
	}
	for name, count := range got {
		if strings.HasPrefix(name, "settle-") {
			if count > 1 {
				n.t.Errorf("the status of pod %s was patched %d times", name, count)
			}
			delete(got, name)
		}
	}
	if !maps.Equal(got, want) {
		n.t.Errorf("patches of pods' status, by pod: %v, want %v", got, want)
	}
}
