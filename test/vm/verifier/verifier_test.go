// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func budget() *Budget {
	return &Budget{Kernels: []Kernel{
		{Release: "6.1.0-57-cloud-amd64", Programs: map[string]map[string]Cost{"clang-19": {"a": {1000, 1500}, "b": {10, 20}}}},
		{Release: "6.12.1+deb13-cloud-amd64", Programs: map[string]map[string]Cost{"clang-19": {"a": {100, 200}}}},
	}}
}

func TestCheck(t *testing.T) {
	for name, c := range map[string]struct {
		release, program string
		instructions     int
		want             string // "": it is within
	}{
		"as it was":                         {"6.1.0-57-cloud-amd64", "a", 1000, ""},
		"half more":                         {"6.1.0-99-cloud-amd64", "a", 1500, ""},
		"more than half more":               {"6.1.0-57-cloud-amd64", "a", 1501, "1501 instructions on 6.1.0-57-cloud-amd64"},
		"another line has its own":          {"6.12.9", "a", 151, "the 100 that it took"},
		"6.1 is not 6.12":                   {"6.12.9", "a", 150, ""},
		"on another kernel the most counts": {"7.3.4", "a", 1500, ""},
		"on another kernel, too much":       {"7.3.4", "a", 1501, "1501"},
		"measured elsewhere":                {"6.12.9", "b", 15, ""},
		"never measured":                    {"6.1.0", "c", 1, "program c of clang-19 has no budget: run make verifier-table"},
	} {
		err := budget().Check(c.release, "clang-19", c.program, c.instructions)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if err := budget().Check("6.1.0", "clang-16", "a", 1); err == nil {
		t.Error("a compiler that was never measured has a budget")
	}
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "budget.json")
	if err := budget().Write(path); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := parse(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(budget(), got); d != "" {
		t.Errorf("(-written +read)\n%s", d)
	}
}

func TestMarkdown(t *testing.T) {
	want := "## clang-19\n\n" +
		"| program | 6.1.0-57-cloud-amd64 | 6.12.1+deb13-cloud-amd64 |\n| --- | ---: | ---: |\n" +
		"| `a` | 1000 in 1.5 ms | 100 in 0.2 ms |\n| `b` | 10 in 0.0 ms | not there |\n\n"
	if d := cmp.Diff(want, budget().Markdown()); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}
