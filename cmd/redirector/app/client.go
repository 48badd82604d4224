// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/api"
)

// answerTimeout is how long the agent may take for an answer beyond what it was told to wait. It is longer than the agent
// waits for node proxies when a pod leaves.
const answerTimeout = 40 * time.Second

// ask calls fn with a client of the agent and a context that ends when the agent should have answered.
func ask(ctx context.Context, runDir string, wait time.Duration, fn func(context.Context, *api.Client) error) error {
	ctx, cancel := context.WithTimeout(ctx, wait+answerTimeout)
	defer cancel()
	return fn(ctx, api.NewClient(socketIn(runDir)))
}
