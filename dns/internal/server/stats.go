package server

import (
	"sync/atomic"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// Count is how many messages had the same outcome since the start.
type Count struct {
	Transport string // "udp" or "tcp"
	Type      string // A, AAAA, SRV or PTR; "other" for all others
	Rcode     string // the mnemonic; "other" for those that never occur
	Messages  uint64
}

// Counts is what a server has counted.
type Counts struct {
	Answers []Count // those that are not zero
	Unusual uint64  // messages that took the library to read
	Ignored uint64  // messages that deserve no answer
	Limited uint64  // answers held back or cut short because a client asked too often
	Refused uint64  // TCP connections that were one too many
}

var (
	countedTypes  = [...]zone.Type{zone.A, zone.AAAA, zone.SRV, zone.PTR} // and others
	countedRcodes = [...]uint16{dns.RcodeSuccess, dns.RcodeFormatError, dns.RcodeServerFailure, dns.RcodeNameError, dns.RcodeNotImplemented, dns.RcodeRefused, dns.RcodeBadVers}
)

// tally counts for one socket, so that no two threads write to the same memory.
type tally struct {
	_                [64]byte
	answers          [len(countedTypes) + 1][len(countedRcodes) + 1]atomic.Uint64
	unusual, ignored atomic.Uint64
	limited, refused atomic.Uint64
	_                [64]byte
}

// count counts a message that was answered, or ignored.
func (t *tally) count(o outcome, answered bool) {
	if !answered {
		t.ignored.Add(1)
		return
	}
	if o.unusual {
		t.unusual.Add(1)
	}
	t.answers[indexOf(countedTypes[:], o.typ)][indexOf(countedRcodes[:], o.rcode)].Add(1)
}

// indexOf returns where v is in list, or its length.
func indexOf[T comparable](list []T, v T) int {
	for i := range list {
		if list[i] == v {
			return i
		}
	}
	return len(list)
}

// add adds what t counted of a transport to c.
func (c *Counts) add(t *tally, transport string) {
	for i := range t.answers {
		for j := range t.answers[i] {
			n := t.answers[i][j].Load()
			if n == 0 {
				continue
			}
			one := Count{transport, "other", "other", n}
			if i < len(countedTypes) {
				one.Type = countedTypes[i].String()
			}
			if j < len(countedRcodes) {
				one.Rcode = rcodeName(countedRcodes[j])
			}
			c.merge(one)
		}
	}
	c.Unusual += t.unusual.Load()
	c.Ignored += t.ignored.Load()
	c.Limited += t.limited.Load()
	c.Refused += t.refused.Load()
}

func (c *Counts) merge(one Count) {
	for i := range c.Answers {
		if a := &c.Answers[i]; a.Transport == one.Transport && a.Type == one.Type && a.Rcode == one.Rcode {
			a.Messages += one.Messages
			return
		}
	}
	c.Answers = append(c.Answers, one)
}

// rcodeName returns a code's mnemonic. Two share the number 16.
func rcodeName(code uint16) string {
	if code == dns.RcodeBadVers {
		return "BADVERS"
	}
	return dns.RcodeToString[int(code)]
}
