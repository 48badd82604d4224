// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// Of linux/mptcp_pm.h and linux/mptcp.h: the path manager's generic netlink family, and a socket's state.
const (
	mptcpAddAddr      = 1
	mptcpFlushAddrs   = 4
	mptcpSetLimits    = 5
	mptcpAttrAddr     = 1
	mptcpAttrAnnounce = 2
	mptcpAttrSubflows = 3
	mptcpAddrFamily   = 1
	mptcpAddrV4       = 3
	mptcpAddrV6       = 4
	mptcpAddrFlags    = 6
	mptcpFlagSubflow  = 2
	solMPTCP          = 284
	mptcpInfo         = 1
)

// pathManager sends one request to the kernel's MPTCP path manager.
func pathManager(t *testing.T, ns *bed.NS, command uint8, attrs ...*nl.RtAttr) {
	t.Helper()
	err := ns.Do(func() error {
		family, err := netlink.GenlFamilyGet("mptcp_pm")
		if err != nil {
			return err
		}
		r := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
		r.AddData(&nl.Genlmsg{Command: command, Version: 1})
		for _, a := range attrs {
			r.AddData(a)
		}
		_, err = r.Execute(unix.NETLINK_GENERIC, 0)
		return err
	})
	if err != nil {
		t.Fatalf("ask the MPTCP path manager of %s: %v", ns.Name, err)
	}
}

// allowSubflows lets a namespace's MPTCP connections have more than one path.
func allowSubflows(t *testing.T, ns *bed.NS) {
	t.Helper()
	two := binary.NativeEndian.AppendUint32(nil, 2)
	pathManager(t, ns, mptcpSetLimits, nl.NewRtAttr(mptcpAttrAnnounce, two), nl.NewRtAttr(mptcpAttrSubflows, two))
}

// addPath tells the kernel to use another address of a namespace for the MPTCP connections that it has made.
func addPath(t *testing.T, ns *bed.NS, a netip.Addr) {
	t.Helper()
	family, attr := uint16(unix.AF_INET), mptcpAddrV4
	if a.Is6() {
		family, attr = unix.AF_INET6, mptcpAddrV6
	}
	endpoint := nl.NewRtAttr(mptcpAttrAddr|unix.NLA_F_NESTED, nil)
	endpoint.AddRtAttr(mptcpAddrFamily, binary.NativeEndian.AppendUint16(nil, family))
	endpoint.AddRtAttr(attr, a.AsSlice())
	endpoint.AddRtAttr(mptcpAddrFlags, binary.NativeEndian.AppendUint32(nil, mptcpFlagSubflow))
	pathManager(t, ns, mptcpAddAddr, endpoint)
}

// morePaths is how many paths an MPTCP connection has besides its first.
func morePaths(t *testing.T, c *net.TCPConn) int {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	info := ""
	var errOption error
	if err := raw.Control(func(fd uintptr) { info, errOption = unix.GetsockoptString(int(fd), solMPTCP, mptcpInfo) }); err != nil {
		t.Fatal(err)
	}
	if errOption != nil {
		t.Fatalf("look at an MPTCP connection: %v", errOption)
	}
	if info == "" {
		return 0 // the string ends at the first zero
	}
	return int(info[0])
}

// An MPTCP connection from before enrolment goes on. A path that it gets later, from another address of the pod's or of the
// peer's, is a connection like any other, and ends at the proxy, which does not know what it belongs to.
func TestAnMPTCPConnectionGetsNoPathPastTheProxy(t *testing.T) {
	s := newEvasionStage(t)
	s.startNodeProxy()
	eachFamily(t, func(t *testing.T, family string) {
		for _, inbound := range []bool{false, true} {
			for _, enrol := range []bool{false, true} {
				s.t = t
				a := s.newAttempt(t, family)
				client, server, link := a.pod, s.Outside, a.pod.Link
				if inbound {
					client, server, link = s.Outside, a.pod, s.Outside.Link
				}
				port := s.nextPort()
				l, err := server.Listen("tcp", port, bed.ListenOptions{MPTCP: true})
				if err != nil {
					t.Skipf("the kernel lacks MPTCP: %v", err)
				}
				app := bed.NewApp(l, bed.AppOptions{})
				t.Cleanup(func() { _ = app.Close() })
				pathManager(t, client, mptcpFlushAddrs) // those of an earlier case
				allowSubflows(t, client)
				allowSubflows(t, server)
				remote := netip.AddrPortFrom(addr(server, family), port)
				c, err := client.Dial(t.Context(), bed.DialSpec{Remote: remote, MPTCP: true})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = c.Close() })
				if _, err := bed.ReadIdentity(c); err != nil {
					t.Fatal(err)
				}
				if enrol {
					s.enrolPod(t, a.pod)
				}
				second := addr(client, family)
				for range 100 {
					second = second.Next()
				}
				for range s.pods {
					second = second.Next()
				}
				addAddr(t, client, link, second)
				time.Sleep(evasionPatience)
				addPath(t, client, second)
				if !enrol {
					eventually(t, "the connection has a second path", func() bool { return morePaths(t, c) == 1 })
					continue
				}
				counter := "outbound_captured"
				if inbound {
					counter = "inbound_steered"
				}
				eventually(t, "the second path has been tried", func() bool { return s.counter(t, a.pod, counter) > 0 })
				time.Sleep(evasionPatience)
				eventually(t, "the second path has been given up", func() bool { return morePaths(t, c) == 0 })
			}
		}
	})
}
