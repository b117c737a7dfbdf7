/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Keys, values and flags of the maps that only a gateway's balancer has. All its maps are pinned in a folder of its
 * own, including those that abi.h describes, and an agent on the same machine shares none of them. Raise
 * GATEWAY_ABI_VERSION when a layout or a map's name changes.
 */
#ifndef ISTHMUS_GATEWAY_H
#define ISTHMUS_GATEWAY_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

#define GATEWAY_ABI_VERSION 2

/* The size of a Maglev table: a prime, 19 slots for each of 862 backends of one weight. */
#define GATEWAY_TABLE 16381

#define GATEWAY_FRONTENDS_MAX 16384

/* The ports that replace clients' are divided among the gateways of a group, in slots. */
#define GATEWAY_SLOT_PORTS 1024
/* The gateways to which packets can be handed over. */
#define GATEWAY_PEERS_MAX 32

/* Flags of struct gateway_vip. */
enum gateway_vip_flags {
	GATEWAY_OWN = 1, /* an address of the gateway itself: packets of no flow are for the gateway */
};

/* Value of `vips`, whose key is an address as everywhere. The balancer handles packets to it. */
struct gateway_vip {
	__u8 source[16] ADDR_ALIGNED; /* replaces the client's address; zeros keep that */
	enum gateway_vip_flags flags;
};
_Static_assert(sizeof(struct gateway_vip) == 20, "gateway_vip is 20 bytes");

/* Flags of struct gateway_frontend. */
enum gateway_frontend_flags {
	GATEWAY_AFFINITY = 1, /* session affinity: the client's address chooses the backend, without its port */
	GATEWAY_SOURCES = 2,  /* only clients in `sources` may connect */
};

/* Value of `frontends`. */
struct gateway_frontend {
	__u32 id;    /* never 0; `service` of its flows and refusals, since a gateway knows Services only by frontend */
	__u32 slots; /* of its Maglev table: GATEWAY_TABLE, or 0 without a backend */
	__u32 pad;   /* zero; keeps the size of ABI 1, whose ids an upgrade adopts */
	__u32 affinity_s; /* session affinity timeout; 0 without session affinity */
	enum gateway_frontend_flags flags;
};
_Static_assert(sizeof(struct gateway_frontend) == 20, "gateway_frontend is 20 bytes");

/* Value of the inner arrays of `tables`, which have one entry: the Maglev table of a frontend. */
struct gateway_table {
	__u32 backend_ids[GATEWAY_TABLE];
};
_Static_assert(sizeof(struct gateway_table) == 65524, "gateway_table is 65,524 bytes");

/* Key of `sources`, a longest-prefix trie. */
struct gateway_source_key {
	__u32 prefixlen;   /* of the bits that follow: 32 and those of the address; an IPv4 /8 is 136 */
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

/* Key of `origins`: the source of a backend's packets. Fragments carry no port, so every backend has a second entry
 * with its address alone. */
struct gateway_origin_key {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port; /* host order, 0 in the entry of the address alone */
	__u8 proto; /* 0 in the entry of the address alone */
	__u8 pad;   /* zero */
};
_Static_assert(sizeof(struct gateway_origin_key) == 20, "gateway_origin_key is 20 bytes");

/* Value of `origins`: the frontend whose flow a packet of no known flow belongs to. */
struct gateway_origin {
	struct frontend_key frontend; /* port 0 if the backend has several, or if its clients' addresses are replaced */
	__u32 backend_id;
};
_Static_assert(sizeof(struct gateway_origin) == 24, "gateway_origin is 24 bytes");

/* Value of `slots`, whose key is a port divided by GATEWAY_SLOT_PORTS. Gateways are numbers: 0 is this one, and others
 * are keys of `peers`. */
struct gateway_slot {
	__u32 shift; /* leads from this slot to one of the gateway's own, modulo their number; 0: it is its own */
	__u32 owner;
	__u32 previous; /* gets packets of no flow from the owner, if it is not the owner itself */
};
_Static_assert(sizeof(struct gateway_slot) == 12, "gateway_slot is 12 bytes");

/* The address of a gateway: a value of `peers`. */
struct gateway_peer {
	__u8 addr[16] ADDR_ALIGNED;
};
_Static_assert(sizeof(struct gateway_peer) == 16, "gateway_peer is 16 bytes");

/* Value of `peer_flows`, whose key is that of a client's packets: only this other gateway can continue the flow. */
struct gateway_peer_flow {
	struct gateway_peer owner;
	__u64 seen; /* when its client sent a packet here, or its owner announced it, CLOCK_MONOTONIC in ns */
};
_Static_assert(sizeof(struct gateway_peer_flow) == 24, "gateway_peer_flow is 24 bytes");

struct gateway_sum {
	__u64 packets;
	__u64 bytes; /* of IP packets */
};
_Static_assert(sizeof(struct gateway_sum) == 16, "gateway_sum is 16 bytes");

/* Value of `traffic`, an array whose index is a frontend's id: what this CPU has forwarded of its flows. */
struct gateway_traffic {
	struct gateway_sum to_backends;
	struct gateway_sum to_clients;
};
_Static_assert(sizeof(struct gateway_traffic) == 32, "gateway_traffic is 32 bytes");

/* The only value of `gateway_settings`. */
struct gateway_settings {
	__u32 next_backend; /* the id of the next new backend. Only the agent uses it: no id is ever reused */
	__u32 announce;	    /* 1: flows are announced in `opened` */
};
_Static_assert(sizeof(struct gateway_settings) == 8, "gateway_settings is 8 bytes");

/* Value of `xdp_devices`, whose key is an interface index: the XDP program runs on it. */
struct gateway_xdp_device {
	__u8 mac[6];
	__u8 sends; /* 1: its driver sends frames that came in by another device */
	__u8 pad;   /* zero */
};
_Static_assert(sizeof(struct gateway_xdp_device) == 8, "gateway_xdp_device is 8 bytes");

/* Flags of struct conn that only a gateway sets. CONN_SELF and CONN_BACK, which only a node sets, stay 0 here. */
enum gateway_conn_flags {
	GATEWAY_ANNOUNCED = 8,	 /* UDP, which has no FIN and so leaves CONN_FIN_SERVER free: the flow was announced */
	GATEWAY_DOUBLE_NAT = 64, /* both addresses change: the flow has two more entries (gateway.bpf.c) */
	GATEWAY_STANDBY = 128,	 /* announced by another gateway, and no packet of it has come here */
};

/* A record of the ring buffer `opened`, of 104 bytes in older builds. A flow is announced once both sides have spoken,
 * and a half-open one if only its backend has spoken here. A UDP flow is announced when it is a second old, since most
 * are one question and its answer. A standby is announced to give it back to a gateway that does not know it. */
struct gateway_opened {
	struct conn_key key;
	struct conn conn;
};
_Static_assert(sizeof(struct gateway_opened) == 120, "gateway_opened is 120 bytes");

/* Why a packet was dropped, in addition to enum drop_reason. */
enum gateway_drop_reason {
	GATEWAY_DROP_SOURCE = 64,  /* the client may not connect to this Service */
	GATEWAY_DROP_NO_FLOW = 65, /* of no known flow: from a backend, or mid-connection */
	GATEWAY_DROP_TOO_BIG = 66, /* larger than the MTU towards the backend; the sender was told */
	GATEWAY_DROP_HOPS = 67,	   /* hop limit exceeded; the sender was told */
};

#endif
