/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
//go:build ignore

/*
 * cgroup/sock_ops: looks at every TCP connect() and listen() below the cgroup it is attached to, and acts on those made
 * in an enrolled pod's network namespace.
 */

#define TCP_STATE_CLOSE 7 /* BPF_TCP_CLOSE */

/* Source and destination of the socket's connection. Of AF_INET6 sockets that talk IPv4, both are v4-mapped already. */
static __always_inline void connection_addrs(struct bpf_sock_ops *ctx, union ip_addr *src, union ip_addr *dst)
{
	if (ctx->family == AF_INET) {
		addr_from_v4(src, ctx_read32(ctx, local_ip4));
		addr_from_v4(dst, ctx_read32(ctx, remote_ip4));
	} else {
		addr_from_v6(src, ctx, local_ip6);
		addr_from_v6(dst, ctx, remote_ip6);
	}
}

static __always_inline void connection_flow(struct bpf_sock_ops *ctx, __u64 cookie, struct flow_key *flow)
{
	union ip_addr src, dst;

	connection_addrs(ctx, &src, &dst);
	flow->netns_cookie = cookie;
	__builtin_memcpy(flow->src, src.bytes, sizeof(flow->src));
	__builtin_memcpy(flow->dst, dst.bytes, sizeof(flow->dst));
	flow->sport = ctx->local_port;
	flow->dport = bpf_ntohl(ctx->remote_port);
}

/* Changes the bits that are ours. A changed mark drops the cached route, so the SYN is routed anew. */
static __always_inline int set_mark(struct bpf_sock_ops *ctx, __u32 old, __u32 mark)
{
	__u32 new = (old & ~MARK_MASK) | mark;

	return bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &new, sizeof(new));
}

/*
 * The last moment before the SYN is made: source address and port are chosen by the pod's own routes and stay. Plain
 * connects, Fast Open, MPTCP subflows and v4-mapped sockets all pass here.
 */
static __always_inline void on_connect(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u64 cookie)
{
	struct admission admission = {.by = ADMITTED_BY_PROXY};
	__u32 mark = sk->mark;
	bool proxy = (mark & MARK_MASK) == MARK_PROXY;
	union ip_addr src, dst;
	struct flow_key flow;
	char any_device[1] = "";

	connection_addrs(ctx, &src, &dst);

	if (addr_is_own(cookie, &dst)) {
		if (!proxy || addr_is_own(cookie, &src)) {
			count(cookie, own_address);
			return;
		}
		/*
		 * The proxy speaks to the app as the client. The app's answers to that foreign address must come back
		 * over lo: its accepted socket inherits this mark (tcp_fwmark_accept), and the rule sends it there.
		 */
		connection_flow(ctx, cookie, &flow);
		if (bpf_map_update_elem(&admitted, &flow, &admission, BPF_ANY))
			return; /* the steer program sends it to the proxy, which refuses itself */
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
		set_mark(ctx, mark, MARK_REPLY);
		count(cookie, proxy_to_app);
		return;
	}

	if (proxy) {
		count(cookie, proxy_outbound);
		return;
	}

	/* A socket bound to a device takes no route over lo. On failure the SYN leaves as it is, and the seal drops it. */
	if (sk->bound_dev_if && bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, any_device, sizeof(any_device))) {
		count(cookie, capture_failed);
		return;
	}
	if (set_mark(ctx, mark, MARK_CAPTURE)) {
		count(cookie, capture_failed);
		return;
	}
	count(cookie, outbound_captured);
}

/* The proxy's listeners are found by what they are (mark and port), never by a name that another could take. */
static __always_inline void on_listen(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u64 cookie)
{
	__u32 port = ctx->local_port;
	struct listener_key key = {.netns_cookie = cookie, .port = port};
	int err = 0;
	__u32 slot;

	if ((sk->mark & MARK_MASK) != MARK_PROXY) {
		/* tcp_fwmark_accept does not reach a listener that has a mark: its answers will not find the proxy. */
		if (sk->mark)
			count(cookie, marked_listeners);
		return;
	}
	if (port != PORT_OUTBOUND && port != PORT_INBOUND && port != PORT_HBONE)
		return;

#pragma clang loop unroll(disable)
	for (slot = SLOT_FIRST; slot < LISTENER_SLOTS; slot++) {
		key.slot = slot;
		err = bpf_sock_hash_update(ctx, &listeners, &key, BPF_NOEXIST);
		if (err != -EEXIST)
			break;
	}
	if (err) {
		count(cookie, listeners_rejected);
		return;
	}
	/* An IPv6 listener that does not take IPv4 does no harm there: it cannot be assigned, and the next one is looked up. */
	key.slot = SLOT_NEWEST_V4;
	bpf_sock_hash_update(ctx, &listeners, &key, BPF_ANY);
	if (ctx->family == AF_INET6) {
		key.slot = SLOT_NEWEST_V6;
		bpf_sock_hash_update(ctx, &listeners, &key, BPF_ANY);
	}
	count(cookie, listeners_added);
}

/* redir_mark: marks what leaves an enrolled pod, admits what the proxy sends to its app, notes where the proxy listens.
 * Needs kernel 5.15 (netns cookie in sock_ops). */
SEC("sockops")
int redir_mark(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct flow_key flow;
	__u64 cookie;

	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		cookie = bpf_get_netns_cookie(ctx);
		if (!sk || !pod_lookup(cookie))
			break;
		if (ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
			on_connect(ctx, sk, cookie);
		else
			on_listen(ctx, sk, cookie);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		/* Asked for by on_connect on admitted connections only; also seen when the pod is enrolled no more. */
		if (ctx->args[1] != TCP_STATE_CLOSE)
			break;
		connection_flow(ctx, bpf_get_netns_cookie(ctx), &flow);
		bpf_map_delete_elem(&admitted, &flow);
		break;
	}
	return 1;
}
