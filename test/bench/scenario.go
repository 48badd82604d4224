// SPDX-License-Identifier: Apache-2.0

package main

import "fmt"

// scenario is work in one direction.
type scenario struct {
	Direction string `json:"direction"`
	V6        bool   `json:"ipv6"`
	Work      string `json:"work"`
	Clients   int    `json:"clients"`
	// Size is of a message, in bytes.
	Size int `json:"size"`
}

// String names the scenario in a line of a table.
func (sc scenario) String() string {
	family := "IPv4"
	if sc.V6 {
		family = "IPv6"
	}
	size := fmt.Sprintf("%d B", sc.Size)
	if sc.Size >= 1<<10 {
		size = fmt.Sprintf("%d kB", sc.Size>>10)
	}
	return fmt.Sprintf("%s %s %s ×%d %s", sc.Direction, family, sc.Work, sc.Clients, size)
}

const (
	small    = 64
	large    = 64 << 10
	dnsQuery = 40 // of a query for a name of usual length
)

// allScenarios are those of make bench.
func allScenarios() []scenario {
	var all []scenario
	for _, direction := range []string{outbound, inbound, probe} {
		for _, v6 := range []bool{false, true} {
			for _, clients := range []int{1, 16, 64} {
				all = append(all, scenario{direction, v6, workConnect, clients, small})
			}
			all = append(all, scenario{direction, v6, workEcho, 1, small})
			if direction == probe {
				continue // probes are short
			}
			all = append(all,
				scenario{direction, v6, workEcho, 1, large},
				scenario{direction, v6, workStream, 1, small},
				scenario{direction, v6, workStream, 1, large},
				scenario{direction, v6, workStream, 8, large})
			if direction == outbound {
				all = append(all, scenario{direction, v6, workDNS, 16, dnsQuery})
			}
		}
	}
	return all
}

// quickScenarios are one of each kind, enough to see a disaster.
func quickScenarios() []scenario {
	return []scenario{
		{outbound, false, workConnect, 16, small},
		{outbound, true, workConnect, 1, small},
		{outbound, false, workEcho, 1, small},
		{outbound, true, workStream, 1, large},
		{outbound, false, workDNS, 16, dnsQuery},
		{inbound, false, workConnect, 16, small},
		{inbound, true, workStream, 1, large},
		{probe, false, workConnect, 1, small},
		{probe, true, workConnect, 1, small},
	}
}
