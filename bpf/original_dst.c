/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
//go:build ignore

/*
 * cgroup/getsockopt: tells proxies that ask netfilter for a connection's original destination, instead of taking the socket's
 * own address for it. Nothing is rewritten on the way to the proxy, so that both are the same.
 */

#define SOL_IP 0
#define SOL_IPV6 41
#define SO_ORIGINAL_DST 80 /* and IP6T_SO_ORIGINAL_DST */

/* What an option's value may be longer than, but not be copied for programs. */
#define SOCKOPT_PAGE 4096

#define TCP_STATE_LISTEN 10 /* BPF_TCP_LISTEN */

static __always_inline void sock_local(struct bpf_sock *sk, union ip_addr *addr)
{
	if (sk->family == AF_INET)
		addr_from_v4(addr, sk->src_ip4);
	else
		addr_from_v6(addr, sk, src_ip6);
}

static __always_inline void sock_remote(struct bpf_sock *sk, union ip_addr *addr)
{
	if (sk->family == AF_INET)
		addr_from_v4(addr, sk->dst_ip4);
	else
		addr_from_v6(addr, sk, dst_ip6);
}

/*
 * Has the proxy accepted this connection from redir_steer? What an app or a machine has sent has the mark of what the outbound
 * listener accepts, which gets nothing else. What a peer has sent has the note of a listener that is steered to, and comes from an
 * address that is not the pod's: what the pod sends to itself, and a probe that is let through, have found a listener by its
 * address. What the proxy connects itself has neither.
 */
static __always_inline bool was_steered(struct bpf_sock *sk, __u64 cookie, const union ip_addr *local)
{
	struct flow_key flow = {.netns_cookie = cookie};
	__u32 mark = sk->mark & MARK_MASK;
	struct socket_verdict *verdict;
	union ip_addr remote;

	if (sk->protocol != IPPROTO_TCP || sk->state == TCP_STATE_LISTEN || !sk->dst_port)
		return false;
	if (mark == MARK_ACCEPT)
		return true;
	verdict = bpf_sk_storage_get(&sockets, sk, NULL, 0);
	if (!verdict || !verdict->listens || mark != MARK_PROXY || !socket_is_of_proxy(sk))
		return false;
	sock_remote(sk, &remote);
	if (addr_is_own(cookie, &remote))
		return false;
	__builtin_memcpy(flow.src, remote.bytes, sizeof(flow.src));
	__builtin_memcpy(flow.dst, local->bytes, sizeof(flow.dst));
	flow.sport = bpf_ntohs(sk->dst_port);
	flow.dport = sk->src_port;
	return !bpf_map_lookup_elem(&admitted, &flow);
}

/*
 * redir_original_dst: answers SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST on connections that were steered to the proxy. Every
 * other socket, option and buffer that is too small has the kernel's own answer. An AF_INET6 socket that talks IPv4 may be asked
 * for either. Attached to the cgroups of proxies, or to the node's; see pkg/loader.
 */
SEC("cgroup/getsockopt")
int redir_original_dst(struct bpf_sockopt *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct sockaddr_in6 *six;
	struct sockaddr_in *sin;
	union ip_addr local;
	__u64 cookie;

	/* The program has but the first page of a longer value. Of length 0, it leaves the answer as it is. */
	if (ctx->optlen > SOCKOPT_PAGE)
		ctx->optlen = 0;
	if (ctx->optname != SO_ORIGINAL_DST || (ctx->level != SOL_IP && ctx->level != SOL_IPV6) || !sk)
		return 1;
	cookie = bpf_get_netns_cookie(ctx);
	if (!pod_lookup(cookie))
		return 1;
	sock_local(sk, &local);
	if (!was_steered(sk, cookie, &local))
		return 1;

	if (ctx->level == SOL_IP) {
		sin = ctx->optval;
		if (!addr_is_mapped(&local) || (void *)(sin + 1) > ctx->optval_end)
			return 1;
		__builtin_memset(sin, 0, sizeof(*sin));
		sin->sin_family = AF_INET;
		sin->sin_port = bpf_htons(sk->src_port);
		sin->sin_addr.s_addr = local.words[3];
		ctx->optlen = sizeof(*sin);
	} else {
		six = ctx->optval;
		if (sk->family != AF_INET6 || (void *)(six + 1) > ctx->optval_end)
			return 1;
		__builtin_memset(six, 0, sizeof(*six));
		six->sin6_family = AF_INET6;
		six->sin6_port = bpf_htons(sk->src_port);
		__builtin_memcpy(&six->sin6_addr, local.bytes, sizeof(six->sin6_addr));
		ctx->optlen = sizeof(*six);
	}
	ctx->retval = 0;
	return 1;
}
