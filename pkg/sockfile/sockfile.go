// SPDX-License-Identifier: Apache-2.0

// Package sockfile makes the files of listening Unix sockets, and clears away those that a process which is gone has left. What
// somebody listens on, and what is no socket, it never touches.
package sockfile

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

// MaxPath is what fits into sockaddr_un.sun_path with its closing NUL, in bytes.
const MaxPath = 107

// ErrInUse says that somebody listens on a socket.
var ErrInUse = errors.New("socket is in use: stop who listens on it, or choose another path")

// NotSocketError says that a file is something else than a socket.
type NotSocketError struct {
	Path string
	Mode fs.FileMode
}

// Error names the file and what it is.
func (e *NotSocketError) Error() string {
	return fmt.Sprintf("%s is no socket (it is %s): remove it, or choose another path", e.Path, e.Mode)
}

// Listen listens at a path, "unix" or "unixpacket", with that mode of the file. There must be nothing at the path.
func Listen(network, path string, mode fs.FileMode) (net.Listener, error) {
	config := net.ListenConfig{
		// bind() gives the file the mode that the socket's own inode has: set before it, there is no moment at which others
		// could connect, and no umask is touched.
		Control: func(_, _ string, c syscall.RawConn) error {
			var err error
			if ctlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), uint32(mode.Perm())) }); ctlErr != nil {
				return ctlErr
			}
			return err
		},
	}
	return config.Listen(context.Background(), network, path)
}

// RemoveStale removes the file of a Unix socket, "unix" or "unixpacket", on which nobody listens. That there is none is no error;
// that somebody listens on it is (ErrInUse), and that it is no socket (*NotSocketError).
func RemoveStale(network, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return &NotSocketError{Path: path, Mode: info.Mode()}
	}
	kind := unix.SOCK_STREAM
	if network == "unixpacket" {
		kind = unix.SOCK_SEQPACKET
	}
	// Non-blocking, for a server that lives but does not accept.
	fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
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
	// Also EAGAIN, its queue is full, and EPROTOTYPE, a server of another type of socket.
	case err == nil, errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("%s: %w", path, ErrInUse)
	default:
		return fmt.Errorf("try socket %s: %w", path, err)
	}
}
