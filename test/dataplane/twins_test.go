// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/test/bed"
)

// proxyListener is a listener as the proxy has it, but in the hands of the test.
func proxyListener(t *testing.T, pod *bed.NS, port uint16) *net.TCPListener {
	t.Helper()
	l, err := pod.Listen("tcp", port, bed.ListenOptions{Mark: 0x539, Transparent: true, ReusePort: true})
	if err != nil {
		t.Fatal(err)
	}
	_ = l.SetDeadline(time.Now().Add(5 * time.Second))
	return l
}

func accept(t *testing.T, l *net.TCPListener) *net.TCPConn {
	t.Helper()
	c, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	return c
}

func dial(t *testing.T, from *bed.NS, spec bed.DialSpec) *net.TCPConn {
	t.Helper()
	if spec.Timeout == 0 {
		spec.Timeout = 3 * time.Second
	}
	c, err := from.Dial(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	return c
}

// An inbound connection is two in one namespace, with the same addresses. The port that the proxy uses towards the app may be
// one from which the peer has, or makes, a connection of its own to the same app: each must stay what it is.
func TestAPeerAndTheProxyMayUseTheSamePort(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	n.serve(pod, 8080, bed.AppOptions{})
	inbound := proxyListener(t, pod, 15006)
	eachFamily(t, func(t *testing.T, family string) {
		app := netip.AddrPortFrom(addr(pod, family), 8080)
		peerAt := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(addr(n.Outside, family), port) }
		fromPeer := func(port uint16) {
			t.Helper()
			peer := dial(t, n.Outside, bed.DialSpec{Remote: app, Local: peerAt(port)})
			got := accept(t, inbound)
			if remote, err := bed.Peername(got); err != nil || remote != peerAt(port) {
				t.Errorf("the proxy has accepted %s, %v; want %s", remote, err, peerAt(port))
			}
			// What the peer sends comes to the proxy, and not to the app.
			if _, err := peer.Write([]byte("to the proxy")); err != nil {
				t.Error(err)
			}
			buf := make([]byte, 12)
			if _, err := got.Read(buf); err != nil || string(buf) != "to the proxy" {
				t.Errorf("the proxy has read %q, %v", buf, err)
			}
		}
		fromProxy := func(port uint16) {
			t.Helper()
			proxy := dial(t, pod, bed.DialSpec{Remote: app, Local: peerAt(port), Mark: 0x539, Transparent: true})
			id, err := bed.ReadIdentity(proxy)
			if err != nil || id.Peer != peerAt(port) || id.Local != app {
				t.Errorf("the app sees %+v, %v; want %s at %s", id, err, peerAt(port), app)
			}
			if err := echo(proxy, []byte("to the app")); err != nil {
				t.Error(err)
			}
		}
		fromProxy(41000)
		fromPeer(41000)
		// And the other way round.
		fromPeer(41001)
		fromProxy(41001)
	})
	if c := n.counters(pod); c.BindFailed > 0 || c.InboundSteered < 4 || c.ProxyToApp != 4 {
		t.Errorf("counters are %+v", c)
	}
}

// What the proxy sends to an app's connection that is gone must be answered to the proxy: the answer has the mark of what it
// answers, and with the proxy's mark it would leave the pod.
func TestTheProxyIsToldWhenAClientIsGone(t *testing.T) {
	n := newNode(t)
	pod := n.enrolledPod("pod")
	outbound := proxyListener(t, pod, 15001)
	eachFamily(t, func(t *testing.T, family string) {
		client := dial(t, pod, bed.DialSpec{Remote: netip.AddrPortFrom(addr(n.Outside, family), 8080)})
		got := accept(t, outbound)
		// In repair mode a socket closes without a word.
		raw, err := client.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if errControl := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_TCP, unix.TCP_REPAIR, 1) }); errControl != nil || err != nil {
			t.Fatal(errControl, err)
		}
		_ = client.Close()
		if _, err := got.Write([]byte("anybody there?")); err != nil {
			t.Fatal(err)
		}
		if _, err := got.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("the proxy reads %v, want a reset", err)
		}
	})
	if c := n.counters(pod); c.InboundSteered > 0 {
		t.Errorf("counters are %+v", c)
	}
}

// Of the proxy's connections to the app as one client, each has a port of its own. The kernel must know that they are all bound
// to lo when it chooses, or it gives a port away twice, and the older connection is dead.
func TestTheProxyTakesNoPortTwice(t *testing.T) {
	n := newNode(t)
	n.startProxy()
	pod := n.enrolledPod("pod")
	n.serve(pod, 8080, bed.AppOptions{})
	// Few ports, of which old connections hold some.
	if err := pod.SetSysctl("net.ipv4.ip_local_port_range", "40000 40089"); err != nil {
		t.Fatal(err)
	}
	eachFamily(t, func(t *testing.T, family string) {
		remote := netip.AddrPortFrom(addr(pod, family), 8080)
		var old []net.Conn
		for range 12 {
			c, err := n.Outside.Dial(t.Context(), bed.DialSpec{Remote: remote})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			_ = c.SetDeadline(time.Now().Add(2 * patience))
			if _, err := bed.ReadIdentity(c); err != nil {
				t.Fatal(err)
			}
			old = append(old, c)
		}
		for range 45 {
			if err := exchange(n.Outside, remote); err != nil {
				t.Fatal(err)
			}
		}
		for _, c := range old {
			_ = c.SetDeadline(time.Now().Add(patience / 5))
			if err := echo(c, []byte("still there")); err != nil {
				t.Errorf("%s to %s: %v", c.LocalAddr(), c.RemoteAddr(), err)
			}
		}
	})
}
