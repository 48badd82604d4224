// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"io"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/explain"
)

type explainOptions struct {
	pod, from, to string
	via           string
	by            choice
	protocol      choice
	runDir        string
}

func newExplain(env *Env) *cobra.Command {
	o := explainOptions{protocol: choice{value: string(explain.TCP), choices: []string{string(explain.TCP), string(explain.UDP)}}}
	for _, maker := range explain.Makers() {
		o.by.choices = append(o.by.choices, string(maker))
	}
	cmd := &cobra.Command{
		Use:   "explain --pod POD [--from ADDRESS[:PORT]] --to ADDRESS:PORT",
		Short: "Say what becomes of a connection, and which decision makes it so",
		Long: `Say what becomes of a new connection of an enrolled pod, or to it, and which line of the decision list makes
it so. The agent goes through the list as the programs in the kernel do, and asks the same maps; nothing is sent.

Without --from the pod's app connects. A source of the pod's own, too, means its app, unless --by says that the
proxy does; any other source means a peer, unless --by says that it is a process of the host: kubelet, node (in no
pod's cgroup) or host-pod (of a pod with hostNetwork). With a source port, a connection that is admitted right
now is found. Of a machine behind the pod, name the interface of the pod that it comes by, with --via.

The last line names the counter that counts such connections, which "redirector pod" shows.`,
		Example: `  redirector explain --pod shop/web --to 198.51.100.7:443
  redirector explain --pod web --from 198.51.100.7 --to 10.0.0.7:8080
  redirector explain --pod web --from 10.0.0.1 --by kubelet --to 10.0.0.7:8080
  redirector explain --pod vm --from 10.77.0.2 --via br0 --to 198.51.100.7:443
  redirector explain --pod web --to 198.51.100.53:53 --protocol udp -o json`,
	}
	output := addOutput(cmd.Flags())
	addRunDir(cmd.Flags(), &o.runDir)
	flags := cmd.Flags()
	flags.StringVar(&o.pod, "pod", "", "the pod: its UID, NAMESPACE/NAME, or name")
	flags.StringVar(&o.from, "from", "", "source address, with or without a port (default: the pod's own)")
	flags.StringVar(&o.to, "to", "", "destination address and port")
	flags.StringVar(&o.via, "via", "", "interface of the pod that the connection comes by, as in reroute-interfaces (default: its own)")
	flags.Var(&o.by, "by", "who connects (default: the app from the pod's own address, a peer from any other)")
	flags.Var(&o.protocol, "protocol", "the transport protocol")
	_ = cmd.RegisterFlagCompletionFunc("pod", func(cmd *cobra.Command, _ []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return completePods(env, &o.runDir)(cmd, nil, begun)
	})
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		q, err := o.query()
		if err != nil {
			return &usageError{err}
		}
		return ask(cmd.Context(), o.runDir, 0, func(ctx context.Context, agent *api.Client) error {
			uid, err := findPod(ctx, agent, o.pod)
			if err != nil {
				return err
			}
			answer, err := agent.Explain(ctx, uid, q)
			if err != nil {
				return err
			}
			if output.value == outputJSON {
				return env.printJSON(answer)
			}
			return env.print(func(w io.Writer) error { return writeAnswer(w, env.styleOf(), o.pod, &answer) })
		})
	}
	return cmd
}

// query checks all that can be known without the agent.
func (o *explainOptions) query() (explain.Query, error) {
	q := explain.Query{By: explain.Maker(o.by.value), Protocol: explain.Protocol(o.protocol.value), Via: o.via}
	if o.pod == "" || o.to == "" {
		return q, fmt.Errorf("give --pod and --to, as in --pod shop/web --to 198.51.100.7:443")
	}
	var err error
	if q.To, err = netip.ParseAddrPort(o.to); err != nil || q.To.Port() == 0 {
		return q, fmt.Errorf("bad --to %q: give an address and a port, as in 198.51.100.7:443 or [2001:db8::7]:443", o.to)
	}
	if o.from == "" {
		return q, nil
	}
	if addr, err := netip.ParseAddr(o.from); err == nil {
		q.From = netip.AddrPortFrom(addr, 0)
	} else if q.From, err = netip.ParseAddrPort(o.from); err != nil {
		return q, fmt.Errorf("bad --from %q: give an address, as in 10.0.0.7, 10.0.0.7:34567 or [fd00::7]:34567", o.from)
	}
	return q, nil
}

func writeAnswer(w io.Writer, s style, pod string, a *explain.Answer) error {
	from := "its own address"
	if a.From.Addr().IsValid() {
		from = a.From.Addr().String()
		if a.From.Port() != 0 {
			from = a.From.String()
		}
	}
	fmt.Fprintf(w, "%s, %s %s of pod %s: %s -> %s, by %s\n\n", s.paint(verdictColour(a.Verdict), verdictWords(a)), a.Direction, a.Protocol, pod, from, a.To, a.By)
	tw := newTable(w)
	for i, step := range a.Steps {
		arrow := "  "
		if step.Decides {
			arrow = "=>"
		}
		fmt.Fprintf(tw, "%s %d\t%s\t%s\n", arrow, i+1, step.Text, step.Found)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	counter := "no counter counts it"
	if a.Counter != "" {
		counter = "counted as " + a.Counter
	}
	_, err := fmt.Fprintf(w, "\n%s\n", counter)
	return err
}

func verdictWords(a *explain.Answer) string {
	switch a.Verdict {
	case explain.ToProxy:
		return fmt.Sprintf("to the node proxy, port %d", a.Port)
	case explain.ToApp:
		return "to the app"
	case explain.Out:
		return "out as it is"
	default:
		return "dropped"
	}
}

func verdictColour(v explain.Verdict) colour {
	switch v {
	case explain.ToProxy:
		return green
	case explain.Dropped:
		return red
	default:
		return yellow
	}
}
