// SPDX-License-Identifier: Apache-2.0

package enroll_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/journal"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// drift are the objects that are not as they should be, by kind and name. Without a proxy there is no listener.
func drift(t *testing.T, a *agent.Agent, uid string) []string {
	t.Helper()
	found, err := a.Inspect(t.Context(), uid)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range found.Drift() {
		if o.Kind != enroll.ObjectListener {
			names = append(names, string(o.Kind)+" "+o.Name)
		}
		if o.Have == "" || o.Have == o.Want || o.Show == "" {
			t.Errorf("what is not as it should be says %+v", o)
		}
	}
	return names
}

func TestInspectNamesWhatIsNotAsItShouldBe(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	a := agent.Start(t, b, nil)
	pod := newPod(t, b, "web", bed.PodOptions{})
	if err := a.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	if names := drift(t, a, "uid-web"); names != nil {
		t.Fatalf("of a pod that was just enrolled these are not as they should be: %q", names)
	}
	m := a.Datapath.Maps()
	// What no event tells of is put back by Reconcile, which does not run here.
	for name, c := range map[string]struct {
		undo func() error
		want string
	}{
		"the entry in pods":     {func() error { return m.DeletePod(pod.Cookie) }, "map entry pods"},
		"the entry in counters": {func() error { return m.DeleteCounters(pod.Cookie) }, "map entry counters"},
		"an own address":        {func() error { return m.DeleteOwnAddr(pod.Cookie, pod.V4) }, "map entry own_addrs " + pod.V4.String()},
		"a stale address": {
			func() error { return m.PutOwnAddr(pod.Cookie, pod.V4.Next(), 2) }, "map entry own_addrs " + pod.V4.Next().String(),
		},
		"a probe target": {func() error { return m.DeleteProbeTarget(pod.V6, "uid-web") }, "map entry probe_targets " + pod.V6.String()},
		"the steer link": {func() error { return a.Datapath.DetachSteer("uid-web") }, "link steer"},
		"an exception": {
			func() error {
				return m.PutException(pod.Cookie, maps.Exception{Kind: maps.ExceptionInboundPort, Value: 80})
			},
			"map entry exceptions, cidrs",
		},
		"a sysctl":         {func() error { return pod.SetSysctl("net.ipv4.tcp_fwmark_accept", "0") }, "sysctl net.ipv4.tcp_fwmark_accept"},
		"a sysctl of IPv6": {func() error { return pod.SetSysctl("net.ipv6.fwmark_reflect", "0") }, "sysctl net.ipv6.fwmark_reflect"},
	} {
		t.Run(name, func(t *testing.T) {
			// An event of the enrolment that comes late may put it right meanwhile.
			eventually(t, c.want+" alone is named", func() bool {
				if err := c.undo(); err != nil {
					t.Fatal(err)
				}
				return slices.Equal(drift(t, a, "uid-web"), []string{c.want})
			})
			if err := a.Unenroll(t.Context(), "uid-web"); err != nil {
				t.Fatal(err)
			}
			// An address that nobody knows of stays, until Reconcile finds it.
			if err := m.DeleteOwnAddr(pod.Cookie, pod.V4.Next()); err != nil {
				t.Fatal(err)
			}
			if err := m.DeleteException(pod.Cookie, maps.Exception{Kind: maps.ExceptionInboundPort, Value: 80}); err != nil {
				t.Fatal(err)
			}
			if err := a.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
				t.Fatal(err)
			}
			if names := drift(t, a, "uid-web"); names != nil {
				t.Errorf("enrolled anew, not as they should be are %q", names)
			}
		})
	}
}

// What netlink tells of is put back at once, and the journal has it.
func TestTheJournalHasWhatWasPutBack(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	a := agent.Start(t, b, nil)
	pod := newPod(t, b, "web", bed.PodOptions{})
	if err := a.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	h, err := pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	rules, err := h.RuleList(unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	removed := slices.ContainsFunc(rules, func(r netlink.Rule) bool { return r.Mark == 0x110 && h.RuleDel(&r) == nil })
	if !removed {
		t.Fatalf("there is no rule of ours in %v", rules)
	}
	eventually(t, "the rule is put back", func() bool { return a.Repairs()[enroll.RepairRouting] > 0 })
	var kinds []string
	found, err := a.Inspect(t.Context(), "uid-web")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range found.Events {
		kinds = append(kinds, strings.TrimSpace(string(e.Kind)+" "+e.What))
		if e.Pod != "default/web" || e.UID != "uid-web" || e.Message == "" || e.Time.IsZero() {
			t.Errorf("an event is %+v", e)
		}
	}
	if want := []string{string(journal.Enrolled), "repaired routing"}; !slices.Equal(kinds, want) {
		t.Errorf("the journal has %q, want %q", kinds, want)
	}
	if err := a.Unenroll(t.Context(), "uid-web"); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Inspect(t.Context(), "uid-web"); !errors.Is(err, enroll.ErrNotEnrolled) {
		t.Errorf("of a pod that has left Inspect says %v", err)
	}
}

// The commands that show an object do show it.
func TestTheCommandsThatShowObjects(t *testing.T) {
	for _, tool := range []string{"bpftool", "nsenter", "ip", "tc", "sysctl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	b := bed.ForTest(t, bed.Options{})
	a := agent.Start(t, b, nil)
	pod := newPod(t, b, "web", bed.PodOptions{})
	if err := a.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	found, err := a.Inspect(t.Context(), "uid-web")
	if err != nil {
		t.Fatal(err)
	}
	shown := map[enroll.ObjectKind][]string{
		enroll.ObjectMapEntry: nil, enroll.ObjectLink: {"netns", "netns_ino"}, enroll.ObjectFilter: {"redir_seal", "direct-action"},
		enroll.ObjectRule: {"0x110/0xffc"}, enroll.ObjectRoute: {"local default dev lo"}, enroll.ObjectSysctl: {"= 1"},
	}
	for _, o := range found.Objects {
		if o.Kind == enroll.ObjectListener {
			continue // without a proxy there is none to show
		}
		out, err := exec.CommandContext(t.Context(), "sh", "-c", o.Show).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v: %s", o.Show, err, out)
		}
		for _, word := range shown[o.Kind] {
			if !strings.Contains(string(out), word) {
				t.Errorf("%s does not show %q: %s", o.Show, word, out)
			}
		}
	}
}

// The commands of docs/bpftool.md work as they are written there, with the names of this machine in the place of the page's.
func TestTheCommandsOfThePage(t *testing.T) {
	for _, tool := range []string{"bpftool", "nsenter", "ip", "tc", "sysctl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed", tool)
		}
	}
	page, err := os.ReadFile("../../docs/bpftool.md")
	if err != nil {
		t.Fatal(err)
	}
	b := bed.ForTest(t, bed.Options{})
	a := agent.Start(t, b, nil)
	pod := newPod(t, b, "web", bed.PodOptions{})
	if err := a.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	info, err := a.Datapath.Hooks()
	if err != nil {
		t.Fatal(err)
	}
	here := strings.NewReplacer("/sys/fs/bpf/redirector", b.BPFFS, "/run/netns/cart", pod.Path, "/UID/", "/uid-web/", "dev eth0", "dev "+pod.Link)
	ran := 0
	for line := range strings.Lines(string(page)) {
		command, isCommand := strings.CutPrefix(line, "    ")
		if !isCommand {
			continue
		}
		command, _, _ = strings.Cut(command, "#")
		command = here.Replace(strings.TrimSpace(command))
		// By name there may be programs of another dataplane on this machine.
		for _, h := range info {
			command = strings.ReplaceAll(command, "name "+h.Program, fmt.Sprintf("id %d", h.ID))
		}
		out, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput()
		empty := strings.Contains(command, "/listeners") || strings.Contains(command, "/admitted") ||
			strings.Contains(command, "/exceptions") || strings.Contains(command, "/cidrs")
		if err != nil || len(out) == 0 && !empty {
			t.Errorf("%s: %v: %s", command, err, out)
		}
		ran++
	}
	if ran < 15 {
		t.Errorf("of the page %d commands were run", ran)
	}
}
