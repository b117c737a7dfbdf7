/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps, by the names they are pinned under. The first three are written by the agent alone, in an
 * order in which every moment is safe (package lb); the programs only read them. They allocate by use,
 * so the sizes below are limits, not memory.
 */
#ifndef ISTHMUS_MAPS_H
#define ISTHMUS_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

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
	__uint(max_entries, 524288);
	__type(key, struct slot_key);
	__type(value, __u32); /* backend id */
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 262144);
	__type(key, __u32); /* backend id */
	__type(value, struct backend);
} backends SEC(".maps");

/* Dies with its socket, so nothing is ever evicted or left over. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct sock_vip);
} sock_vips SEC(".maps");

/* One unconnected socket may speak to many VIPs; the oldest pair makes room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct udp_vip_key);
	__type(value, struct udp_vip);
} udp_vips SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DROP_REASON_MAX);
	__type(key, __u32); /* enum drop_reason; an array's key must be an integer in BTF */
	__type(value, __u64);
} refusals SEC(".maps");

#endif
