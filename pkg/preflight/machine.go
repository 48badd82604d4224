// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
)

// machineChecks are those that are not about what the kernel can, but how the machine is set up.
func machineChecks() []Check {
	return []Check{
		{
			Group: GroupMachine, Name: "a BPF filesystem", Needed: true, Since: "4.4", Option: "CONFIG_BPF_SYSCALL",
			Without: "the agent does not start: the dataplane would go when it ends",
			Remedy:  "mount one with `mount -t bpf none /sys/fs/bpf`",
			run: func(o *Options) (State, string) {
				return placed(loader.CheckBPFFS(o.BPFFS), o.BPFFS)
			},
		},
		{
			Group: GroupMachine, Name: "a cgroup2 mount", Needed: true, Since: "4.5", Option: "CONFIG_CGROUPS",
			Without: "the agent does not start: there is nothing to attach programs to that see every process",
			Remedy:  "mount one with `mount -t cgroup2 none DIR`, and name it with --cgroup unless it is the only one",
			run: func(o *Options) (State, string) {
				dir, err := cgroupOf(o)
				if err == nil {
					err = loader.CheckCgroup(dir)
				}
				return placed(err, dir)
			},
		},
		{
			Group: GroupMachine, Name: "processes in cgroups of version 2", Since: "4.5",
			Without: "--proxy-identity=cgroup falls back to the mark alone, which whoever has CAP_NET_ADMIN can set; " +
				"with --probe-source=node every process in the host's network namespace counts as a prober, those of " +
				"hostNetwork pods too, and with --probe-source=kubelet none does",
			Remedy: "boot with cgroup_no_v1=all (systemd.unified_cgroup_hierarchy=1), and have the container runtime use cgroup2",
			run:    func(o *Options) (State, string) { return cgroupsTell(cmp.Or(o.Proc, "/proc")) },
		},
		{
			Group: GroupMachine, Name: "the sysctls of network namespaces, writable", Needed: true,
			Without: "pods in which tcp_fwmark_accept and fwmark_reflect are off cannot be enrolled",
			Remedy:  "name the node's /proc with --proc, for a container cannot write to its own; or run it with privileged: true",
			run:     func(*Options) (State, string) { return sysctlsWritable() },
		},
		{
			Group: GroupMachine, Name: "IPv6", Option: "CONFIG_IPV6",
			Without: "pods have IPv4 only; all else works",
			Remedy:  "boot without ipv6.disable=1",
			run:     func(*Options) (State, string) { return ipv6There() },
		},
		{
			Group: GroupMachine, Name: "the BPF JIT", Since: "3.16", Option: "CONFIG_BPF_JIT",
			Without: "programs are interpreted: every connection and every packet out of a pod costs more, all else works",
			Remedy:  "sysctl net.core.bpf_jit_enable=1",
			run:     func(*Options) (State, string) { return jitOn() },
		},
		{
			Group: GroupMachine, Name: "the kernel's own BTF", Since: "5.4", Option: "CONFIG_DEBUG_INFO_BTF",
			Without: "nothing of redirector's: programs and maps bring their own types. Some other tools do not work",
			run: func(*Options) (State, string) {
				return exists("/sys/kernel/btf/vmlinux", "no /sys/kernel/btf/vmlinux")
			},
		},
	}
}

// placed judges a file system.
func placed(err error, dir string) (State, string) {
	switch {
	case err == nil:
		return OK, dir
	case errors.Is(err, fs.ErrPermission):
		return Unknown, err.Error()
	default:
		return Missing, err.Error()
	}
}

func cgroupOf(o *Options) (string, error) {
	if o.Cgroup != "" {
		return o.Cgroup, nil
	}
	return loader.FindCgroup2()
}

func exists(path, missing string) (State, string) {
	switch _, err := os.Stat(path); {
	case err == nil:
		return OK, path
	case errors.Is(err, fs.ErrNotExist):
		return Missing, missing
	default:
		return Unknown, err.Error()
	}
}

// cgroupsTell looks whether the processes of the machine are in groups of version 2, and those of pods, too. Where a container
// runtime uses version 1, all are in the root group of version 2, or pods in that of the runtime.
func cgroupsTell(proc string) (State, string) {
	files, err := filepath.Glob(filepath.Join(proc, "[0-9]*", "cgroup"))
	if err != nil || len(files) == 0 {
		return Unknown, "no process can be looked at in " + proc
	}
	grouped, rooted := 0, 0
	version1 := false
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // the process is gone, or hidden
		}
		unified, legacy := pathsOf(string(b))
		version1 = version1 || len(legacy) > 0
		for _, path := range legacy {
			if strings.Contains(path, "kubepods") && !strings.Contains(unified, "kubepods") {
				return Missing, fmt.Sprintf("pods are in cgroups of version 1: process %s is in %s, and in %q of version 2",
					filepath.Base(filepath.Dir(file)), path, unified)
			}
		}
		switch unified {
		case "":
		case "/":
			rooted++
		default:
			grouped++
		}
	}
	switch {
	case grouped > 0:
		return OK, fmt.Sprintf("%d processes are in groups of their own", grouped)
	case rooted == 0:
		return Missing, "no process is in a cgroup of version 2"
	case version1:
		return Missing, "all processes are in the root group of version 2, for version 1 is in use"
	default:
		return Missing, "all processes are in the root group"
	}
}

// pathsOf reads /proc/PID/cgroup: the group of version 2, empty if there is none, and those of version 1.
func pathsOf(text string) (unified string, legacy []string) {
	for line := range strings.Lines(text) {
		// hierarchy, controllers, path
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(f) != 3:
		case f[0] == "0":
			unified = f[2]
		default:
			legacy = append(legacy, f[2])
		}
	}
	return unified, legacy
}

func sysctlsWritable() (State, string) {
	err := loader.TryMarkSysctls()
	switch {
	case err == nil:
		return OK, "tried"
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EACCES):
		return Missing, err.Error()
	default:
		return judge(err)
	}
}

func ipv6There() (State, string) {
	state, found := exists("/proc/sys/net/ipv6/conf/all/disable_ipv6", "the kernel has none, or was booted with ipv6.disable=1")
	if state != OK {
		return state, found
	}
	off, err := os.ReadFile(found)
	if err == nil && strings.TrimSpace(string(off)) == "1" {
		return Missing, "switched off here by net.ipv6.conf.all.disable_ipv6; pods have a switch of their own"
	}
	return OK, "on"
}

func jitOn() (State, string) {
	jited, err := loader.TryJIT()
	if err == nil && !jited {
		return Missing, "a program was loaded and is interpreted"
	}
	return judge(err)
}
