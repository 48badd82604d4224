// SPDX-License-Identifier: Apache-2.0

// Command demo shows what Redirector does, with real traffic: it makes two pods and a host outside as network namespaces,
// runs the agent and a node proxy, and tells who connected to whom, what the proxy saw and what the app saw. It checks
// every row that it prints, so it is a test too: exit status 0 says that all was as it should be.
//
// It needs root and touches nothing but what it makes itself, and removes that at its end, also when it is interrupted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

func main() {
	if code, ok := playRole(); ok {
		os.Exit(code)
	}
	os.Exit(demoMain(os.Args[1:]))
}

// demoMain is the demo itself, and returns its exit status.
func demoMain(args []string) int {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	hold := flags.Bool("hold", false, "wait for Enter while both pods are enrolled, to look around")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return 2
	}
	if flags.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "demo: unknown argument %q: see demo -help\n", flags.Arg(0))
		return 2
	}

	ctx := untilSignal()
	if err := checkMachine(); err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		return 1
	}
	d := &demo{page: newPage(os.Stdout), hold: *hold}
	err := d.run(ctx, d.tell)
	var stop *signalError
	switch {
	case errors.As(err, &stop):
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		return 128 + int(stop.signal) // as shells say it
	case err != nil:
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		return 1
	}
	return 0
}

// signalError is why the demo ends early.
type signalError struct{ signal unix.Signal }

func (e *signalError) Error() string { return "stopped by " + unix.SignalName(e.signal) }

// untilSignal returns a context that ends with the first signal. From then on signals do nothing, so that impatience does
// not keep the demo from removing what it made. SIGPIPE is among them for `demo | head`.
func untilSignal() context.Context {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGQUIT, unix.SIGPIPE)
	if !signal.Ignored(unix.SIGHUP) { // as nohup has it
		signal.Notify(signals, unix.SIGHUP)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() {
		s, _ := (<-signals).(unix.Signal)
		cancel(&signalError{s})
	}()
	return ctx
}
