// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From linux/io_uring.h.
const (
	uringSQPoll    = 1 << 1 // IORING_SETUP_SQPOLL
	uringWakeUp    = 1 << 1 // IORING_ENTER_SQ_WAKEUP
	uringGetEvents = 1 << 0 // IORING_ENTER_GETEVENTS
	uringAsync     = 1 << 4 // IOSQE_ASYNC

	uringSendmsg = 9
	uringRecvmsg = 10
	uringConnect = 16
	uringSend    = 26

	uringOffSQ  = 0          // IORING_OFF_SQ_RING
	uringOffCQ  = 0x8000000  // IORING_OFF_CQ_RING
	uringOffSQE = 0x10000000 // IORING_OFF_SQES
)

type uringParams struct {
	sqEntries, cqEntries, flags, cpu, idle, features, wq uint32
	_                                                    [3]uint32
	sq                                                   struct{ head, tail, mask, entries, flags, dropped, array, _ uint32 }
	_                                                    uint64
	cq                                                   struct{ head, tail, mask, entries, overflow, cqes, flags, _ uint32 }
	_                                                    uint64
}

// uringEntry is a request to the kernel.
type uringEntry struct {
	op, flags    uint8
	_            uint16
	fd           int32
	offset, addr uint64
	length       uint32
	msgFlags     uint32
	_            [4]uint64
}

// uring is an io_uring with room for one request at a time.
type uring struct {
	fd           int
	params       uringParams
	sq, cq, sqes []byte
	flags        uint8 // of each request
	pinner       runtime.Pinner
}

// newUring makes a ring; a kernel without, or one that does not let us, skips the test.
func newUring(t *testing.T, setup uint32, flags uint8) *uring {
	t.Helper()
	u := &uring{flags: flags, params: uringParams{flags: setup, idle: 1000}}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&u.params)), 0)
	if errno == unix.ENOSYS || errno == unix.EPERM {
		t.Skipf("the kernel has no io_uring (5.1; CONFIG_IO_URING, kernel.io_uring_disabled): %v", errno)
	}
	if errno != 0 {
		t.Fatal(errno)
	}
	u.fd = int(fd)
	p := &u.params
	mapped := func(offset int64, length uint32) []byte {
		b, err := unix.Mmap(u.fd, offset, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Munmap(b) })
		return b
	}
	t.Cleanup(func() { u.pinner.Unpin(); _ = unix.Close(u.fd) })
	u.sq = mapped(uringOffSQ, p.sq.array+p.sqEntries*4)
	u.cq = mapped(uringOffCQ, p.cq.cqes+p.cqEntries*16)
	u.sqes = mapped(uringOffSQE, p.sqEntries*uint32(unsafe.Sizeof(uringEntry{})))
	return u
}

func word(ring []byte, offset uint32) *uint32 { return (*uint32)(unsafe.Pointer(&ring[offset])) }

// do has one request carried out, and returns its result.
func (u *uring) do(e uringEntry) (int, error) {
	e.flags |= u.flags
	*(*uringEntry)(unsafe.Pointer(&u.sqes[0])) = e
	*word(u.sq, u.params.sq.array) = 0
	atomic.AddUint32(word(u.sq, u.params.sq.tail), 1)
	enter := uintptr(uringGetEvents)
	if u.params.flags&uringSQPoll != 0 {
		enter |= uringWakeUp
	}
	head, tail := word(u.cq, u.params.cq.head), word(u.cq, u.params.cq.tail)
	// A signal ends the wait, with no error if the request was taken.
	submit := uintptr(1)
	for deadline := time.Now().Add(patience); atomic.LoadUint32(head) == atomic.LoadUint32(tail); {
		if time.Now().After(deadline) {
			return 0, errors.New("the ring has no result")
		}
		_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(u.fd), submit, 1, enter, 0, 0)
		if errno == 0 {
			submit = 0
		} else if errno != unix.EINTR {
			return 0, errno
		}
	}
	at := u.params.cq.cqes + (*head&*word(u.cq, u.params.cq.mask))*16
	result := int32(binary.NativeEndian.Uint32(u.cq[at+8:]))
	atomic.AddUint32(head, 1)
	if result < 0 {
		return 0, unix.Errno(-result)
	}
	return int(result), nil
}

// pinned is the address of what the kernel is to find there until the test ends.
func pinned[T any](u *uring, what *T) uint64 {
	u.pinner.Pin(what)
	return uint64(uintptr(unsafe.Pointer(what)))
}

func (u *uring) message(data []byte, name *unix.RawSockaddrAny, nameLen uint32) *unix.Msghdr {
	u.pinner.Pin(&data[0])
	iov := &unix.Iovec{Base: &data[0]}
	iov.SetLen(len(data))
	u.pinner.Pin(iov)
	m := &unix.Msghdr{Iov: iov}
	m.SetIovlen(1)
	if name != nil {
		u.pinner.Pin(name)
		m.Name, m.Namelen = (*byte)(unsafe.Pointer(name)), nameLen
	}
	return m
}

// rawSockaddr is the kernel's form of an address.
func rawSockaddr(a netip.AddrPort) (*unix.RawSockaddrAny, uint32) {
	raw := new(unix.RawSockaddrAny)
	port := a.Port()<<8 | a.Port()>>8
	if a.Addr().Is4() {
		*(*unix.RawSockaddrInet4)(unsafe.Pointer(raw)) = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port, Addr: a.Addr().As4()}
		return raw, unix.SizeofSockaddrInet4
	}
	*(*unix.RawSockaddrInet6)(unsafe.Pointer(raw)) = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: port, Addr: a.Addr().As16()}
	return raw, unix.SizeofSockaddrInet6
}

func addrPortOfRaw(raw *unix.RawSockaddrAny) netip.AddrPort {
	if raw.Addr.Family == unix.AF_INET {
		in := (*unix.RawSockaddrInet4)(unsafe.Pointer(raw))
		return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), in.Port<<8|in.Port>>8)
	}
	in := (*unix.RawSockaddrInet6)(unsafe.Pointer(raw))
	return netip.AddrPortFrom(netip.AddrFrom16(in.Addr), in.Port<<8|in.Port>>8)
}

// sendmsg and recvmsg by io_uring pass the same programs, whether the kernel carries them out in the caller, in a worker, or in a
// thread that polls the ring.
func TestDNSByIOUring(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.dnsPod("pod", true)
	outside := serveDNS(t, n.Outside, netip.Addr{}, 53)
	for _, kind := range []struct {
		name  string
		setup uint32
		flags uint8
	}{{"in the caller", 0, 0}, {"in a worker", 0, uringAsync}, {"in a thread that polls", uringSQPoll, 0}} {
		t.Run(kind.name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) {
				u := newUring(t, kind.setup, kind.flags)
				server := netip.AddrPortFrom(addr(n.Outside, family), 53)
				receive := func(s *dnsSocket, id uint16) {
					t.Helper()
					buf, name := make([]byte, 512), new(unix.RawSockaddrAny)
					got, err := u.do(uringEntry{op: uringRecvmsg, fd: int32(s.fd), addr: pinned(u, u.message(buf, name, unix.SizeofSockaddrAny)), length: 1})
					if err != nil {
						t.Fatal(err)
					}
					gotID, answer, err := answered(buf[:got])
					if from := addrPortOfRaw(name); err != nil || gotID != id || answer != proxyAnswer(family) || from != server {
						t.Errorf("received %d: %s from %s, %v; want %d: %s from %s", gotID, answer, from, err, id, proxyAnswer(family), server)
					}
				}
				to, length := rawSockaddr(server)

				s := openUDP(t, pod, dnsSocketSpec{family: family})
				for id := range uint16(3) {
					m := u.message(query(id, "name.test.", family), to, length)
					if _, err := u.do(uringEntry{op: uringSendmsg, fd: int32(s.fd), addr: pinned(u, m), length: 1}); err != nil {
						t.Fatal(err)
					}
					receive(s, id)
				}

				s = openUDP(t, pod, dnsSocketSpec{family: family})
				if _, err := u.do(uringEntry{op: uringConnect, fd: int32(s.fd), addr: pinned(u, to), offset: uint64(length)}); err != nil {
					t.Fatal(err)
				}
				if peer, err := unix.Getpeername(s.fd); err != nil || addrPortOf(peer) != server {
					t.Errorf("getpeername says %v, %v; want %s", peer, err, server)
				}
				message := query(9, "name.test.", family)
				if _, err := u.do(uringEntry{op: uringSend, fd: int32(s.fd), addr: pinned(u, &message[0]), length: uint32(len(message))}); err != nil {
					t.Fatal(err)
				}
				receive(s, 9)
			})
		})
	}
	if got := outside.queries.Load(); got > 0 {
		t.Errorf("the server has got %d queries", got)
	}
	if c := n.counters(pod); c.DnsCaptured == 0 {
		t.Errorf("counters are %+v", c)
	}
}
