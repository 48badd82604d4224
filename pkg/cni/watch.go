// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// quietTime is how long the directories must have been quiet before they are looked at, at most busyTime after the first change.
	quietTime = 100 * time.Millisecond
	busyTime  = time.Second
	// checkInterval is how often they are looked at without a change: a directory may have been replaced, or lie behind a
	// symbolic link.
	checkInterval = 30 * time.Second
	// retryInterval is how often they are looked at while the plugin is not installed.
	retryInterval = time.Second
	// fightLimit repairs within fightTime mean that somebody takes the plugin out each time.
	fightLimit = 5
	fightTime  = time.Minute
	// fightPause is the least time between two repairs then.
	fightPause = 5 * time.Second
)

// Run installs the plugin and keeps it installed until ctx is done: it looks at the directories after each change, and from time to
// time. What it does to them itself makes it look once more, and find nothing to do. observe, which may be nil, is told after each
// look whether the plugin is installed: nil, or why not. Run returns an error only if it cannot watch at all.
func (in *Installer) Run(ctx context.Context, observe func(error)) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch the CNI's directories: %w", err)
	}
	defer func() { _ = watcher.Close() }()
	var repairs []time.Time
	installed := false
	for {
		// Watch first, then look: a change in between is seen. A directory that was replaced is watched anew.
		watchErr := errors.Join(watcher.Add(in.opts.NetDir), watcher.Add(in.opts.BinDir))
		changed, err := in.Install()
		if err == nil && watchErr != nil {
			in.said.once("watch", "the CNI's directories cannot be watched, they are looked at from time to time", "error", watchErr)
		}
		in.report(changed, err)
		if observe != nil {
			observe(err)
		}

		wait := checkInterval
		if err != nil {
			wait = retryInterval
		}
		var pause time.Duration
		if installed && len(changed) > 0 {
			repairs = append(repairs, time.Now())
			for len(repairs) > 0 && time.Since(repairs[0]) > fightTime {
				repairs = repairs[1:]
			}
			if len(repairs) > fightLimit {
				in.said.once("fight", "somebody takes the plugin out of the CNI configuration again and again; if it is Cilium, set its cni.exclusive=false",
					"repairs", len(repairs), "within", fightTime)
				pause = fightPause
			} else {
				in.said.well("fight")
			}
		}
		installed = installed || err == nil
		if !sleepUnlessDone(ctx, pause) || !await(ctx, watcher, wait) {
			return nil
		}
	}
}

// report logs what a look at the directories has brought.
func (in *Installer) report(changed []string, err error) {
	if len(changed) > 0 {
		in.opts.Log.Info("the CNI plugin is installed", "changed", changed)
	}
	switch {
	case err == nil:
		in.said.well("install")
	case errors.Is(err, errChanged), errors.Is(err, errSettling):
		in.opts.Log.Debug("the CNI configuration is being changed by somebody else", "error", err)
	default:
		in.said.once("install", "the CNI plugin is not installed", "error", err)
	}
}

// await waits until the directories have changed and are quiet again, or for a time. It says whether ctx is still going on.
func await(ctx context.Context, watcher *fsnotify.Watcher, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	var busySince time.Time
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		case _, ok := <-watcher.Errors:
			if !ok {
				return sleepUnlessDone(ctx, wait)
			}
			return true // events may be lost
		case event, ok := <-watcher.Events:
			if !ok {
				return sleepUnlessDone(ctx, wait)
			}
			if isTemp(event.Name) {
				continue
			}
			if busySince.IsZero() {
				busySince = time.Now()
			}
			timer.Reset(min(quietTime, max(0, busyTime-time.Since(busySince))))
		}
	}
}

// isTemp says whether a file is one of those that are on their way to another name.
func isTemp(path string) bool { return strings.HasPrefix(filepath.Base(path), ".redirector") }

func sleepUnlessDone(ctx context.Context, d time.Duration) bool {
	sleep(ctx, d)
	return ctx.Err() == nil
}

// complaints are what was warned about, so that it is not again with each look.
type complaints struct {
	log *slog.Logger

	mu   sync.Mutex
	open map[string]bool
}

// once warns about one thing until it is well again.
func (c *complaints) once(about, message string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.open[about] {
		return
	}
	if c.open == nil {
		c.open = map[string]bool{}
	}
	c.open[about] = true
	c.log.Warn(message, args...) //nolint:sloglint // the messages are its callers'
}

// well says that there is nothing to complain about any more.
func (c *complaints) well(about string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, about)
}
