// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/redirector-dataplane/redirector/pkg/kubeapi"
)

// leaveAgain is the pause between two tries to learn whether the agent comes back.
const leaveAgain = 500 * time.Millisecond

// Uninstalled says whether an agent that is told to stop goes for good, and why: if its DaemonSet is gone, is being deleted, or
// does not want its pods on this node any more, or if the agent has no rights left to know. In all other cases another agent will
// come, or may, and everything has to stay. What the API server does not tell it is asked again, until ctx is done.
func Uninstalled(ctx context.Context, client *kubeapi.Client, namespace, daemonSet, node string) (gone bool, why string) {
	for {
		gone, why, err := uninstalled(ctx, client, namespace, daemonSet, node)
		if err == nil {
			return gone, why
		}
		select {
		case <-time.After(leaveAgain):
		case <-ctx.Done():
			// The rights of an account go before it does: the API server remembers for some seconds that a token was good.
			if apierrors.IsForbidden(err) && mayNothing(context.WithoutCancel(ctx), client, namespace, node) {
				return true, "the agent's service account has no rights any more"
			}
			return false, fmt.Sprintf("it is not known whether DaemonSet %s/%s still wants an agent on this node: %v", namespace, daemonSet, err)
		}
	}
}

// uninstalled asks once.
func uninstalled(ctx context.Context, client *kubeapi.Client, namespace, daemonSet, node string) (gone bool, why string, err error) {
	ds, err := client.DaemonSet(ctx, namespace, daemonSet)
	switch {
	case apierrors.IsNotFound(err):
		return true, fmt.Sprintf("DaemonSet %s/%s is gone", namespace, daemonSet), nil
	case apierrors.IsUnauthorized(err):
		return true, "the agent's service account is gone", nil
	case err != nil:
		return false, "", err
	case ds.DeletionTimestamp != nil:
		return true, fmt.Sprintf("DaemonSet %s/%s is being deleted", namespace, daemonSet), nil
	}
	wanted, err := wantedOn(ctx, client, ds, node)
	switch {
	case err != nil:
		return false, "", err
	case !wanted:
		return true, fmt.Sprintf("DaemonSet %s/%s wants no agent on node %s any more, by its node selector or node affinity",
			namespace, daemonSet, node), nil
	}
	return false, fmt.Sprintf("DaemonSet %s/%s is there", namespace, daemonSet), nil
}

// wantedOn says whether a DaemonSet selects the node for its pods. Taints are not looked at: they come and go by themselves.
func wantedOn(ctx context.Context, client *kubeapi.Client, ds *appsv1.DaemonSet, name string) (bool, error) {
	spec := ds.Spec.Template.Spec
	if len(spec.NodeSelector) == 0 && (spec.Affinity == nil || spec.Affinity.NodeAffinity == nil) {
		return true, nil
	}
	node, err := client.Node(ctx, name)
	if err != nil {
		return false, fmt.Errorf("get node %s: %w", name, err)
	}
	return nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: spec}).Match(node)
}

// mayNothing says whether the API server forbids what an agent needs all the time.
func mayNothing(ctx context.Context, client *kubeapi.Client, namespace, node string) bool {
	ctx, cancel := context.WithTimeout(ctx, goneTimeout)
	defer cancel()
	_, errNamespace := client.Namespace(ctx, namespace)
	_, errNode := client.Node(ctx, node)
	return apierrors.IsForbidden(errNamespace) && apierrors.IsForbidden(errNode)
}
