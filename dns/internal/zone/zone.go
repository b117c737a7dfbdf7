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
	apexes []apex
	shards []shard
	names  int
	// records counts those of all names.
	records int
	serial  uint32
}

// apex is the top of a part of the world we know all of.
type apex struct {
	name string
	soa  string // as a record whose owner is the name that was asked
	// labels is how many labels a name below a reverse apex has that can have records, 0 for other apexes. Those with
	// fewer stand between and are taken to exist: that some address below has a name costs nobody anything.
	labels int
}

// A shard holds the names whose keys' hashes share their first shardBits, as a hash table in two pieces of memory without
// pointers: a search touches little of it, and the garbage collector nothing. A change makes the shards anew that it
// touches and shares all others with the Zone before.
type shard struct {
	buckets []uint32 // where each begins in the text, and where the last one ends; none when there are no entries
	text    string   // the entries, each after its length
}

const shardBits = 12

// seed is the process's own, so that nobody can send us names that meet in one place.
var seed = maphash.MakeSeed()

// find returns the entry of name, which is lower case.
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

// bucketOf returns in which of so many buckets a name is, by its key's hash.
func bucketOf(hash uint64, buckets int) int { return int(uint64(uint32(hash)) * uint64(buckets) >> 32) }

// makeShard returns a table of entries, which all belong to one shard. It copies them, and sorts them by bucket.
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
	text.Grow(length) // and so the only piece of memory of this size
	for _, p := range sorted {
		var head [entryHead]byte
		binary.BigEndian.PutUint32(head[:], uint32(len(p.entry)))
		text.Write(head[:])
		text.WriteString(string(p.entry))
		s.buckets[p.bucket+1] = uint32(text.Len())
	}
	for i := range entries { // an empty one ends where it begins
		s.buckets[i+1] = max(s.buckets[i+1], s.buckets[i])
	}
	s.text = text.String()
	return s
}

// entryHead is what stands before an entry in the text of a shard: its length.
const entryHead = 4

// entriesOf yields the entries of a text.
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

// with returns z with other entries, by key: a change to "" takes the name away. Nothing of z changes.
func (z *Zone) with(changes map[string]entry) *Zone {
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
			if _, changes := changes[e.key()]; changes {
				next.count(e, -1)
			} else {
				entries = append(entries, e)
			}
		}
		next.shards[at] = makeShard(entries)
	}
	return &next
}

func (z *Zone) count(e entry, by int) {
	z.names += by
	e.records(func(Type, uint32, string) { z.records += by })
}

// Serial returns the serial number of the zone's SOA.
func (z *Zone) Serial() uint32 { return z.serial }

// SOA returns the SOA of the zone without its owner: type, class, TTL, length and data.
func (z *Zone) SOA() string { return z.apexes[0].soa[len(ownerPointer):] }

// Len returns how many records there are.
func (z *Zone) Len() int { return z.records }

// Names returns how many names exist.
func (z *Zone) Names() int { return z.names }

// entries yields all, in no order.
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

// Records returns the records of names below and at suffix, written as in a zone file, or of all names when suffix is
// empty, sorted by name from the right, then by type. A name without records is one of type 0.
func (z *Zone) Records(suffix string) []Record {
	suffix = strings.TrimSuffix(strings.ToLower(suffix), ".")
	var all []Record
	for e := range z.entries() {
		name := Text(e.name())
		if bare := strings.TrimSuffix(name, "."); suffix != "" && bare != suffix && !strings.HasSuffix(bare, "."+suffix) {
			continue
		}
		n := len(all)
		e.records(func(t Type, ttl uint32, data string) { all = append(all, Record{name, t, ttl, t.text(data)}) })
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

// String returns the zone as a file; names without records are comments.
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

func ttlOf(rr string) uint32 {
	return uint32(rr[6])<<24 | uint32(rr[7])<<16 | uint32(rr[8])<<8 | uint32(rr[9])
}

// reverseName returns the name under which an address has its PTR record (RFC 1035, section 3.5; RFC 3596,
// section 2.5), and under which a prefix has its zone: an IPv4 prefix is cut at bytes, an IPv6 one at half bytes, each
// to the shorter.
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
