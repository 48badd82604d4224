// SPDX-License-Identifier: Apache-2.0

// Package nodeproxy is a small node proxy that really proxies: for tests, the
// demo and benchmarks. It is a ZDS client as ztunnel is one, has the same
// listeners in each pod's network namespace, and keeps source and destination of
// what it carries; but it speaks no mTLS, knows no policy, and its port 15008 takes
// a plain HTTP CONNECT. For every connection it writes one line of JSON.
//
// It can also play the peers that a ZDS server must withstand: see Config.Mute.
//
// It runs in a process of its own (cmd/nodeproxy, or a test binary that calls
// Main) or inside another one (Run).
package nodeproxy

// The ports that it listens on in each pod, and the mark of all its sockets there.
const (
	PortOutbound = 15001 // what the pod connects to; the socket's local address is the true destination
	PortInbound  = 15006 // what others connect to in the pod; likewise
	PortHBONE    = 15008 // HTTP CONNECT, in plain text here
	PortDNS      = 15053 // DNS queries of the pod, on its loopback addresses; UDP and TCP
	Mark         = 0x539
)
