// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"fmt"
	"strings"
	"text/template"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

// Markdown is the reference of all events, which docs/events.md has.
func Markdown() string {
	var repairs []map[string]string
	for _, kind := range enroll.RepairKinds() {
		if text := repairTexts[kind]; text != "" {
			repairs = append(repairs, map[string]string{"Kind": string(kind), "Text": fmt.Sprintf(text, exampleTimes)})
		}
	}
	var b strings.Builder
	err := reference().Execute(&b, map[string]any{
		"Incidents": incidents,
		"Repairs":   repairs,
		"Every":     incidentsEvery,
		"Again":     incidentAgain,
		"Rate":      incidentRate,
		"Burst":     incidentBurst,
		"PodBurst":  podBurst,
		"PodEvery":  podEvery,
		"Tries":     quietTries,
		"SayAgain":  sayAgain,
	})
	if err != nil {
		return err.Error() // the template is fixed, and a test reads what it makes
	}
	return b.String()
}

// Annotations are the keys of all that the agent reads or writes of a pod's annotations.
func Annotations() []string {
	all := []string{
		StatusAnnotation, annotationBypassInbound, annotationDNSCapture, annotationSidecar, annotationConfigHash, annotationMirror,
	}
	for _, list := range listAnnotations {
		all = append(all, list.annotation)
	}
	return all
}

// exampleTimes stands for how often something has happened.
const exampleTimes = "N times"

// reference is made when it is needed, which no agent does.
func reference() *template.Template {
	return template.Must(template.New("events").Funcs(template.FuncMap{
		"counter": func(i incident) string { return i.counter },
		"reason":  func(i incident) string { return string(i.reason) },
		"text":    func(i incident) string { return fmt.Sprintf(i.text, exampleTimes) },
		"short": func(d fmt.Stringer) string {
			return strings.NewReplacer("m0s", " minutes", "s", " seconds").Replace(d.String())
		},
	}).Parse(`<!-- Made from pkg/podwatch by "go test ./docs -update". Do not edit. -->

# Events

What the agent says of pods in Kubernetes' events, besides its log and its [metrics](metrics.md). All are warnings, of the component
` + "`redirector`" + `; a pod without any is as it should be:

    kubectl describe pod cart
    kubectl get events -A --field-selector source=redirector

| reason | means | what to do |
|---|---|---|
| ` + "`EnrollFailed`" + ` | the pod is not captured, for the reason that is said; it is tried again, and was {{.Tries}} times | what the event says |
| ` + "`ProxyPending`" + ` | the pod is captured, and no node proxy runs for it: nothing of it passes | start the node proxy, or see its log |
| ` + "`CapturedLate`" + ` | the pod ran before it was captured: connections that it made until then go past the proxy | restart the pod if that matters |
| ` + "`BadAnnotation`" + ` | one of the pod's annotations makes no sense, and is ignored | write it as the event says |
| ` + "`BypassBlocked`" + ` | something in the pod, or a peer of it, has tried to get past the node proxy, in vain | see below |
| ` + "`SteeringFailed`" + ` | something of the pod could not be sent to the node proxy, and did not pass | see below |
| ` + "`Repaired`" + ` | something of the pod's capture was not as it should be, and is again; on the node, what all pods share | see below |

What is said of a pod is said again after {{short .SayAgain}} at the earliest, if it is still so. Of one pod there are {{.PodBurst}} events
at most, and one more every {{short .PodEvery}}.

## What the kernel counts

The counters of each pod (` + "`redirector pods -o json`" + `) are read every {{short .Every}}. What they have counted since they were
last said makes one event per counter, the next one {{short .Again}} later at the earliest, with all that has come together by then. What was
counted while no agent ran makes none.

| counter | reason | the event |
|---|---|---|
{{range .Incidents}}| ` + "`{{counter .}}`" + ` | ` + "`{{reason .}}`" + ` | {{text .}} |
{{end}}
## Repairs

The same goes for repairs, by what was repaired (` + "`kind`" + ` in ` + "`redirector_repairs_total`" + `).

| kind | the event |
|---|---|
{{range .Repairs}}| ` + "`{{.Kind}}`" + ` | {{.Text}} |
{{end}}
The last is on the node, where ` + "`kubectl describe node`" + ` shows it. Of a pod whose network namespace is gone, or was made anew by the
runtime, there is none.

Events on what the kernel counts and on repairs are made at {{.Rate}} per second for all pods of the node, after {{.Burst}} at once; the
others wait, and nothing is lost of the numbers.
`))
}
