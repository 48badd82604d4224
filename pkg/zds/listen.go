// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/sockfile"
)

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
	if len(path) > sockfile.MaxPath {
		return nil, socketFile{}, fmt.Errorf("ZDS socket %s: the path has %d bytes, a Unix socket's has %d at most: choose a shorter one",
			path, len(path), sockfile.MaxPath)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, socketFile{}, fmt.Errorf("create the directory of ZDS socket %s: %w", path, err)
	}
	if err := removeStale(path); err != nil {
		return nil, socketFile{}, err
	}

	l, err := sockfile.Listen("unixpacket", path, mode)
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
	err := sockfile.RemoveStale("unixpacket", path)
	if file, ok := errors.AsType[*sockfile.NotSocketError](err); ok {
		return fmt.Errorf("ZDS socket %s exists and is not a socket (%s): remove it or choose another path", path, file.Mode.Type())
	}
	if errors.Is(err, sockfile.ErrInUse) {
		return fmt.Errorf("ZDS socket %s is in use: another server listens on it, stop that one or choose another path", path)
	}
	if err != nil {
		return fmt.Errorf("ZDS %w", err)
	}
	return nil
}
