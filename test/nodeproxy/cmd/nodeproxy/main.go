// SPDX-License-Identifier: Apache-2.0

// Command nodeproxy is the node proxy of package test/nodeproxy as a program.
package main

import (
	"os"

	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

func main() { os.Exit(nodeproxy.Main(os.Args[1:])) }
