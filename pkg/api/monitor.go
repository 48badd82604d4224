// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/monitor"
)

// beat is how often somebody who watches is sent a blank line when nothing happens: by that it is known when he has gone.
const beat = 5 * time.Second

// monitor writes events, one a line, until whoever watches goes away or ctx is done.
func (s *Server) monitor(ctx context.Context) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		filter, err := monitor.ParseFilter(r.URL.Query())
		if err != nil {
			s.answer(w, nil, invalid(err))
			return
		}
		watcher, err := s.hub.Watch(filter)
		if err != nil {
			s.answer(w, nil, err)
			return
		}
		defer watcher.Close()
		w.Header().Set("Content-Type", "application/x-ndjson")
		w.WriteHeader(http.StatusOK)
		control := http.NewResponseController(w)
		buffered := bufio.NewWriter(w)
		encoder := json.NewEncoder(buffered)
		// An empty line says that it has begun.
		_ = buffered.WriteByte('\n')
		ticker := time.NewTicker(beat)
		defer ticker.Stop()
		for {
			_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
			if buffered.Flush() != nil || control.Flush() != nil {
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-r.Context().Done():
				return
			case <-ticker.C:
				_ = buffered.WriteByte('\n') // it fails again when it is flushed
			case e := <-watcher.Events():
				if err := writeEvents(encoder, watcher, e); err != nil {
					return
				}
			}
		}
	})
}

// writeEvents writes an event and those that wait, as many as there are now.
func writeEvents(encoder *json.Encoder, watcher *monitor.Watcher, e monitor.Event) error {
	events := []monitor.Event{e}
	for range len(watcher.Events()) {
		events = append(events, <-watcher.Events())
	}
	if lost := watcher.TakeLost(); lost > 0 {
		events = append(events, monitor.Event{Time: time.Now(), Kind: monitor.Lost, Count: lost})
	}
	for i := range events {
		if err := encoder.Encode(&events[i]); err != nil {
			return fmt.Errorf("write an event: %w", err)
		}
	}
	return nil
}

// Monitor tells do of what happens, until ctx is done, which is no error, or do fails. begun, which may be nil, is called when
// from then on nothing is missed.
func (c *Client) Monitor(ctx context.Context, filter monitor.Filter, begun func(), do func(monitor.Event) error) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent/v1/monitor?"+filter.Values().Encode(), http.NoBody)
	if err != nil {
		return fmt.Errorf("ask the agent: %w", err)
	}
	response, err := c.http.Do(request)
	if err != nil {
		return c.explain(ctx, err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	if response.StatusCode != http.StatusOK {
		lines.Scan() // no line is no refusal either
		return c.refusal(response, lines.Bytes(), "a wish to watch")
	}
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			if begun != nil {
				begun()
				begun = nil
			}
			continue
		}
		var e monitor.Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return fmt.Errorf("agent at %s: read an event (is it of another version?): %w", c.socket, err)
		}
		if err := do(e); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("the agent at %s does not tell any more: it has stopped, or see its log", c.socket)
}
