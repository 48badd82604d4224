// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// socketEvasions are what a program can do with ordinary TCP sockets, if need be with CAP_NET_ADMIN.
func socketEvasions() []evasion {
	plain := func(options ...func(fd int) error) func(t *testing.T, a *attempt) {
		return func(t *testing.T, a *attempt) {
			a.open(t, a.pod, options...)
			a.connect()
		}
	}
	toDevice := func(fd int) error { return unix.BindToDevice(fd, "eth0") }
	return []evasion{
		{name: "the proxy's mark", try: plain(marked(0x539)), proxied: true, counter: "foreign_marks"},
		{name: "the proxy's mark with upper bits", try: plain(marked(0xabcd0539)), proxied: true, counter: "foreign_marks"},
		{name: "the reply mark", try: plain(marked(0x111)), proxied: true, counter: "outbound_captured"},
		{name: "the accept mark", try: plain(marked(0x113)), proxied: true, counter: "outbound_captured"},
		{name: "the capture mark", try: plain(marked(0x112)), proxied: true, counter: "outbound_captured"},
		{name: "the capture mark with upper bits", try: plain(marked(0xfffff112)), proxied: true, counter: "outbound_captured"},
		{name: "bound to the device", try: plain(toDevice), proxied: true, counter: "outbound_captured"},
		{name: "bound to the device with the proxy's mark", try: plain(toDevice, marked(0x539)), proxied: true, counter: "foreign_marks"},
		{name: "a transparent socket with the proxy's mark", try: plain(transparent, marked(0x539)), proxied: true, counter: "foreign_marks"},
		{name: "a source address that is not the pod's", try: foreignSource, counter: "outbound_steered"},
		{name: "Fast Open by sendto with the proxy's mark", try: fastOpen(bed.FastOpenSendto), proxied: true, counter: "foreign_marks"},
		{name: "Fast Open by connect with the proxy's mark", try: fastOpen(bed.FastOpenConnect), proxied: true, counter: "foreign_marks"},
		{name: "MPTCP with the proxy's mark", try: mptcp, proxied: true, counter: "foreign_marks"},
		{name: "v4-mapped with the proxy's mark", family: "IPv4", try: v4Mapped, proxied: true, counter: "foreign_marks"},
		{name: "disconnected and connected again", try: again, proxied: true, counter: "outbound_captured"},
		{name: "made before enrolment", prepare: func(t *testing.T, a *attempt) { a.open(t, a.pod) }, try: tryConnect,
			proxied: true, counter: "outbound_captured"},
		{
			name:    "bound to the device and marked before enrolment",
			prepare: func(t *testing.T, a *attempt) { a.open(t, a.pod, toDevice, marked(0x539)) }, try: tryConnect,
			proxied: true, counter: "foreign_marks",
		},
		{name: "made in the pod, used in another", try: fromAnotherPod, proxied: true, counter: "outbound_captured"},
		{name: "a process outside the cgroup", try: outsideCgroup, counter: "seal_dropped"},
		{name: "a destination that the pod claims as its own", try: claimedDestination, counter: "seal_dropped"},
	}
}

func tryConnect(_ *testing.T, a *attempt) { a.connect() }

func transparent(fd int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	if domain, errDomain := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); errDomain == nil && domain == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
	}
	return os.NewSyscallError("setsockopt IP_TRANSPARENT", err)
}

// foreignSource connects from an address that is nobody's. It gets to the proxy, which waits in vain for an answer to it.
func foreignSource(t *testing.T, a *attempt) {
	source := netip.MustParseAddr("10.88.200.9")
	if a.family == "IPv6" {
		source = netip.MustParseAddr("fd00:88:200::9")
	}
	a.local = netip.AddrPortFrom(source, a.local.Port())
	a.open(t, a.pod, transparent)
	a.connect()
}

func fastOpen(kind bed.FastOpen) func(t *testing.T, a *attempt) {
	return func(t *testing.T, a *attempt) {
		for range 2 { // the first only fetches the cookie
			a.local = netip.AddrPortFrom(a.local.Addr(), a.nextPort())
			a.dial(t, bed.DialSpec{FastOpen: kind, Data: []byte("data for the SYN"), Mark: 0x539})
		}
	}
}

func (a *attempt) dial(t *testing.T, spec bed.DialSpec) {
	t.Helper()
	spec.Local, spec.Remote, spec.Timeout = a.local, a.remote, evasionPatience
	c, err := a.pod.Dial(t.Context(), spec)
	if err != nil {
		t.Logf("in pod %s: %v", a.pod.Name, err)
		return
	}
	t.Cleanup(func() { _ = c.Close() })
}

func mptcp(t *testing.T, a *attempt) {
	a.dial(t, bed.DialSpec{MPTCP: true, Mark: 0x539})
}

func v4Mapped(t *testing.T, a *attempt) {
	a.dial(t, bed.DialSpec{V4Mapped: true, Mark: 0x539})
}

// again connects, disconnects, which keeps the socket, and connects once more.
func again(t *testing.T, a *attempt) {
	a.open(t, a.pod, option(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	a.connect()
	if _, err := unix.Write(a.socket, []byte("x")); err != nil {
		t.Errorf("the first connection: %v", err)
	}
	var unspecified [16]byte // AF_UNSPEC
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(a.socket), pointerTo(unspecified[:]), uintptr(len(unspecified)))
	if errno != 0 {
		t.Fatalf("disconnect: %v", errno)
	}
	// The mark that the first connection got is the app's to change.
	if err := marked(0)(a.socket); err != nil {
		t.Fatal(err)
	}
	a.local = netip.AddrPortFrom(a.local.Addr(), a.nextPort())
	if err := unix.Bind(a.socket, sockaddrOf(a.local)); err != nil && !errors.Is(err, unix.EINVAL) {
		t.Fatal(err)
	}
	local, err := unix.Getsockname(a.socket)
	if err != nil {
		t.Fatal(err)
	}
	a.local = netip.AddrPortFrom(a.local.Addr(), portOf(local))
	a.connect()
}

func portOf(sa unix.Sockaddr) uint16 {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return uint16(sa.Port)
	case *unix.SockaddrInet6:
		return uint16(sa.Port)
	}
	return 0
}

// pass sends a socket through a Unix socket, as one process does to another, and returns what comes out.
func pass(t *testing.T, fd int) int {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[0], []byte("take it"), unix.UnixRights(fd), nil, 0); err != nil {
		t.Fatal(err)
	}
	data, control := make([]byte, 16), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(pair[1], data, control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) != 1 {
		t.Fatalf("the socket has not come: %v", err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fds[0]) })
	return fds[0]
}

// fromAnotherPod connects a socket of the pod in another one's network namespace: the socket stays the pod's.
func fromAnotherPod(t *testing.T, a *attempt) {
	a.open(t, a.pod)
	a.socket = pass(t, a.socket)
	other := a.newPod(t)
	if err := other.Do(func() error { a.connect(); return nil }); err != nil {
		t.Fatal(err)
	}
}

// A socket belongs to the network namespace that it was made in. One of a pod that is not enrolled, given to one that is,
// stays with the first: it leaves by that one's interface, with that one's address.
func TestASocketOfAnotherPodIsThatPods(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	enrolled := s.newPod(t)
	s.enrolPod(t, enrolled)
	eachFamily(t, func(t *testing.T, family string) {
		for _, owner := range []*bed.NS{s.newPod(t), s.Node} {
			a := s.newAttempt(t, family)
			a.pod = owner
			a.local = netip.AddrPortFrom(addr(owner, family), a.local.Port())
			a.open(t, owner)
			a.socket = pass(t, a.socket)
			err := enrolled.Do(func() error { return connectWithin(a.socket, a.remote, 5*time.Second) })
			if err != nil {
				t.Errorf("a socket of %s: %v", owner.Name, err)
			}
		}
	})
	if saw := s.proxy.connections(); len(saw) > 0 {
		t.Errorf("the proxy has seen %+v", saw)
	}
	if c := s.podStatus(t, enrolled).Counters; c.OutboundCaptured+c.SealDropped > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// outsideCgroup is a process that the sock_ops program does not see.
func outsideCgroup(t *testing.T, a *attempt) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	proc, err := a.Start(a.pod, false, "evader", []string{self, a.remote.String(), a.local.String(), "0"}, []string{roleVariable + "=evade"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := proc.Wait(ctx); (err == nil) == a.enrolled {
		t.Errorf("enrolled: %v, the process ended with %v: %s", a.enrolled, err, proc.Output())
	}
}

// claimedDestination has the pod own the app's address, so that connections to it are the pod's with itself, and takes a
// route out all the same.
func claimedDestination(t *testing.T, a *attempt) {
	h, err := a.pod.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	claim(t, h, a.remote.Addr())
	if a.enrolled {
		eventually(t, "the agent knows the address", func() bool {
			for _, own := range a.podStatus(t, a.pod).Addresses {
				if own == a.remote.Addr() {
					return true
				}
			}
			return false
		})
	}
	a.open(t, a.pod, func(fd int) error { return unix.BindToDevice(fd, "eth0") })
	a.connect()
}
