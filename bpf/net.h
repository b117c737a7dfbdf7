/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Addresses, wire formats and checksum arithmetic. The header uses no map and no packet context, so every program can
 * include it.
 */
#ifndef ISTHMUS_NET_H
#define ISTHMUS_NET_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

#define AF_INET 2
#define AF_INET6 10

#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define ETH_P_8021Q 0x8100
#define ETH_P_8021AD 0x88a8

#define IPPROTO_HOPOPTS 0
#define IPPROTO_ICMP 1
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define IPPROTO_ROUTING 43
#define IPPROTO_FRAGMENT 44
#define IPPROTO_ICMPV6 58
#define IPPROTO_DSTOPTS 60
#define IPPROTO_SCTP 132
#define IPPROTO_MPTCP 262

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

#define SCTP_INIT 1
#define SCTP_INIT_ACK 2
#define SCTP_ABORT 6
#define SCTP_SHUTDOWN_COMPLETE 14

struct ethernet_header {
	__u8 to[6];
	__u8 from[6];
	__be16 protocol;
};
_Static_assert(sizeof(struct ethernet_header) == 14, "an Ethernet header is 14 bytes");

struct vlan_tag {
	__be16 tci;
	__be16 protocol;
};

struct ipv4_header {
	__u8 version_ihl;
	__u8 tos;
	__be16 total;
	__be16 id;
	__be16 fragment;
	__u8 hops;
	__u8 proto;
	__be16 check;
	__be32 source;
	__be32 destination;
};
_Static_assert(sizeof(struct ipv4_header) == 20, "an IPv4 header is 20 bytes");

struct ipv6_header {
	__be32 version_class_flow;
	__be16 payload;
	__u8 next;
	__u8 hops;
	__u8 source[16];
	__u8 destination[16];
};
_Static_assert(sizeof(struct ipv6_header) == 40, "an IPv6 header is 40 bytes");

/* The start of an extension header; a fragment header is complete. */
struct ipv6_extension {
	__u8 next;
	__u8 length; /* in units of 8 bytes, without the first 8; reserved in a fragment header */
	__be16 fragment;
	__be32 id;
};

/* Both ports, in their order on the wire. */
struct port_pair {
	__be16 source;
	__be16 destination;
};

struct tcp_header {
	struct port_pair ports;
	__be32 seq;
	__be32 ack;
	__u8 offset; /* header length in the upper half, in words */
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

/*
 * Addresses and ports
 */

static __always_inline bool same_addr(const __u8 a[16], const __u8 b[16])
{
	const __u32 *x = ADDR(a), *y = ADDR(b);

	return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

static __always_inline void write_mapped(__u8 addr[16], __be32 ip)
{
	__u32 words[4] = { 0, 0, bpf_htonl(0xffff), ip };

	__builtin_memcpy(addr, words, sizeof(words));
}

/* Returns the IPv4 address of a mapped address. */
static __always_inline __u32 last_word(const __u8 addr[16])
{
	__u32 word;

	__builtin_memcpy(&word, ADDR(addr + 12), sizeof(word));
	return word;
}

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

/* Mixes all bits of x into 32. */
static __always_inline __u32 hash_u64(__u64 x)
{
	x *= 0x9e3779b97f4a7c15ULL;
	x ^= x >> 29;
	x *= 0xbf58476d1ce4e5b9ULL;
	return x >> 32;
}

/* An address has the same hash on every machine. */
static __always_inline __u32 hash_address(const __u8 addr[16])
{
	__u64 words[2];

	__builtin_memcpy(words, ADDR(addr), sizeof(words));
	return hash_u64(words[0] ^ hash_u64(words[1]));
}

/* Exchanges the two MAC addresses of an Ethernet header. */
static __always_inline bool swap_macs(struct __sk_buff *skb)
{
	__u16 macs[9]; /* to, from, to */

	if (bpf_skb_load_bytes(skb, 0, macs, 12))
		return false;
	__builtin_memcpy(macs + 6, macs, 6);
	return bpf_skb_store_bytes(skb, 0, macs + 3, 12, 0) == 0;
}

/*
 * Checksums
 */

/* Folds a sum of fewer than 2^32 words into a ones' complement sum of 16 bits. */
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

/* Returns what replacing old by new adds to a sum (RFC 1624). */
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

#endif
