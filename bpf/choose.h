/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Who serves a client of a VIP: what the socket path and the packet path decide alike.
 *
 *	fe = find_frontend(&vip, &choice)	whose VIP it is
 *	fill in struct client			it costs something, so only when there is a frontend
 *	be = choose_backend(&vip, fe, &client, &choice)
 *
 * Both return NULL when there is nobody; choice.reason says whether the client must be refused or is none of
 * ours (DROP_REASON_NONE). The agent may change the maps at any moment: a value that was looked up stays what
 * it was, and whatever is gone in between is looked for once more.
 */
#ifndef ISTHMUS_CHOOSE_H
#define ISTHMUS_CHOOSE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"

#define NS_PER_S 1000000000ULL

/* Who asks. */
struct client {
	__u8 addr[16] ADDR_ALIGNED; /* as in struct affinity_key; only read when the frontend has affinity */
	__u32 hash;		    /* picks the slot: of the flow, or chance. For a Maglev frontend of the packet
				       path it must be of the packet alone, so that every machine finds the same */
};

/* What became of it. */
struct choice {
	__u32 backend_id; /* 0 when nobody serves */
	__u32 service;	  /* 0 when there is no frontend */
	enum drop_reason reason;
};

/* Mixes all bits of x into 32. */
static __always_inline __u32 hash_u64(__u64 x)
{
	x *= 0x9e3779b97f4a7c15ULL;
	x ^= x >> 29;
	x *= 0xbf58476d1ce4e5b9ULL;
	return x >> 32;
}

/* The same client has the same hash on every machine. */
static __always_inline __u32 hash_address(const __u8 addr[16])
{
	__u64 words[2];

	__builtin_memcpy(words, ADDR(addr), sizeof(words));
	return hash_u64(words[0] ^ hash_u64(words[1]));
}

/* Finds the frontend of a VIP. Only after a miss does an address cost a look at the ClusterSet's ranges. */
static __always_inline struct frontend *find_frontend(const struct frontend_key *vip, struct choice *choice)
{
	struct range_key range = { .prefixlen = 128 };
	struct frontend *fe = bpf_map_lookup_elem(&frontends, vip);

	choice->backend_id = 0;
	choice->service = 0;
	choice->reason = DROP_REASON_NONE;
	if (fe)
		return fe;
	__builtin_memcpy(range.addr, vip->addr, sizeof(range.addr));
	if (bpf_map_lookup_elem(&ranges, &range))
		choice->reason = DROP_REASON_NO_FRONTEND;
	return NULL;
}

/* Returns the backend a client was given before, if it may keep it.
 *
 * The map reuses its values at any time. That the two numbers are read as one word tells whether they are still
 * this frontend's: else a client could meet a backend of some other service. */
static __always_inline struct backend *keep_backend(struct affinity *known, const struct frontend *fe, __u64 now,
						    __u32 *backend_id)
{
	__u64 last = *(volatile __u64 *)&known->last;
	__u64 word = *(volatile __u64 *)&known->backend_id;
	struct backend *be;
	__u32 ids[2];

	__builtin_memcpy(ids, &word, sizeof(ids));
	if (ids[1] != fe->id || now - last > fe->affinity * NS_PER_S)
		return NULL;
	be = bpf_map_lookup_elem(&backends, &ids[0]);
	if (!be || be->flags & BACKEND_DRAINING)
		return NULL;
	known->last = now;
	*backend_id = ids[0];
	return be;
}

/* Takes the backend of a slot. */
static __always_inline struct backend *take_slot(const struct frontend *fe, __u32 hash, struct choice *choice)
{
	struct slot_key key = { .frontend_id = fe->id };
	struct backend *be;
	__u32 *id;

	choice->reason = DROP_REASON_NO_BACKEND;
	if (fe->count == 0)
		return NULL;
	choice->reason = DROP_REASON_BACKEND_GONE;
	key.slot = hash % fe->count;
	id = bpf_map_lookup_elem(&slots, &key);
	if (!id)
		return NULL;
	be = bpf_map_lookup_elem(&backends, id);
	if (!be)
		return NULL;
	choice->backend_id = *id;
	choice->reason = DROP_REASON_NONE;
	return be;
}

/* Gives a client of a frontend with session affinity its backend, the one it had if it may keep it. */
static __noinline struct backend *choose_with_affinity(const struct frontend *fe, const struct client *client,
						       struct choice *choice)
{
	struct affinity_key key = { .frontend_id = fe->id };
	struct affinity value = { .frontend_id = fe->id };
	struct affinity *known;
	struct backend *be;
	__u32 hash = client->hash;

	value.last = bpf_ktime_get_boot_ns();
	__builtin_memcpy(key.client, client->addr, sizeof(key.client));
	known = bpf_map_lookup_elem(&affinities, &key);
	if (known) {
		be = keep_backend(known, fe, value.last, &choice->backend_id);
		if (be)
			return be;
	}
	/* Who is forgotten here finds the same backend again: on this machine and on every other. */
	if (fe->flags & FRONTEND_MAGLEV)
		hash = hash_address(client->addr);
	be = take_slot(fe, hash, choice);
	if (!be)
		return NULL;
	value.backend_id = choice->backend_id;
	bpf_map_update_elem(&affinities, &key, &value, BPF_ANY); /* without room the client merely is not known again */
	return be;
}

static __always_inline struct backend *try_backend(const struct frontend *fe, const struct client *client,
						   bool affinity, struct choice *choice)
{
	choice->service = fe->service;
	if (affinity && fe->affinity)
		return choose_with_affinity(fe, client, choice);
	return take_slot(fe, client->hash, choice);
}

/* Chooses a backend of fe, the frontend of vip, and counts it. */
static __always_inline struct backend *choose_backend(const struct frontend_key *vip, const struct frontend *fe,
						      const struct client *client, struct choice *choice)
{
	bool affinity = fe->affinity; /* of the frontend client was filled in for */
	struct backend *be = try_backend(fe, client, affinity, choice);
	struct service *service;

	if (!be && choice->reason == DROP_REASON_BACKEND_GONE) {
		/* The table was of a moment ago. */
		fe = bpf_map_lookup_elem(&frontends, vip);
		if (!fe)
			return NULL;
		be = try_backend(fe, client, affinity, choice);
	}
	if (!be)
		return NULL;
	service = bpf_map_lookup_elem(&services, &choice->service);
	if (service)
		__sync_fetch_and_add(&service->chosen, 1);
	return be;
}

/* Counts a refusal. Not inlined, so that enum drop_reason stays in the BTF, from which Go has its constants. */
static __noinline int count_refusal(__u32 service, enum drop_reason reason)
{
	struct refusal_key key = { .service = service, .reason = reason };
	__u64 *count = bpf_map_lookup_elem(&refusals, &key);
	__u64 one = 1;

	if (!count) {
		if (bpf_map_update_elem(&refusals, &key, &one, BPF_NOEXIST) == 0)
			return 0;
		count = bpf_map_lookup_elem(&refusals, &key); /* another CPU was first, or the map is full */
	}
	if (count)
		__sync_fetch_and_add(count, 1);
	return 0;
}

/* Reports whether somebody watches and wants this event: every refusal, and of the choices a part. */
static __always_inline bool is_observed(enum event_kind kind)
{
	__u32 zero = 0;
	struct settings *s = bpf_map_lookup_elem(&settings, &zero);
	__u32 one_in;

	if (!s)
		return false;
	one_in = s->observe;
	if (one_in == 0)
		return false;
	return kind == EVENT_REFUSED || one_in == 1 || bpf_get_prandom_u32() % one_in == 0;
}

/* Begins an event about vip: be is NULL in a refusal. The caller adds what it knows of the client and submits it.
 * Returns NULL when there is no room, and the event is lost. */
static __always_inline struct event *begin_event(enum event_kind kind, enum event_path path,
						 const struct frontend_key *vip, const struct backend *be,
						 const struct choice *choice)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e)
		return NULL;
	__builtin_memset(e, 0, sizeof(*e));
	e->time = bpf_ktime_get_boot_ns();
	e->kind = kind;
	e->path = path;
	e->reason = choice->reason;
	e->service = choice->service;
	e->proto = vip->proto;
	e->vip_port = vip->port;
	__builtin_memcpy(e->vip, vip->addr, sizeof(e->vip));
	if (be) {
		e->cluster = be->cluster;
		e->backend_port = be->port;
		__builtin_memcpy(e->backend, be->addr, sizeof(e->backend));
	}
	return e;
}

#endif
