/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps that a gateway's balancer has besides those of maps.h and packet_maps.h, by the names they are pinned under.
 */
#ifndef ISTHMUS_GATEWAY_MAPS_H
#define ISTHMUS_GATEWAY_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "gateway.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__uint(key_size, 16);
	__type(value, struct gateway_vip);
} vips SEC(".maps");

/* By frontend id. A table is replaced whole, so that no packet sees half of two. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, GATEWAY_FRONTENDS_MAX);
	__type(key, __u32);
	__array(
		values, struct {
			__uint(type, BPF_MAP_TYPE_ARRAY);
			__uint(max_entries, 1);
			__type(key, __u32);
			__uint(value_size,
			       sizeof(struct gateway_table)); /* clang leaves a type out that only stands here */
		});
} tables SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct gateway_source_key);
	__type(value, __u32); /* 1 */
} sources SEC(".maps");

/* Which backends of frontends with session affinity take new flows: only with those may a client stay. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 524288);
	__type(key, struct gateway_member);
	__type(value, __u32); /* 1 */
} members SEC(".maps");

/* Where answers come from: every backend's address, port and protocol, and once more with port 0 and protocol 0. What
 * comes from there and is of no flow is never forwarded as it is. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 524288);
	__type(key, struct frontend_key);
	__type(value, struct gateway_origin);
} origins SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct gateway_settings);
} gateway_settings SEC(".maps");

/* Whoever reads it comes by when he likes; what does not fit he finds in `conns`. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1048576);
} opened SEC(".maps");

/* One number: flows that found no room in `opened`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} opened_lost SEC(".maps");

/* TCP connections under way of which no gateway has told yet, and when their first packet came, CLOCK_MONOTONIC in ns.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct conn_key);
	__type(value, __u64);
} strangers SEC(".maps");

/* Empty is safe: the XDP program then leaves everything to the one that runs behind it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32); /* interface index */
	__type(value, struct gateway_xdp_device);
} xdp_devices SEC(".maps");

/* One number: packets that the XDP program has sent. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} xdp_sent SEC(".maps");

/* A flow that begins, for as long as its packet is here: the stack has no room for it. */
struct gateway_scratch {
	struct conn flow;
	struct conn other;
	struct conn_key key;
	__u8 source[16] ADDR_ALIGNED; /* takes the place of the client's address, where the flow is GATEWAY_TWICE */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct gateway_scratch);
} scratch SEC(".maps");

#endif
