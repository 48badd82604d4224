// SPDX-License-Identifier: Apache-2.0

// Package takeover finds listeners that a node proxy had before the dataplane was there, and so were not noted when they
// were made, and has connections steered to them. It looks at the proxy's open files; it changes nothing but the mark of the
// outbound listeners.
package takeover

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Marks of sockets, as in bpf/redirector.h.
const (
	markMask   = 0xfff
	markProxy  = 0x539
	markAccept = 0x113
)

// Listeners looks for listeners of the process in the network namespaces with these cookies, and puts those into the map that
// are the proxy's by mark and port. It returns how many it has put there by cookie. Needs kernel 5.6 (pidfd_getfd) and the
// right to trace the process.
func Listeners(m *maps.Maps, pid int, cookies map[uint64]bool) (map[uint64]int, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer unix.Close(pidfd)
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list the open files of process %d: %w", pid, err)
	}
	found := map[uint64]int{}
	var errs []error
	for _, file := range files {
		// Most are connections, and not to be opened one by one if it can be told before: it cannot, but for what is no socket.
		target, err := os.Readlink(filepath.Join(dir, file.Name()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return found, fmt.Errorf("look at a file of process %d (needs CAP_SYS_PTRACE): %w", pid, err)
		}
		if !strings.HasPrefix(target, "socket:") {
			continue // or closed meanwhile
		}
		number, err := strconv.Atoi(file.Name())
		if err != nil {
			continue
		}
		fd, err := unix.PidfdGetfd(pidfd, number, 0)
		if errors.Is(err, unix.EBADF) {
			continue // closed meanwhile
		}
		if err != nil {
			return found, fmt.Errorf("take a file of process %d (needs CAP_SYS_PTRACE): %w", pid, err)
		}
		cookie, err := adopt(m, fd, cookies)
		_ = unix.Close(fd)
		if err != nil {
			errs = append(errs, err)
		} else if cookie != 0 {
			found[cookie]++
		}
	}
	return found, errors.Join(errs...)
}

// adopt puts a socket into the map if it is one of the listeners that are looked for, and returns its namespace's cookie.
func adopt(m *maps.Maps, fd int, cookies map[uint64]bool) (uint64, error) {
	option := func(name int) int {
		v, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, name)
		if err != nil {
			return -1
		}
		return v
	}
	if option(unix.SO_ACCEPTCONN) != 1 || option(unix.SO_PROTOCOL) != unix.IPPROTO_TCP {
		return 0, nil
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil || !cookies[cookie] {
		return 0, nil //nolint:nilerr // a socket that has no cookie is none of a pod
	}
	mark := option(unix.SO_MARK)
	if mark&markMask != markProxy && mark&markMask != markAccept {
		return 0, nil
	}
	addr, err := unix.Getsockname(fd)
	if err != nil {
		return 0, fmt.Errorf("ask a listener for its port: %w", err)
	}
	var port int
	ipv6 := false
	switch a := addr.(type) {
	case *unix.SockaddrInet4:
		port = a.Port
	case *unix.SockaddrInet6:
		port, ipv6 = a.Port, true
	}
	switch port {
	case maps.PortOutbound:
		// As the sock_ops program does when it sees such a listener made.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark&^markMask|markAccept); err != nil {
			return 0, fmt.Errorf("mark a listener: %w", err)
		}
	case maps.PortInbound, maps.PortHBONE:
		// First, or the seal drops its answers to what is steered to it.
		if err := m.NoteProxyListener(fd, uint16(port)); err != nil {
			return 0, err
		}
	default:
		return 0, nil
	}
	return cookie, m.PutListener(cookie, uint16(port), ipv6, fd)
}
