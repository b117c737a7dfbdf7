/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps that only a gateway's balancer has, by the names they are pinned under. It also has those of maps.h and
 * flow_maps.h.
 */
#ifndef ISTHMUS_GATEWAY_MAPS_H
#define ISTHMUS_GATEWAY_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "flow.h"
#include "gateway.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__uint(key_size, 16);
	__type(value, struct gateway_vip);
} vips SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct frontend_key);
	__type(value, struct gateway_frontend);
} frontends SEC(".maps");

/* By frontend id. */
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
			       sizeof(struct gateway_table)); /* clang omits a type that is only used here */
		});
} tables SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct gateway_source_key);
	__type(value, __u32); /* 1 */
} sources SEC(".maps");

/* The backends of frontends with session affinity that accept new flows. A client may only stay with one of these. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 524288);
	__type(key, struct gateway_member);
	__type(value, __u32); /* 1 */
} members SEC(".maps");

/* The addresses of all backends. A packet from one of them that belongs to no flow is never forwarded as it is. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 524288);
	__type(key, struct gateway_origin_key);
	__type(value, struct gateway_origin);
} origins SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536 / GATEWAY_SLOT_PORTS);
	__type(key, __u32);
	__type(value, struct gateway_slot);
} slots SEC(".maps");

/* The addresses of the other gateways, by number from 1 on. Zeros are an unknown address: no number is missing before
 * the last one. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, GATEWAY_PEERS_MAX);
	__type(key, __u32);
	__uint(value_size, 16);
} peers SEC(".maps");

/* One number for each CPU: packets that were handed over to another gateway. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} handed_over SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct gateway_settings);
} gateway_settings SEC(".maps");

/* Longer than a round trip of 300 ms: a handshake of another VIP lives through one that is flooded. */
#define HALF_OPEN_NS (NS_PER_S / 3)

/* Entries of `handshakes` that a CPU fills with half-open flows within HALF_OPEN_NS. The loader sets it so that all
 * CPUs together fill a quarter of the map. The LRU evicts an entry that was not used lately before half of the others
 * are replaced, and it keeps used ones for another round. */
volatile const __u32 HALF_OPEN_MAX = 131072;

/* Those entries: of all frontends at index 0, and those of each at its id. An entry counts until its flow opens.
 * Flows of UDP have a map of their own: they count as one each for their frontend, and all together in `new_flows`. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, GATEWAY_FRONTENDS_MAX);
	__type(key, __u32);
	__type(value, struct answers);
} half_open SEC(".maps");

/* Announced flows. The reader polls. Flows that do not fit are in `flows` all the same. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1048576);
} opened SEC(".maps");

/* One number: flows that did not fit into `opened`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} opened_lost SEC(".maps");

/* TCP connections that no gateway has announced yet, and when their first packet came, CLOCK_MONOTONIC in ns. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct conn_key);
	__type(value, __u64);
} unknown_flows SEC(".maps");

/* Flows of other gateways that replace clients' addresses by their own. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 131072);
	__type(key, struct conn_key);
	__type(value, struct gateway_peer_flow);
} peer_flows SEC(".maps");

/* Empty is safe: the XDP program then passes every frame to the program at the ingress. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32); /* interface index */
	__type(value, struct gateway_xdp_device);
} xdp_devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, GATEWAY_FRONTENDS_MAX);
	__type(key, __u32);
	__type(value, struct gateway_traffic);
} traffic SEC(".maps");

/* Not inlined, to save stack in its callers. */
static __noinline int count_traffic(__u32 frontend_id, bool to_client, __u32 packets, __u32 bytes)
{
	struct gateway_traffic *t = bpf_map_lookup_elem(&traffic, &frontend_id);
	struct gateway_sum *sum;

	if (!t)
		return 0;
	sum = to_client ? &t->to_clients : &t->to_backends;
	sum->packets += packets;
	sum->bytes += bytes;
	return 0;
}

/* One number for each CPU: packets that the XDP program has sent. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} xdp_sent SEC(".maps");

/* The new flow of the packet that is being handled. It would not fit on the stack. */
struct gateway_scratch {
	struct conn flow;
	struct conn other;
	struct conn_key key;
	__u8 source[16] ADDR_ALIGNED; /* replaces the client's address, if the flow is GATEWAY_DOUBLE_NAT */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct gateway_scratch);
} scratch SEC(".maps");

#endif
