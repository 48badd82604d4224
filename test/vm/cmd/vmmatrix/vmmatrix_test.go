// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/test/rebuild"
	"github.com/redirector-dataplane/redirector/test/vm/matrix"
)

func TestTestsAreSharedOutEvenly(t *testing.T) {
	seconds := map[string]float64{"TestLong": 2.2 * share, "TestHalf": 0.9 * share, "TestOther": 1.1 * share}
	var tests []string
	for i := range 30 {
		tests = append(tests, fmt.Sprintf("TestShort%d", i))
	}
	tests = append(tests, "TestHalf", "TestLong", "TestOther")
	batches := shares(tests, func(test string) float64 { return seconds[test] })

	var all []string
	for _, b := range batches {
		all = append(all, b.tests...)
		sum := 0.0
		for _, test := range b.tests {
			if sum += seconds[test]; seconds[test] == 0 {
				sum += usual
			}
		}
		if d := sum - b.seconds; d > 0.01 || d < -0.01 {
			t.Errorf("%v is said to take %.1f s, and takes %.1f s", b.tests, b.seconds, sum)
		}
		// A test alone may take longer than a share.
		if b.seconds > share+usual && len(b.tests) > 1 && !slices.Contains(b.tests, "TestOther") {
			t.Errorf("%v takes %.1f s", b.tests, b.seconds)
		}
	}
	slices.Sort(all)
	slices.Sort(tests)
	if d := cmp.Diff(tests, all); d != "" {
		t.Errorf("each test has to be in one batch (-want +got):\n%s", d)
	}
	if len(batches) != 5 { // 2.2 + 0.9 + 1.1 shares, and 30 × 0.3 seconds
		t.Errorf("%d batches", len(batches))
	}
}

func TestThereIsAlwaysABatch(t *testing.T) {
	for _, tests := range [][]string{nil, {"TestA"}} {
		batches := shares(tests, func(string) float64 { return 0 })
		if len(batches) != 1 || !slices.Equal(batches[0].tests, tests) {
			t.Errorf("of %v: %+v", tests, batches)
		}
	}
}

func TestDurationsAreRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "durations")
	if d, err := readDurations(path); len(d) != 0 || err != nil {
		t.Errorf("of no file: %v, %v", d, err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# comment\n\n12 pkg/a TestX\n3 pkg/b TestX\n")
	d, err := readDurations(path)
	if diff := cmp.Diff(map[string]float64{"pkg/a TestX": 12, "pkg/b TestX": 3}, d); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	write("12 pkg/a\n")
	if _, err := readDurations(path); err == nil || !strings.Contains(err.Error(), path+":1:") {
		t.Errorf("%v, want one that names the line", err)
	}
}

// The checked-in list has to be one that can be read, of tests that there are.
func TestTheListOfDurations(t *testing.T) {
	d, err := readDurations("../../durations.txt")
	if err != nil || len(d) == 0 {
		t.Fatal(err)
	}
	for name := range d {
		pkg, test, _ := strings.Cut(name, " ")
		files, err := filepath.Glob(filepath.Join("../../../..", pkg, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(files, func(file string) bool {
			b, err := os.ReadFile(file)
			return err == nil && strings.Contains(string(b), "\nfunc "+test+"(")
		}) {
			t.Errorf("there is no test %s: run make vmtest VMFLAGS=-record", name)
		}
	}
}

func TestOddMachinesHaveTests(t *testing.T) {
	for _, odd := range oddMachines {
		if len(odd.lines) == 0 || len(odd.tests) == 0 {
			t.Errorf("%s runs nothing", odd.name)
		}
		for pkg := range odd.tests {
			if _, err := os.Stat(filepath.Join("../../../..", pkg)); err != nil {
				t.Errorf("%s: %v", odd.name, err)
			}
		}
	}
}

// A program that the verifier rejects makes the matrix fail, and what it says at last is in sight.
func TestABrokenProgramFailsTheMatrix(t *testing.T) {
	if testing.Short() {
		t.Skip("boots a machine")
	}
	const line = "6.1"
	cache := os.Getenv("REDIRECTOR_CACHE")
	if cache == "" {
		cache = "/var/cache/redirector"
	}
	if _, err := os.Stat(filepath.Join(cache, "lines", line)); err != nil {
		t.Skipf("kernel %s is not in %s: run test/vm/fetch.sh", line, cache)
	}
	objects, out := t.TempDir(), t.TempDir()
	// What a look-up has not found is used all the same.
	err := rebuild.Objects(t.Context(), objects, "clang-16", []rebuild.Edit{
		{File: "bpf/tc.c", Old: `return admission && admission->by == ADMITTED_BY_PROBE;`, New: `return admission->by == ADMITTED_BY_PROBE;`},
	})
	if errors.Is(err, rebuild.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}

	vmmatrix := filepath.Join(t.TempDir(), "vmmatrix")
	if said, err := exec.Command("go", "build", "-o", vmmatrix, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	cmd := exec.Command(vmmatrix, "-kernels", line, "-packages", "./pkg/loader", "-run", "^TestVerifierOnAnotherCompilersPrograms$",
		"-machines", "ordinary", "-objects", objects, "-out", out)
	cmd.Dir = "../../../.."
	said, err := cmd.CombinedOutput()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.ExitCode() != 1 {
		t.Fatalf("%v, want exit status 1:\n%s", err, said)
	}
	for _, want := range []string{
		"the verifier rejects program redir_seal_pkt", "invalid mem access 'map_value_or_null'", "line(s) omitted",
		"TestVerifierOnAnotherCompilersPrograms/redir_seal_pkt: fail", "FAIL: 1 of 1 runs are bad",
	} {
		if !strings.Contains(string(said), want) {
			t.Errorf("it does not say %q", want)
		}
	}
	if n := strings.Count(string(said), "\n"); n > 60 {
		t.Errorf("it says it in %d lines", n)
	}
	if t.Failed() {
		t.Logf("%s", said)
	}
}

func TestKeysTellCellsApart(t *testing.T) {
	a, b := matrix.Column("6.1.0", ""), matrix.Column("6.1.0", "jit-off")
	if a != "6.1.0" || b != "6.1.0 jit-off" {
		t.Errorf("columns are %q and %q", a, b)
	}
}
