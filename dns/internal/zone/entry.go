package zone

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
)

// entry is a name and its sets of records, in one piece of memory:
//
//	length of the name's key, the key, and for each set, by type:
//	type (2 bytes), flags (1), count (2), length of the records (4), the records
//
// A key is a name without the origin, where it ends with that: nearly all do, and nearly all memory is names.
//
// A name without sets exists because of names below it, or is to have records later: what is asked there is answered
// by NODATA. The zero value is no name at all.
type entry string

// setHead is what stands before the records of a set.
const setHead = 9

// setOne is the flag of a set of which every answer takes one record, in turn.
const setOne = 1

func (e entry) key() string { return string(e[1 : 1+int(e[0])]) }

func (e entry) name() string { return nameOf(e.key()) }

// is reports whether e is of the name with a key, which is lower case.
func (e entry) is(key []byte) bool {
	return int(e[0]) == len(key) && string(e[1:1+len(key)]) == string(key)
}

// keyOf returns the key of a name.
func keyOf(name string) string { return strings.TrimSuffix(name, origin) }

// nameOf returns the name of a key. A name ends with a zero, and what is cut off one does not.
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

// Set is the records of one name and type, in the order in which they were made.
type Set struct {
	Count int
	// One says that an answer takes one record of the set alone, another one each time.
	One bool
	rrs string
}

// headOf returns what stands before the records of the set that s begins with, and how long these are.
func headOf(s string) (t Type, set Set, length int) {
	set = Set{Count: int(s[3])<<8 | int(s[4]), One: s[2]&setOne != 0}
	return Type(s[0])<<8 | Type(s[1]), set, int(s[5])<<24 | int(s[6])<<16 | int(s[7])<<8 | int(s[8])
}

// cutSet returns the set that s, which is well-formed, begins with, and what follows it.
func cutSet(s string) (t Type, set Set, rest string) {
	t, set, length := headOf(s)
	set.rrs = s[setHead : setHead+length]
	return t, set, s[setHead+length:]
}

// set returns the set of a type, an empty one when there is none.
func (e entry) set(t Type) Set {
	for s := string(e[1+int(e[0]):]); s != ""; {
		have, set, rest := cutSet(s)
		if have == t {
			return set
		}
		s = rest
	}
	return Set{}
}

// addresses returns the one IPv4 and the one IPv6 address of e, neither when it has more of one of them.
func (e entry) addresses() (addrs [2]netip.Addr) {
	if e == "" {
		return addrs
	}
	for i, t := range [...]Type{A, AAAA} {
		set := e.set(t)
		if set.Count > 1 {
			return [2]netip.Addr{}
		}
		if set.Count == 1 {
			addrs[i], _ = netip.AddrFromSlice([]byte(set.rrs[recordHead:]))
		}
	}
	return addrs
}

// records calls yield for every record of e.
func (e entry) records(yield func(t Type, ttl uint32, data string)) {
	for s := string(e[1+int(e[0]):]); s != ""; {
		t, set, rest := cutSet(s)
		for rrs := set.rrs; rrs != ""; rrs = rrs[recordLen(rrs):] {
			yield(t, ttlOf(rrs), rrs[recordHead:recordLen(rrs)])
		}
		s = rest
	}
}

// isWellFormed reports whether s, of unknown origin, is an entry that everything here can read.
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
		if s = s[setHead:]; length > len(s) || set.Count == 0 {
			return false
		}
		rrs := s[:length]
		for range set.Count {
			if len(rrs) < recordHead || len(rrs) < recordLen(rrs) || !isData(t, rrs[recordHead:recordLen(rrs)]) {
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

// isName reports whether s is one whole name.
func isName(s string) bool {
	if len(s) > maxName {
		return false
	}
	for s != "" {
		n := int(s[0])
		if n == 0 {
			return len(s) == 1
		}
		if n > maxLabel || len(s) <= n {
			return false
		}
		s = s[1+n:]
	}
	return false
}

// isData reports whether s can be the data of a type that a zone keeps.
func isData(t Type, s string) bool {
	switch t {
	case A:
		return len(s) == 4
	case AAAA:
		return len(s) == 16
	case SRV:
		return len(s) > srvHead && isName(s[srvHead:])
	case PTR, NS:
		return isName(s)
	case TXT:
		for s != "" {
			if len(s) <= int(s[0]) {
				return false
			}
			s = s[1+int(s[0]):]
		}
		return true
	default:
		return false
	}
}

// sheet collects the records of a service.
type sheet struct {
	ttl   uint32
	lines []line
}

type line struct {
	name string
	t    Type // 0 for a name alone
	one  bool
	data string
}

func (s *sheet) add(name string, t Type, data string) {
	s.lines = append(s.lines, line{name, t, false, data})
}

// exist makes a name exist.
func (s *sheet) exist(name string) { s.lines = append(s.lines, line{name: name}) }

// entries returns one entry for each name. Equal records are one.
func (s *sheet) entries() []entry {
	slices.SortFunc(s.lines, func(a, b line) int {
		return cmp.Or(strings.Compare(a.name, b.name), cmp.Compare(a.t, b.t), strings.Compare(a.data, b.data))
	})
	lines := slices.Compact(s.lines)
	var all []entry
	var b []byte
	for len(lines) > 0 {
		name := lines[0].name
		b = append(b[:0], entryOf(name)...)
		for len(lines) > 0 && lines[0].name == name {
			t, one := lines[0].t, lines[0].one
			if t == 0 {
				lines = lines[1:]
				continue
			}
			at, count := len(b), 0
			b = append(b, make([]byte, setHead)...)
			for len(lines) > 0 && lines[0].name == name && lines[0].t == t && count < 1<<16-1 {
				b = appendRecord(b, t, s.ttl, lines[0].data)
				lines, count = lines[1:], count+1
			}
			for len(lines) > 0 && lines[0].name == name && lines[0].t == t {
				lines = lines[1:] // no answer could hold them
			}
			binary.BigEndian.PutUint16(b[at:], uint16(t))
			if one {
				b[at+2] = setOne
			}
			binary.BigEndian.PutUint16(b[at+3:], uint16(count))
			binary.BigEndian.PutUint32(b[at+5:], uint32(len(b)-at-setHead))
		}
		all = append(all, entry(b))
	}
	return all
}
