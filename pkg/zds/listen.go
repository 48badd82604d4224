// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxSocketPath is what fits into sockaddr_un.sun_path with its closing NUL.
const maxSocketPath = 107

// socketFile is the listener's place in the file system.
type socketFile struct {
	path string
	id   fileID
}

// fileID tells files, and namespaces, apart while they exist.
type fileID struct{ dev, ino uint64 }

func fileIDOf(st *unix.Stat_t) fileID { return fileID{dev: st.Dev, ino: st.Ino} }

// listenSeqpacket listens at path with the file mode given, and clears away what
// a server that is gone left there.
func listenSeqpacket(path string, mode os.FileMode) (*net.UnixListener, socketFile, error) {
	if !filepath.IsAbs(path) {
		return nil, socketFile{}, fmt.Errorf("ZDS socket %q: give an absolute path", path)
	}
	if len(path) > maxSocketPath {
		return nil, socketFile{}, fmt.Errorf("ZDS socket %s: the path has %d bytes, a Unix socket's has %d at most: choose a shorter one",
			path, len(path), maxSocketPath)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, socketFile{}, fmt.Errorf("create the directory of ZDS socket %s: %w", path, err)
	}
	if err := removeStale(path); err != nil {
		return nil, socketFile{}, err
	}

	config := net.ListenConfig{
		// bind() gives the file the mode of the socket's own inode: set before it,
		// there is no moment at which others could connect, and no umask is touched.
		Control: func(_, _ string, c syscall.RawConn) error {
			var err error
			if ctlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), uint32(mode.Perm())) }); ctlErr != nil {
				return ctlErr
			}
			return err
		},
	}
	l, err := config.Listen(context.Background(), "unixpacket", path)
	if err != nil {
		return nil, socketFile{}, fmt.Errorf("listen on ZDS socket %s: %w", path, err)
	}
	listener, ok := l.(*net.UnixListener)
	if !ok {
		_ = l.Close()
		return nil, socketFile{}, fmt.Errorf("listen on ZDS socket %s: got a %T", path, l)
	}
	// By the time we stop, the path may belong to somebody else: remove checks.
	listener.SetUnlinkOnClose(false)
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		_ = listener.Close()
		return nil, socketFile{}, fmt.Errorf("look at ZDS socket %s after creating it: %w", path, err)
	}
	return listener, socketFile{path: path, id: fileIDOf(&st)}, nil
}

// remove takes the socket file away if it is still the one we made.
func (f socketFile) remove() error {
	var st unix.Stat_t
	switch err := unix.Lstat(f.path, &st); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at ZDS socket %s before removing it: %w", f.path, err)
	case fileIDOf(&st) != f.id:
		return nil // a successor's
	}
	if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove ZDS socket: %w", err)
	}
	return nil
}

// removeStale removes a socket file on which nobody listens. A socket on which
// somebody does, and anything that is not a socket, is left alone and an error.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look at ZDS socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("ZDS socket %s exists and is not a socket (%s): remove it or choose another path", path, info.Mode().Type())
	}

	// Non-blocking, for a server that lives but does not accept.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("try ZDS socket %s: %w", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	switch err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); {
	case errors.Is(err, unix.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove stale ZDS socket: %w", err)
		}
		return nil
	// Also EAGAIN, its queue is full, and EPROTOTYPE, a server of another type.
	case err == nil, errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("ZDS socket %s is in use: another server listens on it, stop that one or choose another path", path)
	case errors.Is(err, unix.ENOENT):
		return nil
	default:
		return fmt.Errorf("try ZDS socket %s: %w", path, err)
	}
}
