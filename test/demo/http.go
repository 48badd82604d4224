// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

const httpPort = 80

// host is a pod, or the host outside: a network namespace, and its HTTP server if it has one.
type host struct {
	*bed.NS
	uid      string       // empty when it is no pod
	before   string       // the snapshot of a pod's namespace before it was enrolled
	accepted atomic.Int64 // connections that its server has accepted
}

// podName is the pod's name as Kubernetes would have it.
func (h *host) podName() string { return "demo/" + h.Name }

// address is the host's address of a family.
func (h *host) address(v6 bool) netip.Addr {
	if v6 {
		return h.V6
	}
	return h.V4
}

// sighting is what an HTTP server says about the connection that a request came by.
type sighting struct {
	Peer  netip.AddrPort `json:"peer"`  // getpeername
	Local netip.AddrPort `json:"local"` // getsockname
}

// serve runs an HTTP server in the host's namespace that tells each client what it sees of it. Closing the bed ends it.
func (h *host) serve() error {
	l, err := h.Listen("tcp", httpPort, bed.ListenOptions{})
	if err != nil {
		return err
	}
	server := &http.Server{
		ReadHeaderTimeout: time.Second,
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				h.accepted.Add(1)
			}
		},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := look(r)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(body) // the client misses it, and says so
		}),
	}
	go func() { _ = server.Serve(l) }() // ends with an error when the bed closes the listener
	return nil
}

// look writes what the server sees of a request's connection as JSON.
func look(r *http.Request) ([]byte, error) {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok {
		return nil, errors.New("the connection has no address here")
	}
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return nil, err
	}
	return json.Marshal(sighting{unmap(peer), unmap(local.AddrPort())})
}

// unmap writes ::ffff:a.b.c.d, which a socket for both families has, as a.b.c.d.
func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// visit is one HTTP request over a connection of its own, and what became of it.
type visit struct {
	from, to *host
	v6       bool

	// Of the client's socket, zero when it was not connected.
	local, peer netip.AddrPort
	saw         sighting // what the server said
	err         error

	proxy []nodeproxy.Record // what the node proxy wrote about it
}

// destination is the address that the client connects to.
func (v *visit) destination() netip.AddrPort { return netip.AddrPortFrom(v.to.address(v.v6), httpPort) }

func (v *visit) url() string {
	if v.v6 {
		return "http://[" + v.to.V6.String() + "]/"
	}
	return "http://" + v.to.V4.String() + "/"
}

// send sends the request.
func (v *visit) send(ctx context.Context, patience time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	v.err = v.try(ctx)
}

func (v *visit) try(ctx context.Context) error {
	c, err := v.from.Dial(ctx, bed.DialSpec{Remote: v.destination()})
	if err != nil {
		return err
	}
	defer c.Close()
	if v.local, err = bed.Sockname(c); err != nil {
		return err
	}
	if v.peer, err = bed.Peername(c); err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		// Not a dial of the transport's own: that goes on after the request is given up.
		DialContext: func(context.Context, string, string) (net.Conn, error) { return c, nil },
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, v.url(), http.NoBody)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the server answered %s", resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(&v.saw)
}

// result says in a word or two how the request ended.
func (v *visit) result() string {
	switch {
	case v.err == nil:
		return "200 OK"
	case errors.Is(v.err, unix.ECONNREFUSED):
		return "refused"
	case errors.Is(v.err, unix.ECONNRESET):
		return "reset"
	case errors.Is(v.err, context.DeadlineExceeded), errors.Is(v.err, os.ErrDeadlineExceeded):
		return "timeout"
	}
	return "failed"
}
