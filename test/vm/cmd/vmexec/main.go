// SPDX-License-Identifier: Apache-2.0

// Vmexec runs a static binary on a Debian kernel inside QEMU. It prints what the binary prints and exits with its exit
// status, so that it serves as the runner of go test:
//
//	CGO_ENABLED=0 VMTEST_KERNEL=DIR go test -exec "$PWD/bin/vmexec" ./pkg/zds
//
// Tests, benchmarks, fuzzing seeds, -coverprofile and the other profiles work. Of the environment only variables that
// start with GO or TEST_ reach the guest. A failure of vmexec's own exits with 125.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/redirector-dataplane/redirector/test/vm/machine"
)

// codeOwn is the exit status of vmexec's own failures.
const codeOwn = 125

func main() {
	code, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "vmexec:", err)
		code = codeOwn
	}
	os.Exit(code)
}

func run() (int, error) {
	var (
		kernel  = flag.String("kernel", os.Getenv("VMTEST_KERNEL"), "`folder` of an unpacked Debian kernel (VMTEST_KERNEL)")
		initBin = flag.String("init", "", "static vminit `binary` (default: vminit beside this program)")
		modules = flag.String("modules", strings.Join(machine.Modules, ","), "kernel `modules` to load, by commas")
		klog    = flag.String("klog", os.Getenv("VMTEST_KLOG"), "`file` for the kernel's log (VMTEST_KLOG)")
		cmdline = flag.String("append", os.Getenv("VMTEST_APPEND"), "`text` to add to the kernel command line (VMTEST_APPEND)")
		cpus    = flag.Int("smp", 2, "virtual CPUs")
		memory  = flag.Int("mem", 1024, "memory in MiB")
		timeout = flag.Duration("timeout", 10*time.Minute, "how long the machine may run")
		verbose = flag.Bool("v", os.Getenv("VMTEST_VERBOSE") != "", "say how the boot went (VMTEST_VERBOSE)")
	)
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: vmexec [flags] BINARY [arguments]")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		return 0, errors.New("no binary named; see vmexec -help")
	}
	if *kernel == "" {
		return 0, errors.New("no kernel named: set -kernel or VMTEST_KERNEL; test/vm/fetch.sh gets them")
	}
	k, err := machine.OpenKernel(*kernel)
	if err != nil {
		return 0, err
	}
	if *initBin == "" {
		self, err := os.Executable()
		if err != nil {
			return 0, fmt.Errorf("find vminit: %w", err)
		}
		*initBin = filepath.Join(filepath.Dir(self), "vminit")
	}
	wd, err := os.Getwd()
	if err != nil {
		return 0, err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, *timeout, fmt.Errorf("still running after %s", *timeout))
	defer cancel()

	m := &machine.Machine{
		Kernel: k, Init: *initBin, Modules: strings.Split(*modules, ","),
		CPUs: *cpus, MemoryMiB: *memory, Append: *cmdline, KernelLog: *klog,
	}
	args := flag.Args()[1:]
	res, err := m.Run(ctx, machine.Program{
		Path: flag.Arg(0), Args: args, Env: environment(), Dir: wd, Collect: profiles(args, wd), Output: os.Stdout,
	})
	if err != nil {
		return 0, err
	}
	if *verbose {
		fmt.Fprintf(os.Stderr, "vmexec: kernel %s, started after %.1fs, exit status %d\n", res.Release, res.Boot.Seconds(), res.Code)
		for _, n := range res.Notes {
			fmt.Fprintln(os.Stderr, "vmexec:", n)
		}
	}
	for _, c := range res.Complaints {
		fmt.Fprintln(os.Stderr, "vmexec: the kernel complains:", c)
	}
	return res.Code, nil
}

// environment is what of the host's environment means something to a Go test.
func environment() []string {
	var env []string
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "GO") || strings.HasPrefix(kv, "TEST_") {
			env = append(env, kv)
		}
	}
	return env
}

// profiles finds the files that a test binary was told to write.
func profiles(args []string, wd string) []string {
	var files []string
	outdir := wd
	var folder string
	for _, a := range args {
		name, value, ok := strings.Cut(a, "=")
		if !ok {
			continue
		}
		switch name {
		case "-test.outputdir":
			outdir = value
		case "-test.gocoverdir":
			folder = value
		case "-test.coverprofile", "-test.cpuprofile", "-test.memprofile", "-test.blockprofile", "-test.mutexprofile",
			"-test.trace":
			files = append(files, value)
		}
	}
	for i, f := range files {
		if !filepath.IsAbs(f) {
			files[i] = filepath.Join(outdir, f)
		}
	}
	if folder != "" { // go test gives an absolute one; the slash makes it a folder
		files = append(files, filepath.Clean(folder)+"/")
	}
	return files
}
