// SPDX-License-Identifier: Apache-2.0

package podwatch

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Uninstalled says whether an agent that is told to stop goes for good, and why: if its DaemonSet is gone, is being deleted, or
// the agent has no right any more to know. In all other cases another agent will come, or may, and everything has to stay.
func Uninstalled(ctx context.Context, client kubernetes.Interface, namespace, daemonSet string) (gone bool, why string) {
	ds, err := client.AppsV1().DaemonSets(namespace).Get(ctx, daemonSet, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, fmt.Sprintf("DaemonSet %s/%s is gone", namespace, daemonSet)
	case apierrors.IsUnauthorized(err):
		return true, "the agent's service account is gone"
	case err != nil:
		return false, fmt.Sprintf("it is not known whether DaemonSet %s/%s still exists: %v", namespace, daemonSet, err)
	case ds.DeletionTimestamp != nil:
		return true, fmt.Sprintf("DaemonSet %s/%s is being deleted", namespace, daemonSet)
	default:
		return false, fmt.Sprintf("DaemonSet %s/%s is there", namespace, daemonSet)
	}
}
