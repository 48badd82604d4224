// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxSocketPath is what fits into sockaddr_un.sun_path with its closing NUL, in bytes.
const maxSocketPath = 107

// ErrSocketInUse says that somebody listens on a socket.
var ErrSocketInUse = errors.New("socket is in use: stop who listens on it, or choose another path")

// socketMode lets root only in.
const socketMode = 0o600

// Listen makes the agent's socket. A socket file on which nobody listens any more is replaced; one on which somebody does,
// and a file that is no socket, is left alone and an error. Closing the listener removes the file.
func Listen(path string) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("agent socket %s: the path has %d bytes, a Unix socket's has %d at most: choose a shorter run-dir",
			path, len(path), maxSocketPath)
	}
	if err := RemoveStaleSocket(path); err != nil {
		return nil, err
	}
	config := net.ListenConfig{
		// bind() gives the file the mode that the socket's own inode has: set before it, there is no moment at which others
		// could connect, and no umask is touched.
		Control: func(_, _ string, c syscall.RawConn) error {
			var err error
			if ctlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), socketMode) }); ctlErr != nil {
				return ctlErr
			}
			return err
		},
	}
	l, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on agent socket %s: %w", path, err)
	}
	return l, nil
}

// RemoveStaleSocket removes a Unix socket's file on which nobody listens. That there is none is no error; that somebody
// listens on it is (ErrSocketInUse), and that it is no socket.
func RemoveStaleSocket(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is no socket (it is %s): remove it, or choose another path", path, info.Mode())
	}
	// Non-blocking, for a server that lives but does not accept.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("try socket %s: %w", path, err)
	}
	defer unix.Close(fd)
	switch err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove stale socket: %w", err)
		}
		return nil
	// Also EAGAIN, its queue is full, and EPROTOTYPE, a server of another type.
	case err == nil, errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("%s: %w", path, ErrSocketInUse)
	default:
		return fmt.Errorf("try socket %s: %w", path, err)
	}
}
