// SPDX-License-Identifier: Apache-2.0

package app

import (
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// A pod's own word on DNS counts more than the agent's, either way.
func TestDNSCaptureIsTheAgentsOrThePods(t *testing.T) {
	for _, c := range []struct {
		agent, pod []string
		want       bool
	}{
		{want: true},
		{agent: []string{"--dns-capture=false"}, want: false},
		{agent: []string{"--dns-capture=false"}, pod: []string{"--dns-capture"}, want: true},
		{pod: []string{"--dns-capture=false"}, want: false},
	} {
		m := newMachine(t)
		agent := m.agent(c.agent...)
		pod := m.pod("web")
		run(t, nil, m.enrollFlags(pod, c.pod...)...).wantDone(t)
		pinned, err := ebpf.LoadPinnedMap(filepath.Join(m.BPFFS, "maps", bpf.RedirectorMapPods), nil)
		if err != nil {
			t.Fatal(err)
		}
		entries := maps.Maps{RedirectorMaps: bpf.RedirectorMaps{Pods: pinned}}
		if entry, err := entries.Pod(pod.Cookie); err != nil || entry.DNSCapture != c.want {
			t.Errorf("with an agent of %q and a pod of %q DNS is captured: %t, %v; want %t", c.agent, c.pod, entry.DNSCapture, err, c.want)
		}
		if err := pinned.Close(); err != nil {
			t.Error(err)
		}
		m.stop(agent)
	}
}
