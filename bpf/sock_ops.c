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

/* The connection as its receiver sees it. */
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

/* Admits a flow until the connection closes. */
static __always_inline int admit(struct bpf_sock_ops *ctx, const struct flow_key *flow, enum admitted_by by)
{
	/* With room for what a later version's values have: pkg/loader lets this program write into such a map, too. */
	struct {
		struct admission admission;
		__u32 later[7];
	} value = {.admission.by = by};
	int err = bpf_map_update_elem(&admitted, flow, &value, BPF_ANY);

	if (!err)
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
	return err;
}

/*
 * Admits a connection of the pod's with itself until it closes. Of IPv4 the stack knows that it is not from outside, and what is
 * for loopback comes by lo.
 */
static __always_inline void admit_own(struct bpf_sock_ops *ctx, __u64 cookie, const union ip_addr *dst)
{
	struct flow_key flow;

	if (ctx->family != AF_INET6 || addr_is_loopback(dst))
		return;
	connection_flow(ctx, cookie, &flow);
	if (admit(ctx, &flow, ADMITTED_BY_POD))
		count(cookie, capture_failed);
}

/*
 * The last moment before the SYN is made: source address and port are chosen by the pod's own routes and stay. Plain
 * connects, Fast Open, MPTCP subflows and v4-mapped sockets all pass here.
 */
static __always_inline void on_connect(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u64 cookie,
				       const struct pod *pod)
{
	char none[1] = "", outward[16];
	__u32 mark = sk->mark;
	bool proxy = socket_is_proxys(sk);
	union ip_addr src, dst;

	if (!proxy && (mark & MARK_MASK) == MARK_PROXY)
		count(cookie, foreign_marks);
	connection_addrs(ctx, &src, &dst);

	if (addr_is_own(cookie, &dst)) {
		/*
		 * The proxy speaks to the app as the client. The app's answers to that foreign address must come back
		 * over lo: its accepted socket inherits this mark (tcp_fwmark_accept), and the rule sends it there.
		 *
		 * Bound to lo, the SYN takes the same rule instead of the local table, and so comes in with lo's index: by
		 * that it is known to be from here. And by that its connection is kept apart from one of the client's own
		 * that happens to have the same addresses and ports; see on_accepted. The cgroup program has seen to both.
		 */
		if ((mark & MARK_MASK) == MARK_REPLY && sk->bound_dev_if == LOOPBACK_IFINDEX) {
			count(cookie, proxy_to_app);
		} else if (!proxy || addr_is_own(cookie, &src)) {
			admit_own(ctx, cookie, &dst);
			count(cookie, own_address);
		} else {
			count(cookie, capture_failed); /* the steer program takes it for a peer's */
		}
		return;
	}

	if (proxy) {
		/*
		 * By a local route it would come in again by lo, look like the app's, and be proxied for ever. Bound to a device
		 * it takes no such route.
		 */
		if (pod->exit_ifname[0]) {
			__builtin_memcpy(outward, pod->exit_ifname, sizeof(outward));
			if (bind_to_device(ctx, outward))
				count(cookie, capture_failed);
		}
		count(cookie, proxy_outbound);
		return;
	}

	/* The seal knows them too. */
	if (pod->has_exceptions && is_excluded(cookie, &dst, bpf_ntohl(ctx->remote_port))) {
		count(cookie, excluded_outbound);
		return;
	}

	/* A socket bound to a device takes no route over lo. On failure the SYN leaves as it is, and the seal drops it. */
	if ((sk->bound_dev_if && bind_to_device(ctx, none)) || set_mark(ctx, mark, MARK_CAPTURE)) {
		count(cookie, capture_failed);
		return;
	}
	count(cookie, outbound_captured);
}

/*
 * A connection of the host's. The cgroup program has left with the socket whom it may probe; the destination is looked up
 * again, for another program may have changed it since. The flow passes to the app's own listener until the socket closes.
 */
static __always_inline void on_host_connect(struct bpf_sock_ops *ctx, struct bpf_sock *sk)
{
	struct socket_verdict *verdict = bpf_sk_storage_get(&sockets, sk, NULL, 0);
	struct probe_target_key key;
	struct probe_target *target;
	struct flow_key flow;

	if (!verdict || !verdict->probe_target)
		return;
	connection_flow(ctx, verdict->probe_target, &flow);
	__builtin_memcpy(key.addr, flow.dst, sizeof(key.addr));
	target = bpf_map_lookup_elem(&probe_targets, &key);
	if (!target || target->netns_cookie != verdict->probe_target)
		return;
	if (!admit(ctx, &flow, ADMITTED_BY_PROBE))
		count(flow.netns_cookie, probes_admitted);
}

/* A connection that was admitted when it was made ends: its flow is admitted no more. */
static __always_inline void on_close(struct bpf_sock_ops *ctx, struct bpf_sock *sk)
{
	struct socket_verdict *verdict = bpf_sk_storage_get(&sockets, sk, NULL, 0);
	__u64 cookie = verdict ? verdict->probe_target : 0;
	struct flow_key flow;

	connection_flow(ctx, cookie ? cookie : bpf_get_netns_cookie(ctx), &flow);
	bpf_map_delete_elem(&admitted, &flow);
}

/*
 * An app has accepted a connection. While the steer program is away, for somebody has detached it, a marked SYN finds a
 * listener of the pod's own on that port, as if it were the server outside; IPv6 has the answer find its way, too. So what is for
 * none of the pod's addresses is bound to a device that there cannot be: nothing of it is sent any more, and what comes for it is
 * answered with a RST.
 */
static __always_inline void on_accepted_by_app(struct bpf_sock_ops *ctx, __u64 cookie, const union ip_addr *local)
{
	int nowhere = 0x7fffffff;

	if (addr_is_own(cookie, local))
		return;
	count(cookie, capture_failed);
	if (bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTOIFINDEX, &nowhere, sizeof(nowhere)))
		count(cookie, bind_failed);
}

/*
 * An inbound connection is two in one network namespace: peer to proxy, and proxy to app with the peer's address as source.
 * Their addresses are the same, and the port that the proxy has chosen may well be one that the peer uses too. The stack
 * tells connections with the same addresses and ports apart by the device they are bound to, so these are: the app's to lo,
 * and the peer's to the pod's interface, if it has but one.
 */
static __always_inline void on_accepted(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u64 cookie,
					const struct pod *pod)
{
	char device[16] = "lo";
	union ip_addr peer, local;
	__u32 mark = sk->mark & MARK_MASK;

	if (mark == MARK_ACCEPT)
		return;
	connection_addrs(ctx, &local, &peer);
	if (mark != MARK_REPLY && mark != MARK_PROXY) {
		on_accepted_by_app(ctx, cookie, &local);
		return;
	}
	if (!addr_is_own(cookie, &local))
		return;
	if (mark == MARK_PROXY) {
		/* A DNS query by TCP comes over lo, and so must the answer go. */
		if (!pod->ifname[0] || addr_is_loopback(&local))
			return;
		__builtin_memcpy(device, pod->ifname, sizeof(device));
	}
	if (bind_to_device(ctx, device))
		count(cookie, bind_failed);
}

/* The proxy's listeners are found by what they are (mark and port), never by a name that another could take. */
static __always_inline void on_listen(struct bpf_sock_ops *ctx, struct bpf_sock *sk, __u64 cookie)
{
	__u32 port = ctx->local_port;
	struct listener_key key = {.netns_cookie = cookie, .port = port};
	struct socket_verdict *verdict;
	char none[1] = "";
	int err = 0;
	__u32 slot;

	if (!socket_is_proxys(sk)) {
		if ((sk->mark & MARK_MASK) == MARK_PROXY)
			count(cookie, foreign_marks);
		/* tcp_fwmark_accept does not reach a listener that has a mark: its answers will not find the proxy. */
		if (sk->mark)
			count(cookie, marked_listeners);
		/* A listener bound to a device does not hear the proxy, which speaks over lo. Peers are kept off all the same. */
		if (sk->bound_dev_if && sk->bound_dev_if != LOOPBACK_IFINDEX && !bind_to_device(ctx, none))
			count(cookie, unbound_listeners);
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

	/*
	 * What is accepted for an app's connection speaks to that app alone, over lo. With the proxy's mark its packets would
	 * be answered with the same mark where there is no socket to answer (fwmark_reflect; TIME_WAIT): out of the pod. The mark
	 * is one of its own, for where machines are behind the pod, what is accepted for them takes the pod's own routes. It tells
	 * all that there is to know, so the note goes: each accepted connection would make a copy of it.
	 */
	if (port == PORT_OUTBOUND && !set_mark(ctx, sk->mark, MARK_ACCEPT)) {
		bpf_sk_storage_delete(&sockets, sk);
		return;
	}
	verdict = bpf_sk_storage_get(&sockets, sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (verdict)
		verdict->listens = port;
}

/* redir_mark: marks what leaves an enrolled pod and what the proxy sends to its app, and notes where the proxy listens.
 * Needs kernel 5.15 (netns cookie in sock_ops). */
SEC("sockops")
int redir_mark(struct bpf_sock_ops *ctx)
{
	const struct pod *pod;
	struct bpf_sock *sk;
	__u64 cookie;

	/* Each connection asks for a dozen other things, too: they are answered first. */
	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_STATE_CB:
		break;
	default:
		return 1;
	}
	sk = ctx->sk;
	if (!sk)
		return 1;
	if (ctx->op == BPF_SOCK_OPS_STATE_CB) {
		if (ctx->args[1] == TCP_STATE_CLOSE)
			on_close(ctx, sk);
		return 1;
	}

	cookie = bpf_get_netns_cookie(ctx);
	pod = pod_lookup(cookie);
	if (!pod) {
		if (ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB && is_host(cookie))
			on_host_connect(ctx, sk);
		return 1;
	}
	if (ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
		on_connect(ctx, sk, cookie, pod);
	else if (ctx->op == BPF_SOCK_OPS_TCP_LISTEN_CB)
		on_listen(ctx, sk, cookie);
	else
		on_accepted(ctx, sk, cookie, pod);
	return 1;
}
