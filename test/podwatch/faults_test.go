// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/test/kube"
)

// outageVar is how long the API server is down, as time.ParseDuration reads it.
const outageVar = "REDIRECTOR_PODWATCH_OUTAGE"

// steady runs fn and checks all the while that the kernel captures the pods, without a gap.
func (n *node) steady(pods []*kube.Pod, fn func()) {
	n.t.Helper()
	stop, failed := make(chan struct{}), make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			for _, p := range pods {
				entry, err := n.pods.Pod(p.NS.Cookie)
				if err == nil && entry.UID != p.UID() {
					err = fmt.Errorf("the kernel has UID %q in its namespace", entry.UID)
				}
				if err != nil {
					failed <- fmt.Errorf("pod %s is not captured any more: %w", p.Object.Name, err)
					return
				}
			}
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
	// fn may end the test.
	defer func() {
		close(stop)
		wg.Wait()
		select {
		case err := <-failed:
			n.t.Error(err)
		default:
		}
	}()
	fn()
}

// scheduled makes pods of which the API server, and so the agent, knows, and that do not run yet.
func (n *node) scheduled(count int) []*kube.Pod {
	n.t.Helper()
	var pods []*kube.Pod
	for range count {
		pods = append(pods, n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod")}))
	}
	n.settle()
	return pods
}

// wantCNI starts a pod as the runtime does, and checks that it is captured when the plugin may return.
func (n *node) wantCNI(pods ...*kube.Pod) {
	n.t.Helper()
	for _, p := range pods {
		if p.NS == nil {
			p.Start()
		}
		if err := n.cniAdd(p); err != nil {
			n.t.Errorf("pod %s: %v", p.Object.Name, err)
			continue
		}
		if err := n.captured(p); err != nil {
			n.t.Errorf("pod %s, right after CNI ADD: %v", p.Object.Name, err)
		}
		n.wantConnection(p, true)
	}
}

// wantDone brings pods that were enrolled by CNI to where the kubelet does, checks that all is well with them, and ends them.
func (n *node) wantDone(pods ...*kube.Pod) {
	n.t.Helper()
	for _, p := range pods {
		p.SetStatus(corev1.PodRunning, p.IPs()...)
	}
	for _, p := range pods {
		n.wantIn(p)
	}
	n.end(pods...)
}

// TestTheAPIServerFails has the API server fail in many ways. In each, pods are enrolled by CNI, what is enrolled stays so, and
// readiness tells when the agent does not know what it should. When all is well again, the agent has everything as it should be.
func TestTheAPIServerFails(t *testing.T) {
	n := newNode(t)
	n.startAgent()
	n.wantReady()
	var old []*kube.Pod
	for range 3 {
		p := n.run("mesh")
		n.wantIn(p)
		old = append(old, p)
	}
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			n.in(t, func(n *node) {
				n.steady(old, func() { f.run(n) })
				n.wantReady()
				n.settle()
				n.eventually("the pods of before are captured, and no others", func() error { return n.only(old...) })
			})
		})
	}
	for _, r := range rights {
		t.Run("no right to "+r.verb+" "+strings.ReplaceAll(r.resource, "/", " "), func(t *testing.T) {
			n.in(t, func(n *node) {
				n.steady(old, func() { n.without(r) })
				n.wantReady()
				n.settle()
				n.eventually("the pods of before are captured, and no others", func() error { return n.only(old...) })
			})
		})
	}
}

var faults = []struct {
	name string
	run  func(n *node)
}{
	{"it is down", func(n *node) {
		outage := 5 * time.Second
		if text := os.Getenv(outageVar); text != "" {
			var err error
			if outage, err = time.ParseDuration(text); err != nil {
				n.t.Fatalf("%s: %v", outageVar, err)
			}
		}
		known := n.scheduled(4)
		n.StopAPIServer()
		end := time.Now().Add(outage)
		n.wantNotReady("kubernetes")
		n.wantCNI(known[:2]...)
		time.Sleep(time.Until(end))
		n.wantCNI(known[2:]...)
		n.wantNotReady("kubernetes")
		n.StartAPIServer()
		n.wantDone(known...)
	}},
	{"it is down, and the agent starts", func(n *node) {
		known, enrolled := n.scheduled(1), n.scheduled(1)
		n.wantCNI(enrolled...)
		n.StopAPIServer()
		n.stopAgent()
		n.startAgent()
		n.steady(enrolled, func() {
			n.wantNotReady("pods", "namespaces")
			// The kubelet tries again.
			known[0].Start()
			start := time.Now()
			if err := n.cniAdd(known[0]); err == nil {
				n.t.Error("a pod that the agent cannot know may start")
			} else {
				n.t.Logf("a pod that the agent cannot know is told after %s: %v", time.Since(start), err)
			}
			time.Sleep(2 * time.Second)
			n.StartAPIServer()
			n.wantReady()
			n.wantCNI(known...)
		})
		n.wantDone(append(known, enrolled...)...)
	}},
	{"it answers after two seconds", func(n *node) {
		known := n.scheduled(2)
		n.Faults.Delay(2 * time.Second)
		defer n.Faults.Delay(0)
		n.wantCNI(known...)
		// The watch has not told of this one.
		unknown := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod")})
		n.wantCNI(unknown)
		found := n.run("mesh")
		n.wantIn(found)
		n.wantDone(append(known, unknown, found)...)
		n.stopAgent()
		n.startAgent()
		n.wantReady()
	}},
	{"its answers are lost", func(n *node) {
		known := n.scheduled(2)
		n.Faults.Stall(true)
		defer n.Faults.Stall(false)
		n.wantCNI(known...)
		time.Sleep(3 * time.Second)
		n.Faults.Stall(false)
		n.wantDone(known...)
	}},
	{"it closes connections every second", func(n *node) {
		before := n.Faults.Accepted()
		known := n.scheduled(2)
		n.Faults.CutEvery(time.Second)
		defer n.Faults.CutEvery(0)
		n.wantCNI(known...)
		for range 5 {
			p := n.run("mesh")
			n.wantIn(p)
			p.Label(mode, "none")
			n.wantOut(p)
			n.end(p)
			time.Sleep(700 * time.Millisecond)
		}
		n.wantDone(known...)
		if cut := n.Faults.Accepted() - before; cut < 3 {
			n.t.Errorf("the agent has connected %d times: nothing was cut", cut)
		}
	}},
	{"it has forgotten what the agent saw last", func(n *node) {
		gone, stays := n.run("mesh"), n.run("mesh")
		n.wantIn(gone)
		n.wantIn(stays)
		before := len(n.Requests())
		n.Faults.Refuse(true)
		n.wantNotReady("kubernetes")
		gone.Delete()
		fresh := n.run("mesh")
		n.StopAPIServer()
		n.Compact()
		n.StartAPIServer()
		n.steady([]*kube.Pod{stays}, func() {
			n.Faults.Refuse(false)
			n.wantIn(fresh)
			n.wantOut(gone)
		})
		told := false
		for _, r := range n.Requests()[before:] {
			told = told || r.Code == 410
		}
		told = told || strings.Contains(n.agent.Output(), "too old resource version")
		if !told {
			n.t.Errorf("the agent was not told 410 Gone: %+v", n.Requests()[before:])
		}
		gone.Stop()
		n.end(stays, fresh)
	}},
	{"it has 5000 pods", func(n *node) {
		known := n.scheduled(2)
		n.CreateNamespace("crowd", nil)
		start := time.Now()
		n.crowd("crowd", 5000)
		n.t.Logf("made 5000 pods in %s", time.Since(start))
		n.wantCNI(known[0])
		fresh := n.run("mesh")
		n.wantIn(fresh)
		n.stopAgent()
		start = time.Now()
		n.startAgent()
		// Whether or not it has the list by now.
		n.wantCNI(known[1])
		n.steady([]*kube.Pod{known[0], fresh}, func() {
			n.wantReady()
			n.t.Logf("ready %s after the start, with %d kB in memory", time.Since(start), n.memory("VmRSS"))
		})
		n.wantDone(append(known, fresh)...)
		n.DeleteNamespace("crowd")
		n.wantReady()
	}},
}

// crowd makes pods of this node that do not run.
func (n *node) crowd(namespace string, count int) {
	n.t.Helper()
	var group errgroup.Group
	group.SetLimit(16)
	for i := range count {
		group.Go(func() error {
			pod := kube.NewPod(kube.PodOptions{Namespace: namespace, Name: fmt.Sprintf("crowd-%d", i)})
			_, err := n.Admin.CoreV1().Pods(namespace).Create(n.t.Context(), pod, metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		n.t.Fatal(err)
	}
}

// right is a verb on a resource.
type right struct {
	verb, resource string
	// unready says that the agent is not ready without it, by the words in ready.
	unready []string
}

var rights = []right{
	{"watch", "pods", []string{"list and watch pods", "403"}},
	{"watch", "namespaces", []string{"list and watch namespaces", "403"}},
	{"patch", "pods/status", []string{"patch pods/status", "403"}},
	// A watch that goes on, or can begin anew where it ended, needs no list; pods that the watch told of need no get; and what
	// events say is in the log.
	{"list", "pods", nil},
	{"list", "namespaces", nil},
	{"get", "pods", nil},
	{"get", "namespaces", nil},
	{"create", "events", nil},
}

// without checks that the agent does what it can without a right, and the rest when it has it again.
func (n *node) without(r right) {
	known := n.scheduled(2)
	n.Forbid(r.verb, r.resource)
	n.Faults.Cut() // a watch that is under way would go on
	n.wantCNI(known...)
	var unknown []*kube.Pod
	if r.verb == "watch" && r.resource == "pods" {
		unknown = append(unknown, n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod")}))
		n.wantCNI(unknown...)
	}
	if r.unready != nil {
		n.wantNotReady(append(r.unready, "kubernetes")...)
		n.wantStatus(api.ReasonNotReady, "kubernetes is not ready", "ClusterRole")
	} else {
		time.Sleep(time.Second)
		n.wantReady()
	}
	n.Allow()
	n.wantDone(append(known, unknown...)...)
}
