/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP errors about packets of a flow. An error quotes the packet as it was where it got lost: an error to a client
 * quotes a packet to the backend, an error to a backend quotes one from the VIP. Both the error's own addresses and the
 * quoted ones are translated, so that a "packet too big" reaches the right socket.
 */
#ifndef ISTHMUS_PACKET_ERROR_H
#define ISTHMUS_PACKET_ERROR_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "flow.h"
#include "net.h"
#include "packet_parse.h"
#include "packet_rewrite.h"

#define ICMP_HEADER 8
#define ICMP_CHECK 2

static __always_inline bool is_tracked(__u8 proto)
{
	return proto == IPPROTO_TCP || proto == IPPROTO_UDP || proto == IPPROTO_SCTP;
}

/* Reads the packet that p, an ICMP error, quotes, and finds its flow in the direction of p. A quote may end after the
 * ports. */
static __noinline struct conn *find_quoted(struct __sk_buff *skb, const struct packet *p, struct packet *quoted)
{
	bool reply = !p->key.reply; /* the quoted packet went the other way */
	struct port_pair ports;
	struct conn *c;

	quoted->l3 = p->l4 + ICMP_HEADER;
	quoted->end = p->end;
	quoted->ipv6 = p->ipv6;
	if (read_network(skb, quoted, reply, true) != DROP_REASON_NONE)
		return NULL;
	if (quoted->ipv6 && is_extension(quoted->key.proto) && skip_extensions(skb, quoted) != DROP_REASON_NONE)
		return NULL;
	if (!is_tracked(quoted->key.proto) || quoted->part == PART_LATER || quoted->l4 + 8 > quoted->end)
		return NULL;
	if (bpf_skb_load_bytes(skb, quoted->l4, &ports, sizeof(ports)))
		return NULL;
	take_ports(quoted, &ports, reply);
	quoted->key.reply = p->key.reply;
	c = find_entry(&quoted->key);
	return c && is_alive(quoted->key.proto, c, now_ns()) ? c : NULL;
}

/* Updates the checksum of a quoted UDP header and returns how that changes the sum. The checksums of TCP and SCTP need
 * not be quoted, and no receiver verifies them. */
static __noinline __u32 rewrite_quoted_udp(struct __sk_buff *skb, const struct packet *quoted, __u64 difference)
{
	__u16 old, new;

	if (quoted->key.proto != IPPROTO_UDP || bpf_skb_load_bytes(skb, quoted->l4 + 6, &old, sizeof(old)) || old == 0)
		return 0;
	new = replace_in_check(old, difference);
	if (new == 0)
		new = 0xffff;
	bpf_skb_store_bytes(skb, quoted->l4 + 6, &new, sizeof(new), 0);
	return fold_word(replaced(old, new));
}

/* Replaces the server's address in a quoted IP header, and returns how that changes the sum. */
static __noinline __u32 rewrite_quoted_addr(struct __sk_buff *skb, const struct packet *quoted, const struct conn *c,
					    __u32 difference)
{
	bool source = !quoted->key.reply; /* the quoted packet came from the server */
	__u16 check, right;

	if (c->flags & CONN_SELF) { /* the quote was from the VIP to the client, and becomes the reverse */
		write_addrs(skb, quoted, quoted->key.client, quoted->key.server);
		return 0;
	}
	if (quoted->ipv6) {
		bpf_skb_store_bytes(skb, quoted->l3 + (source ? 8 : 24), c->addr, 16, 0);
		return difference;
	}
	bpf_skb_store_bytes(skb, quoted->l3 + (source ? 12 : 16), c->addr + 12, 4, 0);
	__builtin_memcpy(&check, (const __u8 *)&quoted->hop_word + 2, sizeof(check));
	right = replace_in_check(check, difference);
	bpf_skb_store_bytes(skb, quoted->l3 + 10, &right, sizeof(right), 0);
	return fold_word((__u64)difference + replaced(check, right));
}

/* Translates the quoted packet and returns how that changes the sum. */
static __noinline __u32 rewrite_quoted(struct __sk_buff *skb, const struct packet *quoted, const struct conn *c)
{
	bool source = !quoted->key.reply;
	struct port_pair old = pair_ports(quoted->key.client_port, quoted->key.server_port, source);
	struct port_pair new = pair_ports(c->client_port, c->server_port, source);
	__u32 addr = c->flags & CONN_SELF ? 0 : fold_word(replaced_addr(quoted->key.server, c->addr));
	__u32 ports = fold_word(replaced(port_word(&old), port_word(&new)));
	__u64 sum = (__u64)ports + rewrite_quoted_addr(skb, quoted, c, addr);

	bpf_skb_store_bytes(skb, quoted->l4, &new, sizeof(new), 0);
	sum += rewrite_quoted_udp(skb, quoted, (__u64)ports + addr);
	return fold_word(sum);
}

/* Translates the error's own addresses. Its server is the quoted one, unless a router in between sent the error. */
static __noinline int rewrite_outer(struct __sk_buff *skb, const struct packet *p, const struct packet *quoted,
				    const struct conn *c, bool hop)
{
	struct port_pair none = {};
	__u8 server[16] ADDR_ALIGNED;

	__builtin_memcpy(server, p->key.server, sizeof(server));
	if (same_addr(server, quoted->key.server))
		__builtin_memcpy(server, c->addr, sizeof(server));
	rewrite_to(skb, p, server, &none, p->key.reply, hop);
	return 0;
}

/* Translates p, an ICMP error, if it is about a flow on the fast path, or about any flow if only_fast is false. Returns
 * the flow's entry in the direction of p, NULL if there is none. */
static __noinline struct conn *translate_error(struct __sk_buff *skb, const struct packet *p, bool only_fast)
{
	struct packet quoted = {};
	struct conn *c = find_quoted(skb, p, &quoted);
	bool hop;

	if (!c || (only_fast && !(c->flags & CONN_FAST)))
		return NULL;
	if (c->flags & CONN_SELF) {
		/* Only the client itself can have seen such a packet. The outer addresses stay as they are. */
		if (!same_addr(p->key.client, quoted.key.client))
			return NULL;
		bpf_l4_csum_replace(skb, p->l4 + ICMP_CHECK, 0, rewrite_quoted(skb, &quoted, c), 0);
		return c;
	}
	hop = p->key.reply ? only_fast : c->flags & CONN_FAST;
	bpf_l4_csum_replace(skb, p->l4 + ICMP_CHECK, 0, rewrite_quoted(skb, &quoted, c), 0);
	rewrite_outer(skb, p, &quoted, c, hop && hops_of(p) > 1);
	return c;
}

#endif
