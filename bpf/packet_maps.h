/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps of the packet path alone, by the names they are pinned under.
 */
#ifndef ISTHMUS_PACKET_MAPS_H
#define ISTHMUS_PACKET_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* Written by the agent: roles of the devices that the programs are attached to. Empty is safe: every flow takes the
 * slow path. */
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

/* Clients that open flows often do so again: the routes found last, indexed by a hash of client and backend. 57,344
 * bytes for each CPU. */
#define ROUTE_CACHE_MAX 1024

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ROUTE_CACHE_MAX);
	__type(key, __u32);
	__type(value, struct route_cache);
} route_cache SEC(".maps");

/* Written by the programs: 1 once a client came in by a device that is not a DEVICE_CLIENT. Until then no reply to a
 * client leaves by an uplink, and to_network skips the lookup. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} routed_clients SEC(".maps");

/* The new flow of the packet that is being handled. It would not fit on the stack, where all functions of a program
 * share 512 bytes. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct conn);
} new_conn SEC(".maps");

#endif
