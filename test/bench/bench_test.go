// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/test/bed"
)

func TestMain(m *testing.M) {
	if code, ok := playRole(); ok {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

// Every scenario goes where it should with every subject; measure looks.
func TestConnectionsGoWhereTheyShould(t *testing.T) {
	for _, name := range subjectNames {
		t.Run(name, func(t *testing.T) {
			s := forTest(t, name)
			for _, sc := range allScenarios() {
				if _, err := s.measure(sc, 0, 2); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// No more is begun than the rate allows, but for each client's first.
func TestARateIsKept(t *testing.T) {
	const rate, clients, window = 200, 4, 200 * time.Millisecond
	s := forTest(t, direct)
	s.rate = rate
	for _, work := range []string{workConnect, workEcho} {
		sc := scenario{outbound, false, work, clients, small}
		m, err := s.measure(sc, window, 0)
		if err != nil {
			t.Fatal(err)
		}
		if most := rate + clients/window.Seconds(); m.Rate <= 0 || m.Rate > most {
			t.Errorf("%s: %.0f/s, want at most %.0f/s", sc, m.Rate, most)
		}
	}
}

func forTest(t *testing.T, name string) *subject {
	t.Helper()
	s, err := newSubject(t.Context(), name, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// A rule set that has lost a rule is noticed, in both families: what is timed is never something else.
func TestARuleThatIsMissingIsNoticed(t *testing.T) {
	for _, r := range ruleSets {
		s := forTest(t, r.name)
		for _, c := range []struct {
			what     string
			iptables string // the beginning of the rule
			nft      string
			scenario scenario
		}{
			{"outbound", "-A OUTPUT ! -d {{.Loopback}} -p tcp -m mark", "redirect to :15001",
				scenario{outbound, false, workConnect, 1, small}},
			{"inbound", "-A PREROUTING ! -d", "redirect to :15006", scenario{inbound, false, workConnect, 1, small}},
			{"DNS", "-A OUTPUT ! -o lo -p udp", "oifname != \"lo\" udp", scenario{outbound, false, workDNS, 1, dnsQuery}},
			{"probe", "-A PREROUTING -s", "saddr", scenario{probe, false, workConnect, 1, small}},
			{"the mark of the connection", "-A PREROUTING -m mark", "ct mark set", scenario{inbound, false, workConnect, 1, small}},
			{"the mark of answers", "-A OUTPUT -m connmark", "meta mark set ct mark", scenario{inbound, false, workConnect, 1, small}},
		} {
			t.Run(r.name+"/"+c.what, func(t *testing.T) {
				without(t, s, r, c.iptables, c.nft)
				for _, v6 := range []bool{false, true} {
					c.scenario.V6 = v6
					if _, err := s.measure(c.scenario, 0, 1); err == nil {
						t.Errorf("%s was measured without the rule", c.scenario)
					}
				}
			})
		}
	}
}

// without puts the rules of a pod in anew, and leaves out those that contain the text.
func without(t *testing.T, s *subject, r ruleSet, iptables, nft string) {
	t.Helper()
	if err := r.remove(s.Bed, s.pod); err != nil {
		t.Fatal(err)
	}
	if err := addReplyRoutes(s.pod); err != nil {
		t.Fatal(err)
	}
	texts, err := r.texts("pod", s.pod)
	if err != nil {
		t.Fatal(err)
	}
	for i := range texts {
		absent := nft
		if r.native == "" {
			absent = strings.ReplaceAll(iptables, "{{.Loopback}}", []string{"127.0.0.1", "::1"}[i])
		}
		var kept []string
		lines := strings.Split(texts[i], "\n")
		for _, line := range lines {
			if !strings.Contains(line, absent) {
				kept = append(kept, line)
			}
		}
		if len(kept) == len(lines) {
			t.Fatalf("there is no rule %q", absent)
		}
		texts[i] = strings.Join(kept, "\n")
	}
	if err := r.feed(s.Bed, s.pod, texts); err != nil {
		t.Fatal(err)
	}
}

// Without the node's rules a probe has the node's own address and goes to the proxy.
func TestProbesNeedTheNodesRules(t *testing.T) {
	for _, r := range ruleSets {
		t.Run(r.name, func(t *testing.T) {
			s := forTest(t, r.name)
			var err error
			if r.native != "" {
				err = run(s.Bed, s.Node, "delete table inet bench\n", r.native, "-f", "-")
			} else {
				for _, program := range r.restore {
					if err == nil {
						err = run(s.Bed, s.Node, "*nat\nCOMMIT\n", program)
					}
				}
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, v6 := range []bool{false, true} {
				if _, err := s.measure(scenario{probe, v6, workConnect, 1, small}, 0, 1); err == nil {
					t.Errorf("IPv6 %t: a probe was taken for one that the rules have let in", v6)
				}
			}
		})
	}
}

// A rule set leaves nothing in a namespace that it has left: the pod's apps reach whom they like.
func TestRemovedRulesLeaveNothing(t *testing.T) {
	for _, r := range ruleSets {
		t.Run(r.name, func(t *testing.T) {
			b := bed.ForTest(t, bed.Options{})
			pod, err := b.Pod("pod", bed.PodOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for range 2 { // a second time finds nothing in its way
				if err := r.apply(b, pod); err != nil {
					t.Fatal(err)
				}
				if err := r.remove(b, pod); err != nil {
					t.Fatal(err)
				}
			}
			h, err := pod.Handle()
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			found, err := h.RuleList(0)
			if err != nil {
				t.Fatal(err)
			}
			for _, rule := range found {
				if rule.Table == routeTable {
					t.Errorf("a rule is left: %s", rule)
				}
			}
		})
	}
}

func TestEnrolmentsAreTakenApart(t *testing.T) {
	all, err := enrolments(t.Context(), 3)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 1+len(ruleSets) || all[0].Subject != redirector {
		t.Fatalf("enrolments of %+v", all)
	}
	ours := all[0]
	if ours.DatapathP50 <= 0 || ours.DatapathP50 > ours.EnrolP50 {
		t.Errorf("the datapath's part is %v of %v µs", ours.DatapathP50, ours.EnrolP50)
	}
	var names []string
	for _, s := range ours.Steps {
		names = append(names, s.Name)
	}
	for _, step := range []string{"state file", "routing IPv6", "seal", "proxy"} {
		if !strings.Contains(strings.Join(names, ", "), step) {
			t.Errorf("no step %q among %v", step, names)
		}
	}
	for _, e := range all {
		if e.EnrolP50 <= 0 || e.EnrolP99 < e.EnrolP50 || e.RemoveP50 <= 0 {
			t.Errorf("%s: %+v", e.Subject, e)
		}
	}
}

func TestProgramsAreCountedUnderLoad(t *testing.T) {
	before, err := programIDs()
	if err != nil {
		t.Fatal(err)
	}
	s := forTest(t, redirector)
	o := options{scenarios: []scenario{{outbound, false, workConnect, 1, small}}, window: 20 * time.Millisecond}
	programs, err := runTimes([]*subject{s}, o, before)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, p := range programs {
		seen[p.Name] = true
		if p.Runs == 0 || p.Nanoseconds <= 0 || p.Translated <= 0 {
			t.Errorf("%+v", p)
		}
	}
	for _, name := range []string{"redir_mark", "redir_steer", "redir_connect4"} {
		if !seen[name] {
			t.Errorf("%s has not run: %+v", name, programs)
		}
	}
}

// The whole command, in rounds too short to say anything.
func TestARunFromEndToEnd(t *testing.T) {
	o, err := parse([]string{"-rounds=6", "-window=2ms", "-enrolments=1", "-commit=c0ffee"})
	if err != nil {
		t.Fatal(err)
	}
	o.scenarios = quickScenarios()
	o.out, o.history = t.TempDir(), filepath.Join(t.TempDir(), "history.jsonl")
	if err := bench(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal(read(t, o.out, "bench.json"), &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != len(o.scenarios)*len(subjectNames) || len(r.Programs) == 0 || r.Machine.Commit != "c0ffee" {
		t.Errorf("%d rows, %d programs, commit %s", len(r.Rows), len(r.Programs), r.Machine.Commit)
	}
	for _, row := range r.Rows {
		if row.Rate.Median <= 0 || row.CPU.Median <= 0 || row.Rate.Confidence < wanted {
			t.Errorf("%s, %s: %+v", row.Subject, row.Scenario, row)
		}
		if timed := row.Scenario.Work != workStream; timed != (row.P50.Median > 0) {
			t.Errorf("%s, %s: latency %+v", row.Subject, row.Scenario, row.P50)
		}
	}
	for _, name := range []string{"bench.md", "bench.svg"} {
		if len(read(t, o.out, name)) == 0 {
			t.Errorf("%s is empty", name)
		}
	}
}

func TestAJobThatMakesNoSenseIsRefused(t *testing.T) {
	for _, job := range []Job{
		{}, {Work: workEcho, Clients: 1}, {Work: workEcho, Size: 1}, {Work: workEcho, Clients: 1, Size: maxMessage + 1},
	} {
		var r Result
		if err := (client{}).Run(job, &r); err == nil {
			t.Errorf("%+v was done", job)
		}
	}
}
