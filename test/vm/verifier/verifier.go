// SPDX-License-Identifier: Apache-2.0

// Package verifier keeps what the kernel's verifier had to do for each program, on each kernel and from each compiler: as a
// budget that a test holds the programs against, and as a table to read.
package verifier

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// Cost is what one program takes the verifier.
type Cost struct {
	// Instructions are those that it has looked at, along all paths. Kernels allow a million.
	Instructions int `json:"instructions"`
	// Microseconds is how long that took, of an emulated CPU. It is for comparisons between programs.
	Microseconds int `json:"microseconds"`
}

// Kernel is what was measured on one.
type Kernel struct {
	// Release is what uname -r prints.
	Release string `json:"release"`
	// Programs are costs by compiler and program.
	Programs map[string]map[string]Cost `json:"programs"`
}

// Budget is what was measured when it was last looked at, oldest kernel first.
type Budget struct {
	Kernels []Kernel `json:"kernels"`
}

//go:embed budget.json
var committed []byte

// Committed returns the budget that is checked in, budget.json.
func Committed() (*Budget, error) { return parse(committed) }

func parse(b []byte) (*Budget, error) {
	budget := new(Budget)
	if err := json.Unmarshal(b, budget); err != nil {
		return nil, fmt.Errorf("read the verifier's budget: %w", err)
	}
	return budget, nil
}

// Write writes the budget.
func (b *Budget) Write(path string) error {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetIndent("", "  ")
	if err := enc.Encode(b); err != nil {
		return fmt.Errorf("write the verifier's budget: %w", err)
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}

// line is a release's first two numbers.
func line(release string) string {
	numbers := strings.FieldsFunc(release, func(r rune) bool { return r < '0' || r > '9' })
	return strings.Join(numbers[:min(2, len(numbers))], ".")
}

// Check fails if a program takes the verifier half more than it did on a kernel of the same line; on another kernel, more than it
// did on any.
func (b *Budget) Check(release, compiler, program string, instructions int) error {
	same, most := 0, 0
	for _, k := range b.Kernels {
		n := k.Programs[compiler][program].Instructions
		most = max(most, n)
		if line(k.Release) == line(release) {
			same = n
		}
	}
	allowed := same
	if allowed == 0 {
		allowed = most
	}
	const remedy = "run make verifier-table, and commit what it writes"
	switch {
	case allowed == 0:
		return fmt.Errorf("program %s of %s has no budget: %s", program, compiler, remedy)
	case instructions > allowed+allowed/2:
		return fmt.Errorf("program %s of %s takes the verifier %d instructions on %s, more than half over the %d that it took: "+
			"make it simpler, or %s", program, compiler, instructions, release, allowed, remedy)
	}
	return nil
}

// Markdown returns the tables of docs/verifier.md.
func (b *Budget) Markdown() string {
	var out strings.Builder
	compilers := map[string]map[string]bool{}
	for _, k := range b.Kernels {
		for compiler, programs := range k.Programs {
			if compilers[compiler] == nil {
				compilers[compiler] = map[string]bool{}
			}
			for program := range programs {
				compilers[compiler][program] = true
			}
		}
	}
	for _, compiler := range slices.Backward(slices.Sorted(maps.Keys(compilers))) {
		fmt.Fprintf(&out, "## %s\n\n| program |", compiler)
		for _, k := range b.Kernels {
			fmt.Fprintf(&out, " %s |", k.Release)
		}
		out.WriteString("\n| --- |" + strings.Repeat(" ---: |", len(b.Kernels)) + "\n")
		for _, program := range slices.Sorted(maps.Keys(compilers[compiler])) {
			fmt.Fprintf(&out, "| `%s` |", program)
			for _, k := range b.Kernels {
				if c, ok := k.Programs[compiler][program]; ok {
					fmt.Fprintf(&out, " %d in %.1f ms |", c.Instructions, float64(c.Microseconds)/1000)
				} else {
					out.WriteString(" not there |")
				}
			}
			out.WriteString("\n")
		}
		out.WriteString("\n")
	}
	return out.String()
}
