// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/kube"
)

// only returns nil if the kernel captures these pods and no others.
func (n *node) only(pods ...*kube.Pod) error {
	for _, p := range pods {
		if err := n.captured(p); err != nil {
			return err
		}
	}
	if all := n.kernel(); len(all) != len(pods) {
		return fmt.Errorf("the kernel captures %d pods, want %d: %v", len(all), len(pods), all)
	}
	return nil
}

// run makes a pod in a namespace that runs.
func (n *node) run(namespace string) *kube.Pod {
	n.t.Helper()
	return n.RunPod(kube.PodOptions{Namespace: namespace, Name: n.name("pod")})
}

// end ends pods in the order of the kubelet.
func (n *node) end(pods ...*kube.Pod) {
	n.t.Helper()
	for _, p := range pods {
		if p.NS != nil {
			p.Stop()
		}
		p.Delete()
		n.wantOut(p)
	}
}

// wantEntry waits until what the kernel has of a pod is so.
func (n *node) wantEntry(p *kube.Pod, what string, so func(maps.Pod) bool) {
	n.t.Helper()
	n.eventually(what, func() error {
		if entry := n.kernel()[p.NS.Cookie]; !so(entry) {
			return fmt.Errorf("the kernel has %+v", entry)
		}
		return nil
	})
}

// changes are what can happen to pods. Each leaves nothing captured.
var changes = []struct {
	name string
	run  func(n *node)
}{
	{"a pod asks, and does not any more", func(n *node) {
		p := n.run("unlabelled")
		n.settle()
		n.wantOut(p)
		n.wantConnection(p, false)
		p.Label(mode, "ambient")
		n.wantIn(p)
		n.wantConnection(p, true)
		p.Label(mode, "")
		n.wantOut(p)
		n.wantConnection(p, false)
		n.end(p)
	}},
	{"a pod declines, and does not any more", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.Label(mode, "none")
		n.wantOut(p)
		p.Label(mode, "")
		n.wantIn(p)
		n.end(p)
	}},
	{"a label goes to and fro", func(n *node) {
		p := n.run("unlabelled")
		for range 20 {
			p.Label(mode, "ambient")
			p.Label(mode, "")
		}
		p.Label(mode, "ambient")
		n.wantIn(p)
		for range 20 {
			p.Label(mode, "")
			p.Label(mode, "ambient")
		}
		p.Label(mode, "")
		n.settle()
		n.wantOut(p)
		n.end(p)
	}},
	{"a namespace comes in with its pods, and goes", func(n *node) {
		n.CreateNamespace("flip", nil)
		defer n.DeleteNamespace("flip")
		a, b := n.run("flip"), n.RunPod(kube.PodOptions{Namespace: "flip", Name: n.name("pod"), Labels: map[string]string{mode: "none"}})
		n.settle()
		n.wantOut(a)
		n.LabelNamespace("flip", mode, "ambient")
		n.wantIn(a)
		n.settle()
		n.wantOut(b)
		n.LabelNamespace("flip", mode, "")
		n.wantOut(a)
		n.end(a, b)
	}},
	{"a namespace is deleted", func(n *node) {
		n.CreateNamespace("doomed", map[string]string{mode: "ambient"})
		a, b := n.run("doomed"), n.run("doomed")
		n.wantIn(a)
		n.wantIn(b)
		n.DeleteNamespace("doomed")
		n.wantOut(a)
		n.wantOut(b)
		a.Stop()
		b.Stop()
	}},
	{"a namespace is deleted and made again", func(n *node) {
		n.CreateNamespace("again", map[string]string{mode: "ambient"})
		a := n.run("again")
		n.wantIn(a)
		n.DeleteNamespace("again")
		n.wantOut(a)
		a.Stop()
		n.CreateNamespace("again", nil)
		b := n.run("again")
		n.settle()
		n.wantOut(b)
		n.LabelNamespace("again", mode, "ambient")
		n.wantIn(b)
		n.end(b)
		n.DeleteNamespace("again")
	}},
	{"a pod is deleted while its process runs", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.Delete()
		n.wantOut(p)
		n.wantConnection(p, false)
		p.Stop()
	}},
	{"a sidecar is noticed late", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.Annotate(sidecar, "{}")
		n.wantOut(p)
		n.end(p)
	}},
	{"annotations are followed", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.Annotate(bypass, "true")
		n.wantEntry(p, "inbound connections bypass the proxy", func(e maps.Pod) bool { return e.BypassInbound })
		p.Annotate(dnsCapture, "true")
		n.wantEntry(p, "DNS is captured", func(e maps.Pod) bool { return e.BypassInbound && e.DNSCapture })
		p.Annotate(bypass, "")
		n.wantEntry(p, "inbound connections are captured again", func(e maps.Pod) bool { return !e.BypassInbound && e.DNSCapture })
		p.Annotate(dnsCapture, "")
		n.wantEntry(p, "DNS is not captured any more", func(e maps.Pod) bool { return !e.BypassInbound && !e.DNSCapture })
		for annotation, value := range map[string]string{
			"istio.io/reroute-virtual-interfaces": "br0, eth0", "redirector/exclude-outbound-cidrs": "10.0.0.0/8,!10.1.0.0/16",
			"redirector/exclude-outbound-ports": "25", "redirector/exclude-inbound-ports": "9100",
		} {
			p.Annotate(annotation, value)
			n.wantEntry(p, annotation+" is followed", func(e maps.Pod) bool { return e.HasExceptions })
			p.Annotate(annotation, "")
			n.wantEntry(p, annotation+" is followed when it goes", func(e maps.Pod) bool { return !e.HasExceptions })
		}
		n.wantIn(p)
		n.end(p)
	}},
	{"the annotation is output", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.Annotate(redirection, "")
		n.wantIn(p)
		p.Annotate(redirection, "disabled")
		n.wantIn(p)
		n.wantConnection(p, true)
		n.end(p)
	}},
	{"addresses come late", func(n *node) {
		p := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod")})
		n.settle()
		p.Start()
		n.settle()
		n.wantOut(p)
		p.SetStatus(corev1.PodPending, p.IPs()...)
		n.wantIn(p)
		p.SetStatus(corev1.PodRunning, p.IPs()...)
		n.wantIn(p)
		n.end(p)
	}},
	{"the second family comes late", func(n *node) {
		p := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod")})
		p.Start()
		p.SetStatus(corev1.PodRunning, p.NS.V4)
		n.wantIn(p)
		p.SetStatus(corev1.PodRunning, p.NS.V4, p.NS.V6)
		n.settle()
		n.wantIn(p)
		n.wantConnection(p, true)
		n.end(p)
	}},
	{"a job finishes", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.SetStatus(corev1.PodSucceeded, p.IPs()...)
		n.wantOut(p)
		n.end(p)
	}},
	{"a job finishes and its addresses are gone from the status", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.Stop()
		p.SetStatus(corev1.PodSucceeded)
		n.wantOut(p)
		n.end(p)
	}},
	{"a pod fails", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.SetStatus(corev1.PodFailed, p.IPs()...)
		n.wantOut(p)
		n.end(p)
	}},
	{"a status without addresses takes nothing out", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.SetStatus(corev1.PodRunning)
		n.settle()
		n.wantIn(p)
		n.wantConnection(p, true)
		p.SetStatus(corev1.PodRunning, p.IPs()...)
		n.settle()
		n.wantIn(p)
		n.end(p)
	}},
	{"the sandbox is made anew", func(n *node) {
		p := n.run("mesh")
		n.wantIn(p)
		p.Stop()
		p.SetStatus(corev1.PodPending)
		p.Start()
		p.SetStatus(corev1.PodRunning, p.IPs()...)
		n.wantIn(p)
		n.wantConnection(p, true)
		n.end(p)
	}},
	{"an address changes", func(n *node) {
		p := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod"), Net: bed.PodOptions{V4Only: true}})
		n.wantIn(p)
		p.Move(netip.MustParseAddr("10.88.1.253"))
		p.SetStatus(corev1.PodRunning, p.IPs()...)
		n.settle()
		n.wantIn(p)
		n.wantConnection(p, true)
		n.end(p)
	}},
	{"a new pod has the name of one that is gone", func(n *node) {
		name := n.name("db")
		a := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: name})
		n.wantIn(a)
		a.Delete()
		b := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: name})
		n.wantIn(b)
		n.wantOut(a)
		n.wantConnection(b, true)
		a.Stop()
		n.end(b)
	}},
	{"a new pod has the name of one that is gone, and is not in the mesh", func(n *node) {
		name := n.name("db")
		a := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: name})
		n.wantIn(a)
		a.Delete()
		a.Stop()
		b := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: name, Labels: map[string]string{mode: "none"}})
		n.wantOut(a)
		n.settle()
		n.wantOut(b)
		n.end(b)
	}},
	{"a new pod has the address of one that is gone", func(n *node) {
		a := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod"), Net: bed.PodOptions{V4Only: true}})
		n.wantIn(a)
		addr := a.NS.V4
		a.Stop()
		b := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod"), Net: bed.PodOptions{V4Only: true}})
		b.Start()
		b.Move(addr)
		b.SetStatus(corev1.PodRunning, b.IPs()...)
		n.wantIn(b)
		a.Delete()
		n.wantOut(a)
		n.wantIn(b)
		n.wantConnection(b, true)
		n.end(b)
	}},
	{"a finished job's address is another pod's", func(n *node) {
		a := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod"), Net: bed.PodOptions{V4Only: true}})
		n.wantIn(a)
		addr := a.NS.V4
		a.Stop()
		a.SetStatus(corev1.PodSucceeded, addr)
		b := n.CreatePod(kube.PodOptions{Namespace: "mesh", Name: n.name("pod"), Net: bed.PodOptions{V4Only: true}})
		b.Start()
		b.Move(addr)
		b.SetStatus(corev1.PodRunning, b.IPs()...)
		n.wantIn(b)
		n.wantOut(a)
		a.SetStatus(corev1.PodFailed, addr)
		a.Delete()
		n.settle()
		n.wantIn(b)
		n.wantConnection(b, true)
		n.end(b)
	}},
}
