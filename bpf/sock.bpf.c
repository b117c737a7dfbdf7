//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The socket path: a connect or a send to a VIP becomes one to a backend before the kernel looks for a
 * route, so no packet ever carries the VIP and none costs anything more. What the application asked for
 * is remembered with the socket, and getpeername and recvfrom keep saying it.
 *
 *   connect4/6      VIP -> backend, remembered in sock_vips
 *   sendmsg4/6      VIP -> backend for unconnected UDP, remembered in udp_vips
 *   recvmsg4/6      backend -> VIP in the sender's address of a UDP datagram
 *   getpeername4/6  backend -> VIP
 *
 * The 6 hooks also see IPv4-mapped addresses of dual-stack sockets; they need nothing special, since an
 * IPv4 address is stored mapped anyway.
 *
 * Known limit: getpeername of an MPTCP socket says the backend. What connect remembers belongs to its
 * TCP subflow, and the helper that leads from one to the other does not load on kernels without MPTCP.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "addr.h"
#include "maps.h"

#define ENOBUFS 105
#define ECONNREFUSED 111

/* What a hook returns. */
#define REFUSE 0
#define PROCEED 1

/* Counts reason against a service and makes the system call fail at once instead of timing out. Its own function,
 * not inlined, so that enum drop_reason stays in the BTF, from which Go has its constants. */
static __noinline int refuse(__u32 service, enum drop_reason reason)
{
	struct refusal_key key = { .service = service, .reason = reason };
	__u64 *count = bpf_map_lookup_elem(&refusals, &key);
	__u64 one = 1;

	if (count)
		__sync_fetch_and_add(count, 1);
	else
		bpf_map_update_elem(&refusals, &key, &one, BPF_NOEXIST);
	bpf_set_retval(reason == DROP_REASON_NO_MEMORY ? -ENOBUFS : -ECONNREFUSED);
	return REFUSE;
}

/* Spreads sockets over slots, and one socket differently over the slots of different frontends. */
static __always_inline __u32 hash_socket(__u64 cookie, __u32 frontend_id)
{
	__u64 x = (cookie ^ ((__u64)frontend_id << 32)) * 0x9e3779b97f4a7c15ULL;

	x ^= x >> 29;
	x *= 0xbf58476d1ce4e5b9ULL;
	return x >> 32;
}

/* Picks a backend of vip: by the socket when sticky, else at random. Returns NULL with *reason NONE when
 * there is no such frontend, NULL with another reason when the client must be refused.
 *
 * The agent may change the maps in between: a slot or backend that is gone is picked once more from the
 * frontend as it is then. */
static __always_inline struct backend *select_backend(struct bpf_sock_addr *ctx, const struct frontend_key *vip,
						      bool sticky, enum drop_reason *reason)
{
	*reason = DROP_REASON_NONE;
	for (int attempt = 0; attempt < 2; attempt++) {
		struct frontend *fe = bpf_map_lookup_elem(&frontends, vip);
		struct slot_key key = {};
		struct backend *be;
		__u32 *id;

		if (!fe)
			return NULL;
		if (fe->count == 0) {
			*reason = DROP_REASON_NO_BACKEND;
			return NULL;
		}
		key.frontend_id = fe->id;
		key.slot =
			(sticky ? hash_socket(bpf_get_socket_cookie(ctx), fe->id) : bpf_get_prandom_u32()) % fe->count;
		id = bpf_map_lookup_elem(&slots, &key);
		be = id ? bpf_map_lookup_elem(&backends, id) : NULL;
		if (be)
			return be;
		*reason = DROP_REASON_BACKEND_GONE;
	}
	return NULL;
}

static __always_inline bool remember_connected(struct bpf_sock_addr *ctx, const struct sock_name *vip,
					       const struct backend *be)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (!s)
		return false;
	__builtin_memcpy(s->vip, vip->addr, sizeof(s->vip));
	__builtin_memcpy(s->backend, be->addr, sizeof(s->backend));
	s->vip_port = vip->port;
	s->backend_port = be->port;
	s->flags |= SOCK_VIP_CONNECTED;
	return true;
}

static __always_inline bool remember_sent(struct bpf_sock_addr *ctx, const struct sock_name *vip,
					  const struct backend *be)
{
	struct udp_vip_key key = { .cookie = bpf_get_socket_cookie(ctx), .port = be->port };
	struct udp_vip value = { .port = vip->port };
	struct udp_vip *known;
	struct sock_vip *s;

	__builtin_memcpy(key.addr, be->addr, sizeof(key.addr));
	known = bpf_map_lookup_elem(&udp_vips, &key);
	if (known && same_name(vip, known->addr, known->port))
		return true;
	s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!s)
		return false;
	s->flags |= SOCK_VIP_SENT;
	__builtin_memcpy(value.addr, vip->addr, sizeof(value.addr));
	return bpf_map_update_elem(&udp_vips, &key, &value, BPF_ANY) == 0;
}

/* A socket that connects elsewhere has left the VIP it was connected to. What it sent to other VIPs
 * unconnected stays known: it may do so again. */
static __always_inline void forget_connected(struct bpf_sock_addr *ctx)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);

	if (!s)
		return;
	if (s->flags & SOCK_VIP_SENT)
		s->flags = SOCK_VIP_SENT;
	else
		bpf_sk_storage_delete(&sock_vips, ctx->sk);
}

static __always_inline struct frontend_key frontend_of(const struct sock_name *name, __u8 proto)
{
	struct frontend_key key = { .port = name->port, .proto = proto };

	__builtin_memcpy(key.addr, name->addr, sizeof(key.addr));
	return key;
}

static __always_inline void become_backend(struct sock_name *name, const struct backend *be)
{
	__builtin_memcpy(name->addr, be->addr, sizeof(name->addr));
	name->port = be->port;
}

/* Puts the backend in the place of the VIP a UDP socket is connected to. It may have been disconnected
 * since, of which no hook tells: its state does. */
static __always_inline bool follow_connected(struct bpf_sock_addr *ctx, struct sock_name *name)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);

	if (!s || ctx->sk->state != BPF_TCP_ESTABLISHED)
		return false;
	if (!(s->flags & SOCK_VIP_CONNECTED) || !same_name(name, s->vip, s->vip_port))
		return false;
	__builtin_memcpy(name->addr, s->backend, sizeof(name->addr));
	name->port = s->backend_port;
	return true;
}

/* Rewrites the name a socket connects to. *rewritten says whether there was anything to rewrite. */
static __always_inline int translate_connect(struct bpf_sock_addr *ctx, struct sock_name *name, bool *rewritten)
{
	__u8 proto = read_proto(ctx);
	struct frontend_key key = frontend_of(name, proto);
	enum drop_reason reason;
	struct backend *be;

	if (!proto)
		return PROCEED;
	be = select_backend(ctx, &key, false, &reason);
	if (reason != DROP_REASON_NONE && !be)
		return refuse(0, reason);
	if (!be) {
		forget_connected(ctx);
		return PROCEED;
	}
	/* Without it TCP only shows the backend in getpeername; a UDP client may drop replies. */
	if (!remember_connected(ctx, name, be) && proto == IPPROTO_UDP)
		return refuse(0, DROP_REASON_NO_MEMORY);
	become_backend(name, be);
	*rewritten = true;
	return PROCEED;
}

/* The same for one datagram that names its destination: the hooks fire for UDP alone. */
static __always_inline int translate_send(struct bpf_sock_addr *ctx, struct sock_name *name, bool *rewritten)
{
	struct frontend_key key = frontend_of(name, IPPROTO_UDP);
	enum drop_reason reason;
	struct backend *be;

	if (read_proto(ctx) != IPPROTO_UDP)
		return PROCEED;
	/* A connected socket hears its own backend alone, so no other will do. */
	if (follow_connected(ctx, name)) {
		*rewritten = true;
		return PROCEED;
	}
	be = select_backend(ctx, &key, true, &reason);
	if (reason != DROP_REASON_NONE && !be)
		return refuse(0, reason);
	if (!be)
		return PROCEED;
	if (!remember_sent(ctx, name, be))
		return refuse(0, DROP_REASON_NO_MEMORY);
	become_backend(name, be);
	*rewritten = true;
	return PROCEED;
}

/* Puts the VIP in the place of the backend a socket is connected to. */
static __always_inline bool restore_connected(const struct sock_vip *s, struct sock_name *name)
{
	if (!(s->flags & SOCK_VIP_CONNECTED) || !same_name(name, s->backend, s->backend_port))
		return false;
	__builtin_memcpy(name->addr, s->vip, sizeof(name->addr));
	name->port = s->vip_port;
	return true;
}

/* Puts the VIP in the place of a backend that an unconnected send went to. When two VIPs of one socket
 * led to one backend, the later one is shown: the datagram itself does not say. */
static __always_inline bool restore_sent(struct bpf_sock_addr *ctx, const struct sock_vip *s, struct sock_name *name)
{
	struct udp_vip_key key = { .port = name->port };
	struct udp_vip *vip;

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

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	bool rewritten = false;
	struct sock_name name;
	int verdict;

	read_name4(ctx, &name);
	verdict = translate_connect(ctx, &name, &rewritten);
	if (rewritten)
		write_name4(ctx, &name);
	return verdict;
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	bool rewritten = false;
	struct sock_name name;
	int verdict;

	read_name6(ctx, &name);
	verdict = translate_connect(ctx, &name, &rewritten);
	if (rewritten)
		write_name6(ctx, &name);
	return verdict;
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	bool rewritten = false;
	struct sock_name name;
	int verdict;

	read_name4(ctx, &name);
	verdict = translate_send(ctx, &name, &rewritten);
	if (rewritten)
		write_name4(ctx, &name);
	return verdict;
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	bool rewritten = false;
	struct sock_name name;
	int verdict;

	read_name6(ctx, &name);
	verdict = translate_send(ctx, &name, &rewritten);
	if (rewritten)
		write_name6(ctx, &name);
	return verdict;
}

/* The hooks below fire for every UDP receive and every getpeername of the node: a socket that never met
 * a VIP has no storage and leaves at once. The kernel lets them return PROCEED only. */

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	struct sock_name name;

	if (!s)
		return PROCEED;
	read_name4(ctx, &name);
	if (restore_connected(s, &name) || restore_sent(ctx, s, &name))
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
	if (restore_connected(s, &name) || restore_sent(ctx, s, &name))
		write_name6(ctx, &name);
	return PROCEED;
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	struct sock_name name;

	if (!s)
		return PROCEED;
	read_name4(ctx, &name);
	if (restore_connected(s, &name))
		write_name4(ctx, &name);
	return PROCEED;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	struct sock_name name;

	if (!s)
		return PROCEED;
	read_name6(ctx, &name);
	if (restore_connected(s, &name))
		write_name6(ctx, &name);
	return PROCEED;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
