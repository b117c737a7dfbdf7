//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The balancer of a gateway: one program at the ingress of every device, since a gateway may have one arm or two.
 *
 * A packet to a VIP becomes one to a backend, which a Maglev table and a hash of the client choose: every gateway that
 * has the same backends chooses the same. A packet from a backend that is of a flow becomes one from the VIP. What
 * comes from a backend and is of no flow is dropped: who forwarded it would show the client an address that it never
 * spoke to.
 *
 * A flow has two entries in `conns`, as conntrack.h says:
 *
 *	client -> VIP		the VIP becomes the backend
 *	backend -> client	the backend becomes the VIP
 *
 * Where the client's address is to change too, the packet is translated twice, and what comes out of the first
 * translation is the key of the second. To the second one everything is the other way round: the backend is the client
 * of a source address, behind which the client serves.
 *
 *	client -> VIP		the VIP becomes the backend
 *	client -> backend	the client becomes the source
 *	backend -> source	the source becomes the client
 *	backend -> client	the backend becomes the VIP
 *
 * The packet then leaves by the way that the routes say, without a look at the kernel's other rules. Where there is no
 * such way it goes on through the kernel.
 *
 * Where a driver can run a program itself, another one stands before it: gateway_xdp.h.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "choose.h"
#include "conntrack.h"
#include "gateway.h"
#include "gateway_maps.h"
#include "maps.h"
#include "packet_error.h"
#include "packet_maps.h"
#include "packet_parse.h"
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunused-function" /* a gateway sends nothing back as it is */
#include "packet_refuse.h"
#pragma clang diagnostic pop
#include "packet_rewrite.h"
#include "gateway_xdp.h"

#define PACKET_HOST 0

/* How often a port is chosen anew when it is taken. */
#define TRIES 8
/* Ports that stand in for a client's: those that Linux gives to no socket of its own. */
#define STAND_IN_FIRST 1024
#define STAND_IN_COUNT 31744
/* Any length: the helper then tells the route's MTU. */
#define SOME_LENGTH 68

/* Within this time another gateway tells of a connection that comes from it. TCP sends what was lost again after 200 ms
 * at the earliest.
 */
#define TOLD_WITHIN_NS (NS_PER_S / 10)
/* And so long a stranger is known as one. */
#define STRANGER_NS (NS_PER_S * 10)

#define ICMPV6_ROUTER_SOLICITATION 133
#define ICMPV6_REDIRECT 137

/* clang leaves out of the BTF, from which Go has its constants and types, what no function takes that is not inlined.
 */
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

static __always_inline bool shares(void)
{
	__u32 zero = 0;
	struct gateway_settings *s = bpf_map_lookup_elem(&gateway_settings, &zero);

	return s && s->share;
}

static __noinline int describe(struct gateway_opened *o, const struct conn_key *key, const struct conn *c)
{
	o->key = *key;
	o->conn = *c;
	return 0;
}

/* Tells the agent of a flow. It is not woken: so many flows may begin at once that to wake it costs more than all. */
static __noinline int share(const struct conn_key *key, const struct conn *c)
{
	struct gateway_opened *o;
	__u32 zero = 0;
	__u64 *lost;

	if (!shares())
		return 0;
	o = bpf_ringbuf_reserve(&opened, sizeof(*o), 0);
	if (!o) {
		lost = bpf_map_lookup_elem(&opened_lost, &zero);
		if (lost)
			__sync_fetch_and_add(lost, 1);
		return 0;
	}
	describe(o, key, c);
	bpf_ringbuf_submit(o, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Finds the way from here to where the flow's packets go once they are translated, and keeps it. */
static __noinline int find_road(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	struct bpf_fib_lookup fib = { .l4_protocol = p->key.proto, .tot_len = SOME_LENGTH, .ifindex = skb->ifindex };
	const __u8 *to = p->key.reply ? p->key.client : c->addr;
	__u32 mtu = 0;
	long found;

	c->flags &= ~(CONN_FAST | CONN_VIA6);
	if (p->ipv6) {
		fib.family = AF_INET6;
		__builtin_memcpy(fib.ipv6_src, p->key.reply ? c->addr : p->key.client, sizeof(fib.ipv6_src));
		__builtin_memcpy(fib.ipv6_dst, to, sizeof(fib.ipv6_dst));
	} else {
		fib.family = AF_INET;
		fib.ipv4_src = last_word(p->key.reply ? c->addr : p->key.client);
		fib.ipv4_dst = last_word(to);
	}
	found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;
	if (found == BPF_FIB_LKUP_RET_SUCCESS)
		mtu = fib.mtu_result;
	else if (bpf_check_mtu(skb, fib.ifindex, &mtu, 0, 0) < 0)
		return false;
	c->mtu = mtu > 0xffff ? 0xffff : mtu;
	c->ifindex = fib.ifindex;
	c->flags |= CONN_FAST;
	if (fib.family == AF_INET6)
		c->flags |= CONN_VIA6;
	/* An IPv4 address is the first word of the same union. */
	__builtin_memcpy(c->via, fib.ipv6_dst, sizeof(c->via));
	return true;
}

static __always_inline int send(const struct conn *c)
{
	struct bpf_redir_neigh next = { .nh_family = c->flags & CONN_VIA6 ? AF_INET6 : AF_INET };

	__builtin_memcpy(next.ipv6_nh, c->via, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(c->ifindex, &next, sizeof(next), 0);
}

/* Looks at the clock for a flow, and after it once a second. Returns false when the flow is over: it was silent for too
 * long, or its backend is gone. Only the first translation of a packet needs a road. */
__noinline int tend(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	__u32 backend_id;
	__u64 now = now_ns();
	bool first, young;

	if (!p || !c)
		return false;
	backend_id = c->backend_id;
	young = since(c->seen, now) < NS_PER_S && !(c->flags & GATEWAY_STANDBY);
	first = !(c->flags & GATEWAY_TWICE) || !p->key.reply;
	if (!is_alive(p->key.proto, c, now))
		return false;
	if (!young) {
		if (!bpf_map_lookup_elem(&backends, &backend_id))
			return false; /* it stays due: the next packet is told so, too */
		c->seen = now;
		c->flags &= ~GATEWAY_STANDBY;
		tend_other(&p->key, c, 0);
		if (p->key.proto == IPPROTO_UDP && !p->key.reply && c->state == CONN_OPEN &&
		    !(c->flags & GATEWAY_TOLD)) {
			c->flags |= GATEWAY_TOLD;
			share(&p->key, c);
		}
	}
	c->looked = ticks();
	if (first && !(young && c->flags & CONN_FAST))
		find_road(skb, p, c);
	return true;
}

/* Reports whether a SYN on a flow that is known begins another: its client has used the port again, or nobody answered
 * the first one. */
static __always_inline bool is_reopening(const struct packet *p, const struct conn *c)
{
	if (p->key.proto != IPPROTO_TCP || p->part == PART_LATER || !is_opening(p))
		return false;
	if (c->state == CONN_OPENING)
		return since(c->seen, now_ns()) >= SYN_AGAIN_NS;
	return c->state != CONN_ANSWERED;
}

/* Finds the flow of a packet, NULL when there is none, or none any more. */
static __always_inline struct conn *find_flow(struct __sk_buff *skb, const struct packet *p)
{
	struct conn_key key = p->key; /* Linux 6.1 takes no key from memory that a caller passed */
	struct conn *c = bpf_map_lookup_elem(&conns, &key);

	if (!c || (!p->key.reply && is_reopening(p, c)))
		return NULL;
	return !is_due(c) || tend(skb, p, c) ? c : NULL;
}

/* Changes a flow's state by a packet of it, and tells of it when it is open. */
static __always_inline void go_on(const struct packet *p, struct conn *c)
{
	enum conn_state before = c->state;

	if (!is_telling(p, c))
		return;
	follow(p, c);
	if (before != CONN_OPEN && c->state == CONN_OPEN && !p->key.reply)
		share(&p->key, c);
}

/* Takes the backend of a slot. Returns 0 when there is none. */
static __always_inline __u32 choose_slot(const struct packet *p, const struct frontend *fe)
{
	__u8 client[16] ADDR_ALIGNED;
	__u32 id = fe->id, zero = 0, slot;
	struct gateway_table *table;
	void *array;

	if (!fe->count)
		return 0;
	array = bpf_map_lookup_elem(&tables, &id);
	table = array ? bpf_map_lookup_elem(array, &zero) : NULL;
	if (!table)
		return 0;
	__builtin_memcpy(client, p->key.client, sizeof(client));
	slot = hash_address(client);
	if (!(fe->flags & (__u32)GATEWAY_AFFINITY))
		slot = hash_u64((__u64)slot << 16 | p->key.client_port);
	slot %= GATEWAY_TABLE;
	barrier_var(slot); /* the verifier draws no conclusion from a remainder */
	return slot < GATEWAY_TABLE ? table->backend_ids[slot] : 0;
}

/* Returns the backend that a client had, if that is not too long ago and it takes new flows still, else 0. As in
 * keep_backend the map reuses its values at any time. */
static __always_inline __u32 choose_known(struct affinity *known, const struct frontend *fe, __u64 now)
{
	__u64 last = *(volatile __u64 *)&known->last;
	__u64 word = *(volatile __u64 *)&known->backend_id;
	struct gateway_member member = { .frontend_id = fe->id };
	__u32 ids[2];

	__builtin_memcpy(ids, &word, sizeof(ids));
	member.backend_id = ids[0];
	if (ids[1] != fe->id || now - last > fe->affinity * NS_PER_S || !bpf_map_lookup_elem(&members, &member))
		return 0;
	known->last = now;
	return ids[0];
}

/* Chooses a backend. Returns 0 when there is none. */
static __noinline __u32 choose(const struct packet *p, const struct frontend *fe)
{
	struct affinity_key key = { .frontend_id = fe->id };
	struct affinity value = { .frontend_id = fe->id };
	struct affinity *known;

	if (!fe->affinity)
		return choose_slot(p, fe);
	value.last = bpf_ktime_get_boot_ns();
	__builtin_memcpy(key.client, p->key.client, sizeof(key.client));
	known = bpf_map_lookup_elem(&affinities, &key);
	if (known)
		value.backend_id = choose_known(known, fe, value.last);
	if (value.backend_id)
		return value.backend_id;
	value.backend_id = choose_slot(p, fe);
	if (value.backend_id)
		bpf_map_update_elem(&affinities, &key, &value, BPF_ANY); /* without room the hash says it again */
	return value.backend_id;
}

static __noinline bool may_connect(const struct packet *p, __u32 frontend_id, enum gateway_frontend_flags flags)
{
	struct gateway_source_key key = { .prefixlen = 32 + 128, .frontend_id = frontend_id };

	if (!(flags & GATEWAY_SOURCES))
		return true;
	__builtin_memcpy(key.addr, p->key.client, sizeof(key.addr));
	return bpf_map_lookup_elem(&sources, &key);
}

/* Reports whether a new flow may have an entry that another one has: that is over, or leads to the same. */
static __always_inline bool may_take(__u8 proto, const struct conn *mine, const struct conn *taken)
{
	if (taken->state >= CONN_CLOSING || !is_alive(proto, taken, mine->seen))
		return true;
	return same_addr(taken->addr, mine->addr) && taken->server_port == mine->server_port &&
	       taken->client_port == mine->client_port;
}

/* Stores an entry in which nobody else's flow stands. */
static __noinline bool store(const struct conn_key *key, const struct conn *mine)
{
	struct conn *taken;

	if (!bpf_map_update_elem(&conns, key, mine, BPF_NOEXIST))
		return true;
	taken = bpf_map_lookup_elem(&conns, key);
	return taken && may_take(key->proto, mine, taken) && !bpf_map_update_elem(&conns, key, mine, BPF_ANY);
}

/* The port by which the backend shall know the client. Every gateway finds the same ones in the same order: the
 * client's own if it may be that, then others. */
static __always_inline __u16 port_at(const struct conn_key *key, __u32 i, bool own)
{
	__u64 ports = (__u64)key->client_port << 32 | key->server_port << 16 | i;
	__u8 client[16] ADDR_ALIGNED;

	if (own && i == 0)
		return key->client_port;
	__builtin_memcpy(client, key->client, sizeof(client));
	return STAND_IN_FIRST + hash_u64(hash_address(client) ^ hash_u64(ports)) % STAND_IN_COUNT;
}

/* Makes an entry of a flow that begins, whose first packet finds its road. */
static __always_inline void fill_entry(struct gateway_scratch *s, const __u8 addr[16], __u16 server_port,
				       __u16 client_port)
{
	s->other = s->flow;
	__builtin_memcpy(s->other.addr, addr, sizeof(s->other.addr));
	s->other.server_port = server_port;
	s->other.client_port = client_port;
	s->other.flags &= ~(CONN_FAST | CONN_VIA6);
	s->other.looked -= 2;
}

/* Stores the entry by which the backend's packets to the client become the VIP's. */
static __noinline bool store_back(const struct packet *p, struct gateway_scratch *s)
{
	s->key = key_of_other(&p->key, &s->flow);
	fill_entry(s, p->key.server, p->key.server_port, p->key.client_port);
	return store(&s->key, &s->other);
}

/* Makes the key of a second translation: the backend is the client of addr. */
static __always_inline void turn_key(struct gateway_scratch *s, const __u8 addr[16], __u8 proto, bool reply)
{
	__builtin_memset(&s->key, 0, sizeof(s->key));
	__builtin_memcpy(s->key.client, s->flow.addr, sizeof(s->key.client));
	__builtin_memcpy(s->key.server, addr, sizeof(s->key.server));
	s->key.client_port = s->flow.server_port;
	s->key.server_port = s->flow.client_port;
	s->key.proto = proto;
	s->key.reply = reply;
}

/* Stores the entries by which the client becomes the source, and the source the client. */
static __noinline bool store_source(const struct packet *p, struct gateway_scratch *s)
{
	turn_key(s, s->source, p->key.proto, false);
	fill_entry(s, p->key.client, s->flow.client_port, s->flow.server_port);
	if (!store(&s->key, &s->other))
		return false;
	turn_key(s, p->key.client, p->key.proto, true);
	fill_entry(s, s->source, s->flow.client_port, s->flow.server_port);
	return store(&s->key, &s->other);
}

/* Reports whether somebody may connect to a port of an address. */
static __noinline bool is_served(const __u8 addr[16], __u16 port, __u8 proto)
{
	struct frontend_key key = { .port = port, .proto = proto };

	__builtin_memcpy(key.addr, addr, sizeof(key.addr));
	return bpf_map_lookup_elem(&frontends, &key);
}

/* Stores all entries of the flow in `scratch` but that of its first packet, with a port for its client. Returns false
 * when one of them is taken. Not static: see skip_extensions. */
__noinline int store_others(const struct packet *p, __u16 port)
{
	struct gateway_scratch *s;
	__u32 zero = 0;

	s = bpf_map_lookup_elem(&scratch, &zero);
	if (!p || !s)
		return false;
	s->flow.client_port = port;
	if (s->flow.flags & GATEWAY_TWICE && (is_served(s->source, port, p->key.proto) || !store_source(p, s)))
		return false;
	return store_back(p, s);
}

/* Finds the port by which the backend knows the client, and stores the flow: where the gateway's own address becomes
 * the source, none that the gateway itself could use. */
static __noinline bool store_flow(const struct packet *p, enum gateway_conn_flags flags, struct gateway_scratch *s)
{
	bool own = !(flags & GATEWAY_TWICE) || same_addr(s->source, p->key.server);

	for (__u32 i = 0; i < TRIES; i++) {
		if (!store_others(p, port_at(&p->key, i, own)))
			continue;
		s->key = p->key;
		return !bpf_map_update_elem(&conns, &s->key, &s->flow, BPF_ANY);
	}
	return false;
}

/* Begins a flow to a backend, in `scratch`. Returns false when there is no room for it. */
static __noinline bool begin(struct __sk_buff *skb, const struct packet *p, const struct gateway_vip *vip,
			     const struct frontend *fe, __u32 backend_id)
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
	s->flow.service = fe->service;
	s->flow.looked = ticks();
	s->flow.seen = now_ns();
	s->flow.state = is_opening(p) ? CONN_OPENING : CONN_OPEN;
	find_road(skb, p, &s->flow);
	__builtin_memcpy(s->source, vip->source, sizeof(s->source));
	/* Who is his own backend would take his own address for an impostor's. */
	if (is_zero_addr(s->source) && same_addr(s->flow.addr, p->key.client))
		__builtin_memcpy(s->source, p->key.server, sizeof(s->source));
	if (!is_zero_addr(s->source))
		s->flow.flags |= GATEWAY_TWICE;
	if (!store_flow(p, s->flow.flags & GATEWAY_TWICE, s))
		return false;
	if (s->flow.state == CONN_OPEN)
		share(&p->key, &s->flow);
	return true;
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

/* Makes p what the packet is since its flow's first translation, seen from the other side. */
static __always_inline bool look_again(struct __sk_buff *skb, struct packet *p, const struct conn *c)
{
	__builtin_memcpy(p->key.server, c->addr, sizeof(p->key.server));
	p->key.server_port = c->server_port;
	p->key.client_port = c->client_port;
	turn(p);
	return READ_AT(skb, p->l3 + (p->ipv6 ? 4 : 8), &p->hop_word) == 0;
}

/* Makes the packet an ICMP error about itself, as a router does: it has made too many hops, or is too big. */
__noinline int answer_router(struct __sk_buff *skb, const struct packet *p, __u32 service, __u32 mtu)
{
	struct icmp_error e = {};
	__u64 pseudo = 0;
	bool unsummed;
	__u32 length;
	__u8 proto;

	if (!p)
		return TC_ACT_SHOT;
	proto = p->ipv6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	length = p->end - p->l3;
	if (p->part == PART_LATER || (is_icmp(p) && is_error(p)) || !may_answer())
		return drop(service, mtu ? GATEWAY_DROP_TOO_BIG : GATEWAY_DROP_HOPS);
	drop(service, mtu ? GATEWAY_DROP_TOO_BIG : GATEWAY_DROP_HOPS);
	if (length > QUOTE_MAX)
		length = QUOTE_MAX;
	barrier_var(length); /* clang would merge the two limits into one the verifier cannot follow */
	if (length < sizeof(struct ipv4_header) || bpf_skb_load_bytes(skb, p->l3, e.quote, length))
		return TC_ACT_SHOT;
	/* RFC 792 and RFC 1191; RFC 4443 sections 3.2 and 3.3. */
	if (p->ipv6)
		e.type = mtu ? 2 : 3;
	else
		e.type = mtu ? 3 : 11;
	e.code = !p->ipv6 && mtu ? 4 : 0;
	e.rest = bpf_htonl(mtu);
	if (p->ipv6)
		pseudo = sum_pseudo(p, 8 + length, proto);
	e.check = ~fold(pseudo + (__u32)bpf_csum_diff(NULL, 0, (void *)&e, sizeof(e), 0));
	unsummed = is_unsummed(skb, p);
	if (!begin_answer(skb, p, 8 + length, proto))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, answer_offset(p), &e, 8 + length, 0))
		return TC_ACT_SHOT;
	return send_answer(skb, p, unsummed, pseudo);
}

/* Translates a packet for the second time. Returns false when nothing is known of that. */
__noinline int forward_again(struct __sk_buff *skb, struct packet *p, const struct conn *first)
{
	struct conn *second;

	if (!p || !first || !look_again(skb, p, first))
		return false;
	second = find_flow(skb, p);
	if (!second)
		return false;
	go_on(p, second);
	rewrite(skb, p, second, true, false);
	return true;
}

/* Translates a packet of a flow and sends it on its way. */
__noinline int forward(struct __sk_buff *skb, struct packet *p, struct conn *c)
{
	bool fast;

	if (!p || !c)
		return TC_ACT_SHOT;
	fast = c->flags & CONN_FAST;
	if (fast && hops_of(p) <= 1)
		return answer_router(skb, p, c->service, 0);
	if (fast && size_of(skb, p) > c->mtu)
		return answer_router(skb, p, c->service, c->mtu);
	if (p->part == PART_FIRST)
		remember_fragment(p);
	rewrite(skb, p, c, p->key.reply, fast);
	if (c->flags & GATEWAY_TWICE && !p->key.reply && !forward_again(skb, p, c))
		return drop(c->service, GATEWAY_DROP_NO_FLOW);
	return fast ? send(c) : TC_ACT_UNSPEC;
}

/* An ICMP error about a packet of a flow. p is read anew between the two translations: what it quotes has changed. */
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
	if (c->flags & GATEWAY_TWICE && !p->key.reply) {
		if (read_network(skb, p, true, false) != DROP_REASON_NONE || !translate_error(skb, p, false))
			return TC_ACT_SHOT;
	}
	return fast ? send(c) : TC_ACT_UNSPEC;
}

/* An ICMP message to a VIP. Neighbours ask where it is, and errors go on to whom they are for. */
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
	}
	if (vip->flags & GATEWAY_OWN)
		return TC_ACT_UNSPEC;
	return refuse(skb, p, 0, is_error(p) ? DROP_REASON_NO_CONNECTION : DROP_REASON_PROTOCOL);
}

/* Finds what answers come from there; port is 0 for the address alone. */
static __always_inline struct gateway_origin *find_origin(const __u8 addr[16], __u16 port, __u8 proto)
{
	struct frontend_key key = { .port = port, .proto = port ? proto : 0 };

	__builtin_memcpy(key.addr, addr, sizeof(key.addr));
	return bpf_map_lookup_elem(&origins, &key);
}

/* Reports whether another gateway may still tell of a connection that is under way. What is known here of others may
 * have led it to another port, which its backend would answer with a reset; so who comes a second time goes by the
 * hash.
 */
static __noinline bool may_be_told(const struct packet *p)
{
	struct conn_key key = p->key;
	__u64 now = now_ns();
	__u64 *came;

	if (p->key.proto != IPPROTO_TCP || is_opening(p) || !shares())
		return false;
	came = bpf_map_lookup_elem(&strangers, &key);
	if (came && since(*came, now) < STRANGER_NS)
		return since(*came, now) < TOLD_WITHIN_NS;
	bpf_map_update_elem(&strangers, &key, &now, BPF_ANY);
	return true;
}

/* What meet returns when a flow has begun, in `scratch`. */
#define BEGUN 1000

/* A packet to an address of ours that is of no flow: begins one, or returns what becomes of it. */
__noinline int meet(struct __sk_buff *skb, const struct packet *p, const struct gateway_vip *vip)
{
	struct frontend_key key = {};
	struct frontend *fe;
	__u32 backend_id;

	if (!p || !vip)
		return TC_ACT_SHOT;
	__builtin_memcpy(key.addr, p->key.server, sizeof(key.addr));
	key.port = p->key.server_port;
	key.proto = p->key.proto;
	fe = bpf_map_lookup_elem(&frontends, &key);
	if (!fe && vip->flags & GATEWAY_OWN)
		return TC_ACT_UNSPEC;
	/* A backend that got a reset would end a connection that another gateway may know. */
	if (!fe && find_origin(p->key.client, p->key.client_port, p->key.proto))
		return drop(0, GATEWAY_DROP_NO_FLOW);
	if (!fe)
		return refuse(skb, p, 0, DROP_REASON_NO_FRONTEND);
	if (!may_connect(p, fe->id, (__u32)fe->flags))
		return drop(fe->service, GATEWAY_DROP_SOURCE);
	if (is_reset(p))
		return refuse(skb, p, fe->service, DROP_REASON_NO_CONNECTION);
	if (may_be_told(p))
		return drop(fe->service, GATEWAY_DROP_NO_FLOW);
	backend_id = choose(p, fe);
	if (!backend_id)
		return refuse(skb, p, fe->service, DROP_REASON_NO_BACKEND);
	return begin(skb, p, vip, fe, backend_id) ? BEGUN : refuse(skb, p, fe->service, DROP_REASON_NO_MEMORY);
}

/* Serves a packet to a VIP, or to the source of a flow. */
static __always_inline int serve(struct __sk_buff *skb, struct packet *p, const struct gateway_vip *vip,
				 enum drop_reason reason)
{
	struct gateway_scratch *begun;
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
	if (!c && p->part == PART_LATER)
		return refuse(skb, p, 0, DROP_REASON_FRAGMENT);
	if (c) {
		go_on(p, c);
		return forward(skb, p, c);
	}
	verdict = meet(skb, p, vip);
	if (verdict != BEGUN)
		return verdict;
	begun = bpf_map_lookup_elem(&scratch, &zero);
	return begun ? forward(skb, p, &begun->flow) : TC_ACT_SHOT;
}

/* Reports whether the kernel would forward the packet: what is for the gateway itself it keeps. */
static __noinline bool is_passing(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup fib = { .l4_protocol = p->key.proto, .tot_len = SOME_LENGTH, .ifindex = skb->ifindex };

	if (p->ipv6) {
		fib.family = AF_INET6;
		__builtin_memcpy(fib.ipv6_src, p->key.server, sizeof(fib.ipv6_src));
		__builtin_memcpy(fib.ipv6_dst, p->key.client, sizeof(fib.ipv6_dst));
	} else {
		fib.family = AF_INET;
		fib.ipv4_src = last_word(p->key.server);
		fib.ipv4_dst = last_word(p->key.client);
	}
	return bpf_fib_lookup(skb, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_NOT_FWDED;
}

/* Makes a flow known by a packet from its backend: it began at another gateway. Returns false when it cannot be told
 * which flow that is, or it may be no answer to a client of a VIP: who opens a connection to a backend itself is
 * answered by what begins one. */
__noinline int learn(const struct packet *p)
{
	struct gateway_origin *origin;
	struct gateway_scratch *s;
	struct frontend *fe;
	__u32 zero = 0;

	if (!p || p->key.proto != IPPROTO_TCP || p->part == PART_LATER || is_reset(p) || p->kind & TCP_SYN)
		return false;
	origin = find_origin(p->key.server, p->key.server_port, p->key.proto);
	fe = origin ? bpf_map_lookup_elem(&frontends, &origin->frontend) : NULL;
	s = bpf_map_lookup_elem(&scratch, &zero);
	if (!fe || !s)
		return false;
	__builtin_memset(&s->flow, 0, sizeof(s->flow));
	__builtin_memcpy(s->flow.addr, p->key.server, sizeof(s->flow.addr));
	s->flow.server_port = p->key.server_port;
	s->flow.client_port = p->key.client_port;
	s->flow.backend_id = origin->backend_id;
	s->flow.service = fe->service;
	s->flow.looked = ticks() - 2;
	s->flow.seen = now_ns();
	s->flow.state = CONN_OPEN;
	s->key = p->key;
	__builtin_memcpy(s->key.server, origin->frontend.addr, sizeof(s->key.server));
	s->key.server_port = origin->frontend.port;
	s->key.reply = 0;
	if (!store(&s->key, &s->flow))
		return false;
	share(&s->key, &s->flow);
	fill_entry(s, s->key.server, s->key.server_port, p->key.client_port);
	s->key = p->key;
	return !bpf_map_update_elem(&conns, &s->key, &s->other, BPF_ANY);
}

/* A packet to somebody else: an answer is translated back. What is from a backend and of no flow never passes. */
static __always_inline int answer(struct __sk_buff *skb, struct packet *p, enum drop_reason reason)
{
	__u16 port = p->key.server_port;
	struct conn *c;

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
		if (!find_origin(p->key.server, port, p->key.proto) || !is_passing(skb, p))
			return TC_ACT_UNSPEC;
		c = learn(p) ? find_flow(skb, p) : NULL;
		if (!c)
			return drop(0, GATEWAY_DROP_NO_FLOW);
	}
	if (c->flags & GATEWAY_TWICE)
		return TC_ACT_UNSPEC; /* its packets go to its source */
	go_on(p, c);
	return forward(skb, p, c);
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
		turn(&p);
	if (reason == DROP_REASON_NONE)
		reason = read_transport(skb, &p, !vip);
	return vip ? serve(skb, &p, vip, reason) : answer(skb, &p, reason);
}

SEC("xdp")
int gateway_xdp(struct xdp_md *ctx)
{
	return send_known(ctx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
