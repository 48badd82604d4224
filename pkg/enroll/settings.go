// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/redirector-dataplane/redirector/pkg/maps"
)

// Settings is what a pod may have its own way. The zero value is what a pod has that asks for nothing. Lists are sorted, and nil
// when they are empty.
type Settings struct {
	// BypassInbound lets peers' connections reach the app without the proxy. The mesh tunnel still ends at the proxy.
	BypassInbound bool `json:"bypassInbound,omitempty"`
	// DNSCapture sends the pod's DNS queries to the proxy, or does not; nil: as Config.DNSCapture says.
	DNSCapture *bool `json:"dnsCapture,omitempty"`
	// ExcludeOutboundPorts are ports to which the pod's apps connect without the proxy.
	ExcludeOutboundPorts []uint16 `json:"excludeOutboundPorts,omitempty"`
	// ExcludeOutboundCIDRs are ranges of addresses to which the pod's apps connect without the proxy.
	ExcludeOutboundCIDRs []CIDR `json:"excludeOutboundCIDRs,omitempty"`
	// ExcludeInboundPorts are ports on which peers' connections reach the app without the proxy.
	ExcludeInboundPorts []uint16 `json:"excludeInboundPorts,omitempty"`
	// RerouteInterfaces are interfaces of the pod by which machines behind it are reached: what they send by TCP goes to the proxy,
	// as if the pod had sent it. AutoInterfaces stands for all that carry none of the pod's addresses.
	RerouteInterfaces []string `json:"rerouteInterfaces,omitempty"`
}

// AutoInterfaces among Settings.RerouteInterfaces stands for every interface that carries none of Spec.IPs.
const AutoInterfaces = "auto"

// Bounds on what one pod may ask for.
const (
	maxExclusions = 256 // in one list
	maxInterfaces = 16
	maxInterface  = 15 // bytes: IFNAMSIZ of linux/if.h, with its NUL
)

// CIDR is a range of addresses that is excluded, or a part of one that is not.
type CIDR struct {
	netip.Prefix
	// Captured takes the range out of a wider one that is excluded.
	Captured bool
}

// captureSign comes before a range that is taken out of a wider one.
const captureSign = "!"

// String writes the range as ParseCIDR reads it.
func (c CIDR) String() string {
	if c.Captured {
		return captureSign + c.Prefix.String()
	}
	return c.Prefix.String()
}

// MarshalText writes what String returns.
func (c CIDR) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads what ParseCIDR does.
func (c *CIDR) UnmarshalText(text []byte) (err error) {
	*c, err = ParseCIDR(string(text))
	return err
}

// ParseCIDR reads a range as in 10.0.0.0/8, or !10.1.0.0/16.
func ParseCIDR(text string) (CIDR, error) {
	bare, captured := strings.CutPrefix(text, captureSign)
	prefix, err := netip.ParsePrefix(bare)
	if err != nil {
		return CIDR{}, fmt.Errorf("bad range %q: write one as in 10.0.0.0/8 or fd00::/8, with %s before it to take it out of a wider one",
			shorten(text), captureSign)
	}
	c := CIDR{prefix, captured}
	return c, c.validate()
}

func (c CIDR) validate() error {
	switch {
	case !c.IsValid():
		return errors.New("a range is empty")
	case c.Addr().Is4In6():
		return fmt.Errorf("bad range %s: write it as one of IPv4", c)
	case c.Masked() != c.Prefix:
		return fmt.Errorf("bad range %s: it has bits behind its prefix: write %s", c, CIDR{c.Masked(), c.Captured})
	}
	return nil
}

// shorten keeps a bad value that is very long from filling the screen.
func shorten(text string) string {
	const enough = 64 // bytes
	if len(text) <= enough {
		return text
	}
	return text[:enough] + "..."
}

// The keys of settings, in Settings.Set and wherever people write them.
const (
	KeyBypassInbound        = "bypass-inbound"
	KeyDNSCapture           = "dns-capture"
	KeyExcludeOutboundPorts = "exclude-outbound-ports"
	KeyExcludeOutboundCIDRs = "exclude-outbound-cidrs"
	KeyExcludeInboundPorts  = "exclude-inbound-ports"
	KeyRerouteInterfaces    = "reroute-interfaces"
)

// SettingKeys lists all keys.
func SettingKeys() []string {
	return []string{
		KeyBypassInbound, KeyDNSCapture, KeyExcludeOutboundPorts, KeyExcludeOutboundCIDRs, KeyExcludeInboundPorts, KeyRerouteInterfaces,
	}
}

// nodesDefault is a value of KeyDNSCapture.
const nodesDefault = "default"

// Set changes one setting to a value as people write it: true or false, or a list with commas between its entries; an empty one is
// none. KeyDNSCapture may also be "default". The error names the key and says what is wrong; then nothing is changed.
func (s *Settings) Set(key, value string) error {
	next := *s
	var err error
	switch key {
	case KeyBypassInbound:
		next.BypassInbound, err = parseBool(value)
	case KeyDNSCapture:
		next.DNSCapture = nil
		if value != nodesDefault {
			var capture bool
			if capture, err = parseBool(value); err != nil {
				err = fmt.Errorf("%w, or %s for the agent's own", err, nodesDefault)
			}
			next.DNSCapture = &capture
		}
	case KeyExcludeOutboundPorts:
		next.ExcludeOutboundPorts, err = parseList(value, maxExclusions, parsePort, cmp.Compare)
	case KeyExcludeOutboundCIDRs:
		next.ExcludeOutboundCIDRs, err = parseList(value, maxExclusions, ParseCIDR, compareCIDRs)
	case KeyExcludeInboundPorts:
		next.ExcludeInboundPorts, err = parseList(value, maxExclusions, parsePort, cmp.Compare)
	case KeyRerouteInterfaces:
		next.RerouteInterfaces, err = parseList(value, maxInterfaces, parseInterface, cmp.Compare)
	default:
		return fmt.Errorf("there is no setting %q: use %s", shorten(key), strings.Join(SettingKeys(), ", "))
	}
	if err != nil {
		return fmt.Errorf("bad %s: %w", key, err)
	}
	if err := next.Validate(); err != nil {
		return err
	}
	*s = next
	return nil
}

func parseBool(text string) (bool, error) {
	value, err := strconv.ParseBool(text)
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false: write true or false", shorten(text))
	}
	return value, nil
}

func parsePort(text string) (uint16, error) {
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, fmt.Errorf("%q is no port: write a number from 1 to 65535", shorten(text))
	}
	return uint16(port), nil
}

func parseInterface(text string) (string, error) { return text, checkInterface(text) }

func compareCIDRs(a, b CIDR) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()), strings.Compare(a.String(), b.String()))
}

// parseList reads a list, sorts it, and leaves out what it has twice.
func parseList[T comparable](text string, most int, parse func(string) (T, error), compare func(a, b T) int) ([]T, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	if n := strings.Count(text, ",") + 1; n > most {
		return nil, fmt.Errorf("it has %d entries, and may have %d: leave some out", n, most)
	}
	var list []T
	for entry := range strings.SplitSeq(text, ",") {
		value, err := parse(strings.TrimSpace(entry))
		if err != nil {
			return nil, err
		}
		list = append(list, value)
	}
	slices.SortFunc(list, compare)
	return slices.Compact(list), nil
}

// Validate says what is wrong with the settings, if anything, and names the key of the one that it is about.
func (s *Settings) Validate() error {
	for _, check := range []struct {
		key string
		err error
	}{
		{KeyExcludeOutboundPorts, checkPorts(s.ExcludeOutboundPorts)},
		{KeyExcludeOutboundCIDRs, checkCIDRs(s.ExcludeOutboundCIDRs)},
		{KeyExcludeInboundPorts, errors.Join(checkPorts(s.ExcludeInboundPorts), checkProxysPorts(s.ExcludeInboundPorts))},
		{KeyRerouteInterfaces, checkInterfaces(s.RerouteInterfaces)},
	} {
		if check.err != nil {
			return fmt.Errorf("bad %s: %w", check.key, check.err)
		}
	}
	return nil
}

func checkLength(n, most int) error {
	if n > most {
		return fmt.Errorf("it has %d entries, and may have %d: leave some out", n, most)
	}
	return nil
}

func checkPorts(ports []uint16) error {
	if slices.Contains(ports, 0) {
		return errors.New("0 is no port: write a number from 1 to 65535")
	}
	return checkLength(len(ports), maxExclusions)
}

// checkProxysPorts refuses those that belong to the proxy in every pod.
func checkProxysPorts(ports []uint16) error {
	for _, port := range []uint16{maps.PortOutbound, maps.PortInbound, maps.PortHBONE} {
		if slices.Contains(ports, port) {
			return fmt.Errorf("port %d is the node proxy's: leave it out", port)
		}
	}
	return nil
}

func checkCIDRs(cidrs []CIDR) error {
	seen := map[netip.Prefix]bool{}
	for _, c := range cidrs {
		if err := c.validate(); err != nil {
			return err
		}
		if captured, ok := seen[c.Prefix]; ok && captured != c.Captured {
			return fmt.Errorf("%s is there both with and without %s: leave one out", c.Prefix, captureSign)
		}
		seen[c.Prefix] = c.Captured
	}
	return checkLength(len(cidrs), maxExclusions)
}

func checkInterfaces(names []string) error {
	for _, name := range names {
		if err := checkInterface(name); err != nil {
			return err
		}
	}
	return checkLength(len(names), maxInterfaces)
}

// checkInterface allows what the kernel does; see dev_valid_name in its net/core/dev.c.
func checkInterface(name string) error {
	bad := func(r rune) bool { return r == '/' || r == ':' || unicode.IsSpace(r) || unicode.IsControl(r) }
	switch {
	case len(name) > maxInterface:
		return fmt.Errorf("%q is no name of an interface: it has %d bytes, and may have %d", shorten(name), len(name), maxInterface)
	case name == "" || name == "." || name == ".." || strings.ContainsFunc(name, bad):
		return fmt.Errorf("%q is no name of an interface: write one as `ip link` shows it, or %s", name, AutoInterfaces)
	case name == "lo":
		return errors.New("what comes by lo is the pod's own: leave lo out")
	}
	return nil
}

// exceptions are what the maps are to have of the settings. rerouted are the indices of the interfaces that RerouteInterfaces names.
func (s *Settings) exceptions(rerouted []int) maps.Exceptions {
	e := maps.Exceptions{Values: map[maps.Exception]bool{}, CIDRs: map[netip.Prefix]bool{}}
	for _, port := range s.ExcludeOutboundPorts {
		e.Values[maps.Exception{Kind: maps.ExceptionOutboundPort, Value: uint32(port)}] = true
	}
	for _, port := range s.ExcludeInboundPorts {
		e.Values[maps.Exception{Kind: maps.ExceptionInboundPort, Value: uint32(port)}] = true
	}
	for _, index := range rerouted {
		e.Values[maps.Exception{Kind: maps.ExceptionInterface, Value: uint32(index)}] = true
	}
	for _, c := range s.ExcludeOutboundCIDRs {
		e.CIDRs[c.Prefix] = !c.Captured
	}
	return e
}
