// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// roleVar makes this program play one of the others: a demo needs no second file beside it.
const roleVar = "REDIRECTOR_DEMO_ROLE"

const (
	roleRedirector = "redirector"
	roleNodeproxy  = "nodeproxy"
)

// playRole runs the program that the environment names, and returns its exit status; ok is false when it names none.
func playRole() (code int, ok bool) {
	switch os.Getenv(roleVar) {
	case roleRedirector:
		return app.Main(context.Background(), os.Args[1:], app.Env{
			Stdout: os.Stdout,
			Stderr: os.Stderr,
			Getenv: func(string) string { return "" }, // what is set for a real agent on this machine is not for this one
		}), true
	case roleNodeproxy:
		return nodeproxy.Main(os.Args[1:]), true
	}
	return 0, false
}
