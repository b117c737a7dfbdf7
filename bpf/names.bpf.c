//go:build ignore
/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Answers to plain questions for addresses, where a pod's packets enter the node: the question itself becomes the
 * answer and goes back. Whatever is not plain passes untouched, to the resolver that it is for: other types, EDNS,
 * more than one question, TCP, fragments, IP options, names that are not in the map or have more than one address of a
 * family. So nothing depends on this program, and it need not know more of DNS than RFC 1035, section 4.1.
 */
#include <linux/bpf.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "names.h"
#include "packet_parse.h"

#define DNS_PORT 53

#define DNS_RESPONSE 0x8000
#define DNS_AUTHORITATIVE 0x0400
#define DNS_RECURSION_DESIRED 0x0100
#define DNS_RECURSION_AVAILABLE 0x0080
/* A question may say that recursion is desired, that it understands AD (RFC 6840, section 5.7), and CD. */
#define DNS_QUESTION_FLAGS (DNS_RECURSION_DESIRED | 0x0020 | 0x0010)

#define DNS_A 1
#define DNS_AAAA 28
#define DNS_IN 1

/* A pointer to the name of the question. */
#define DNS_POINTER 0xc000
#define DNS_HEADER 12
/* The length of clusterset.local on the wire: every name in the map ends in it. */
#define DNS_ORIGIN 18

struct udp_header {
	__be16 source;
	__be16 destination;
	__be16 length;
	__be16 check;
};

struct dns_header {
	__be16 id;
	__be16 flags;
	__be16 questions;
	__be16 answers;
	__be16 authority;
	__be16 additional;
};
_Static_assert(sizeof(struct dns_header) == DNS_HEADER, "a header of DNS is 12 bytes");

/* One record, and what a checksum takes of it: a multiple of 4 bytes, the rest zero. */
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

/* Eight bytes at once, as RFC 4343 has it: the 26 letters and nothing else. The length of a label is never one. */
static __always_inline void lower(__u64 *bytes)
{
	const __u64 each = 0x0101010101010101;
	__u64 low = *bytes & (0x7f * each);
	__u64 from_a = low + (0x80 - 'A') * each;
	__u64 beyond_z = low + (0x7f - 'Z') * each;

	*bytes |= ((from_a ^ beyond_z) & ~*bytes & (0x80 * each)) >> 2;
}

/* Reads the IP header of a whole UDP datagram without options or extensions. */
static __always_inline bool read_datagram(struct __sk_buff *skb, struct packet *p, struct dns_resolver *to)
{
	if (p->ipv6) {
		struct ipv6_header h;

		if (READ_AT(skb, p->l3, &h) || h.next != IPPROTO_UDP)
			return false;
		__builtin_memcpy(to->addr, h.destination, sizeof(to->addr));
		p->l4 = p->l3 + sizeof(h);
		p->end = p->l4 + bpf_ntohs(h.payload);
	} else {
		struct ipv4_header h;

		if (READ_AT(skb, p->l3, &h) || h.version_ihl != 0x45 || h.proto != IPPROTO_UDP ||
		    h.fragment & bpf_htons(0x3fff))
			return false;
		write_mapped(to->addr, h.destination);
		p->l4 = p->l3 + sizeof(h);
		p->end = p->l3 + bpf_ntohs(h.total);
	}
	return p->end <= skb->len;
}

/* Writes the record that answers. Returns its length, 0 when there is nothing to say. */
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
	if (!s->soa[1]) /* its type's second byte */
		return 0;
	r->owner = bpf_htons(DNS_POINTER | (DNS_HEADER + name - DNS_ORIGIN));
	__builtin_memcpy(r->rest, s->soa, sizeof(s->soa));
	return sizeof(r->owner) + NAMES_SOA;
}

/* What a part of a datagram that begins at an odd byte adds to its checksum. */
static __always_inline __u32 at_odd(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ((sum & 0xff) << 8) | (sum >> 8);
}

/* Sends the packet back: addresses and ports change sides, which leaves every checksum as it is. */
static __always_inline bool turn_back(struct __sk_buff *skb, const struct packet *p, struct udp_header *u, __u16 length)
{
	__u8 mac[12];
	__be16 port = u->source;
	bool failed;

	failed = bpf_skb_load_bytes(skb, 0, mac + 6, 6) || bpf_skb_load_bytes(skb, 6, mac, 6) ||
		 bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0);
	if (p->ipv6) {
		struct ipv6_header h;
		__u8 source[16];

		failed |= bpf_skb_load_bytes(skb, p->l3, &h, sizeof(h));
		__builtin_memcpy(source, h.source, sizeof(source));
		__builtin_memcpy(h.source, h.destination, sizeof(h.source));
		__builtin_memcpy(h.destination, source, sizeof(h.destination));
		h.payload = bpf_htons(length);
		h.hops = 64;
		failed |= bpf_skb_store_bytes(skb, p->l3, &h, sizeof(h), 0);
	} else {
		struct ipv4_header h;
		__be32 source;
		__u32 sum;

		failed |= bpf_skb_load_bytes(skb, p->l3, &h, sizeof(h));
		source = h.source;
		h.source = h.destination;
		h.destination = source;
		h.total = bpf_htons(sizeof(h) + length);
		h.hops = 64;
		h.check = 0;
		sum = bpf_csum_diff(NULL, 0, (__be32 *)&h, sizeof(h), 0);
		sum = (sum & 0xffff) + (sum >> 16);
		h.check = ~((sum & 0xffff) + (sum >> 16));
		failed |= bpf_skb_store_bytes(skb, p->l3, &h, sizeof(h), 0);
	}
	u->source = u->destination;
	u->destination = port;
	u->length = bpf_htons(length);
	failed |= bpf_skb_store_bytes(skb, p->l4, u, __builtin_offsetof(struct udp_header, check), 0);
	return !failed;
}

SEC("tc/answer_names")
int answer_names(struct __sk_buff *skb)
{
	const __u32 zero = 0;
	const struct names_settings *s;
	const struct dns_addresses *a;
	struct packet p = {};
	struct dns_resolver to = {};
	struct udp_header u;
	struct dns_header d, was;
	struct dns_name name = {};
	struct dns_record record = {};
	__be16 question[2];
	__be16 lengths[2][2] = {};
	__u32 n, length, added;
	__s64 sum;

	if (!locate(skb, &p) || p.tagged || !read_datagram(skb, &p, &to))
		return TC_ACT_UNSPEC;
	if (READ_AT(skb, p.l4, &u) || u.destination != bpf_htons(DNS_PORT) || !bpf_map_lookup_elem(&resolvers, &to))
		return TC_ACT_UNSPEC;
	length = bpf_ntohs(u.length);
	if (p.l4 + length != p.end || READ_AT(skb, p.l4 + sizeof(u), &d))
		return TC_ACT_UNSPEC;
	if (d.flags & bpf_htons(~DNS_QUESTION_FLAGS & 0xffff) || d.questions != bpf_htons(1) || d.answers ||
	    d.authority || d.additional)
		return TC_ACT_UNSPEC;

	/* One question and nothing else: whatever is left is its name. Is it not, then no name in the map is like it.
	 */
	n = length - sizeof(u) - sizeof(d) - sizeof(question);
	if (n <= DNS_ORIGIN || n > NAMES_LENGTH)
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, p.l4 + sizeof(u) + sizeof(d), name.wire, n) ||
	    bpf_skb_load_bytes(skb, p.l4 + sizeof(u) + sizeof(d) + n, question, sizeof(question)))
		return TC_ACT_UNSPEC;
	if ((question[0] != bpf_htons(DNS_A) && question[0] != bpf_htons(DNS_AAAA)) || question[1] != bpf_htons(DNS_IN))
		return TC_ACT_UNSPEC;
	for (int i = 0; i < NAMES_LENGTH / 8; i++)
		lower((__u64 *)name.wire + i);
	a = bpf_map_lookup_elem(&names, &name);
	s = bpf_map_lookup_elem(&names_settings, &zero);
	if (!a || !s)
		return TC_ACT_UNSPEC;
	added = write_record(&record, a, s, question[0], n);
	if (!added || bpf_skb_change_tail(skb, p.end + added, 0))
		return TC_ACT_UNSPEC;

	was = d;
	d.flags = bpf_htons(DNS_RESPONSE | DNS_AUTHORITATIVE | DNS_RECURSION_AVAILABLE) |
		  (was.flags & bpf_htons(DNS_RECURSION_DESIRED));
	if (added == sizeof(record.owner) + NAMES_SOA)
		d.authority = bpf_htons(1);
	else
		d.answers = bpf_htons(1);
	lengths[0][0] = u.length;
	lengths[1][0] = bpf_htons(length + added);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&record, sizeof(record), 0);
	if (n & 1)
		sum = at_odd(sum);
	sum = bpf_csum_diff((__be32 *)&was, sizeof(was), (__be32 *)&d, sizeof(d), sum);
	sum = bpf_csum_diff((__be32 *)lengths[0], sizeof(lengths[0]), (__be32 *)lengths[1], sizeof(lengths[1]), sum);
	if (!turn_back(skb, &p, &u, length + added) || bpf_skb_store_bytes(skb, p.l4 + sizeof(u), &d, sizeof(d), 0) ||
	    bpf_skb_store_bytes(skb, p.end, &record, added, 0) ||
	    bpf_l4_csum_replace(skb, p.l4 + __builtin_offsetof(struct udp_header, check), 0, sum,
				BPF_F_MARK_MANGLED_0) ||
	    bpf_l4_csum_replace(skb, p.l4 + __builtin_offsetof(struct udp_header, check), lengths[0][0], lengths[1][0],
				BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0 | sizeof(lengths[0][0])))
		return TC_ACT_SHOT;
	count(question[0] == bpf_htons(DNS_A) ? NAMES_A : NAMES_AAAA);
	return bpf_redirect_peer(skb->ifindex, 0);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
