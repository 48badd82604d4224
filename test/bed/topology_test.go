// SPDX-License-Identifier: Apache-2.0

package bed

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// newBed is ForTest, but skips when the kernel has no bridges.
func newBed(t *testing.T, opts Options) *Bed {
	t.Helper()
	b, err := New(opts)
	if opts.Bridge && errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("the kernel has no bridges: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func TestEveryNamespaceReachesEveryOtherWithoutNAT(t *testing.T) {
	for _, opts := range []Options{{}, {Bridge: true}} {
		t.Run(fmt.Sprintf("bridge=%v", opts.Bridge), func(t *testing.T) {
			b := newBed(t, opts)
			all := []*NS{b.Node, b.Outside, pod(t, b, "a", PodOptions{}), pod(t, b, "b", PodOptions{})}
			for _, server := range all {
				app := serve(t, server, AppOptions{})
				for _, client := range all {
					for _, at := range []netip.Addr{server.V4, server.V6} {
						// Node has an address on each of its links and uses the nearest.
						var source netip.Addr
						if client != b.Node || server == b.Outside || server == client {
							source = client.V4
							if at.Is6() {
								source = client.V6
							}
						}
						checkConnection(t, client, DialSpec{Remote: addrPort(at, app.Port)}, source)
					}
				}
			}
		})
	}
}

// checkConnection dials an App, checks that both sides agree on who is who and that data passes, and closes. The source is
// not checked when it is the zero Addr.
func checkConnection(t *testing.T, client *NS, spec DialSpec, source netip.Addr) {
	t.Helper()
	c, err := client.Dial(within(t), spec)
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	id, err := ReadIdentity(c)
	if err != nil {
		t.Errorf("%s to %s: %v", client.Name, spec.Remote, err)
		return
	}
	local, err := Sockname(c)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := Peername(c)
	if err != nil {
		t.Fatal(err)
	}
	if peer != spec.Remote {
		t.Errorf("%s to %s: getpeername is %s", client.Name, spec.Remote, peer)
	}
	if want := (Identity{Peer: local, Local: peer}); id != want {
		t.Errorf("%s to %s: the app sees %v, the client %v", client.Name, spec.Remote, id, want)
	}
	if source.IsValid() && id.Peer.Addr() != source {
		t.Errorf("%s to %s: the app sees source %s, want %s", client.Name, spec.Remote, id.Peer, source)
	}
	sent := string(spec.Data)
	if _, err := io.WriteString(c, "and this"); err != nil {
		t.Errorf("%s to %s: %v", client.Name, spec.Remote, err)
	}
	sent += "and this"
	if err := c.CloseWrite(); err != nil {
		t.Errorf("%s to %s: %v", client.Name, spec.Remote, err)
	}
	echo, err := io.ReadAll(c)
	if string(echo) != sent || err != nil {
		t.Errorf("%s to %s: sent %q, got back %q, %v", client.Name, spec.Remote, sent, echo, err)
	}
}

func TestPodOptions(t *testing.T) {
	b := ForTest(t, Options{})
	app := serve(t, b.Outside, AppOptions{})
	outside4, outside6 := addrPort(b.Outside.V4, app.Port), addrPort(b.Outside.V6, app.Port)
	loopback4 := netip.MustParseAddrPort("127.0.0.1:1")
	loopback6 := netip.MustParseAddrPort("[::1]:1")
	for name, c := range map[string]struct {
		opts   PodOptions
		v4, v6 bool
		errs   map[netip.AddrPort]error // of a Dial
	}{
		"plain": {PodOptions{}, true, true, map[netip.AddrPort]error{
			outside4: nil, outside6: nil, loopback4: unix.ECONNREFUSED, loopback6: unix.ECONNREFUSED,
		}},
		"v4only": {PodOptions{V4Only: true}, true, false, map[netip.AddrPort]error{
			outside4: nil, outside6: unix.ENETUNREACH, loopback6: unix.ECONNREFUSED,
		}},
		"v6only": {PodOptions{V6Only: true}, false, true, map[netip.AddrPort]error{
			outside4: unix.ENETUNREACH, outside6: nil, loopback4: unix.ECONNREFUSED,
		}},
		"v6disabled": {PodOptions{V6Disabled: true}, true, false, map[netip.AddrPort]error{
			outside4: nil, loopback4: unix.ECONNREFUSED, loopback6: unix.EADDRNOTAVAIL,
		}},
		"lodown": {PodOptions{LoDown: true}, true, true, map[netip.AddrPort]error{
			outside4: nil, outside6: nil,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod(t, b, name, c.opts)
			if p.V4.IsValid() != c.v4 || p.V6.IsValid() != c.v6 {
				t.Errorf("the pod has the addresses %s and %s", p.V4, p.V6)
			}
			var lo net.Flags
			err := p.Do(func() error {
				l, err := net.InterfaceByName("lo")
				if err == nil {
					lo = l.Flags
				}
				return err
			})
			if up := lo&net.FlagUp != 0; up == c.opts.LoDown || err != nil {
				t.Errorf("lo is up: %v, %v", up, err)
			}
			for remote, want := range c.errs {
				conn, err := p.Dial(within(t), DialSpec{Remote: remote})
				if err == nil {
					_ = conn.Close()
				}
				if !errors.Is(err, want) {
					t.Errorf("dial %s: %v, want %v", remote, err, want)
				}
			}
		})
	}
}

func TestPodRefusesWhatCannotBe(t *testing.T) {
	b := ForTest(t, Options{})
	pod(t, b, "a", PodOptions{})
	for _, name := range []string{"", "a", "node", "outside", "a/b", "..", "A", "a-"} {
		if _, err := b.Pod(name, PodOptions{}); err == nil {
			t.Errorf("a pod named %q was made", name)
		}
	}
	if _, err := b.Pod("c", PodOptions{V4Only: true, V6Only: true}); err == nil {
		t.Error("a pod without addresses was made")
	}
}

func TestRemovedPodIsGone(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	other := pod(t, b, "b", PodOptions{})
	waitGone := watchNetns(t, b.Outside, 100, p)
	if err := b.RemovePod(p); err != nil {
		t.Fatal(err)
	}
	waitGone()
	if err := b.RemovePod(p); err == nil {
		t.Error("a pod was removed twice")
	}
	if err := b.RemovePod(b.Node); err == nil {
		t.Error("Node was removed")
	}
	again := pod(t, b, "a", PodOptions{})
	app := serve(t, again, AppOptions{})
	checkConnection(t, other, DialSpec{Remote: addrPort(again.V4, app.Port)}, other.V4)
}

func TestNamespaceIdentity(t *testing.T) {
	b := ForTest(t, Options{})
	p := pod(t, b, "a", PodOptions{})
	var st unix.Stat_t
	err := p.Do(func() error { return unix.Stat(threadNetns, &st) })
	if err != nil {
		t.Fatal(err)
	}
	if st.Ino != p.Inode {
		t.Errorf("Inode is %d, Do runs in %d", p.Inode, st.Ino)
	}
	if p.Cookie == 0 {
		t.Skip("the kernel does not tell the netns cookie (SO_NETNS_COOKIE, kernel 5.14)")
	}
	seen := map[uint64]string{0: "no namespace"}
	for _, ns := range []*NS{b.Node, b.Outside, p} {
		if other, ok := seen[ns.Cookie]; ok {
			t.Errorf("%s has the cookie %d of %s", ns.Name, ns.Cookie, other)
		}
		seen[ns.Cookie] = ns.Name
	}
}

func TestSysctlIsTheNamespacesOwn(t *testing.T) {
	b := ForTest(t, Options{})
	a, other := pod(t, b, "a", PodOptions{}), pod(t, b, "b", PodOptions{})
	const name = "net.ipv4.tcp_syncookies"
	before, err := other.Sysctl(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.SetSysctl(name, "2"); err != nil {
		t.Fatal(err)
	}
	if got, err := a.Sysctl("net/ipv4/tcp_syncookies"); got != "2" || err != nil {
		t.Errorf("after setting it to 2 it is %q, %v", got, err)
	}
	if got, err := other.Sysctl(name); got != before || err != nil {
		t.Errorf("the other pod's went from %q to %q, %v", before, got, err)
	}
	if err := a.SetSysctl("net.ipv4.no_such", "1"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("setting an unknown sysctl: %v", err)
	}
}
