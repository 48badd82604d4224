// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func pointerTo(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }

// segment is a TCP segment, with a checksum that a receiver accepts. Data is of an even length.
func segment(src, dst netip.AddrPort, flags byte, data ...byte) []byte {
	h := append(tcpHeader(flags, 1), data...)
	binary.BigEndian.PutUint16(h[0:], src.Port())
	binary.BigEndian.PutUint16(h[2:], dst.Port())
	pseudo := append(append([]byte(nil), src.Addr().AsSlice()...), dst.Addr().AsSlice()...)
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(len(h)))
	pseudo = binary.BigEndian.AppendUint32(pseudo, unix.IPPROTO_TCP)
	var sum uint32
	for _, part := range [][]byte{pseudo, h} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(h[16:], ^uint16(sum))
	return h
}

// packet is an IP packet with one TCP segment.
func packet(src, dst netip.AddrPort, flags byte, data ...byte) []byte {
	if src.Addr().Is4() {
		return ipv4(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, nil, 0, segment(src, dst, flags, data...))
	}
	return ipv6(src.Addr(), dst.Addr(), unix.IPPROTO_TCP, nil, segment(src, dst, flags, data...))
}

// sendRaw sends a packet by a raw socket of the pod.
func (a *attempt) sendRaw(t *testing.T, mark uint32, p []byte) {
	t.Helper()
	domain := unix.AF_INET6
	var to unix.Sockaddr = &unix.SockaddrInet6{Addr: addr(a.Outside, "IPv6").As16()}
	if p[0]>>4 == 4 {
		domain, to = unix.AF_INET, &unix.SockaddrInet4{Addr: addr(a.Outside, "IPv4").As4()}
	}
	err := a.pod.Do(func() error {
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if mark != 0 {
			if err := marked(mark)(fd); err != nil {
				return err
			}
		}
		return unix.Sendto(fd, p, 0, to)
	})
	if err != nil && !errors.Is(err, unix.ENOBUFS) { // the seal's verdict
		t.Fatal(err)
	}
}

// sendFrame sends a frame by a packet socket on one of the pod's links.
func (a *attempt) sendFrame(t *testing.T, link string, mark uint32, frame []byte) {
	t.Helper()
	index := linkOf(t, a.pod, link).Attrs().Index
	fd := packetSocket(t, a.pod, index, 0)
	if mark != 0 {
		if err := marked(mark)(fd); err != nil {
			t.Fatal(err)
		}
	}
	sendFrameBy(t, fd, index, frame)
}

func sendFrameBy(t *testing.T, fd, ifindex int, frame []byte) {
	t.Helper()
	if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: ifindex}); err != nil && !errors.Is(err, unix.ENOBUFS) {
		t.Fatal(err)
	}
}

// frame puts a packet into a frame from one of the pod's links to the node.
func (a *attempt) frame(t *testing.T, link string, p []byte) []byte {
	t.Helper()
	w := wire{podMAC: linkOf(t, a.pod, link).Attrs().HardwareAddr, hostMAC: linkOf(t, a.Node, a.pod.HostLink).Attrs().HardwareAddr}
	if p[0]>>4 == 4 {
		return w.ethernet(typeIPv4, nil, p)
	}
	return w.ethernet(typeIPv6, nil, p)
}

// packetEvasions are what a program can do that makes its packets itself, which takes CAP_NET_RAW.
func packetEvasions() []evasion {
	raw := func(mark uint32, flags byte) func(t *testing.T, a *attempt) {
		return func(t *testing.T, a *attempt) { a.sendRaw(t, mark, packet(a.local, a.remote, flags)) }
	}
	frame := func(mark uint32, flags byte) func(t *testing.T, a *attempt) {
		return func(t *testing.T, a *attempt) {
			a.sendFrame(t, a.pod.Link, mark, a.frame(t, a.pod.Link, packet(a.local, a.remote, flags)))
		}
	}
	return []evasion{
		{name: "a raw socket's SYN", try: raw(0, syn), counter: "seal_dropped"},
		{name: "a raw socket's SYN with the proxy's mark", try: raw(0x539, syn), counter: "seal_dropped"},
		{name: "a raw socket's SYN with the capture mark", try: raw(0x112, syn), counter: "outbound_steered"},
		{name: "a raw socket's SYN with the reply mark", try: raw(0x111, syn), counter: "outbound_steered"},
		{name: "a raw socket's SYN with the accept mark", try: raw(0x113, syn), counter: "outbound_steered"},
		{name: "a raw socket's SYN with FIN", try: raw(0, syn|fin), counter: "seal_dropped"},
		{name: "a raw socket's SYN-ACK first", try: raw(0, syn|ack), counter: "seal_dropped_synack"},
		{name: "a raw socket's SYN-ACK first with the proxy's mark", try: raw(0x539, syn|ack), counter: "seal_dropped_synack"},
		{name: "a packet socket's SYN", try: frame(0, syn), counter: "seal_dropped"},
		{name: "a packet socket's SYN with the proxy's mark", try: frame(0x539, syn), counter: "seal_dropped"},
		{name: "a packet socket's SYN-ACK with the proxy's mark", try: frame(0x539, syn|ack), counter: "seal_dropped_synack"},
		{name: "a packet socket's SYN with the accept mark", try: frame(0x113, syn), counter: "seal_dropped"},
		{name: "a packet socket's SYN-ACK with the accept mark", try: frame(0x113, syn|ack), counter: "seal_dropped_synack"},
		{name: "behind a mobility header", family: "IPv6", try: behind(135), counter: "seal_dropped"},
		{name: "behind an authentication header", family: "IPv6", try: behind(authExt), counter: "seal_dropped"},
		{name: "in a stack of all headers", family: "IPv6", try: behind(hopByHop, destOptions, routing, 135, authExt, destOptions), counter: "seal_dropped"},
		{name: "a packet socket past the queueing discipline", try: qdiscBypass, counter: "raw_bypass_refused"},
		{name: "AF_XDP", try: xdp, counter: "raw_bypass_refused"},
	}
}

// behind puts extension headers of these kinds before the TCP header.
func behind(kinds ...byte) func(t *testing.T, a *attempt) {
	return func(t *testing.T, a *attempt) {
		var headers []extension
		for _, kind := range kinds {
			header := padded(kind)
			if kind == authExt {
				header.rest = make([]byte, 22)
			}
			headers = append(headers, header)
		}
		// With data behind it, for who looks too far for the flags to find there something else than the end.
		body := append(segment(a.local, a.remote, syn), make([]byte, 64)...)
		p := ipv6(a.local.Addr(), a.remote.Addr(), unix.IPPROTO_TCP, headers, body)
		a.sendFrame(t, a.pod.Link, 0, a.frame(t, a.pod.Link, p))
	}
}

func qdiscBypass(t *testing.T, a *attempt) {
	index := linkOf(t, a.pod, a.pod.Link).Attrs().Index
	fd := packetSocket(t, a.pod, index, 0)
	err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1)
	if a.enrolled != errors.Is(err, unix.EPERM) {
		t.Errorf("enrolled: %v, PACKET_QDISC_BYPASS: %v", a.enrolled, err)
	}
	sendFrameBy(t, fd, index, a.frame(t, a.pod.Link, packet(a.local, a.remote, syn)))
}

// xdp sends one frame by an AF_XDP socket, which hands it to the driver.
func xdp(t *testing.T, a *attempt) {
	const frames, frameSize = 4, 4096
	frame := a.frame(t, a.pod.Link, packet(a.local, a.remote, syn))
	index := linkOf(t, a.pod, a.pod.Link).Attrs().Index
	err := a.pod.Do(func() error {
		fd, err := unix.Socket(unix.AF_XDP, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		memory, err := unix.Mmap(-1, 0, frames*frameSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = unix.Munmap(memory) })
		copy(memory, frame)
		// struct xdp_umem_reg: address, length, size of a chunk, headroom.
		umem := make([]byte, 32)
		binary.NativeEndian.PutUint64(umem[0:], uint64(pointerTo(memory)))
		binary.NativeEndian.PutUint64(umem[8:], uint64(len(memory)))
		binary.NativeEndian.PutUint32(umem[16:], frameSize)
		if err := unix.SetsockoptString(fd, unix.SOL_XDP, unix.XDP_UMEM_REG, string(umem)); err != nil {
			return err
		}
		for _, ring := range []int{unix.XDP_UMEM_FILL_RING, unix.XDP_UMEM_COMPLETION_RING, unix.XDP_TX_RING} {
			if err := unix.SetsockoptInt(fd, unix.SOL_XDP, ring, frames); err != nil {
				return err
			}
		}
		// struct xdp_mmap_offsets: for each of rx, tx, fill, completion: producer, consumer, descriptors, flags.
		var offsets [16]uint64
		size := uint32(unsafe.Sizeof(offsets))
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_XDP, unix.XDP_MMAP_OFFSETS,
			uintptr(unsafe.Pointer(&offsets)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
			return errno
		}
		producer, descriptors := offsets[4], offsets[6]
		ring, err := unix.Mmap(fd, unix.XDP_PGOFF_TX_RING, int(descriptors)+frames*16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = unix.Munmap(ring) })
		if err := unix.Bind(fd, &unix.SockaddrXDP{Flags: unix.XDP_COPY, Ifindex: uint32(index)}); err != nil {
			return err
		}
		// struct xdp_desc: offset, length, options.
		binary.NativeEndian.PutUint32(ring[descriptors+8:], uint32(len(frame)))
		binary.NativeEndian.PutUint32(ring[producer:], 1)
		for range 100 {
			if err = unix.Sendto(fd, nil, unix.MSG_DONTWAIT, nil); !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EBUSY) {
				break
			}
			time.Sleep(time.Millisecond)
		}
		return err
	})
	switch {
	case errors.Is(err, unix.EAFNOSUPPORT):
		t.Skip("the kernel has no AF_XDP")
	case a.enrolled != errors.Is(err, unix.EPERM):
		t.Errorf("enrolled: %v, AF_XDP: %v", a.enrolled, err)
	}
}
