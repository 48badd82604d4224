// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"
	"k8s.io/klog/v2"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/cni"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/kubeapi"
	"github.com/redirector-dataplane/redirector/pkg/podns"
	"github.com/redirector-dataplane/redirector/pkg/podwatch"
)

const (
	defaultProc      = "/proc"
	defaultDaemonSet = "redirector"
	defaultSystem    = "istio-system"
	// defaultHealth is where istio-cni's DaemonSet has its readiness probe look.
	defaultHealth = ":8000"
	// clientQPS, per second as istio-cni's, and clientBurst bound the requests to the API server but events. A node that starts
	// writes an annotation for each of its pods, of which clouds allow 250; no more than eight are under way at a time.
	clientQPS, clientBurst = 80, 300
	// leaveTimeout bounds how long the agent, when told to stop, asks whether it will come back. Of the 30 s that a pod has to
	// stop, most is left for cleaning up.
	leaveTimeout = 5 * time.Second
	// runtimeAgain is the pause between two tries to learn the node's container runtime.
	runtimeAgain = time.Minute
	// removeTimeout bounds how long it removes annotations then.
	removeTimeout = 10 * time.Second
)

// kubernetesOptions are those of an agent that pods come to from Kubernetes.
type kubernetesOptions struct {
	pluginOptions
	node, kubeconfig, system, daemonSet string
	selectors                           string
	proc                                string
	healthAddr                          string
	installCNI                          bool
	// cleanUp says that the agent is to clean up when it stops, whoever comes after it.
	cleanUp bool
	// gone says that the agent has ended for good, and the node has to be cleaned up.
	gone bool
}

func (o *kubernetesOptions) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.node, "node-name", "", "name of this node; needed without --standalone")
	addPath(flags, &o.kubeconfig, "kubeconfig", "", "how to reach the API server (default: as pods do, by their service account)")
	flags.StringVar(&o.system, "system-namespace", defaultSystem, "namespace of the node proxy, which is never enrolled")
	flags.StringVar(&o.daemonSet, "daemonset", defaultDaemonSet, "the agent's DaemonSet, in --pod-namespace: "+
		"when it is gone as the agent stops, the agent cleans up")
	flags.StringVar(&o.selectors, "ambient-enablement-selector", "", "which pods are in the mesh: a YAML list of podSelector and namespaceSelector "+
		"(default: by the label istio.io/dataplane-mode of pod or namespace)")
	addPath(flags, &o.proc, "proc", defaultProc, "the node's /proc")
	flags.StringVar(&o.healthAddr, "health-addr", "", "address of /healthz and /readyz (default: "+defaultHealth+", none with --standalone)")
	flags.BoolVar(&o.installCNI, "install-cni", true, "install the CNI plugin and keep it installed; not with --standalone")
	flags.BoolVar(&o.cleanUp, "disable-safe-upgrade", false, "when the agent stops, clean up as if its DaemonSet were gone, whether or not it is: "+
		"pods are not captured until the next agent has them; not with --standalone")
	twin(flags, "disable-safe-upgrade", "AMBIENT_DISABLE_SAFE_UPGRADE")
	for _, name := range []string{
		"node-name", "kubeconfig", "system-namespace", "ambient-enablement-selector", "proc", "health-addr", "install-cni",
	} {
		twin(flags, name)
	}
	twin(flags, "daemonset", "DAEMONSET_NAME")
	o.addPluginFlags(flags)
}

// kubernetesAgent is the part of an agent that has to do with Kubernetes. Nil where there is none of it.
type kubernetesAgent struct {
	opts      *kubernetesOptions
	log       *slog.Logger
	policy    podwatch.Policy
	client    *kubeapi.Client
	health    podwatch.Health
	listener  net.Listener   // for health checks; nil: none
	plugins   net.Listener   // for the CNI plugin; nil: none
	installer *cni.Installer // nil: none
	// installed is what became of the last look at the plugin's installation; nil before the first.
	installed atomic.Pointer[error]
	// runtime is the node's container runtime with its version, as "containerd://1.7.1"; nil while it is not known.
	runtime atomic.Pointer[string]
	watcher *podwatch.Watcher
}

// prepare does all that may fail. With standalone there is nothing but health checks, if they were asked for.
func (o *kubernetesOptions) prepare(
	ctx context.Context, standalone bool, runDir string, log *slog.Logger,
) (_ *kubernetesAgent, err error) {
	a := &kubernetesAgent{opts: o, log: log}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	addr := o.healthAddr
	if !standalone {
		if addr == "" {
			addr = defaultHealth
		}
		if err := a.configure(runDir); err != nil {
			return nil, err
		}
	}
	if addr != "" {
		if a.listener, err = listenHealth(ctx, addr); err != nil {
			return nil, err
		}
	}
	if !standalone {
		a.plugins, err = cni.ListenSocket(filepath.Join(runDir, cni.SocketName))
	}
	return a, err
}

// configure reads the options.
func (a *kubernetesAgent) configure(runDir string) error {
	o := a.opts
	if o.node == "" {
		return usagef("the node's name is not known: set --node-name or NODE_NAME, in a DaemonSet from spec.nodeName, or use --standalone")
	}
	if problems := validation.IsDNS1123Subdomain(o.node); len(problems) > 0 {
		return usagef("bad --node-name %q: %s", o.node, strings.Join(problems, "; "))
	}
	for flag, name := range map[string]string{"pod-namespace": o.podNamespace, "system-namespace": o.system} {
		if problems := validation.IsDNS1123Label(name); name != "" && len(problems) > 0 {
			return usagef("bad --%s %q: %s", flag, name, strings.Join(problems, "; "))
		}
	}
	for flag, name := range map[string]string{"pod-name": o.podName, "daemonset": o.daemonSet} {
		if problems := validation.IsDNS1123Subdomain(name); name != "" && len(problems) > 0 {
			return usagef("bad --%s %q: %s", flag, name, strings.Join(problems, "; "))
		}
	}
	for _, name := range o.excluded() {
		if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
			return usagef("bad --exclude-namespaces %q: %s", name, strings.Join(problems, "; "))
		}
	}
	text := o.selectors
	if strings.TrimSpace(text) == "" {
		text = podwatch.DefaultSelectors
	}
	selectors, err := podwatch.ParseSelectors(text)
	if err != nil {
		return usagef("bad --ambient-enablement-selector: %w", err)
	}
	if _, err := os.Stat(filepath.Join(o.proc, "1")); err != nil {
		return usagef("bad --proc %s: %w: name where the node's /proc is mounted", o.proc, err)
	}
	podns.UseProc(o.proc)

	o.pluginOptions.runDir = runDir
	installer, err := o.pluginOptions.installer(a.log)
	if err != nil {
		return err
	}
	if o.installCNI {
		a.installer = installer
	}
	a.policy = podwatch.Policy{
		Selectors:         selectors,
		ExcludeNamespaces: o.excluded(),
		SystemNamespace:   o.system,
		AgentNamespace:    o.podNamespace,
		AgentDaemonSet:    o.daemonSet,
		AgentPod:          o.podName,
	}
	return a.connect()
}

// connect makes the client, which does not connect before it is used.
func (a *kubernetesAgent) connect() (err error) {
	klog.SetSlogLogger(a.log)
	a.client, err = connectAPI(a.opts.kubeconfig, "use --standalone", a.health.Wrap)
	return err
}

// connectAPI makes a client by a kubeconfig or, without, by the pod's service account; otherwise says what else can be done.
func connectAPI(kubeconfig, otherwise string, wrap transport.WrapperFunc) (*kubeapi.Client, error) {
	var config *rest.Config
	var err error
	if kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, usagef("bad --kubeconfig %s: %w", kubeconfig, err)
		}
	} else if config, err = rest.InClusterConfig(); err != nil {
		return nil, usagef("reach the API server: %w: run this as a pod with a service account, name a file with --kubeconfig, or %s", err, otherwise)
	}
	config.QPS, config.Burst = clientQPS, clientBurst
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.UserAgent = "redirector"
	if wrap != nil {
		config.Wrap(wrap)
	}
	client, err := kubeapi.New(config)
	if err != nil {
		return nil, usagef("bad --kubeconfig %s: %w", kubeconfig, err)
	}
	return client, nil
}

// close gives back what prepare has opened.
func (a *kubernetesAgent) close() {
	for _, l := range []net.Listener{a.listener, a.plugins} {
		if l != nil {
			_ = l.Close()
		}
	}
}

// watch makes what looks after the pods, without starting it.
func (a *kubernetesAgent) watch(enroller *enroll.Enroller, runDir string, observe func(podwatch.Reason)) (err error) {
	if a.client == nil {
		return nil
	}
	a.watcher, err = podwatch.New(podwatch.Options{
		Client: a.client, Node: a.opts.node, Policy: a.policy, Enroller: enroller, RunDir: runDir, Log: a.log,
		ObserveEvent: observe,
	})
	return err
}

// repaired has a repair said to whoever looks at the pod; see enroll.Config.
func (a *kubernetesAgent) repaired(uid string, kind enroll.Repair) {
	if a.watcher != nil {
		a.watcher.Repaired(uid, kind)
	}
}

// serve adds to a group what is done until ctx is done. The pods that were enrolled have been taken over.
func (a *kubernetesAgent) serve(ctx context.Context, group *errgroup.Group) {
	if a.watcher != nil {
		group.Go(func() error { return a.watcher.Run(ctx) })
		group.Go(func() error { return a.learnRuntime(ctx) })
		group.Go(func() error { return cni.NewServer(a.watcher, a.log).Serve(ctx, a.plugins) })
	}
	if a.installer != nil {
		group.Go(func() error {
			// Pods that run need no plugin: the agent works on without, and is not ready.
			if err := a.installer.Run(ctx, func(err error) { a.installed.Store(&err) }); err != nil {
				a.log.Error("cannot look after the CNI plugin", "error", oneLine(err))
				a.installed.Store(&err)
			}
			return nil
		})
	}
	if a.listener != nil {
		group.Go(func() error { return serveHealth(ctx, a.listener, a.conditions(), a.log) })
	}
}

// learnRuntime asks which container runtime the node has, again until that is known. It is needed when the agent may have no right any
// more to ask.
func (a *kubernetesAgent) learnRuntime(ctx context.Context) error {
	for {
		node, err := a.client.Node(ctx, a.opts.node)
		if err == nil {
			a.runtime.Store(&node.Status.NodeInfo.ContainerRuntimeVersion)
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(runtimeAgain):
		}
	}
}

// keepBinary says whether the plugin's binary may have to stay for containers that were added by it: containerd deletes them by the
// configuration that is there then, and other runtimes, and Multus, by the one that was.
func (a *kubernetesAgent) keepBinary() cni.KeepBinary {
	if runtime := a.runtime.Load(); a.opts.chained && runtime != nil && strings.HasPrefix(*runtime, "containerd://") {
		return cni.KeepNever
	}
	return cni.KeepIfCached
}

// conditions are what must be so for the agent to be ready.
func (a *kubernetesAgent) conditions() []condition {
	conditions := []condition{{"dataplane", func() error { return nil }}}
	if a.watcher != nil {
		conditions = append(conditions, condition{"kubernetes", a.health.Err}, condition{"pods", a.watcher.Ready})
	}
	if a.installer != nil {
		conditions = append(conditions, condition{"cni", func() error {
			if err := a.installed.Load(); err != nil {
				return *err
			}
			return errors.New("the CNI plugin's installation was not looked at yet")
		}})
	}
	return conditions
}

// reportConditions says of each whether it is met.
func (a *kubernetesAgent) reportConditions() []api.Condition {
	var all []api.Condition
	for _, c := range a.conditions() {
		reported := api.Condition{Name: c.name}
		if err := c.err(); err != nil {
			reported.Problem = oneLine(err)
		}
		all = append(all, reported)
	}
	return all
}

// leaves says whether the agent, which was told to stop, goes for good. If so it has removed what only it can: the plugin, so that
// no pod waits for an agent, and the pods' annotations.
func (a *kubernetesAgent) leaves(ctx context.Context) bool {
	if a.client == nil {
		return false
	}
	// The context is the one that was done for the agent to stop.
	ctx = context.WithoutCancel(ctx)
	asking, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	gone, why := true, "--disable-safe-upgrade says so"
	if !a.opts.cleanUp {
		gone, why = podwatch.Uninstalled(asking, a.client, a.opts.podNamespace, a.opts.daemonSet, a.opts.node)
	}
	if !gone {
		a.log.Info("everything stays for the next agent", "reason", why)
		return false
	}
	a.log.Info("everything is removed from the node", "reason", why)
	if a.installer != nil {
		if _, err := a.installer.Uninstall(a.keepBinary()); err != nil {
			a.log.Error("cannot take the CNI plugin off the node: use redirector uninstall", "error", oneLine(err))
		}
	}
	removing, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	if err := a.watcher.RemoveStatus(removing); err != nil {
		a.log.Warn("pods keep an annotation that is not so any more", "annotation", podwatch.StatusAnnotation, "error", oneLine(err))
	}
	return true
}
