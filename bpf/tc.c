/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
//go:build ignore

/*
 * tc egress on each interface of a pod but lo: the seal. It judges the bytes that go on the wire, whatever made them: an
 * ordinary socket, a raw or packet socket, a tunnel, a bridge.
 */

#define TC_ACT_UNSPEC (-1) /* on to the next filter */
#define TC_ACT_SHOT 2

#define ETH_P_8021Q_ 0x8100
#define ETH_P_8021AD_ 0x88a8

/* VLAN tags in the frame itself; the stack strips no more than a few, and neither does anyone need more. */
#define MAX_VLAN_TAGS 2
/* Extension headers before an IPv6 packet's TCP header. RFC 8200 names seven kinds and lets one occur twice. */
#define MAX_EXTENSION_HEADERS 8

#define IPV4_FRAGMENT_OFFSET 0x1fff
#define IPV6_FRAGMENT_OFFSET 0xfff8

#define TCP_DPORT_OFFSET 2
#define TCP_FLAGS_OFFSET 13
#define TCP_SYN 0x02
#define TCP_ACK 0x10

#define TCP_STATE_SYN_RECV 3 /* BPF_TCP_SYN_RECV */

/* Patched by the loader beside the cookie: 14 on devices with an Ethernet header, 0 on those that carry bare IP. */
#define LINK_HEADER_IMMEDIATE 0x72656469722e6c32

/* What redir_seal tells redir_seal_pkt, in the words that a packet has for programs that call each other. */
enum {
	CB_COOKIE_LOW,
	CB_COOKIE_HIGH,
	CB_LINK_HEADER,
};

enum packet_kind {
	PACKET_OTHER, /* no TCP, or TCP in the middle of a connection */
	PACKET_OPENS, /* a SYN, or what may be one: it is cut off before its flags, or hidden behind too many headers */
	PACKET_ANSWERS, /* a SYN-ACK */
	PACKET_STRAYS,  /* for loopback, or for a tag of dns.c: what goes there stays in the pod */
};

/* A packet's addresses, and where its TCP header is. Valid if it is a SYN-ACK, or a SYN with straight set. */
struct packet {
	union ip_addr src, dst;
	__u32 tcp;
	bool by_hops;  /* its sender has named hops, or may have: its destination need not be the last */
	bool straight; /* its flags are there, and its destination is where it goes */
};

/* What does a TCP header at this offset do? */
static __always_inline enum packet_kind tcp_kind(struct __sk_buff *skb, struct packet *p, __u32 offset)
{
	__u8 flags;

	p->tcp = offset;
	if (bpf_skb_load_bytes(skb, offset + TCP_FLAGS_OFFSET, &flags, sizeof(flags)))
		return PACKET_OPENS;
	p->straight = !p->by_hops;
	if (!(flags & TCP_SYN))
		return PACKET_OTHER;
	return flags & TCP_ACK ? PACKET_ANSWERS : PACKET_OPENS;
}

static __always_inline enum packet_kind ipv4_kind(struct __sk_buff *skb, struct packet *p, __u32 offset)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
		return PACKET_OTHER; /* too short to be IPv4: no receiver takes it */
	addr_from_v4(&p->src, ip.saddr);
	addr_from_v4(&p->dst, ip.daddr);
	if (addr_is_loopback(&p->dst))
		return PACKET_STRAYS;
	if (ip.protocol != IPPROTO_TCP || (ip.frag_off & bpf_htons(IPV4_FRAGMENT_OFFSET)))
		return PACKET_OTHER; /* a later fragment is nothing without its first */
	p->by_hops = ip.ihl != sizeof(ip) / 4;
	return tcp_kind(skb, p, offset + ip.ihl * 4);
}

static __always_inline enum packet_kind ipv6_kind(struct __sk_buff *skb, struct packet *p, __u32 offset)
{
	struct ipv6hdr ip;
	__u16 fragment_offset;
	__u8 next, ext[2]; /* of an extension header: what comes next, how long this one is */
	int i;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
		return PACKET_OTHER;
	__builtin_memcpy(p->src.bytes, &ip.saddr, sizeof(p->src.bytes));
	__builtin_memcpy(p->dst.bytes, &ip.daddr, sizeof(p->dst.bytes));
	if (addr_is_loopback(&p->dst) || dns_tag_of(&p->dst) >= 0)
		return PACKET_STRAYS;
	next = ip.nexthdr;
	offset += sizeof(ip);

	for (i = 0; i < MAX_EXTENSION_HEADERS; i++) {
		switch (next) {
		case IPPROTO_TCP:
			return tcp_kind(skb, p, offset);
		case IPPROTO_ROUTING:
			p->by_hops = true;
			/* fall through */
		case IPPROTO_HOPOPTS:
		case IPPROTO_DSTOPTS:
		case IPPROTO_MH:
			if (bpf_skb_load_bytes(skb, offset, ext, sizeof(ext)))
				return PACKET_OPENS;
			offset += (ext[1] + 1) * 8;
			break;
		case IPPROTO_AH:
			if (bpf_skb_load_bytes(skb, offset, ext, sizeof(ext)))
				return PACKET_OPENS;
			offset += (ext[1] + 2) * 4;
			break;
		case IPPROTO_FRAGMENT:
			if (bpf_skb_load_bytes(skb, offset, ext, sizeof(ext)) ||
			    bpf_skb_load_bytes(skb, offset + 2, &fragment_offset, sizeof(fragment_offset)))
				return PACKET_OPENS;
			if (fragment_offset & bpf_htons(IPV6_FRAGMENT_OFFSET))
				return PACKET_OTHER;
			offset += 8;
			break;
		default:
			return PACKET_OTHER; /* not TCP */
		}
		next = ext[0];
	}
	return PACKET_OPENS; /* more headers than anything honest has */
}

static __always_inline enum packet_kind frame_kind(struct __sk_buff *skb, struct packet *p, __u32 offset)
{
	__u16 proto;
	__u8 version;
	int i;

	if (!offset) {
		if (bpf_skb_load_bytes(skb, 0, &version, sizeof(version)))
			return PACKET_OTHER;
		if (version >> 4 == 4)
			return ipv4_kind(skb, p, 0);
		return version >> 4 == 6 ? ipv6_kind(skb, p, 0) : PACKET_OTHER;
	}

	for (i = 0; i <= MAX_VLAN_TAGS; i++) {
		/* The type is the last thing in the link header and in each tag. */
		if (bpf_skb_load_bytes(skb, offset - sizeof(proto), &proto, sizeof(proto)))
			return PACKET_OTHER;
		switch (proto) {
		case bpf_htons(ETH_P_IP):
			return ipv4_kind(skb, p, offset);
		case bpf_htons(ETH_P_IPV6):
			return ipv6_kind(skb, p, offset);
		case bpf_htons(ETH_P_8021Q_):
		case bpf_htons(ETH_P_8021AD_):
			offset += 4;
			break;
		default:
			return PACKET_OTHER;
		}
	}
	return PACKET_OPENS; /* tags within tags within tags */
}

/* Is the packet of a socket of the proxy's? A SYN-ACK is its listener's. */
static __always_inline bool packet_is_proxys(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk, *full;

	if ((skb->mark & MARK_MASK) != MARK_PROXY || !sk)
		return false;
	full = bpf_sk_fullsock(sk);
	if (!full)
		full = bpf_get_listener_sock(sk);
	return full && socket_is_proxys(full);
}

/* Of a probe that was let through to the app? */
static __always_inline bool answer_is_admitted(struct __sk_buff *skb, __u64 cookie, const struct packet *p)
{
	struct flow_key flow = {.netns_cookie = cookie};
	struct admission *admission;
	__u16 ports[2]; /* the app's, the peer's */

	if (bpf_skb_load_bytes(skb, p->tcp, ports, sizeof(ports)))
		return false;
	__builtin_memcpy(flow.src, p->dst.bytes, sizeof(flow.src));
	__builtin_memcpy(flow.dst, p->src.bytes, sizeof(flow.dst));
	flow.sport = bpf_ntohs(ports[1]);
	flow.dport = bpf_ntohs(ports[0]);
	admission = bpf_map_lookup_elem(&admitted, &flow);
	return admission && admission->by == ADMITTED_BY_PROBE;
}

/*
 * Has the kernel answered here to a SYN that it let in? A request has no full socket, but for Fast Open; a syncookie's answer has
 * none at all, as has what is forwarded, but that comes from somewhere.
 */
static __always_inline bool is_kernels_answer(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk, *full;

	if (!sk)
		return !skb->ingress_ifindex;
	full = bpf_sk_fullsock(sk);
	if (full)
		return full->state == TCP_STATE_SYN_RECV;
	return bpf_get_listener_sock(sk) != NULL;
}

/*
 * Of the proxy, to a machine behind the pod? Its outbound listener has a mark of its own, and gets what machines send. Which those
 * are, redir_steer has noted as it handed the SYN over.
 */
static __always_inline bool answer_is_to_machine(struct __sk_buff *skb, __u64 cookie, const struct packet *p)
{
	struct own_addr_key key = {.netns_cookie = cookie};

	if ((skb->mark & MARK_MASK) != MARK_ACCEPT)
		return false;
	__builtin_memcpy(key.addr, p->dst.bytes, sizeof(key.addr));
	return bpf_map_lookup_elem(&machines, &key) != NULL;
}

/* Of the app, to a connection that was left to it? */
static __always_inline bool answer_is_apps(struct __sk_buff *skb, __u64 cookie, const struct packet *p)
{
	const struct pod *pod = pod_lookup(cookie);
	__u16 port;

	if (!pod || bpf_skb_load_bytes(skb, p->tcp, &port, sizeof(port)))
		return false;
	return is_left_to_app(cookie, pod, bpf_ntohs(port));
}

/* Is this SYN-ACK one that may leave? Not inlined, for the many paths through a packet's headers to lead here once. */
__noinline int answer_may_leave(struct __sk_buff *skb, __u64 cookie, const struct packet *p)
{
	if (!p) /* never, but the verifier does not know */
		return 0;
	if (answer_is_admitted(skb, cookie, p))
		return 1;
	return is_kernels_answer(skb) && (answer_is_apps(skb, cookie, p) || answer_is_to_machine(skb, cookie, p));
}

/* Is this SYN one that may leave, for it is excluded where it goes? */
__noinline int opening_is_excluded(struct __sk_buff *skb, __u64 cookie, const struct packet *p)
{
	const struct pod *pod = pod_lookup(cookie);
	__u16 port;

	if (!p || !pod || !pod->has_exceptions || !p->straight)
		return 0;
	if (bpf_skb_load_bytes(skb, p->tcp + TCP_DPORT_OFFSET, &port, sizeof(port)))
		return 0;
	return is_excluded(cookie, &p->dst, bpf_ntohs(port));
}

/*
 * Is the pod enrolled? Either of its entries will do: where one has been lost, apps' connections are captured no more, and
 * must not leave as they are. Enrolment makes the one in counters last, unenrolment removes it first.
 */
static __always_inline bool is_sealed(__u64 cookie)
{
	struct netns_key key = {.netns_cookie = cookie};

	return pod_lookup(cookie) || bpf_map_lookup_elem(&counters, &key);
}

/*
 * redir_seal_pkt: drops a fresh TCP connection that is not the proxy's, and the answer to one that did not come by the
 * proxy. One program for all pods, reached by a tail call: loading it takes a hundred times as long as loading the few
 * instructions that each pod has of its own.
 */
SEC("tc")
int redir_seal_pkt(struct __sk_buff *skb)
{
	__u64 cookie = (__u64)skb->cb[CB_COOKIE_HIGH] << 32 | skb->cb[CB_COOKIE_LOW];
	struct packet p = {};
	enum packet_kind kind;

	/* Nearly all that a meshed pod sends. */
	if (packet_is_proxys(skb))
		return TC_ACT_UNSPEC;

	kind = frame_kind(skb, &p, skb->cb[CB_LINK_HEADER]);
	if (kind == PACKET_OTHER || !is_sealed(cookie))
		return TC_ACT_UNSPEC;
	if (kind == PACKET_STRAYS) {
		count(cookie, strays_dropped);
		return TC_ACT_SHOT;
	}
	if (kind == PACKET_OPENS) {
		if (opening_is_excluded(skb, cookie, &p)) {
			count(cookie, seal_excluded);
			return TC_ACT_UNSPEC;
		}
		count(cookie, seal_dropped);
		return TC_ACT_SHOT;
	}
	/*
	 * The kernel makes a syncookie's SYN-ACK without a socket, but with its listener's mark. What is forwarded has no socket
	 * either, but comes from somewhere.
	 */
	if ((skb->mark & MARK_MASK) == MARK_PROXY && !skb->sk && !skb->ingress_ifindex)
		return TC_ACT_UNSPEC;
	if (answer_may_leave(skb, cookie, &p))
		return TC_ACT_UNSPEC;
	count(cookie, seal_dropped_synack);
	return TC_ACT_SHOT;
}

/* redir_seal: leads to redir_seal_pkt. One copy per pod and kind of link, with what that must know. */
SEC("tc")
int redir_seal(struct __sk_buff *skb)
{
	__u64 cookie = pod_netns_cookie(), link_header;

	asm volatile("%0 = %1 ll" : "=r"(link_header) : "i"(LINK_HEADER_IMMEDIATE));
	/*
	 * Without the JIT the program that is called gets the stack of the one that calls it, whatever it needs, and writes past its
	 * end (seen on 7.3: the kernel panics). So this one takes all that there is.
	 */
	asm volatile("*(u64 *)(r10 - 512) = %0" : : "r"(link_header) : "memory");
	skb->cb[CB_COOKIE_LOW] = cookie;
	skb->cb[CB_COOKIE_HIGH] = cookie >> 32;
	skb->cb[CB_LINK_HEADER] = link_header;
	bpf_tail_call(skb, &tail_calls, TAIL_CALL_SEAL_PKT);
	return TC_ACT_SHOT; /* the program has been taken out of the map: nothing passes unseen */
}
