package zone

import (
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"iter"
	"net/netip"
	"slices"
	"strings"
)

// Zone answers questions. It is immutable; a [Builder] makes it.
type Zone struct {
	apexes  []apex
	shards  []shard
	names   int // that exist
	records int // of all names
	serial  uint32
}

// apex is the top of a part of the name space that the zone is authoritative for: clusterset.local or a reverse range.
type apex struct {
	name string
	soa  string // a record whose owner is the name in the question
	// labels is the number of labels of a full reverse name, for a reverse apex; 0 for clusterset.local. Names with fewer
	// labels are in between and are assumed to exist: NODATA there harms no client, and NXDOMAIN would deny all below.
	labels int
}

// shard holds the names whose keys' hashes share their first shardBits. It is a hash table in two allocations without
// pointers: a lookup touches little memory, and the garbage collector scans none of it. An update rebuilds the shards that
// it touches and shares all others with the previous Zone.
type shard struct {
	buckets []uint32 // offset of each bucket in text, then the end of the last; empty if there are no entries
	text    string   // the entries, each after its length
}

const shardBits = 12

// seed is random in each process, so that no exporter can choose names that collide in one bucket.
var seed = maphash.MakeSeed()

// find returns the entry of name, which is in lower case; "" if there is none.
func (z *Zone) find(name []byte) entry {
	key := name
	if cut := len(name) - len(origin); cut >= 0 && string(name[cut:]) == origin {
		key = name[:cut]
	}
	h := maphash.Bytes(seed, key)
	s := &z.shards[h>>(64-shardBits)]
	if len(s.buckets) == 0 {
		return ""
	}
	i := bucketOf(h, len(s.buckets)-1)
	for e := range entriesOf(s.text[s.buckets[i]:s.buckets[i+1]]) {
		if e.is(key) {
			return e
		}
	}
	return ""
}

// bucketOf returns the bucket of a name, out of a number of buckets, by the hash of its key.
func bucketOf(hash uint64, buckets int) int { return int(uint64(uint32(hash)) * uint64(buckets) >> 32) }

// makeShard copies entries, which must all belong to one shard, into a table.
func makeShard(entries []entry) shard {
	if len(entries) == 0 {
		return shard{}
	}
	type placed struct {
		bucket int
		entry
	}
	sorted := make([]placed, len(entries))
	length := 0
	for i, e := range entries {
		sorted[i] = placed{bucketOf(maphash.String(seed, e.key()), len(entries)), e}
		length += entryHead + len(e)
	}
	slices.SortFunc(sorted, func(a, b placed) int { return a.bucket - b.bucket })
	s := shard{buckets: make([]uint32, len(entries)+1)}
	var text strings.Builder
	text.Grow(length) // one allocation of this size
	for _, p := range sorted {
		var head [entryHead]byte
		binary.BigEndian.PutUint32(head[:], uint32(len(p.entry)))
		text.Write(head[:])
		text.WriteString(string(p.entry))
		s.buckets[p.bucket+1] = uint32(text.Len())
	}
	for i := range entries { // an empty bucket ends where it begins
		s.buckets[i+1] = max(s.buckets[i+1], s.buckets[i])
	}
	s.text = text.String()
	return s
}

// entryHead is the length of the length that precedes each entry in the text of a shard.
const entryHead = 4

// entriesOf yields the entries of a shard's text.
func entriesOf(text string) iter.Seq[entry] {
	return func(yield func(entry) bool) {
		for text != "" {
			end := entryHead + (int(text[0])<<24 | int(text[1])<<16 | int(text[2])<<8 | int(text[3]))
			if !yield(entry(text[entryHead:end])) {
				return
			}
			text = text[end:]
		}
	}
}

func shardOf(key string) int { return int(maphash.String(seed, key) >> (64 - shardBits)) }

// apply returns a copy of z with changes, by key; "" removes a name. It does not modify z.
func (z *Zone) apply(changes map[string]entry) *Zone {
	next := *z
	next.shards = slices.Clone(z.shards)
	touched := make(map[int][]entry)
	for key, e := range changes {
		at := shardOf(key)
		if _, ok := touched[at]; !ok {
			touched[at] = nil
		}
		if e != "" {
			touched[at] = append(touched[at], e)
			next.count(e, 1)
		}
	}
	for at, entries := range touched {
		for e := range entriesOf(z.shards[at].text) {
			if _, changed := changes[e.key()]; changed {
				next.count(e, -1)
			} else {
				entries = append(entries, e)
			}
		}
		next.shards[at] = makeShard(entries)
	}
	return &next
}

// count adds the name and the records of e to the counters of z, or subtracts them if by is -1.
func (z *Zone) count(e entry, by int) {
	z.names += by
	e.eachRecord(func(Type, uint32, string) { z.records += by })
}

// Serial returns the serial number of the zone's SOA.
func (z *Zone) Serial() uint32 { return z.serial }

// SOA returns the SOA record of the zone without its owner: type, class, TTL, length and data.
func (z *Zone) SOA() string { return z.apexes[0].soa[len(ownerPointer):] }

// Len returns the number of records.
func (z *Zone) Len() int { return z.records }

// Names returns the number of names that exist, with or without records.
func (z *Zone) Names() int { return z.names }

// entries yields all entries in no particular order.
func (z *Zone) entries() iter.Seq[entry] {
	return func(yield func(entry) bool) {
		for i := range z.shards {
			for e := range entriesOf(z.shards[i].text) {
				if !yield(e) {
					return
				}
			}
		}
	}
}

// Records returns the records at suffix and below, or all if suffix is empty. They are sorted by name from the rightmost
// label, then by type. A name without records appears as one Record of type 0.
func (z *Zone) Records(suffix string) []Record {
	suffix = strings.TrimSuffix(strings.ToLower(suffix), ".")
	var all []Record
	for e := range z.entries() {
		name := Text(e.name())
		if bare := strings.TrimSuffix(name, "."); suffix != "" && bare != suffix && !strings.HasSuffix(bare, "."+suffix) {
			continue
		}
		n := len(all)
		e.eachRecord(func(t Type, ttl uint32, data string) { all = append(all, Record{name, t, ttl, t.text(data)}) })
		if len(all) == n {
			all = append(all, Record{Name: name})
		}
	}
	slices.SortStableFunc(all, func(a, b Record) int {
		if a.Name != b.Name {
			return slices.Compare(reversed(a.Name), reversed(b.Name))
		}
		return int(a.Type) - int(b.Type)
	})
	return all
}

func reversed(name string) []string {
	labels := strings.Split(name, ".")
	slices.Reverse(labels)
	return labels
}

// String returns the zone as a zone file. Names without records are comments.
func (z *Zone) String() string {
	var b strings.Builder
	for _, a := range z.apexes {
		fmt.Fprintln(&b, Record{Text(a.name), SOA, ttlOf(a.soa), SOA.text(a.soa[recordHead:])})
	}
	for _, r := range z.Records("") {
		if r.Type == 0 {
			fmt.Fprintf(&b, "; %s\n", r.Name)
		} else {
			fmt.Fprintln(&b, r)
		}
	}
	return b.String()
}

// reverseName returns the name of an address's PTR record (RFC 1035, section 3.5; RFC 3596, section 2.5), or of a prefix's
// reverse zone. It shortens an IPv4 prefix to whole bytes and an IPv6 prefix to whole nibbles.
func reverseName(p netip.Prefix) string {
	var labels []string
	if p.Addr().Is4() {
		b := p.Addr().As4()
		for i := range p.Bits() / 8 {
			labels = append(labels, fmt.Sprint(b[i]))
		}
		labels = append([]string{"arpa", "in-addr"}, labels...)
	} else {
		b := p.Addr().As16()
		for i := range p.Bits() / 4 {
			labels = append(labels, fmt.Sprintf("%x", b[i/2]>>(4*(1-i%2))&0xf))
		}
		labels = append([]string{"arpa", "ip6"}, labels...)
	}
	slices.Reverse(labels)
	return wireName(labels...)
}
