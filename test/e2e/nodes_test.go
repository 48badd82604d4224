// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// TestTwoNodes has what goes from node to node, with the ptp plugin, an entry of istio-cni in the chain of plugins, and Helm.
func TestTwoNodes(t *testing.T) {
	c := start(t, "ptp", "node1", "node2")
	c.chainIstioCNI()
	before := c.look()
	c.prepare()
	for _, part := range []struct {
		name string
		test func(*cluster)
	}{
		{"helm install", helmInstall},
		{"between nodes", betweenNodes},
		{"the kubectl plugin", plugin},
		{"pods with a sidecar are left alone", sidecars},
		{"a node is rebooted", reboot},
		{"the cluster is rebooted", rebootAll},
		{"helm uninstall", func(c *cluster) { helmUninstall(c, before) }},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.test(c.with(t)) }) {
			return
		}
	}
}

// chainIstioCNI puts an entry like istio-cni's at the end of each node's configuration. Its plugin is one that does nothing.
func (c *cluster) chainIstioCNI() {
	c.t.Helper()
	for _, node := range c.nodes {
		c.must(node, "sh", "-c", `
			cp /opt/cni/bin/tuning /opt/cni/bin/istio-cni
			sed -i 's/\(.*portMappings.*\)\]}/\1,\n {"type":"istio-cni","name":"istio-cni","ambient_enabled":true}]}/' /etc/cni/net.d/10-net.conflist`)
	}
}

func helmInstall(c *cluster) {
	chart, err := filepath.Abs("../../deploy/chart/redirector")
	if err != nil {
		c.t.Fatal(err)
	}
	c.apply(proxyManifest())
	c.helm("install", "redirector", chart, "--namespace", system)
	c.rollout(system, "daemonset/redirector")
	c.rollout(system, "daemonset/ztunnel")
	for _, node := range c.nodes {
		conf := c.must(node, "cat", "/etc/cni/net.d/10-net.conflist")
		if istio, ours := strings.Index(conf, `{"type":"istio-cni"`), strings.Index(conf, `{"type":"redirector"`); istio < 0 || ours < istio {
			c.t.Errorf("the configuration of %s is %s", node, conf)
		}
	}
	if logs := c.kubectl("-n", system, "logs", "daemonset/redirector"); !strings.Contains(logs, "istio-cni") {
		c.t.Errorf("the agent does not warn about istio-cni:\n%s", logs)
	}
}

// onNode is a pod's spec that has it run on a node.
func onNode(node, spec string) string { return "nodeName: " + node + ", " + spec }

func betweenNodes(c *cluster) {
	server := "containers: [" + container("app", httpServer, ready) + "]"
	c.apply(workload("Deployment", shop, "web", 1, onNode("node2", server)) + service(shop, "web", ", type: NodePort") +
		workload("Deployment", shop, "client", 1, onNode("node1", server)) +
		workload("Deployment", plain, "stranger", 1, onNode("node1", server)))
	c.rollout(shop, "deployment/web")
	c.rollout(shop, "deployment/client")
	c.rollout(plain, "deployment/stranger")
	c.wantAnnotation(shop, "app=web", "enabled")
	c.wantAnnotation(shop, "app=client", "enabled")
	c.wantCarried()
}

// wantCarried checks that requests from node1 to the pod web on node2 go by the proxies of both nodes, to its address and through its
// service, and that the server sees the client's address.
func (c *cluster) wantCarried() {
	c.t.Helper()
	web, client, stranger := c.pod(shop, "app=web"), c.pod(shop, "app=client"), c.pod(plain, "app=stranger")
	vip := c.kubectl("-n", shop, "get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
	c.eventually("the service answers", func() error {
		_, err := c.get(stranger, "http://"+vip+"/")
		return err
	})
	for url, port := range map[string]uint16{"http://" + web.Status.PodIP + ":8080/": 8080, "http://" + vip + "/": 80} {
		first, second := len(c.records("node1")), len(c.records("node2"))
		if host, peer := c.mustGet(client, url); host != web.Name || !strings.HasPrefix(peer, client.Status.PodIP+":") {
			c.t.Errorf("%s: %s has answered to %s", url, host, peer)
		}
		if got := proxied(c.records("node1")[first:], client, nodeproxy.Outbound, port); len(got) != 1 {
			c.t.Errorf("%s: the client's proxy has had %+v", url, got)
		}
		if got := proxied(c.records("node2")[second:], web, nodeproxy.Inbound, 8080); len(got) != 1 {
			c.t.Errorf("%s: the server's proxy has had %+v", url, got)
		}
	}
	// Through the port of the node that the pod is not on.
	port := c.kubectl("-n", shop, "get", "service", "web", "-o", "jsonpath={.spec.ports[0].nodePort}")
	second := len(c.records("node2"))
	c.must("node1", "ip", "netns", "exec", "outside", "curl", "-sf", "--max-time", "5", "http://172.18.0.2:"+port+"/")
	if got := proxied(c.records("node2")[second:], web, nodeproxy.Inbound, 8080); len(got) != 1 {
		c.t.Errorf("through the port of the other node the server's proxy has had %+v", got)
	}
}

func sidecars(c *cluster) {
	pod := podManifest(shop, "has-a-sidecar", "nodeName: node2, containers: ["+container("app", firstAct, ready)+"]")
	c.apply(strings.Replace(pod, "labels: {app: has-a-sidecar}", `labels: {app: has-a-sidecar}, annotations: {sidecar.istio.io/status: "{}"}`, 1))
	c.kubectl("-n", shop, "wait", "--for=condition=Ready", "pod/has-a-sidecar", "--timeout=100s")
	got := c.pod(shop, "app=has-a-sidecar")
	if value, ok := got.Annotations[annotation]; ok {
		c.t.Errorf("it has the annotation %q", value)
	}
	for _, r := range c.records("node2") {
		if r.UID == string(got.UID) {
			c.t.Errorf("the proxy has had %+v", r)
		}
	}
	if a, b := c.lookInto(got), c.lookInto(c.pod(plain, "app=stranger")); a != b {
		c.t.Errorf("in its network namespace is\n%s\nand in a plain pod's\n%s", a, b)
	}
}

// reboot takes node2 away and brings it up again, with the same disk.
func reboot(c *cluster) {
	before := c.pod(shop, "app=web")
	c.down("node2")
	c.up("node2")
	c.converges(before)
}

// rebootAll does so with all nodes at once.
func rebootAll(c *cluster) {
	before := c.pod(shop, "app=web")
	c.down()
	c.up()
	c.serveOutside()
	c.converges(before)
}

// converges waits until everything runs that did before a reboot, and is captured.
func (c *cluster) converges(web corev1.Pod) {
	c.t.Helper()
	c.eventually("the server's pod has another sandbox", func() error {
		now := c.pod(shop, "app=web")
		if now.Status.PodIP == web.Status.PodIP && restarts(now) == restarts(web) {
			return fmt.Errorf("it has %s still", now.Status.PodIP)
		}
		return nil
	})
	for _, what := range []string{"daemonset/redirector", "daemonset/ztunnel"} {
		c.rollout(system, what)
	}
	for _, name := range []string{"web", "client"} {
		c.rollout(shop, "deployment/"+name)
		c.wantAnnotation(shop, "app="+name, "enabled")
	}
	c.rollout(plain, "deployment/stranger")
	c.eventually("the proxies serve", func() error {
		for _, pod := range c.pods(system, "app.kubernetes.io/name=redirector") {
			if out := c.kubectl("-n", system, "exec", pod.Name, "--", "/redirector", "status"); !strings.Contains(out, " 0 pending, 0 unnamed") {
				return errors.New(out)
			}
		}
		return nil
	})
	c.wantCarried()
}

func helmUninstall(c *cluster, before map[string]string) {
	stranger, web, client := c.pod(plain, "app=stranger"), c.pod(shop, "app=web"), c.pod(shop, "app=client")
	c.helm("uninstall", "redirector", "--namespace", system)
	c.wantNothingLeft(before, stranger, web, client)
	if out := c.kubectl("get", "all,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings", "-A", "-l", "app.kubernetes.io/name=redirector",
		"-o", "name"); out != "" {
		c.t.Errorf("left in the API: %s", out)
	}
	records := len(c.records())
	c.mustGet(client, "http://"+web.Status.PodIP+":8080/")
	if got := c.records()[records:]; len(got) != 0 {
		c.t.Errorf("the proxies still have %+v", got)
	}
}
