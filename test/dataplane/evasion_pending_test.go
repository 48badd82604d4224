// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// The kernel repeats a SYN after a second, and by what the socket's mark and device are then.
const synRepeats = 1500 * time.Millisecond

// Without a proxy a connect() hangs. What the app changes about its socket meanwhile does not let the SYN out.
func TestAPendingConnectionDoesNotGetOut(t *testing.T) {
	s := newEvasionStage(t)
	for name, change := range map[string]func(fd int) error{
		"its mark is taken off":         marked(0),
		"it gets the proxy's mark":      marked(0x539),
		"it gets another mark":          marked(0x42),
		"it is bound to the device":     func(fd int) error { return unix.BindToDevice(fd, "eth0") },
		"it gets mark and device":       func(fd int) error { return errors.Join(unix.BindToDevice(fd, "eth0"), marked(0x539)(fd)) },
		"it is connected a second time": func(int) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, family string) {
				s.t = t
				a := s.newAttempt(t, family)
				s.enrolPod(t, a.pod)
				a.dropResets(t)
				a.open(t, a.pod)
				if err := unix.Connect(a.socket, sockaddrOf(a.remote)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
					t.Fatal(err)
				}
				if err := change(a.socket); err != nil {
					t.Fatal(err)
				}
				_ = unix.Connect(a.socket, sockaddrOf(a.remote))
				err := waitConnected(a.socket, synRepeats)
				if err == nil {
					t.Error("it is connected")
				}
				if seen := a.onTheWire(t); seen.syn > 0 {
					t.Errorf("%d SYNs have left the pod", seen.syn)
				}
				c := s.podStatus(t, a.pod).Counters
				if c.SealDropped+c.OutboundNoListener == 0 {
					t.Errorf("it is not counted: %+v", c)
				}
			})
		})
	}
	if got := s.outside.Accepts(); got > 0 {
		t.Errorf("the app has accepted %d connections", got)
	}
}

// dropResets keeps the RST from an IPv6 client that tells it that nobody listens, as a pod can, so that it goes on trying.
// For IPv4 there is none.
func (a *attempt) dropResets(t *testing.T) {
	t.Helper()
	const flagsOffset = 14 + 40 + 13
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadAbs(flagsOffset, asm.Byte),
			asm.And.Imm(asm.R0, rst),
			asm.JEq.Imm(asm.R0, 0, "pass"),
			asm.Mov.Imm(asm.R0, 2), // TC_ACT_SHOT
			asm.Return(),
			asm.Mov.Imm(asm.R0, 0).WithSymbol("pass"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if a.family == "IPv6" {
		a.filter(t, "lo", netlink.HANDLE_MIN_EGRESS, 1, program)
	}
}

// Two connect() that cross make a connection without a listener, so that no program is asked for one.
func TestASimultaneousOpenDoesNotGetThrough(t *testing.T) {
	s := newEvasionStage(t)
	forwarding := func(t *testing.T, value string) {
		t.Helper()
		for _, name := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
			if err := s.Node.SetSysctl(name, value); err != nil {
				t.Fatal(err)
			}
		}
	}
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		for _, enrol := range []bool{false, true} {
			a := s.newAttempt(t, family)
			if enrol {
				s.enrolPod(t, a.pod)
				a.dropResets(t)
			}
			a.remote = netip.AddrPortFrom(a.remote.Addr(), s.nextPort()) // where nobody listens
			peer := *a
			peer.local, peer.remote = a.remote, a.local
			a.open(t, a.pod)
			peer.open(t, s.Outside)
			// Both first SYNs are lost on the way. Later ones meet sockets that are connecting.
			forwarding(t, "0")
			for _, side := range []*attempt{a, &peer} {
				if err := unix.Connect(side.socket, sockaddrOf(side.remote)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
					t.Fatal(err)
				}
			}
			if enrol {
				// Or its answer would go to lo, where the SYN went.
				if err := marked(0)(a.socket); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(100 * time.Millisecond)
			forwarding(t, "1")
			patience := 5 * time.Second
			if enrol {
				patience = 2 * synRepeats
			}
			errPod, errPeer := waitConnected(a.socket, patience), waitConnected(peer.socket, patience)
			if (errPod == nil) == enrol || (errPeer == nil) == enrol {
				t.Errorf("enrolled: %v, the pod's connect: %v, the peer's: %v", enrol, errPod, errPeer)
			}
			if seen := a.onTheWire(t); enrol && seen.syn+seen.synAck > 0 {
				t.Errorf("%d SYNs and %d SYN-ACKs have left the pod", seen.syn, seen.synAck)
			}
			if enrol && s.counter(t, a.pod, "seal_dropped_synack") == 0 {
				t.Errorf("it is not counted: %+v", s.podStatus(t, a.pod).Counters)
			}
		}
	})
}

// Without a proxy an app that listens on its ports, with all that the proxy's listeners have, still gets nothing.
func TestAnAppDoesNotTakeTheProxysPlace(t *testing.T) {
	s := newEvasionStage(t)
	opts := bed.AppOptions{Listen: bed.ListenOptions{Mark: 0x539, Transparent: true, ReusePort: true}}
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		a := s.newAttempt(t, family)
		s.enrolPod(t, a.pod)
		for _, port := range []uint16{15001, 15006, 15008} {
			app := s.serve(a.pod, port, opts)
			for _, from := range []*bed.NS{s.Outside, s.Node} {
				for _, to := range []uint16{evasionPort, port} {
					blocked(t, from, netip.AddrPortFrom(addr(a.pod, family), to))
				}
			}
			blocked(t, a.pod, a.remote)
			if got := app.Accepts(); got > 0 {
				t.Errorf("an app on port %d has accepted %d connections", port, got)
			}
		}
		c := s.podStatus(t, a.pod).Counters
		if c.ListenersAdded > 0 || c.ForeignMarks != 3 {
			t.Errorf("counters are %+v", c)
		}
	})
}
