// SPDX-License-Identifier: Apache-2.0

// Package deploy checks what is deployed beside the agent against what the agent exports.
package deploy

import (
	"embed"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v2"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
	bpfmaps "github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/metrics"
)

//go:embed grafana alerts
var files embed.FS

// exported says what an agent exports: of each metric its labels, nil if they are not known, and of each label the values, nil
// if they may be any.
func exported(t *testing.T) map[string]map[string][]string {
	t.Helper()
	all := map[string]map[string][]string{}
	for _, f := range metrics.Families() {
		labels := map[string][]string{}
		for _, label := range f.Labels {
			labels[label] = nil
		}
		all[f.Name] = labels
		if f.Type == metrics.Histogram {
			all[f.Name+"_count"], all[f.Name+"_sum"] = labels, labels
			all[f.Name+"_bucket"] = maps.Clone(labels)
			all[f.Name+"_bucket"]["le"] = nil
			delete(all, f.Name)
		}
	}
	new(bpfmaps.Counters).Each(func(counter string, _ uint64) {
		name, labels := metrics.SeriesOf(counter)
		for i := 0; i < len(labels); i += 2 {
			for _, family := range []string{name, strings.Replace(name, "redirector_", "redirector_pod_", 1)} {
				all[family][labels[i]] = append(all[family][labels[i]], labels[i+1])
			}
		}
	})
	m := metrics.New(metrics.Options{})
	m.Handler(slog.New(slog.DiscardHandler))
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "redirector_") {
			continue
		}
		all[f.GetName()] = nil
	}
	// What Prometheus says itself.
	all["up"] = map[string][]string{}
	return all
}

// ofTheTarget are labels that Prometheus puts on everything that it scrapes.
var ofTheTarget = []string{"instance", "job"}

var (
	word     = regexp.MustCompile(`^[a-zA-Z_:][a-zA-Z0-9_:]*`)
	number   = regexp.MustCompile(`^[0-9.]+`)
	matcher  = regexp.MustCompile(`([a-zA-Z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	call     = regexp.MustCompile(`^(\(|(by|without)\b)`) // what follows a function's or an aggregation's name
	grouping = []string{"by", "without", "on", "ignoring", "group_left", "group_right"}
	operator = []string{"and", "or", "unless", "bool", "offset"}
)

// check says what is wrong with a PromQL expression: metrics, labels or values that no agent exports. It reads as much of the
// language as is used here.
func check(expr string, exported map[string]map[string][]string) (problems []string) {
	var labels, grouped []string
	known := slices.Clone(ofTheTarget)
	unknown := false // a metric whose labels are not known
	metric := ""
	for rest := expr; rest != ""; {
		switch name := word.FindString(rest); {
		case name != "":
			rest = strings.TrimSpace(rest[len(name):])
			switch {
			case slices.Contains(grouping, name):
				list, after, _ := strings.Cut(strings.TrimPrefix(rest, "("), ")")
				for label := range strings.SplitSeq(list, ",") {
					grouped = append(grouped, strings.TrimSpace(label))
				}
				rest = after
			case slices.Contains(operator, name), call.MatchString(rest):
			default:
				metric = name
				of, ok := exported[name]
				if !ok {
					problems = append(problems, fmt.Sprintf("metric %s is not exported", name))
				}
				unknown = unknown || of == nil
				labels = slices.Collect(maps.Keys(of))
				known = append(known, labels...)
			}
		case rest[0] == '{':
			selector, after, _ := strings.Cut(rest[1:], "}")
			for _, m := range matcher.FindAllStringSubmatch(selector, -1) {
				problems = append(problems, checkMatcher(metric, m[1], m[3], exported)...)
			}
			rest = after
		case rest[0] == '[':
			_, rest, _ = strings.Cut(rest, "]")
		case number.MatchString(rest):
			rest = rest[len(number.FindString(rest)):]
		default:
			rest = rest[1:]
		}
	}
	for _, label := range grouped {
		if !unknown && !slices.Contains(known, label) {
			problems = append(problems, fmt.Sprintf("label %s is on none of the metrics", label))
		}
	}
	return problems
}

func checkMatcher(metric, label, values string, exported map[string]map[string][]string) (problems []string) {
	of, ok := exported[metric]
	if !ok || of == nil || slices.Contains(ofTheTarget, label) {
		return nil
	}
	known, ok := of[label]
	if !ok {
		return []string{fmt.Sprintf("metric %s has no label %s", metric, label)}
	}
	for value := range strings.SplitSeq(values, "|") {
		if known != nil && !slices.Contains(known, value) {
			problems = append(problems, fmt.Sprintf("label %s of metric %s is never %q", label, metric, value))
		}
	}
	return problems
}

// expressions are those of the dashboard and of the alert rules, by where they are.
func expressions(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	text, err := files.ReadFile("grafana/redirector.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard any
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	panels := 0
	var walk func(where string, node any)
	walk = func(where string, node any) {
		switch node := node.(type) {
		case map[string]any:
			if title, ok := node["title"].(string); ok {
				where += " > " + title
			}
			if expr, ok := node["expr"].(string); ok {
				all[fmt.Sprintf("%s %v", where, node["refId"])] = expr
				panels++
			}
			if definition, ok := node["definition"].(string); ok {
				all[where+" variable"] = strings.TrimSuffix(strings.TrimPrefix(definition, "label_values("), ", instance)")
			}
			for _, key := range slices.Sorted(maps.Keys(node)) {
				walk(where, node[key])
			}
		case []any:
			for _, one := range node {
				walk(where, one)
			}
		}
	}
	walk("dashboard", dashboard)

	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Expr        string
				Annotations map[string]string
			}
		}
	}
	if text, err = files.ReadFile("alerts/redirector.yaml"); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &rules); err != nil {
		t.Fatal(err)
	}
	alerts := 0
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			all["alert "+rule.Alert] = rule.Expr
			alerts++
			if rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
				t.Errorf("alert %s does not say what is so, and what to do", rule.Alert)
			}
		}
	}
	if panels == 0 || alerts == 0 {
		t.Fatalf("there are %d queries and %d alerts", panels, alerts)
	}
	return all
}

func TestDashboardsAndAlertsNameOnlyWhatIsExported(t *testing.T) {
	all := exported(t)
	for where, expr := range expressions(t) {
		for _, problem := range check(expr, all) {
			t.Errorf("%s: %s: %s", where, problem, expr)
		}
	}
}

// The other way round: what is in no panel is seen by nobody.
func TestTheDashboardShowsAllMetrics(t *testing.T) {
	var queries strings.Builder
	for where, expr := range expressions(t) {
		if strings.HasPrefix(where, "dashboard") {
			queries.WriteString(expr + "\n")
		}
	}
	// The same as redirector_proxies; and those per pod that are of use for one pod only.
	notShown := []string{
		"ztunnel_connected", "redirector_pods_left_out", "redirector_pod_steered_syns_total", "redirector_pod_dns_queries_total",
		"redirector_pod_excluded_syns_total", "redirector_pod_proxy_listeners_total", "redirector_pod_app_listeners_total",
	}
	for _, f := range metrics.Families() {
		shown := regexp.MustCompile(`\b` + f.Name + `(_bucket|_count|_sum)?\b`).MatchString(queries.String())
		if shown == slices.Contains(notShown, f.Name) {
			t.Errorf("metric %s is shown: %v", f.Name, shown)
		}
	}
}

func TestWhatIsNotExportedIsFound(t *testing.T) {
	all := exported(t)
	for expr, want := range map[string]string{
		`sum(redirector_nonsense) > 0`:                                           "metric redirector_nonsense is not exported",
		`redirector_enrolment_duration_seconds`:                                  "is not exported",
		`rate(redirector_pods_count[5m])`:                                        "is not exported",
		`redirector_pods{status="enrolled"}`:                                     "has no label status",
		`sum by (pod) (redirector_pods)`:                                         "label pod is on none",
		`redirector_connections_total{direction="sideways"}`:                     `never "sideways"`,
		`redirector_dropped_packets_total{reason=~"seal|sael"}`:                  `never "sael"`,
		`up and on (instance) process_nonsense_total`:                            "process_nonsense_total",
		`histogram_quantile(0.9, redirector_reconcile_duration_seconds_buckets)`: "is not exported",
	} {
		if problems := check(expr, all); len(problems) != 1 || !strings.Contains(problems[0], want) {
			t.Errorf("%s: found %q, want %q", expr, problems, want)
		}
	}
}

// Prometheus's own tool judges the syntax of rules and of the dashboard's queries, and runs the rules' tests.
func TestPromtoolAcceptsRulesAndQueries(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed: it is in Debian's package prometheus")
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, files); err != nil {
		t.Fatal(err)
	}
	// The dashboard's queries as rules.
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	i := 0
	for where, expr := range expressions(t) {
		if strings.HasPrefix(where, "dashboard") {
			i++
			fmt.Fprintf(&rules, "  - record: dashboard_%d\n    expr: %q\n", i, strings.ReplaceAll(expr, "$__rate_interval", "1m"))
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "dashboard.yaml"), []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"check", "rules", "alerts/redirector.yaml", "dashboard.yaml"},
		{"test", "rules", "alerts/redirector_test.yaml"},
	} {
		cmd := exec.CommandContext(t.Context(), promtool, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// manifests are what the chart renders by default and with all options.
var manifests = []string{"redirector.yaml", "../test/chart/testdata/everything.yaml"}

func TestTheAgentKnowsTheFlagsOfTheManifests(t *testing.T) {
	for _, path := range manifests {
		args := agentArgs(t, path)
		var out, errs strings.Builder
		env := app.Env{Stdout: &out, Stderr: &errs, Getenv: func(string) string { return "" }}
		if code := app.Main(t.Context(), append(args, "--help"), env); code != 0 || !strings.Contains(out.String(), "redirector agent [flags]") {
			t.Errorf("%s: redirector %s: %d, %s", path, strings.Join(args, " "), code, errs.String())
		}
		if app.Main(t.Context(), append(args, "--nonsense", "--help"), env) == 0 {
			t.Error("a flag that there is not passes")
		}
	}
}

// agentArgs are the arguments of the agent's container.
func agentArgs(t *testing.T, path string) []string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var ds struct {
			Kind string
			Spec struct {
				Template struct {
					Spec struct{ Containers []struct{ Args []string } }
				}
			}
		}
		if err := yaml.Unmarshal([]byte(document), &ds); err != nil {
			t.Fatal(err)
		}
		if ds.Kind == "DaemonSet" {
			return ds.Spec.Template.Spec.Containers[0].Args
		}
	}
	t.Fatalf("%s has no DaemonSet", path)
	return nil
}
