/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flow tracking. A flow has two entries, one for each direction, and each entry holds the key of the other. They are in
 * `handshakes` until both sides have spoken, and then in `flows`; those of UDP are always in `udp_flows`. A packet
 * needs only the entry of its own direction. Once a second it also refreshes the other entry, so that both have the
 * same age, the LRU evicts neither long before the other, and an evicted entry is created again. A state change is
 * written to both entries.
 *
 * An attacker can forge a packet with the addresses and ports of a flow, but does not know its sequence numbers:
 *
 *	- A SYN+ACK must acknowledge the client's SYN, and the client's next packet that SYN+ACK. A forged SYN and ACK
 *	  would otherwise put a flow that no backend knows into `flows`.
 *	- A RST or FIN must lie in the window that its receiver has announced (RFC 5961 section 3). A blind RST would
 *	  otherwise end an idle connection: ten seconds later its next packet would be refused.
 *	- A SYN of an open flow goes to its backend, which knows best (RFC 5961 section 4): see may_end_open.
 *
 * The window is known if the handshake passed here. A flow may also begin in the middle, if another gateway or a build
 * without windows had it. Its window stays unknown, even when packets pass: an attacker who forges a RST could forge
 * those too. No RST or FIN of such a flow is believed. It stays until it is idle, is evicted, or its client connects
 * again.
 *
 * A flow that begins in the middle is half-open too until both sides have spoken. One forged ACK would otherwise occupy
 * its entries for six hours, and those of every other gateway.
 *
 * A datagram has no sequence number. Two forged ones, and an answer in between, open a flow. In a table of their own
 * such flows evict no connection, and among themselves first those that were idle for longest.
 */
#ifndef ISTHMUS_FLOW_H
#define ISTHMUS_FLOW_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "evidence.h"
#include "flow_maps.h"
#include "maps.h"
#include "net.h"
#include "packet_parse.h"

/* Idle timeouts, in seconds. */
#define OPENING_S 60 /* half again as long as a Linux client retransmits its SYN */
#define OPEN_S 21600 /* TCP, SCTP: RFC 5382 section 5 requires at least 2 h 4 min */
#define HALF_S 3600  /* TCP that still sends in one direction */
#define CLOSING_S 60 /* for retransmissions at the end */
#define CLOSED_S 10  /* after a reset, for packets still on the way */
#define UDP_OPENING_S 60
#define UDP_OPEN_S 300 /* RFC 4787 section 4.3 */
#define FRAGMENT_S 30  /* as long as Linux waits for the other fragments */

/* Flows that a CPU opens in a second, for all clients and for one. One client leaves half of them to the others. A
 * gateway limits half-open ones further: see gateway_maps.h. */
#define CPU_FLOWS_MAX 100000
#define CLIENT_FLOWS_MAX 50000

/* A SYN that is repeated sooner was duplicated by the network: a client's first timeout is 1 s (RFC 6298). */
#define SYN_AGAIN_NS (NS_PER_S / 2)

/* 2^6 kernel ticks (jiffies) are one coarse tick: 1.6 to 16 of them make a second. */
#define COARSE_TICK_SHIFT 6
/* A packet looks at the clock again after so many coarse ticks. */
#define CHECK_TICKS 2

/* The coarse clock is exact to a kernel tick, which is enough here, and costs a tenth. */
static __always_inline __u64 now_ns(void)
{
	return bpf_ktime_get_coarse_ns();
}

/* Counts coarse ticks. Unlike a clock it is read without a call. */
static __always_inline __u32 coarse_ticks(void)
{
	return bpf_jiffies64() >> COARSE_TICK_SHIFT;
}

/* Reports whether a flow's packet must look at the clock: at most some ten times a second, and once after any silence.
 * The counter wraps around after an hour or more, which delays the check by one packet. */
static __always_inline bool is_due(const struct conn *c)
{
	return (__u16)(coarse_ticks() - c->checked_at) >= CHECK_TICKS;
}

/* Returns the time since then; 0 if the clock of another CPU is ahead. */
static __always_inline __u64 since(__u64 then, __u64 now)
{
	return (__s64)(now - then) > 0 ? now - then : 0;
}

/* Begins to count again if the period is over. */
static __always_inline void start_period(struct answers *a, __u64 now, __u64 period)
{
	if (since(a->since, now) >= period) {
		a->since = now;
		a->given = 0;
	}
}

/* Takes one of the `most` that a second has. Returns false if none is left. */
static __always_inline bool take(struct answers *a, __u64 now, __u64 most)
{
	if (!a)
		return false;
	start_period(a, now, NS_PER_S);
	return a->given++ < most;
}

/* Takes one of the flows that a client may open in this second. They are counted by its device, or if device is 0 by
 * its address, of IPv6 the first 64 bits. Returns false if none is left. */
static __always_inline bool may_client_open(const struct packet *p, __u32 device, __u64 now)
{
	__u64 words[2];
	__u32 source;

	__builtin_memcpy(words, ADDR(p->key.client), sizeof(words));
	if (p->ipv6)
		words[1] = 0;
	source = 1 + hash_u64(device ? device : words[0] ^ hash_u64(words[1])) % FLOW_SOURCES;
	return take(bpf_map_lookup_elem(&new_flows, &source), now, CLIENT_FLOWS_MAX);
}

static __always_inline __u64 idle_timeout_ns(__u8 proto, enum conn_state state)
{
	if (proto == IPPROTO_UDP)
		return (state == CONN_OPENING ? UDP_OPENING_S : UDP_OPEN_S) * NS_PER_S;
	switch (state) {
	case CONN_OPEN:
		return OPEN_S * NS_PER_S;
	case CONN_HALF:
		return HALF_S * NS_PER_S;
	case CONN_CLOSING:
		return CLOSING_S * NS_PER_S;
	case CONN_CLOSED:
		return CLOSED_S * NS_PER_S;
	default:
		return OPENING_S * NS_PER_S;
	}
}

static __always_inline bool is_alive(__u8 proto, const struct conn *c, __u64 now)
{
	return since(c->seen, now) <= idle_timeout_ns(proto, c->state);
}

/* Reports whether a packet may open a flow: a SYN, an INIT, or any UDP datagram. */
static __always_inline bool is_opening(const struct packet *p)
{
	if (p->key.proto == IPPROTO_TCP)
		return (p->kind & (TCP_SYN | TCP_ACK)) == TCP_SYN;
	return p->key.proto == IPPROTO_UDP || p->kind == SCTP_INIT;
}

static __always_inline bool is_syn(const struct packet *p)
{
	return p->key.proto == IPPROTO_TCP && is_opening(p);
}

/* Returns the key of the other direction. */
static __always_inline struct conn_key other_key(const struct conn_key *key, const struct conn *c)
{
	bool self = c->flags & CONN_SELF;
	struct conn_key other = {
		.client_port = self ? c->server_port : c->client_port,
		.server_port = self ? c->client_port : c->server_port,
		.proto = key->proto,
		.reply = self ? 0 : !key->reply,
	};

	__builtin_memcpy(other.client, key->client, sizeof(other.client));
	__builtin_memcpy(other.server, ADDR(self ? key->server : c->addr), sizeof(other.server));
	return other;
}

/* Exchanges client and server in a key, which then describes the same packet as one of the other direction. */
static __always_inline void reverse_key(struct conn_key *key)
{
	__u16 port = key->client_port;

	for (int i = 0; i < 16; i += 4) { /* word by word, to save stack */
		__u32 client, server;

		__builtin_memcpy(&client, key->client + i, sizeof(client));
		__builtin_memcpy(&server, key->server + i, sizeof(server));
		__builtin_memcpy(key->client + i, &server, sizeof(server));
		__builtin_memcpy(key->server + i, &client, sizeof(client));
	}
	key->client_port = key->server_port;
	key->server_port = port;
	key->reply = !key->reply;
}

/* Reports whether a flow's packet came from the backend. */
static __always_inline bool is_from_backend(const struct conn_key *key, const struct conn *c)
{
	return key->reply || c->flags & CONN_BACK;
}

/* Stores an entry of a flow that is new. */
static __always_inline long put_new(const struct conn_key *key, const struct conn *c, __u64 flags)
{
	if (key->proto == IPPROTO_UDP)
		return bpf_map_update_elem(&udp_flows, key, c, flags);
	return bpf_map_update_elem(&handshakes, key, c, flags);
}

/* Deletes an entry that put_new has stored. */
static __always_inline void delete_new(const struct conn_key *key)
{
	if (key->proto == IPPROTO_UDP)
		bpf_map_delete_elem(&udp_flows, key);
	else
		bpf_map_delete_elem(&handshakes, key);
}

/* Moves an entry of an older build's map to today's, if there is one. */
static __always_inline void move_old_entry(const struct conn_key *key)
{
	struct old_conn *old = bpf_map_lookup_elem(&conns, key);
	__u32 zero = 0;
	struct conn *c = bpf_map_lookup_elem(&moving_conn, &zero);

	if (!old || !c)
		return;
	__builtin_memset(c, 0, sizeof(*c));
	__builtin_memcpy(c, old, sizeof(*old));
	if (is_alive(key->proto, c, now_ns())) {
		if (key->proto == IPPROTO_UDP)
			put_new(key, c, BPF_NOEXIST);
		else
			bpf_map_update_elem(&flows, key, c, BPF_NOEXIST);
	}
	bpf_map_delete_elem(&conns, key);
}

/* Moves an entry of an older build's map, given a key in any memory: Linux 6.1 accepts no map key in memory that the
 * caller passed. */
static __noinline int move_old_entry_of(const struct conn_key *key)
{
	struct conn_key k = *key;

	move_old_entry(&k);
	return 0;
}

/* Finds an entry in `handshakes`. */
static __noinline struct conn *find_young_entry(const struct conn_key *key)
{
	struct conn_key k = *key; /* see move_old_entry_of */

	return bpf_map_lookup_elem(&handshakes, &k);
}

/* Finds an entry that was not in `flows`. Another CPU may move it there meanwhile: unless it looks `again`, a backend's
 * packet would find no flow while the client's opens it. */
static __noinline struct conn *find_other_entry(const struct conn_key *key, bool again)
{
	struct conn_key k = *key;
	struct conn *c = bpf_map_lookup_elem(&handshakes, &k);

	if (c || !(again || OLD_FLOWS))
		return c;
	if (OLD_FLOWS)
		move_old_entry(&k);
	return bpf_map_lookup_elem(&flows, &k);
}

static __always_inline struct conn *find_udp_entry(const struct conn_key *key)
{
	struct conn *c = bpf_map_lookup_elem(&udp_flows, key);

	if (c || !OLD_FLOWS)
		return c;
	move_old_entry_of(key);
	return bpf_map_lookup_elem(&udp_flows, key);
}

/* Finds an entry. */
static __always_inline struct conn *find_entry(const struct conn_key *key)
{
	if (key->proto == IPPROTO_UDP)
		return find_udp_entry(key);
	return bpf_map_lookup_elem(&flows, key) ?: find_other_entry(key, true);
}

/* Finds the entry of a packet, given its key: in `flows` first, where those of most packets are. A SYN needs no look
 * again: a flow that another CPU opens meanwhile has had its SYN. */
static __always_inline struct conn *find_entry_of(struct packet *p, const struct conn_key *key)
{
	struct conn *c;

	p->young = false;
	if (key->proto == IPPROTO_UDP)
		return find_udp_entry(key);
	c = bpf_map_lookup_elem(&flows, key);
	if (c)
		return c;
	p->young = true;
	return find_other_entry(key, !is_syn(p));
}

/* Reports whether another flow has the key of a new one, apart from flows in `handshakes` and `udp_flows`. */
static __always_inline bool is_taken(const struct conn_key *key)
{
	if (OLD_FLOWS)
		move_old_entry_of(key);
	return key->proto != IPPROTO_UDP && bpf_map_lookup_elem(&flows, key);
}

/* Stores an entry of a new flow, unless another flow has its key. */
static __always_inline bool add_entry(const struct conn_key *key, const struct conn *c)
{
	return !is_taken(key) && !put_new(key, c, BPF_NOEXIST);
}

/* Stores an entry of a new flow. An older flow's entry in `flows` would hide it. */
static __noinline long store_entry(const struct conn_key *key, const struct conn *c)
{
	struct conn_key k = *key;

	if (k.proto != IPPROTO_UDP && bpf_map_lookup_elem(&flows, &k))
		bpf_map_delete_elem(&flows, &k);
	return put_new(&k, c, BPF_ANY);
}

/* Moves an entry from `handshakes` to `flows`, if it is there. */
static __noinline int promote_entry(const struct conn_key *key)
{
	struct conn_key k = *key;
	struct conn *c = bpf_map_lookup_elem(&handshakes, &k);

	if (c && !bpf_map_update_elem(&flows, &k, c, BPF_ANY))
		bpf_map_delete_elem(&handshakes, &k);
	return 0;
}

/* Fills in the entry of the other direction, without what only the fast path needs. */
static __always_inline void fill_other(const struct conn_key *key, const struct conn *c, struct conn *other)
{
	bool self = c->flags & CONN_SELF;

	__builtin_memset(other, 0, sizeof(*other));
	__builtin_memcpy(other->addr, ADDR(self ? key->client : key->server), sizeof(other->addr));
	other->seen = c->seen;
	other->checked_at = c->checked_at;
	other->backend_id = c->backend_id;
	other->service = c->service;
	other->server_port = self ? key->client_port : key->server_port;
	other->client_port = self ? key->server_port : key->client_port;
	other->cluster = c->cluster;
	other->state = c->state;
	other->flags = (c->flags & ~(CONN_FAST | CONN_VIA6)) ^ (self ? CONN_BACK : 0);
}

/* Makes the entry of the other direction as young as this one, or creates it again. client_device is the client's
 * device, 0 if it is unknown. Returns the flags of the other entry.
 *
 * A new entry of the direction to the backend is dated back: its next packet refreshes it and looks up its route. */
static __noinline enum conn_flags refresh_other(const struct conn_key *key, const struct conn *c, __u32 client_device)
{
	struct conn_key reverse = other_key(key, c);
	struct conn *other = find_entry(&reverse);
	struct conn fresh;

	if (other) {
		other->seen = c->seen;
		return other->flags;
	}
	fill_other(key, c, &fresh);
	if (client_device) {
		fresh.ifindex = client_device;
		fresh.flags |= c->flags & CONN_FAST;
	} else {
		fresh.seen -= NS_PER_S;
	}
	if (fresh.state < CONN_OPEN || reverse.proto == IPPROTO_UDP)
		put_new(&reverse, &fresh, BPF_NOEXIST);
	else
		bpf_map_update_elem(&flows, &reverse, &fresh, BPF_NOEXIST);
	return fresh.flags;
}

/* Reports whether two entries translate to the same server and ports. */
static __always_inline bool is_same_translation(const struct conn *a, const struct conn *b)
{
	return same_addr(a->addr, b->addr) && a->server_port == b->server_port && a->client_port == b->client_port;
}

/* Reports whether a new entry may replace an existing one: that has timed out, has reached the state `over`, or
 * translates to the same. */
static __always_inline bool may_replace(__u8 proto, const struct conn *new, const struct conn *existing,
					enum conn_state over)
{
	return existing->state >= over || !is_alive(proto, existing, new->seen) || is_same_translation(existing, new);
}

/* Returns the cluster of a flow's backend, NULL if it has none. */
static __always_inline struct cluster *cluster_of(const struct conn *c)
{
	__u32 index = c->cluster;

	return index ? bpf_map_lookup_elem(&clusters, &index) : NULL;
}

static __always_inline bool is_reset(const struct packet *p)
{
	if (p->key.proto == IPPROTO_TCP)
		return p->kind & TCP_RST;
	return p->key.proto == IPPROTO_SCTP && (p->kind == SCTP_ABORT || p->kind == SCTP_SHUTDOWN_COMPLETE);
}

/* Reports whether a packet answers a SYN or INIT. */
static __always_inline bool is_accepting(const struct packet *p)
{
	if (p->key.proto == IPPROTO_TCP)
		return (p->kind & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK);
	return p->key.proto == IPPROTO_SCTP && p->kind == SCTP_INIT_ACK;
}

/* Reports whether a SYN may end an open flow: its backend was removed. As long as there is a backend, the SYN goes to
 * it: a forged SYN would otherwise lead the client's next packet to another backend, which resets it. If the client has
 * forgotten the connection, it answers the backend's ACK with a RST of the right number, and its next SYN opens a flow.
 * If only the backend has, it accepts the SYN. */
static __always_inline bool may_end_open(const struct conn *c)
{
	__u32 backend_id = c->backend_id;

	return !bpf_map_lookup_elem(&backends, &backend_id);
}

/* Notes a client's SYN in the client's entry, whose window is not known yet. */
static __always_inline void note_syn(const struct packet *p, struct conn *c)
{
	c->ack = p->seq;
	c->edge = p->window;
	c->window = WINDOW_SYN | p->scale;
}

/* Reports whether a SYN or INIT on a known flow opens a new one: the client has reused the port, or retransmits because
 * the first packet got no answer. If the backend began the flow, a SYN shows that the client knows nothing of it:
 * otherwise a backend could bring another's clients to itself. */
static __always_inline bool is_reopening(const struct packet *p, struct conn *c)
{
	if (p->key.proto == IPPROTO_UDP || p->part == PART_LATER || !is_opening(p) || c->window & WINDOW_SECOND)
		return false;
	switch (c->state) {
	case CONN_OPENING:
		return since(c->seen, now_ns()) >= SYN_AGAIN_NS;
	case CONN_ANSWERED:
		return p->key.proto == IPPROTO_TCP && c->flags & CONN_FIN_SERVER;
	case CONN_OPEN:
	case CONN_HALF:
		return p->key.proto != IPPROTO_TCP || may_end_open(c);
	default:
		return true;
	}
}

/* Prepares the entry of the backend's direction for the answer to a SYN. */
static __always_inline void expect_answer(const struct packet *p, struct conn *reply)
{
	reply->ack = p->seq;
	reply->edge = p->ack; /* a backend may also acknowledge the SYN's data (RFC 7413) */
	reply->window = WINDOW_KNOWN;
}

/* Learns the windows of both sides from a SYN+ACK to the SYN that the client's entry notes. The windows of both packets
 * are not scaled. */
static __always_inline void open_windows(const struct packet *p, struct conn *c, struct conn *client)
{
	bool scaled = client->window & p->scale & WINDOW_SCALED;

	if (!(c->window & WINDOW_KNOWN)) { /* otherwise follow_window has set them */
		c->ack = p->ack;
		c->edge = p->ack + p->window;
	}
	c->window = WINDOW_KNOWN | (scaled ? p->scale & WINDOW_SCALE : 0);
	client->ack = p->seq;
	client->edge += p->seq;
	client->window = WINDOW_KNOWN | (scaled ? client->window & WINDOW_SCALE : 0);
}

/* Follows the window of a packet's sender. A number beyond the window is no acknowledgement: it was not announced to
 * the other side, which therefore has not sent so much. A forged packet would otherwise move the window to a forged
 * RST. */
static __always_inline void follow_window(__u8 flags, __u32 ack, __u16 window, struct conn *c)
{
	__u32 edge;

	if (!(c->window & WINDOW_KNOWN) || !(flags & TCP_ACK) || ack - c->ack > c->edge - c->ack)
		return;
	edge = ack + ((__u32)window << (flags & TCP_SYN ? 0 : c->window & WINDOW_SCALE));
	c->ack = ack;
	if ((__s32)(edge - c->edge) > 0)
		c->edge = edge;
}

static __always_inline void track_window(const struct packet *p, struct conn *c)
{
	follow_window(p->kind, p->ack, p->window, c);
}

/* Reports whether a packet acknowledges what follow_window accepts, or whether nothing is known about that. */
static __always_inline bool is_current(const struct packet *p, const struct conn *c)
{
	return !(c->window & WINDOW_KNOWN) || (p->kind & TCP_ACK && p->ack == c->ack);
}

/* Reports whether a number lies in the window of the entry's sender. */
static __always_inline bool is_in_window(__u32 number, const struct conn *c)
{
	return c && c->window & WINDOW_KNOWN && number - c->ack <= c->edge - c->ack;
}

/* Reports whether a RST, ABORT or the like ends the flow. One that answers a SYN acknowledges it (RFC 9293 section
 * 3.10.7.3). */
static __always_inline bool is_believed(const struct packet *p, const struct conn *c, const struct conn *other)
{
	if (p->key.proto != IPPROTO_TCP)
		return true;
	if (c->state == CONN_OPENING && is_from_backend(&p->key, c))
		return is_current(p, c);
	return is_in_window(p->seq, other);
}

/* Reports whether a packet may change the state of its flow. Few packets do. */
static __always_inline bool may_change_state(const struct packet *p, const struct conn *c)
{
	if (p->part == PART_LATER)
		return false;
	return c->state < CONN_OPEN || is_reset(p) || (p->key.proto == IPPROTO_TCP && p->kind & (TCP_SYN | TCP_FIN));
}

/* Reports whether a backend's packet answers the client's first one. */
static __always_inline bool is_answer(const struct packet *p, const struct conn *c)
{
	return !(c->window & WINDOW_KNOWN) || (is_accepting(p) && is_current(p, c));
}

/* Reports whether the backend of an open flow accepts its client's SYN: it does not know the flow's connection. A flow
 * with a known window is not opened again: a forged SYN and a forged SYN+ACK would give it another window. */
static __always_inline bool is_accepted_again(const struct packet *p, const struct conn *c, const struct conn *client)
{
	return is_accepting(p) && !(c->window & WINDOW_KNOWN) && client->window & WINDOW_SYN && client->ack == p->ack;
}

/* Returns the state that a packet without RST leads to. */
static __always_inline enum conn_state next_state(const struct packet *p, struct conn *c, struct conn *other)
{
	bool back = is_from_backend(&p->key, c), is_tcp = p->key.proto == IPPROTO_TCP;

	if (c->state == CONN_OPENING && back && is_answer(p, c)) {
		count_outcome(cluster_of(c), false);
		if (is_tcp && c->window & WINDOW_KNOWN && other && other->window & WINDOW_SYN)
			open_windows(p, c, other);
		return CONN_ANSWERED;
	}
	if (c->state == CONN_ANSWERED && !back && is_current(p, c) && (p->key.proto == IPPROTO_UDP || !is_opening(p)))
		return CONN_OPEN;
	if (c->state >= CONN_OPEN && is_tcp && back && other && is_accepted_again(p, c, other)) {
		open_windows(p, c, other);
		return CONN_ANSWERED;
	}
	if (c->state >= CONN_OPEN && is_syn(p) && !back && !(c->window & WINDOW_KNOWN))
		note_syn(p, c);
	return c->state;
}

#define FIN_FLAGS (CONN_FIN_CLIENT | CONN_FIN_SERVER)

static __always_inline void set_state(struct conn *c, enum conn_state state, __u8 fins)
{
	c->state = state;
	c->flags = (c->flags & ~FIN_FLAGS) | fins;
}

/* Updates a flow's state in both entries. Call it if may_change_state allows. Returns whether that has opened the flow.
 * If p->young, its entries have then moved to `flows`, and c is invalid. */
__noinline int update_state(const struct packet *p, struct conn *c)
{
	enum conn_state state = CONN_CLOSED, before;
	struct conn_key key, reverse;
	struct conn *other;
	__u8 fins;

	if (!p || !c)
		return false;
	key = p->key;
	reverse = other_key(&key, c);
	before = c->state;
	other = (p->young ? find_young_entry(&reverse) : NULL) ?: find_entry(&reverse);
	if (!is_reset(p))
		state = next_state(p, c, other);
	else if (!is_believed(p, c, other))
		return false;
	else if (before == CONN_OPENING && is_from_backend(&key, c))
		count_outcome(cluster_of(c), true);
	fins = state != before && state <= CONN_OPEN ? 0 : c->flags & FIN_FLAGS;
	if (key.proto == IPPROTO_TCP && p->kind & TCP_FIN && state >= CONN_OPEN && state != CONN_CLOSED &&
	    is_in_window(p->seq, other)) {
		fins |= is_from_backend(&key, c) ? CONN_FIN_SERVER : CONN_FIN_CLIENT;
		state = fins == FIN_FLAGS ? CONN_CLOSING : CONN_HALF;
	}
	if (state == before && fins == (c->flags & FIN_FLAGS))
		return false;
	set_state(c, state, fins);
	if (other)
		set_state(other, state, fins);
	if (before >= CONN_OPEN || state < CONN_OPEN || state == CONN_CLOSED || key.proto == IPPROTO_UDP)
		return false;
	if (p->young) {
		promote_entry(&reverse);
		promote_entry(&key);
	}
	return true;
}

static __always_inline struct fragment_key fragment_of(const struct packet *p)
{
	struct fragment_key key = { .id = p->id, .proto = p->key.proto };

	__builtin_memcpy(key.source, ADDR(p->key.reply ? p->key.server : p->key.client), sizeof(key.source));
	__builtin_memcpy(key.destination, ADDR(p->key.reply ? p->key.client : p->key.server), sizeof(key.destination));
	return key;
}

/* Stores the ports of a first fragment. */
__noinline int remember_fragment(const struct packet *p)
{
	struct fragment value = {};
	struct fragment_key key;

	if (!p)
		return 0;
	key = fragment_of(p);
	value.seen = now_ns();
	value.client_port = p->key.client_port;
	value.server_port = p->key.server_port;
	return bpf_map_update_elem(&fragments, &key, &value, BPF_ANY);
}

/* Gives a later fragment the ports of its first. Returns false if that was not seen. Only first fragments of
 * translated flows are stored. */
__noinline int recall_fragment(struct packet *p)
{
	struct fragment_key key;
	struct fragment *first;

	if (!p)
		return false;
	key = fragment_of(p);
	first = bpf_map_lookup_elem(&fragments, &key);
	if (!first || since(first->seen, now_ns()) > FRAGMENT_S * NS_PER_S)
		return false;
	p->key.client_port = first->client_port;
	p->key.server_port = first->server_port;
	return true;
}

#endif
