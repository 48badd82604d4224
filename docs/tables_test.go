// SPDX-License-Identifier: Apache-2.0

package docs

import (
	_ "embed"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/redirector-dataplane/redirector/pkg/preflight"
	"github.com/redirector-dataplane/redirector/test/vm/verifier"
)

var (
	//go:embed kernels.md
	kernelsPage string
	//go:embed verifier.md
	verifierPage string
)

// The tables of these pages are between two marks; what is around them is written by hand.
func TestTablesAreWhatTheCodeMakes(t *testing.T) {
	budget, err := verifier.Committed()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, page, begin, want string }{
		{"kernels.md", kernelsPage, "<!-- begin: go test ./docs -update -->\n", preflight.Markdown()},
		{"verifier.md", verifierPage, "<!-- begin: make verifier-table -->\n", budget.Markdown()},
	} {
		const end = "<!-- end -->\n"
		before, rest, ok := strings.Cut(c.page, c.begin)
		made, after, ended := strings.Cut(rest, end)
		if !ok || !ended {
			t.Errorf("docs/%s has no lines %q and %q", c.name, c.begin, end)
			continue
		}
		want := "\n" + c.want
		if *update {
			if err := os.WriteFile(c.name, []byte(before+c.begin+want+end+after), 0o644); err != nil {
				t.Fatal(err)
			}
		} else if d := cmp.Diff(want, made); d != "" {
			t.Errorf("docs/%s is not what the code makes: run go test ./docs -update (-code +page):\n%s", c.name, d)
		}
	}
}
