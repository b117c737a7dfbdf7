package zone

import (
	"net/netip"
	"strings"
)

// entry is a name and its record sets in one allocation:
//
//	length of the name's key, the key, and for each set, by type:
//	type (2 bytes), flags (1), count (2), length of the records (4), the records
//
// A key is a name without the origin, clusterset.local. Nearly all names end in the origin, and names are most of a
// zone's memory.
//
// A name without sets exists because names below it exist, or because it will have records later. Questions for it are
// answered with NODATA. The zero value is no entry.
type entry string

// setHead is the length of the header of a set: type, flags, count and length.
const setHead = 9

// setSingle is the flag of a set of which each answer carries one record, in turn.
const setSingle = 1

func (e entry) key() string { return string(e[1 : 1+int(e[0])]) }

func (e entry) name() string { return nameOf(e.key()) }

// is reports whether key, in lower case, is the key of e.
func (e entry) is(key []byte) bool {
	return int(e[0]) == len(key) && string(e[1:1+len(key)]) == string(key)
}

// keyOf returns the key of a name.
func keyOf(name string) string { return strings.TrimSuffix(name, origin) }

// nameOf returns the name of a key. A name ends in a zero byte; a key from which the origin was cut does not.
func nameOf(key string) string {
	if strings.HasSuffix(key, "\x00") {
		return key
	}
	return key + origin
}

// entryOf returns the entry of a name without sets.
func entryOf(name string) entry {
	key := keyOf(name)
	return entry(append([]byte{byte(len(key))}, key...))
}

// recordSet holds the records of one name and type, in a fixed order.
type recordSet struct {
	count  int
	single bool   // an answer carries one of the records, a different one each time
	rrs    string // the records in wire format
}

// headOf decodes the header of the set that s begins with. length is that of its records.
func headOf(s string) (t Type, set recordSet, length int) {
	set = recordSet{count: int(s[3])<<8 | int(s[4]), single: s[2]&setSingle != 0}
	return Type(s[0])<<8 | Type(s[1]), set, int(s[5])<<24 | int(s[6])<<16 | int(s[7])<<8 | int(s[8])
}

// cutSet returns the set that s begins with, and the rest of s, which must be well-formed.
func cutSet(s string) (t Type, set recordSet, rest string) {
	t, set, length := headOf(s)
	set.rrs = s[setHead : setHead+length]
	return t, set, s[setHead+length:]
}

// set returns the set of a type; an empty one if e has none.
func (e entry) set(t Type) recordSet {
	for s := string(e[1+int(e[0]):]); s != ""; {
		have, set, rest := cutSet(s)
		if have == t {
			return set
		}
		s = rest
	}
	return recordSet{}
}

// addresses returns the only IPv4 and the only IPv6 address of e. Both are invalid if e has several of either family.
func (e entry) addresses() (addrs [2]netip.Addr) {
	if e == "" {
		return addrs
	}
	for i, t := range [...]Type{A, AAAA} {
		set := e.set(t)
		if set.count > 1 {
			return [2]netip.Addr{}
		}
		if set.count == 1 {
			addrs[i], _ = netip.AddrFromSlice([]byte(set.rrs[recordHead:]))
		}
	}
	return addrs
}

// eachRecord calls yield for every record of e.
func (e entry) eachRecord(yield func(t Type, ttl uint32, data string)) {
	for s := string(e[1+int(e[0]):]); s != ""; {
		t, set, rest := cutSet(s)
		for rrs := set.rrs; rrs != ""; rrs = rrs[recordLen(rrs):] {
			yield(t, ttlOf(rrs), rrs[recordHead:recordLen(rrs)])
		}
		s = rest
	}
}

// isWellFormed reports whether s, from an untrusted source, is an entry that all methods can read safely.
func isWellFormed(s string) bool {
	if s == "" || len(s) < 1+int(s[0]) {
		return false
	}
	if e := entry(s); !isName(e.name()) || keyOf(e.name()) != e.key() {
		return false
	}
	for s = s[1+int(s[0]):]; s != ""; {
		if len(s) < setHead {
			return false
		}
		t, set, length := headOf(s)
		if s = s[setHead:]; length > len(s) || set.count == 0 {
			return false
		}
		rrs := s[:length]
		for range set.count {
			if len(rrs) < recordHead || len(rrs) < recordLen(rrs) || !t.valid(rrs[recordHead:recordLen(rrs)]) {
				return false
			}
			rrs = rrs[recordLen(rrs):]
		}
		if rrs != "" {
			return false
		}
		s = s[length:]
	}
	return true
}
