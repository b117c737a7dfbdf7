/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Writing into a packet. Checksums are updated by the difference, so a wrong one stays wrong.
 *
 * All writes go through helpers. If a program wrote through a pointer, the kernel would copy the head of every cloned
 * packet that enters the program, whether it is translated or not.
 *
 * If the device has yet to compute a packet's transport checksum (CHECKSUM_PARTIAL), the field holds the sum of the
 * pseudo header. It must follow the addresses but not the ports. Only the kernel knows which packets these are. Since
 * Linux 6.2 a program can ask, and writes all changes with one call. On older kernels bpf_l4_csum_replace makes the
 * distinction, in one call for the addresses and one for the ports.
 */
#ifndef ISTHMUS_PACKET_REWRITE_H
#define ISTHMUS_PACKET_REWRITE_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "net.h"
#include "packet_parse.h"

/* Offset of the CRC in the SCTP header. */
#define SCTP_CRC 8
/* The CRC32c polynomial, lowest power in the highest bit (RFC 9260 appendix A). */
#define CRC32C_POLYNOMIAL 0x82f63b78U

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define LE32(x) (x)
#else
#define LE32(x) __builtin_bswap32(x)
#endif

/* Multiplies two polynomials modulo that of CRC32c. */
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

/* Returns how the CRC of an SCTP packet changes if its first four bytes change by these bits. A CRC is linear: the
 * change is the bits times x to the power of the length, and the rest of the packet need not be read.
 *
 * Not static, so that the verifier checks the loops once and not for every call. */
__noinline __u32 crc_change(__u32 bits, __u32 length)
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

/* Reports whether this packet's ports can be changed. A fragment of SCTP holds only a part of what the CRC covers. */
static __always_inline bool can_rewrite(const struct packet *p, const struct conn *c)
{
	return p->key.proto != IPPROTO_SCTP || p->part == PART_WHOLE ||
	       (p->key.client_port == c->client_port && p->key.server_port == c->server_port);
}

/* The bytes that are written into a packet: the IP header from the word with the hop limit on, and then the known part
 * of the transport header. */
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
			__u8 none[24]; /* shorter than IPv6, and aligned at the end */
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
		difference += bpf_htons(0xfeff); /* minus one in the upper half of a word */
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

/* The only field of the kernel's packet that is read here: the state of its transport checksum. */
struct sk_buff {
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

extern void *bpf_cast_to_kern_ctx(void *skb) __ksym __weak;

/* The values of ip_summed that matter here, and one for kernels where it cannot be read. */
enum summed {
	SUMMED_COMPLETE = 2, /* the device delivered the sum over the whole packet, which must stay correct */
	SUMMED_PARTIAL = 3,  /* the device has yet to compute the checksum */
	SUMMED_UNKNOWN = 4,
};

/* CO-RE relocations give the byte of the bit field, and its shifts in a word of 64 bits. */
static __always_inline enum summed read_summed(struct __sk_buff *skb)
{
	const struct sk_buff *k;
	const void *at;
	__u64 value;

	if (!bpf_cast_to_kern_ctx)
		return SUMMED_UNKNOWN;
	k = bpf_cast_to_kern_ctx(skb);
	at = (const void *)k + __builtin_preserve_field_info(k->ip_summed, 0 /* BPF_FIELD_BYTE_OFFSET */);
	barrier_var(at); /* otherwise clang would read the byte from the struct above */
	value = *(const __u8 *)at;
	value <<= __builtin_preserve_field_info(k->ip_summed, 4 /* BPF_FIELD_LSHIFT_U64 */);
	return value >> __builtin_preserve_field_info(k->ip_summed, 5 /* BPF_FIELD_RSHIFT_U64 */);
}

/* Returns the new transport checksum, given what the addresses and the ports add to its sum. */
static __always_inline __u16 change_check(__u16 check, enum summed summed, __u64 addrs, __u64 ports)
{
	return summed == SUMMED_PARTIAL ? fold(check + addrs) : replace_in_check(check, addrs + ports);
}

/* Builds the transport header's part of h and returns its length. If it is longer than the ports, it includes the
 * checksum; otherwise the caller updates the checksum. */
static __always_inline __u32 build_transport(struct __sk_buff *skb, const struct packet *p, struct headers *h,
					     const __u8 server[16], __u32 old, const struct port_pair *new)
{
	__u64 addrs =
		p->ipv6 ? replaced_addr(p->key.server, server) : replaced(last_word(p->key.server), last_word(server));
	__u64 ports = replaced(old, port_word(new));
	enum summed summed = read_summed(skb);
	bool known = summed != SUMMED_UNKNOWN && summed != SUMMED_COMPLETE;

	if (!p->ports)
		return 0;
	if (known && p->key.proto == IPPROTO_TCP && !READ_AT(skb, p->l4, &h->tcp)) {
		h->tcp.check = change_check(h->tcp.check, summed, addrs, ports);
		h->ports = *new;
		return sizeof(h->tcp);
	}
	if (known && p->key.proto == IPPROTO_UDP && !READ_AT(skb, p->l4, &h->udp)) {
		if (h->udp.check != 0) /* RFC 768: 0 means no checksum, and a sum of 0 is written as 0xffff */
			h->udp.check = change_check(h->udp.check, summed, addrs, ports) ?: 0xffff;
		h->ports = *new;
		return sizeof(h->udp);
	}
	h->ports = *new;
	return sizeof(h->ports);
}

/* Writes both addresses. The caller updates the checksums. */
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

/* Updates checksums after a change of the server's address and the hop limit: the transport header's Internet checksum,
 * if it has one, and the sum over the whole packet, which some devices deliver. */
static __always_inline void update_addr_check(struct __sk_buff *skb, const struct packet *p, const __u8 server[16],
					      bool hop)
{
	__u64 flags = BPF_F_PSEUDO_HDR | (p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0);
	__u32 at = p->l4 + p->check;
	__u64 difference;

	if (!p->ipv6) { /* the header checksum keeps the sum over the packet unchanged */
		if (p->check)
			bpf_l4_csum_replace(skb, at, last_word(p->key.server), last_word(server), flags | 4);
		return;
	}
	difference = replaced_addr(p->key.server, server);
	/* The helper assumes that the packet's sum changed by as much, which only holds for IPv4. The flag BPF_F_IPV6
	 * says otherwise, but kernels before 6.16 refuse it. */
	if (p->check)
		bpf_l4_csum_replace(skb, at, 0, fold_word(difference), flags);
	if (hop)
		difference += bpf_htons(0xfffe); /* minus one in the lower half of a word */
	bpf_csum_update(skb, fold_word(difference));
}

/* Updates the transport checksum after a change of the ports. */
static __always_inline void update_port_check(struct __sk_buff *skb, const struct packet *p, __u32 old, __u32 new)
{
	if (p->key.proto == IPPROTO_SCTP) {
		__u32 crc;

		if (bpf_skb_load_bytes(skb, p->l4 + SCTP_CRC, &crc, sizeof(crc)))
			return;
		crc ^= LE32(crc_change(LE32(old ^ new), p->end - p->l4));
		bpf_skb_store_bytes(skb, p->l4 + SCTP_CRC, &crc, sizeof(crc), BPF_F_RECOMPUTE_CSUM);
		bpf_csum_update(skb, fold_word(replaced(old, new)));
		return;
	}
	bpf_l4_csum_replace(skb, p->l4 + p->check, old, new,
			    4 | (p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0));
}

/* Writes another server and other ports into the packet, and decrements the hop limit if `hop` is set. */
static __always_inline void rewrite_to(struct __sk_buff *skb, const struct packet *p, const __u8 server[16],
				       const struct port_pair *ports, bool reply, bool hop)
{
	struct port_pair pair = pair_ports(p->key.client_port, p->key.server_port, reply);
	__u32 old = port_word(&pair);
	struct headers h;
	__u32 transport = build_transport(skb, p, &h, server, old, ports);

	barrier_var(transport); /* clang would test p->ports instead, from which the verifier learns nothing */
	if (p->ipv6)
		write_ipv6(skb, p, &h, server, transport, reply, hop);
	else
		write_ipv4(skb, p, &h, server, transport, reply, hop);
	if (transport > sizeof(*ports))
		return;
	update_addr_check(skb, p, server, hop);
	if (p->ports && old != port_word(ports))
		update_port_check(skb, p, old, port_word(ports));
}

/* Translates a packet by its flow's entry. Not inlined, so that its stack is free again when it returns. */
static __noinline int rewrite(struct __sk_buff *skb, const struct packet *p, const struct conn *c, bool reply, bool hop)
{
	struct port_pair ports = pair_ports(c->client_port, c->server_port, reply);
	__u8 server[16] ADDR_ALIGNED;

	__builtin_memcpy(server, c->addr, sizeof(server));
	rewrite_to(skb, p, server, &ports, reply, hop);
	return 0;
}

#endif
