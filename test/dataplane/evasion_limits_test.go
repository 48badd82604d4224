// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// limit is something that gets out of an enrolled pod, and that docs/evasion.md says so of.
type limit struct {
	name    string
	prepare func(t *testing.T, a *attempt)
	try     func(t *testing.T, a *attempt)
}

func limits() []limit {
	return []limit{
		{name: "a packet socket that passed by the queueing discipline before enrolment", prepare: bypassBefore, try: byBypass},
		{name: "the pod's interface moved to a network namespace of its own", try: movedAway},
		{name: "in a packet of another protocol", try: encapsulated},
	}
}

// What docs/evasion.md says the dataplane does not stop is so: whoever closes one of these finds it here, and moves it.
func TestWhatIsNotStopped(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	for _, l := range limits() {
		t.Run(l.name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) {
				s.t = t
				a := s.newAttempt(t, family)
				if l.prepare != nil {
					l.prepare(t, a)
				}
				s.enrolPod(t, a.pod)
				a.enrolled = true
				l.try(t, a)
				if seen := a.onTheWire(t); seen.syn == 0 {
					t.Error("it is stopped: say so in docs/evasion.md, and move the test")
				}
			})
		})
	}
}

func bypassBefore(t *testing.T, a *attempt) {
	a.socket = packetSocket(t, a.pod, linkOf(t, a.pod, a.pod.Link).Attrs().Index, 0)
	if err := unix.SetsockoptInt(a.socket, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1); err != nil {
		t.Fatal(err)
	}
}

func byBypass(t *testing.T, a *attempt) {
	index := linkOf(t, a.pod, a.pod.Link).Attrs().Index
	sendFrameBy(t, a.socket, index, a.frame(t, a.pod.Link, packet(a.local, a.remote, syn)))
}

// movedAway moves the pod's interface to a network namespace that is not enrolled, which takes CAP_SYS_ADMIN as well.
func movedAway(t *testing.T, a *attempt) {
	child := a.child(t)
	file, err := os.Open(child.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := h.LinkSetNsFd(linkOf(t, a.pod, a.pod.Link), int(file.Fd())); err != nil {
		t.Fatal(err)
	}
	child.HostLink = a.pod.HostLink
	a.pod = child
	up(t, child, child.Link)
	waitUp(t, child, child.Link)
	a.sendFrame(t, child.Link, 0, a.frame(t, child.Link, packet(a.local, a.remote, syn)))
}

// encapsulated is a SYN in a packet that is not TCP. It needs a peer that unwraps it, as UDP does that carries one.
func encapsulated(t *testing.T, a *attempt) {
	inner := packet(a.local, a.remote, syn)
	proto := byte(unix.IPPROTO_IPIP)
	if a.family == "IPv6" {
		proto = unix.IPPROTO_IPV6
	}
	outer := ipv4(a.pod.V4, a.Outside.V4, proto, nil, 0, inner)
	a.sendFrame(t, a.pod.Link, 0, a.frame(t, a.pod.Link, outer))
}
