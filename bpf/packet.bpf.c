//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The packet path, for whom the socket path does not see: VMs, sandboxed pods, forwarded hosts, pods that opted out.
 * A packet to a VIP becomes one to a backend where it enters the node, and the answers' source becomes the VIP again
 * where they leave it towards the client:
 *
 *	from_client	ingress of a client's device: a pod's host veth, a tap, a bridge
 *	from_network	ingress of an uplink: the same, and the answers of flows on the fast road
 *	to_client	egress of a client's device
 *	to_network	egress of an uplink: the same, for clients that are behind it
 *
 * Each may be attached by TCX or as a direct-action filter of clsact.
 *
 * A flow takes one of two roads, both ways the same, fixed at its first packet. On the slow one the kernel routes it,
 * through netfilter and its connection tracking, and to_client translates the answers. On the fast one from_client
 * sends it straight to the uplink and from_network straight into the pod, each making the hop a router makes.
 *
 * Only its own side is kept in a packet's sight: packet_parse.h reads it, conntrack.h knows its flow,
 * packet_rewrite.h writes it, packet_refuse.h answers it, packet_error.h is about ICMP errors.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "choose.h"
#include "conntrack.h"
#include "maps.h"
#include "packet_error.h"
#include "packet_maps.h"
#include "packet_parse.h"
#include "packet_refuse.h"
#include "packet_rewrite.h"

#define AF_INET 2
#define AF_INET6 10
#define PACKET_HOST 0

/* How often a port is chosen anew when it is taken. */
#define TRIES 4
/* Ports that stand in for a client's: the upper half, as Linux clients use them. */
#define STAND_IN_FIRST 32768
#define STAND_IN_COUNT 28232
/* Any length: the helper then tells the route's MTU. */
#define SOME_LENGTH 68

/* Never NULL, but for the verifier. */
static __always_inline const struct packet_settings *read_settings(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&packet_settings, &zero);
}

static __always_inline enum device_flags read_device(__u32 ifindex)
{
	struct device *d = bpf_map_lookup_elem(&devices, &ifindex);

	return d ? d->flags : 0;
}

static __always_inline bool is_in_ranges(const __u8 addr[16])
{
	struct range_key range = { .prefixlen = 128 };

	__builtin_memcpy(range.addr, ADDR(addr), sizeof(range.addr));
	return bpf_map_lookup_elem(&ranges, &range);
}

static __always_inline bool covers4(const struct packet_settings *s, __u32 addr)
{
	return (addr & s->mask4) == s->net4;
}

static __always_inline bool covers6(const struct packet_settings *s, const __u8 addr[16])
{
	__u32 a[4], net[4], mask[4];

	__builtin_memcpy(a, ADDR(addr), sizeof(a));
	__builtin_memcpy(net, s->net6, sizeof(net));
	__builtin_memcpy(mask, s->mask6, sizeof(mask));
	return (a[0] & mask[0]) == net[0] && (a[1] & mask[1]) == net[1] && (a[2] & mask[2]) == net[2] &&
	       (a[3] & mask[3]) == net[3];
}

/* Reports whether an address is known to be no VIP's. */
static __always_inline bool is_elsewhere(const struct packet_settings *s, const struct packet *p, const __u8 addr[16])
{
	if (!(s->flags & PACKET_VIPS_IN_RANGES))
		return false;
	if (!(p->ipv6 ? covers6(s, addr) : covers4(s, last_word(addr))))
		return true;
	return !(s->flags & PACKET_ONE_RANGE) && !is_in_ranges(addr);
}

/* The first question about every packet: is it known to be to no VIP, by a look at its destination alone? When that is
 * not to be had at once the answer is no. */
static __always_inline bool goes_elsewhere(struct __sk_buff *skb, const struct packet_settings *s)
{
	void *start = (void *)(long)skb->data + LINK_HEADER, *end = (void *)(long)skb->data_end;
	const struct ipv4_header *h4 = start;
	const struct ipv6_header *h6 = start;

	if (!(s->flags & PACKET_VIPS_IN_RANGES))
		return false;
	if (skb->protocol == bpf_htons(ETH_P_IP) && (void *)(h4 + 1) <= end)
		return !covers4(s, h4->destination);
	if (skb->protocol == bpf_htons(ETH_P_IPV6) && (void *)(h6 + 1) <= end)
		return !covers6(s, h6->destination);
	return false;
}

/* Finds the way from here to a flow's backend, and keeps what is known of it when there is none to be found. Returns
 * whether it leaves by an uplink. */
static __noinline bool find_road(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	struct bpf_fib_lookup fib = { .l4_protocol = p->key.proto, .tot_len = SOME_LENGTH, .ifindex = skb->ifindex };
	__u32 mtu = 0;
	long found;

	if (p->ipv6) {
		fib.family = AF_INET6;
		__builtin_memcpy(fib.ipv6_src, p->key.client, sizeof(fib.ipv6_src));
		__builtin_memcpy(fib.ipv6_dst, c->addr, sizeof(fib.ipv6_dst));
	} else {
		fib.family = AF_INET;
		fib.ipv4_src = last_word(p->key.client);
		fib.ipv4_dst = last_word(c->addr);
	}
	fib.sport = bpf_htons(c->client_port);
	fib.dport = bpf_htons(c->server_port);
	found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;
	if (!(read_device(fib.ifindex) & DEVICE_UPLINK))
		return false;
	if (found == BPF_FIB_LKUP_RET_SUCCESS)
		mtu = fib.mtu_result;
	else if (bpf_check_mtu(skb, fib.ifindex, &mtu, 0, 0) < 0)
		return false;
	c->mtu = mtu > 0xffff ? 0xffff : mtu;
	c->ifindex = fib.ifindex;
	if (fib.family == AF_INET6)
		c->flags |= CONN_VIA6;
	else
		c->flags &= ~CONN_VIA6;
	/* An IPv4 address is the first word of the same union. */
	__builtin_memcpy(c->via, fib.ipv6_dst, sizeof(c->via));
	return true;
}

/* Finds the fast road for a flow to be, if there is one: what was found a moment ago for the same client and backend is
 * as good as the roads of known flows, which are looked for once a second. The kernel's lookup costs as much as all
 * else that a flow's first packet needs beside its two entries. */
static __noinline bool find_first_road(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	__u32 index = (hash_address(p->key.client) ^ c->backend_id) % ROADS_MAX;
	struct road *r = bpf_map_lookup_elem(&roads, &index);
	__u32 now = bpf_jiffies64() >> 6;

	if (!r)
		return false;
	if (r->backend_id == c->backend_id && r->device == skb->ifindex && now - r->looked < 2 &&
	    same_addr(r->client, p->key.client)) {
		__builtin_memcpy(c->via, r->via, sizeof(c->via));
		c->ifindex = r->ifindex;
		c->mtu = r->mtu;
		c->flags |= r->flags;
		return read_device(c->ifindex) & DEVICE_UPLINK; /* the agent may have left it */
	}
	if (!(read_device(skb->ifindex) & DEVICE_PEER) || !find_road(skb, p, c))
		return false;
	__builtin_memcpy(r->client, p->key.client, sizeof(r->client));
	__builtin_memcpy(r->via, c->via, sizeof(r->via));
	r->device = skb->ifindex;
	r->backend_id = c->backend_id;
	r->looked = now;
	r->ifindex = c->ifindex;
	r->mtu = c->mtu;
	r->flags = c->flags & CONN_VIA6;
	return true;
}

/* Looks at the clock for a flow, and after it once a second. Returns false when the flow is over: it was silent for too
 * long, or its backend is gone and a datagram may as well go to another. */
__noinline int tend(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	__u32 client_device, backend_id;
	__u64 now = now_ns();

	if (!p || !c)
		return false;
	backend_id = c->backend_id; /* Linux 6.1 takes no key from memory that a caller passed */
	client_device = is_back(&p->key, c) ? 0 : skb->ifindex;
	if (!is_alive(p->key.proto, c, now))
		return false;
	c->looked = ticks();
	if (since(c->seen, now) < NS_PER_S)
		return true;
	if (p->key.proto == IPPROTO_UDP && !is_back(&p->key, c) && !bpf_map_lookup_elem(&backends, &backend_id))
		return false;
	c->seen = now;
	if (is_back(&p->key, c))
		note_answer(c);
	if (tend_other(&p->key, c, client_device) & CONN_FAST && client_device && find_road(skb, p, c))
		c->flags |= CONN_FAST;
	return true;
}

/* Reports whether a SYN or INIT on a flow that is known begins another: its client has used the port again, or
 * nobody answered the first one. */
static __always_inline bool is_reopening(const struct packet *p, const struct conn *c)
{
	if (p->key.proto == IPPROTO_UDP || p->part == PART_LATER || !is_opening(p))
		return false;
	if (c->state == CONN_OPENING)
		return since(c->seen, now_ns()) >= SYN_AGAIN_NS;
	return c->state != CONN_ANSWERED;
}

/* Removes the other direction of a flow that is over. */
static __noinline int forget_other(const struct conn_key *key, const struct conn *c)
{
	struct conn_key other = key_of_other(key, c);

	bpf_map_delete_elem(&conns, &other);
	return 0;
}

/* Reports whether an answer is to a connection that the client has opened to the backend itself, from a port from which
 * it has had a flow to it. That flow is over, and has had its own answer; what reopens it makes it another one. */
static __always_inline bool is_of_direct(const struct packet *p, const struct conn *c)
{
	return c->state >= CONN_CLOSING && p->part != PART_LATER && is_accepting(p);
}

/* Finds the flow of a packet, NULL when there is none, or none any more. One that the packet begins anew is *ended. */
static __always_inline struct conn *find_conn(struct __sk_buff *skb, const struct packet *p, struct conn **ended)
{
	struct conn *c = bpf_map_lookup_elem(&conns, &p->key);

	if (!c)
		return NULL;
	if (!p->key.reply && is_reopening(p, c)) {
		if (c->state == CONN_OPENING)
			note_silence(c);
		*ended = c;
		return NULL;
	}
	if (p->key.reply && is_of_direct(p, c)) {
		forget_other(&p->key, c);
		bpf_map_delete_elem(&conns, &p->key);
		return NULL;
	}
	if (is_due(c) && !tend(skb, p, c))
		return NULL;
	return c;
}

/* Reports whether a known way back leads to the same VIP and client. */
static __always_inline bool leads_to_same(const struct conn *back, const struct conn *known)
{
	return same_addr(known->addr, back->addr) && known->server_port == back->server_port &&
	       known->client_port == back->client_port;
}

/* Reports whether a new flow may have the way back of a flow that is known: that is over, or leads to the same. */
static __always_inline bool may_take(const struct packet *p, const struct conn *back, const struct conn *taken)
{
	return taken->state == CONN_CLOSED || !is_alive(p->key.proto, taken, back->seen) || leads_to_same(back, taken);
}

static __always_inline void fill_back(struct __sk_buff *skb, const struct packet *p, const struct conn *c,
				      struct conn *back)
{
	fill_other(&p->key, c, back);
	back->ifindex = skb->ifindex;
	back->flags |= c->flags & CONN_FAST;
}

/* Stores the direction back of a new flow, and so finds out by which port the backend shall know the client: its own,
 * unless another VIP of the same client and port leads there too. Returns false when there is none, or no memory. */
static __noinline bool store_back(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	struct conn other;

	fill_back(skb, p, c, &other);
	for (int i = 0; i < TRIES; i++) {
		struct conn_key key = key_of_other(&p->key, c);
		struct conn *taken;

		if (!bpf_map_update_elem(&conns, &key, &other, BPF_NOEXIST))
			return true;
		taken = bpf_map_lookup_elem(&conns, &key);
		if (taken && may_take(p, &other, taken))
			return !bpf_map_update_elem(&conns, &key, &other, BPF_ANY);
		c->client_port = STAND_IN_FIRST + bpf_get_prandom_u32() % STAND_IN_COUNT;
	}
	return false;
}

/* What of a flow's entry stays as it is for as long as there is the flow. */
static __always_inline bool same_flow(const struct conn *a, const struct conn *b)
{
	enum conn_flags lasting = CONN_FAST | CONN_VIA6 | CONN_SELF | CONN_BACK;

	return a->backend_id == b->backend_id && a->service == b->service && a->cluster == b->cluster &&
	       a->ifindex == b->ifindex && a->mtu == b->mtu && !((a->flags ^ b->flags) & lasting) &&
	       same_addr(a->via, b->via) && leads_to_same(a, b);
}

static __always_inline void renew(struct conn *entry, const struct conn *c)
{
	entry->seen = c->seen;
	entry->looked = c->looked;
	entry->state = c->state;
	entry->flags = c->flags;
}

/* Begins a flow in the entries of the one that it ends, when only its state makes it another one: the ports of a busy
 * client come round, and to remove an entry and make it again costs several times what it costs to find it. Whatever a
 * late packet reads meanwhile is right for both. Returns false when more has to change. */
static __noinline bool begin_again(struct __sk_buff *skb, const struct packet *p, struct conn *ended,
				   const struct conn *c)
{
	struct conn_key key = key_of_other(&p->key, c);
	struct conn *known, other;

	if (!same_flow(ended, c))
		return false;
	known = bpf_map_lookup_elem(&conns, &key);
	if (!known)
		return false;
	fill_back(skb, p, c, &other);
	if (!same_flow(known, &other))
		return false;
	renew(known, &other);
	renew(ended, c);
	return true;
}

/* Chooses who serves a flow of which this is the first packet that is known. Returns NULL when there is nobody:
 * choice->reason says why the packet must be refused, or that it is to no VIP. */
static __noinline struct backend *find_backend(const struct packet *p, bool adopt, struct choice *choice)
{
	struct frontend_key vip = { .port = p->key.server_port, .proto = p->key.proto };
	__u64 ports = (__u64)p->key.client_port << 32 | p->key.server_port << 16 | p->key.proto;
	struct client client;
	struct frontend *fe;

	__builtin_memcpy(vip.addr, p->key.server, sizeof(vip.addr));
	fe = find_frontend(&vip, choice);
	if (!fe)
		return NULL;
	if (!is_opening(p) && (is_reset(p) || !adopt)) {
		choice->service = fe->service;
		choice->reason = DROP_REASON_NO_CONNECTION;
		return NULL;
	}
	__builtin_memcpy(client.addr, p->key.client, sizeof(client.addr));
	client.hash = fe->flags & FRONTEND_MAGLEV ? hash_u64(hash_address(client.addr) ^ ports) : bpf_get_prandom_u32();
	return choose_backend(&vip, fe, &client, choice);
}

/* Remembers that answers to clients may leave the node by an uplink. */
static __always_inline void note_routed_client(void)
{
	__u32 zero = 0;
	__u32 *known = bpf_map_lookup_elem(&routed_clients, &zero);

	if (known && !*known)
		*known = 1;
}

/* Begins a flow; ended is the one that had the key before, NULL when there was none. Returns what the first packet
 * needs to know of it, NULL when there is no room for it. */
static __noinline struct conn *begin(struct __sk_buff *skb, const struct packet *p, const struct backend *be,
				     const struct choice *choice, struct conn *ended)
{
	__u32 zero = 0;
	struct conn *c = bpf_map_lookup_elem(&new_conn, &zero);

	if (!c)
		return NULL;
	__builtin_memset(c, 0, sizeof(*c));
	__builtin_memcpy(c->addr, be->addr, sizeof(c->addr));
	c->server_port = be->port;
	c->client_port = p->key.client_port;
	c->looked = ticks();
	c->state = is_opening(p) ? CONN_OPENING : CONN_OPEN;
	c->cluster = be->cluster;
	c->seen = now_ns();
	c->backend_id = choice->backend_id;
	c->service = choice->service;
	if (same_addr(c->addr, p->key.client))
		c->flags |= CONN_SELF;
	else if (!p->tagged && find_first_road(skb, p, c))
		c->flags |= CONN_FAST;
	if (!(c->flags & CONN_FAST) && !(read_device(skb->ifindex) & DEVICE_CLIENT))
		note_routed_client();
	if (!ended || !begin_again(skb, p, ended, c)) {
		if (ended)
			forget_other(&p->key, ended);
		/* First the direction back: no answer may come unknown. */
		if (!store_back(skb, p, c) || bpf_map_update_elem(&conns, &p->key, c, BPF_ANY))
			return NULL;
	}
	tell(&p->key, be, choice);
	return c;
}

/* Reports whether the packet can leave by the fast road as it is. The others the kernel routes: it knows how to say
 * "packet too big" and "time exceeded". */
static __always_inline bool fits_fast(struct __sk_buff *skb, const struct packet *p, const struct conn *c)
{
	if (!(c->flags & CONN_FAST) || hops_of(p) <= 1)
		return false;
	return p->key.reply || size_of(skb, p) <= c->mtu;
}

static __always_inline int send_to_backend(const struct conn *c)
{
	struct bpf_redir_neigh next = { .nh_family = c->flags & CONN_VIA6 ? AF_INET6 : AF_INET };

	__builtin_memcpy(next.ipv6_nh, c->via, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(c->ifindex, &next, sizeof(next), 0);
}

/* Sends a packet of a client that is its own backend back to it, as if the VIP had sent it. */
static __noinline int send_home(struct __sk_buff *skb, const struct packet *p, const struct conn *c)
{
	struct port_pair old = pair_ports(p->key.client_port, p->key.server_port, false);
	struct port_pair ports = pair_ports(c->client_port, c->server_port, false);

	if (p->ports && port_word(&old) != port_word(&ports)) {
		bpf_skb_store_bytes(skb, p->l4, &ports, sizeof(ports), 0);
		follow_ports(skb, p, port_word(&old), port_word(&ports));
	}
	return turn_back(skb, p);
}

/* An ICMP message to a VIP. Errors go on to the backend they are for. Anything else is refused, echo requests too: a
 * VIP is ports and no machine, and what answered in its place would say nothing of any backend. */
__noinline int serve_icmp(struct __sk_buff *skb, const struct packet *p)
{
	struct conn *c;

	if (!p)
		return TC_ACT_SHOT;
	c = is_error(p) ? translate_error(skb, p, false) : NULL;
	if (c && c->flags & CONN_SELF)
		return turn_back(skb, p);
	if (c)
		return fits_fast(skb, p, c) ? send_to_backend(c) : TC_ACT_UNSPEC;
	if (!is_in_ranges(p->key.server))
		return TC_ACT_UNSPEC;
	return refuse(skb, p, 0, is_error(p) ? DROP_REASON_NO_CONNECTION : DROP_REASON_PROTOCOL);
}

/* What cannot be read is refused when it is for the ClusterSet, and else none of our business. */
__noinline int reject(struct __sk_buff *skb, const struct packet *p, enum drop_reason reason)
{
	if (!p)
		return TC_ACT_SHOT;
	if (!is_in_ranges(p->key.server))
		return TC_ACT_UNSPEC;
	return refuse(skb, p, 0, reason);
}

/* Serves a packet from a client: whatever is to a VIP goes to a backend or is refused. */
static __always_inline int serve(struct __sk_buff *skb, struct packet *p, enum drop_reason reason, bool adopt)
{
	struct choice choice = {};
	struct conn *c, *ended = NULL;
	struct backend *be = NULL;
	bool fast;

	if (reason == DROP_REASON_NONE && p->part == PART_LATER && !recall_fragment(p))
		reason = DROP_REASON_FRAGMENT;
	if (reason != DROP_REASON_NONE)
		return reject(skb, p, reason);
	if (is_icmp(p))
		return serve_icmp(skb, p);
	c = find_conn(skb, p, &ended);
	if (!c) {
		if (p->part == PART_LATER)
			return reject(skb, p, DROP_REASON_FRAGMENT);
		be = find_backend(p, adopt, &choice);
		if (!be && choice.reason == DROP_REASON_NONE)
			return TC_ACT_UNSPEC;
		c = be ? begin(skb, p, be, &choice, ended) : NULL;
		if (!c) {
			if (ended)
				forget_other(&p->key, ended);
			bpf_map_delete_elem(&conns, &p->key);
			return refuse(skb, p, choice.service, be ? DROP_REASON_NO_MEMORY : choice.reason);
		}
	}
	if (!can_rewrite(p, c))
		return refuse(skb, p, c->service, DROP_REASON_SCTP_PORT);
	if (!be && is_telling(p, c)) /* a new flow is as this packet made it */
		follow(p, c);
	if (p->part == PART_FIRST)
		remember_fragment(p);
	if (c->flags & CONN_SELF)
		return send_home(skb, p, c);
	fast = fits_fast(skb, p, c);
	rewrite(skb, p, c, false, fast);
	return fast ? send_to_backend(c) : TC_ACT_UNSPEC;
}

/* Gives an answer the VIP for its source. only_fast is for the uplink, where the answers of slow flows must pass as
 * they are. Returns TC_ACT_UNSPEC for what is no answer, or is to go on by the slow road. */
static __always_inline int answer(struct __sk_buff *skb, struct packet *p, enum drop_reason reason, bool only_fast)
{
	struct conn *c, *ended = NULL; /* answers end none */
	bool fast;

	if (reason != DROP_REASON_NONE || (p->part == PART_LATER && !recall_fragment(p)))
		return TC_ACT_UNSPEC;
	if (is_icmp(p)) {
		c = is_error(p) ? translate_error(skb, p, only_fast) : NULL;
		return c && only_fast && hops_of(p) > 1 ? bpf_redirect_peer(c->ifindex, 0) : TC_ACT_UNSPEC;
	}
	c = find_conn(skb, p, &ended);
	if (!c || (only_fast && !(c->flags & CONN_FAST)))
		return TC_ACT_UNSPEC;
	if (!can_rewrite(p, c)) {
		count_refusal(c->service, DROP_REASON_SCTP_PORT);
		return TC_ACT_SHOT;
	}
	if (is_telling(p, c))
		follow(p, c);
	if (p->part == PART_FIRST)
		remember_fragment(p);
	fast = only_fast && hops_of(p) > 1;
	rewrite(skb, p, c, true, fast);
	return fast ? bpf_redirect_peer(c->ifindex, 0) : TC_ACT_UNSPEC;
}

/* Turns what was read as one direction of a flow into the other. */
static __always_inline void turn(struct packet *p)
{
	__u16 port = p->key.client_port;

	for (int i = 0; i < 16; i += 4) { /* word by word: the stack is short */
		__u32 client, server;

		__builtin_memcpy(&client, p->key.client + i, sizeof(client));
		__builtin_memcpy(&server, p->key.server + i, sizeof(server));
		__builtin_memcpy(p->key.client + i, &server, sizeof(server));
		__builtin_memcpy(p->key.server + i, &client, sizeof(client));
	}
	p->key.client_port = p->key.server_port;
	p->key.server_port = port;
	p->key.reply = !p->key.reply;
}

SEC("tc/from_client")
int from_client(struct __sk_buff *skb)
{
	const struct packet_settings *s = read_settings();
	struct packet p = {};
	enum drop_reason reason;

	if (!s || goes_elsewhere(skb, s) || !locate(skb, &p))
		return TC_ACT_UNSPEC;
	reason = read_network(skb, &p, false, false);
	if (is_elsewhere(s, &p, p.key.server))
		return TC_ACT_UNSPEC;
	if (reason == DROP_REASON_NONE)
		reason = read_transport(skb, &p, false);
	return serve(skb, &p, reason, s->flags & PACKET_ADOPT);
}

SEC("tc/from_network")
int from_network(struct __sk_buff *skb)
{
	const struct packet_settings *s = read_settings();
	struct packet p = {};
	enum drop_reason reason;
	bool elsewhere, answers;
	int verdict;

	if (!s)
		return TC_ACT_UNSPEC;
	answers = s->flags & PACKET_FAST && skb->pkt_type == PACKET_HOST;
	if ((!answers && goes_elsewhere(skb, s)) || !locate(skb, &p))
		return TC_ACT_UNSPEC;
	reason = read_network(skb, &p, true, false);
	elsewhere = is_elsewhere(s, &p, p.key.client);
	if (elsewhere && !answers)
		return TC_ACT_UNSPEC;
	if (reason == DROP_REASON_NONE)
		reason = read_transport(skb, &p, true);
	if (answers && !p.tagged) {
		verdict = answer(skb, &p, reason, true);
		if (verdict != TC_ACT_UNSPEC)
			return verdict;
	}
	if (elsewhere)
		return TC_ACT_UNSPEC;
	turn(&p);
	return serve(skb, &p, reason, s->flags & PACKET_ADOPT);
}

static __always_inline int to_any(struct __sk_buff *skb)
{
	struct packet p = {};
	enum drop_reason reason;

	if (!locate(skb, &p))
		return TC_ACT_UNSPEC;
	reason = read_network(skb, &p, true, false);
	if (reason == DROP_REASON_NONE)
		reason = read_transport(skb, &p, true);
	return answer(skb, &p, reason, false);
}

SEC("tc/to_client")
int to_client(struct __sk_buff *skb)
{
	return to_any(skb);
}

SEC("tc/to_network")
int to_network(struct __sk_buff *skb)
{
	__u32 zero = 0;
	__u32 *routed = bpf_map_lookup_elem(&routed_clients, &zero);

	return routed && *routed ? to_any(skb) : TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
