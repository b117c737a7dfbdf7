/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The one place that reads and writes the socket address of a hook. Everything behind it sees a
 * 16-byte address and a port in host order, whatever the family.
 */
#ifndef ISTHMUS_ADDR_H
#define ISTHMUS_ADDR_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_MPTCP 262

struct sock_name {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port; /* host order */
};

/* The context must be read and written by its own word size: the verifier refuses a narrow access to
 * user_port ("invalid bpf_context access"), which clang would emit for the 16 bits that matter. */
static __always_inline __u16 read_port(struct bpf_sock_addr *ctx)
{
	return bpf_ntohs(*(volatile __u32 *)&ctx->user_port);
}

static __always_inline void write_port(struct bpf_sock_addr *ctx, __u16 port)
{
	*(volatile __u32 *)&ctx->user_port = bpf_htons(port);
}

static __always_inline void read_name4(struct bpf_sock_addr *ctx, struct sock_name *name)
{
	__u32 mapped[4] = { 0, 0, bpf_htonl(0xffff), ctx->user_ip4 };

	__builtin_memcpy(name->addr, mapped, sizeof(mapped));
	name->port = read_port(ctx);
}

static __always_inline void read_name6(struct bpf_sock_addr *ctx, struct sock_name *name)
{
	__u32 words[4] = { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3] };

	__builtin_memcpy(name->addr, words, sizeof(words));
	name->port = read_port(ctx);
}

static __always_inline void write_name4(struct bpf_sock_addr *ctx, const struct sock_name *name)
{
	__u32 ip;

	__builtin_memcpy(&ip, name->addr + 12, sizeof(ip));
	ctx->user_ip4 = ip;
	write_port(ctx, name->port);
}

static __always_inline void write_name6(struct bpf_sock_addr *ctx, const struct sock_name *name)
{
	__u32 words[4];

	__builtin_memcpy(words, name->addr, sizeof(words));
	ctx->user_ip6[0] = words[0];
	ctx->user_ip6[1] = words[1];
	ctx->user_ip6[2] = words[2];
	ctx->user_ip6[3] = words[3];
	write_port(ctx, name->port);
}

/* The protocol under which a frontend is looked up, 0 for sockets that are none of ours. MPTCP is
 * treated as TCP, on purpose: it offers its clients a TCP service. Linux 6.18 shows the connect hook the
 * TCP subflow, with 6; a kernel that shows the MPTCP socket itself, with 262, is served as well, and not
 * because 262 cut to eight bits happens to read 6. */
static __always_inline __u8 read_proto(struct bpf_sock_addr *ctx)
{
	switch (ctx->protocol) {
	case IPPROTO_TCP:
	case IPPROTO_MPTCP:
		return IPPROTO_TCP;
	case IPPROTO_UDP:
		return IPPROTO_UDP;
	default:
		return 0;
	}
}

static __always_inline bool same_addr(const __u8 a[16], const __u8 b[16])
{
	const __u32 *x = ADDR(a), *y = ADDR(b);

	return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

static __always_inline bool same_name(const struct sock_name *name, const __u8 addr[16], __u16 port)
{
	return same_addr(name->addr, addr) && name->port == port;
}

#endif
