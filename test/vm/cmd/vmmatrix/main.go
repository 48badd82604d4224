// SPDX-License-Identifier: Apache-2.0

// Vmmatrix runs the project's test packages on several kernels, each package in machines of its own, and some of the tests on
// machines that are odd in other ways, and prints one table. It exits with 1 when a test failed, when a test was skipped that is
// not expected to be, or when something that was asked for did not run.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/test/vm/machine"
	"github.com/redirector-dataplane/redirector/test/vm/matrix"
)

// everything is the pattern of all packages.
const everything = "./..."

// options are the command line.
type options struct {
	cache, out, expected string
	lines, packages      []string
	exclude              []string
	run                  string
	parallel, tail       int
	timeout              time.Duration
	machines             []string
	record               bool
	durations            string
	objects              string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	passed, err := run(ctx, parse())
	stop()
	switch {
	case err != nil:
		fmt.Fprintln(os.Stderr, "vmmatrix:", err)
		os.Exit(1)
	case !passed:
		os.Exit(1)
	}
}

func parse() options {
	var o options
	cache := os.Getenv("REDIRECTOR_CACHE")
	if cache == "" {
		cache = "/var/cache/redirector"
	}
	flag.StringVar(&o.cache, "cache", cache, "`folder` that test/vm/fetch.sh fills (REDIRECTOR_CACHE)")
	lines := flag.String("kernels", "5.10,6.1,6.12,newest", "kernel `lines`, by commas")
	packages := flag.String("packages", everything, "package `patterns`, by commas")
	exclude := flag.String("exclude", "", "`packages` that cannot run in a guest, by commas, as paths below the module's root")
	flag.StringVar(&o.run, "run", "", "run only tests that match this `regexp`")
	flag.StringVar(&o.expected, "expected", "test/vm/expected-skips.txt", "`file` of expected skips")
	flag.StringVar(&o.out, "out", "build/vmtest", "`folder` for test binaries, logs, results.json and results.md")
	flag.IntVar(&o.parallel, "parallel", runtime.NumCPU()+1, "machines at once; each keeps one CPU busy, unless its tests wait")
	flag.IntVar(&o.tail, "tail", 60, "`lines` of a failed test's output to show")
	flag.DurationVar(&o.timeout, "timeout", 10*time.Minute, "how long the tests of one package may take")
	machines := flag.String("machines", "", "`machines`, by commas: ordinary, or the names of odd ones (default: all)")
	flag.StringVar(&o.durations, "durations", "test/vm/durations.txt", "`file` of how long tests take")
	flag.BoolVar(&o.record, "record", false, "write the file of durations anew")
	flag.StringVar(&o.objects, "objects", "", "`folder` of compiled BPF objects for the machines, which tests find by TEST_OBJECTS")
	flag.Parse()
	o.lines, o.packages, o.exclude, o.machines = split(*lines), split(*packages), split(*exclude), split(*machines)
	return o
}

func split(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

// testPackage is a package with tests.
type testPackage struct {
	importPath string
	dir        string
	name       string // the path below the module's root
	binary     string
}

func run(ctx context.Context, o options) (passed bool, err error) {
	rules, err := readRules(o.expected)
	if err != nil {
		return false, err
	}
	var kernels []*machine.Kernel
	var report matrix.Report
	for _, line := range o.lines {
		k, err := openLine(o.cache, line)
		if err != nil {
			return false, err
		}
		if !slices.Contains(report.Kernels, k.Version) { // "newest" may be one of the other lines
			kernels = append(kernels, k)
			report.Kernels = append(report.Kernels, k.Version)
		}
	}
	packages, err := listPackages(ctx, o)
	if err != nil {
		return false, err
	}
	initBin, packages, err := build(ctx, o, packages)
	if err != nil {
		return false, err
	}
	jobs, err := o.plan(ctx, kernels, packages)
	if err != nil {
		return false, err
	}
	if err := o.runAll(ctx, jobs, initBin, rules, &report); err != nil {
		return false, err
	}
	if o.record {
		if err := writeDurations(o.durations, report.Cells); err != nil {
			return false, err
		}
	}
	if o.run == "" && slices.Equal(o.packages, []string{everything}) {
		report.Problems = matrix.Stale(report.Cells, rules)
	}
	report.Finish()
	if err := o.write(&report); err != nil {
		return false, err
	}
	return report.Passed, nil
}

// runAll runs the jobs, several at once, and adds their results to the report.
func (o *options) runAll(ctx context.Context, jobs []job, initBin string, rules []matrix.Rule, report *matrix.Report) error {
	files, err := o.files()
	if err != nil {
		return err
	}
	cells := map[string]*matrix.Cell{}
	left := map[string]int{}
	for _, j := range jobs {
		left[j.key()]++
		if !slices.Contains(report.Packages, j.pkg.name) {
			report.Packages = append(report.Packages, j.pkg.name)
		}
		if column := matrix.Column(j.kernel.Version, j.machine()); !slices.Contains(report.Kernels, column) {
			report.Kernels = append(report.Kernels, column)
		}
	}
	report.Wanted = len(left)
	slices.Sort(report.Packages)
	var mu sync.Mutex // for the cells, the report and the terminal
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(max(1, o.parallel))
	for _, j := range jobs {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return errors.New("interrupted")
			}
			c, err := o.runJob(ctx, &j, initBin, files)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			fmt.Print(c.Failures(o.tail))
			if whole := cells[j.key()]; whole != nil {
				whole.Merge(c)
				c = whole
			}
			cells[j.key()] = c
			left[j.key()]--
			if left[j.key()] > 0 {
				return nil
			}
			c.Judge(rules, o.run == "")
			report.Cells = append(report.Cells, c)
			fmt.Println(progress(c))
			return nil
		})
	}
	return g.Wait()
}

// objectsDir is where the machines have the objects.
const objectsDir = "/objects"

// files are those that come along with every program, by their paths in the machine.
func (o *options) files() (map[string]string, error) {
	files := map[string]string{}
	if o.objects == "" {
		return files, nil
	}
	objects, err := filepath.Glob(filepath.Join(o.objects, "*.o"))
	if err == nil && len(objects) == 0 {
		err = fmt.Errorf("no objects in %s", o.objects)
	}
	for _, path := range objects {
		files[filepath.Join(objectsDir, filepath.Base(path))] = path
	}
	return files, err
}

func readRules(path string) ([]matrix.Rule, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read expected skips: %w", err)
	}
	defer f.Close()
	return matrix.ReadRules(path, f)
}

// openLine finds a kernel by line, or by the name of its folder.
func openLine(cache, line string) (*machine.Kernel, error) {
	for _, dir := range []string{filepath.Join(cache, "lines", line), filepath.Join(cache, "kernels", line)} {
		if _, err := os.Stat(dir); err == nil {
			k, err := machine.OpenKernel(dir)
			if err == nil {
				k.Line = line
			}
			return k, err
		}
	}
	return nil, fmt.Errorf("kernel %s is not in %s; get it with test/vm/fetch.sh %s", line, cache, line)
}

func listPackages(ctx context.Context, o options) ([]testPackage, error) {
	const format = `{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{"\t"}}{{.Dir}}{{"\t"}}{{.Module.Path}}{{end}}`
	out, err := goCommand(ctx, append([]string{"list", "-f", format}, o.packages...)...)
	if err != nil {
		return nil, err
	}
	var packages []testPackage
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if len(f) != 3 {
			continue
		}
		p := testPackage{importPath: f[0], dir: f[1], name: strings.TrimPrefix(strings.TrimPrefix(f[0], f[2]), "/")}
		if !slices.Contains(o.exclude, p.name) {
			packages = append(packages, p)
		}
	}
	if len(packages) == 0 {
		return nil, fmt.Errorf("no package with tests in %s", strings.Join(o.packages, " "))
	}
	return packages, nil
}

// build makes the static binaries: vminit and one for each package's tests.
func build(ctx context.Context, o options, packages []testPackage) (initBin string, built []testPackage, err error) {
	bin, err := filepath.Abs(filepath.Join(o.out, "bin"))
	if err != nil {
		return "", nil, err
	}
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", nil, err
	}
	const stripped = "-ldflags=-s -w"
	initBin = filepath.Join(bin, "vminit")
	if _, err := goCommand(ctx, "build", "-trimpath", stripped, "-o", initBin,
		"github.com/redirector-dataplane/redirector/test/vm/cmd/vminit"); err != nil {
		return "", nil, err
	}
	for _, p := range packages {
		p.binary = filepath.Join(bin, strings.ReplaceAll(p.name, "/", "_")+".test")
		if _, err := goCommand(ctx, "test", "-c", "-trimpath", stripped, "-o", p.binary, p.importPath); err != nil {
			return "", nil, err
		}
		built = append(built, p)
	}
	return initBin, built, nil
}

// goCommand runs the go command for a static result and returns its output.
func goCommand(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go %s: %w\n%s", args[0], err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

// runJob runs tests of one package on one machine. What goes wrong with the tests or the machine is in the cell.
func (o *options) runJob(ctx context.Context, j *job, initBin string, files map[string]string) (*matrix.Cell, error) {
	k, p := j.kernel, &j.pkg
	c := &matrix.Cell{Kernel: k.Version, Machine: j.machine(), Package: p.name}
	name := fmt.Sprintf("%s-%d", strings.ReplaceAll(p.name, "/", "_"), j.part)
	base := filepath.Join(o.out, "logs", strings.ReplaceAll(c.Column(), " ", "-"), name)
	if err := os.MkdirAll(filepath.Dir(base), 0o755); err != nil {
		return nil, err
	}
	log, err := os.Create(base + ".out")
	if err != nil {
		return nil, err
	}
	defer log.Close()

	// test2json understands the output of -test.v=test2json, and nothing that a test prints can mislead it. Without -t it does
	// not tell how long tests took.
	convert := exec.Command("go", "tool", "test2json", "-t", "-p", p.importPath)
	convert.Stderr = os.Stderr
	in, err := convert.StdinPipe()
	if err != nil {
		return nil, err
	}
	events, err := convert.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := convert.Start(); err != nil {
		return nil, fmt.Errorf("start go tool test2json: %w", err)
	}

	args := []string{"-test.v=test2json", "-test.short", "-test.timeout=" + o.timeout.String()}
	if j.run != "" {
		args = append(args, "-test.run="+j.run)
	}
	env := []string{"GOTRACEBACK=all"}
	if len(files) > 0 {
		env = append(env, "TEST_OBJECTS="+objectsDir)
	}
	// The test binary has a time limit of its own, which tells where it hangs: it comes first.
	limit := o.timeout + time.Minute
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("still running after %s", limit))
	defer cancel()
	m := &machine.Machine{Kernel: k, Init: initBin, KernelLog: base + ".kernel.log"}
	if j.odd != nil {
		m.Append, m.Cgroups, m.Sysctls = j.odd.cmdline, j.odd.cgroups, j.odd.sysctls
	}
	begin := time.Now()
	var res *machine.Result
	var g errgroup.Group
	g.Go(func() error {
		var runErr error
		res, runErr = m.Run(ctx, machine.Program{
			Path: p.binary, Args: args, Dir: p.dir, Env: env, Files: files, Output: io.MultiWriter(log, in),
		})
		return errors.Join(runErr, in.Close())
	})
	readErr := c.Read(bufio.NewReader(events))
	runErr := g.Wait()
	if err := errors.Join(readErr, convert.Wait()); err != nil {
		return nil, err
	}
	c.Seconds = time.Since(begin).Seconds()
	if errors.Is(context.Cause(ctx), context.Canceled) {
		return nil, errors.New("interrupted")
	}
	switch {
	case runErr != nil:
		c.Fail(runErr)
	case res.Code != 0 && c.Failed == 0:
		c.Fail(fmt.Errorf("exit status %d, and no test failed", res.Code))
	}
	if res != nil {
		c.Notes, c.CPUSeconds = res.Notes, res.CPU.Seconds()
		for _, complaint := range res.Complaints {
			c.Fail(fmt.Errorf("the kernel complains: %s", complaint))
		}
	}
	return c, nil
}

func progress(c *matrix.Cell) string {
	word := "ok  "
	if c.Bad() {
		word = "FAIL"
	}
	return fmt.Sprintf("%s  %-35s %-22s %6.1fs  %6.1fs CPU  %d passed, %d failed, %d skipped",
		word, c.Column(), c.Package, c.Seconds, c.CPUSeconds, c.Passed, c.Failed, c.Skipped)
}

// write stores the report and prints it.
func (o *options) write(r *matrix.Report) error {
	for name, render := range map[string]func(io.Writer) error{"results.json": r.WriteJSON, "results.md": r.WriteMarkdown} {
		var b bytes.Buffer
		if err := render(&b); err != nil {
			return fmt.Errorf("render %s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(o.out, name), b.Bytes(), 0o644); err != nil {
			return err
		}
	}
	fmt.Println()
	return r.WriteText(os.Stdout)
}
