// SPDX-License-Identifier: Apache-2.0

// Package docs checks the documents that are made from code.
package docs

import (
	_ "embed"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/pkg/metrics"
	"github.com/redirector-dataplane/redirector/pkg/preflight"
)

//go:embed metrics.md
var metricsPage string

//go:embed kernels.md
var kernelsPage string

var update = flag.Bool("update", false, "write the documents that are made from code")

func TestThePageOfMetricsIsWhatTheCodeMakes(t *testing.T) {
	want := metrics.Markdown()
	if *update {
		if err := os.WriteFile("metrics.md", []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(want, metricsPage); d != "" {
		t.Errorf("docs/metrics.md is not what the code makes: run go test ./docs -update (-code +page):\n%s", d)
	}
}

// The tables of kernels.md are between two marks; what is around them is written by hand.
func TestThePageOfKernelsIsWhatTheCodeMakes(t *testing.T) {
	const begin, end = "<!-- begin: go test ./docs -update -->\n", "<!-- end -->\n"
	before, rest, ok := strings.Cut(kernelsPage, begin)
	made, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		t.Fatalf("docs/kernels.md has no lines %q and %q", begin, end)
	}
	want := "\n" + preflight.Markdown()
	if *update {
		if err := os.WriteFile("kernels.md", []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(want, made); d != "" {
		t.Errorf("docs/kernels.md is not what the code makes: run go test ./docs -update (-code +page):\n%s", d)
	}
}
