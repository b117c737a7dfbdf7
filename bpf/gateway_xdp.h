/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The XDP program of a gateway. A driver runs it before the kernel turns a frame into a packet. It forwards frames of
 * established flows and passes everything else to the program at the ingress, which runs next.
 *
 * Of a flow it changes only the window, so it passes every packet that could change more: a SYN, FIN or RST, a packet
 * of a half-open flow, an acknowledgement that another gateway may have to see, and some times a second a packet of
 * each flow, when that is due for a check. The program at the
 * ingress therefore notices by itself that a flow has ended or its backend was removed. The kernel forwards those
 * packets and notices that a neighbour is gone.
 *
 * It also passes what it could only handle in part: fragments, IP options and extension headers, packets that need an
 * ICMP error, packets whose next hop has no known neighbour, and packets whose transport checksum the device has yet to
 * compute. A driver does not mark the latter, but their checksum is the sum of the pseudo header. One checksum in
 * 65,535 has that value by chance, and such a packet is passed too.
 */
#ifndef ISTHMUS_GATEWAY_XDP_H
#define ISTHMUS_GATEWAY_XDP_H

#include <stdbool.h>

#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "flow.h"
#include "flow_maps.h"
#include "gateway.h"
#include "gateway_maps.h"
#include "hand_over.h"
#include "net.h"
#include "packet_parse.h"
#include "packet_rewrite.h"
#include "route.h"

/* The source and destination of a packet. */
struct ends {
	__u8 source[16] ADDR_ALIGNED;
	__u8 destination[16] ADDR_ALIGNED;
	__u16 source_port; /* host order */
	__u16 destination_port;
};

/* A frame without IP options or extension headers, so that every header has a known offset. */
struct frame {
	struct ethernet_header *link;
	void *ip;
	struct port_pair *ports; /* the start of the transport header */
	__u16 *check;		 /* of the transport header */
	struct ends ends;
	__u64 header; /* length of the IP header: 64 bits, since the verifier loses track of a shorter spilled value */
	__u32 length; /* of the IP packet */
	__u32 ack;    /* TCP, as the next two */
	__u16 window;
	__u8 flags;
	__u8 proto;
};

static __always_inline bool is_ipv6(const struct frame *f)
{
	return f->header == sizeof(struct ipv6_header);
}

/* Reads the IP header. */
static __always_inline bool read_frame_ip(struct frame *f, void *end)
{
	struct ipv4_header *v4 = f->ip;
	struct ipv6_header *v6 = f->ip;

	if (f->link->protocol == bpf_htons(ETH_P_IP)) {
		if ((void *)(v4 + 1) > end || v4->version_ihl != 0x45 || v4->fragment & bpf_htons(0x3fff) ||
		    v4->hops <= 1)
			return false;
		write_mapped(f->ends.source, v4->source);
		write_mapped(f->ends.destination, v4->destination);
		f->header = sizeof(*v4);
		f->length = bpf_ntohs(v4->total);
		f->proto = v4->proto;
		f->ports = (void *)(v4 + 1);
		return true;
	}
	if (f->link->protocol != bpf_htons(ETH_P_IPV6) || (void *)(v6 + 1) > end ||
	    bpf_ntohl(v6->version_class_flow) >> 28 != 6 || v6->hops <= 1)
		return false;
	__builtin_memcpy(f->ends.source, v6->source, sizeof(v6->source));
	__builtin_memcpy(f->ends.destination, v6->destination, sizeof(v6->destination));
	f->header = sizeof(*v6);
	f->length = sizeof(*v6) + bpf_ntohs(v6->payload);
	f->proto = v6->next;
	f->ports = (void *)(v6 + 1);
	return true;
}

/* Reads the transport header. `rest` is the length of the IP payload. */
static __always_inline bool read_frame_transport(struct frame *f, void *end, __u32 rest)
{
	struct tcp_header *tcp = (void *)f->ports;
	struct udp_header *udp = (void *)f->ports;
	struct port_pair ports;

	if (f->proto == IPPROTO_TCP) {
		if ((void *)(tcp + 1) > end || rest < sizeof(*tcp) || tcp->offset >> 4 < 5 ||
		    (tcp->offset >> 4) * 4U > rest || tcp->flags & (TCP_SYN | TCP_FIN | TCP_RST))
			return false;
		f->check = &tcp->check;
		f->ack = bpf_ntohl(tcp->ack);
		f->window = bpf_ntohs(tcp->window);
		f->flags = tcp->flags;
	} else {
		if (f->proto != IPPROTO_UDP || (void *)(udp + 1) > end || rest < sizeof(*udp) ||
		    bpf_ntohs(udp->length) < sizeof(*udp) || bpf_ntohs(udp->length) > rest)
			return false;
		f->check = &udp->check;
	}
	ports = *f->ports;
	f->ends.source_port = bpf_ntohs(ports.source);
	f->ends.destination_port = bpf_ntohs(ports.destination);
	return true;
}

static __always_inline __u64 sum_of_addr(const __u8 addr[16])
{
	const __u32 *words = ADDR(addr);

	return (__u64)words[0] + words[1] + words[2] + words[3];
}

/* Reports whether the device has yet to compute the transport checksum. The prefix that marks an address as IPv4 adds
 * nothing to a ones' complement sum. */
static __always_inline bool lacks_check(const struct frame *f, __u32 rest)
{
	__u64 pseudo =
		sum_of_addr(f->ends.source) + sum_of_addr(f->ends.destination) + bpf_htons(rest) + bpf_htons(f->proto);

	return *f->check == fold(pseudo);
}

/* Reads a frame. Returns false if it must be passed to the ingress. */
static __always_inline bool read_frame(struct xdp_md *ctx, struct frame *f)
{
	void *start = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 rest;

	f->link = start;
	f->ip = start + sizeof(*f->link);
	if (f->ip > end || !read_frame_ip(f, end))
		return false;
	if (f->length < f->header || f->length > end - f->ip)
		return false;
	rest = f->length - f->header;
	return read_frame_transport(f, end, rest) && !lacks_check(f, rest);
}

/* Translates a frame's ends by its flow's entry. Returns the entry, or NULL if the ingress must handle the packet. */
static __always_inline struct conn *translate_ends(struct ends *e, const struct frame *f, bool reply)
{
	struct conn_key key = {
		.client_port = reply ? e->destination_port : e->source_port,
		.server_port = reply ? e->source_port : e->destination_port,
		.proto = f->proto,
		.reply = reply,
	};
	struct conn *c;

	__builtin_memcpy(key.client, ADDR(reply ? e->destination : e->source), sizeof(key.client));
	__builtin_memcpy(key.server, ADDR(reply ? e->source : e->destination), sizeof(key.server));
	c = key.proto == IPPROTO_UDP ? bpf_map_lookup_elem(&udp_flows, &key) : bpf_map_lookup_elem(&flows, &key);
	if (!c || c->state < CONN_OPEN || is_due(c) ||
	    (f->proto == IPPROTO_TCP && is_due_to_owner(c, f->ack, f->window)))
		return NULL;
	follow_window(f->flags, f->ack, f->window, c);
	if (reply)
		__builtin_memcpy(e->source, c->addr, sizeof(e->source));
	else
		__builtin_memcpy(e->destination, c->addr, sizeof(e->destination));
	e->source_port = reply ? c->server_port : c->client_port;
	e->destination_port = reply ? c->client_port : c->server_port;
	return c;
}

/* Looks up route and neighbour. Returns false if either is unknown, or the packet exceeds the MTU. */
static __always_inline bool find_neighbour(struct xdp_md *ctx, const struct frame *f, const struct ends *to,
					   struct bpf_fib_lookup *fib)
{
	fib->l4_protocol = f->proto;
	fib->tot_len = f->length;
	fib->ifindex = ctx->ingress_ifindex;
	set_fib_addrs(fib, is_ipv6(f), to->source, to->destination);
	return bpf_fib_lookup(ctx, fib, sizeof(*fib), 0) == BPF_FIB_LKUP_RET_SUCCESS;
}

/* Finds the new ends of a frame, and its next hop. Returns the entry of its flow, or NULL if the ingress must handle
 * the packet. */
static __always_inline struct conn *find_flow_and_neighbour(struct xdp_md *ctx, const struct frame *f, bool reply,
							    struct ends *to, struct bpf_fib_lookup *fib)
{
	struct conn *c;
	bool double_nat;

	*to = f->ends;
	c = translate_ends(to, f, reply);
	if (!c || !(c->flags & CONN_FAST))
		return NULL;
	double_nat = c->flags & GATEWAY_DOUBLE_NAT;
	if (double_nat && reply) /* the backend's packets go to the source address instead */
		return NULL;
	return find_neighbour(ctx, f, to, fib) && (!double_nat || translate_ends(to, f, true)) ? c : NULL;
}

static __always_inline void write_frame(struct frame *f, const struct ends *to, const struct bpf_fib_lookup *fib)
{
	__u64 addrs = replaced_addr(f->ends.source, to->source) + replaced_addr(f->ends.destination, to->destination);
	struct port_pair old = pair_ports(f->ends.source_port, f->ends.destination_port, false);
	struct port_pair new = pair_ports(to->source_port, to->destination_port, false);
	struct ipv4_header *v4 = f->ip;
	struct ipv6_header *v6 = f->ip;

	if (is_ipv6(f)) {
		v6->hops--;
		__builtin_memcpy(v6->source, to->source, sizeof(v6->source));
		__builtin_memcpy(v6->destination, to->destination, sizeof(v6->destination));
	} else {
		v4->hops--;
		v4->source = last_word(to->source);
		v4->destination = last_word(to->destination);
		/* minus one in the upper half of a word */
		v4->check = replace_in_check(v4->check, addrs + bpf_htons(0xfeff));
	}
	*f->ports = new;
	addrs += replaced(port_word(&old), port_word(&new));
	if (f->proto == IPPROTO_TCP)
		*f->check = replace_in_check(*f->check, addrs);
	else if (*f->check != 0) /* as in build_transport */
		*f->check = replace_in_check(*f->check, addrs) ?: 0xffff;
	__builtin_memcpy(f->link->to, fib->dmac, sizeof(f->link->to));
	__builtin_memcpy(f->link->from, fib->smac, sizeof(f->link->from));
}

static __always_inline bool is_for(const struct gateway_xdp_device *device, const struct frame *f)
{
	return __builtin_memcmp(device->mac, f->link->to, sizeof(device->mac)) == 0;
}

/* Forwards a frame of an established flow. */
static __always_inline int forward_established(struct xdp_md *ctx)
{
	__u32 in = ctx->ingress_ifindex, out, zero = 0;
	struct gateway_xdp_device *device = bpf_map_lookup_elem(&xdp_devices, &in);
	struct bpf_fib_lookup fib = {};
	struct frame f = {};
	struct ends to;
	struct conn *c;
	__u64 *sent;
	bool reply;

	/* A device in promiscuous mode also delivers frames for other machines. */
	if (!device || !read_frame(ctx, &f) || !is_for(device, &f))
		return XDP_PASS;
	reply = !bpf_map_lookup_elem(&vips, f.ends.destination);
	c = find_flow_and_neighbour(ctx, &f, reply, &to, &fib);
	if (!c)
		return XDP_PASS;
	out = fib.ifindex;
	device = bpf_map_lookup_elem(&xdp_devices, &out);
	if (!device || !device->sends)
		return XDP_PASS;
	write_frame(&f, &to, &fib);
	count_traffic(c->service, reply || c->window & WINDOW_SECOND, 1, f.length);
	sent = bpf_map_lookup_elem(&xdp_sent, &zero);
	if (sent)
		++*sent;
	return out == in ? XDP_TX : bpf_redirect(out, 0);
}

#endif
