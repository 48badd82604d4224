// SPDX-License-Identifier: Apache-2.0

package app

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

//nolint:dupword // "none" in two columns
func TestPodsTable(t *testing.T) {
	pods := []enroll.Pod{
		{
			Spec:      enroll.Spec{UID: "2f1c", Namespace: "shop", Name: "web-0", NetNS: "/run/netns/a"},
			State:     enroll.StateEnrolled,
			Since:     now.Add(-26*time.Hour - 5*time.Minute),
			Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.7"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("fd00::7"), netip.MustParseAddr("fe80::7")},
			Listeners: map[uint16]int{15008: 1, 15001: 2, 15006: 1},
			Counters: maps.Counters{
				OutboundCaptured: 12, OutboundSteered: 13, InboundSteered: 5, HboneSteered: 2, ProxyToApp: 4, ProbesAdmitted: 6, DnsCaptured: 8,
				OutboundNoListener: 1, InboundNoListener: 2, HboneNoListener: 3, SealDropped: 4, SealDroppedSynack: 5, LoopsDropped: 6,
				StraysDropped: 7, DnsRefused: 8, CaptureFailed: 100,
			},
			DNSCapture: true, BypassInbound: true,
		},
		{
			Spec:      enroll.Spec{UID: "b", Namespace: "shop", Name: "web-1", NetNS: "/run/netns/b"},
			State:     enroll.StatePending,
			Since:     now.Add(-95 * time.Second),
			Listeners: map[uint16]int{15001: 0},
		},
	}
	for name, c := range map[string]struct {
		style style
		wide  bool
		want  string
	}{
		"plain": {want: `
NAMESPACE/NAME  STATE     SINCE  ADDRESSES         SETTINGS            CAPTURED  IN  PROBE  DNS  DROPPED
shop/web-0      enrolled  1d2h   10.0.0.7,fd00::7  dns,bypass-inbound  12        7   6      8    36
shop/web-1      pending   1m35s  none              none                0         0   0      0    0
`},
		"wide": {wide: true, want: `
NAMESPACE/NAME  STATE     SINCE  ADDRESSES         SETTINGS            CAPTURED  IN  PROBE  DNS  DROPPED  UID   PROXY LISTENERS    TO-APP  NETNS
shop/web-0      enrolled  1d2h   10.0.0.7,fd00::7  dns,bypass-inbound  12        7   6      8    36       2f1c  15001,15006,15008  4       /run/netns/a
shop/web-1      pending   1m35s  none              none                0         0   0      0    0        b     none               0       /run/netns/b
`},
		"on a terminal": {style: style{on: true}, want: "\n" +
			"NAMESPACE/NAME  \x1b[39mSTATE\x1b[0m     SINCE  ADDRESSES         SETTINGS            CAPTURED  IN  PROBE  DNS  DROPPED\n" +
			"shop/web-0      \x1b[32menrolled\x1b[0m  1d2h   10.0.0.7,fd00::7  dns,bypass-inbound  12        7   6      8    36\n" +
			"shop/web-1      \x1b[31mpending\x1b[0m   1m35s  none              none                0         0   0      0    0\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var got strings.Builder
			if err := writePods(&got, c.style, pods, c.wide, now); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(strings.TrimPrefix(c.want, "\n"), got.String()); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestStatusTable(t *testing.T) {
	status := api.Status{
		Agent: api.Agent{
			Version: "v1.2.3", PID: 4711, Started: now.Add(-time.Hour), Uptime: api.Duration(time.Hour), Kernel: "6.1.0-9",
			RunDir: "/run/redirector", BPFFS: "/sys/fs/bpf/redirector", Cgroup: "/sys/fs/cgroup", ZDSSocket: "/run/z.sock",
		},
		Proxies: []zds.ConnStatus{
			{ID: 1, PID: 100, Since: now.Add(-time.Minute), State: zds.StateReady, Pods: 3, LastError: "add b: no identity"},
			{ID: 2, PID: 101, Since: now.Add(-5 * time.Second), State: zds.StateReady, Newest: true, Pods: 2},
		},
		Pods:          api.PodCounts{Enrolled: 2, Pending: 1, Unnamed: 1},
		Counters:      maps.Counters{OutboundCaptured: 12, SealDropped: 3},
		Repairs:       map[enroll.Repair]uint64{enroll.RepairSeal: 1, enroll.RepairRouting: 2},
		AdmittedFlows: 7,
		Warnings: []api.Warning{
			{Reason: api.ReasonNoProxy, Severity: api.Red, Message: "nobody is there", Remedy: "start one"},
			{Reason: api.ReasonMarkedListeners, Severity: api.Yellow, Pod: "shop/web", UID: "u", Message: "it has a mark", Remedy: "take it off"},
			{Reason: api.ReasonUnnamed, Severity: api.Yellow, UID: "x", Message: "it has no name", Remedy: "give it one"},
		},
		Health: api.Red, Next: "start one", KernelStats: true,
		Features:   []api.Feature{{Name: "links to cgroups", Since: "5.7"}},
		Conditions: []api.Condition{{Name: "dataplane"}, {Name: "cni", Problem: "it is not installed"}},
		Hooks: []api.Hook{
			{Name: "sock_ops", Program: "redir_mark", ID: 7, Link: 8, Runs: 4, RunTime: api.Duration(time.Microsecond), Show: "bpftool link show pinned /b/links/sock_ops"},
			{Name: "seal_pkt", Program: "redir_seal_pkt", ID: 9, Problem: "it is gone", Show: "bpftool prog show id 9"},
		},
		Maps: []api.MapUsage{{Map: "pods", Entries: 3, Capacity: 8192}},
	}
	want := `
status          red
next step       start one
agent           version v1.2.3, pid 4711, up 1h0m
kernel          6.1.0-9, with all 1 features that are needed
run dir         /run/redirector
bpffs           /sys/fs/bpf/redirector
cgroup          /sys/fs/cgroup
zds socket      /run/z.sock
pods            2 enrolled, 1 pending, 1 unnamed
admitted flows  7
dataplane       ready
cni             it is not installed

node proxies: 2
  PID  STATE  PODS  SINCE  GETS NEW PODS  LAST ERROR
  100  ready  3     1m0s   no             add b: no identity
  101  ready  2     5s     yes            none

programs: 2 (runs since the kernel counts them)
  OK   HOOK      PROGRAM         ID  RUNS  PER RUN  SHOW
  yes  sock_ops  redir_mark      7   4     250ns    bpftool link show pinned /b/links/sock_ops
  NO   seal_pkt  redir_seal_pkt  9   0     -        bpftool prog show id 9

maps: 1
  MAP   ENTRIES  ROOM FOR
  pods  3        8192

counters, of all enrolled pods:
`
	var got strings.Builder
	if err := writeStatus(&got, style{}, &status, now); err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(got.String(), "pods:\n")
	if d := cmp.Diff(strings.TrimPrefix(want, "\n"), head+"pods:\n"); d != "" || !ok {
		t.Error(d)
	}
	counters, rest, _ := strings.Cut(rest, "\n\n")
	repairs, warnings, _ := strings.Cut(rest, "\n\n")
	if d := cmp.Diff("repairs, since the agent's start:\n  routing  2\n  seal     1", repairs); d != "" {
		t.Error(d)
	}
	// Which there are is for bpf/redirector.h to say.
	for _, line := range []string{"  outbound_captured     12", "  seal_dropped          3", "  inbound_steered       0"} {
		if !strings.Contains(counters+"\n", line+"\n") {
			t.Errorf("there is no %q in\n%s", line, counters)
		}
	}
	want = `warnings: 3
  red  nobody is there
    -> start one
  yellow  pod shop/web (u): it has a mark
    -> take it off
  yellow  pod x: it has no name
    -> give it one
`
	if d := cmp.Diff(strings.TrimPrefix(want, "\n"), warnings); d != "" {
		t.Error(d)
	}
}

func TestAge(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second:                        "0s",
		0:                                   "0s",
		59*time.Second + 999:                "59s",
		time.Minute:                         "1m0s",
		time.Hour - time.Second:             "59m59s",
		time.Hour + 61*time.Second:          "1h1m",
		24 * time.Hour:                      "1d0h",
		400*24*time.Hour + 90*time.Minute:   "400d1h",
		23*time.Hour + 59*time.Minute + 1e9: "23h59m",
	} {
		if got := age(d); got != want {
			t.Errorf("age(%s) is %q, want %q", d, got, want)
		}
	}
}
