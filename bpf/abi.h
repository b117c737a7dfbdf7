/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The ABI between the BPF programs and the agent: map keys, map values, flags and drop reasons,
 * written once. bpf2go turns it into Go types (sock_bpfel.go), abi.go gives them their Go names.
 *
 * An address is always 16 bytes in network order: IPv6, or IPv4 as ::ffff:a.b.c.d.
 *
 * Ports are in HOST byte order, unlike on the wire and unlike in most BPF programs. A person who runs
 * `bpftool map dump` must read 80 there and not 20480; the programs swap once, where they touch the
 * socket address (addr.h), and nowhere else is there a port in network order.
 *
 * The maps are pinned and outlive the agent that made them. A layout, once released, never changes
 * under its name: a changed one gets a new map name (frontends_v2) and a migration.
 */
#ifndef ISTHMUS_ABI_H
#define ISTHMUS_ABI_H

#include <linux/types.h>

/* Lets the compiler move an address by words. */
#define ADDR_ALIGNED __attribute__((aligned(4)))

/* Key of `frontends`: one VIP, port and protocol. */
struct frontend_key {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port; /* host order, 0 never occurs */
	__u8 proto; /* IPPROTO_TCP or IPPROTO_UDP */
	__u8 pad;   /* must be zero: hash maps compare every byte */
};
_Static_assert(sizeof(struct frontend_key) == 20, "frontend_key is 20 bytes");

/* Value of `frontends`. The frontend's slots are numbered 0 to count-1; 0 refuses every client. */
struct frontend {
	__u32 id; /* 0 never occurs */
	__u32 count;
};
_Static_assert(sizeof(struct frontend) == 8, "frontend is 8 bytes");

/* Key of `slots`, whose value is a backend id. */
struct slot_key {
	__u32 frontend_id;
	__u32 slot;
};
_Static_assert(sizeof(struct slot_key) == 8, "slot_key is 8 bytes");

/* Value of `backends`, whose key is a backend id, 0 never occurs. What an id names never changes. */
struct backend {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port; /* host order */
	__u8 proto;
	__u8 pad; /* zero */
};
_Static_assert(sizeof(struct backend) == 20, "backend is 20 bytes");

/* Flags of struct sock_vip. */
enum sock_vip_flags {
	SOCK_VIP_CONNECTED = 1, /* the socket is connected: vip and backend hold */
	SOCK_VIP_SENT = 2,	/* an unconnected send went to some VIP: look into `udp_vips` */
};

/* Value of `sock_vips`, the storage of a socket that met a VIP. Sockets without it cost nothing. */
struct sock_vip {
	__u8 vip[16] ADDR_ALIGNED;
	__u8 backend[16] ADDR_ALIGNED;
	__u16 vip_port;	    /* host order */
	__u16 backend_port; /* host order */
	__u32 flags;	    /* enum sock_vip_flags */
};
_Static_assert(sizeof(struct sock_vip) == 40, "sock_vip is 40 bytes");

/* Key of `udp_vips`: whose datagrams from this backend carry the name of a VIP. */
struct udp_vip_key {
	__u64 cookie; /* of the socket */
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port;  /* host order */
	__u8 pad[6]; /* zero */
};
_Static_assert(sizeof(struct udp_vip_key) == 32, "udp_vip_key is 32 bytes");

/* Value of `udp_vips`. */
struct udp_vip {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port;  /* host order */
	__u8 pad[2]; /* zero */
};
_Static_assert(sizeof(struct udp_vip) == 20, "udp_vip is 20 bytes");

/* Index of `refusals`: why a client was refused. Numbers are for ever; append before _MAX. */
enum drop_reason {
	DROP_REASON_NONE = 0,	      /* never counted */
	DROP_REASON_NO_BACKEND = 1,   /* the VIP has no ready backend */
	DROP_REASON_BACKEND_GONE = 2, /* the backend vanished while it was picked, twice */
	DROP_REASON_NO_MEMORY = 3,    /* no room to remember which VIP a UDP socket spoke to */
	DROP_REASON_MAX = 4,
};
_Static_assert(DROP_REASON_MAX == 4, "a new reason needs its name in bpf/abi.go and docs");

#endif
