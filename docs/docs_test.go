// SPDX-License-Identifier: Apache-2.0

// Package docs checks the documents that are made from code.
package docs

import (
	"bytes"
	_ "embed"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
	"github.com/redirector-dataplane/redirector/pkg/metrics"
	"github.com/redirector-dataplane/redirector/pkg/podwatch"
)

var (
	//go:embed metrics.md
	metricsPage string
	//go:embed events.md
	eventsPage string
	//go:embed commands.md
	commandsPage string
	//go:embed labels.md
	labelsPage string
)

var update = flag.Bool("update", false, "write the documents that are made from code")

func TestThePagesAreWhatTheCodeMakes(t *testing.T) {
	for _, page := range []struct{ name, have, want string }{
		{"metrics.md", metricsPage, metrics.Markdown()},
		{"events.md", eventsPage, podwatch.Markdown()},
		{"commands.md", commandsPage, commands(t)},
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

// commands is the help of all commands on one page.
func commands(t *testing.T) string {
	t.Helper()
	var page bytes.Buffer
	page.WriteString("# Commands and flags\n\nWhat `--help` says of each. Some flags have a twin in the environment, which their texts name.\n\n")
	link := func(name string) string { return "#" + strings.ReplaceAll(strings.TrimSuffix(name, ".md"), "_", "-") }
	var write func(*cobra.Command)
	write = func(cmd *cobra.Command) {
		if err := doc.GenMarkdownCustom(cmd, &page, link); err != nil {
			t.Fatal(err)
		}
		page.WriteByte('\n')
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() {
				write(sub)
			}
		}
	}
	root := app.Commands()
	root.DisableAutoGenTag = true // the same sources make the same page
	write(root)
	return page.String()
}

// The page of annotations has each that the agent reads or writes.
func TestTheLabelsPageHasAllAnnotations(t *testing.T) {
	keys := podwatch.Annotations()
	if len(keys) == 0 {
		t.Fatal("there are no annotations")
	}
	for _, key := range keys {
		if !strings.Contains(labelsPage, "`"+key+"`") {
			t.Errorf("docs/labels.md does not tell of %s", key)
		}
	}
}
