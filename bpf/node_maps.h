/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps that the socket path and the packet path share, by the names they are pinned under. Only the agent writes
 * them, in an order in which every intermediate state is safe (package lb). The programs only count in `services`.
 */
#ifndef ISTHMUS_NODE_MAPS_H
#define ISTHMUS_NODE_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct frontend_key);
	__type(value, struct frontend);
} frontends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 2097152);
	__type(key, struct slot_key);
	__type(value, __u32); /* backend id */
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32); /* service number */
	__type(value, struct service);
} services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 64);
	__type(key, struct range_key);
	__type(value, __u32); /* 1 */
} ranges SEC(".maps");

#endif
