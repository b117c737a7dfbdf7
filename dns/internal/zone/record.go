package zone

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Type is a record or question type (IANA "DNS Resource Record (RR) TYPEs"). Questions may hold any
// value, the zone holds only those below.
type Type uint16

// The types that the zone answers or treats in a way of its own.
const (
	A     Type = 1
	NS    Type = 2
	SOA   Type = 6
	HINFO Type = 13
	TXT   Type = 16
	AAAA  Type = 28
	IXFR  Type = 251
	AXFR  Type = 252
	ANY   Type = 255
)

// String returns the mnemonic, or TYPEn as RFC 3597 writes types without one.
func (t Type) String() string {
	switch t {
	case A:
		return "A"
	case NS:
		return "NS"
	case SOA:
		return "SOA"
	case HINFO:
		return "HINFO"
	case TXT:
		return "TXT"
	case AAAA:
		return "AAAA"
	case IXFR:
		return "IXFR"
	case AXFR:
		return "AXFR"
	case ANY:
		return "ANY"
	default:
		return "TYPE" + strconv.Itoa(int(t))
	}
}

// Rcode is a response code (RFC 1035, section 4.1.1).
type Rcode uint8

// The response codes that a lookup can give. NoError with no records is NODATA.
const (
	NoError   Rcode = 0
	NameError Rcode = 3
	Refused   Rcode = 5
)

// String returns the name that dig prints.
func (r Rcode) String() string {
	switch r {
	case NoError:
		return "NOERROR"
	case NameError:
		return "NXDOMAIN"
	case Refused:
		return "REFUSED"
	default:
		return "RCODE" + strconv.Itoa(int(r))
	}
}

// Record is one resource record of class IN.
type Record struct {
	Name string
	Type Type
	TTL  uint32 // seconds, as on the wire
	// Data is a netip.Addr (A, AAAA), Target (NS), Text (TXT), HostInfo (HINFO) or StartOfAuthority (SOA).
	Data fmt.Stringer
}

// Target is the name that an NS record points at.
type Target string

// Text is the strings of a TXT record, each at most 255 bytes.
type Text []string

// HostInfo is the data of a HINFO record.
type HostInfo struct{ CPU, OS string }

// StartOfAuthority is the data of the SOA record; times are seconds, as on the wire.
type StartOfAuthority struct {
	Primary, Mailbox                        string
	Serial, Refresh, Retry, Expire, Minimum uint32
}

// String returns the target as it stands in a zone file.
func (t Target) String() string { return string(t) }

// String returns the quoted strings as they stand in a zone file.
func (t Text) String() string {
	quoted := make([]string, len(t))
	for i, s := range t {
		quoted[i] = strconv.Quote(s)
	}
	return strings.Join(quoted, " ")
}

// String returns the two quoted strings as they stand in a zone file.
func (h HostInfo) String() string { return Text{h.CPU, h.OS}.String() }

// String returns the seven fields as they stand in a zone file.
func (s StartOfAuthority) String() string {
	return fmt.Sprintf("%s %s %d %d %d %d %d", s.Primary, s.Mailbox, s.Serial, s.Refresh, s.Retry, s.Expire, s.Minimum)
}

// String returns the record as a line of a zone file.
func (r Record) String() string {
	return fmt.Sprintf("%s %d IN %s %s", r.Name, r.TTL, r.Type, r.Data)
}

// compare orders the records of one name by type; addresses of one type by value.
func (r Record) compare(o Record) int {
	if c := cmp.Compare(r.Type, o.Type); c != 0 {
		return c
	}
	have, ok := r.Data.(netip.Addr)
	want, also := o.Data.(netip.Addr)
	if ok && also {
		return have.Compare(want)
	}
	return strings.Compare(r.Data.String(), o.Data.String())
}
