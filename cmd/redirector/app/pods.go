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

type podsOptions struct {
	runDir    string
	namespace string
	state     choice
	dropping  bool
	watch     bool
	interval  time.Duration
	output    *choice
}

// podStates are the values of --state.
var podStates = []string{string(enroll.StateEnrolled), string(enroll.StatePending)}

func newPods(env *Env) *cobra.Command {
	o := podsOptions{state: choice{choices: podStates}}
	cmd := &cobra.Command{
		Use:   "pods [NAME|NAMESPACE/NAME|UID...]",
		Short: "List the enrolled pods and what happened to their connections",
		Long: `List the enrolled pods and what happened to their connections since they were enrolled: all, or those that
are named, that are in a state or a namespace, or of which packets were dropped.

  STATE            enrolled: a node proxy runs for the pod; pending: none does, so nothing passes
  SINCE            how long ago the pod was enrolled
  ADDRESSES        the pod's own, which its apps reach without the node proxy
  SETTINGS         dns: its DNS queries go to the node proxy; the others as in "redirector set --help", with how many
                   entries each has
  CAPTURED         connections of the pod's apps, taken to the node proxy
  IN               connections of others to the pod, handed to the node proxy
  PROBE            probes of the host's processes, let through to the pod's apps
  DNS              queries to DNS servers, sent to the node proxy
  DROPPED          packets that were dropped, because no node proxy listened or because they would have
                   left past it

With -o wide also:

  UID              what the pod is known by
  PROXY LISTENERS  ports on which a node proxy listens in the pod: 15001 outbound, 15006 inbound, 15008 mesh
  TO-APP           connections from the node proxy to the pod's apps
  NETNS            the path of the pod's network namespace

All counters, with their names in the kernel's map, are in -o json and -o yaml.`,
		Example: `  redirector pods
  redirector pods -o wide
  redirector pods --namespace shop --state pending
  redirector pods web -o yaml
  redirector pods --watch --dropping`,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: completePods(env, &o.runDir),
	}
	flags := cmd.Flags()
	o.output = addOutput(flags, outputWide, outputYAML)
	addRunDir(flags, &o.runDir)
	flags.StringVarP(&o.namespace, "namespace", "n", "", "only pods of this Kubernetes namespace")
	flags.Var(&o.state, "state", "only pods in this state")
	flags.BoolVar(&o.dropping, "dropping", false, "only pods of which packets were dropped")
	flags.BoolVarP(&o.watch, "watch", "w", false, "print again and again, until it is interrupted")
	flags.DurationVar(&o.interval, "interval", 2*time.Second, "how often to print with --watch")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if o.interval < 100*time.Millisecond {
			return usagef("bad --interval %s: use 100ms or more", o.interval)
		}
		for {
			if err := o.print(cmd.Context(), env, args); err != nil || !o.watch {
				return err
			}
			select {
			case <-cmd.Context().Done():
				return nil
			case <-time.After(o.interval):
			}
		}
	}
	return cmd
}

// print asks once, and prints what was asked for.
func (o *podsOptions) print(ctx context.Context, env *Env, names []string) error {
	return ask(ctx, o.runDir, 0, func(ctx context.Context, agent *api.Client) error {
		all, err := agent.Pods(ctx)
		if err != nil {
			return err
		}
		pods := slices.DeleteFunc(slices.Clone(all), func(p enroll.Pod) bool { return !o.wants(&p, names) })
		switch o.output.value {
		case outputJSON:
			return env.printJSON(pods)
		case outputYAML:
			return env.printYAML(pods)
		}
		s := env.styleOf()
		return env.print(func(w io.Writer) error {
			if o.watch && s.on {
				fmt.Fprint(w, "\x1b[H\x1b[2J") // from the top of a cleared screen
			}
			if len(pods) == 0 && len(all) > 0 {
				_, err := fmt.Fprintf(w, "of %d enrolled pods none is as asked for\n", len(all))
				return err
			}
			return writePods(w, s, pods, o.output.value == outputWide, time.Now())
		})
	})
}

// wants says whether a pod is among those that were asked for.
func (o *podsOptions) wants(p *enroll.Pod, names []string) bool {
	return (len(names) == 0 || slices.Contains(names, p.UID) || slices.Contains(names, p.Name) || slices.Contains(names, p.String())) &&
		(o.namespace == "" || p.Namespace == o.namespace) &&
		(o.state.value == "" || string(p.State) == o.state.value) &&
		(!o.dropping || dropped(&p.Counters) > 0)
}

func writePods(w io.Writer, s style, pods []enroll.Pod, wide bool, now time.Time) error {
	if len(pods) == 0 {
		_, err := fmt.Fprintln(w, `no pod is enrolled: "redirector enroll --help" shows how`)
		return err
	}
	tw := newTable(w)
	more := ""
	if wide {
		more = "\tUID\tPROXY LISTENERS\tTO-APP\tNETNS"
	}
	fmt.Fprintf(tw, "NAMESPACE/NAME\t%s\tSINCE\tADDRESSES\tSETTINGS\tCAPTURED\tIN\tPROBE\tDNS\tDROPPED%s\n", s.paint(plain, "STATE"), more)
	for i := range pods {
		p := &pods[i]
		c := &p.Counters
		if wide {
			more = fmt.Sprintf("\t%s\t%s\t%d\t%s", p.UID, listeners(p), c.ProxyToApp, p.NetNS)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d%s\n", p, s.state(p.State), age(now.Sub(p.Since)), addresses(p), settingWords(p),
			c.OutboundCaptured, c.InboundSteered+c.HboneSteered, c.ProbesAdmitted, c.DnsCaptured, dropped(c), more)
	}
	return tw.Flush()
}

// settingWords names what is switched on for the pod.
func settingWords(p *enroll.Pod) string {
	var on []string
	if p.DNSCapture {
		on = append(on, "dns")
	}
	if p.BypassInbound {
		on = append(on, enroll.KeyBypassInbound)
	}
	s := &p.Settings
	for _, list := range []struct {
		key string
		n   int
	}{
		{enroll.KeyExcludeOutboundPorts, len(s.ExcludeOutboundPorts)},
		{enroll.KeyExcludeOutboundCIDRs, len(s.ExcludeOutboundCIDRs)},
		{enroll.KeyExcludeInboundPorts, len(s.ExcludeInboundPorts)},
		{enroll.KeyRerouteInterfaces, len(s.RerouteInterfaces)},
	} {
		if list.n > 0 {
			on = append(on, fmt.Sprintf("%s(%d)", list.key, list.n))
		}
	}
	return orNone(on)
}

// newTable aligns columns that are separated by tabs.
func newTable(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

// dropped is how many packets did not pass.
func dropped(c *maps.Counters) uint64 {
	return c.OutboundNoListener + c.InboundNoListener + c.HboneNoListener + c.SealDropped + c.SealDroppedSynack + c.LoopsDropped +
		c.StraysDropped + c.DnsRefused
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
