// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

// DefaultSelectors has istio's two ways into the mesh: a pod that asks for it, and a namespace that does, unless the pod declines.
const DefaultSelectors = `
- podSelector:
    matchLabels: {istio.io/dataplane-mode: ambient}
- podSelector:
    matchExpressions: [{key: istio.io/dataplane-mode, operator: NotIn, values: [none]}]
  namespaceSelector:
    matchLabels: {istio.io/dataplane-mode: ambient}
`

// Selectors say by labels which pods are in the mesh: those that any of them selects.
type Selectors []selector

// selector selects pods by their own labels and those of their namespace, both.
type selector struct{ pod, namespace labels.Selector }

// ParseSelectors reads istio's YAML: a list of podSelector and namespaceSelector, each a Kubernetes label selector. One that is
// missing or empty selects everything, so a field that is misspelt is an error.
func ParseSelectors(text string) (Selectors, error) {
	var list []struct {
		PodSelector       metav1.LabelSelector `json:"podSelector"`
		NamespaceSelector metav1.LabelSelector `json:"namespaceSelector"`
	}
	if err := yaml.UnmarshalStrict([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("it is no list of podSelector and namespaceSelector in YAML: %w", err)
	}
	if len(list) == 0 {
		return nil, errors.New("it selects nothing: list at least one podSelector or namespaceSelector")
	}
	all := make(Selectors, 0, len(list))
	for i, entry := range list {
		pod, err := metav1.LabelSelectorAsSelector(&entry.PodSelector)
		if err != nil {
			return nil, fmt.Errorf("podSelector of entry %d: %w", i+1, err)
		}
		namespace, err := metav1.LabelSelectorAsSelector(&entry.NamespaceSelector)
		if err != nil {
			return nil, fmt.Errorf("namespaceSelector of entry %d: %w", i+1, err)
		}
		all = append(all, selector{pod, namespace})
	}
	return all, nil
}

// Match says whether a pod with these labels, in a namespace with those, is selected.
func (s Selectors) Match(pod, namespace map[string]string) bool {
	for _, one := range s {
		if one.pod.Matches(labels.Set(pod)) && one.namespace.Matches(labels.Set(namespace)) {
			return true
		}
	}
	return false
}
