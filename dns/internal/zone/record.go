package zone

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Type is a type of record (IANA, "Resource Record (RR) TYPEs").
type Type uint16

// The types that occur here.
const (
	A     Type = 1
	NS    Type = 2
	SOA   Type = 6
	PTR   Type = 12
	HINFO Type = 13
	TXT   Type = 16
	AAAA  Type = 28
	SRV   Type = 33
	IXFR  Type = 251
	AXFR  Type = 252
	ANY   Type = 255
)

var typeNames = map[Type]string{
	A: "A", NS: "NS", SOA: "SOA", PTR: "PTR", HINFO: "HINFO", TXT: "TXT", AAAA: "AAAA", SRV: "SRV", IXFR: "IXFR", AXFR: "AXFR", ANY: "ANY",
}

// String returns the mnemonic, or TYPE65 as RFC 3597 writes the others.
func (t Type) String() string {
	if name, ok := typeNames[t]; ok {
		return name
	}
	return "TYPE" + strconv.Itoa(int(t))
}

// Record is one record, as people look at it.
type Record struct {
	Name string // as a zone file writes it
	Type Type
	TTL  uint32 // seconds
	Data string // as a zone file writes it
}

// String returns the record's line in a zone file.
func (r Record) String() string { return fmt.Sprintf("%s %d IN %s %s", r.Name, r.TTL, r.Type, r.Data) }

// The layout of a record in an answer whose owner is the name that was asked: a pointer to it, type, class, TTL, and
// the data after its length.
const (
	ownerPointer = "\xc0\x0c"
	recordHead   = 2 + 2 + 2 + 4 + 2
	classIN      = 1
)

// appendRecord appends a record whose owner is the name that was asked.
func appendRecord(b []byte, t Type, ttl uint32, data string) []byte {
	b = append(b, ownerPointer...)
	b = binary.BigEndian.AppendUint16(b, uint16(t))
	b = binary.BigEndian.AppendUint16(b, classIN)
	b = binary.BigEndian.AppendUint32(b, ttl)
	b = binary.BigEndian.AppendUint16(b, uint16(len(data)))
	return append(b, data...)
}

// recordLen returns how long the first record of rrs is.
func recordLen(rrs string) int {
	return recordHead + int(rrs[recordHead-2])<<8 + int(rrs[recordHead-1])
}

// The data of records, as on the wire.

func addressData(a netip.Addr) (Type, string) {
	a = a.Unmap()
	if a.Is4() {
		b := a.As4()
		return A, string(b[:])
	}
	b := a.As16()
	return AAAA, string(b[:])
}

// srvHead is what stands before the target.
const srvHead = 6

func srvData(weight, port uint16, target string) string {
	b := make([]byte, 0, srvHead+len(target))
	b = binary.BigEndian.AppendUint16(b, 0) // all have the same priority
	b = binary.BigEndian.AppendUint16(b, weight)
	b = binary.BigEndian.AppendUint16(b, port)
	return string(append(b, target...))
}

// textsData is the data of TXT and HINFO.
func textsData(texts ...string) string {
	var b []byte
	for _, t := range texts {
		b = append(append(b, byte(len(t))), t...)
	}
	return string(b)
}

// soaData is the data of a SOA. A service exported a moment ago must not stay unknown for longer than its TTL
// (RFC 2308).
func soaData(primary, mailbox string, serial, minimum uint32) string {
	b := append([]byte(primary), mailbox...)
	for _, n := range []uint32{serial, 7200, 1800, 86400, minimum} {
		b = binary.BigEndian.AppendUint32(b, n)
	}
	return string(b)
}

// text returns data as a zone file writes it.
func (t Type) text(data string) string {
	switch t {
	case A, AAAA:
		addr, _ := netip.AddrFromSlice([]byte(data))
		return addr.String()
	case NS, PTR:
		return Text(data)
	case SRV:
		n := []byte(data[:srvHead])
		return fmt.Sprintf("%d %d %d %s", binary.BigEndian.Uint16(n), binary.BigEndian.Uint16(n[2:]), binary.BigEndian.Uint16(n[4:]), Text(data[srvHead:]))
	case TXT, HINFO:
		var quoted []string
		for data != "" {
			quoted = append(quoted, strconv.Quote(data[1:1+int(data[0])]))
			data = data[1+int(data[0]):]
		}
		return strings.Join(quoted, " ")
	case SOA:
		primary := nameLen(data)
		mailbox := nameLen(data[primary:])
		words := []string{Text(data[:primary]), Text(data[primary : primary+mailbox])}
		for n := []byte(data[primary+mailbox:]); len(n) > 0; n = n[4:] {
			words = append(words, strconv.FormatUint(uint64(binary.BigEndian.Uint32(n)), 10))
		}
		return strings.Join(words, " ")
	default:
		return fmt.Sprintf(`\# %d %x`, len(data), data) // RFC 3597, section 5
	}
}

// nameLen returns how long the name is that s begins with.
func nameLen(s string) int {
	n := 0
	for s[n] != 0 {
		n += 1 + int(s[n])
	}
	return n + 1
}
