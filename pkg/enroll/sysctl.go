// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/pkg/podns"
)

// sysctl is one that carries the mark of a connection between proxy and app to the app's side of it, and what is noted of it.
type sysctl struct {
	name string
	// wasZero is set when enrolment finds or found it 0.
	wasZero *bool
}

// sysctls lists those that a namespace has, with their places in r.
func sysctls(ipv6 bool, r *maps.Restore) []sysctl {
	all := []sysctl{
		{"net/ipv4/tcp_fwmark_accept", &r.TCPFwmarkAccept},
		{"net/ipv4/fwmark_reflect", &r.FwmarkReflect},
	}
	if ipv6 {
		all = append(all, sysctl{"net/ipv6/fwmark_reflect", &r.FwmarkReflectV6})
	}
	return all
}

// openSysctls are the sysctls of one namespace, open for reading, and for writing where that is allowed. Reading one that is open
// takes a microsecond; to look it up again each time takes more than 0.1 ms where there are 1000 namespaces, each with its own tree
// below /proc/sys/net. The zero value has none open.
type openSysctls []int

// switchOn sets what is 0 to 1 and returns which these were. One that is not 0 is only read: where sysctls cannot be written,
// somebody else may have set it.
func (o *openSysctls) switchOn(ns *podns.NetNS, ipv6 bool) (changed maps.Restore, err error) {
	zero, err := o.zero(ns, ipv6)
	if err != nil || zero == (maps.Restore{}) {
		return changed, err
	}
	for i, s := range sysctls(ipv6, &zero) {
		if !*s.wasZero {
			continue
		}
		if _, err = unix.Pwrite((*o)[i], []byte("1"), 0); err != nil {
			// By its name, to be told why: one that is open for reading only says that it is a bad descriptor.
			err = ns.Do(func() error { return writeSysctl(s.name, "1") })
		}
		if err != nil {
			_ = restoreSysctls(ns, ipv6, zero) // why that fails, if it does, is known
			return changed, err
		}
	}
	return zero, nil
}

// zero returns which are 0.
func (o *openSysctls) zero(ns *podns.NetNS, ipv6 bool) (zero maps.Restore, err error) {
	all := sysctls(ipv6, &zero)
	if len(*o) != len(all) {
		if err := o.open(ns, all); err != nil {
			return maps.Restore{}, err
		}
	}
	for i, s := range all {
		if *s.wasZero, err = isZero((*o)[i], s.name); err != nil {
			o.close() // to be opened anew the next time
			return maps.Restore{}, err
		}
	}
	return zero, nil
}

func (o *openSysctls) open(ns *podns.NetNS, all []sysctl) error {
	o.close()
	err := ns.Do(func() error {
		for _, s := range all {
			fd, err := unix.Open(podns.Sysctl(s.name), unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				fd, err = unix.Open(podns.Sysctl(s.name), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			}
			if err != nil {
				return fmt.Errorf("open a sysctl: %s: %w", podns.Sysctl(s.name), err)
			}
			*o = append(*o, fd)
		}
		return nil
	})
	if err != nil {
		o.close()
	}
	return err
}

func (o *openSysctls) close() {
	for _, fd := range *o {
		_ = unix.Close(fd)
	}
	*o = nil
}

func isZero(fd int, name string) (bool, error) {
	var value [8]byte
	n, err := unix.Pread(fd, value[:], 0)
	if err != nil {
		return false, fmt.Errorf("read a sysctl: %s: %w", podns.Sysctl(name), err)
	}
	return strings.TrimSpace(string(value[:n])) == "0", nil
}

// restoreSysctls sets those to 0 again that were, and goes on after a failure.
func restoreSysctls(ns *podns.NetNS, ipv6 bool, was maps.Restore) error {
	if was == (maps.Restore{}) {
		return nil
	}
	return ns.Do(func() error {
		var errs []error
		for _, s := range sysctls(ipv6, &was) {
			if *s.wasZero {
				errs = append(errs, writeSysctl(s.name, "0"))
			}
		}
		return errors.Join(errs...)
	})
}

// readSysctl and writeSysctl act on the network namespace of the calling thread.
func readSysctl(name string) (string, error) {
	b, err := os.ReadFile(podns.Sysctl(name))
	if err != nil {
		return "", fmt.Errorf("read a sysctl: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

func writeSysctl(name, value string) error {
	if err := os.WriteFile(podns.Sysctl(name), []byte(value), 0); err != nil {
		return fmt.Errorf("set a sysctl (is it writable here? name the node's /proc with --proc): %w", err)
	}
	return nil
}
