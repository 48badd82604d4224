/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Marks, ports, types and maps shared by all programs.
 *
 * Addresses are 16 bytes everywhere, IPv4 as ::ffff:a.b.c.d, so that one map and one code path serve both families
 * and sockets of AF_INET6 that talk IPv4. Ports are in host byte order, so that a map dump reads as people write them.
 * Everything about a pod is keyed by its network namespace's cookie: a 64-bit number that the kernel never reuses.
 */
#ifndef REDIRECTOR_H
#define REDIRECTOR_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Not in the UAPI headers that programs may include; the values are fixed by the kernel's ABI. */
#define AF_INET 2
#define AF_INET6 10
#define SOL_SOCKET 1
#define SO_BINDTODEVICE 25
#define SO_MARK 36
#define SO_BINDTOIFINDEX 62
#define EEXIST 17

/* The loopback device has this index in every network namespace. */
#define LOOPBACK_IFINDEX 1

/*
 * Socket marks. Only the bits under MARK_MASK are ours; the upper 20 belong to others and are kept.
 * One ip rule, fwmark 0x110/0xffc, covers the three marks that are routed to lo.
 */
#define MARK_MASK 0xfff
#define MARK_PROXY 0x539   /* set by the node proxy on its sockets: never captured */
#define MARK_CAPTURE 0x112 /* an app's connection on its way to the proxy's outbound listener */
#define MARK_REPLY 0x111   /* a connection between proxy and app whose source is foreign: stays on lo */
#define MARK_ACCEPT 0x113  /* what the proxy's outbound listener accepts: stays on lo, unless it is a machine's */

/* The node proxy's listeners in the pod. */
#define PORT_OUTBOUND 15001
#define PORT_INBOUND 15006
#define PORT_HBONE 15008
#define PORT_DNS 15053

/* Where DNS queries are for. */
#define PORT_DOMAIN 53

/*
 * A listener of the proxy is in the map twice: in the slot of the newest for its family, where it takes the place of the
 * one before, and in the first free of the others, to be found when a newer one has closed. That is room for two proxies
 * (a rolling update) with a socket per address family, and for one more.
 */
#define SLOT_NEWEST_V4 0
#define SLOT_NEWEST_V6 1
#define SLOT_FIRST 2
#define LISTENER_SLOTS 8

/* Levels of the cgroup tree, below its root, at which a process is recognised: as deep as nodes nest their pods. */
#define CGROUP_LEVELS 8

/* Capacities. Entries are allocated as they are needed, except in the LRU map. */
#define MAX_PODS 8192
#define MAX_OWN_ADDRS 65536
#define MAX_LISTENERS 65536
#define MAX_ADMITTED 65536
#define MAX_PROBE_TARGETS 65536
#define MAX_CGROUPS 1024
#define MAX_DNS_BOUND 16384
#define MAX_EXCEPTIONS 65536
#define MAX_CIDRS 65536
#define MAX_MACHINES 16384

/* Names a pod by its network namespace. */
struct netns_key {
	__u64 netns_cookie;
};

/* An enrolled pod. That the entry exists is what switches capture on. */
struct pod {
	char uid[64];    /* NUL-padded */
	__u64 netns_ino; /* the namespace's inode number, as in /proc/PID/ns/net */
	char ifname[16]; /* its interface; empty if it has none besides lo, or several */
	/* What the proxy's connections out are bound to, for a route of the pod's would lead them back to it; empty: nothing. */
	char exit_ifname[16];
	/* 1: this sysctl was 0 before enrolment and must be 0 again after it. */
	__u8 restore_tcp_fwmark_accept; /* net.ipv4.tcp_fwmark_accept */
	__u8 restore_fwmark_reflect;    /* net.ipv4.fwmark_reflect */
	__u8 restore_fwmark_reflect_v6; /* net.ipv6.fwmark_reflect */
	/* The pod's settings; 1: on. */
	__u8 bypass_inbound; /* peers' connections go to the app, not to the proxy */
	__u8 dns_capture;    /* DNS queries go to the proxy */
	__u8 has_exceptions; /* there are entries of the pod's in exceptions or cidrs */
	__u8 reserved[2];
};

/* An address on one of the pod's interfaces. */
struct own_addr_key {
	__u64 netns_cookie;
	__u8 addr[16];
};

struct own_addr {
	__u32 ifindex; /* the interface that carries it */
};

/*
 * What of a pod's connections is treated in another way than the rest. A machine is what has a network stack of its own behind the
 * pod: a virtual machine, a container in it.
 */
enum exception_kind {
	EXCEPTION_OUTBOUND_PORT = 1, /* connections to this port go past the proxy */
	EXCEPTION_INBOUND_PORT = 2,  /* peers' connections to this port go to the app */
	EXCEPTION_INTERFACE = 3,     /* by the interface with this index come machines' connections, for the proxy */
};

struct exception_key {
	__u64 netns_cookie;
	enum exception_kind kind;
	__u32 value; /* a port, or the index of an interface */
};

/* A range of addresses. Of those that an address is in, the one with the longest prefix counts. */
struct cidr_key {
	__u32 prefixlen; /* in bits, of all that follows */
	__u32 family;    /* AF_INET or AF_INET6: ::/0 has no IPv4 address in it */
	__u64 netns_cookie;
	__u8 addr[16];
};

struct cidr {
	__u32 excluded; /* 1: connections there go past the proxy; 0: they do not, though a shorter prefix says so */
};

/* One of the proxy's listening sockets in a pod. */
struct listener_key {
	__u64 netns_cookie;
	__u32 port;
	__u32 slot; /* SLOT_NEWEST_V4, SLOT_NEWEST_V6, or SLOT_FIRST to LISTENER_SLOTS-1 */
};

/* A connection as its receiver sees the first SYN. */
struct flow_key {
	__u64 netns_cookie; /* of the receiver */
	__u8 src[16];
	__u8 dst[16];
	__u32 sport;
	__u32 dport;
};

enum admitted_by {
	ADMITTED_BY_PROBE = 1, /* a host's process that may probe pods connects to the app */
	ADMITTED_BY_POD = 2,   /* the pod connects to itself */
};

struct admission {
	enum admitted_by by;
};

/* Whose connections to pods are probes: processes of the host's network namespace ... */
enum probe_source {
	PROBE_SOURCE_NODE = 0,    /* that are in no pod's cgroup */
	PROBE_SOURCE_HOST = 1,    /* all of them, those of hostNetwork pods too */
	PROBE_SOURCE_KUBELET = 2, /* that are in the kubelet's cgroup */
};

/* How a probe looks to the pod. */
enum probe_identity {
	PROBE_IDENTITY_SNAT = 0, /* it comes from the probe address */
	PROBE_IDENTITY_FLOW = 1, /* it comes from whatever address the node would use */
};

/* By what a socket of the proxy is known. */
enum proxy_identity {
	PROXY_IDENTITY_CGROUP = 0, /* the mark, on a socket that a process in the proxy's cgroup has made */
	PROXY_IDENTITY_MARK = 1,   /* the mark alone */
	/* As PROXY_IDENTITY_CGROUP, and what a process in the proxy's cgroup makes in an enrolled pod is given the mark. */
	PROXY_IDENTITY_CGROUP_ALONE = 2,
};

/* The agent's settings. */
struct node_config {
	__u64 host_netns_cookie; /* the host's network namespace; 0: no probe is let through */
	enum probe_source probe_source;
	enum probe_identity probe_identity;
	enum proxy_identity proxy_identity;
	__u8 probe_addr_v4[16]; /* v4-mapped; all zero: IPv4 probes are not let through */
	__u8 probe_addr_v6[16];
};

/* An address of an enrolled pod that probes may be for. */
struct probe_target_key {
	__u8 addr[16];
};

struct probe_target {
	__u64 netns_cookie; /* of the pod that has the address */
	char uid[64];       /* the pod; only its own removal takes the entry out */
};

/* What a cgroup is for. Processes in groups below it count too. */
enum cgroup_role {
	CGROUP_PODS = 1,    /* all pods of the node are below it */
	CGROUP_KUBELET = 2, /* the kubelet's */
	CGROUP_PROXY = 3,   /* a node proxy's */
};

struct cgroup_key {
	__u64 cgroup_id;
};

struct cgroup_value {
	enum cgroup_role role;
};

/* What is known of a socket from the process that made it or connected it, for hooks that cannot ask. */
struct socket_verdict {
	__u64 probe_target;      /* netns cookie of the pod that it probes; 0: it is no probe */
	__u32 by_proxy;          /* 1: a process in a proxy's cgroup made it */
	__u32 reserved_connects; /* of earlier versions */
	/* The port of a listener of the proxy's that is steered to, and of what that has accepted, except the outbound one; or 0. */
	__u32 listens;
	__u32 reserved;
};

/*
 * What happened to a pod's connections since it was enrolled. Each counts connections unless it says otherwise. Those that say
 * SYNs count whatever the stack looks for a listener for: repeated SYNs too, the ACK that brings a syncookie back, and now and
 * then a late packet of a connection that is gone.
 */
struct pod_counters {
	__u64 outbound_captured;    /* the app's connect(), marked to go to the proxy */
	__u64 outbound_steered;     /* SYNs handed to the outbound listener; more than captured if SYNs are repeated */
	__u64 outbound_no_listener; /* SYNs dropped: no proxy listens for outbound connections */
	__u64 inbound_steered;      /* SYNs of peers handed to the inbound listener */
	__u64 inbound_no_listener;  /* SYNs dropped: no proxy listens for inbound connections */
	__u64 hbone_steered;        /* SYNs of peers to the mesh tunnel's port handed to the proxy's listener there */
	__u64 hbone_no_listener;    /* SYNs dropped: no proxy listens on the mesh tunnel's port */
	__u64 proxy_to_app;         /* the proxy's connect() to the app with the client's address */
	__u64 proxy_outbound;       /* the proxy's connect() to anything outside the pod */
	__u64 own_address;          /* connect() to loopback or to one of the pod's own addresses: untouched */
	__u64 capture_failed;       /* connect() that could not be marked, bound or steered; it goes nowhere */
	__u64 bind_failed;          /* accepted connections that could not be bound to their device */
	__u64 probes_admitted;      /* connections of the host's probes to the app */
	__u64 seal_dropped;         /* packets, not connections: fresh SYNs on their way out past the proxy */
	__u64 seal_dropped_synack;  /* packets: answers to connections that did not come by the proxy */
	__u64 loops_dropped; /* SYNs to the proxy's own ports from the pod or its proxy, or from who only says that he is the pod */
	__u64 foreign_marks;      /* sockets with the proxy's mark that no process of a proxy has made */
	__u64 raw_bypass_refused; /* setsockopt() calls that would have sent packets past the seal */
	__u64 listeners_added;    /* proxy listeners that connections can be steered to */
	__u64 listeners_rejected; /* proxy listeners that cannot be steered to: all slots taken, or MPTCP */
	__u64 unbound_listeners;  /* app listeners that were bound to a device, and are so no more */
	__u64 marked_listeners;   /* app listeners with a mark of their own: proxied inbound connections fail there */
	__u64 dns_captured;   /* connect() or datagrams of unconnected sockets, to a DNS server: sent to the proxy */
	__u64 dns_refused;    /* the same that could not be sent to the proxy, and went nowhere */
	__u64 strays_dropped; /* packets on their way out that are for loopback, or for the proxy's DNS answers only */
	__u64 excluded_outbound; /* the app's connect() to a port or range that is excluded: untouched */
	__u64 excluded_inbound;  /* SYNs of peers to a port that is excluded, left to the app */
	__u64 bypassed_inbound;  /* SYNs of peers left to the app, as the pod asks for all of them */
	__u64 rerouted; /* SYNs of machines behind the pod handed to the outbound listener; not in outbound_steered */
	__u64 seal_excluded;   /* packets: fresh SYNs on their way out to what is excluded */
	__u64 unowned_dropped; /* SYNs for addresses that are here by a route only: of machines, or the pod claims them */
};

/* The DNS servers that one socket can have queries with at the same time. With more, the first is forgotten. */
#define DNS_SERVERS 16

/* Which DNS servers a socket has asked, while it was the proxy that got the queries. */
struct dns_note {
	__u8 connected[16]; /* whom the socket is connected to, or whose answers come without a tag; all zero: nobody */
	__u8 servers[DNS_SERVERS][16]; /* by tag */
	__u32 used;                    /* how many tags were given out; the next is this modulo DNS_SERVERS */
};

/* A socket that is bound to an address, as the proxy sees it. */
struct dns_bound_key {
	__u64 netns_cookie;
	__u32 tag;
	__u32 port;
};

struct dns_bound {
	__u8 addr[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PODS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct netns_key);
	__type(value, struct pod);
} pods SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_OWN_ADDRS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct own_addr_key);
	__type(value, struct own_addr);
} own_addrs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_EXCEPTIONS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct exception_key);
	__type(value, __u32); /* 1 */
} exceptions SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, MAX_CIDRS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cidr_key);
	__type(value, struct cidr);
} cidrs SEC(".maps");

/*
 * The addresses of machines behind a pod that have made connections, with the interface that they came by. Least recently used go
 * first when it is full: a machine is known again with its next connection.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_MACHINES);
	__type(key, struct own_addr_key);
	__type(value, struct own_addr);
} machines SEC(".maps");

/* An entry goes by itself when its socket closes. Listening sockets in it need kernel 5.7. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, MAX_LISTENERS);
	__type(key, struct listener_key);
	__type(value, __u64);
} listeners SEC(".maps");

/*
 * Flows that pass to the app's own listener, from connect() to close. Least recently used go first when it is full,
 * which is harmless: an established connection is found by the stack without asking us.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_ADMITTED);
	__type(key, struct flow_key);
	__type(value, struct admission);
} admitted SEC(".maps");

/* Entries are made by user space at enrolment; a program only adds to one that is there. The seal holds while there is one. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, MAX_PODS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct netns_key);
	__type(value, struct pod_counters);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct node_config);
} config SEC(".maps");

/* Keyed by address, so that a connect() on the host finds the pod. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PROBE_TARGETS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct probe_target_key);
	__type(value, struct probe_target);
} probe_targets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CGROUPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct cgroup_key);
	__type(value, struct cgroup_value);
} cgroups SEC(".maps");

/* Goes with the socket. What the proxy's listeners accept inherits their note: a Fast Open SYN-ACK is of such a socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct socket_verdict);
} sockets SEC(".maps");

/* Goes with the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct dns_note);
} dns_notes SEC(".maps");

/* Least recently used go first when it is full: the answer to a query that old is lost, and the client asks again. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_DNS_BOUND);
	__type(key, struct dns_bound_key);
	__type(value, struct dns_bound);
} dns_bounds SEC(".maps");

/* Programs that others call, by index. The loader fills it; a new version of a program takes effect for all pods at once. */
enum tail_call {
	TAIL_CALL_SEAL_PKT,
	TAIL_CALLS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, TAIL_CALLS);
	__type(key, enum tail_call);
	__type(value, __u32);
} tail_calls SEC(".maps");

/*
 * Which layout the pinned maps have, for an agent that takes them over. No program reads it. Whoever changes a map's key, value
 * or capacity, or adds or removes a map, raises the version in pkg/loader/layout.go.
 */
struct layout_record {
	__u32 version;    /* of the layout */
	__u32 oldest;     /* agents of this layout and later ones may take over */
	char release[56]; /* the agent that made it so, as `redirector version` names it; NUL-padded */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct layout_record);
} layout SEC(".maps");

/* Each CPU has its own copy, and a program is not moved between CPUs: a plain addition loses nothing. */
#define count(cookie, what)                                                                                            \
	do {                                                                                                           \
		struct netns_key key_ = {.netns_cookie = (cookie)};                                                    \
		struct pod_counters *c_ = bpf_map_lookup_elem(&counters, &key_);                                       \
		if (c_)                                                                                                \
			c_->what++;                                                                                    \
	} while (0)

/* An empty name unbinds. */
#define bind_to_device(ctx, name) bpf_setsockopt(ctx, SOL_SOCKET, SO_BINDTODEVICE, (void *)(name), sizeof(name))

static __always_inline const struct pod *pod_lookup(__u64 cookie)
{
	struct netns_key key = {.netns_cookie = cookie};

	return bpf_map_lookup_elem(&pods, &key);
}

/*
 * Reads a 32-bit field of a program's context at a fixed offset, as the verifier demands. Left alone, the compiler folds
 * the loads of two branches into one at a computed offset.
 */
#define ctx_read32(ctx, field)                                                                                         \
	({                                                                                                             \
		__u32 value_;                                                                                          \
		asm volatile("%0 = *(u32 *)(%1 + %2)"                                                                  \
			     : "=r"(value_)                                                                            \
			     : "r"(ctx), "i"(__builtin_offsetof(typeof(*(ctx)), field)));                              \
		value_;                                                                                                \
	})

/* The address as words in network byte order: what the contexts give and comparisons want. */
union ip_addr {
	__u8 bytes[16];
	__u32 words[4];
};

static __always_inline void addr_from_v4(union ip_addr *to, __u32 v4)
{
	to->words[0] = 0;
	to->words[1] = 0;
	to->words[2] = bpf_htonl(0xffff);
	to->words[3] = v4;
}

/* From a context's array of four words. */
#define addr_from_v6(to, ctx, field)                                                                                   \
	do {                                                                                                           \
		(to)->words[0] = ctx_read32(ctx, field[0]);                                                            \
		(to)->words[1] = ctx_read32(ctx, field[1]);                                                            \
		(to)->words[2] = ctx_read32(ctx, field[2]);                                                            \
		(to)->words[3] = ctx_read32(ctx, field[3]);                                                            \
	} while (0)

static __always_inline bool addr_is_mapped(const union ip_addr *a)
{
	return !a->words[0] && !a->words[1] && a->words[2] == bpf_htonl(0xffff);
}

static __always_inline bool addr_is_loopback(const union ip_addr *a)
{
	if (addr_is_mapped(a))
		return a->bytes[12] == 127;
	return !a->words[0] && !a->words[1] && !a->words[2] && a->words[3] == bpf_htonl(1);
}

/* Is it an address of this pod? Those of lo are in the map with the others, but of 127.0.0.0/8 every address counts. */
static __always_inline bool addr_is_own(__u64 cookie, const union ip_addr *a)
{
	struct own_addr_key key = {.netns_cookie = cookie};

	if (addr_is_mapped(a) && a->bytes[12] == 127)
		return true;
	__builtin_memcpy(key.addr, a->bytes, sizeof(key.addr));
	return bpf_map_lookup_elem(&own_addrs, &key) != NULL;
}

/*
 * Is there such an exception? Ask for none if the pod has none at all. What is not inlined is verified once, and not again along
 * each path that leads to it.
 */
__noinline int is_exception(__u64 cookie, __u32 kind, __u32 value)
{
	struct exception_key key = {.netns_cookie = cookie, .kind = kind, .value = value};

	return bpf_map_lookup_elem(&exceptions, &key) != NULL;
}

/* Do the pod's connections to that address and port go past the proxy? Do not ask, either, if the pod has no exceptions. */
__noinline int is_excluded(__u64 cookie, const union ip_addr *dst, __u32 port)
{
	struct cidr_key key = {.prefixlen = 8 * (sizeof(key) - sizeof(key.prefixlen)), .netns_cookie = cookie};
	struct cidr *cidr;

	if (!dst) /* never, but the verifier does not know */
		return 0;
	if (is_exception(cookie, EXCEPTION_OUTBOUND_PORT, port))
		return 1;
	key.family = addr_is_mapped(dst) ? AF_INET : AF_INET6;
	__builtin_memcpy(key.addr, dst->bytes, sizeof(key.addr));
	cidr = bpf_map_lookup_elem(&cidrs, &key);
	return cidr && cidr->excluded;
}

/* The proxy's ports in the pod are for what is steered there. Whoever connects to them straight would be proxied to them. */
static __always_inline bool is_loop(__u32 port)
{
	return port == PORT_OUTBOUND || port == PORT_INBOUND;
}

/* Do peers' connections to that port go to the app? The mesh tunnel ends at the proxy, whatever a pod asks for. */
static __always_inline bool is_left_to_app(__u64 cookie, const struct pod *pod, __u32 port)
{
	if (is_loop(port) || port == PORT_HBONE)
		return false;
	return pod->bypass_inbound || (pod->has_exceptions && is_exception(cookie, EXCEPTION_INBOUND_PORT, port));
}

static __always_inline const struct node_config *config_read(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&config, &zero);
}

static __always_inline bool is_host(__u64 cookie)
{
	const struct node_config *cfg = config_read();

	return cfg && cfg->host_netns_cookie && cfg->host_netns_cookie == cookie;
}

/* Is it a socket that the proxy has made, or accepted, if it has a mark that says so? sk must be a full socket. */
static __always_inline bool socket_is_of_proxy(struct bpf_sock *sk)
{
	const struct node_config *cfg = config_read();
	struct socket_verdict *verdict;

	if (cfg && cfg->proxy_identity == PROXY_IDENTITY_MARK)
		return true;
	verdict = bpf_sk_storage_get(&sockets, sk, NULL, 0);
	return verdict && verdict->by_proxy;
}

/* Is it a socket of the proxy's, going by its mark and by who made it? sk must be a full socket. */
static __always_inline bool socket_is_proxys(struct bpf_sock *sk)
{
	return (sk->mark & MARK_MASK) == MARK_PROXY && socket_is_of_proxy(sk);
}

/*
 * The cookie of the pod that a per-pod program serves, as an immediate: neither sk_lookup (on any kernel) nor tc (before
 * 6.15) can ask in which network namespace it runs. The loader finds this constant and puts the cookie there.
 */
#define NETNS_COOKIE_IMMEDIATE 0x72656469722e6e73

static __always_inline __u64 pod_netns_cookie(void)
{
	__u64 cookie;

	asm volatile("%0 = %1 ll" : "=r"(cookie) : "i"(NETNS_COOKIE_IMMEDIATE));
	return cookie;
}

#endif
