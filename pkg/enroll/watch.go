// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf"
	netlinkconn "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// settle is how long a burst of changes may go on before they are looked at together: a new interface comes with several.
const settle = 10 * time.Millisecond

// watch tells of changes in one pod's network namespace. It costs a file descriptor and a sleeping goroutine.
type watch struct {
	conn *netlinkconn.Conn
}

// startWatch has resync called after each change of the namespace's interfaces and addresses.
func (e *Enroller) startWatch(p *pod) (*watch, error) {
	conn, err := netlinkconn.Dial(unix.NETLINK_ROUTE, &netlinkconn.Config{
		NetNS:  p.ns.FD(),
		Groups: unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR,
	})
	if err != nil {
		return nil, fmt.Errorf("watch the interfaces of %s: %w", p.ns.Path(), err)
	}
	w := &watch{conn: conn}
	go e.follow(p, w)
	return w, nil
}

// stopWatch does not wait for a resync that is under way: it will find that it is stopped.
func (p *pod) stopWatch() {
	if p.watch != nil {
		_ = p.watch.conn.Close()
		p.watch = nil
	}
}

func (e *Enroller) follow(p *pod, w *watch) {
	for {
		// What has changed is not read from the message: it may be out of date, and messages may have been lost.
		_, err := w.conn.Receive()
		for err == nil {
			if err = w.conn.SetReadDeadline(time.Now().Add(settle)); err == nil {
				_, err = w.conn.Receive()
			}
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ENOBUFS):
		default:
			return // closed
		}
		if !e.resync(p, w) || w.conn.SetReadDeadline(time.Time{}) != nil {
			return
		}
	}
}

// resync makes good what a change has undone: an interface without a seal, an address that the map does not know, a route
// that went with lo. It returns false when the watch has been stopped.
func (e *Enroller) resync(p *pod, w *watch) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.watch != w {
		return false
	}
	if err := e.repair(p); err != nil {
		e.Log.Error("cannot follow a change in a pod's network namespace",
			"pod", p.spec.String(), "uid", p.uid, "netns", p.ns.Path(), "error", err)
	}
	return true
}

// applyInterface tells the programs which interface the pod has, when that has changed.
func (e *Enroller) applyInterface(p *pod, n *podNet) error {
	entry, err := e.Datapath.Maps().Pod(p.ns.Cookie())
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil // on its way in, or out
	}
	if err != nil || entry.Interface == n.onlyInterface() {
		return err
	}
	entry.Interface = n.onlyInterface()
	return e.Datapath.Maps().PutPod(p.ns.Cookie(), entry)
}

func (e *Enroller) repair(p *pod) error {
	n, err := openPodNet(p.ns)
	if err != nil {
		return err
	}
	defer n.close()
	// The seals first: they are what keeps closed what is not steered yet.
	_, err = e.applySeals(p, n, false)
	errs := []error{err}
	_, err = e.applyOwnAddrs(p, n)
	errs = append(errs, err, e.applyInterface(p, n))
	for _, family := range families {
		_, err = n.addRouting(family)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
