// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

// stateName is the name of the state file in the run-dir.
const stateName = "node-state.json"

// maxState bounds the state file, in bytes. 10 000 namespaces with names of the greatest length have 660 000.
const maxState = 4 << 20

// NodeState is what the agent leaves for the plugin, for the time when no agent answers. The agent writes it once it knows all
// namespaces, and whenever something in it changes; never from a list that may be incomplete.
type NodeState struct {
	// EnrolledNamespaces are those whose pods are in the mesh unless a pod says otherwise.
	EnrolledNamespaces []string `json:"enrolledNamespaces"`
	// ExcludedNamespaces are those whose pods are never in the mesh.
	ExcludedNamespaces []string `json:"excludedNamespaces"`
}

// Write puts the state into a run-dir, whole or not at all.
func (s NodeState) Write(runDir string) error {
	s.EnrolledNamespaces, s.ExcludedNamespaces = sorted(s.EnrolledNamespaces), sorted(s.ExcludedNamespaces)
	data, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("write the node's state: %w", err)
	}
	if err := renameio.WriteFile(filepath.Join(runDir, stateName), append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the node's state for the CNI plugin: %w", err)
	}
	return nil
}

// sorted never returns nil: none and unknown are two things in the file.
func sorted(names []string) []string {
	all := append([]string{}, names...)
	slices.Sort(all)
	return all
}

// ReadNodeState reads what the agent has left in a run-dir. A file that is not whole is an error, as is none (fs.ErrNotExist): then
// nothing is known.
func ReadNodeState(runDir string) (NodeState, error) {
	var s NodeState
	path := filepath.Join(runDir, stateName)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return s, fmt.Errorf("read the node's state: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxState+1))
	if err != nil {
		return s, fmt.Errorf("read the node's state: %w", err)
	}
	if len(data) > maxState {
		return s, fmt.Errorf("read the node's state: %s has more than %d bytes", path, maxState)
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("read the node's state: %s: %w", path, err)
	}
	if s.EnrolledNamespaces == nil || s.ExcludedNamespaces == nil {
		return s, fmt.Errorf("read the node's state: %s is not whole", path)
	}
	return s, nil
}

// RemoveRunFiles removes from a run-dir what the agent and the plugin have put there: the state file and the plugin's logs. The
// socket goes with its listener.
func RemoveRunFiles(runDir string) error {
	logs, err := filepath.Glob(filepath.Join(runDir, logPattern))
	if err != nil {
		return fmt.Errorf("look for the plugin's logs in %s: %w", runDir, err)
	}
	var errs []error
	for _, path := range append(logs, filepath.Join(runDir, stateName)) {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove what the CNI plugin used: %w", err))
		}
	}
	return errors.Join(errs...)
}
