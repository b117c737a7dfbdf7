/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the balancer of a gateway has besides what it shares with the packet path of a node: keys, values and flags of
 *its own maps. All its maps are pinned in a folder of its own, also those whose layout abi.h says; nothing is shared
 *with an agent on the same machine. Whoever changes a layout raises GATEWAY_ABI_VERSION.
 *
 * The balancer uses abi.h's
 *
 *	frontend	id; count, 0 without a backend; flags, those below; affinity; service is the id again
 *	backend		as it is
 *	conn		flags, those below besides CONN_FAST, CONN_VIA6 and CONN_FIN_*
 */
#ifndef ISTHMUS_GATEWAY_H
#define ISTHMUS_GATEWAY_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

#define GATEWAY_ABI_VERSION 1

/* The size of a Maglev table: a prime, 19 slots for each of 862 backends of one weight. */
#define GATEWAY_TABLE 16381

#define GATEWAY_FRONTENDS_MAX 16384

/* Flags of struct frontend. */
enum gateway_frontend_flags {
	GATEWAY_AFFINITY = 1, /* a client's address alone chooses its backend, not its port; see affinity, too */
	GATEWAY_SOURCES = 2,  /* only who stands in `sources` may connect */
};

/* Flags of struct gateway_vip. */
enum gateway_vip_flags {
	GATEWAY_OWN = 1, /* an address of the gateway itself: what is of no flow is for the gateway */
};

/* Value of `vips`, whose key is an address as everywhere: packets to it are ours. */
struct gateway_vip {
	__u8 source[16] ADDR_ALIGNED; /* takes the place of the client's address; zeros keep that */
	enum gateway_vip_flags flags;
};
_Static_assert(sizeof(struct gateway_vip) == 20, "gateway_vip is 20 bytes");

/* Value of `tables`' inner arrays, which have one: the Maglev table of a frontend. */
struct gateway_table {
	__u32 backend_ids[GATEWAY_TABLE];
};
_Static_assert(sizeof(struct gateway_table) == 65524, "gateway_table is 65,524 bytes");

/* Key of `sources`, a longest-prefix trie. */
struct gateway_source_key {
	__u32 prefixlen;   /* of the bits that follow: 32 and those of the address, of an IPv4 /8 136 */
	__u32 frontend_id; /* host order: all its bits always count */
	__u8 addr[16] ADDR_ALIGNED;
};
_Static_assert(sizeof(struct gateway_source_key) == 24, "gateway_source_key is 24 bytes");

/* Key of `members`. */
struct gateway_member {
	__u32 frontend_id;
	__u32 backend_id;
};
_Static_assert(sizeof(struct gateway_member) == 8, "gateway_member is 8 bytes");

/* Value of `origins`: what comes from a backend's address and port, of no flow, is of the one frontend that it serves.
 */
struct gateway_origin {
	struct frontend_key frontend; /* port 0 when there are several, or its clients' addresses change */
	__u32 backend_id;
};
_Static_assert(sizeof(struct gateway_origin) == 24, "gateway_origin is 24 bytes");

/* The one value of `gateway_settings`. */
struct gateway_settings {
	__u32 next_backend; /* the number that the next new backend gets: none is ever given twice. Of the agent alone
			     */
	__u32 share;	    /* 1: flows are told to `opened` */
};
_Static_assert(sizeof(struct gateway_settings) == 8, "gateway_settings is 8 bytes");

/* Value of `xdp_devices`, whose key is an interface index: the XDP program runs on it. */
struct gateway_xdp_device {
	__u8 mac[6];
	__u8 sends; /* 1: its driver sends what came in by another device */
	__u8 pad;   /* zero */
};
_Static_assert(sizeof(struct gateway_xdp_device) == 8, "gateway_xdp_device is 8 bytes");

/* Flags of struct conn, besides those of abi.h. */
enum gateway_conn_flags {
	GATEWAY_TOLD = 8,      /* of UDP, in the place of CONN_FIN_SERVER: the agent was told of it */
	GATEWAY_TWICE = 64,    /* both addresses change: the flow has two more entries, see gateway.bpf.c */
	GATEWAY_STANDBY = 128, /* another gateway told of it, and no packet of it has come here */
};

/* A record of the ring buffer `opened`: a flow that has been answered, or was taken over; of UDP one that is a second
 * old, since most are a question and its answer. */
struct gateway_opened {
	struct conn_key key;
	struct conn conn;
};
_Static_assert(sizeof(struct gateway_opened) == 104, "gateway_opened is 104 bytes");

/* Why a packet was dropped, besides the reasons of enum drop_reason. */
enum gateway_drop_reason {
	GATEWAY_DROP_SOURCE = 64,  /* a client that may not connect to this Service */
	GATEWAY_DROP_NO_FLOW = 65, /* of no flow that is known: from a backend, or of a connection under way */
	GATEWAY_DROP_TOO_BIG = 66, /* does not fit on the way to the backend; the sender was told */
	GATEWAY_DROP_HOPS = 67,	   /* made too many hops; the sender was told */
};

#endif
