// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/redirector-dataplane/redirector/pkg/metrics"
	"github.com/redirector-dataplane/redirector/pkg/sockfile"
)

const (
	// defaultMetrics is where the metrics of an agent that runs with Kubernetes are: where istio-cni has its own.
	defaultMetrics = ":15014"
	// noMetrics is the value of --metrics-addr that switches them off.
	noMetrics = "off"
	// pprofName is the socket's in the run-dir.
	pprofName = "pprof.sock"
)

// insightOptions say who may look into the agent, and where.
type insightOptions struct {
	metricsAddr string // empty: the default
	perPod      bool
	pprof       bool
}

func (o *insightOptions) addFlags(flags *pflag.FlagSet) {
	flags.Var((*portFlag)(&o.metricsAddr), "metrics-addr", "address or port of /metrics, or off (default: "+defaultMetrics+", off with --standalone)")
	flags.BoolVar(&o.perPod, "metrics-per-pod", false,
		fmt.Sprintf("export the counters of each pod besides their sums, of %d pods at most", metrics.MaxPods))
	flags.BoolVar(&o.pprof, "pprof", false, "serve Go profiles of the agent on "+pprofName+" in the run-dir, to root only")
	twin(flags, "metrics-addr", "MONITORING_PORT")
	twin(flags, "metrics-per-pod")
	twin(flags, "pprof")
}

// portFlag is an address to listen on, a port on all addresses, or off.
type portFlag string

func (p *portFlag) String() string { return string(*p) }

// Type is what --help calls the value.
func (p *portFlag) Type() string { return "address" }

// Set refuses what nobody can listen on.
func (p *portFlag) Set(value string) error {
	if value == noMetrics {
		*p = noMetrics
		return nil
	}
	port := value
	if _, err := strconv.Atoi(value); err == nil {
		value = ":" + value
	} else if _, port, err = net.SplitHostPort(value); err != nil {
		return errors.New("must be an address like :15014 or 127.0.0.1:15014, a port, or off")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("must have a port between 1 and 65535, not %q", port)
	}
	*p = portFlag(value)
	return nil
}

// openInsight is what lets others look into a running agent.
type openInsight struct {
	*metrics.Metrics
	log *slog.Logger
	// scrapes and profiles are nil if they were not asked for.
	scrapes, profiles net.Listener
}

// prepare does all that may fail: ports and sockets are there, and wait. Whoever does not serve them must close them.
func (o *insightOptions) prepare(ctx context.Context, standalone bool, runDir string, build buildInfo, log *slog.Logger) (i *openInsight, err error) {
	i = &openInsight{
		Metrics: metrics.New(metrics.Options{Version: build.Version, Commit: build.Commit, Kernel: build.Kernel, PerPod: o.perPod}),
		log:     log,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, i.close())
		}
	}()
	addr := o.metricsAddr
	if addr == "" && !standalone {
		addr = defaultMetrics
	}
	if addr != "" && addr != noMetrics {
		if i.scrapes, err = metrics.Listen(ctx, addr); err != nil {
			return i, err
		}
		log.Info("metrics are served", "address", i.scrapes.Addr().String())
	}
	if o.pprof {
		path := filepath.Join(runDir, pprofName)
		if err = sockfile.RemoveStale("unix", path); err == nil {
			i.profiles, err = sockfile.Listen("unix", path, 0o600)
		}
		if err != nil {
			return i, fmt.Errorf("serve profiles, as --pprof says: %w", err)
		}
	}
	return i, nil
}

// close gives back what prepare has made. It may be called again, and after serve.
func (i *openInsight) close() error {
	var errs []error
	for _, l := range []net.Listener{i.scrapes, i.profiles} {
		if l == nil {
			continue
		}
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// serve answers until ctx is done.
func (i *openInsight) serve(ctx context.Context, group *errgroup.Group) {
	if i.scrapes != nil {
		group.Go(func() error { return i.Serve(ctx, i.scrapes, i.log) })
	}
	if i.profiles != nil {
		group.Go(func() error { return serveProfiles(ctx, i.profiles) })
	}
}

// serveProfiles answers /debug/pprof/.
func serveProfiles(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	// A profile takes as long as was asked for.
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	unhook := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer unhook()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve profiles: %w", err)
	}
	return nil
}
