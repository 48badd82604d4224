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
	"github.com/redirector-dataplane/redirector/pkg/podwatch"
)

var (
	//go:embed metrics.md
	metricsPage string
	//go:embed events.md
	eventsPage string
)

var update = flag.Bool("update", false, "write the documents that are made from code")

func TestThePagesAreWhatTheCodeMakes(t *testing.T) {
	for _, page := range []struct{ name, have, want string }{
		{"metrics.md", metricsPage, metrics.Markdown()},
		{"events.md", eventsPage, podwatch.Markdown()},
	} {
		if *update {
			if err := os.WriteFile(page.name, []byte(page.want), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if d := cmp.Diff(page.want, page.have); d != "" {
			t.Errorf("docs/%s is not what the code makes: run go test ./docs -update (-code +page):\n%s", page.name, d)
		}
	}
}
