// SPDX-License-Identifier: Apache-2.0

package podns

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// isHost says whether the namespace, which the calling thread must be in, is a host's: the agent's own, that of pid 1, or
// the one that the machine was booted with. The last two differ when the node is itself a container.
func (n *NetNS) isHost() (bool, error) {
	if errOwn != nil {
		return false, errOwn
	}
	if n.id == own {
		return true, nil
	}
	if initial, err := inInitialNetNS(); initial || err != nil {
		return initial, err
	}
	init, err := statNetNS("/proc/1/ns/net")
	if errors.Is(err, fs.ErrPermission) {
		return inNetNSOfInit()
	}
	return n.id == init, err
}

// inInitialNetNS says whether the calling thread is in the network namespace of the machine's boot: there alone exists
// this sysctl, which is about all network devices' soft interrupts.
func inInitialNetNS() (bool, error) {
	_, err := os.Stat("/proc/sys/net/core/dev_weight")
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// inNetNSOfInit says whether the calling thread is in the network namespace of pid 1, without the right to look at pid 1's
// namespaces, which takes all the capabilities that it has: an abstract Unix socket made here is listed there or not.
func inNetNSOfInit() (bool, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("make a Unix socket: %w", err)
	}
	defer unix.Close(fd)
	name := "@redirector-" + rand.Text()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err != nil {
		return false, fmt.Errorf("bind a Unix socket: %w", err)
	}
	// The thread's own list first: a name that is not even there proves nothing.
	if listed, err := listsUnixSocket("/proc/thread-self/net/unix", name); err != nil || !listed {
		return false, errors.Join(err, errors.New("/proc/thread-self/net/unix does not list a socket that is there"))
	}
	return listsUnixSocket("/proc/1/net/unix", name)
}

func listsUnixSocket(path, name string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if strings.HasSuffix(lines.Text(), " "+name) {
			return true, nil
		}
	}
	return false, lines.Err()
}
