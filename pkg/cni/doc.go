// SPDX-License-Identifier: Apache-2.0

// Package cni is what container runtimes see of Redirector: the CNI plugin, which keeps a pod from starting before the agent has
// captured it; the socket by which the plugin asks the agent; and the plugin's installation on a node.
//
// The plugin knows nothing of Kubernetes. It tells the agent which pod has which network namespace and addresses, waits for the
// answer, and passes on the result of the plugin before it. What it does when no agent answers is in
// docs/decisions/0010-cni-without-an-agent.md.
package cni

import (
	"context"
	"net/netip"
)

// PluginType is what the plugin is called in CNI configurations, and the name of its file.
const PluginType = "redirector"

// SocketName is the name of the plugin's socket in the agent's run-dir.
const SocketName = "cni.sock"

// AddRequest says that a pod's network is about to be ready.
type AddRequest struct {
	// Netns is the path of the pod's network namespace as the container runtime sees it, absolute.
	Netns string
	// PodName and PodNamespace are the pod's. They are never empty.
	PodName, PodNamespace string
	// PodUID is the pod's UID; "" if the runtime does not tell.
	PodUID string
	// IPs are the addresses that the plugins before gave the pod, IPv4 never as v4-mapped IPv6. There are none if the plugin
	// is not called in a chain.
	IPs []netip.Addr
}

// Adder captures pods.
type Adder interface {
	// AddPod returns when the pod is captured and a node proxy runs for it. A pod that is not in the mesh is a
	// *NotEligibleError; with any other error the pod does not start, and the kubelet tries again. ctx ends when nobody waits
	// for the answer any more.
	AddPod(ctx context.Context, req AddRequest) error
}

// NotEligibleError says that a pod is not in the mesh, and may start as it is.
type NotEligibleError struct {
	// Reason is why, in words.
	Reason string
}

// Error returns the reason.
func (e *NotEligibleError) Error() string { return "the pod is not to be captured: " + e.Reason }
