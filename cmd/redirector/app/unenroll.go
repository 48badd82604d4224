// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

func newUnenroll(env *Env) *cobra.Command {
	var uids []string
	var runDir string
	cmd := &cobra.Command{
		Use:   "unenroll --uid UID...",
		Short: "Let a pod's traffic go as it did before enroll",
		Long: `Let the traffic of pods go as it did before "redirector enroll". What was changed in a pod's network
namespace is undone, and node proxies are told to stop for it. Connections of its apps through a node
proxy end with that.

That a pod is not enrolled is no error.`,
		Example: `  redirector unenroll --uid 1
  redirector unenroll --uid 1 --uid 2`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(uids) == 0 {
				return usagef("not given: --uid")
			}
			for _, uid := range uids {
				if err := enroll.ValidateUID(uid); err != nil {
					return &usageError{err}
				}
			}
			return unenroll(cmd.Context(), env, runDir, uids)
		},
	}
	cmd.Flags().StringArrayVar(&uids, "uid", nil, "what the pod is known by; may be given several times")
	addRunDir(cmd.Flags(), &runDir)
	return cmd
}

// unenroll goes on with the other pods when one fails, but not without an agent.
func unenroll(ctx context.Context, env *Env, runDir string, uids []string) error {
	var errs []error
	for _, uid := range uids {
		err := ask(ctx, runDir, 0, func(ctx context.Context, agent *api.Client) error { return agent.Unenroll(ctx, uid) })
		if err == nil {
			err = env.printf("pod %s is not enrolled\n", uid)
		}
		errs = append(errs, err)
		if refused := (*api.Error)(nil); err != nil && !errors.As(err, &refused) {
			break
		}
	}
	return errors.Join(errs...)
}
