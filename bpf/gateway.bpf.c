//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The balancer of a gateway: one program at the ingress of every device, since a gateway may have one arm or two.
 *
 * A packet to a VIP becomes one to a backend. A Maglev table and a hash of the client choose the backend, so every
 * gateway with the same backends makes the same choice. A packet of a flow from a backend becomes one from the VIP. So
 * does one that belongs to no flow here, if its backend and port serve one frontend only: the client's packets pass
 * another gateway. Any other is handed over or dropped: if it were forwarded, the client would see an address that it
 * never contacted.
 *
 * A flow has two entries, as flow.h says:
 *
 *	client -> VIP		the VIP becomes the backend
 *	backend -> client	the backend becomes the VIP
 *
 * If the client's address changes too (double NAT), a packet is translated twice, and the result of the first
 * translation is the key of the second. The second translation sees the roles reversed: the backend is the client of a
 * source address, and the client is the server behind it.
 *
 *	client -> VIP		the VIP becomes the backend
 *	client -> backend	the client becomes the source
 *	backend -> source	the source becomes the client
 *	backend -> client	the backend becomes the VIP
 *
 * The packet then leaves by the route from the FIB, past the kernel's other rules. Without such a route it continues
 * through the kernel.
 *
 * Where a driver supports it, an XDP program runs before this one: gateway_xdp.h.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "affinity.h"
#include "flow.h"
#include "flow_maps.h"
#include "gateway.h"
#include "gateway_maps.h"
#include "hand_over.h"
#include "maps.h"
#include "net.h"
#include "packet_error.h"
#include "packet_parse.h"
#include "packet_refuse.h"
#include "packet_rewrite.h"
#include "route.h"
#include "gateway_xdp.h"

#define PACKET_HOST 0

/* How often another NAT port is tried if one is taken. */
#define TRIES 8
/* NAT ports, which replace a client's port: those that Linux gives to no socket of its own. */
#define NAT_PORT_FIRST 1024
#define NAT_PORT_COUNT 31744

/* Within this time another gateway announces a connection that moves here, also if its machine is busy. TCP sends a
 * lost packet after 200 ms at the earliest, then after 600 ms. */
#define ANNOUNCE_NS (NS_PER_S * 3 / 10)
/* How long an unknown connection is remembered as one. */
#define UNKNOWN_FLOW_NS (NS_PER_S * 10)

#define ICMPV6_ROUTER_SOLICITATION 133
#define ICMPV6_REDIRECT 137

/* Counts a drop. Not inlined: Go constants and types come from the BTF, from which clang omits types that only inlined
 * functions take. */
static __noinline int drop(__u32 service, enum gateway_drop_reason reason)
{
	count_refusal(service, (enum drop_reason)reason);
	return TC_ACT_SHOT;
}

static __always_inline bool is_zero_addr(const __u8 addr[16])
{
	__u64 words[2];

	__builtin_memcpy(words, addr, sizeof(words));
	return (words[0] | words[1]) == 0;
}

/* Reports whether the agent wants flows to be announced. */
static __always_inline bool is_announcing(void)
{
	__u32 zero = 0;
	struct gateway_settings *s = bpf_map_lookup_elem(&gateway_settings, &zero);

	return s && s->announce;
}

/* Not inlined, as drop. */
static __noinline int fill_opened(struct gateway_opened *o, const struct conn_key *key, const struct conn *c)
{
	o->key = *key;
	o->conn = *c;
	return 0;
}

/* Announces a flow to the agent, which shares it with other gateways. The agent is not woken: at a high rate of new
 * flows the wake-ups would cost more than everything else. */
static __noinline int announce_flow(const struct conn_key *key, const struct conn *c)
{
	struct gateway_opened *o;
	__u32 zero = 0;
	__u64 *lost;

	if (!is_announcing())
		return 0;
	o = bpf_ringbuf_reserve(&opened, sizeof(*o), 0);
	if (!o) {
		lost = bpf_map_lookup_elem(&opened_lost, &zero);
		if (lost)
			__sync_fetch_and_add(lost, 1);
		return 0;
	}
	fill_opened(o, key, c);
	bpf_ringbuf_submit(o, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Looks up the route from here to the destination of a flow's translated packets, and stores its next hop. */
static __noinline bool find_route(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	struct bpf_fib_lookup fib = { .l4_protocol = p->key.proto, .tot_len = ANY_LENGTH, .ifindex = skb->ifindex };
	const __u8 *from = p->key.reply ? c->addr : p->key.client, *to = p->key.reply ? p->key.client : c->addr;
	long found;

	c->flags &= ~(CONN_FAST | CONN_VIA6);
	set_fib_addrs(&fib, p->ipv6, from, to);
	found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (!has_route(found) || !store_next_hop(skb, c, &fib, found))
		return false;
	c->flags |= CONN_FAST;
	return true;
}

/* Announces a standby whose client's packet another gateway has handed over: the flow began there, and that gateway has
 * lost it in a restart. The flag stays in the record: the agent then knows that the flow has not opened now. */
static __noinline int tell_back(struct __sk_buff *skb, const struct packet *p, const struct conn *c)
{
	if (c->flags & GATEWAY_STANDBY && !p->key.reply && !(c->window & WINDOW_SECOND) && find_sender(skb))
		announce_flow(&p->key, c);
	return 0;
}

/* Compares a flow's age with the clock, and refreshes both entries once a second. Returns false if the flow is over: it
 * has timed out, or its backend was removed. Only the first translation of a packet needs a route. */
__noinline int refresh_conn(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	__u32 backend_id;
	__u64 now = now_ns();
	bool first, young;

	if (!p || !c)
		return false;
	backend_id = c->backend_id;
	young = since(c->seen, now) < NS_PER_S && !(c->flags & GATEWAY_STANDBY);
	first = !(c->flags & GATEWAY_DOUBLE_NAT) || !p->key.reply;
	if (!is_alive(p->key.proto, c, now))
		return false;
	if (!young) {
		if (!bpf_map_lookup_elem(&backends, &backend_id))
			return false; /* checked_at stays, so that the next packet comes here too */
		c->seen = now;
		refresh_other(&p->key, c, 0);
		tell_back(skb, p, c);
		c->flags &= ~GATEWAY_STANDBY;
		if (p->key.proto == IPPROTO_UDP && !p->key.reply && c->state == CONN_OPEN &&
		    !(c->flags & GATEWAY_ANNOUNCED)) {
			c->flags |= GATEWAY_ANNOUNCED;
			announce_flow(&p->key, c);
		}
	}
	c->checked_at = coarse_ticks();
	if (first && !(young && c->flags & CONN_FAST))
		find_route(skb, p, c);
	return true;
}

/* Reports whether the answers of a flow would come back to it. Its port may belong to another flow by now, of which the
 * port's owner has told, while its own client's entry is still here. */
static __noinline bool leads_back(const struct packet *p, const struct conn *c)
{
	struct conn_key k = other_key(&p->key, c);
	struct conn *back = find_entry(&k);

	return back && back->client_port == p->key.client_port && back->server_port == p->key.server_port &&
	       same_addr(back->addr, p->key.server);
}

/* Finds the flow of a packet. Returns NULL if there is none, it is over, or the packet reopens it. */
static __always_inline struct conn *find_flow(struct __sk_buff *skb, struct packet *p)
{
	struct conn_key key = p->key; /* Linux 6.1 accepts no map key in memory that the caller passed */
	struct conn *c = find_entry_of(p, &key);

	if (!c || (!p->key.reply && is_reopening(p, c)) || (is_due(c) && !refresh_conn(skb, p, c)))
		return NULL;
	if (is_syn(p) && c->flags & GATEWAY_DOUBLE_NAT && !p->key.reply && !(c->window & WINDOW_SECOND) &&
	    !leads_back(p, c))
		return NULL;
	track_window(p, c);
	return c;
}

/* Announces a flow that is open now, given one of its entries. A UDP flow is announced later (refresh_conn). */
static __noinline int announce_opened(const struct conn_key *key, const struct conn *c)
{
	struct conn_key client = *key;

	if (key->proto != IPPROTO_TCP || c->state != CONN_OPEN)
		return 0;
	if (key->reply) {
		client = other_key(key, c);
		c = bpf_map_lookup_elem(&flows, &client);
	}
	return c ? announce_flow(&client, c) : 0;
}

/* Returns the number of entries that a flow of TCP has. */
static __always_inline __u32 entries_of(bool double_nat)
{
	return double_nat ? 4 : 2;
}

/* Reports whether a packet may open another flow of a frontend, with so many entries: only while the frontend has taken
 * fewer than are left to all. So a flood of one frontend leaves half to the others, and a flood of nine a tenth. A
 * client that may open none takes none of the frontend's. */
static __noinline bool may_open_flow(const struct packet *p, __u32 frontend_id, __u32 entries)
{
	bool udp = p->key.proto == IPPROTO_UDP;
	__u64 now = now_ns(), most = udp ? CPU_FLOWS_MAX : HALF_OPEN_MAX;
	struct answers *all, *own;
	__u32 zero = 0;

	all = udp ? bpf_map_lookup_elem(&new_flows, &zero) : bpf_map_lookup_elem(&half_open, &zero);
	own = bpf_map_lookup_elem(&half_open, &frontend_id);
	if (!all || !own)
		return false;
	start_period(all, now, udp ? NS_PER_S : HALF_OPEN_NS);
	if (own->since != all->since) {
		own->since = all->since;
		own->given = 0;
	}
	if (all->given + own->given >= most || !may_client_open(p, 0, now))
		return false;
	entries = udp ? 1 : entries;
	all->given += entries;
	own->given += entries;
	return true;
}

static __always_inline void give_back(__u32 index, __u32 entries)
{
	struct answers *a = bpf_map_lookup_elem(&half_open, &index);

	if (a)
		a->given -= a->given < entries ? a->given : entries;
}

/* Advances a flow's state by a packet of it, and announces the flow once it is open. Returns the flow's entry, which
 * may have moved; NULL if it was evicted at once. */
static __always_inline struct conn *advance(const struct packet *p, struct conn *c)
{
	__u32 frontend_id = c->service, entries = entries_of(c->flags & GATEWAY_DOUBLE_NAT);
	struct conn_key key;

	if (c->window & WINDOW_SECOND || !may_change_state(p, c) || !update_state(p, c))
		return c;
	give_back(0, entries);
	give_back(frontend_id, entries);
	key = p->key;
	if (p->young)
		c = bpf_map_lookup_elem(&flows, &key);
	if (c)
		announce_opened(&key, c);
	return c;
}

/* Gives the entries of the second translation the state of the first. Returns the entry of the key, which may have
 * moved; NULL if it was evicted at once. */
static __noinline struct conn *follow(const struct conn_key *key, struct conn *c, enum conn_state state)
{
	struct conn_key k = *key, reverse = other_key(key, c);
	bool opens = c->state < CONN_OPEN && state >= CONN_OPEN;
	struct conn *other;

	if (c->state == state)
		return c;
	other = find_entry(&reverse);
	c->state = state;
	if (other)
		other->state = state;
	if (opens) {
		promote_entry(&reverse);
		promote_entry(&k);
	}
	return find_entry(&k);
}

/* Returns the backend of the slot that the client's hash selects, 0 if there is none. */
static __always_inline __u32 choose_slot(const struct packet *p, const struct gateway_frontend *fe)
{
	__u8 client[16] ADDR_ALIGNED;
	__u32 id = fe->id, zero = 0, slot;
	struct gateway_table *table;
	void *array;

	if (!fe->slots)
		return 0;
	array = bpf_map_lookup_elem(&tables, &id);
	table = array ? bpf_map_lookup_elem(array, &zero) : NULL;
	if (!table)
		return 0;
	__builtin_memcpy(client, p->key.client, sizeof(client));
	slot = hash_address(client);
	if (!(fe->flags & GATEWAY_AFFINITY))
		slot = hash_u64((__u64)slot << 16 | p->key.client_port);
	slot %= GATEWAY_TABLE;
	barrier_var(slot); /* the verifier draws no conclusion from a remainder */
	return slot < GATEWAY_TABLE ? table->backend_ids[slot] : 0;
}

/* Returns the backend that a client had before, if it may keep it, else 0. */
static __always_inline __u32 keep_backend(struct affinity *known, const struct gateway_frontend *fe, __u64 now)
{
	struct gateway_member member = { .frontend_id = fe->id };

	if (!read_affinity(known, fe->id, fe->affinity_s, now, &member.backend_id) ||
	    !bpf_map_lookup_elem(&members, &member))
		return 0;
	known->last = now;
	return member.backend_id;
}

/* Chooses a backend. Returns 0 if there is none. */
static __noinline __u32 choose_backend(const struct packet *p, const struct gateway_frontend *fe)
{
	struct affinity_key key = { .frontend_id = fe->id };
	struct affinity value = { .frontend_id = fe->id };
	struct affinity *known;

	if (!fe->affinity_s)
		return choose_slot(p, fe);
	value.last = bpf_ktime_get_boot_ns();
	__builtin_memcpy(key.client, p->key.client, sizeof(key.client));
	known = bpf_map_lookup_elem(&affinities, &key);
	if (known)
		value.backend_id = keep_backend(known, fe, value.last);
	if (value.backend_id)
		return value.backend_id;
	value.backend_id = choose_slot(p, fe);
	if (value.backend_id)
		bpf_map_update_elem(&affinities, &key, &value, BPF_ANY); /* on failure the hash chooses again */
	return value.backend_id;
}

/* Reports whether a client may connect to a frontend. */
static __noinline bool may_connect(const struct packet *p, __u32 frontend_id, enum gateway_frontend_flags flags)
{
	struct gateway_source_key key = { .prefixlen = 32 + 128, .frontend_id = frontend_id };

	if (!(flags & GATEWAY_SOURCES))
		return true;
	__builtin_memcpy(key.addr, p->key.client, sizeof(key.addr));
	return bpf_map_lookup_elem(&sources, &key);
}

/* Stores an entry, unless another flow has its key. */
static __always_inline bool store(const struct conn_key *key, const struct conn *new)
{
	struct conn *existing;

	if (add_entry(key, new))
		return true;
	existing = find_entry(key);
	return existing && may_replace(key->proto, new, existing, CONN_CLOSING) && !store_entry(key, new);
}

/* Moves a port into a slot of this gateway, unless it is in one. */
static __always_inline __u16 move_to_own_slot(__u16 port)
{
	struct gateway_slot *slot = find_slot(port);

	return slot ? port + slot->shift * GATEWAY_SLOT_PORTS : port;
}

/* Returns the i-th candidate for the port by which the backend knows the client. Every gateway derives the same ones in
 * the same order: the client's own port if `own` allows it, then NAT ports. */
static __always_inline __u16 nat_port(const struct conn_key *key, __u32 i, bool own)
{
	__u64 ports = (__u64)key->client_port << 32 | key->server_port << 16 | i;
	__u8 client[16] ADDR_ALIGNED;

	if (own && i == 0)
		return key->client_port;
	__builtin_memcpy(client, key->client, sizeof(client));
	return NAT_PORT_FIRST + hash_u64(hash_address(client) ^ hash_u64(ports)) % NAT_PORT_COUNT;
}

/* Fills in another entry of a new flow. It is due for a check, so that its first packet looks up its route. */
static __always_inline void fill_entry(struct gateway_scratch *s, const __u8 addr[16], __u16 server_port,
				       __u16 client_port)
{
	s->other = s->flow;
	barrier(); /* otherwise clang keeps the whole copy on the stack, for which Linux 6.1 has no room */
	__builtin_memcpy(s->other.addr, addr, sizeof(s->other.addr));
	s->other.server_port = server_port;
	s->other.client_port = client_port;
	s->other.flags &= ~(CONN_FAST | CONN_VIA6);
	s->other.checked_at -= CHECK_TICKS;
	s->other.window = 0;
}

/* Stores the entry that turns the backend's packets to the client into the VIP's. */
static __noinline bool store_reply(const struct packet *p, struct gateway_scratch *s)
{
	s->key = other_key(&p->key, &s->flow);
	fill_entry(s, p->key.server, p->key.server_port, p->key.client_port);
	if (is_syn(p))
		expect_answer(p, &s->other);
	return store(&s->key, &s->other);
}

/* Deletes what store_reply has stored. Returns false. */
static __noinline bool delete_reply(const struct packet *p, struct gateway_scratch *s)
{
	s->key = other_key(&p->key, &s->flow);
	delete_new(&s->key);
	return false;
}

/* Builds the key of a second translation: the backend is the client of addr. */
static __always_inline void set_second_key(struct gateway_scratch *s, const __u8 addr[16], __u8 proto, bool reply)
{
	__builtin_memset(&s->key, 0, sizeof(s->key));
	__builtin_memcpy(s->key.client, s->flow.addr, sizeof(s->key.client));
	__builtin_memcpy(s->key.server, addr, sizeof(s->key.server));
	s->key.client_port = s->flow.server_port;
	s->key.server_port = s->flow.client_port;
	s->key.proto = proto;
	s->key.reply = reply;
}

/* Stores the entries that turn the client into the source, and the source into the client. */
static __noinline bool store_source(const struct packet *p, struct gateway_scratch *s)
{
	set_second_key(s, s->source, p->key.proto, false);
	fill_entry(s, p->key.client, s->flow.client_port, s->flow.server_port);
	s->other.window = WINDOW_SECOND;
	if (!store(&s->key, &s->other))
		return false;
	set_second_key(s, p->key.client, p->key.proto, true);
	fill_entry(s, s->source, s->flow.client_port, s->flow.server_port);
	s->other.window = WINDOW_SECOND;
	return store(&s->key, &s->other);
}

/* Reports whether a port of an address has a frontend. */
static __noinline bool has_frontend(const __u8 addr[16], __u16 port, __u8 proto)
{
	struct frontend_key key = { .port = port, .proto = proto };

	__builtin_memcpy(key.addr, addr, sizeof(key.addr));
	return bpf_map_lookup_elem(&frontends, &key);
}

/* Stores all entries of the flow in `scratch` except that of its first packet, with this port for its client. Returns
 * false if one of them is taken. The reply's entry comes first: it differs from that of any other flow of the client,
 * while those of the second translation would replace the other flow's. Not static: see skip_extensions. */
__noinline int store_others(const struct packet *p, __u16 port)
{
	struct gateway_scratch *s;
	__u32 zero = 0;

	s = bpf_map_lookup_elem(&scratch, &zero);
	if (!p || !s)
		return false;
	s->flow.client_port = port;
	if (!(s->flow.flags & GATEWAY_DOUBLE_NAT))
		return store_reply(p, s);
	if (has_frontend(s->source, port, p->key.proto) || !store_reply(p, s))
		return false;
	return store_source(p, s) || delete_reply(p, s);
}

/* Chooses the port by which the backend knows the client, and stores the flow. If the gateway's own address becomes the
 * source, only ports that the gateway itself never uses are candidates. If the VIP does, answers may come to another
 * gateway, so a new flow gets a port of this gateway's slots. A flow that did not begin here more likely has its
 * client's port. */
static __noinline bool store_flow(const struct packet *p, enum gateway_conn_flags flags, struct gateway_scratch *s)
{
	bool to_vip = flags & GATEWAY_DOUBLE_NAT && same_addr(s->source, p->key.server);
	bool own = !(flags & GATEWAY_DOUBLE_NAT) || to_vip;

	for (__u32 i = 0; i < TRIES; i++) {
		__u16 port = nat_port(&p->key, i, own);

		if (to_vip && is_opening(p))
			port = move_to_own_slot(port);
		if (!store_others(p, port))
			continue;
		s->key = p->key;
		return !store_entry(&s->key, &s->flow);
	}
	return false;
}

/* Creates a flow to a backend, in `scratch` and in `handshakes`. Returns false without a free port or memory. */
static __noinline bool create_conn(struct __sk_buff *skb, const struct packet *p, const struct gateway_vip *vip,
				   const struct gateway_frontend *fe, __u32 backend_id)
{
	struct backend *be = bpf_map_lookup_elem(&backends, &backend_id);
	struct gateway_scratch *s;
	__u32 zero = 0;

	s = bpf_map_lookup_elem(&scratch, &zero);
	if (!be || !s)
		return false;
	__builtin_memset(&s->flow, 0, sizeof(s->flow));
	__builtin_memcpy(s->flow.addr, be->addr, sizeof(s->flow.addr));
	s->flow.server_port = be->port;
	s->flow.backend_id = backend_id;
	s->flow.service = fe->id;
	s->flow.checked_at = coarse_ticks();
	s->flow.seen = now_ns();
	s->flow.state = CONN_OPENING;
	if (is_syn(p))
		note_syn(p, &s->flow);
	find_route(skb, p, &s->flow);
	__builtin_memcpy(s->source, vip->source, sizeof(s->source));
	/* A client that is its own backend would discard a packet from its own address as spoofed. */
	if (is_zero_addr(s->source) && same_addr(s->flow.addr, p->key.client))
		__builtin_memcpy(s->source, p->key.server, sizeof(s->source));
	if (!is_zero_addr(s->source))
		s->flow.flags |= GATEWAY_DOUBLE_NAT;
	return store_flow(p, s->flow.flags & GATEWAY_DOUBLE_NAT, s);
}

/* Makes p describe the packet after its first translation, from the other side. */
static __always_inline bool read_translated(struct __sk_buff *skb, struct packet *p, const struct conn *c)
{
	__builtin_memcpy(p->key.server, c->addr, sizeof(p->key.server));
	p->key.server_port = c->server_port;
	p->key.client_port = c->client_port;
	reverse_key(&p->key);
	return READ_AT(skb, p->l3 + (p->ipv6 ? 4 : 8), &p->hop_word) == 0;
}

/* Replies with an ICMP error as a router does: "time exceeded", or "packet too big" if mtu is not 0. */
__noinline int reply_as_router(struct __sk_buff *skb, const struct packet *p, __u32 service, __u32 mtu)
{
	__u32 kind;
	bool silent;

	if (!p)
		return TC_ACT_SHOT;
	silent = p->part == PART_LATER || (is_icmp(p) && is_error(p)) || !may_reply();
	drop(service, mtu ? GATEWAY_DROP_TOO_BIG : GATEWAY_DROP_HOPS);
	if (silent)
		return TC_ACT_SHOT;
	if (p->ipv6)
		kind = mtu ? ICMP_ERROR(2, 0) : ICMP_ERROR(3, 0); /* RFC 4443 sections 3.2 and 3.3 */
	else
		kind = mtu ? ICMP_ERROR(3, 4) : ICMP_ERROR(11, 0); /* RFC 1191 and RFC 792 */
	return reply_error(skb, p, kind, mtu);
}

/* Translates a packet for the second time. Returns false if the flow has no entry for that. */
__noinline int translate_again(struct __sk_buff *skb, struct packet *p, struct conn *first)
{
	struct gateway_scratch *s;
	struct conn *second;
	__u32 zero = 0;

	s = bpf_map_lookup_elem(&scratch, &zero);
	if (!p || !first || !s)
		return false;
	s->key = p->key;
	if (!read_translated(skb, p, first))
		return false;
	second = find_flow(skb, p);
	if (second)
		second = advance(p, second);
	if (second && second->window & WINDOW_SECOND)
		second = follow(&p->key, second, first->state);
	else if (second && first->window & WINDOW_SECOND)
		follow(&s->key, first, second->state);
	if (!second)
		return false;
	rewrite(skb, p, second, true, false);
	return true;
}

/* Translates a packet of a flow and sends it to its next hop. */
__noinline int forward(struct __sk_buff *skb, struct packet *p, struct conn *c)
{
	bool fast;

	if (!p || !c)
		return TC_ACT_SHOT;
	if (c->window & WINDOW_SECOND && is_told(skb, p)) {
		learn_window(p, c);
		translate_again(skb, p, c); /* which changes the flow's state */
		return TC_ACT_SHOT;
	}
	fast = c->flags & CONN_FAST;
	if (fast && hops_of(p) <= 1)
		return reply_as_router(skb, p, c->service, 0);
	if (fast && size_of(skb, p) > c->mtu)
		return reply_as_router(skb, p, c->service, c->mtu);
	if (p->part == PART_FIRST)
		remember_fragment(p);
	count_traffic(c->service, p->key.reply || c->window & WINDOW_SECOND, skb->gso_segs ?: 1, p->end - p->l3);
	rewrite(skb, p, c, p->key.reply, fast);
	if (c->flags & GATEWAY_DOUBLE_NAT && !p->key.reply && !translate_again(skb, p, c))
		return drop(c->service, GATEWAY_DROP_NO_FLOW);
	return fast ? redirect_to_next_hop(c) : TC_ACT_UNSPEC;
}

/* Reads a packet again after its first translation. Not inlined, to save stack in forward_error. */
static __noinline bool read_again(struct __sk_buff *skb, struct packet *p)
{
	return read_network(skb, p, true, false) == DROP_REASON_NONE;
}

/* Forwards an ICMP error about a packet of a flow. Between the two translations p is read again, because the first one
 * changes the quote. */
__noinline int forward_error(struct __sk_buff *skb, struct packet *p)
{
	struct conn *c;
	bool fast;

	if (!p)
		return TC_ACT_SHOT;
	c = translate_error(skb, p, false);
	if (!c)
		return TC_ACT_SHOT;
	fast = c->flags & CONN_FAST && !p->key.reply && hops_of(p) > 1;
	if (c->flags & GATEWAY_DOUBLE_NAT && !p->key.reply) {
		if (!read_again(skb, p) || !translate_error(skb, p, false))
			return TC_ACT_SHOT;
	}
	return fast ? redirect_to_next_hop(c) : TC_ACT_UNSPEC;
}

/* Handles an ICMP message to a VIP. Neighbour discovery passes, and errors go on to their flow's other side, or to the
 * gateway that has the flow. */
static __always_inline int serve_icmp(struct __sk_buff *skb, struct packet *p, const struct gateway_vip *vip)
{
	__u8 transport = p->key.proto;
	int verdict;

	if (p->ipv6 && p->kind >= ICMPV6_ROUTER_SOLICITATION && p->kind <= ICMPV6_REDIRECT)
		return TC_ACT_UNSPEC;
	if (is_error(p)) {
		verdict = forward_error(skb, p);
		if (verdict != TC_ACT_SHOT)
			return verdict;
		p->key.proto = transport;
		verdict = hand_error(skb, p);
		if (verdict != TC_ACT_SHOT)
			return verdict;
	}
	if (vip->flags & GATEWAY_OWN)
		return TC_ACT_UNSPEC;
	return refuse(skb, p, 0, is_error(p) ? DROP_REASON_NO_CONNECTION : DROP_REASON_PROTOCOL);
}

/* Finds the backend that sends from an address and port; port 0 asks for the address alone. */
static __always_inline struct gateway_origin *find_origin(const __u8 addr[16], __u16 port, __u8 proto)
{
	struct gateway_origin_key key = { .port = port, .proto = port ? proto : 0 };

	__builtin_memcpy(key.addr, addr, sizeof(key.addr));
	return bpf_map_lookup_elem(&origins, &key);
}

/* Reports whether another gateway may still announce the connection of this packet. That gateway may have chosen a NAT
 * port which its backend expects: with another port the backend would reply with a reset. Its packets go to the other
 * gateways until then, since one that has not opened there yet opens by them. A connection that is still unknown when
 * its packet comes again later is balanced by the hash. */
static __noinline bool may_be_announced(const struct packet *p)
{
	struct conn_key key = p->key;
	__u64 now = now_ns();
	__u64 *came;

	if (p->key.proto != IPPROTO_TCP || is_opening(p) || !is_announcing())
		return false;
	came = bpf_map_lookup_elem(&unknown_flows, &key);
	if (came && since(*came, now) < UNKNOWN_FLOW_NS)
		return since(*came, now) < ANNOUNCE_NS;
	bpf_map_update_elem(&unknown_flows, &key, &now, BPF_ANY);
	return true;
}

/* open_flow returns this instead of a TC action if it has created a flow, in `scratch`. No TC action has this number.
 */
#define FLOW_CREATED 1000

/* Handles a packet to a VIP that belongs to no flow: creates one, or returns the TC action for the packet. */
__noinline int open_flow(struct __sk_buff *skb, const struct packet *p, const struct gateway_vip *vip)
{
	struct frontend_key key = {};
	struct gateway_frontend *fe;
	__u32 backend_id;
	int verdict;

	if (!p || !vip)
		return TC_ACT_SHOT;
	__builtin_memcpy(key.addr, p->key.server, sizeof(key.addr));
	key.port = p->key.server_port;
	key.proto = p->key.proto;
	fe = bpf_map_lookup_elem(&frontends, &key);
	if (!fe && vip->flags & GATEWAY_OWN)
		return TC_ACT_UNSPEC;
	/* A reset to a backend would end a connection that another gateway may know. */
	if (!fe && find_origin(p->key.client, p->key.client_port, p->key.proto)) {
		verdict = hand_over(skb, p);
		return verdict == TC_ACT_SHOT ? drop(0, GATEWAY_DROP_NO_FLOW) : verdict;
	}
	if (fe && !is_syn(p)) {
		verdict = hand_to_owner(skb, p, &p->key);
		if (verdict != TC_ACT_SHOT)
			return verdict;
	}
	if (p->part == PART_LATER)
		return refuse(skb, p, 0, DROP_REASON_FRAGMENT);
	if (!fe)
		return refuse(skb, p, 0, DROP_REASON_NO_FRONTEND);
	if (!may_connect(p, fe->id, fe->flags))
		return drop(fe->id, GATEWAY_DROP_SOURCE);
	if (is_reset(p))
		return refuse(skb, p, fe->id, DROP_REASON_NO_CONNECTION);
	if (may_be_announced(p))
		return hand_to_all(skb, p) ? TC_ACT_SHOT : drop(fe->id, GATEWAY_DROP_NO_FLOW);
	backend_id = choose_backend(p, fe);
	if (!backend_id)
		return refuse(skb, p, fe->id, DROP_REASON_NO_BACKEND);
	if (!may_open_flow(p, fe->id, entries_of(!is_zero_addr(vip->source))))
		return refuse(skb, p, fe->id, DROP_REASON_NEW_FLOWS);
	if (!create_conn(skb, p, vip, fe, backend_id))
		return refuse(skb, p, fe->id, DROP_REASON_NO_MEMORY);
	return FLOW_CREATED;
}

/* Handles a packet to a VIP, or to the source address of a flow. */
static __always_inline int serve(struct __sk_buff *skb, struct packet *p, const struct gateway_vip *vip,
				 enum drop_reason reason)
{
	struct gateway_scratch *created;
	struct conn *c;
	__u32 zero = 0;
	int verdict;

	if (reason == DROP_REASON_NONE && p->part == PART_LATER && !recall_fragment(p))
		reason = DROP_REASON_FRAGMENT;
	if (reason != DROP_REASON_NONE)
		return vip->flags & GATEWAY_OWN ? TC_ACT_UNSPEC : refuse(skb, p, 0, reason);
	if (is_icmp(p))
		return serve_icmp(skb, p, vip);
	c = find_flow(skb, p);
	if (c && may_matter_to_owner(p, c) && !(vip->flags & GATEWAY_OWN)) {
		verdict = share_with_owner(skb, p, c);
		if (verdict != GOES_ON)
			return verdict;
	}
	if (c) {
		c = advance(p, c);
		return c ? forward(skb, p, c) : TC_ACT_SHOT;
	}
	verdict = open_flow(skb, p, vip);
	if (verdict != FLOW_CREATED)
		return verdict;
	created = bpf_map_lookup_elem(&scratch, &zero);
	return created ? forward(skb, p, &created->flow) : TC_ACT_SHOT;
}

/* Reports whether the kernel would forward the packet, instead of delivering it to the gateway itself. */
static __noinline bool is_forwarded(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup fib = { .l4_protocol = p->key.proto, .tot_len = ANY_LENGTH, .ifindex = skb->ifindex };

	set_fib_addrs(&fib, p->ipv6, p->key.server, p->key.client);
	return bpf_fib_lookup(skb, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_NOT_FWDED;
}

/* Derives the flow of a backend's packet, in `scratch`: `flow` is the client's entry, `key` its key, and `other` the
 * entry of the packet itself. Returns false if the packet may belong to another frontend. */
static __noinline bool derive_flow(const struct packet *p, struct gateway_scratch *s)
{
	struct gateway_origin *origin = find_origin(p->key.server, p->key.server_port, p->key.proto);
	struct gateway_frontend *fe = origin ? bpf_map_lookup_elem(&frontends, &origin->frontend) : NULL;

	if (!fe)
		return false;
	__builtin_memset(&s->flow, 0, sizeof(s->flow));
	__builtin_memcpy(s->flow.addr, p->key.server, sizeof(s->flow.addr));
	s->flow.server_port = p->key.server_port;
	s->flow.client_port = p->key.client_port;
	s->flow.backend_id = origin->backend_id;
	s->flow.service = fe->id;
	s->flow.checked_at = coarse_ticks() - CHECK_TICKS;
	s->flow.seen = now_ns();
	s->flow.state = CONN_ANSWERED;
	s->flow.flags = CONN_FIN_SERVER; /* before CONN_OPEN: the backend began the flow */
	s->key = p->key;
	__builtin_memcpy(s->key.server, origin->frontend.addr, sizeof(s->key.server));
	s->key.server_port = origin->frontend.port;
	s->key.reply = 0;
	fill_entry(s, s->key.server, s->key.server_port, p->key.client_port);
	return true;
}

/* Reports whether a backend's packet shows that its flow was opened at another gateway. One with SYN does not: it may
 * answer a client that connects to the backend directly. */
static __always_inline bool may_adopt(const struct packet *p)
{
	return p->key.proto == IPPROTO_TCP && p->part != PART_LATER && !is_reset(p) && !(p->kind & TCP_SYN);
}

/* Derives the translation of a backend's packet of no known flow, in `other` of `scratch`, if the packet can only be
 * the answer of one frontend: the client's packets pass another gateway. An open flow is adopted, half-open until the
 * client sends a packet here too, so that it keeps its backend if that gateway dies. It is announced, because no other
 * gateway sees both sides either. Without room for it, and for all other packets, no flow is necessary. */
__noinline int derive_answer(struct __sk_buff *skb, const struct packet *p)
{
	struct gateway_scratch *s;
	__u32 zero = 0;

	s = bpf_map_lookup_elem(&scratch, &zero);
	if (!p || !s || is_syn(p) || !derive_flow(p, s))
		return false;
	if (may_adopt(p) && may_open_flow(p, s->flow.service, entries_of(false)) && store(&s->key, &s->flow)) {
		announce_flow(&s->key, &s->flow);
		s->key = p->key;
		store_entry(&s->key, &s->other);
	}
	find_route(skb, p, &s->other);
	return true;
}

/* Handles a packet to any other address: translates a backend's reply. A packet from a backend that belongs to no flow
 * is never forwarded. */
static __always_inline int translate_reply(struct __sk_buff *skb, struct packet *p, enum drop_reason reason)
{
	__u16 port = p->key.server_port;
	struct gateway_scratch *derived;
	struct conn *c;
	__u32 zero = 0;

	if (reason != DROP_REASON_NONE)
		return TC_ACT_UNSPEC;
	if (is_icmp(p)) {
		if (is_error(p))
			forward_error(skb, p);
		return TC_ACT_UNSPEC;
	}
	if (p->part == PART_LATER)
		port = recall_fragment(p) ? p->key.server_port : 0;
	c = find_flow(skb, p);
	if (!c) {
		if (!find_origin(p->key.server, port, p->key.proto) || !is_forwarded(skb, p))
			return TC_ACT_UNSPEC;
		derived = derive_answer(skb, p) ? bpf_map_lookup_elem(&scratch, &zero) : NULL;
		if (derived)
			return forward(skb, p, &derived->other);
		return !is_syn(p) && hand_to_all(skb, p) ? TC_ACT_SHOT : drop(0, GATEWAY_DROP_NO_FLOW);
	}
	if (c->flags & GATEWAY_DOUBLE_NAT)
		return TC_ACT_UNSPEC; /* replies of this flow go to its source address instead */
	c = advance(p, c);
	return c ? forward(skb, p, c) : TC_ACT_SHOT;
}

SEC("tc/gateway")
int gateway(struct __sk_buff *skb)
{
	struct gateway_vip *vip;
	struct packet p = {};
	enum drop_reason reason;

	if (skb->pkt_type != PACKET_HOST || !locate(skb, &p))
		return TC_ACT_UNSPEC;
	reason = read_network(skb, &p, false, false);
	vip = bpf_map_lookup_elem(&vips, p.key.server);
	if (!vip)
		reverse_key(&p.key);
	if (reason == DROP_REASON_NONE)
		reason = read_transport(skb, &p, !vip);
	return vip ? serve(skb, &p, vip, reason) : translate_reply(skb, &p, reason);
}

SEC("xdp")
int gateway_xdp(struct xdp_md *ctx)
{
	return forward_established(ctx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
