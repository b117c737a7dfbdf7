/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps, by the names they are pinned under. Those down to `settings` are written by the agent alone, in an
 * order in which every moment is safe (package lb); the programs only read them, counters in their values apart.
 * They allocate by use, so the sizes below are limits, not memory.
 */
#ifndef ISTHMUS_MAPS_H
#define ISTHMUS_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

#define TCP_VIPS 65536

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
	__uint(max_entries, 262144);
	__type(key, __u32); /* backend id */
	__type(value, struct backend);
} backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32); /* service number */
	__type(value, struct service);
} services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32); /* index 0 is nobody's */
	__type(value, struct cluster);
} clusters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 64);
	__type(key, struct range_key);
	__type(value, __u32); /* 1 */
} ranges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings SEC(".maps");

/* Which backend a client of a frontend with session affinity has; the client longest unseen makes room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
} affinities SEC(".maps");

/* Of connected TCP sockets, which are many and short. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TCP_VIPS);
	__type(key, __u32); /* see tcp_vips.h */
	__type(value, struct tcp_vip);
} tcp_vips SEC(".maps");

/* Of UDP and MPTCP sockets, and of those that found no room in `tcp_vips`. It dies with its socket, so nothing is ever
 * evicted or left over; to make one costs more than all the rest of a connect. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct sock_vip);
} sock_vips SEC(".maps");

/* One unconnected socket may speak to many VIPs: what is known of all but the first one. The oldest pair makes room. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct udp_vip_key);
	__type(value, struct udp_vip);
} udp_vips SEC(".maps");

/* One number: entries ever made in `udp_vips`. Those that are not there any more had to make room. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} udp_vips_added SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct refusal_key);
	__type(value, __u64);
} refusals SEC(".maps");

/* For whoever watches: nobody needs to. What does not fit is lost. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 262144);
} events SEC(".maps");

#endif
