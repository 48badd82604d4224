// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	_ "embed"
	"regexp"
	"slices"
	"testing"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

//go:embed watch.go
var watchSource string

//go:embed node.go
var nodeSource string

func TestRepairKindsAreAllThatThereAre(t *testing.T) {
	var declared []enroll.Repair
	for _, found := range regexp.MustCompile(`Repair[A-Za-z]+ +Repair = "([^"]+)"`).FindAllStringSubmatch(watchSource+nodeSource, -1) {
		declared = append(declared, enroll.Repair(found[1]))
	}
	listed := enroll.RepairKinds()
	slices.Sort(declared)
	slices.Sort(listed)
	if len(declared) == 0 || !slices.Equal(declared, listed) {
		t.Errorf("RepairKinds lists %q, declared are %q", listed, declared)
	}
}

func TestTheTotalsKeepWhatPodsHaveCountedThatLeft(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	for _, name := range []string{"a", "b"} {
		pod := newPod(t, b, name, bed.PodOptions{})
		if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
			t.Fatal(err)
		}
		key := bpf.RedirectorNetnsKey{NetnsCookie: pod.Cookie}
		var perCPU []bpf.RedirectorPodCounters
		if err := n.Datapath.Maps().RedirectorMaps.Counters.Lookup(key, &perCPU); err != nil {
			t.Fatal(err)
		}
		for cpu := range perCPU {
			perCPU[cpu].OutboundCaptured = 10
		}
		if err := n.Datapath.Maps().RedirectorMaps.Counters.Put(key, perCPU); err != nil {
			t.Fatal(err)
		}
	}
	want := func(when string, pods int, want maps.Counters) {
		t.Helper()
		got, err := n.Totals()
		if err != nil || got != want {
			t.Errorf("%s the totals are %+v, %v; want %+v", when, got, err, want)
		}
		if enrolled, pending, unnamed, err := n.States(); err != nil || enrolled != 0 || pending != pods || unnamed != 0 {
			t.Errorf("%s there are %d enrolled, %d pending and %d unnamed pods, %v; want %d pending", when, enrolled, pending, unnamed, err, pods)
		}
	}
	both, err := n.Totals()
	if err != nil || both.OutboundCaptured < 20 || both.OutboundCaptured%20 != 0 {
		t.Fatalf("the totals are %+v, %v", both, err)
	}
	want("with both", 2, both)
	for i, uid := range []string{"uid-a", "uid-b"} {
		if err := n.Unenroll(t.Context(), uid); err != nil {
			t.Fatal(err)
		}
		want("without "+uid, 1-i, both)
	}
	n.Stop()

	// A pod that the kernel alone knows.
	again := agent.Start(t, b, nil)
	if err := again.Datapath.Maps().PutPod(12345, maps.Pod{UID: "lost"}); err != nil {
		t.Fatal(err)
	}
	if _, _, unnamed, err := again.States(); err != nil || unnamed != 1 {
		t.Errorf("%d pods are unnamed, %v; want 1", unnamed, err)
	}
	if got, err := again.Totals(); err != nil || got != (maps.Counters{}) {
		t.Errorf("the next agent begins with %+v, %v", got, err)
	}
}
