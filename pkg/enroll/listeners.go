// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"slices"

	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/takeover"
)

// takeOverListeners sees to pods for which a proxy says that it runs, and of whose listeners none is known: they were made
// before the dataplane was there to note them. They are looked for among the proxy's open files. It returns the pods for which
// that was not possible, or has found nothing.
func (e *Enroller) takeOverListeners() (missed []string) {
	missing := map[uint64]bool{}
	var uids []string
	for _, uid := range e.uids() {
		if cookie, ok := e.lacksListeners(uid); ok {
			missing[cookie] = true
			uids = append(uids, uid)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	// Also in those of a proxy that is not ready yet: it may say of a pod, which it has had all the time, that it runs.
	for _, proxy := range slices.Backward(e.Proxies.Status()) {
		found, err := takeover.Listeners(e.Datapath.Maps(), int(proxy.PID), missing)
		if err != nil {
			e.Log.Warn("cannot look for listeners that the node proxy had before", "pid", proxy.PID, "error", err)
		}
		for cookie, n := range found {
			e.Log.Info("connections are steered to listeners that the node proxy had before", "pid", proxy.PID, "netns_cookie", cookie, "listeners", n)
		}
	}
	for _, uid := range uids {
		if _, still := e.lacksListeners(uid); still {
			missed = append(missed, uid)
		}
	}
	return missed
}

// lacksListeners says whether a proxy runs for the pod, but no listener of its is known on a port that it must have.
func (e *Enroller) lacksListeners(uid string) (cookie uint64, lacks bool) {
	proxied, ok := e.Proxies.Pod(uid)
	if !ok || len(proxied.Acked) == 0 {
		return 0, false
	}
	shown := e.shown(uid)
	if shown == nil {
		return 0, false
	}
	for _, port := range []uint16{maps.PortOutbound, maps.PortInbound} {
		if has, err := e.Datapath.Maps().HasListener(shown.NetNSCookie, port); err != nil || !has {
			return shown.NetNSCookie, err == nil
		}
	}
	return 0, false
}

// offerAnew asks the proxy to leave the pod and take it again, once, so that it makes its listeners for it anew.
func (e *Enroller) offerAnew(ctx context.Context, uid string) {
	p := e.claim(uid)
	defer e.release(p)
	if p.ns == nil || p.offered {
		return
	}
	p.offered = true
	e.Log.Warn("listeners of the node proxy are not found: it is asked to start anew for the pod", "pod", p.spec.String(), "uid", uid)
	err := e.Proxies.Remove(ctx, uid)
	if err == nil {
		err = e.Proxies.Set(p.zdsPod())
	}
	if err != nil {
		e.Log.Error("cannot have the node proxy start anew for a pod", "pod", p.spec.String(), "uid", uid, "error", err)
	}
}
