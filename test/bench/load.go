// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

// The kinds of work.
const (
	workConnect = "connect" // connect, one request and its answer, close
	workEcho    = "request" // requests and answers on connections that stay
	workStream  = "stream"  // messages one way
	workDNS     = "dns"     // a socket, a query and its answer
)

// patience bounds one operation: what takes that long is lost.
const patience = 3 * time.Second

// Job is work for a client.
type Job struct {
	Work    string
	Target  netip.AddrPort
	Clients int
	Size    int // of a message, in bytes
	// Duration ends the work, or Count operations of each client if that is not 0.
	Duration time.Duration
	Count    int
	// Rate is how many operations all clients together begin in a second at most; 0 for as many as they can.
	Rate int
}

// turns is how long it takes to begin n operations; 0 if there is no rate to keep to.
func (j *Job) turns(n int) time.Duration {
	if j.Rate == 0 {
		return 0
	}
	return time.Duration(n) * time.Second / time.Duration(j.Rate)
}

// Result is what came of a Job.
type Result struct {
	Ops, Bytes  uint64
	Connections uint64
	Elapsed     time.Duration
	// P50 and P99 are of the time that an operation took; 0 for streams.
	P50, P99 time.Duration
}

// client does the work of a subject from one place. Its methods are called by the benchmark.
type client struct{}

func serveLoad(ctx context.Context, control string) error {
	return serveControl(ctx, control, client{})
}

// Stats tells of the processor time only.
func (client) Stats(_ struct{}, out *Stats) error { //nolint:unparam // net/rpc wants an error
	out.CPU = cpuTime()
	return nil
}

// Run does a job. Any failure of any operation fails it.
func (client) Run(job Job, out *Result) error {
	one, ok := map[string]func(*worker) error{
		workConnect: (*worker).connects, workEcho: (*worker).requests, workStream: (*worker).stream, workDNS: (*worker).queries,
	}[job.Work]
	if !ok || job.Clients < 1 || job.Size < 1 || job.Size > maxMessage || job.Rate < 0 {
		return fmt.Errorf("job %+v makes no sense", job)
	}
	workers := make([]*worker, job.Clients)
	errs := make([]error, job.Clients)
	start := time.Now()
	var running sync.WaitGroup
	for i := range workers {
		workers[i] = &worker{Job: job, end: start.Add(job.Duration)}
		workers[i].next = start.Add(job.turns(i)) // the clients take turns
		running.Go(func() { errs[i] = one(workers[i]) })
	}
	running.Wait()
	out.Elapsed = time.Since(start)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	var took []time.Duration
	for _, w := range workers {
		out.Ops += w.ops
		out.Bytes += w.bytes
		out.Connections += w.connections
		took = append(took, w.took...)
	}
	out.P50, out.P99 = quantile(took, 0.50), quantile(took, 0.99)
	return nil
}

// worker is one of a job's clients.
type worker struct {
	Job
	end                     time.Time
	next                    time.Time // when the next operation is due
	ops, bytes, connections uint64
	took                    []time.Duration
}

// more says whether there is another operation to do, when it is due. One is done in any case, however late it has become meanwhile.
func (w *worker) more() bool {
	if w.Rate > 0 {
		time.Sleep(time.Until(w.next))
		w.next = w.next.Add(w.turns(w.Clients))
	}
	if w.Count > 0 {
		return w.ops < uint64(w.Count)
	}
	return w.ops == 0 || time.Now().Before(w.end)
}

func (w *worker) did(start time.Time) {
	w.took = append(w.took, time.Since(start))
	w.ops++
	w.bytes += uint64(w.Size)
}

func (w *worker) dial() (*net.TCPConn, error) {
	d := net.Dialer{KeepAlive: -1, Timeout: patience}
	d.SetMultipathTCP(false)
	// Not DialTCP: that would bind the socket first, and one that is bound is no probe.
	conn, err := d.Dial("tcp", w.Target.String())
	if err != nil {
		return nil, err
	}
	c, ok := conn.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("connecting made a %T", conn), conn.Close())
	}
	w.connections++
	// Connections are ended by a reset: what waits for late packets would fill the port range, of some subjects sooner than of others.
	if err := errors.Join(c.SetLinger(0), c.SetDeadline(w.deadline())); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (w *worker) deadline() time.Time {
	if w.Count > 0 {
		return time.Now().Add(patience)
	}
	return w.end.Add(patience)
}

// first returns the header with one message after it.
func (w *worker) first(want byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{want}, uint32(w.Size))
	return append(b, make([]byte, w.Size)...)
}

func (w *worker) connects() error {
	request, answer := w.first(wantEcho), make([]byte, w.Size)
	for w.more() {
		start := time.Now()
		c, err := w.dial()
		if err != nil {
			return err
		}
		err = exchange(c, request, answer)
		w.did(start)
		if err := errors.Join(err, c.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (w *worker) requests() error {
	c, err := w.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	request, answer := w.first(wantEcho), make([]byte, w.Size)
	for w.more() {
		start := time.Now()
		if err := exchange(c, request, answer); err != nil {
			return err
		}
		w.did(start)
		request = request[len(request)-w.Size:] // the header only once
	}
	return nil
}

func exchange(c net.Conn, request, answer []byte) error {
	if _, err := c.Write(request); err != nil {
		return err
	}
	_, err := io.ReadFull(c, answer)
	return err
}

// stream counts what the other side says has arrived.
func (w *worker) stream() error {
	c, err := w.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	message := w.first(wantDrain)
	for w.more() {
		if _, err := c.Write(message); err != nil {
			return err
		}
		w.ops++
		message = message[len(message)-w.Size:]
	}
	if err := c.CloseWrite(); err != nil {
		return err
	}
	var total [8]byte
	if _, err := io.ReadFull(c, total[:]); err != nil {
		return fmt.Errorf("the other side's count: %w", err)
	}
	w.bytes = binary.BigEndian.Uint64(total[:])
	if sent := w.ops * uint64(w.Size); w.bytes != sent {
		return fmt.Errorf("%d bytes were sent, and %d arrived", sent, w.bytes)
	}
	return nil
}

// queries makes a socket for each query, as resolvers do.
func (w *worker) queries() error {
	query, answer := make([]byte, w.Size), make([]byte, w.Size+1)
	for w.more() {
		start := time.Now()
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(w.Target))
		if err != nil {
			return err
		}
		err = c.SetDeadline(start.Add(patience))
		if err == nil {
			_, err = c.Write(query)
		}
		n := 0
		if err == nil {
			n, err = c.Read(answer)
		}
		if err == nil && n != w.Size {
			err = fmt.Errorf("an answer of %d bytes to a query of %d", n, w.Size)
		}
		w.did(start)
		if err := errors.Join(err, c.Close()); err != nil {
			return err
		}
	}
	return nil
}
