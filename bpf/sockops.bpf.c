//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The evidence of life: what becomes of the TCP connections that connect4/6 translated, counted by the cluster
 * of their backend. Nothing is sent for it, and an idle cluster gives none.
 *
 *   handshake ends                established, answered_at
 *   handshake is refused          reset, answered_at: somebody there is alive to refuse
 *   retransmission timeout        silent, silent_at; in a handshake first after a second
 *   handshake is given up         timed_out, by the kernel or by the application after a timeout
 *   answer after such a timeout   answered_at
 *
 * An ICMP error is no evidence: a router on the way sends it. The program runs for every TCP socket of the node,
 * so one that met no VIP leaves at once, and after its handshake a socket costs nothing until it is closed.
 *
 * It shares its hook with others: it only ever adds callbacks to those a socket has, and sets no reply.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "tcp_vips.h"

/* A sock_ops program lets the connection go on. */
#define PROCEED 1

/* How old answered_at may be before a connection under way renews it. */
#define ANSWER_NS 100000000ULL

/* Says which cluster's backend the socket is connected to. Returns false when it is connected to no VIP. */
static __always_inline bool find_index(struct bpf_sock_ops *ctx, __u32 *index)
{
	struct tcp_vip *t = find_tcp_vip(bpf_get_socket_cookie(ctx));
	struct bpf_sock *sk;
	struct sock_vip *s;

	if (t) {
		*index = t->cluster;
		return true;
	}
	sk = ctx->sk;
	if (!sk)
		return false;
	s = bpf_sk_storage_get(&sock_vips, sk, NULL, 0);
	if (!s || !(s->flags & SOCK_VIP_CONNECTED))
		return false;
	*index = s->cluster;
	return true;
}

static __always_inline struct cluster *find_cluster(struct bpf_sock_ops *ctx)
{
	__u32 index;

	return find_index(ctx, &index) ? bpf_map_lookup_elem(&clusters, &index) : NULL;
}

/* Asks for the callbacks this socket needs beside those others asked for. */
static __always_inline void watch(struct bpf_sock_ops *ctx, int callbacks)
{
	bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | callbacks);
}

static __always_inline void count_established(struct bpf_sock_ops *ctx)
{
	struct cluster *c = find_cluster(ctx);

	if (!c)
		return;
	__sync_fetch_and_add(&c->established, 1);
	c->answered_at = bpf_ktime_get_boot_ns();
}

static __always_inline void count_silence(struct bpf_sock_ops *ctx)
{
	struct cluster *c = find_cluster(ctx);

	if (!c)
		return;
	__sync_fetch_and_add(&c->silent, 1);
	c->silent_at = bpf_ktime_get_boot_ns();
	if (ctx->state != BPF_TCP_SYN_SENT)
		watch(ctx, BPF_SOCK_OPS_RTT_CB_FLAG); /* it tells when the other side is back */
}

/* A handshake that ended without a connection: a segment can only have been a reset. */
static __always_inline void count_failure(struct bpf_sock_ops *ctx)
{
	struct cluster *c = find_cluster(ctx);

	if (!c)
		return;
	if (ctx->segs_in) {
		__sync_fetch_and_add(&c->reset, 1);
		c->answered_at = bpf_ktime_get_boot_ns();
	} else if (ctx->total_retrans) {
		__sync_fetch_and_add(&c->timed_out, 1);
	}
}

static __always_inline void note_answer(struct bpf_sock_ops *ctx)
{
	struct cluster *c = find_cluster(ctx);
	__u64 now;

	if (!c)
		return;
	now = bpf_ktime_get_boot_ns();
	if (now - c->answered_at > ANSWER_NS)
		c->answered_at = now;
}

SEC("sockops")
int evidence(struct bpf_sock_ops *ctx)
{
	__u32 index;

	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		if (find_index(ctx, &index))
			watch(ctx, BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		count_established(ctx);
		break;
	case BPF_SOCK_OPS_RTO_CB:
		count_silence(ctx);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		if (ctx->args[1] != BPF_TCP_CLOSE)
			break;
		if (ctx->args[0] == BPF_TCP_SYN_SENT)
			count_failure(ctx);
		free_tcp_vip(bpf_get_socket_cookie(ctx));
		break;
	case BPF_SOCK_OPS_RTT_CB:
		note_answer(ctx);
		break;
	default:
		break;
	}
	return PROCEED;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
