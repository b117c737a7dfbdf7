//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The socket path: a connect or a send to a VIP becomes one to a backend before the kernel looks for a
 * route, so no packet ever carries the VIP and none costs anything more. What the application asked for
 * is remembered with the socket, and getpeername and recvfrom keep saying it.
 *
 *   connect4/6      VIP -> backend, remembered in tcp_vips or sock_vips
 *   sendmsg4/6      VIP -> backend for unconnected UDP: a socket's first VIP in sock_vips, others in udp_vips
 *   recvmsg4/6      backend -> VIP in the sender's address of a UDP datagram
 *   getpeername4/6  backend -> VIP
 *   release         forgets what a TCP socket remembers that never connected
 *
 * The 6 hooks also see IPv4-mapped addresses of dual-stack sockets; they need nothing special, since an
 * IPv4 address is stored mapped anyway.
 *
 * A UDP connect to port 0 sends nothing: resolvers ask so for the source address of a destination (RFC 6724
 * section 6). It is left alone also where anything else would be refused.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "addr.h"
#include "choose.h"
#include "maps.h"
#include "tcp_vips.h"

/* Of the kernel's own only the name matters: whether there is such a type says whether there is MPTCP. */
struct mptcp_sock {
	char unread;
} __attribute__((preserve_access_index));

#define ENOBUFS 105
#define ECONNREFUSED 111

/* What a hook returns. */
#define REFUSE 0
#define PROCEED 1

/* What is to become of a name. */
enum verdict {
	LEAVE,	/* it stays as it is */
	BECOME, /* it was rewritten and must be written back */
	DENY,	/* the system call must fail */
};

/* Adds to an event who asks. Not inlined, so that struct event stays in the BTF, from which Go has it. */
static __noinline int describe_client(struct bpf_sock_addr *ctx, struct event *e)
{
	e->netns = bpf_get_netns_cookie(ctx);
	e->pid = bpf_get_current_pid_tgid() >> 32;
	return bpf_get_current_comm(e->comm, sizeof(e->comm));
}

/* Tells whoever watches. */
static __noinline int announce(struct bpf_sock_addr *ctx, enum event_kind kind, const struct frontend_key *vip,
			       const struct backend *be, const struct choice *choice)
{
	struct event *e;

	if (!is_observed(kind))
		return 0;
	e = begin_event(kind, PATH_SOCKET, vip, be, choice);
	if (!e)
		return 0;
	describe_client(ctx, e);
	bpf_ringbuf_submit(e, 0);
	return 0;
}

/* Counts and tells the reason, and makes the system call fail at once instead of timing out. */
static __noinline enum verdict refuse(struct bpf_sock_addr *ctx, const struct frontend_key *vip,
				      const struct choice *choice)
{
	count_refusal(choice->service, choice->reason);
	announce(ctx, EVENT_REFUSED, vip, NULL, choice);
	bpf_set_retval(choice->reason == DROP_REASON_NO_MEMORY ? -ENOBUFS : -ECONNREFUSED);
	return DENY;
}

/* Spreads sockets over slots, and one socket differently over the slots of different frontends. */
static __always_inline __u32 hash_socket(__u64 cookie, __u32 frontend_id)
{
	return hash_u64(cookie ^ ((__u64)frontend_id << 32));
}

/* Says who asks: session affinity knows a network namespace, because the socket has no address yet. */
static __always_inline void identify_client(struct bpf_sock_addr *ctx, const struct frontend *fe, __u32 hash,
					    struct client *client)
{
	__u64 netns = fe->affinity ? bpf_cpu_to_be64(bpf_get_netns_cookie(ctx)) : 0;

	__builtin_memset(client->addr, 0, 8);
	__builtin_memcpy(client->addr + 8, &netns, sizeof(netns));
	client->hash = hash;
}

/* The socket that getpeername will be asked about when sk is the TCP subflow of an MPTCP socket, else NULL. On a
 * kernel without MPTCP the question is false when the program is loaded, and the verifier never sees the call. */
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

/* Notes in udp_vips that datagrams of backend are of vip. An entry made is counted. */
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

/* Moves what the storage holds of an unconnected send to udp_vips, to make room. */
static __always_inline bool move_first(struct bpf_sock_addr *ctx, struct sock_vip *s)
{
	if (!remember_pair(bpf_get_socket_cookie(ctx), s->vip, s->vip_port, s->backend, s->backend_port))
		return false;
	set_flags(s, SOCK_VIP_SENT);
	clear_flags(s, SOCK_VIP_FIRST);
	return true;
}

static __always_inline void fill_vip(struct sock_vip *s, const struct frontend_key *vip, const struct backend *be,
				     const struct choice *choice)
{
	__builtin_memcpy(s->vip, vip->addr, sizeof(s->vip));
	__builtin_memcpy(s->backend, be->addr, sizeof(s->backend));
	s->vip_port = vip->port;
	s->backend_port = be->port;
	s->backend_id = choice->backend_id;
	s->service = choice->service;
	s->cluster = be->cluster;
}

/* Remembers a connection with the socket itself. */
static __always_inline bool store_connected(struct bpf_sock_addr *ctx, const struct frontend_key *vip,
					    const struct backend *be, const struct choice *choice)
{
	struct sock_vip *s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);

	if (!s)
		return false;
	if (s->flags & SOCK_VIP_FIRST && !move_first(ctx, s))
		return false;
	fill_vip(s, vip, be, choice);
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
		__builtin_memcpy(s->vip, vip->addr, sizeof(s->vip));
		__builtin_memcpy(s->backend, be->addr, sizeof(s->backend));
		s->vip_port = vip->port;
		s->backend_port = be->port;
		s->backend_id = choice->backend_id;
		s->service = choice->service;
		s->cluster = be->cluster;
	} else if (!store_connected(ctx, vip, be, choice)) {
		return false;
	}
	msk = mptcp_of(ctx->sk);
	if (!msk)
		return true;
	m = bpf_sk_storage_get(&sock_vips, msk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!m)
		return false;
	fill_vip(m, vip, be, choice);
	set_flags(m, SOCK_VIP_CONNECTED);
	return true;
}

/* A socket that connects elsewhere has left the VIP it was connected to. What it sent to other VIPs
 * unconnected stays known: it may do so again. */
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

/* Remembers an unconnected send. A socket's storage is made with its first VIP in it, so that no other thread sees
 * half of it, and that VIP is not changed afterwards. */
static __always_inline bool remember_sent(struct bpf_sock_addr *ctx, struct sock_vip *s, const struct frontend_key *vip,
					  const struct backend *be, const struct choice *choice)
{
	bool same_backend;

	if (!s) {
		struct sock_vip first = { .flags = SOCK_VIP_FIRST };

		fill_vip(&first, vip, be, choice);
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
		clear_flags(s, SOCK_VIP_FIRST); /* the later VIP is the one to show */
	return true;
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
static __always_inline bool follow_connected(struct bpf_sock_addr *ctx, const struct sock_vip *s,
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

/* Rewrites the name a socket connects to. */
static __always_inline enum verdict translate_connect(struct bpf_sock_addr *ctx, struct sock_name *name)
{
	__u8 proto = read_proto(ctx);
	struct frontend_key vip = frontend_of(name, proto);
	struct client client;
	struct choice choice;
	struct frontend *fe;
	struct backend *be;

	if (!proto)
		return LEAVE;
	fe = find_frontend(&vip, &choice);
	if (!fe) {
		if (choice.reason != DROP_REASON_NONE && !(proto == IPPROTO_UDP && vip.port == 0))
			return refuse(ctx, &vip, &choice);
		forget_connected(ctx, proto);
		return LEAVE;
	}
	/* A connect has no source port yet that could tell it from others. */
	identify_client(ctx, fe, bpf_get_prandom_u32(), &client);
	be = choose_backend(&vip, fe, &client, &choice);
	if (!be)
		return refuse(ctx, &vip, &choice);
	if (proto == IPPROTO_TCP) {
		remember_tcp(ctx, &vip, be, &choice); /* else getpeername merely shows the backend */
	} else if (!store_connected(ctx, &vip, be, &choice)) {
		choice.reason = DROP_REASON_NO_MEMORY; /* the client may drop replies */
		return refuse(ctx, &vip, &choice);
	}
	announce(ctx, EVENT_CHOSEN, &vip, be, &choice);
	become_backend(name, be);
	return BECOME;
}

/* The same for one datagram that names its destination: the hooks fire for UDP alone. */
static __always_inline enum verdict translate_send(struct bpf_sock_addr *ctx, struct sock_name *name)
{
	struct frontend_key vip = frontend_of(name, IPPROTO_UDP);
	struct client client;
	struct choice choice;
	struct frontend *fe;
	struct backend *be;
	struct sock_vip *s;

	if (read_proto(ctx) != IPPROTO_UDP)
		return LEAVE;
	/* A connected socket hears its own backend alone, so no other will do. */
	s = bpf_sk_storage_get(&sock_vips, ctx->sk, NULL, 0);
	if (s && follow_connected(ctx, s, name)) {
		return BECOME;
	}
	fe = find_frontend(&vip, &choice);
	if (!fe)
		return choice.reason == DROP_REASON_NONE ? LEAVE : refuse(ctx, &vip, &choice);
	identify_client(ctx, fe, hash_socket(bpf_get_socket_cookie(ctx), fe->id), &client);
	be = choose_backend(&vip, fe, &client, &choice);
	if (!be)
		return refuse(ctx, &vip, &choice);
	if (!remember_sent(ctx, s, &vip, be, &choice)) {
		choice.reason = DROP_REASON_NO_MEMORY;
		return refuse(ctx, &vip, &choice);
	}
	announce(ctx, EVENT_CHOSEN, &vip, be, &choice);
	become_backend(name, be);
	return BECOME;
}

/* Puts the VIP in the place of the backend that s, whose flag must be set, holds. */
static __always_inline bool restore_stored(const struct sock_vip *s, __u32 flag, struct sock_name *name)
{
	if (!(s->flags & flag) || !same_name(name, s->backend, s->backend_port))
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

/* Puts the VIP in the place of the sender of a datagram. A socket may have been disconnected since. */
static __always_inline bool restore_sender(struct bpf_sock_addr *ctx, const struct sock_vip *s, struct sock_name *name)
{
	if (ctx->sk->state == BPF_TCP_ESTABLISHED && restore_stored(s, SOCK_VIP_CONNECTED, name))
		return true;
	return restore_sent(ctx, s, name);
}

/* Puts the VIP in the place of the backend that a socket is connected to. */
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

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name4(ctx, &name);
	switch (translate_connect(ctx, &name)) {
	case DENY:
		return REFUSE;
	case BECOME:
		write_name4(ctx, &name);
		return PROCEED;
	default:
		return PROCEED;
	}
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name6(ctx, &name);
	switch (translate_connect(ctx, &name)) {
	case DENY:
		return REFUSE;
	case BECOME:
		write_name6(ctx, &name);
		return PROCEED;
	default:
		return PROCEED;
	}
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name4(ctx, &name);
	switch (translate_send(ctx, &name)) {
	case DENY:
		return REFUSE;
	case BECOME:
		write_name4(ctx, &name);
		return PROCEED;
	default:
		return PROCEED;
	}
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	struct sock_name name;

	read_name6(ctx, &name);
	switch (translate_send(ctx, &name)) {
	case DENY:
		return REFUSE;
	case BECOME:
		write_name6(ctx, &name);
		return PROCEED;
	default:
		return PROCEED;
	}
}

/* The hooks below fire for every UDP receive and every getpeername of the node: a socket that never met
 * a VIP leaves at once. The kernel lets them return PROCEED only. */

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

/* A connect may fail before its first packet, of which no other hook tells. Every socket of the node ends here. */
SEC("cgroup/sock_release")
int release(struct bpf_sock *sk)
{
	if (sk->protocol == IPPROTO_TCP && sk->state == BPF_TCP_CLOSE)
		free_tcp_vip(bpf_get_socket_cookie(sk));
	return PROCEED;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
