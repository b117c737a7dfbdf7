/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Choosing a backend for a client of a VIP, on the socket path and on the packet path alike.
 *
 *	fe = find_frontend(&vip, &choice)
 *	fill in struct client			only with a frontend, because it costs something
 *	be = choose_backend(&vip, fe, &client, &choice)
 *
 * Both calls return NULL on failure. choice.reason then says why the client must be refused, or is DROP_REASON_NONE if
 * the address is no VIP. The agent may change the maps at any moment: a value that was looked up stays valid, and a
 * backend that was removed meanwhile is chosen once more.
 */
#ifndef ISTHMUS_CHOOSE_H
#define ISTHMUS_CHOOSE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "affinity.h"
#include "events.h"
#include "net.h"
#include "node_maps.h"

/* The client of a VIP. */
struct client {
	__u8 addr[16] ADDR_ALIGNED; /* as in struct affinity_key; only read if the frontend has session affinity */
	/* Selects the slot. On the packet path it depends on the packet alone: machines agree on a Maglev frontend, and
	 * an evicted flow finds its backend again. */
	__u32 hash;
};

/* Finds the frontend of a VIP. The ClusterSet's ranges are only looked up after a miss. */
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

/* Returns the backend that a client had before, if it may keep it. */
static __always_inline struct backend *keep_backend(struct affinity *known, const struct frontend *fe, __u64 now,
						    __u32 *backend_id)
{
	struct backend *be;
	__u32 id;

	if (!read_affinity(known, fe->id, fe->affinity, now, &id))
		return NULL;
	be = bpf_map_lookup_elem(&backends, &id);
	if (!be || be->flags & BACKEND_DRAINING)
		return NULL;
	known->last = now;
	*backend_id = id;
	return be;
}

/* Returns the backend of the slot that a hash selects. */
static __always_inline struct backend *choose_slot(const struct frontend *fe, __u32 hash, struct choice *choice)
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

/* Chooses a backend for a client of a frontend with session affinity: the previous one if the client may keep it. */
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
	/* A client whose entry was evicted gets the same backend again, on this machine and on every other. */
	if (fe->flags & FRONTEND_MAGLEV)
		hash = hash_address(client->addr);
	be = choose_slot(fe, hash, choice);
	if (!be)
		return NULL;
	value.backend_id = choice->backend_id;
	bpf_map_update_elem(&affinities, &key, &value, BPF_ANY); /* on failure the client is merely not remembered */
	return be;
}

static __always_inline struct backend *try_backend(const struct frontend *fe, const struct client *client,
						   bool affinity, struct choice *choice)
{
	choice->service = fe->service;
	if (affinity && fe->affinity)
		return choose_with_affinity(fe, client, choice);
	return choose_slot(fe, client->hash, choice);
}

/* Chooses a backend of fe, the frontend of vip, and counts the choice. */
static __always_inline struct backend *choose_backend(const struct frontend_key *vip, const struct frontend *fe,
						      const struct client *client, struct choice *choice)
{
	bool affinity = fe->affinity; /* of the frontend that `client` was filled in for */
	struct backend *be = try_backend(fe, client, affinity, choice);
	struct service *service;

	if (!be && choice->reason == DROP_REASON_BACKEND_GONE) {
		/* The slots were out of date. */
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

#endif
