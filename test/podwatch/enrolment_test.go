// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/kube"
)

// still is a pod to which nothing happens once it is there.
type still struct {
	name string
	pod  kube.PodOptions
	// phase is that of its status; empty for Running.
	phase corev1.PodPhase
	// noIPs leaves the addresses out of its status, strangeIP puts another's there.
	noIPs     bool
	strangeIP bool
	// want says whether it is to be captured, bypass and dns how.
	want        bool
	bypass, dns bool
}

// matrix has the label on pod and namespace in every combination.
func matrix() []still {
	var cases []still
	for _, ns := range []string{"unlabelled", "mesh", "declined", "other"} {
		for _, label := range []string{"", "ambient", "none", "other"} {
			s := still{
				name: "namespace " + ns + ", pod " + map[string]string{"": "unlabelled"}[label] + label,
				pod:  kube.PodOptions{Namespace: ns},
				want: label == "ambient" || ns == "mesh" && label != "none",
			}
			if label != "" {
				s.pod.Labels = map[string]string{mode: label}
			}
			cases = append(cases, s)
		}
	}
	return cases
}

// asking is a pod that asks to be in the mesh.
func asking(namespace string) kube.PodOptions {
	return kube.PodOptions{Namespace: namespace, Labels: map[string]string{mode: "ambient"}}
}

// proxyLike is a pod that is labelled as the node proxy's are.
func proxyLike(namespace string) kube.PodOptions {
	return kube.PodOptions{Namespace: namespace, Labels: map[string]string{"app": "ztunnel", mode: "ambient"}}
}

func annotatedIn(namespace, key, value string) kube.PodOptions {
	return kube.PodOptions{Namespace: namespace, Annotations: map[string]string{key: value}}
}

func annotated(key, value string) kube.PodOptions { return annotatedIn("mesh", key, value) }

var stills = append(matrix(), []still{
	{name: "excluded namespace", pod: kube.PodOptions{Namespace: "kube-system"}},
	{name: "excluded namespace, pod asks", pod: asking("kube-system")},
	{name: "the host's network", pod: kube.PodOptions{Namespace: "mesh", HostNetwork: true}},
	{name: "the host's network, pod asks", pod: kube.PodOptions{
		Namespace: "unlabelled", HostNetwork: true, Labels: map[string]string{mode: "ambient"},
	}},
	{name: "a sidecar", pod: annotated(sidecar, `{"containers":["istio-proxy"]}`)},
	{name: "a sidecar, empty", pod: annotated(sidecar, "")},
	{name: "the node proxy", pod: proxyLike(kube.AgentNamespace)},
	{name: "the node proxy's name elsewhere", pod: proxyLike("mesh"), want: true},
	{name: "a pod of the agent's DaemonSet", pod: kube.PodOptions{
		Namespace: kube.AgentNamespace, Labels: map[string]string{mode: "ambient"}, DaemonSet: kube.AgentAccount,
	}},
	{name: "another beside the agent", pod: asking(kube.AgentNamespace), want: true},
	{name: "another DaemonSet's", pod: kube.PodOptions{Namespace: "mesh", DaemonSet: "log-shipper"}, want: true},
	{name: "another node's", pod: kube.PodOptions{Namespace: "mesh", Node: "elsewhere"}},

	{name: "init containers run", pod: kube.PodOptions{Namespace: "mesh"}, phase: corev1.PodPending, want: true},
	{name: "no address yet", pod: kube.PodOptions{Namespace: "mesh"}, phase: corev1.PodPending, noIPs: true},
	{name: "runs without address", pod: kube.PodOptions{Namespace: "mesh"}, noIPs: true},
	{name: "finished", pod: kube.PodOptions{Namespace: "mesh"}, phase: corev1.PodSucceeded},
	{name: "failed", pod: kube.PodOptions{Namespace: "mesh"}, phase: corev1.PodFailed},
	{name: "unknown phase", pod: kube.PodOptions{Namespace: "mesh"}, phase: corev1.PodUnknown, want: true},
	{name: "an address that its namespace has not", pod: kube.PodOptions{Namespace: "mesh"}, strangeIP: true},

	{name: "IPv4 only", pod: kube.PodOptions{Namespace: "mesh", Net: bed.PodOptions{V4Only: true}}, want: true},
	{name: "IPv6 only", pod: kube.PodOptions{Namespace: "mesh", Net: bed.PodOptions{V6Only: true}}, want: true},
	{name: "IPv6 disabled", pod: kube.PodOptions{Namespace: "mesh", Net: bed.PodOptions{V6Disabled: true}}, want: true},
	{name: "a static pod", pod: kube.PodOptions{Namespace: "mesh", Static: true}, want: true},
	{name: "a static pod, cgroups by systemd", pod: kube.PodOptions{Namespace: "mesh", Static: true, Systemd: true}, want: true},
	{name: "cgroups by systemd", pod: kube.PodOptions{Namespace: "mesh", Systemd: true}, want: true},

	{name: "bypass true", pod: annotated(bypass, "true"), want: true, bypass: true},
	{name: "bypass 1", pod: annotated(bypass, "1"), want: true, bypass: true},
	{name: "bypass false", pod: annotated(bypass, "false"), want: true},
	{name: "bypass nonsense", pod: annotated(bypass, "yes please"), want: true},
	{name: "DNS capture true", pod: annotated(dnsCapture, "true"), want: true, dns: true},
	{name: "DNS capture false", pod: annotated(dnsCapture, "false"), want: true},
	{name: "DNS capture nonsense", pod: annotated(dnsCapture, "2"), want: true},
	{name: "annotated as enabled, and is not in", pod: annotatedIn("unlabelled", redirection, "enabled")},
	{name: "annotated as enabled, and is to be", pod: annotated(redirection, "enabled"), want: true},
	{name: "annotated as pending, and is not in", pod: annotatedIn("unlabelled", redirection, "pending")},
}...)

// makeNamespaces makes those that the cases are in.
func (n *node) makeNamespaces() {
	n.t.Helper()
	n.CreateNamespace("unlabelled", nil)
	n.CreateNamespace("declined", map[string]string{mode: "none"})
	n.CreateNamespace("other", map[string]string{mode: "other"})
	n.LabelNamespace("kube-system", mode, "ambient")
}

// runStill makes the pod of a case.
func (n *node) runStill(s still) *kube.Pod {
	n.t.Helper()
	s.pod.Name = n.name("pod")
	p := n.CreatePod(s.pod)
	p.Start()
	phase, ips := s.phase, p.IPs()
	if phase == "" {
		phase = corev1.PodRunning
	}
	switch {
	case s.noIPs:
		ips = nil
	case s.strangeIP:
		ips = []netip.Addr{netip.MustParseAddr("10.88.1.254")}
	}
	p.SetStatus(phase, ips...)
	return p
}

// wantStill checks what became of the pod of a case.
func (n *node) wantStill(s still, p *kube.Pod) {
	n.t.Helper()
	if !s.want {
		n.wantOut(p)
		return
	}
	n.wantIn(p)
	entry := n.kernel()[p.NS.Cookie]
	if entry.BypassInbound != s.bypass || entry.DNSCapture != s.dns {
		n.t.Errorf("the kernel has bypass %t and DNS capture %t, want %t and %t", entry.BypassInbound, entry.DNSCapture, s.bypass, s.dns)
	}
}

// TestEnrolment has many pods, and compares what is wanted of each with what the kernel has: pods that were there before the agent,
// pods that come to it, and pods to which something happens.
func TestEnrolment(t *testing.T) {
	n := newNode(t)
	n.makeNamespaces()
	before := make([]*kube.Pod, len(stills))
	for i, s := range stills {
		before[i] = n.runStill(s)
	}
	n.startAgent()
	n.wantReady()
	n.settle()
	check := func(when string, pods []*kube.Pod) {
		for i, s := range stills {
			t.Run(s.name+", "+when, func(t *testing.T) {
				n.in(t, func(n *node) { n.wantStill(s, pods[i]) })
			})
		}
	}
	check("there before", before)
	for _, p := range before {
		p.Delete()
		p.Stop()
	}
	n.eventually("nothing is captured without pods", func() error { return n.only() })

	after := make([]*kube.Pod, len(stills))
	for i, s := range stills {
		after[i] = n.runStill(s)
	}
	n.settle()
	check("comes later", after)
	t.Run("connections", func(t *testing.T) {
		n.in(t, func(n *node) {
			for i, s := range stills {
				if !s.pod.HostNetwork {
					n.wantConnection(after[i], s.want)
				}
			}
		})
	})
	for _, p := range after {
		p.Delete()
		p.Stop()
	}

	for _, c := range changes {
		t.Run(strings.ReplaceAll(c.name, "/", " "), func(t *testing.T) { n.in(t, c.run) })
	}
	n.eventually("nothing is captured at the end", func() error { return n.only() })
}
