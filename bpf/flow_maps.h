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

/* 131,072 flows of two entries each. A full map evicts the flow that was idle for longest. */
#define FLOWS_MAX 262144

/* 32,768 flows of two entries each. At the limit of one CPU a flow stays for 0.3 s at least, longer than a handshake
 * takes. */
#define HANDSHAKES_MAX 65536

/* 65,536 flows of two entries each. */
#define UDP_FLOWS_MAX 131072

/* Datagrams with fragments on the way; 983,936 bytes. */
#define FRAGMENTS_MAX 8192

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, FLOWS_MAX);
	__type(key, struct conn_key);
	__type(value, struct conn);
} flows SEC(".maps");

/* Flows of which one side has not spoken yet, or not since the other answered: the LRU knows no state, so that a flood
 * of SYNs into `flows` would evict connections. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, HANDSHAKES_MAX);
	__type(key, struct conn_key);
	__type(value, struct conn);
} handshakes SEC(".maps");

/* Flows of UDP, in all states: see flow.h. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, UDP_FLOWS_MAX);
	__type(key, struct conn_key);
	__type(value, struct conn);
} udp_flows SEC(".maps");

/* Flows of a build without `flows`, whose map the loader puts here and sets OLD_FLOWS. A flow moves to `flows` with its
 * next packet. Otherwise the map is empty and unused. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct conn_key);
	__type(value, struct old_conn);
} conns SEC(".maps");

/* Set at load time: 1 if `conns` may hold flows. */
volatile const __u32 OLD_FLOWS = 0;

/* A flow on its way from `conns`. It would not fit on the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct conn);
} moving_conn SEC(".maps");

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
