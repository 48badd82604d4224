// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

func newPod(env *Env) *cobra.Command {
	var runDir string
	cmd := &cobra.Command{
		Use:   "pod NAME|NAMESPACE/NAME|UID",
		Short: "Show all about one enrolled pod",
		Long: `Show all about one enrolled pod: what is wanted for it and what the kernel has, each of its objects with the
number and the command that shows it, where the node proxy listens, what happened to its connections, the last
events, and what needs attention, with what to do about it.

The kernel is asked anew each time, and nothing is repaired by asking.`,
		Example: `  redirector pod web
  redirector pod shop/web -o json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("name one pod, by UID, NAMESPACE/NAME or name; \"redirector pods\" lists them")
			}
			return nil
		},
		ValidArgsFunction: completePods(env, &runDir),
	}
	output := addOutput(cmd.Flags(), outputYAML)
	addRunDir(cmd.Flags(), &runDir)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return ask(cmd.Context(), runDir, 0, func(ctx context.Context, agent *api.Client) error {
			uid, err := findPod(ctx, agent, args[0])
			if err != nil {
				return err
			}
			found, err := agent.Inspect(ctx, uid)
			if err != nil {
				return err
			}
			switch output.value {
			case outputJSON:
				return env.printJSON(found)
			case outputYAML:
				return env.printYAML(found)
			}
			return env.print(func(w io.Writer) error { return writePod(w, env.styleOf(), &found, time.Now()) })
		})
	}
	return cmd
}

func writePod(w io.Writer, s style, p *api.Inspection, now time.Time) error {
	tw := newTable(w)
	for _, line := range []struct{ name, value string }{
		{"pod", p.String()},
		{"uid", p.UID},
		{"health", s.health(p.Health)},
		{"state", s.state(p.State) + proxyWords(p)},
		{"enrolled", age(now.Sub(p.Since)) + " ago"},
		{"service account", p.ServiceAccount},
		{"network namespace", fmt.Sprintf("%s (inode %d, cookie %d)", p.NetNS, p.NetNSInode, p.NetNSCookie)},
		{"addresses", addresses(&p.Pod)},
		{"settings", settingWords(&p.Pod)},
		{"proxy listeners", listeners(&p.Pod)},
	} {
		fmt.Fprintf(tw, "%s\t%s\n", line.name, line.value)
	}
	if err := tw.Flush(); err != nil {
		return err
	}

	fmt.Fprintln(w, "\nin the kernel:")
	fmt.Fprintf(tw, "  %s\tOBJECT\tID\tHAVE\tSHOW\n", s.paint(plain, "OK"))
	for _, o := range p.Objects {
		ok, have := "yes", o.Have
		if !o.OK {
			ok, have = "NO", fmt.Sprintf("%s (want: %s)", o.Have, o.Want)
		}
		id := "-"
		if o.ID != 0 {
			id = fmt.Sprint(o.ID)
		}
		fmt.Fprintf(tw, "  %s\t%s %s\t%s\t%s\t%s\n", s.verdict(o.OK, ok), o.Kind, o.Name, id, have, o.Show)
	}
	if err := tw.Flush(); err != nil {
		return err
	}

	fmt.Fprintln(w, "\ncounters, since it was enrolled:")
	p.Counters.Each(func(name string, value uint64) {
		if value > 0 {
			fmt.Fprintf(tw, "  %s\t%d\n", name, value)
		}
	})
	if err := tw.Flush(); err != nil {
		return err
	}

	fmt.Fprintln(w, "\nlast events:")
	for _, e := range p.Events {
		fmt.Fprintf(tw, "  %s ago\t%s\t%s\n", age(now.Sub(e.Time)), strings.TrimSpace(string(e.Kind)+" "+e.What), e.Message)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if err := writeWarnings(w, s, p.Warnings, true); err != nil {
		return err
	}
	return writeNodeWarnings(w, s, p.Node)
}

// writeNodeWarnings lists what needs attention of the node, for who asks about a pod; nothing if nothing does.
func writeNodeWarnings(w io.Writer, s style, warnings []api.Warning) error {
	if len(warnings) == 0 {
		return nil
	}
	if _, err := fmt.Fprintln(w, "\nthe node needs attention, too:"); err != nil {
		return err
	}
	return writeWarningLines(w, s, warnings, true)
}

// proxyWords says what the node proxies have said of the pod.
func proxyWords(p *api.Inspection) string {
	if p.State == enroll.StateEnrolled {
		return fmt.Sprintf(": %d node proxy connections run for it", len(p.Proxies.Acked))
	}
	return ": nothing of it passes; " + cmp.Or(p.Reason, "no node proxy has answered yet")
}

// writeWarnings lists what needs attention. About one pod, which pod it is need not be said.
func writeWarnings(w io.Writer, s style, warnings []api.Warning, onePod bool) error {
	if _, err := fmt.Fprintf(w, "\nwarnings: %d\n", len(warnings)); err != nil {
		return err
	}
	return writeWarningLines(w, s, warnings, onePod)
}

func writeWarningLines(w io.Writer, s style, warnings []api.Warning, onePod bool) error {
	for _, warning := range warnings {
		about := ""
		switch {
		case onePod:
		case warning.Pod != "":
			about = fmt.Sprintf("pod %s (%s): ", warning.Pod, warning.UID)
		case warning.UID != "":
			about = fmt.Sprintf("pod %s: ", warning.UID)
		}
		if _, err := fmt.Fprintf(w, "  %s  %s%s\n    -> %s\n", s.health(warning.Severity), about, warning.Message, warning.Remedy); err != nil {
			return err
		}
	}
	return nil
}
