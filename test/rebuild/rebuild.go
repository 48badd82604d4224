// SPDX-License-Identifier: Apache-2.0

// Package rebuild makes other versions of redirector for tests: of upgrades, for which it changes a copy of the sources, compiles
// the programs and builds the binary, as a release would be; and of the programs, for which it compiles them in other ways.
package rebuild

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// ErrMissing says which tool is not on this machine.
var ErrMissing = errors.New("not on this machine")

// Edit is a change of one file.
type Edit struct {
	// File is the path below the module's root.
	File string
	// Old is a regular expression that matches exactly once, and New what it is replaced with; $1 is its first group.
	Old, New string
}

// Grown is a version whose layout is one newer than this one's: structs have more fields, maps more room, and a program counts
// in a new counter. It takes over this version's dataplane, and is taken over by this version.
func Grown() []Edit {
	const header = "bpf/redirector.h"
	edits := []Edit{
		{"pkg/loader/layout.go", `layoutVersion += 1\n`, "layoutVersion = 2\n"},
		{"bpf/sock_ops.c", `(count\(cookie, outbound_captured\);)`, "$1\n\tcount(cookie, added);"},
		{header, `#define MAX_PODS \d+`, "#define MAX_PODS 10000"},
		{header, `#define MAX_LISTENERS \d+`, "#define MAX_LISTENERS 70000"},
		{header, `(\n\tTAIL_CALLS,)`, "\n\tTAIL_CALL_ADDED,$1"},
	}
	for _, s := range []string{"pod", "own_addr", "probe_target", "pod_counters", "node_config", "cgroup_value", "admission", "socket_verdict"} {
		field := "__u64 added"
		if s == "own_addr" || s == "cgroup_value" || s == "admission" {
			field = "__u32 added"
		}
		edits = append(edits, Edit{header, `(?s)(\nstruct ` + s + ` \{.*?)(\n\};)`, "$1\n\t" + field + ";$2"})
	}
	return edits
}

// CrashVariable is the environment variable that says where an agent with Crashing's changes ends: at the point of package
// fault with that name, or, with "#2" behind it, when that is passed for the second time.
const CrashVariable = "REDIRECTOR_CRASH_AT"

// Crashing is this version, but for being able to end where CrashVariable says. The real one has nothing of that kind in it.
func Crashing() []Edit {
	const file = "cmd/redirector/main.go"
	return []Edit{
		{file, `(import \(\n)`, "$1\t\"fmt\"\n\t\"sync/atomic\"\n\t\"syscall\"\n\n\t\"github.com/redirector-dataplane/redirector/pkg/fault\"\n"},
		{file, `(func main\(\) \{\n)`, `$1
			var passed atomic.Int64
			at := os.Getenv("` + CrashVariable + `")
			fault.Hook = func(point string) {
				if point == at || strings.HasPrefix(at, point+"#") && at == fmt.Sprintf("%s#%d", point, passed.Add(1)) {
					_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
					select {}
				}
			}
		`},
		{file, `(\t"os"\n)`, "$1\t\"strings\"\n"},
	}
}

// Strange is a version that nothing can be carried over to.
func Strange() []Edit {
	return []Edit{
		{"pkg/loader/layout.go", `layoutVersion += 1\n`, "layoutVersion = 9\n"},
		{"pkg/loader/layout.go", `layoutOldest += 0\n`, "layoutOldest = 9\n"},
	}
}

// Agent builds redirector with the changes and that version's name, below dir, and returns its path. The error wraps ErrMissing
// when a tool is.
func Agent(ctx context.Context, dir, version string, edits []Edit) (string, error) {
	tools := []string{"go"}
	if len(edits) > 0 {
		tools = append(tools, "clang-19", "llvm-strip-19")
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			return "", fmt.Errorf("%s is %w", tool, ErrMissing)
		}
	}
	source, err := root(ctx)
	if err != nil {
		return "", err
	}
	tree := filepath.Join(dir, "source-"+version)
	if err := copyParts(tree, source, "bpf", "cmd", "pkg"); err != nil {
		return "", err
	}
	for _, file := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(filepath.Join(source, file))
		if err == nil {
			err = os.WriteFile(filepath.Join(tree, file), data, 0o644)
		}
		if err != nil {
			return "", fmt.Errorf("copy the sources: %w", err)
		}
	}
	if err := applyAll(tree, edits); err != nil {
		return "", err
	}
	if len(edits) > 0 {
		if _, err := run(ctx, tree, "go", "generate", "./bpf"); err != nil {
			return "", err
		}
	}
	binary := filepath.Join(dir, "redirector-"+version)
	_, err = run(ctx, tree, "go", "build", "-buildvcs=false", "-ldflags=-s -w -X main.version="+version, "-o", binary, "./cmd/redirector")
	return binary, err
}

// Sources are the files below bpf/ that an object each is made of, without their ending.
var Sources = []string{"redirector", "monitor"}

// ObjectName is the name of the file that Objects writes for one of Sources.
func ObjectName(source, compiler string) string { return source + "-" + compiler + ".o" }

// Objects compiles all BPF programs with a compiler, as "clang-16", and with changes of the sources below bpf/, and writes an
// object for each of Sources into dir, by ObjectName. The flags are those of go generate. The error wraps ErrMissing when the
// compiler is.
func Objects(ctx context.Context, dir, compiler string, edits []Edit) error {
	if _, err := exec.LookPath(compiler); err != nil {
		return fmt.Errorf("%s is %w", compiler, ErrMissing)
	}
	dir, err := filepath.Abs(dir) // for the compiler, which runs elsewhere
	if err != nil {
		return fmt.Errorf("find the folder of the objects: %w", err)
	}
	source, err := root(ctx)
	if err != nil {
		return err
	}
	tree, err := os.MkdirTemp("", "redirector-source-")
	if err != nil {
		return fmt.Errorf("copy the sources: %w", err)
	}
	defer os.RemoveAll(tree)
	if err := copyParts(tree, source, "bpf"); err != nil {
		return err
	}
	if err := applyAll(tree, edits); err != nil {
		return err
	}
	tree = filepath.Join(tree, "bpf")
	directives, err := os.ReadFile(filepath.Join(tree, "bpf.go"))
	if err != nil {
		return fmt.Errorf("find the flags of the compiler: %w", err)
	}
	for _, source := range Sources {
		flags, err := compilerFlags(directives, source)
		if err != nil {
			return err
		}
		object := filepath.Join(dir, ObjectName(source, compiler))
		args := slices.Concat(flags, []string{"-target", "bpfel", "-c", source + ".c", "-o", object})
		if _, err := run(ctx, tree, compiler, args...); err != nil {
			return err
		}
	}
	return nil
}

// compilerFlags are what go generate hands to the compiler.
func compilerFlags(directives []byte, source string) ([]string, error) {
	directive := regexp.MustCompile(`(?m)^//go:generate .* ` + regexp.QuoteMeta(source) + `\.c -- (.*)$`)
	found := directive.FindSubmatch(directives)
	if found == nil {
		return nil, fmt.Errorf("find the flags of the compiler: bpf/bpf.go has no directive that matches %s", directive)
	}
	return strings.Fields(string(found[1])), nil
}

// root is the module's.
func root(ctx context.Context) (string, error) {
	dir, err := run(ctx, ".", "go", "list", "-m", "-f", "{{.Dir}}")
	return string(bytes.TrimSpace(dir)), err
}

func copyParts(tree, source string, parts ...string) error {
	for _, part := range parts {
		if err := os.CopyFS(filepath.Join(tree, part), os.DirFS(filepath.Join(source, part))); err != nil {
			return fmt.Errorf("copy the sources: %w", err)
		}
	}
	return nil
}

func applyAll(tree string, edits []Edit) error {
	for _, e := range edits {
		if err := e.apply(tree); err != nil {
			return err
		}
	}
	return nil
}

func (e *Edit) apply(tree string) error {
	path := filepath.Join(tree, e.File)
	before, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	old, err := regexp.Compile(e.Old)
	if err != nil {
		return err
	}
	if n := len(old.FindAllIndex(before, -1)); n != 1 {
		return fmt.Errorf("%s has %q %d times, want once: change it with the code that it is about", e.File, e.Old, n)
	}
	return os.WriteFile(path, old.ReplaceAll(before, []byte(e.New)), 0o644)
}

func run(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", name, args[0], err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}
