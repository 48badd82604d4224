// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// notDatapath are the steps of an enrolment that put nothing into the kernel.
var notDatapath = []string{"state file", "proxy"}

// BenchmarkEnrol enrols one pod and takes it out again. It reports the median of the datapath part of an enrolment (all
// that capture needs: without the state file and without the proxy) and of each step, in microseconds. The steer program is
// loaded beside the other steps: "steer" is the time that is left to wait for it, and to attach it.
func BenchmarkEnrol(b *testing.B) {
	bd := bed.ForTest(b, bed.Options{})
	steps := map[string][]time.Duration{}
	var datapath []time.Duration
	var sum time.Duration
	var order []string
	n := agent.Start(b, bd, func(step string, took time.Duration) {
		if steps[step] == nil {
			order = append(order, step)
		}
		steps[step] = append(steps[step], took)
		if !slices.Contains(notDatapath, step) {
			sum += took
		}
	})
	// On a node there are other pods. The first qdisc of all, and the last to go, make the kernel rewrite code of its own.
	if err := n.Enroll(b.Context(), agent.Spec(newPod(b, bd, "other", bed.PodOptions{})), false); err != nil {
		b.Fatal(err)
	}
	clear(steps)
	order = nil
	pod := newPod(b, bd, "pod", bed.PodOptions{})
	spec := agent.Spec(pod)
	for b.Loop() {
		sum = 0
		if err := n.Enroll(b.Context(), spec, false); err != nil {
			b.Fatal(err)
		}
		datapath = append(datapath, sum)
		b.StopTimer()
		if err := n.Unenroll(b.Context(), spec.UID); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	median := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2].Nanoseconds()) / 1000
	}
	b.ReportMetric(median(datapath), "datapath-p50-µs")
	b.ReportMetric(float64(datapath[len(datapath)*99/100].Nanoseconds())/1000, "datapath-p99-µs")
	for _, step := range order {
		b.ReportMetric(median(steps[step]), strings.ReplaceAll(step, " ", "-")+"-p50-µs")
	}
}
