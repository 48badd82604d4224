// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// patience is how long anything may take that should happen at once. An emulated machine needs some seconds for some things.
const patience = 15 * time.Second

// demo is one run of the demo.
type demo struct {
	page *page
	hold bool
	self string // this program's file, to be run again in other roles

	bed                  *bed.Bed
	client, web, outside *host
	agent, proxy         *bed.Proc
	procs                []*bed.Proc // all that were started
	log                  *proxyLog
	wrong                int // how many of the things shown were not as they should be
}

// run tells a story and removes what it needed for that, whatever happens.
func (d *demo) run(ctx context.Context, tell func(context.Context) error) error {
	start := time.Now()
	err := guard(func() error { return tell(ctx) })
	if cause := context.Cause(ctx); cause != nil {
		err = cause // what failed then, failed because of that
	} else if err != nil {
		d.showLogs()
	}
	if left := guard(d.tearDown); left != nil {
		if err != nil {
			left = fmt.Errorf("%w\nand before that: %v", left, err) //nolint:errorlint // no excuse for leaving something
		}
		return left
	}
	if err == nil && d.wrong > 0 {
		err = fmt.Errorf("%d of the things above are not as they should be: look for %q", d.wrong, markWrong)
	}
	if err == nil {
		d.farewell(time.Since(start))
	}
	return err
}

// guard makes an error of a panic, for what was made must be removed even so.
func guard(fn func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("this is a bug: %v\n%s", r, debug.Stack())
		}
	}()
	return fn()
}

// tell is the story, part by part.
func (d *demo) tell(ctx context.Context) error {
	for _, part := range []func(context.Context) error{
		d.build, d.enrolBoth, d.showProxied, d.showKernel, d.holdOn, d.showWithoutProxy, d.showProxyBack, d.showUnenrolled,
	} {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// start runs this program in another role, in the node's network namespace. The node proxy has a cgroup of its own: what it is in is
// how it is known.
func (d *demo) start(role, name string, args ...string) (*bed.Proc, error) {
	group := d.bed.Cgroup
	if role == roleNodeproxy {
		var err error
		if group, err = d.bed.Group("proxy"); err != nil {
			return nil, err
		}
	}
	p, err := d.bed.StartIn(d.bed.Node, group, name, append([]string{d.self}, args...), []string{roleVar + "=" + role})
	if err == nil {
		d.procs = append(d.procs, p)
	}
	return p, err
}

// redirector runs a command of the command line to its end and returns what it wrote.
func (d *demo) redirector(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	p, err := d.start(roleRedirector, "redirector "+args[0], args...)
	if err != nil {
		return "", err
	}
	if err := p.Wait(ctx); err != nil {
		// It may wait for the proxy yet, and the agent for the end of that.
		err = errors.Join(err, p.Kill())
		return "", fmt.Errorf("redirector %s: %w: %s", args[0], err, strings.TrimSpace(p.Output()))
	}
	return p.Output(), nil
}

// show prints a command, runs it, and says how long that took.
func (d *demo) show(ctx context.Context, args ...string) error {
	d.command("redirector", args...)
	start := time.Now()
	out, err := d.redirector(ctx, args...)
	if err != nil {
		return err
	}
	took := time.Since(start).Round(time.Millisecond)
	for line := range strings.Lines(out) {
		d.page.printf("  %s", d.short(strings.TrimSpace(line)))
	}
	d.page.printf("  done in %s", took)
	return nil
}

func (d *demo) command(program string, args ...string) {
	words := []string{program}
	for _, a := range args {
		words = append(words, d.short(a))
	}
	d.page.command(words...)
}

// short writes the bed's long paths by the variables that the demo has told of.
func (d *demo) short(s string) string {
	return strings.NewReplacer(d.bed.Cgroup, "$C", d.bed.Dir, "$D").Replace(s)
}

// pods asks the agent about the enrolled pods, by UID.
func (d *demo) pods(ctx context.Context) (map[string]enroll.Pod, error) {
	out, err := d.redirector(ctx, "pods", "--run-dir", d.bed.RunDir, "-o", "json")
	if err != nil {
		return nil, err
	}
	var list []enroll.Pod
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, fmt.Errorf("read what `redirector pods` wrote: %w", err)
	}
	pods := map[string]enroll.Pod{}
	for _, p := range list {
		pods[p.UID] = p
	}
	return pods, nil
}

// stop ends a process as a person would, and by force if it does not listen.
func stop(p *bed.Proc) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	select {
	case <-p.Done():
		return fmt.Errorf("%s had ended by itself: %s", p.Name, strings.TrimSpace(p.Output()))
	default:
	}
	if err := p.Signal(unix.SIGTERM); err != nil {
		return err
	}
	err := p.Wait(ctx)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signal() == unix.SIGTERM {
			return nil // before it could have asked to be told
		}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%s after SIGTERM: %w: %s", p.Name, err, strings.TrimSpace(p.Output())), p.Kill())
	}
	return nil
}

// showLogs prints the ends of the agent's and the proxy's logs, to show why something failed.
func (d *demo) showLogs() {
	for _, p := range []*bed.Proc{d.agent, d.proxy} {
		if p == nil || p.Output() == "" {
			continue
		}
		lines := strings.Split(strings.TrimSpace(p.Output()), "\n")
		fmt.Fprintf(os.Stderr, "the last lines of %s:\n  %s\n", p.Name, strings.Join(lines[max(0, len(lines)-8):], "\n  "))
	}
}

// tearDown removes everything in the order that a person would, and looks whether it is gone. It does not end early.
func (d *demo) tearDown() error {
	if d.bed == nil {
		return nil
	}
	d.page.headline("The end: everything is removed")
	var errs []error
	if d.proxy != nil {
		errs = append(errs, stop(d.proxy))
	}
	if d.agent != nil {
		errs = append(errs, stop(d.agent), d.cleanup())
	}
	errs = append(errs, d.bed.Close(), d.leftovers())
	if err := errors.Join(errs...); err != nil {
		return err
	}
	d.page.printf("%s no pin, no program, no process, no cgroup, no mount, no file is left", d.page.paint(green, markRight))
	return nil
}

// cleanup takes the dataplane off, and looks whether that is so. The agent has ended.
func (d *demo) cleanup() error {
	err := d.show(context.Background(), "cleanup", "--run-dir", d.bed.RunDir, "--bpffs", d.bed.BPFFS, "--zds-socket", d.bed.ZDSSocket)
	if err != nil {
		return err
	}
	pins, err := filepath.Glob(d.bed.BPFFS + "*") // beside it, the kernel has files of its own
	if err != nil {
		return err
	}
	if len(pins) > 0 {
		return fmt.Errorf("left after cleanup: %s", strings.Join(pins, ", "))
	}
	attached, err := programsOn(d.bed.Cgroup)
	if err == nil && attached > 0 {
		err = fmt.Errorf("left after cleanup: %d programs on cgroup %s", attached, d.bed.Cgroup)
	}
	return err
}

// leftovers looks for traces of the bed after its end.
func (d *demo) leftovers() error {
	var errs []error
	for _, path := range []string{d.bed.Dir, filepath.Dir(d.bed.Cgroup)} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("left behind: %s", path))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	errs = append(errs, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, d.bed.Dir) {
			errs = append(errs, fmt.Errorf("left mounted: %s", strings.TrimSpace(line)))
		}
	}
	for _, p := range d.procs {
		select {
		case <-p.Done():
		default:
			errs = append(errs, fmt.Errorf("left running: %s (pid %d)", p.Name, p.Pid))
		}
	}
	return errors.Join(errs...)
}
