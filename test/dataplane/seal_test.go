// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"testing"

	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// frames are packets as a program with CAP_NET_RAW may put them on the wire itself.
func frames(w *wire) (sealed, open map[string][]byte) {
	src4, dst4, src6, dst6 := w.pod.V4, w.destination.V4, w.pod.V6, w.destination.V6
	v4 := func(options []byte, fragment uint16, payload []byte) []byte {
		return w.ethernet(typeIPv4, nil, ipv4(src4, dst4, 6, options, fragment, payload))
	}
	v6 := func(extensions []extension, payload []byte) []byte {
		return w.ethernet(typeIPv6, nil, ipv6(src6, dst6, 6, extensions, payload))
	}
	const moreFragments = 0x2000
	opening := tcpHeader(syn, 1)
	nops := []byte{1, 1, 1, 1, 1, 1, 1, 0}
	plain4, plain6 := ipv4(src4, dst4, 6, nil, 0, opening), ipv6(src6, dst6, 6, nil, opening)
	cutOff := v6([]extension{fragmentHeader(0, true), padded(destOptions)}, nil)
	cutOff = cutOff[:len(cutOff)-8]
	auth := extension{authExt, make([]byte, 22)}
	var many []extension
	for range 9 {
		many = append(many, padded(destOptions))
	}
	sealed = map[string][]byte{
		"IPv4":                                     v4(nil, 0, opening),
		"IPv4 with options":                        v4(nops, 0, opening),
		"IPv4 SYN with FIN":                        v4(nil, 0, tcpHeader(syn|fin, 1)),
		"IPv4 SYN with ECN flags":                  v4(nil, 0, tcpHeader(syn|0xc0, 1)),
		"IPv4 first fragment":                      v4(nil, moreFragments, opening),
		"IPv4 first fragment without flags":        v4(nil, moreFragments, opening[:8]),
		"IPv4 in a VLAN":                           w.ethernet(typeIPv4, []uint16{typeVLAN}, plain4),
		"IPv4 in two VLANs":                        w.ethernet(typeIPv4, []uint16{typeQinQ, typeVLAN}, plain4),
		"IPv4 in three VLANs":                      w.ethernet(typeIPv4, []uint16{typeQinQ, typeVLAN, typeVLAN}, plain4),
		"IPv6":                                     v6(nil, opening),
		"IPv6 with hop-by-hop options":             v6([]extension{padded(hopByHop)}, opening),
		"IPv6 with destination options":            v6([]extension{padded(destOptions)}, opening),
		"IPv6 with a routing header":               v6([]extension{{routing, []byte{0, 0, 0, 0, 0, 0}}}, opening),
		"IPv6 with an authentication header":       v6([]extension{auth}, opening),
		"IPv6 with all of these":                   v6([]extension{padded(hopByHop), padded(destOptions), {routing, []byte{0, 0, 0, 0, 0, 0}}, auth, padded(destOptions)}, opening),
		"IPv6 first fragment":                      v6([]extension{fragmentHeader(0, true)}, opening),
		"IPv6 first fragment without flags":        v6([]extension{fragmentHeader(0, true)}, opening[:8]),
		"IPv6 fragment that ends in a header":      v6([]extension{padded(hopByHop), fragmentHeader(0, true), padded(destOptions)}, nil),
		"IPv6 fragment that ends before a header":  cutOff,
		"IPv6 fragment within a fragment's header": v6([]extension{padded(hopByHop), fragmentHeader(0, true)}, nil)[:14+40+8+1],
		"IPv6 with more headers than is sound":     v6(many, opening),
		"IPv6 in a VLAN":                           w.ethernet(typeIPv6, []uint16{typeVLAN}, plain6),
	}
	open = map[string][]byte{
		"IPv4 ACK":                   v4(nil, 0, tcpHeader(ack, 1)),
		"IPv4 RST":                   v4(nil, 0, tcpHeader(rst, 1)),
		"IPv4 later fragment":        v4(nil, moreFragments|1, opening),
		"IPv4 UDP":                   w.ethernet(typeIPv4, nil, ipv4(src4, dst4, 17, nil, 0, udpHeader(1))),
		"IPv4 UDP in a VLAN":         w.ethernet(typeIPv4, []uint16{typeVLAN}, ipv4(src4, dst4, 17, nil, 0, udpHeader(1))),
		"IPv4 SCTP":                  w.ethernet(typeIPv4, nil, ipv4(src4, dst4, 132, nil, 0, opening)),
		"IPv6 ACK after options":     v6([]extension{padded(hopByHop), padded(destOptions)}, tcpHeader(ack, 1)),
		"IPv6 later fragment":        v6([]extension{fragmentHeader(1, true)}, opening),
		"IPv6 UDP after options":     w.ethernet(typeIPv6, nil, ipv6(src6, dst6, 17, []extension{padded(destOptions)}, udpHeader(1))),
		"IPv6 ICMP":                  w.ethernet(typeIPv6, nil, ipv6(src6, dst6, 58, nil, []byte{128, 0, 0, 0, 0, 0, 0, 0})),
		"ARP":                        w.ethernet(typeARP, nil, make([]byte, 28)),
		"something that is no IP":    w.ethernet(0x88b6, nil, opening),
		"IPv4 that is cut off early": w.ethernet(typeIPv4, nil, plain4[:12]),
	}
	return sealed, open
}

// What a program writes onto the wire by a packet socket never meets a hook of sockets: the seal alone stops it.
func TestTheSealJudgesFrames(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	pod, err := b.Pod("pod", bed.PodOptions{})
	if err != nil {
		t.Fatal(err)
	}
	a := agent.Start(t, b, nil)
	w := newWire(t, b, pod)
	sealed, open := frames(w)

	check := func(t *testing.T, frames map[string][]byte, want bool) {
		t.Helper()
		for name, frame := range frames {
			if got := w.passes(t, frame); got != want {
				t.Errorf("%s: passes: %v, want %v", name, got, want)
			}
		}
	}
	t.Run("before enrolment all pass", func(t *testing.T) {
		check(t, sealed, true)
		check(t, open, true)
	})
	if err := a.Enroll(t.Context(), agent.Spec(pod), false); err != nil {
		t.Fatal(err)
	}
	t.Run("enrolled, what opens a connection is dropped", func(t *testing.T) {
		check(t, sealed, false)
		counters, err := a.Datapath.Maps().Counters(pod.Cookie)
		if err != nil || counters.SealDropped != uint64(len(sealed)) {
			t.Errorf("%d are counted as dropped, %v; want %d", counters.SealDropped, err, len(sealed))
		}
	})
	t.Run("enrolled, the rest passes", func(t *testing.T) { check(t, open, true) })
	if err := a.Unenroll(t.Context(), "uid-pod"); err != nil {
		t.Fatal(err)
	}
	t.Run("after it all pass again", func(t *testing.T) { check(t, sealed, true) })
}
