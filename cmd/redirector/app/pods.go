// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

func newPods(env *Env) *cobra.Command {
	var runDir string
	cmd := &cobra.Command{
		Use:   "pods",
		Short: "List the enrolled pods and what happened to their connections",
		Long: `List the enrolled pods and what happened to their connections since they were enrolled.

  STATE            enrolled: a node proxy runs for the pod; pending: none does, so nothing passes
  SINCE            how long ago the pod was enrolled
  ADDRESSES        the pod's own, which its apps reach without the node proxy
  PROXY LISTENERS  ports on which a node proxy listens in the pod: 15001 outbound, 15006 inbound, 15008 mesh
  CAPTURED         connections of the pod's apps, taken to the node proxy
  IN               connections of others to the pod, handed to the node proxy
  TO-APP           connections from the node proxy to the pod's apps
  DROPPED          packets that were dropped, because no node proxy listened or because they would have
                   left past it

All counters, with their names in the kernel's map, are in -o json.`,
		Example: `  redirector pods
  redirector pods -o json`,
	}
	output := addOutput(cmd.Flags())
	addRunDir(cmd.Flags(), &runDir)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return ask(cmd.Context(), runDir, 0, func(ctx context.Context, agent *api.Client) error {
			pods, err := agent.Pods(ctx)
			if err != nil {
				return err
			}
			if output.value == outputJSON {
				return env.printJSON(pods)
			}
			return env.print(func(w io.Writer) error { return writePods(w, pods, time.Now()) })
		})
	}
	return cmd
}

func writePods(w io.Writer, pods []enroll.Pod, now time.Time) error {
	if len(pods) == 0 {
		_, err := fmt.Fprintln(w, `no pod is enrolled: "redirector enroll --help" shows how`)
		return err
	}
	tw := newTable(w)
	fmt.Fprintln(tw, "NAMESPACE/NAME\tUID\tSTATE\tSINCE\tADDRESSES\tPROXY LISTENERS\tCAPTURED\tIN\tTO-APP\tDROPPED")
	for i := range pods {
		p := &pods[i]
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\n", p, p.UID, p.State, age(now.Sub(p.Since)), addresses(p), listeners(p),
			p.Counters.OutboundCaptured, p.Counters.InboundSteered, p.Counters.ProxyToApp, dropped(&p.Counters))
	}
	return tw.Flush()
}

// newTable aligns columns that are separated by tabs.
func newTable(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

// dropped is how many packets did not pass.
func dropped(c *maps.Counters) uint64 {
	return c.OutboundNoListener + c.InboundNoListener + c.HboneNoListener + c.SealDropped
}

// addresses leaves out those that every network namespace has.
func addresses(p *enroll.Pod) string {
	var texts []string
	for _, a := range p.Addresses {
		if !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			texts = append(texts, a.String())
		}
	}
	return orNone(texts)
}

func listeners(p *enroll.Pod) string {
	var ports []int
	for port, n := range p.Listeners {
		if n > 0 {
			ports = append(ports, int(port))
		}
	}
	slices.Sort(ports)
	var texts []string
	for _, port := range ports {
		texts = append(texts, strconv.Itoa(port))
	}
	return orNone(texts)
}

func orNone(texts []string) string {
	if len(texts) == 0 {
		return "none"
	}
	return strings.Join(texts, ",")
}

// age writes a duration in its one or two largest units.
func age(d time.Duration) string {
	switch {
	case d < 0: // the clock was set back
		return "0s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
	}
}
