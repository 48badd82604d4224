// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

// settings are what a pod may have its own way, as flags of enroll.
var settings = []struct {
	key, usage string
	isBool     bool
}{
	{enroll.KeyBypassInbound, "leave connections of others to the pod's apps, without the node proxy", true},
	{enroll.KeyDNSCapture, "send the pod's DNS queries to the node proxy, or do not (default: as the agent does)", true},
	{enroll.KeyExcludeOutboundPorts, "ports to which the pod's apps connect without the node proxy", false},
	{enroll.KeyExcludeOutboundCIDRs, "ranges to which they do, as 10.0.0.0/8; !10.1.0.0/16 takes one out of a wider one", false},
	{enroll.KeyExcludeInboundPorts, "ports of the pod on which others reach its apps without the node proxy", false},
	{enroll.KeyRerouteInterfaces, "interfaces of machines behind the pod, whose TCP goes to the node proxy; or auto", false},
}

// addSettings adds a flag for each setting.
func addSettings(flags *pflag.FlagSet) {
	for _, s := range settings {
		if s.isBool {
			flags.Bool(s.key, false, s.usage)
		} else {
			flags.StringSlice(s.key, nil, s.usage)
		}
	}
}

// settingsOf returns those settings that were given as flags.
func settingsOf(flags *pflag.FlagSet) api.SettingsRequest {
	given := api.SettingsRequest{}
	for _, s := range settings {
		if !flags.Changed(s.key) {
			continue
		}
		if s.isBool {
			value, _ := flags.GetBool(s.key) // it is one: addSettings made it
			given[s.key] = strconv.FormatBool(value)
			continue
		}
		values, _ := flags.GetStringSlice(s.key)
		given[s.key] = strings.Join(values, ",")
	}
	return given
}

func newSet(env *Env) *cobra.Command {
	var uid, runDir string
	cmd := &cobra.Command{
		Use:   "set --uid UID KEY=VALUE...",
		Short: "Change what an enrolled pod has its own way",
		Long: `Change what an enrolled pod has its own way, for connections that are made from then on: those that are
there already are left alone. All that is asked for is changed, or nothing is.

  bypass-inbound=true          others connect to the pod's apps without the node proxy, which still has the
                               mesh tunnel, port 15008
  dns-capture=true             DNS queries go to the node proxy; "default" is what the agent was told
  exclude-outbound-ports=25,465
                               to these ports the pod's apps connect without the node proxy
  exclude-outbound-cidrs=10.0.0.0/8,!10.1.0.0/16
                               and to these ranges; of those that an address is in, the longest prefix counts,
                               and one with ! before it is not excluded
  exclude-inbound-ports=9100   on these ports others reach the pod's apps without the node proxy
  reroute-interfaces=br0       what machines behind the pod send by TCP over these interfaces goes to the node
                               proxy, as if the pod had sent it; "auto" is all interfaces that carry none of the
                               addresses that the pod was enrolled with

A list replaces the one before; an empty one, as in exclude-outbound-ports= , is none. DNS queries that are
captured go to the node proxy whatever is excluded. "redirector pods -o json" shows the settings.`,
		Example: `  redirector set --uid 1 bypass-inbound=true
  redirector set --uid 1 exclude-outbound-cidrs=10.0.0.0/8,fd00::/8 exclude-outbound-ports=`,
		Args: func(*cobra.Command, []string) error { return nil },
		RunE: func(cmd *cobra.Command, args []string) error {
			request, err := readSettings(uid, args)
			if err != nil {
				return &usageError{err}
			}
			return ask(cmd.Context(), runDir, 0, func(ctx context.Context, agent *api.Client) error {
				pod, err := agent.Set(ctx, uid, request)
				if err != nil {
					return err
				}
				return env.printf("pod %s (%s) is set\n", &pod.Spec, pod.UID)
			})
		},
	}
	cmd.Flags().StringVar(&uid, "uid", "", "what the pod is known by")
	addRunDir(cmd.Flags(), &runDir)
	return cmd
}

// readSettings checks all that can be known without the agent.
func readSettings(uid string, args []string) (api.SettingsRequest, error) {
	if uid == "" {
		return nil, usagef("not given: --uid")
	}
	if err := enroll.ValidateUID(uid); err != nil {
		return nil, err
	}
	if len(args) == 0 {
		return nil, usagef("no setting is given: write KEY=VALUE, with one of the keys %s", strings.Join(enroll.SettingKeys(), ", "))
	}
	request := api.SettingsRequest{}
	for _, arg := range args {
		key, value, ok := strings.Cut(arg, "=")
		if !ok {
			return nil, usagef("%q is no setting: write KEY=VALUE", arg)
		}
		if _, twice := request[key]; twice {
			return nil, usagef("%s is given twice: give it once, with commas between its entries", key)
		}
		if err := new(enroll.Settings).Set(key, value); err != nil {
			return nil, err
		}
		request[key] = value
	}
	return request, nil
}
