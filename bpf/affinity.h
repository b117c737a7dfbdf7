/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reading an entry of `affinities`.
 */
#ifndef ISTHMUS_AFFINITY_H
#define ISTHMUS_AFFINITY_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* Reads the backend that a client of a frontend had until at most timeout_s seconds ago. Returns false if it had none.
 *
 * The map reuses its values at any time. Both ids are therefore read as one word: if the frontend id does not match,
 * the entry now belongs to another frontend. Otherwise a client could get a backend of another Service. */
static __always_inline bool read_affinity(const struct affinity *known, __u32 frontend_id, __u64 timeout_s, __u64 now,
					  __u32 *backend_id)
{
	__u64 last = *(volatile __u64 *)&known->last;
	__u64 word = *(volatile __u64 *)&known->backend_id;
	__u32 ids[2];

	__builtin_memcpy(ids, &word, sizeof(ids));
	if (ids[1] != frontend_id || now - last > timeout_s * NS_PER_S)
		return false;
	*backend_id = ids[0];
	return true;
}

#endif
