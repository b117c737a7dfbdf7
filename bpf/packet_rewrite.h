/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Writing into a packet, and keeping its checksums as right or as wrong as they were.
 *
 * All writes go through helpers. A program that wrote through a pointer would make the kernel copy the head of every
 * cloned packet that enters it, ours or not.
 *
 * Of a packet whose transport checksum the device is still to compute (CHECKSUM_PARTIAL) the field holds the sum of the
 * pseudo header and must follow the addresses but not the ports. Only the kernel knows which packets these are. Since
 * Linux 6.2 it tells, and all that changes is written by one call. Elsewhere bpf_l4_csum_replace makes the difference,
 * by a call for the addresses and one for the ports.
 */
#ifndef ISTHMUS_PACKET_REWRITE_H
#define ISTHMUS_PACKET_REWRITE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "packet_parse.h"

/* Where the CRC is in the SCTP header. */
#define SCTP_CRC 8
/* The CRC32c polynomial, lowest power in the highest bit (RFC 9260 appendix A). */
#define CRC32C_POLYNOMIAL 0x82f63b78U

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define LE32(x) (x)
#else
#define LE32(x) __builtin_bswap32(x)
#endif

static __always_inline __u32 last_word(const __u8 addr[16])
{
	__u32 word;

	__builtin_memcpy(&word, ADDR(addr + 12), sizeof(word));
	return word;
}

/* The ones' complement sum in 16 bits, of a sum of fewer than 2^32 words. */
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static __always_inline __u32 fold_word(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* What replacing old by new adds to a sum (RFC 1624). */
static __always_inline __u64 replaced(__u32 old, __u32 new)
{
	return (__u64)(__u32)~old + new;
}

static __always_inline __u64 replaced_addr(const __u8 old[16], const __u8 new[16])
{
	__u32 a[4], b[4];

	__builtin_memcpy(a, ADDR(old), sizeof(a));
	__builtin_memcpy(b, ADDR(new), sizeof(b));
	return replaced(a[0], b[0]) + replaced(a[1], b[1]) + replaced(a[2], b[2]) + replaced(a[3], b[3]);
}

static __always_inline __u16 replace_in_check(__u16 check, __u64 difference)
{
	return ~fold((__u16)~check + difference);
}

/* The product of two polynomials modulo that of CRC32c. */
static __always_inline __u32 multiply_crc32c(__u32 a, __u32 b)
{
	__u32 product = 0;

	for (int i = 0; i < 32; i++) {
		product ^= b & -(a >> 31);
		a <<= 1;
		b = (b >> 1) ^ (CRC32C_POLYNOMIAL & -(b & 1));
	}
	return product;
}

/* Not static, so that the verifier looks at the loops once, and not again for every way to get there.
 *
 * What changing the first four bytes of an SCTP packet by these bits changes in its CRC. A CRC is linear, so the
 * rest of the packet, however long, need not be read: the change is the bits times x to the power of the length. */
__noinline __u32 change_of_crc(__u32 bits, __u32 length)
{
	__u32 power = 0x00800000; /* x^8: one byte */

	for (int i = 0; i < 16; i++) {
		if (length & 1)
			bits = multiply_crc32c(bits, power);
		length >>= 1;
		if (length == 0)
			break;
		power = multiply_crc32c(power, power);
	}
	return bits;
}

/* Both ports, as they follow each other on the wire. */
struct port_pair {
	__be16 source;
	__be16 destination;
};

static __always_inline struct port_pair pair_ports(__u16 client, __u16 server, bool reply)
{
	struct port_pair pair = {
		.source = bpf_htons(reply ? server : client),
		.destination = bpf_htons(reply ? client : server),
	};

	return pair;
}

static __always_inline __u32 port_word(const struct port_pair *pair)
{
	__u32 word;

	__builtin_memcpy(&word, pair, sizeof(word));
	return word;
}

/* Reports whether a flow's ports can be changed in this packet. The CRC of an SCTP packet of which only a part is
 * here cannot. */
static __always_inline bool can_rewrite(const struct packet *p, const struct conn *c)
{
	return p->key.proto != IPPROTO_SCTP || p->part == PART_WHOLE ||
	       (p->key.client_port == c->client_port && p->key.server_port == c->server_port);
}

struct tcp_header {
	struct port_pair ports;
	__be32 seq;
	__be32 ack;
	__u8 offset; /* in the upper half, in words */
	__u8 flags;
	__be16 window;
	__u16 check;
	__be16 urgent;
};
_Static_assert(sizeof(struct tcp_header) == 20, "a TCP header is 20 bytes");

struct udp_header {
	struct port_pair ports;
	__be16 length;
	__u16 check;
};
_Static_assert(sizeof(struct udp_header) == 8, "a UDP header is 8 bytes");

/* What is written of a packet: its IP header from the word with the hop limit on, and then what is known of its
 * transport header. */
struct headers {
	union {
		struct {
			__be16 payload;
			__u8 next;
			__u8 hops;
			__u8 source[16];
			__u8 destination[16];
		} ipv6;
		struct {
			__u8 none[24]; /* this one is shorter, and ends where the other does */
			__u8 hops;
			__u8 proto;
			__u16 check;
			__be32 source;
			__be32 destination;
		} ipv4;
	};
	union {
		struct port_pair ports;
		struct tcp_header tcp;
		struct udp_header udp;
	};
};
_Static_assert(sizeof(struct headers) == 56, "headers are 36 bytes of IPv6 and 20 of TCP");

static __always_inline void write_ipv4(struct __sk_buff *skb, const struct packet *p, struct headers *h,
				       const __u8 server[16], __u32 transport, bool reply, bool hop)
{
	__be32 client = last_word(p->key.client), old = last_word(p->key.server), new = last_word(server);
	const void *start = &h->ipv4.hops;
	__u64 difference = replaced(old, new);

	__builtin_memcpy(&h->ipv4.hops, &p->hop_word, sizeof(p->hop_word));
	h->ipv4.source = reply ? new : client;
	h->ipv4.destination = reply ? client : new;
	if (hop) {
		h->ipv4.hops--;
		difference += bpf_htons(0xfeff); /* one less in the upper half of a word */
	}
	h->ipv4.check = replace_in_check(h->ipv4.check, difference);
	if (p->l4 == p->l3 + sizeof(struct ipv4_header)) {
		bpf_skb_store_bytes(skb, p->l3 + 8, start, 12 + transport, 0);
		return;
	}
	bpf_skb_store_bytes(skb, p->l3 + 8, start, 12, 0);
	if (transport)
		bpf_skb_store_bytes(skb, p->l4, &h->ports, transport, 0);
}

static __always_inline void write_ipv6(struct __sk_buff *skb, const struct packet *p, struct headers *h,
				       const __u8 server[16], __u32 transport, bool reply, bool hop)
{
	__builtin_memcpy(&h->ipv6, &p->hop_word, sizeof(p->hop_word));
	__builtin_memcpy(h->ipv6.source, ADDR(reply ? server : p->key.client), sizeof(h->ipv6.source));
	__builtin_memcpy(h->ipv6.destination, ADDR(reply ? p->key.client : server), sizeof(h->ipv6.destination));
	if (hop)
		h->ipv6.hops--;
	if (p->l4 == p->l3 + sizeof(struct ipv6_header)) {
		bpf_skb_store_bytes(skb, p->l3 + 4, &h->ipv6, 36 + transport, 0);
		return;
	}
	bpf_skb_store_bytes(skb, p->l3 + 4, &h->ipv6, 36, 0);
	if (transport)
		bpf_skb_store_bytes(skb, p->l4, &h->ports, transport, 0);
}

/* Of the kernel's own packet, only who answers for its transport checksum. */
struct sk_buff {
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

extern void *bpf_cast_to_kern_ctx(void *skb) __ksym __weak;

/* The values of ip_summed that matter here, and one for kernels that do not tell. */
enum summed {
	SUMMED_COMPLETE = 2, /* the device told the sum over the whole packet, which must stay right */
	SUMMED_PARTIAL = 3,  /* the device is still to compute the checksum */
	SUMMED_UNKNOWN = 4,
};

/* The kernel says in which byte the bit field is, and how to shift that in a word of 64 bits. */
static __always_inline enum summed how_summed(struct __sk_buff *skb)
{
	const struct sk_buff *k;
	const void *at;
	__u64 value;

	if (!bpf_cast_to_kern_ctx)
		return SUMMED_UNKNOWN;
	k = bpf_cast_to_kern_ctx(skb);
	at = (const void *)k + __builtin_preserve_field_info(k->ip_summed, 0 /* BPF_FIELD_BYTE_OFFSET */);
	barrier_var(at); /* else clang would look for the byte in the struct above */
	value = *(const __u8 *)at;
	value <<= __builtin_preserve_field_info(k->ip_summed, 4 /* BPF_FIELD_LSHIFT_U64 */);
	return value >> __builtin_preserve_field_info(k->ip_summed, 5 /* BPF_FIELD_RSHIFT_U64 */);
}

/* What becomes of a transport checksum when the addresses and the ports add so much to its sum. */
static __always_inline __u16 change_check(__u16 check, enum summed summed, __u64 addrs, __u64 ports)
{
	return summed == SUMMED_PARTIAL ? fold(check + addrs) : replace_in_check(check, addrs + ports);
}

/* Makes what is to be written of the transport header, and returns its length. When that is more than the ports, the
 * checksum is among it; else it is left to the caller. */
static __always_inline __u32 make_transport(struct __sk_buff *skb, const struct packet *p, struct headers *h,
					    const __u8 server[16], __u32 old, const struct port_pair *new)
{
	__u64 addrs =
		p->ipv6 ? replaced_addr(p->key.server, server) : replaced(last_word(p->key.server), last_word(server));
	__u64 ports = replaced(old, port_word(new));
	enum summed summed = how_summed(skb);
	bool ours = summed != SUMMED_UNKNOWN && summed != SUMMED_COMPLETE;

	if (!p->ports)
		return 0;
	if (ours && p->key.proto == IPPROTO_TCP && !READ_AT(skb, p->l4, &h->tcp)) {
		h->tcp.check = change_check(h->tcp.check, summed, addrs, ports);
		h->ports = *new;
		return sizeof(h->tcp);
	}
	if (ours && p->key.proto == IPPROTO_UDP && !READ_AT(skb, p->l4, &h->udp)) {
		if (h->udp.check != 0) /* RFC 768: else there is none, and what comes out as 0 is the other zero */
			h->udp.check = change_check(h->udp.check, summed, addrs, ports) ?: 0xffff;
		h->ports = *new;
		return sizeof(h->udp);
	}
	h->ports = *new;
	return sizeof(h->ports);
}

/* Writes both addresses, and leaves all checksums to the caller. */
static __always_inline void write_addrs(struct __sk_buff *skb, const struct packet *p, const __u8 source[16],
					const __u8 destination[16])
{
	if (p->ipv6) {
		__u8 addrs[32] ADDR_ALIGNED;

		__builtin_memcpy(addrs, ADDR(source), 16);
		__builtin_memcpy(addrs + 16, ADDR(destination), 16);
		bpf_skb_store_bytes(skb, p->l3 + 8, addrs, sizeof(addrs), 0);
	} else {
		__be32 addrs[2] = { last_word(source), last_word(destination) };

		bpf_skb_store_bytes(skb, p->l3 + 12, addrs, sizeof(addrs), 0);
	}
}

/* Makes all checksums follow the server's address, and the hop limit: that of the transport header, if it is one of the
 * Internet, and the sum over the whole packet, which some devices deliver. */
static __always_inline void follow_addr(struct __sk_buff *skb, const struct packet *p, const __u8 server[16], bool hop)
{
	__u64 flags = BPF_F_PSEUDO_HDR | (p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0);
	__u32 at = p->l4 + p->check;
	__u64 difference;

	if (!p->ipv6) { /* whose header has a checksum, and is no change in the sum over the packet */
		if (p->check)
			bpf_l4_csum_replace(skb, at, last_word(p->key.server), last_word(server), flags | 4);
		return;
	}
	difference = replaced_addr(p->key.server, server);
	/* The helper believes that the packet's sum has changed by as much, which is so in IPv4. The flag BPF_F_IPV6
	 * would tell it, but kernels before 6.16 refuse it. */
	if (p->check)
		bpf_l4_csum_replace(skb, at, 0, fold_word(difference), flags);
	if (hop)
		difference += bpf_htons(0xfffe); /* one less in the lower half of a word */
	bpf_csum_update(skb, fold_word(difference));
}

/* Makes the checksum of the transport header follow the ports. */
static __always_inline void follow_ports(struct __sk_buff *skb, const struct packet *p, __u32 old, __u32 new)
{
	if (p->key.proto == IPPROTO_SCTP) {
		__u32 crc;

		if (bpf_skb_load_bytes(skb, p->l4 + SCTP_CRC, &crc, sizeof(crc)))
			return;
		crc ^= LE32(change_of_crc(LE32(old ^ new), p->end - p->l4));
		bpf_skb_store_bytes(skb, p->l4 + SCTP_CRC, &crc, sizeof(crc), BPF_F_RECOMPUTE_CSUM);
		bpf_csum_update(skb, fold_word(replaced(old, new)));
		return;
	}
	bpf_l4_csum_replace(skb, p->l4 + p->check, old, new,
			    4 | (p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0));
}

/* Puts another server and other ports into the packet, and takes one from its hop limit if it makes a hop. */
static __always_inline void rewrite_to(struct __sk_buff *skb, const struct packet *p, const __u8 server[16],
				       const struct port_pair *ports, bool reply, bool hop)
{
	struct port_pair pair = pair_ports(p->key.client_port, p->key.server_port, reply);
	__u32 old = port_word(&pair);
	struct headers h;
	__u32 transport = make_transport(skb, p, &h, server, old, ports);

	barrier_var(transport); /* clang would ask p->ports instead whether it is 0, which tells the verifier nothing */
	if (p->ipv6)
		write_ipv6(skb, p, &h, server, transport, reply, hop);
	else
		write_ipv4(skb, p, &h, server, transport, reply, hop);
	if (transport > sizeof(*ports))
		return;
	follow_addr(skb, p, server, hop);
	if (p->ports && old != port_word(ports))
		follow_ports(skb, p, old, port_word(ports));
}

/* Makes the packet one of the other side of its flow. Not inlined: what it keeps on the stack is gone when it returns.
 */
static __noinline int rewrite(struct __sk_buff *skb, const struct packet *p, const struct conn *c, bool reply, bool hop)
{
	struct port_pair ports = pair_ports(c->client_port, c->server_port, reply);
	__u8 server[16] ADDR_ALIGNED;

	__builtin_memcpy(server, c->addr, sizeof(server));
	rewrite_to(skb, p, server, &ports, reply, hop);
	return 0;
}

#endif
