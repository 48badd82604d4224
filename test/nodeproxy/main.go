// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"strconv"

	"golang.org/x/sys/unix"
)

// Main is the node proxy as a program; args are those after its name. It runs
// until SIGTERM or SIGINT and returns the exit code: 0 when it ended well, 1 when it
// failed, 2 when the arguments are wrong. A second signal ends it at once.
func Main(args []string) int {
	cfg, logPath, err := parseArgs(args, os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "nodeproxy: %v\n", err)
		return 2
	}
	cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	if logPath != "" {
		f, err := os.OpenFile(logPath, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
		if err != nil {
			fmt.Fprintf(os.Stderr, "nodeproxy: open the connection log: %v\n", err)
			return 1
		}
		defer f.Close()
		cfg.Log = f
	}

	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop)
	if err := Run(ctx, cfg); err != nil {
		fmt.Fprintf(os.Stderr, "nodeproxy: %v\n", err)
		return 1
	}
	return 0
}

// parseArgs prints the usage to help if asked for.
func parseArgs(args []string, help io.Writer) (cfg Config, logPath string, err error) {
	fs := flag.NewFlagSet("nodeproxy", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&cfg.ZDSSocket, "zds-socket", DefaultZDSSocket, "`PATH` of the agent's ZDS socket")
	fs.StringVar(&logPath, "log", "", "`FILE` to append a line of JSON to for each connection (default standard output)")
	fs.BoolVar(&cfg.Hold, "hold", false, "accept connections, but never proxy them")
	fs.DurationVar(&cfg.HelloDelay, "hello-delay", 0, "`TIME` to wait before saying hello to the agent")
	fs.DurationVar(&cfg.Drain, "drain", DefaultDrain, "`TIME` that connections may take to finish on SIGTERM")
	fs.TextVar(&cfg.DNSUpstream, "dns-upstream", netip.AddrPort{},
		"`ADDRESS:PORT` of the DNS server to ask for names below "+UpstreamDomain)
	fs.Func("dns-upstream-port", "`PORT` to ask it from (default any)", func(s string) error {
		port, err := strconv.ParseUint(s, 10, 16)
		cfg.DNSUpstreamPort = uint16(port)
		return err
	})
	fs.StringVar((*string)(&cfg.Mute), "mute", "", "misbehave towards the agent: `HOW` is hello, ack, late, garbage, huge, vanish or listen")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(help, "Usage: nodeproxy [flags]")
			fs.SetOutput(help)
			fs.PrintDefaults()
		}
		return cfg, "", err
	}
	switch {
	case fs.NArg() > 0:
		return cfg, "", fmt.Errorf("unexpected argument %q", fs.Arg(0))
	case cfg.ZDSSocket == "":
		return cfg, "", errors.New("--zds-socket is empty: give the path of the agent's ZDS socket")
	case cfg.HelloDelay < 0:
		return cfg, "", fmt.Errorf("--hello-delay %v is negative", cfg.HelloDelay)
	case cfg.Drain < 0:
		return cfg, "", fmt.Errorf("--drain %v is negative", cfg.Drain)
	case cfg.Drain == 0:
		cfg.Drain = -1 // zero is the default in a Config
	}
	if err := checkMute(cfg.Mute); err != nil {
		return cfg, "", fmt.Errorf("--mute: %w", err)
	}
	return cfg, logPath, nil
}
