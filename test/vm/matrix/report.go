// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Report is a whole matrix.
type Report struct {
	// Kernels are the columns in their order: releases, and releases on odd machines.
	Kernels []string `json:"kernels"`
	// Packages are the rows.
	Packages []string `json:"packages"`
	// Cells are the results, in any order.
	Cells []*Cell `json:"cells"`
	// Wanted is how many cells there must be. The others of the table were not asked for.
	Wanted int `json:"wanted"`
	// Problems are those that belong to no cell.
	Problems []string `json:"problems,omitempty"`
	// Passed is the verdict.
	Passed bool `json:"passed"`
}

// Finish sorts the cells and sets the verdict. A matrix in which nothing ran has not passed.
func (r *Report) Finish() {
	slices.SortStableFunc(r.Cells, func(a, b *Cell) int {
		if c := slices.Index(r.Kernels, a.Column()) - slices.Index(r.Kernels, b.Column()); c != 0 {
			return c
		}
		return strings.Compare(a.Package, b.Package)
	})
	tests := 0
	for _, c := range r.Cells {
		tests += c.Passed + c.Failed + c.Skipped
	}
	if tests == 0 {
		r.Problems = append(r.Problems, "no test ran")
	}
	r.Passed = len(r.Problems) == 0 && len(r.Cells) == r.Wanted && !slices.ContainsFunc(r.Cells, (*Cell).Bad)
}

// Failures returns what the failed tests of a cell said, and the output that belongs to no test, for a person to read.
// Of each it shows so many lines at most: the last ones, and the first ones, which of a panic are what matters.
func (c *Cell) Failures(lines int) string {
	var b strings.Builder
	say := func(title string, output []string) {
		fmt.Fprintf(&b, "--- %s\n", title)
		head := lines / 3
		left := len(output) - lines
		for i, l := range output {
			switch {
			case left <= 0 || i < head || i >= head+left:
				fmt.Fprintf(&b, "    %s\n", l)
			case i == head:
				fmt.Fprintf(&b, "    (%d lines left out)\n", left)
			}
		}
	}
	for _, t := range c.Tests {
		if t.Outcome == Failed || t.Outcome == Unfinished {
			say(fmt.Sprintf("%s: %s (%.2fs)", t.Outcome, t.Name, t.Seconds), t.Output)
		}
	}
	if c.Bad() && len(c.Stray) > 0 {
		say("output outside of any test", c.Stray)
	}
	for _, p := range c.Problems {
		fmt.Fprintf(&b, "--- %s\n", p)
	}
	return b.String()
}

// WriteJSON writes the report for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteText writes the table, the skips and the problems for a terminal.
func (r *Report) WriteText(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	row := func(cols []string) { fmt.Fprintln(tw, strings.Join(cols, "\t")) }
	row(r.header())
	for _, p := range r.Packages {
		row(r.row(p))
	}
	row(r.totals())
	if err := tw.Flush(); err != nil {
		return err
	}
	if skips := r.skips(); len(skips) > 0 {
		fmt.Fprintln(w, "\nSkipped:")
		for _, s := range skips {
			fmt.Fprintf(w, "  %s %s: %d: %s\n", s.kernel, s.pkg, len(s.tests), s.reason)
		}
	}
	if problems := r.problems(); len(problems) > 0 {
		fmt.Fprintln(w, "\nProblems:")
		for _, p := range problems {
			fmt.Fprintf(w, "  %s\n", strings.ReplaceAll(p, "\n", "\n    "))
		}
	}
	_, err := fmt.Fprintf(w, "\n%s\n", r.verdict())
	return err
}

// WriteMarkdown writes the report for a page.
func (r *Report) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	row := func(cols []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cols, " | ")) }
	b.WriteString("# Kernel matrix\n\n" + r.verdict() + "\n\n")
	head := r.header()
	row(head)
	row(slices.Repeat([]string{"---"}, len(head)))
	for _, p := range r.Packages {
		row(r.row(p))
	}
	row(r.totals())
	if skips := r.skips(); len(skips) > 0 {
		b.WriteString("\n## Skipped\n\n| Kernel | Package | Tests | Reason |\n| --- | --- | --- | --- |\n")
		for _, s := range skips {
			row([]string{s.kernel, s.pkg, strings.Join(s.tests, ", "), strings.ReplaceAll(s.reason, "|", `\|`)})
		}
	}
	if problems := r.problems(); len(problems) > 0 {
		b.WriteString("\n## Problems\n\n")
		for _, p := range problems {
			b.WriteString("- " + strings.ReplaceAll(p, "\n", "\n  ") + "\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Report) header() []string { return append([]string{"Package"}, r.Kernels...) }

func (r *Report) row(pkg string) []string {
	cols := []string{pkg}
	for _, k := range r.Kernels {
		i := slices.IndexFunc(r.Cells, func(c *Cell) bool { return c.Column() == k && c.Package == pkg })
		if i < 0 {
			cols = append(cols, notRun(k))
			continue
		}
		cols = append(cols, summary(r.Cells[i].Bad(), r.Cells[i].Passed, r.Cells[i].Failed, r.Cells[i].Skipped))
	}
	return cols
}

// notRun is what stands for a cell that is not there: on odd machines few packages run.
func notRun(column string) string {
	if strings.Contains(column, " ") {
		return ""
	}
	return "NOT RUN"
}

func (r *Report) totals() []string {
	cols := []string{"all"}
	for _, k := range r.Kernels {
		var passed, failed, skipped int
		bad := false
		for _, c := range r.Cells {
			if c.Column() == k {
				passed, failed, skipped, bad = passed+c.Passed, failed+c.Failed, skipped+c.Skipped, bad || c.Bad()
			}
		}
		cols = append(cols, summary(bad, passed, failed, skipped))
	}
	return cols
}

// summary is the text of a field of the table: the counts that are not zero.
func summary(bad bool, passed, failed, skipped int) string {
	var parts []string
	for _, p := range []struct {
		n    int
		word string
	}{{failed, "failed"}, {passed, "passed"}, {skipped, "skipped"}} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.word))
		}
	}
	text := orNone(strings.Join(parts, ", "))
	if bad {
		return "FAIL " + text
	}
	return text
}

func orNone(s string) string {
	if s == "" {
		return "no tests"
	}
	return s
}

// skip gathers the tests of one cell that were skipped for one reason.
type skip struct {
	kernel, pkg, reason string
	tests               []string
}

// skips returns the skipped tests that want selects, by reason.
func (c *Cell) skips(want func(t Test) bool) []skip {
	var all []skip
	for _, t := range c.Tests {
		if t.Outcome != Skipped || !want(t) {
			continue
		}
		i := slices.IndexFunc(all, func(s skip) bool { return s.reason == t.Reason })
		if i < 0 {
			i = len(all)
			all = append(all, skip{kernel: c.Column(), pkg: c.Package, reason: t.Reason})
		}
		all[i].tests = append(all[i].tests, t.Name)
	}
	return all
}

func (r *Report) skips() []skip {
	var all []skip
	for _, c := range r.Cells {
		all = append(all, c.skips(func(Test) bool { return true })...)
	}
	return all
}

// maxFailures is how many failed tests of a cell are listed by name; all of them are in the JSON.
const maxFailures = 10

func (r *Report) problems() []string {
	var all []string
	for _, c := range r.Cells {
		shown := 0
		for _, t := range c.Tests {
			if t.Outcome != Failed && t.Outcome != Unfinished {
				continue
			}
			shown++
			if shown > maxFailures {
				all = append(all, fmt.Sprintf("%s %s: and %d more", c.Column(), c.Package, c.Failed-maxFailures))
				break
			}
			all = append(all, fmt.Sprintf("%s %s: %s: %s", c.Column(), c.Package, t.Name, t.Outcome))
		}
		for _, p := range c.Problems {
			all = append(all, fmt.Sprintf("%s %s: %s", c.Column(), c.Package, p))
		}
	}
	return append(all, r.Problems...)
}

func (r *Report) verdict() string {
	bad := 0
	for _, c := range r.Cells {
		if c.Bad() {
			bad++
		}
	}
	switch {
	case r.Passed:
		return fmt.Sprintf("PASS: %d packages on %d kernels", len(r.Packages), len(r.Kernels))
	case bad > 0:
		return fmt.Sprintf("FAIL: %d of %d runs are bad", bad, r.Wanted)
	default:
		return "FAIL"
	}
}
