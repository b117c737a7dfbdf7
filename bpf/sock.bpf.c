//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The socket path: a connect or a send to a VIP becomes one to a backend before the kernel looks up a route. No packet
 * ever carries the VIP, so packets cost nothing extra. The VIP is stored with the socket, and getpeername and recvfrom
 * keep returning it.
 *
 *   connect4/6      VIP -> backend, stored in tcp_vips or sock_vips
 *   sendmsg4/6      VIP -> backend for unconnected UDP; a socket's first VIP is in sock_vips, others in udp_vips
 *   recvmsg4/6      backend -> VIP in the sender's address of a UDP datagram
 *   getpeername4/6  backend -> VIP
 *   release         frees the entry of a TCP socket that never connected
 *
 * The 6 hooks also see IPv4-mapped addresses of dual-stack sockets. They need no special case, since IPv4 addresses are
 * stored mapped anyway.
 *
 * A UDP connect to port 0 sends nothing: a resolver does it to learn the source address for a destination (RFC 6724
 * section 6). It passes even where any other connect would be refused.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "choose.h"
#include "maps.h"
#include "net.h"
#include "node_maps.h"
#include "sock_addr.h"
#include "sock_maps.h"
#include "tcp_vips.h"

/* Only the name of the kernel's type matters: a kernel without MPTCP does not have it. */
struct mptcp_sock {
	char unread;
} __attribute__((preserve_access_index));

#define ENOBUFS 105
#define ECONNREFUSED 111

/* Return values of a hook. */
#define REFUSE 0
#define PROCEED 1

/* The verdict of a hook on a socket address. */
enum verdict {
	PASS,	 /* leave it as it is */
	REWRITE, /* write back the changed address */
	DENY,	 /* fail the system call */
};

/* Adds the client to an event. Not inlined, so that struct event stays in the BTF that Go types are generated from. */
static __noinline int describe_client(struct bpf_sock_addr *ctx, struct event *e)
{
	e->netns = bpf_get_netns_cookie(ctx);
	e->pid = bpf_get_current_pid_tgid() >> 32;
	return bpf_get_current_comm(e->comm, sizeof(e->comm));
}

/* Emits an event for an observer. */
static __noinline int emit_event(struct bpf_sock_addr *ctx, enum event_kind kind, const struct frontend_key *vip,
				 const struct backend *be, const struct choice *choice)
{
	struct event *e;

	if (!is_observed(kind))
		return 0;
	e = reserve_event(kind, PATH_SOCKET, vip, be, choice);
	if (!e)
		return 0;
	describe_client(ctx, e);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

/* Counts the refusal and emits its event. The system call fails at once instead of timing out. */
static __noinline enum verdict refuse(struct bpf_sock_addr *ctx, const struct frontend_key *vip,
				      const struct choice *choice)
{
	count_refusal(choice->service, choice->reason);
	emit_event(ctx, EVENT_REFUSED, vip, NULL, choice);
	bpf_set_retval(choice->reason == DROP_REASON_NO_MEMORY ? -ENOBUFS : -ECONNREFUSED);
	return DENY;
}

/* Hashes a socket to slots, differently for each frontend. */
static __always_inline __u32 hash_socket(__u64 cookie, __u32 frontend_id)
{
	return hash_u64(cookie ^ ((__u64)frontend_id << 32));
}

/* Fills in the client. Session affinity identifies it by network namespace, because the socket has no address yet. */
static __always_inline void identify_client(struct bpf_sock_addr *ctx, const struct frontend *fe, __u32 hash,
					    struct client *client)
{
	__u64 netns = fe->affinity ? bpf_cpu_to_be64(bpf_get_netns_cookie(ctx)) : 0;

	__builtin_memset(client->addr, 0, 8);
	__builtin_memcpy(client->addr + 8, &netns, sizeof(netns));
	client->hash = hash;
}

/* Returns the MPTCP socket of which sk is a TCP subflow, else NULL. getpeername is called on that socket. On a kernel
 * without MPTCP the condition is false at load time, and the verifier never sees the call. */
static __always_inline struct mptcp_sock *mptcp_of(struct bpf_sock *sk)
{
	if (!__builtin_preserve_type_info(*(struct mptcp_sock *)NULL, 0 /* BPF_TYPE_EXISTS */))
		return NULL;
	return bpf_skc_to_mptcp_sock(sk);
}

static __always_inline void set_flags(struct sock_vip *s, __u32 flags)
{
	__sync_fetch_and_or((__u32 *)&s->flags, flags);
}

static __always_inline void clear_flags(struct sock_vip *s, __u32 flags)
{
	__sync_fetch_and_and((__u32 *)&s->flags, ~flags);
}

/* Stores in udp_vips that datagrams from backend belong to vip. A new entry is counted. */
static __noinline bool remember_pair(__u64 cookie, const __u8 vip[16], __u16 vip_port, const __u8 backend[16],
				     __u16 backend_port)
{
	struct udp_vip_key key = { .cookie = cookie, .port = backend_port };
	struct udp_vip value = { .port = vip_port };
	struct udp_vip *known;
	__u64 *added;
	__u32 zero = 0;

	__builtin_memcpy(key.addr, ADDR(backend), sizeof(key.addr));
	__builtin_memcpy(value.addr, ADDR(vip), sizeof(value.addr));
	known = bpf_map_lookup_elem(&udp_vips, &key);
	if (known && same_addr(known->addr, vip) && known->port == vip_port)
		return true;
	if (known && bpf_map_update_elem(&udp_vips, &key, &value, BPF_EXIST) == 0)
		return true;
	if (bpf_map_update_elem(&udp_vips, &key, &value, BPF_ANY) != 0)
		return false;
	added = bpf_map_lookup_elem(&udp_vips_added, &zero);
	if (added)
		__sync_fetch_and_add(added, 1);
	return true;
}

/* Moves the VIP of the first unconnected send from the storage to udp_vips, to make room. */
static __always_inline bool move_first(struct bpf_sock_addr *ctx, struct sock_vip *s)
{
	if (!remember_pair(bpf_get_socket_cookie(ctx), s->vip, s->vip_port, s->backend, s->backend_port))
		return false;
	set_flags(s, SOCK_VIP_SENT);
	clear_flags(s, SOCK_VIP_FIRST);
	return true;
}

/* Fills in the VIP and the backend of a struct sock_vip or struct tcp_vip. */
#define FILL_VIP(s, from, be, choice)                                             \
	({                                                                        \
		__builtin_memcpy((s)->vip, (from)->addr, sizeof((s)->vip));       \
		__builtin_memcpy((s)->backend, (be)->addr, sizeof((s)->backend)); \
		(s)->vip_port = (from)->port;                                     \
		(s)->backend_port = (be)->port;                                   \
		(s)->backend_id = (choice)->backend_id;                           \
		(s)->service = (choice)->service;                                 \
		(s)->cluster = (be)->cluster;                                     \
	})

/* Stores a connection in the socket's storage. */
static __always_inline bool store_connected(struct bpf_sock_addr *ctx, const struct frontend_key *vip,
					    const struct backend *be, const struct choice *choice)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (!s)
		return false;
	if (s->flags & SOCK_VIP_FIRST && !move_first(ctx, s))
		return false;
	FILL_VIP(s, vip, be, choice);
	set_flags(s, SOCK_VIP_CONNECTED);
	return true;
}

static __always_inline bool remember_tcp(struct bpf_sock_addr *ctx, const struct frontend_key *vip,
					 const struct backend *be, const struct choice *choice)
{
	struct tcp_vip *s = claim_tcp_vip(bpf_get_socket_cookie(ctx));
	struct mptcp_sock *msk;
	struct sock_vip *m;

	if (s) {
		FILL_VIP(s, vip, be, choice);
	} else if (!store_connected(ctx, vip, be, choice)) {
		return false;
	}
	msk = mptcp_of(ctx->sk);
	if (!msk)
		return true;
	m = bpf_sk_storage_get(&sock_vips, msk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!m)
		return false;
	FILL_VIP(m, vip, be, choice);
	set_flags(m, SOCK_VIP_CONNECTED);
	return true;
}

/* Forgets the VIP of a socket that now connects to another address. VIPs of its unconnected sends stay, since it may
 * send to them again. */
static __always_inline void forget_connected(struct bpf_sock_addr *ctx, __u8 proto)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	struct mptcp_sock *msk;

	if (s && s->flags & (SOCK_VIP_SENT | SOCK_VIP_FIRST))
		clear_flags(s, SOCK_VIP_CONNECTED);
	else if (s)
		bpf_sk_storage_delete(&sock_vips, ctx->sk);
	if (proto != IPPROTO_TCP)
		return;
	free_tcp_vip(bpf_get_socket_cookie(ctx));
	msk = mptcp_of(ctx->sk);
	if (msk)
		bpf_sk_storage_delete(&sock_vips, msk);
}

/* Stores the VIP of an unconnected send. A socket's storage is created with its first VIP in it, and that VIP never
 * changes afterwards. Otherwise another thread could read a half-written one. */
static __always_inline bool remember_sent(struct bpf_sock_addr *ctx, struct sock_vip *s, const struct frontend_key *vip,
					  const struct backend *be, const struct choice *choice)
{
	bool same_backend;

	if (!s) {
		struct sock_vip first = { .flags = SOCK_VIP_FIRST };

		FILL_VIP(&first, vip, be, choice);
		s = bpf_sk_storage_get(&sock_vips, ctx->sk, &first, BPF_SK_STORAGE_GET_F_CREATE);
		if (!s)
			return false;
	}
	same_backend = s->flags & SOCK_VIP_FIRST && same_addr(s->backend, be->addr) && s->backend_port == be->port;
	if (same_backend && same_addr(s->vip, vip->addr) && s->vip_port == vip->port)
		return true;
	if (!remember_pair(bpf_get_socket_cookie(ctx), vip->addr, vip->port, be->addr, be->port))
		return false;
	if (!(s->flags & SOCK_VIP_SENT))
		set_flags(s, SOCK_VIP_SENT);
	if (same_backend)
		clear_flags(s, SOCK_VIP_FIRST); /* replies show the later VIP */
	return true;
}

static __always_inline struct frontend_key frontend_of(const struct sock_name *name, __u8 proto)
{
	struct frontend_key key = { .port = name->port, .proto = proto };

	__builtin_memcpy(key.addr, name->addr, sizeof(key.addr));
	return key;
}

static __always_inline void rewrite_to_backend(struct sock_name *name, const struct backend *be)
{
	__builtin_memcpy(name->addr, be->addr, sizeof(name->addr));
	name->port = be->port;
}

/* Replaces the VIP that a UDP socket is connected to by its backend. No hook runs when a socket is disconnected, but
 * its state shows it. */
static __always_inline bool rewrite_connected(struct bpf_sock_addr *ctx, const struct sock_vip *s,
					      struct sock_name *name)
{
	if (!(s->flags & SOCK_VIP_CONNECTED) || ctx->sk->state != BPF_TCP_ESTABLISHED)
		return false;
	if (!same_name(name, s->vip, s->vip_port))
		return false;
	__builtin_memcpy(name->addr, s->backend, sizeof(name->addr));
	name->port = s->backend_port;
	return true;
}

/* Rewrites the address that a socket connects to. */
static __always_inline enum verdict translate_connect(struct bpf_sock_addr *ctx, struct sock_name *name)
{
	__u8 proto = read_proto(ctx);
	struct frontend_key vip = frontend_of(name, proto);
	struct client client;
	struct choice choice;
	struct frontend *fe;
	struct backend *be;

	if (!proto)
		return PASS;
	fe = find_frontend(&vip, &choice);
	if (!fe) {
		if (choice.reason != DROP_REASON_NONE && !(proto == IPPROTO_UDP && vip.port == 0))
			return refuse(ctx, &vip, &choice);
		forget_connected(ctx, proto);
		return PASS;
	}
	/* The hash is random: a connecting socket has no source port yet that would distinguish it. */
	identify_client(ctx, fe, bpf_get_prandom_u32(), &client);
	be = choose_backend(&vip, fe, &client, &choice);
	if (!be)
		return refuse(ctx, &vip, &choice);
	if (proto == IPPROTO_TCP) {
		remember_tcp(ctx, &vip, be, &choice); /* on failure getpeername merely returns the backend */
	} else if (!store_connected(ctx, &vip, be, &choice)) {
		choice.reason = DROP_REASON_NO_MEMORY; /* without it the client may drop replies */
		return refuse(ctx, &vip, &choice);
	}
	emit_event(ctx, EVENT_CHOSEN, &vip, be, &choice);
	rewrite_to_backend(name, be);
	return REWRITE;
}

/* Rewrites the destination of one datagram. These hooks only fire for UDP. */
static __always_inline enum verdict translate_send(struct bpf_sock_addr *ctx, struct sock_name *name)
{
	struct frontend_key vip = frontend_of(name, IPPROTO_UDP);
	struct client client;
	struct choice choice;
	struct frontend *fe;
	struct backend *be;
	struct sock_vip *s;

	if (read_proto(ctx) != IPPROTO_UDP)
		return PASS;
	/* A connected socket only receives from its own backend, so it must keep that one. */
	s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	if (s && rewrite_connected(ctx, s, name))
		return REWRITE;
	fe = find_frontend(&vip, &choice);
	if (!fe)
		return choice.reason == DROP_REASON_NONE ? PASS : refuse(ctx, &vip, &choice);
	identify_client(ctx, fe, hash_socket(bpf_get_socket_cookie(ctx), fe->id), &client);
	be = choose_backend(&vip, fe, &client, &choice);
	if (!be)
		return refuse(ctx, &vip, &choice);
	if (!remember_sent(ctx, s, &vip, be, &choice)) {
		choice.reason = DROP_REASON_NO_MEMORY;
		return refuse(ctx, &vip, &choice);
	}
	emit_event(ctx, EVENT_CHOSEN, &vip, be, &choice);
	rewrite_to_backend(name, be);
	return REWRITE;
}

/* Replaces the backend in s by its VIP, if the flag is set. */
static __always_inline bool restore_stored(const struct sock_vip *s, __u32 flag, struct sock_name *name)
{
	if (!(s->flags & flag) || !same_name(name, s->backend, s->backend_port))
		return false;
	__builtin_memcpy(name->addr, s->vip, sizeof(name->addr));
	name->port = s->vip_port;
	return true;
}

/* Replaces the backend of an unconnected send by its VIP. If two VIPs of one socket led to one backend, the later one
 * is shown: the datagram does not say which it was. */
static __always_inline bool restore_sent(struct bpf_sock_addr *ctx, const struct sock_vip *s, struct sock_name *name)
{
	struct udp_vip_key key = { .port = name->port };
	struct udp_vip *vip;

	if (restore_stored(s, SOCK_VIP_FIRST, name))
		return true;
	if (!(s->flags & SOCK_VIP_SENT))
		return false;
	key.cookie = bpf_get_socket_cookie(ctx);
	__builtin_memcpy(key.addr, name->addr, sizeof(key.addr));
	vip = bpf_map_lookup_elem(&udp_vips, &key);
	if (!vip)
		return false;
	__builtin_memcpy(name->addr, vip->addr, sizeof(name->addr));
	name->port = vip->port;
	return true;
}

/* Replaces the sender of a datagram by the VIP. The socket may have been disconnected meanwhile. */
static __always_inline bool restore_sender(struct bpf_sock_addr *ctx, const struct sock_vip *s, struct sock_name *name)
{
	if (ctx->sk->state == BPF_TCP_ESTABLISHED && restore_stored(s, SOCK_VIP_CONNECTED, name))
		return true;
	return restore_sent(ctx, s, name);
}

/* Replaces the backend that a socket is connected to by the VIP. */
static __always_inline bool restore_peer(struct bpf_sock_addr *ctx, struct sock_name *name)
{
	struct tcp_vip *t = find_tcp_vip(bpf_get_socket_cookie(ctx));
	struct sock_vip *s;

	if (t && same_name(name, t->backend, t->backend_port)) {
		__builtin_memcpy(name->addr, t->vip, sizeof(name->addr));
		name->port = t->vip_port;
		return true;
	}
	s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	return s && restore_stored(s, SOCK_VIP_CONNECTED, name);
}

static __always_inline int apply4(struct bpf_sock_addr *ctx, const struct sock_name *name, enum verdict verdict)
{
	switch (verdict) {
	case DENY:
		return REFUSE;
	case REWRITE:
		write_name4(ctx, name);
		return PROCEED;
	default:
		return PROCEED;
	}
}

static __always_inline int apply6(struct bpf_sock_addr *ctx, const struct sock_name *name, enum verdict verdict)
{
	switch (verdict) {
	case DENY:
		return REFUSE;
	case REWRITE:
		write_name6(ctx, name);
		return PROCEED;
	default:
		return PROCEED;
	}
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name4(ctx, &name);
	return apply4(ctx, &name, translate_connect(ctx, &name));
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name6(ctx, &name);
	return apply6(ctx, &name, translate_connect(ctx, &name));
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name4(ctx, &name);
	return apply4(ctx, &name, translate_send(ctx, &name));
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name6(ctx, &name);
	return apply6(ctx, &name, translate_send(ctx, &name));
}

/* The hooks below fire for every UDP receive and every getpeername of the node. They return early for a socket that
 * never used a VIP. The kernel only allows them to return PROCEED. */

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	struct sock_name name;

	if (!s)
		return PROCEED;
	read_name4(ctx, &name);
	if (restore_sender(ctx, s, &name))
		write_name4(ctx, &name);
	return PROCEED;
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	struct sock_name name;

	if (!s)
		return PROCEED;
	read_name6(ctx, &name);
	if (restore_sender(ctx, s, &name))
		write_name6(ctx, &name);
	return PROCEED;
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name4(ctx, &name);
	if (restore_peer(ctx, &name))
		write_name4(ctx, &name);
	return PROCEED;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name6(ctx, &name);
	if (restore_peer(ctx, &name))
		write_name6(ctx, &name);
	return PROCEED;
}

/* Frees the entry of a socket whose connect failed before its first packet, which no other hook sees. It fires for
 * every socket of the node. */
SEC("cgroup/sock_release")
int release(struct bpf_sock *sk)
{
	if (sk->protocol == IPPROTO_TCP && sk->state == BPF_TCP_CLOSE)
		free_tcp_vip(bpf_get_socket_cookie(sk));
	return PROCEED;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
