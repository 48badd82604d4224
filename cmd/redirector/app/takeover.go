// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
)

// stopPatience is how long an agent that is asked to stop may take: it answers the requests that it has.
const stopPatience = 30 * time.Second

// inUse says whether an error means that another agent has what is wanted, and which process that is: 0 if the kernel does not
// tell, for it is in another PID namespace.
func inUse(err error) (pid int, is bool) {
	if running, ok := errors.AsType[*runningError](err); ok {
		return running.holder, true
	}
	if used, ok := errors.AsType[*loader.InUseError](err); ok {
		return used.PID, true
	}
	return 0, false
}

// takeFrom calls take, and if another agent has what that wants, asks it to stop and waits for it to give that back.
func takeFrom[T any](ctx context.Context, log *slog.Logger, take func() (T, error)) (T, error) {
	got, err := take()
	pid, used := inUse(err)
	if !used {
		return got, err
	}
	log.Info("an agent runs already: it is asked to stop", "pid", pid)
	if pid != 0 {
		if got, err = askToStop(pid, take); err == nil {
			return got, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for {
		if _, used := inUse(err); !used {
			return got, err
		}
		select {
		case <-ctx.Done():
			return got, fmt.Errorf("wait for the other agent to stop: %w: %w", context.Cause(ctx), err)
		case <-ticker.C:
		}
		got, err = take()
	}
}

// askToStop sends SIGTERM to the agent with that pid. Once the process is held fast, it is looked whether it is the agent
// still: the number may be another process's by then.
func askToStop[T any](pid int, take func() (T, error)) (T, error) {
	var none T
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return none, fmt.Errorf("stop the agent with pid %d: %w", pid, err)
	}
	if err == nil {
		defer unix.Close(fd)
	}
	got, errTake := take()
	if now, used := inUse(errTake); !used || now != pid || err != nil {
		return got, errTake
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return none, fmt.Errorf("stop the agent with pid %d: %w", pid, err)
	}
	return none, errTake
}
