// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/redirector-dataplane/redirector/test/vm/machine"
	"github.com/redirector-dataplane/redirector/test/vm/matrix"
)

const (
	// usual is how many seconds a test counts for that is not in the list of durations.
	usual = 0.3
	// share is how many seconds of tests one machine gets at most, unless a single one takes longer. A machine that is started
	// for less than this spends too much of its time on starting.
	share = 100.0
	// refused is the line on which tests skip at once, all but those of its refusal.
	refused = "5.10"
	// noted is from how many seconds on a test is in the list.
	noted = 1.5
)

// job is what one machine does: tests of one package.
type job struct {
	kernel *machine.Kernel
	odd    *odd // nil: an ordinary machine
	pkg    testPackage
	// run is the pattern of the tests.
	run string
	// part tells jobs of one cell apart.
	part int
	// seconds is how long it is thought to take.
	seconds float64
}

func (j *job) machine() string {
	if j.odd == nil {
		return ""
	}
	return j.odd.name
}

// key names the cell that the job is a part of.
func (j *job) key() string { return matrix.Column(j.kernel.Version, j.machine()) + " " + j.pkg.name }

// ordinary is what the machine is called that has no name of its own.
const ordinary = "ordinary"

// wants says whether a machine is asked for.
func (o *options) wants(name string) bool {
	return len(o.machines) == 0 || slices.Contains(o.machines, name)
}

// plan shares the tests out to machines, the longest jobs first.
func (o *options) plan(ctx context.Context, kernels []*machine.Kernel, packages []testPackage) ([]job, error) {
	durations, err := readDurations(o.durations)
	if err != nil {
		return nil, err
	}
	for _, name := range o.machines {
		if name != ordinary && !slices.ContainsFunc(oddMachines, func(m odd) bool { return m.name == name }) {
			return nil, fmt.Errorf("there is no machine %q: see test/vm/cmd/vmmatrix/odd.go", name)
		}
	}
	var jobs []job
	for _, p := range packages {
		if !o.wants(ordinary) {
			break
		}
		tests, err := p.tests(ctx, o.run)
		if err != nil {
			return nil, err
		}
		if len(tests) == 0 && o.run != "" && !strings.Contains(o.run, "/") {
			continue // nothing of it is asked for
		}
		for _, k := range kernels {
			batches := shares(tests, func(test string) float64 {
				if k.Line == refused {
					return 0
				}
				return durations[p.name+" "+test]
			})
			for i, b := range batches {
				run := o.run
				if len(batches) > 1 {
					run = patternOf(b.tests)
				}
				jobs = append(jobs, job{kernel: k, pkg: p, run: run, part: i, seconds: b.seconds})
			}
		}
	}
	more, err := o.oddJobs(ctx, kernels, packages)
	if err != nil {
		return nil, err
	}
	jobs = append(jobs, more...)
	if len(jobs) == 0 {
		return nil, fmt.Errorf("no test matches %q", o.run)
	}
	slices.SortStableFunc(jobs, func(a, b job) int { return cmp.Compare(b.seconds, a.seconds) })
	return jobs, nil
}

// oddJobs are those on odd machines: of the tests that are asked for, those that run there.
func (o *options) oddJobs(ctx context.Context, kernels []*machine.Kernel, packages []testPackage) ([]job, error) {
	var jobs []job
	for i := range oddMachines {
		odd := &oddMachines[i]
		if !o.wants(odd.name) {
			continue
		}
		for _, p := range packages {
			pattern, ok := odd.tests[p.name]
			if !ok {
				continue
			}
			tests, err := p.tests(ctx, o.run)
			if err != nil {
				return nil, err
			}
			wanted, err := regexp.Compile(pattern)
			if err != nil {
				return nil, fmt.Errorf("tests of odd machine %s: %w", odd.name, err)
			}
			tests = slices.DeleteFunc(tests, func(test string) bool { return !wanted.MatchString(test) })
			if len(tests) == 0 {
				continue
			}
			for _, k := range kernels {
				if slices.Contains(odd.lines, k.Line) {
					jobs = append(jobs, job{kernel: k, odd: odd, pkg: p, run: patternOf(tests), seconds: share})
				}
			}
		}
	}
	return jobs, nil
}

func patternOf(tests []string) string { return "^(" + strings.Join(tests, "|") + ")$" }

// tests lists the tests of a package that a pattern selects; none if the pattern is one of subtests, which cannot be told from
// outside.
func (p *testPackage) tests(ctx context.Context, run string) ([]string, error) {
	if strings.Contains(run, "/") {
		return nil, nil
	}
	cmd := exec.CommandContext(ctx, p.binary, "-test.list="+cmp.Or(run, "."))
	cmd.Dir = p.dir
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the tests of %s: %w", p.name, err)
	}
	var tests []string
	for name := range strings.FieldsSeq(string(out)) {
		if isTest.MatchString(name) {
			tests = append(tests, name)
		}
	}
	return tests, nil
}

// isTest matches what -test.run runs, of what -test.list lists.
var isTest = regexp.MustCompile(`^(Test|Fuzz|Example)`)

// batch is a part of a package's tests.
type batch struct {
	tests   []string
	seconds float64
}

// shares makes as few batches as there must be, of about the same length. There is at least one.
func shares(tests []string, seconds func(test string) float64) []batch {
	weigh := func(test string) float64 { return cmp.Or(seconds(test), usual) }
	total := 0.0
	for _, t := range tests {
		total += weigh(t)
	}
	batches := make([]batch, max(1, int(total/share+0.999)))
	sorted := slices.Clone(tests)
	slices.SortStableFunc(sorted, func(a, b string) int { return cmp.Compare(weigh(b), weigh(a)) })
	for _, t := range sorted {
		least := &batches[0]
		for i := range batches {
			if batches[i].seconds < least.seconds {
				least = &batches[i]
			}
		}
		least.tests = append(least.tests, t)
		least.seconds += weigh(t)
	}
	return slices.DeleteFunc(batches, func(b batch) bool { return len(b.tests) == 0 && len(tests) > 0 })
}

// readDurations reads how long tests take, a line each: SECONDS PACKAGE TEST. A missing file tells nothing, which makes for a
// worse plan and nothing else.
func readDurations(path string) (map[string]float64, error) {
	f, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read durations: %w", err)
	}
	defer f.Close()
	durations := map[string]float64{}
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		seconds, err := strconv.ParseFloat(fields[0], 64)
		if err != nil || len(fields) != 3 {
			return nil, fmt.Errorf("%s:%d: want SECONDS PACKAGE TEST, have %q", path, n, lines.Text())
		}
		durations[fields[1]+" "+fields[2]] = seconds
	}
	return durations, lines.Err()
}

// writeDurations notes how long the longer tests have taken, on the slowest of the kernels.
func writeDurations(path string, cells []*matrix.Cell) error {
	seconds := map[string]float64{}
	for _, c := range cells {
		for test, s := range c.Durations() {
			name := c.Package + " " + test
			seconds[name] = max(seconds[name], s)
		}
	}
	var b strings.Builder
	b.WriteString("# How long tests take in a machine, by which vmmatrix shares them out; make vmtest VMFLAGS=-record notes it anew.\n#\n" +
		"# SECONDS PACKAGE TEST\n\n")
	for _, name := range slices.Sorted(maps.Keys(seconds)) {
		if seconds[name] >= noted {
			fmt.Fprintf(&b, "%.0f %s\n", seconds[name], name)
		}
	}
	return os.WriteFile(filepath.Clean(path), []byte(b.String()), 0o644)
}
