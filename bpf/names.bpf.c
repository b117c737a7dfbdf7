//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Answers plain DNS queries for addresses where a pod's packets enter the node: the query packet itself becomes the
 * answer and goes back to the pod. Every other packet passes unchanged to its resolver: other types, EDNS, more than
 * one question, TCP, fragments, IP options, names that are not in the map or have several addresses of one family.
 * Nothing therefore depends on this program, and it implements no more of DNS than RFC 1035 section 4.1.
 */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "names.h"
#include "net.h"
#include "packet_parse.h"

#define DNS_PORT 53

#define DNS_RESPONSE 0x8000
#define DNS_AUTHORITATIVE 0x0400
#define DNS_RECURSION_DESIRED 0x0100
#define DNS_RECURSION_AVAILABLE 0x0080
/* A query may set recursion desired, AD (it understands that flag, RFC 6840 section 5.7), and CD. */
#define DNS_QUERY_FLAGS (DNS_RECURSION_DESIRED | 0x0020 | 0x0010)

#define DNS_A 1
#define DNS_AAAA 28
#define DNS_IN 1

/* A compression pointer; the name of the question is at offset DNS_HEADER. */
#define DNS_POINTER 0xc000
#define DNS_HEADER 12
/* The length of clusterset.local on the wire, with which every name in the map ends. */
#define DNS_ORIGIN 18

#define ANSWER_HOPS 64

struct dns_header {
	__be16 id;
	__be16 flags;
	__be16 questions;
	__be16 answers;
	__be16 authority;
	__be16 additional;
};
_Static_assert(sizeof(struct dns_header) == DNS_HEADER, "a DNS header is 12 bytes");

/* One record, padded with zeros to a multiple of 4 bytes for the checksum. */
struct dns_record {
	__be16 owner;
	__u8 rest[NAMES_SOA];
	__u16 zero;
};
_Static_assert(sizeof(struct dns_record) % 4 == 0, "bpf_csum_diff counts in 4 bytes");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, struct dns_name);
	__type(value, struct dns_addresses);
} names SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, struct dns_resolver);
	__type(value, __u8);
} resolvers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct dns_client);
	__type(value, __u8);
} dns_clients SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct names_settings);
} names_settings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NAMES_COUNTS);
	__type(key, enum names_count);
	__type(value, __u64);
} names_counts SEC(".maps");

static __always_inline void count(enum names_count what)
{
	__u64 *n = bpf_map_lookup_elem(&names_counts, &what);

	if (n)
		(*n)++;
}

/* Converts eight bytes to lower case, the 26 ASCII letters only (RFC 4343). A label's length byte is never a letter. */
static __always_inline void lower(__u64 *bytes)
{
	const __u64 each = 0x0101010101010101;
	__u64 low = *bytes & (0x7f * each);
	__u64 from_a = low + (0x80 - 'A') * each;
	__u64 beyond_z = low + (0x7f - 'Z') * each;

	*bytes |= ((from_a ^ beyond_z) & ~*bytes & (0x80 * each)) >> 2;
}

/* Reads the IP header of a whole UDP datagram without options or extensions. */
static __always_inline bool read_datagram(struct __sk_buff *skb, struct packet *p, struct dns_client *from,
					  struct dns_resolver *to)
{
	if (p->ipv6) {
		struct ipv6_header h;

		if (READ_AT(skb, p->l3, &h) || h.next != IPPROTO_UDP)
			return false;
		__builtin_memcpy(from->addr, h.source, sizeof(from->addr));
		__builtin_memcpy(to->addr, h.destination, sizeof(to->addr));
		p->l4 = p->l3 + sizeof(h);
		p->end = p->l4 + bpf_ntohs(h.payload);
	} else {
		struct ipv4_header h;

		if (READ_AT(skb, p->l3, &h) || h.version_ihl != 0x45 || h.proto != IPPROTO_UDP ||
		    h.fragment & bpf_htons(0x3fff))
			return false;
		write_mapped(from->addr, h.source);
		write_mapped(to->addr, h.destination);
		p->l4 = p->l3 + sizeof(h);
		p->end = p->l3 + bpf_ntohs(h.total);
	}
	return p->end <= skb->len;
}

/* Builds the record: an address, or the SOA if the name has none of this family. Returns its length, 0 without an SOA.
 */
static __always_inline __u32 write_record(struct dns_record *r, const struct dns_addresses *a,
					  const struct names_settings *s, __be16 type, __u32 name)
{
	const __be16 head[2] = { type, bpf_htons(DNS_IN) };
	__u16 data;

	r->owner = bpf_htons(DNS_POINTER | DNS_HEADER);
	__builtin_memcpy(r->rest, head, sizeof(head));
	__builtin_memcpy(r->rest + 4, &s->ttl, sizeof(s->ttl));
	if (type == bpf_htons(DNS_A) && a->families & NAMES_IPV4) {
		data = bpf_htons(sizeof(a->ipv4));
		__builtin_memcpy(r->rest + 8, &data, sizeof(data));
		__builtin_memcpy(r->rest + 10, a->ipv4, sizeof(a->ipv4));
		return 12 + sizeof(a->ipv4);
	}
	if (type == bpf_htons(DNS_AAAA) && a->families & NAMES_IPV6) {
		data = bpf_htons(sizeof(a->ipv6));
		__builtin_memcpy(r->rest + 8, &data, sizeof(data));
		__builtin_memcpy(r->rest + 10, a->ipv6, sizeof(a->ipv6));
		return 12 + sizeof(a->ipv6);
	}
	if (!s->soa[1]) /* the second byte of its type */
		return 0;
	r->owner = bpf_htons(DNS_POINTER | (DNS_HEADER + name - DNS_ORIGIN));
	__builtin_memcpy(r->rest, s->soa, sizeof(s->soa));
	return sizeof(r->owner) + NAMES_SOA;
}

/* Converts the sum of bytes that begin at an odd offset of the datagram. */
static __always_inline __u32 at_odd(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ((sum & 0xff) << 8) | (sum >> 8);
}

/* Writes the link, IP and UDP headers of the answer: source and destination are exchanged, which changes no checksum.
 */
static __always_inline bool write_headers(struct __sk_buff *skb, const struct packet *p, struct udp_header *u,
					  __u16 length)
{
	__be16 port = u->ports.source;

	if (!swap_macs(skb))
		return false;
	if (p->ipv6) {
		struct ipv6_header h;
		__u8 source[16];

		if (bpf_skb_load_bytes(skb, p->l3, &h, sizeof(h)))
			return false;
		__builtin_memcpy(source, h.source, sizeof(source));
		__builtin_memcpy(h.source, h.destination, sizeof(h.source));
		__builtin_memcpy(h.destination, source, sizeof(h.destination));
		h.payload = bpf_htons(length);
		h.hops = ANSWER_HOPS;
		if (bpf_skb_store_bytes(skb, p->l3, &h, sizeof(h), 0))
			return false;
	} else {
		struct ipv4_header h;
		__be32 source;
		__u32 sum;

		if (bpf_skb_load_bytes(skb, p->l3, &h, sizeof(h)))
			return false;
		source = h.source;
		h.source = h.destination;
		h.destination = source;
		h.total = bpf_htons(sizeof(h) + length);
		h.hops = ANSWER_HOPS;
		h.check = 0;
		sum = bpf_csum_diff(NULL, 0, (__be32 *)&h, sizeof(h), 0);
		sum = (sum & 0xffff) + (sum >> 16);
		h.check = ~((sum & 0xffff) + (sum >> 16));
		if (bpf_skb_store_bytes(skb, p->l3, &h, sizeof(h), 0))
			return false;
	}
	u->ports.source = u->ports.destination;
	u->ports.destination = port;
	u->length = bpf_htons(length);
	return bpf_skb_store_bytes(skb, p->l4, u, __builtin_offsetof(struct udp_header, check), 0) == 0;
}

/* A DNS query that has been read. */
struct query {
	struct udp_header udp;
	struct dns_header header;
	struct dns_name name; /* in lower case */
	__be16 type_class[2]; /* the type is DNS_A or DNS_AAAA */
};

/* Whether packets between two addresses may be answered here. A guarded resolver refuses strangers itself. */
static __always_inline bool may_answer(const struct dns_client *from, const struct dns_resolver *to)
{
	const __u8 *kind = bpf_map_lookup_elem(&resolvers, to);

	return kind && (*kind != NAMES_GUARDED || bpf_map_lookup_elem(&dns_clients, from));
}

/* Reads a packet to port 53 of a resolver. Returns false if it is none, or its UDP length does not match. */
static __always_inline bool read_packet(struct __sk_buff *skb, struct packet *p, struct query *q)
{
	struct dns_client from = { .bits = 128 };
	struct dns_resolver to = {};

	if (!locate(skb, p) || p->tagged || !read_datagram(skb, p, &from, &to))
		return false;
	if (READ_AT(skb, p->l4, &q->udp) || q->udp.ports.destination != bpf_htons(DNS_PORT) || !may_answer(&from, &to))
		return false;
	return p->l4 + bpf_ntohs(q->udp.length) == p->end;
}

/* Reads the DNS message of a packet. Returns the length of the name, 0 if the message is not one plain question. */
static __always_inline __u32 read_query(struct __sk_buff *skb, const struct packet *p, struct query *q)
{
	__u32 at = p->l4 + sizeof(q->udp) + sizeof(q->header), n;
	const struct dns_header *h = &q->header;

	if (READ_AT(skb, p->l4 + sizeof(q->udp), &q->header))
		return 0;
	if (h->flags & bpf_htons(~DNS_QUERY_FLAGS & 0xffff) || h->questions != bpf_htons(1) || h->answers ||
	    h->authority || h->additional)
		return 0;
	/* All bytes before type and class are taken as the name. If they are not one, the map has no such name. */
	n = bpf_ntohs(q->udp.length) - sizeof(q->udp) - sizeof(q->header) - sizeof(q->type_class);
	if (n <= DNS_ORIGIN || n > NAMES_LENGTH)
		return 0;
	if (bpf_skb_load_bytes(skb, at, q->name.wire, n) ||
	    bpf_skb_load_bytes(skb, at + n, q->type_class, sizeof(q->type_class)))
		return 0;
	if ((q->type_class[0] != bpf_htons(DNS_A) && q->type_class[0] != bpf_htons(DNS_AAAA)) ||
	    q->type_class[1] != bpf_htons(DNS_IN))
		return 0;
	for (int i = 0; i < NAMES_LENGTH / 8; i++)
		lower((__u64 *)q->name.wire + i);
	return n;
}

/* Looks up the name and builds the record for it. Returns the record's length, 0 if the resolver must answer. */
static __always_inline __u32 find_record(const struct query *q, __u32 n, struct dns_record *record)
{
	const struct names_settings *s;
	const struct dns_addresses *a;
	const __u32 zero = 0;

	a = bpf_map_lookup_elem(&names, &q->name);
	s = bpf_map_lookup_elem(&names_settings, &zero);
	return a && s ? write_record(record, a, s, q->type_class[0], n) : 0;
}

/* Turns the query into its answer: appends the record, completes the DNS header, updates the checksum and reverses the
 * packet. Returns false if a write failed. */
static __always_inline bool write_answer(struct __sk_buff *skb, const struct packet *p, struct query *q, __u32 n,
					 const struct dns_record *record, __u32 added)
{
	__u32 length = bpf_ntohs(q->udp.length) + added, check = p->l4 + __builtin_offsetof(struct udp_header, check);
	__be16 lengths[2][2] = {}; /* old and new, padded for the checksum */
	struct dns_header was = q->header;
	__s64 sum;

	q->header.flags = bpf_htons(DNS_RESPONSE | DNS_AUTHORITATIVE | DNS_RECURSION_AVAILABLE) |
			  (was.flags & bpf_htons(DNS_RECURSION_DESIRED));
	if (added == sizeof(record->owner) + NAMES_SOA)
		q->header.authority = bpf_htons(1);
	else
		q->header.answers = bpf_htons(1);
	lengths[0][0] = q->udp.length;
	lengths[1][0] = bpf_htons(length);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)record, sizeof(*record), 0);
	if (n & 1)
		sum = at_odd(sum);
	sum = bpf_csum_diff((__be32 *)&was, sizeof(was), (__be32 *)&q->header, sizeof(q->header), sum);
	sum = bpf_csum_diff((__be32 *)lengths[0], sizeof(lengths[0]), (__be32 *)lengths[1], sizeof(lengths[1]), sum);
	return write_headers(skb, p, &q->udp, length) &&
	       !bpf_skb_store_bytes(skb, p->l4 + sizeof(q->udp), &q->header, sizeof(q->header), 0) &&
	       !bpf_skb_store_bytes(skb, p->end, record, added, 0) &&
	       !bpf_l4_csum_replace(skb, check, 0, sum, BPF_F_MARK_MANGLED_0) &&
	       !bpf_l4_csum_replace(skb, check, lengths[0][0], lengths[1][0],
				    BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0 | sizeof(lengths[0][0]));
}

SEC("tc/answer_names")
int answer_names(struct __sk_buff *skb)
{
	struct dns_record record = {};
	struct packet p = {};
	struct query q;
	__u32 n, added;

	__builtin_memset(&q.name, 0, sizeof(q.name)); /* the rest is read before use */
	if (!read_packet(skb, &p, &q))
		return TC_ACT_UNSPEC;
	n = read_query(skb, &p, &q);
	if (!n)
		return TC_ACT_UNSPEC;
	added = find_record(&q, n, &record);
	if (!added || bpf_skb_change_tail(skb, p.end + added, 0))
		return TC_ACT_UNSPEC;
	if (!write_answer(skb, &p, &q, n, &record, added))
		return TC_ACT_SHOT;
	count(q.type_class[0] == bpf_htons(DNS_A) ? NAMES_A : NAMES_AAAA);
	return bpf_redirect_peer(skb->ifindex, 0);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
