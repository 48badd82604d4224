// SPDX-License-Identifier: Apache-2.0

// Package loader puts the dataplane into the kernel and keeps it there: it loads the programs, pins maps and links below a
// directory of a BPF filesystem, attaches what is node-wide to a cgroup, and gives each pod its own steer program and seal.
// Nothing else loads, pins or attaches. What stays when the process ends:
//
//	BPFFS/maps/NAME        the maps
//	BPFFS/links/NAME       the programs on the cgroup: connect4, connect6, setsockopt, sock_create, sock_ops
//	BPFFS/pods/UID/steer   the sk_lookup program on one pod's network namespace
//
// and, while a dataplane of another layout is taken over,
//
//	BPFFS/next/NAME        maps that are being filled
//	BPFFS/previous/NAME    maps that programs of pods use until they are replaced
//	BPFFS/links/upgrade-N  programs that keep these up to date
//
// and, on the pod's interfaces, the seal: a filter on clsact egress, which goes with the interface.
package loader
