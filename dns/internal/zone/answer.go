package zone

import "encoding/binary"

// Rcode is a response code (IANA, "DNS RCODEs").
type Rcode uint8

// The codes of answers from a zone.
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

// Bits of a header's third byte, and where its counts are.
const (
	authoritative = 0x04
	truncated     = 0x02

	answersAt    = 6
	authorityAt  = 8
	additionalAt = 10
)

// maxGlue is up to how many answers the addresses of their targets are added.
const maxGlue = 64

// Question is what is asked for.
type Question struct {
	Name []byte // in lower case, as on the wire
	Type Type
}

// Append completes an answer: b is its header, of which the flags of ours, the code and the counts but the first are
// zero, and the question as it was asked, name first, of class IN. What is appended leaves b no longer than limit
// bytes, which must have room for a SOA: 512 do, less an OPT. turn says at which of several records to begin, so that
// clients which take the first one spread.
//
// Where not all records have room there are as many whole ones as have, and the answer is marked as truncated.
func (z *Zone) Append(b []byte, q Question, turn uint32, limit int) ([]byte, Rcode) {
	top, at := z.apexOf(q.Name)
	if top == nil || q.Type == AXFR || q.Type == IXFR {
		b[3] |= byte(Refused)
		return b, Refused
	}
	b[2] |= authoritative
	e := z.find(q.Name)
	switch {
	case e == "" && labelsOf(q.Name) < top.labels:
		return top.appendSOA(b, at), NoError
	case e == "":
		b[3] |= byte(NameError)
		return top.appendSOA(b, at), NameError
	case q.Type == ANY:
		// RFC 8482, section 4.2: a name that exists, and nothing to amplify with.
		b[answersAt+1] = 1
		return appendRecord(b, HINFO, DefaultTTL, textsData("RFC8482", "")), NoError
	case q.Type == SOA && at == 0:
		b[answersAt+1] = 1
		return append(b, top.soa...), NoError
	}
	set := e.set(q.Type)
	if set.Count == 0 {
		return top.appendSOA(b, at), NoError
	}
	question := len(b)
	b, n := set.append(b, turn, limit)
	binary.BigEndian.PutUint16(b[answersAt:], uint16(n))
	if q.Type == SRV && b[2]&truncated == 0 && n <= maxGlue {
		b = z.appendGlue(b, question, n, limit)
	}
	return b, NoError
}

// apexOf returns the top of what a name belongs to, nil when that is none of ours, and how many bytes of the name stand
// before it.
func (z *Zone) apexOf(name []byte) (*apex, int) {
	for i := range z.apexes {
		top := &z.apexes[i]
		if at, ok := cutAt(name, top.name); ok {
			return top, at
		}
	}
	return nil, 0
}

// cutAt returns how many bytes of a name stand before top, and whether it is top or below it.
func cutAt(name []byte, top string) (at int, ok bool) {
	at = len(name) - len(top)
	if at < 0 || string(name[at:]) != top {
		return 0, false
	}
	i := 0
	for i < at { // from label to label
		i += 1 + int(name[i])
	}
	return at, i == at
}

// appendSOA appends the SOA of a negative answer (RFC 2308) to an apex's name, which stands in the question after so
// many bytes.
func (a *apex) appendSOA(b []byte, at int) []byte {
	b[authorityAt+1] = 1
	b = append(b, 0xc0, byte(HeaderLen+at))
	return append(b, a.soa[len(ownerPointer):]...)
}

// append appends the records of a set, from the turn's on, and returns how many had room.
func (s Set) append(b []byte, turn uint32, limit int) ([]byte, int) {
	first := int(turn % uint32(s.Count))
	start := 0
	for range first {
		start += recordLen(s.rrs[start:])
	}
	if s.One {
		return append(b, s.rrs[start:start+recordLen(s.rrs[start:])]...), 1
	}
	if len(b)+len(s.rrs) <= limit {
		return append(append(b, s.rrs[start:]...), s.rrs[:start]...), s.Count
	}
	b[2] |= truncated
	n := 0
	for at := start; n < s.Count; n++ {
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

// appendGlue appends the addresses of the targets of n SRV records, which begin at an index of b, as far as there is
// room for those of a target.
func (z *Zone) appendGlue(b []byte, at, n, limit int) []byte {
	var seen [maxGlue]int // where in b the targets are whose addresses are there
	targets, added := 0, 0
	for range n {
		length := recordHead + int(binary.BigEndian.Uint16(b[at+recordHead-2:]))
		name := at + recordHead + srvHead
		target := b[name : at+length]
		at += length
		if name > 0x3fff { // beyond what a pointer reaches
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
			if set.Count == 0 || len(b)+len(set.rrs) > limit {
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

// Contains reports whether a name, in lower case and on the wire, is clusterset.local or below it.
func Contains(name []byte) bool {
	_, ok := cutAt(name, origin)
	return ok
}
