/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
//go:build ignore

/*
 * cgroup/sock_ops, beside redir_mark and after it: tells of new connections of enrolled pods. An object of its own, which is loaded
 * and attached while somebody watches, and at no other time. It decides nothing: what it tells is read from what redir_mark and
 * redir_steer have left with the socket, its mark above all.
 */
#include "redirector.h"

/* What has become of a connection. Each is told of once, where that is decided. */
enum conn_verdict {
	CONN_CAPTURED = 1,     /* an app's, to the proxy */
	CONN_OWN = 2,          /* of the pod with itself */
	CONN_EXCLUDED = 3,     /* an app's, past the proxy, as the pod asks for */
	CONN_PROXY_OUT = 4,    /* the proxy's, to another */
	CONN_PROXY_TO_APP = 5, /* the proxy's, to the app as its client */
	CONN_INBOUND = 6,      /* a peer's, to the proxy */
	CONN_TO_APP = 7,       /* a peer's, to the app, as the pod asks for */
	CONN_PROBE = 8,        /* of the host's, to the app */
	CONN_REROUTED = 9,     /* of a machine behind the pod, to the proxy */
	CONN_UNCAPTURED = 10,  /* an app's that could not be marked: the seal drops it */
	CONN_DNS = 11,         /* an app's DNS query by TCP, to the proxy */
};

struct conn_event {
	__u64 time;         /* nanoseconds, as CLOCK_MONOTONIC */
	__u64 netns_cookie; /* of the pod */
	__u8 src[16];
	__u8 dst[16];
	__u32 sport;
	__u32 dport;
	enum conn_verdict verdict;
	__u32 reserved;
};

/* Room for some 13 000 connections that are not read yet. */
#define MONITOR_BYTES (1 << 20)

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, MONITOR_BYTES);
} conn_events SEC(".maps");

/* How many connections there was no room for. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} conn_lost SEC(".maps");

static __always_inline void conn_tell(__u64 cookie, const union ip_addr *src, __u32 sport, const union ip_addr *dst,
				      __u32 dport, enum conn_verdict verdict)
{
	struct conn_event *e = bpf_ringbuf_reserve(&conn_events, sizeof(*e), 0);
	__u32 zero = 0;
	__u64 *lost;

	if (!e) {
		lost = bpf_map_lookup_elem(&conn_lost, &zero);
		if (lost)
			(*lost)++;
		return;
	}
	e->time = bpf_ktime_get_ns();
	e->netns_cookie = cookie;
	__builtin_memcpy(e->src, src->bytes, sizeof(e->src));
	__builtin_memcpy(e->dst, dst->bytes, sizeof(e->dst));
	e->sport = sport;
	e->dport = dport;
	e->verdict = verdict;
	e->reserved = 0;
	bpf_ringbuf_submit(e, 0);
}

/* This end's address and the other's; v4-mapped for IPv4. */
static __always_inline void conn_addrs(struct bpf_sock_ops *ctx, union ip_addr *local, union ip_addr *remote)
{
	if (ctx->family == AF_INET) {
		addr_from_v4(local, ctx_read32(ctx, local_ip4));
		addr_from_v4(remote, ctx_read32(ctx, remote_ip4));
	} else {
		addr_from_v6(local, ctx, local_ip6);
		addr_from_v6(remote, ctx, remote_ip6);
	}
}

/* What redir_mark has made of a connect(). */
static __always_inline enum conn_verdict connect_verdict(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u64 cookie,
							 const struct pod *pod, const union ip_addr *dst)
{
	__u32 mark = sk->mark & MARK_MASK, port = bpf_ntohl(ctx->remote_port);

	if (addr_is_own(cookie, dst)) {
		if (mark == MARK_REPLY && sk->bound_dev_if == LOOPBACK_IFINDEX)
			return CONN_PROXY_TO_APP;
		return addr_is_loopback(dst) && port == PORT_DNS ? CONN_DNS : CONN_OWN;
	}
	if (mark == MARK_CAPTURE)
		return CONN_CAPTURED;
	if (socket_is_proxys(sk))
		return CONN_PROXY_OUT;
	return pod->has_exceptions && is_excluded(cookie, dst, port) ? CONN_EXCLUDED : CONN_UNCAPTURED;
}

/* A connection that was accepted in a pod. What was made in the pod has been told of at its connect(). */
static __always_inline void tell_accepted(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u64 cookie,
					  const struct pod *pod)
{
	__u32 mark = sk->mark & MARK_MASK;
	struct flow_key flow = {.netns_cookie = cookie};
	union ip_addr local, remote;
	enum conn_verdict verdict;

	conn_addrs(ctx, &local, &remote);
	if (mark == MARK_REPLY || addr_is_own(cookie, &remote))
		return;
	if (mark == MARK_ACCEPT) {
		verdict = CONN_REROUTED;
	} else if (mark == MARK_PROXY) {
		verdict = CONN_INBOUND;
	} else {
		__builtin_memcpy(flow.src, remote.bytes, sizeof(flow.src));
		__builtin_memcpy(flow.dst, local.bytes, sizeof(flow.dst));
		flow.sport = bpf_ntohl(ctx->remote_port);
		flow.dport = ctx->local_port;
		if (bpf_map_lookup_elem(&admitted, &flow))
			return; /* a probe */
		verdict = CONN_TO_APP;
	}
	conn_tell(cookie, &remote, bpf_ntohl(ctx->remote_port), &local, ctx->local_port, verdict);
}

/* redir_monitor: tells of new connections. Needs kernel 5.15 (netns cookie), as redir_mark does. */
SEC("sockops")
int redir_monitor(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct socket_verdict *verdict;
	union ip_addr local, remote;
	const struct pod *pod;
	__u64 cookie;

	if (!sk || (ctx->op != BPF_SOCK_OPS_TCP_CONNECT_CB && ctx->op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB))
		return 1;
	cookie = bpf_get_netns_cookie(ctx);
	pod = pod_lookup(cookie);
	if (ctx->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
		if (pod)
			tell_accepted(ctx, sk, cookie, pod);
		return 1;
	}
	conn_addrs(ctx, &local, &remote);
	if (pod) {
		conn_tell(cookie, &local, ctx->local_port, &remote, bpf_ntohl(ctx->remote_port),
			  connect_verdict(ctx, sk, cookie, pod, &remote));
		return 1;
	}
	if (!is_host(cookie))
		return 1;
	verdict = bpf_sk_storage_get(&sockets, sk, NULL, 0);
	if (verdict && verdict->probe_target)
		conn_tell(verdict->probe_target, &local, ctx->local_port, &remote, bpf_ntohl(ctx->remote_port),
			  CONN_PROBE);
	return 1;
}

/* So that user space gets the type: no map has it. */
const struct conn_event *conn_event_type __attribute__((unused));

char monitor_license[] SEC("license") = "Dual BSD/GPL";
