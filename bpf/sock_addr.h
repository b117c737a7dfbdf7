/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reads and writes the socket address of a cgroup hook. All other code sees a 16-byte address and a port in host
 * order, for both families.
 */
#ifndef ISTHMUS_SOCK_ADDR_H
#define ISTHMUS_SOCK_ADDR_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "net.h"

struct sock_name {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port; /* host order */
};

/* The context must be accessed in its own word size. clang would emit a narrow access for the 16 bits that matter,
 * which the verifier refuses for user_port ("invalid bpf_context access"). */
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
	write_mapped(name->addr, ctx->user_ip4);
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
	ctx->user_ip4 = last_word(name->addr);
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

/* Returns the protocol of the frontends that a socket may reach, 0 for other sockets. MPTCP counts as TCP on purpose:
 * it offers its clients a TCP service. Linux 6.18 shows the connect hook the TCP subflow, with protocol 6. A kernel
 * that shows the MPTCP socket itself, with 262, works as well, and not because 262 cut to eight bits happens to be 6.
 */
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

static __always_inline bool same_name(const struct sock_name *name, const __u8 addr[16], __u16 port)
{
	return same_addr(name->addr, addr) && name->port == port;
}

#endif
