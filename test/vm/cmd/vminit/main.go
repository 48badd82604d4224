// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Vminit is PID 1 of the test VM. It mounts what a test expects of a machine, loads the kernel modules it was given,
// runs one program, hands back its exit status and the files that were asked for, and switches the machine off.
//
// It leaves the network as the kernel made it: lo is there and down.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/vm/guest"
)

// outputPort is the second serial port. The first one is the kernel's console: its log must not get between the
// bytes of the program's output.
const outputPort = "/dev/ttyS1"

// mounts are made in this order. Every kernel this is run on has all of these file systems.
var mounts = []struct{ fstype, target, options string }{
	{"proc", "/proc", ""},
	{"sysfs", "/sys", ""},
	{"devtmpfs", "/dev", ""},
	{"devpts", "/dev/pts", ""},
	{"tmpfs", "/dev/shm", ""},
	{"bpf", "/sys/fs/bpf", ""},
	{"debugfs", "/sys/kernel/debug", ""},
	{"tracefs", "/sys/kernel/tracing", ""},
}

func main() {
	var notes []error
	for _, m := range mounts {
		if err := mount(m.fstype, m.target, m.options); err != nil {
			notes = append(notes, err)
		}
	}
	// These stay on the root file system: the program's folder, with its testdata, may well be below one of them.
	notes = append(notes, os.MkdirAll("/run", 0o755), os.MkdirAll("/tmp", 0o777), os.Chmod("/tmp", 0o777|os.ModeSticky))
	if err := redirectOutput(); err != nil {
		notes = append(notes, err)
	}
	c, err := readConfig()
	if err != nil {
		note(err)
		powerOff(guest.CodeSetup)
	}
	notes = append(notes, mountCgroups(c.Cgroups),
		// The modules of the tunnel drivers would put a fallback device of each kind into every namespace.
		writeFile("/proc/sys/net/core/fb_tunnels_only_for_init_net", "2"))
	for _, m := range c.Modules {
		notes = append(notes, loadModule(m))
	}
	for name, value := range c.Sysctls {
		notes = append(notes, writeFile(filepath.Join("/proc/sys", name), value))
	}
	for _, err := range notes {
		note(err)
	}
	code := run(c)
	for _, root := range c.Collect {
		note(collect(root))
	}
	powerOff(code)
}

// legacyControllers are those of cgroup v1 that every kernel this is run on has, and that a process may enter at once.
var legacyControllers = []string{"cpu", "pids", "freezer", "devices"}

// mountCgroups mounts cgroups as they are wanted. With version 1 the program is put into a group of its own, as a container
// runtime does.
func mountCgroups(how guest.Cgroups) error {
	if how == guest.CgroupsUnified {
		return mount("cgroup2", "/sys/fs/cgroup", "")
	}
	errs := []error{mount("tmpfs", "/sys/fs/cgroup", "mode=0755")}
	for _, c := range legacyControllers {
		errs = append(errs, mount("cgroup", filepath.Join("/sys/fs/cgroup", c), c))
	}
	group := "/sys/fs/cgroup/pids/kubepods/pod1"
	errs = append(errs, os.MkdirAll(group, 0o755), writeFile(filepath.Join(group, "cgroup.procs"), "0"))
	return errors.Join(errs...)
}

func mount(fstype, target, options string) error {
	// Below /sys and /dev the folders are the kernel's own and exist; elsewhere they have to be made.
	if err := os.MkdirAll(target, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	if err := unix.Mount(fstype, target, fstype, 0, options); err != nil {
		return fmt.Errorf("mount %s on %s: %w", fstype, target, err)
	}
	return nil
}

// redirectOutput makes the second serial port the standard output and error, without any translation of bytes.
func redirectOutput() error {
	fd, err := unix.Open(outputPort, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", outputPort, err)
	}
	defer unix.Close(fd)
	tio, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return fmt.Errorf("get terminal settings of %s: %w", outputPort, err)
	}
	tio.Oflag &^= unix.OPOST
	tio.Lflag &^= unix.ECHO | unix.ICANON | unix.ISIG
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, tio); err != nil {
		return fmt.Errorf("set terminal settings of %s: %w", outputPort, err)
	}
	for _, std := range []int{unix.Stdout, unix.Stderr} {
		if err := unix.Dup3(fd, std, 0); err != nil {
			return fmt.Errorf("make %s descriptor %d: %w", outputPort, std, err)
		}
	}
	return nil
}

func readConfig() (*guest.Config, error) {
	b, err := os.ReadFile(guest.ConfigPath)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	c := new(guest.Config)
	if err := json.Unmarshal(b, c); err != nil {
		return nil, fmt.Errorf("read configuration %s: %w", guest.ConfigPath, err)
	}
	if len(c.Argv) == 0 {
		return nil, fmt.Errorf("configuration %s names no program", guest.ConfigPath)
	}
	return c, nil
}

func loadModule(m guest.Module) error {
	f, err := os.Open(m.Path)
	if err != nil {
		return fmt.Errorf("load module: %w", err)
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), m.Params, 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load module %s: %w", filepath.Base(m.Path), err)
	}
	return nil
}

func run(c *guest.Config) int {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		note(fmt.Errorf("uname: %w", err))
	}
	for _, p := range c.Collect {
		// The Go runtime writes coverage into a folder that has to exist; a file needs its parent.
		dir := filepath.Dir(p)
		if strings.HasSuffix(p, "/") {
			dir = p
		}
		note(os.MkdirAll(dir, 0o755))
	}
	// Level 4 is a warning: the console shows it, and everything more urgent.
	note(writeFile("/dev/kmsg", "<4>"+guest.LogMark))
	send(guest.Record{Kind: guest.Ready, Text: unix.ByteSliceToString(uts.Release[:])})

	cmd := &exec.Cmd{Path: c.Argv[0], Args: c.Argv, Env: c.Env, Dir: c.Dir, Stdout: os.Stdout, Stderr: os.Stderr}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &exit):
		note(fmt.Errorf("start %s: %w", c.Argv[0], err))
		return guest.CodeExec
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return exit.ExitCode()
}

func collect(root string) error {
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		send(guest.Record{Kind: guest.File, Path: p, Data: b})
		return nil
	})
	if err != nil {
		return fmt.Errorf("collect %s: %w", root, err)
	}
	return nil
}

// powerOff reports the exit status and ends the machine. It does not return.
func powerOff(code int) {
	send(guest.Record{Kind: guest.Exit, Code: code})
	// The port's buffer would be lost with the machine: wait until it is empty (this is tcdrain).
	_ = unix.IoctlSetInt(unix.Stdout, unix.TCSBRK, 1)
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		note(fmt.Errorf("power off: %w", err))
	}
	select {}
}

// note tells the host of a failure that does not end the run; nil is no failure.
func note(err error) {
	if err != nil {
		send(guest.Record{Kind: guest.Note, Text: err.Error()})
	}
}

func send(r guest.Record) {
	line, err := r.Line()
	if err != nil {
		line = []byte(err.Error() + "\n")
	}
	// There is nobody left to tell when the serial port itself fails; the host notices the missing exit record.
	_, _ = os.Stdout.Write(line)
}

func writeFile(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}
