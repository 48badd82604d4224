// SPDX-License-Identifier: Apache-2.0

// Command kube is etcd and all of Kubernetes's programs in one static program, for the tests that need real ones. Its first
// argument says which: "kube etcd ...", "kube kubelet ..."; the rest are that program's own flags.
//
// It is a module of its own, because what it needs has no place in what Redirector needs. See test/kube for how it is
// built and kept.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// programs are all but etcd and kubectl, whose ways to end are their own.
var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	program := ""
	if len(os.Args) > 1 {
		program = os.Args[1]
	}
	switch program {
	case "etcd":
		etcdmain.Main(os.Args[1:])
		return
	case "kubectl":
		os.Args = os.Args[1:]
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	command, ok := programs[program]
	if !ok {
		fmt.Fprintf(os.Stderr, "usage: %s etcd|kubectl|%s [flags]\n", os.Args[0], strings.Join(slices.Sorted(maps.Keys(programs)), "|"))
		os.Exit(2)
	}
	os.Args = os.Args[1:]
	os.Exit(cli.Run(command()))
}
