/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
//go:build ignore

/*
 * cgroup/sock_create, cgroup/bind4 and 6, cgroup/connect4 and 6, cgroup/setsockopt: run in the context of the process that acts,
 * and so can tell who it is. What the later hooks must know of that, they leave with the socket.
 */

#define SOCK_STREAM 1

#define SOL_PACKET 263
#define PACKET_QDISC_BYPASS 20
#define SOL_XDP 283

/* Is the current process in a cgroup with that role, or below one? */
static __always_inline bool current_has_role(enum cgroup_role role)
{
	struct cgroup_value *value;
	struct cgroup_key key;
	__u32 level;

	for (level = 1; level <= CGROUP_LEVELS; level++) {
		key.cgroup_id = bpf_get_current_ancestor_cgroup_id(level);
		if (!key.cgroup_id)
			break;
		value = bpf_map_lookup_elem(&cgroups, &key);
		if (value && value->role == role)
			return true;
	}
	return false;
}

/* Is the mark to be given to the proxy's sockets, for a proxy that does not know of it? */
static __always_inline bool proxy_gets_mark(void)
{
	const struct node_config *cfg = config_read();

	return cfg && cfg->proxy_identity == PROXY_IDENTITY_CGROUP_ALONE;
}

/* redir_create: remembers which sockets the proxy has made, and marks them if asked to. A mark that is set later replaces it. */
SEC("cgroup/sock_create")
int redir_create(struct bpf_sock *ctx)
{
	struct cgroup_key key = {.cgroup_id = bpf_get_current_cgroup_id()};
	struct cgroup_value *value = bpf_map_lookup_elem(&cgroups, &key);
	struct socket_verdict *verdict;

	if (!value || value->role != CGROUP_PROXY)
		return 1;
	verdict = bpf_sk_storage_get(&sockets, ctx, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (verdict)
		verdict->by_proxy = 1;
	if (proxy_gets_mark() && !ctx->mark && pod_lookup(bpf_get_netns_cookie(ctx)))
		ctx->mark = MARK_PROXY;
	return 1; /* without the note the socket counts as an app's, and is captured */
}

/* May the current process probe pods? */
static __always_inline bool current_may_probe(const struct node_config *cfg)
{
	switch (cfg->probe_source) {
	case PROBE_SOURCE_HOST:
		return true;
	case PROBE_SOURCE_KUBELET:
		return current_has_role(CGROUP_KUBELET);
	default:
		return !current_has_role(CGROUP_PODS);
	}
}

/* The pod that a TCP connection from the host to this address probes, or 0. */
static __always_inline __u64 probe_target_of(struct bpf_sock_addr *ctx, const struct node_config *cfg,
					     const union ip_addr *dst)
{
	struct probe_target_key key;
	struct probe_target *target;

	if (ctx->type != SOCK_STREAM || ctx->protocol != IPPROTO_TCP)
		return 0;
	__builtin_memcpy(key.addr, dst->bytes, sizeof(key.addr));
	target = bpf_map_lookup_elem(&probe_targets, &key);
	if (!target || !current_may_probe(cfg))
		return 0;
	return target->netns_cookie;
}

/* Leaves with the socket whom it probes. A socket may be connected again, to somebody else. */
static __always_inline void note_probe(struct bpf_sock_addr *ctx, __u64 target)
{
	struct socket_verdict *verdict;

	if (!ctx->sk)
		return;
	verdict = bpf_sk_storage_get(&sockets, ctx->sk, NULL, target ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	if (verdict)
		verdict->probe_target = target;
}

static __always_inline bool addr_is_set(const struct in6_addr *a)
{
	return a->s6_addr32[0] | a->s6_addr32[1] | a->s6_addr32[2] | a->s6_addr32[3];
}

static __always_inline const struct node_config *host_config(struct bpf_sock_addr *ctx)
{
	return is_host(bpf_get_netns_cookie(ctx)) ? config_read() : NULL;
}

/*
 * The proxy speaks to the app of its pod as a client: bound to lo and with the mark that keeps the connection there; see
 * on_connect in sock_ops.c. It has to be bound before the kernel chooses a port: only then does that see which ports other such
 * connections have, and gives none of them away twice.
 */
static __always_inline void prepare_proxy(struct bpf_sock_addr *ctx, struct bpf_sock *sk, const union ip_addr *src,
					  const union ip_addr *dst)
{
	__u64 cookie = bpf_get_netns_cookie(ctx);
	char device[3] = "lo";
	__u32 mark = sk->mark;

	if (ctx->type != SOCK_STREAM || (mark & MARK_MASK) != MARK_PROXY || !pod_lookup(cookie) ||
	    !socket_is_proxys(sk))
		return;
	if (!addr_is_own(cookie, dst) || addr_is_own(cookie, src))
		return;
	mark = (mark & ~MARK_MASK) | MARK_REPLY;
	/* When either fails, on_connect counts it. */
	if (!bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, device, sizeof(device)))
		bpf_setsockopt(ctx, SOL_SOCKET, SO_MARK, &mark, sizeof(mark));
}

/*
 * Does the proxy bind a socket to the address of a machine behind its pod, to speak for it? The answers would be routed on to the
 * machine, which knows of no connection. So it speaks as the pod does, as the pod's own masquerading would have it.
 */
static __always_inline bool speaks_for_machine(struct bpf_sock_addr *ctx, const union ip_addr *src)
{
	struct own_addr_key key = {};

	if (ctx->type != SOCK_STREAM || !ctx->sk || (ctx->sk->mark & MARK_MASK) != MARK_PROXY)
		return false;
	key.netns_cookie = bpf_get_netns_cookie(ctx);
	__builtin_memcpy(key.addr, src->bytes, sizeof(key.addr));
	return bpf_map_lookup_elem(&machines, &key) && socket_is_proxys(ctx->sk);
}

/* redir_bind4: the proxy is not bound to the address of a machine behind its pod, but to none. */
SEC("cgroup/bind4")
int redir_bind4(struct bpf_sock_addr *ctx)
{
	union ip_addr src;

	addr_from_v4(&src, ctx->user_ip4);
	if (speaks_for_machine(ctx, &src))
		ctx->user_ip4 = 0;
	return 1;
}

/* redir_bind6: the same for IPv6, and for AF_INET6 sockets that talk IPv4. */
SEC("cgroup/bind6")
int redir_bind6(struct bpf_sock_addr *ctx)
{
	union ip_addr src;

	addr_from_v6(&src, ctx, user_ip6);
	if (speaks_for_machine(ctx, &src))
		ctx_write_v6(ctx, user_ip6, 0, 0, addr_is_mapped(&src) ? bpf_htonl(0xffff) : 0, 0);
	return 1;
}

/*
 * redir_connect4: on the host, a probe of an enrolled pod gets the probe address as its source; elsewhere, what is for a DNS
 * server goes to the proxy (dns.c).
 */
SEC("cgroup/connect4")
int redir_connect4(struct bpf_sock_addr *ctx)
{
	const struct node_config *cfg = host_config(ctx);
	struct sockaddr_in source = {.sin_family = AF_INET};
	struct bpf_sock *sk = ctx->sk;
	union ip_addr src, dst;
	__u64 target;

	addr_from_v4(&dst, ctx->user_ip4);
	if (sk && sk->src_ip4) {
		addr_from_v4(&src, sk->src_ip4);
		prepare_proxy(ctx, sk, &src, &dst);
	}
	if (!cfg)
		return dns_connect4(ctx);
	target = probe_target_of(ctx, cfg, &dst);
	if (target && cfg->probe_identity == PROBE_IDENTITY_SNAT) {
		__builtin_memcpy(&source.sin_addr, &cfg->probe_addr_v4[12], sizeof(source.sin_addr));
		/* A socket that is bound already, or an address that is gone: then it is no probe, and is captured. */
		if (!source.sin_addr.s_addr || bpf_bind(ctx, (struct sockaddr *)&source, sizeof(source)))
			target = 0;
	}
	note_probe(ctx, target);
	return 1;
}

/* redir_connect6: the same for IPv6, and for AF_INET6 sockets that talk IPv4. */
SEC("cgroup/connect6")
int redir_connect6(struct bpf_sock_addr *ctx)
{
	const struct node_config *cfg = host_config(ctx);
	struct sockaddr_in6 source = {.sin6_family = AF_INET6};
	struct bpf_sock *sk = ctx->sk;
	union ip_addr src, dst;
	bool mapped;
	__u64 target;

	addr_from_v6(&dst, ctx, user_ip6);
	if (sk) {
		src.words[0] = sk->src_ip6[0];
		src.words[1] = sk->src_ip6[1];
		src.words[2] = sk->src_ip6[2];
		src.words[3] = sk->src_ip6[3];
		if (src.words[0] | src.words[1] | src.words[2] | src.words[3])
			prepare_proxy(ctx, sk, &src, &dst);
	}
	if (!cfg)
		return dns_connect6(ctx);
	mapped = addr_is_mapped(&dst);
	target = probe_target_of(ctx, cfg, &dst);
	if (target && cfg->probe_identity == PROBE_IDENTITY_SNAT) {
		__builtin_memcpy(&source.sin6_addr, mapped ? cfg->probe_addr_v4 : cfg->probe_addr_v6,
				 sizeof(source.sin6_addr));
		if (!addr_is_set(&source.sin6_addr) || bpf_bind(ctx, (struct sockaddr *)&source, sizeof(source)))
			target = 0;
	}
	note_probe(ctx, target);
	return 1;
}

/*
 * redir_setsockopt: in an enrolled pod, refuses what would put packets on the wire without passing tc egress, where the seal
 * is: packet sockets that bypass the queueing discipline, and AF_XDP sockets. No ordinary option passes by any look-up.
 */
SEC("cgroup/setsockopt")
int redir_setsockopt(struct bpf_sockopt *ctx)
{
	__u64 cookie;

	if (!(ctx->level == SOL_PACKET && ctx->optname == PACKET_QDISC_BYPASS) && ctx->level != SOL_XDP) {
		ctx->optlen = ctx->optlen > 4096 ? 0 : ctx->optlen;
		return 1;
	}
	cookie = bpf_get_netns_cookie(ctx);
	if (!pod_lookup(cookie))
		return 1;
	count(cookie, raw_bypass_refused);
	return 0; /* EPERM */
}
