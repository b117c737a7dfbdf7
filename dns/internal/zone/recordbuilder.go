package zone

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
)

// recordBuilder collects names and records and encodes them as entries.
type recordBuilder struct {
	ttl     uint32 // seconds
	records []record
}

// record is one record to encode. Type 0 makes the name exist without a record.
type record struct {
	name   string
	typ    Type
	single bool // an answer carries one record of this name and type
	data   string
}

// add adds a record.
func (b *recordBuilder) add(name string, t Type, data string) {
	b.records = append(b.records, record{name: name, typ: t, data: data})
}

// addName makes a name exist, with or without records.
func (b *recordBuilder) addName(name string) { b.records = append(b.records, record{name: name}) }

// addAddress adds an A or AAAA record.
func (b *recordBuilder) addAddress(name string, addr netip.Addr) {
	t, data := addressData(addr)
	b.add(name, t, data)
}

func (b *recordBuilder) addAddresses(name string, addrs []netip.Addr) {
	for _, a := range addrs {
		b.addAddress(name, a)
	}
}

// addRotating adds addresses of which each answer carries one, in turn.
func (b *recordBuilder) addRotating(name string, addrs []netip.Addr) {
	for _, a := range addrs {
		t, data := addressData(a)
		b.records = append(b.records, record{name, t, true, data})
	}
}

// entries returns one entry for each name. Equal records are merged.
func (b *recordBuilder) entries() []entry {
	slices.SortFunc(b.records, func(a, b record) int {
		return cmp.Or(strings.Compare(a.name, b.name), cmp.Compare(a.typ, b.typ), strings.Compare(a.data, b.data))
	})
	rest := slices.Compact(b.records)
	var all []entry
	var buf []byte
	for len(rest) > 0 {
		name := rest[0].name
		buf = append(buf[:0], entryOf(name)...)
		for len(rest) > 0 && rest[0].name == name {
			n := 1
			for n < len(rest) && rest[n].name == name && rest[n].typ == rest[0].typ {
				n++
			}
			if rest[0].typ != 0 {
				buf = appendSet(buf, rest[:n], b.ttl)
			}
			rest = rest[n:]
		}
		all = append(all, entry(buf))
	}
	return all
}

// maxSet is the number of records that the count of an entry's set, and that of an answer's section, can express.
const maxSet = 1<<16 - 1

// appendSet appends records of one name and type as a set. It drops those above maxSet: no answer could carry them.
func appendSet(b []byte, records []record, ttl uint32) []byte {
	records = records[:min(len(records), maxSet)]
	at := len(b)
	b = append(b, make([]byte, setHead)...)
	for _, r := range records {
		b = appendRecord(b, r.typ, ttl, r.data)
	}
	binary.BigEndian.PutUint16(b[at:], uint16(records[0].typ))
	if records[0].single {
		b[at+2] = setSingle
	}
	binary.BigEndian.PutUint16(b[at+3:], uint16(len(records)))
	binary.BigEndian.PutUint32(b[at+5:], uint32(len(b)-at-setHead))
	return b
}
