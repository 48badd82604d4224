// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// Report is all that a run has found.
type Report struct {
	Machine Machine `json:"machine"`
	Rounds  int     `json:"rounds"`
	Window  string  `json:"window"`
	// OpsPerSecond is how many operations were begun in a second at most; 0 if as many as could be.
	OpsPerSecond int         `json:"ops_per_second,omitempty"`
	Subjects     []string    `json:"subjects"`
	Rows         []Row       `json:"rows"`
	Enrolments   []Enrolment `json:"enrolments"`
	Programs     []Program   `json:"programs"`
}

// write writes the report as JSON, as Markdown and as a picture.
func (r *Report) write(dir string) error {
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "bench.json"), append(data, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, "bench.md"), []byte(r.markdown()), 0o644),
		r.plot(filepath.Join(dir, "bench.svg")),
	)
}

// append adds the report to a history, as one line.
func (r *Report) append(file string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	return errors.Join(err, f.Close())
}

func (r *Report) markdown() string {
	var b strings.Builder
	m := r.Machine
	fmt.Fprintf(&b, "# Measured against the alternatives\n\nMade by `make bench`: commit %s, kernel %s, %d cores of %s, %s,"+
		" load %s before and %s after. %d rounds of %s.", m.Commit, m.Kernel, m.Cores, m.CPU, m.Time, m.LoadBefore, m.LoadAfter, r.Rounds, r.Window)
	if r.OpsPerSecond > 0 {
		fmt.Fprintf(&b, " No more than %d operations in a second.", r.OpsPerSecond)
	}
	fmt.Fprint(&b, "\n\n")
	fmt.Fprint(&b, "![Rates as ratios to direct](bench.svg)\n\n")
	r.markdownRatios(&b, "Rate or throughput, as a ratio to direct: more is better",
		func(row Row) Interval { return row.Rate }, perSecond)
	r.markdownRatios(&b, "Median latency, as a ratio to direct: less is better",
		func(row Row) Interval { return row.P50 }, func(row Row) string { return fmt.Sprintf("%.1f µs", row.Absolute.P50) })
	r.markdownRatios(&b, "99th percentile of latency, as a ratio to direct: less is better",
		func(row Row) Interval { return row.P99 }, func(row Row) string { return fmt.Sprintf("%.1f µs", row.Absolute.P99) })
	r.markdownRatios(&b, "Processor time per operation, as a ratio to direct: less is better",
		func(row Row) Interval { return row.CPU }, func(row Row) string { return fmt.Sprintf("%.2f µs", row.Absolute.CPU) })
	r.markdownEnrolments(&b)
	r.markdownPrograms(&b)
	return b.String()
}

func perSecond(row Row) string {
	if row.Scenario.Work == workStream {
		return fmt.Sprintf("%.2f GB/s", row.Absolute.Rate/1e9)
	}
	return fmt.Sprintf("%.0f/s", row.Absolute.Rate)
}

// markdownRatios is a table with a line for each scenario in which there is something to compare.
func (r *Report) markdownRatios(b *strings.Builder, title string, ratio func(Row) Interval, absolute func(Row) string) {
	fmt.Fprintf(b, "## %s\n\nMedians of the ratios within a round, and in brackets where the true one is with"+
		" 95 %% confidence.\n\n", title)
	fmt.Fprintf(b, "| | %s |\n|---|%s\n", strings.Join(r.Subjects, " | "), strings.Repeat("---:|", len(r.Subjects)))
	for _, row := range r.Rows {
		if row.Subject == direct {
			if ratio(row).Median == 0 {
				continue
			}
			fmt.Fprintf(b, "| %s | %s |", row.Scenario, absolute(row))
			continue
		}
		if i := ratio(row); i.Median != 0 {
			fmt.Fprintf(b, " %.3f (%.3f–%.3f) |", i.Median, i.Low, i.High)
			if row.Subject == r.Subjects[len(r.Subjects)-1] {
				fmt.Fprintln(b)
			}
		}
	}
	fmt.Fprintln(b)
}

func (r *Report) markdownEnrolments(b *strings.Builder) {
	fmt.Fprint(b, "## Enrolment, in microseconds\n\nOf Redirector, \"compared\" is all that capture needs, without the state file and"+
		" without asking a proxy: the rule sets do neither.\n\n"+
		"| | compared p50 | enrol p50 | enrol p99 | unenrol p50 | unenrol p99 |\n|---|---:|---:|---:|---:|---:|\n")
	for i := range r.Enrolments {
		e := &r.Enrolments[i]
		fmt.Fprintf(b, "| %s | %.0f | %.0f | %.0f | %.0f | %.0f |\n",
			e.Subject, e.compared(), e.EnrolP50, e.EnrolP99, e.RemoveP50, e.RemoveP99)
	}
	fmt.Fprint(b, "\n| step of Redirector's | p50 | p99 |\n|---|---:|---:|\n")
	for _, e := range r.Enrolments {
		for _, s := range e.Steps {
			fmt.Fprintf(b, "| %s | %.0f | %.0f |\n", s.Name, s.P50, s.P99)
		}
	}
	fmt.Fprintln(b)
}

func (r *Report) markdownPrograms(b *strings.Builder) {
	fmt.Fprint(b, "## BPF programs\n\nAs the kernel counts, with what counting costs, over all scenarios once. What a program tail-calls"+
		" is counted as its own.\n\n| program | instructions | verified | runs | ns per run |\n|---|---:|---:|---:|---:|\n")
	for _, p := range r.Programs {
		fmt.Fprintf(b, "| `%s` | %d | %d | %d | %.0f |\n", p.Name, p.Translated, p.Verified, p.Runs, p.Nanoseconds)
	}
}

// plot draws the rates as bars, with the intervals.
func (r *Report) plot(file string) error {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("Rate or throughput as a ratio to direct (kernel %s, commit %.12s)", r.Machine.Kernel, r.Machine.Commit)
	p.Y.Label.Text = "ratio to direct"
	p.Y.Min = 0
	p.Legend.Top = true
	const width, pitch = 4, 24 // of a bar and of a scenario, in points
	shades := []color.Color{
		color.RGBA{0x1b, 0x7f, 0x3b, 0xff}, color.RGBA{0xd9, 0x5f, 0x02, 0xff},
		color.RGBA{0x75, 0x70, 0xb3, 0xff}, color.RGBA{0x66, 0x66, 0x66, 0xff}, color.RGBA{0xe7, 0x29, 0x8a, 0xff},
	}
	names := r.scenarioNames()
	for i, subject := range r.Subjects[1:] {
		bars, whiskers := r.series(subject, (float64(i)-1.5)*width/pitch)
		chart, err := plotter.NewBarChart(bars, vg.Points(width))
		if err != nil {
			return err
		}
		chart.Color, chart.LineStyle.Width = shades[i%len(shades)], 0
		chart.Offset = vg.Points(width * (float64(i) - 1.5))
		p.Add(chart)
		p.Legend.Add(subject, chart)
		spans, err := plotter.NewYErrorBars(whiskers)
		if err != nil {
			return err
		}
		spans.CapWidth = 0
		p.Add(spans)
	}
	limit, err := plotter.NewLine(plotter.XYs{{X: -0.5, Y: 1}, {X: float64(len(names)) - 0.5, Y: 1}})
	if err != nil {
		return err
	}
	p.Add(limit)
	p.NominalX(names...)
	p.X.Tick.Label.Rotation = 1.1
	p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = -1, -0.5
	p.Y.Max *= 1.25 // room for the legend
	return p.Save(vg.Points(80+pitch*float64(len(names))), 14*vg.Centimeter, file)
}

// whiskers are intervals around the tops of bars.
type whiskers struct {
	plotter.XYs
	plotter.YErrors
}

// series is one subject's bars; its whiskers stand aside by offset, in scenarios.
func (r *Report) series(subject string, offset float64) (plotter.Values, whiskers) {
	var bars plotter.Values
	var w whiskers
	for _, row := range r.Rows {
		if row.Subject != subject {
			continue
		}
		i := row.Rate
		w.XYs = append(w.XYs, plotter.XY{X: float64(len(bars)) + offset, Y: i.Median})
		w.YErrors = append(w.YErrors, struct{ Low, High float64 }{i.Median - i.Low, i.High - i.Median})
		bars = append(bars, i.Median)
	}
	return bars, w
}

func (r *Report) scenarioNames() []string {
	var names []string
	for _, row := range r.Rows {
		if name := row.Scenario.String(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// disaster says what is out of all proportion. The bounds are such that no busy machine reaches them.
func (r *Report) disaster() error {
	const slowest, latest, longest = 0.4, 3.0, 20_000.0
	var errs []error
	for _, row := range r.Rows {
		if row.Subject != redirector {
			continue
		}
		if m := row.Rate.Median; m < slowest {
			errs = append(errs, fmt.Errorf("%s: rate is %.2f of direct, below %.2f", row.Scenario, m, slowest))
		}
		if m := row.P50.Median; m > latest {
			errs = append(errs, fmt.Errorf("%s: median latency is %.2f of direct, above %.2f", row.Scenario, m, latest))
		}
	}
	for i := range r.Enrolments {
		if e := &r.Enrolments[i]; e.Subject == redirector && e.compared() > longest {
			errs = append(errs, fmt.Errorf("enrolment takes %.0f µs, more than %.0f", e.compared(), longest))
		}
	}
	return errors.Join(errs...)
}
