// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"
)

// manifests are what the chart renders: by default, with all options, and on OpenShift.
var manifests = []string{
	"../../deploy/redirector.yaml", "../chart/testdata/everything.yaml", "../chart/testdata/openshift.yaml",
}

// notServed are the groups of the kinds that other projects' CustomResourceDefinitions bring.
var notServed = []string{"monitoring.coreos.com", "k8s.cni.cncf.io"}

const manifestNamespace = "manifests"

func readManifest(t *testing.T, path string) []*unstructured.Unstructured {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var objects []*unstructured.Unstructured
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var object map[string]any
		if err := yaml.UnmarshalStrict([]byte(document), &object); err != nil {
			t.Fatalf("%s: %v in\n%s", path, err, document)
		}
		if len(object) > 0 {
			objects = append(objects, &unstructured.Unstructured{Object: object})
		}
	}
	return objects
}

// testManifests has the API server judge what the chart renders, field by field, without keeping it.
func testManifests(t *testing.T, c *Cluster) {
	groups, err := restmapper.GetAPIGroupResources(c.Admin.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	// Where the agents of the other tests have theirs, there is a DaemonSet with another selector.
	c.CreateNamespace(manifestNamespace, nil)
	for _, path := range manifests {
		judged := 0
		for _, object := range readManifest(t, path) {
			kind := object.GroupVersionKind()
			mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
			if meta.IsNoMatchError(err) && slices.Contains(notServed, kind.Group) {
				continue
			}
			if err != nil {
				t.Errorf("%s: %s: %v", path, kind, err)
				continue
			}
			if err := c.dryRun(t, mapping, object); err != nil {
				t.Errorf("%s: %s %s: %v", path, kind.Kind, object.GetName(), err)
			}
			judged++
		}
		if judged < 6 {
			t.Errorf("%s: only %d objects were judged", path, judged)
		}
	}

	// The judge does find faults.
	broken := readManifest(t, manifests[0])
	ds := broken[slices.IndexFunc(broken, func(o *unstructured.Unstructured) bool { return o.GetKind() == "DaemonSet" })]
	if err := unstructured.SetNestedField(ds.Object, "x", "spec", "template", "spec", "hostNetwrk"); err != nil {
		t.Fatal(err)
	}
	mapping, err := mapper.RESTMapping(ds.GroupVersionKind().GroupKind(), "v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.dryRun(t, mapping, ds); err == nil || !strings.Contains(err.Error(), "hostNetwrk") {
		t.Errorf("a misspelt field: %v", err)
	}
}

// dryRun has the API server do all but keep the object.
func (c *Cluster) dryRun(t *testing.T, mapping *meta.RESTMapping, object *unstructured.Unstructured) error {
	t.Helper()
	if object.GetNamespace() != "" {
		object.SetNamespace(manifestNamespace)
	}
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	request := c.Admin.RESTClient().Patch(types.ApplyPatchType).
		AbsPath("/apis", mapping.Resource.Group, mapping.Resource.Version).
		Param("dryRun", metav1.DryRunAll).Param("fieldValidation", metav1.FieldValidationStrict).
		Param("fieldManager", "test").Param("force", "true").
		Body(text)
	if mapping.Resource.Group == "" {
		request = request.AbsPath("/api", mapping.Resource.Version)
	}
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		request = request.Namespace(manifestNamespace)
	}
	return request.Resource(mapping.Resource.Resource).Name(object.GetName()).Do(t.Context()).Error()
}

// testManifestRights compares the rights that the chart gives with those that the agents of all tests here have.
func testManifestRights(t *testing.T, _ *Cluster) {
	var want []string
	for _, rule := range agentRules() {
		want = append(want, rights(rule)...)
	}
	slices.Sort(want)
	for _, path := range manifests {
		var got []string
		for _, object := range readManifest(t, path) {
			if kind := object.GetKind(); kind != "ClusterRole" && kind != "Role" || object.GetName() != AgentAccount {
				continue
			}
			var role struct {
				Rules []rbacv1.PolicyRule `json:"rules"`
			}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &role); err != nil {
				t.Fatal(err)
			}
			for _, rule := range role.Rules {
				got = append(got, rights(rule)...)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s gives the rights\n%q, want\n%q", path, got, want)
		}
	}
}

func rights(rule rbacv1.PolicyRule) []string {
	var all []string
	for _, resource := range rule.Resources {
		for _, verb := range rule.Verbs {
			all = append(all, fmt.Sprintf("%s %s/%s", verb, rule.APIGroups[0], resource))
		}
	}
	return all
}
