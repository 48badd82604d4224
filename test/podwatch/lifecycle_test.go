// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/cni"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/kube"
)

// patches returns how many annotations the agent has written since the requests before.
func (n *node) patches(before int) int {
	n.t.Helper()
	return kube.Count(n.Requests()[before:], "patch", "pods/status")
}

// TestARestartRepairsNothingThatIsRight starts the agent anew beside pods that are as they should be, and beside some that are not.
func TestARestartRepairsNothingThatIsRight(t *testing.T) {
	n := newNode(t)
	n.CreateNamespace("unlabelled", nil)
	n.startAgent()
	n.wantReady()
	stay, goes, out := n.run("mesh"), n.run("mesh"), n.run("mesh")
	outside := n.run("unlabelled")
	for _, p := range []*kube.Pod{stay, goes, out} {
		n.wantIn(p)
	}
	n.stopAgent()
	if err := n.only(stay, goes, out); err != nil {
		t.Errorf("an agent that stops while its DaemonSet is there takes pods out: %v", err)
	}
	n.wantConnection(stay, true)

	// While no agent looks, one pod goes, one leaves the mesh, and nobody tells the third from before.
	goes.Delete()
	goes.Stop()
	out.Label(mode, "none")
	before := len(n.Requests())
	n.startAgent()
	n.wantReady()
	n.wantOut(out)
	n.eventually("what should not be captured is not", func() error { return n.only(stay) })
	n.settle()
	n.wantAnnotation(stay, "enabled")
	// A removal, and what settle's pod has.
	if got := n.patches(before); got != 2 {
		t.Errorf("%d annotations were written, want 2: %v", got, n.Requests()[before:])
	}
	for _, r := range n.Requests()[before:] {
		if r.Resource == "pods/status" && (r.Name == stay.Object.Name || r.Name == outside.Object.Name) {
			t.Errorf("what was right was written again: %v", r)
		}
	}
	n.wantConnection(stay, true)
}

// TestAnAgentThatGoesForGoodLeavesNothing stops the agent when its DaemonSet is gone.
func TestAnAgentThatGoesForGoodLeavesNothing(t *testing.T) {
	n := newNode(t)
	n.CreateNamespace("unlabelled", nil)
	n.startAgent()
	n.wantReady()
	out := n.run("unlabelled")
	untouched, err := out.NS.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	out.Label(mode, "ambient")
	n.wantIn(out)
	in := n.run("mesh")
	n.wantIn(in)
	n.DeleteDaemonSet()
	n.stopAgent()

	n.wantAnnotation(in, "")
	n.wantAnnotation(out, "")
	for _, path := range []string{n.b.BPFFS, filepath.Join(n.b.RunDir, "pods"), filepath.Join(n.b.RunDir, cni.SocketName)} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	left, err := out.NS.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	if left != untouched {
		t.Errorf("the pod's namespace is not as it was:\n%s\nit was:\n%s", left, untouched)
	}
	n.wantConnection(in, false)
}

// TestNothingIsRemovedWhenTheAPIServerDoesNotSay stops the agent while nobody can tell whether it will come back.
func TestNothingIsRemovedWhenTheAPIServerDoesNotSay(t *testing.T) {
	n := newNode(t)
	n.startAgent()
	n.wantReady()
	p := n.run("mesh")
	n.wantIn(p)
	n.Faults.Refuse(true)
	n.stopAgent()
	n.Faults.Refuse(false)
	if err := n.only(p); err != nil {
		t.Error(err)
	}
	n.wantAnnotation(p, "enabled")
	n.wantConnection(p, true)
}

// TestAPodIsPendingWithoutAProxy has no node proxy at first.
func TestAPodIsPendingWithoutAProxy(t *testing.T) {
	n := newNode(t)
	if err := n.proxy.Kill(); err != nil {
		t.Fatal(err)
	}
	n.startAgent()
	n.wantReady()
	p := n.run("mesh")
	n.eventually("the pod is captured", func() error { return n.captured(p) })
	n.wantAnnotation(p, "pending")
	n.wantEvent(p, "ProxyPending", "node proxy")
	n.startProxy()
	n.wantAnnotation(p, "enabled")
	n.wantConnection(p, true)
}

// TestEvents looks at what the agent says of pods.
func TestEvents(t *testing.T) {
	n := newNode(t)
	n.startAgent()
	n.wantReady()
	late := n.run("mesh")
	n.wantIn(late)
	n.wantEvent(late, "CapturedLate", "before it was captured")
	bad := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: "bad", Annotations: map[string]string{bypass: "maybe"}})
	n.wantIn(bad)
	n.wantEvent(bad, "BadAnnotation", bypass, "maybe")
	lost := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: "lost"})
	lost.SetStatus(corev1.PodRunning, late.IPs()...)
	n.wantEvent(lost, "EnrollFailed", "no process of the pod")
	if events := n.events(bad); len(events) != 2 { // and that it was late
		t.Errorf("of one pod there are %d events: %v", len(events), events)
	}
}

// events lists what was said of a pod.
func (n *node) events(p *kube.Pod) []corev1.Event {
	n.t.Helper()
	list, err := n.Admin.CoreV1().Events(p.Object.Namespace).List(n.t.Context(), metav1.ListOptions{
		FieldSelector: "involvedObject.uid=" + p.UID(),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return list.Items
}

// wantEvent waits for a warning about a pod whose text has all the words.
func (n *node) wantEvent(p *kube.Pod, reason string, words ...string) {
	n.t.Helper()
	n.eventually(fmt.Sprintf("there is a %s event of pod %s with %q", reason, p.Object.Name, words), func() error {
		events := n.events(p)
		for _, e := range events {
			if e.Reason == reason && e.Type == corev1.EventTypeWarning && e.Source.Component == "redirector" && e.Source.Host == kube.NodeName &&
				!slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(e.Message, word) }) {
				return nil
			}
		}
		return fmt.Errorf("there are: %s", texts(events))
	})
}

// TestTheAgentInstallsThePlugin has the agent look after a CNI configuration, and take it back when it goes for good.
func TestTheAgentInstallsThePlugin(t *testing.T) {
	n := newNode(t)
	conf, bin, cache := t.TempDir(), t.TempDir(), t.TempDir()
	n.env = append(n.env, "CNI_NET_DIR="+conf, "CNI_BIN_DIR="+bin, "CNI_CACHE_DIR="+cache)
	n.startAgent("--install-cni=true")
	n.wantNotReady("cni: not ready", "no valid CNI configuration")
	list := filepath.Join(conf, "10-net.conflist")
	const primary = `{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"ptp"}]}`
	if err := os.WriteFile(list, []byte(primary), 0o600); err != nil {
		t.Fatal(err)
	}
	n.wantReady()
	data, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{`"type":"redirector"`, `"agentPodPrefix":"redirector-node-"`, kube.AgentNamespace, "kube-system", n.b.RunDir} {
		if !strings.Contains(string(data), word) {
			t.Errorf("the configuration has no %s: %s", word, data)
		}
	}
	// It goes while pods are captured, and who looks is told.
	n.wantIn(n.run("mesh"))
	if err := os.Remove(list); err != nil {
		t.Fatal(err)
	}
	n.wantStatus(api.ReasonNotReady, "cni is not ready", "no valid CNI configuration", "directories")
	if err := os.WriteFile(list, []byte(primary), 0o600); err != nil {
		t.Fatal(err)
	}
	n.wantReady()
	state, err := cni.ReadNodeState(n.b.RunDir)
	if err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(state) != "{[mesh] [kube-system]}" {
		t.Errorf("what the plugin goes by without an agent is %+v", state)
	}
	n.CreateNamespace("more", map[string]string{mode: "ambient"})
	n.eventually("a namespace that comes into the mesh is in it", func() error {
		state, err := cni.ReadNodeState(n.b.RunDir)
		if err == nil && len(state.EnrolledNamespaces) != 2 {
			err = fmt.Errorf("it has %+v", state)
		}
		return err
	})
	n.DeleteDaemonSet()
	n.stopAgent()
	if data, err := os.ReadFile(list); err != nil || string(data) != primary {
		t.Errorf("the primary's configuration is not as it was: %s, %v", data, err)
	}
	if files, err := os.ReadDir(bin); err != nil || len(files) > 0 {
		t.Errorf("the plugin is left: %v, %v", files, err)
	}
}

// TestAPortThatIsTakenIsSaid has another listen where health checks are answered.
func TestAPortThatIsTakenIsSaid(t *testing.T) {
	n := newNode(t)
	app, err := n.b.Node.ServeApp(8000, bed.AppOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = app.Close() })
	n.launchAgent()
	n.eventually("the agent ends", func() error {
		select {
		case <-n.agent.Done():
			return nil
		default:
			return errors.New("it runs")
		}
	})
	if out := n.agent.Output(); !strings.Contains(out, ":8000") || !strings.Contains(out, "--health-addr") {
		t.Errorf("it says %s", out)
	}
}

// TestAPodThatStartsIsJudgedByItsNamespaceAsItIsNow has the watch of namespaces be behind.
func TestAPodThatStartsIsJudgedByItsNamespaceAsItIsNow(t *testing.T) {
	n := newNode(t)
	n.CreateNamespace("shop", nil)
	n.startAgent()
	n.wantReady()
	n.Forbid("watch", "namespaces")
	n.Faults.Cut()
	n.wantNotReady("list and watch namespaces")
	p := n.CreatePod(kube.PodOptions{Namespace: "shop", Name: "first"})
	p.Start()
	if err := n.cniAdd(p); err != nil {
		t.Fatal(err)
	}
	if err := n.only(); err != nil {
		t.Error(err)
	}
	n.LabelNamespace("shop", mode, "ambient")
	p = n.CreatePod(kube.PodOptions{Namespace: "shop", Name: "second"})
	p.Start()
	if err := n.cniAdd(p); err != nil {
		t.Fatal(err)
	}
	if err := n.captured(p); err != nil {
		t.Errorf("the pod may start, and is not captured: %v", err)
	}
	n.Allow()
	n.wantReady()
}
