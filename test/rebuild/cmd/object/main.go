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
		fmt.Fprintln(os.Stderr, "usage: object FOLDER COMPILER...: writes FOLDER/COMPILER.o")
		os.Exit(2)
	}
	for _, compiler := range os.Args[2:] {
		if err := write(os.Args[1], compiler); err != nil {
			fmt.Fprintln(os.Stderr, "object:", err)
			os.Exit(1)
		}
	}
}

func write(dir, compiler string) error {
	scratch, err := os.MkdirTemp("", "redirector-object-")
	if err != nil {
		return fmt.Errorf("make a scratch folder: %w", err)
	}
	defer os.RemoveAll(scratch)
	object, err := rebuild.Object(context.Background(), scratch, compiler, nil)
	if err != nil {
		return err
	}
	b, err := os.ReadFile(object)
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return fmt.Errorf("keep the object: %w", err)
	}
	return os.WriteFile(dir+"/"+compiler+".o", b, 0o644)
}
