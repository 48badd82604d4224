// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// threadNetns is the network namespace of the calling thread, not of the process.
const threadNetns = "/proc/thread-self/ns/net"

// NS is one network namespace of a bed.
type NS struct {
	// Name is the name given to Pod, or "node" or "outside".
	Name string
	// Path is the bind mount of the namespace: a value for --netns.
	Path string
	// Link is the name of the interface that leads out of the namespace.
	Link string
	// V4 and V6 are the addresses of Link; the zero Addr when it has none of that family. Node has, beside these that
	// Outside sees, the pods' gateway addresses.
	V4, V6 netip.Addr
	// HostLink is the name of the other end of a pod's Link, in Node; empty for Node and Outside.
	HostLink string
	// Inode is the inode number of the namespace, as in /proc/PID/ns/net.
	Inode uint64
	// Cookie is the netns cookie: the key of the maps for this pod (SO_NETNS_COOKIE, kernel 5.14; 0 before).
	Cookie uint64

	bed  *Bed
	file *os.File // keeps the namespace; setns on it also works when Path is gone
}

// newNS makes a network namespace and binds it to a file of the bed. The caller holds b.mu.
func (b *Bed) newNS(name string) (*NS, error) {
	ns := &NS{Name: name, Path: filepath.Join(b.Dir, "netns", name), Link: "eth0", bed: b}
	if err := os.WriteFile(ns.Path, nil, 0o400); err != nil {
		return nil, fmt.Errorf("make a file for netns %s: %w", name, err)
	}
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare (needs root): %w", err)
		}
		if err := unix.Mount(threadNetns, ns.Path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind mount at %s: %w", ns.Path, err)
		}
		cookie, err := netnsCookie()
		ns.Cookie = cookie
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make netns %s: %w", name, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(ns.Path, &st); err != nil {
		return nil, fmt.Errorf("stat netns %s: %w", name, err)
	}
	ns.Inode = st.Ino
	ns.file, err = os.Open(ns.Path)
	if err != nil {
		return nil, fmt.Errorf("open netns %s: %w", name, err)
	}
	b.ns = append(b.ns, ns)
	return ns, nil
}

// netnsCookie returns the cookie of the calling thread's network namespace, 0 when the kernel does not tell.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("make a socket: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return 0, nil // a bed must stand where the agent is to say that it cannot
	}
	if err != nil {
		return 0, fmt.Errorf("read the netns cookie: %w", err)
	}
	return cookie, nil
}

// onThread runs fn on an OS thread of its own and puts the thread back into the network namespace it was in. A
// thread that cannot be put back ends with its goroutine, so no other goroutine ever runs on it.
func onThread(fn func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		var err error
		returned := false
		home, openErr := os.Open(threadNetns)
		defer func() {
			switch {
			case openErr != nil:
				err = openErr
			case !returned:
				err = errors.New("the function ended its goroutine instead of returning")
			}
			if home == nil || unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
			_ = home.Close() // read only: nothing can be lost
			result <- err
		}()
		if openErr == nil {
			err = fn()
			returned = true
		}
	}()
	return <-result
}

// Do runs fn on an OS thread that is in the namespace, and returns its error. Sockets made and processes started by
// fn itself, not by goroutines it starts, are in the namespace and stay in it.
func (n *NS) Do(fn func() error) error {
	return onThread(func() error {
		if err := n.enter(); err != nil {
			return fmt.Errorf("enter netns %s: %w", n.Name, err)
		}
		return fn()
	})
}

// enter moves the calling thread. The descriptor is not another's meanwhile, though the namespace may be removed by now.
func (n *NS) enter() error {
	raw, err := n.file.SyscallConn()
	if err != nil {
		return err
	}
	if errControl := raw.Control(func(fd uintptr) { err = unix.Setns(int(fd), unix.CLONE_NEWNET) }); errControl != nil {
		return errControl
	}
	return err
}

// Handle returns a netlink (route) handle of the namespace. The caller closes it.
func (n *NS) Handle() (*netlink.Handle, error) {
	var h *netlink.Handle
	err := n.Do(func() error {
		var err error
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open netlink in netns %s: %w", n.Name, err)
	}
	return h, nil
}

// Sysctl returns a sysctl of the namespace, by its name with dots ("net.ipv4.tcp_syncookies") or slashes (for
// interfaces with a dot in their name), without the line end.
func (n *NS) Sysctl(name string) (string, error) {
	var data []byte
	err := n.Do(func() error {
		var err error
		data, err = os.ReadFile(sysctlPath(name))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read sysctl %s of netns %s: %w", name, n.Name, err)
	}
	return strings.TrimSuffix(string(data), "\n"), nil
}

// SetSysctl writes a sysctl of the namespace; see Sysctl for its name.
func (n *NS) SetSysctl(name, value string) error {
	err := n.Do(func() error { return writeKernelFile(sysctlPath(name), value) })
	if err != nil {
		return fmt.Errorf("set sysctl %s of netns %s to %q: %w", name, n.Name, value, err)
	}
	return nil
}

func sysctlPath(name string) string {
	if !strings.Contains(name, "/") {
		name = strings.ReplaceAll(name, ".", "/")
	}
	return filepath.Join("/proc/sys", name)
}

func (n *NS) closeFile() error {
	if n.file == nil {
		return nil
	}
	if err := n.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("close netns %s: %w", n.Name, err)
	}
	return nil
}
