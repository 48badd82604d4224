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

#define TCP_FLAGS_OFFSET 13
#define TCP_SYN 0x02
#define TCP_ACK 0x10

/* Patched by the loader beside the cookie: 14 on devices with an Ethernet header, 0 on those that carry bare IP. */
#define LINK_HEADER_IMMEDIATE 0x72656469722e6c32

/* What redir_seal tells redir_seal_pkt, in the words that a packet has for programs that call each other. */
enum {
	CB_COOKIE_LOW,
	CB_COOKIE_HIGH,
	CB_LINK_HEADER,
};

/* Does a TCP header at this offset open a connection? One that is cut off before its flags may: yes. */
static __always_inline bool opens_connection(struct __sk_buff *skb, __u32 offset)
{
	__u8 flags;

	if (bpf_skb_load_bytes(skb, offset + TCP_FLAGS_OFFSET, &flags, sizeof(flags)))
		return true;
	return (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

static __always_inline bool ipv4_opens_connection(struct __sk_buff *skb, __u32 offset)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
		return false; /* too short to be IPv4: no receiver takes it */
	if (ip.protocol != IPPROTO_TCP || (ip.frag_off & bpf_htons(IPV4_FRAGMENT_OFFSET)))
		return false; /* a later fragment is nothing without its first */
	return opens_connection(skb, offset + ip.ihl * 4);
}

static __always_inline bool ipv6_opens_connection(struct __sk_buff *skb, __u32 offset)
{
	struct ipv6hdr ip;
	__u16 fragment_offset;
	__u8 next, ext[2]; /* of an extension header: what comes next, how long this one is */
	int i;

	if (bpf_skb_load_bytes(skb, offset, &ip, sizeof(ip)))
		return false;
	next = ip.nexthdr;
	offset += sizeof(ip);

	for (i = 0; i < MAX_EXTENSION_HEADERS; i++) {
		switch (next) {
		case IPPROTO_TCP:
			return opens_connection(skb, offset);
		case IPPROTO_HOPOPTS:
		case IPPROTO_ROUTING:
		case IPPROTO_DSTOPTS:
		case IPPROTO_MH:
			if (bpf_skb_load_bytes(skb, offset, ext, sizeof(ext)))
				return true;
			offset += (ext[1] + 1) * 8;
			break;
		case IPPROTO_AH:
			if (bpf_skb_load_bytes(skb, offset, ext, sizeof(ext)))
				return true;
			offset += (ext[1] + 2) * 4;
			break;
		case IPPROTO_FRAGMENT:
			if (bpf_skb_load_bytes(skb, offset, ext, sizeof(ext)) ||
			    bpf_skb_load_bytes(skb, offset + 2, &fragment_offset, sizeof(fragment_offset)))
				return true;
			if (fragment_offset & bpf_htons(IPV6_FRAGMENT_OFFSET))
				return false;
			offset += 8;
			break;
		default:
			return false; /* not TCP */
		}
		next = ext[0];
	}
	return true; /* more headers than anything honest has */
}

static __always_inline bool frame_opens_connection(struct __sk_buff *skb, __u32 offset)
{
	__u16 proto;
	__u8 version;
	int i;

	if (!offset) {
		if (bpf_skb_load_bytes(skb, 0, &version, sizeof(version)))
			return false;
		if (version >> 4 == 4)
			return ipv4_opens_connection(skb, 0);
		return version >> 4 == 6 && ipv6_opens_connection(skb, 0);
	}

	for (i = 0; i <= MAX_VLAN_TAGS; i++) {
		/* The type is the last thing in the link header and in each tag. */
		if (bpf_skb_load_bytes(skb, offset - sizeof(proto), &proto, sizeof(proto)))
			return false;
		switch (proto) {
		case bpf_htons(ETH_P_IP):
			return ipv4_opens_connection(skb, offset);
		case bpf_htons(ETH_P_IPV6):
			return ipv6_opens_connection(skb, offset);
		case bpf_htons(ETH_P_8021Q_):
		case bpf_htons(ETH_P_8021AD_):
			offset += 4;
			break;
		default:
			return false;
		}
	}
	return true; /* tags within tags within tags */
}

/*
 * redir_seal_pkt: drops a fresh TCP connection that is not the proxy's. One program for all pods, reached by a tail call:
 * loading it takes a hundred times as long as loading the few instructions that each pod has of its own.
 */
SEC("tc")
int redir_seal_pkt(struct __sk_buff *skb)
{
	__u64 cookie = (__u64)skb->cb[CB_COOKIE_HIGH] << 32 | skb->cb[CB_COOKIE_LOW];

	if (!frame_opens_connection(skb, skb->cb[CB_LINK_HEADER]) || !pod_lookup(cookie))
		return TC_ACT_UNSPEC;
	count(cookie, seal_dropped);
	return TC_ACT_SHOT;
}

/* redir_seal: the proxy's own packets pass, all others are looked at. One copy per pod and kind of link. */
SEC("tc")
int redir_seal(struct __sk_buff *skb)
{
	__u64 cookie = pod_netns_cookie(), link_header;

	/* Nearly all that a meshed pod sends. */
	if ((skb->mark & MARK_MASK) == MARK_PROXY)
		return TC_ACT_UNSPEC;

	asm volatile("%0 = %1 ll" : "=r"(link_header) : "i"(LINK_HEADER_IMMEDIATE));
	skb->cb[CB_COOKIE_LOW] = cookie;
	skb->cb[CB_COOKIE_HIGH] = cookie >> 32;
	skb->cb[CB_LINK_HEADER] = link_header;
	bpf_tail_call(skb, &tail_calls, TAIL_CALL_SEAL_PKT);
	return TC_ACT_SHOT; /* the program has been taken out of the map: nothing passes unseen */
}
