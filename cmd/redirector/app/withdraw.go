// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

const (
	// defaultWithdraw is how long all agents may take to leave: more than the 30 s that a pod has to stop.
	defaultWithdraw = 2 * time.Minute
	// withdrawAgain is the pause between two looks whether they have.
	withdrawAgain = time.Second
)

type withdrawOptions struct {
	kubeconfig, namespace, daemonSet string
	timeout                          time.Duration
}

func newWithdraw(env *Env) *cobra.Command {
	var o withdrawOptions
	cmd := &cobra.Command{
		Use:   "withdraw",
		Short: "Delete the agents' DaemonSet, and wait until all agents have left",
		Long: `Delete the agents' DaemonSet in Kubernetes, and wait until all agents have left their nodes. As they stop they
take everything off, and need their rights for that, to remove the annotations of pods. So this comes before the
rest of an uninstallation; the Helm chart does it by itself.

That there is no such DaemonSet is no error.`,
		Example: `  redirector withdraw --pod-namespace istio-system
  redirector withdraw --pod-namespace istio-system --kubeconfig ~/.kube/config --timeout 5m`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), env) },
	}
	flags := cmd.Flags()
	addPath(flags, &o.kubeconfig, "kubeconfig", "", "how to reach the API server (default: as pods do, by their service account)")
	flags.StringVar(&o.namespace, "pod-namespace", "", "namespace of the DaemonSet; needed")
	flags.StringVar(&o.daemonSet, "daemonset", defaultDaemonSet, "name of the DaemonSet")
	flags.DurationVar(&o.timeout, "timeout", defaultWithdraw, "how long the agents may take")
	for _, name := range []string{"kubeconfig", "pod-namespace", "daemonset"} {
		twin(flags, name)
	}
	return cmd
}

func (o *withdrawOptions) run(ctx context.Context, env *Env) error {
	if o.namespace == "" {
		return usagef("the namespace of the DaemonSet is not known: set --pod-namespace or POD_NAMESPACE")
	}
	client, err := connectAPI(o.kubeconfig, "delete the DaemonSet by kubectl with --cascade=foreground", nil)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	name := o.namespace + "/" + o.daemonSet
	switch err := client.DeleteDaemonSet(ctx, o.namespace, o.daemonSet); {
	case apierrors.IsNotFound(err):
		return env.printf("DaemonSet %s is not there\n", name)
	case err != nil:
		return fmt.Errorf("delete DaemonSet %s: %w", name, err)
	}
	for {
		ds, err := client.DaemonSet(ctx, o.namespace, o.daemonSet)
		if apierrors.IsNotFound(err) {
			return env.printf("DaemonSet %s is deleted, and all agents have left\n", name)
		}
		select {
		case <-time.After(withdrawAgain):
			continue
		case <-ctx.Done():
		}
		if err == nil {
			err = fmt.Errorf("%d agents have not left", ds.Status.CurrentNumberScheduled)
		}
		return fmt.Errorf("wait %s for the agents of DaemonSet %s to leave: %w: see their logs, and the nodes that are not ready",
			o.timeout, name, errors.Join(err, context.Cause(ctx)))
	}
}
