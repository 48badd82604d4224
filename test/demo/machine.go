// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/loader"
)

// checkMachine names the first thing that the demo needs and this machine lacks, and the remedy, before anything is made.
func checkMachine() error {
	if os.Geteuid() != 0 {
		return errors.New("it needs root, to make network namespaces and load BPF programs: run it with sudo")
	}
	if _, err := os.Stat("/proc/sys/net/ipv6"); errors.Is(err, fs.ErrNotExist) {
		return errors.New("this kernel has no IPv6, which half of the demo is about: boot without ipv6.disable=1")
	}
	if _, err := loader.FindCgroup2(); err != nil {
		return errors.New("no cgroup2 filesystem is mounted: mount one with `mount -t cgroup2 none /sys/fs/cgroup`")
	}
	return loader.CheckFeatures()
}

// remedy adds what to do to the errors of making a bed that come from how this machine is set up.
func remedy(err error) error {
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w: load the veth driver with `modprobe veth`, or use a kernel with CONFIG_VETH", err)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: in a container, run it with --privileged and a writable cgroup2 mount", err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: run it as root with all capabilities; in a container, with --privileged", err)
	}
	return err
}
