// SPDX-License-Identifier: Apache-2.0

// Man writes a manual page for each command into a directory: go run ./hack/man DIRECTORY.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra/doc"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: man DIRECTORY")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "man:", err)
		os.Exit(1)
	}
}

// write makes the pages, and removes those of commands that are no more.
func write(dir string) error {
	old, err := filepath.Glob(filepath.Join(dir, "redirector*.8"))
	if err != nil {
		return err
	}
	for _, page := range old {
		if err := os.Remove(page); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root := app.Commands()
	root.DisableAutoGenTag = true // the same sources make the same pages
	epoch := time.Unix(0, 0).UTC()
	return doc.GenManTree(root, &doc.GenManHeader{Section: "8", Source: "redirector", Manual: "Redirector", Date: &epoch}, dir)
}
