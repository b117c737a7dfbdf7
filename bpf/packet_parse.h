/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reading a packet. Headers are copied at once; no pointer into the packet is kept.
 *
 *	locate		link layer and VLAN tags: finds an IP header that is complete up to its addresses
 *	read_network	IPv4 or IPv6: addresses, length, fragment
 *	read_transport	IPv6 extension headers, then ports or ICMP type
 */
#ifndef ISTHMUS_PACKET_PARSE_H
#define ISTHMUS_PACKET_PARSE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "net.h"

/* Return values of a program. UNSPEC passes the packet to the next program on the same hook, under TCX (where it is
 * called TCX_NEXT) as under clsact. After the last program it means OK. */
#define TC_ACT_UNSPEC (-1)
#define TC_ACT_SHOT 2

/* VLAN tags that may remain in a packet: the kernel removes the outer one itself. */
#define VLAN_TAGS_MAX 2
/* RFC 8200 section 4.1 recommends four kinds, one of them up to twice. */
#define EXTENSIONS_MAX 6

/* Bytes before the IP header: 14 with Ethernet, 0 for devices without a link layer. Set at load time. */
volatile const __u32 LINK_HEADER = 14;

/* The part of a datagram that a packet carries. */
enum part {
	PART_WHOLE,
	PART_FIRST, /* the first fragment, with the ports */
	PART_LATER, /* another fragment, without ports */
};

/* Copies the value at an offset of the packet into *to. In nearly every packet it lies in the linear part and is read
 * directly. The verifier needs the comparison of the offset as proof that the pointer cannot wrap around. */
#define READ_AT(skb, offset, to)                                                                 \
	({                                                                                       \
		__u32 read_offset = (offset);                                                    \
		void *read_start = (void *)(long)(skb)->data;                                    \
		void *read_end = (void *)(long)(skb)->data_end;                                  \
		long read_error = 0;                                                             \
                                                                                                 \
		if (read_offset <= 0xff && read_start + read_offset + sizeof(*(to)) <= read_end) \
			*(to) = *(typeof(to))(read_start + read_offset);                         \
		else                                                                             \
			read_error = bpf_skb_load_bytes(skb, read_offset, to, sizeof(*(to)));    \
		read_error;                                                                      \
	})

/* The fields of a packet that have been read so far. */
struct packet {
	struct conn_key key; /* of its flow; read_network is told which side is the server */
	__u32 id;	     /* identifies the datagram that a fragment belongs to */
	__u32 hop_word;	     /* the word of the IP header with the hop limit: bytes 8 to 11 of IPv4, 4 to 7 of IPv6 */
	__u32 l3;	     /* offset of the IP header */
	__u32 l4;	     /* offset of the transport header */
	__u32 end;	     /* offset behind the IP packet */
	__u32 seq;	     /* TCP: sequence number; of a SYN and a FIN as read_edges says */
	__u32 ack;	     /* TCP, likewise */
	__u16 window;	     /* TCP: as in the packet, without scale */
	__u16 next;	     /* offset from l3 of the byte with the protocol number */
	__u8 kind;	     /* TCP flags, type of the first SCTP chunk, or ICMP type */
	__u8 check;	     /* offset of the Internet checksum in the transport header, 0 without one */
	bool ipv6;
	bool tagged;
	bool ports; /* the packet carries ports */
	bool young; /* its flow's entry was not in `flows` */
	__u8 part;  /* enum part */
	__u8 scale; /* WINDOW_SCALED and the scale that a SYN offers, or 0 */
};

/* Returns the hop limit, which IPv4 and IPv6 have in different bytes of the word. */
static __always_inline __u8 hops_of(const struct packet *p)
{
	__u8 bytes[4];

	__builtin_memcpy(bytes, &p->hop_word, sizeof(bytes));
	return p->ipv6 ? bytes[3] : bytes[0];
}

/* Finds the IP header. Returns false if the packet is not IP, or ends before its addresses do. */
static __always_inline bool locate(struct __sk_buff *skb, struct packet *p)
{
	__be16 protocol = skb->protocol;

	p->l3 = LINK_HEADER;
	p->tagged = skb->vlan_present;
	for (int i = 0; i < VLAN_TAGS_MAX; i++) {
		struct vlan_tag tag;

		if (protocol != bpf_htons(ETH_P_8021Q) && protocol != bpf_htons(ETH_P_8021AD))
			break;
		if (bpf_skb_load_bytes(skb, p->l3, &tag, sizeof(tag)))
			return false;
		p->l3 += sizeof(tag);
		p->tagged = true;
		protocol = tag.protocol;
	}
	if (protocol == bpf_htons(ETH_P_IP))
		return p->l3 + sizeof(struct ipv4_header) <= skb->len;
	p->ipv6 = true;
	return protocol == bpf_htons(ETH_P_IPV6) && p->l3 + sizeof(struct ipv6_header) <= skb->len;
}

static __always_inline enum drop_reason read_ipv4(struct __sk_buff *skb, struct packet *p, bool reply, bool quoted)
{
	struct ipv4_header h;
	__u32 length, total;
	__u16 fragment;

	if (READ_AT(skb, p->l3, &h))
		return DROP_REASON_MALFORMED;
	write_mapped(p->key.client, reply ? h.destination : h.source);
	write_mapped(p->key.server, reply ? h.source : h.destination);
	__builtin_memcpy(&p->hop_word, &h.hops, sizeof(p->hop_word));
	p->key.proto = h.proto;
	p->id = h.id;
	p->next = __builtin_offsetof(struct ipv4_header, proto);
	fragment = bpf_ntohs(h.fragment);
	if (fragment & 0x1fff)
		p->part = PART_LATER;
	else if (fragment & 0x2000)
		p->part = PART_FIRST;
	length = (h.version_ihl & 0xf) * 4;
	total = bpf_ntohs(h.total);
	p->l4 = p->l3 + length;
	if (h.version_ihl >> 4 != 4 || length < sizeof(h))
		return DROP_REASON_MALFORMED;
	if (quoted)
		return DROP_REASON_NONE;
	if (total == 0 && skb->gso_size) /* more than 64 KiB, which the device will segment */
		total = skb->len - p->l3;
	p->end = p->l3 + total;
	if (p->end > skb->len || p->l4 > p->end)
		return DROP_REASON_MALFORMED;
	return DROP_REASON_NONE;
}

static __always_inline enum drop_reason read_ipv6(struct __sk_buff *skb, struct packet *p, bool reply, bool quoted)
{
	struct ipv6_header h;
	__u32 payload;

	if (READ_AT(skb, p->l3, &h))
		return DROP_REASON_MALFORMED;
	__builtin_memcpy(p->key.client, ADDR(reply ? h.destination : h.source), sizeof(h.source));
	__builtin_memcpy(p->key.server, ADDR(reply ? h.source : h.destination), sizeof(h.source));
	__builtin_memcpy(&p->hop_word, &h.payload, sizeof(p->hop_word));
	p->key.proto = h.next;
	p->next = __builtin_offsetof(struct ipv6_header, next);
	p->l4 = p->l3 + sizeof(h);
	if (bpf_ntohl(h.version_class_flow) >> 28 != 6)
		return DROP_REASON_MALFORMED;
	if (quoted)
		return DROP_REASON_NONE;
	payload = bpf_ntohs(h.payload);
	if (payload == 0 && skb->gso_size)
		payload = skb->len - p->l4;
	p->end = p->l4 + payload;
	return p->end > skb->len ? DROP_REASON_MALFORMED : DROP_REASON_NONE;
}

/* Reads the IP header at p->l3. The server is the source of replies and the destination of other packets. For a packet
 * that an ICMP error quotes, the caller sets p->end: the quote is truncated, so its length field is useless. The
 * addresses are valid even if an error is returned. */
static __always_inline enum drop_reason read_network(struct __sk_buff *skb, struct packet *p, bool reply, bool quoted)
{
	p->key.reply = reply;
	p->part = PART_WHOLE;
	return p->ipv6 ? read_ipv6(skb, p, reply, quoted) : read_ipv4(skb, p, reply, quoted);
}

static __always_inline bool is_extension(__u8 next)
{
	return next == IPPROTO_HOPOPTS || next == IPPROTO_ROUTING || next == IPPROTO_DSTOPTS ||
	       next == IPPROTO_FRAGMENT;
}

/* Skips the extension headers of IPv6 and returns an enum drop_reason.
 *
 * The verifier checks a function that is not static once and on its own, here and elsewhere. It checks a static one
 * again for every state at its call sites, and the code after the call for every state on return. The price is that
 * global functions must handle NULL arguments, although no caller passes NULL. */
__noinline int skip_extensions(struct __sk_buff *skb, struct packet *p)
{
	if (!p)
		return DROP_REASON_MALFORMED;
	for (int i = 0; i < EXTENSIONS_MAX; i++) {
		struct ipv6_extension ext;
		__u32 length;

		if (p->l4 + sizeof(ext) > p->end || bpf_skb_load_bytes(skb, p->l4, &ext, sizeof(ext)))
			return DROP_REASON_MALFORMED;
		length = sizeof(ext);
		if (p->key.proto == IPPROTO_FRAGMENT) {
			p->id = ext.id;
			if (ext.fragment & bpf_htons(0xfff8))
				p->part = PART_LATER;
			else if (ext.fragment & bpf_htons(1))
				p->part = PART_FIRST;
		} else {
			length += ext.length * 8;
		}
		/* Until its last segment the checksum covers another destination than the IP header has. The field
		 * holds the routing type and then the segments left. */
		if (p->key.proto == IPPROTO_ROUTING && ext.fragment & bpf_htons(0x00ff))
			return DROP_REASON_PROTOCOL;
		p->next = p->l4 - p->l3;
		p->key.proto = ext.next;
		p->l4 += length;
		if (p->l4 > p->end)
			return DROP_REASON_MALFORMED;
		if (p->part == PART_LATER || !is_extension(p->key.proto))
			return DROP_REASON_NONE;
	}
	return DROP_REASON_PROTOCOL;
}

/* Stores the ports, which come first in every transport header. */
static __always_inline void take_ports(struct packet *p, const struct port_pair *ports, bool reply)
{
	p->ports = true;
	p->key.client_port = bpf_ntohs(reply ? ports->destination : ports->source);
	p->key.server_port = bpf_ntohs(reply ? ports->source : ports->destination);
}

#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTION_SCALE 3
#define TCP_OPTION_SCALE_MAX 14
/* Options that a SYN is searched for. Linux sends the scale as the fifth at the latest. */
#define TCP_OPTIONS_MAX 12
#define TCP_OPTIONS_SIZE 40

/* Returns the window scale that a SYN with a header of so many bytes offers. The options are copied at once: a helper
 * call for each would cost as much as a map lookup. */
static __noinline __u8 read_scale(struct __sk_buff *skb, const struct packet *p, __u32 length)
{
	__u8 options[TCP_OPTIONS_SIZE] = {};
	__u32 size = length - 20, at = 0;

	if (size > TCP_OPTIONS_SIZE)
		return 0;
	barrier_var(size); /* clang would merge the two limits into one that Linux 6.1 cannot follow */
	if (size < 4 || bpf_skb_load_bytes(skb, p->l4 + 20, options, size))
		return 0;
	for (int i = 0; i < TCP_OPTIONS_MAX; i++) {
		__u8 kind, value;

		if (at > TCP_OPTIONS_SIZE - 3 || at + 3 > size)
			break;
		kind = options[at];
		value = options[at + 2];
		if (kind == TCP_OPTION_SCALE)
			return WINDOW_SCALED | (value > TCP_OPTION_SCALE_MAX ? TCP_OPTION_SCALE_MAX : value);
		if (kind == TCP_OPTION_END || (kind != TCP_OPTION_NOP && options[at + 1] < 2))
			break;
		at += kind == TCP_OPTION_NOP ? 1 : options[at + 1];
	}
	return 0;
}

/* Reads what matters about a SYN or FIN with a header of so many bytes. A SYN gets the number that accepts it as seq,
 * and as ack, since it acknowledges nothing, the number behind its data. SYN+ACK and FIN get the number behind their
 * data as seq. Fewer fields save stack, of which all functions of a program share 512 bytes. Not static: see
 * skip_extensions. */
__noinline int read_edges(struct __sk_buff *skb, struct packet *p, __u32 length)
{
	if (!p)
		return 0;
	if (p->kind & TCP_SYN) {
		p->seq++;
		p->scale = read_scale(skb, p, length);
	}
	if ((p->kind & (TCP_SYN | TCP_ACK)) == TCP_SYN)
		p->ack = p->seq + (p->end - p->l4 - length);
	else
		p->seq += p->end - p->l4 - length;
	return 0;
}

static __always_inline enum drop_reason read_tcp(struct __sk_buff *skb, struct packet *p, bool reply)
{
	struct {
		struct port_pair ports;
		__be32 seq, ack;
		__u8 offset;
		__u8 flags;
		__be16 window;
	} h;

	if (p->l4 + 20 > p->end || READ_AT(skb, p->l4, &h))
		return DROP_REASON_MALFORMED;
	if (h.offset >> 4 < 5 || p->l4 + (h.offset >> 4) * 4 > p->end)
		return DROP_REASON_MALFORMED;
	take_ports(p, &h.ports, reply);
	p->kind = h.flags;
	p->check = 16;
	p->seq = bpf_ntohl(h.seq);
	p->ack = bpf_ntohl(h.ack);
	p->window = bpf_ntohs(h.window);
	if (h.flags & (TCP_SYN | TCP_FIN))
		read_edges(skb, p, (h.offset >> 4) * 4);
	return DROP_REASON_NONE;
}

static __always_inline enum drop_reason read_udp(struct __sk_buff *skb, struct packet *p, bool reply)
{
	struct udp_header h;
	__u16 length;

	if (p->l4 + sizeof(h) > p->end || READ_AT(skb, p->l4, &h))
		return DROP_REASON_MALFORMED;
	length = bpf_ntohs(h.length);
	/* A first fragment is shorter than its datagram. A packet that the device will segment may have any length. */
	if (p->part == PART_WHOLE && !skb->gso_size && (length < sizeof(h) || p->l4 + length > p->end))
		return DROP_REASON_MALFORMED;
	take_ports(p, &h.ports, reply);
	p->check = 6;
	return DROP_REASON_NONE;
}

static __always_inline enum drop_reason read_sctp(struct __sk_buff *skb, struct packet *p, bool reply)
{
	struct {
		struct port_pair ports;
		__be32 tag;
		__le32 crc;
		__u8 chunk;
		__u8 pad[3];
	} h;

	if (p->l4 + sizeof(h) > p->end || READ_AT(skb, p->l4, &h))
		return DROP_REASON_MALFORMED;
	take_ports(p, &h.ports, reply);
	p->kind = h.chunk;
	return DROP_REASON_NONE;
}

static __always_inline bool is_icmp(const struct packet *p)
{
	return p->key.proto == (p->ipv6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP);
}

/* Reports whether an ICMP message is an error, which quotes a packet that did not arrive. A redirect is none here: it
 * is only meant for the sender's own link. */
static __always_inline bool is_error(const struct packet *p)
{
	if (p->ipv6)
		return p->kind >= 1 && p->kind <= 4;
	return p->kind == 3 || p->kind == 11 || p->kind == 12;
}

static __always_inline enum drop_reason read_icmp(struct __sk_buff *skb, struct packet *p)
{
	if (p->l4 + 8 > p->end || bpf_skb_load_bytes(skb, p->l4, &p->kind, sizeof(p->kind)))
		return DROP_REASON_MALFORMED;
	if (p->ipv6)
		p->check = 2;
	return DROP_REASON_NONE;
}

/* Reads the extension and transport headers. A later fragment stays without ports. */
static __always_inline enum drop_reason read_transport(struct __sk_buff *skb, struct packet *p, bool reply)
{
	if (p->ipv6 && is_extension(p->key.proto)) {
		enum drop_reason reason = skip_extensions(skb, p);

		if (reason != DROP_REASON_NONE)
			return reason;
	}
	if (p->part == PART_LATER)
		return DROP_REASON_NONE;
	switch (p->key.proto) {
	case IPPROTO_TCP:
		return read_tcp(skb, p, reply);
	case IPPROTO_UDP:
		return read_udp(skb, p, reply);
	case IPPROTO_SCTP:
		return read_sctp(skb, p, reply);
	default:
		return is_icmp(p) && p->part == PART_WHOLE ? read_icmp(skb, p) : DROP_REASON_PROTOCOL;
	}
}

/* Returns the length of the packet, or of the longest segment that the device will make of it. */
static __always_inline __u32 size_of(struct __sk_buff *skb, const struct packet *p)
{
	__u8 offset = 2 << 4; /* a UDP header has two words */

	if (!skb->gso_size)
		return p->end - p->l3;
	if (p->key.proto == IPPROTO_TCP && READ_AT(skb, p->l4 + 12, &offset))
		return p->end - p->l3;
	return p->l4 - p->l3 + (offset >> 4) * 4 + skb->gso_size;
}

#endif
