// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// Another program on the host may send a probe elsewhere after ours has let it through, as a service's address is translated.
// Then it is no probe of either pod.
func TestAProbeThatIsSentElsewhereIsNone(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	s.joinGroup("kubelet")
	eachFamily(t, func(t *testing.T, family string) {
		s.t = t
		meant, other := s.newPod(t), s.newPod(t)
		for _, pod := range []*bed.NS{meant, other} {
			s.enrolPod(t, pod)
			s.serve(pod, evasionPort, bed.AppOptions{})
		}
		remote := netip.AddrPortFrom(addr(meant, family), evasionPort)
		ask(t, s.Node, bed.DialSpec{Remote: remote})
		if got := s.counter(t, meant, "probes_admitted"); got != 1 {
			t.Fatalf("of one probe %d are admitted: %+v", got, s.podStatus(t, meant).Counters)
		}

		s.sendElsewhere(t, addr(meant, family), addr(other, family))
		c, err := s.Node.Dial(t.Context(), bed.DialSpec{Remote: remote})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if id, err := bed.ReadIdentity(c); err != nil || id.Local.Addr() != addr(other, family) {
			t.Errorf("it has reached %+v, %v", id, err)
		}
		local, err := bed.Sockname(c)
		if err != nil {
			t.Fatal(err)
		}
		p := *s.proxy
		p.t = t
		p.saw(other, "inbound", local, netip.AddrPortFrom(addr(other, family), evasionPort))
		if here, there := s.counter(t, meant, "probes_admitted"), s.counter(t, other, "probes_admitted"); here != 1 || there != 0 {
			t.Errorf("%d probes of the one and %d of the other pod are admitted, want 1 and 0", here, there)
		}
	})
}

// sendElsewhere attaches a program behind ours that has connections to one address go to another.
func (s *evasionStage) sendElsewhere(t *testing.T, from, to netip.Addr) {
	t.Helper()
	// The address in struct bpf_sock_addr.
	attach, offset := ebpf.AttachCGroupInet4Connect, int16(4)
	if from.Is6() {
		attach, offset = ebpf.AttachCGroupInet6Connect, 8
	}
	match, replace := asm.Instructions{}, asm.Instructions{}
	was, is := from.AsSlice(), to.AsSlice()
	for i := 0; i < len(was); i += 4 {
		at := offset + int16(i)
		match = append(match,
			asm.LoadMem(asm.R2, asm.R1, at, asm.Word),
			asm.LoadImm(asm.R3, int64(binary.NativeEndian.Uint32(was[i:])), asm.DWord),
			asm.JNE.Reg(asm.R2, asm.R3, "done"))
		replace = append(replace,
			asm.LoadImm(asm.R3, int64(binary.NativeEndian.Uint32(is[i:])), asm.DWord),
			asm.StoreMem(asm.R1, at, asm.R3, asm.Word))
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: attach, License: "GPL",
		Instructions: append(append(match, replace...), asm.Mov.Imm(asm.R0, 1).WithSymbol("done"), asm.Return()),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = program.Close() })
	attached, err := link.AttachCgroup(link.CgroupOptions{Path: s.Cgroup, Attach: attach, Program: program})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = attached.Close() })
}
