// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// File types in a cpio entry's mode: those of stat(2).
const (
	typeDir  = 0o040000
	typeChar = 0o020000
	typeFile = 0o100000
)

// archive writes an initramfs: a cpio archive of the "newc" format, uncompressed, because the emulated CPU would take
// longer to decompress it than QEMU takes to load it. The first error sticks and is returned by close.
type archive struct {
	w    *bufio.Writer
	ino  int
	seen map[string]bool
	err  error
}

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), seen: map[string]bool{}}
}

// node is what makes one entry of the archive.
type node struct {
	name         string // absolute, slash-separated
	mode         uint32
	major, minor uint32 // of a device
	data         []byte
}

func (a *archive) add(n node) {
	if a.err != nil {
		return
	}
	name := strings.TrimPrefix(n.name, "/")
	a.ino++
	const nlink, uid, gid, mtime, dev, check = 1, 0, 0, 0, 0, 0
	head := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		a.ino, n.mode, uid, gid, nlink, mtime, len(n.data), dev, dev, n.major, n.minor, len(name)+1, check, name)
	for _, part := range [][]byte{[]byte(head), padding(len(head)), n.data, padding(len(n.data))} {
		if _, err := a.w.Write(part); err != nil {
			a.err = fmt.Errorf("write initramfs entry %s: %w", n.name, err)
			return
		}
	}
}

// padding returns the zero bytes that take n to a multiple of four.
func padding(n int) []byte { return make([]byte, -n&3) }

// dir adds a folder and those above it, each once.
func (a *archive) dir(name string) {
	name = path.Clean(name)
	if name == "/" || name == "." || a.seen[name] {
		return
	}
	a.dir(path.Dir(name))
	a.seen[name] = true
	a.add(node{name: name, mode: typeDir | 0o755})
}

// file adds an executable file and the folders above it.
func (a *archive) file(name string, data []byte) {
	a.dir(path.Dir(name))
	a.add(node{name: name, mode: typeFile | 0o755, data: data})
}

// copyFile adds a file of the host's under the given name.
func (a *archive) copyFile(name, src string) {
	b, err := os.ReadFile(src)
	if err != nil {
		a.err = errors.Join(a.err, err)
		return
	}
	a.file(name, b)
}

// copyTree adds the regular files below a folder of the host's under the same names. A folder that is not there adds
// nothing.
func (a *archive) copyTree(root string) {
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			a.copyFile(p, p)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.err = errors.Join(a.err, err)
	}
}

// close ends the archive and returns the first error.
func (a *archive) close() error {
	a.add(node{name: "TRAILER!!!"})
	return errors.Join(a.err, a.w.Flush())
}
