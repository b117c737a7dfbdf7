/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which VIP a TCP socket is connected to.
 *
 * The entry of a socket is one of the TCP_VIP_PLACES after the place that its cookie says. The kernel numbers cookies
 * one after the other, so that the sockets of a moment stand side by side and meet only those that have lived for
 * TCP_VIPS sockets or a multiple. A socket that finds all its places taken has its storage instead (`sock_vips`).
 *
 *	connect4/6	claims one
 *	evidence	frees it when the socket is closed, which may be long after its application has left it
 *	release		frees it when the application leaves a socket that is not connected
 *
 * The kernel holds the socket's lock in all of them, so one socket's entry never changes under its reader.
 */
#ifndef ISTHMUS_TCP_VIPS_H
#define ISTHMUS_TCP_VIPS_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"

#define TCP_VIP_PLACES 2

static __always_inline struct tcp_vip *tcp_vip_at(__u64 cookie, __u32 place)
{
	__u32 index = (cookie + place) % TCP_VIPS;

	return bpf_map_lookup_elem(&tcp_vips, &index);
}

static __always_inline __u64 owner_of(const struct tcp_vip *s)
{
	return *(const volatile __u64 *)&s->cookie;
}

/* Returns a socket's entry, or NULL. */
static __always_inline struct tcp_vip *find_tcp_vip(__u64 cookie)
{
	for (__u32 place = 0; place < TCP_VIP_PLACES; place++) {
		struct tcp_vip *s = tcp_vip_at(cookie, place);

		if (s && owner_of(s) == cookie)
			return s;
	}
	return NULL;
}

/* Returns an entry for a socket, the one it has or a free one, or NULL when there is no room. */
static __always_inline struct tcp_vip *claim_tcp_vip(__u64 cookie)
{
	struct tcp_vip *s = find_tcp_vip(cookie);

	if (s)
		return s;
	for (__u32 place = 0; place < TCP_VIP_PLACES; place++) {
		s = tcp_vip_at(cookie, place);
		if (s && owner_of(s) == 0 && __sync_val_compare_and_swap(&s->cookie, 0, cookie) == 0)
			return s;
	}
	return NULL;
}

/* Frees a socket's entry, if it has one. */
static __always_inline void free_tcp_vip(__u64 cookie)
{
	struct tcp_vip *s = find_tcp_vip(cookie);

	if (s)
		*(volatile __u64 *)&s->cookie = 0;
}

#endif
