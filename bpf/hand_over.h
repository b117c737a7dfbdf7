/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Handing a packet over to the gateway that has its connection. Routers may lead it to another one, which knows the
 * connection only some milliseconds after both sides have spoken: not yet at the SYN+ACK, nor at the ACK that follows.
 *
 * If the VIP replaces the client, the answer goes to it, and the slot of its port names the gateway. If the slot's
 * owner does not know it either, the slot may have been another's until a moment ago, and the owner hands it on to the
 * previous owner. No one else hands on what a gateway has handed over, and an owner never back. All states rank
 * gateways alike for a slot, owner before previous owner. So no packet circles, even while gateways have different
 * states.
 *
 * A router may lead all packets of a backend to another gateway than the client's, and that one translates them once it
 * knows the flow. The slot's owner still keeps the flow's state, because it gives the port to another flow after the
 * end. So it gets copies of packets that matter for that: a RST or FIN, and acknowledgements, which tell the window
 * that a client's FIN must lie in. The hop limit of such a copy is 1, so that it goes no further. The owner gets each
 * SYN+ACK itself, since here its port may still belong to an earlier flow.
 *
 * A flow whose client was replaced by a gateway's own address stays with that gateway, its owner. The owner announces
 * it to the others, which hand the client's packets over while they can reach the owner.
 *
 * An answer to the client itself names no gateway, if several frontends have its backend and port. Nor does a client's
 * packet. All get a copy then.
 *
 * The packet stays as it is, apart from its hop limit. Only its link header leads to the other gateway, which must
 * therefore be on one link with this one.
 */
#ifndef ISTHMUS_HAND_OVER_H
#define ISTHMUS_HAND_OVER_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "flow.h"
#include "gateway.h"
#include "gateway_maps.h"
#include "net.h"
#include "packet_error.h"
#include "packet_parse.h"
#include "packet_refuse.h"
#include "route.h"

/* The link to another gateway. */
struct peer_link {
	__u32 ifindex;
	__u8 macs[12]; /* the other gateway's and this one's, as in an Ethernet header */
};

static __always_inline struct gateway_slot *find_slot(__u16 port)
{
	__u32 slot = port / GATEWAY_SLOT_PORTS;

	return bpf_map_lookup_elem(&slots, &slot);
}

enum peer_found {
	PEER_NONE = 0, /* there is no gateway of this number, nor of any higher one */
	PEER_UNREACHABLE = 1,
	PEER_FOUND = 2,
};

/* Finds the link to a gateway at an address. A gateway whose neighbour entry is not resolved is unreachable. The agents
 * of gateways talk to one another, so it is resolved. Returns an enum peer_found. Not static: see skip_extensions. */
__noinline int find_link(struct __sk_buff *skb, const struct gateway_peer *peer, struct peer_link *to)
{
	struct bpf_fib_lookup fib = { .tot_len = ANY_LENGTH, .ifindex = skb->ifindex };
	__u8 there[16] ADDR_ALIGNED, none[16] ADDR_ALIGNED = {};
	bool ipv6;

	if (!peer || !to)
		return PEER_NONE;
	__builtin_memcpy(there, peer->addr, sizeof(there));
	write_mapped(none, last_word(there));
	ipv6 = !same_addr(none, there);
	__builtin_memset(none, 0, sizeof(none));
	set_fib_addrs(&fib, ipv6, none, there);
	if (bpf_fib_lookup(skb, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return PEER_UNREACHABLE;
	/* If the route leads through a router, the lookup has replaced the address by the router's. */
	if (ipv6 ? __builtin_memcmp(fib.ipv6_dst, there, sizeof(there)) : fib.ipv4_dst != last_word(there))
		return PEER_UNREACHABLE;
	to->ifindex = fib.ifindex;
	__builtin_memcpy(to->macs, fib.dmac, 6);
	__builtin_memcpy(to->macs + 6, fib.smac, 6);
	return PEER_FOUND;
}

/* Finds the link to a gateway by its number. */
static __noinline int find_peer(struct __sk_buff *skb, __u32 number, struct peer_link *to)
{
	struct gateway_peer *peer = bpf_map_lookup_elem(&peers, &number), there;

	if (!peer)
		return PEER_NONE;
	there = *peer;
	return find_link(skb, &there, to);
}

/* Returns the number of the gateway that has handed this packet over, 0 for none. */
static __noinline __u32 find_sender(struct __sk_buff *skb)
{
	struct ethernet_header link;
	struct peer_link peer = {};
	int found;

	if (bpf_skb_load_bytes(skb, 0, &link, sizeof(link)))
		return 0;
	for (__u32 number = 1; number <= GATEWAY_PEERS_MAX; number++) {
		found = find_peer(skb, number, &peer);
		if (found == PEER_NONE)
			break;
		if (found == PEER_FOUND && !__builtin_memcmp(peer.macs, link.from, sizeof(link.from)))
			return number;
	}
	return 0;
}

/* Lowers the hop limit. */
static __noinline bool lower_hops(struct __sk_buff *skb, const struct packet *p, __u8 by)
{
	__u8 bytes[4];
	__u16 check;

	__builtin_memcpy(bytes, &p->hop_word, sizeof(bytes));
	if (p->ipv6) {
		bytes[3] -= by;
		return !bpf_skb_store_bytes(skb, p->l3 + 4, bytes, sizeof(bytes), BPF_F_RECOMPUTE_CSUM);
	}
	bytes[0] -= by;
	__builtin_memcpy(&check, bytes + 2, sizeof(check));
	check = replace_in_check(check, bpf_htons(0xffff - (by << 8))); /* minus `by` in the upper half of a word */
	__builtin_memcpy(bytes + 2, &check, sizeof(check));
	/* the header checksum keeps the sum over the packet unchanged */
	return !bpf_skb_store_bytes(skb, p->l3 + 8, bytes, sizeof(bytes), 0);
}

static __always_inline bool can_hand_over(const struct packet *p)
{
	return LINK_HEADER >= sizeof(struct ethernet_header) && !p->tagged && hops_of(p) > 1;
}

static __always_inline void count_handed_over(void)
{
	__u32 zero = 0;
	__u64 *count = bpf_map_lookup_elem(&handed_over, &zero);

	if (count)
		++*count;
}

/* Sends a packet to another gateway. Returns the TC action. */
static __always_inline int redirect_to_peer(struct __sk_buff *skb, const struct packet *p, const struct peer_link *to)
{
	if (p->part == PART_FIRST)
		remember_fragment(p);
	if (!lower_hops(skb, p, 1) || bpf_skb_store_bytes(skb, 0, to->macs, sizeof(to->macs), 0))
		return TC_ACT_SHOT;
	count_handed_over();
	return bpf_redirect(to->ifindex, 0);
}

/* Hands a backend's packet to a VIP over, which belongs to no flow here. Returns TC_ACT_SHOT if no other gateway is to
 * get it. */
__noinline int hand_over(struct __sk_buff *skb, const struct packet *p)
{
	struct peer_link to = {};
	struct gateway_slot *slot;
	__u32 number, sender;

	slot = p ? find_slot(p->key.server_port) : NULL;
	if (!slot || !can_hand_over(p))
		return TC_ACT_SHOT;
	number = slot->owner ?: slot->previous;
	if (!number || find_peer(skb, number, &to) != PEER_FOUND)
		return TC_ACT_SHOT;
	sender = find_sender(skb);
	if (sender == number || (sender && slot->owner))
		return TC_ACT_SHOT;
	return redirect_to_peer(skb, p, &to);
}

/* So many bytes are acknowledged between two acknowledgements that a slot's owner gets, less than any usual window. */
#define ACK_BYTES (16 << 10)

/* Reports whether the owner of a port must get a backend's packet: this gateway's flow of it is over, or the next
 * acknowledgement would lie beyond the window that the owner knows. The entries of a second translation have no window
 * of their own. Their `ack` and `edge` are the number and the window, not scaled, that the owner last got. */
static __always_inline bool is_due_to_owner(const struct conn *c, __u32 ack, __u16 window)
{
	return c->window & WINDOW_SECOND && (c->state == CONN_CLOSED || ack - c->ack >= ACK_BYTES || window > c->edge);
}

static __noinline int set_over(const struct conn_key *key, enum conn_state state, __u64 seen)
{
	struct conn_key k = *key; /* see move_old_entry_of */
	struct conn *c = find_entry(&k);

	if (!c)
		return 0;
	c->state = state;
	c->seen = seen; /* that of a standby lies hours back */
	return 0;
}

/* Returns the key of the first translation of a backend's packet, given that of the second. */
static __always_inline struct conn_key first_key(const struct conn_key *second, const struct conn *c)
{
	struct conn_key k = *second;

	__builtin_memcpy(k.server, c->addr, sizeof(k.server));
	k.server_port = c->server_port;
	k.client_port = c->client_port;
	reverse_key(&k);
	return k;
}

/* Reports whether a SYN+ACK acknowledges a SYN that has passed here in this flow. */
static __noinline bool answers_syn(const struct packet *p, const struct conn *c)
{
	struct conn_key k = first_key(&p->key, c);
	struct conn *first = find_entry(&k), *client;

	if (!first)
		return false;
	k = other_key(&k, first);
	client = find_entry(&k);
	return client && client->window & WINDOW_SYN && client->ack == p->ack;
}

/* Learns a backend's window from a copy that another gateway has sent. An earlier copy may be lost, so that this one
 * lies beyond the window that is known. */
static __noinline int learn_window(const struct packet *p, const struct conn *c)
{
	struct conn_key k = first_key(&p->key, c);
	struct conn *first = find_entry(&k);
	__u32 edge;

	if (!first || !(first->window & WINDOW_KNOWN) || !(p->kind & TCP_ACK) || (__s32)(p->ack - first->ack) < 0)
		return 0;
	edge = p->ack + ((__u32)p->window << (first->window & WINDOW_SCALE));
	first->ack = p->ack;
	if ((__s32)(edge - first->edge) > 0)
		first->edge = edge;
	return 0;
}

/* Ends this gateway's copy of a flow, in all four entries. `key` and `c` are those of the backend's packets. An end of
 * a flow that began here is tracked by its windows instead. */
static __noinline int end_copy(const struct conn_key *key, struct conn *c, enum conn_state state)
{
	struct conn_key k = first_key(key, c), other;
	struct conn *first = find_entry(&k);

	if (!first || (state == CONN_CLOSING && first->window & WINDOW_KNOWN))
		return 0;
	first->state = state;
	first->seen = c->seen;
	other = other_key(&k, first);
	set_over(&other, state, c->seen);
	c->state = state;
	other = other_key(key, c);
	return set_over(&other, state, c->seen);
}

/* Sends the owner of a port a copy of a packet, with hop limit 1. Returns false if the packet itself is damaged. */
static __noinline bool tell_owner(struct __sk_buff *skb, const struct packet *p, __u32 owner)
{
	struct peer_link to = {};
	__u32 word = p->hop_word;
	__u8 macs[12];

	if (!can_hand_over(p) || find_sender(skb) || find_peer(skb, owner, &to) != PEER_FOUND ||
	    bpf_skb_load_bytes(skb, 0, macs, sizeof(macs)))
		return true;
	if (lower_hops(skb, p, hops_of(p) - 1) && !bpf_skb_store_bytes(skb, 0, to.macs, sizeof(to.macs), 0) &&
	    !bpf_clone_redirect(skb, to.ifindex, 0))
		count_handed_over();
	return !bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0) &&
	       !bpf_skb_store_bytes(skb, p->l3 + (p->ipv6 ? 4 : 8), &word, sizeof(word),
				    p->ipv6 ? BPF_F_RECOMPUTE_CSUM : 0);
}

/* Reports whether another gateway has sent this packet by tell_owner. */
static __always_inline bool is_told(struct __sk_buff *skb, const struct packet *p)
{
	return hops_of(p) <= 1 && find_sender(skb);
}

/* These functions return this instead of a TC action if the packet goes on to its flow's other side. */
#define GOES_ON 1001

/* Treats a backend's packet of a known flow, if another gateway has its port: the owner gets a copy, or the packet
 * itself after a SYN+ACK, until it announces the flow. Returns a TC action, or GOES_ON. */
__noinline int share_with_owner(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	struct gateway_slot *slot;
	int verdict;

	if (!p || !c)
		return TC_ACT_SHOT;
	if (p->kind & TCP_ACK) {
		c->ack = p->ack;
		c->edge = p->window;
	}
	slot = find_slot(p->key.server_port);
	if (!slot || !slot->owner)
		return GOES_ON;
	if (p->kind & TCP_SYN && answers_syn(p, c))
		return GOES_ON;
	if (p->kind & TCP_SYN || c->state == CONN_CLOSED) {
		verdict = hand_over(skb, p);
		if (verdict == TC_ACT_SHOT)
			return GOES_ON;
		if (p->kind & TCP_SYN)
			end_copy(&p->key, c, CONN_CLOSED);
		return verdict;
	}
	if (!tell_owner(skb, p, slot->owner))
		return TC_ACT_SHOT;
	if (p->kind & (TCP_FIN | TCP_RST))
		end_copy(&p->key, c, CONN_CLOSING);
	return GOES_ON;
}

/* Reports whether share_with_owner is to treat a packet. */
static __always_inline bool may_matter_to_owner(const struct packet *p, const struct conn *c)
{
	return c->window & WINDOW_SECOND && p->key.proto == IPPROTO_TCP && !p->key.reply && p->part != PART_LATER &&
	       (p->kind & (TCP_SYN | TCP_FIN | TCP_RST) || is_due_to_owner(c, p->ack, p->window));
}

/* An entry of `peer_flows` is valid for so long after it was last seen. */
#define PEER_FLOW_NS (NS_PER_S * 300)

/* Hands a packet over to the owner of a flow. Returns TC_ACT_SHOT if there is none, or it cannot be reached. Such an
 * owner is dead: a client's packet then opens another flow, whose backend resets the connection. */
__noinline int hand_to_owner(struct __sk_buff *skb, const struct packet *p, const struct conn_key *key)
{
	struct gateway_peer_flow *flow;
	struct gateway_peer owner;
	struct peer_link to = {};
	struct conn_key k;
	__u64 now = now_ns();

	if (!p || !key || !can_hand_over(p))
		return TC_ACT_SHOT;
	k = *key;
	flow = bpf_map_lookup_elem(&peer_flows, &k);
	if (!flow || since(flow->seen, now) >= PEER_FLOW_NS)
		return TC_ACT_SHOT;
	owner = flow->owner;
	flow->seen = now;
	if (find_link(skb, &owner, &to) != PEER_FOUND) {
		bpf_map_delete_elem(&peer_flows, &k);
		return TC_ACT_SHOT;
	}
	if (find_sender(skb))
		return TC_ACT_SHOT;
	return redirect_to_peer(skb, p, &to);
}

/* Hands an ICMP error about a packet to a client over to the owner of that packet's flow. Routers choose the gateway of
 * an error by other addresses than that of the flow, and choose the same one each time. Returns as hand_to_owner. */
__noinline int hand_error(struct __sk_buff *skb, const struct packet *p)
{
	struct packet quoted = {};

	if (!p)
		return TC_ACT_SHOT;
	find_quoted(skb, p, &quoted); /* no flow of this gateway, but its key */
	return hand_to_owner(skb, p, &quoted.key);
}

/* Hands a copy of a packet to every other gateway, one of which has its flow. Returns false if there is none,
 * or another gateway has done the same. The copies are limited as replies are. */
__noinline int hand_to_all(struct __sk_buff *skb, const struct packet *p)
{
	struct peer_link to = {};
	bool lowered = false;
	int found;

	if (!p || !can_hand_over(p) || find_sender(skb) || !may_reply())
		return false;
	for (__u32 number = 1; number <= GATEWAY_PEERS_MAX; number++) {
		found = find_peer(skb, number, &to);
		if (found == PEER_NONE)
			break;
		if (found != PEER_FOUND)
			continue;
		if ((!lowered && !lower_hops(skb, p, 1)) || bpf_skb_store_bytes(skb, 0, to.macs, sizeof(to.macs), 0))
			return false;
		lowered = true;
		if (!bpf_clone_redirect(skb, to.ifindex, 0))
			count_handed_over();
	}
	return lowered;
}

#endif
