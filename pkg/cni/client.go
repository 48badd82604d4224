// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// askAgain is the pause between two tries to reach an agent.
const askAgain = 250 * time.Millisecond

// unreachableError says that no agent has taken the question: none listens, or it went away before it answered.
type unreachableError struct {
	socket string
	err    error
}

func (e *unreachableError) Error() string {
	return fmt.Sprintf("no redirector agent answers on %s (%v)", e.socket, e.err)
}

func (e *unreachableError) Unwrap() error { return e.err }

// ask tells the agent of a pod and waits for its answer, nil if the pod may start. The error is an *unreachableError if there is
// no agent. One that has taken the question and is silent is there: it may be about to capture the pod.
func ask(ctx context.Context, socket string, pod *addBody) error {
	if deadline, ok := ctx.Deadline(); ok {
		// The agent knows better than we why it takes so long, so its answer is to come before we give up.
		pod.Timeout = time.Until(deadline) * 9 / 10
	}
	body, err := json.Marshal(pod)
	if err != nil {
		return fmt.Errorf("write a request to the agent: %w", err)
	}
	var connected atomic.Bool // by a goroutine of the transport's
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			c, err := d.DialContext(ctx, "unix", socket)
			connected.Store(err == nil)
			return c, err
		},
	}}
	// failure tells an agent that is silent from one that is not there.
	failure := func(err error) error {
		if connected.Load() && ctx.Err() != nil {
			return fmt.Errorf("the redirector agent listens on %s and does not answer: see its log; the kubelet tries again", socket)
		}
		return &unreachableError{socket: socket, err: cause(err)}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://unix"+addPath, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("make a request to the agent: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return failure(err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return failure(err)
	}
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	return fmt.Errorf("the redirector agent answers %s: %s", resp.Status, strings.TrimSpace(string(answer)))
}

// cause takes off what net/http and net put around an error: the socket is named already.
func cause(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Err
	}
	if unwrapped := errors.Unwrap(err); unwrapped != nil {
		return unwrapped
	}
	return err
}

// sleep waits, but not longer than ctx.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
