// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/metrics"
	"github.com/redirector-dataplane/redirector/pkg/zds"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

func TestEachCounterIsOneSeries(t *testing.T) {
	seen := map[string]string{}
	new(maps.Counters).Each(func(counter string, _ uint64) {
		name, labels := metrics.SeriesOf(counter)
		if name == "" {
			t.Errorf("counter %s is not exported: give it a series in pkg/metrics/families.go", counter)
			return
		}
		series := name + strings.Join(labels, ",")
		if other := seen[series]; other != "" {
			t.Errorf("%s and %s are the same series %s", counter, other, series)
		}
		seen[series] = counter
	})
	if name, _ := metrics.SeriesOf("nonsense"); name != "" {
		t.Errorf("nonsense is exported as %s", name)
	}
}

// agentWithPods returns the metrics of an agent with pods that no proxy runs.
func agentWithPods(t *testing.T, opts metrics.Options, names ...string) (*metrics.Metrics, *agent.Agent) {
	t.Helper()
	b := bed.ForTest(t, bed.Options{})
	n := agent.Start(t, b, nil)
	m := metrics.New(opts)
	if err := m.Watch(n.Enroller); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		pod, err := b.Pod(name, bed.PodOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
			t.Fatal(err)
		}
	}
	return m, n
}

func TestPromlintFindsNothing(t *testing.T) {
	m, _ := agentWithPods(t, metrics.Options{PerPod: true}, "a")
	m.ObserveStep("seal", time.Millisecond)
	problems, err := testutil.GatherAndLint(m.Gatherer())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	for _, f := range metrics.Families() {
		if n, err := testutil.GatherAndCount(m.Gatherer(), f.Name); err != nil || n == 0 {
			t.Errorf("there are %d of %s, %v", n, f.Name, err)
		}
	}
}

func TestMetricsPerPodAreBounded(t *testing.T) {
	m, _ := agentWithPods(t, metrics.Options{PerPod: true, MaxPods: 2}, "c", "a", "b")
	body := scrape(m)
	for name, want := range map[string]bool{"a": true, "b": true, "c": false} {
		if got := strings.Contains(body, `pod_name="`+name+`"`); got != want {
			t.Errorf("pod %s is exported: %v, want %v", name, got, want)
		}
	}
	for _, line := range []string{"redirector_pods_left_out 1\n", `redirector_pods{state="pending"} 3` + "\n"} {
		if !strings.Contains(body, line) {
			t.Errorf("there is no %q in\n%s", line, body)
		}
	}
}

func scrape(m *metrics.Metrics) string {
	recorder := httptest.NewRecorder()
	m.Handler(slog.New(slog.DiscardHandler)).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	return recorder.Body.String()
}

// One map that cannot be read costs the metrics that need it, and it is said that something is missing.
func TestAMapThatCannotBeReadCostsOnlyItsMetrics(t *testing.T) {
	m, n := agentWithPods(t, metrics.Options{}, "a")
	if err := n.Datapath.Maps().RedirectorMaps.DnsBounds.Close(); err != nil {
		t.Fatal(err)
	}
	handler := m.Handler(slog.New(slog.DiscardHandler))
	var body string
	for range 2 { // what has failed is in the next scrape
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
		body = recorder.Body.String()
		if recorder.Code != 200 {
			t.Errorf("it answers %d", recorder.Code)
		}
	}
	if strings.Contains(body, "redirector_map_entries") {
		t.Error("there are numbers of maps of which one could not be read")
	}
	for _, line := range []string{`redirector_pods{state="pending"} 1`, `promhttp_metric_handler_errors_total{cause="gathering"} 1`} {
		if !strings.Contains(body, line+"\n") {
			t.Errorf("there is no %q in\n%s", line, body)
		}
	}
}

func TestDurationsAreExportedByOutcome(t *testing.T) {
	m, _ := agentWithPods(t, metrics.Options{})
	m.ObserveEnrolment(3*time.Millisecond, nil)
	m.ObserveEnrolment(time.Second, errors.New("no room"))
	m.ObserveStep("seal", time.Millisecond)
	m.ObserveReconcile(time.Hour)
	m.ObserveAnswer(zds.RequestAdd, zds.OutcomeLost, 5*time.Second)
	body := scrape(m)
	for _, line := range []string{
		`redirector_enrolment_duration_seconds_sum{result="done"} 0.003`,
		`redirector_enrolment_duration_seconds_bucket{result="done",le="0.0025"} 0`,
		`redirector_enrolment_duration_seconds_bucket{result="done",le="0.005"} 1`,
		`redirector_enrolment_duration_seconds_count{result="failed"} 1`,
		`redirector_enrolment_step_duration_seconds_count{step="seal"} 1`,
		`redirector_reconcile_duration_seconds_sum 3600`,
		`redirector_zds_ack_duration_seconds_sum{outcome="lost",request="add"} 5`,
		`redirector_zds_ack_duration_seconds_count{outcome="acked",request="add"} 0`,
	} {
		if !strings.Contains(body, line+"\n") {
			t.Errorf("there is no %q in\n%s", line, body)
		}
	}
}
