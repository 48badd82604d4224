// SPDX-License-Identifier: Apache-2.0

// Object compiles the BPF programs with compilers other than that of the committed object, for tests that load them where there
// is no compiler.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/redirector-dataplane/redirector/test/rebuild"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: object FOLDER COMPILER...: writes FOLDER/SOURCE-COMPILER.o for each source")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "object:", err)
		os.Exit(1)
	}
}

func write(dir string, compilers []string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the folder of the objects: %w", err)
	}
	for _, compiler := range compilers {
		if err := rebuild.Objects(context.Background(), dir, compiler, nil); err != nil {
			return err
		}
	}
	return nil
}
