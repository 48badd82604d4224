// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/cgroups"
	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// DialCommand is the command of this binary that connects to the address that follows, and prints the number of the kernel's error,
// 0 for none. A Prober runs it where this process may not probe itself.
const DialCommand = "dial"

// childPatience bounds a DialCommand: its own patience, and time to start.
const childPatience = patience + 5*time.Second

// NewProber returns how to probe on this node, where the programs go by that configuration and are attached to that cgroup.
func NewProber(config maps.Config, cgroup string) Prober {
	if config.HostNetNSCookie == 0 {
		return Prober{Why: "no probe is let through on this node"}
	}
	switch config.ProbeSource {
	case maps.ProbeSourceHost:
		return Prober{Dial: Dial, Itself: true}
	case maps.ProbeSourceKubelet:
		kubelets, err := cgroups.Kubelets(cgroup)
		if err != nil || len(kubelets) == 0 {
			return Prober{Why: "no kubelet is found on this node, and nobody else may probe"}
		}
		return Prober{Dial: func(to netip.AddrPort) error { return dialIn(kubelets[0], to) }}
	default:
		inPod, err := isInPod(cgroup)
		if err != nil {
			return Prober{Why: "whether this process may probe cannot be told: " + err.Error()}
		}
		if !inPod {
			return Prober{Dial: Dial, Itself: true}
		}
		return Prober{Dial: func(to netip.AddrPort) error { return dialIn(cgroup, to) }}
	}
}

// isInPod says whether this process is in a pod's cgroup.
func isInPod(cgroup string) (bool, error) {
	own, err := cgroups.Of(cgroup, os.Getpid())
	if errors.Is(err, cgroups.ErrRoot) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	pods, err := cgroups.Pods(cgroup)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(pods, func(dir string) bool { return strings.HasPrefix(own+"/", dir+"/") }), nil
}

// dialIn connects by a process in a cgroup: it is there from its beginning (kernel 5.7).
func dialIn(cgroup string, to netip.AddrPort) error {
	dir, err := os.Open(cgroup)
	if err != nil {
		return fmt.Errorf("probe from cgroup %s: %w", cgroup, err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(context.Background(), childPatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", DialCommand, to.String())
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("probe from cgroup %s: %w", cgroup, err)
	}
	number, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		return fmt.Errorf("probe from cgroup %s: it says %q", cgroup, out)
	}
	if number == 0 {
		return nil
	}
	return syscall.Errno(number)
}
