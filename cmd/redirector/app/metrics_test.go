// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/metrics"
	"github.com/redirector-dataplane/redirector/test/bed"
)

const metricsAddr = "127.0.0.1:15014"

// get asks a server in a namespace of the bed, or at a Unix socket.
func (m *machine) get(ns *bed.NS, socket, url string) string {
	m.t.Helper()
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			if socket != "" {
				return new(net.Dialer).DialContext(ctx, "unix", socket)
			}
			return ns.Dial(ctx, bed.DialSpec{Remote: netip.MustParseAddrPort(addr)})
		},
	}
	client := &http.Client{Transport: transport, Timeout: 20 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		m.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		m.t.Fatal(err)
	}
	if response.StatusCode != http.StatusOK {
		m.t.Fatalf("%s answers %s: %s", url, response.Status, body)
	}
	return string(body)
}

// scraped is a scrape, by family.
type scraped map[string]*dto.MetricFamily

// scrape reads an agent's metrics as Prometheus does, and has its linter look at them.
func (m *machine) scrape() scraped {
	m.t.Helper()
	body := m.get(m.Node, "", "http://"+metricsAddr+"/metrics")
	parser := expfmt.NewTextParser(model.UTF8Validation)
	all, err := parser.TextToMetricFamilies(strings.NewReader(body))
	if err != nil {
		m.t.Fatalf("%v in\n%s", err, body)
	}
	problems, err := promlint.New(strings.NewReader(body)).Lint()
	if err != nil {
		m.t.Fatal(err)
	}
	for _, p := range problems {
		m.t.Errorf("promlint on %s: %s", p.Metric, p.Text)
	}
	return all
}

// value is that of the one metric of a family that has the labels, given as name and value in turn.
func (s scraped) value(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	metric := s.find(name, labels...)
	switch {
	case metric == nil:
		t.Errorf("there is no %s with labels %q", name, labels)
		return -1
	case metric.Counter != nil:
		return metric.GetCounter().GetValue()
	case metric.Histogram != nil:
		return float64(metric.GetHistogram().GetSampleCount())
	default:
		return metric.GetGauge().GetValue()
	}
}

func (s scraped) find(name string, labels ...string) *dto.Metric {
	for _, metric := range s[name].GetMetric() {
		has := map[string]string{}
		for _, pair := range metric.GetLabel() {
			has[pair.GetName()] = pair.GetValue()
		}
		same := true
		for i := 0; i < len(labels); i += 2 {
			same = same && has[labels[i]] == labels[i+1]
		}
		if same {
			return metric
		}
	}
	return nil
}

func (s scraped) want(t *testing.T, want float64, name string, labels ...string) {
	t.Helper()
	if got := s.value(t, name, labels...); got != want {
		t.Errorf("%s%q is %v, want %v", name, labels, got, want)
	}
}

// wantSameAsPods compares what is exported of the counters with what `redirector pods -o json` says, of each pod and in sum.
// There must be no traffic meanwhile but what comes late of connections that are closed.
func (m *machine) wantSameAsPods() {
	m.t.Helper()
	var s scraped
	var pods []enroll.Pod
	m.eventually("nothing is counted any more", func() bool {
		before := m.pods()
		s, pods = m.scrape(), m.pods()
		return cmp.Equal(before, pods, cmpopts.EquateComparable(netip.Addr{}))
	})
	sums := map[string]float64{}
	for i := range pods {
		pod := &pods[i]
		of := []string{"pod_namespace", pod.Namespace, "pod_name", pod.Name, "pod_uid", pod.UID}
		pod.Counters.Each(func(counter string, value uint64) {
			name, labels := metrics.SeriesOf(counter)
			if name == "" {
				m.t.Fatalf("counter %s is not exported: give it a series in pkg/metrics", counter)
			}
			s.want(m.t, float64(value), strings.Replace(name, "redirector_", "redirector_pod_", 1), append(labels, of...)...)
			sums[counter] += float64(value)
		})
	}
	for counter, sum := range sums {
		name, labels := metrics.SeriesOf(counter)
		s.want(m.t, sum, name, labels...)
	}
}

func TestAScrapeSaysWhatThePodsSay(t *testing.T) {
	m := newMachine(t)
	if err := m.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	web, db := m.pod("web"), m.pod("db")
	outside, inside := m.serveOn(m.Outside), m.serveOn(web)
	agent := m.agent("--metrics-addr", metricsAddr, "--metrics-per-pod")

	s := m.scrape()
	s.want(t, 0, "redirector_pods", "state", "enrolled")
	s.want(t, 0, "redirector_proxies", "state", "ready")
	s.want(t, 0, "redirector_connections_total", "direction", "outbound", "verdict", "captured")
	s.want(t, 0, "redirector_repairs_total", "kind", "seal")
	s.want(t, 1, "redirector_build_info", "version", "v0.0.0-test")

	// Dropped, without a proxy; then captured.
	run(t, nil, m.enrollFlags(web)...).wantDone(t)
	run(t, nil, m.enrollFlags(db)...).wantDone(t)
	if conn, err := m.Outside.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(web.V6, inside.Port), Timeout: time.Second}); err == nil {
		_ = conn.Close()
		t.Error("a connection reached the app without the proxy")
	}
	s = m.scrape()
	s.want(t, 2, "redirector_pods", "state", "pending")
	if s.value(t, "redirector_dropped_packets_total", "direction", "inbound", "reason", "no_listener") == 0 {
		t.Error("what was dropped is not counted")
	}
	proxy := m.proxy()
	m.eventually("both pods are enrolled", func() bool { return m.status().Pods.Enrolled == 2 })
	m.wantConnection(web, web.V4, m.Outside.V4, outside.Port)
	m.wantConnection(web, web.V6, m.Outside.V6, outside.Port)
	m.wantConnection(db, db.V4, m.Outside.V4, outside.Port)
	m.wantConnection(m.Outside, m.Outside.V4, web.V4, inside.Port)

	m.eventually("nothing is under way", func() bool { return m.status().AdmittedFlows == 0 })
	m.wantSameAsPods()
	s = m.scrape()
	s.want(t, 3, "redirector_connections_total", "direction", "outbound", "verdict", "captured")
	s.want(t, 1, "redirector_connections_total", "direction", "inbound", "verdict", "proxied")
	s.want(t, 2, "redirector_pods", "state", "enrolled")
	s.want(t, 0, "redirector_pods", "state", "pending")
	s.want(t, 0, "redirector_pods", "state", "unnamed")
	s.want(t, 0, "redirector_pods_left_out")
	s.want(t, 1, "redirector_proxies", "state", "ready")
	s.want(t, 1, "ztunnel_connected")
	s.want(t, 2, "redirector_map_entries", "map", "pods")
	s.want(t, 2, "redirector_map_entries", "map", "counters")
	s.want(t, 8192, "redirector_map_max_entries", "map", "pods")
	for _, more := range []string{"own_addrs", "listeners", "probe_targets", "cgroups"} {
		if s.value(t, "redirector_map_entries", "map", more) == 0 {
			t.Errorf("map %s is said to be empty", more)
		}
	}
	s.want(t, 0, "redirector_admitted_flows")
	s.want(t, 2, "redirector_enrolment_duration_seconds", "result", "done")
	s.want(t, 2, "redirector_enrolment_step_duration_seconds", "step", "steer")
	s.want(t, 2, "redirector_zds_ack_duration_seconds", "request", "add", "outcome", "acked")
	s.want(t, 1, "redirector_zds_ack_duration_seconds", "request", "snapshot_sent", "outcome", "acked")
	m.eventually("a look at all pods is noted", func() bool { return m.scrape().value(t, "redirector_reconcile_duration_seconds") > 0 })
	tables := map[string]bool{}
	for _, f := range metrics.Families() {
		tables[f.Name] = true
		if s[f.Name] == nil {
			t.Errorf("%s is not exported", f.Name)
		}
	}
	for name := range s {
		if library, _, _ := strings.Cut(name, "_"); !tables[name] && !slices.Contains([]string{"go", "process", "promhttp"}, library) {
			t.Errorf("%s is exported, and in no table", name)
		}
	}

	// A pod that leaves takes nothing from the sums.
	run(t, nil, "unenroll", "--run-dir", m.RunDir, "--uid", "uid-db").wantDone(t)
	s = m.scrape()
	s.want(t, 3, "redirector_connections_total", "direction", "outbound", "verdict", "captured")
	s.want(t, 1, "redirector_zds_ack_duration_seconds", "request", "del", "outcome", "acked")
	if s.find("redirector_pod_connections_total", "pod_name", "db") != nil {
		t.Error("a pod that has left is still exported")
	}
	m.wantConnection(web, web.V4, m.Outside.V4, outside.Port)
	m.scrape().want(t, 4, "redirector_connections_total", "direction", "outbound", "verdict", "captured")

	// The sums of another agent begin anew; those of the pods go on.
	m.stop(agent)
	m.agent("--metrics-addr", "15014", "--metrics-per-pod")
	m.eventually("the proxy has the pod again", func() bool { return m.status().Pods.Enrolled == 1 })
	s = m.scrape()
	s.want(t, 0, "redirector_connections_total", "direction", "outbound", "verdict", "captured")
	s.want(t, 3, "redirector_pod_connections_total", "direction", "outbound", "verdict", "captured", "pod_name", "web")
	m.wantConnection(web, web.V4, m.Outside.V4, outside.Port)
	m.scrape().want(t, 1, "redirector_connections_total", "direction", "outbound", "verdict", "captured")
	m.kill(proxy)
	m.eventually("no proxy is connected", func() bool { return m.scrape().value(t, "ztunnel_connected") == 0 })
}

func TestWithoutMetricsPerPodNoPodIsNamed(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	m.agent("--metrics-addr", metricsAddr)
	run(t, nil, m.enrollFlags(pod)...).wantDone(t)
	body := m.get(m.Node, "", "http://"+metricsAddr+"/metrics")
	if strings.Contains(body, "uid-web") || strings.Contains(body, "redirector_pod_") || !strings.Contains(body, `redirector_pods{state="pending"} 1`) {
		t.Errorf("it exports\n%s", body)
	}
}

// What no event tells of is repaired within seconds, and counted by kind.
func TestARepairIsCounted(t *testing.T) {
	m := newMachine(t)
	pod := m.pod("web")
	m.agent("--metrics-addr", metricsAddr)
	run(t, nil, m.enrollFlags(pod)...).wantDone(t)
	m.scrape().want(t, 0, "redirector_repairs_total", "kind", "sysctl")
	if err := pod.SetSysctl("net.ipv4.tcp_fwmark_accept", "0"); err != nil {
		t.Fatal(err)
	}
	m.eventually("the repair is counted", func() bool { return m.scrape().value(t, "redirector_repairs_total", "kind", "sysctl") == 1 })
}

func TestAMetricsPortThatIsTakenEndsTheStart(t *testing.T) {
	m := newMachine(t)
	before := m.state()
	l, err := m.Node.Listen("tcp4", 15014, bed.ListenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.command(m.agentFlags("--metrics-addr", ":15014")...).wantFailure(t, exitFailed, ":15014", "address already in use", "--metrics-addr")
	m.wantNoDataplane()
	m.wantState(before)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	m.agent("--metrics-addr", ":15014")
	m.scrape()
}

// A standalone agent may be one of several on a machine.
func TestAStandaloneAgentHasNoPortsUnlessToldTo(t *testing.T) {
	for name, flags := range map[string][]string{"by default": nil, "off": {"--metrics-addr", "off"}} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			m.agent(flags...)
			l, err := m.Node.Listen("tcp6", 15014, bed.ListenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			_ = l.Close()
			if files := m.runFiles(); strings.Contains(files, pprofName) {
				t.Errorf("there is a socket for profiles: %s", files)
			}
		})
	}
}

func TestProfilesAreServedToRootOnly(t *testing.T) {
	m := newMachine(t)
	socket := filepath.Join(m.RunDir, pprofName)
	agent := m.agent("--pprof")
	if files := m.runFiles(); !strings.Contains(files, "Srw------- "+socket+"\n") {
		t.Errorf("there is no socket for root in:\n%s", files)
	}
	if out := m.get(nil, socket, "http://agent/debug/pprof/goroutine?debug=1"); !strings.Contains(out, "goroutine profile: total") {
		t.Errorf("it answers %q", out)
	}
	if out := m.get(nil, socket, "http://agent/debug/pprof/heap"); !bytes.HasPrefix([]byte(out), []byte{0x1f, 0x8b}) {
		t.Errorf("a profile is %d bytes of something else than gzip", len(out))
	}
	m.kill(agent)
	agent = m.agent("--pprof") // the socket of one that was killed is in nobody's way
	m.stop(agent)
	if files := m.runFiles(); files != "" {
		t.Errorf("a stopped agent leaves %s", files)
	}
	m.kill(m.agent("--pprof"))
	m.cleanup().wantDone(t)
	if left := tree(t, m.RunDir); left != "" {
		t.Errorf("cleanup leaves %s", left)
	}
}
