//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The minimum of a load balancer, as a baseline on the same machine: one VIP, IPv4, IP headers without options, no
 * counters, no events and no refusals. It has what every balancer needs against forged packets: it limits new flows for
 * each CPU and each client, keeps half-open flows in a table of their own, and believes a SYN+ACK, the ACK of it, a RST
 * and a FIN only with the right numbers.
 *
 *	connect4_storage	selects a backend and stores the VIP for getpeername in the socket's storage
 *	connect4_table		selects a backend and stores the VIP in a table indexed by the socket's cookie
 *	from_client		selects a backend for a new flow, and translates packets from the client
 *	to_client		translates packets from the backend
 *	from_network		translates packets from the backend, and redirects them to the client
 *	redirect_out		redirects packets from the client to the uplink without translation
 *	redirect_in		redirects packets from the uplink to the client, likewise
 *
 * With UPLINK set, from_client and from_network redirect packets: the fast path. Without it the kernel routes them. The
 * last two programs are the fast path without a load balancer.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define ETH_P_IP 0x0800
#define ETH_HEADER 14
#define AF_INET 2
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define PROCEED 1
#define TC_ACT_UNSPEC (-1)
/* Capacity of the socket table. */
#define SOCKETS 65536

/* Interface index of the uplink, 0 on the slow path; of the client's device, for redirect_in; and the next hop at the
 * uplink, in network order. Set at load. */
volatile const __u32 UPLINK = 0;
volatile const __u32 CLIENT_DEVICE = 0;
volatile const __be32 NEXT_HOP = 0;

/* An address and a port, both in network order. */
struct endpoint {
	__be32 addr;
	__be16 port;
	__u8 proto;
	__u8 pad; /* zero */
};
_Static_assert(sizeof(struct endpoint) == 8, "endpoint is 8 bytes");

/* The backends of a VIP. */
struct group {
	__u32 first; /* index of `backends` */
	__u32 count;
};
_Static_assert(sizeof(struct group) == 8, "group is 8 bytes");

/* The VIP of a socket, in the table. */
struct socket {
	__u64 cookie;
	struct endpoint vip;
};
_Static_assert(sizeof(struct socket) == 16, "socket is 16 bytes");

/* One direction of a flow, before translation. */
struct flow_key {
	__be32 client;
	__be32 server;
	__be16 client_port;
	__be16 server_port;
	__u8 proto;
	__u8 reply;
	__u8 pad[2]; /* zero */
};
_Static_assert(sizeof(struct flow_key) == 16, "flow_key is 16 bytes");

enum state {
	OPENING,
	ANSWERED,
	OPEN,
	CLOSED,
};

/* Flags of a TCP sender's window; the low bits are its scale. */
enum window {
	WINDOW_SCALE = 15,
	WINDOW_KNOWN = 16,
	WINDOW_SCALED = 32,
	WINDOW_SYN = 64, /* `ack` accepts the SYN, `edge` is the size of the window */
};

struct flow {
	__u64 seen; /* jiffies */
	__be32 server;
	__be16 server_port;
	__u8 state;
	__u8 window;
	__u32 client_device; /* interface index; used towards the client */
	__u32 ack;
	__u32 edge;
	__u8 fins; /* 1 of the client, 2 of the backend */
	__u8 pad[3];
};
_Static_assert(sizeof(struct flow) == 32, "flow is 32 bytes");

/* New flows of a second. */
struct rate {
	__u64 since; /* when the second began, CLOCK_MONOTONIC in ns */
	__u64 given;
};
_Static_assert(sizeof(struct rate) == 16, "rate is 16 bytes");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, struct endpoint);
	__type(value, struct group);
} frontends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, struct endpoint);
} backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct endpoint);
} storage SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SOCKETS);
	__type(key, __u32);
	__type(value, struct socket);
} table SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows SEC(".maps");

/* Flows of which one side has not spoken yet. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow_key);
	__type(value, struct flow);
} handshakes SEC(".maps");

/* Those of the CPU at index 0, those of the clients with one hash at each other index. */
#define SOURCES 4096
#define CPU_FLOWS_MAX 100000
#define CLIENT_FLOWS_MAX 50000

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1 + SOURCES);
	__type(key, __u32);
	__type(value, struct rate);
} new_flows SEC(".maps");

static __always_inline const struct endpoint *select_backend(const struct endpoint *vip)
{
	const struct group *g = bpf_map_lookup_elem(&frontends, vip);
	__u32 index;

	if (!g || g->count == 0)
		return NULL;
	index = g->first + bpf_get_prandom_u32() % g->count;
	return bpf_map_lookup_elem(&backends, &index);
}

static __always_inline struct endpoint read_name(struct bpf_sock_addr *ctx)
{
	struct endpoint vip = { .addr = ctx->user_ip4, .proto = ctx->protocol };

	vip.port = *(volatile __u32 *)&ctx->user_port; /* the verifier accepts no narrower access */
	return vip;
}

static __always_inline void write_name(struct bpf_sock_addr *ctx, const struct endpoint *to)
{
	ctx->user_ip4 = to->addr;
	*(volatile __u32 *)&ctx->user_port = to->port;
}

SEC("cgroup/connect4")
int connect4_storage(struct bpf_sock_addr *ctx)
{
	struct endpoint vip = read_name(ctx);
	const struct endpoint *to = select_backend(&vip);

	if (!to)
		return PROCEED;
	bpf_sk_storage_get(&storage, ctx->sk, &vip, BPF_SK_STORAGE_GET_F_CREATE);
	write_name(ctx, to);
	return PROCEED;
}

SEC("cgroup/connect4")
int connect4_table(struct bpf_sock_addr *ctx)
{
	struct endpoint vip = read_name(ctx);
	const struct endpoint *to = select_backend(&vip);
	struct socket *s;
	__u64 cookie;
	__u32 index;

	if (!to)
		return PROCEED;
	cookie = bpf_get_socket_cookie(ctx);
	index = cookie % SOCKETS;
	s = bpf_map_lookup_elem(&table, &index);
	if (s) {
		s->cookie = cookie;
		s->vip = vip;
	}
	write_name(ctx, to);
	return PROCEED;
}

/* The IP header from its TTL on, and the ports. Read and written as a whole. */
struct header {
	__u8 ttl;
	__u8 proto;
	__u16 check;
	__be32 source;
	__be32 destination;
	__be16 source_port;
	__be16 destination_port;
};
_Static_assert(sizeof(struct header) == 16, "header is 16 bytes");

/* Offsets of struct header and of the transport header. */
#define HEADER (ETH_HEADER + 8)
#define TRANSPORT (ETH_HEADER + 20)

static __always_inline bool read_header(struct __sk_buff *skb, struct header *h)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (skb->protocol != bpf_htons(ETH_P_IP) || data + HEADER + sizeof(*h) > end)
		return false;
	if (*(__u8 *)(data + ETH_HEADER) != 0x45)
		return false;
	*h = *(struct header *)(data + HEADER);
	return h->proto == IPPROTO_TCP || h->proto == IPPROTO_UDP;
}

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* Replaces an address and a port in the packet, and updates both of its checksums. */
static __always_inline void replace(struct __sk_buff *skb, struct header *h, __be32 *addr, __be16 *port,
				    const struct flow *f)
{
	__u64 sum = (__u16)~h->check + (__u64)(__u32) ~*addr + f->server;
	__u32 at = TRANSPORT + (h->proto == IPPROTO_TCP ? 16 : 6);
	__u64 flags = h->proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__be32 old_addr = *addr;
	__be16 old_port = *port;

	*addr = f->server;
	*port = f->server_port;
	if (UPLINK) {
		h->ttl--;
		sum += bpf_htons(0xfeff); /* TTL is the upper byte: subtract 0x0100 */
	}
	h->check = ~fold(sum);
	bpf_l4_csum_replace(skb, at, old_addr, f->server, flags | BPF_F_PSEUDO_HDR | 4);
	bpf_l4_csum_replace(skb, at, old_port, f->server_port, flags | 2);
	bpf_skb_store_bytes(skb, HEADER, h, sizeof(*h), 0);
}

/* Takes one of the `most` new flows that a second has. */
static __always_inline bool take(__u32 index, __u64 now, __u64 most)
{
	struct rate *r = bpf_map_lookup_elem(&new_flows, &index);

	if (!r)
		return false;
	if (now - r->since >= 1000000000) {
		r->since = now;
		r->given = 0;
	}
	return r->given++ < most;
}

/* Reports whether a client may open another flow. */
static __always_inline bool may_open_flow(__be32 client)
{
	__u64 now = bpf_ktime_get_coarse_ns();

	return take(1 + (client * 0x9e3779b1U >> 16) % SOURCES, now, CLIENT_FLOWS_MAX) && take(0, now, CPU_FLOWS_MAX);
}

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16

/* The TCP header behind its ports, in host order. */
struct tcp {
	__u32 seq;
	__u32 ack;
	__u8 offset;
	__u8 flags;
	__u16 window;
};
_Static_assert(sizeof(struct tcp) == 12, "tcp is 12 bytes");

/* Reads the TCP header. Of UDP and truncated packets it is zero. */
static __always_inline struct tcp read_tcp(struct __sk_buff *skb, __u8 proto)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct tcp t = {};

	if (proto != IPPROTO_TCP || data + TRANSPORT + 4 + sizeof(t) > end)
		return t;
	t = *(struct tcp *)(data + TRANSPORT + 4);
	t.seq = bpf_ntohl(t.seq);
	t.ack = bpf_ntohl(t.ack);
	t.window = bpf_ntohs(t.window);
	return t;
}

/* Returns the window scale that a SYN offers. */
static __noinline __u8 read_scale(struct __sk_buff *skb, __u32 length)
{
	__u32 at = TRANSPORT + 20;

	for (int i = 0; i < 12; i++) {
		__u8 option[3];

		if (at + 3 > TRANSPORT + length || bpf_skb_load_bytes(skb, at, option, sizeof(option)))
			break;
		if (option[0] == 3)
			return WINDOW_SCALED | (option[2] > 14 ? 14 : option[2]);
		if (option[0] == 0 || (option[0] != 1 && option[1] < 2))
			break;
		at += option[0] == 1 ? 1 : option[1];
	}
	return 0;
}

/* Finds an entry. Sets *young if it is in `handshakes`. */
static __always_inline struct flow *find_flow(const struct flow_key *key, bool *young)
{
	struct flow *f = bpf_map_lookup_elem(&flows, key);

	*young = !f;
	return f ?: bpf_map_lookup_elem(&handshakes, key);
}

/* Returns the key of the direction from or to a server. */
static __always_inline struct flow_key other_key(const struct flow_key *key, __be32 server, __be16 port)
{
	struct flow_key other = *key;

	other.server = server;
	other.server_port = port;
	other.reply = !key->reply;
	return other;
}

static __always_inline bool is_in_window(__u32 number, const struct flow *f)
{
	return f->window & WINDOW_KNOWN && number - f->ack <= f->edge - f->ack;
}

/* Follows the window of a packet's sender. */
static __always_inline void follow_window(const struct tcp *t, struct flow *f)
{
	__u32 edge;

	if (!(t->flags & TCP_ACK) || !is_in_window(t->ack, f))
		return;
	edge = t->ack + ((__u32)t->window << (t->flags & TCP_SYN ? 0 : f->window & WINDOW_SCALE));
	f->ack = t->ack;
	if ((__s32)(edge - f->edge) > 0)
		f->edge = edge;
}

/* Learns both windows from a SYN+ACK. */
static __always_inline void open_windows(struct __sk_buff *skb, const struct tcp *t, struct flow *f,
					 struct flow *client)
{
	__u8 scale = read_scale(skb, (t->offset >> 4) * 4);
	bool scaled = client->window & scale & WINDOW_SCALED;

	f->window = WINDOW_KNOWN | (scaled ? scale & WINDOW_SCALE : 0);
	client->ack = t->seq + 1;
	client->edge += t->seq + 1;
	client->window = WINDOW_KNOWN | (scaled ? client->window & WINDOW_SCALE : 0);
}

static __always_inline void promote(const struct flow_key *key)
{
	struct flow *f = bpf_map_lookup_elem(&handshakes, key);

	if (f && !bpf_map_update_elem(&flows, key, f, BPF_ANY))
		bpf_map_delete_elem(&handshakes, key);
}

static __always_inline bool is_current(const struct tcp *t, const struct flow *f)
{
	return !(f->window & WINDOW_KNOWN) || (t->flags & TCP_ACK && t->ack == f->ack);
}

/* Prepares both entries for the answer to a SYN. */
static __always_inline void begin(struct __sk_buff *skb, const struct tcp *t, struct flow *f, struct flow *back)
{
	f->state = back->state = OPENING;
	f->fins = back->fins = 0;
	f->ack = back->ack = back->edge = t->seq + 1;
	f->edge = t->window;
	f->window = WINDOW_SYN | read_scale(skb, (t->offset >> 4) * 4);
	back->window = WINDOW_KNOWN;
}

/* Updates a flow's state in both entries. Returns its entry, which may have moved. */
static __noinline struct flow *advance(struct __sk_buff *skb, const struct flow_key *key, struct flow *f,
				       const struct tcp *t, bool young)
{
	bool syn = t->flags & TCP_SYN, is_tcp = key->proto == IPPROTO_TCP, other_young;
	struct flow_key k = *key, back = other_key(key, f->server, f->server_port);
	__u8 state = f->state;
	struct flow *other;

	other = young ? bpf_map_lookup_elem(&handshakes, &back) : NULL;
	if (!other)
		other = find_flow(&back, &other_young);
	if (!other)
		return f;
	if (t->flags & TCP_RST) {
		if (state == OPENING && key->reply ? is_current(t, f) : is_in_window(t->seq, other))
			f->state = other->state = CLOSED;
		return f;
	}
	if (state == OPENING && key->reply && (syn || !(f->window & WINDOW_KNOWN)) && is_current(t, f)) {
		if (is_tcp && other->window & WINDOW_SYN)
			open_windows(skb, t, f, other);
		f->state = other->state = ANSWERED;
	} else if (state == ANSWERED && !key->reply && !syn && is_current(t, f)) {
		f->state = other->state = OPEN;
	}
	if (t->flags & TCP_FIN && f->state == OPEN &&
	    is_in_window(t->seq + skb->len - TRANSPORT - (t->offset >> 4) * 4, other)) {
		f->fins |= key->reply ? 2 : 1;
		other->fins = f->fins;
		if (f->fins == 3)
			f->state = other->state = CLOSED;
	}
	if (!young || f->state < OPEN)
		return f;
	promote(&back);
	promote(&k);
	return bpf_map_lookup_elem(&flows, &k);
}

/* Advances a flow by a packet of it. Few packets change its state. */
static __always_inline struct flow *follow_flow(struct __sk_buff *skb, const struct flow_key *key, struct flow *f,
						const struct tcp *t, bool young)
{
	follow_window(t, f);
	return f->state < OPEN || t->flags & (TCP_SYN | TCP_FIN | TCP_RST) ? advance(skb, key, f, t, young) : f;
}

/* Creates both directions of a flow. A new connection of a closed flow, `old`, may have another backend, and counts
 * against the limit like any other. Returns the direction to the backend, or NULL if the destination is no VIP or the
 * flow is one too many. */
static __noinline struct flow *create_flow(struct __sk_buff *skb, const struct flow_key *key, const struct tcp *t,
					   struct flow *old)
{
	struct endpoint vip = { .addr = key->server, .port = key->server_port, .proto = key->proto };
	const struct endpoint *to = select_backend(&vip);
	struct flow reply = { .server = key->server, .server_port = key->server_port, .client_device = skb->ifindex };
	struct flow f = {}, *other;
	struct flow_key back;

	if (!to || !may_open_flow(key->client))
		return NULL;
	back = other_key(key, to->addr, to->port);
	if (old && old->server == to->addr && old->server_port == to->port) {
		other = bpf_map_lookup_elem(&flows, &back);
		if (other) {
			begin(skb, t, old, other);
			return old;
		}
	}
	f.server = to->addr;
	f.server_port = to->port;
	if (t->flags & TCP_SYN)
		begin(skb, t, &f, &reply);
	if (old)
		bpf_map_delete_elem(&flows, key);
	bpf_map_update_elem(&handshakes, &back, &reply, BPF_ANY);
	bpf_map_update_elem(&handshakes, key, &f, BPF_ANY);
	return bpf_map_lookup_elem(&handshakes, key);
}

SEC("tc/from_client")
int from_client(struct __sk_buff *skb)
{
	struct bpf_redir_neigh next = { .nh_family = AF_INET, .ipv4_nh = NEXT_HOP };
	struct header h;
	struct flow_key key;
	struct flow *f;
	struct tcp t;
	bool young;

	if (!read_header(skb, &h))
		return TC_ACT_UNSPEC;
	t = read_tcp(skb, h.proto);
	key = (struct flow_key){ .client = h.source,
				 .server = h.destination,
				 .client_port = h.source_port,
				 .server_port = h.destination_port,
				 .proto = h.proto };
	f = find_flow(&key, &young);
	if (!f || (f->state == CLOSED && t.flags & TCP_SYN))
		f = create_flow(skb, &key, &t, f);
	else
		f = follow_flow(skb, &key, f, &t, young);
	if (!f)
		return TC_ACT_UNSPEC;
	f->seen = bpf_jiffies64();
	replace(skb, &h, &h.destination, &h.destination_port, f);
	return UPLINK ? bpf_redirect_neigh(UPLINK, &next, sizeof(next), 0) : TC_ACT_UNSPEC;
}

/* Translates a reply. Returns its flow, or NULL if it belongs to none. */
static __always_inline struct flow *translate_reply(struct __sk_buff *skb)
{
	struct header h;
	struct flow_key key;
	struct flow *f;
	struct tcp t;
	bool young;

	if (!read_header(skb, &h))
		return NULL;
	t = read_tcp(skb, h.proto);
	key = (struct flow_key){ .client = h.destination,
				 .server = h.source,
				 .client_port = h.destination_port,
				 .server_port = h.source_port,
				 .proto = h.proto,
				 .reply = 1 };
	f = find_flow(&key, &young);
	f = f ? follow_flow(skb, &key, f, &t, young) : NULL;
	if (!f)
		return NULL;
	f->seen = bpf_jiffies64();
	replace(skb, &h, &h.source, &h.source_port, f);
	return f;
}

SEC("tc/to_client")
int to_client(struct __sk_buff *skb)
{
	translate_reply(skb);
	return TC_ACT_UNSPEC;
}

SEC("tc/from_network")
int from_network(struct __sk_buff *skb)
{
	struct flow *f = translate_reply(skb);

	return f ? bpf_redirect_peer(f->client_device, 0) : TC_ACT_UNSPEC;
}

/* Decrements the TTL, as a router does. */
static __always_inline bool decrement_ttl(struct __sk_buff *skb)
{
	struct header h;

	if (!read_header(skb, &h))
		return false;
	h.ttl--;
	h.check = ~fold((__u64)(__u16)~h.check + bpf_htons(0xfeff));
	return !bpf_skb_store_bytes(skb, HEADER, &h, sizeof(h), 0);
}

SEC("tc/redirect_out")
int redirect_out(struct __sk_buff *skb)
{
	struct bpf_redir_neigh next = { .nh_family = AF_INET, .ipv4_nh = NEXT_HOP };

	return decrement_ttl(skb) ? bpf_redirect_neigh(UPLINK, &next, sizeof(next), 0) : TC_ACT_UNSPEC;
}

SEC("tc/redirect_in")
int redirect_in(struct __sk_buff *skb)
{
	return decrement_ttl(skb) ? bpf_redirect_peer(CLIENT_DEVICE, 0) : TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
