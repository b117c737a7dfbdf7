/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps of flows, which the packet path and a gateway's balancer both have, by the names they are pinned under. The
 * tables are preallocated, so they have headers of their own: a node that translates only sockets does not pay for
 * them.
 */
#ifndef ISTHMUS_FLOW_MAPS_H
#define ISTHMUS_FLOW_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* 131,072 flows of two entries each; 44,041,088 bytes by the kernel's count. A full map evicts the flow that was idle
 * for longest. */
#define CONNS_MAX 262144

/* Datagrams with fragments on the way; 983,936 bytes. */
#define FRAGMENTS_MAX 8192

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, CONNS_MAX);
	__type(key, struct conn_key);
	__type(value, struct conn);
} conns SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, FRAGMENTS_MAX);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct answers);
} answers SEC(".maps");

/* New flows of the current second: those of the CPU at index 0, and at each other index those of the clients with one
 * hash. 65,552 bytes for each CPU. */
#define FLOW_SOURCES 4096

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1 + FLOW_SOURCES);
	__type(key, __u32);
	__type(value, struct answers);
} new_flows SEC(".maps");

#endif
