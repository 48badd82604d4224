// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

// splice is an experiment: what an app and the proxy say to each other goes from socket to socket, past TCP, by a map of sockets
// (sockmap) and a program that redirects messages. It is no part of Redirector; docs/performance/splice.md says why. IPv4 only, and
// only connections to the port that the benchmark's servers have.
type splice struct {
	sockets      *ebpf.Map
	note, direct *ebpf.Program
	attached     link.Link
}

const (
	splicedPort = 80
	spliceKey   = 16 // local and remote address, local and remote port in host byte order

	activeEstablished  = 4 // BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB
	passiveEstablished = 5 // BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB
	flagIngress        = 1 // BPF_F_INGRESS
	verdictPass        = 1 // SK_PASS
)

// Offsets in struct bpf_sock_ops and struct sk_msg_md.
const (
	opsOp, opsRemoteIP, opsLocalIP, opsRemotePort, opsLocalPort = 0, 24, 28, 64, 68
	msgRemoteIP, msgLocalIP, msgRemotePort, msgLocalPort        = 20, 24, 60, 64
)

// newSplice splices the connections of all processes below a cgroup, from now on.
func newSplice(cgroup string) (*splice, error) {
	s := &splice{}
	if err := s.load(cgroup); err != nil {
		return nil, errors.Join(fmt.Errorf("splice: %w", err), s.Close())
	}
	return s, nil
}

func (s *splice) load(cgroup string) (err error) {
	if s.sockets, err = ebpf.NewMap(&ebpf.MapSpec{Name: "bench_sockets", Type: ebpf.SockHash, KeySize: spliceKey, ValueSize: 8, MaxEntries: 65536}); err != nil {
		return err
	}
	// Each socket under its own addresses ...
	note := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, opsOp, asm.Word),
		asm.JEq.Imm(asm.R2, activeEstablished, "established"),
		asm.JNE.Imm(asm.R2, passiveEstablished, "done"),
		asm.LoadMem(asm.R7, asm.R6, opsRemotePort, asm.Word).WithSymbol("established"),
		asm.HostTo(asm.BE, asm.R7, asm.Word),
		asm.LoadMem(asm.R8, asm.R6, opsLocalPort, asm.Word),
		asm.JEq.Imm(asm.R7, splicedPort, "known"),
		asm.JNE.Imm(asm.R8, splicedPort, "done"),
		asm.LoadMem(asm.R2, asm.R6, opsLocalIP, asm.Word).WithSymbol("known"),
		asm.StoreMem(asm.RFP, -16, asm.R2, asm.Word),
		asm.LoadMem(asm.R2, asm.R6, opsRemoteIP, asm.Word),
		asm.StoreMem(asm.RFP, -12, asm.R2, asm.Word),
		asm.StoreMem(asm.RFP, -8, asm.R8, asm.Word),
		asm.StoreMem(asm.RFP, -4, asm.R7, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, s.sockets.FD()),
		asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -16),
		asm.Mov.Imm(asm.R4, int32(ebpf.UpdateAny)),
		asm.FnSockHashUpdate.Call(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("done"),
		asm.Return(),
	}
	// ... and what it sends to the one that has them the other way round. As long as that is not there, by TCP.
	direct := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R2, asm.R6, msgRemoteIP, asm.Word),
		asm.StoreMem(asm.RFP, -16, asm.R2, asm.Word),
		asm.LoadMem(asm.R2, asm.R6, msgLocalIP, asm.Word),
		asm.StoreMem(asm.RFP, -12, asm.R2, asm.Word),
		asm.LoadMem(asm.R2, asm.R6, msgRemotePort, asm.Word),
		asm.HostTo(asm.BE, asm.R2, asm.Word),
		asm.StoreMem(asm.RFP, -8, asm.R2, asm.Word),
		asm.LoadMem(asm.R2, asm.R6, msgLocalPort, asm.Word),
		asm.StoreMem(asm.RFP, -4, asm.R2, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, s.sockets.FD()),
		asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -16),
		asm.Mov.Imm(asm.R4, flagIngress),
		asm.FnMsgRedirectHash.Call(),
		asm.Mov.Imm(asm.R0, verdictPass),
		asm.Return(),
	}
	const license = "Dual BSD/GPL"
	if s.note, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "bench_note", Type: ebpf.SockOps, License: license, Instructions: note}); err != nil {
		return err
	}
	if s.direct, err = ebpf.NewProgram(&ebpf.ProgramSpec{Name: "bench_direct", Type: ebpf.SkMsg, License: license, Instructions: direct}); err != nil {
		return err
	}
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: s.sockets.FD(), Program: s.direct, Attach: ebpf.AttachSkMsgVerdict}); err != nil {
		return err
	}
	s.attached, err = link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ebpf.AttachCGroupSockOps, Program: s.note})
	return err
}

// Close stops splicing new connections. Those that are spliced lose that with the map.
func (s *splice) Close() error {
	var errs []error
	if s.attached != nil {
		errs = append(errs, s.attached.Close())
	}
	return errors.Join(append(errs, s.note.Close(), s.direct.Close(), s.sockets.Close())...)
}
