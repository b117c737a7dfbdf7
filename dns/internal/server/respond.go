package server

import (
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

const (
	headerLen = zone.HeaderLen

	// maxUDP is the largest answer sent over UDP and the size we announce, in bytes. It fits an IPv6
	// packet of 1280 bytes, which no path fragments (https://www.dnsflagday.net/2020/).
	maxUDP = 1232

	maxTCP = dns.MaxMsgSize

	// maxName is the length of the longest name on the wire (RFC 1035, section 2.3.4).
	maxName = 255
)

// transport is how a question came.
type transport uint8

const (
	overUDP transport = iota
	overTCP
)

// Bits of a header's third and fourth byte (RFC 1035, section 4.1.1).
const (
	response         = 0x80
	opcodeMask       = 0x78
	recursionDesired = 0x01
	rcodeMask        = 0x0f
)

// question is what a message asks, and how it is to be answered.
type question struct {
	wire  []byte // the question as it is echoed: name, type, class
	lower []byte // the name in lower case
	typ   zone.Type
	class uint16
	edns  edns
}

// edns is what a message says by its OPT record (RFC 6891).
type edns struct {
	present bool
	version uint8
	do      bool
	size    int // of the largest answer over UDP that the client can take
}

// responder answers messages, one at a time, in memory that is there, so that an answer costs none.
type responder struct {
	lower [maxName]byte
	out   []byte // for the next answer, whatever it holds
	// barred is true for a client that may not ask here: it is told so, and nothing else.
	barred bool
	// last says what became of the last message, for those who count.
	last outcome
}

// outcome is what became of a message.
type outcome struct {
	typ     zone.Type // that was asked for; 0 when that could not be read
	rcode   uint16    // 16 and above are of EDNS
	unusual bool      // it took the library to read it
}

// respond returns the answer to one message and its code, or nil when the message deserves none. Any bytes are
// welcome; z is nil until the first snapshot came. turn says at which of several records to begin, so that clients
// which take the first one spread. The answer is valid until the next call.
func (r *responder) respond(z *zone.Zone, query []byte, via transport, turn uint32) []byte {
	r.last = outcome{}
	if len(query) < headerLen || query[2]&response != 0 {
		return nil // an answer; answering it could start an endless exchange
	}
	if query[2]&opcodeMask != dns.OpcodeQuery<<3 {
		return r.bare(query, dns.RcodeNotImplemented)
	}
	if binary.BigEndian.Uint16(query[4:]) != 1 {
		return r.bare(query, dns.RcodeFormatError)
	}
	q, ok := r.parse(query)
	if !ok {
		r.last.unusual = true
		q, ok = r.parseUnusual(query)
	}
	if !ok {
		return r.bare(query, dns.RcodeFormatError)
	}
	return r.answer(z, query, q, via, turn)
}

// answer answers q, the question of query.
func (r *responder) answer(z *zone.Zone, query []byte, q question, via transport, turn uint32) []byte {
	b := append(r.out[:0], query[0], query[1], response|query[2]&recursionDesired, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	b = append(b, q.wire...)
	limit := maxTCP
	if via == overUDP {
		limit = q.edns.size
	}
	if q.edns.present {
		limit -= optLen
	}
	extended := 0
	switch {
	case q.edns.version != 0:
		extended = dns.RcodeBadVers >> 4
		b[3] |= dns.RcodeBadVers & rcodeMask
	case r.barred || q.class != dns.ClassINET || z == nil && !zone.Contains(q.lower):
		b[3] |= dns.RcodeRefused
	case z == nil:
		b[3] |= dns.RcodeServerFailure
	default:
		b, _ = z.Append(b, zone.Question{Name: q.lower, Type: q.typ}, turn, limit)
	}
	if q.edns.present {
		b = appendOPT(b, extended, q.edns.do)
	}
	r.last.typ, r.last.rcode = q.typ, uint16(extended)<<4|uint16(b[3]&rcodeMask)
	r.out = b
	return b
}

// truncated returns an answer without records that makes the client ask again over TCP, or nil when the message does
// not deserve one. It is as short as the message, or shorter.
func (r *responder) truncated(query []byte) []byte {
	const tc = 0x02
	q, ok := r.parse(query)
	if !ok || query[2]&(response|opcodeMask) != 0 {
		return nil
	}
	b := append(r.out[:0], query[0], query[1], response|tc|query[2]&recursionDesired, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	r.out = append(b, q.wire...)
	return r.out
}

// tooLong returns the answer to a message of which only the beginning was read, nil when it is none that deserves one.
func (r *responder) tooLong(query []byte) []byte {
	r.last = outcome{unusual: true}
	if query[2]&response != 0 {
		return nil
	}
	return r.bare(query, dns.RcodeFormatError)
}

// An OPT record's type, and its length without options.
const (
	typeOPT = 41
	optLen  = 11
)

// appendOPT appends our OPT record. The DO bit is the client's (RFC 3225).
func appendOPT(b []byte, extended int, do bool) []byte {
	const additionalAt = 10
	binary.BigEndian.PutUint16(b[additionalAt:], binary.BigEndian.Uint16(b[additionalAt:])+1)
	flags := byte(0)
	if do {
		flags = 0x80
	}
	return append(b, 0, 0, typeOPT, maxUDP>>8, maxUDP&0xff, byte(extended), 0, flags, 0, 0, 0)
}

// parse reads the message that nearly all are: one question, without compression, and at most an OPT record without
// options or with a cookie. It reports false for every other one, well-formed or not.
func (r *responder) parse(query []byte) (question, bool) {
	if binary.BigEndian.Uint32(query[6:]) != 0 || query[10] != 0 || query[11] > 1 {
		return question{}, false
	}
	end := headerLen
	for {
		if end >= len(query) || end-headerLen >= maxName {
			return question{}, false
		}
		n := int(query[end])
		if n == 0 {
			break
		}
		if n > 63 {
			return question{}, false
		}
		end += 1 + n
	}
	end++
	name := query[headerLen:end]
	if len(name) > maxName || len(query) < end+4 {
		return question{}, false
	}
	q := question{
		wire: query[headerLen : end+4], lower: r.lowerOf(name),
		typ: zone.Type(binary.BigEndian.Uint16(query[end:])), class: binary.BigEndian.Uint16(query[end+2:]),
		edns: edns{size: dns.MinMsgSize},
	}
	rest := query[end+4:]
	if query[11] == 0 {
		return q, len(rest) == 0
	}
	if len(rest) < optLen || rest[0] != 0 || rest[1] != 0 || rest[2] != typeOPT || !isPlain(rest[9:]) {
		return question{}, false
	}
	q.edns = edns{present: true, version: rest[6], do: rest[7]&0x80 != 0, size: answerSize(binary.BigEndian.Uint16(rest[3:]))}
	return q, true
}

// lowerOf returns a name in lower case, valid until the next call.
func (r *responder) lowerOf(name []byte) []byte {
	lower := r.lower[:len(name)]
	for i, c := range name {
		if 'A' <= c && c <= 'Z' { // a label's length is 63 at most and none of these
			c += 'a' - 'A'
		}
		lower[i] = c
	}
	return lower
}

// isPlain reports whether the data of an OPT record, which begins with its length and is the end of a message, holds
// nothing or a cookie.
func isPlain(data []byte) bool {
	length := int(binary.BigEndian.Uint16(data))
	options := data[2:]
	switch {
	case length != len(options):
		return false
	case length == 0:
		return true
	default:
		return length >= 4 && binary.BigEndian.Uint16(options) == dns.EDNS0COOKIE && int(binary.BigEndian.Uint16(options[2:])) == length-4
	}
}

// parseUnusual reads any message, by the library.
func (r *responder) parseUnusual(query []byte) (question, bool) {
	var m dns.Msg
	if err := m.Unpack(query); err != nil || len(m.Question) != 1 {
		return question{}, false
	}
	asked := m.Question[0]
	wire := make([]byte, maxName+1+4)
	n, err := dns.PackDomainName(asked.Name, wire, 0, nil, false)
	if err != nil {
		return question{}, false
	}
	q := question{lower: r.lowerOf(wire[:n]), typ: zone.Type(asked.Qtype), class: asked.Qclass, edns: edns{size: dns.MinMsgSize}}
	wire = binary.BigEndian.AppendUint16(wire[:n], asked.Qtype)
	q.wire = binary.BigEndian.AppendUint16(wire, asked.Qclass)
	for _, rr := range m.Extra {
		opt, is := rr.(*dns.OPT)
		if !is {
			continue
		}
		if q.edns.present {
			return question{}, false // RFC 6891, section 6.1.1
		}
		q.edns = edns{present: true, version: opt.Version(), do: opt.Do(), size: answerSize(opt.UDPSize())}
	}
	return q, true
}

// answerSize returns how long an answer over UDP may be for a client that can take so much.
func answerSize(announced uint16) int { return min(max(int(announced), dns.MinMsgSize), maxUDP) }

// bare returns a header alone with rcode, for messages whose question cannot be echoed. query holds at
// least a header.
func (r *responder) bare(query []byte, rcode byte) []byte {
	r.last.rcode = uint16(rcode)
	r.out = append(r.out[:0], query[0], query[1], response|query[2]&(opcodeMask|recursionDesired), rcode, 0, 0, 0, 0, 0, 0, 0, 0)
	return r.out
}
