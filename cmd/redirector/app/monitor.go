// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/monitor"
)

type monitorOptions struct {
	runDir    string
	pods      []string
	kinds     []string
	direction choice
	verdict   choice
	port      uint16
	cidr      string
	duration  time.Duration
}

func newMonitor(env *Env) *cobra.Command {
	o := monitorOptions{direction: choice{choices: monitor.Directions}, verdict: choice{choices: monitor.Verdicts}}
	cmd := &cobra.Command{
		Use:   "monitor",
		Short: "Tell of connections, drops, enrolments and repairs as they happen",
		Long: `Tell of what happens from now on, a line for each event, until it is interrupted: new TCP connections of enrolled
pods, with what becomes of each and why; packets that are dropped, by reason; and what happens to pods and the
node, enrolments and repairs. A connection is told of once, where it is decided about:

  outbound  proxy    captured, dns (a query by TCP) or rerouted (of a machine behind the pod)
  outbound  out      excluded, or proxy (the node proxy's own)
  outbound  app      own-address
  outbound  dropped  capture-failed
  inbound   proxy    inbound or mesh
  inbound   app      asked (bypassed or excluded), probe, or proxy-to-app (the node proxy speaks to the app)

Drops are told of several times a second, with how many there were; the reason is the name of the pod's counter. Of
their ends nothing is known, so there are none with --port and --cidr.

While nobody watches, nothing of this runs. Events for which there is no room are counted, and that is told of.`,
		Example: `  redirector monitor
  redirector monitor --pod shop/web --direction inbound
  redirector monitor --verdict dropped
  redirector monitor --cidr 10.0.0.0/8 --port 443 -o json --for 10s`,
	}
	output := addOutput(cmd.Flags())
	flags := cmd.Flags()
	addRunDir(flags, &o.runDir)
	flags.StringSliceVar(&o.pods, "pod", nil, "only of these pods: UID, NAMESPACE/NAME or name")
	flags.StringSliceVar(&o.kinds, "kind", nil, "only events of these kinds: "+strings.Join(monitor.Kinds, ", "))
	flags.Var(&o.direction, "direction", "only connections and drops in this direction")
	flags.Var(&o.verdict, "verdict", "only connections and drops with this verdict")
	flags.Uint16Var(&o.port, "port", 0, "only connections with this port at either end")
	flags.StringVar(&o.cidr, "cidr", "", "only connections with either end in this range of addresses")
	flags.DurationVar(&o.duration, "for", 0, "how long to watch (default: until it is interrupted)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return o.run(cmd.Context(), env, output.value == outputJSON)
	}
	return cmd
}

func (o *monitorOptions) run(ctx context.Context, env *Env, asJSON bool) error {
	filter := monitor.Filter{Kinds: o.kinds, Direction: o.direction.value, Verdict: o.verdict.value, Port: o.port}
	if o.cidr != "" {
		var err error
		if filter.CIDR, err = netip.ParsePrefix(o.cidr); err != nil {
			return usagef("bad --cidr %q: write a range as in 10.0.0.0/8 or fd00::/8", o.cidr)
		}
	}
	if _, err := monitor.ParseFilter(filter.Values()); err != nil {
		return &usageError{err}
	}
	if o.duration < 0 {
		return usagef("bad --for %s: it is negative", o.duration)
	}
	err := ask(ctx, o.runDir, 0, func(ctx context.Context, agent *api.Client) error {
		for _, name := range o.pods {
			uid, err := findPod(ctx, agent, name)
			if err != nil {
				return err
			}
			filter.UIDs = append(filter.UIDs, uid)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if o.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.duration)
		defer cancel()
	}
	s := env.styleOf()
	return api.NewClient(socketIn(o.runDir)).Monitor(ctx, filter, nil, func(e monitor.Event) error {
		return env.print(func(w io.Writer) error {
			if asJSON {
				return json.NewEncoder(w).Encode(e)
			}
			return writeEvent(w, s, &e)
		})
	})
}

func writeEvent(w io.Writer, s style, e *monitor.Event) error {
	at := e.Time.Local().Format("15:04:05.000000")
	var err error
	switch e.Kind {
	case monitor.Connection:
		_, err = fmt.Fprintf(w, "%s  %-8s  %s  %-14s  %s  %s -> %s\n", at, e.Direction, s.word(e.Verdict, 7), e.Reason, e.Pod, e.From, e.To)
	case monitor.Drop:
		_, err = fmt.Fprintf(w, "%s  %-8s  %s  %s: %d  %s\n", at, e.Direction, s.word(e.Verdict, 7), e.Reason, e.Count, e.Pod)
	case monitor.Lost:
		_, err = fmt.Fprintf(w, "%s  %s\n", at, s.paint(red, fmt.Sprintf("%d events are lost: there was no room for them", e.Count)))
	default:
		_, err = fmt.Fprintf(w, "%s  %s  %s  %s\n", at, strings.TrimSpace(string(e.Kind)+" "+e.Reason), e.Pod, e.Message)
	}
	return err
}

// word paints the verdict of a connection, in a column of that width.
func (s style) word(verdict string, width int) string {
	c := map[string]colour{"proxy": green, "dropped": red, "out": yellow}[verdict]
	if c == "" {
		c = plain
	}
	return s.paint(c, fmt.Sprintf("%-*s", width, verdict))
}
