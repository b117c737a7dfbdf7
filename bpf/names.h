/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The maps of the program that answers questions of DNS. They are of one process, pinned nowhere, and no part of the
 * ABI.
 */
#ifndef ISTHMUS_NAMES_H
#define ISTHMUS_NAMES_H

#include <linux/types.h>

/* Names longer than this, on the wire, are not answered here: a multiple of 8. */
#define NAMES_LENGTH 96

/* The SOA of clusterset.local without its owner: type, class, TTL, length and data (74 bytes), all names in full, so
 * that it is right at any place of a message. */
#define NAMES_SOA 84

/* In lower case and on the wire, zero behind its end. */
struct dns_name {
	__u8 wire[NAMES_LENGTH] __attribute__((aligned(8)));
};

#define NAMES_IPV4 1
#define NAMES_IPV6 2

/* The addresses that a name has: all of them. Without one of a family a question for it has no data. */
struct dns_addresses {
	__u8 ipv4[4];
	__u8 ipv6[16];
	__u32 families;
};

/* Where questions are answered, whoever else would. */
struct dns_resolver {
	__u8 addr[16];
};

struct names_settings {
	__be32 ttl;
	__u8 soa[NAMES_SOA];
};

/* Indices of names_counts: answers by what was asked for. */
enum names_count {
	NAMES_A,
	NAMES_AAAA,
	NAMES_COUNTS,
};

#endif
