package server

import (
	"net/netip"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// sample logs one of so many questions with what became of it. asked counts those of a socket or connection; it begins
// anywhere, so that clients that ask once are logged too.
func (s *Server) sample(asked *uint64, r *responder, answer []byte, from netip.AddrPort) {
	*asked++
	if *asked%s.Sample != 0 {
		return
	}
	if answer == nil {
		s.Log.Info("ignored what is no question", "peer", from)
		return
	}
	rcode := rcodeName(r.last.rcode)
	if rcode == "" {
		rcode = "other"
	}
	s.Log.Info("answered", "peer", from, "name", nameOf(answer), "type", r.last.typ.String(), "rcode", rcode, "bytes", len(answer))
}

// nameOf returns the name that an answer of ours echoes, "" when it echoes none.
func nameOf(answer []byte) string {
	if answer[5] == 0 { // QDCOUNT
		return ""
	}
	name, _, err := dns.UnpackDomainName(answer, zone.HeaderLen)
	if err != nil {
		return ""
	}
	return name
}
