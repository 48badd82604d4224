/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
//go:build ignore

/*
 * sk_lookup: asked by the stack of one pod's network namespace which listener a SYN is for, after reassembly and header
 * parsing. Packets of established connections never come here.
 *
 * Every enrolment loads a copy, and the time that takes goes by the number of instructions the verifier walks through:
 * hence one loop for all three listeners.
 */

/* Values of proxy_port() that are no port. */
#define TO_APP 0
#define TO_NOBODY 1
#define TO_APP_AS_ASKED 2
#define REROUTED 3     /* to PORT_OUTBOUND, but counted by itself */
#define NOT_THE_PODS 4 /* to nobody */

/*
 * Gives the SYN to the proxy's newest listener on that port: when a proxy takes over from another, the older one gets no new
 * connections from then on, and loses none when it closes. Never to another member of the listener's SO_REUSEPORT group,
 * which an app with the proxy's user id can join.
 */
__noinline int assign_listener(struct bpf_sk_lookup *ctx, __u64 cookie, __u32 port)
{
	struct listener_key key = {.netns_cookie = cookie, .port = port};
	struct bpf_sock *sk;
	__u32 slot;
	int err;

#pragma clang loop unroll(disable)
	for (slot = SLOT_NEWEST_V6; slot < LISTENER_SLOTS; slot++) {
		key.slot = slot == SLOT_NEWEST_V6 && ctx->family == AF_INET ? SLOT_NEWEST_V4 : slot;
		sk = bpf_map_lookup_elem(&listeners, &key);
		if (!sk)
			continue;
		err = bpf_sk_assign(ctx, sk, BPF_SK_LOOKUP_F_NO_REUSEPORT);
		bpf_sk_release(sk);
		if (!err) /* else: a listener of the other address family */
			return 1;
	}
	return 0;
}

__noinline int count_steered(__u64 cookie, __u32 port, int assigned)
{
	struct netns_key key = {.netns_cookie = cookie};
	struct pod_counters *c = bpf_map_lookup_elem(&counters, &key);

	if (!c)
		return 0;
	if (assigned) {
		if (port == REROUTED)
			c->rerouted++;
		else if (port == PORT_OUTBOUND)
			c->outbound_steered++;
		else if (port == PORT_INBOUND)
			c->inbound_steered++;
		else
			c->hbone_steered++;
		return 0;
	}
	if (port == PORT_OUTBOUND || port == REROUTED)
		c->outbound_no_listener++;
	else if (port == PORT_INBOUND)
		c->inbound_no_listener++;
	else
		c->hbone_no_listener++;
	return 0;
}

/* Source and destination, the context's unused family being all zero. No branch: two paths double what is verified. */
static __always_inline void packet_addrs(struct bpf_sk_lookup *ctx, union ip_addr *src, union ip_addr *dst)
{
	__u32 mapped = ctx->family == AF_INET ? bpf_htonl(0xffff) : 0;

	src->words[0] = ctx_read32(ctx, remote_ip6[0]);
	src->words[1] = ctx_read32(ctx, remote_ip6[1]);
	src->words[2] = ctx_read32(ctx, remote_ip6[2]) | mapped;
	src->words[3] = ctx_read32(ctx, remote_ip6[3]) | ctx_read32(ctx, remote_ip4);
	dst->words[0] = ctx_read32(ctx, local_ip6[0]);
	dst->words[1] = ctx_read32(ctx, local_ip6[1]);
	dst->words[2] = ctx_read32(ctx, local_ip6[2]) | mapped;
	dst->words[3] = ctx_read32(ctx, local_ip6[3]) | ctx_read32(ctx, local_ip4);
}

/* For redir_bind4: where an address comes from. */
__noinline int note_machine(__u64 cookie, const union ip_addr *src, __u32 ifindex)
{
	struct own_addr_key key = {.netns_cookie = cookie};
	struct own_addr value = {.ifindex = ifindex};

	if (!src) /* never, but the verifier does not know */
		return 0;
	__builtin_memcpy(key.addr, src->bytes, sizeof(key.addr));
	return bpf_map_update_elem(&machines, &key, &value, BPF_ANY);
}

/*
 * Which of the proxy's listeners is this SYN for, or is it the app's? The order is that of the decisions in
 * docs/ARCHITECTURE.md.
 */
static __always_inline __u32 proxy_port(struct bpf_sk_lookup *ctx, __u64 cookie, const struct pod *pod)
{
	struct flow_key flow = {.netns_cookie = cookie};
	union ip_addr src, dst;

	packet_addrs(ctx, &src, &dst);

	/*
	 * By lo comes what sock_ops marked, for its route is "local default dev lo": the app's connections, and the proxy's
	 * to the app. And what is for loopback. What the pod sends to itself otherwise carries the index of the address's
	 * interface, though it travels over lo.
	 */
	if (ctx->ingress_ifindex == LOOPBACK_IFINDEX) {
		if (!addr_is_own(cookie, &dst))
			return PORT_OUTBOUND;
		return is_loop(ctx->local_port) ? TO_NOBODY : TO_APP;
	}

	__builtin_memcpy(flow.src, src.bytes, sizeof(flow.src));
	__builtin_memcpy(flow.dst, dst.bytes, sizeof(flow.dst));
	flow.sport = bpf_ntohs(ctx->remote_port);
	flow.dport = ctx->local_port;

	/*
	 * From the pod to itself. The stack drops IPv4 packets from outside that say so, but no IPv6 ones: of these the pod's
	 * own are known from connect().
	 */
	if (addr_is_own(cookie, &src)) {
		if (is_loop(ctx->local_port))
			return TO_NOBODY;
		return ctx->family == AF_INET || bpf_map_lookup_elem(&admitted, &flow) ? TO_APP : TO_NOBODY;
	}

	/* A machine behind the pod: its connections are like the pod's own, be they to the pod. */
	if (pod->has_exceptions && is_exception(cookie, EXCEPTION_INTERFACE, ctx->ingress_ifindex)) {
		if (addr_is_own(cookie, &dst) && (is_loop(ctx->local_port) || ctx->local_port == PORT_HBONE))
			return TO_NOBODY;
		note_machine(cookie, &src, ctx->ingress_ifindex);
		return REROUTED;
	}

	/* The pod's by a route only, or not yet known. The proxy's connection to it would leave the pod, and come here again. */
	if (!addr_is_own(cookie, &dst))
		return NOT_THE_PODS;

	/* From a process of the host that may. */
	if (bpf_map_lookup_elem(&admitted, &flow))
		return is_loop(ctx->local_port) || ctx->local_port == PORT_HBONE ? TO_NOBODY : TO_APP;

	/*
	 * A pod that asks for its inbound connections, or for those to this port. With all of them left to the app, what is for
	 * the proxy's own ports would find its listeners.
	 */
	if (is_left_to_app(cookie, pod, ctx->local_port))
		return TO_APP_AS_ASKED;
	if (pod->bypass_inbound && is_loop(ctx->local_port))
		return TO_NOBODY;

	/* The mesh tunnel ends at the proxy itself. Assigned, not passed: an app that listens there gets nothing. */
	return ctx->local_port == PORT_HBONE ? PORT_HBONE : PORT_INBOUND;
}

/*
 * redir_steer: hands new connections to the node proxy's listeners; without one they are dropped, never passed on. One
 * copy per pod, with the pod's cookie in it. Needs kernel 5.17 (ingress_ifindex).
 */
SEC("sk_lookup")
int redir_steer(struct bpf_sk_lookup *ctx)
{
	__u64 cookie = pod_netns_cookie();
	const struct pod *pod;
	__u32 port;
	int assigned;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	pod = pod_lookup(cookie);
	if (!pod)
		return SK_PASS;
	port = proxy_port(ctx, cookie, pod);
	if (port == TO_APP)
		return SK_PASS;
	if (port == TO_APP_AS_ASKED) {
		if (pod->bypass_inbound)
			count(cookie, bypassed_inbound);
		else
			count(cookie, excluded_inbound);
		return SK_PASS;
	}
	if (port == TO_NOBODY) {
		count(cookie, loops_dropped);
		return SK_DROP;
	}
	if (port == NOT_THE_PODS) {
		count(cookie, unowned_dropped);
		return SK_DROP;
	}
	assigned = assign_listener(ctx, cookie, port == REROUTED ? PORT_OUTBOUND : port);
	count_steered(cookie, port, assigned);
	barrier_var(assigned); /* the verifier does not know that it is 0 or 1, and wants a verdict to be */
	return assigned ? SK_PASS : SK_DROP;
}
