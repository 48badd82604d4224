// SPDX-License-Identifier: Apache-2.0

// Command kube is etcd and the Kubernetes API server in one static program, for the tests that need a real one. Its
// first argument says which: "kube etcd ..." or "kube kube-apiserver ..."; the rest are that program's own flags.
//
// It is a module of its own, because what it needs has no place in what Redirector needs. See test/kube for how it is
// built and kept.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

func main() {
	program := ""
	if len(os.Args) > 1 {
		program = os.Args[1]
	}
	switch program {
	case "etcd":
		etcdmain.Main(os.Args[1:])
	case "kube-apiserver":
		os.Args = os.Args[1:]
		os.Exit(cli.Run(app.NewAPIServerCommand()))
	default:
		fmt.Fprintf(os.Stderr, "usage: %s etcd|kube-apiserver [flags]\n", os.Args[0])
		os.Exit(2)
	}
}
