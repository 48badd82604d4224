// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/pkg/api"
	"github.com/redirector-dataplane/redirector/test/agent"
	"github.com/redirector-dataplane/redirector/test/bed"
	"github.com/redirector-dataplane/redirector/test/nodeproxy"
)

// soOriginalDst is SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST, by the level.
const soOriginalDst = 80

// adminPort is a port of the asking proxy's that nothing is steered to.
const adminPort = 15020

// originalDst asks as netfilter's users do, with a buffer of that size.
func originalDst(fd uintptr, level, size int) string {
	buf := make([]byte, 128)
	n := uint32(size)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, uintptr(level), soOriginalDst,
		uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return "none"
	}
	port := binary.BigEndian.Uint16(buf[2:])
	switch family := binary.NativeEndian.Uint16(buf); {
	case family == unix.AF_INET && n == unix.SizeofSockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(buf[4:8])), port).String()
	case family == unix.AF_INET6 && n == unix.SizeofSockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(buf[8:24])), port).String()
	default:
		return fmt.Sprintf("an answer of %d bytes with family %d", n, family)
	}
}

// originalDsts are all answers for a connection, in a line.
func originalDsts(c net.Conn) string {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return fmt.Sprintf("%T is no TCP connection", c)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return err.Error()
	}
	line := ""
	err = raw.Control(func(fd uintptr) {
		line = fmt.Sprintf("v4 %s v6 %s short v4 %s v6 %s",
			originalDst(fd, unix.SOL_IP, unix.SizeofSockaddrInet4), originalDst(fd, unix.SOL_IPV6, unix.SizeofSockaddrInet6),
			originalDst(fd, unix.SOL_IP, unix.SizeofSockaddrInet4-1), originalDst(fd, unix.SOL_IPV6, unix.SizeofSockaddrInet6-1))
	})
	if err != nil {
		return err.Error()
	}
	return line
}

// askingProxy is a role of the test binary: a proxy that knows nothing of marks. It says what it is told of each connection, and
// carries those of apps to where they were for.
func askingProxy(networks []string) int {
	for _, network := range networks {
		for _, port := range []int{15001, 15006, nodeproxy.PortHBONE, adminPort} {
			config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
				var errSet error
				err := c.Control(func(fd uintptr) {
					errSet = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
				})
				return errors.Join(err, errSet)
			}}
			config.SetMultipathTCP(false) // the kernel makes its subflows, and asks no program about them
			l, err := config.Listen(context.Background(), network, fmt.Sprintf(":%d", port))
			if err != nil {
				fmt.Println(err)
				return 1
			}
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					go func() {
						defer c.Close()
						fmt.Printf("on %d %s: %s\n", port, c.LocalAddr(), originalDsts(c))
						if port == 15001 {
							carryOn(c)
						}
					}()
				}
			}()
		}
	}
	fmt.Println("listening")
	select {}
}

func carryOn(c net.Conn) {
	up, err := net.DialTimeout("tcp", c.LocalAddr().String(), 10*time.Second)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer up.Close()
	fmt.Printf("to %s: %s\n", up.RemoteAddr(), originalDsts(up))
	go func() {
		_, _ = io.Copy(up, c)
		if tcp, ok := up.(*net.TCPConn); ok {
			_ = tcp.CloseWrite()
		}
	}()
	_, _ = io.Copy(c, up)
}

// noOriginalDst is what a connection that was not steered is told.
const noOriginalDst = "v4 none v6 none short v4 none v6 none"

// asking is a pod with a proxy that knows nothing of marks in it.
type asking struct {
	*evasionStage
	pod   *bed.NS
	proxy *bed.Proc
	// mapped says that its sockets are of AF_INET6 for IPv4, too.
	mapped bool
}

func newAsking(t *testing.T, networks ...string) *asking {
	t.Helper()
	s := newEvasionStage(t)
	s.stopAgent(t)
	s.startAgentAs("agent", "--proxy-identity=cgroup-alone")
	s.startNodeProxy("--mute", "listen")
	pod := s.newPod(t)
	s.enrolPod(t, pod)
	a := &asking{s, pod, s.startIn("proxy", pod, "asking", "asking", networks...), networks[0] == "tcp"}
	a.said(t, "listening")
	return a
}

func (a *asking) said(t *testing.T, line string) {
	t.Helper()
	eventually(t, "the proxy says "+line, func() bool {
		return slices.Contains(strings.Split(a.proxy.Output(), "\n"), line)
	})
	if t.Failed() {
		t.Log(a.proxy.Output())
	}
}

// answer is what a steered connection is told.
func (a *asking) answer(dst netip.AddrPort) string {
	switch {
	case dst.Addr().Is6():
		return fmt.Sprintf("v4 none v6 %s short v4 none v6 none", dst)
	case a.mapped:
		return fmt.Sprintf("v4 %s v6 [::ffff:%s]:%d short v4 none v6 none", dst, dst.Addr(), dst.Port())
	default:
		return fmt.Sprintf("v4 %s v6 none short v4 none v6 none", dst)
	}
}

// touch connects, and says nothing.
func touch(t *testing.T, from *bed.NS, to netip.AddrPort) {
	t.Helper()
	c, err := from.Dial(t.Context(), bed.DialSpec{Remote: to})
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

// A proxy that is told original destinations by getsockopt alone, and sets no mark, is told them of what was steered to it, and
// of nothing else.
func TestOriginalDestination(t *testing.T) {
	for _, networks := range [][]string{{"tcp"}, {"tcp4", "tcp6"}} {
		t.Run(strings.Join(networks, " and "), func(t *testing.T) {
			a := newAsking(t, networks...)
			eachFamily(t, func(t *testing.T, family string) {
				remote := netip.AddrPortFrom(addr(a.Outside, family), evasionPort)
				ask(t, a.pod, bed.DialSpec{Remote: remote})
				a.said(t, fmt.Sprintf("on 15001 %s: %s", remote, a.answer(remote)))
				a.said(t, fmt.Sprintf("to %s: %s", remote, noOriginalDst))
				inside := netip.AddrPortFrom(addr(a.pod, family), 4321)
				touch(t, a.Outside, inside)
				a.said(t, fmt.Sprintf("on 15006 %s: %s", inside, a.answer(inside)))
				admin := netip.AddrPortFrom(addr(a.pod, family), adminPort)
				touch(t, a.pod, admin)
				a.said(t, fmt.Sprintf("on %d %s: %s", adminPort, admin, noOriginalDst))

				// Peers are steered to the tunnel's end, and what the pod itself sends there is not.
				tunnel := netip.AddrPortFrom(addr(a.pod, family), nodeproxy.PortHBONE)
				touch(t, a.Outside, tunnel)
				a.said(t, fmt.Sprintf("on %d %s: %s", nodeproxy.PortHBONE, tunnel, a.answer(tunnel)))
				touch(t, a.pod, tunnel)
				a.said(t, fmt.Sprintf("on %d %s: %s", nodeproxy.PortHBONE, tunnel, noOriginalDst))
			})
		})
	}
}

// Machines' connections are steered, and have one. What is left to the pod finds a listener by itself, and has none, be the listener
// the proxy's.
func TestOriginalDestinationWithSettings(t *testing.T) {
	a := newAsking(t, "tcp")
	m := a.machine(t, a.pod, "machine", "br0")
	set := func(settings api.SettingsRequest) {
		t.Helper()
		if _, err := a.agent.client.Set(t.Context(), "uid-"+a.pod.Name, settings); err != nil {
			t.Fatal(err)
		}
	}
	eachFamily(t, func(t *testing.T, family string) {
		set(api.SettingsRequest{"reroute-interfaces": "br0"})
		remote, inside := netip.AddrPortFrom(addr(a.Outside, family), evasionPort), netip.AddrPortFrom(addr(a.pod, family), 4321)
		ask(t, m, bed.DialSpec{Remote: remote})
		a.said(t, fmt.Sprintf("on 15001 %s: %s", remote, a.answer(remote)))
		touch(t, m, inside)
		a.said(t, fmt.Sprintf("on 15001 %s: %s", inside, a.answer(inside)))

		admin := netip.AddrPortFrom(addr(a.pod, family), adminPort)
		set(api.SettingsRequest{"exclude-inbound-ports": fmt.Sprint(adminPort)})
		touch(t, a.Outside, admin)
		a.said(t, fmt.Sprintf("on %d %s: %s", adminPort, admin, noOriginalDst))
		set(api.SettingsRequest{"exclude-inbound-ports": ""})
		touch(t, a.Outside, admin)
		a.said(t, fmt.Sprintf("on 15006 %s: %s", admin, a.answer(admin)))
	})
}

// The answer stays with the proxy's cgroup when the agent is replaced, comes back when it is taken off, and goes with the flag
// and with the cgroup.
func TestOriginalDestinationIsKept(t *testing.T) {
	s := newEvasionStage(t)
	p := s.startNodeProxy("--mute", "listen")
	pins := func() (pins []string) {
		files, err := os.ReadDir(s.BPFFS + "/links")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if strings.HasPrefix(f.Name(), "original_dst-") {
				pins = append(pins, f.Name())
			}
		}
		return pins
	}
	if got := pins(); len(got) != 1 {
		t.Fatalf("pins are %q, want one", got)
	}
	before := pins()
	s.stopAgent(t)
	if got := pins(); !slices.Equal(got, before) {
		t.Errorf("without an agent the pins are %q, want %q", got, before)
	}
	s.startAgent()
	if got := pins(); !slices.Equal(got, before) {
		t.Errorf("with the next agent the pins are %q, want %q", got, before)
	}
	if err := os.Remove(s.BPFFS + "/links/" + before[0]); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pin is there again", func() bool { return slices.Equal(pins(), before) })
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	dir, err := s.Group("proxy")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the cgroup is removed", func() bool { return os.Remove(dir) == nil })
	eventually(t, "the link goes with it", func() bool { return len(pins()) == 0 })
	if out := s.agent.Output(); strings.Contains(out, "level=ERROR") {
		t.Errorf("the agent says %s", out)
	}
}

// What an answer costs the proxy, and what the program costs it on options that are none of the program's.
func BenchmarkGetsockopt(b *testing.B) {
	n := bed.ForTest(b, bed.Options{})
	if err := n.JoinCgroup(); err != nil {
		b.Fatal(err)
	}
	a := agent.Start(b, n, nil)
	pod, err := n.Pod("pod", bed.PodOptions{})
	if err != nil {
		b.Fatal(err)
	}
	if err := a.Enroll(b.Context(), agent.Spec(pod), false); err != nil {
		b.Fatal(err)
	}
	l, err := pod.Listen("tcp4", 15001, bed.ListenOptions{Mark: nodeproxy.Mark, Transparent: true})
	if err != nil {
		b.Fatal(err)
	}
	dst := netip.MustParseAddrPort("198.51.100.1:80")
	c, err := pod.Dial(b.Context(), bed.DialSpec{Remote: dst})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	accepted, err := l.AcceptTCP()
	if err != nil {
		b.Fatal(err)
	}
	defer accepted.Close()
	raw, err := accepted.SyscallConn()
	if err != nil {
		b.Fatal(err)
	}
	for _, attached := range []bool{false, true} {
		name, want := "without the program", "none"
		if attached {
			name, want = "with the program", dst.String()
			if err := a.Datapath.AnswerOriginalDst(n.Cgroup); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(name+"/SO_ORIGINAL_DST", func(b *testing.B) {
			_ = raw.Control(func(fd uintptr) {
				for b.Loop() {
					if got := originalDst(fd, unix.SOL_IP, unix.SizeofSockaddrInet4); got != want {
						b.Fatalf("the answer is %s, want %s", got, want)
					}
				}
			})
		})
		b.Run(name+"/SO_ERROR", func(b *testing.B) {
			_ = raw.Control(func(fd uintptr) {
				for b.Loop() {
					if _, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}
