// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Others write to the configuration directory, too: the primary plugin's agent, other meshes, people. What they write must not be
// lost between our reading a file and our replacing it. So a file is replaced by exchanging it with the new one, and what comes out
// is looked at: if it is not what was read, it goes back.

// errChanged says that somebody else has changed a file meanwhile: look again.
var errChanged = errors.New("the file was changed by somebody else meanwhile")

// tempPattern is how temporary files are called. Runtimes look at the ending of names.
const tempPattern = ".redirector-*.tmp"

// maxConf bounds configuration files, in bytes.
const maxConf = 4 << 20

// maxSwaps bounds how often an exchange is undone and redone, while somebody else replaces the file each time.
const maxSwaps = 100

// confFile is a configuration file as it was read.
type confFile struct {
	path string // symbolic links followed
	text []byte
	info fs.FileInfo
	stat unix.Stat_t
}

// readConf reads a configuration file. It waits for nobody, if the file is a FIFO for example.
func readConf(path string) (*confFile, error) {
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(target, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	c := &confFile{path: target}
	if c.info, err = f.Stat(); err != nil {
		return nil, err
	}
	if !c.info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file (it is %s)", target, c.info.Mode())
	}
	if err := unix.Fstat(int(f.Fd()), &c.stat); err != nil {
		return nil, err
	}
	c.text, err = io.ReadAll(io.LimitReader(f, maxConf+1))
	if err == nil && len(c.text) > maxConf {
		err = fmt.Errorf("%s has more than %d bytes", target, maxConf)
	}
	return c, err
}

// writeTemp makes a file with that content beside path, on the disk when it returns.
func writeTemp(path string, text []byte, mode fs.FileMode, uid, gid int) (name string, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), tempPattern)
	if err != nil {
		return "", err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	if _, err := f.Write(text); err != nil {
		return "", err
	}
	if err := f.Chown(uid, gid); err != nil {
		return "", err
	}
	if err := f.Chmod(mode); err != nil {
		return "", err
	}
	return f.Name(), f.Sync()
}

// createFile makes a new file; errChanged if there is one by now.
func createFile(path string, text []byte, mode fs.FileMode, uid, gid int) error {
	temp, err := writeTemp(path, text, mode, uid, gid)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE); err != nil {
		_ = os.Remove(temp)
		if errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("write %s: %w", path, errChanged)
		}
		return fmt.Errorf("write %s: %w", path, err)
	}
	return syncDir(path)
}

// replace gives the file a new content, and keeps its mode and owner; errChanged if it is not as it was read.
func (c *confFile) replace(text []byte) error {
	temp, err := writeTemp(c.path, text, c.info.Mode().Perm(), int(c.stat.Uid), int(c.stat.Gid))
	if err != nil {
		return fmt.Errorf("write %s: %w", c.path, err)
	}
	ours, err := os.Lstat(temp)
	if err != nil {
		return fmt.Errorf("write %s: %w", c.path, err)
	}
	defer os.Remove(temp)
	switch err := exchange(temp, c.path); {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP):
		return c.rename(temp)
	case err != nil:
		return fmt.Errorf("write %s: %w", c.path, err)
	}
	if c.is(temp) {
		return syncDir(c.path)
	}
	// Each turn puts back what came out; done when what comes out is what was put in the turn before.
	in := ours
	for range maxSwaps {
		out, err := os.Lstat(temp)
		if err != nil {
			return fmt.Errorf("give %s back: %w", c.path, err)
		}
		if err := exchange(temp, c.path); err != nil {
			return fmt.Errorf("give %s back: %w", c.path, err)
		}
		now, err := os.Lstat(temp)
		if err != nil {
			return fmt.Errorf("give %s back: %w", c.path, err)
		}
		if os.SameFile(now, in) {
			break
		}
		in = out
	}
	return fmt.Errorf("write %s: %w", c.path, errChanged)
}

// rename is for filesystems that cannot exchange: somebody else's change is noticed up to the last moment, but not in it.
func (c *confFile) rename(temp string) error {
	now, err := readConf(c.path)
	if err != nil || !bytes.Equal(now.text, c.text) {
		return fmt.Errorf("write %s: %w", c.path, errChanged)
	}
	if err := os.Rename(temp, c.path); err != nil {
		return fmt.Errorf("write %s: %w", c.path, err)
	}
	return syncDir(c.path)
}

// exchange swaps two files in one step; errChanged if one is gone.
func exchange(a, b string) error {
	err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		return errChanged
	}
	return err
}

// remove takes the file away, or moves it to a name that runtimes do not look at if aside is not ""; errChanged if it is not as it
// was read. It is about the file at path, which may be a symbolic link to what was read.
func (c *confFile) remove(path, aside string) error {
	temp := filepath.Join(filepath.Dir(path), fmt.Sprintf(".redirector-%d.tmp", c.stat.Ino))
	if err := os.Rename(path, temp); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = errChanged
		}
		return fmt.Errorf("remove %s: %w", path, err)
	}
	if !c.is(temp) {
		err := unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) { // by something newer
			err = os.Remove(temp)
		}
		return fmt.Errorf("remove %s: %w", path, errors.Join(errChanged, err))
	}
	var err error
	if aside != "" {
		err = os.Rename(temp, aside)
	} else {
		err = os.Remove(temp)
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return syncDir(path)
}

// is says whether what was taken away is what was read, and nobody can change it any more: who has it open for writing could, and
// then no lease is given.
func (c *confFile) is(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	lease := func(kind int) error {
		_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, kind)
		return err
	}
	// Some filesystems know no leases.
	if err := lease(unix.F_RDLCK); errors.Is(err, unix.EAGAIN) {
		return false
	} else if err == nil {
		defer func() { _ = lease(unix.F_UNLCK) }()
	}
	text, err := io.ReadAll(io.LimitReader(f, maxConf+1))
	return err == nil && bytes.Equal(text, c.text)
}

// syncDir makes sure that what was renamed is so after a power failure.
func syncDir(path string) error {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}
