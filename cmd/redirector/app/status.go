// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
)

func newStatus(env *Env) *cobra.Command {
	var runDir string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the agent, its node proxies, totals, and what needs attention",
		Long: `Show the agent, the node proxies that are connected to it, how many pods are enrolled, what happened
to the connections of all of them since each was enrolled, and what needs attention, with what to do about it.`,
		Example: `  redirector status
  redirector status -o json`,
	}
	output := addOutput(cmd.Flags())
	addRunDir(cmd.Flags(), &runDir)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return ask(cmd.Context(), runDir, 0, func(ctx context.Context, agent *api.Client) error {
			status, err := agent.Status(ctx)
			if err != nil {
				return err
			}
			if output.value == outputJSON {
				return env.printJSON(status)
			}
			return env.print(func(w io.Writer) error { return writeStatus(w, &status, time.Now()) })
		})
	}
	return cmd
}

func writeStatus(w io.Writer, s *api.Status, now time.Time) error {
	a := &s.Agent
	tw := newTable(w)
	for _, line := range []struct{ name, value string }{
		{"agent", fmt.Sprintf("version %s, pid %d, up %s", a.Version, a.PID, age(time.Duration(a.Uptime)))},
		{"kernel", a.Kernel},
		{"run dir", a.RunDir},
		{"bpffs", a.BPFFS},
		{"cgroup", a.Cgroup},
		{"zds socket", a.ZDSSocket},
		{"pods", fmt.Sprintf("%d enrolled, %d pending, %d unnamed", s.Pods.Enrolled, s.Pods.Pending, s.Pods.Unnamed)},
		{"admitted flows", fmt.Sprint(s.AdmittedFlows)},
	} {
		fmt.Fprintf(tw, "%s\t%s\n", line.name, line.value)
	}
	if err := tw.Flush(); err != nil {
		return err
	}

	fmt.Fprintf(w, "\nnode proxies: %d\n", len(s.Proxies))
	if len(s.Proxies) > 0 {
		fmt.Fprintln(tw, "  PID\tSTATE\tPODS\tSINCE\tGETS NEW PODS\tLAST ERROR")
		for _, p := range s.Proxies {
			newest := "no"
			if p.Newest {
				newest = "yes"
			}
			fmt.Fprintf(tw, "  %d\t%s\t%d\t%s\t%s\t%s\n", p.PID, p.State, p.Pods, age(now.Sub(p.Since)), newest, cmp.Or(p.LastError, "none"))
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}

	fmt.Fprintln(w, "\ncounters, of all enrolled pods:")
	s.Counters.Each(func(name string, value uint64) { fmt.Fprintf(tw, "  %s\t%d\n", name, value) })
	if err := tw.Flush(); err != nil {
		return err
	}

	fmt.Fprintln(w, "\nrepairs, since the agent's start:")
	for _, kind := range slices.Sorted(maps.Keys(s.Repairs)) {
		fmt.Fprintf(tw, "  %s\t%d\n", kind, s.Repairs[kind])
	}
	if err := tw.Flush(); err != nil {
		return err
	}

	fmt.Fprintf(w, "\nwarnings: %d\n", len(s.Warnings))
	for _, warning := range s.Warnings {
		about := ""
		switch {
		case warning.Pod != "":
			about = fmt.Sprintf("pod %s (%s): ", warning.Pod, warning.UID)
		case warning.UID != "":
			about = fmt.Sprintf("pod %s: ", warning.UID)
		}
		fmt.Fprintf(w, "  %s%s\n    -> %s\n", about, warning.Message, warning.Remedy)
	}
	return nil
}
