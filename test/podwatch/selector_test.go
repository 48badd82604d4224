// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"slices"
	"testing"

	"github.com/redirector-dataplane/redirector/test/kube"
)

// selectors are what AMBIENT_ENABLEMENT_SELECTOR can say, and which of the pods below are then in the mesh.
var selectors = []struct {
	name, yaml string
	want       []string
}{
	{"default", ``, []string{"asks", "mesh"}},
	{"istio's, as JSON", `[{"podSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}}]`, []string{"asks"}},
	{"everything", `[{}]`, []string{"asks", "declines", "mesh", "plain", "team"}},
	{"namespaces by expression", `
- namespaceSelector:
    matchExpressions: [{key: team, operator: In, values: [a, b]}]`, []string{"team"}},
	{"namespaces without a label", `
- namespaceSelector:
    matchExpressions: [{key: istio.io/dataplane-mode, operator: DoesNotExist}]`, []string{"asks", "plain", "team"}},
	{"pod and namespace, both", `
- podSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
  namespaceSelector: {matchLabels: {team: a}}`, nil},
	{"one or another", `
- podSelector: {matchLabels: {istio.io/dataplane-mode: none}}
- namespaceSelector: {matchLabels: {team: a}}`, []string{"declines", "team"}},
	{"an empty one beside another", `
- podSelector: {}
- podSelector: {matchLabels: {a: b}}`, []string{"asks", "declines", "mesh", "plain", "team"}},
}

// TestSelectors starts an agent after the other, each with selectors of its own, over the same pods.
func TestSelectors(t *testing.T) {
	n := newNode(t)
	n.CreateNamespace("unlabelled", nil)
	n.CreateNamespace("team", map[string]string{"team": "a"})
	pods := map[string]*kube.Pod{
		"asks":     n.RunPod(kube.PodOptions{Namespace: "unlabelled", Name: "asks", Labels: map[string]string{mode: "ambient"}}),
		"declines": n.RunPod(kube.PodOptions{Namespace: "mesh", Name: "declines", Labels: map[string]string{mode: "none"}}),
		"mesh":     n.RunPod(kube.PodOptions{Namespace: "mesh", Name: "mesh"}),
		"plain":    n.RunPod(kube.PodOptions{Namespace: "unlabelled", Name: "plain"}),
		"team":     n.RunPod(kube.PodOptions{Namespace: "team", Name: "team"}),
	}
	// Never in, whatever selects them.
	host := n.RunPod(kube.PodOptions{Namespace: "mesh", Name: "host", HostNetwork: true})
	excluded := n.RunPod(kube.PodOptions{Namespace: "kube-system", Name: "excluded", Labels: map[string]string{mode: "ambient"}})
	for _, s := range selectors {
		t.Run(s.name, func(t *testing.T) {
			n.in(t, func(n *node) {
				n.env = []string{"AMBIENT_ENABLEMENT_SELECTOR=" + s.yaml}
				n.startAgent()
				defer n.stopAgent()
				n.wantReady()
				var want []*kube.Pod
				for _, name := range s.want {
					want = append(want, pods[name])
				}
				n.eventually("the selected pods are captured, and no others", func() error { return n.only(want...) })
				for _, p := range want {
					n.wantIn(p)
				}
				for name, p := range pods {
					if !slices.Contains(s.want, name) {
						n.wantOut(p)
					}
				}
				n.wantOut(host)
				n.wantOut(excluded)
			})
		})
	}
}
