/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps of the socket path alone, by the names they are pinned under. The programs write them.
 */
#ifndef ISTHMUS_SOCK_MAPS_H
#define ISTHMUS_SOCK_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

#define TCP_VIPS 65536

/* Connected TCP sockets, which are many and short-lived. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TCP_VIPS);
	__type(key, __u32); /* see tcp_vips.h */
	__type(value, struct tcp_vip);
} tcp_vips SEC(".maps");

/* UDP and MPTCP sockets, and TCP sockets that found no room in `tcp_vips`. A storage dies with its socket, so nothing
 * is ever evicted or left behind. Creating one costs more than the rest of a connect. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct sock_vip);
} sock_vips SEC(".maps");

/* An unconnected socket may send to many VIPs. Holds all but its first one. A full map evicts the oldest pair. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct udp_vip_key);
	__type(value, struct udp_vip);
} udp_vips SEC(".maps");

/* One number: entries ever added to `udp_vips`. Entries that are missing there were evicted. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} udp_vips_added SEC(".maps");

#endif
