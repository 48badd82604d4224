// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// Feature is something of the kernel that the dataplane uses.
type Feature struct {
	// Name says what it is, in the kernel's words.
	Name string
	// Since is the kernel version that brought it; distributions also carry it in older ones.
	Since string
	// Option is the kernel configuration option that it needs, if any.
	Option string
	// Without is what happens where it is missing: nothing is captured where a needed one is, for the agent does not start.
	Without string
	// Optional says that the agent starts without it.
	Optional bool

	probe   func() error
	helpers []helper
}

// helper is a function of the kernel's that a program of a type calls.
type helper struct {
	kind ebpf.ProgramType
	fn   asm.BuiltinFunc
}

// Probe tries the feature. The error is the kernel's answer; it wraps unix.EPERM where the process may not try, which tells
// nothing about the kernel.
func (f *Feature) Probe() error {
	for _, h := range f.helpers {
		if err := features.HaveProgramHelper(h.kind, h.fn); err != nil {
			return err
		}
	}
	if f.probe == nil {
		return nil
	}
	return f.probe()
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

// Features lists what the dataplane uses, oldest first as far as it can be told. That a version is right is not assumed: each is
// tried on the kernels of test/vm.
func Features() []Feature {
	return []Feature{
		{
			Name: "LRU hash maps", Since: "4.10", Option: "CONFIG_BPF_SYSCALL",
			Without: "flows of probes cannot be admitted",
			probe:   func() error { return features.HaveMapType(ebpf.LRUHash) },
		},
		{
			Name: "tries of prefixes", Since: "4.11", Option: "CONFIG_BPF_SYSCALL",
			Without: "ranges of addresses cannot be excluded",
			probe:   func() error { return features.HaveMapType(ebpf.LPMTrie) },
		},
		{
			Name: "the clsact qdisc", Since: "4.5", Option: "CONFIG_NET_SCH_INGRESS",
			Without: "interfaces cannot be sealed",
			probe:   probeClsact,
		},
		{
			Name: "BPF programs as traffic control filters", Since: "4.1", Option: "CONFIG_NET_CLS_BPF",
			Without: "interfaces cannot be sealed",
			probe:   probeFilter,
		},
		{
			Name: "routing rules by mark", Since: "2.6.19", Option: "CONFIG_IP_MULTIPLE_TABLES",
			Without: "marked connections are not led to the proxy",
			probe:   func() error { return probeRule(unix.AF_INET) },
		},
		{
			Name: "routing rules by mark, for IPv6", Since: "2.6.19", Option: "CONFIG_IPV6_MULTIPLE_TABLES", Optional: true,
			Without: "pods in whose namespaces IPv6 is on cannot be enrolled",
			probe:   func() error { return probeRule(unix.AF_INET6) },
		},
		{
			Name: "marks that accepted sockets inherit", Since: "3.15", Option: "CONFIG_INET",
			Without: "the app's answers to what the proxy delivers leave the pod",
			probe:   probeMarkSysctl,
		},
		{
			Name: "socket maps", Since: "4.18", Option: "CONFIG_BPF_STREAM_PARSER",
			Without: "the proxy's listeners cannot be found",
			probe:   func() error { return features.HaveMapType(ebpf.SockHash) },
		},
		{
			Name: "sock_ops programs that change socket options", Since: "4.13", Option: "CONFIG_CGROUP_BPF",
			Without: "outbound connections cannot be marked",
			helpers: []helper{{ebpf.SockOps, asm.FnSetsockopt}},
		},
		{
			Name: "sendmsg programs", Since: "4.18", Option: "CONFIG_CGROUP_BPF",
			Without: "DNS queries of sockets that do not connect are not captured",
			probe: func() error {
				return errors.Join(tryAddressProgram(ebpf.AttachCGroupUDP4Sendmsg), tryAddressProgram(ebpf.AttachCGroupUDP6Sendmsg))
			},
		},
		{
			Name: "connect programs that bind", Since: "4.17", Option: "CONFIG_CGROUP_BPF",
			Without: "probes cannot be given their address",
			helpers: []helper{{ebpf.CGroupSockAddr, asm.FnBind}},
		},
		{
			Name: "bind programs", Since: "4.17", Option: "CONFIG_CGROUP_BPF",
			Without: "what the proxy does for machines behind a pod gets no answer",
			probe: func() error {
				return errors.Join(tryAddressProgram(ebpf.AttachCGroupInet4Bind), tryAddressProgram(ebpf.AttachCGroupInet6Bind))
			},
		},
		{
			Name: "sockets of packets in traffic control programs", Since: "5.1", Option: "CONFIG_NET_CLS_BPF",
			Without: "the seal cannot tell the proxy's packets",
			helpers: []helper{{ebpf.SchedCLS, asm.FnSkFullsock}, {ebpf.SchedCLS, asm.FnGetListenerSock}},
		},
		{
			Name: "socket storage", Since: "5.2", Option: "CONFIG_BPF_SYSCALL",
			Without: "nothing can be noted with a socket: whose it is, which DNS server it has asked",
			helpers: []helper{{ebpf.SchedCLS, asm.FnSkStorageGet}},
		},
		{
			Name: "recvmsg programs", Since: "5.2", Option: "CONFIG_CGROUP_BPF",
			Without: "answers of DNS come from the proxy's address, and clients reject them",
			probe: func() error {
				return errors.Join(tryAddressProgram(ebpf.AttachCGroupUDP4Recvmsg), tryAddressProgram(ebpf.AttachCGroupUDP6Recvmsg))
			},
		},
		{
			Name: "setsockopt and getsockopt programs", Since: "5.3", Option: "CONFIG_CGROUP_BPF",
			Without: "packet sockets that bypass the seal cannot be refused, SO_ORIGINAL_DST is not answered",
			probe:   func() error { return features.HaveProgramType(ebpf.CGroupSockopt) },
			helpers: []helper{{ebpf.CGroupSockopt, asm.FnSkStorageGet}},
		},
		{
			Name: "socket storage in sock_ops and connect programs", Since: "5.3", Option: "CONFIG_CGROUP_BPF",
			Without: "a verdict cannot stay with a socket",
			helpers: []helper{{ebpf.SockOps, asm.FnSkStorageGet}, {ebpf.SockOps, asm.FnSkStorageDelete}, {ebpf.CGroupSockAddr, asm.FnSkStorageGet}},
		},
		{
			Name: "pidfd_getfd", Since: "5.6", Optional: true,
			Without: "listeners that a proxy had before the agent came are found when the proxy makes them anew, not at once",
			probe:   probePidfdGetfd,
		},
		{
			Name: "links to cgroups", Since: "5.7", Option: "CONFIG_CGROUP_BPF",
			Without: "programs cannot be attached so that they stay",
			probe:   probeCgroupLink,
		},
		{
			Name: "listening sockets in socket maps", Since: "5.7",
			Without: "the proxy's listeners cannot be found",
			probe:   probeListenerInMap,
		},
		{
			Name: "cgroups and network namespaces in cgroup programs", Since: "5.7", Option: "CONFIG_CGROUPS",
			Without: "who connects, and from which pod, cannot be told",
			helpers: []helper{
				{ebpf.CGroupSock, asm.FnGetCurrentAncestorCgroupId}, {ebpf.CGroupSock, asm.FnGetCurrentCgroupId},
				{ebpf.CGroupSock, asm.FnGetNetnsCookie},
				{ebpf.CGroupSockAddr, asm.FnGetCurrentAncestorCgroupId}, {ebpf.CGroupSockAddr, asm.FnGetCurrentCgroupId},
				{ebpf.CGroupSockAddr, asm.FnGetNetnsCookie},
			},
		},
		{
			Name: "connect programs that change socket options", Since: "5.8", Option: "CONFIG_CGROUP_BPF",
			Without: "what the proxy delivers to the app leaves the pod",
			helpers: []helper{{ebpf.CGroupSockAddr, asm.FnSetsockopt}},
		},
		{
			Name: "getpeername programs", Since: "5.8", Option: "CONFIG_CGROUP_BPF",
			Without: "DNS clients see that they ask the proxy, and some give up",
			probe: func() error {
				return errors.Join(tryAddressProgram(ebpf.AttachCgroupInet4GetPeername), tryAddressProgram(ebpf.AttachCgroupInet6GetPeername))
			},
		},
		{
			Name: "sk_lookup programs", Since: "5.9", Option: "CONFIG_BPF_SYSCALL",
			Without: "nothing can be steered to the proxy",
			probe:   func() error { return features.HaveProgramType(ebpf.SkLookup) },
			helpers: []helper{{ebpf.SkLookup, asm.FnSkAssign}, {ebpf.SkLookup, asm.FnSkRelease}},
		},
		{
			Name: "socket storage in sock_create programs", Since: "5.9", Option: "CONFIG_CGROUP_BPF",
			Without: "it cannot be noted who made a socket: a mark alone would do for the proxy",
			helpers: []helper{{ebpf.CGroupSock, asm.FnSkStorageGet}},
		},
		{
			Name: "iterators over maps of sockets", Since: "5.11", Option: "CONFIG_BPF_SYSCALL", Optional: true,
			Without: "an agent whose maps have another layout cannot take over from the one before, and does not start; capture goes on",
			probe:   ProbeIterators,
		},
		{
			Name: "SO_NETNS_COOKIE", Since: "5.14",
			Without: "the agent cannot learn the number by which programs know a pod",
			probe:   probeNetnsCookieOption,
		},
		{
			Name: "the netns cookie in sock_ops programs", Since: "5.15",
			Without: "a connection's pod cannot be told",
			helpers: []helper{{ebpf.SockOps, asm.FnGetNetnsCookie}},
		},
		{
			Name: "the netns cookie in setsockopt and getsockopt programs", Since: "5.15",
			Without: "a socket's pod cannot be told when it asks for its original destination, or to bypass the seal",
			helpers: []helper{{ebpf.CGroupSockopt, asm.FnGetNetnsCookie}},
		},
		{
			Name: "the ingress interface in sk_lookup programs", Since: "5.17",
			Without: "what a pod sends cannot be told from what it is sent",
			probe:   probeIngressIfindex,
		},
	}
}

// CheckFeatures tries each feature that is needed and returns a *FeatureError for the first that is missing, or an error that
// names the capability that the process lacks.
func CheckFeatures() error {
	for _, c := range Capabilities() {
		if c.Optional {
			continue
		}
		has, err := c.Held()
		if err != nil {
			return err
		}
		// Before anything is tried: the kernel answers "operation not permitted" to everything.
		if !has {
			return fmt.Errorf("the process lacks %s, which it needs %s: %s", c.Name, c.For, CapabilityRemedy)
		}
	}
	// Kernels before 5.11 charge maps and programs to RLIMIT_MEMLOCK; on later ones this does nothing.
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("lift RLIMIT_MEMLOCK (needs CAP_SYS_RESOURCE on this kernel): %w", err)
	}
	for _, f := range Features() {
		if f.Optional {
			continue
		}
		if err := f.Probe(); err != nil {
			return &FeatureError{Feature: f, Err: err}
		}
	}
	return nil
}

// Capability is a right that the agent needs.
type Capability struct {
	// Name is as in capabilities(7).
	Name string
	// For completes "the agent needs it ...".
	For string
	// Without is what happens where it is missing.
	Without string
	// Optional says that the agent starts without it.
	Optional bool

	bits []int // one of them will do
}

// CapabilityRemedy is what to do about one that is missing.
const CapabilityRemedy = "run it as root, or add the capability to the container's securityContext"

// Capabilities lists the rights that the agent needs.
func Capabilities() []Capability {
	const refused = "the agent does not start"
	return []Capability{
		{Name: "CAP_NET_ADMIN", For: "to attach programs and to set rules in pods", Without: refused, bits: []int{unix.CAP_NET_ADMIN}},
		{Name: "CAP_BPF", For: "to load programs", Without: refused, bits: []int{unix.CAP_BPF, unix.CAP_SYS_ADMIN}},
		{Name: "CAP_SYS_ADMIN", For: "to enter the network namespaces of pods", Without: refused, bits: []int{unix.CAP_SYS_ADMIN}},
		{
			Name: "CAP_SYS_PTRACE", For: "to look at the namespaces and sockets of other processes", Optional: true,
			Without: "pods that run already are not found by their processes, nor the listeners that a proxy has already",
			bits:    []int{unix.CAP_SYS_PTRACE},
		},
	}
}

// Held says whether the calling thread has it.
func (c *Capability) Held() (bool, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false, fmt.Errorf("read the process's capabilities: %w", err)
	}
	return slices.ContainsFunc(c.bits, func(bit int) bool { return data[bit/32].Effective&(1<<(bit%32)) != 0 }), nil
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

// tryAddressProgram loads a program for a hook that changes addresses.
func tryAddressProgram(attach ebpf.AttachType) error {
	return tryProgram(ebpf.CGroupSockAddr, attach, asm.Mov.Imm(asm.R0, 1), asm.Return())
}

// probeRule adds a rule for a mark, as pods get one. Where there is no IPv6 at all, none is needed.
func probeRule(family int) error {
	err := inScratchNetNS(func(handle *netlink.Handle, _ netlink.Link) error {
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Mark, rule.Table = family, 1, 1, unix.RT_TABLE_LOCAL
		return handle.RuleAdd(rule)
	})
	if family == unix.AF_INET6 && errors.Is(err, unix.EAFNOSUPPORT) {
		if _, errStat := os.Stat("/proc/sys/net/ipv6"); errors.Is(errStat, fs.ErrNotExist) {
			return nil
		}
	}
	return err
}

// probeMarkSysctl looks for one of the sysctls that are set in pods. Whether they may be set is another question.
func probeMarkSysctl() error {
	_, err := os.Stat(podns.Sysctl("net/ipv4/tcp_fwmark_accept"))
	return err
}

// TryMarkSysctls sets the sysctls that pods get, in a network namespace of its own.
func TryMarkSysctls() error {
	return inScratchNetNS(func(*netlink.Handle, netlink.Link) error {
		for _, name := range []string{"tcp_fwmark_accept", "fwmark_reflect"} {
			f, err := os.OpenFile(podns.Sysctl("net/ipv4/"+name), os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteString("1")
			if err := errors.Join(err, f.Close()); err != nil {
				return err
			}
		}
		return nil
	})
}

// TryJIT loads a program and says whether the kernel compiles it.
func TryJIT() (bool, error) {
	prog, err := newProgram(ebpf.SocketFilter, ebpf.AttachNone, asm.Mov.Imm(asm.R0, 0), asm.Return())
	if err != nil {
		return false, err
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return false, err
	}
	_, err = info.JitedSize()
	if errors.Is(err, ebpf.ErrNotSupported) {
		return false, nil // there is no compiled code of it
	}
	return err == nil, err
}

// ProbeIterators tries what an upgrade to another layout of maps copies sockets by. It needs kernel 5.11; some kernels that have it
// answer unix.EPERM whoever asks.
func ProbeIterators() error {
	for _, kind := range []string{iterSockets, iterNotes} {
		prog, err := loadIterator(kind, nil)
		if err != nil {
			return err
		}
		if err := prog.Close(); err != nil {
			return err
		}
	}
	return nil
}

// probePidfdGetfd asks for a file of this process that is not open: a kernel that knows the call says so.
func probePidfdGetfd() error {
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return err
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, 1<<30, 0)
	if err == nil {
		return errors.Join(errors.New("a file that is not open was handed out"), unix.Close(fd))
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
