/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Routes: asking the kernel's FIB for the next hop of a flow, keeping it in the flow's entry, and redirecting to it.
 */
#ifndef ISTHMUS_ROUTE_H
#define ISTHMUS_ROUTE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "net.h"

/* Any packet length. The helper then returns the MTU of the route instead of comparing. */
#define ANY_LENGTH 68

static __always_inline void set_fib_addrs(struct bpf_fib_lookup *fib, bool ipv6, const __u8 source[16],
					  const __u8 destination[16])
{
	if (ipv6) {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, ADDR(source), sizeof(fib->ipv6_src));
		__builtin_memcpy(fib->ipv6_dst, ADDR(destination), sizeof(fib->ipv6_dst));
	} else {
		fib->family = AF_INET;
		fib->ipv4_src = last_word(source);
		fib->ipv4_dst = last_word(destination);
	}
}

/* Reports whether a lookup found a route, even if its neighbour is not resolved yet. */
static __always_inline bool has_route(long found)
{
	return found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH;
}

/* Stores device, MTU and next hop of a route in a flow's entry. Returns false if the MTU is unknown. */
static __always_inline bool store_next_hop(struct __sk_buff *skb, struct conn *c, const struct bpf_fib_lookup *fib,
					   long found)
{
	__u32 mtu = 0;

	if (found == BPF_FIB_LKUP_RET_SUCCESS)
		mtu = fib->mtu_result;
	else if (bpf_check_mtu(skb, fib->ifindex, &mtu, 0, 0) < 0)
		return false;
	c->mtu = mtu > 0xffff ? 0xffff : mtu;
	c->ifindex = fib->ifindex;
	if (fib->family == AF_INET6)
		c->flags |= CONN_VIA6;
	else
		c->flags &= ~CONN_VIA6;
	/* An IPv4 address is the first word of the same union. */
	__builtin_memcpy(c->via, fib->ipv6_dst, sizeof(c->via));
	return true;
}

static __always_inline int redirect_to_next_hop(const struct conn *c)
{
	struct bpf_redir_neigh next = { .nh_family = c->flags & CONN_VIA6 ? AF_INET6 : AF_INET };

	__builtin_memcpy(next.ipv6_nh, c->via, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(c->ifindex, &next, sizeof(next), 0);
}

#endif
