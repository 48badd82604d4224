// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// places are what a node is looked at for, as commands.
var places = map[string]string{
	"CNI configurations":        `cd /etc/cni/net.d && for f in $(ls -A); do stat -c '%n %a %u:%g' $f; cat $f; done`,
	"CNI plugins":               `ls -A /opt/cni/bin`,
	"BPF file system":           `ls -A /sys/fs/bpf`,
	"files of the agent":        `ls -dA /run/redirector/* /run/redirector 2>/dev/null || true`,
	"the proxy's socket":        `ls -A /run/ztunnel/*.sock 2>/dev/null || true`,
	"addresses of lo":           `ip -o addr show lo | sed 's/valid_lft.*//'`,
	"rules of the node":         `ip rule; ip -6 rule`,
	"routes of the node's lo":   `ip route show table all dev lo; ip -6 route show table all dev lo`,
	"filters on the node":       `for d in $(ls /sys/class/net); do tc filter show dev $d ingress; tc filter show dev $d egress; done 2>/dev/null`,
	"netfilter rules with ours": `nft list ruleset | grep -i -E 'redirector|istio|0x539|0x11' || true`,
}

// attachTypes are those of the programs on the node's cgroup.
var attachTypes = []ebpf.AttachType{
	ebpf.AttachCGroupSockOps, ebpf.AttachCGroupInetSockCreate, ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect,
	ebpf.AttachCGroupSetsockopt, ebpf.AttachCGroupGetsockopt, ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Sendmsg,
	ebpf.AttachCGroupUDP4Recvmsg, ebpf.AttachCGroupUDP6Recvmsg, ebpf.AttachCgroupInet4GetPeername, ebpf.AttachCgroupInet6GetPeername,
}

// look lists what is on all nodes where an agent leaves something.
func (c *cluster) look() map[string]string {
	c.t.Helper()
	seen := map[string]string{}
	for _, node := range c.nodes {
		for place, command := range places {
			seen[node+": "+place] = c.must(node, "sh", "-c", command)
		}
		seen[node+": programs on the cgroup"] = fmt.Sprint(c.attached(node))
	}
	return seen
}

// attached counts the programs on a node's cgroup2 group and on all below it.
func (c *cluster) attached(node string) (n int) {
	c.t.Helper()
	groups, err := os.ReadFile(filepath.Join(stateDir, node, "cgroups"))
	if err != nil {
		c.t.Fatal(err)
	}
	for group := range strings.Lines(string(groups)) {
		group = strings.TrimSpace(group)
		if _, err := os.Stat(group + "/cgroup.controllers"); err != nil {
			continue // of version 1
		}
		err := filepath.WalkDir(group, func(path string, d os.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil // gone meanwhile
			}
			dir, err := os.Open(path)
			if err != nil {
				return nil // likewise
			}
			defer dir.Close()
			for _, attach := range attachTypes {
				found, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: attach})
				if err != nil {
					return fmt.Errorf("%s: %s: %w", path, attach, err)
				}
				n += len(found.Programs)
			}
			return nil
		})
		if err != nil {
			c.t.Fatal(err)
		}
	}
	return n
}

// netns is the name of a pod's network namespace on its node.
func (c *cluster) netns(pod corev1.Pod) string {
	c.t.Helper()
	out := c.must(pod.Spec.NodeName, "sh", "-c",
		`for n in $(ls /run/netns); do ip -n $n -o -4 addr show eth0 2>/dev/null | grep -q ' `+pod.Status.PodIP+`/' && echo $n; done; true`)
	name := strings.TrimSpace(out)
	if name == "" || strings.Contains(name, "\n") {
		c.t.Fatalf("the network namespaces of %s are %q", pod.Name, name)
	}
	return name
}

// lookInto lists what is in a pod's network namespace where an agent leaves something. That of two pods of one kind is the same, if both
// are in the mesh or none is.
func (c *cluster) lookInto(pod corev1.Pod) string {
	c.t.Helper()
	return c.must(pod.Spec.NodeName, "ip", "netns", "exec", c.netns(pod), "sh", "-c", `
		ip rule; ip -6 rule
		ip route show table all dev lo | grep -v -F '`+pod.Status.PodIP+`'
		ip -6 route show table all dev lo
		tc qdisc show; tc filter show dev eth0 egress; tc filter show dev eth0 ingress
		sysctl net.ipv4.tcp_fwmark_accept net.ipv4.fwmark_reflect net.ipv6.fwmark_reflect`)
}

// uninstall takes everything away while pods run, and installs it again.
func uninstall(c *cluster, before map[string]string) {
	stranger, web, set := c.pod(plain, "app=stranger"), c.pod(shop, "app=web"), c.pods(shop, "app=set")[0]
	if cmp.Equal(c.lookInto(stranger), c.lookInto(web)) {
		c.t.Fatal("nothing is seen of a pod's capture")
	}
	during := c.look()
	for _, place := range []string{"CNI configurations", "CNI plugins", "BPF file system", "files of the agent", "the proxy's socket",
		"addresses of lo", "programs on the cgroup"} {
		for _, node := range c.nodes {
			if key := node + ": " + place; during[key] == before[key] {
				c.t.Errorf("nothing is seen of the agent in %s", key)
			}
		}
	}
	load := c.load("load-uninstall")

	c.uninstall()

	c.wantNothingLeft(before, stranger, web, set)

	// Pods go on, and new ones start, as plain ones.
	records := len(c.records())
	c.apply(podManifest(shop, "afterwards", "containers: ["+container("app", firstAct, ready)+"]"))
	c.kubectl("-n", shop, "wait", "--for=condition=Ready", "pod/afterwards", "--timeout=100s")
	afterwards := c.pod(shop, "app=afterwards")
	c.mustGet(web, "http://"+afterwards.Status.PodIP+":8080/")
	c.mustGet(afterwards, "http://"+web.Status.PodIP+":8080/")
	if _, ok := afterwards.Annotations[annotation]; ok {
		c.t.Error("a pod that has started afterwards has the annotation")
	}
	if diff := cmp.Diff(c.lookInto(stranger), c.lookInto(afterwards)); diff != "" {
		c.t.Errorf("a pod that has started afterwards has (- a plain pod's, + its):\n%s", diff)
	}
	for _, r := range c.records()[records:] {
		if r.UID != string(load.UID) {
			c.t.Errorf("the proxy still has %+v", r)
		}
	}
	c.kubectl("-n", shop, "delete", "pod", load.Name, "afterwards")

	install(c)
	c.wantAnnotation(shop, "app=web", "enabled")
	start := len(c.records())
	c.mustGet(web, "http://"+outside+":8080/")
	if got := proxied(c.records()[start:], web, nodeproxy.Outbound, 8080); len(got) != 1 {
		c.t.Errorf("after it was installed again the proxy has had %+v", got)
	}
}

// wantNothingLeft compares the nodes with what they were before, and pods that are not captured any more with a plain one.
func (c *cluster) wantNothingLeft(before map[string]string, plainPod corev1.Pod, pods ...corev1.Pod) {
	c.t.Helper()
	if diff := cmp.Diff(before, c.look()); diff != "" {
		c.t.Errorf("left on the nodes (- before, + after):\n%s", diff)
	}
	for _, pod := range pods {
		if diff := cmp.Diff(c.lookInto(plainPod), c.lookInto(pod)); diff != "" {
			c.t.Errorf("left in %s (- a plain pod's, + its):\n%s", pod.Name, diff)
		}
		now := c.pods(pod.Namespace, "app="+pod.Labels["app"])
		for _, p := range now {
			if value, ok := p.Annotations[annotation]; ok {
				c.t.Errorf("%s has the annotation %q still", p.Name, value)
			}
		}
	}
}

// uninstall is what people do: the DaemonSet first, with its pods, which have their rights until then.
func (c *cluster) uninstall() {
	c.t.Helper()
	text, err := os.ReadFile(manifestFile)
	if err != nil {
		c.t.Fatal(err)
	}
	c.kubectl("-n", system, "delete", "daemonset", "redirector", "--cascade=foreground")
	if _, err := c.pipe("node1", string(text), "kubectl", "delete", "-f", "-", "--ignore-not-found"); err != nil {
		c.t.Fatal(err)
	}
	c.eventually("the agents' pods are gone", func() error {
		if out := c.kubectl("-n", system, "get", "pods", "-l", "app.kubernetes.io/name=redirector", "-o", "name"); out != "" {
			return errors.New(out)
		}
		return nil
	})
}
