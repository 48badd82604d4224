// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
)

type enrollOptions struct {
	uid            string
	name           string
	serviceAccount string
	netns          string
	ips            []string
	settings       api.SettingsRequest
	waitProxy      bool
	timeout        time.Duration
	runDir         string
}

func newEnroll(env *Env) *cobra.Command {
	var o enrollOptions
	cmd := &cobra.Command{
		Use:   "enroll --uid UID --name NAMESPACE/NAME --service-account NAME --netns PATH",
		Short: "Send a pod's traffic through the node proxy",
		Long: `Send a pod's traffic through the node proxy: what its apps connect to outside of it, and what others
connect to in it. Connections that are there already are left alone.

The command returns when the pod is captured and a node proxy has said that it runs for it. If none does
in time, the command fails, and the pod stays captured: nothing of it passes until a node proxy comes. It
may be repeated, to repair or to wait again. What the pod may have its own way is told here, and may be
changed later by "redirector set", whose help explains it.

The path of the network namespace is opened by the agent, so it must lead there from where the agent is. It
is never the host's. /proc/self/ns/net stands for the namespace that this command runs in.`,
		Example: `  redirector enroll --uid 1 --name shop/web --service-account web --netns /run/netns/web
  redirector enroll --uid 1 --name shop/web --service-account web --netns /proc/4711/ns/net \
      --ip 10.0.0.7,fd00::7 --timeout 30s
  ip netns exec web redirector enroll --uid 1 --name shop/web --service-account web --netns /proc/self/ns/net`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.settings = settingsOf(cmd.Flags())
			return o.run(cmd.Context(), env)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.uid, "uid", "", "what the pod is known by: at most 63 letters, digits, '-' and '_', the first a letter or digit")
	flags.StringVar(&o.name, "name", "", "the pod's Kubernetes namespace and name, as NAMESPACE/NAME")
	flags.StringVar(&o.serviceAccount, "service-account", "", "the pod's service account, part of its identity in the mesh")
	flags.StringVar(&o.netns, "netns", "", "path of the pod's network namespace")
	flags.StringSliceVar(&o.ips, "ip", nil, "addresses of which the namespace must have one (default: any namespace will do)")
	addSettings(flags)
	flags.BoolVar(&o.waitProxy, "wait-proxy", true, "wait until a node proxy runs for the pod")
	flags.DurationVar(&o.timeout, "timeout", 10*time.Second, "how long to wait for it")
	addRunDir(flags, &o.runDir)
	return cmd
}

func (o *enrollOptions) run(ctx context.Context, env *Env) error {
	request, err := o.request()
	if err != nil {
		return &usageError{err}
	}
	return ask(ctx, o.runDir, o.timeout, func(ctx context.Context, agent *api.Client) error {
		pod, err := agent.Enroll(ctx, request)
		if err != nil {
			return err
		}
		return env.printf("pod %s (%s) is %s\n", &pod.Spec, pod.UID, pod.State)
	})
}

// request checks all that can be known without the agent.
func (o *enrollOptions) request() (api.EnrollRequest, error) {
	var missing []string
	for _, f := range []struct{ flag, value string }{
		{"--uid", o.uid}, {"--name", o.name}, {"--service-account", o.serviceAccount}, {"--netns", o.netns},
	} {
		if f.value == "" {
			missing = append(missing, f.flag)
		}
	}
	if len(missing) > 0 {
		return api.EnrollRequest{}, fmt.Errorf("not given, or empty: %s", strings.Join(missing, ", "))
	}
	namespace, name, ok := strings.Cut(o.name, "/")
	if !ok {
		return api.EnrollRequest{}, fmt.Errorf("bad --name %q: give the Kubernetes namespace, too, as in shop/web", o.name)
	}
	if o.waitProxy && (o.timeout <= 0 || o.timeout > api.MaxTimeout) {
		return api.EnrollRequest{}, fmt.Errorf("bad --timeout %s: wait longer than 0s and at most %s", o.timeout, api.MaxTimeout)
	}
	ips, err := parseIPs(o.ips)
	if err != nil {
		return api.EnrollRequest{}, err
	}
	netns, err := callersPath(o.netns)
	if err != nil {
		return api.EnrollRequest{}, err
	}
	request := api.EnrollRequest{
		Spec: enroll.Spec{
			UID:            o.uid,
			Namespace:      namespace,
			Name:           name,
			ServiceAccount: o.serviceAccount,
			NetNS:          netns,
			IPs:            ips,
		},
		Wait:    o.waitProxy,
		Timeout: api.Duration(o.timeout),
	}
	if err := o.settings.Apply(&request.Spec.Settings); err != nil {
		return api.EnrollRequest{}, err
	}
	return request, request.Spec.Validate()
}

func parseIPs(texts []string) ([]netip.Addr, error) {
	var ips []netip.Addr
	for _, text := range texts {
		ip, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil || ip.Zone() != "" {
			return nil, fmt.Errorf("bad --ip %q: give addresses without prefix length and zone, as in 10.0.0.7,fd00::7", text)
		}
		ips = append(ips, ip.Unmap())
	}
	return ips, nil
}

// callersPath makes a path mean to the agent what it means here: not its own processes and its own directory.
func callersPath(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("make --netns %q absolute: %w", path, err)
	}
	here := "/proc/" + strconv.Itoa(os.Getpid())
	for _, own := range []struct{ prefix, replacement string }{
		{"/proc/self/", here + "/"},
		{"/proc/thread-self/", here + "/"},
		{"/dev/fd/", here + "/fd/"},
		{"/dev/stdin", here + "/fd/0"},
	} {
		if rest, ok := strings.CutPrefix(abs, own.prefix); ok {
			return own.replacement + rest, nil
		}
	}
	return abs, nil
}
