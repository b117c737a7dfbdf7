/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Refusing a packet so that its sender learns of it at once. The packet itself becomes the reply and leaves by the
 * device it came in by: a reset for TCP, ICMP port unreachable for UDP. For SCTP and everything else it is ICMP
 * protocol unreachable or its IPv6 equivalent, the only errors that an SCTP client accepts (RFC 9260 section 10).
 */
#ifndef ISTHMUS_PACKET_REFUSE_H
#define ISTHMUS_PACKET_REFUSE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "events.h"
#include "flow.h"
#include "flow_maps.h"
#include "net.h"
#include "packet_parse.h"
#include "packet_rewrite.h"

/* Bytes of the refused packet that an ICMP error quotes: all headers and the ports. */
#define QUOTE_MAX 96

#define REPLY_HOPS 64

#define EINVAL 22

/* Replies that a CPU sends in a second: a flood of packets must not cause a second one. */
#define REPLIES_MAX 10000

#define ICMP_ERROR(type, code) ((type) << 8 | (code))

struct icmp_error {
	__u8 type;
	__u8 code;
	__u16 check;
	__be32 rest;
	__u8 quote[QUOTE_MAX];
};
_Static_assert(sizeof(struct icmp_error) == 8 + QUOTE_MAX, "an ICMP header is 8 bytes");

/* Returns the sum of a reply's pseudo header, which is the same in both directions. */
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

/* Exchanges the MAC addresses, if the device has any. */
static __always_inline bool reverse_link_header(struct __sk_buff *skb)
{
	return LINK_HEADER < sizeof(struct ethernet_header) || swap_macs(skb);
}

/* Returns the offset of the transport header in a reply. */
static __always_inline __u32 reply_offset(const struct packet *p)
{
	return p->l3 + (p->ipv6 ? sizeof(struct ipv6_header) : sizeof(struct ipv4_header));
}

/* Reports whether the device has yet to compute the packet's checksum (CHECKSUM_PARTIAL). It will then do so for the
 * reply too. The kernel reveals it by refusing to truncate such a packet before the checksum. Any other packet is
 * truncated there. */
static __always_inline bool is_unsummed(struct __sk_buff *skb, const struct packet *p)
{
	return p->check && bpf_skb_change_tail(skb, p->l4 + p->check, 0) == -EINVAL;
}

/* Resizes the packet to a reply of length bytes after the IP header, and writes its link and IP headers. */
static __always_inline bool write_reply_headers(struct __sk_buff *skb, const struct packet *p, __u32 length, __u8 proto)
{
	__u32 header = p->ipv6 ? sizeof(struct ipv6_header) : sizeof(struct ipv4_header);

	if (bpf_skb_change_tail(skb, p->l3 + header + length, 0) || !reverse_link_header(skb))
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
			.fragment = bpf_htons(0x4000), /* don't fragment: it has no id */
			.hops = REPLY_HOPS,
			.proto = proto,
			.source = last_word(p->key.server),
			.destination = last_word(p->key.client),
		};

		h.check = ~fold((__u32)bpf_csum_diff(NULL, 0, (void *)&h, sizeof(h), 0));
		return bpf_skb_store_bytes(skb, p->l3, &h, sizeof(h), 0) == 0;
	}
}

/* Sends a reply with correct checksums. If a device has yet to compute a checksum, it stores the result where the old
 * packet's checksum was, and the bytes there are part of its sum. They are set to the sum of the reply's pseudo header,
 * or to zero if the reply has no checksum there. The device's sum begins after the old packet's headers. If those were
 * longer than the reply's, the checksum is only correct where no device computes it, as behind a pod's veth. */
static __always_inline int send_reply(struct __sk_buff *skb, const struct packet *p, bool unsummed, __u64 pseudo)
{
	__u16 sum = fold(pseudo);

	if (unsummed && reply_offset(p) == p->l4 && bpf_skb_store_bytes(skb, p->l4 + p->check, &sum, sizeof(sum), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(skb->ifindex, 0);
}

/* Turns the packet into a reset of its connection (RFC 9293 section 3.10.7.1). A reset gets no reply. */
static __noinline int reply_reset(struct __sk_buff *skb, const struct packet *p)
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
	if (!write_reply_headers(skb, p, sizeof(r), IPPROTO_TCP))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, reply_offset(p), &r, sizeof(r), 0))
		return TC_ACT_SHOT;
	return send_reply(skb, p, unsummed, pseudo);
}

/* Turns the packet into an ICMP error about itself. `kind` is its type, and its code in the low byte. */
static __noinline int reply_error(struct __sk_buff *skb, const struct packet *p, __u32 kind, __u32 rest)
{
	__u8 proto = p->ipv6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	__u32 length = p->end - p->l3;
	struct icmp_error e = { .type = kind >> 8, .code = kind, .rest = bpf_htonl(rest) };
	__u64 pseudo = 0;
	bool unsummed;

	if (length > QUOTE_MAX)
		length = QUOTE_MAX;
	barrier_var(length); /* clang would merge the two limits into one that the verifier cannot follow */
	if (length < sizeof(struct ipv4_header) || bpf_skb_load_bytes(skb, p->l3, e.quote, length))
		return TC_ACT_SHOT;
	/* The sum covers all of e: the rest of the quote is zero. */
	if (p->ipv6)
		pseudo = sum_pseudo(p, 8 + length, proto);
	e.check = ~fold(pseudo + (__u32)bpf_csum_diff(NULL, 0, (void *)&e, sizeof(e), 0));
	unsummed = is_unsummed(skb, p);
	if (!write_reply_headers(skb, p, 8 + length, proto))
		return TC_ACT_SHOT;
	if (bpf_skb_store_bytes(skb, reply_offset(p), &e, 8 + length, 0))
		return TC_ACT_SHOT;
	return send_reply(skb, p, unsummed, pseudo);
}

/* Turns the packet into the ICMP error that refuses its protocol or port. */
static __always_inline int reply_unreachable(struct __sk_buff *skb, const struct packet *p)
{
	bool udp = p->key.proto == IPPROTO_UDP;
	__u32 kind, rest = 0;

	if (!p->ipv6) {
		kind = ICMP_ERROR(3, udp ? 3 : 2); /* RFC 792: destination unreachable: port, or protocol */
	} else if (udp || p->key.proto == IPPROTO_ICMPV6) {
		kind = ICMP_ERROR(1, udp ? 4 : 1); /* RFC 4443 section 3.1: port, or administratively prohibited */
	} else {
		kind = ICMP_ERROR(4, 1); /* RFC 4443 section 3.4: unrecognized next header, at the offset in rest */
		rest = p->next;
	}
	return reply_error(skb, p, kind, rest);
}

/* Emits the event of a client that got be, or was refused if be is NULL. */
static __noinline int emit_event(const struct conn_key *client, const struct backend *be, const struct choice *choice)
{
	enum event_kind kind = be ? EVENT_CHOSEN : EVENT_REFUSED;
	struct frontend_key vip = { .port = client->server_port, .proto = client->proto };
	struct event *e;

	if (!is_observed(kind))
		return 0;
	__builtin_memcpy(vip.addr, client->server, sizeof(vip.addr));
	e = reserve_event(kind, PATH_PACKET, &vip, be, choice);
	if (!e)
		return 0;
	__builtin_memcpy(e->client, client->client, sizeof(e->client));
	e->client_port = client->client_port;
	bpf_ringbuf_submit(e, 0);
	return 0;
}

/* Takes one of the replies that this CPU may send in this second. Returns false if none is left. */
static __always_inline bool may_reply(void)
{
	__u32 zero = 0;

	return take(bpf_map_lookup_elem(&answers, &zero), now_ns(), REPLIES_MAX);
}

/* Counts a refusal and replies to the packet. Later fragments and ICMP errors get no reply (RFC 1122 section 3.2.2),
 * nor do packets with invalid headers. Nor does a new flow beyond the limit: the source of a flood is forged, and a
 * client that is not tries again. */
__noinline int refuse(struct __sk_buff *skb, const struct packet *p, __u32 service, enum drop_reason reason)
{
	struct choice choice = { .service = service, .reason = reason };

	if (!p)
		return TC_ACT_SHOT;

	count_refusal(service, reason);
	emit_event(&p->key, NULL, &choice);
	if (reason == DROP_REASON_MALFORMED || reason == DROP_REASON_NEW_FLOWS || p->part == PART_LATER)
		return TC_ACT_SHOT;
	if (is_icmp(p) && is_error(p))
		return TC_ACT_SHOT;
	if (!may_reply()) {
		count_refusal(service, DROP_REASON_UNANSWERED);
		return TC_ACT_SHOT;
	}
	return p->key.proto == IPPROTO_TCP ? reply_reset(skb, p) : reply_unreachable(skb, p);
}

#endif
