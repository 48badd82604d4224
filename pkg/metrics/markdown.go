// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"slices"
	"strings"
	"text/template"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/podwatch"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// Markdown is the reference of all metrics, which docs/metrics.md has.
func Markdown() string {
	var b strings.Builder
	err := reference().Execute(&b, map[string]any{
		"MaxPods":   MaxPods,
		"PodLabels": code(podLabels),
		"Families":  families,
		"Series":    series,
		"Repairs":   code(enroll.RepairKinds()),
		"Requests":  code(zds.Requests()),
		"Outcomes":  code(zds.Outcomes()),
		"Reasons":   code(podwatch.Reasons()),
	})
	if err != nil {
		return err.Error() // the template is fixed, and a test reads what it makes
	}
	return b.String()
}

// code lists words as Markdown's code.
func code[T ~string](words []T) string {
	if len(words) == 0 {
		return "none"
	}
	var quoted []string
	for _, w := range words {
		quoted = append(quoted, "`"+string(w)+"`")
	}
	return strings.Join(quoted, ", ")
}

// reference is made when it is needed, which no agent does.
func reference() *template.Template {
	return template.Must(template.New("metrics").Funcs(template.FuncMap{
		"code": code[string],
		"selector": func(s counterSeries) string {
			var pairs []string
			for i, label := range s.family.Labels {
				pairs = append(pairs, fmt.Sprintf("%s=%q", label, s.values[i]))
			}
			return s.family.Name + "{" + strings.Join(pairs, ",") + "}"
		},
		"counter": func(s counterSeries) string { return s.counter },
		"meaning": func(s counterSeries) string { return s.meaning },
		"perPod": func(all []*Family) []*Family {
			return slices.DeleteFunc(slices.Clone(all), func(f *Family) bool { return !f.PerPod })
		},
	}).Parse(`<!-- Made from pkg/metrics by "go test ./docs -update". Do not edit. -->

# Metrics

The agent serves its metrics to Prometheus on the address that ` + "`--metrics-addr`" + ` names ($METRICS_ADDR, or istio-cni's
$MONITORING_PORT), at ` + "`/metrics`" + `. The default is ` + "`:15014`" + `, where istio-cni has its own. With ` + "`--standalone`" + ` there is no default, so
that several agents can run on one machine. ` + "`off`" + ` switches them off. An agent that cannot have the port does not start.

Nothing is collected in between: the numbers of the dataplane are read from its maps during a scrape. Anybody who can reach the
port can read them, so the names of pods are exported only on request.

- Counters begin with zero when the agent starts, and never fall: what pods have counted stays in the sums when they leave. What
  is counted while no agent runs is in ` + "`redirector pods`" + ` and in the metrics per pod, but in no sum.
- When a map cannot be read, the metrics that need it are missing from that scrape, the others are there, and
  ` + "`promhttp_metric_handler_errors_total`" + ` rises.
- ` + "`go_*`, `process_*` and `promhttp_*`" + ` are what the Go runtime, the kernel and the server of the metrics say of the agent.

A dashboard for Grafana is in [deploy/grafana](../deploy/grafana/redirector.json), alert rules for Prometheus are in
[deploy/alerts](../deploy/alerts/redirector.yaml); one of those wants the scrape job to be called ` + "`redirector`" + `.

## All metrics

| metric | type | labels | what it is |
|---|---|---|---|
{{range .Families}}{{if not .PerPod}}| ` + "`{{.Name}}`" + ` | {{.Type}} | {{code .Labels}} | {{.Help}} |
{{end}}{{end}}
## What is counted of connections

Each counter of the dataplane's map ` + "`counters`" + ` is one series. Captured connections and the proxy's own are two halves: an app's
connection to a server is counted once as captured, and once more as the proxy's connection onwards.

| series | in the map | what it counts |
|---|---|---|
{{range .Series}}| ` + "`{{selector .}}`" + ` | ` + "`{{counter .}}`" + ` | {{meaning .}} |
{{end}}
## The values of other labels

- ` + "`redirector_repairs_total`" + `, ` + "`kind`" + `: {{.Repairs}}
- ` + "`redirector_zds_ack_duration_seconds`" + `, ` + "`request`" + `: {{.Requests}}; ` + "`outcome`" + `: {{.Outcomes}}
- ` + "`redirector_events_total`" + `, ` + "`reason`" + `: {{.Reasons}}: see [events.md](events.md)
- ` + "`redirector_enrolment_duration_seconds`" + `, ` + "`result`" + `: ` + "`done`, `failed`" + `

## Per pod

With ` + "`--metrics-per-pod`" + ` ($METRICS_PER_POD) the counters are exported of each pod, too, with labels
{{.PodLabels}} before those above. They are called so because Prometheus puts the agent's own ` + "`namespace` and `pod`" + ` on what it scrapes. At most {{.MaxPods}} pods are
exported, the first by namespace and name; ` + "`redirector_pods_left_out`" + ` says how many are not. The metrics are:

{{range perPod .Families}}- ` + "`{{.Name}}`" + `
{{end}}
## Profiles

With ` + "`--pprof`" + ` ($PPROF) the agent serves Go's profiles on ` + "`pprof.sock`" + ` in its run-dir, which only root can open:

    curl --unix-socket /var/run/redirector/pprof.sock -o heap.pb.gz http://agent/debug/pprof/heap
    go tool pprof heap.pb.gz
`))
}
