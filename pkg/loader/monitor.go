// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
)

// Verdict is what has become of a connection.
type Verdict = bpf.MonitorConnVerdict

// The verdicts, as bpf/monitor.c explains them.
const (
	VerdictCaptured   = bpf.MonitorConnVerdictCONN_CAPTURED
	VerdictOwn        = bpf.MonitorConnVerdictCONN_OWN
	VerdictExcluded   = bpf.MonitorConnVerdictCONN_EXCLUDED
	VerdictProxyOut   = bpf.MonitorConnVerdictCONN_PROXY_OUT
	VerdictProxyToApp = bpf.MonitorConnVerdictCONN_PROXY_TO_APP
	VerdictInbound    = bpf.MonitorConnVerdictCONN_INBOUND
	VerdictToApp      = bpf.MonitorConnVerdictCONN_TO_APP
	VerdictProbe      = bpf.MonitorConnVerdictCONN_PROBE
	VerdictRerouted   = bpf.MonitorConnVerdictCONN_REROUTED
	VerdictUncaptured = bpf.MonitorConnVerdictCONN_UNCAPTURED
	VerdictDNS        = bpf.MonitorConnVerdictCONN_DNS
)

// Connection is a new connection of an enrolled pod.
type Connection struct {
	Time        time.Time
	NetNSCookie uint64 // of the pod
	From, To    netip.AddrPort
	Verdict     Verdict
}

// Monitor is told of new connections for as long as it is open. It is attached to the cgroup for this process alone, and gone with it.
type Monitor struct {
	objects *ebpf.Collection
	link    link.Link
	reader  *ringbuf.Reader
	// epoch is when CLOCK_MONOTONIC was 0.
	epoch time.Time
}

// OpenMonitor attaches the program that tells of connections, after the one that decides about them. Needs kernel 5.8 (ring
// buffers).
func (d *Datapath) OpenMonitor() (m *Monitor, err error) {
	spec, err := bpf.LoadMonitor()
	if err != nil {
		return nil, err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("read the clock: %w", err)
	}
	m = &Monitor{epoch: time.Now().Add(-time.Duration(now.Nano()))}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	if m.objects, err = ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: d.byName()}); err != nil {
		return m, fmt.Errorf("load the program that tells of connections: %w", err)
	}
	if m.reader, err = ringbuf.NewReader(m.objects.Maps["conn_events"]); err != nil {
		return m, fmt.Errorf("read what it tells: %w", err)
	}
	m.link, err = link.AttachCgroup(link.CgroupOptions{
		Path: d.cgroup, Attach: ebpf.AttachCGroupSockOps, Program: m.objects.Programs["redir_monitor"],
	})
	if err != nil {
		return m, fmt.Errorf("attach the program that tells of connections to cgroup %s: %w", d.cgroup, err)
	}
	return m, nil
}

// Read waits for a connection, until Close; then the error wraps os.ErrClosed.
func (m *Monitor) Read() (Connection, error) {
	record, err := m.reader.Read()
	if err != nil {
		return Connection{}, fmt.Errorf("read what is told of connections: %w", err)
	}
	var e bpf.MonitorConnEvent
	if n, err := binary.Decode(record.RawSample, binary.NativeEndian, &e); err != nil {
		return Connection{}, fmt.Errorf("read what is told of connections: %d bytes: %w", n, err)
	}
	addr := func(a [16]uint8, port uint32) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom16(a).Unmap(), uint16(port))
	}
	return Connection{
		Time:        m.epoch.Add(time.Duration(e.Time)),
		NetNSCookie: e.NetnsCookie,
		From:        addr(e.Src, e.Sport),
		To:          addr(e.Dst, e.Dport),
		Verdict:     e.Verdict,
	}, nil
}

// Lost is how many connections there was no room for so far.
func (m *Monitor) Lost() (uint64, error) {
	var perCPU []uint64
	if err := m.objects.Maps["conn_lost"].Lookup(uint32(0), &perCPU); err != nil {
		return 0, fmt.Errorf("map conn_lost: look up: %w", err)
	}
	var sum uint64
	for _, n := range perCPU {
		sum += n
	}
	return sum, nil
}

// Close detaches the program.
func (m *Monitor) Close() error {
	var errs []error
	if m.link != nil {
		errs = append(errs, m.link.Close())
	}
	if m.reader != nil {
		errs = append(errs, m.reader.Close())
	}
	if m.objects != nil {
		m.objects.Close()
	}
	return errors.Join(errs...)
}
