// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// families runs a test for the IPv4 and the IPv6 address of a namespace.
func families(t *testing.T, ns *NS, test func(t *testing.T, addr netip.Addr)) {
	t.Run("v4", func(t *testing.T) { test(t, ns.V4) })
	t.Run("v6", func(t *testing.T) { test(t, ns.V6) })
}

func own(ns *NS, remote netip.Addr) netip.Addr {
	if remote.Is4() {
		return ns.V4
	}
	return ns.V6
}

func TestDialVariants(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	app := serve(t, b.Outside, AppOptions{})
	families(t, b.Outside, func(t *testing.T, addr netip.Addr) {
		remote := addrPort(addr, app.Port)
		for name, spec := range map[string]DialSpec{
			"plain":       {},
			"data":        {Data: []byte("first ")},
			"port":        {Local: addrPort(netip.Addr{}, 4001)},
			"any address": {Local: addrPort(netip.IPv4Unspecified(), 4002)},
			"address":     {Local: addrPort(own(p, addr), 0)},
			"source":      {Local: addrPort(own(p, addr), 4003)},
			"device":      {BindToDevice: "eth0"},
			"mark":        {Mark: 0x7},
		} {
			t.Run(name, func(t *testing.T) {
				spec.Remote = remote
				checkConnection(t, p, spec, own(p, addr))
			})
		}
	})
	t.Run("v4-mapped", func(t *testing.T) {
		for _, local := range []netip.AddrPort{{}, addrPort(p.V4, 4004)} {
			spec := DialSpec{Remote: addrPort(b.Outside.V4, app.Port), V4Mapped: true, Local: local}
			checkConnection(t, p, spec, p.V4)
			c, err := p.Dial(within(t), DialSpec{Remote: spec.Remote, V4Mapped: true})
			if err != nil {
				t.Fatal(err)
			}
			closeAtEnd(t, c)
			if d := sockopt(t, c, unix.SOL_SOCKET, unix.SO_DOMAIN); d != unix.AF_INET6 {
				t.Errorf("the socket's family is %d, want AF_INET6", d)
			}
		}
		if _, err := p.Dial(within(t), DialSpec{Remote: addrPort(b.Outside.V6, app.Port), V4Mapped: true}); err == nil {
			t.Error("an IPv6 address was taken for v4-mapped")
		}
	})
}

func sockopt(t *testing.T, c syscall.Conn, level, opt int) int {
	t.Helper()
	var v int
	err := control(c, func(fd int) error {
		var err error
		v, err = unix.GetsockoptInt(fd, level, opt)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestDialBindsThePort(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	app := serve(t, b.Outside, AppOptions{})
	families(t, b.Outside, func(t *testing.T, addr netip.Addr) {
		c, err := p.Dial(within(t), DialSpec{Remote: addrPort(addr, app.Port), Local: addrPort(own(p, addr), 4100)})
		if err != nil {
			t.Fatal(err)
		}
		closeAtEnd(t, c)
		id, err := ReadIdentity(c)
		if want := addrPort(own(p, addr), 4100); id.Peer != want || err != nil {
			t.Errorf("the app sees %s, %v, want %s", id.Peer, err, want)
		}
	})
}

func TestOnePortAgainAndAgainWhileThePeerClosesFirst(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	app := serve(t, b.Outside, AppOptions{CloseFirst: true})
	families(t, b.Outside, func(t *testing.T, addr netip.Addr) {
		spec := DialSpec{Remote: addrPort(addr, app.Port), Local: addrPort(netip.Addr{}, 4200)}
		for i := range 20 {
			var c *net.TCPConn
			eventually(t, "the port is free again", func() bool {
				var err error
				c, err = p.Dial(within(t), spec)
				if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
					t.Fatalf("connection %d: %v", i, err)
				}
				return err == nil
			})
			if _, err := ReadIdentity(c); err != nil {
				t.Fatalf("connection %d: %v", i, err)
			}
			if rest, err := io.ReadAll(c); len(rest) > 0 || err != nil {
				t.Fatalf("connection %d: the app sent %q, %v, and should have closed", i, rest, err)
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
		}
	})
	if n := app.Accepts(); n != 40 {
		t.Errorf("the app has accepted %d connections, want 40", n)
	}
}

func TestDialFastOpenCarriesDataInTheSYN(t *testing.T) {
	b := ForTest(t, Options{})
	app := serve(t, b.Outside, AppOptions{Listen: ListenOptions{FastOpen: true}})
	plain := serve(t, b.Outside, AppOptions{})
	for _, mode := range []FastOpen{FastOpenSendto, FastOpenConnect} {
		t.Run(mode.String(), func(t *testing.T) {
			// A pod of its own: a cookie that the other way has fetched must not serve this one.
			p := pod(t, b, mode.String(), PodOptions{})
			families(t, b.Outside, func(t *testing.T, addr netip.Addr) {
				spec := DialSpec{Remote: addrPort(addr, app.Port), FastOpen: mode, Data: []byte("in the SYN ")}
				for i, want := range []bool{false, true, true} {
					c, err := p.Dial(within(t), spec)
					if err != nil {
						t.Fatal(err)
					}
					closeAtEnd(t, c)
					if _, err := ReadIdentity(c); err != nil {
						t.Fatal(err)
					}
					if used, err := SynData(c); used != want || err != nil {
						t.Errorf("connection %d: data in the SYN is %v, %v, want %v", i, used, err, want)
					}
				}
				checkConnection(t, p, spec, own(p, addr))
				spec.Remote = addrPort(addr, plain.Port)
				checkConnection(t, p, spec, own(p, addr)) // the listener refuses the data, and gets it later
			})
			if _, err := p.Dial(within(t), DialSpec{Remote: addrPort(b.Outside.V4, app.Port), FastOpen: mode}); err == nil {
				t.Error("TCP Fast Open without data was accepted")
			}
		})
	}
}

func TestDialMPTCP(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	app, err := b.Outside.ServeApp(0, AppOptions{Listen: ListenOptions{MPTCP: true}})
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.ENOPROTOOPT) {
		t.Skipf("the kernel has no MPTCP (CONFIG_MPTCP, kernel 5.6; sysctl net.mptcp.enabled): %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	plain := serve(t, b.Outside, AppOptions{})
	families(t, b.Outside, func(t *testing.T, addr netip.Addr) {
		for _, c := range []struct {
			port   uint16
			client bool
			want   bool
		}{{app.Port, true, true}, {app.Port, false, false}, {plain.Port, true, false}} {
			spec := DialSpec{Remote: addrPort(addr, c.port), MPTCP: c.client}
			checkConnection(t, p, spec, own(p, addr))
			conn, err := p.Dial(within(t), spec)
			if err != nil {
				t.Fatal(err)
			}
			closeAtEnd(t, conn)
			if _, err := ReadIdentity(conn); err != nil {
				t.Fatal(err)
			}
			if used, err := conn.MultipathTCP(); used != c.want || err != nil {
				t.Errorf("%+v: MPTCP is used: %v, %v", c, used, err)
			}
		}
	})
	c, err := p.Dial(within(t), DialSpec{
		Remote: addrPort(b.Outside.V4, app.Port), V4Mapped: true, MPTCP: true, Local: addrPort(p.V4, 4300),
	})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, c)
	if id, err := ReadIdentity(c); id.Peer != addrPort(p.V4, 4300) || err != nil {
		t.Errorf("a v4-mapped MPTCP client with a bound source is %s, %v", id.Peer, err)
	}
}

func TestDialMarkIsSeenByTheRules(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	app := serve(t, b.Outside, AppOptions{})
	h, err := p.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	rule := netlink.NewRule()
	rule.Mark, rule.Type, rule.Priority = 0x77, unix.FR_ACT_UNREACHABLE, 100
	if err := h.RuleAdd(rule); err != nil {
		t.Fatal(err)
	}
	remote := addrPort(b.Outside.V4, app.Port)
	checkConnection(t, p, DialSpec{Remote: remote, Mark: 0x76}, p.V4)
	c, err := p.Dial(within(t), DialSpec{Remote: remote, Mark: 0x77})
	if err == nil {
		_ = c.Close()
	}
	if !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("with the mark of an unreachable rule: %v", err)
	}
}

func TestDialBindsToTheDevice(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	app := serve(t, b.Outside, AppOptions{})
	remote := addrPort(b.Outside.V4, app.Port)
	c, err := p.Dial(within(t), DialSpec{Remote: remote, BindToDevice: "eth0"})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, c)
	var device string
	err = control(c, func(fd int) error {
		var err error
		device, err = unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE)
		return err
	})
	if device != "eth0" || err != nil {
		t.Errorf("the socket is bound to %q, %v", device, err)
	}
	if _, err := p.Dial(within(t), DialSpec{Remote: remote, BindToDevice: "nosuch"}); !errors.Is(err, unix.ENODEV) {
		t.Errorf("bound to a device that is not there: %v", err)
	}
}

func TestDialTransparentTakesAForeignSource(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	app := serve(t, b.Outside, AppOptions{})
	for remote, foreign := range map[netip.Addr]netip.Addr{
		b.Outside.V4: netip.MustParseAddr("10.99.0.1"),
		b.Outside.V6: netip.MustParseAddr("fd00:99::1"),
	} {
		spec := DialSpec{Remote: addrPort(remote, app.Port), Local: addrPort(foreign, 0), Timeout: 100 * time.Millisecond}
		if _, err := p.Dial(within(t), spec); !errors.Is(err, unix.EADDRNOTAVAIL) {
			t.Errorf("from %s: %v", foreign, err)
		}
		// The SYN leaves, and no answer finds its way back.
		spec.Transparent = true
		if _, err := p.Dial(within(t), spec); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("from %s, transparent: %v", foreign, err)
		}
	}
}

func TestDialSaysWhyItFailed(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	families(t, b.Outside, func(t *testing.T, addr netip.Addr) {
		if _, err := p.Dial(within(t), DialSpec{Remote: addrPort(addr, 1)}); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a port without a listener: %v", err)
		}
	})
	// The neighbour is looked for in vain for longer than this.
	nobody := netip.MustParseAddrPort("10.88.0.99:1")
	if _, err := p.Dial(within(t), DialSpec{Remote: nobody, Timeout: 50 * time.Millisecond}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a host that is not there, with a timeout: %v", err)
	}
	why := errors.New("changed my mind")
	ctx, cancel := context.WithCancelCause(within(t))
	time.AfterFunc(50*time.Millisecond, func() { cancel(why) })
	if _, err := p.Dial(ctx, DialSpec{Remote: nobody}); !errors.Is(err, why) {
		t.Errorf("a host that is not there, cancelled: %v", err)
	}
	if _, err := p.Dial(ctx, DialSpec{Remote: nobody}); !errors.Is(err, why) {
		t.Errorf("cancelled before: %v", err)
	}
}

func TestManyConnectionsAtOnce(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	app := serve(t, b.Outside, AppOptions{})
	const count = 500
	conns := make([]*net.TCPConn, count)
	errs := make([]error, count)
	var wg sync.WaitGroup
	for i := range count {
		wg.Go(func() {
			conns[i], errs[i] = p.Dial(within(t), DialSpec{Remote: addrPort(own(b.Outside, []netip.Addr{p.V4, p.V6}[i%2]), app.Port)})
			if errs[i] == nil {
				_, errs[i] = ReadIdentity(conns[i])
			}
		})
	}
	wg.Wait()
	for i, c := range conns {
		if errs[i] != nil {
			t.Errorf("connection %d: %v", i, errs[i])
		}
		if c != nil {
			_ = c.Close()
		}
	}
	if n := app.Accepts(); n != count {
		t.Errorf("the app has accepted %d of %d connections", n, count)
	}
}

func TestListenOptions(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	for network, domain := range map[string]int{"tcp": unix.AF_INET6, "tcp4": unix.AF_INET, "tcp6": unix.AF_INET6} {
		l, err := p.Listen(network, 5001, ListenOptions{
			Backlog: 7, Transparent: true, Mark: 0x539, ReusePort: true, BindToDevice: "eth0",
		})
		if err != nil {
			t.Fatal(err)
		}
		for name, c := range map[string]struct{ level, opt, want int }{
			"family":      {unix.SOL_SOCKET, unix.SO_DOMAIN, domain},
			"protocol":    {unix.SOL_SOCKET, unix.SO_PROTOCOL, unix.IPPROTO_TCP},
			"mark":        {unix.SOL_SOCKET, unix.SO_MARK, 0x539},
			"reuseport":   {unix.SOL_SOCKET, unix.SO_REUSEPORT, 1},
			"transparent": {unix.SOL_IP, unix.IP_TRANSPARENT, 1},
		} {
			if got := sockopt(t, l, c.level, c.opt); got != c.want {
				t.Errorf("%s: %s is %d, want %d", network, name, got, c.want)
			}
		}
		err = control(l, func(fd int) error {
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			// For a listener this field holds the backlog.
			if err == nil && info.Sacked != 7 {
				t.Errorf("%s: the backlog is %d, want 7", network, info.Sacked)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
		same, err := p.Listen(network, 5001, ListenOptions{ReusePort: true, Mark: 1, BindToDevice: "eth0"})
		if err != nil {
			t.Errorf("%s: a second listener of the port: %v", network, err)
		} else if err := same.Close(); err != nil {
			t.Error(err)
		}
		if _, err := p.Listen(network, 5001, ListenOptions{BindToDevice: "eth0"}); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: a second listener that does not share: %v", network, err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := p.Listen("udp", 5002, ListenOptions{}); err == nil {
		t.Error("a TCP listener on udp was made")
	}
}

func TestListenFamilies(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	for network, want := range map[string][2]error{
		"tcp":  {nil, nil},
		"tcp4": {nil, unix.ECONNREFUSED},
		"tcp6": {unix.ECONNREFUSED, nil},
	} {
		app := serve(t, p, AppOptions{Network: network})
		for i, addr := range []netip.Addr{p.V4, p.V6} {
			c, err := b.Outside.Dial(within(t), DialSpec{Remote: addrPort(addr, app.Port)})
			if err == nil {
				_ = c.Close()
			}
			if !errors.Is(err, want[i]) {
				t.Errorf("an app on %s, dialled at %s: %v, want %v", network, addr, err, want[i])
			}
		}
	}
	app := serve(t, p, AppOptions{Listen: ListenOptions{Addr: p.V6}})
	checkConnection(t, b.Outside, DialSpec{Remote: addrPort(p.V6, app.Port)}, b.Outside.V6)
	if _, err := b.Outside.Dial(within(t), DialSpec{Remote: addrPort(p.V4, app.Port)}); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("an app on the IPv6 address, dialled at the other: %v", err)
	}
}

func TestReadIdentity(t *testing.T) {
	for _, line := range []string{"", "1.2.3.4:5", "1.2.3.4:5 6.7.8.9:0", "1.2.3.4:5 x\n", "x 1.2.3.4:5\n", "\n"} {
		if id, err := ReadIdentity(strings.NewReader(line)); err == nil {
			t.Errorf("%q was read as %v", line, id)
		}
	}
	r := strings.NewReader("1.2.3.4:5 [::1]:6\nrest")
	want := Identity{netip.MustParseAddrPort("1.2.3.4:5"), netip.MustParseAddrPort("[::1]:6")}
	if id, err := ReadIdentity(r); id != want || err != nil {
		t.Errorf("read %v, %v", id, err)
	}
	if rest, err := io.ReadAll(r); string(rest) != "rest" || err != nil {
		t.Errorf("behind the line there is %q, %v", rest, err)
	}
}
