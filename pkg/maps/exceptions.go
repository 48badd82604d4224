// SPDX-License-Identifier: Apache-2.0

package maps

import (
	"errors"
	"fmt"
	gomaps "maps"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/redirector-dataplane/redirector/bpf"
)

// ExceptionKind says what of a pod's connections is treated in another way than the rest.
type ExceptionKind = bpf.RedirectorExceptionKind

// The kinds of exceptions.
const (
	// ExceptionOutboundPort: connections to the port go past the proxy.
	ExceptionOutboundPort = bpf.RedirectorExceptionKindEXCEPTION_OUTBOUND_PORT
	// ExceptionInboundPort: peers' connections to the port go to the app.
	ExceptionInboundPort = bpf.RedirectorExceptionKindEXCEPTION_INBOUND_PORT
	// ExceptionInterface: what comes in by the interface with that index goes out by the proxy, as if it were the pod's own.
	ExceptionInterface = bpf.RedirectorExceptionKindEXCEPTION_INTERFACE
)

// Exception is an exception of one kind, for a port or an interface's index.
type Exception struct {
	Kind  ExceptionKind
	Value uint32
}

// Exceptions are all of one pod. The zero value is none.
type Exceptions struct {
	Values map[Exception]bool // the keys count
	// CIDRs says of ranges of addresses whether connections there go past the proxy. The longest prefix counts: false takes a part
	// out of a wider range.
	CIDRs map[netip.Prefix]bool
}

// Equal says whether both are the same exceptions.
func (e Exceptions) Equal(other Exceptions) bool {
	return gomaps.Equal(e.Values, other.Values) && gomaps.Equal(e.CIDRs, other.CIDRs)
}

// PutException makes an exception for a pod. The programs look for it once Pod.HasExceptions is set.
func (m *Maps) PutException(cookie uint64, e Exception) error {
	if err := m.RedirectorMaps.Exceptions.Put(exceptionKey(cookie, e), uint32(1)); err != nil {
		return fmt.Errorf("map exceptions: put %d of kind %d of %d: %w", e.Value, e.Kind, cookie, explain(err))
	}
	return nil
}

// DeleteException undoes PutException. That there is none is no error.
func (m *Maps) DeleteException(cookie uint64, e Exception) error {
	return drop(m.RedirectorMaps.Exceptions, exceptionKey(cookie, e))
}

// HasException says whether a pod has an exception.
func (m *Maps) HasException(cookie uint64, e Exception) (bool, error) {
	var value uint32
	err := m.RedirectorMaps.Exceptions.Lookup(exceptionKey(cookie, e), &value)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, fmt.Errorf("map exceptions: look up %d of kind %d of %d: %w", e.Value, e.Kind, cookie, err)
	}
	return err == nil, nil
}

// IsExcluded says whether a pod's connections to an address go past the proxy: what is said of the longest prefix that it is in.
func (m *Maps) IsExcluded(cookie uint64, addr netip.Addr) (bool, error) {
	var value bpf.RedirectorCidr
	err := m.RedirectorMaps.Cidrs.Lookup(cidrKey(cookie, netip.PrefixFrom(addr, addr.BitLen())), &value)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, fmt.Errorf("map cidrs: look up %s of %d: %w", addr, cookie, err)
	}
	return err == nil && value.Excluded != 0, nil
}

func exceptionKey(cookie uint64, e Exception) bpf.RedirectorExceptionKey {
	return bpf.RedirectorExceptionKey{NetnsCookie: cookie, Kind: e.Kind, Value: e.Value}
}

// PutCIDR says whether a pod's connections to a range of addresses go past the proxy, but for narrower ranges of which something
// else is said.
func (m *Maps) PutCIDR(cookie uint64, prefix netip.Prefix, excluded bool) error {
	value := bpf.RedirectorCidr{Excluded: uint32(bit(excluded))}
	if err := m.RedirectorMaps.Cidrs.Put(cidrKey(cookie, prefix), value); err != nil {
		if errors.Is(err, unix.ENOSPC) { // what a full map of this kind answers
			err = unix.E2BIG
		}
		return fmt.Errorf("map cidrs: put %s of %d: %w", prefix, cookie, explain(err))
	}
	return nil
}

// DeleteCIDR undoes PutCIDR. That nothing is said of the range is no error.
func (m *Maps) DeleteCIDR(cookie uint64, prefix netip.Prefix) error {
	return drop(m.RedirectorMaps.Cidrs, cidrKey(cookie, prefix))
}

// cidrFixed is how many bits come before the address in what the map's prefixes count.
const cidrFixed = 8 * (4 + 8)

// mapped is how many bits come before an IPv4 address in an IPv6 one.
const mapped = 96

func cidrKey(cookie uint64, prefix netip.Prefix) bpf.RedirectorCidrKey {
	key := bpf.RedirectorCidrKey{
		Prefixlen:   uint32(cidrFixed + prefix.Bits()),
		Family:      unix.AF_INET6,
		NetnsCookie: cookie,
		Addr:        prefix.Masked().Addr().As16(),
	}
	if prefix.Addr().Is4() {
		key.Family = unix.AF_INET
		key.Prefixlen += mapped
	}
	return key
}

func prefixOf(key *bpf.RedirectorCidrKey) netip.Prefix {
	addr, bits := netip.AddrFrom16(key.Addr), int(key.Prefixlen)-cidrFixed
	if key.Family == unix.AF_INET {
		return netip.PrefixFrom(addr.Unmap(), bits-mapped)
	}
	return netip.PrefixFrom(addr, bits)
}

// Exceptions returns those of all pods by netns cookie. It walks through both maps. An error that wraps ebpf.ErrIterationAborted
// says that they were changed too much meanwhile.
func (m *Maps) Exceptions() (map[uint64]Exceptions, error) {
	all := map[uint64]Exceptions{}
	of := func(cookie uint64) Exceptions {
		if _, ok := all[cookie]; !ok {
			all[cookie] = Exceptions{map[Exception]bool{}, map[netip.Prefix]bool{}}
		}
		return all[cookie]
	}
	err := each(m.RedirectorMaps.Exceptions, func(key *bpf.RedirectorExceptionKey, _ *uint32) {
		of(key.NetnsCookie).Values[Exception{key.Kind, key.Value}] = true
	})
	if err != nil {
		return nil, fmt.Errorf("map exceptions: iterate: %w", err)
	}
	var cidr bpf.RedirectorCidrKey
	var value bpf.RedirectorCidr
	it := m.RedirectorMaps.Cidrs.Iterate()
	for it.Next(&cidr, &value) {
		of(cidr.NetnsCookie).CIDRs[prefixOf(&cidr)] = value.Excluded != 0
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("map cidrs: iterate: %w", err)
	}
	return all, nil
}

// SetExceptions turns what the maps have of a pod into what is wanted. At no moment is anything excluded that is so neither before
// nor after. After a failure, the maps may have some of both.
func (m *Maps) SetExceptions(cookie uint64, have, want Exceptions) error {
	for _, s := range cidrSteps(have.CIDRs, want.CIDRs) {
		if err := s.carryOut(m, cookie); err != nil {
			return err
		}
	}
	for e := range want.Values {
		if !have.Values[e] {
			if err := m.PutException(cookie, e); err != nil {
				return err
			}
		}
	}
	for e := range have.Values {
		if !want.Values[e] {
			if err := m.DeleteException(cookie, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// cidrStep is a change of one entry of map cidrs.
type cidrStep struct {
	prefix           netip.Prefix
	remove, excluded bool // removed, or made to be excluded or not
}

func (s cidrStep) carryOut(m *Maps, cookie uint64) error {
	if s.remove {
		return m.DeleteCIDR(cookie, s.prefix)
	}
	return m.PutCIDR(cookie, s.prefix, s.excluded)
}

// cidrSteps lists the changes from one set of ranges to another. What takes ranges back comes first and goes last.
func cidrSteps(have, want map[netip.Prefix]bool) []cidrStep {
	var steps []cidrStep
	for _, excluded := range []bool{false, true} {
		for prefix, is := range want {
			if now, ok := have[prefix]; is == excluded && (!ok || now != is) {
				steps = append(steps, cidrStep{prefix: prefix, excluded: is})
			}
		}
	}
	for _, excluded := range []bool{true, false} {
		for prefix, is := range have {
			if _, ok := want[prefix]; !ok && is == excluded {
				steps = append(steps, cidrStep{prefix: prefix, remove: true})
			}
		}
	}
	return steps
}
