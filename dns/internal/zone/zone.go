package zone

import (
	"fmt"
	"hash/maphash"
	"iter"
	"math/bits"
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

// A shard holds the names whose hashes share their first shardBits, as a hash table with open addressing, in two pieces of
// memory without pointers: a search touches little of it, and the garbage collector nothing. A change makes the shards
// anew that it touches and shares all others with the Zone before.
type shard struct {
	places []place // as many as a power of two, or none
	text   string  // the entries, one after another
}

// place says where an entry stands in a shard's text. The end is 0 where there is none.
type place struct {
	hash       uint32 // the last bits of its name's
	begin, end uint32
}

// at returns the entry of a place, which is the zero value when there is none.
func (s *shard) at(p place) entry { return entry(s.text[p.begin:p.end]) }

const shardBits = 12

// seed is the process's own, so that nobody can send us names that meet in one place.
var seed = maphash.MakeSeed()

// find returns the entry of name, which is lower case.
func (z *Zone) find(name []byte) entry {
	h := maphash.Bytes(seed, name)
	s := &z.shards[h>>(64-shardBits)]
	if len(s.places) == 0 {
		return ""
	}
	for i := uint(h); ; i++ {
		p := s.places[i&uint(len(s.places)-1)]
		if p.end == 0 {
			return ""
		}
		if p.hash == uint32(h) {
			if e := s.at(p); e.is(name) {
				return e
			}
		}
	}
}

// makeShard returns a table of entries, which all belong to one shard. It copies them.
func makeShard(entries []entry) shard {
	if len(entries) == 0 {
		return shard{}
	}
	// A quarter stays free, and one place always: a search ends there.
	places := make([]place, 1<<bits.Len(uint(len(entries)+max(len(entries)/3, 1)-1)))
	length := 0
	for _, e := range entries {
		length += len(e)
	}
	var text strings.Builder
	text.Grow(length)
	for _, e := range entries {
		h := maphash.String(seed, e.name())
		i := uint(h)
		for places[i&uint(len(places)-1)].end != 0 {
			i++
		}
		begin := text.Len()
		text.WriteString(string(e))
		places[i&uint(len(places)-1)] = place{uint32(h), uint32(begin), uint32(text.Len())}
	}
	return shard{places, text.String()}
}

func shardOf(name string) int { return int(maphash.String(seed, name) >> (64 - shardBits)) }

// with returns z with other entries: a change to "" takes the name away. Nothing of z changes.
func (z *Zone) with(changes map[string]entry) *Zone {
	next := *z
	next.shards = slices.Clone(z.shards)
	touched := make(map[int][]entry)
	for name, e := range changes {
		at := shardOf(name)
		if _, ok := touched[at]; !ok {
			touched[at] = nil
		}
		if e != "" {
			touched[at] = append(touched[at], e)
			next.count(e, 1)
		}
	}
	for at, entries := range touched {
		for e := range z.shards[at].entries() {
			if _, changes := changes[e.name()]; changes {
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
			for e := range z.shards[i].entries() {
				if !yield(e) {
					return
				}
			}
		}
	}
}

// entries yields all of the shard, in no order.
func (s *shard) entries() iter.Seq[entry] {
	return func(yield func(entry) bool) {
		for _, p := range s.places {
			if p.end != 0 && !yield(s.at(p)) {
				return
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
