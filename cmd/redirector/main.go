// SPDX-License-Identifier: Apache-2.0

// Redirector steers the traffic of enrolled pods to the node proxy. Run `redirector help`.
package main

import (
	"context"
	"os"

	"github.com/redirector-dataplane/redirector/cmd/redirector/app"
)

// Set by the linker: -X main.version=... -X main.commit=...
var version, commit string

func main() {
	os.Exit(app.Main(context.Background(), os.Args[1:], app.Env{
		Stdout:  os.Stdout,
		Stderr:  os.Stderr,
		Getenv:  os.Getenv,
		Version: version,
		Commit:  commit,
	}))
}
