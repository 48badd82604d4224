// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
)

// completionTimeout is how long an agent may take while somebody waits for the names of pods to be completed.
const completionTimeout = 2 * time.Second

func newCompletion(env *Env) *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish",
		Short: "Print a script that completes commands in a shell",
		Long: `Print a script for a shell that completes commands, flags and the names of enrolled pods.

Where a shell looks for it: bash, /etc/bash_completion.d/redirector; zsh, a file _redirector in a directory of
$fpath; fish, ~/.config/fish/completions/redirector.fish.`,
		Example: `  redirector completion bash
  redirector completion zsh
  redirector completion fish`,
		ValidArgs: []string{"bash", "zsh", "fish"},
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs)(cmd, args); err != nil {
				return usagef("name one shell: bash, zsh or fish")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.print(func(w io.Writer) error {
				switch args[0] {
				case "bash":
					return cmd.Root().GenBashCompletionV2(w, true)
				case "zsh":
					return cmd.Root().GenZshCompletion(w)
				default:
					return cmd.Root().GenFishCompletion(w, true)
				}
			})
		},
	}
}

// completePods completes the names of enrolled pods. Without an agent there are none.
func completePods(env *Env, runDir *string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 || applyEnv(cmd.Flags(), env.Getenv) != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(context.Background(), completionTimeout)
		defer cancel()
		pods, err := api.NewClient(socketIn(*runDir)).Pods(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var names []cobra.Completion
		for i := range pods {
			if name := pods[i].String(); strings.HasPrefix(name, begun) {
				names = append(names, cobra.CompletionWithDesc(name, string(pods[i].State)))
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
