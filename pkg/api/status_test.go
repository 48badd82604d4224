// SPDX-License-Identifier: Apache-2.0

package api

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

func TestWarnings(t *testing.T) {
	all := map[uint16]int{maps.PortOutbound: 1, maps.PortInbound: 1, maps.PortHBONE: 1}
	ready := []zds.ConnStatus{{State: zds.StateHello}, {State: zds.StateReady}}
	for name, c := range map[string]struct {
		pod     enroll.Pod
		proxies []zds.ConnStatus
		unnamed []string
		want    []Reason
	}{
		"all is well":                {pod: enroll.Pod{State: enroll.StateEnrolled, Listeners: all}, proxies: ready},
		"pending without a proxy":    {pod: enroll.Pod{State: enroll.StatePending}, want: []Reason{ReasonNoProxy}},
		"a proxy that is not ready":  {pod: enroll.Pod{State: enroll.StatePending}, proxies: ready[:1], want: []Reason{ReasonNoProxy}},
		"pending with a proxy":       {pod: enroll.Pod{State: enroll.StatePending}, proxies: ready, want: []Reason{ReasonPending}},
		"one port without listener":  {pod: enroll.Pod{State: enroll.StateEnrolled, Listeners: map[uint16]int{15001: 1, 15006: 2}}, proxies: ready, want: []Reason{ReasonNoListener}},
		"an app with a mark":         {pod: enroll.Pod{State: enroll.StateEnrolled, Listeners: all, Counters: maps.Counters{MarkedListeners: 1}}, proxies: ready, want: []Reason{ReasonMarkedListeners}},
		"a listener that is no good": {pod: enroll.Pod{State: enroll.StateEnrolled, Listeners: all, Counters: maps.Counters{ListenersRejected: 2}}, proxies: ready, want: []Reason{ReasonListenersRejected}},
		"what cannot be captured":    {pod: enroll.Pod{State: enroll.StateEnrolled, Listeners: all, Counters: maps.Counters{CaptureFailed: 3}}, proxies: ready, want: []Reason{ReasonCaptureFailed}},
		"what has passed":            {pod: enroll.Pod{State: enroll.StateEnrolled, Listeners: all, Counters: maps.Counters{OutboundCaptured: 9, SealDropped: 1}}, proxies: ready},
		"a pod without a name":       {pod: enroll.Pod{State: enroll.StateEnrolled, Listeners: all}, proxies: ready, unnamed: []string{"u"}, want: []Reason{ReasonUnnamed}},
	} {
		t.Run(name, func(t *testing.T) {
			status := Status{Proxies: c.proxies}
			if c.pod.State == enroll.StatePending {
				status.Pods.Pending = 1
			}
			var got []Reason
			for _, w := range warnings(&status, []enroll.Pod{c.pod}, c.unnamed) {
				got = append(got, w.Reason)
				if w.Message == "" || w.Remedy == "" {
					t.Errorf("%+v does not say what is so and what to do", w)
				}
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}
