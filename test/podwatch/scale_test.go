// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/test/kube"
)

// full is how many pods a node has at most, by what clouds allow.
const full = 250

// TestAFullNode starts an agent on a node with many pods that run, and then another after it.
func TestAFullNode(t *testing.T) {
	n := newNode(t)
	pods := make([]*kube.Pod, full)
	for i := range pods {
		pods[i] = n.run("mesh")
	}
	start := time.Now()
	n.startAgent()
	started := time.Since(start)
	n.within(2*time.Minute, "all pods are captured", func() error {
		if len(n.kernel()) < full {
			return fmt.Errorf("%d are", len(n.kernel()))
		}
		return nil
	})
	t.Logf("the agent has started after %s; %d pods are captured %s after the start; %s",
		started, full, time.Since(start), memory(t, n.agent.Pid))
	for _, p := range pods {
		n.wantIn(p)
	}
	t.Logf("all are annotated %s after the start", time.Since(start))
	if err := n.only(pods...); err != nil {
		t.Error(err)
	}
	n.wantPatches(0, pods...)
	n.wantReady()
	// Each pod ran before it was captured, and an event says so. They are sent on the side, the last after all else is done.
	n.eventually("each pod has its event", func() error {
		created := 0
		for _, r := range n.Requests() {
			if r.Verb == "create" && r.Resource == "events" {
				created++
			}
		}
		if created < full {
			return fmt.Errorf("%d events were created", created)
		}
		return nil
	})

	before, requests := n.kernel(), len(n.Requests())
	n.steady(pods, func() {
		n.stopAgent()
		start = time.Now()
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
	counts := map[string]int{}
	for _, r := range n.Requests()[requests:] {
		counts[r.Verb+" "+r.Resource]++
	}
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
