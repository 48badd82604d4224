// SPDX-License-Identifier: Apache-2.0

// Package podns opens the network namespaces of pods and runs code in them. A NetNS is never the host's: this is the only
// package that makes one, and it refuses the namespace of the agent and that of pid 1, by whatever path they come.
// Everything that programs a pod takes a NetNS, so no caller can get that wrong.
package podns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Errors that Open wraps.
var (
	// ErrHost says that a path leads to the network namespace of the agent or of pid 1.
	ErrHost = errors.New("is the host's network namespace: name the pod's own, as in /run/netns/NAME or /proc/PID/ns/net")
	// ErrNotNetNS says that a path leads to something else than a network namespace.
	ErrNotNetNS = errors.New("is not a network namespace: name one, as in /run/netns/NAME or /proc/PID/ns/net")
)

// identity tells namespaces apart, whatever path led to them.
type identity struct {
	dev, ino uint64
}

// own is the namespace that the process was started in. It is read before any thread can have gone elsewhere.
var own, errOwn = statNetNS("/proc/self/ns/net")

// NetNS is an open handle on one pod's network namespace. It keeps the namespace alive until Close. Its methods may be
// called from several goroutines, but not after Close.
type NetNS struct {
	file   *os.File
	path   string
	id     identity
	cookie uint64
}

// Open opens the network namespace that path leads to: a bind mount or /proc/PID/ns/net. It fails with an error that wraps
// ErrHost, ErrNotNetNS or the system's error, and needs kernel 5.14 (SO_NETNS_COOKIE).
func Open(path string) (*NetNS, error) {
	// Non-blocking, so that a FIFO does not hang us.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil && filepath.Clean(path) == "/proc/1/ns/net" {
		return nil, fmt.Errorf("%q %w", path, ErrHost) // whatever keeps us from looking at it
	}
	if err != nil {
		return nil, fmt.Errorf("open network namespace %q: %w: name one that the agent sees, as in /run/netns/NAME or /proc/PID/ns/net", path, err)
	}
	n := &NetNS{file: os.NewFile(uintptr(fd), path), path: path}
	if err := n.identify(); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func (n *NetNS) identify() error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(n.FD(), &fs); err != nil {
		return fmt.Errorf("network namespace %q: statfs: %w", n.path, err)
	}
	if fs.Type != unix.NSFS_MAGIC {
		return fmt.Errorf("%q %w", n.path, ErrNotNetNS)
	}
	kind, err := unix.IoctlRetInt(n.FD(), unix.NS_GET_NSTYPE)
	if err != nil {
		return fmt.Errorf("network namespace %q: ask for its type: %w", n.path, err)
	}
	if kind != unix.CLONE_NEWNET {
		return fmt.Errorf("%q %w", n.path, ErrNotNetNS)
	}

	var st unix.Stat_t
	if err := unix.Fstat(n.FD(), &st); err != nil {
		return fmt.Errorf("network namespace %q: stat: %w", n.path, err)
	}
	n.id = identity{st.Dev, st.Ino}
	return n.Do(func() error {
		host, err := n.isHost()
		if err != nil {
			// When it cannot be told which namespace is the host's, none is safe to touch.
			return fmt.Errorf("network namespace %q: find out whether it is the host's: %w", n.path, err)
		}
		if host {
			return fmt.Errorf("%q %w", n.path, ErrHost)
		}
		n.cookie, err = Cookie()
		if err != nil {
			return fmt.Errorf("network namespace %q: read its cookie (SO_NETNS_COOKIE needs kernel 5.14): %w", n.path, err)
		}
		return nil
	})
}

// Close gives the handle back. The namespace lives on while something else uses it.
func (n *NetNS) Close() error { return n.file.Close() }

// FD is the open descriptor of the namespace, valid until Close.
func (n *NetNS) FD() int { return int(n.file.Fd()) }

// Path is the path that the namespace was opened by.
func (n *NetNS) Path() string { return n.path }

// Cookie is the number by which the BPF maps know the namespace. The kernel never gives it to another.
func (n *NetNS) Cookie() uint64 { return n.cookie }

// Inode is the namespace's number as in `ls -l /proc/PID/ns/net` and lsns. It is given to another namespace when this one is
// gone.
func (n *NetNS) Inode() uint64 { return n.id.ino }

// Do runs fn on a thread that is in the namespace, and returns its error. Sockets that fn makes belong to the namespace for
// good; goroutines that fn starts are not in it.
func (n *NetNS) Do(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			// Not the main thread: where that is, /proc/PID/ns says of the whole process. While this goroutine
			// holds it, the next gets another.
			done <- n.Do(fn)
			runtime.UnlockOSThread()
			return
		}
		back, err := os.Open("/proc/self/task/" + strconv.Itoa(unix.Gettid()) + "/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("open the thread's network namespace: %w", err)
			return
		}
		defer back.Close()
		if err := unix.Setns(n.FD(), unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter network namespace %q: %w", n.path, err)
			return
		}
		err = fn()
		// A thread that cannot go back stays locked, and so ends with this goroutine.
		if unix.Setns(int(back.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

func statNetNS(path string) (identity, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return identity{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return identity{st.Dev, st.Ino}, nil
}

// Cookie reads the cookie of the calling thread's network namespace. Needs kernel 5.14 (SO_NETNS_COOKIE).
func Cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}
