// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// padding makes a pointer 64 bits wide, as the kernel wants it; it is of a little-endian machine, as all of bpf/ is.
type padding [8 - unsafe.Sizeof(uintptr(0))]byte

// attrSize is how long, in bytes, what the kernel is given is, without what the compiler may put behind a struct's last field.
const attrSize = 16

// objGet is what BPF_OBJ_GET takes.
type objGet struct {
	path  *byte
	_     padding
	fd    uint32
	flags uint32
}

// infoByFD is what BPF_OBJ_GET_INFO_BY_FD takes.
type infoByFD struct {
	fd, size uint32
	info     *netnsLinkInfo
	_        padding
}

// netnsLinkInfo is the beginning of struct bpf_link_info, for a link on a network namespace.
type netnsLinkInfo struct {
	kind, _, program, _ uint32
	inode, _            uint32
}

// Steers says whether the pod's pinned link runs that program in the namespace. It is SteerProgram for those who ask again and
// again and expect a yes: in three system calls and without a handle, at a sixth of the time. If it cannot be told, it says no.
func (d *Datapath) Steers(ns *podns.NetNS, uid string, program ebpf.ProgramID) bool {
	path, err := unix.BytePtrFromString(d.PinOfSteer(uid))
	if err != nil {
		return false
	}
	get := objGet{path: path}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_OBJ_GET, uintptr(unsafe.Pointer(&get)), attrSize)
	if errno != 0 {
		return false
	}
	defer unix.Close(int(fd))
	var info netnsLinkInfo
	ask := infoByFD{fd: uint32(fd), size: uint32(unsafe.Sizeof(info)), info: &info}
	_, _, errno = unix.Syscall(unix.SYS_BPF, unix.BPF_OBJ_GET_INFO_BY_FD, uintptr(unsafe.Pointer(&ask)), attrSize)
	return errno == 0 && link.Type(info.kind) == link.NetNsType && ebpf.ProgramID(info.program) == program && uint64(info.inode) == ns.Inode()
}
