/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Counters of refusals, and the events about choices and refusals that an observer reads.
 */
#ifndef ISTHMUS_EVENTS_H
#define ISTHMUS_EVENTS_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"

/* The result of choosing a backend. */
struct choice {
	__u32 backend_id; /* 0 without a backend */
	__u32 service;	  /* 0 without a frontend */
	enum drop_reason reason;
};

/* Counts a refusal. Not inlined, so that enum drop_reason stays in the BTF that Go constants are generated from. */
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

/* Reports whether an observer wants this event: every refusal, and a sample of the choices. */
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

/* Reserves an event about vip; be is NULL in a refusal. The caller adds what it knows of the client and submits it.
 * Returns NULL if the ring buffer is full: the event is lost. */
static __always_inline struct event *reserve_event(enum event_kind kind, enum event_path path,
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
