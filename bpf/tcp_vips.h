/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The VIPs that TCP sockets are connected to.
 *
 * A socket's cookie selects TCP_VIP_PROBES consecutive entries, and the socket uses one of them. The kernel numbers
 * cookies consecutively, so sockets of the same time have neighbouring entries. A socket only collides with one that
 *has lived for TCP_VIPS sockets or a multiple of that. If all its entries are taken, the socket uses its storage
 *instead
 * (`sock_vips`).
 *
 *	connect4/6	claims an entry
 *	evidence	frees it when the socket is closed, perhaps long after the application has left the socket
 *	release		frees it when the application leaves a socket that is not connected
 *
 * The kernel holds the socket's lock in all of them, so a socket's entry never changes during a read.
 */
#ifndef ISTHMUS_TCP_VIPS_H
#define ISTHMUS_TCP_VIPS_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "sock_maps.h"

#define TCP_VIP_PROBES 2

static __always_inline struct tcp_vip *tcp_vip_at(__u64 cookie, __u32 probe)
{
	__u32 index = (cookie + probe) % TCP_VIPS;

	return bpf_map_lookup_elem(&tcp_vips, &index);
}

static __always_inline __u64 owner_of(const struct tcp_vip *s)
{
	return *(const volatile __u64 *)&s->cookie;
}

/* Returns a socket's entry, or NULL. */
static __always_inline struct tcp_vip *find_tcp_vip(__u64 cookie)
{
	for (__u32 probe = 0; probe < TCP_VIP_PROBES; probe++) {
		struct tcp_vip *s = tcp_vip_at(cookie, probe);

		if (s && owner_of(s) == cookie)
			return s;
	}
	return NULL;
}

/* Returns a socket's entry or claims a free one. Returns NULL if none is free. */
static __always_inline struct tcp_vip *claim_tcp_vip(__u64 cookie)
{
	struct tcp_vip *s = find_tcp_vip(cookie);

	if (s)
		return s;
	for (__u32 probe = 0; probe < TCP_VIP_PROBES; probe++) {
		s = tcp_vip_at(cookie, probe);
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
