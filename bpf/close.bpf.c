//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Closes UDP sockets that are connected to a removed backend. They would get no answer, and only the error makes their
 * application connect again. The programs identify the sockets by what connect4/6 stored, never by an address.
 *
 * Reading an iterator runs it over the sockets of the reader's network namespace.
 *
 *   close_stale  closes them. The reader gets the backend id of each socket, 32 bits in the machine's byte order. It
 *                needs bpf_sock_destroy, which came with Linux 6.5.
 *   find_stale   only finds them. The reader gets the cookie of each socket, 64 bits; 0 for a socket without one.
 *
 * It is a separate object, so that a kernel that refuses it still loads the others.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "sock_maps.h"

/* The fields of the kernel's types that are read here. The loader resolves their offsets (CO-RE). */
struct sock_common {
	volatile unsigned char skc_state;
	struct {
		__s64 counter;
	} skc_cookie;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
} __attribute__((preserve_access_index));

struct udp_sock {
	char unread;
} __attribute__((preserve_access_index));

struct seq_file {
	char unread;
} __attribute__((preserve_access_index));

struct bpf_iter_meta {
	struct seq_file *seq;
} __attribute__((preserve_access_index));

/* The context of the iterator. */
struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk; /* NULL after the last one */
};

extern int bpf_sock_destroy(struct sock_common *sock) __ksym;

/* Reports whether a socket is connected to a removed backend. No hook runs when a socket is disconnected, but its state
 * shows it. */
static __always_inline bool is_stale(struct sock *sk, const struct sock_vip *s)
{
	if (!(s->flags & SOCK_VIP_CONNECTED) || sk->__sk_common.skc_state != BPF_TCP_ESTABLISHED)
		return false;
	return !bpf_map_lookup_elem(&backends, &s->backend_id);
}

/* Returns what connect4/6 stored for the iterator's socket if its backend was removed, else NULL. */
static __always_inline struct sock_vip *find_stale_vip(struct sock *sk)
{
	struct sock_vip *s;

	if (!sk)
		return NULL;
	s = bpf_sk_storage_get(&sock_vips, sk, NULL, 0);
	return s && is_stale(sk, s) ? s : NULL;
}

SEC("iter/udp")
int find_stale(struct bpf_iter__udp *ctx)
{
	struct sock *sk = (struct sock *)ctx->udp_sk;
	__s64 cookie;

	if (!find_stale_vip(sk))
		return 0;
	cookie = sk->__sk_common.skc_cookie.counter;
	bpf_seq_write(ctx->meta->seq, &cookie, sizeof(cookie));
	return 0;
}

SEC("iter/udp")
int close_stale(struct bpf_iter__udp *ctx)
{
	struct sock *sk = (struct sock *)ctx->udp_sk;
	struct sock_vip *s = find_stale_vip(sk);
	__u32 backend_id;

	if (!s)
		return 0;
	backend_id = s->backend_id;
	if (bpf_sock_destroy(&sk->__sk_common) == 0)
		bpf_seq_write(ctx->meta->seq, &backend_id, sizeof(backend_id));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
