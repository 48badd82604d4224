// SPDX-License-Identifier: Apache-2.0

// Verifiertable takes what TestVerifier has measured on each kernel out of the results of vmmatrix, and writes it down as the
// verifier's budget.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"

	"github.com/redirector-dataplane/redirector/test/vm/matrix"
	"github.com/redirector-dataplane/redirector/test/vm/verifier"
)

func main() {
	results := flag.String("results", "build/vmtest/results.json", "`file` that vmmatrix has written")
	budget := flag.String("budget", "test/vm/verifier/budget.json", "`file` to write")
	flag.Parse()
	if err := run(*results, *budget); err != nil {
		fmt.Fprintln(os.Stderr, "verifiertable:", err)
		os.Exit(1)
	}
}

func run(results, path string) error {
	b, err := os.ReadFile(results)
	if err != nil {
		return fmt.Errorf("read results: %w", err)
	}
	var report matrix.Report
	if err := json.Unmarshal(b, &report); err != nil {
		return fmt.Errorf("read results %s: %w", results, err)
	}
	var budget verifier.Budget
	for _, c := range report.Cells {
		if c.Machine != "" {
			continue
		}
		k, err := measured(c)
		if err != nil {
			return err
		}
		if len(k.Programs) > 0 {
			budget.Kernels = append(budget.Kernels, k)
		}
	}
	if len(budget.Kernels) == 0 {
		return errors.New("no results of TestVerifier in " + results + ": run it with make vmtest PKG=./pkg/loader RUN=TestVerifier")
	}
	return budget.Write(path)
}

// measured gathers what the tests of one cell have measured.
func measured(c *matrix.Cell) (k verifier.Kernel, err error) {
	k = verifier.Kernel{Release: c.Kernel, Programs: map[string]map[string]verifier.Cost{}}
	for _, t := range c.Tests {
		compiler, program := t.Attrs["compiler"], t.Attrs["program"]
		if compiler == "" || program == "" {
			// A program that is over its old budget has been measured; any other failure is none of the budget's.
			if t.Outcome == matrix.Failed || t.Outcome == matrix.Unfinished {
				return k, fmt.Errorf("%s on %s: %s has failed, and measured nothing", c.Package, c.Kernel, t.Name)
			}
			continue
		}
		var cost verifier.Cost
		for name, to := range map[string]*int{"instructions": &cost.Instructions, "microseconds": &cost.Microseconds} {
			if *to, err = strconv.Atoi(t.Attrs[name]); err != nil {
				return k, fmt.Errorf("%s on %s: %s of %s: %w", c.Package, c.Kernel, name, t.Name, err)
			}
		}
		if k.Programs[compiler] == nil {
			k.Programs[compiler] = map[string]verifier.Cost{}
		}
		k.Programs[compiler][program] = cost
	}
	return k, nil
}
