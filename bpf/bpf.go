// SPDX-License-Identifier: Apache-2.0

// Package bpf holds the dataplane's C programs and what bpf2go makes of them: the compiled object and the Go types of
// its maps' keys and values. Only pkg/loader and pkg/maps use it.
package bpf

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -type netns_key -type pod -type own_addr_key -type own_addr -type listener_key -type flow_key -type admission -type admitted_by -type pod_counters -type tail_call -type node_config -type probe_source -type probe_identity -type proxy_identity -type probe_target_key -type probe_target -type cgroup_key -type cgroup_value -type cgroup_role -type layout_record -type exception_kind -type exception_key -type cidr_key -type cidr Redirector redirector.c -- -O2 -g -Wall -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -type conn_event -type conn_verdict Monitor monitor.c -- -O2 -g -Wall -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu
