// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// proxyLog reads the file in which the node proxy, and the next one, writes a line about each connection.
type proxyLog struct {
	path string
	read int // lines that were returned already
}

// next returns the lines that have come since the last call. It waits for the number that is wanted: a client may have its
// answer before the proxy has written.
func (l *proxyLog) next(ctx context.Context, want int) ([]nodeproxy.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		lines, err := l.all()
		if err != nil {
			return nil, err
		}
		if len(lines)-l.read >= want || ctx.Err() != nil {
			fresh := lines[l.read:]
			l.read = len(lines)
			return fresh, nil
		}
		pause(ctx, 2*time.Millisecond)
	}
}

func (l *proxyLog) all() ([]nodeproxy.Record, error) {
	data, err := os.ReadFile(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // no proxy has started yet
	}
	if err != nil {
		return nil, fmt.Errorf("read the node proxy's log: %w", err)
	}
	var lines []nodeproxy.Record
	for line := range bytes.Lines(data) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // half written
		}
		var r nodeproxy.Record
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("read the node proxy's log: %q: %w", line, err)
		}
		lines = append(lines, r)
	}
	return lines, nil
}

// pause waits, but not beyond the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
