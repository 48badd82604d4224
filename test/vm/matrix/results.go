// SPDX-License-Identifier: Apache-2.0

// Package matrix makes a verdict of test runs on several kernels: it counts what each test binary reports, holds every
// skipped test against the checked-in list of expected ones, and renders the table of kernels by packages.
package matrix

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Outcome is how a test ended.
type Outcome string

// The outcomes of a test. An unfinished one counts as failed.
const (
	Passed     Outcome = "pass"
	Failed     Outcome = "fail"
	Skipped    Outcome = "skip"
	Unfinished Outcome = "unfinished"
)

// Test is one test or subtest.
type Test struct {
	Name    string  `json:"name"`
	Outcome Outcome `json:"outcome"`
	// Seconds is how long it took in the guest.
	Seconds float64 `json:"seconds"`
	// Reason is what a skipped test said.
	Reason string `json:"reason,omitempty"`
	// Attrs are what the test has measured, as t.Attr took it.
	Attrs map[string]string `json:"attrs,omitempty"`
	// Output is what the test logged, without the framing of the test runner.
	Output []string `json:"-"`
}

// Cell is one test package on one kernel.
type Cell struct {
	// Kernel is the release that ran.
	Kernel string `json:"kernel"`
	// Machine is the odd machine that it ran on; empty: an ordinary one.
	Machine string `json:"machine,omitempty"`
	// Package is the path of the package below the module's root.
	Package string `json:"package"`
	// Seconds is the whole time, with the boot; where tests were shared out to several machines, of all of them.
	Seconds float64 `json:"seconds"`
	// CPUSeconds is how long CPUs were busy for it.
	CPUSeconds float64 `json:"cpuSeconds"`
	Passed     int     `json:"passed"`
	Failed     int     `json:"failed"`
	Skipped    int     `json:"skipped"`
	// Tests are the leaves: a test that has subtests is only here when it failed by itself.
	Tests []Test `json:"tests"`
	// Problems are what makes the cell bad besides failed tests: an unexpected skip, a machine that died.
	Problems []string `json:"problems,omitempty"`
	// Notes are worth knowing and no failure.
	Notes []string `json:"notes,omitempty"`
	// Stray is output that belongs to no test: a panic, a fatal signal, what TestMain prints.
	Stray []string `json:"-"`

	// all are the tests with subtests too, by name.
	all map[string]*Test
}

// Column is the heading under which the cell stands: the release, and the odd machine.
func (c *Cell) Column() string { return Column(c.Kernel, c.Machine) }

// Column names a kernel on a machine; an ordinary machine has no name.
func Column(kernel, machine string) string {
	if machine == "" {
		return kernel
	}
	return kernel + " " + machine
}

// Merge adds the results of other tests of the same package on the same kernel and machine.
func (c *Cell) Merge(other *Cell) {
	c.Seconds += other.Seconds
	c.CPUSeconds += other.CPUSeconds
	c.Passed += other.Passed
	c.Failed += other.Failed
	c.Skipped += other.Skipped
	c.Tests = append(c.Tests, other.Tests...)
	c.Stray = append(c.Stray, other.Stray...)
	for _, p := range other.Problems {
		c.problem("%s", p)
	}
	for _, n := range other.Notes {
		if !slices.Contains(c.Notes, n) {
			c.Notes = append(c.Notes, n)
		}
	}
	if c.all == nil {
		c.all = map[string]*Test{}
	}
	maps.Copy(c.all, other.all)
}

// Durations are those of the tests that are no subtests, in seconds, by name.
func (c *Cell) Durations() map[string]float64 {
	d := map[string]float64{}
	for name, t := range c.all {
		if !strings.Contains(name, "/") {
			d[name] = t.Seconds
		}
	}
	return d
}

// Bad says whether the cell makes the matrix fail.
func (c *Cell) Bad() bool { return c.Failed > 0 || len(c.Problems) > 0 }

// Duration is Seconds.
func (c *Cell) Duration() time.Duration { return time.Duration(c.Seconds * float64(time.Second)) }

// event is one line of go tool test2json.
type event struct {
	Action  string
	Test    string
	Output  string
	Elapsed float64
	Key     string
	Value   string
}

// framing is what the test runner prints around a test's own output.
var framing = regexp.MustCompile(`^\s*(=== (RUN|PAUSE|CONT|NAME|ATTR|ARTIFACTS) |--- (PASS|FAIL|SKIP): )`)

// Read fills the cell from the output of go tool test2json.
func (c *Cell) Read(r io.Reader) error {
	c.all = map[string]*Test{}
	var order []*Test
	for dec := json.NewDecoder(r); ; {
		var e event
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("read test events of %s on %s: %w", c.Package, c.Kernel, err)
		}
		if e.Test == "" {
			c.strayEvent(e)
			continue
		}
		t := c.all[e.Test]
		if t == nil {
			t = &Test{Name: e.Test, Outcome: Unfinished}
			c.all[e.Test] = t
			order = append(order, t)
		}
		switch e.Action {
		case "output":
			if line := strings.TrimRight(e.Output, "\n"); line != "" && !framing.MatchString(line) {
				t.Output = append(t.Output, line)
			}
		case "attr":
			if t.Attrs == nil {
				t.Attrs = map[string]string{}
			}
			t.Attrs[e.Key] = e.Value
		case "pass", "fail", "skip":
			t.Outcome, t.Seconds = Outcome(e.Action), e.Elapsed
		}
	}
	c.count(order)
	return nil
}

func (c *Cell) strayEvent(e event) {
	line := strings.TrimRight(e.Output, "\n")
	if e.Action == "output" && line != "" && line != "PASS" && line != "FAIL" {
		c.Stray = append(c.Stray, line)
	}
}

func (c *Cell) count(order []*Test) {
	parent := map[string]bool{}
	failedBelow := map[string]bool{}
	for _, t := range order {
		for name := range ancestors(t.Name) {
			parent[name] = true
			if t.Outcome == Failed || t.Outcome == Unfinished {
				failedBelow[name] = true
			}
		}
	}
	for _, t := range order {
		failed := t.Outcome == Failed || t.Outcome == Unfinished
		if parent[t.Name] && (!failed || failedBelow[t.Name]) {
			continue
		}
		switch {
		case failed:
			c.Failed++
		case t.Outcome == Skipped:
			c.Skipped++
			t.Reason = reason(t.Output)
		default:
			c.Passed++
		}
		c.Tests = append(c.Tests, *t)
	}
}

// ancestors yields the names of the tests that a subtest is part of. A slash in a subtest's own name makes one up that
// does not exist, which harms nobody.
func ancestors(name string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for i := strings.LastIndexByte(name, '/'); i > 0; i = strings.LastIndexByte(name[:i], '/') {
			if !yield(name[:i]) {
				return
			}
		}
	}
}

// logged is the start of what a test says through t.Log and t.Skip.
var logged = regexp.MustCompile(`^\s+\S+\.go:\d+: `)

// reason is the last thing a skipped test logged, on one line.
func reason(output []string) string {
	for i, line := range slices.Backward(output) {
		if at := logged.FindString(line); at != "" {
			said := append([]string{strings.TrimPrefix(line, at)}, output[i+1:]...)
			return strings.Join(strings.Fields(strings.Join(said, " ")), " ")
		}
	}
	return ""
}
