// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"net"

	"github.com/redirector-dataplane/redirector/pkg/sockfile"
)

// socketMode lets root only in.
const socketMode = 0o600

// Listen makes the agent's socket. A socket file on which nobody listens any more is replaced; one on which somebody does
// (sockfile.ErrInUse), and a file that is no socket, is left alone and an error. Closing the listener removes the file.
func Listen(path string) (net.Listener, error) {
	if len(path) > sockfile.MaxPath {
		return nil, fmt.Errorf("agent socket %s: the path has %d bytes, a Unix socket's has %d at most: choose a shorter run-dir",
			path, len(path), sockfile.MaxPath)
	}
	if err := sockfile.RemoveStale("unix", path); err != nil {
		return nil, err
	}
	l, err := sockfile.Listen("unix", path, socketMode)
	if err != nil {
		return nil, fmt.Errorf("listen on agent socket %s: %w", path, err)
	}
	return l, nil
}
