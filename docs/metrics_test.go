// SPDX-License-Identifier: Apache-2.0

// Package docs checks the documents that are made from code.
package docs

import (
	_ "embed"
	"flag"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/pkg/metrics"
)

//go:embed metrics.md
var metricsPage string

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
