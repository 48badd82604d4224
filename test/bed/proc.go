// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// outputTail is how much of a process's output is kept for failure messages, in bytes.
const outputTail = 64 << 10

// Proc is a process that a bed has started.
type Proc struct {
	// Name is the name given to Start.
	Name string
	// Pid is its process id; it leads its own process group.
	Pid int
	// LogPath is the file that its standard output and standard error go to.
	LogPath string

	cmd  *exec.Cmd
	done chan struct{}
	err  error // of Wait; set before done is closed

	mu   sync.Mutex
	last string // the output, once the log is about to be removed
	gone bool
}

// Start runs a program in the namespace. With cgroup it is in the bed's cgroup from its first instruction; without, it
// is in a group beside it that nothing is attached to. The name is for messages and the log file. env is added to the
// environment of the calling process. The process gets no terminal signals; Close kills it if it still runs.
func (b *Bed) Start(ns *NS, cgroup bool, name string, argv, env []string) (*Proc, error) {
	group := b.cgroupOther
	if cgroup {
		group = b.Cgroup
	}
	return b.StartIn(ns, group, name, argv, env)
}

// Group makes a cgroup below the bed's, "pods/a" with those above it, and returns its directory.
func (b *Bed) Group(name string) (string, error) {
	dir := filepath.Join(b.Cgroup, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make a cgroup: %w", err)
	}
	return dir, nil
}

// StartIn is Start with the cgroup that the process is to be in.
func (b *Bed) StartIn(ns *NS, group, name string, argv, env []string) (*Proc, error) {
	if len(argv) == 0 || ns == nil {
		return nil, fmt.Errorf("start %s: it needs a program and a namespace", name)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, errClosed
	}
	dir, err := os.Open(group)
	if err != nil {
		return nil, fmt.Errorf("start %s: open its cgroup: %w", name, err)
	}
	defer dir.Close()

	logName := strings.ReplaceAll(name, "/", "_")
	b.procNames[logName]++
	if n := b.procNames[logName]; n > 1 {
		logName = fmt.Sprintf("%s.%d", logName, n)
	}
	p := &Proc{
		Name:    name,
		LogPath: filepath.Join(b.Dir, "log", logName+".log"),
		cmd:     exec.Command(argv[0], argv[1:]...),
		done:    make(chan struct{}),
	}
	// The process writes to the file itself: no pipe that a slow reader here could fill.
	log, err := os.OpenFile(p.LogPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start %s: make its log: %w", name, err)
	}
	defer log.Close()
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		UseCgroupFD: true, // clone3 with CLONE_INTO_CGROUP, kernel 5.7
		CgroupFD:    int(dir.Fd()),
		Setpgid:     true,
	}
	// The child inherits the namespace of the thread that forks it.
	if err := ns.Do(p.cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s in netns %s: %w", name, ns.Name, err)
	}
	p.Pid = p.cmd.Process.Pid
	b.procs = append(b.procs, p)
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Signal sends a signal to the process.
func (p *Proc) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("send %s to %s (pid %d): %w", sig, p.Name, p.Pid, err)
	}
	return nil
}

// Kill kills the process and its process group and waits until it is gone. It is no error when it has ended before.
func (p *Proc) Kill() error {
	p.kill()
	select {
	case <-p.done:
		return nil
	case <-time.After(cgroupPatience):
		return fmt.Errorf("%s (pid %d) still runs %s after SIGKILL", p.Name, p.Pid, cgroupPatience)
	}
}

func (p *Proc) kill() {
	select {
	case <-p.done:
		return // its pid may be another's by now
	default:
	}
	// The leader is waited for only in the goroutine that closes done; a race with that hits a group without members,
	// unless the kernel gives the pid away within these lines.
	if err := unix.Kill(-p.Pid, unix.SIGKILL); err != nil {
		_ = p.cmd.Process.Kill() // fails only when the process is gone
	}
}

// Done is closed when the process has ended.
func (p *Proc) Done() <-chan struct{} { return p.done }

// Wait waits until the process has ended and returns what became of it, as [exec.Cmd.Wait] does: nil for exit
// status 0, an [exec.ExitError] for others. When ctx ends first, it returns the cause of that.
func (p *Proc) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	default:
	}
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("wait for %s (pid %d): %w", p.Name, p.Pid, context.Cause(ctx))
	}
}

// Output returns what the process has written so far to its standard output and standard error; of long output the end,
// 64 KiB. It still works after Close.
func (p *Proc) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return p.last
	}
	out, err := tail(p.LogPath)
	if err != nil {
		return fmt.Sprintf("(read the output of %s: %v)", p.Name, err)
	}
	return out
}

// finish waits for a killed process and keeps its output, for its log is about to be removed.
func (p *Proc) finish() {
	select {
	case <-p.done:
	case <-time.After(cgroupPatience): // the cgroup cannot be removed then, and Close says so
	}
	out := p.Output()
	p.mu.Lock()
	p.last, p.gone = out, true
	p.mu.Unlock()
}

func tail(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return "", err
	}
	if _, err := f.Seek(max(0, size-outputTail), io.SeekStart); err != nil {
		return "", err
	}
	data, err := io.ReadAll(f)
	if err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	return string(data), nil
}
