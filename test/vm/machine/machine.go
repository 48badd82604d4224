// SPDX-License-Identifier: Apache-2.0

// Package machine runs one static program on a kernel of choice, in QEMU, without KVM: it makes an initramfs of
// cmd/vminit, the kernel modules and the program, boots it, passes the program's output on and returns its exit status.
package machine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redirector-dataplane/redirector/test/vm/guest"
)

// Modules are the kernel modules that the project's tests use, beyond what every kernel has built in.
var Modules = []string{
	// Interfaces that a test can give to a pod.
	"veth", "dummy", "bridge", "8021q", "macvlan", "ipvlan", "tun", "ipip", "sit",
	// The seal's hook.
	"sch_ingress", "cls_bpf", "act_bpf",
	// Sockets, as ss(8) sees them.
	"inet_diag", "tcp_diag", "udp_diag", "mptcp_diag",
	// To see that there are no rules.
	"nf_tables",
	// And what nodes have them for.
	"nft_chain_nat", "nft_nat", "nft_masq",
}

// parameters of modules that would otherwise make interfaces of their own when they are loaded.
var parameters = map[string]string{"dummy": "numdummies=0"}

const (
	// accel is not "multi": with one host thread a CPU, QEMU's translator crashes guests (Oops: int3) while the
	// kernel patches its own code, as it does for each static key that attaching cgroup, clsact and tcx programs flips.
	accel = "tcg,thread=single"

	// cpu has the oldest features that a 64-bit kernel runs on: with all that QEMU can emulate (max), tests take a third more of
	// the host's time, for page tables have a level more, and a switch of tasks saves more registers.
	cpu = "qemu64"

	// logTail is how much of the kernel log goes into an error, in bytes.
	logTail = 4 << 10

	// exitGrace is how long a machine that has reported its exit status may take to switch itself off.
	exitGrace = 20 * time.Second
)

// Machine is the hardware and the kernel. The zero value of each field but Kernel and Init has a meaning.
type Machine struct {
	// Kernel is what boots.
	Kernel *Kernel
	// Init is the path of the static vminit binary.
	Init string
	// Modules are loaded before the program starts; those that the kernel does not have are left out. nil: Modules of
	// this package.
	Modules []string
	// CPUs is the number of virtual CPUs (0: 2). They take turns on one CPU of the host.
	CPUs int
	// MemoryMiB is the size of the memory (0: 1024).
	MemoryMiB int
	// Append is added to the kernel's command line.
	Append string
	// Cgroups says how cgroups are mounted.
	Cgroups guest.Cgroups
	// Sysctls are set before the program starts: values by path below /proc/sys.
	Sysctls map[string]string
	// KernelLog is where the kernel's console log goes ("": nowhere).
	KernelLog string
	// QEMU is the emulator ("": qemu-system-x86_64).
	QEMU string
}

// Program is what runs in the machine.
type Program struct {
	// Path of the static binary on the host.
	Path string
	// Args are its arguments, without the name.
	Args []string
	// Env is its whole environment, besides PATH, HOME, TMPDIR, and VMTEST_IN_VM, by which tests know that they need patience.
	Env []string
	// Dir is its working directory. The files below testdata in this folder of the host's come along.
	Dir string
	// Files come along, too: files of the host's by their paths in the guest.
	Files map[string]string
	// Collect are files in the guest that are written to the same path on the host when it has ended. A path that ends
	// in a slash is a folder of them.
	Collect []string
	// Output takes what it writes to standard output and standard error.
	Output io.Writer
}

// Result is what came of a program that ran to its end.
type Result struct {
	// Code is the exit status, 128 + N after signal N.
	Code int
	// Release is the kernel's, as the guest gives it.
	Release string
	// CPU is how long QEMU has kept CPUs of the host busy.
	CPU time.Duration
	// Boot is the time from the start of QEMU to the start of the program.
	Boot time.Duration
	// Notes are what vminit could not do, and the modules that the kernel lacks.
	Notes []string
	// Complaints are the kernel's own about what happened while the program ran: warnings, stalls, bugs.
	Complaints []string
}

// Run boots the machine, runs the program and waits for the machine to switch off. A program that fails is no error: see
// Result.Code. It is an error when the machine cannot be started, dies (the end of its kernel log is in the error), or
// is still running when ctx ends.
func (m *Machine) Run(ctx context.Context, p Program) (*Result, error) {
	tmp, err := os.MkdirTemp("", "redirector-vm-")
	if err != nil {
		return nil, fmt.Errorf("make scratch folder: %w", err)
	}
	defer os.RemoveAll(tmp)

	initrd := filepath.Join(tmp, "initramfs.cpio")
	absent, err := m.writeInitramfs(initrd, p)
	if err != nil {
		return nil, err
	}
	klog := m.KernelLog
	if klog == "" {
		klog = filepath.Join(tmp, "kernel.log")
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	q := exec.CommandContext(ctx, orDefault(m.QEMU, "qemu-system-x86_64"), m.arguments(initrd, klog)...)
	var complaints strings.Builder
	q.Stderr = &complaints
	out, err := q.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	begin := time.Now()
	if err := q.Start(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return nil, errors.New("start QEMU: qemu-system-x86_64 is not installed; run hack/install-deps.sh vm")
		}
		return nil, fmt.Errorf("start QEMU: %w", err)
	}
	res := &Result{}
	if len(absent) > 0 {
		res.Notes = append(res.Notes, "modules this kernel does not have: "+strings.Join(absent, ", "))
	}
	ended, readErr := res.read(out, p, begin)
	if ended || readErr != nil {
		t := time.AfterFunc(exitGrace, cancel)
		defer t.Stop()
	}
	waitErr := q.Wait()
	log, _ := os.ReadFile(klog)
	switch {
	case readErr != nil:
		return nil, readErr
	case !ended:
		why := "QEMU ended"
		if err := context.Cause(ctx); err != nil {
			why = err.Error()
		} else if waitErr != nil {
			why = waitErr.Error()
		}
		return nil, fmt.Errorf("kernel %s gave no exit status (%s)\n%send of the kernel log:\n%s",
			m.Kernel.Version, why, complaints.String(), tail(log, logTail))
	}
	res.Complaints = Complaints(string(log))
	res.CPU = q.ProcessState.UserTime() + q.ProcessState.SystemTime()
	return res, nil
}

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

func (m *Machine) arguments(initrd, klog string) []string {
	return []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35", "-accel", accel, "-cpu", cpu,
		"-smp", strconv.Itoa(orDefault(m.CPUs, 2)), "-m", strconv.Itoa(orDefault(m.MemoryMiB, 1024)),
		"-kernel", m.Kernel.Image, "-initrd", initrd,
		// An oops ends the machine: what a test says after one means nothing. Level 5 shows warnings, not the boot.
		// no_timer_check: a host that is busy makes the check fail, and the kernel panic.
		"-append", strings.TrimSpace("console=ttyS0 panic=-1 oops=panic loglevel=5 mitigations=off nokaslr no_timer_check " +
			"random.trust_cpu=on " + m.Append),
		"-serial", "file:" + klog,
		"-serial", "stdio",
	}
}

// writeInitramfs returns the modules that were asked for and do not exist.
func (m *Machine) writeInitramfs(path string, p Program) (absent []string, err error) {
	names := m.Modules
	if names == nil {
		names = Modules
	}
	mods, absent, err := m.Kernel.resolve(names)
	if err != nil {
		return nil, err
	}
	f, err := os.Create(path)
	if err != nil {
		return nil, fmt.Errorf("write initramfs: %w", err)
	}
	a := newArchive(f)
	a.dir("/dev")
	// The kernel opens it as PID 1's standard streams before anything is mounted.
	a.add(node{name: "/dev/console", mode: typeChar | 0o600, major: 5, minor: 1})
	a.copyFile("/init", m.Init)
	c := guest.Config{
		Argv:    append([]string{"/program"}, p.Args...),
		Env:     append([]string{"PATH=/bin", "HOME=/tmp", "TMPDIR=/tmp", "VMTEST_IN_VM=1"}, p.Env...),
		Dir:     orDefault(p.Dir, "/"),
		Collect: p.Collect,
		Cgroups: m.Cgroups,
		Sysctls: m.Sysctls,
	}
	a.copyFile(c.Argv[0], p.Path)
	for _, name := range slices.Sorted(maps.Keys(p.Files)) {
		a.dir(filepath.Dir(name))
		a.copyFile(name, p.Files[name])
	}
	for _, mod := range mods {
		dst := "/modules/" + mod.name + ".ko"
		a.file(dst, mod.elf)
		c.Modules = append(c.Modules, guest.Module{Path: dst, Params: parameters[mod.name]})
	}
	a.dir(c.Dir)
	if p.Dir != "" {
		a.copyTree(filepath.Join(p.Dir, "testdata"))
	}
	j, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("write initramfs: %w", err)
	}
	a.file(guest.ConfigPath, j)
	if err := errors.Join(a.close(), f.Close()); err != nil {
		return nil, fmt.Errorf("write initramfs: %w", err)
	}
	return absent, nil
}

// read takes the guest's output up to the exit record and says whether it came. An output that ends or breaks before it
// is no error here: why the machine ended is known by Run.
func (r *Result) read(out io.Reader, p Program, begin time.Time) (ended bool, err error) {
	in := bufio.NewReader(out)
	for {
		line, last := in.ReadBytes('\n')
		text, rec := guest.Cut(line)
		if len(text) > 0 && p.Output != nil {
			if _, err := p.Output.Write(text); err != nil {
				return false, fmt.Errorf("pass output on: %w", err)
			}
		}
		if rec != nil {
			switch rec.Kind {
			case guest.Note:
				r.Notes = append(r.Notes, rec.Text)
			case guest.Ready:
				r.Boot, r.Release = time.Since(begin), rec.Text
			case guest.File:
				if err := p.store(rec); err != nil {
					return false, err
				}
			case guest.Exit:
				r.Code = rec.Code
				return true, nil
			}
		}
		if last != nil {
			return false, nil //nolint:nilerr // see above
		}
	}
}

// store writes a collected file. The guest only gets to write what was asked for.
func (p *Program) store(rec *guest.Record) error {
	for _, want := range p.Collect {
		below := strings.HasSuffix(want, "/") && strings.HasPrefix(filepath.Clean(rec.Path), want)
		if rec.Path != want && !below {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(rec.Path), 0o755); err != nil {
			return fmt.Errorf("store %s: %w", rec.Path, err)
		}
		return os.WriteFile(rec.Path, rec.Data, 0o644)
	}
	return fmt.Errorf("the guest sent %s, which nobody asked for", rec.Path)
}

// tail returns the whole lines in the last n bytes.
func tail(b []byte, n int) []byte {
	if len(b) <= n {
		return b
	}
	b = b[len(b)-n:]
	_, rest, ok := strings.Cut(string(b), "\n")
	if !ok {
		return b
	}
	return []byte(rest)
}

// Complaints returns the lines of a kernel log, from the start of the program on, in which the kernel reports a fault of
// its own: a test that passes while the kernel warns has found something.
func Complaints(log string) []string {
	_, log, ok := strings.Cut(log, guest.LogMark)
	if !ok {
		return nil
	}
	var found []string
	for line := range strings.Lines(log) {
		for _, sign := range []string{"WARNING: ", "BUG: ", "INFO: rcu", "INFO: task", "soft lockup", "UBSAN: ", "refcount_t: "} {
			if strings.Contains(line, sign) {
				found = append(found, strings.TrimSpace(line))
				break
			}
		}
	}
	return found
}
