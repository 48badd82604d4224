// SPDX-License-Identifier: Apache-2.0

// Package bed makes the network, the cgroup and the bpffs that a test, a demo or a benchmark runs in, and removes them
// at its end.
//
// A bed is a small cluster node made of network namespaces:
//
//	pod eth0 ──┐
//	pod eth0 ──┼── Node (routes, no NAT, no netfilter) eth0 ── eth0 Outside
//	pod eth0 ──┘
//
// Everything a bed makes lives below one private directory or in one private cgroup, so that what is left of a killed
// run can be found and removed (see [Sweep]). The network namespace of the machine is never changed: every link is made
// within one of the bed's own namespaces.
//
// A bed needs root, a cgroup2 mount and a kernel with bpffs and veth. Where the kernel has no IPv6, its namespaces have IPv4 only. It stands on Linux 5.10 too, where the agent refuses
// to work, for tests of just that. It runs no tool.
package bed

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// maxSocketDir bounds the length of a bed's directory, in bytes: a Unix socket's path has room for 107 bytes
// (sun_path in unix(7), with its NUL), and "/run/" and the longest socket name used below it must still fit.
const maxSocketDir = 107 - 32

// Options says what a bed looks like. The zero value is a node that routes to its pods (no bridge), as the ptp CNI
// plugin and most clouds' plugins do.
type Options struct {
	// Bridge connects the pods to one bridge in Node with a /24 and a /64, as the bridge CNI plugin does. The kernel
	// must have bridges. Otherwise each pod has a /32 and a /128 and its own veth pair that Node routes to.
	Bridge bool
	// NodeV6Disabled turns IPv6 off by sysctl in Node and Outside. Pods have it if Node bridges, and no IPv6 gateway then.
	NodeV6Disabled bool
}

// Bed is a node, a host beyond it, pods on demand, and the directory, bpffs and cgroup for what runs on the node.
// Its methods may be called from several goroutines.
type Bed struct {
	// Dir is the private directory of the bed; all other paths are below it.
	Dir string
	// BPFFS is a path that does not exist yet on a bpffs that only this bed uses: a value for --bpffs.
	BPFFS string
	// RunDir is an empty directory: a value for --run-dir.
	RunDir string
	// Cgroup is the cgroup2 group whose members count as the node's processes: a value for --cgroup. What is attached
	// to it sees only processes started with Start(..., true, ...) and, after JoinCgroup, the calling process.
	Cgroup string
	// ZDSSocket is a path for the ZDS socket, below RunDir and short enough for a Unix socket.
	ZDSSocket string

	// Node stands for the host: the agent runs in it.
	Node *NS
	// Outside is a host beyond the node. It routes to the pods through Node.
	Outside *NS
	// nodeV6 says whether those two have IPv6.
	nodeV6 bool

	opts        Options
	cgroupTop   string // holds both groups, removed with them
	cgroupOther string // for processes that must not be in Cgroup, yet must be found by a sweep
	cgroupMount string

	mu        sync.Mutex
	closed    bool
	closeErr  error
	podCount  int
	ns        []*NS
	procs     []*Proc
	closers   []io.Closer
	procNames map[string]int
	oldCgroup string // where JoinCgroup found the process; empty while it is not in Cgroup
}

// New makes a bed and, first, sweeps what dead processes left of theirs. When it fails, it leaves nothing.
func New(opts Options) (*Bed, error) {
	if err := Sweep(); err != nil {
		return nil, err
	}
	b := &Bed{opts: opts, nodeV6: !opts.NodeV6Disabled && HasIPv6(), procNames: map[string]int{}}
	if err := b.setUp(); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func (b *Bed) setUp() error {
	// A minimal VM has no /tmp.
	if err := os.MkdirAll(os.TempDir(), 0o1777); err != nil {
		return fmt.Errorf("make the directory for temporary files: %w", err)
	}
	owner, err := thisProcess()
	if err != nil {
		return err
	}
	b.Dir, err = os.MkdirTemp("", owner.prefix()+"*")
	if err != nil {
		return fmt.Errorf("make the directory of a bed: %w", err)
	}
	if len(b.Dir) > maxSocketDir {
		return fmt.Errorf("directory %s is too long for Unix sockets below it: set TMPDIR to a shorter one", b.Dir)
	}
	// A private mount keeps the mounts below it from spreading to other mount namespaces, where they would outlive us.
	if err := unix.Mount(b.Dir, b.Dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind mount %s on itself (needs root): %w", b.Dir, err)
	}
	if err := unix.Mount("", b.Dir, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mount %s private: %w", b.Dir, err)
	}
	b.RunDir = filepath.Join(b.Dir, "run")
	b.ZDSSocket = filepath.Join(b.RunDir, "zds.sock")
	bpf := filepath.Join(b.Dir, "bpf")
	b.BPFFS = filepath.Join(bpf, "redirector")
	for _, d := range []string{b.RunDir, bpf, filepath.Join(b.Dir, "netns"), filepath.Join(b.Dir, "log")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return fmt.Errorf("make a directory of a bed: %w", err)
		}
	}
	if err := unix.Mount("bpffs", bpf, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount a bpffs at %s: %w", bpf, err)
	}
	if err := b.makeCgroups(); err != nil {
		return err
	}
	return b.makeNetwork()
}

// Close removes all the bed has made: it closes apps and listeners, kills processes, moves the calling process back to
// its own cgroup, and removes mounts, namespaces, the cgroup and the directory. It goes on after a failure and
// returns all failures joined. Later calls do nothing and return the same.
//
// A connection of the caller keeps the namespace of its socket alive: close it before.
func (b *Bed) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return b.closeErr
	}
	b.closed = true

	var errs []error
	add := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	for _, c := range slices.Backward(b.closers) {
		if err := c.Close(); err != nil && !isClosed(err) {
			add(err)
		}
	}
	for _, p := range b.procs {
		p.kill()
	}
	for _, p := range b.procs {
		p.finish()
	}
	add(b.leaveCgroup())
	for _, ns := range slices.Backward(b.ns) {
		add(ns.closeFile())
	}
	if b.Dir != "" {
		add(unmountBelow(b.Dir))
	}
	add(b.removeCgroups())
	if b.Dir != "" {
		add(removeDir(b.Dir))
	}
	b.closeErr = errors.Join(errs...)
	return b.closeErr
}

// addCloser has Close close c. It fails when the bed is closed already.
func (b *Bed) addCloser(c io.Closer) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return errClosed
	}
	b.closers = append(b.closers, c)
	return nil
}

var errClosed = errors.New("the bed is closed")
