// SPDX-License-Identifier: Apache-2.0

package main

// monitorMutations are what the monitor tells of connections.
func monitorMutations() []mutation {
	const (
		file  = "bpf/monitor.c"
		tells = "TestMonitorTellsOfConnections"
	)
	return []mutation{
		{
			name: "monitor: what is captured is said not to be", file: file,
			old: "if (mark == MARK_CAPTURE)", new: "if (0)", tests: tells,
		},
		{
			name: "monitor: the proxy's own connections are said to be an app's", file: file,
			old: "if (socket_is_proxys(sk))", new: "if (0)", tests: tells,
		},
		{
			name: "monitor: DNS queries are said to be the pod's with itself", file: file,
			old: "port == PORT_DNS ? CONN_DNS : CONN_OWN", new: "port == PORT_DNS ? CONN_OWN : CONN_OWN", tests: tells,
		},
		{
			name: "monitor: the proxy's connection to the app is said to be the pod's with itself", file: file,
			old: "return CONN_PROXY_TO_APP;", new: "return CONN_OWN;", tests: tells,
		},
		{
			name: "monitor: what is excluded is said to have got past", file: file,
			old: "is_excluded(cookie, dst, port) ? CONN_EXCLUDED", new: "is_excluded(cookie, dst, port) ? CONN_UNCAPTURED", tests: tells,
		},
		{
			name: "monitor: peers' connections are said to be left to the app", file: file,
			old: "} else if (mark == MARK_PROXY) {", new: "} else if (0) {", tests: tells,
		},
		{
			name: "monitor: a connection of the pod with itself is told of twice", file: file,
			old: "if (mark == MARK_REPLY || addr_is_own(cookie, &remote))", new: "if (mark == MARK_REPLY)", tests: tells,
		},
		{
			name: "monitor: a connection of the proxy to the app is told of twice", file: file,
			old: "if (mark == MARK_REPLY || addr_is_own(cookie, &remote))", new: "if (addr_is_own(cookie, &remote))", tests: tells,
		},
		{
			name: "monitor: a probe is told of twice", file: file,
			old: "if (bpf_map_lookup_elem(&admitted, &flow))", new: "if (0)", tests: tells,
		},
		{
			name: "monitor: probes are not told of", file: file,
			old: "if (verdict && verdict->probe_target)", new: "if (0)", tests: tells,
		},
	}
}
