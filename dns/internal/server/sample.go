package server

import (
	"net/netip"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// sample logs every s.Sample-th question with its outcome. asked counts the questions of a socket or connection. It starts
// at a random number, so that connections with a single question are sampled too.
func (s *Server) sample(asked *uint64, r *responder, answer []byte, from netip.AddrPort) {
	*asked++
	if *asked%s.Sample != 0 {
		return
	}
	if answer == nil {
		s.Log.Info("ignored a message that is not a question", "peer", from)
		return
	}
	rcode := rcodeName(r.last.rcode)
	if rcode == "" {
		rcode = "other"
	}
	s.Log.Info("answered", "peer", from, "name", nameOf(answer), "type", r.last.typ.String(), "rcode", rcode, "bytes", len(answer))
}

// nameOf returns the name in the question of an answer of this server, "" if the answer has no question.
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
