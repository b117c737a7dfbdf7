/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Tracking of flows. A flow has two entries in `conns`, one a direction, and each holds the key of the other. A packet
 * needs only its own: once a second it tends the other as well, so that both grow old together, are evicted neither
 * before the other for long, and come back when one of them was. What changes a flow's state is written to both.
 */
#ifndef ISTHMUS_CONNTRACK_H
#define ISTHMUS_CONNTRACK_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "choose.h"
#include "maps.h"
#include "packet_maps.h"
#include "packet_parse.h"

/* How long a flow may be silent, in seconds. */
#define OPENING_S 60 /* as long as a Linux client goes on with its SYN, and half */
#define OPEN_S 21600 /* TCP, SCTP: RFC 5382 section 5 wants 2 h 4 min at least */
#define HALF_S 3600  /* TCP that still sends one way */
#define CLOSING_S 60 /* for what is sent again at the end */
#define CLOSED_S 10  /* after a reset, for what was under way */
#define UDP_OPENING_S 60
#define UDP_OPEN_S 300 /* RFC 4787 section 4.3 */
#define FRAGMENT_S 30  /* as long as Linux waits for the others */

/* A SYN that comes again sooner was doubled by the network; the first timeout of a client is 1 s (RFC 6298). */
#define SYN_AGAIN_NS (NS_PER_S / 2)

/* What is left of a kernel tick does not matter here, and the coarse clock costs a tenth. */
static __always_inline __u64 now_ns(void)
{
	return bpf_ktime_get_coarse_ns();
}

/* Counts up once in 64 ticks of the kernel, of which a second has between 100 and 1000. Unlike a clock it is read
 * without a call. */
static __always_inline __u16 ticks(void)
{
	return bpf_jiffies64() >> 6;
}

/* Reports whether it is time to look at the clock for this flow: at most some ten times a second, and once after any
 * silence. That the count comes round after an hour or more only puts it off by a packet. */
static __always_inline bool is_due(const struct conn *c)
{
	return (__u16)(ticks() - c->looked) >= 2;
}

/* How long ago that was; 0 when another CPU's clock is ahead. */
static __always_inline __u64 since(__u64 then, __u64 now)
{
	return (__s64)(now - then) > 0 ? now - then : 0;
}

static __always_inline __u64 patience_ns(__u8 proto, enum conn_state state)
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
	return since(c->seen, now) <= patience_ns(proto, c->state);
}

/* The key of the other direction. */
static __always_inline struct conn_key key_of_other(const struct conn_key *key, const struct conn *c)
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

/* Reports whether a flow's packet came from the backend. */
static __always_inline bool is_back(const struct conn_key *key, const struct conn *c)
{
	return key->reply || c->flags & CONN_BACK;
}

/* The value of the other direction, but for what only the fast road needs. */
static __always_inline void fill_other(const struct conn_key *key, const struct conn *c, struct conn *other)
{
	bool self = c->flags & CONN_SELF;

	__builtin_memset(other, 0, sizeof(*other));
	__builtin_memcpy(other->addr, ADDR(self ? key->client : key->server), sizeof(other->addr));
	other->seen = c->seen;
	other->looked = c->looked;
	other->backend_id = c->backend_id;
	other->service = c->service;
	other->server_port = self ? key->client_port : key->server_port;
	other->client_port = self ? key->server_port : key->client_port;
	other->cluster = c->cluster;
	other->state = c->state;
	other->flags = (c->flags & ~(CONN_FAST | CONN_VIA6)) ^ (self ? CONN_BACK : 0);
}

/* Makes the other direction as young as this one, or makes it again; client_device is the client's, 0 when that is not
 * known. Returns the flags of the other direction.
 *
 * The direction to the backend, made again, is older than it is: its next packet tends it and finds its road. */
static __noinline enum conn_flags tend_other(const struct conn_key *key, const struct conn *c, __u32 client_device)
{
	struct conn_key other_key = key_of_other(key, c);
	struct conn *other = bpf_map_lookup_elem(&conns, &other_key);
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
	bpf_map_update_elem(&conns, &other_key, &fresh, BPF_NOEXIST);
	return fresh.flags;
}

static __always_inline struct cluster *cluster_of(const struct conn *c)
{
	__u32 index = c->cluster;

	return index ? bpf_map_lookup_elem(&clusters, &index) : NULL;
}

/* Something came from the backend. */
static __always_inline void note_answer(const struct conn *c)
{
	struct cluster *cl = cluster_of(c);

	if (cl)
		cl->answered_at = bpf_ktime_get_boot_ns();
}

/* Somebody waited for the backend in vain. */
static __always_inline void note_silence(const struct conn *c)
{
	struct cluster *cl = cluster_of(c);

	if (!cl)
		return;
	__sync_fetch_and_add(&cl->silent, 1);
	cl->silent_at = bpf_ktime_get_boot_ns();
}

/* The backend answered for the first time, or refused. */
static __always_inline void note_outcome(const struct conn *c, bool refused)
{
	struct cluster *cl = cluster_of(c);

	if (!cl)
		return;
	__sync_fetch_and_add(refused ? &cl->reset : &cl->established, 1);
	cl->answered_at = bpf_ktime_get_boot_ns();
}

static __always_inline bool is_reset(const struct packet *p)
{
	if (p->key.proto == IPPROTO_TCP)
		return p->kind & TCP_RST;
	return p->key.proto == IPPROTO_SCTP && (p->kind == SCTP_ABORT || p->kind == SCTP_SHUTDOWN_COMPLETE);
}

static __always_inline bool is_opening(const struct packet *p)
{
	if (p->key.proto == IPPROTO_TCP)
		return (p->kind & (TCP_SYN | TCP_ACK)) == TCP_SYN;
	return p->key.proto == IPPROTO_UDP || p->kind == SCTP_INIT;
}

/* Reports whether a packet is the answer to an opening. */
static __always_inline bool is_accepting(const struct packet *p)
{
	if (p->key.proto == IPPROTO_TCP)
		return (p->kind & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK);
	return p->key.proto == IPPROTO_SCTP && p->kind == SCTP_INIT_ACK;
}

/* Changes a flow's state by a packet of it, in both directions. Few packets do; is_telling says which may. */
__noinline int follow(const struct packet *p, struct conn *c)
{
	enum conn_state state;
	enum conn_flags flags;
	struct conn_key other_key;
	struct conn *other;
	bool back;

	if (!p || !c)
		return 0;
	back = is_back(&p->key, c);
	state = c->state;
	flags = c->flags;
	if (is_reset(p)) {
		if (state == CONN_OPENING && back)
			note_outcome(c, true);
		state = CONN_CLOSED;
	} else if (state == CONN_OPENING && back) {
		note_outcome(c, false);
		state = p->key.proto == IPPROTO_UDP ? CONN_OPEN : CONN_ANSWERED;
	} else if (state == CONN_ANSWERED && !back && !is_opening(p)) {
		state = CONN_OPEN;
	}
	if (p->key.proto == IPPROTO_TCP && p->kind & TCP_FIN && state != CONN_CLOSED) {
		flags |= back ? CONN_FIN_SERVER : CONN_FIN_CLIENT;
		state = flags & CONN_FIN_SERVER && flags & CONN_FIN_CLIENT ? CONN_CLOSING : CONN_HALF;
	}
	if (state == c->state && flags == c->flags)
		return 0;
	other_key = key_of_other(&p->key, c);
	c->state = state;
	c->flags = flags;
	other = bpf_map_lookup_elem(&conns, &other_key);
	if (!other)
		return 0;
	other->state = state;
	other->flags |= flags & (CONN_FIN_SERVER | CONN_FIN_CLIENT);
	return 0;
}

static __always_inline bool is_telling(const struct packet *p, const struct conn *c)
{
	if (p->part == PART_LATER)
		return false;
	return c->state < CONN_OPEN || (p->key.proto == IPPROTO_TCP && p->kind & (TCP_FIN | TCP_RST)) ||
	       p->key.proto == IPPROTO_SCTP;
}

static __always_inline struct fragment_key fragment_of(const struct packet *p)
{
	struct fragment_key key = { .id = p->id, .proto = p->key.proto };

	__builtin_memcpy(key.source, ADDR(p->key.reply ? p->key.server : p->key.client), sizeof(key.source));
	__builtin_memcpy(key.destination, ADDR(p->key.reply ? p->key.client : p->key.server), sizeof(key.destination));
	return key;
}

/* Remembers the ports of a first fragment. */
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

/* Gives a later fragment the ports of its first. Returns false when that was not seen: only those of flows that are
 * translated are remembered. */
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
