// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/verify"
)

func newVerify(env *Env) *cobra.Command {
	var runDir string
	cmd := &cobra.Command{
		Use:   "verify [NAME|NAMESPACE/NAME|UID...]",
		Short: "Check with real packets that pods are captured",
		Long: `Check with real packets that pods are captured: those that are named, or all. The agent connects from inside each
pod's network namespace and from the host's, by IPv4 and IPv6, and says of each check whether it has passed, and
if not, why and what to do:

  outbound   an app's connection goes to the node proxy
  unproxied  so does that of an app which pretends to be the node proxy
  seal       a SYN of a raw socket does not leave the pod
  dns        a DNS query by UDP and by TCP goes to the node proxy
  inbound    a peer's connection goes to the node proxy
  probe      a probe of the host's reaches the pod past the node proxy
  objects    everything that the kernel must have for the pod is there, as "redirector pod" lists it

It is safe where pods do their work: all that is sent goes between the pod and its own node, to ports where nobody
listens (9, 53, or one that is free) or to the node proxy, and no app is reached. The node proxy's log shows the
connections, and so do the pod's counters.

It fails if a check does.`,
		Example: `  redirector verify
  redirector verify shop/web
  redirector verify web -o json`,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: completePods(env, &runDir),
	}
	output := addOutput(cmd.Flags())
	addRunDir(cmd.Flags(), &runDir)
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		var uids []string
		err := ask(cmd.Context(), runDir, 0, func(ctx context.Context, agent *api.Client) (err error) {
			uids, err = podsToVerify(ctx, agent, names)
			return err
		})
		if err != nil {
			return err
		}
		var all []api.Verification
		for _, uid := range uids {
			err := ask(cmd.Context(), runDir, 0, func(ctx context.Context, agent *api.Client) error {
				v, err := agent.Verify(ctx, uid)
				all = append(all, v)
				return err
			})
			if err != nil {
				return err
			}
		}
		if output.value == outputJSON {
			err = env.printJSON(all)
		} else {
			err = env.print(func(w io.Writer) error { return writeVerifications(w, env.styleOf(), all) })
		}
		if err != nil {
			return err
		}
		return failedChecks(all)
	}
	return cmd
}

// podsToVerify are the UIDs of those named, or of all.
func podsToVerify(ctx context.Context, agent *api.Client, names []string) (uids []string, err error) {
	for _, name := range names {
		uid, err := findPod(ctx, agent, name)
		if err != nil {
			return nil, err
		}
		uids = append(uids, uid)
	}
	if len(names) > 0 {
		return uids, nil
	}
	pods, err := agent.Pods(ctx)
	if err == nil && len(pods) == 0 {
		err = errors.New(`there is nothing to verify, as no pod is enrolled: "redirector enroll --help" shows how`)
	}
	for i := range pods {
		uids = append(uids, pods[i].UID)
	}
	return uids, err
}

// failedChecks is the error that says that some have failed.
func failedChecks(all []api.Verification) error {
	pods, checks := 0, 0
	for _, v := range all {
		if v.Passed {
			continue
		}
		pods++
		for _, c := range v.Checks {
			if c.Result == verify.Failed {
				checks++
			}
		}
	}
	if checks == 0 {
		return nil
	}
	return fmt.Errorf("of %d pods %d have failed, in %d checks: do what is said for each, and verify again", len(all), pods, checks)
}

func writeVerifications(w io.Writer, s style, all []api.Verification) error {
	for i, v := range all {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "pod %s (%s)\n", v.Pod, v.UID)
		tw := newTable(w)
		for _, c := range v.Checks {
			fmt.Fprintf(tw, "  %s\t%s\t%s\t%s\n", s.paint(resultColour(c.Result), string(c.Result)), c.Name, c.Family, c.Message)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
		for _, c := range v.Checks {
			if c.Result == verify.Failed {
				fmt.Fprintf(w, "  %s %s: %s\n    -> %s\n", c.Name, c.Family, c.Cause, c.Remedy)
			}
		}
	}
	if len(all) == 0 {
		return nil
	}
	return writeNodeWarnings(w, s, all[len(all)-1].Node)
}

func resultColour(r verify.Result) colour {
	return map[verify.Result]colour{verify.Passed: green, verify.Failed: red, verify.Skipped: yellow}[r]
}

// newDial is what verify.NewProber runs in another cgroup.
func newDial(env *Env) *cobra.Command {
	return &cobra.Command{
		Use:   verify.DialCommand + " ADDRESS:PORT",
		Short: "Connect, and print the number of the kernel's error",
		Long: `Connect to an address by TCP, close the connection at once, and print the number of the kernel's error, 0 for
none. The agent runs it in another cgroup, to probe a pod as the kubelet does.`,
		Example: `  redirector dial 127.0.0.1:9`,
		Hidden:  true,
		Args:    cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			to, err := netip.ParseAddrPort(args[0])
			if err != nil {
				return &usageError{err}
			}
			number := unix.Errno(0)
			if err := verify.Dial(to); err != nil && !errors.As(err, &number) {
				return err
			}
			return env.printf("%d\n", int(number))
		},
	}
}
