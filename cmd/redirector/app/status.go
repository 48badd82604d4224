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
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

func newStatus(env *Env) *cobra.Command {
	var runDir string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the agent, its node proxies, totals, and what needs attention",
		Long: `Show in a word how things are on the node, and the step to take next; then the agent, the node proxies that are
connected to it, the programs and how full the maps are, how many pods are enrolled, what happened to the
connections of all of them since each was enrolled, and what needs attention, with what to do about it.

  green   nothing needs attention
  yellow  everything works as it should, and something needs attention: what had to be put back in the last
          ten minutes, say
  red     something does not work as it should`,
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
			return env.print(func(w io.Writer) error { return writeStatus(w, env.styleOf(), &status, time.Now()) })
		})
	}
	return cmd
}

func writeStatus(w io.Writer, st style, s *api.Status, now time.Time) error {
	a := &s.Agent
	tw := newTable(w)
	for _, line := range []struct{ name, value string }{
		{"status", st.health(s.Health)},
		{"next step", cmp.Or(s.Next, "none: nothing needs attention")},
		{"agent", fmt.Sprintf("version %s, pid %d, up %s", a.Version, a.PID, age(time.Duration(a.Uptime)))},
		{"kernel", fmt.Sprintf("%s, with all %d features that are needed", a.Kernel, len(s.Features))},
		{"run dir", a.RunDir},
		{"bpffs", a.BPFFS},
		{"cgroup", a.Cgroup},
		{"zds socket", a.ZDSSocket},
		{"pods", fmt.Sprintf("%d enrolled, %d pending, %d unnamed", s.Pods.Enrolled, s.Pods.Pending, s.Pods.Unnamed)},
		{"admitted flows", fmt.Sprint(s.AdmittedFlows)},
	} {
		fmt.Fprintf(tw, "%s\t%s\n", line.name, line.value)
	}
	for _, c := range s.Conditions {
		fmt.Fprintf(tw, "%s\t%s\n", c.Name, st.verdict(c.Problem == "", cmp.Or(c.Problem, "ready")))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, part := range []func() error{
		func() error { return writeProxies(w, s.Proxies, now) },
		func() error { return writeHooks(w, st, s) },
		func() error { return writeMaps(w, s.Maps) },
	} {
		if err := part(); err != nil {
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
	return writeWarnings(w, st, s.Warnings, false)
}

func writeProxies(w io.Writer, proxies []zds.ConnStatus, now time.Time) error {
	fmt.Fprintf(w, "\nnode proxies: %d\n", len(proxies))
	if len(proxies) == 0 {
		return nil
	}
	tw := newTable(w)
	fmt.Fprintln(tw, "  PID\tSTATE\tPODS\tSINCE\tGETS NEW PODS\tLAST ERROR")
	for _, p := range proxies {
		newest := "no"
		if p.Newest {
			newest = "yes"
		}
		fmt.Fprintf(tw, "  %d\t%s\t%d\t%s\t%s\t%s\n", p.PID, p.State, p.Pods, age(now.Sub(p.Since)), newest, cmp.Or(p.LastError, "none"))
	}
	return tw.Flush()
}

// writeHooks lists the programs on the node. How often and how long they run is known while the kernel counts it.
func writeHooks(w io.Writer, st style, s *api.Status) error {
	how := "the kernel does not count their runs: sysctl kernel.bpf_stats_enabled=1"
	if s.KernelStats {
		how = "runs since the kernel counts them"
	}
	fmt.Fprintf(w, "\nprograms: %d (%s)\n", len(s.Hooks), how)
	tw := newTable(w)
	fmt.Fprintf(tw, "  %s\tHOOK\tPROGRAM\tID\tRUNS\tPER RUN\tSHOW\n", st.paint(plain, "OK"))
	for _, h := range s.Hooks {
		ok, runs, each := "yes", "-", "-"
		if h.Problem != "" {
			ok = "NO"
		}
		if s.KernelStats {
			runs = fmt.Sprint(h.Runs)
			if h.Runs > 0 {
				each = fmt.Sprintf("%dns", time.Duration(h.RunTime).Nanoseconds()/int64(h.Runs))
			}
		}
		fmt.Fprintf(tw, "  %s\t%s\t%s\t%d\t%s\t%s\t%s\n", st.verdict(h.Problem == "", ok), h.Name, h.Program, h.ID, runs, each, h.Show)
	}
	return tw.Flush()
}

func writeMaps(w io.Writer, usages []api.MapUsage) error {
	fmt.Fprintf(w, "\nmaps: %d\n", len(usages))
	tw := newTable(w)
	fmt.Fprintln(tw, "  MAP\tENTRIES\tROOM FOR")
	for _, u := range usages {
		fmt.Fprintf(tw, "  %s\t%d\t%d\n", u.Map, u.Entries, u.Capacity)
	}
	return tw.Flush()
}
