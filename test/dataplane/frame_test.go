// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// TCP flags.
const (
	fin = 0x01
	syn = 0x02
	rst = 0x04
	ack = 0x10
)

// Ethernet types and IP protocols of the frames below.
const (
	typeVLAN = 0x8100
	typeQinQ = 0x88a8
	typeIPv4 = 0x0800
	typeIPv6 = 0x86dd
	typeARP  = 0x0806
)

// tcpHeader is a TCP header without options. The marker in its sequence number is what the other side looks for.
func tcpHeader(flags byte, marker uint32) []byte {
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h[0:], 40000)
	binary.BigEndian.PutUint16(h[2:], 80)
	binary.BigEndian.PutUint32(h[4:], marker)
	h[12] = 5 << 4
	h[13] = flags
	binary.BigEndian.PutUint16(h[14:], 65535)
	return h
}

// udpHeader is a UDP header with the marker as its payload.
func udpHeader(marker uint32) []byte {
	h := make([]byte, 12)
	binary.BigEndian.PutUint16(h[0:], 40000)
	binary.BigEndian.PutUint16(h[2:], 80)
	binary.BigEndian.PutUint16(h[4:], 12)
	binary.BigEndian.PutUint32(h[8:], marker)
	return h
}

// ipv4 is an IPv4 packet; options must be a multiple of four bytes, fragment is the field of flags and offset.
func ipv4(src, dst netip.Addr, proto byte, options []byte, fragment uint16, payload []byte) []byte {
	n := 20 + len(options)
	h := make([]byte, n, n+len(payload))
	h[0] = 4<<4 | byte(n/4)
	binary.BigEndian.PutUint16(h[2:], uint16(n+len(payload)))
	binary.BigEndian.PutUint16(h[6:], fragment)
	h[8], h[9] = 64, proto
	copy(h[12:], src.AsSlice())
	copy(h[16:], dst.AsSlice())
	copy(h[20:], options)
	var sum uint32
	for i := 0; i < n; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum))
	return append(h, payload...)
}

// extension is an IPv6 extension header: its kind, and its bytes from the third on.
type extension struct {
	kind byte
	rest []byte
}

// Kinds of IPv6 extension headers.
const (
	hopByHop    = 0
	routing     = 43
	fragmentExt = 44
	authExt     = 51
	destOptions = 60
)

func padded(kind byte) extension { return extension{kind, []byte{1, 4, 0, 0, 0, 0}} } // PadN

// fragmentHeader has the offset in units of eight bytes.
func fragmentHeader(offset uint16, more bool) extension {
	field := offset << 3
	if more {
		field |= 1
	}
	return extension{fragmentExt, []byte{byte(field >> 8), byte(field), 0, 0, 0, 1}}
}

func ipv6(src, dst netip.Addr, proto byte, extensions []extension, payload []byte) []byte {
	var body []byte
	for i, e := range extensions {
		next := proto
		if i+1 < len(extensions) {
			next = extensions[i+1].kind
		}
		length := byte((len(e.rest)+2)/8 - 1)
		if e.kind == authExt {
			length = byte((len(e.rest)+2)/4 - 2)
		}
		if e.kind == fragmentExt {
			length = 0
		}
		body = append(append(body, next, length), e.rest...)
	}
	body = append(body, payload...)
	h := make([]byte, 40, 40+len(body))
	h[0] = 6 << 4
	binary.BigEndian.PutUint16(h[4:], uint16(len(body)))
	h[6], h[7] = proto, 64
	if len(extensions) > 0 {
		h[6] = extensions[0].kind
	}
	copy(h[8:], src.AsSlice())
	copy(h[24:], dst.AsSlice())
	return append(h, body...)
}

// wire is an Ethernet link between a pod and its node, to put frames on and to take them off.
type wire struct {
	from, to         int // packet sockets
	ifindex          int
	podMAC, hostMAC  net.HardwareAddr
	pod, destination *bed.NS
}

// newWire opens a packet socket at each end of the pod's link.
func newWire(t *testing.T, b *bed.Bed, pod *bed.NS) *wire {
	t.Helper()
	w := &wire{pod: pod, destination: b.Outside}
	inner, outer := linkOf(t, pod, pod.Link), linkOf(t, b.Node, pod.HostLink)
	w.ifindex, w.podMAC, w.hostMAC = inner.Attrs().Index, inner.Attrs().HardwareAddr, outer.Attrs().HardwareAddr
	w.from = packetSocket(t, pod, inner.Attrs().Index, 0)
	w.to = packetSocket(t, b.Node, outer.Attrs().Index, unix.ETH_P_ALL)
	return w
}

func linkOf(t *testing.T, ns *bed.NS, name string) netlink.Link {
	t.Helper()
	h, err := ns.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	l, err := h.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func packetSocket(t *testing.T, ns *bed.NS, ifindex int, proto uint16) int {
	t.Helper()
	var fd int
	err := ns.Do(func() (err error) {
		be := proto<<8 | proto>>8
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(be)); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: be, Ifindex: ifindex})
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// ethernet puts link headers before a packet: the tags are VLAN types, the outermost first.
func (w *wire) ethernet(etherType uint16, tags []uint16, packet []byte) []byte {
	f := append(append([]byte(nil), w.hostMAC...), w.podMAC...)
	for _, tag := range tags {
		f = binary.BigEndian.AppendUint16(f, tag)
		f = binary.BigEndian.AppendUint16(f, 7) // VLAN id
	}
	f = binary.BigEndian.AppendUint16(f, etherType)
	return append(f, packet...)
}

// passes sends a frame from the pod and says whether it comes out at the node. The link is a veth: what is not there when
// send has returned and a second frame has come through, was dropped.
func (w *wire) passes(t *testing.T, frame []byte) bool {
	t.Helper()
	const marker = "the frame after the one in question"
	after := w.ethernet(0x88b5, nil, []byte(marker)) // local experimental Ethernet type
	for _, f := range [][]byte{frame, after} {
		// The seal's verdict on a frame reaches the sender as ENOBUFS, or not at all.
		if err := unix.Sendto(w.from, f, 0, &unix.SockaddrLinklayer{Ifindex: w.ifindex}); err != nil && err != unix.ENOBUFS {
			t.Fatalf("send %x: %v", f, err)
		}
	}
	passed := false
	buf := make([]byte, 2048)
	if err := unix.SetsockoptTimeval(w.to, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
		t.Fatal(err)
	}
	for {
		n, _, err := unix.Recvfrom(w.to, buf, 0)
		if err != nil {
			t.Fatalf("the frame after has not come: %v", err)
		}
		got := buf[:n]
		if n >= 14+len(marker) && string(got[14:14+len(marker)]) == marker {
			return passed
		}
		// A tag may have been taken out of the frame on its way: compare what is behind the link headers.
		passed = passed || n >= 14 && bytes.HasSuffix(frame, got[14:])
	}
}
