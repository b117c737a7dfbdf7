package zone

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Type is a record type (IANA, "Resource Record (RR) TYPEs").
type Type uint16

// The types that the zone holds, then those that only occur in questions and generated answers.
const (
	A    Type = 1
	NS   Type = 2
	PTR  Type = 12
	TXT  Type = 16
	AAAA Type = 28
	SRV  Type = 33

	SOA   Type = 6
	HINFO Type = 13
	IXFR  Type = 251
	AXFR  Type = 252
	ANY   Type = 255
)

// typeInfo describes a record type.
type typeInfo struct {
	mnemonic string
	// text returns wire-format data as a zone file writes it; nil if no record has the type.
	text func(data string) string
	// valid reports whether bytes from a file are data of the type; nil if an entry cannot hold the type.
	valid func(data string) bool
}

// types holds all types. A new type needs its number above, a row here, and the place that adds its records.
var types = map[Type]typeInfo{
	A:    {"A", addressText, func(data string) bool { return len(data) == 4 }},
	NS:   {"NS", Text, isName},
	PTR:  {"PTR", Text, isName},
	TXT:  {"TXT", textsText, isTexts},
	AAAA: {"AAAA", addressText, func(data string) bool { return len(data) == 16 }},
	SRV:  {"SRV", srvText, isSRV},

	SOA:   {"SOA", soaText, nil},
	HINFO: {"HINFO", textsText, nil},
	IXFR:  {"IXFR", nil, nil},
	AXFR:  {"AXFR", nil, nil},
	ANY:   {"ANY", nil, nil},
}

// String returns the mnemonic, or TYPE65 for an unknown type (RFC 3597).
func (t Type) String() string {
	if info, ok := types[t]; ok {
		return info.mnemonic
	}
	return "TYPE" + strconv.Itoa(int(t))
}

// text returns data as a zone file writes it.
func (t Type) text(data string) string {
	if text := types[t].text; text != nil {
		return text(data)
	}
	return fmt.Sprintf(`\# %d %x`, len(data), data) // RFC 3597, section 5
}

// valid reports whether data, from an untrusted source, can stand in an entry under the type.
func (t Type) valid(data string) bool {
	valid := types[t].valid
	return valid != nil && valid(data)
}

// Record is one record in presentation format.
type Record struct {
	Name string // as a zone file writes it
	Type Type
	TTL  uint32 // seconds
	Data string // as a zone file writes it
}

// String returns the record as a line of a zone file.
func (r Record) String() string { return fmt.Sprintf("%s %d IN %s %s", r.Name, r.TTL, r.Type, r.Data) }

// The layout of a record in an answer whose owner is the name in the question: a pointer to it, type, class, TTL, and
// the data after its length.
const (
	ownerPointer = "\xc0\x0c"
	recordHead   = 2 + 2 + 2 + 4 + 2
	classIN      = 1
)

// appendRecord appends a record whose owner is the name in the question.
func appendRecord(b []byte, t Type, ttl uint32, data string) []byte {
	b = append(b, ownerPointer...)
	b = binary.BigEndian.AppendUint16(b, uint16(t))
	b = binary.BigEndian.AppendUint16(b, classIN)
	b = binary.BigEndian.AppendUint32(b, ttl)
	b = binary.BigEndian.AppendUint16(b, uint16(len(data)))
	return append(b, data...)
}

// recordLen returns the length of the first record of rrs.
func recordLen(rrs string) int {
	return recordHead + int(rrs[recordHead-2])<<8 + int(rrs[recordHead-1])
}

// ttlOf returns the TTL of a record.
func ttlOf(rr string) uint32 {
	return uint32(rr[6])<<24 | uint32(rr[7])<<16 | uint32(rr[8])<<8 | uint32(rr[9])
}

// addressData returns the type and data of the record of an address.
func addressData(a netip.Addr) (Type, string) {
	a = a.Unmap()
	if a.Is4() {
		b := a.As4()
		return A, string(b[:])
	}
	b := a.As16()
	return AAAA, string(b[:])
}

func addressText(data string) string {
	addr, _ := netip.AddrFromSlice([]byte(data))
	return addr.String()
}

// srvHead is the length of priority, weight and port, which precede the target.
const srvHead = 6

func srvData(weight, port uint16, target string) string {
	b := make([]byte, 0, srvHead+len(target))
	b = binary.BigEndian.AppendUint16(b, 0) // one priority for all
	b = binary.BigEndian.AppendUint16(b, weight)
	b = binary.BigEndian.AppendUint16(b, port)
	return string(append(b, target...))
}

func srvText(data string) string {
	n := []byte(data[:srvHead])
	return fmt.Sprintf("%d %d %d %s", binary.BigEndian.Uint16(n), binary.BigEndian.Uint16(n[2:]), binary.BigEndian.Uint16(n[4:]), Text(data[srvHead:]))
}

func isSRV(data string) bool { return len(data) > srvHead && isName(data[srvHead:]) }

// textsData returns the data of TXT and HINFO records: strings of up to 255 bytes, each after its length.
func textsData(texts ...string) string {
	var b []byte
	for _, t := range texts {
		b = append(append(b, byte(len(t))), t...)
	}
	return string(b)
}

func textsText(data string) string {
	var quoted []string
	for data != "" {
		quoted = append(quoted, strconv.Quote(data[1:1+int(data[0])]))
		data = data[1+int(data[0]):]
	}
	return strings.Join(quoted, " ")
}

func isTexts(data string) bool {
	for data != "" {
		if len(data) <= int(data[0]) {
			return false
		}
		data = data[1+int(data[0]):]
	}
	return true
}

// soaData returns the data of a SOA record. Resolvers cache a negative answer for minimum seconds (RFC 2308), the TTL of
// positive ones: otherwise a Service exported a moment ago would stay unknown for longer.
func soaData(primary, mailbox string, serial, minimum uint32) string {
	b := append([]byte(primary), mailbox...)
	for _, n := range []uint32{serial, 7200, 1800, 86400, minimum} {
		b = binary.BigEndian.AppendUint32(b, n)
	}
	return string(b)
}

func soaText(data string) string {
	primary := nameLen(data)
	mailbox := nameLen(data[primary:])
	words := []string{Text(data[:primary]), Text(data[primary : primary+mailbox])}
	for n := []byte(data[primary+mailbox:]); len(n) > 0; n = n[4:] {
		words = append(words, strconv.FormatUint(uint64(binary.BigEndian.Uint32(n)), 10))
	}
	return strings.Join(words, " ")
}
