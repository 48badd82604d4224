// SPDX-License-Identifier: Apache-2.0

package hostprobe_test

import (
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/redirector-dataplane/redirector/pkg/hostprobe"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

func TestAddressesThatParse(t *testing.T) {
	for _, s := range []string{"169.254.7.127", "10.0.0.1", "100.64.0.1", "0.0.0.1"} {
		if a, err := hostprobe.ParseV4(s); err != nil || a.String() != s {
			t.Errorf("ParseV4(%q) = %v, %v", s, a, err)
		}
	}
	for _, s := range []string{"fd16:9254:7127:1337:ffff:ffff:ffff:ffff", "2001:db8::", "64:ff9b::1"} {
		if a, err := hostprobe.ParseV6(s); err != nil || a.String() != s {
			t.Errorf("ParseV6(%q) = %v, %v", s, a, err)
		}
	}
}

func TestAddressesThatCannotBeAProbesSource(t *testing.T) {
	parsers := map[string]func(string) (netip.Addr, error){"ParseV4": hostprobe.ParseV4, "ParseV6": hostprobe.ParseV6}
	for _, c := range []struct{ parser, address, words string }{
		{"ParseV4", "", "is not an IP address"},
		{"ParseV4", "node", "is not an IP address"},
		{"ParseV4", "10.0.0.300", "is not an IP address"},
		{"ParseV4", "10.0.0.1/24", "is not an IP address"},
		{"ParseV4", "10.0.0.1:80", "is not an IP address"},
		{"ParseV4", " 10.0.0.1", "is not an IP address"},
		{"ParseV4", "fd00::1", "is an IPv6 address: use an IPv4 address, as 169.254.7.127"},
		{"ParseV4", "::ffff:10.0.0.1", "is a v4-mapped address"},
		{"ParseV4", "239.1.2.3", "is a multicast address"},
		{"ParseV4", "0.0.0.0", "cannot be the source of a probe"},
		{"ParseV4", "127.1.2.3", "cannot be the source of a probe"},
		{"ParseV4", "255.255.255.255", "cannot be the source of a probe"},
		{"ParseV6", "", "is not an IP address"},
		{"ParseV6", "fd00::1%eth0", "is not an IP address"},
		{"ParseV6", "[fd00::1]", "is not an IP address"},
		{"ParseV6", "10.0.0.1", "is an IPv4 address: use an IPv6 address, as fd16:9254:7127:1337:ffff:ffff:ffff:ffff"},
		{"ParseV6", "::ffff:10.0.0.1", "is a v4-mapped address"},
		{"ParseV6", "ff05::1", "is a multicast address"},
		{"ParseV6", "::", "cannot be the source of a probe"},
		{"ParseV6", "::1", "cannot be the source of a probe"},
		{"ParseV6", "fe80::1", "is an IPv6 link-local address"},
	} {
		_, err := parsers[c.parser](c.address)
		if err == nil || !strings.Contains(err.Error(), c.words) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s(%q) says %v, want one line with %q", c.parser, c.address, err, c.words)
		}
	}
}

func snapshot(t *testing.T, ns *bed.NS) string {
	t.Helper()
	s, err := ns.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func wantUnchanged(t *testing.T, before string, ns *bed.NS) {
	t.Helper()
	if d := cmp.Diff(before, snapshot(t, ns)); d != "" {
		t.Errorf("netns %s is not as it was (-was +is):\n%s", ns.Name, d)
	}
}

// onLoopback are the addresses of lo that are no loopback addresses.
func onLoopback(t *testing.T, ns *bed.NS) []netip.Addr {
	t.Helper()
	h, err := ns.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	list, err := h.AddrList(lo, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	var all []netip.Addr
	for _, a := range list {
		ip, _ := netip.AddrFromSlice(a.IP)
		if ip = ip.Unmap(); !ip.IsLoopback() {
			all = append(all, ip)
		}
		if ones, bits := a.Mask.Size(); !ip.IsLoopback() && ones != bits {
			t.Errorf("%s has a prefix of %d of %d bits", ip, ones, bits)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

func TestAddAndRemove(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	before := snapshot(t, b.Node)
	for range 2 {
		for range 2 { // the second time, both are there
			err := b.Node.Do(func() error {
				got, err := hostprobe.Add(hostprobe.Defaults)
				if got != hostprobe.Defaults {
					t.Errorf("Add returns %v", got)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := onLoopback(t, b.Node); !slices.Equal(got, []netip.Addr{hostprobe.Defaults.V4, hostprobe.Defaults.V6}) {
				t.Errorf("lo has %v", got)
			}
		}
		for range 2 { // the second time, neither is there
			if err := b.Node.Do(func() error { return hostprobe.Remove(hostprobe.Defaults) }); err != nil {
				t.Fatal(err)
			}
			wantUnchanged(t, before, b.Node)
		}
	}
}

func TestOneFamilyOnly(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	for _, want := range []hostprobe.Addrs{{V4: hostprobe.Defaults.V4}, {V6: hostprobe.Defaults.V6}, {}} {
		before := snapshot(t, b.Node)
		err := b.Node.Do(func() error {
			got, err := hostprobe.Add(want)
			if got != want {
				t.Errorf("Add returns %v, want %v", got, want)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		var addrs []netip.Addr
		for _, a := range []netip.Addr{want.V4, want.V6} {
			if a.IsValid() {
				addrs = append(addrs, a)
			}
		}
		if got := onLoopback(t, b.Node); !slices.Equal(got, addrs) {
			t.Errorf("lo has %v, want %v", got, addrs)
		}
		if err := b.Node.Do(func() error { return hostprobe.Remove(want) }); err != nil {
			t.Fatal(err)
		}
		wantUnchanged(t, before, b.Node)
	}
}

// The IPv4 address alone is taken, the IPv6 one would be free, and the other way round: neither is added.
func TestAnAddressOfAnotherInterfaceIsNotTaken(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	before := snapshot(t, b.Node)
	for _, want := range []hostprobe.Addrs{
		{V4: b.Node.V4, V6: hostprobe.Defaults.V6},
		{V4: hostprobe.Defaults.V4, V6: b.Node.V6},
	} {
		err := b.Node.Do(func() error {
			_, err := hostprobe.Add(want)
			return err
		})
		if err == nil || !strings.Contains(err.Error(), "already belongs to eth0") {
			t.Errorf("Add(%v) says %v", want, err)
		}
		wantUnchanged(t, before, b.Node)
		// Nor is it removed.
		if err := b.Node.Do(func() error { return hostprobe.Remove(want) }); err != nil {
			t.Error(err)
		}
		wantUnchanged(t, before, b.Node)
	}
}

func TestAHostWithoutIPv6(t *testing.T) {
	b := bed.ForTest(t, bed.Options{})
	host, err := b.Pod("host", bed.PodOptions{V6Disabled: true})
	if err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, host)
	err = host.Do(func() error {
		got, err := hostprobe.Add(hostprobe.Defaults)
		if got != (hostprobe.Addrs{V4: hostprobe.Defaults.V4}) {
			t.Errorf("Add returns %v", got)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := onLoopback(t, host); !slices.Equal(got, []netip.Addr{hostprobe.Defaults.V4}) {
		t.Errorf("lo has %v", got)
	}
	if err := host.Do(func() error { return hostprobe.Remove(hostprobe.Defaults) }); err != nil {
		t.Fatal(err)
	}
	wantUnchanged(t, before, host)
}

// An address that is taken away is put back, and found where it is among those of other interfaces.
func TestAnAddressThatIsGoneIsAddedAgain(t *testing.T) {
	for _, gone := range []hostprobe.Addrs{{V4: hostprobe.Defaults.V4}, {V6: hostprobe.Defaults.V6}} {
		b := bed.ForTest(t, bed.Options{})
		add := func() error {
			_, err := hostprobe.Add(hostprobe.Defaults)
			return err
		}
		if err := b.Node.Do(add); err != nil {
			t.Fatal(err)
		}
		if err := b.Node.Do(func() error { return hostprobe.Remove(gone) }); err != nil {
			t.Fatal(err)
		}
		if got := onLoopback(t, b.Node); len(got) != 1 {
			t.Fatalf("lo has %v, want one of them", got)
		}
		if err := b.Node.Do(add); err != nil {
			t.Fatal(err)
		}
		if got := onLoopback(t, b.Node); !slices.Equal(got, []netip.Addr{hostprobe.Defaults.V4, hostprobe.Defaults.V6}) {
			t.Errorf("lo has %v", got)
		}
	}
}
