// SPDX-License-Identifier: Apache-2.0

package app

import (
	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/cni"
)

// isPlugin says whether a container runtime calls. It names no command.
func isPlugin(args []string, env Env) bool {
	return len(args) == 0 && env.Getenv("CNI_COMMAND") != ""
}

func newCNI() *cobra.Command {
	return &cobra.Command{
		Use:   "cni",
		Short: "Be the CNI plugin, which container runtimes call",
		Long: `Be the CNI plugin. Container runtimes call it as the last of a chain of plugins, without this word: where
CNI_COMMAND is set and no command is named, redirector is the plugin. It reads the variables and the
network configuration of the CNI specification (versions 0.3.0 to 1.1.0) and writes one JSON document to
standard output: the result of the plugin before it, or an error, with which it ends with status 1.

ADD returns when the agent has captured the pod and a node proxy runs for it. Where no agent answers, it
waits, and then lets a pod start only if its namespace is known not to be in the mesh. DEL never fails.
CHECK, GC and STATUS have nothing to do. The plugin logs to plugin.log in the run-dir.

The network configuration may have, beside what the specification defines:

  runDir             the agent's run-dir (/var/run/redirector)
  timeout            how long to wait for the agent in all (30s)
  excludeNamespaces  namespaces whose pods start without asking
  agentNamespace     the namespace of the agent's own pod, which starts without asking
  agentPodPrefix     what the name of the agent's own pod begins with

"redirector install" writes it.`,
		Example: `  CNI_COMMAND=VERSION redirector
  CNI_COMMAND=ADD CNI_CONTAINERID=1 CNI_IFNAME=eth0 CNI_NETNS=/run/netns/cart CNI_PATH=/opt/cni/bin \
    CNI_ARGS='K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart' redirector cni < network.json`,
		RunE: func(*cobra.Command, []string) error {
			if status := cni.Main(); status != exitDone {
				return &loggedError{errPlugin}
			}
			return nil
		},
	}
}
