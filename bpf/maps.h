/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps that a node's programs and a gateway's balancer both have, by the names they are pinned under. A node and a
 * gateway never share one: each has its own pins. Hash maps allocate on use, so max_entries is a limit and costs no
 * memory.
 */
#ifndef ISTHMUS_MAPS_H
#define ISTHMUS_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* Written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 262144);
	__type(key, __u32); /* backend id */
	__type(value, struct backend);
} backends SEC(".maps");

/* The agent writes the id, the programs write the counters (evidence.h). A gateway leaves it empty. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32); /* index 0 stands for no cluster */
	__type(value, struct cluster);
} clusters SEC(".maps");

/* Written by the process that observes. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings SEC(".maps");

/* The backend that a client of a frontend with session affinity has. A full map evicts the least recently used client.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} affinities SEC(".maps");

/* Written by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct refusal_key);
	__type(value, __u64);
} refusals SEC(".maps");

/* Choices and refusals, for an observer. Nothing depends on a reader. Events that do not fit are lost. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 262144);
} events SEC(".maps");

#endif
