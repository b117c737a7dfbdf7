/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Keys and values of the maps of the DNS program. One process owns them. They are not pinned and not part of the ABI.
 */
#ifndef ISTHMUS_NAMES_H
#define ISTHMUS_NAMES_H

#include <linux/types.h>

/* Longest name in bytes on the wire that is answered here; a multiple of 8. */
#define NAMES_LENGTH 96

/* Length of the SOA record of clusterset.local without its owner: type, class, TTL, length and 74 bytes of data. Its
 * names are uncompressed, so that it is valid at any offset of a message. */
#define NAMES_SOA 84

/* Key of `names`: a name in wire format and lower case, padded with zeros. */
struct dns_name {
	__u8 wire[NAMES_LENGTH] __attribute__((aligned(8)));
};

#define NAMES_IPV4 1
#define NAMES_IPV6 2

/* Value of `names`: all addresses of a name. A query for a family without one gets an answer with no data. */
struct dns_addresses {
	__u8 ipv4[4];
	__u8 ipv6[16];
	__u32 families;
};

/* Key of `resolvers`: the address of a resolver whose queries are answered here. */
struct dns_resolver {
	__u8 addr[16];
};

/* Value of `resolvers`: a guarded resolver is an address of this node that answers only `dns_clients`. */
#define NAMES_ANSWERED 1
#define NAMES_GUARDED 2

/* Key of `dns_clients`: a prefix of source addresses. */
struct dns_client {
	__u32 bits;
	__u8 addr[16];
};

/* The only value of `names_settings`. */
struct names_settings {
	__be32 ttl;
	__u8 soa[NAMES_SOA];
};

/* Indices of `names_counts`: answers by query type. */
enum names_count {
	NAMES_A,
	NAMES_AAAA,
	NAMES_COUNTS,
};

#endif
