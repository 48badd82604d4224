// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// Where agent and Prometheus listen, in a network namespace of the test's own.
const (
	agentAddr      = "127.0.0.1:15014"
	prometheusAddr = "127.0.0.1:9090"
)

// dashboardQueries are the expressions of the dashboard's panels, as Grafana would send them.
func dashboardQueries(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "deploy", "grafana", "redirector.json"))
	if err != nil {
		t.Fatal(err)
	}
	type panel struct {
		Targets []struct {
			Expr string `json:"expr"`
		} `json:"targets"`
		Panels []json.RawMessage `json:"panels"`
	}
	var queries []string
	var walk func(raw []byte)
	walk = func(raw []byte) {
		var p panel
		if err := json.Unmarshal(raw, &p); err != nil {
			t.Fatal(err)
		}
		for _, target := range p.Targets {
			queries = append(queries, strings.NewReplacer("$__rate_interval", "10s", "$instance", ".*").Replace(target.Expr))
		}
		for _, inner := range p.Panels {
			walk(inner)
		}
	}
	walk(text)
	return queries
}

// mayBeEmpty says whether a query shows only what is out of the ordinary, or of Kubernetes.
func mayBeEmpty(query string) bool {
	return strings.Contains(query, "> 0") || strings.Contains(query, "redirector_events_total")
}

// Prometheus scrapes an agent, and the dashboard has something to show.
func TestPrometheusScrapesWhatTheDashboardAsksFor(t *testing.T) {
	binary, err := exec.LookPath("prometheus")
	if err != nil {
		t.Skip("prometheus is not installed")
	}
	m := newMachine(t)
	if err := m.JoinCgroup(); err != nil {
		t.Fatal(err)
	}
	pod := m.pod("web")
	app := m.serveOn(m.Outside)
	m.agent("--metrics-addr", agentAddr, "--metrics-per-pod")
	m.proxy()
	run(t, nil, m.enrollFlags(pod, "--wait-proxy", "--timeout", "20s")...).wantDone(t)
	config := filepath.Join(t.TempDir(), "prometheus.yml")
	text := fmt.Sprintf("global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: redirector\n  static_configs: [{targets: ['%s']}]\n", agentAddr)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = m.Bed.Start(m.Node, true, "prometheus", []string{
		binary, "--config.file", config, "--storage.tsdb.path", t.TempDir(), "--web.listen-address", prometheusAddr,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return m.Node.Dial(ctx, bed.DialSpec{Remote: netip.MustParseAddrPort(prometheusAddr)})
	}}}
	// returns says how many series a query has now.
	returns := func(query string) (int, error) {
		response, err := client.Get("http://" + prometheusAddr + "/api/v1/query?" + url.Values{"query": {query}}.Encode())
		if err != nil {
			return 0, err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			return 0, err
		}
		var answer struct {
			Status, Error string
			Data          struct{ Result []json.RawMessage }
		}
		if err := json.Unmarshal(body, &answer); err != nil {
			return 0, fmt.Errorf("%s: %s: %w", response.Status, body, err)
		}
		if answer.Status != "success" {
			return 0, fmt.Errorf("%s: %s", response.Status, answer.Error)
		}
		return len(answer.Data.Result), nil
	}

	// Something happens all the time.
	missing := map[string]error{}
	queries := dashboardQueries(t)
	if len(queries) < 20 {
		t.Fatalf("the dashboard has %d queries", len(queries))
	}
	for _, query := range queries {
		missing[query] = nil
	}
	for end := time.Now().Add(40 * time.Second); len(missing) > 0 && time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		run(t, nil, m.enrollFlags(pod)...).wantDone(t)
		if c, err := pod.Dial(t.Context(), bed.DialSpec{Remote: netip.AddrPortFrom(m.Outside.V4, app.Port)}); err == nil {
			_ = c.Close()
		}
		for query := range missing {
			n, err := returns(query)
			if missing[query] = err; err == nil && (n > 0 || mayBeEmpty(query)) {
				delete(missing, query)
			}
		}
	}
	for query, err := range missing {
		t.Errorf("%s returns nothing, %v", query, err)
	}
}
