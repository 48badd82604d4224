// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
)

// Filter says what somebody wants to be told of. The zero value is everything. That events were lost is always told.
type Filter struct {
	// UIDs are those of pods.
	UIDs []string
	// Kinds are kinds of events.
	Kinds []string
	// Direction is outbound or inbound, and Verdict one of proxy, app, out and dropped.
	Direction, Verdict string
	// Port is that of either end of a connection, and CIDR a range that either end is in. With one of them there are no drops, of
	// whose ends nothing is known.
	Port uint16
	CIDR netip.Prefix
}

// The words that Filter.Direction and Filter.Verdict may have.
var (
	Directions = []string{"outbound", "inbound"}
	Verdicts   = []string{"proxy", "app", "out", "dropped"}
	Kinds      = []string{"connection", "drop", "enrolled", "unenrolled", "adopted", "repaired", "failing", "recovered"}
)

func (f *Filter) passes(e *Event) bool {
	if e.Kind == Lost {
		return true
	}
	ends := func(has func(netip.AddrPort) bool) bool {
		return e.From.IsValid() && has(e.From) || e.To.IsValid() && has(e.To)
	}
	return (len(f.UIDs) == 0 || slices.Contains(f.UIDs, e.UID)) &&
		(len(f.Kinds) == 0 || slices.Contains(f.Kinds, string(e.Kind))) &&
		(f.Direction == "" || e.Direction == f.Direction) &&
		(f.Verdict == "" || e.Verdict == f.Verdict) &&
		(f.Port == 0 || ends(func(a netip.AddrPort) bool { return a.Port() == f.Port })) &&
		(!f.CIDR.IsValid() || ends(func(a netip.AddrPort) bool { return f.CIDR.Contains(a.Addr()) }))
}

// Values writes the filter for ParseFilter.
func (f *Filter) Values() url.Values {
	values := url.Values{"pod": f.UIDs, "kind": f.Kinds}
	if f.Direction != "" {
		values.Set("direction", f.Direction)
	}
	if f.Verdict != "" {
		values.Set("verdict", f.Verdict)
	}
	if f.Port != 0 {
		values.Set("port", strconv.Itoa(int(f.Port)))
	}
	if f.CIDR.IsValid() {
		values.Set("cidr", f.CIDR.String())
	}
	return values
}

// ParseFilter reads what Values writes, or says what is wrong with it.
func ParseFilter(values url.Values) (f Filter, err error) {
	f = Filter{UIDs: values["pod"], Kinds: values["kind"], Direction: values.Get("direction"), Verdict: values.Get("verdict")}
	for _, check := range []struct {
		name  string
		given []string
		words []string
	}{
		{"kind", f.Kinds, Kinds}, {"direction", one(f.Direction), Directions}, {"verdict", one(f.Verdict), Verdicts},
	} {
		for _, word := range check.given {
			if !slices.Contains(check.words, word) {
				return f, fmt.Errorf("bad %s %q: use one of %v", check.name, word, check.words)
			}
		}
	}
	if text := values.Get("port"); text != "" {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil || port == 0 {
			return f, fmt.Errorf("bad port %q: use a number from 1 to 65535", text)
		}
		f.Port = uint16(port)
	}
	if text := values.Get("cidr"); text != "" {
		if f.CIDR, err = netip.ParsePrefix(text); err != nil {
			return f, fmt.Errorf("bad cidr %q: write a range as in 10.0.0.0/8 or fd00::/8", text)
		}
	}
	return f, nil
}

func one(word string) []string {
	if word == "" {
		return nil
	}
	return []string{word}
}
