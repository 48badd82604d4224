// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
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

// What the agent lacks of Kubernetes or the CNI, a full map and a program that is gone are said with what to do.
func TestWarningsOfTheNode(t *testing.T) {
	for name, c := range map[string]struct {
		status   Status
		reason   Reason
		severity Health
		words    []string
	}{
		"no rights": {
			Status{Conditions: []Condition{{Name: "kubernetes", Problem: "list and watch pods: the API server answers 403 Forbidden: look at the rights of the agent's service account"}}},
			ReasonNotReady, Red, []string{"403 Forbidden", "ClusterRole"},
		},
		"no API server":    {Status{Conditions: []Condition{{Name: "kubernetes", Problem: "connection refused"}}}, ReasonNotReady, Red, []string{"connection refused", "reached"}},
		"no CNI conf":      {Status{Conditions: []Condition{{Name: "dataplane"}, {Name: "cni", Problem: "no configuration in /etc/cni/net.d"}}}, ReasonNotReady, Red, []string{"/etc/cni/net.d", "directories"}},
		"pods not had":     {Status{Conditions: []Condition{{Name: "pods", Problem: "not yet"}}}, ReasonNotReady, Red, []string{"pods is not ready", "log"}},
		"a full map":       {Status{Maps: []MapUsage{{Map: "pods", Entries: 100, Capacity: 100, Pin: "/b/maps/pods"}}}, ReasonMapFull, Red, []string{"pods", "full", "/b/maps/pods"}},
		"nearly full":      {Status{Maps: []MapUsage{{Map: "pods", Entries: 90, Capacity: 100}}}, ReasonMapFull, Yellow, []string{"nearly full", "90 of 100"}},
		"a program is off": {Status{Hooks: []Hook{{Name: "sock_ops"}, {Name: "connect4", Program: "redir_connect4", Problem: "its pin is gone"}}}, ReasonHook, Red, []string{"connect4", "pin", "bpftool"}},
	} {
		t.Run(name, func(t *testing.T) {
			all := warnings(&c.status, nil, nil)
			if len(all) != 1 || all[0].Reason != c.reason || all[0].Severity != c.severity || healthOf(all) != c.severity || next(all) != all[0].Remedy {
				t.Fatalf("the warnings are %+v", all)
			}
			for _, word := range c.words {
				if !strings.Contains(all[0].Message+" -> "+all[0].Remedy, word) {
					t.Errorf("%+v does not say %q", all[0], word)
				}
			}
		})
	}
	evicting := Status{Maps: []MapUsage{{Map: "admitted", Entries: 100, Capacity: 100, Evicts: true}}}
	if all := warnings(&evicting, nil, nil); len(all) > 0 {
		t.Errorf("of a map that gives up entries there is %+v", all)
	}
}

func TestHealthIsTheWorst(t *testing.T) {
	y, r := Warning{Severity: Yellow, Remedy: "first"}, Warning{Severity: Red, Remedy: "now"}
	if healthOf(nil) != Green || healthOf([]Warning{y}) != Yellow || healthOf([]Warning{y, r}) != Red {
		t.Error("it is not")
	}
	if next(nil) != "" || next([]Warning{y}) != "first" || next([]Warning{y, r}) != "now" {
		t.Error("the next step is another")
	}
	sorted := []Warning{y, r}
	sortWarnings(sorted)
	if sorted[0].Severity != Red {
		t.Error("what does not work does not come first")
	}
}

// Of many pods whose names are lost, a few are named.
func TestManyUnnamedPods(t *testing.T) {
	uids := make([]string, 1000)
	all := warnings(&Status{}, nil, uids)
	if len(all) != maxUnnamed+1 || !strings.Contains(all[maxUnnamed].Message, "990") {
		t.Errorf("there are %d warnings, the last %+v", len(all), all[len(all)-1])
	}
}
