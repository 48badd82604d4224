// SPDX-License-Identifier: Apache-2.0

// Package soak has a node live through everything at once for a while: pods are enrolled and taken out, agents and proxies are
// restarted and killed, network namespaces are replaced under the same UID, and what the agent has put into the kernel is taken
// away, all under traffic that never stops. What happens is drawn from a seed, which is printed; with the same seed the same
// things happen in the same order.
//
//	make soak                     for 30 s, from a seed that is chosen
//	make soak SOAK=10m SEED=42    for longer, from that one
//
// It needs what the other tests of the dataplane need, and more minutes than they have: go test ./... skips it.
package soak
