// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/enroll"
	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/zds"
)

// The values of --log-format.
const (
	logText = "text"
	logJSON = "json"
)

type agentOptions struct {
	standalone bool
	runDir     string
	zdsSocket  string
	bpffs      string
	cgroup     string
	logLevel   choice
	logFormat  choice
}

func newAgent(env *Env) *cobra.Command {
	o := agentOptions{
		logLevel:  choice{value: "info", choices: []string{"debug", "info", "warn", "error"}},
		logFormat: choice{value: logText, choices: []string{logText, logJSON}},
	}
	cmd := &cobra.Command{
		Use:   "agent --standalone",
		Short: "Run the node's agent",
		Long: `Run the node's agent: load the dataplane, or take over the one that an earlier agent has left, serve
node proxies and the other commands, and look after the enrolled pods.

The agent needs root, a kernel of version 6.1 or later, a BPF filesystem and a cgroup2 filesystem. It
runs until SIGTERM or SIGINT. The dataplane works on without it: pods stay enrolled, and a new agent takes
them over. "redirector cleanup" takes everything away.

Each flag has a twin in the environment, named beside it. The flag wins; a variable that is set to
nothing counts as unset.`,
		Example: `  redirector agent --standalone
  redirector agent --standalone --cgroup /sys/fs/cgroup/unified --log-format json
  RUN_DIR=/run/redirector STANDALONE=true redirector agent`,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), env) },
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.standalone, "standalone", false, "run without Kubernetes: pods come from redirector enroll")
	addRunDir(flags, &o.runDir)
	addZDSSocket(flags, &o.zdsSocket)
	addBPFFS(flags, &o.bpffs)
	addPath(flags, &o.cgroup, "cgroup", "", "cgroup2 directory whose processes are looked at (default: where cgroup2 is mounted)")
	flags.Var(&o.logLevel, "log-level", "what to log")
	flags.Var(&o.logFormat, "log-format", "how to log, to standard error")
	for _, name := range []string{"standalone", "cgroup", "log-level", "log-format"} {
		twin(flags, name)
	}
	return cmd
}

func (o *agentOptions) run(ctx context.Context, env *Env) error {
	if !o.standalone {
		return usagef("this version runs without Kubernetes only: use --standalone")
	}
	log := o.newLog(env)
	err := o.serve(ctx, env, log)
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
	lock, err := lockRunDir(o.runDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.release()) }()

	datapath, err := loader.Open(loader.Options{BPFFS: o.bpffs, Cgroup: o.cgroup})
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, datapath.Close())
		if !started && !datapath.Adopted() {
			err = errors.Join(err, unload(o.bpffs))
		}
	}()

	removeZDSDir, err := makeDirs(filepath.Dir(o.zdsSocket), 0o755)
	if err != nil {
		return fmt.Errorf("make a directory for ZDS socket %s: %w: choose another with --zds-socket", o.zdsSocket, err)
	}
	defer unlessStarted(removeZDSDir)
	proxies, err := zds.Listen(zds.Options{Path: o.zdsSocket, Log: log})
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
	enroller := enroll.New(enroll.Config{Datapath: datapath, Proxies: proxies, StateDir: stateDir, Log: log})
	defer enroller.Close()
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
		Log: log,
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
	log.Info("ready", "version", env.buildInfo().Version, "pid", os.Getpid(), "run_dir", o.runDir, "zds_socket", o.zdsSocket,
		"bpffs", o.bpffs, "cgroup", o.cgroup, "adopted", datapath.Adopted(), "took", time.Since(start))
	err = group.Wait()
	log.Info("stopped: the dataplane works on, and pods stay enrolled")
	return err
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
