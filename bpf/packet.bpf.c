//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The packet path, for clients that the socket path does not reach: VMs, sandboxed pods, forwarded hosts and pods that
 * opted out. A packet to a VIP becomes one to a backend where it enters the node. In a reply the backend's address
 * becomes the VIP again where the reply leaves towards the client:
 *
 *	from_client	ingress of a client's device: a pod's host veth, a tap, a bridge
 *	from_network	ingress of an uplink: the same, and replies of flows on the fast path
 *	to_client	egress of a client's device
 *	to_network	egress of an uplink: the same, for clients behind it
 *
 * Each may be attached by TCX or as a direct-action filter of clsact.
 *
 * A flow takes one of two paths, the same in both directions, chosen by its first packet. On the slow path the kernel
 * routes it, through netfilter and its connection tracking, and to_client translates the replies. On the fast path
 * from_client sends it straight to the uplink and from_network straight into the pod. Each of them counts as one router
 * hop.
 *
 * packet_parse.h reads a packet, flow.h tracks its flow, packet_rewrite.h translates it, packet_refuse.h refuses it,
 * and packet_error.h translates ICMP errors.
 */
#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "choose.h"
#include "flow.h"
#include "flow_maps.h"
#include "maps.h"
#include "net.h"
#include "packet_error.h"
#include "packet_maps.h"
#include "packet_parse.h"
#include "packet_refuse.h"
#include "packet_rewrite.h"
#include "route.h"

#define PACKET_HOST 0

/* How often another NAT port is tried if one is taken. */
#define TRIES 4
/* NAT ports, which replace a client's port: the upper half, as Linux clients use it. */
#define NAT_PORT_FIRST 32768
#define NAT_PORT_COUNT 28232
/* A cached route is valid for so many coarse ticks. */
#define ROUTE_CACHE_TICKS 2

/* Never returns NULL, but the verifier requires the check. */
static __always_inline const struct packet_settings *read_settings(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&packet_settings, &zero);
}

static __always_inline enum device_flags read_device(__u32 ifindex)
{
	struct device *d = bpf_map_lookup_elem(&devices, &ifindex);

	return d ? d->flags : 0;
}

static __always_inline bool is_in_ranges(const __u8 addr[16])
{
	struct range_key range = { .prefixlen = 128 };

	__builtin_memcpy(range.addr, ADDR(addr), sizeof(range.addr));
	return bpf_map_lookup_elem(&ranges, &range);
}

static __always_inline bool covers4(const struct packet_settings *s, __u32 addr)
{
	return (addr & s->mask4) == s->net4;
}

static __always_inline bool covers6(const struct packet_settings *s, const __u8 addr[16])
{
	__u32 a[4], net[4], mask[4];

	__builtin_memcpy(a, ADDR(addr), sizeof(a));
	__builtin_memcpy(net, s->net6, sizeof(net));
	__builtin_memcpy(mask, s->mask6, sizeof(mask));
	return (a[0] & mask[0]) == net[0] && (a[1] & mask[1]) == net[1] && (a[2] & mask[2]) == net[2] &&
	       (a[3] & mask[3]) == net[3];
}

/* Reports whether an address is known not to be a VIP. */
static __always_inline bool is_no_vip(const struct packet_settings *s, const struct packet *p, const __u8 addr[16])
{
	if (!(s->flags & PACKET_VIPS_IN_RANGES))
		return false;
	if (!(p->ipv6 ? covers6(s, addr) : covers4(s, last_word(addr))))
		return true;
	return !(s->flags & PACKET_ONE_RANGE) && !is_in_ranges(addr);
}

/* Reports whether a packet's destination is known not to be a VIP. It runs first for every packet and compares only the
 * destination. It returns false if the destination is not directly readable. */
static __always_inline bool misses_vips(struct __sk_buff *skb, const struct packet_settings *s)
{
	void *start = (void *)(long)skb->data + LINK_HEADER, *end = (void *)(long)skb->data_end;
	const struct ipv4_header *h4 = start;
	const struct ipv6_header *h6 = start;

	if (!(s->flags & PACKET_VIPS_IN_RANGES))
		return false;
	if (skb->protocol == bpf_htons(ETH_P_IP) && (void *)(h4 + 1) <= end)
		return !covers4(s, h4->destination);
	if (skb->protocol == bpf_htons(ETH_P_IPV6) && (void *)(h6 + 1) <= end)
		return !covers6(s, h6->destination);
	return false;
}

/* Looks up the route from here to a flow's backend, and stores its next hop. Returns whether the route leaves by an
 * uplink. If not, the flow's entry stays as it is. */
static __noinline bool find_route(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	struct bpf_fib_lookup fib = { .l4_protocol = p->key.proto, .tot_len = ANY_LENGTH, .ifindex = skb->ifindex };
	long found;

	set_fib_addrs(&fib, p->ipv6, p->key.client, c->addr);
	fib.sport = bpf_htons(c->client_port);
	fib.dport = bpf_htons(c->server_port);
	found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (!has_route(found) || !(read_device(fib.ifindex) & DEVICE_UPLINK))
		return false;
	return store_next_hop(skb, c, &fib, found);
}

/* Looks up the route of a new flow from a DEVICE_PEER. A route that was found a moment ago for the same client and
 * backend is as good as the routes of known flows, which are looked up once a second. The kernel's lookup costs as much
 * as everything else about a flow's first packet, apart from its two entries. */
static __noinline bool find_cached_route(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	__u32 index = (hash_address(p->key.client) ^ c->backend_id) % ROUTE_CACHE_MAX;
	struct route_cache *r = bpf_map_lookup_elem(&route_cache, &index);
	__u32 now = coarse_ticks();

	if (!r)
		return false;
	if (r->backend_id == c->backend_id && r->device == skb->ifindex && now - r->checked_at < ROUTE_CACHE_TICKS &&
	    same_addr(r->client, p->key.client)) {
		__builtin_memcpy(c->via, r->via, sizeof(c->via));
		c->ifindex = r->ifindex;
		c->mtu = r->mtu;
		c->flags |= r->flags;
		return read_device(c->ifindex) & DEVICE_UPLINK; /* the agent may have detached from it */
	}
	if (!find_route(skb, p, c))
		return false;
	__builtin_memcpy(r->client, p->key.client, sizeof(r->client));
	__builtin_memcpy(r->via, c->via, sizeof(r->via));
	r->device = skb->ifindex;
	r->backend_id = c->backend_id;
	r->checked_at = now;
	r->ifindex = c->ifindex;
	r->mtu = c->mtu;
	r->flags = c->flags & CONN_VIA6;
	return true;
}

/* Compares a flow's age with the clock, and refreshes both entries and the route once a second. Returns false if the
 * flow is over: it has timed out, or it is UDP and its backend was removed, so that another backend may take over. */
__noinline int refresh_conn(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	__u32 client_device, backend_id;
	__u64 now = now_ns();
	struct cluster *cl;

	if (!p || !c)
		return false;
	backend_id = c->backend_id; /* Linux 6.1 accepts no map key in memory that the caller passed */
	client_device = is_from_backend(&p->key, c) ? 0 : skb->ifindex;
	if (!is_alive(p->key.proto, c, now))
		return false;
	c->checked_at = coarse_ticks();
	if (since(c->seen, now) < NS_PER_S)
		return true;
	if (p->key.proto == IPPROTO_UDP && !is_from_backend(&p->key, c) && !bpf_map_lookup_elem(&backends, &backend_id))
		return false;
	c->seen = now;
	if (is_from_backend(&p->key, c)) {
		cl = cluster_of(c);
		if (cl)
			cl->answered_at = bpf_ktime_get_boot_ns();
	}
	if (refresh_other(&p->key, c, client_device) & CONN_FAST && client_device && find_route(skb, p, c))
		c->flags |= CONN_FAST;
	return true;
}

/* Removes an entry. */
static __noinline int remove_entry(const struct conn_key *key)
{
	struct conn_key k = *key;

	if (k.proto == IPPROTO_UDP)
		bpf_map_delete_elem(&udp_flows, &k);
	else if (bpf_map_delete_elem(&flows, &k))
		bpf_map_delete_elem(&handshakes, &k);
	if (OLD_FLOWS)
		bpf_map_delete_elem(&conns, &k);
	return 0;
}

/* Deletes the entry of a flow's other direction. */
static __noinline int delete_other(const struct conn_key *key, const struct conn *c)
{
	struct conn_key other = other_key(key, c);

	return remove_entry(&other);
}

/* Reports whether a reply belongs to a connection that the client opened to the backend directly, from a port that it
 * used before for a flow through a VIP. The old flow is over. The reply cannot belong to it: its own SYN+ACK came long
 * ago, and a client that reopens it moves it back into its handshake. */
static __always_inline bool is_of_direct_connection(const struct packet *p, const struct conn *c)
{
	return c->state >= CONN_CLOSING && p->part != PART_LATER && is_accepting(p);
}

/* Finds the flow of a packet. Returns NULL if there is none or it is over. If an old flow has the packet's key, *ended
 * is its entry. */
static __always_inline struct conn *find_conn(struct __sk_buff *skb, struct packet *p, struct conn **ended)
{
	struct conn *c = find_entry_of(p, &p->key);

	if (!c)
		return NULL;
	if (!p->key.reply && is_reopening(p, c)) {
		if (c->state == CONN_OPENING)
			count_silence(cluster_of(c));
		*ended = c;
		return NULL;
	}
	if (p->key.reply && is_of_direct_connection(p, c)) {
		delete_other(&p->key, c);
		remove_entry(&p->key);
		return NULL;
	}
	if (is_due(c) && !refresh_conn(skb, p, c)) {
		*ended = c;
		return NULL;
	}
	track_window(p, c);
	return c;
}

/* Fills in the entry of a new flow's replies. */
static __always_inline void fill_reply(struct __sk_buff *skb, const struct packet *p, const struct conn *c,
				       struct conn *reply)
{
	fill_other(&p->key, c, reply);
	if (is_syn(p))
		expect_answer(p, reply);
	reply->ifindex = skb->ifindex;
	reply->flags |= c->flags & CONN_FAST;
}

/* Stores the entry of a new flow's replies, and chooses the port by which the backend knows the client: the client's
 * own, or a NAT port if another VIP leads that port to the same backend. Returns false without a port or memory. */
static __noinline bool store_reply(struct __sk_buff *skb, const struct packet *p, struct conn *c)
{
	struct conn other;

	fill_reply(skb, p, c, &other);
	for (int i = 0; i < TRIES; i++) {
		struct conn_key key = other_key(&p->key, c);
		struct conn *existing;

		if (add_entry(&key, &other))
			return true;
		existing = find_entry(&key);
		if (existing && may_replace(p->key.proto, &other, existing, CONN_CLOSED))
			return !store_entry(&key, &other);
		c->client_port = NAT_PORT_FIRST + bpf_get_prandom_u32() % NAT_PORT_COUNT;
	}
	return false;
}

/* Reports whether two entries agree in everything that never changes during a flow. */
static __always_inline bool is_same_but_state(const struct conn *a, const struct conn *b)
{
	enum conn_flags lasting = CONN_FAST | CONN_VIA6 | CONN_SELF | CONN_BACK;

	return a->backend_id == b->backend_id && a->service == b->service && a->cluster == b->cluster &&
	       a->ifindex == b->ifindex && a->mtu == b->mtu && !((a->flags ^ b->flags) & lasting) &&
	       same_addr(a->via, b->via) && is_same_translation(b, a);
}

static __always_inline void copy_state(struct conn *entry, const struct conn *c)
{
	entry->seen = c->seen;
	entry->checked_at = c->checked_at;
	entry->state = c->state;
	entry->flags = c->flags;
	entry->ack = c->ack;
	entry->edge = c->edge;
	entry->window = c->window;
}

/* Reuses the entries of the ended flow for a new one that differs only in state. A busy client's ports come round, and
 * deleting and creating an entry costs several times a lookup. Late packets that read the entry meanwhile get a result
 * that is right for both flows. Returns false if more than the state would change. */
static __noinline bool reuse_conn(struct __sk_buff *skb, const struct packet *p, struct conn *ended,
				  const struct conn *c)
{
	struct conn_key key = other_key(&p->key, c);
	struct conn *known, other;

	if (!is_same_but_state(ended, c))
		return false;
	known = find_entry(&key);
	if (!known)
		return false;
	fill_reply(skb, p, c, &other);
	if (!is_same_but_state(known, &other))
		return false;
	copy_state(known, &other);
	copy_state(ended, c);
	return true;
}

/* Chooses a backend for the first known packet of a flow. Returns NULL without one: choice->reason then says why the
 * packet must be refused, or is DROP_REASON_NONE if it is not to a VIP. */
static __noinline struct backend *find_backend(const struct packet *p, bool adopt, struct choice *choice)
{
	struct frontend_key vip = { .port = p->key.server_port, .proto = p->key.proto };
	__u64 ports = (__u64)p->key.client_port << 32 | p->key.server_port << 16 | p->key.proto;
	struct client client;
	struct frontend *fe;

	__builtin_memcpy(vip.addr, p->key.server, sizeof(vip.addr));
	fe = find_frontend(&vip, choice);
	if (!fe)
		return NULL;
	if (!is_opening(p) && (is_reset(p) || !adopt)) {
		choice->service = fe->service;
		choice->reason = DROP_REASON_NO_CONNECTION;
		return NULL;
	}
	__builtin_memcpy(client.addr, p->key.client, sizeof(client.addr));
	client.hash = hash_u64(hash_address(client.addr) ^ ports);
	return choose_backend(&vip, fe, &client, choice);
}

/* Records that replies to clients may leave the node by an uplink. */
static __always_inline void note_routed_client(void)
{
	__u32 zero = 0;
	__u32 *known = bpf_map_lookup_elem(&routed_clients, &zero);

	if (known && !*known)
		*known = 1;
}

/* Fills in the entry for the first packet of a flow to a backend, from a device with these flags. Returns it in
 * `new_conn`. */
static __noinline struct conn *fill_conn(struct __sk_buff *skb, const struct packet *p, const struct backend *be,
					 const struct choice *choice, enum device_flags from)
{
	__u32 zero = 0;
	struct conn *c = bpf_map_lookup_elem(&new_conn, &zero);

	if (!c)
		return NULL;
	__builtin_memset(c, 0, sizeof(*c));
	__builtin_memcpy(c->addr, be->addr, sizeof(c->addr));
	c->server_port = be->port;
	c->client_port = p->key.client_port;
	c->checked_at = coarse_ticks();
	c->state = CONN_OPENING;
	c->cluster = be->cluster;
	c->seen = now_ns();
	c->backend_id = choice->backend_id;
	c->service = choice->service;
	if (is_syn(p))
		note_syn(p, c);
	if (same_addr(c->addr, p->key.client))
		c->flags |= CONN_SELF;
	else if (from & DEVICE_PEER && !p->tagged && find_cached_route(skb, p, c))
		c->flags |= CONN_FAST;
	if (!(c->flags & CONN_FAST) && !(from & DEVICE_CLIENT))
		note_routed_client();
	return c;
}

/* Stores the entries of a new flow. ended is the entry of the flow that had the same key, NULL if there was none.
 * Returns false without a port or memory. */
static __noinline bool store_conn(struct __sk_buff *skb, const struct packet *p, struct conn *c, struct conn *ended)
{
	if (ended && reuse_conn(skb, p, ended, c))
		return true;
	if (ended)
		delete_other(&p->key, ended);
	/* The reply entry comes first: otherwise a fast reply would find no flow. */
	if (!store_reply(skb, p, c))
		return false;
	return !(ended ? store_entry(&p->key, c) : put_new(&p->key, c, BPF_ANY));
}

/* Reports whether the packet can leave by the fast path as it is. Other packets go to the kernel, which knows how to
 * reply "packet too big" and "time exceeded". */
static __always_inline bool fits_fast_path(struct __sk_buff *skb, const struct packet *p, const struct conn *c)
{
	if (!(c->flags & CONN_FAST) || hops_of(p) <= 1)
		return false;
	return p->key.reply || size_of(skb, p) <= c->mtu;
}

/* Sends a packet back where it came from, with its two addresses exchanged. That changes no checksum. */
static __noinline int send_back(struct __sk_buff *skb, const struct packet *p)
{
	write_addrs(skb, p, p->key.server, p->key.client);
	return reverse_link_header(skb) ? bpf_redirect(skb->ifindex, 0) : TC_ACT_SHOT;
}

/* Sends a packet of a client that is its own backend back to it, as if it came from the VIP. */
static __noinline int send_to_self(struct __sk_buff *skb, const struct packet *p, const struct conn *c)
{
	struct port_pair old = pair_ports(p->key.client_port, p->key.server_port, false);
	struct port_pair ports = pair_ports(c->client_port, c->server_port, false);

	if (p->ports && port_word(&old) != port_word(&ports)) {
		bpf_skb_store_bytes(skb, p->l4, &ports, sizeof(ports), 0);
		update_port_check(skb, p, port_word(&old), port_word(&ports));
	}
	return send_back(skb, p);
}

/* Handles an ICMP message to a VIP. Errors go on to their backend. Everything else is refused, echo requests too: a VIP
 * is a set of ports and no machine, and an echo reply would say nothing about any backend. */
__noinline int serve_icmp(struct __sk_buff *skb, const struct packet *p)
{
	struct conn *c;

	if (!p)
		return TC_ACT_SHOT;
	c = is_error(p) ? translate_error(skb, p, false) : NULL;
	if (c && c->flags & CONN_SELF)
		return send_back(skb, p);
	if (c)
		return fits_fast_path(skb, p, c) ? redirect_to_next_hop(c) : TC_ACT_UNSPEC;
	if (!is_in_ranges(p->key.server))
		return TC_ACT_UNSPEC;
	return refuse(skb, p, 0, is_error(p) ? DROP_REASON_NO_CONNECTION : DROP_REASON_PROTOCOL);
}

/* Refuses a packet that cannot be read if it is to the ClusterSet, and passes it otherwise. */
__noinline int reject(struct __sk_buff *skb, const struct packet *p, enum drop_reason reason)
{
	if (!p)
		return TC_ACT_SHOT;
	if (!is_in_ranges(p->key.server))
		return TC_ACT_UNSPEC;
	return refuse(skb, p, 0, reason);
}

/* Reports whether a packet may open another flow. A client that has no flow left takes none of the CPU's. */
static __noinline bool may_open_flow(const struct packet *p, __u32 device)
{
	__u64 now = now_ns();
	__u32 zero = 0;

	return may_client_open(p, device, now) && take(bpf_map_lookup_elem(&new_flows, &zero), now, CPU_FLOWS_MAX);
}

/* Handles a packet from a client: a packet to a VIP goes to a backend or is refused. */
static __always_inline int serve(struct __sk_buff *skb, struct packet *p, enum drop_reason reason, bool adopt)
{
	struct choice choice = {};
	struct conn *c, *ended = NULL;
	struct backend *be = NULL;
	enum device_flags from;
	bool fast;

	if (reason == DROP_REASON_NONE && p->part == PART_LATER && !recall_fragment(p))
		reason = DROP_REASON_FRAGMENT;
	if (reason != DROP_REASON_NONE)
		return reject(skb, p, reason);
	if (is_icmp(p))
		return serve_icmp(skb, p);
	c = find_conn(skb, p, &ended);
	if (!c) {
		if (p->part == PART_LATER)
			return reject(skb, p, DROP_REASON_FRAGMENT);
		be = find_backend(p, adopt, &choice);
		if (!be && choice.reason == DROP_REASON_NONE)
			return TC_ACT_UNSPEC;
		from = be ? read_device(skb->ifindex) : 0;
		/* A pod, a VM or their bridge can forge its address, but not its device. */
		if (be && !may_open_flow(p, from & DEVICE_CLIENT ? skb->ifindex : 0))
			return refuse(skb, p, choice.service, DROP_REASON_NEW_FLOWS);
		c = be ? fill_conn(skb, p, be, &choice, from) : NULL;
		if (!c || !store_conn(skb, p, c, ended)) {
			if (ended)
				delete_other(&p->key, ended);
			remove_entry(&p->key);
			return refuse(skb, p, choice.service, be ? DROP_REASON_NO_MEMORY : choice.reason);
		}
		emit_event(&p->key, be, &choice);
	}
	if (!can_rewrite(p, c))
		return refuse(skb, p, c->service, DROP_REASON_SCTP_PORT);
	/* The first packet has set the state of a new flow. */
	if (!be && may_change_state(p, c) && update_state(p, c) && p->young) {
		c = bpf_map_lookup_elem(&flows, &p->key);
		if (!c)
			return refuse(skb, p, 0, DROP_REASON_NO_MEMORY);
	}
	if (p->part == PART_FIRST)
		remember_fragment(p);
	if (c->flags & CONN_SELF)
		return send_to_self(skb, p, c);
	fast = fits_fast_path(skb, p, c);
	rewrite(skb, p, c, false, fast);
	return fast ? redirect_to_next_hop(c) : TC_ACT_UNSPEC;
}

/* Replaces a reply's source by the VIP. The uplink sets only_fast: there, replies on the slow path must pass untouched.
 * Returns TC_ACT_UNSPEC for packets that are no replies, and for those on the slow path. */
static __always_inline int translate_reply(struct __sk_buff *skb, struct packet *p, enum drop_reason reason,
					   bool only_fast)
{
	struct conn *c, *ended = NULL; /* a reply ends no flow */
	bool fast;

	if (reason != DROP_REASON_NONE || (p->part == PART_LATER && !recall_fragment(p)))
		return TC_ACT_UNSPEC;
	if (is_icmp(p)) {
		c = is_error(p) ? translate_error(skb, p, only_fast) : NULL;
		return c && only_fast && hops_of(p) > 1 ? bpf_redirect_peer(c->ifindex, 0) : TC_ACT_UNSPEC;
	}
	c = find_conn(skb, p, &ended);
	if (!c || (only_fast && !(c->flags & CONN_FAST)))
		return TC_ACT_UNSPEC;
	if (!can_rewrite(p, c)) {
		count_refusal(c->service, DROP_REASON_SCTP_PORT);
		return TC_ACT_SHOT;
	}
	if (may_change_state(p, c) && update_state(p, c) && p->young) {
		c = bpf_map_lookup_elem(&flows, &p->key);
		if (!c)
			return TC_ACT_SHOT;
	}
	if (p->part == PART_FIRST)
		remember_fragment(p);
	fast = only_fast && hops_of(p) > 1;
	rewrite(skb, p, c, true, fast);
	return fast ? bpf_redirect_peer(c->ifindex, 0) : TC_ACT_UNSPEC;
}

SEC("tc/from_client")
int from_client(struct __sk_buff *skb)
{
	const struct packet_settings *s = read_settings();
	struct packet p = {};
	enum drop_reason reason;

	if (!s || misses_vips(skb, s) || !locate(skb, &p))
		return TC_ACT_UNSPEC;
	reason = read_network(skb, &p, false, false);
	if (is_no_vip(s, &p, p.key.server))
		return TC_ACT_UNSPEC;
	if (reason == DROP_REASON_NONE)
		reason = read_transport(skb, &p, false);
	return serve(skb, &p, reason, s->flags & PACKET_ADOPT);
}

SEC("tc/from_network")
int from_network(struct __sk_buff *skb)
{
	const struct packet_settings *s = read_settings();
	struct packet p = {};
	enum drop_reason reason;
	bool no_vip, may_be_reply;
	int verdict;

	if (!s)
		return TC_ACT_UNSPEC;
	may_be_reply = s->flags & PACKET_FAST && skb->pkt_type == PACKET_HOST;
	if ((!may_be_reply && misses_vips(skb, s)) || !locate(skb, &p))
		return TC_ACT_UNSPEC;
	reason = read_network(skb, &p, true, false);
	no_vip = is_no_vip(s, &p, p.key.client);
	if (no_vip && !may_be_reply)
		return TC_ACT_UNSPEC;
	if (reason == DROP_REASON_NONE)
		reason = read_transport(skb, &p, true);
	if (may_be_reply && !p.tagged) {
		verdict = translate_reply(skb, &p, reason, true);
		if (verdict != TC_ACT_UNSPEC)
			return verdict;
	}
	if (no_vip)
		return TC_ACT_UNSPEC;
	reverse_key(&p.key);
	return serve(skb, &p, reason, s->flags & PACKET_ADOPT);
}

static __always_inline int to_any(struct __sk_buff *skb)
{
	struct packet p = {};
	enum drop_reason reason;

	if (!locate(skb, &p))
		return TC_ACT_UNSPEC;
	reason = read_network(skb, &p, true, false);
	if (reason == DROP_REASON_NONE)
		reason = read_transport(skb, &p, true);
	return translate_reply(skb, &p, reason, false);
}

SEC("tc/to_client")
int to_client(struct __sk_buff *skb)
{
	return to_any(skb);
}

SEC("tc/to_network")
int to_network(struct __sk_buff *skb)
{
	__u32 zero = 0;
	__u32 *routed = bpf_map_lookup_elem(&routed_clients, &zero);

	return routed && *routed ? to_any(skb) : TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
