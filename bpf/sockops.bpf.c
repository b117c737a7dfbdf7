//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Evidence of life: outcomes of the TCP connections that connect4/6 translated, counted by the cluster of their
 * backend. The program sends no probes, so an idle cluster yields no evidence.
 *
 *   handshake completes           established, answered_at
 *   handshake is refused          reset, answered_at: the endpoint is alive, or it could not refuse
 *   retransmission timeout        silent, silent_at; during a handshake after a second at the earliest
 *   handshake is abandoned        timed_out: the kernel or the application gave up after a timeout
 *   answer after such a timeout   answered_at
 *
 * An ICMP error is no evidence, because routers on the way send it. The program runs for every TCP socket of the node:
 * it returns early for a socket that used no VIP, and costs nothing between the handshake and the close.
 *
 * Other programs share the hook: it only adds callbacks to those that a socket has, and sets no reply.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "evidence.h"
#include "maps.h"
#include "sock_maps.h"
#include "tcp_vips.h"

/* The return value with which the connection proceeds. */
#define PROCEED 1

/* An open connection updates answered_at once it is older than this. */
#define ANSWER_NS 100000000ULL

/* Finds the cluster index of the backend that a socket is connected to. Returns false if it is connected to no VIP. */
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

/* Requests callbacks, in addition to those that other programs requested. */
static __always_inline void add_callbacks(struct bpf_sock_ops *ctx, int callbacks)
{
	bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | callbacks);
}

static __always_inline void on_timeout(struct bpf_sock_ops *ctx)
{
	struct cluster *c = find_cluster(ctx);

	if (!c)
		return;
	count_silence(c);
	if (ctx->state != BPF_TCP_SYN_SENT)
		add_callbacks(ctx, BPF_SOCK_OPS_RTT_CB_FLAG); /* fires once the other side answers again */
}

/* Counts a handshake that ended without a connection. A segment that came in can only have been a reset. */
static __always_inline void on_failure(struct bpf_sock_ops *ctx)
{
	struct cluster *c = find_cluster(ctx);

	if (!c)
		return;
	if (ctx->segs_in) {
		count_outcome(c, true);
	} else if (ctx->total_retrans) {
		__sync_fetch_and_add(&c->timed_out, 1);
	}
}

static __always_inline void on_answer(struct bpf_sock_ops *ctx)
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
			add_callbacks(ctx, BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_STATE_CB_FLAG);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		count_outcome(find_cluster(ctx), false);
		break;
	case BPF_SOCK_OPS_RTO_CB:
		on_timeout(ctx);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		if (ctx->args[1] != BPF_TCP_CLOSE)
			break;
		if (ctx->args[0] == BPF_TCP_SYN_SENT)
			on_failure(ctx);
		free_tcp_vip(bpf_get_socket_cookie(ctx));
		break;
	case BPF_SOCK_OPS_RTT_CB:
		on_answer(ctx);
		break;
	default:
		break;
	}
	return PROCEED;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
