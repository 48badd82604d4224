// SPDX-License-Identifier: Apache-2.0

// Mutate shows that the tests of the dataplane can fail: it takes one rule after the other out of the programs and out of
// enrolment, and runs the tests that must notice.
//
//	go run ./test/mutate                      all mutations; takes about fifteen minutes
//	go run ./test/mutate -run 'seal: .*'      those whose names match
//	go run ./test/mutate -list                their names
//	go run ./test/mutate -markdown FILE       and write the table to a file
//
// It works on a copy of the tree in a temporary directory: the working tree is not touched. It needs what the tests need
// (root) and what makes the programs (clang-19, llvm-strip-19). To run it in the root of the repository, at any commit or with
// changes that are not committed.
//
// A mutation is killed when a test fails with it, and survives when none does. One that no longer applies, for its text is
// not in the file exactly once, or that does not compile, is an error: change it with the code that it is about. The exit
// status is 1 when there is a survivor or an error.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// mutation is a change that a test must notice.
type mutation struct {
	// name says what is so with the change.
	name string
	file string
	// old must be in the file exactly once.
	old, new string
	// tests is a pattern for go test -run, in package pkg; dataplaneTests if that is empty.
	tests, pkg string
}

const dataplaneTests = "./test/dataplane"

// patience is how long a test may take with a mutation, which may well make it hang.
const patience = 3 * time.Minute

type outcome struct {
	mutation
	// killer is the test that failed; empty if none did.
	killer string
	err    error
	took   time.Duration
}

func main() {
	pattern := flag.String("run", "", "`regexp` of the mutations to run")
	list := flag.Bool("list", false, "list the mutations")
	markdown := flag.String("markdown", "", "`file` to write the table to")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx, *pattern, *list, *markdown)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
	}
	if err != nil || !ok {
		stop()
		os.Exit(1) //nolint:gocritic // stop has been called
	}
}

func run(ctx context.Context, pattern string, list bool, markdown string) (ok bool, err error) {
	chosen, err := regexp.Compile(pattern)
	if err != nil {
		return false, fmt.Errorf("bad -run: %w", err)
	}
	var todo []mutation
	for _, m := range slices.Concat(mutations(), adoptionMutations(), monitorMutations()) {
		if chosen.MatchString(m.name) {
			todo = append(todo, m)
		}
	}
	if list {
		for _, m := range todo {
			fmt.Println(m.name)
		}
		return true, nil
	}
	if _, err := os.Stat("bpf/redirector.c"); err != nil {
		return false, errors.New("bpf/redirector.c is not here: run it in the root of the repository")
	}
	tree, err := copyTree()
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tree.dir)) }()

	if err := tree.baseline(ctx, todo); err != nil {
		return false, err
	}
	var all []outcome
	for i, m := range todo {
		start := time.Now()
		killer, err := tree.try(ctx, m)
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		o := outcome{m, killer, err, time.Since(start)}
		all = append(all, o)
		fmt.Printf("%3d/%d  %-9s %-75s %s (%.0f s)\n", i+1, len(todo), o.verdict(), m.name, o.detail(), o.took.Seconds())
	}
	table, survivors, failures := report(all)
	fmt.Printf("%d mutations: %d killed, %d survived, %d errors\n", len(all), len(all)-survivors-failures, survivors, failures)
	if markdown != "" {
		if err := os.WriteFile(markdown, []byte(table), 0o644); err != nil {
			return false, err
		}
	}
	return survivors+failures == 0, nil
}

func (o *outcome) verdict() string {
	switch {
	case o.err != nil:
		return "ERROR"
	case o.killer == "":
		return "SURVIVED"
	}
	return "killed"
}

func (o *outcome) detail() string {
	switch {
	case o.err != nil:
		return o.err.Error()
	case o.killer == "":
		return o.tests
	}
	return o.killer
}

func report(all []outcome) (table string, survivors, failures int) {
	var b strings.Builder
	b.WriteString("| mutation | in | verdict | by |\n|---|---|---|---|\n")
	for _, o := range all {
		switch {
		case o.err != nil:
			failures++
		case o.killer == "":
			survivors++
		}
		fmt.Fprintf(&b, "| %s | `%s` | %s | `%s` |\n", o.name, o.file, o.verdict(), strings.ReplaceAll(o.detail(), "|", "\\|"))
	}
	fmt.Fprintf(&b, "\n%d mutations: %d killed, %d survived, %d errors.\n", len(all), len(all)-survivors-failures, survivors, failures)
	return b.String(), survivors, failures
}

// tree is a copy of the repository.
type tree struct {
	dir string
}

// copyTree copies what is needed to build and test: neither history nor what was built.
func copyTree() (*tree, error) {
	dir, err := os.MkdirTemp("", "redirector-mutate-")
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if path != "." && (strings.HasPrefix(d.Name(), ".") || path == "build" || path == "bin") {
				return fs.SkipDir
			}
			return os.MkdirAll(filepath.Join(dir, path), 0o755)
		}
		if !d.Type().IsRegular() {
			return nil
		}
		data, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // somebody works in the tree
		}
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, path), data, 0o644)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("copy the tree: %w", err), os.RemoveAll(dir))
	}
	return &tree{dir}, nil
}

func (t *tree) command(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = t.dir
	cmd.WaitDelay = 10 * time.Second
	return cmd.CombinedOutput()
}

// baseline runs all the tests on the tree as it is: a test that fails anyway kills every mutation.
func (t *tree) baseline(ctx context.Context, todo []mutation) error {
	patterns := map[string][]string{}
	for _, m := range todo {
		// Of a pattern with subtests only the tests themselves: patterns with slashes cannot be joined.
		test, _, _ := strings.Cut(m.tests, "/")
		patterns[m.packageName()] = append(patterns[m.packageName()], test)
	}
	if out, err := t.command(ctx, "go", "generate", "./bpf"); err != nil {
		return fmt.Errorf("make the programs: %w\n%s", err, out)
	}
	for pkg, tests := range patterns {
		start := time.Now()
		out, err := t.command(ctx, "go", "test", "-count=1", "-timeout=15m", "-run", strings.Join(tests, "|"), pkg)
		if err != nil {
			return fmt.Errorf("the tests of %s fail without any mutation: %w\n%s", pkg, err, out)
		}
		fmt.Printf("without a mutation the tests of %s pass (%.0f s)\n", pkg, time.Since(start).Seconds())
	}
	return nil
}

func (m *mutation) packageName() string {
	if m.pkg != "" {
		return m.pkg
	}
	return dataplaneTests
}

var failedTest = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// try makes one change, runs the tests, and undoes it. It returns the test that failed.
func (t *tree) try(ctx context.Context, m mutation) (killer string, err error) {
	before, err := os.ReadFile(filepath.Join(t.dir, m.file))
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(before), m.old); n != 1 {
		return "", fmt.Errorf("it no longer applies: its text is in %s %d times", m.file, n)
	}
	changed := []string{m.file}
	if strings.HasPrefix(m.file, "bpf/") {
		changed = append(changed, generated...)
	}
	undo, err := t.remember(changed)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, undo()) }()
	if err := t.write(m.file, []byte(strings.Replace(string(before), m.old, m.new, 1))); err != nil {
		return "", err
	}
	if len(changed) > 1 {
		if out, err := t.command(ctx, "go", "generate", "./bpf"); err != nil {
			return "", fmt.Errorf("it does not compile: %s", firstError(out))
		}
	}
	binary := filepath.Join(t.dir, "mutant.test")
	if out, err := t.command(ctx, "go", "test", "-c", "-o", binary, m.packageName()); err != nil {
		return "", fmt.Errorf("it does not compile: %s", firstError(out))
	}
	limited, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	out, err := t.command(limited, binary, "-test.failfast", "-test.timeout="+(patience-10*time.Second).String(), "-test.run", m.tests)
	switch {
	case err == nil && bytes.Contains(out, []byte("no tests to run")):
		return "", fmt.Errorf("there is no test %s", m.tests)
	case err == nil:
		return "", nil
	}
	// A subtest comes after the test that it is in.
	for _, match := range failedTest.FindAllSubmatch(out, -1) {
		if name := string(match[1]); killer == "" || strings.HasPrefix(name, killer+"/") {
			killer = name
		}
	}
	if killer == "" {
		return "", fmt.Errorf("the tests ended with %w, but none failed: %s", err, firstError(out))
	}
	return killer, nil
}

// generated is what go generate makes of the programs.
var generated = []string{"bpf/redirector_bpfel.o", "bpf/redirector_bpfel.go"}

// remember returns how to make these files what they are now.
func (t *tree) remember(files []string) (undo func() error, err error) {
	contents := map[string][]byte{}
	for _, f := range files {
		if contents[f], err = os.ReadFile(filepath.Join(t.dir, f)); err != nil {
			return nil, err
		}
	}
	return func() error {
		var errs []error
		for f, content := range contents {
			errs = append(errs, t.write(f, content))
		}
		return errors.Join(errs...)
	}, nil
}

func (t *tree) write(file string, content []byte) error {
	return os.WriteFile(filepath.Join(t.dir, file), content, 0o644)
}

// firstError is the first line of a compiler's or a test's output that says what is wrong.
func firstError(out []byte) string {
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "error") || strings.Contains(line, "panic") || strings.Contains(line, ".go:") {
			return strings.TrimSpace(line)
		}
	}
	return strings.TrimSpace(string(out))
}
