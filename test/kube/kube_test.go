// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// TestCluster has one cluster for all, because a start takes seconds.
func TestCluster(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	start := time.Now()
	c := Start(t, b)
	t.Logf("the control plane is ready after %s", time.Since(start).Round(10*time.Millisecond))
	version, err := c.Admin.Discovery().ServerVersion()
	if err != nil || !strings.Contains(filepath.Dir(c.binary), version.GitVersion) {
		t.Errorf("%s is version %v, %v", c.binary, version, err)
	}
	c.CreateNamespace("shop", map[string]string{"istio.io/dataplane-mode": "ambient"})

	for name, test := range map[string]func(*testing.T, *Cluster){
		"a pod is what the kubelet makes of it":              testPod,
		"the agent has its rights and no others":             testRights,
		"faults":                                             testFaults,
		"a watch from before a compaction is told it":        testGone,
		"a namespace goes with its pods":                     testNamespace,
		"a pod's object can be replaced under the same name": testReplaced,
		"the chart's objects are valid":                      testManifests,
		"the chart gives the agent's rights and no others":   testManifestRights,
	} {
		t.Run(name, func(t *testing.T) { test(t, c.For(t)) })
	}
}

// agent is a client with the agent's rights, connected through the fault proxy.
func (c *Cluster) agent(t *testing.T) *kubernetes.Clientset {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.Dial = c.dial
	config.Timeout = patience
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func testPod(t *testing.T, c *Cluster) {
	for _, systemd := range []bool{false, true} {
		p := c.RunPod(PodOptions{Namespace: "shop", Name: fmt.Sprintf("cart-%t", systemd), Systemd: systemd})
		got, err := c.Admin.CoreV1().Pods("shop").Get(t.Context(), p.Object.Name, get)
		if err != nil {
			t.Fatal(err)
		}
		var ips []string
		for _, ip := range got.Status.PodIPs {
			ips = append(ips, ip.IP)
		}
		if want := []string{p.NS.V4.String(), p.NS.V6.String()}; !slices.Equal(ips, want) || got.Status.Phase != corev1.PodRunning {
			t.Errorf("the status has addresses %v and phase %s, want %v, Running", ips, got.Status.Phase, want)
		}
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p.Process.Pid))
		if want := fmt.Sprintf("net:[%d]", p.NS.Inode); err != nil || ns != want {
			t.Errorf("the process is in %s, %v, want %s", ns, err, want)
		}
		group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.Process.Pid))
		want := "/kubepods/besteffort/pod" + p.UID() + "/"
		if systemd {
			want = "/kubepods-besteffort-pod" + strings.ReplaceAll(p.UID(), "-", "_") + ".slice/cri-containerd-"
		}
		if err != nil || !strings.Contains(string(group), want) {
			t.Errorf("the process is in cgroups %q, %v, want %s", group, err, want)
		}
		pid := p.Process.Pid
		p.Stop()
		p.Delete()
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("process %d of a stopped pod: %v", pid, err)
		}
		if _, err := c.Admin.CoreV1().Pods("shop").Get(t.Context(), p.Object.Name, get); !apierrors.IsNotFound(err) {
			t.Errorf("a deleted pod: %v", err)
		}
	}
}

func testRights(t *testing.T, c *Cluster) {
	before := len(c.Requests())
	agent := c.agent(t)
	p := c.CreatePod(PodOptions{Namespace: "shop", Name: "rights"})
	defer p.Delete()
	patch := []byte(`{"metadata":{"annotations":{"a":"b"}}}`)
	pods := agent.CoreV1().Pods("shop")
	try := func(wantAllowed bool, do func() error) {
		t.Helper()
		if err := do(); wantAllowed && err != nil || !wantAllowed && !apierrors.IsForbidden(err) {
			t.Errorf("allowed should be %t: %v", wantAllowed, err)
		}
	}
	patchStatus := func() error {
		_, err := pods.Patch(t.Context(), "rights", "application/merge-patch+json", patch, metav1.PatchOptions{}, "status")
		return err
	}
	list := func() error {
		_, err := agent.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + NodeName})
		return err
	}
	try(true, list)
	try(true, patchStatus)
	try(false, func() error {
		_, err := pods.Patch(t.Context(), "rights", "application/merge-patch+json", patch, metav1.PatchOptions{})
		return err
	})
	try(false, func() error { return pods.Delete(t.Context(), "rights", metav1.DeleteOptions{}) })
	try(false, func() error {
		_, err := agent.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{})
		return err
	})
	c.Forbid("patch", "pods/status")
	try(false, patchStatus)
	try(true, list)
	c.Allow()
	try(true, patchStatus)

	var got []string
	for _, r := range c.Requests()[before:] {
		got = append(got, fmt.Sprintf("%s %s %d", r.Verb, r.Resource, r.Code))
	}
	want := []string{
		"list pods 200", "patch pods/status 200", "patch pods 403", "delete pods 403", "list secrets 403",
		"patch pods/status 403", "list pods 200", "patch pods/status 200",
	}
	if !slices.Equal(got, want) {
		t.Errorf("the audit log has %q, want %q", got, want)
	}
	if n := Count(c.Requests()[before:], "patch", "pods/status"); n != 3 {
		t.Errorf("counted %d patches of pods/status, want 3", n)
	}
}

func testFaults(t *testing.T, c *Cluster) {
	get := func() (time.Duration, error) {
		// A client of its own: no connection is used again.
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
		if err != nil {
			t.Fatal(err)
		}
		config.Dial = func(_ context.Context, network, address string) (net.Conn, error) {
			return c.dial(ctx, network, address)
		}
		config.Timeout = 2 * time.Second
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			t.Fatal(err)
		}
		_, err = client.CoreV1().Namespaces().Get(ctx, "shop", metav1.GetOptions{})
		return time.Since(start), err
	}
	if _, err := get(); err != nil {
		t.Errorf("without a fault: %v", err)
	}
	c.Faults.Delay(300 * time.Millisecond)
	// The handshake of TLS and the request take a round trip each.
	if took, err := get(); err != nil || took < 600*time.Millisecond {
		t.Errorf("with answers 0.3 s late: after %s %v", took, err)
	}
	c.Faults.Delay(0)
	c.Faults.Refuse(true)
	if _, err := get(); err == nil {
		t.Error("a refused connection gave an answer")
	}
	c.Faults.Refuse(false)
	if _, err := get(); err != nil {
		t.Errorf("after a refusal: %v", err)
	}
	c.Faults.Stall(true)
	if took, err := get(); err == nil || took < time.Second {
		t.Errorf("stalled: after %s %v", took, err)
	}
	c.Faults.Stall(false)
	if _, err := get(); err != nil {
		t.Errorf("after a stall: %v", err)
	}

	conn, err := c.dial(t.Context(), "tcp", c.Faults.Addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c.Faults.CutEvery(100 * time.Millisecond)
	defer c.Faults.CutEvery(0)
	if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection to be cut gave %v", err)
	}
}

func testGone(t *testing.T, c *Cluster) {
	agent := c.agent(t)
	list, err := agent.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before := list.ResourceVersion
	p := c.CreatePod(PodOptions{Namespace: "shop", Name: "gone"})
	p.Label("a", "b")
	p.Delete()
	c.StopAPIServer()
	c.Compact()
	c.StartAPIServer()
	// The first requests may be sent on the connection to the server that is no more.
	var events watch.Interface
	c.eventually("a watch gets an answer", func() error {
		events, err = agent.CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{ResourceVersion: before})
		if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			return nil
		}
		return err
	})
	if err != nil {
		return // the answer itself is 410
	}
	defer events.Stop()
	select {
	case e := <-events.ResultChan():
		if err := apierrors.FromObject(e.Object); e.Type != watch.Error || !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
			t.Errorf("a watch from before the compaction begins with %s %v, want 410 Gone", e.Type, e.Object)
		}
	case <-time.After(patience):
		t.Error("a watch from before the compaction is told nothing")
	}
}

func testNamespace(t *testing.T, c *Cluster) {
	c.CreateNamespace("going", nil)
	c.LabelNamespace("going", "istio.io/dataplane-mode", "ambient")
	c.CreatePod(PodOptions{Namespace: "going", Name: "a"})
	c.DeleteNamespace("going")
	if _, err := c.Admin.CoreV1().Namespaces().Get(t.Context(), "going", get); !apierrors.IsNotFound(err) {
		t.Errorf("the namespace: %v", err)
	}
	if _, err := c.Admin.CoreV1().Pods("going").Get(t.Context(), "a", get); !apierrors.IsNotFound(err) {
		t.Errorf("its pod: %v", err)
	}
}

func testReplaced(t *testing.T, c *Cluster) {
	a := c.CreatePod(PodOptions{Namespace: "shop", Name: "db-0", Annotations: map[string]string{"a": "b"}})
	if got := a.Annotation("a"); got != "b" {
		t.Errorf("the annotation is %q", got)
	}
	a.Delete()
	b := c.CreatePod(PodOptions{Namespace: "shop", Name: "db-0"})
	defer b.Delete()
	if a.UID() == b.UID() {
		t.Errorf("both have UID %s", a.UID())
	}
	if got := a.Annotation("a"); got != "" {
		t.Errorf("the annotation of the pod that is gone is %q", got)
	}
	b.Annotate("a", "c")
	if got := b.Annotation("a"); got != "c" {
		t.Errorf("the annotation is %q", got)
	}
	a.Delete() // of that UID there is none any more
	if b.Annotation("a") != "c" {
		t.Error("the wrong pod was deleted")
	}
}
