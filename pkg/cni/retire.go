// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/google/renameio/v2"
)

// DefaultCacheDir is where libcni keeps the configuration by which each container was added. CRI-O and Multus delete a container by
// that, however long ago its configuration was changed, and so call plugins that are in no configuration any more.
const DefaultCacheDir = "/var/lib/cni"

// A plugin that was uninstalled, but is still named by a cached configuration, is retired: beside its binary there is a file of this
// ending, with the path of the cache in it. It lets pods start without asking, and removes itself with the last of them.
const retiredSuffix = ".retired"

// namesPlugin finds the plugin in a configuration.
var namesPlugin = regexp.MustCompile(`"type"\s*:\s*"` + PluginType + `"`)

// cachedBy counts the containers, other than one, that were added by a configuration with the plugin in it.
func cachedBy(cacheDir, except string) (int, error) {
	count := 0
	for _, sub := range []string{"results", "multus"} {
		dir := filepath.Join(cacheDir, sub)
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, fmt.Errorf("look into the CNI cache: %w", err)
		}
		for _, entry := range entries {
			if entry.IsDir() {
				continue
			}
			data, err := os.ReadFile(filepath.Join(dir, entry.Name()))
			if errors.Is(err, fs.ErrNotExist) {
				continue // its container has just gone
			}
			if err != nil {
				return 0, fmt.Errorf("look into the CNI cache: %w", err)
			}
			var result struct {
				ContainerID string `json:"containerId"`
				Config      []byte `json:"config"`
			}
			_ = json.Unmarshal(data, &result) // Multus' files are of another form
			if except != "" && (result.ContainerID == except || entry.Name() == except) {
				continue
			}
			if namesPlugin.Match(data) || namesPlugin.Match(result.Config) {
				count++
			}
		}
	}
	return count, nil
}

// retire marks the binary as one that is there for the containers of a cache only.
func retire(binary, cacheDir string) error {
	if err := renameio.WriteFile(binary+retiredSuffix, []byte(cacheDir+"\n"), 0o644); err != nil {
		return fmt.Errorf("mark %s as retired: %w", binary, err)
	}
	return nil
}

// isRetired says whether the running binary is.
func isRetired() bool {
	_, err := retiredCache()
	return err == nil
}

// retiredCache returns the path of the cache that keeps the running binary, if it is retired.
func retiredCache() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	data, err := os.ReadFile(self + retiredSuffix)
	return strings.TrimSpace(string(data)), err
}

// leaveIfLast removes the running binary if it is retired and no container but the one that goes now was added by it. It is tried
// again with the next if it fails.
func leaveIfLast(container string) {
	cacheDir, err := retiredCache()
	if err != nil {
		return
	}
	if left, err := cachedBy(cacheDir, container); err != nil || left > 0 {
		return
	}
	if self, err := os.Executable(); err == nil {
		_ = os.Remove(self)
		_ = os.Remove(self + retiredSuffix)
	}
}
