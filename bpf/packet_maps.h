/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps of the packet path alone, by the names they are pinned under. They are not in maps.h, so that a node that
 * translates only sockets does not pay for them: the tables below have all their memory from the start.
 */
#ifndef ISTHMUS_PACKET_MAPS_H
#define ISTHMUS_PACKET_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* 131,072 flows of two entries each; 44,041,088 bytes by the kernel's count. The flow longest silent makes room. */
#define CONNS_MAX 262144

/* Datagrams whose fragments are under way; 983,936 bytes. */
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

/* Written by the agent: what the devices are that the programs are attached to. Empty is safe: every flow takes the
 * slow road. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32); /* interface index */
	__type(value, struct device);
} devices SEC(".maps");

/* Written by the agent. Zero is safe. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct packet_settings);
} packet_settings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct answers);
} answers SEC(".maps");

/* What begins most often begins again: the ways found last, each at the place that a hash of both ends says. 57,344
 * bytes a CPU. */
#define ROADS_MAX 1024

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ROADS_MAX);
	__type(key, __u32);
	__type(value, struct road);
} roads SEC(".maps");

/* Written by the programs: 1 since a client came by a device that is not a DEVICE_CLIENT. Until then no answer to one
 * leaves by an uplink, and to_network need not look for any. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} routed_clients SEC(".maps");

/* The flow that a packet begins, for as long as the packet is here: the stack of a program has 512 bytes for all its
 * functions together. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct conn);
} new_conn SEC(".maps");

#endif
