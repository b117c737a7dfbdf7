package server

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

const (
	headerLen = 12 // RFC 1035, section 4.1.1

	// maxUDP is the largest answer sent over UDP and the size we announce, in bytes. It fits an IPv6
	// packet of 1280 bytes, which no path fragments (https://www.dnsflagday.net/2020/).
	maxUDP = 1232

	maxTCP = dns.MaxMsgSize
)

// transport is how a question came.
type transport uint8

const (
	overUDP transport = iota
	overTCP
)

// respond returns the answer to one message, or nil when the message deserves none. Any bytes are
// welcome; z is nil until the first snapshot came. turn says at which of several addresses to begin, so
// that clients which take the first one spread. The answer does not alias query.
func respond(z *zone.Zone, query []byte, via transport, turn uint32) []byte {
	if len(query) < headerLen {
		return nil
	}
	flags := binary.BigEndian.Uint16(query[2:])
	const qr = 1 << 15
	if flags&qr != 0 {
		return nil // an answer; answering it could start an endless exchange
	}
	if opcode := flags >> 11 & 0xf; opcode != dns.OpcodeQuery {
		return bare(query, dns.RcodeNotImplemented)
	}
	if questions := binary.BigEndian.Uint16(query[4:]); questions != 1 {
		return bare(query, dns.RcodeFormatError)
	}
	var req dns.Msg
	if err := req.Unpack(query); err != nil || len(req.Question) != 1 {
		return bare(query, dns.RcodeFormatError)
	}
	opt, ok := onlyOPT(&req)
	if !ok {
		return bare(query, dns.RcodeFormatError)
	}

	resp := new(dns.Msg)
	resp.SetReply(&req)
	resp.CheckingDisabled = false // SetReply copies it, and it means nothing without DNSSEC
	if opt != nil {
		resp.SetEdns0(maxUDP, opt.Do()) // RFC 3225: the DO bit is copied
	}
	if opt != nil && opt.Version() != 0 {
		resp.Rcode = dns.RcodeBadVers
	} else {
		fill(resp, z, turn)
	}
	resp.Truncate(sizeLimit(via, opt))
	resp.Compress = true // always; Truncate turns it off for answers that fit without
	wire, err := resp.Pack()
	if err != nil {
		// A name may unpack and yet not pack again; nothing of ours is at fault and nothing is lost.
		return bare(query, dns.RcodeServerFailure)
	}
	return wire
}

// onlyOPT returns the OPT record of req, nil when there is none; ok is false when there are several,
// which RFC 6891, section 6.1.1, calls a format error.
func onlyOPT(req *dns.Msg) (opt *dns.OPT, ok bool) {
	for _, rr := range req.Extra {
		o, is := rr.(*dns.OPT)
		if !is {
			continue
		}
		if opt != nil {
			return nil, false
		}
		opt = o
	}
	return opt, true
}

// sizeLimit returns how long an answer may be, in bytes.
func sizeLimit(via transport, opt *dns.OPT) int {
	if via == overTCP {
		return maxTCP
	}
	if opt == nil {
		return dns.MinMsgSize
	}
	return min(max(int(opt.UDPSize()), dns.MinMsgSize), maxUDP)
}

// fill puts what z says to the question of resp into resp.
func fill(resp *dns.Msg, z *zone.Zone, turn uint32) {
	q := resp.Question[0]
	if q.Qclass != dns.ClassINET || !zone.Contains(q.Name) {
		resp.Rcode = dns.RcodeRefused
		return
	}
	if z == nil {
		resp.Rcode = dns.RcodeServerFailure
		return
	}
	answer := z.Lookup(strings.ToLower(q.Name), zone.Type(q.Qtype))
	resp.Rcode = int(answer.Rcode)
	resp.Authoritative = answer.Rcode != zone.Refused
	n := len(answer.Records)
	for i := range n {
		// The owner is the name as it was asked, which compresses to a pointer at the question.
		resp.Answer = append(resp.Answer, toRR(q.Name, answer.Records[(i+int(turn%uint32(n)))%n]))
	}
	if answer.Authority != nil {
		resp.Ns = append(resp.Ns, toRR(answer.Authority.Name, *answer.Authority))
	}
}

// toRR translates r, owned by owner, into the library's form.
func toRR(owner string, r zone.Record) dns.RR {
	hdr := dns.RR_Header{Name: owner, Rrtype: uint16(r.Type), Class: dns.ClassINET, Ttl: r.TTL}
	switch d := r.Data.(type) {
	case netip.Addr:
		if r.Type == zone.A {
			return &dns.A{Hdr: hdr, A: d.AsSlice()}
		}
		return &dns.AAAA{Hdr: hdr, AAAA: d.AsSlice()}
	case zone.Target:
		return &dns.NS{Hdr: hdr, Ns: string(d)}
	case zone.Text:
		return &dns.TXT{Hdr: hdr, Txt: d}
	case zone.HostInfo:
		return &dns.HINFO{Hdr: hdr, Cpu: d.CPU, Os: d.OS}
	case zone.StartOfAuthority:
		return &dns.SOA{
			Hdr: hdr, Ns: d.Primary, Mbox: d.Mailbox, Serial: d.Serial,
			Refresh: d.Refresh, Retry: d.Retry, Expire: d.Expire, Minttl: d.Minimum,
		}
	default:
		panic("zone record with data of an unknown kind: " + r.String())
	}
}

// bare returns a header alone with rcode, for messages whose question cannot be echoed. query holds at
// least a header.
func bare(query []byte, rcode uint16) []byte {
	resp := make([]byte, headerLen)
	copy(resp, query[:2])
	const qr, opcode, rd = 1 << 15, 0xf << 11, 1 << 8
	flags := binary.BigEndian.Uint16(query[2:])
	binary.BigEndian.PutUint16(resp[2:], qr|flags&(opcode|rd)|rcode)
	return resp
}
