// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What a mutation changes is in its file exactly once, and no two have the same name. So a change of the code takes its mutations
// with it, where running them all takes too long.
func TestEveryMutationApplies(t *testing.T) {
	root := filepath.Join("..", "..")
	names := map[string]bool{}
	for _, m := range slices.Concat(mutations(), adoptionMutations(), monitorMutations()) {
		if names[m.name] {
			t.Errorf("%s: there are two of that name", m.name)
		}
		names[m.name] = true
		text, err := os.ReadFile(filepath.Join(root, m.file))
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		if n := strings.Count(string(text), m.old); n != 1 {
			t.Errorf("%s: its text is in %s %d times", m.name, m.file, n)
		}
	}
}
