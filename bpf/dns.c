/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
//go:build ignore

/*
 * cgroup/connect, sendmsg, recvmsg and getpeername, each for both families: DNS queries of a pod's sockets go to the proxy's
 * DNS server on the pod's loopback, and its answers come from the server that was asked.
 *
 * A socket that is not connected may have queries with several servers at once, and all answers come from the proxy's one
 * address. No hook of the client's sees more of an answer than the address that it comes from. So each query gets a source
 * address of its own server, the tag; the proxy answers to that address; and as it does so, its own sendmsg passes here: the
 * answer is sent to the client's true address, from the tag. Nothing looks into packets, and nothing depends on their order.
 * docs/decisions/0007-dns-by-socket.md has the other ways that were looked at.
 */

/* Of the tags' addresses: 127.53.0.0/16, and a /112 that nobody else has. Their last 16 bits are the tag. */
#define DNS_TAGS_V4 0x7f350000
#define DNS_TAGS_V6_0 0xfd726564
#define DNS_TAGS_V6_1 0x69720053
#define DNS_TAG_MASK 0xffff

/* The lower bits of a tag are the server's index with its socket; the upper tell apart the addresses that sockets are bound to. */
#define DNS_TAG_SERVER_BITS 4
#define DNS_TAG_BOUND_MASK 0xfff

_Static_assert(DNS_SERVERS == 1 << DNS_TAG_SERVER_BITS, "a tag has room for each server's index");

static __always_inline bool addr_equal(const union ip_addr *a, const __u8 *b)
{
	const __u64 *x = (const void *)a->bytes, *y = (const void *)b;

	return x[0] == y[0] && x[1] == y[1];
}

static __always_inline bool addr_is_zero(const __u8 *a)
{
	const __u64 *x = (const void *)a;

	return !(x[0] | x[1]);
}

/* To no address in particular: the kernel takes that for loopback. */
static __always_inline bool addr_is_unspecified(const union ip_addr *a)
{
	return !a->words[3] && (addr_is_mapped(a) || addr_is_zero(a->bytes));
}

/* The tag that an address carries, or -1. */
static __always_inline int dns_tag_of(const union ip_addr *a)
{
	__u32 last = bpf_ntohl(a->words[3]);

	if (addr_is_mapped(a))
		return (last & ~DNS_TAG_MASK) == DNS_TAGS_V4 ? (int)(last & DNS_TAG_MASK) : -1;
	if (a->words[0] != bpf_htonl(DNS_TAGS_V6_0) || a->words[1] != bpf_htonl(DNS_TAGS_V6_1) || a->words[2])
		return -1;
	return last & ~DNS_TAG_MASK ? -1 : (int)last;
}

/* Is this the destination of a query that is to be captured? */
static __always_inline bool dns_is_captured(struct bpf_sock_addr *ctx, __u64 cookie, const union ip_addr *dst)
{
	const struct pod *pod;

	if (ctx->protocol != IPPROTO_UDP && ctx->protocol != IPPROTO_TCP)
		return false;
	pod = pod_lookup(cookie);
	if (!pod || !pod->dns_capture || addr_is_loopback(dst) || addr_is_unspecified(dst))
		return false;
	return !ctx->sk || !socket_is_proxys(ctx->sk);
}

/* A socket that is connected to the proxy by its own wish, not by ours, is to see that. */
static __always_inline void dns_forget(struct bpf_sock_addr *ctx)
{
	struct dns_note *note;

	if (ctx->user_port != bpf_htons(PORT_DNS) || !ctx->sk)
		return;
	note = bpf_sk_storage_get(&dns_notes, ctx->sk, NULL, 0);
	if (note)
		__builtin_memset(note->connected, 0, sizeof(note->connected));
}

/*
 * A socket connects to a DNS server: it is connected to the proxy, and the note says to whom it believes to be. A socket that
 * is bound to a device does not reach lo.
 */
static __always_inline int dns_connect(struct bpf_sock_addr *ctx, __u64 cookie, const union ip_addr *dst)
{
	struct dns_note *note = NULL;
	char none[1] = "";

	if (ctx->sk)
		note = bpf_sk_storage_get(&dns_notes, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!note || (ctx->sk->bound_dev_if && bind_to_device(ctx, none))) {
		count(cookie, dns_refused);
		return 0;
	}
	__builtin_memcpy(note->connected, dst->bytes, sizeof(note->connected));
	count(cookie, dns_captured);
	return 1;
}

static __always_inline int dns_connect4(struct bpf_sock_addr *ctx)
{
	__u64 cookie;
	union ip_addr dst;

	if (ctx->user_port != bpf_htons(PORT_DOMAIN)) {
		dns_forget(ctx);
		return 1;
	}
	cookie = bpf_get_netns_cookie(ctx);
	addr_from_v4(&dst, ctx->user_ip4);
	if (!dns_is_captured(ctx, cookie, &dst))
		return 1;
	if (!dns_connect(ctx, cookie, &dst))
		return 0;
	ctx->user_ip4 = bpf_htonl(0x7f000001);
	ctx->user_port = bpf_htons(PORT_DNS);
	return 1;
}

static __always_inline int dns_connect6(struct bpf_sock_addr *ctx)
{
	__u64 cookie;
	union ip_addr dst;
	bool mapped;

	if (ctx->user_port != bpf_htons(PORT_DOMAIN)) {
		dns_forget(ctx);
		return 1;
	}
	cookie = bpf_get_netns_cookie(ctx);
	addr_from_v6(&dst, ctx, user_ip6);
	if (!dns_is_captured(ctx, cookie, &dst))
		return 1;
	if (!dns_connect(ctx, cookie, &dst))
		return 0;
	mapped = addr_is_mapped(&dst);
	ctx->user_ip6[0] = 0;
	ctx->user_ip6[1] = 0;
	ctx->user_ip6[2] = mapped ? bpf_htonl(0xffff) : 0;
	ctx->user_ip6[3] = mapped ? bpf_htonl(0x7f000001) : bpf_htonl(1);
	ctx->user_port = bpf_htons(PORT_DNS);
	return 1;
}

/* The index of a server in a socket's note. Two threads that send at once get two, be it for the same server. */
static __always_inline __u32 dns_server_index(struct dns_note *note, const union ip_addr *server)
{
	__u32 i;

#pragma clang loop unroll(disable)
	for (i = 0; i < DNS_SERVERS; i++) {
		if (addr_equal(server, note->servers[i]))
			return i;
	}
	i = __sync_fetch_and_add(&note->used, 1) % DNS_SERVERS;
	__builtin_memcpy(note->servers[i], server->bytes, sizeof(note->servers[i]));
	return i;
}

/* What becomes of a query. */
enum dns_route {
	DNS_REFUSED,
	DNS_TAGGED,    /* to the proxy, from the tag */
	DNS_UNTAGGED,  /* to the proxy; the answer says nothing of the server */
	DNS_ON_DEVICE, /* the same, on a socket that this send still takes for bound to a device */
};

/*
 * An unconnected socket sends a query. bound is the address that the socket is bound to, all zero if to none. The kernel has
 * read the socket's device before it asks us: unbinding helps from the next datagram on.
 */
static __always_inline enum dns_route dns_send(struct bpf_sock_addr *ctx, __u64 cookie, const union ip_addr *dst,
					       const union ip_addr *bound, __u32 *tag)
{
	struct dns_bound_key key = {.netns_cookie = cookie};
	struct dns_note *note = NULL;
	struct dns_bound value;
	char none[1] = "";

	if (ctx->sk)
		note = bpf_sk_storage_get(&dns_notes, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!note)
		return DNS_REFUSED;
	if (ctx->sk->bound_dev_if) {
		if (bind_to_device(ctx, none) || !addr_is_zero(bound->bytes))
			return DNS_REFUSED;
		__builtin_memcpy(note->connected, dst->bytes, sizeof(note->connected));
		return DNS_ON_DEVICE;
	}
	/* Connected to it by us, and yet given the address: the socket hears nobody but the proxy's address itself. */
	if (addr_equal(dst, note->connected) && ctx->sk->dst_port == bpf_htons(PORT_DNS))
		return DNS_UNTAGGED;

	*tag = dns_server_index(note, dst);
	if (addr_is_zero(bound->bytes))
		return DNS_TAGGED;
	key.tag =
		(bound->words[0] ^ bound->words[1] ^ bound->words[2] ^ bpf_ntohl(bound->words[3])) & DNS_TAG_BOUND_MASK;
	key.tag = key.tag ?: 1;
	key.port = ctx->sk->src_port;
	__builtin_memcpy(value.addr, bound->bytes, sizeof(value.addr));
	if (bpf_map_update_elem(&dns_bounds, &key, &value, BPF_ANY))
		return DNS_REFUSED;
	*tag |= key.tag << DNS_TAG_SERVER_BITS;
	return DNS_TAGGED;
}

/*
 * The proxy answers to a tag: where does the client that has it listen? All zero: it is bound to no address. False: it is not
 * known any more.
 */
static __always_inline bool dns_client_addr(struct bpf_sock_addr *ctx, int tag, union ip_addr *addr)
{
	struct dns_bound_key key = {.tag = (__u32)tag >> DNS_TAG_SERVER_BITS};
	struct dns_bound *bound;

	__builtin_memset(addr, 0, sizeof(*addr));
	if (!key.tag)
		return true;
	key.netns_cookie = bpf_get_netns_cookie(ctx);
	key.port = bpf_ntohs(ctx->user_port);
	bound = bpf_map_lookup_elem(&dns_bounds, &key);
	if (!bound)
		return false;
	__builtin_memcpy(addr->bytes, bound->addr, sizeof(addr->bytes));
	return true;
}

/*
 * The tag that is answered to, or -1 if it is no answer. Who made the socket does not matter: nobody else sends to a tag from
 * the port that answers.
 */
static __always_inline int dns_answered_tag(struct bpf_sock_addr *ctx, const union ip_addr *dst)
{
	return ctx->sk && ctx->sk->src_port == PORT_DNS ? dns_tag_of(dst) : -1;
}

/* redir_sendmsg4: an IPv4 query of a socket that is not connected, or the proxy's answer to one. */
SEC("cgroup/sendmsg4")
int redir_sendmsg4(struct bpf_sock_addr *ctx)
{
	union ip_addr dst, other;
	__u32 tag = 0;
	__u64 cookie;
	int answers;

	addr_from_v4(&dst, ctx->user_ip4);
	answers = dns_answered_tag(ctx, &dst);
	if (answers >= 0) {
		if (!dns_client_addr(ctx, answers, &other))
			return 0;
		ctx->msg_src_ip4 = dst.words[3];
		ctx->user_ip4 = addr_is_zero(other.bytes) ? bpf_htonl(0x7f000001) : other.words[3];
		return 1;
	}
	if (ctx->user_port != bpf_htons(PORT_DOMAIN))
		return 1;
	cookie = bpf_get_netns_cookie(ctx);
	if (!dns_is_captured(ctx, cookie, &dst))
		return 1;
	__builtin_memset(&other, 0, sizeof(other));
	if (ctx->sk && ctx->sk->src_ip4)
		addr_from_v4(&other, ctx->sk->src_ip4);
	switch (dns_send(ctx, cookie, &dst, &other, &tag)) {
	case DNS_REFUSED:
		count(cookie, dns_refused);
		return 0;
	case DNS_TAGGED:
		ctx->msg_src_ip4 = bpf_htonl(DNS_TAGS_V4 | (tag & DNS_TAG_MASK));
		ctx->user_ip4 = bpf_htonl(0x7f000001);
		break;
	case DNS_ON_DEVICE:
		/* To no address: that is to the source address by lo, whatever the device. */
		ctx->msg_src_ip4 = bpf_htonl(0x7f000001);
		ctx->user_ip4 = 0;
		break;
	case DNS_UNTAGGED:
		ctx->user_ip4 = bpf_htonl(0x7f000001);
		break;
	}
	ctx->user_port = bpf_htons(PORT_DNS);
	count(cookie, dns_captured);
	return 1;
}

#define ctx_write_v6(ctx, field, w0, w1, w2, w3)                                                                       \
	do {                                                                                                           \
		(ctx)->field[0] = (w0);                                                                                \
		(ctx)->field[1] = (w1);                                                                                \
		(ctx)->field[2] = (w2);                                                                                \
		(ctx)->field[3] = (w3);                                                                                \
	} while (0)

/* redir_sendmsg6: the same for IPv6. What an AF_INET6 socket sends to an IPv4 address passes redir_sendmsg4. */
SEC("cgroup/sendmsg6")
int redir_sendmsg6(struct bpf_sock_addr *ctx)
{
	union ip_addr dst, other;
	__u32 tag = 0;
	__u64 cookie;
	int answers;

	addr_from_v6(&dst, ctx, user_ip6);
	answers = dns_answered_tag(ctx, &dst);
	if (answers >= 0) {
		if (!dns_client_addr(ctx, answers, &other))
			return 0;
		if (addr_is_zero(other.bytes))
			other.words[3] = bpf_htonl(1);
		ctx_write_v6(ctx, msg_src_ip6, dst.words[0], dst.words[1], dst.words[2], dst.words[3]);
		ctx_write_v6(ctx, user_ip6, other.words[0], other.words[1], other.words[2], other.words[3]);
		return 1;
	}
	if (ctx->user_port != bpf_htons(PORT_DOMAIN))
		return 1;
	cookie = bpf_get_netns_cookie(ctx);
	if (!dns_is_captured(ctx, cookie, &dst))
		return 1;
	__builtin_memset(&other, 0, sizeof(other));
	if (ctx->sk)
		addr_from_v6(&other, ctx->sk, src_ip6);
	switch (dns_send(ctx, cookie, &dst, &other, &tag)) {
	case DNS_TAGGED:
		ctx_write_v6(ctx, msg_src_ip6, bpf_htonl(DNS_TAGS_V6_0), bpf_htonl(DNS_TAGS_V6_1), 0,
			     bpf_htonl(tag & DNS_TAG_MASK));
		break;
	case DNS_UNTAGGED:
		break;
	default:
		count(cookie, dns_refused);
		return 0;
	}
	ctx_write_v6(ctx, user_ip6, 0, 0, 0, bpf_htonl(1));
	ctx->user_port = bpf_htons(PORT_DNS);
	count(cookie, dns_captured);
	return 1;
}

/* The server whose answer comes from this address and port, or NULL if it is not the proxy's to a query of this socket. */
static __always_inline const __u8 *dns_answer_of(struct bpf_sock_addr *ctx, const union ip_addr *from)
{
	struct dns_note *note;
	const __u8 *server;
	int tag;

	if (!ctx->sk)
		return NULL;
	tag = dns_tag_of(from);
	if (tag < 0 && !(addr_is_loopback(from) && from->bytes[15] == 1))
		return NULL;
	note = bpf_sk_storage_get(&dns_notes, ctx->sk, NULL, 0);
	if (!note)
		return NULL;
	server = tag < 0 ? note->connected : note->servers[tag % DNS_SERVERS];
	return addr_is_zero(server) ? NULL : server;
}

static __always_inline int dns_reveal4(struct bpf_sock_addr *ctx)
{
	union ip_addr from, server;
	const __u8 *found;

	if (ctx->user_port != bpf_htons(PORT_DNS))
		return 1;
	addr_from_v4(&from, ctx->user_ip4);
	found = dns_answer_of(ctx, &from);
	if (!found)
		return 1;
	__builtin_memcpy(server.bytes, found, sizeof(server.bytes));
	ctx->user_ip4 = server.words[3];
	ctx->user_port = bpf_htons(PORT_DOMAIN);
	return 1;
}

static __always_inline int dns_reveal6(struct bpf_sock_addr *ctx)
{
	union ip_addr from, server;
	const __u8 *found;

	if (ctx->user_port != bpf_htons(PORT_DNS))
		return 1;
	addr_from_v6(&from, ctx, user_ip6);
	found = dns_answer_of(ctx, &from);
	if (!found)
		return 1;
	__builtin_memcpy(server.bytes, found, sizeof(server.bytes));
	ctx_write_v6(ctx, user_ip6, server.words[0], server.words[1], server.words[2], server.words[3]);
	ctx->user_port = bpf_htons(PORT_DOMAIN);
	return 1;
}

/* redir_recvmsg4: the proxy's answer comes from the server that was asked. */
SEC("cgroup/recvmsg4")
int redir_recvmsg4(struct bpf_sock_addr *ctx)
{
	return dns_reveal4(ctx);
}

/* redir_recvmsg6: the same on AF_INET6 sockets, for both families. */
SEC("cgroup/recvmsg6")
int redir_recvmsg6(struct bpf_sock_addr *ctx)
{
	return dns_reveal6(ctx);
}

/* redir_getpeername4: a socket that connected to a DNS server is connected to it. Needs kernel 5.8. */
SEC("cgroup/getpeername4")
int redir_getpeername4(struct bpf_sock_addr *ctx)
{
	return dns_reveal4(ctx);
}

/* redir_getpeername6: the same on AF_INET6 sockets, for both families. */
SEC("cgroup/getpeername6")
int redir_getpeername6(struct bpf_sock_addr *ctx)
{
	return dns_reveal6(ctx);
}
