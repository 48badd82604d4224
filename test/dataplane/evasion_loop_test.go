// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net/netip"
	"testing"
	"time"
)

// An address that the node routes to the pod, and that the pod has by a route only, as some load balancers do it, would lead the
// proxy that connects to it back to itself.
func TestAnAddressThatLeadsBackMakesNoLoop(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		a := s.newAttempt(t, family)
		s.enrolPod(t, a.pod)
		a.enrolled = true
		anyIP(t, a)
		a.local = netip.AddrPortFrom(addr(s.Outside, family), a.local.Port())
		a.open(t, s.Outside)
		_ = connectWithin(a.socket, a.remote, evasionPatience)
		time.Sleep(time.Second)
		if got := len(s.proxy.connections()); got > 1 {
			t.Errorf("a peer has made one connection, and the proxy has seen %d", got)
		}
		if s.counter(t, a.pod, "loops_dropped") == 0 {
			t.Errorf("it is not counted: %+v", s.podStatus(t, a.pod).Counters)
		}
	})
}
