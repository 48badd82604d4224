// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	// clientTimeout bounds what a client can take up.
	clientTimeout = 15 * time.Second
	// scrapesAtOnce bounds how many scrapes are served at the same time; more are answered with 503. Two servers may scrape.
	scrapesAtOnce = 4
)

// Listen opens the port for scrapes.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for metrics on %s: %w: stop what listens there, or choose another address with --metrics-addr", addr, err)
	}
	return l, nil
}

// Handler answers scrapes. What cannot be read is logged and left out. It is to be made once.
func (m *Metrics) Handler(log *slog.Logger) http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(log.Handler(), slog.LevelError),
		ErrorHandling:       promhttp.ContinueOnError,
		Registry:            m.registry,
		MaxRequestsInFlight: scrapesAtOnce,
	})
}

// Serve answers GET /metrics until ctx is done, and closes the listener.
func (m *Metrics) Serve(ctx context.Context, l net.Listener, log *slog.Logger) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", m.Handler(log))
	server := &http.Server{
		Handler:      mux,
		ReadTimeout:  clientTimeout,
		WriteTimeout: clientTimeout,
		IdleTimeout:  2 * time.Minute, // longer than the usual time between two scrapes
		ErrorLog:     slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	unhook := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer unhook()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
