package server

import (
	"encoding/binary"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

const (
	headerLen = zone.HeaderLen

	// maxUDP is the size in bytes of the largest answer over UDP, and of the largest question as announced by EDNS. It fits
	// an IPv6 packet of 1280 bytes, which no path fragments (https://www.dnsflagday.net/2020/).
	maxUDP = 1232

	maxTCP = dns.MaxMsgSize

	// maxName is the length of the longest name in wire format (RFC 1035, section 2.3.4).
	maxName = 255
)

// transport is the protocol over which a question came.
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

// question is the question of a message, and the EDNS parameters of its answer.
type question struct {
	wire  []byte // the question as the answer repeats it: name, type, class
	lower []byte // the name in lower case
	typ   zone.Type
	class uint16
	edns  edns
}

// edns holds the OPT record of a message (RFC 6891).
type edns struct {
	present bool
	version uint8
	do      bool
	size    int // of the largest answer over UDP, in bytes
}

// responder answers messages, one at a time. It reuses its memory, so that an answer allocates none.
type responder struct {
	lower [maxName]byte
	out   []byte // buffer of the next answer
	// denied is set for a stranger: all its questions are REFUSED.
	denied bool
	// last is the outcome of the last message, for counters and log.
	last outcome
}

// outcome describes how a message was answered.
type outcome struct {
	typ     zone.Type // in the question; 0 if that could not be read
	rcode   uint16    // 16 and above are extended codes of EDNS
	unusual bool      // the fast parser left it to miekg/dns
}

// respond returns the answer to one message, or nil if the message gets none. The message may hold any bytes. z is nil
// before the first snapshot. rotation selects the record that comes first, so that clients that use only that one spread
// over all. The answer is valid until the next call.
func (r *responder) respond(z *zone.Zone, query []byte, via transport, rotation uint32) []byte {
	r.last = outcome{}
	if len(query) < headerLen || query[2]&response != 0 {
		return nil // an answer: answering it could start an endless exchange
	}
	if r.denied {
		return r.refuse(query)
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
	return r.answer(z, query, q, via, rotation)
}

// answer returns the answer to q, the question of query.
func (r *responder) answer(z *zone.Zone, query []byte, q question, via transport, rotation uint32) []byte {
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
	case q.class != dns.ClassINET || z == nil && !zone.Contains(q.lower):
		b[3] |= dns.RcodeRefused
	case z == nil:
		b[3] |= dns.RcodeServerFailure
	default:
		b, _ = z.Append(b, zone.Question{Name: q.lower, Type: q.typ}, rotation, limit)
	}
	if q.edns.present {
		b = appendOPT(b, extended, q.edns.do)
	}
	r.last.typ, r.last.rcode = q.typ, uint16(extended)<<4|uint16(b[3]&rcodeMask)
	r.out = b
	return b
}

// refuse returns a REFUSED answer to a message with a header. The answer has no records and is no longer than the message, so it
// is useless for amplification. Only messages of the common form are parsed; a stranger causes no work beyond that.
func (r *responder) refuse(query []byte) []byte {
	r.last = outcome{}
	if query[2]&opcodeMask != dns.OpcodeQuery<<3 || binary.BigEndian.Uint16(query[4:]) != 1 {
		return r.bare(query, dns.RcodeRefused)
	}
	q, ok := r.parse(query)
	if !ok {
		return r.bare(query, dns.RcodeRefused)
	}
	b := append(r.out[:0], query[0], query[1], response|query[2]&recursionDesired, dns.RcodeRefused, 0, 1, 0, 0, 0, 0, 0, 0)
	b = append(b, q.wire...)
	if q.edns.present {
		b = appendOPT(b, 0, q.edns.do)
	}
	r.last.typ, r.last.rcode = q.typ, dns.RcodeRefused
	r.out = b
	return b
}

// truncated returns an answer without records and with the TC bit, so that the client retries over TCP. It returns nil if
// the message gets no answer. The answer is no longer than the message, so it is useless for amplification.
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

// tooLong returns the answer to a message of which only the beginning was read, or nil for none.
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

// appendOPT appends the server's OPT record. It copies the DO bit of the client (RFC 3225).
func appendOPT(b []byte, extended int, do bool) []byte {
	const additionalAt = 10
	binary.BigEndian.PutUint16(b[additionalAt:], binary.BigEndian.Uint16(b[additionalAt:])+1)
	flags := byte(0)
	if do {
		flags = 0x80
	}
	return append(b, 0, 0, typeOPT, maxUDP>>8, maxUDP&0xff, byte(extended), 0, flags, 0, 0, 0)
}

// parse reads the common form of a message: one question without compression, and at most one OPT record, either without
// options or with a cookie. It returns false for every other message, well-formed or not.
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
		if 'A' <= c && c <= 'Z' { // lengths of labels are at most 63, below 'A'
			c += 'a' - 'A'
		}
		lower[i] = c
	}
	return lower
}

// isPlain reports whether the data of an OPT record holds no option or only a cookie. data begins with its length and must
// end with the message.
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

// parseUnusual reads any message, with miekg/dns.
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

// answerSize returns the size of the largest answer over UDP for a client that announced a size.
func answerSize(announced uint16) int { return min(max(int(announced), dns.MinMsgSize), maxUDP) }

// bare returns a header with rcode and nothing else, for messages whose question cannot be repeated. query must hold at
// least a header.
func (r *responder) bare(query []byte, rcode byte) []byte {
	r.last.rcode = uint16(rcode)
	r.out = append(r.out[:0], query[0], query[1], response|query[2]&(opcodeMask|recursionDesired), rcode, 0, 0, 0, 0, 0, 0, 0, 0)
	return r.out
}
