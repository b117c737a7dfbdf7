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
 * The maps are pinned and outlive the agent that made them, all maps of one ABI in a folder of its number.
 * Whoever changes a layout raises ABI_VERSION: an agent of another ABI fills maps of its own before it puts
 * its programs in the place of those that run, in an upgrade as in a rollback (package datapath).
 */
#ifndef ISTHMUS_ABI_H
#define ISTHMUS_ABI_H

#include <linux/types.h>

#define ABI_VERSION 3

/* Lets the compiler move an address by words. */
#define ADDR_ALIGNED __attribute__((aligned(4)))
/* An address that a pointer to bytes is to, or that is one of two: clang would move it byte by byte. */
#define ADDR(bytes) __builtin_assume_aligned(bytes, 4)

/* Key of `frontends`: one VIP, port and protocol. */
struct frontend_key {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port; /* host order, 0 never occurs */
	__u8 proto; /* IPPROTO_TCP, IPPROTO_UDP or IPPROTO_SCTP */
	__u8 pad;   /* must be zero: hash maps compare every byte */
};
_Static_assert(sizeof(struct frontend_key) == 20, "frontend_key is 20 bytes");

/* Flags of struct frontend. */
enum frontend_flags {
	FRONTEND_MAGLEV = 1, /* the slots are a Maglev table: the client's hash picks one, not chance */
};

/* Value of `frontends`. The frontend's slots are numbered 0 to count-1; 0 refuses every client. */
struct frontend {
	__u32 id; /* 0 never occurs */
	__u32 count;
	__u32 service;	/* key of `services` */
	__u32 affinity; /* for so many seconds a client keeps its backend; 0 without session affinity */
	enum frontend_flags flags;
};
_Static_assert(sizeof(struct frontend) == 20, "frontend is 20 bytes");

/* Key of `slots`, whose value is a backend id. */
struct slot_key {
	__u32 frontend_id;
	__u32 slot;
};
_Static_assert(sizeof(struct slot_key) == 8, "slot_key is 8 bytes");

/* Flags of struct backend. */
enum backend_flags {
	BACKEND_DRAINING = 1, /* keeps what it has and gets nothing new, not by session affinity either */
};

/* Value of `backends`, whose key is a backend id, 0 never occurs. What address an id names never changes. */
struct backend {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port; /* host order */
	__u8 proto;
	__u8 pad;      /* zero */
	__u16 cluster; /* index of `clusters` */
	__u8 pad2[2];  /* zero */
	enum backend_flags flags;
};
_Static_assert(sizeof(struct backend) == 28, "backend is 28 bytes");

/* Value of `services`, whose key is a service number, 0 never occurs. */
struct service {
	char name[128]; /* namespace/name, for people */
	__u64 chosen;	/* how often a backend was picked for a client */
};
_Static_assert(sizeof(struct service) == 136, "service is 136 bytes");

/* Value of `clusters`, an array. Index 0 is for whatever has no cluster. Only what a member's endpoints did is
 * counted, never what was sent to them. Times are of CLOCK_BOOTTIME, in ns; 0 is never. */
struct cluster {
	char id[64];
	__u64 established; /* handshakes that ended well */
	__u64 timed_out;   /* and those that nobody answered */
	__u64 reset;	   /* and those that were refused */
	__u64 silent;	   /* retransmission timeouts, in a handshake or after it */
	__u64 answered_at; /* when something last came from there */
	__u64 silent_at;   /* when something last did not */
};
_Static_assert(sizeof(struct cluster) == 112, "cluster is 112 bytes");

/* Key of `ranges`, a longest-prefix trie of the ClusterSet's address ranges: an address in one of them that has no
 * frontend is refused. */
struct range_key {
	__u32 prefixlen; /* of the 128 bits: an IPv4 /8 is 104 */
	__u8 addr[16] ADDR_ALIGNED;
};
_Static_assert(sizeof(struct range_key) == 20, "range_key is 20 bytes");

/* Key of `affinities`: a client of a frontend. */
struct affinity_key {
	__u8 client[16] ADDR_ALIGNED; /* its address, or zeros and the cookie of its network namespace */
	__u32 frontend_id;
};
_Static_assert(sizeof(struct affinity_key) == 20, "affinity_key is 20 bytes");

/* Value of `affinities`. */
struct affinity {
	__u64 last; /* when the client was last given this backend, CLOCK_BOOTTIME in ns */
	__u32 backend_id;
	__u32 frontend_id; /* the key's: the programs see by it whether the entry is still the one they found */
};
_Static_assert(sizeof(struct affinity) == 16, "affinity is 16 bytes");

/* Flags of struct sock_vip. */
enum sock_vip_flags {
	SOCK_VIP_CONNECTED = 1, /* the socket is connected: vip and backend hold */
	SOCK_VIP_SENT = 2,	/* unconnected sends went to VIPs that stand in `udp_vips` */
	SOCK_VIP_FIRST = 4,	/* vip and backend are of the first unconnected send, and not in `udp_vips` */
};

/* Value of `tcp_vips`, an array: where a TCP socket that is connected to a VIP has its entry says tcp_vips.h. */
struct tcp_vip {
	__u64 cookie; /* of the socket, 0 in a free entry, whose other fields say nothing */
	__u8 vip[16] ADDR_ALIGNED;
	__u8 backend[16] ADDR_ALIGNED;
	__u16 vip_port;	    /* host order */
	__u16 backend_port; /* host order */
	__u32 backend_id;
	__u32 service; /* key of `services` */
	__u16 cluster; /* index of `clusters` */
	__u8 pad[10];  /* zero */
};
_Static_assert(sizeof(struct tcp_vip) == 64, "tcp_vip is 64 bytes");

/* Value of `sock_vips`, the storage of a socket that met a VIP and has no entry in `tcp_vips`. */
struct sock_vip {
	__u8 vip[16] ADDR_ALIGNED;
	__u8 backend[16] ADDR_ALIGNED;
	__u16 vip_port;	    /* host order */
	__u16 backend_port; /* host order */
	enum sock_vip_flags flags;
	__u32 backend_id;
	__u32 service; /* key of `services` */
	__u16 cluster; /* index of `clusters` */
	__u8 pad[6];   /* zero */
};
_Static_assert(sizeof(struct sock_vip) == 56, "sock_vip is 56 bytes");

/* Key of `udp_vips`, for sockets of more than one VIP: whose datagrams from this backend carry the name of a VIP. */
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

/* Why a client was refused, or a packet dropped. Numbers are for ever; append before _MAX. */
enum drop_reason {
	DROP_REASON_NONE = 0,	      /* never counted */
	DROP_REASON_NO_BACKEND = 1,   /* the VIP has no ready backend */
	DROP_REASON_BACKEND_GONE = 2, /* the backend vanished while it was picked, twice */
	DROP_REASON_NO_MEMORY = 3,    /* no room to remember which VIP a UDP socket spoke to */
	DROP_REASON_NO_FRONTEND = 4,  /* an address of the ClusterSet that nobody serves, at this port or at all */
	DROP_REASON_MALFORMED = 5,    /* a packet shorter than its headers say, or with a header that cannot be */
	DROP_REASON_FRAGMENT = 6,     /* a fragment whose first one, with the ports, was not seen before */
	DROP_REASON_PROTOCOL = 7,     /* neither TCP, UDP, SCTP nor an ICMP error about them */
	DROP_REASON_SCTP_PORT =
		8, /* SCTP to another port than the backend's, in fragments: the checksum is over all of them */
	DROP_REASON_NO_CONNECTION =
		9, /* in the middle of a connection that is not known, after a full table or a long silence */
	DROP_REASON_ITSELF = 10,     /* the backends found for a client were itself: only ABI 2 refused that */
	DROP_REASON_UNANSWERED = 11, /* a packet that was refused, for another reason, without a word: too many are */
	DROP_REASON_MAX = 12,
};
_Static_assert(DROP_REASON_MAX == 12, "a new reason needs its name in bpf/abi.go and docs");

/* Key of `refusals`, whose value is a count. */
struct refusal_key {
	__u32 service; /* key of `services`, 0 when there is none to blame */
	enum drop_reason reason;
};
_Static_assert(sizeof(struct refusal_key) == 8, "refusal_key is 8 bytes");

/* What an event tells. */
enum event_kind {
	EVENT_CHOSEN = 1,  /* a client was given a backend */
	EVENT_REFUSED = 2, /* a client was refused */
};

/* How a client came. */
enum event_path {
	PATH_SOCKET = 1,
	PATH_PACKET = 2,
};

/* A record of the ring buffer `events`. */
struct event {
	__u64 time;		      /* CLOCK_BOOTTIME in ns */
	__u8 client[16] ADDR_ALIGNED; /* zeros on the socket path, where it has no address yet */
	__u8 vip[16] ADDR_ALIGNED;
	__u8 backend[16] ADDR_ALIGNED; /* zeros when refused */
	__u64 netns;		       /* the cookie of the client's network namespace, 0 when not known */
	__u32 pid;		       /* of the client, 0 when not known */
	__u32 service;		       /* key of `services`, 0 when there is none */
	enum drop_reason reason;
	__u16 client_port; /* all ports in host order */
	__u16 vip_port;
	__u16 backend_port;
	__u16 cluster; /* index of `clusters` */
	enum event_kind kind;
	enum event_path path;
	__u8 proto;
	__u8 pad[3]; /* zero */
	char comm[16];
};
_Static_assert(sizeof(struct event) == 112, "event is 112 bytes");

/* The one value of `settings`. */
struct settings {
	__u32 observe; /* of so many choices one becomes an event: 0 none, 1 all; refusals always do unless it is 0 */
	__u32 pad;     /* zero */
};
_Static_assert(sizeof(struct settings) == 8, "settings is 8 bytes");

/*
 * The packet path. Its maps are in packet_maps.h.
 */

/* Flags of struct packet_settings. */
enum packet_flags {
	PACKET_VIPS_IN_RANGES = 1, /* no frontend lies outside of `ranges`: packets to elsewhere leave at once */
	PACKET_ADOPT = 2,	   /* TCP in the middle of an unknown connection gets a backend, not a reset */
	PACKET_FAST = 4,	   /* flows may take the fast road */
	PACKET_ONE_RANGE = 8,	   /* `ranges` holds nothing but net4 and net6 */
};

/* The one value of `packet_settings`. Every range of `ranges` lies in net4/mask4 or net6/mask6, so that an address is
 * known not to be in any without a look there. For a family without ranges the net is no part of its mask. */
struct packet_settings {
	enum packet_flags flags;
	__u32 net4; /* these four in network order */
	__u32 mask4;
	__u8 net6[16] ADDR_ALIGNED;
	__u8 mask6[16] ADDR_ALIGNED;
};
_Static_assert(sizeof(struct packet_settings) == 44, "packet_settings is 44 bytes");

/* Flags of struct device. With PACKET_FAST a flow whose first packet came from a PEER and whose way to its backend
 * leaves by an UPLINK takes the fast road, past the node's routing and netfilter; every other flow takes the slow one,
 * through them. */
enum device_flags {
	DEVICE_PEER =
		1, /* a CLIENT that is a veth whose other end is a pod's: what is redirected to it appears there */
	DEVICE_UPLINK = 2, /* from_network runs at its ingress */
	DEVICE_CLIENT = 4, /* a pod or a VM is at its other end, and answers to it leave the node there */
};

/* Value of `devices`, whose key is an interface index. A device that is not there has no flags. */
struct device {
	enum device_flags flags;
};
_Static_assert(sizeof(struct device) == 4, "device is 4 bytes");

/* Key of `conns`: one direction of a flow, as its packets look before they are translated. */
struct conn_key {
	__u8 client[16] ADDR_ALIGNED;
	__u8 server[16] ADDR_ALIGNED; /* the VIP, or in replies the backend */
	__u16 client_port;	      /* host order, as all ports here */
	__u16 server_port;
	__u8 proto;
	__u8 reply;  /* 1 in the direction from the backend to the client */
	__u8 pad[2]; /* zero */
};
_Static_assert(sizeof(struct conn_key) == 40, "conn_key is 40 bytes");

/* How far a flow has come. How long one may be silent before it is forgotten depends on it (conntrack.h). */
enum conn_state {
	CONN_OPENING = 0,  /* nothing came back yet */
	CONN_ANSWERED = 1, /* the backend answered the handshake, the client has not confirmed it */
	CONN_OPEN = 2,
	CONN_HALF = 3,	  /* one side has said that it will send no more */
	CONN_CLOSING = 4, /* both have */
	CONN_CLOSED = 5,  /* one side has reset it */
} __attribute__((packed));

/* Flags of struct conn. */
enum conn_flags {
	CONN_FAST = 1,	     /* takes the fast road, both directions */
	CONN_VIA6 = 2,	     /* `via` is an IPv6 address */
	CONN_FIN_CLIENT = 4, /* the client has sent its FIN */
	CONN_FIN_SERVER = 8, /* the backend has */
	CONN_SELF = 16,	     /* the client is its own backend, and each side of it sees the VIP as the other */
	CONN_BACK = 32,	     /* with CONN_SELF: the direction from the backend to the client */
} __attribute__((packed));

/* Value of `conns`. A flow has two, one a direction, and each holds the key of the other. With CONN_SELF both are keyed
 * as packets from the client to the VIP: what the two sides send differs in its ports alone. */
struct conn {
	__u8 addr[16] ADDR_ALIGNED; /* takes the place of the key's server: the backend, or in replies the VIP */
	__u8 via[16] ADDR_ALIGNED;  /* on the fast road to the backend: the next hop, IPv4 in the first four bytes */
	__u64 seen;		    /* when a packet last came, CLOCK_MONOTONIC in ns, to a second */
	__u32 backend_id;
	__u32 service; /* key of `services` */
	__u32 ifindex; /* on the fast road: the device to send to, or in replies the client's */
	__u16 server_port;
	__u16 client_port; /* another than the key's when two VIPs of a client meet at one backend */
	__u16 cluster;	   /* index of `clusters` */
	__u16 mtu;	   /* on the fast road to the backend */
	enum conn_state state;
	enum conn_flags flags;
	__u16 looked; /* when the clock was last looked at, in 64 ticks of the kernel, the low bits; ABI 2 has 0 here */
};
_Static_assert(sizeof(struct conn) == 64, "conn is 64 bytes");

/* Value of `roads`, one a CPU: the way from a client's device to a backend, as a flow has found it. */
struct road {
	__u8 client[16] ADDR_ALIGNED;
	__u8 via[16] ADDR_ALIGNED; /* the next hop, as in struct conn */
	__u32 device;		   /* the client's: an interface index */
	__u32 backend_id;	   /* 0 when nothing is known */
	__u32 looked;		   /* when, in 64 ticks of the kernel */
	__u32 ifindex;		   /* the device to send to */
	__u16 mtu;
	enum conn_flags flags; /* CONN_VIA6 */
	__u8 pad[5];	       /* zero */
};
_Static_assert(sizeof(struct road) == 56, "road is 56 bytes");

/* Value of `answers`, one a CPU: how many refusals were answered in a second. */
struct answers {
	__u64 since; /* when the second began, CLOCK_MONOTONIC in ns */
	__u64 given;
};
_Static_assert(sizeof(struct answers) == 16, "answers is 16 bytes");

/* Key of `fragments`: the datagram a fragment is of. */
struct fragment_key {
	__u8 source[16] ADDR_ALIGNED;
	__u8 destination[16] ADDR_ALIGNED;
	__u32 id; /* as on the wire */
	__u8 proto;
	__u8 pad[3]; /* zero */
};
_Static_assert(sizeof(struct fragment_key) == 40, "fragment_key is 40 bytes");

/* Value of `fragments`: the ports, which only the first fragment carries. */
struct fragment {
	__u64 seen; /* when it came, CLOCK_MONOTONIC in ns */
	__u16 client_port;
	__u16 server_port;
	__u8 pad[4]; /* zero */
};
_Static_assert(sizeof(struct fragment) == 16, "fragment is 16 bytes");

#endif
