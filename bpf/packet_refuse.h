/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Refusing a packet so that its sender learns of it at once. The packet itself becomes the answer and goes back out of
 * the device it came in by: a reset for TCP, ICMP port unreachable for UDP. For SCTP and everything else it is ICMP
 * protocol unreachable, or what IPv6 has in its place: the only ones an SCTP client believes (RFC 9260 section 10).
 */
#ifndef ISTHMUS_PACKET_REFUSE_H
#define ISTHMUS_PACKET_REFUSE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "choose.h"
#include "conntrack.h"
#include "packet_maps.h"
#include "packet_parse.h"
#include "packet_rewrite.h"

/* Of the packet that is refused, so much is quoted: all headers and what names the flow. */
#define QUOTE_MAX 96

#define REPLY_HOPS 64

#define EINVAL 22

/* So many refusals a CPU answers in a second: a flood of packets must not become two. */
#define ANSWERS_MAX 10000

struct icmp_error {
	__u8 type;
	__u8 code;
	__u16 check;
	__be32 rest;
	__u8 quote[QUOTE_MAX];
};
_Static_assert(sizeof(struct icmp_error) == 8 + QUOTE_MAX, "an ICMP header is 8 bytes");

/* The sum of the pseudo header of an answer: the same whichever way it goes. */
static __always_inline __u64 sum_pseudo(const struct packet *p, __u32 length, __u8 proto)
{
	__u64 sum = (__u64)bpf_htonl(length) + bpf_htonl(proto);
	__u32 words[8];

	if (!p->ipv6)
		return sum + last_word(p->key.client) + last_word(p->key.server);
	__builtin_memcpy(words, p->key.client, 16);
	__builtin_memcpy(words + 4, p->key.server, 16);
	for (int i = 0; i < 8; i++)
		sum += words[i];
	return sum;
}

static __always_inline bool turn_link_header(struct __sk_buff *skb)
{
	__u8 macs[12], turned[12];

	if (LINK_HEADER < sizeof(macs))
		return true;
	if (bpf_skb_load_bytes(skb, 0, macs, sizeof(macs)))
		return false;
	__builtin_memcpy(turned, macs + 6, 6);
	__builtin_memcpy(turned + 6, macs, 6);
	return bpf_skb_store_bytes(skb, 0, turned, sizeof(turned), 0) == 0;
}

/* Sends a packet back to where it came from, its two addresses exchanged. No checksum sees which of them is first. */
static __noinline int turn_back(struct __sk_buff *skb, const struct packet *p)
{
	write_addrs(skb, p, p->key.server, p->key.client);
	return turn_link_header(skb) ? bpf_redirect(skb->ifindex, 0) : TC_ACT_SHOT;
}

static __always_inline __u32 answer_offset(const struct packet *p)
{
	return p->l3 + (p->ipv6 ? sizeof(struct ipv6_header) : sizeof(struct ipv4_header));
}

/* Reports whether the device is still to compute the packet's checksum (CHECKSUM_PARTIAL), as it then will of an answer
 * made of it. Only the kernel knows, and shows it by not letting the packet be cut before that checksum. Else it is cut
 * there. */
static __always_inline bool is_unsummed(struct __sk_buff *skb, const struct packet *p)
{
	return p->check && bpf_skb_change_tail(skb, p->l4 + p->check, 0) == -EINVAL;
}

/* Cuts or grows the packet to an answer of length bytes behind the IP header, and writes the headers before them. */
static __always_inline bool begin_answer(struct __sk_buff *skb, const struct packet *p, __u32 length, __u8 proto)
{
	__u32 header = p->ipv6 ? sizeof(struct ipv6_header) : sizeof(struct ipv4_header);

	if (bpf_skb_change_tail(skb, p->l3 + header + length, 0) || !turn_link_header(skb))
		return false;
	if (p->ipv6) {
		struct ipv6_header h = {
			.version_class_flow = bpf_htonl(6U << 28),
			.payload = bpf_htons(length),
			.next = proto,
			.hops = REPLY_HOPS,
		};

		__builtin_memcpy(h.source, p->key.server, sizeof(h.source));
		__builtin_memcpy(h.destination, p->key.client, sizeof(h.destination));
		return bpf_skb_store_bytes(skb, p->l3, &h, sizeof(h), 0) == 0;
	} else {
		struct ipv4_header h = {
			.version_ihl = 0x45,
			.total = bpf_htons(header + length),
			.fragment = bpf_htons(0x4000), /* don't: it has no id */
			.hops = REPLY_HOPS,
			.proto = proto,
			.source = last_word(p->key.server),
			.destination = last_word(p->key.client),
		};

		h.check = ~fold((__u32)bpf_csum_diff(NULL, 0, (void *)&h, sizeof(h), 0));
		return bpf_skb_store_bytes(skb, p->l3, &h, sizeof(h), 0) == 0;
	}
}

/* Sends an answer whose checksums are right. What a device is to compute takes the place of the old packet's checksum,
 * and what stands there before takes part: the sum of the answer's pseudo header makes it right again, or zero where
 * the place is none of a checksum. It does so behind the old packet's headers: where these were longer than the
 * answer's, only who lets the checksum be, as a pod's veth does, gets a right one. */
static __always_inline int send_answer(struct __sk_buff *skb, const struct packet *p, bool unsummed, __u64 pseudo)
{
	__u16 sum = fold(pseudo);

	if (unsummed && answer_offset(p) == p->l4 && bpf_skb_store_bytes(skb, p->l4 + p->check, &sum, sizeof(sum), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(skb->ifindex, 0);
}

/* Makes the packet a reset of its connection (RFC 9293 section 3.10.7.1). A reset is never answered by one. */
static __noinline int answer_reset(struct __sk_buff *skb, const struct packet *p)
{
	struct tcp_header h, r = { .offset = 5 << 4, .flags = TCP_RST };
	bool unsummed;
	__u64 pseudo;
	__u32 length;

	if (p->kind & TCP_RST || bpf_skb_load_bytes(skb, p->l4, &h, sizeof(h)))
		return TC_ACT_SHOT;
	r.ports.source = h.ports.destination;
	r.ports.destination = h.ports.source;
	if (h.flags & TCP_ACK) {
		r.seq = h.ack;
	} else {
		length = p->end - p->l4 - (h.offset >> 4) * 4;
		length += (h.flags & TCP_SYN ? 1 : 0) + (h.flags & TCP_FIN ? 1 : 0);
		r.ack = bpf_htonl(bpf_ntohl(h.seq) + length);
		r.flags |= TCP_ACK;
	}
	pseudo = sum_pseudo(p, sizeof(r), IPPROTO_TCP);
	r.check = ~fold(pseudo + (__u32)bpf_csum_diff(NULL, 0, (void *)&r, sizeof(r), 0));
	unsummed = is_unsummed(skb, p);
	if (!begin_answer(skb, p, sizeof(r), IPPROTO_TCP))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, answer_offset(p), &r, sizeof(r), 0))
		return TC_ACT_SHOT;
	return send_answer(skb, p, unsummed, pseudo);
}

/* Which ICMP message says it. */
static __always_inline void explain(const struct packet *p, struct icmp_error *e)
{
	if (!p->ipv6) {
		e->type = 3;				       /* RFC 792: destination unreachable, */
		e->code = p->key.proto == IPPROTO_UDP ? 3 : 2; /* its port or protocol */
	} else if (p->key.proto == IPPROTO_UDP || p->key.proto == IPPROTO_ICMPV6) {
		e->type = 1;				       /* RFC 4443 section 3.1: destination unreachable, */
		e->code = p->key.proto == IPPROTO_UDP ? 4 : 1; /* its port, or by decision of an administrator */
	} else {
		e->type = 4; /* section 3.4: a next header that is not known, here: */
		e->code = 1;
		e->rest = bpf_htonl(p->next);
	}
}

/* Makes the packet an ICMP error about itself. */
static __noinline int answer_icmp(struct __sk_buff *skb, const struct packet *p)
{
	__u8 proto = p->ipv6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	__u32 length = p->end - p->l3;
	struct icmp_error e = {};
	__u64 pseudo = 0;
	bool unsummed;

	if (length > QUOTE_MAX)
		length = QUOTE_MAX;
	barrier_var(length); /* clang would merge the two limits into one the verifier cannot follow */
	if (length < sizeof(struct ipv4_header) || bpf_skb_load_bytes(skb, p->l3, e.quote, length))
		return TC_ACT_SHOT;
	explain(p, &e);
	/* All of it may be summed: what is not quoted is zero. */
	if (p->ipv6)
		pseudo = sum_pseudo(p, 8 + length, proto);
	e.check = ~fold(pseudo + (__u32)bpf_csum_diff(NULL, 0, (void *)&e, sizeof(e), 0));
	unsummed = is_unsummed(skb, p);
	if (!begin_answer(skb, p, 8 + length, proto))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, answer_offset(p), &e, 8 + length, 0))
		return TC_ACT_SHOT;
	return send_answer(skb, p, unsummed, pseudo);
}

/* Tells whoever watches of a client that got be, or was refused. */
static __noinline int tell(const struct conn_key *client, const struct backend *be, const struct choice *choice)
{
	enum event_kind kind = be ? EVENT_CHOSEN : EVENT_REFUSED;
	struct frontend_key vip = { .port = client->server_port, .proto = client->proto };
	struct event *e;

	if (!is_observed(kind))
		return 0;
	__builtin_memcpy(vip.addr, client->server, sizeof(vip.addr));
	e = begin_event(kind, PATH_PACKET, &vip, be, choice);
	if (!e)
		return 0;
	__builtin_memcpy(e->client, client->client, sizeof(e->client));
	e->client_port = client->client_port;
	bpf_ringbuf_submit(e, 0);
	return 0;
}

/* Takes one of the answers that this CPU has for this second. Returns whether there was one. */
static __always_inline bool may_answer(void)
{
	__u32 zero = 0;
	struct answers *a = bpf_map_lookup_elem(&answers, &zero);
	__u64 now = now_ns();

	if (!a)
		return false;
	if (since(a->since, now) >= NS_PER_S) {
		a->since = now;
		a->given = 0;
	}
	return a->given++ < ANSWERS_MAX;
}

/* Counts the refusal of a packet, and answers it where that is right: never an ICMP error, nothing but a first
 * fragment (RFC 1122 section 3.2.2), and nothing whose headers make no sense. */
__noinline int refuse(struct __sk_buff *skb, const struct packet *p, __u32 service, enum drop_reason reason)
{
	struct choice choice = { .service = service, .reason = reason };

	if (!p)
		return TC_ACT_SHOT;

	count_refusal(service, reason);
	tell(&p->key, NULL, &choice);
	if (reason == DROP_REASON_MALFORMED || p->part == PART_LATER)
		return TC_ACT_SHOT;
	if (is_icmp(p) && is_error(p))
		return TC_ACT_SHOT;
	if (!may_answer()) {
		count_refusal(service, DROP_REASON_UNANSWERED);
		return TC_ACT_SHOT;
	}
	return p->key.proto == IPPROTO_TCP ? answer_reset(skb, p) : answer_icmp(skb, p);
}

#endif
