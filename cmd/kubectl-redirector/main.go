// SPDX-License-Identifier: Apache-2.0

// Kubectl-redirector is a kubectl plugin: it runs redirector's commands where they answer, in the agent of the node that a pod is
// on, of one node, or of all. Put it into PATH and run `kubectl redirector help`.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/util/exec"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	status := exitStatus(newCommand().ExecuteContext(ctx))
	stop()
	os.Exit(status)
}

// exitStatus is that of redirector where it ran, whose message is on standard error by then. Of the plugin's own failures it writes
// one line there, and it is 2 when the plugin was called wrongly.
func exitStatus(err error) int {
	var remote exec.CodeExitError
	var usage *usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &remote):
		return remote.Code
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "kubectl redirector: %v (see kubectl redirector help)\n", err)
		return 2
	default:
		fmt.Fprintf(os.Stderr, "kubectl redirector: %v\n", err)
		return 1
	}
}
