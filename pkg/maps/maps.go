// SPDX-License-Identifier: Apache-2.0

// Package maps gives typed access to the dataplane's BPF maps. Nothing else in user space knows their layout, which comes
// from the C types by bpf2go. What writes to which map:
//
//	pods, own_addrs   user space; programs read
//	exceptions, cidrs user space; programs read
//	counters          user space makes and removes entries; programs count
//	listeners         the sock_ops program; user space looks, and clears after a pod has left
//	admitted          the sock_ops program
//	machines          the programs of pods
//	probe_targets     user space; programs read
//	config, cgroups   user space; programs read
//	sockets           the cgroup programs; user space, for what the proxy had before these were there
package maps

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"unicode"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
)

// The ports that the node proxy listens on in each pod, as in bpf/redirector.h.
const (
	PortOutbound = 15001 // what the pod's apps send
	PortInbound  = 15006 // what peers send in plain
	PortHBONE    = 15008 // the mesh tunnel
	PortDNS      = 15053 // what its apps ask of DNS servers, on loopback
)

// The slots of the listeners map, as in bpf/redirector.h.
const (
	slotNewestV4  = 0
	slotNewestV6  = 1
	slotFirst     = 2
	listenerSlots = 8
)

// UIDMax is the length of the longest pod UID that the pods map holds, in bytes.
const UIDMax = len(bpf.RedirectorPod{}.Uid) - 1

// Maps are the open maps of the dataplane. Its methods may be called from several goroutines.
type Maps struct {
	bpf.RedirectorMaps
}

// Pod is what the programs and an agent that starts anew know about an enrolled pod.
type Pod struct {
	UID        string // at most UIDMax bytes
	NetNSInode uint64 // as in /proc/PID/ns/net
	Interface  string // the one besides lo; empty if there is none, or if there are several
	// Exit is the interface that the proxy's connections out are bound to, for a route would lead them back into the pod;
	// empty if none does.
	Exit    string
	Restore Restore // what to undo when the pod leaves

	BypassInbound bool // peers' connections go to the app, not to the proxy
	DNSCapture    bool // DNS queries go to the proxy
	HasExceptions bool // there are entries in maps exceptions or cidrs to look for
}

// Restore names the sysctls that were 0 before enrolment, and that must be 0 again after it.
type Restore struct {
	TCPFwmarkAccept bool // net.ipv4.tcp_fwmark_accept
	FwmarkReflect   bool // net.ipv4.fwmark_reflect
	FwmarkReflectV6 bool // net.ipv6.fwmark_reflect
}

// PutPod makes or changes the entry of the pod whose network namespace has that cookie. From then on it is captured.
func (m *Maps) PutPod(cookie uint64, pod Pod) error {
	if len(pod.UID) > UIDMax {
		return fmt.Errorf("pod UID %q is longer than %d bytes", pod.UID, UIDMax)
	}
	value := bpf.RedirectorPod{
		NetnsIno:               pod.NetNSInode,
		RestoreTcpFwmarkAccept: bit(pod.Restore.TCPFwmarkAccept),
		RestoreFwmarkReflect:   bit(pod.Restore.FwmarkReflect),
		RestoreFwmarkReflectV6: bit(pod.Restore.FwmarkReflectV6),
		BypassInbound:          bit(pod.BypassInbound),
		DnsCapture:             bit(pod.DNSCapture),
		HasExceptions:          bit(pod.HasExceptions),
	}
	putString(value.Uid[:], pod.UID)
	putString(value.Ifname[:], pod.Interface)
	putString(value.ExitIfname[:], pod.Exit)
	if err := m.RedirectorMaps.Pods.Put(bpf.RedirectorNetnsKey{NetnsCookie: cookie}, value); err != nil {
		return fmt.Errorf("map pods: put %d: %w", cookie, explain(err))
	}
	return nil
}

// Pod looks up the entry of a network namespace; the error wraps ebpf.ErrKeyNotExist when there is none.
func (m *Maps) Pod(cookie uint64) (Pod, error) {
	var value bpf.RedirectorPod
	if err := m.RedirectorMaps.Pods.Lookup(bpf.RedirectorNetnsKey{NetnsCookie: cookie}, &value); err != nil {
		return Pod{}, fmt.Errorf("map pods: look up %d: %w", cookie, err)
	}
	return podOf(&value), nil
}

// DeletePod switches capture off for a network namespace. That there is no entry is no error.
func (m *Maps) DeletePod(cookie uint64) error {
	return drop(m.RedirectorMaps.Pods, bpf.RedirectorNetnsKey{NetnsCookie: cookie})
}

// Pods returns all entries by netns cookie.
func (m *Maps) Pods() (map[uint64]Pod, error) {
	all := map[uint64]Pod{}
	err := each(m.RedirectorMaps.Pods, func(key *bpf.RedirectorNetnsKey, value *bpf.RedirectorPod) {
		all[key.NetnsCookie] = podOf(value)
	})
	if err != nil {
		return nil, fmt.Errorf("map pods: iterate: %w", err)
	}
	return all, nil
}

func podOf(value *bpf.RedirectorPod) Pod {
	return Pod{
		UID:        stringOf(value.Uid[:]),
		NetNSInode: value.NetnsIno,
		Interface:  stringOf(value.Ifname[:]),
		Exit:       stringOf(value.ExitIfname[:]),
		Restore: Restore{
			TCPFwmarkAccept: value.RestoreTcpFwmarkAccept != 0,
			FwmarkReflect:   value.RestoreFwmarkReflect != 0,
			FwmarkReflectV6: value.RestoreFwmarkReflectV6 != 0,
		},
		BypassInbound: value.BypassInbound != 0,
		DNSCapture:    value.DnsCapture != 0,
		HasExceptions: value.HasExceptions != 0,
	}
}

// putString writes a string that fits, with a NUL behind it.
func putString(to []int8, s string) {
	for i := range min(len(s), len(to)-1) {
		to[i] = int8(s[i])
	}
}

func stringOf(from []int8) string {
	var s strings.Builder
	for _, c := range from {
		if c == 0 {
			break
		}
		s.WriteByte(byte(c))
	}
	return s.String()
}

// PutOwnAddr notes an address of the pod and the index of the interface that carries it.
func (m *Maps) PutOwnAddr(cookie uint64, addr netip.Addr, ifindex int) error {
	err := m.RedirectorMaps.OwnAddrs.Put(ownAddrKey(cookie, addr), bpf.RedirectorOwnAddr{Ifindex: uint32(ifindex)})
	if err != nil {
		return fmt.Errorf("map own_addrs: put %s of %d: %w", addr, cookie, explain(err))
	}
	return nil
}

// DeleteOwnAddr takes an address of the pod out. That it is not there is no error.
func (m *Maps) DeleteOwnAddr(cookie uint64, addr netip.Addr) error {
	return drop(m.RedirectorMaps.OwnAddrs, ownAddrKey(cookie, addr))
}

// OwnAddrs returns the addresses of all pods by netns cookie, with the index of the interface that carries each. It walks
// through the whole map.
func (m *Maps) OwnAddrs() (map[uint64]map[netip.Addr]int, error) {
	all := map[uint64]map[netip.Addr]int{}
	err := each(m.RedirectorMaps.OwnAddrs, func(key *bpf.RedirectorOwnAddrKey, value *bpf.RedirectorOwnAddr) {
		if all[key.NetnsCookie] == nil {
			all[key.NetnsCookie] = map[netip.Addr]int{}
		}
		all[key.NetnsCookie][netip.AddrFrom16(key.Addr).Unmap()] = int(value.Ifindex)
	})
	if err != nil {
		return nil, fmt.Errorf("map own_addrs: iterate: %w", err)
	}
	return all, nil
}

// OwnAddr returns the index of the interface that carries an address of the pod; 0: it is not known as the pod's.
func (m *Maps) OwnAddr(cookie uint64, addr netip.Addr) (ifindex int, err error) {
	var value bpf.RedirectorOwnAddr
	err = m.RedirectorMaps.OwnAddrs.Lookup(ownAddrKey(cookie, addr), &value)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, fmt.Errorf("map own_addrs: look up %s of %d: %w", addr, cookie, err)
	}
	return int(value.Ifindex), nil
}

// ownAddrKey holds IPv4 addresses as ::ffff:a.b.c.d, as the programs do.
func ownAddrKey(cookie uint64, addr netip.Addr) bpf.RedirectorOwnAddrKey {
	return bpf.RedirectorOwnAddrKey{NetnsCookie: cookie, Addr: addr.As16()}
}

// Listeners returns how many of the proxy's listeners on each port connections of the pod can be steered to.
func (m *Maps) Listeners(cookie uint64) (map[uint16]int, error) {
	all := map[uint16]int{}
	seen := map[uint64]bool{} // each is in the map more than once
	err := eachListener(cookie, func(key bpf.RedirectorListenerKey) error {
		var socket uint64 // its cookie
		switch err := m.RedirectorMaps.Listeners.Lookup(key, &socket); {
		case err == nil:
			if !seen[socket] {
				seen[socket] = true
				all[uint16(key.Port)]++
			}
		case !errors.Is(err, ebpf.ErrKeyNotExist):
			return fmt.Errorf("map listeners: look up port %d of %d: %w", key.Port, cookie, err)
		}
		return nil
	})
	return all, err
}

// HasListener says whether connections of the pod can be steered to a listener of the proxy's on the port.
func (m *Maps) HasListener(cookie uint64, port uint16) (bool, error) {
	for slot := range uint32(listenerSlots) {
		var socket uint64 // its cookie
		err := m.RedirectorMaps.Listeners.Lookup(bpf.RedirectorListenerKey{NetnsCookie: cookie, Port: uint32(port), Slot: slot}, &socket)
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return false, fmt.Errorf("map listeners: look up port %d of %d: %w", port, cookie, err)
		}
	}
	return false, nil
}

// PutListener has connections of the pod steered to a listening socket, as the sock_ops program does for those that it sees
// made: as the newest for its family, and in the first slot that is free.
func (m *Maps) PutListener(cookie uint64, port uint16, ipv6 bool, fd int) error {
	key := bpf.RedirectorListenerKey{NetnsCookie: cookie, Port: uint32(port)}
	err := ebpf.ErrKeyExist
	for slot := uint32(slotFirst); slot < listenerSlots && errors.Is(err, ebpf.ErrKeyExist); slot++ {
		key.Slot = slot
		err = m.RedirectorMaps.Listeners.Update(key, uint64(fd), ebpf.UpdateNoExist)
	}
	newest := []uint32{slotNewestV4}
	if ipv6 {
		newest = append(newest, slotNewestV6)
	}
	for _, slot := range newest {
		if err == nil {
			key.Slot = slot
			err = m.RedirectorMaps.Listeners.Put(key, uint64(fd))
		}
	}
	if err != nil {
		return fmt.Errorf("map listeners: put port %d of %d: %w", port, cookie, explain(err))
	}
	return nil
}

// NoteProxyListener has a socket count as made by the proxy, and as a listener that is steered to, as the programs do for those that
// they see made.
func (m *Maps) NoteProxyListener(fd int, port uint16) error {
	if err := m.RedirectorMaps.Sockets.Put(int32(fd), bpf.RedirectorSocketVerdict{ByProxy: 1, Listens: uint32(port)}); err != nil {
		return fmt.Errorf("map sockets: note a socket of the proxy: %w", explain(err))
	}
	return nil
}

// DeleteListeners takes the pod's listeners out of the map; the sockets themselves are not touched.
func (m *Maps) DeleteListeners(cookie uint64) error {
	return eachListener(cookie, func(key bpf.RedirectorListenerKey) error {
		return drop(m.RedirectorMaps.Listeners, key)
	})
}

func eachListener(cookie uint64, do func(bpf.RedirectorListenerKey) error) error {
	for _, port := range []uint32{PortOutbound, PortInbound, PortHBONE} {
		for slot := range uint32(listenerSlots) {
			if err := do(bpf.RedirectorListenerKey{NetnsCookie: cookie, Port: port, Slot: slot}); err != nil {
				return err
			}
		}
	}
	return nil
}

// Config are the agent's settings that the programs go by.
type Config struct {
	// HostNetNSCookie names the host's network namespace; 0: no probe is let through.
	HostNetNSCookie uint64
	ProbeSource     ProbeSource
	ProbeIdentity   ProbeIdentity
	ProxyIdentity   ProxyIdentity
	// ProbeV4 and ProbeV6 are the addresses that probes come from with ProbeIdentitySNAT. A zero address lets no probe of
	// its family through.
	ProbeV4, ProbeV6 netip.Addr
}

// ProbeSource says whose connections to pods are probes: processes of the host's network namespace that ...
type ProbeSource = bpf.RedirectorProbeSource

// The probe sources.
const (
	ProbeSourceNode    = bpf.RedirectorProbeSourcePROBE_SOURCE_NODE    // are in no pod's cgroup
	ProbeSourceHost    = bpf.RedirectorProbeSourcePROBE_SOURCE_HOST    // are anywhere
	ProbeSourceKubelet = bpf.RedirectorProbeSourcePROBE_SOURCE_KUBELET // are in the kubelet's cgroup
)

// ProbeIdentity says how a probe looks to the pod.
type ProbeIdentity = bpf.RedirectorProbeIdentity

// The probe identities.
const (
	ProbeIdentitySNAT = bpf.RedirectorProbeIdentityPROBE_IDENTITY_SNAT // it comes from the probe address
	ProbeIdentityFlow = bpf.RedirectorProbeIdentityPROBE_IDENTITY_FLOW // it comes from the node's own address
)

// ProxyIdentity says by what a socket of the proxy is known.
type ProxyIdentity = bpf.RedirectorProxyIdentity

// The proxy identities.
const (
	ProxyIdentityCgroup = bpf.RedirectorProxyIdentityPROXY_IDENTITY_CGROUP // the mark, and the cgroup of its maker
	// ProxyIdentityCgroupAlone is ProxyIdentityCgroup with the mark given to what the proxy makes in enrolled pods.
	ProxyIdentityCgroupAlone = bpf.RedirectorProxyIdentityPROXY_IDENTITY_CGROUP_ALONE
	ProxyIdentityMark        = bpf.RedirectorProxyIdentityPROXY_IDENTITY_MARK // the mark alone
)

// SetConfig changes the settings, for all programs at once.
func (m *Maps) SetConfig(c Config) error {
	value := bpf.RedirectorNodeConfig{
		HostNetnsCookie: c.HostNetNSCookie,
		ProbeSource:     c.ProbeSource,
		ProbeIdentity:   c.ProbeIdentity,
		ProxyIdentity:   c.ProxyIdentity,
	}
	if c.ProbeV4.IsValid() {
		value.ProbeAddrV4 = c.ProbeV4.As16()
	}
	if c.ProbeV6.IsValid() {
		value.ProbeAddrV6 = c.ProbeV6.As16()
	}
	if err := m.RedirectorMaps.Config.Put(uint32(0), value); err != nil {
		return fmt.Errorf("map config: put: %w", err)
	}
	return nil
}

// Config returns the settings.
func (m *Maps) Config() (Config, error) {
	var value bpf.RedirectorNodeConfig
	if err := m.RedirectorMaps.Config.Lookup(uint32(0), &value); err != nil {
		return Config{}, fmt.Errorf("map config: look up: %w", err)
	}
	addr := func(b [16]uint8) netip.Addr {
		if b == [16]uint8{} {
			return netip.Addr{}
		}
		return netip.AddrFrom16(b).Unmap()
	}
	return Config{
		HostNetNSCookie: value.HostNetnsCookie,
		ProbeSource:     value.ProbeSource,
		ProbeIdentity:   value.ProbeIdentity,
		ProxyIdentity:   value.ProxyIdentity,
		ProbeV4:         addr(value.ProbeAddrV4),
		ProbeV6:         addr(value.ProbeAddrV6),
	}, nil
}

// ProbeTarget is the pod that probes of an address are for.
type ProbeTarget struct {
	NetNSCookie uint64
	UID         string
}

// PutProbeTarget makes the pod the owner of the address, whoever had it before.
func (m *Maps) PutProbeTarget(addr netip.Addr, target ProbeTarget) error {
	_, err := m.putProbeTarget(addr, target, ebpf.UpdateAny)
	return err
}

// KeepProbeTarget makes the pod the owner of the address if nobody is, and says whether nobody was.
func (m *Maps) KeepProbeTarget(addr netip.Addr, target ProbeTarget) (made bool, err error) {
	return m.putProbeTarget(addr, target, ebpf.UpdateNoExist)
}

func (m *Maps) putProbeTarget(addr netip.Addr, target ProbeTarget, flags ebpf.MapUpdateFlags) (made bool, err error) {
	value := bpf.RedirectorProbeTarget{NetnsCookie: target.NetNSCookie}
	putString(value.Uid[:], target.UID)
	err = m.RedirectorMaps.ProbeTargets.Update(bpf.RedirectorProbeTargetKey{Addr: addr.As16()}, value, flags)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return false, fmt.Errorf("map probe_targets: put %s: %w", addr, explain(err))
	}
	return err == nil, nil
}

// DeleteProbeTarget takes the address out if the pod with that UID still owns it.
func (m *Maps) DeleteProbeTarget(addr netip.Addr, uid string) error {
	key := bpf.RedirectorProbeTargetKey{Addr: addr.As16()}
	var value bpf.RedirectorProbeTarget
	switch err := m.RedirectorMaps.ProbeTargets.Lookup(key, &value); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("map probe_targets: look up %s: %w", addr, err)
	}
	if stringOf(value.Uid[:]) != uid {
		return nil
	}
	return drop(m.RedirectorMaps.ProbeTargets, key)
}

// ProbeTargets returns all addresses that probes may be for.
func (m *Maps) ProbeTargets() (map[netip.Addr]ProbeTarget, error) {
	all := map[netip.Addr]ProbeTarget{}
	err := each(m.RedirectorMaps.ProbeTargets, func(key *bpf.RedirectorProbeTargetKey, value *bpf.RedirectorProbeTarget) {
		all[netip.AddrFrom16(key.Addr).Unmap()] = ProbeTarget{value.NetnsCookie, stringOf(value.Uid[:])}
	})
	if err != nil {
		return nil, fmt.Errorf("map probe_targets: iterate: %w", err)
	}
	return all, nil
}

// ProbeTargetOf returns the pod that probes of an address are for; the error wraps ebpf.ErrKeyNotExist if there is none.
func (m *Maps) ProbeTargetOf(addr netip.Addr) (ProbeTarget, error) {
	var value bpf.RedirectorProbeTarget
	if err := m.RedirectorMaps.ProbeTargets.Lookup(bpf.RedirectorProbeTargetKey{Addr: addr.As16()}, &value); err != nil {
		return ProbeTarget{}, fmt.Errorf("map probe_targets: look up %s: %w", addr, err)
	}
	return ProbeTarget{value.NetnsCookie, stringOf(value.Uid[:])}, nil
}

// CgroupRole says what a cgroup is for; groups below it count too.
type CgroupRole = bpf.RedirectorCgroupRole

// The roles of cgroups.
const (
	CgroupPods    = bpf.RedirectorCgroupRoleCGROUP_PODS    // all pods of the node are below it
	CgroupKubelet = bpf.RedirectorCgroupRoleCGROUP_KUBELET // the kubelet's
	CgroupProxy   = bpf.RedirectorCgroupRoleCGROUP_PROXY   // a node proxy's
)

// PutCgroup gives a cgroup a role, by its id: the inode number of its directory.
func (m *Maps) PutCgroup(id uint64, role CgroupRole) error {
	if err := m.RedirectorMaps.Cgroups.Put(bpf.RedirectorCgroupKey{CgroupId: id}, bpf.RedirectorCgroupValue{Role: role}); err != nil {
		return fmt.Errorf("map cgroups: put %d: %w", id, explain(err))
	}
	return nil
}

// DeleteCgroup takes its role from a cgroup. That it has none is no error.
func (m *Maps) DeleteCgroup(id uint64) error {
	return drop(m.RedirectorMaps.Cgroups, bpf.RedirectorCgroupKey{CgroupId: id})
}

// Cgroups returns the roles of cgroups by id.
func (m *Maps) Cgroups() (map[uint64]CgroupRole, error) {
	all := map[uint64]CgroupRole{}
	var key bpf.RedirectorCgroupKey
	var value bpf.RedirectorCgroupValue
	it := m.RedirectorMaps.Cgroups.Iterate()
	for it.Next(&key, &value) {
		all[key.CgroupId] = value.Role
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("map cgroups: iterate: %w", err)
	}
	return all, nil
}

// Counters are what happened to a pod's connections since it was enrolled; the fields are explained in bpf/redirector.h.
type Counters bpf.RedirectorPodCounters //nolint:recvcheck // encoding/json marshals values, and unmarshals into pointers

// Each calls do with every counter in order, under its name in the map's BTF.
func (c *Counters) Each(do func(name string, value uint64)) {
	v := reflect.ValueOf(c).Elem()
	for i, f := range reflect.VisibleFields(v.Type()) {
		if f.Type.Kind() == reflect.Uint64 {
			do(snakeCase(f.Name), v.Field(i).Uint())
		}
	}
}

// MarshalJSON writes one object with the counters in order.
func (c Counters) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	c.Each(func(name string, value uint64) {
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:%d", name, value)
	})
	b.WriteByte('}')
	return b.Bytes(), nil
}

// UnmarshalJSON reads what MarshalJSON writes. Counters it does not know, of another version, are left out.
func (c *Counters) UnmarshalJSON(data []byte) error {
	var values map[string]uint64
	if err := json.Unmarshal(data, &values); err != nil {
		return err
	}
	v := reflect.ValueOf(c).Elem()
	for i, f := range reflect.VisibleFields(v.Type()) {
		if f.Type.Kind() == reflect.Uint64 {
			v.Field(i).SetUint(values[snakeCase(f.Name)])
		}
	}
	return nil
}

// Add adds another pod's counters, or those of another CPU.
func (c *Counters) Add(other *Counters) {
	to, from := reflect.ValueOf(c).Elem(), reflect.ValueOf(other).Elem()
	for i := range to.NumField() {
		if to.Field(i).Kind() == reflect.Uint64 {
			to.Field(i).SetUint(to.Field(i).Uint() + from.Field(i).Uint())
		}
	}
}

func snakeCase(name string) string {
	var b strings.Builder
	for i, r := range name {
		if unicode.IsUpper(r) && i > 0 {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// CreateCounters makes the pod's counters, all zero, unless they are there: programs count only what user space
// made. It says whether they were not.
func (m *Maps) CreateCounters(cookie uint64) (made bool, err error) {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return false, fmt.Errorf("map counters: %w", err)
	}
	zero := make([]bpf.RedirectorPodCounters, cpus)
	err = m.RedirectorMaps.Counters.Update(bpf.RedirectorNetnsKey{NetnsCookie: cookie}, zero, ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return false, fmt.Errorf("map counters: put %d: %w", cookie, explain(err))
	}
	return err == nil, nil
}

// Counted returns the netns cookies that have counters. It walks through the whole map.
func (m *Maps) Counted() (map[uint64]bool, error) {
	all := map[uint64]bool{}
	var key, next bpf.RedirectorNetnsKey
	err := m.RedirectorMaps.Counters.NextKey(nil, &next)
	for ; err == nil; err = m.RedirectorMaps.Counters.NextKey(key, &next) {
		if all[next.NetnsCookie] {
			break // entries were removed meanwhile, and the walk has begun anew
		}
		key = next
		all[key.NetnsCookie] = true
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, fmt.Errorf("map counters: iterate: %w", err)
	}
	return all, nil
}

// Counters returns the pod's counters, summed over all CPUs; the error wraps ebpf.ErrKeyNotExist when it has none.
func (m *Maps) Counters(cookie uint64) (Counters, error) {
	var sum Counters
	var perCPU []bpf.RedirectorPodCounters
	if err := m.RedirectorMaps.Counters.Lookup(bpf.RedirectorNetnsKey{NetnsCookie: cookie}, &perCPU); err != nil {
		return sum, fmt.Errorf("map counters: look up %d: %w", cookie, err)
	}
	for i := range perCPU {
		sum.Add((*Counters)(&perCPU[i]))
	}
	return sum, nil
}

// DeleteCounters forgets the pod's counters. That there are none is no error.
func (m *Maps) DeleteCounters(cookie uint64) error {
	return drop(m.RedirectorMaps.Counters, bpf.RedirectorNetnsKey{NetnsCookie: cookie})
}

// Admitted returns how many flows are admitted to the apps of all pods. It walks through the whole map.
func (m *Maps) Admitted() (int, error) {
	n := 0
	var key bpf.RedirectorFlowKey
	var value bpf.RedirectorAdmission
	it := m.RedirectorMaps.Admitted.Iterate()
	for it.Next(&key, &value) {
		n++
	}
	if err := it.Err(); err != nil {
		return 0, fmt.Errorf("map admitted: iterate: %w", err)
	}
	return n, nil
}

// IsAdmitted says whether a connection of the pod's, as its receiver sees it, is admitted to the app right now.
func (m *Maps) IsAdmitted(cookie uint64, src, dst netip.AddrPort) (bool, error) {
	key := bpf.RedirectorFlowKey{
		NetnsCookie: cookie, Src: src.Addr().As16(), Dst: dst.Addr().As16(), Sport: uint32(src.Port()), Dport: uint32(dst.Port()),
	}
	var value bpf.RedirectorAdmission
	err := m.RedirectorMaps.Admitted.Lookup(key, &value)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, fmt.Errorf("map admitted: look up %s to %s of %d: %w", src, dst, cookie, err)
	}
	return err == nil, nil
}

// Usage is how full a map is.
type Usage struct {
	Map      string // its name
	Entries  int
	Capacity int
}

// Usage counts the entries of all maps that can be full: those that have room for a number of them, and no entry for each index.
// It walks through them, with system calls that fetch many entries at a time where the kernel can (hash maps, 5.6).
func (m *Maps) Usage() ([]Usage, error) {
	all := m.RedirectorMaps
	var usages []Usage
	for _, one := range []struct {
		name string
		bpf  *ebpf.Map
	}{
		{"pods", all.Pods}, {"own_addrs", all.OwnAddrs}, {"listeners", all.Listeners}, {"admitted", all.Admitted},
		{"counters", all.Counters}, {"probe_targets", all.ProbeTargets}, {"cgroups", all.Cgroups}, {"dns_bounds", all.DnsBounds},
		{"exceptions", all.Exceptions}, {"cidrs", all.Cidrs}, {"machines", all.Machines},
	} {
		n, err := entries(one.bpf)
		if err != nil {
			return nil, fmt.Errorf("map %s: count entries: %w", one.name, err)
		}
		usages = append(usages, Usage{one.name, n, int(one.bpf.MaxEntries())})
	}
	return usages, nil
}

// Evicts says whether a map, when it is full, gives up its least recently used entries instead of refusing new ones.
func Evicts(name string) bool {
	return name == bpf.RedirectorMapAdmitted || name == bpf.RedirectorMapDnsBounds
}

// entriesAtOnce is how many entries are fetched with one system call. A bucket of a hash map must fit.
const entriesAtOnce = 256

// each calls do with all entries of a hash map.
func each[K, V any](m *ebpf.Map, do func(*K, *V)) error {
	keys, values := make([]K, entriesAtOnce), make([]V, entriesAtOnce)
	var cursor ebpf.MapBatchCursor
	for {
		got, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range got {
			do(&keys[i], &values[i])
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil // that was all
		}
		if err != nil {
			return err
		}
	}
}

func entries(m *ebpf.Map) (int, error) {
	if kind := m.Type(); kind != ebpf.Hash && kind != ebpf.LRUHash {
		return entriesOneByOne(m)
	}
	keys := rows(m.KeySize())
	values := rows(m.ValueSize())
	var cursor ebpf.MapBatchCursor
	for n := 0; ; {
		got, err := m.BatchLookup(&cursor, keys, values, nil)
		n += got
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return n, nil // that was all
		}
		if err != nil {
			return 0, err
		}
	}
}

// rows makes room for entriesAtOnce keys or values of that many bytes.
func rows(size uint32) any {
	kind := reflect.SliceOf(reflect.ArrayOf(int(size), reflect.TypeFor[byte]()))
	return reflect.MakeSlice(kind, entriesAtOnce, entriesAtOnce).Interface()
}

// entriesOneByOne is for maps of other kinds. When entries go meanwhile the walk begins anew, so it may miss some.
func entriesOneByOne(m *ebpf.Map) (int, error) {
	seen := map[string]bool{}
	next := make([]byte, m.KeySize())
	err := m.NextKey(nil, next)
	for ; err == nil && !seen[string(next)]; err = m.NextKey(bytes.Clone(next), next) {
		seen[string(next)] = true
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, err
	}
	return len(seen), nil
}

func drop(m *ebpf.Map, key any) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("%s: delete: %w", m, err)
	}
	return nil
}

// explain says in words what a full map answers.
func explain(err error) error {
	if !errors.Is(err, unix.E2BIG) {
		return err
	}
	return fmt.Errorf("the map is full (its size is in bpf/redirector.h): %w", err)
}

func bit(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}
