// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/pkg/loader"
)

// answerTimeout is how long the agent may take for an answer beyond what it was told to wait. It is longer than the agent
// waits for node proxies when a pod leaves.
const answerTimeout = 40 * time.Second

// ask calls fn with a client of the agent and a context that ends when the agent should have answered.
func ask(ctx context.Context, runDir string, wait time.Duration, fn func(context.Context, *api.Client) error) error {
	ctx, cancel := context.WithTimeout(ctx, wait+answerTimeout)
	defer cancel()
	err := fn(ctx, api.NewClient(socketIn(runDir)))
	if errors.Is(err, api.ErrNoAgent) {
		return whyNoAgent(err)
	}
	return err
}

// whyNoAgent adds to the error that no agent answers what keeps one from running here, if anything does, and what goes on without.
func whyNoAgent(err error) error {
	if lacks := loader.CheckFeatures(); lacks != nil {
		return fmt.Errorf("%w: none can run here: %w", err, lacks)
	}
	return fmt.Errorf("%w; the dataplane works on without an agent: pods stay captured, but nothing is repaired", err)
}
