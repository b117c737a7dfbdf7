/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The ABI between the BPF programs and the agent: map keys, map values, flags and drop reasons. It is written here
 * once. bpf2go generates Go types from it (sock_bpfel.go), and abi.go gives them exported names.
 *
 * An address is always 16 bytes in network order: IPv6, or IPv4 as ::ffff:a.b.c.d.
 *
 * Ports are in HOST byte order, unlike on the wire and unlike in most BPF programs, so that `bpftool map dump` prints
 * 80 and not 20480. The programs swap a port once, where they read or write a socket address (sock_addr.h) or a packet
 * (packet_parse.h). No other code sees a port in network order.
 *
 * Maps are pinned and outlive the agent that created them. All maps of one ABI share a folder named after its number.
 * Raise ABI_VERSION when a layout or a map's name changes. An agent of another ABI fills its own maps before it
 * replaces the running programs, in an upgrade and in a rollback (package datapath).
 */
#ifndef ISTHMUS_ABI_H
#define ISTHMUS_ABI_H

#include <linux/types.h>

#define ABI_VERSION 4

#define NS_PER_S 1000000000ULL

/* Lets the compiler move an address in words. */
#define ADDR_ALIGNED __attribute__((aligned(4)))
/* Tells clang that a plain byte pointer points to an address. Without it clang copies byte by byte. */
#define ADDR(bytes) __builtin_assume_aligned(bytes, 4)

/* Key of `frontends`: one VIP, port and protocol. */
struct frontend_key {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port; /* host order, never 0 */
	__u8 proto; /* IPPROTO_TCP, IPPROTO_UDP or IPPROTO_SCTP */
	__u8 pad;   /* must be zero: hash maps compare every byte */
};
_Static_assert(sizeof(struct frontend_key) == 20, "frontend_key is 20 bytes");

/* Flags of struct frontend. */
enum frontend_flags {
	FRONTEND_MAGLEV = 1, /* the slots are a Maglev table, the same on every machine */
};

/* Value of `frontends`. A frontend has slots 0 to count-1. With count 0 every client is refused. */
struct frontend {
	__u32 id; /* never 0 */
	__u32 count;
	__u32 service;	/* key of `services` */
	__u32 affinity; /* session affinity timeout in seconds; 0 without session affinity */
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
	BACKEND_DRAINING = 1, /* keeps its connections and gets no new ones, not even by session affinity */
};

/* Value of `backends`, whose key is a backend id, never 0. The address behind an id never changes. */
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

/* Value of `services`, whose key is a service number, never 0. */
struct service {
	char name[128]; /* namespace/name, for humans */
	__u64 chosen;	/* how often a backend was chosen for a client */
};
_Static_assert(sizeof(struct service) == 136, "service is 136 bytes");

/* Value of `clusters`, an array. Index 0 stands for backends without a cluster. Counters count what a member's
 * endpoints did, never what was sent to them. Times are CLOCK_BOOTTIME in ns; 0 means never. */
struct cluster {
	char id[64];
	__u64 established; /* handshakes that completed */
	__u64 timed_out;   /* handshakes that got no answer */
	__u64 reset;	   /* handshakes that were refused */
	__u64 silent;	   /* retransmission timeouts, during a handshake or after it */
	__u64 answered_at; /* when an endpoint last answered */
	__u64 silent_at;   /* when an endpoint last failed to answer */
};
_Static_assert(sizeof(struct cluster) == 112, "cluster is 112 bytes");

/* Key of `ranges`, a longest-prefix trie of the ClusterSet's address ranges. An address inside a range that has no
 * frontend is refused. */
struct range_key {
	__u32 prefixlen; /* of the 128 bits: an IPv4 /8 is 104 */
	__u8 addr[16] ADDR_ALIGNED;
};
_Static_assert(sizeof(struct range_key) == 20, "range_key is 20 bytes");

/* Key of `affinities`: a client of a frontend. */
struct affinity_key {
	__u8 client[16] ADDR_ALIGNED; /* the client's address, or zeros and the cookie of its network namespace */
	__u32 frontend_id;
};
_Static_assert(sizeof(struct affinity_key) == 20, "affinity_key is 20 bytes");

/* Value of `affinities`. */
struct affinity {
	__u64 last; /* when the client last got this backend, CLOCK_BOOTTIME in ns */
	__u32 backend_id;
	__u32 frontend_id; /* that of the key; programs detect by it that the map has reused the entry */
};
_Static_assert(sizeof(struct affinity) == 16, "affinity is 16 bytes");

/* Flags of struct sock_vip. */
enum sock_vip_flags {
	SOCK_VIP_CONNECTED = 1, /* the socket is connected: vip and backend are valid */
	SOCK_VIP_SENT = 2,	/* unconnected sends went to VIPs that `udp_vips` holds */
	SOCK_VIP_FIRST = 4, /* vip and backend belong to the first unconnected send, which `udp_vips` does not hold */
};

/* Value of `tcp_vips`, an array. tcp_vips.h says which entry a TCP socket that is connected to a VIP has. */
struct tcp_vip {
	__u64 cookie; /* of the socket; 0 in a free entry, whose other fields are meaningless */
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

/* Value of `sock_vips`, the storage of a socket that used a VIP and has no entry in `tcp_vips`. */
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

/* Key of `udp_vips`, for sockets with more than one VIP: the socket, and the backend that a datagram comes from. */
struct udp_vip_key {
	__u64 cookie; /* of the socket */
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port;  /* host order */
	__u8 pad[6]; /* zero */
};
_Static_assert(sizeof(struct udp_vip_key) == 32, "udp_vip_key is 32 bytes");

/* Value of `udp_vips`: the VIP that the datagram's sender address becomes. */
struct udp_vip {
	__u8 addr[16] ADDR_ALIGNED;
	__u16 port;  /* host order */
	__u8 pad[2]; /* zero */
};
_Static_assert(sizeof(struct udp_vip) == 20, "udp_vip is 20 bytes");

/* Why a client was refused or a packet dropped. Numbers never change; append before _MAX. */
enum drop_reason {
	DROP_REASON_NONE = 0,	       /* never counted */
	DROP_REASON_NO_BACKEND = 1,    /* the VIP has no ready backend */
	DROP_REASON_BACKEND_GONE = 2,  /* the chosen backend was removed meanwhile, twice in a row */
	DROP_REASON_NO_MEMORY = 3,     /* no memory to store a UDP socket's VIP or a flow */
	DROP_REASON_NO_FRONTEND = 4,   /* an address of the ClusterSet without a frontend for this port */
	DROP_REASON_MALFORMED = 5,     /* a packet shorter than its headers say, or with an invalid header */
	DROP_REASON_FRAGMENT = 6,      /* a fragment whose first fragment, with the ports, was not seen before */
	DROP_REASON_PROTOCOL = 7,      /* neither TCP, UDP, SCTP nor an ICMP error about them */
	DROP_REASON_SCTP_PORT = 8,     /* fragmented SCTP whose port would change: the checksum covers all fragments */
	DROP_REASON_NO_CONNECTION = 9, /* mid-connection, but the flow is unknown: evicted or timed out */
	DROP_REASON_ITSELF = 10,       /* the only backend was the client itself: only ABI 2 refused that */
	DROP_REASON_UNANSWERED = 11,   /* refused for another reason, but over the rate limit of refusal replies */
	DROP_REASON_NEW_FLOWS = 12,    /* a new flow beyond the limit of its CPU, or of its client */
	DROP_REASON_MAX = 13,
};
_Static_assert(DROP_REASON_MAX == 13, "a new reason needs its name in bpf/abi.go and docs");

/* Key of `refusals`, whose value is a count. */
struct refusal_key {
	__u32 service; /* key of `services`, 0 without a Service; on a gateway a frontend id */
	enum drop_reason reason;
};
_Static_assert(sizeof(struct refusal_key) == 8, "refusal_key is 8 bytes");

/* Kind of an event. */
enum event_kind {
	EVENT_CHOSEN = 1,  /* a client got a backend */
	EVENT_REFUSED = 2, /* a client was refused */
};

/* Path that a client's traffic took. */
enum event_path {
	PATH_SOCKET = 1,
	PATH_PACKET = 2,
};

/* A record of the ring buffer `events`. */
struct event {
	__u64 time;		      /* CLOCK_BOOTTIME in ns */
	__u8 client[16] ADDR_ALIGNED; /* zeros on the socket path, where the socket has no address yet */
	__u8 vip[16] ADDR_ALIGNED;
	__u8 backend[16] ADDR_ALIGNED; /* zeros in a refusal */
	__u64 netns;		       /* cookie of the client's network namespace, 0 if unknown */
	__u32 pid;		       /* of the client, 0 if unknown */
	__u32 service;		       /* key of `services`, 0 without a Service */
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

/* The only value of `settings`. */
struct settings {
	__u32 observe; /* 0: no events; n: an event for every refusal, and for one of n choices */
	__u32 pad;     /* zero */
};
_Static_assert(sizeof(struct settings) == 8, "settings is 8 bytes");

/*
 * The packet path. Its maps are in flow_maps.h and packet_maps.h.
 */

/* Flags of struct packet_settings. */
enum packet_flags {
	PACKET_VIPS_IN_RANGES = 1, /* every frontend lies inside `ranges`: packets to other addresses pass at once */
	PACKET_ADOPT = 2,	   /* a TCP packet of an unknown connection gets a backend instead of a reset */
	PACKET_FAST = 4,	   /* flows may take the fast path */
	PACKET_ONE_RANGE = 8,	   /* `ranges` holds only net4 and net6 */
};

/* The only value of `packet_settings`. net4/mask4 and net6/mask6 cover every range of `ranges`, so that most addresses
 * are known to lie outside without a map lookup. A family without ranges has a net that its mask can never yield. */
struct packet_settings {
	enum packet_flags flags;
	__u32 net4; /* these four in network order */
	__u32 mask4;
	__u8 net6[16] ADDR_ALIGNED;
	__u8 mask6[16] ADDR_ALIGNED;
};
_Static_assert(sizeof(struct packet_settings) == 44, "packet_settings is 44 bytes");

/* Flags of struct device. With PACKET_FAST a flow takes the fast path, past the node's routing and netfilter, if its
 * first packet arrives from a PEER and its route to the backend leaves by an UPLINK. Every other flow takes the slow
 * path, through routing and netfilter. */
enum device_flags {
	DEVICE_PEER = 1,   /* a CLIENT that is a veth to a pod: packets redirected to its peer appear in the pod */
	DEVICE_UPLINK = 2, /* from_network runs at its ingress */
	DEVICE_CLIENT = 4, /* a pod or a VM is behind it, and replies to that leave the node through it */
};

/* Value of `devices`, whose key is an interface index. A device without an entry has no flags. */
struct device {
	enum device_flags flags;
};
_Static_assert(sizeof(struct device) == 4, "device is 4 bytes");

/* Key of `flows` and `handshakes`: one direction of a flow, as its packets look before translation. */
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

/* State of a flow. The idle timeout depends on it (flow.h). */
enum conn_state {
	CONN_OPENING = 0,  /* the backend has not answered yet */
	CONN_ANSWERED = 1, /* the backend answered the handshake, the client has not confirmed it */
	CONN_OPEN = 2,
	CONN_HALF = 3,	  /* one side has closed its direction */
	CONN_CLOSING = 4, /* both sides have */
	CONN_CLOSED = 5,  /* one side has reset it */
} __attribute__((packed));

/* Flags of struct conn. */
enum conn_flags {
	CONN_FAST = 1,	     /* takes the fast path, in both directions */
	CONN_VIA6 = 2,	     /* `via` is an IPv6 address */
	CONN_FIN_CLIENT = 4, /* the client has sent its FIN */
	CONN_FIN_SERVER = 8, /* the backend has. Before CONN_OPEN, when no FIN counts: the backend began the flow */
	CONN_SELF = 16,	     /* the client is its own backend: both sides see the VIP as their peer */
	CONN_BACK = 32,	     /* with CONN_SELF: the direction from the backend to the client */
} __attribute__((packed));

/* Flags of a TCP sender's window. The low bits are its scale (RFC 7323). */
enum conn_window {
	WINDOW_SCALE = 15,
	WINDOW_KNOWN = 16,   /* `ack` and `edge` are valid: the handshake passed here */
	WINDOW_SCALED = 32,  /* the SYN offers a scale */
	WINDOW_SYN = 64,     /* the client has sent a SYN: `ack` accepts it, and `edge` is the size of its window */
	WINDOW_SECOND = 128, /* on a gateway: an entry of the second translation, which copies the state of the first */
} __attribute__((packed));

/* Value of `flows` and `handshakes`. A flow has two entries, one for each direction, and each entry holds the key of
 * the other. With CONN_SELF both keys look like packets from the client to the VIP, and only the ports differ. */
struct conn {
	__u8 addr[16] ADDR_ALIGNED; /* replaces the key's server: the backend, or in replies the VIP */
	__u8 via[16] ADDR_ALIGNED;  /* fast path to the backend: the next hop, IPv4 in the first four bytes */
	__u64 seen;		    /* when the last packet came, CLOCK_MONOTONIC in ns, to the second */
	__u32 backend_id;
	__u32 service; /* key of `services`; on a gateway a frontend id */
	__u32 ifindex; /* fast path: the device to send to, or in replies the client's */
	__u16 server_port;
	__u16 client_port; /* differs from the key's if two VIPs lead a client's port to one backend: the NAT port */
	__u16 cluster;	   /* index of `clusters` */
	__u16 mtu;	   /* fast path to the backend */
	enum conn_state state;
	enum conn_flags flags;
	__u16 checked_at; /* when a packet last compared `seen` with the clock: low bits of coarse_ticks() */
	__u32 ack;	  /* highest number that a packet of this direction has acknowledged */
	__u32 edge;	  /* end of the window that it has announced */
	enum conn_window window;
	__u8 pad[7]; /* zero */
};
_Static_assert(sizeof(struct conn) == 80, "conn is 80 bytes");

/* Value of `conns`, the flows of older builds: what struct conn begins with. */
struct old_conn {
	__u64 words[8];
};
_Static_assert(sizeof(struct old_conn) == __builtin_offsetof(struct conn, ack), "old_conn is the start of conn");

/* Value of `route_cache`, one for each CPU: the route from a client's device to a backend, as a flow has found it. */
struct route_cache {
	__u8 client[16] ADDR_ALIGNED;
	__u8 via[16] ADDR_ALIGNED; /* the next hop, as in struct conn */
	__u32 device;		   /* interface index of the client's device */
	__u32 backend_id;	   /* 0 in an empty entry */
	__u32 checked_at;	   /* when the route was looked up, in coarse_ticks() */
	__u32 ifindex;		   /* the device to send to */
	__u16 mtu;
	enum conn_flags flags; /* CONN_VIA6 */
	__u8 pad[5];	       /* zero */
};
_Static_assert(sizeof(struct route_cache) == 56, "route_cache is 56 bytes");

/* Value of `answers` and `new_flows`, for each CPU: the rate of replies to refused packets, and of new flows. */
struct answers {
	__u64 since; /* when the current second began, CLOCK_MONOTONIC in ns */
	__u64 given; /* replies sent, or flows opened, in that second */
};
_Static_assert(sizeof(struct answers) == 16, "answers is 16 bytes");

/* Key of `fragments`: the datagram that a fragment belongs to. */
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
	__u64 seen; /* when the first fragment came, CLOCK_MONOTONIC in ns */
	__u16 client_port;
	__u16 server_port;
	__u8 pad[4]; /* zero */
};
_Static_assert(sizeof(struct fragment) == 16, "fragment is 16 bytes");

#endif
