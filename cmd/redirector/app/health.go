// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"
)

// healthTimeout bounds what a client of the health endpoints can take up.
const healthTimeout = 5 * time.Second

// condition is something that has to be so for the agent to be ready.
type condition struct {
	name string
	// err says why it is not so. It is asked often, and must not block.
	err func() error
}

// listenHealth opens the port for health checks.
func listenHealth(ctx context.Context, addr string) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for health checks on %s: %w: stop what listens there, or choose another address with --health-addr",
			addr, err)
	}
	return l, nil
}

// serveHealth answers /healthz, always with 200, and /readyz, with 200 if all conditions are met and 503 if not, and a line for
// each, until ctx is done.
func serveHealth(ctx context.Context, l net.Listener, conditions []condition, log *slog.Logger) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		var body strings.Builder
		status := http.StatusOK
		for _, c := range conditions {
			if err := c.err(); err != nil {
				status = http.StatusServiceUnavailable
				fmt.Fprintf(&body, "%s: not ready: %s\n", c.name, oneLine(err))
			} else {
				fmt.Fprintf(&body, "%s: ok\n", c.name)
			}
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body.String())) // fails when the client is gone
	})
	server := &http.Server{
		Handler:      mux,
		ReadTimeout:  healthTimeout,
		WriteTimeout: healthTimeout,
		IdleTimeout:  healthTimeout,
		ErrorLog:     slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	unhook := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer unhook()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve health checks: %w", err)
	}
	return nil
}
