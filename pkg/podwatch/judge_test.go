// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

const modeLabel = "istio.io/dataplane-mode"

// defaultPolicy is that of an agent which was told nothing but what its DaemonSet tells it.
func defaultPolicy(t *testing.T) Policy {
	t.Helper()
	return Policy{
		Selectors:         selectors(t, DefaultSelectors),
		ExcludeNamespaces: []string{"kube-system", "excluded"},
		SystemNamespace:   "istio-system",
		AgentNamespace:    "istio-system",
		AgentDaemonSet:    "redirector",
		AgentPod:          "redirector-x7k2p",
	}
}

func selectors(t *testing.T, text string) Selectors {
	t.Helper()
	s, err := ParseSelectors(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// testPod is a running pod shop/web without labels, changed by fn.
func testPod(fn ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "uid-web"},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}},
		},
	}
	for _, f := range fn {
		f(pod)
	}
	return pod
}

func labelled(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if p.Labels == nil {
			p.Labels = map[string]string{}
		}
		p.Labels[key] = value
	}
}

func annotated(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		p.Annotations[key] = value
	}
}

func in(namespace string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Namespace = namespace } }

func named(name string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Name = name } }

func phase(phase corev1.PodPhase) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Status.Phase = phase }
}

func ips(ips ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Status.PodIP, p.Status.PodIPs = "", nil
		for _, ip := range ips {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
		}
	}
}

func ownedBy(kind, name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.OwnerReferences = append(p.OwnerReferences, metav1.OwnerReference{Kind: kind, Name: name})
	}
}

func hostNetwork(p *corev1.Pod) { p.Spec.HostNetwork = true }

func deleting(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }

func TestJudge(t *testing.T) {
	const (
		ambient = "ambient"
		none    = "none"
		sidecar = "sidecar.istio.io/status"
	)
	plain := &corev1.Namespace{}
	mesh := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{modeLabel: ambient}}}
	meshNone := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{modeLabel: none}}}
	other := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{modeLabel: "Ambient"}}}
	type change = func(*corev1.Pod)
	for _, c := range []struct {
		name      string
		pod       []change
		namespace *corev1.Namespace
		want      Want
		reason    string // a part of it
	}{
		// Labels of pod and namespace, in all combinations.
		{"no labels", nil, plain, WantOut, "no selector"},
		{"pod asks", []change{labelled(modeLabel, ambient)}, plain, WantIn, "matches"},
		{"pod declines", []change{labelled(modeLabel, none)}, plain, WantOut, "no selector"},
		{"pod says something else", []change{labelled(modeLabel, "x")}, plain, WantOut, "no selector"},
		{"namespace asks", nil, mesh, WantIn, "matches"},
		{"namespace asks, pod too", []change{labelled(modeLabel, ambient)}, mesh, WantIn, "matches"},
		{"namespace asks, pod declines", []change{labelled(modeLabel, none)}, mesh, WantOut, "no selector"},
		{"namespace asks, pod says something else", []change{labelled(modeLabel, "x")}, mesh, WantIn, "matches"},
		{"namespace asks, pod's label is empty", []change{labelled(modeLabel, "")}, mesh, WantIn, "matches"},
		{"namespace declines", nil, meshNone, WantOut, "no selector"},
		{"namespace declines, pod asks", []change{labelled(modeLabel, ambient)}, meshNone, WantIn, "matches"},
		{"namespace declines, pod too", []change{labelled(modeLabel, none)}, meshNone, WantOut, "no selector"},
		{"namespace's label has other capitals", nil, other, WantOut, "no selector"},
		{"pod has it as an annotation", []change{annotated(modeLabel, ambient)}, plain, WantOut, "no selector"},

		// What no label overrides.
		{"hostNetwork", []change{hostNetwork}, mesh, WantOut, "host's network"},
		{"hostNetwork, pod asks", []change{hostNetwork, labelled(modeLabel, ambient)}, mesh, WantOut, "host's network"},
		{"hostNetwork, namespace not known", []change{hostNetwork}, nil, WantOut, "host's network"},
		{"sidecar", []change{annotated(sidecar, `{"version":1}`)}, mesh, WantOut, "sidecar"},
		{"sidecar, pod asks", []change{annotated(sidecar, "x"), labelled(modeLabel, ambient)}, mesh, WantOut, "sidecar"},
		{"sidecar's annotation is empty", []change{annotated(sidecar, "")}, mesh, WantOut, "sidecar"},
		{"sidecar as a label", []change{labelled(sidecar, "x")}, mesh, WantIn, "matches"},
		{"excluded", []change{in("kube-system")}, mesh, WantOut, "kube-system is excluded"},
		{"excluded, pod asks", []change{in("excluded"), labelled(modeLabel, ambient)}, mesh, WantOut, "excluded is excluded"},
		{"excluded, namespace not known", []change{in("excluded")}, nil, WantOut, "is excluded"},
		{"almost excluded", []change{in("excluded-not")}, mesh, WantIn, "matches"},
		{"proxy", []change{in("istio-system"), labelled("app", "ztunnel")}, mesh, WantOut, "node proxy"},
		{"proxy asks", []change{in("istio-system"), labelled("app", "ztunnel"), labelled(modeLabel, ambient)}, mesh, WantOut, "node proxy"},
		{"proxy's label elsewhere", []change{labelled("app", "ztunnel")}, mesh, WantIn, "matches"},
		{"another in the proxy's namespace", []change{in("istio-system"), labelled("app", "istiod")}, mesh, WantIn, "matches"},
		{"agent", []change{in("istio-system"), named("redirector-x7k2p")}, mesh, WantOut, "the agent"},
		{"agent of another revision", []change{in("istio-system"), named("redirector-other"), ownedBy("DaemonSet", "redirector")}, mesh, WantOut, "the agent"},
		{"agent's name elsewhere", []change{named("redirector-x7k2p")}, mesh, WantIn, "matches"},
		{"of another DaemonSet", []change{in("istio-system"), ownedBy("DaemonSet", "istio-cni-node")}, mesh, WantIn, "matches"},
		{"of a ReplicaSet with the agent's name", []change{in("istio-system"), ownedBy("ReplicaSet", "redirector")}, mesh, WantIn, "matches"},

		// How far the pod is.
		{"pending", []change{phase(corev1.PodPending)}, mesh, WantIn, "matches"},
		{"pending without addresses", []change{phase(corev1.PodPending), ips()}, mesh, WantAddress, "no address"},
		{"running without addresses", []change{ips()}, mesh, WantAddress, "no address"},
		{"succeeded", []change{phase(corev1.PodSucceeded)}, mesh, WantOut, "finished (phase Succeeded)"},
		{"failed", []change{phase(corev1.PodFailed)}, mesh, WantOut, "finished (phase Failed)"},
		{"a Job whose address is gone", []change{phase(corev1.PodSucceeded), ips()}, mesh, WantOut, "finished"},
		{"a Job that is gone, namespace not known", []change{phase(corev1.PodFailed), ips()}, nil, WantOut, "finished"},
		{"unknown", []change{phase(corev1.PodUnknown)}, mesh, WantIn, "matches"},
		{"no phase", []change{phase("")}, mesh, WantIn, "matches"},
		{"terminating", []change{deleting}, mesh, WantIn, "matches"},
		{"terminating, finished", []change{deleting, phase(corev1.PodSucceeded)}, mesh, WantOut, "finished"},

		// Addresses.
		{"IPv4 only", []change{ips("10.0.0.1")}, mesh, WantIn, "matches"},
		{"IPv6 only", []change{ips("fd00::1")}, mesh, WantIn, "matches"},
		{"only the old field", []change{ips(), func(p *corev1.Pod) { p.Status.PodIP = "10.0.0.1" }}, mesh, WantIn, "matches"},
		{"no address that is one", []change{ips("", "x", "0.0.0.0", "::1", "224.0.0.1")}, mesh, WantAddress, "no address"},
		{"no address, and not wanted", []change{ips()}, plain, WantOut, "no selector"},

		// Namespaces.
		{"namespace not known", nil, nil, WantKnowledge, "not known"},
		{"namespace not known, pod asks", []change{labelled(modeLabel, ambient)}, nil, WantKnowledge, "not known"},
		{"namespace not known, pod declines", []change{labelled(modeLabel, none)}, nil, WantKnowledge, "not known"},

		// What is so is no evidence of what is wanted.
		{"annotation says enabled", []change{annotated(StatusAnnotation, "enabled")}, plain, WantOut, "no selector"},
		{"annotation says pending", []change{annotated(StatusAnnotation, "pending")}, mesh, WantIn, "matches"},
		{"annotation says disabled", []change{annotated(StatusAnnotation, "disabled")}, mesh, WantIn, "matches"},
	} {
		t.Run(c.name, func(t *testing.T) {
			policy := defaultPolicy(t)
			got := policy.Judge(testPod(c.pod...), c.namespace)
			if got.Want != c.want || !strings.Contains(got.Reason, c.reason) {
				t.Errorf("it is %q because %q, want %q because %q", got.Want, got.Reason, c.want, c.reason)
			}
			// What the caches leave out is not looked at.
			if kept := policy.Judge(stripPod(testPod(c.pod...)), c.namespace); kept != got {
				t.Errorf("of what the caches keep it is %q because %q", kept.Want, kept.Reason)
			}
		})
	}
}

func TestSelectors(t *testing.T) {
	type set = map[string]string
	for _, c := range []struct {
		name, text     string
		pod, namespace set
		want           bool
	}{
		{"pod", `[{podSelector: {matchLabels: {mesh: "on"}}}]`, set{"mesh": "on"}, nil, true},
		{"pod, not", `[{podSelector: {matchLabels: {mesh: "on"}}}]`, set{"mesh": "off"}, set{"mesh": "on"}, false},
		{"namespace", `[{namespaceSelector: {matchLabels: {mesh: "on"}}}]`, nil, set{"mesh": "on"}, true},
		{"both", `[{podSelector: {matchLabels: {a: b}}, namespaceSelector: {matchLabels: {c: d}}}]`, set{"a": "b"}, set{"c": "d"}, true},
		{"both, not the pod", `[{podSelector: {matchLabels: {a: b}}, namespaceSelector: {matchLabels: {c: d}}}]`, nil, set{"c": "d"}, false},
		{"both, not the namespace", `[{podSelector: {matchLabels: {a: b}}, namespaceSelector: {matchLabels: {c: d}}}]`, set{"a": "b"}, nil, false},
		{"one of several", `[{podSelector: {matchLabels: {a: b}}}, {podSelector: {matchLabels: {c: d}}}]`, set{"c": "d"}, nil, true},
		{"empty: all", `[{}]`, nil, nil, true},
		{"exists", `[{podSelector: {matchExpressions: [{key: a, operator: Exists}]}}]`, set{"a": ""}, nil, true},
		{"in JSON", `[{"podSelector":{"matchLabels":{"a":"b"}}}]`, set{"a": "b"}, nil, true},
	} {
		if got := selectors(t, c.text).Match(c.pod, c.namespace); got != c.want {
			t.Errorf("%s: %t, want %t", c.name, got, c.want)
		}
	}
	for name, text := range map[string]string{
		"no YAML":         `[{`,
		"no list":         `podSelector: {}`,
		"nothing":         ``,
		"an empty list":   `[]`,
		"a misspelt name": `[{podselectors: {}}]`,
		"a bad operator":  `[{podSelector: {matchExpressions: [{key: a, operator: Is}]}}]`,
		"a bad label":     `[{namespaceSelector: {matchLabels: {a b: c}}}]`,
		"a bad value":     `[{podSelector: {matchLabels: {a: [b]}}}]`,
	} {
		if s, err := ParseSelectors(text); err == nil {
			t.Errorf("%s: %v", name, s)
		}
	}
}

func TestSettingsOf(t *testing.T) {
	const bypass, dns = annotationBypassInbound, annotationDNSCapture
	on, off := true, false
	for _, c := range []struct {
		name   string
		pod    []func(*corev1.Pod)
		bypass bool
		dns    *bool
		bad    int
	}{
		{"none", nil, false, nil, 0},
		{"bypass", []func(*corev1.Pod){annotated(bypass, "true")}, true, nil, 0},
		{"bypass, not", []func(*corev1.Pod){annotated(bypass, "false")}, false, nil, 0},
		{"as ParseBool", []func(*corev1.Pod){annotated(bypass, "T"), annotated(dns, "0")}, true, &off, 0},
		{"dns", []func(*corev1.Pod){annotated(dns, "true")}, false, &on, 0},
		{"bad", []func(*corev1.Pod){annotated(bypass, "yes"), annotated(dns, "")}, false, nil, 2},
		{"one bad", []func(*corev1.Pod){annotated(bypass, "yes"), annotated(dns, "1")}, false, &on, 1},
		{"as labels", []func(*corev1.Pod){labelled(bypass, "true")}, false, nil, 0},
	} {
		s, bad := SettingsOf(stripPod(testPod(c.pod...)))
		if !reflect.DeepEqual(s, enroll.Settings{BypassInbound: c.bypass, DNSCapture: c.dns}) || len(bad) != c.bad {
			t.Errorf("%s: %+v, bad: %q", c.name, s, bad)
		}
	}
}

func TestListsAmongTheSettings(t *testing.T) {
	const ports, cidrs, inbound = "redirector/exclude-outbound-ports", "redirector/exclude-outbound-cidrs", "redirector/exclude-inbound-ports"
	prefix := netip.MustParsePrefix
	for _, c := range []struct {
		name string
		pod  []func(*corev1.Pod)
		want enroll.Settings
		bad  string
	}{
		{"none", []func(*corev1.Pod){annotated(annotationReroute, " "), annotated(ports, "")}, enroll.Settings{}, ""},
		{"interfaces", []func(*corev1.Pod){annotated(annotationReroute, "tap0, br0,br0")}, enroll.Settings{RerouteInterfaces: []string{"br0", "tap0"}}, ""},
		{"auto", []func(*corev1.Pod){annotated(annotationReroute, "auto")}, enroll.Settings{RerouteInterfaces: []string{"auto"}}, ""},
		{
			"exclusions",
			[]func(*corev1.Pod){annotated(ports, "465,25"), annotated(cidrs, "10.0.0.0/8,!10.1.0.0/16"), annotated(inbound, "9100")},
			enroll.Settings{
				ExcludeOutboundPorts: []uint16{25, 465},
				ExcludeOutboundCIDRs: []enroll.CIDR{{Prefix: prefix("10.0.0.0/8")}, {Prefix: prefix("10.1.0.0/16"), Captured: true}},
				ExcludeInboundPorts:  []uint16{9100},
			},
			"",
		},
		{
			"one bad", []func(*corev1.Pod){annotated(ports, "25"), annotated(inbound, "15008")},
			enroll.Settings{ExcludeOutboundPorts: []uint16{25}}, inbound + " is ignored",
		},
		{"a bad interface", []func(*corev1.Pod){annotated(annotationReroute, "br0,lo")}, enroll.Settings{}, annotationReroute + " is ignored"},
	} {
		s, bad := SettingsOf(stripPod(testPod(c.pod...)))
		if !reflect.DeepEqual(s, c.want) || (c.bad == "") != (len(bad) == 0) || len(bad) > 0 && !strings.Contains(bad[0], c.bad) {
			t.Errorf("%s: %+v, bad: %q", c.name, s, bad)
		}
	}
}

func TestAddressesOf(t *testing.T) {
	want := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}
	for name, pod := range map[string]*corev1.Pod{
		"both fields":  testPod(),
		"other order":  testPod(ips("fd00::1", "10.0.0.1")),
		"v4-mapped":    testPod(ips("::ffff:10.0.0.1", "fd00::1", "fd00:0::1")),
		"with rubbish": testPod(ips("10.0.0.1", "", "fd00::1", "127.0.0.1")),
	} {
		if got := addressesOf(pod); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

func TestAStaticPodIsKnownToTheNodeByItsFile(t *testing.T) {
	mirror := testPod(annotated(annotationMirror, "abc"), annotated(annotationConfigHash, "abc"))
	if got := groupUID(stripPod(mirror)); got != "abc" {
		t.Errorf("it is known as %q", got)
	}
	// The hash alone says nothing: only an object that stands for a static pod has both.
	if got := groupUID(testPod(annotated(annotationConfigHash, "abc"))); got != "uid-web" {
		t.Errorf("a pod that only says so is known as %q", got)
	}
}
