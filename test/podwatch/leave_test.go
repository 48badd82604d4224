// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// departures are what may be so when an agent is told to stop. Each is on a cluster of its own.
var departures = []struct {
	name string
	// before is done before the agent is told.
	before func(n *node)
	// gone says whether the agent is to clean up, words what its log is to say of that.
	gone  bool
	words string
	// silent says that the API server lets the agent write nothing any more.
	silent bool
}{
	{"the DaemonSet is there, and selects the node", func(n *node) {
		n.CreateNode(map[string]string{"pool": "a", "kubernetes.io/os": "linux"})
		n.SelectNodes(`{"nodeSelector":{"kubernetes.io/os":"linux"},"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":` +
			`{"nodeSelectorTerms":[{"matchExpressions":[{"key":"pool","operator":"In","values":["a","b"]}]}]}}}}`)
	}, false, "is there", false},
	{"its node selector does not select the node any more", func(n *node) {
		n.CreateNode(map[string]string{"pool": "a"})
		n.SelectNodes(`{"nodeSelector":{"pool":"b"}}`)
	}, true, "wants no agent on node bed", false},
	{"its node affinity does not select the node any more", func(n *node) {
		n.CreateNode(map[string]string{"pool": "a"})
		n.SelectNodes(`{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":` +
			`{"nodeSelectorTerms":[{"matchExpressions":[{"key":"pool","operator":"NotIn","values":["a"]}]}]}}}}`)
	}, true, "wants no agent on node bed", false},
	{"what it prefers is not on the node", func(n *node) {
		n.CreateNode(map[string]string{"pool": "a"})
		n.SelectNodes(`{"affinity":{"nodeAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":` +
			`[{"weight":1,"preference":{"matchExpressions":[{"key":"pool","operator":"In","values":["b"]}]}}]}}}`)
	}, false, "is there", false},
	{"it selects nodes, and the node is not known", func(n *node) { n.SelectNodes(`{"nodeSelector":{"pool":"a"}}`) },
		false, "get node bed", false},
	{"it selects nodes, and the agent may not ask for its own", func(n *node) {
		n.CreateNode(map[string]string{"pool": "a"})
		n.SelectNodes(`{"nodeSelector":{"pool":"b"}}`)
		n.Forbid("get", "nodes")
	}, false, "forbidden", false},
	{"the agent was told to clean up each time", func(n *node) {
		n.env = append(n.env, "AMBIENT_DISABLE_SAFE_UPGRADE=true")
		n.stopAgent()
		n.startAgent()
		n.wantReady()
	}, true, "--disable-safe-upgrade", false},
	{"the DaemonSet is being deleted", func(n *node) {
		n.KeepDaemonSet()
		n.DeleteDaemonSet()
	}, true, "is being deleted", false},
	{"the agent may not ask for its DaemonSet", func(n *node) { n.Forbid("get", "daemonsets") }, false, "forbidden", false},
	{"the DaemonSet is gone, and the agent's rights with it", func(n *node) {
		n.DeleteDaemonSet()
		n.ForbidAll()
	}, true, "no rights any more", true},
	{"the agent's rights come back while it asks", func(n *node) {
		n.ForbidAll()
		// In the few seconds in which it asks again.
		n.whileStopping = n.Allow
	}, false, "is there", false},
	{"the DaemonSet is gone, and the agent's account", func(n *node) {
		n.DeleteDaemonSet()
		n.DeleteAccount()
	}, true, "service account is gone", true},
}

// TestAnAgentThatStopsKnowsWhetherItComesBack stops agents.
func TestAnAgentThatStopsKnowsWhetherItComesBack(t *testing.T) {
	for _, d := range departures {
		t.Run(d.name, func(t *testing.T) {
			n := newNode(t)
			n.startAgent()
			n.wantReady()
			p := n.run("mesh")
			n.wantIn(p)
			d.before(n)
			n.stopAgent()
			if out := n.agent.Output(); !strings.Contains(out, d.words) {
				t.Errorf("the agent does not say %q:\n%s", d.words, out)
			}
			if !d.gone {
				if err := n.only(p); err != nil {
					t.Error(err)
				}
				n.wantAnnotation(p, "enabled")
				n.wantConnection(p, true)
				return
			}
			if err := n.captured(p); err == nil {
				t.Error("the pod is still captured")
			}
			if _, err := os.Lstat(n.b.BPFFS); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", n.b.BPFFS, err)
			}
			want := ""
			if d.silent {
				want = "enabled"
			}
			n.wantAnnotation(p, want)
			n.wantConnection(p, false)
		})
	}
}
