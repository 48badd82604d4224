// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestQuantile(t *testing.T) {
	for _, c := range []struct {
		values []float64
		p      float64
		want   float64
	}{
		{nil, 0.5, 0},
		{[]float64{7}, 0.99, 7},
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{4, 3, 2, 1}, 0.5, 2},
		{[]float64{4, 3, 2, 1}, 0.99, 4},
		{[]float64{4, 3, 2, 1}, 0, 1},
	} {
		if got := quantile(c.values, c.p); got != c.want {
			t.Errorf("quantile %v of %v is %v, want %v", c.p, c.values, got, c.want)
		}
	}
}

// Ratios are taken round by round: what slows down a whole round changes nothing.
func TestASlowRoundChangesNoRatio(t *testing.T) {
	var of, base []Measured
	for i := range 8 {
		slow := float64(1 + i)
		base = append(base, Measured{Rate: 1000 / slow})
		of = append(of, Measured{Rate: 900 / slow})
	}
	got := interval(ratios(of, base, rate))
	for _, v := range []float64{got.Median, got.Low, got.High} {
		if v < 0.8999 || v > 0.9001 {
			t.Errorf("the interval is %+v, want 0.9 everywhere", got)
		}
	}
	if d := cmp.Diff([]float64(nil), ratios(of, make([]Measured, 8), rate)); d != "" {
		t.Errorf("compared with nothing: %s", d)
	}
}

// The interval holds the true median about as often as it says.
func TestTheIntervalHoldsTheMedian(t *testing.T) {
	const tries, rounds = 2000, 15
	random := rand.New(rand.NewPCG(1, 2))
	held := 0
	for range tries {
		var values []float64
		for range rounds {
			values = append(values, random.ExpFloat64()) // far from normal; its median is ln 2
		}
		if i := interval(values); i.Low <= 0.693147 && i.High >= 0.693147 {
			held++
		}
	}
	if share := float64(held) / tries; share < wanted-0.02 {
		t.Errorf("it holds the median in %.3f of all cases, and says %.2f", share, wanted)
	}
}

func TestTooFewRoundsHaveNoInterval(t *testing.T) {
	if got := interval([]float64{1, 2, 3}); got != (Interval{Median: 2}) {
		t.Errorf("of three values: %+v", got)
	}
	if got := interval([]float64{1, 2, 3, 4, 5, 6}); got.Confidence < wanted || got.Low != 1 || got.High != 6 {
		t.Errorf("of six values: %+v", got)
	}
	if _, err := parse([]string{"-rounds=5"}); err == nil || !strings.Contains(err.Error(), "at least 6") {
		t.Errorf("five rounds: %v", err)
	}
}

// made is a report in which Redirector's rate and latency are as given, and the others' as direct's.
func made(rates, latency float64) *Report {
	sc := quickScenarios()[0]
	measured := map[scenario]map[string][]Measured{sc: {}}
	for _, name := range subjectNames {
		m := Measured{Rate: 1000, P50: 10, P99: 20, CPU: 5}
		if name == redirector {
			m.Rate, m.P50 = 1000*rates, 10*latency
		}
		for range fewest {
			measured[sc][name] = append(measured[sc][name], m)
		}
	}
	return &Report{
		Machine: machine("0123456789abcdef"), Rounds: fewest, Window: time.Second.String(), Subjects: subjectNames,
		Rows: rows([]scenario{sc}, subjectNames, measured),
		Enrolments: []Enrolment{
			{Subject: redirector, EnrolP50: 900, DatapathP50: 700, Steps: []Step{{"seals", 1, 2}}},
			{Subject: nativeNFT, EnrolP50: 9000},
		},
		Programs: []Program{{"redir_mark", 100, 200, 300, 40}},
	}
}

func TestOnlyDisastersAreFound(t *testing.T) {
	for _, c := range []struct {
		rate, latency float64
		want          string
	}{
		{1, 1, ""}, {0.6, 2, ""}, {0.3, 1, "rate is 0.30 of direct"}, {1, 4, "median latency is 4.00 of direct"},
	} {
		err := made(c.rate, c.latency).disaster()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("rate %v, latency %v: %v, want %q", c.rate, c.latency, err, c.want)
		}
	}
	slow := made(1, 1)
	slow.Enrolments[0].DatapathP50 = 50_000
	if err := slow.disaster(); err == nil || !strings.Contains(err.Error(), "enrolment takes 50000 µs") {
		t.Errorf("a slow enrolment: %v", err)
	}
}

func TestTheReportIsWritten(t *testing.T) {
	dir := t.TempDir()
	r := made(0.98, 1.02)
	if err := r.write(dir); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(read(t, dir, "bench.json"), &back); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(r, &back); d != "" {
		t.Errorf("the JSON is another report (-made +read):\n%s", d)
	}
	page := string(read(t, dir, "bench.md"))
	for _, want := range []string{
		"commit 0123456789abcdef", "kernel " + r.Machine.Kernel,
		"| outbound IPv4 connect ×16 64 B | 1000/s | 0.980 (0.980–0.980) |" +
			" 1.000 (1.000–1.000) | 1.000 (1.000–1.000) | 1.000 (1.000–1.000) |\n",
		"| redirector | 700 | 900 |", "| nftables | 9000 | 9000 |", "| seals | 1 | 2 |", "| `redir_mark` | 100 | 200 | 300 | 40 |",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	d := xml.NewDecoder(strings.NewReader(string(read(t, dir, "bench.svg"))))
	elements := 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := token.(xml.StartElement); ok {
			elements++
		}
	}
	if elements < 20 {
		t.Errorf("the picture has %d elements", elements)
	}
}

func TestTheHistoryHasALinePerRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "history.jsonl")
	for range 2 {
		if err := made(1, 1).append(file); err != nil {
			t.Fatal(err)
		}
	}
	lines := strings.Split(strings.TrimSpace(string(read(t, filepath.Dir(file), "history.jsonl"))), "\n")
	if len(lines) != 2 {
		t.Fatalf("%d lines", len(lines))
	}
	for _, line := range lines {
		var r Report
		if err := json.Unmarshal([]byte(line), &r); err != nil || len(r.Rows) != len(subjectNames) {
			t.Errorf("a line has %d rows, %v", len(r.Rows), err)
		}
	}
}

func read(t *testing.T, dir, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}
