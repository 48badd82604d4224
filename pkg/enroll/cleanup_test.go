// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

func TestCleanupLeavesThePodsOfAnotherDataplaneAlone(t *testing.T) {
	type node struct {
		bed    *bed.Bed
		agent  *agent.Agent
		pod    *bed.NS
		before string
	}
	var nodes [2]node
	for i := range nodes {
		b := bed.ForTest(t, bed.Options{})
		pod := newPod(t, b, "pod", bed.PodOptions{})
		nodes[i] = node{b, agent.Start(t, b, nil), pod, snapshot(t, pod)}
		if err := nodes[i].agent.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
			t.Fatal(err)
		}
	}
	ours, others := nodes[0], nodes[1]
	enrolled := snapshot(t, others.pod)
	ours.agent.Stop()

	if err := enroll.Cleanup(ours.bed.BPFFS, filepath.Join(ours.bed.RunDir, "pods")); err != nil {
		t.Fatal(err)
	}
	diff(t, ours.before, snapshot(t, ours.pod))
	diff(t, enrolled, snapshot(t, others.pod))

	// With the pins gone, nothing but the other dataplane's being there says whose the namespaces are.
	if err := enroll.Cleanup(ours.bed.BPFFS, filepath.Join(ours.bed.RunDir, "pods")); err != nil {
		t.Fatal(err)
	}
	diff(t, enrolled, snapshot(t, others.pod))
}

func TestCleanupFindsWhatAnAgentDidBeforeItNotedThePod(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	another := agent.Start(t, bed.ForTest(t, bed.Options{}), nil)
	defer another.Stop()
	pod := newPod(t, b, "pod", bed.PodOptions{})
	n := agent.Start(t, b, nil)
	if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	// As if it had died just before. Which sysctls it had set is noted in the same entry, so they stay as they are.
	if err := n.Datapath.Maps().DeletePod(pod.Cookie); err != nil {
		t.Fatal(err)
	}
	n.Stop()
	if err := enroll.Cleanup(b.BPFFS, filepath.Join(b.RunDir, "pods")); err != nil {
		t.Fatal(err)
	}
	for _, sysctl := range []string{"net.ipv4.tcp_fwmark_accept", "net.ipv4.fwmark_reflect", "net.ipv6.fwmark_reflect"} {
		if err := pod.SetSysctl(sysctl, "0"); err != nil {
			t.Fatal(err)
		}
	}
	fresh := newPod(t, b, "fresh", bed.PodOptions{})
	for _, what := range []string{"rule", "qdisc", "filter", "netns", "route"} {
		if got, want := count(snapshot(t, pod), what), count(snapshot(t, fresh), what); got != want {
			t.Errorf("the pod has %d lines about %s, one that was never enrolled %d", got, what, want)
		}
	}
}

func TestCleanupRefusesADirectoryThatIsNotOurs(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	for _, dir := range []string{filepath.Join(t.TempDir(), "plain"), filepath.Join(filepath.Dir(b.BPFFS), "others")} {
		file := filepath.Join(dir, "keep")
		if err := os.MkdirAll(file, 0o700); err != nil { // a bpffs holds no plain files
			t.Fatal(err)
		}
		if err := enroll.Cleanup(dir, t.TempDir()); err == nil {
			t.Errorf("cleanup of %s went well", dir)
		}
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

func count(snapshot, what string) int {
	n := 0
	for line := range strings.Lines(snapshot) {
		if strings.HasPrefix(line, what+" ") {
			n++
		}
	}
	return n
}
