package zone

import "encoding/binary"

// Rcode is a response code (IANA, "DNS RCODEs").
type Rcode uint8

// The response codes that a zone gives.
const (
	NoError   Rcode = 0
	NameError Rcode = 3
	Refused   Rcode = 5
)

// String returns the mnemonic.
func (r Rcode) String() string {
	switch r {
	case NoError:
		return "NOERROR"
	case NameError:
		return "NXDOMAIN"
	case Refused:
		return "REFUSED"
	default:
		return "RCODE" + string('0'+rune(r/10)) + string('0'+rune(r%10))
	}
}

// HeaderLen is the length of a message's header (RFC 1035, section 4.1.1).
const HeaderLen = 12

// Bits of a header's third byte, and the offsets of its counts.
const (
	authoritative = 0x04
	truncated     = 0x02

	answersAt    = 6
	authorityAt  = 8
	additionalAt = 10
)

// maxGlue is the largest number of SRV records to which the addresses of their targets are added.
const maxGlue = 64

// Question is the question of a message. Its class is IN.
type Question struct {
	Name []byte // in lower case and wire format
	Type Type
}

// Append completes an answer. b holds its header and the question as the client sent it. In the header, the flags that
// Append sets, the code and all counts but QDCOUNT are zero. The answer grows to at most limit bytes, which must have room
// for a SOA: 512 bytes have, less an OPT record. rotation selects the record that comes first, so that clients that use
// only the first one spread over all.
//
// If not all records fit, Append adds as many whole records as do and sets the TC bit.
func (z *Zone) Append(b []byte, q Question, rotation uint32, limit int) ([]byte, Rcode) {
	a, at := z.apexOf(q.Name)
	if a == nil || q.Type == AXFR || q.Type == IXFR {
		b[3] |= byte(Refused)
		return b, Refused
	}
	b[2] |= authoritative
	e := z.find(q.Name)
	switch {
	case e == "" && labelsOf(q.Name) < a.labels:
		return a.appendSOA(b, at), NoError
	case e == "":
		b[3] |= byte(NameError)
		return a.appendSOA(b, at), NameError
	case q.Type == ANY:
		// RFC 8482, section 4.2: confirms that the name exists, and is too small for an amplification attack.
		b[answersAt+1] = 1
		return appendRecord(b, HINFO, DefaultTTL, textsData("RFC8482", "")), NoError
	case q.Type == SOA && at == 0:
		b[answersAt+1] = 1
		return append(b, a.soa...), NoError
	}
	set := e.set(q.Type)
	if set.count == 0 {
		return a.appendSOA(b, at), NoError
	}
	question := len(b)
	b, n := set.append(b, rotation, limit)
	binary.BigEndian.PutUint16(b[answersAt:], uint16(n))
	if q.Type == SRV && b[2]&truncated == 0 && n <= maxGlue {
		b = z.appendGlue(b, question, n, limit)
	}
	return b, NoError
}

// apexOf returns the apex at or above a name, and the number of bytes of the name that precede it. The apex is nil if
// the name belongs to another zone.
func (z *Zone) apexOf(name []byte) (*apex, int) {
	for i := range z.apexes {
		a := &z.apexes[i]
		if at, ok := cutAt(name, a.name); ok {
			return a, at
		}
	}
	return nil, 0
}

// cutAt reports whether a name is suffix or below it, and returns the number of bytes that precede suffix.
func cutAt(name []byte, suffix string) (at int, ok bool) {
	at = len(name) - len(suffix)
	if at < 0 || string(name[at:]) != suffix {
		return 0, false
	}
	i := 0
	for i < at { // label by label: suffix must begin at one
		i += 1 + int(name[i])
	}
	return at, i == at
}

// appendSOA appends the SOA of a negative answer (RFC 2308). Its owner is a pointer to the apex's name in the question, at
// bytes after the start of the question's name.
func (a *apex) appendSOA(b []byte, at int) []byte {
	b[authorityAt+1] = 1
	b = append(b, 0xc0, byte(HeaderLen+at))
	return append(b, a.soa[len(ownerPointer):]...)
}

// append appends the records of a set, beginning with the one that rotation selects, and returns how many fit.
func (s recordSet) append(b []byte, rotation uint32, limit int) ([]byte, int) {
	first := int(rotation % uint32(s.count))
	start := 0
	for range first {
		start += recordLen(s.rrs[start:])
	}
	if s.single {
		return append(b, s.rrs[start:start+recordLen(s.rrs[start:])]...), 1
	}
	if len(b)+len(s.rrs) <= limit {
		return append(append(b, s.rrs[start:]...), s.rrs[:start]...), s.count
	}
	b[2] |= truncated
	n := 0
	for at := start; n < s.count; n++ {
		length := recordLen(s.rrs[at:])
		if len(b)+length > limit {
			break
		}
		b = append(b, s.rrs[at:at+length]...)
		if at += length; at == len(s.rrs) {
			at = 0
		}
	}
	return b, n
}

// appendGlue appends the addresses of the targets of n SRV records, the first of which begins at b[at]. It leaves out the
// addresses of a family that do not all fit.
func (z *Zone) appendGlue(b []byte, at, n, limit int) []byte {
	var seen [maxGlue]int // offsets in b of the targets that were looked up
	targets, added := 0, 0
	for range n {
		length := recordHead + int(binary.BigEndian.Uint16(b[at+recordHead-2:]))
		name := at + recordHead + srvHead
		target := b[name : at+length]
		at += length
		if name > 0x3fff { // beyond the reach of a compression pointer
			break
		}
		known := false
		for _, s := range seen[:targets] {
			if len(b)-s >= len(target) && string(b[s:s+len(target)]) == string(target) {
				known = true
				break
			}
		}
		if known {
			continue
		}
		seen[targets] = name
		targets++
		e := z.find(target)
		if e == "" {
			continue
		}
		for _, t := range [...]Type{A, AAAA} {
			set := e.set(t)
			if set.count == 0 || len(b)+len(set.rrs) > limit {
				continue
			}
			for rrs := set.rrs; rrs != ""; rrs = rrs[recordLen(rrs):] {
				b = append(b, 0xc0|byte(name>>8), byte(name))
				b = append(b, rrs[len(ownerPointer):recordLen(rrs)]...)
				added++
			}
		}
	}
	binary.BigEndian.PutUint16(b[additionalAt:], uint16(added))
	return b
}

// Contains reports whether a name, in lower case and wire format, is clusterset.local or below it.
func Contains(name []byte) bool {
	_, ok := cutAt(name, origin)
	return ok
}
