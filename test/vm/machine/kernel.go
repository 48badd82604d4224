// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Kernel is an unpacked Debian kernel: one linux-image package, or the linux-binary and linux-modules packages that
// took its place in 6.19, extracted into one folder.
type Kernel struct {
	// Version is the kernel's release, as in uname -r.
	Version string
	// Line is what the kernel was asked for by, as 6.1; OpenKernel does not know it.
	Line string
	// Image is the path of the bootable image.
	Image string

	modules map[string]string // path by name, underscores for dashes
	builtin map[string]bool
}

// OpenKernel finds the image and the modules below dir.
func OpenKernel(dir string) (*Kernel, error) {
	k := &Kernel{modules: map[string]string{}, builtin: map[string]bool{}}
	// dir may be a symbolic link, which WalkDir would not follow.
	root, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, fmt.Errorf("open kernel: %w", err)
	}
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		base := d.Name()
		switch {
		case base == "vmlinuz" || strings.HasPrefix(base, "vmlinuz-"):
			k.Image = p
		case base == "modules.builtin":
			k.Version = filepath.Base(filepath.Dir(p))
			return k.readBuiltin(p)
		default:
			if name, _, ok := strings.Cut(base, ".ko"); ok {
				k.modules[moduleName(name)] = p
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open kernel %s: %w", dir, err)
	}
	if k.Image == "" || k.Version == "" {
		return nil, fmt.Errorf("open kernel %s: no vmlinuz and modules.builtin below it; fetch it anew with test/vm/fetch.sh",
			dir)
	}
	return k, nil
}

func (k *Kernel) readBuiltin(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for line := range strings.FieldsSeq(string(b)) {
		name, _, _ := strings.Cut(filepath.Base(line), ".ko")
		k.builtin[moduleName(name)] = true
	}
	return nil
}

// moduleName is the name the kernel knows a module by; file names have dashes in places.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

// module is one kernel module, ready to be loaded.
type module struct {
	name string
	elf  []byte
}

// resolve returns the named modules and those they depend on, in the order in which they load. Names that are built in
// need no module. absent are the names that this kernel does not have in any form.
func (k *Kernel) resolve(names []string) (mods []module, absent []string, err error) {
	done := map[string]bool{}
	var add func(name string) error
	add = func(name string) error {
		name = moduleName(name)
		if name == "" || done[name] || k.builtin[name] {
			return nil
		}
		done[name] = true
		path, ok := k.modules[name]
		if !ok {
			absent = append(absent, name)
			return nil
		}
		b, err := readModule(path)
		if err != nil {
			return err
		}
		deps, err := dependencies(b)
		if err != nil {
			return fmt.Errorf("module %s: %w", path, err)
		}
		for _, dep := range deps {
			if err := add(dep); err != nil {
				return err
			}
		}
		mods = append(mods, module{name: name, elf: b})
		return nil
	}
	for _, n := range names {
		if err := add(n); err != nil {
			return nil, nil, err
		}
	}
	slices.Sort(absent)
	return mods, absent, nil
}

// readModule reads a module as the kernel wants it: finit_module(2) is called without the flag for compressed files,
// which 5.10 does not know.
func readModule(path string) ([]byte, error) {
	if !strings.HasSuffix(path, ".xz") {
		return os.ReadFile(path)
	}
	b, err := exec.Command("xz", "-dc", path).Output()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("decompress %s: xz is not installed; run hack/install-deps.sh vm", path)
	}
	if err != nil {
		return nil, fmt.Errorf("decompress %s: %w", path, err)
	}
	return b, nil
}

// dependencies reads the names of the modules that this one needs out of its own description.
func dependencies(b []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, errors.New("no .modinfo section: not a kernel module")
	}
	info, err := s.Data()
	if err != nil {
		return nil, err
	}
	for kv := range bytes.SplitSeq(info, []byte{0}) {
		if v, ok := strings.CutPrefix(string(kv), "depends="); ok && v != "" {
			return strings.Split(v, ","), nil
		}
	}
	return nil, nil
}
