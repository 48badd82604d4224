// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/hostprobe"
	"github.com/redirector-dataplane/redirector/pkg/identity"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// The values of --log-format.
const (
	logText = "text"
	logJSON = "json"
)

type agentOptions struct {
	standalone bool
	takeOver   bool
	runDir     string
	zdsSocket  string
	bpffs      string
	cgroup     string
	logLevel   choice
	logFormat  choice

	probeSource   choice
	probeIdentity choice
	proxyIdentity choice
	probes        hostprobe.Addrs

	dnsCapture  bool
	originalDst choice
	insight     insightOptions

	kube kubernetesOptions
}

// The values of the flags that say who is who, with what the programs call them.
var (
	probeSources = map[string]maps.ProbeSource{
		"node": maps.ProbeSourceNode, "host": maps.ProbeSourceHost, "kubelet": maps.ProbeSourceKubelet,
	}
	probeIdentities = map[string]maps.ProbeIdentity{"snat": maps.ProbeIdentitySNAT, "flow": maps.ProbeIdentityFlow}
	proxyIdentities = map[string]maps.ProxyIdentity{
		"cgroup": maps.ProxyIdentityCgroup, "cgroup-alone": maps.ProxyIdentityCgroupAlone, "mark": maps.ProxyIdentityMark,
	}
)

func newAgent(env *Env) *cobra.Command {
	o := agentOptions{
		logLevel:  choice{value: "info", choices: []string{"debug", "info", "warn", "error"}},
		logFormat: choice{value: logText, choices: []string{logText, logJSON}},

		probeSource:   choice{value: "node", choices: []string{"node", "host", "kubelet"}},
		probeIdentity: choice{value: "snat", choices: []string{"snat", "flow"}},
		proxyIdentity: choice{value: "cgroup", choices: []string{"cgroup", "cgroup-alone", "mark"}},
		probes:        hostprobe.Defaults,
		originalDst:   choice{value: "auto", choices: []string{"auto", "on", "off"}},
	}
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Run the node's agent",
		Long: `Run the node's agent: load the dataplane, or take over the one that an earlier agent has left, serve
node proxies and the other commands, and look after the enrolled pods.

It enrols the pods of its node, --node-name, that Kubernetes says are in the mesh, before they start by means
of its CNI plugin, and writes into the annotation ambient.istio.io/redirection how far each is. With
--standalone there is no Kubernetes, and pods come from "redirector enroll".

The agent needs root, a kernel of version 6.1 or later, a BPF filesystem and a cgroup2 filesystem. It
runs until SIGTERM or SIGINT. The dataplane works on without it: pods stay enrolled, and a new agent, of this
version or a neighbouring one, takes them over. "redirector cleanup" takes everything away, and so
does an agent that is told to stop when its DaemonSet is gone.

There is one agent per run-dir and per dataplane. A second one refuses to start and names the first; with
--take-over it sends SIGTERM to the first and waits up to 30 s for it to end.

Each flag has a twin in the environment, named beside it. The flag wins; a variable that is set to
nothing counts as unset.`,
		Example: `  redirector agent --node-name node-1 --kubeconfig /etc/kubernetes/redirector.conf
  redirector agent --standalone
  redirector agent --standalone --cgroup /sys/fs/cgroup/unified --log-format json
  RUN_DIR=/run/redirector STANDALONE=true redirector agent`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), env) },
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.standalone, "standalone", false, "run without Kubernetes: pods come from redirector enroll")
	flags.BoolVar(&o.takeOver, "take-over", false, "if an agent runs already, have it stop, and take its place")
	o.kube.addFlags(flags)
	addRunDir(flags, &o.runDir)
	addZDSSocket(flags, &o.zdsSocket)
	addBPFFS(flags, &o.bpffs)
	addPath(flags, &o.cgroup, "cgroup", "", "cgroup2 directory whose processes are looked at (default: where cgroup2 is mounted)")
	flags.Var(&o.logLevel, "log-level", "what to log")
	flags.Var(&o.logFormat, "log-format", "how to log, to standard error")
	flags.Var(&o.probeSource, "probe-source", "whose connections to pods are probes, of the processes in the host's network namespace: "+
		"those in no pod's cgroup (node), all (host), or those in the kubelet's cgroup (kubelet)")
	flags.Var(&o.probeIdentity, "probe-identity", "how pods see a probe: from the probe address (snat), or from the node's own (flow)")
	flags.Var(&o.proxyIdentity, "proxy-identity", "what makes a socket the node proxy's: its mark and the cgroup that made it (cgroup), "+
		"the cgroup, for a proxy that sets no mark (cgroup-alone), or the mark alone (mark)")
	flags.Var(&addrFlag{&o.probes.V4, hostprobe.ParseV4}, "host-probe-snat-ip", "IPv4 address that probes come from")
	flags.Var(&addrFlag{&o.probes.V6, hostprobe.ParseV6}, "host-probe-snat-ipv6", "IPv6 address that probes come from")
	flags.BoolVar(&o.dnsCapture, "dns-capture", true,
		"send the DNS queries of pods to the node proxy, of those that do not say it themselves")
	flags.Var(&o.originalDst, "original-dst", "who has getsockopt(SO_ORIGINAL_DST) answered for steered connections: "+
		"the cgroups of node proxies (auto), all below --cgroup (on), or nobody (off)")
	for _, name := range []string{
		"original-dst", "standalone", "take-over", "cgroup", "log-level", "log-format",
		"probe-source", "probe-identity", "proxy-identity", "host-probe-snat-ip", "host-probe-snat-ipv6",
	} {
		twin(flags, name)
	}
	twin(flags, "dns-capture", "AMBIENT_DNS_CAPTURE")
	o.insight.addFlags(flags)
	return cmd
}

// gcPercent is how far the heap may grow before garbage is collected. Most of what an agent allocates is garbage at once, from its
// looks at the kernel: with Go's default of 100 it needs a fifth more memory with 1000 pods, and no less processor time that could
// be measured.
const gcPercent = 40

func (o *agentOptions) run(ctx context.Context, env *Env) error {
	log := o.newLog(env)
	if env.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	err := o.serve(ctx, env, log)
	if err == nil && o.kube.gone {
		err = (&cleanupOptions{runDir: o.runDir, bpffs: o.bpffs, zdsSocket: o.zdsSocket}).clean()
	}
	if err != nil && o.logFormat.value == logJSON {
		// Whoever reads JSON wants this line to be JSON, too.
		log.Error("agent failed", "error", oneLine(err))
		return &loggedError{err}
	}
	return err
}

func (o *agentOptions) newLog(env *Env) *slog.Logger {
	var level slog.Level
	// It is one of the choices, which slog knows.
	_ = level.UnmarshalText([]byte(o.logLevel.value))
	opts := &slog.HandlerOptions{Level: level}
	if o.logFormat.value == logJSON {
		return slog.New(slog.NewJSONHandler(env.Stderr, opts))
	}
	return slog.New(slog.NewTextHandler(env.Stderr, opts))
}

// serve starts the agent and runs it until ctx is done. A start that fails leaves nothing of what it has made. From the moment
// that pods are taken over nothing can fail any more, so all that can is done before: the sockets are there, and wait.
func (o *agentOptions) serve(ctx context.Context, env *Env, log *slog.Logger) (err error) {
	start := time.Now()
	started := false
	unlessStarted := func(undo func()) {
		if !started {
			undo()
		}
	}
	if o.cgroup == "" {
		if o.cgroup, err = loader.FindCgroup2(); err != nil {
			return err
		}
	}

	removeRunDir, err := useRunDir(o.runDir)
	if err != nil {
		return err
	}
	defer unlessStarted(removeRunDir)
	lock, err := fromOther(ctx, o, log, func() (*lockFile, error) { return lockRunDir(o.runDir) })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.release()) }()
	kube, err := o.kube.prepare(ctx, o.standalone, o.runDir, log)
	if err != nil {
		return err
	}
	defer unlessStarted(kube.close)

	datapath, err := fromOther(ctx, o, log, func() (*loader.Datapath, error) {
		return loader.Open(loader.Options{BPFFS: o.bpffs, Cgroup: o.cgroup, Release: env.buildInfo().Version})
	})
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, datapath.Close())
		if !started && !datapath.Adopted() {
			err = errors.Join(err, unload(o.bpffs))
		}
	}()

	insight, err := o.insight.prepare(ctx, o.standalone, o.runDir, env.buildInfo(), log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, insight.close()) }()

	probes, removeProbes, err := o.addProbeAddrs(datapath)
	if err != nil {
		return err
	}
	defer unlessStarted(func() { err = errors.Join(err, removeProbes()) })
	who, err := identity.New(identity.Options{
		Maps:          datapath.Maps(),
		Cgroup:        o.cgroup,
		ProbeSource:   probeSources[o.probeSource.value],
		ProbeIdentity: probeIdentities[o.probeIdentity.value],
		ProxyIdentity: proxyIdentities[o.proxyIdentity.value],
		Kubernetes:    !o.standalone,
		Probes:        probes,
		OnProxyCgroup: o.onProxyCgroup(datapath),
		Log:           log,
	})
	if err != nil {
		return err
	}
	if err := o.answerOriginalDst(datapath); err != nil {
		return err
	}

	removeZDSDir, err := makeDirs(filepath.Dir(o.zdsSocket), 0o755)
	if err != nil {
		return fmt.Errorf("make a directory for ZDS socket %s: %w: choose another with --zds-socket", o.zdsSocket, err)
	}
	defer unlessStarted(removeZDSDir)
	proxies, err := zds.Listen(zds.Options{Path: o.zdsSocket, Log: log, OnHello: who.ProxyConnected, OnAnswer: insight.ObserveAnswer})
	if err != nil {
		return err
	}
	defer unlessStarted(func() { err = errors.Join(err, release(ctx, proxies)) })

	listener, err := api.Listen(socketIn(o.runDir))
	if err != nil {
		return err
	}
	defer unlessStarted(func() { err = errors.Join(err, listener.Close()) })

	stateDir := filepath.Join(o.runDir, podsName)
	removeStateDir, err := makeDirs(stateDir, 0o700)
	if err != nil {
		return fmt.Errorf("make a directory for what is known of pods: %w: remove what is there, or choose another --run-dir", err)
	}
	defer unlessStarted(removeStateDir)
	enroller := enroll.New(enroll.Config{
		Datapath: datapath, Proxies: proxies, StateDir: stateDir, Log: log, DNSCapture: o.dnsCapture,
		Observe: insight.ObserveStep, ObserveEnrolment: insight.ObserveEnrolment, ObserveReconcile: insight.ObserveReconcile,
		ObserveRepair: kube.repaired,
	})
	defer enroller.Close()
	if err := kube.watch(enroller, o.runDir, insight.ObserveEvent); err != nil {
		return err
	}
	if err := insight.Watch(enroller); err != nil {
		return err
	}
	if err := enroller.Restore(ctx); err != nil {
		return fmt.Errorf("take over the enrolled pods: %w", err)
	}
	started = true

	server := api.NewServer(api.Options{
		Enroller: enroller,
		Agent: api.Agent{
			Version:   env.buildInfo().Version,
			PID:       os.Getpid(),
			Started:   start,
			Kernel:    kernelRelease(),
			RunDir:    o.runDir,
			BPFFS:     o.bpffs,
			Cgroup:    o.cgroup,
			ZDSSocket: o.zdsSocket,
		},
		Identity:   who,
		Conditions: kube.reportConditions,
		Log:        log,
	})
	group, groupCtx := errgroup.WithContext(ctx)
	// Node proxies are served until the last request is answered.
	proxyCtx, stopProxies := context.WithCancel(context.WithoutCancel(ctx))
	defer stopProxies()
	group.Go(func() error {
		defer stopProxies()
		return server.Serve(groupCtx, listener)
	})
	group.Go(func() error { return proxies.Serve(proxyCtx) })
	group.Go(func() error { return who.Run(groupCtx) })
	group.Go(func() error { return enroller.Reconcile(groupCtx) })
	group.Go(func() error { return enroller.KeepNode(groupCtx) })
	kube.serve(groupCtx, group)
	insight.serve(groupCtx, group)
	log.Info("ready", "version", env.buildInfo().Version, "pid", os.Getpid(), "run_dir", o.runDir, "zds_socket", o.zdsSocket,
		"bpffs", o.bpffs, "cgroup", o.cgroup, "adopted", datapath.Adopted(), "took", time.Since(start))
	err = group.Wait()
	if o.kube.gone = err == nil && kube.leaves(ctx); !o.kube.gone {
		log.Info("stopped: the dataplane works on, and pods stay enrolled")
	}
	return err
}

// onProxyCgroup returns what is to be done when a proxy's cgroup is known.
func (o *agentOptions) onProxyCgroup(datapath *loader.Datapath) func(dir string) error {
	if o.originalDst.value != "auto" {
		return nil
	}
	return datapath.AnswerOriginalDst
}

// answerOriginalDst has SO_ORIGINAL_DST answered as the options say, and not as those of an earlier agent said.
func (o *agentOptions) answerOriginalDst(datapath *loader.Datapath) error {
	node, err := cgroups.ID(o.cgroup)
	if err != nil {
		return err
	}
	if o.originalDst.value == "on" {
		if err := datapath.AnswerOriginalDst(o.cgroup); err != nil {
			return err
		}
	}
	return datapath.AnswerOriginalDstOnly(func(id uint64) bool {
		switch o.originalDst.value {
		case "on":
			return id == node
		case "auto":
			return id != node
		default:
			return false
		}
	})
}

// fromOther takes what another agent may have, which is stopped if the options say so.
func fromOther[T any](ctx context.Context, o *agentOptions, log *slog.Logger, take func() (T, error)) (T, error) {
	if !o.takeOver {
		return take()
	}
	return takeFrom(ctx, log, take)
}

// addProbeAddrs puts the addresses that probes come from on the host's lo, if probes are to have an address of their own, and
// takes off those that an earlier agent had other than these. undo removes what it has added to a new dataplane.
func (o *agentOptions) addProbeAddrs(datapath *loader.Datapath) (probes hostprobe.Addrs, undo func() error, err error) {
	before, err := datapath.Maps().Config()
	if err != nil {
		return probes, nil, err
	}
	if probeIdentities[o.probeIdentity.value] == maps.ProbeIdentitySNAT {
		if probes, err = hostprobe.Add(o.probes); err != nil {
			return probes, nil, fmt.Errorf("--host-probe-snat-ip %s, --host-probe-snat-ipv6 %s: %w", o.probes.V4, o.probes.V6, err)
		}
	}
	var stale hostprobe.Addrs
	if before.ProbeV4 != probes.V4 {
		stale.V4 = before.ProbeV4
	}
	if before.ProbeV6 != probes.V6 {
		stale.V6 = before.ProbeV6
	}
	undo = func() error {
		if datapath.Adopted() {
			return nil
		}
		return hostprobe.Remove(probes)
	}
	if err := hostprobe.Remove(stale); err != nil {
		return probes, nil, errors.Join(err, undo())
	}
	return probes, undo, nil
}

// release gives the socket back: only Serve does that.
func release(ctx context.Context, proxies *zds.Server) error {
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return proxies.Serve(ctx)
}

// unload takes off a dataplane that this process has made, unless another has taken it over since.
func unload(bpffs string) error {
	if err := loader.Unload(bpffs); !errors.Is(err, loader.ErrInUse) {
		return err
	}
	return nil
}
