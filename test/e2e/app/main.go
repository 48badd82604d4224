// SPDX-License-Identifier: Apache-2.0

// Command app is what runs in the pods of the end-to-end tests: servers for probes, clients, and what keeps a sandbox.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

const usage = "usage: app [serve [flags] | get URL | load [flags]]"

// timeout is how long a client waits.
const timeout = 5 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 { // in a sandbox
		<-ctx.Done()
		return nil
	}
	switch args[0] {
	case "serve":
		return serve(ctx, args[1:])
	case "get":
		if len(args) != 2 {
			return errors.New(usage)
		}
		return get(ctx, args[1], os.Stdout)
	case "load":
		return load(ctx, args[1:])
	default:
		return errors.New(usage)
	}
}

// get makes a connection of its own.
func get(ctx context.Context, url string, to io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(to, response.Body); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, response.Status)
	}
	return nil
}

// serve answers over HTTP, TCP and gRPC until ctx is done.
func serve(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("serve", flag.ContinueOnError)
	overHTTP := flags.String("http", "", "`ADDRESS` to answer HTTP on")
	overTCP := flags.String("tcp", "", "`ADDRESS` to accept TCP connections on")
	overGRPC := flags.String("grpc", "", "`ADDRESS` of the gRPC health service")
	first := flags.String("first", "", "`URL` to get before anything else, and fail if that fails")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *first != "" {
		if err := get(ctx, *first, os.Stdout); err != nil {
			return fmt.Errorf("the first request: %w", err)
		}
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "%s %s\n", host, r.RemoteAddr) })
	var servers sync.WaitGroup
	listen := func(address string, serve func(net.Listener) error) error {
		if address == "" {
			return nil
		}
		l, err := net.Listen("tcp", address)
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { _ = l.Close() })
		servers.Go(func() { _ = serve(l) })
		return nil
	}
	grpcServer := grpc.NewServer()
	healthpb.RegisterHealthServer(grpcServer, health.NewServer())
	err = errors.Join(
		listen(*overHTTP, (&http.Server{Handler: mux, ReadTimeout: timeout}).Serve),
		listen(*overGRPC, grpcServer.Serve),
		listen(*overTCP, func(l net.Listener) error {
			for {
				c, err := l.Accept()
				if err != nil {
					return err
				}
				_ = c.Close()
			}
		}))
	if err != nil {
		return err
	}
	<-ctx.Done()
	servers.Wait()
	return nil
}

// load gets a URL again and again, each time by a new connection, and tells how that went at /.
func load(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("load", flag.ContinueOnError)
	url := flags.String("url", "", "`URL` to get")
	every := flags.Duration("every", 20*time.Millisecond, "`TIME` between two requests")
	stats := flags.String("stats", ":8081", "`ADDRESS` to say how it goes on")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var mu sync.Mutex
	var told struct {
		Requests, Failed int
		LastError        string
	}
	l, err := net.Listen("tcp", *stats)
	if err != nil {
		return err
	}
	server := &http.Server{ReadTimeout: timeout, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if err := json.NewEncoder(w).Encode(told); err != nil {
			return // whoever asked is gone
		}
	})}
	go func() { _ = server.Serve(l) }()
	tick := time.NewTicker(*every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		err := get(ctx, *url, io.Discard)
		if ctx.Err() != nil {
			return nil
		}
		mu.Lock()
		told.Requests++
		if err != nil {
			told.Failed++
			told.LastError = err.Error()
		}
		mu.Unlock()
	}
}
