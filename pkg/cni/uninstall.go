// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// KeepBinary says what becomes of the plugin's binary when the plugin is uninstalled.
type KeepBinary string

// What KeepBinary can be.
const (
	// KeepIfCached keeps it while the runtime's cache has containers that were added by a configuration with the plugin in it. It
	// then lets pods start without asking anybody, and removes itself when the last of those containers goes.
	KeepIfCached KeepBinary = "auto"
	// KeepNever removes it. Runtimes that delete containers by their cached configuration, CRI-O and Multus, cannot delete those.
	KeepNever KeepBinary = "never"
)

// uninstallTries bounds how often a file is looked at again that somebody else has changed at the same moment.
const uninstallTries = 50

// Uninstalled is what Uninstall has done.
type Uninstalled struct {
	// Changed are the files that were changed or removed.
	Changed []string
	// CachedBy is the number of containers for which the binary stays; 0: it is gone.
	CachedBy int
}

// Uninstall takes the plugin off the node, by whatever options it was installed: first out of all configurations, then the binary. A
// configuration that was edited is, byte for byte, as if it had not been. It may be repeated.
func (in *Installer) Uninstall(keep KeepBinary) (Uninstalled, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	var done Uninstalled
	for try := 0; ; try++ {
		changed, err := in.uninstallConf()
		done.Changed = append(done.Changed, changed...)
		if err == nil {
			break
		}
		if !errors.Is(err, errChanged) || try == uninstallTries {
			return done, err
		}
	}
	if err := removeMatching(filepath.Join(in.opts.NetDir, tempPattern)); err != nil {
		return done, err
	}

	binary := filepath.Join(in.opts.BinDir, PluginType)
	if err := removeMatching(filepath.Join(in.opts.BinDir, "."+PluginType+"[0-9]*")); err != nil { // renameio's
		return done, err
	}
	if _, err := os.Lstat(binary); err == nil && keep != KeepNever {
		if done.CachedBy, err = cachedBy(in.opts.CacheDir, ""); err != nil {
			return done, err
		}
		if done.CachedBy > 0 {
			return done, retire(binary, in.opts.CacheDir)
		}
	}
	for _, path := range []string{binary, binary + retiredSuffix} {
		switch err := os.Remove(path); {
		case err == nil:
			done.Changed = append(done.Changed, path)
		case !errors.Is(err, fs.ErrNotExist):
			return done, fmt.Errorf("remove the plugin: %w", err)
		}
	}
	return done, nil
}

// uninstallConf takes the plugin out of all configurations.
func (in *Installer) uninstallConf() (changed []string, err error) {
	confs, _, err := in.read()
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, c := range confs {
		paths, err := in.takeOut(c)
		changed = append(changed, paths...)
		if err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return changed, errors.Join(errs...)
	}
	return changed, in.takeBackAside()
}

// takeBackAside removes what was put aside for lists that are not there any more, or gives it back if nothing has its place.
func (in *Installer) takeBackAside() error {
	left, err := filepath.Glob(filepath.Join(in.opts.NetDir, "*"+asideSuffix))
	if err != nil {
		return fmt.Errorf("look for what was put aside: %w", err)
	}
	confs, err := filepath.Glob(filepath.Join(in.opts.NetDir, "*"))
	if err != nil {
		return fmt.Errorf("look for what was put aside: %w", err)
	}
	for _, aside := range left {
		single := strings.TrimSuffix(aside, asideSuffix)
		if !isConf(single) {
			continue // not ours
		}
		list := strings.TrimSuffix(single, filepath.Ext(single)) + listExt
		if slices.Contains(confs, single) || slices.Contains(confs, list) || slices.Contains(confs, single+listExt) {
			err = os.Remove(aside)
		} else {
			err = os.Rename(aside, single)
		}
		if err != nil {
			return fmt.Errorf("take back what was put aside: %w", err)
		}
	}
	return nil
}

func removeMatching(pattern string) error {
	paths, err := filepath.Glob(pattern)
	if err != nil {
		return fmt.Errorf("look for temporary files: %w", err)
	}
	for _, path := range paths {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove a temporary file: %w", err)
		}
	}
	return nil
}
