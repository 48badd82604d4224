// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// Feature is something of the kernel that the dataplane cannot do without.
type Feature struct {
	// Name says what it is, in the kernel's words.
	Name string
	// Since is the kernel version that brought it; distributions also carry it in older ones.
	Since string
	// Option is the kernel configuration option that it needs, if any.
	Option string

	probe func() error
}

// FeatureError says which feature is missing.
type FeatureError struct {
	Feature Feature
	// Err is what the kernel answered.
	Err error
}

func (e *FeatureError) Error() string {
	option := ""
	if e.Feature.Option != "" {
		option = " with " + e.Feature.Option
	}
	return fmt.Sprintf("this kernel lacks %s (%v): run kernel %s or later%s", e.Feature.Name, e.Err, e.Feature.Since, option)
}

// Unwrap returns the kernel's answer.
func (e *FeatureError) Unwrap() error { return e.Err }

// Features lists what the dataplane needs, oldest first.
func Features() []Feature {
	return []Feature{
		{"LRU hash maps", "4.10", "CONFIG_BPF_SYSCALL", func() error { return features.HaveMapType(ebpf.LRUHash) }},
		{"the clsact qdisc", "4.5", "CONFIG_NET_SCH_INGRESS", probeClsact},
		{"BPF programs as traffic control filters", "4.1", "CONFIG_NET_CLS_BPF", probeFilter},
		{"socket maps", "4.18", "CONFIG_BPF_STREAM_PARSER", func() error { return features.HaveMapType(ebpf.SockHash) }},
		{"sock_ops programs that change socket options", "4.13", "CONFIG_CGROUP_BPF", func() error {
			return features.HaveProgramHelper(ebpf.SockOps, asm.FnSetsockopt)
		}},
		{"links to cgroups", "5.7", "CONFIG_CGROUP_BPF", probeCgroupLink},
		{"listening sockets in socket maps", "5.7", "", probeListenerInMap},
		{"sk_lookup programs", "5.9", "CONFIG_BPF_SYSCALL", func() error { return features.HaveProgramType(ebpf.SkLookup) }},
		{"SO_NETNS_COOKIE", "5.14", "", probeNetnsCookieOption},
		{"the netns cookie in sock_ops programs", "5.15", "", func() error {
			return features.HaveProgramHelper(ebpf.SockOps, asm.FnGetNetnsCookie)
		}},
		{"the ingress interface in sk_lookup programs", "5.17", "", probeIngressIfindex},
	}
}

// CheckFeatures tries each feature and returns a *FeatureError for the first that is missing, or an error that names the
// capability that the process lacks.
func CheckFeatures() error {
	if err := checkCapabilities(); err != nil {
		return err
	}
	// Kernels before 5.11 charge maps and programs to RLIMIT_MEMLOCK; on later ones this does nothing.
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("lift RLIMIT_MEMLOCK (needs CAP_SYS_RESOURCE on this kernel): %w", err)
	}
	for _, f := range Features() {
		if err := f.probe(); err != nil {
			return &FeatureError{Feature: f, Err: err}
		}
	}
	return nil
}

// checkCapabilities looks before anything is tried, for the kernel answers "operation not permitted" to everything.
func checkCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the process's capabilities: %w", err)
	}
	has := func(bit int) bool { return data[bit/32].Effective&(1<<(bit%32)) != 0 }
	for _, c := range []struct {
		name string
		bits []int // one of them will do
		what string
	}{
		{"CAP_NET_ADMIN", []int{unix.CAP_NET_ADMIN}, "to attach programs and to set rules in pods"},
		{"CAP_BPF", []int{unix.CAP_BPF, unix.CAP_SYS_ADMIN}, "to load programs"},
		{"CAP_SYS_ADMIN", []int{unix.CAP_SYS_ADMIN}, "to enter the network namespaces of pods"},
	} {
		ok := false
		for _, bit := range c.bits {
			ok = ok || has(bit)
		}
		if !ok {
			return fmt.Errorf("the process lacks %s, which it needs %s: run it as root, or add the capability to the container's securityContext", c.name, c.what)
		}
	}
	return nil
}

// probeIngressIfindex loads a program that reads the field.
func probeIngressIfindex() error {
	const ingressIfindex = 64 // offset in struct bpf_sk_lookup of <linux/bpf.h>
	return tryProgram(ebpf.SkLookup, ebpf.AttachSkLookup,
		asm.LoadMem(asm.R0, asm.R1, ingressIfindex, asm.Word),
		asm.Mov.Imm(asm.R0, 1),
		asm.Return())
}

// probeCgroupLink asks the kernel to link a program to something that is no cgroup: a kernel that knows links says so.
func probeCgroupLink() error {
	prog, err := newProgram(ebpf.SockOps, ebpf.AttachCGroupSockOps, asm.Mov.Imm(asm.R0, 1), asm.Return())
	if err != nil {
		return err
	}
	defer prog.Close()
	l, err := link.AttachRawLink(link.RawLinkOptions{Target: prog.FD(), Program: prog, Attach: ebpf.AttachCGroupSockOps})
	if err == nil {
		return errors.Join(errors.New("a program passed for a cgroup"), l.Close())
	}
	if errors.Is(err, unix.EBADF) {
		return nil
	}
	return err
}

func probeNetnsCookieOption() error {
	_, err := podns.Cookie()
	return err
}

// probeListenerInMap puts a listening socket of a scratch namespace into a map.
func probeListenerInMap() error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.SockHash, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		return err
	}
	defer m.Close()
	return inScratchNetNS(func(*netlink.Handle, netlink.Link) error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Listen(fd, 1); err != nil {
			return err
		}
		return m.Put(uint32(0), uint64(fd))
	})
}

func probeClsact() error {
	return inScratchNetNS(func(handle *netlink.Handle, lo netlink.Link) error { return handle.QdiscAdd(clsactOf(lo)) })
}

func probeFilter() error {
	prog, err := newProgram(ebpf.SchedCLS, ebpf.AttachNone, asm.Mov.Imm(asm.R0, -1), asm.Return())
	if err != nil {
		return err
	}
	defer prog.Close()
	return inScratchNetNS(func(handle *netlink.Handle, lo netlink.Link) error {
		if err := handle.QdiscAdd(clsactOf(lo)); err != nil {
			return err
		}
		return handle.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: lo.Attrs().Index,
				Parent:    netlink.HANDLE_MIN_EGRESS,
				Handle:    1,
				Protocol:  unix.ETH_P_ALL,
				Priority:  1,
			},
			Fd:           prog.FD(),
			Name:         "probe",
			DirectAction: true,
		})
	})
}

// inScratchNetNS runs fn with the loopback device of a network namespace that is gone afterwards.
func inScratchNetNS(fn func(*netlink.Handle, netlink.Link) error) error {
	done := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine, and the namespace with the thread.
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			// Not the main thread, which never ends: where that is, /proc/PID/ns says of the whole process. While
			// this goroutine holds it, the next gets another.
			done <- inScratchNetNS(fn)
			runtime.UnlockOSThread()
			return
		}
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("make a network namespace to try it in: %w", err)
			}
			handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return err
			}
			defer handle.Close()
			lo, err := handle.LinkByName("lo")
			if err != nil {
				return err
			}
			return fn(handle, lo)
		}()
	}()
	return <-done
}

func tryProgram(kind ebpf.ProgramType, attach ebpf.AttachType, instructions ...asm.Instruction) error {
	prog, err := newProgram(kind, attach, instructions...)
	if err != nil {
		return err
	}
	return prog.Close()
}

func newProgram(kind ebpf.ProgramType, attach ebpf.AttachType, instructions ...asm.Instruction) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         kind,
		AttachType:   attach,
		Instructions: instructions,
		License:      "Dual BSD/GPL",
	})
}
