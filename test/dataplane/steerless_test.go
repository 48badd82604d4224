// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// detachSteer takes the pod's steer program out of its namespace, as `bpftool link detach` does. Nobody puts it back where no agent
// reconciles.
func (n *node) detachSteer(pod *bed.NS) {
	n.t.Helper()
	l, err := link.LoadPinnedLink(filepath.Join(n.BPFFS, "pods", "uid-"+pod.Name, "steer"), nil)
	if err == nil {
		err = errors.Join(l.Detach(), l.Close())
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// While a pod's steer program is away, its marked connections come in again and meet the pod's own listeners, which the client
// would take for the server outside. None of them gets as far as to say a word.
func TestWithoutItsSteerProgramAPodIsNotItsOwnServer(t *testing.T) {
	for name, c := range map[string]struct {
		listen bed.ListenOptions
		dial   bed.DialSpec
	}{
		"plain":                  {},
		"a transparent listener": {listen: bed.ListenOptions{Transparent: true}},
		"a marked listener":      {listen: bed.ListenOptions{Mark: 0x42}},
		"MPTCP":                  {listen: bed.ListenOptions{MPTCP: true}, dial: bed.DialSpec{MPTCP: true}},
		"data in the SYN": {
			listen: bed.ListenOptions{FastOpen: true, Transparent: true},
			dial:   bed.DialSpec{FastOpen: bed.FastOpenSendto, Data: []byte("early")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.startProxy()
			pod := n.plainPod("pod")
			n.serve(n.Outside, 8080, bed.AppOptions{Listen: bed.ListenOptions{FastOpen: c.listen.FastOpen, MPTCP: c.listen.MPTCP}})
			n.serve(pod, 8080, bed.AppOptions{Listen: c.listen})
			n.enrol(pod)
			to := func(ns *bed.NS, family string) bed.DialSpec {
				spec := c.dial
				spec.Remote, spec.Timeout = netip.AddrPortFrom(addr(ns, family), 8080), time.Second
				return spec
			}
			eachFamily(t, func(t *testing.T, family string) {
				for range 2 { // the first fetches the cookie for data in a SYN
					ask(t, pod, to(n.Outside, family))
				}
			})
			n.detachSteer(pod)
			before := n.counters(pod).CaptureFailed
			eachFamily(t, func(t *testing.T, family string) {
				for range 2 {
					conn, err := pod.Dial(t.Context(), to(n.Outside, family))
					if err != nil {
						t.Logf("it cannot be made: %v", err)
						continue
					}
					_ = conn.SetDeadline(time.Now().Add(time.Second))
					if id, err := bed.ReadIdentity(conn); err == nil {
						t.Errorf("the pod's own app answers in the place of %s: %+v", to(n.Outside, family).Remote, id)
					} else {
						t.Logf("it is made, and then: %v", err)
					}
					_ = conn.Close()
				}
				// What the pod has to say to itself is not touched.
				ask(t, pod, to(pod, family))
			})
			if got := n.counters(pod).CaptureFailed; got == before {
				t.Error("nothing is counted: no connection has met a listener of the pod's")
			}
		})
	}
}
