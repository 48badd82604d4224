// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
	"github.com/redirector-dataplane/redirector/test/rebuild"
	"github.com/redirector-dataplane/redirector/test/vm/verifier"
)

// The compilers of the programs: the one whose object is committed, and another, for what loads by luck alone.
const (
	committedCompiler = "clang-19"
	otherCompiler     = "clang-16"
)

// logTail is how much of the verifier's log a program that it rejects shows: the last lines have the reason.
const logTail = 15

// TestVerifier loads every program as it is committed.
func TestVerifier(t *testing.T) {
	verify(t, committedCompiler, committedSpecs(t))
}

// committedSpecs are the committed objects, by source.
func committedSpecs(t *testing.T) map[string]*ebpf.CollectionSpec {
	t.Helper()
	specs := map[string]*ebpf.CollectionSpec{}
	for source, read := range map[string]func() (*ebpf.CollectionSpec, error){
		"redirector": bpf.LoadRedirector,
		"monitor":    bpf.LoadMonitor,
	} {
		spec, err := read()
		if err != nil {
			t.Fatal(err)
		}
		specs[source] = spec
	}
	return specs
}

// TestVerifierOnAnotherCompilersPrograms loads every program as another compiler makes it. In a machine without one the objects
// are handed over; see TEST_OBJECTS in test/vm.
func TestVerifierOnAnotherCompilersPrograms(t *testing.T) {
	objects := os.Getenv("TEST_OBJECTS")
	if objects == "" {
		objects = t.TempDir()
		err := rebuild.Objects(t.Context(), objects, otherCompiler, nil)
		if errors.Is(err, rebuild.ErrMissing) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	specs := map[string]*ebpf.CollectionSpec{}
	for _, source := range rebuild.Sources {
		spec, err := ebpf.LoadCollectionSpec(filepath.Join(objects, rebuild.ObjectName(source, otherCompiler)))
		if err != nil {
			t.Fatal(err)
		}
		specs[source] = spec
	}
	verify(t, otherCompiler, specs)
}

// verify loads the programs of each source one by one, with their maps, and holds what the verifier had to do against the budget.
func verify(t *testing.T, compiler string, specs map[string]*ebpf.CollectionSpec) {
	if err := CheckFeatures(); err != nil {
		t.Skip(err)
	}
	budget, err := verifier.Committed()
	if err != nil {
		t.Fatal(err)
	}
	committed := committedSpecs(t)
	for _, source := range slices.Sorted(maps.Keys(committed)) {
		spec := specs[source]
		if spec == nil {
			t.Fatalf("%s makes no object of bpf/%s.c", compiler, source)
		}
		for name := range committed[source].Programs {
			if spec.Programs[name] == nil {
				t.Errorf("%s makes no program %s of bpf/%s.c", compiler, name, source)
			}
		}
		verifyObject(t, budget, compiler, spec)
	}
}

func verifyObject(t *testing.T, budget *verifier.Budget, compiler string, spec *ebpf.CollectionSpec) {
	for _, name := range slices.Sorted(maps.Keys(spec.Programs)) {
		t.Run(name, func(t *testing.T) {
			cost := load(t, spec, name)
			t.Attr("compiler", compiler)
			t.Attr("program", name)
			t.Attr("instructions", strconv.Itoa(cost.Instructions))
			t.Attr("microseconds", strconv.Itoa(cost.Microseconds))
			if err := budget.Check(kernelRelease(t), compiler, name, cost.Instructions); err != nil {
				t.Error(err)
			}
		})
	}
}

// load loads one program of an object and returns what the verifier says of it.
func load(t *testing.T, spec *ebpf.CollectionSpec, name string) verifier.Cost {
	t.Helper()
	only := spec.Copy()
	maps.DeleteFunc(only.Programs, func(other string, _ *ebpf.ProgramSpec) bool { return other != name })
	with := func(level ebpf.LogLevel) (*ebpf.Collection, error) {
		return ebpf.NewCollectionWithOptions(only, ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: level}})
	}
	loaded, err := with(ebpf.LogLevelStats)
	if _, ok := errors.AsType[*ebpf.VerifierError](err); ok {
		// Once more, with a log of every instruction: what led there is before the reason.
		_, err = with(ebpf.LogLevelInstruction)
	}
	if rejected, ok := errors.AsType[*ebpf.VerifierError](err); ok {
		t.Fatalf("the verifier rejects program %s: %s", name, fmt.Sprintf("%-*v", logTail, rejected))
	}
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	cost, err := parseStats(loaded.Programs[name].VerifierLog)
	if err != nil {
		t.Fatal(err)
	}
	return cost
}

var (
	statsTime         = regexp.MustCompile(`verification time (\d+) usec`)
	statsInstructions = regexp.MustCompile(`processed (\d+) insns`)
)

// parseStats reads the lines that the verifier ends its log with.
func parseStats(log string) (cost verifier.Cost, err error) {
	for re, to := range map[*regexp.Regexp]*int{statsTime: &cost.Microseconds, statsInstructions: &cost.Instructions} {
		m := re.FindStringSubmatch(log)
		if m == nil {
			return cost, fmt.Errorf("the verifier does not say %q:\n%s", re, log)
		}
		if *to, err = strconv.Atoi(m[1]); err != nil {
			return cost, err
		}
	}
	return cost, nil
}

func kernelRelease(t *testing.T) string {
	t.Helper()
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		t.Fatal(err)
	}
	return unix.ByteSliceToString(name.Release[:])
}
