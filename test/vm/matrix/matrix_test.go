// SPDX-License-Identifier: Apache-2.0

package matrix

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// sample is a package with a test of every outcome. It is built and run for real: what the test runner and test2json
// print is theirs to change.
const sample = `package sample

import (
	"fmt"
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	fmt.Println("said by TestMain")
	os.Exit(m.Run())
}

func TestPasses(t *testing.T) { fmt.Println("--- FAIL: TestPasses (0.00s)") }

func TestFails(t *testing.T) { t.Attr("instructions", "12"); t.Log("first"); t.Error("got 1,\nwant 2") }

func TestIsSkipped(t *testing.T) {
	t.Log("looking for a feature")
	t.Skip("sk_lookup ingress_ifindex (kernel 5.17)\n   is missing")
}

func TestSaysNothing(t *testing.T) { t.SkipNow() }

func TestHasSubtests(t *testing.T) {
	t.Run("passes", func(t *testing.T) {})
	t.Run("is skipped", func(t *testing.T) { t.Skip("tcx (kernel 6.6) is missing") })
	t.Run("deeper", func(t *testing.T) {
		t.Run("fails", func(t *testing.T) { t.Fatal("deep down") })
	})
}

func TestFailsAfterItsSubtests(t *testing.T) {
	t.Run("passes", func(t *testing.T) {})
	t.Error("the parent")
}

func TestPanics(t *testing.T) {
	if os.Getenv("SAMPLE_PANIC") != "" {
		panic("out of the sample")
	}
}
`

// runSample runs the tests of sample and reads what they report.
func runSample(t *testing.T, env ...string) *Cell {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module sample\n", "sample_test.go": sample} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	build := exec.Command("go", "test", "-c", "-o", "sample.test")
	build.Dir = dir
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod", "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the sample: %v\n%s", err, out)
	}
	run := exec.Command(filepath.Join(dir, "sample.test"), "-test.v=test2json")
	run.Env = append(os.Environ(), env...)
	out, _ := run.CombinedOutput() // it fails on purpose
	convert := exec.Command("go", "tool", "test2json", "-t")
	convert.Stdin = bytes.NewReader(out)
	events, err := convert.Output()
	if err != nil {
		t.Fatalf("go tool test2json: %v", err)
	}
	c := &Cell{Kernel: "6.1.0-57-cloud-amd64", Package: "pkg/sample"}
	if err := c.Read(bytes.NewReader(events)); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestEveryTestIsCountedOnceByItsOutcome(t *testing.T) {
	c := runSample(t)
	want := []Test{
		{Name: "TestPasses", Outcome: Passed},
		{Name: "TestFails", Outcome: Failed, Attrs: map[string]string{"instructions": "12"}},
		{Name: "TestIsSkipped", Outcome: Skipped, Reason: "sk_lookup ingress_ifindex (kernel 5.17) is missing"},
		{Name: "TestSaysNothing", Outcome: Skipped},
		{Name: "TestHasSubtests/passes", Outcome: Passed},
		{Name: "TestHasSubtests/is_skipped", Outcome: Skipped, Reason: "tcx (kernel 6.6) is missing"},
		{Name: "TestHasSubtests/deeper/fails", Outcome: Failed},
		{Name: "TestFailsAfterItsSubtests", Outcome: Failed},
		{Name: "TestFailsAfterItsSubtests/passes", Outcome: Passed},
		{Name: "TestPanics", Outcome: Passed},
	}
	if diff := cmp.Diff(want, c.Tests, cmpopts.IgnoreFields(Test{}, "Output", "Seconds")); diff != "" {
		t.Errorf("tests (-want +got):\n%s", diff)
	}
	if c.Passed != 4 || c.Failed != 3 || c.Skipped != 3 {
		t.Errorf("counted %d passed, %d failed, %d skipped; want 4, 3, 3", c.Passed, c.Failed, c.Skipped)
	}
	if !c.Bad() {
		t.Error("a cell with failed tests is not bad")
	}
}

func TestPanicCountsAsAFailureWithItsTrace(t *testing.T) {
	c := runSample(t, "SAMPLE_PANIC=1")
	last := c.Tests[len(c.Tests)-1]
	if last.Name != "TestPanics" || last.Outcome == Passed || last.Outcome == Skipped {
		t.Fatalf("last test is %s: %s, want TestPanics to have failed", last.Name, last.Outcome)
	}
	if text := c.Failures(1000); !strings.Contains(text, "panic: out of the sample") || !strings.Contains(text, "goroutine ") {
		t.Errorf("the failures do not show the panic:\n%s", text)
	}
}

func TestFailuresLeaveOutTheMiddle(t *testing.T) {
	c := cell("6.1.0", "pkg/a", Test{Name: "TestA", Outcome: Failed, Output: strings.Fields("1 2 3 4 5 6 7 8 9")})
	for lines, want := range map[int]string{1: "(8 lines left out) 9", 3: "1 (6 lines left out) 8 9", 9: "1 2 3 4 5 6 7 8 9"} {
		_, text, _ := strings.Cut(c.Failures(lines), "\n")
		if got := strings.Join(strings.Fields(text), " "); got != want {
			t.Errorf("with %d lines: %q, want %q", lines, got, want)
		}
	}
}

func TestFailuresAreAboutFailedTestsOnly(t *testing.T) {
	text := runSample(t).Failures(1)
	for _, want := range []string{"fail: TestFails (", "want 2", "(2 lines left out)", "deep down", "the parent", "said by TestMain"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing", want)
		}
	}
	for _, unwanted := range []string{"first", "looking for a feature", "TestPasses"} {
		if strings.Contains(text, unwanted) {
			t.Errorf("%q is shown", unwanted)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}

// cell is a cell as Read leaves it.
func cell(kernel, pkg string, tests ...Test) *Cell {
	c := &Cell{Kernel: kernel, Package: pkg, Tests: tests, all: map[string]*Test{}}
	for i := range tests {
		c.all[tests[i].Name] = &tests[i]
		switch tests[i].Outcome {
		case Passed:
			c.Passed++
		case Skipped:
			c.Skipped++
		default:
			c.Failed++
		}
	}
	return c
}

func rules(t *testing.T, text string) []Rule {
	t.Helper()
	rs, err := ReadRules("list", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

// on puts a cell on an odd machine.
func on(machine string, c *Cell) *Cell {
	c.Machine = machine
	return c
}

func TestPartsOfACellAreAddedUp(t *testing.T) {
	a := cell("6.1", "a", Test{Name: "TestA", Outcome: Passed, Seconds: 2}, Test{Name: "TestA/sub", Outcome: Passed, Seconds: 1})
	b := cell("6.1", "a", Test{Name: "TestB", Outcome: Failed, Seconds: 3}, Test{Name: "TestC", Outcome: Skipped, Reason: "tcx"})
	a.Seconds, a.CPUSeconds, b.Seconds, b.CPUSeconds = 10, 7, 20, 5
	a.Notes, b.Notes = []string{"same"}, []string{"same", "other"}
	b.Problems, b.Stray = []string{"the machine died"}, []string{"panic: x"}
	a.Merge(b)
	if a.Passed != 2 || a.Failed != 1 || a.Skipped != 1 || a.Seconds != 30 || a.CPUSeconds != 12 || len(a.Tests) != 4 {
		t.Errorf("the sum is %+v", a)
	}
	if d := cmp.Diff([]string{"same", "other"}, a.Notes); d != "" {
		t.Errorf("notes (-want +got):\n%s", d)
	}
	if !a.Bad() || len(a.Problems) != 1 || len(a.Stray) != 1 {
		t.Errorf("what is wrong with a part is lost: %+v", a)
	}
	if d := cmp.Diff(map[string]float64{"TestA": 2, "TestB": 3, "TestC": 0}, a.Durations()); d != "" {
		t.Errorf("durations (-want +got):\n%s", d)
	}
	// A rule that names a test of either part finds it.
	a.Judge(rules(t, "6.1 a TestC tcx\n6.1 a TestA tcx"), true)
	if len(a.Problems) != 2 || !strings.Contains(a.Problems[1], "TestA to be skipped, and it passed") {
		t.Errorf("problems are %q", a.Problems)
	}
}

func TestAnOddMachineHasAColumnOfItsOwn(t *testing.T) {
	r := &Report{
		Kernels: []string{"6.1", "6.1 jit-off"}, Packages: []string{"a", "b"}, Wanted: 3,
		Cells: []*Cell{
			on("jit-off", cell("6.1", "a", Test{Name: "TestA", Outcome: Passed})),
			cell("6.1", "a", Test{Name: "TestA", Outcome: Passed}, Test{Name: "TestB", Outcome: Passed}),
			cell("6.1", "b", Test{Name: "TestA", Outcome: Passed}),
		},
	}
	r.Finish()
	var text bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"Package   6.1        6.1 jit-off\n", "a         2 passed   1 passed\n", "b         1 passed   \n", "all       3 passed   1 passed\n",
		"PASS: 2 packages on 2 kernels\n",
	} {
		if !strings.Contains(text.String(), line) {
			t.Errorf("no line %q in\n%s", line, &text)
		}
	}
	r.Wanted = 4
	r.Finish()
	if r.Passed {
		t.Error("a matrix in which something has not run has passed")
	}
}

func TestSkipsAreHeldAgainstTheList(t *testing.T) {
	skipped := Test{Name: "TestTCX", Outcome: Skipped, Reason: "tcx (kernel 6.6) is missing"}
	passed := Test{Name: "TestTCX", Outcome: Passed}
	for _, tc := range []struct {
		name, list string
		cell       *Cell
		selected   bool // only some tests were run
		want       string
	}{
		{name: "expected by name", list: "6.1 pkg/a TestTCX tcx (kernel 6.6)", cell: cell("6.1.0-57-cloud-amd64", "pkg/a", skipped)},
		{name: "expected by pattern", list: "* pkg/* Test* tcx", cell: cell("7.3.4+deb13", "pkg/a/b", skipped)},
		{name: "expected for the whole release", list: "6.1.0 * * tcx", cell: cell("6.1.0", "pkg/a", skipped)},
		{name: "expected on all other kernels", list: "!5.10 pkg/a TestTCX tcx", cell: cell("6.1.0", "pkg/a", skipped)},
		{name: "not expected on this one", list: "!6.1 pkg/a TestTCX tcx", cell: cell("6.1.0", "pkg/a", skipped),
			want: "skipped and not expected to be: TestTCX: tcx (kernel 6.6) is missing"},
		{name: "two for one reason", cell: cell("6.1.0", "pkg/a", skipped, Test{Name: "TestB", Outcome: Skipped, Reason: skipped.Reason}),
			want: "skipped and not expected to be: TestTCX, TestB: tcx (kernel 6.6) is missing"},
		{name: "no rule", cell: cell("6.1.0", "pkg/a", skipped),
			want: "skipped and not expected to be: TestTCX: tcx (kernel 6.6) is missing"},
		{name: "another kernel line that begins alike", list: "6.1 pkg/a TestTCX tcx", cell: cell("6.12.118+deb13", "pkg/a", skipped),
			want: "skipped and not expected to be: TestTCX: tcx (kernel 6.6) is missing"},
		{name: "another package", list: "6.1 pkg/b TestTCX tcx", cell: cell("6.1.0", "pkg/a", skipped),
			want: "skipped and not expected to be: TestTCX: tcx (kernel 6.6) is missing"},
		{name: "another test that begins alike", list: "6.1 pkg/a TestTC tcx", cell: cell("6.1.0", "pkg/a", skipped), selected: true,
			want: "skipped and not expected to be: TestTCX: tcx (kernel 6.6) is missing"},
		{name: "another reason", list: "6.1 pkg/a TestTCX no root", cell: cell("6.1.0", "pkg/a", skipped),
			want: "skipped and not expected to be: TestTCX: tcx (kernel 6.6) is missing"},
		{name: "no reason given", list: "* * * tcx", cell: cell("6.1.0", "pkg/a", Test{Name: "TestX", Outcome: Skipped}),
			want: "skipped without a reason, name the missing feature in t.Skip: TestX"},
		{name: "passed against the list", list: "# heading\n\n6.1 pkg/a TestTCX tcx", cell: cell("6.1.0", "pkg/a", passed),
			want: "list:3 expects TestTCX to be skipped, and it passed: remove the line"},
		{name: "gone", list: "6.1 pkg/a TestOld tcx", cell: cell("6.1.0", "pkg/a", passed),
			want: "list:1 expects TestOld to be skipped, and there is no such test: remove the line"},
		{name: "not selected", list: "6.1 pkg/a TestOld tcx", cell: cell("6.1.0", "pkg/a", passed), selected: true},
		{name: "pattern allows passing", list: "6.1 pkg/a Test* tcx", cell: cell("6.1.0", "pkg/a", passed)},
		{name: "expected on an odd machine", list: "@jit-off pkg/a TestTCX tcx", cell: on("jit-off", cell("6.1.0", "pkg/a", skipped))},
		{name: "expected on all machines", list: "6.1 pkg/a TestTCX tcx", cell: on("jit-off", cell("6.1.0", "pkg/a", skipped))},
		{name: "not expected on another machine", list: "@jit-off pkg/a TestTCX tcx", cell: on("ipv6-off", cell("6.1.0", "pkg/a", skipped)),
			want: "skipped and not expected to be: TestTCX: tcx (kernel 6.6) is missing"},
		{name: "not expected on an ordinary machine", list: "@jit-off pkg/a TestTCX tcx", cell: cell("6.1.0", "pkg/a", skipped),
			want: "skipped and not expected to be: TestTCX: tcx (kernel 6.6) is missing"},
		{name: "passed on a machine that has it", list: "* pkg/a TestTCX tcx", cell: on("has-tcx", cell("6.1.0", "pkg/a", passed))},
		{name: "passed against the list of the machine", list: "@jit-off pkg/a TestTCX tcx", cell: on("jit-off", cell("6.1.0", "pkg/a", passed)),
			want: "list:1 expects TestTCX to be skipped, and it passed: remove the line"},
		{name: "nothing ran", cell: cell("6.1.0", "pkg/a"), want: "no test ran"},
		{name: "nothing was selected", cell: cell("6.1.0", "pkg/a"), selected: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.cell.Judge(rules(t, tc.list), !tc.selected)
			if got := strings.Join(tc.cell.Problems, "\n"); got != tc.want {
				t.Errorf("problems %q, want %q", got, tc.want)
			}
			if tc.cell.Bad() != (tc.want != "") {
				t.Errorf("Bad() = %t, with problems %q", tc.cell.Bad(), tc.cell.Problems)
			}
		})
	}
}

func TestPatternUnderWhichNothingIsSkippedIsStale(t *testing.T) {
	skipped := Test{Name: "TestTCX", Outcome: Skipped, Reason: "tcx (kernel 6.6) is missing"}
	cells := []*Cell{
		cell("6.1.0", "pkg/a", skipped), cell("6.1.0", "pkg/b", Test{Name: "TestB", Outcome: Passed}),
		cell("6.12.118", "pkg/a", Test{Name: "TestTCX", Outcome: Passed}),
	}
	got := Stale(cells, rules(t, "6.1 pkg/* * tcx\n6.12 pkg/* * tcx\n5.10 * * tcx\n* pkg/b * tcx\n6.12 pkg/a TestTCX tcx"))
	want := []string{"list:2 expects skips, and there were none: remove the line"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("stale rules (-want +got):\n%s", diff)
	}
}

func TestListWithoutAReasonIsRefused(t *testing.T) {
	_, err := ReadRules("list", strings.NewReader("# comment\n6.1 pkg/a TestTCX\n"))
	if err == nil || !strings.HasPrefix(err.Error(), "list:2: ") {
		t.Errorf("error is %v, want one that names list:2", err)
	}
}

func TestVerdict(t *testing.T) {
	ok := func(k, p string) *Cell { return cell(k, p, Test{Name: "TestA", Outcome: Passed}) }
	skipped := func(k, p string) *Cell {
		return cell(k, p, Test{Name: "TestA", Outcome: Skipped, Reason: "a|b"}, Test{Name: "TestB", Outcome: Skipped, Reason: "a|b"})
	}
	failed := func(k, p string) *Cell {
		c := cell(k, p, Test{Name: "TestA", Outcome: Unfinished})
		c.Problems = []string{"the machine died\nlast line"}
		return c
	}
	for _, tc := range []struct {
		name    string
		cells   []*Cell
		passed  bool
		verdict string
		text    []string
		md      []string
	}{
		{
			name: "all good", cells: []*Cell{ok("5.10", "a"), ok("6.1", "a"), skipped("5.10", "b"), ok("6.1", "b")}, passed: true,
			verdict: "PASS: 2 packages on 2 kernels",
			text: []string{
				"b         2 skipped             1 passed",
				"all       1 passed, 2 skipped   2 passed",
				"  5.10 b: 2: a|b",
			},
			md: []string{"| b | 2 skipped | 1 passed |", `| 5.10 | b | TestA, TestB | a\|b |`},
		},
		{
			name: "one bad", cells: []*Cell{failed("6.1", "b"), ok("6.1", "a"), ok("5.10", "a"), ok("5.10", "b")},
			verdict: "FAIL: 1 of 4 runs are bad",
			text: []string{
				"b         1 passed   FAIL 1 failed", "  6.1 b: TestA: unfinished", "  6.1 b: the machine died\n    last line",
			},
			md: []string{"- 6.1 b: the machine died\n  last line"},
		},
		{
			name: "one missing", cells: []*Cell{ok("5.10", "a"), ok("5.10", "b"), ok("6.1", "a")}, verdict: "FAIL",
			text: []string{"b         1 passed   NOT RUN"},
		},
		{
			name: "no test at all", cells: []*Cell{cell("5.10", "a"), cell("5.10", "b"), cell("6.1", "a"), cell("6.1", "b")},
			verdict: "FAIL", text: []string{"no test ran"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := &Report{Kernels: []string{"5.10", "6.1"}, Packages: []string{"a", "b"}, Cells: tc.cells, Wanted: 4}
			r.Finish()
			if r.Passed != tc.passed {
				t.Errorf("passed is %t", r.Passed)
			}
			var text, md, j bytes.Buffer
			for _, err := range []error{r.WriteText(&text), r.WriteMarkdown(&md), r.WriteJSON(&j)} {
				if err != nil {
					t.Fatal(err)
				}
			}
			for _, want := range append(tc.text, tc.verdict) {
				if !strings.Contains(text.String(), want+"\n") {
					t.Errorf("text has no line %q:\n%s", want, &text)
				}
			}
			for _, want := range append(tc.md, tc.verdict) {
				if !strings.Contains(md.String(), want+"\n") {
					t.Errorf("Markdown has no line %q:\n%s", want, &md)
				}
			}
			if want := `"passed": ` + map[bool]string{true: "true", false: "false"}[tc.passed]; !strings.Contains(j.String(), want) {
				t.Errorf("JSON has no %s:\n%s", want, &j)
			}
		})
	}
}
