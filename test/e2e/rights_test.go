// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// capabilities takes each capability from the agent that the chart gives it, and sees that it does not do its work without.
func capabilities(c *cluster) {
	given := c.given()
	slices.Sort(given)
	if want := []corev1.Capability{"NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"}; !slices.Equal(given, want) {
		c.t.Fatalf("the agent has %q: this test knows %q", given, want)
	}
	for _, taken := range given {
		c.give(slices.DeleteFunc(slices.Clone(given), func(one corev1.Capability) bool { return one == taken }))
		c.eventually(fmt.Sprintf("the agent is of no use without %s", taken), func() error { return c.useless(taken) })
		c.kubectl("label", "namespace", plain, "istio.io/dataplane-mode-")
	}
	c.give(given)
	c.rollout(system, "daemonset/redirector")
	c.kubectl("label", "namespace", plain, "istio.io/dataplane-mode=ambient")
	c.wantAnnotation(plain, "app=stranger", "enabled")
	c.kubectl("label", "namespace", plain, "istio.io/dataplane-mode-")
	c.wantAnnotation(plain, "app=stranger", "")
}

// given are the capabilities of the agent's container.
func (c *cluster) given() []corev1.Capability {
	c.t.Helper()
	var ds appsv1.DaemonSet
	if err := json.Unmarshal([]byte(c.kubectl("-n", system, "get", "daemonset", "redirector", "-o", "json")), &ds); err != nil {
		c.t.Fatal(err)
	}
	return ds.Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add
}

// give has the agent run anew with capabilities.
func (c *cluster) give(all []corev1.Capability) {
	c.t.Helper()
	list, err := json.Marshal(all)
	if err != nil {
		c.t.Fatal(err)
	}
	old := c.pod(system, "k8s-app=istio-cni-node")
	c.kubectl("-n", system, "patch", "daemonset", "redirector", "--type=json", "-p",
		fmt.Sprintf(`[{"op":"replace","path":"/spec/template/spec/containers/0/securityContext/capabilities/add","value":%s}]`, list))
	c.eventually("the agent is replaced", func() error {
		now := c.pods(system, "k8s-app=istio-cni-node")
		if len(now) != 1 || now[0].Name == old.Name || now[0].Status.StartTime == nil {
			return errors.New("it is not")
		}
		return nil
	})
}

// useless says why the agent does its work: it runs, and has captured a pod that runs already.
func (c *cluster) useless(without corev1.Capability) error {
	c.kubectl("label", "namespace", plain, "istio.io/dataplane-mode=ambient", "--overwrite")
	agents := c.pods(system, "k8s-app=istio-cni-node")
	if len(agents) == 1 && restarts(agents[0]) > 0 {
		logs, err := c.in("node1", "kubectl", "-n", system, "logs", agents[0].Name, "--previous", "--tail=1")
		c.t.Logf("without %s it ends: %s", without, strings.TrimSpace(logs))
		return err
	}
	events := c.kubectl("-n", plain, "get", "events", "--field-selector", "reason=EnrollFailed", "-o", "jsonpath={.items[*].message}")
	if events != "" {
		c.t.Logf("without %s a pod that runs is not captured: %s", without, events)
		return nil
	}
	return errors.New("it runs, and nothing has failed")
}
