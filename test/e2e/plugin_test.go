// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"path/filepath"
	"strings"

	"github.com/redirector-dataplane/redirector/pkg/api"
)

// redirector runs the kubectl plugin, as kubectl does.
func (c *cluster) redirector(args ...string) (string, error) {
	return c.in("node1", append([]string{
		"env", "KUBECONFIG=" + stateDir + "/pki/admin.kubeconfig", "PATH=" + filepath.Dir(built.plugin) + ":/usr/bin:/bin",
		built.kube, "kubectl", "redirector",
	}, args...)...)
}

// plugin asks about pods on both nodes, from node1.
func plugin(c *cluster) {
	for _, name := range []string{"web", "client"} {
		pod := c.pod(shop, "app="+name)
		// It finds the agent of the pod's node: the other does not know the pod.
		for _, args := range [][]string{{"pod", shop + "/" + pod.Name, "-o", "json"}, {"-n", shop, "pod", pod.Name, "-o", "json"}} {
			out, err := c.redirector(args...)
			if err != nil {
				c.t.Fatal(err)
			}
			var got api.Inspection
			if err := json.Unmarshal([]byte(out), &got); err != nil || got.UID != string(pod.UID) {
				c.t.Errorf("%q says %s, %v", args, out, err)
			}
		}
	}

	out, err := c.redirector("status")
	if err != nil {
		c.t.Error(err)
	}
	for _, node := range c.nodes {
		if !strings.Contains(out, "== "+node+"\n") {
			c.t.Errorf("of all nodes the status is %s", out)
		}
	}
	if out, err := c.redirector("--node=node2", "pods"); err != nil || !strings.Contains(out, "/web-") || strings.Contains(out, "/client-") {
		c.t.Errorf("the pods of node2 are %s, %v", out, err)
	}

	report, err := c.redirector("--node=node2", "bugreport")
	if err != nil {
		c.t.Fatal(err)
	}
	unpacked, err := gzip.NewReader(strings.NewReader(report))
	if err != nil {
		c.t.Fatal(err)
	}
	if header, err := tar.NewReader(unpacked).Next(); err != nil || header.Name != "redirector-bugreport/version.json" {
		c.t.Errorf("the report begins with %+v, %v", header, err)
	}

	for _, refused := range []struct {
		args []string
		want string
	}{
		{[]string{"pod", shop + "/nobody"}, "there is no pod shop/nobody"},
		{[]string{"--node=node3", "status"}, "no agent runs on node node3"},
		{[]string{"monitor"}, "there are 2 agents: name a pod, or a node by --node"},
		{[]string{"pod", plain + "/" + c.pod(plain, "app=stranger").Name}, "no enrolled pod is called"},
	} {
		if out, err := c.redirector(refused.args...); err == nil || !strings.Contains(err.Error(), refused.want) {
			c.t.Errorf("%q: %s, %v", refused.args, out, err)
		}
	}
}
