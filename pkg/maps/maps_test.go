// SPDX-License-Identifier: Apache-2.0

package maps_test

import (
	"errors"
	"fmt"
	gomaps "maps"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/redirector-dataplane/redirector/pkg/loader"
	"github.com/redirector-dataplane/redirector/pkg/maps"
	"github.com/redirector-dataplane/redirector/test/bed"
)

// The main thread stays where it is, for /proc/self to mean the host.
func init() { runtime.LockOSThread() }

// open returns the maps of a dataplane of the test's own.
func open(t *testing.T) *maps.Maps {
	t.Helper()
	b := bed.ForTest(t, bed.Options{})
	d, err := loader.Open(loader.Options{BPFFS: b.BPFFS, Cgroup: b.Cgroup})
	if _, lacks := errors.AsType[*loader.FeatureError](err); lacks {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d.Maps()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantTargets(t *testing.T, m *maps.Maps, want map[netip.Addr]maps.ProbeTarget) {
	t.Helper()
	got, err := m.ProbeTargets()
	if err != nil || !gomaps.Equal(got, want) {
		t.Errorf("the targets are %v, %v; want %v", got, err, want)
	}
}

func TestAProbeTargetBelongsToThePodThatTookItLast(t *testing.T) {
	m := open(t)
	old, young := maps.ProbeTarget{NetNSCookie: 1, UID: "old"}, maps.ProbeTarget{NetNSCookie: 2, UID: "young"}
	for _, a := range []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")} {
		only := func(owner maps.ProbeTarget) map[netip.Addr]maps.ProbeTarget {
			return map[netip.Addr]maps.ProbeTarget{a: owner}
		}
		must(t, m.PutProbeTarget(a, old))
		wantTargets(t, m, only(old))
		must(t, m.DeleteProbeTarget(a, "young")) // not yet its own
		wantTargets(t, m, only(old))

		must(t, m.PutProbeTarget(a, young))
		wantTargets(t, m, only(young))
		keep(t, m, a, old, false) // it is another's by now
		wantTargets(t, m, only(young))
		must(t, m.DeleteProbeTarget(a, "old"))
		wantTargets(t, m, only(young))

		must(t, m.DeleteProbeTarget(a, "young"))
		wantTargets(t, m, nil)
		must(t, m.DeleteProbeTarget(a, "young"))
		keep(t, m, a, old, true) // nobody's
		wantTargets(t, m, only(old))
		must(t, m.DeleteProbeTarget(a, "old"))
		wantTargets(t, m, nil)
	}
}

func keep(t *testing.T, m *maps.Maps, a netip.Addr, target maps.ProbeTarget, want bool) {
	t.Helper()
	made, err := m.KeepProbeTarget(a, target)
	must(t, err)
	if made != want {
		t.Errorf("KeepProbeTarget(%s) says %t, want %t", a, made, want)
	}
}

// The owner is told by the whole UID, up to the longest that there is.
func TestUIDsThatAreNearlyTheSame(t *testing.T) {
	m := open(t)
	a := netip.MustParseAddr("10.0.0.1")
	long := strings.Repeat("u", maps.UIDMax)
	for _, c := range [][2]string{{long, long[1:]}, {long[1:], long}, {"pod-1", "pod-10"}, {"pod-10", "pod-1"}, {"pod", "POD"}} {
		owner := maps.ProbeTarget{NetNSCookie: 1, UID: c[0]}
		must(t, m.PutProbeTarget(a, owner))
		must(t, m.DeleteProbeTarget(a, c[1]))
		wantTargets(t, m, map[netip.Addr]maps.ProbeTarget{a: owner})
		must(t, m.DeleteProbeTarget(a, c[0]))
		wantTargets(t, m, nil)
	}
}

// An IPv4 address and its v4-mapped form are one address of one pod.
func TestAV4MappedAddressIsTheIPv4Address(t *testing.T) {
	m := open(t)
	owner := maps.ProbeTarget{NetNSCookie: 1, UID: "pod"}
	v4, mapped := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("::ffff:10.0.0.1")
	must(t, m.PutProbeTarget(mapped, owner))
	wantTargets(t, m, map[netip.Addr]maps.ProbeTarget{v4: owner})
	must(t, m.DeleteProbeTarget(v4, "pod"))
	wantTargets(t, m, nil)
}

func TestTheConfigComesBackAsItWasPut(t *testing.T) {
	m := open(t)
	if c, err := m.Config(); err != nil || c != (maps.Config{}) {
		t.Errorf("of a new dataplane it is %+v, %v", c, err)
	}
	for _, c := range []maps.Config{
		{
			HostNetNSCookie: 1<<63 + 1,
			ProbeSource:     maps.ProbeSourceKubelet,
			ProbeIdentity:   maps.ProbeIdentityFlow,
			ProxyIdentity:   maps.ProxyIdentityMark,
			ProbeV4:         netip.MustParseAddr("169.254.7.127"),
			ProbeV6:         netip.MustParseAddr("fd00:7::"),
		},
		{ProbeSource: maps.ProbeSourceHost, ProbeV6: netip.MustParseAddr("::7")},
		{ProbeV4: netip.MustParseAddr("0.0.0.7")},
		{},
	} {
		must(t, m.SetConfig(c))
		if got, err := m.Config(); err != nil || got != c {
			t.Errorf("the config is %+v, %v; want %+v", got, err, c)
		}
	}
}

func TestCgroupRoles(t *testing.T) {
	m := open(t)
	want := map[uint64]maps.CgroupRole{1: maps.CgroupPods, 1<<40 + 1: maps.CgroupProxy, 3: maps.CgroupKubelet}
	for id, role := range want {
		must(t, m.PutCgroup(id, role))
	}
	if got, err := m.Cgroups(); err != nil || !gomaps.Equal(got, want) {
		t.Errorf("the roles are %v, %v; want %v", got, err, want)
	}
	must(t, m.PutCgroup(1, maps.CgroupProxy))
	must(t, m.DeleteCgroup(3))
	must(t, m.DeleteCgroup(3))
	want = map[uint64]maps.CgroupRole{1: maps.CgroupProxy, 1<<40 + 1: maps.CgroupProxy}
	if got, err := m.Cgroups(); err != nil || !gomaps.Equal(got, want) {
		t.Errorf("the roles are %v, %v; want %v", got, err, want)
	}
}

func TestExceptions(t *testing.T) {
	m := open(t)
	prefix := netip.MustParsePrefix
	want := map[uint64]maps.Exceptions{
		7: {
			Values: map[maps.Exception]bool{
				{Kind: maps.ExceptionOutboundPort, Value: 25}: true, {Kind: maps.ExceptionInboundPort, Value: 65535}: true,
				{Kind: maps.ExceptionInterface, Value: 1 << 20}: true,
			},
			CIDRs: map[netip.Prefix]bool{
				prefix("0.0.0.0/0"): true, prefix("10.0.0.0/8"): false, prefix("10.1.2.3/32"): true,
				prefix("::/0"): false, prefix("fd00::/8"): true, prefix("fd00::1/128"): false,
			},
		},
		1<<40 + 1: {
			Values: map[maps.Exception]bool{{Kind: maps.ExceptionOutboundPort, Value: 25}: true},
			CIDRs:  map[netip.Prefix]bool{prefix("10.0.0.0/8"): true},
		},
	}
	check := func() {
		t.Helper()
		got, err := m.Exceptions()
		if err != nil || !gomaps.EqualFunc(got, want, maps.Exceptions.Equal) {
			t.Errorf("the maps have %+v, %v; want %+v", got, err, want)
		}
	}
	for cookie, e := range want {
		must(t, m.SetExceptions(cookie, maps.Exceptions{}, e))
	}
	check()
	next := maps.Exceptions{
		Values: map[maps.Exception]bool{{Kind: maps.ExceptionOutboundPort, Value: 26}: true},
		CIDRs:  map[netip.Prefix]bool{prefix("10.0.0.0/8"): true, prefix("fd00::/8"): true},
	}
	must(t, m.SetExceptions(7, want[7], next))
	want[7] = next
	check()
	must(t, m.SetExceptions(7, next, maps.Exceptions{}))
	must(t, m.SetExceptions(7, next, maps.Exceptions{})) // of what is gone
	delete(want, 7)
	check()
}

func TestAFullTrieSaysSo(t *testing.T) {
	m := open(t)
	limit := m.RedirectorMaps.Cidrs.MaxEntries()
	for i := range limit {
		must(t, m.PutCIDR(uint64(i), netip.MustParsePrefix("10.0.0.0/8"), true))
	}
	err := m.PutCIDR(uint64(limit), netip.MustParsePrefix("10.0.0.0/8"), true)
	if err == nil || !strings.Contains(err.Error(), "full") || !strings.Contains(err.Error(), "10.0.0.0/8") {
		t.Errorf("the entry after the last gets %v", err)
	}
}

func TestAFullMapSaysSo(t *testing.T) {
	m := open(t)
	limit := m.RedirectorMaps.Cgroups.MaxEntries()
	for id := range uint64(limit) {
		must(t, m.PutCgroup(id+1, maps.CgroupPods))
	}
	err := m.PutCgroup(uint64(limit)+1, maps.CgroupPods)
	if err == nil || !strings.Contains(err.Error(), "full") || !strings.Contains(err.Error(), fmt.Sprint(limit+1)) {
		t.Errorf("the entry after the last gets %v", err)
	}
}

// More entries than are fetched at once, and each map that can be full is there.
func TestUsageCountsTheEntriesOfAllMapsThatCanBeFull(t *testing.T) {
	m := open(t)
	for i := range 700 {
		must(t, m.PutOwnAddr(uint64(i%7), netip.AddrFrom4([4]byte{10, 0, byte(i / 256), byte(i)}), 2))
	}
	for id := range uint64(3) {
		_, err := m.CreateCounters(id + 1)
		must(t, err)
	}
	usage := func() map[string]maps.Usage {
		all := map[string]maps.Usage{}
		usages, err := m.Usage()
		must(t, err)
		for _, u := range usages {
			all[u.Map] = u
		}
		return all
	}
	before := usage()
	if got, want := before["own_addrs"], (maps.Usage{Map: "own_addrs", Entries: 700, Capacity: int(m.RedirectorMaps.OwnAddrs.MaxEntries())}); got != want {
		t.Errorf("own_addrs: %+v, want %+v", got, want)
	}
	if got := before["counters"].Entries; got != 3 {
		t.Errorf("counters has %d entries, want 3", got)
	}
	must(t, m.DeleteOwnAddr(0, netip.MustParseAddr("10.0.0.0")))
	if got := usage()["own_addrs"].Entries; got != 699 {
		t.Errorf("own_addrs has %d entries after one was removed, want 699", got)
	}
	all := reflect.ValueOf(m.RedirectorMaps)
	found := 0
	for _, field := range all.Fields() {
		bpfMap, ok := reflect.TypeAssert[*ebpf.Map](field)
		if !ok || !slices.Contains([]ebpf.MapType{ebpf.Hash, ebpf.LRUHash, ebpf.PerCPUHash, ebpf.SockHash, ebpf.LPMTrie}, bpfMap.Type()) {
			continue
		}
		found++
		info, err := bpfMap.Info()
		must(t, err)
		if _, ok := before[info.Name]; !ok {
			t.Errorf("map %s can be full, and its usage is not known", info.Name)
		}
	}
	if found != len(before) {
		t.Errorf("the usage of %d maps is known, %d can be full", len(before), found)
	}
}
