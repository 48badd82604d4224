// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"encoding/json"
	"io"
	"log/slog"
	"net/netip"
	"sync"
	"time"
)

// Direction says at which port a connection came in.
type Direction string

// The directions.
const (
	Outbound Direction = "outbound" // PortOutbound
	Inbound  Direction = "inbound"  // PortInbound
	HBONE    Direction = "hbone"    // PortHBONE
)

// Record is the line of JSON written for a connection, as soon as it is known
// whether the other side could be reached. IPv4-mapped addresses are written as
// IPv4.
type Record struct {
	Time      time.Time `json:"time"`
	UID       string    `json:"uid"`
	Pod       string    `json:"pod"` // NAMESPACE/NAME
	Direction Direction `json:"direction"`
	// Source is the client's address and port.
	Source netip.AddrPort `json:"source"`
	// OriginalDestination is where the client connected to or, for HBONE, where its
	// CONNECT says.
	OriginalDestination netip.AddrPort `json:"original_destination"`
	// Error says why the connection was not carried; "" if it is.
	Error string `json:"error"`
}

// connLog writes records, each with a single Write.
type connLog struct {
	mu   sync.Mutex
	w    io.Writer
	warn sync.Once
	log  *slog.Logger
}

func (l *connLog) write(r Record) {
	r.Time = time.Now()
	line, err := json.Marshal(r)
	if err == nil {
		l.mu.Lock()
		_, err = l.w.Write(append(line, '\n'))
		l.mu.Unlock()
	}
	if err != nil {
		l.warn.Do(func() { l.log.Error("the connection log is incomplete", "err", err) })
	}
}
