package server

import (
	"sync/atomic"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// The paths that a message can take.
const (
	PathFast = "fast" // over UDP, read by our own parser
	PathSlow = "slow" // over UDP, read by the library
	PathTCP  = "tcp"
)

// Count is how many messages had the same outcome since the start.
type Count struct {
	Path     string // one of the above
	Type     string // A, AAAA, SRV or PTR; "other" for all others
	Rcode    string // the mnemonic; "other" for those that never occur
	Messages uint64
}

// Counts is what a server has counted.
type Counts struct {
	Answers []Count // those that are not zero
	Ignored uint64  // messages that deserve no answer
	Limited uint64  // answers held back or cut short because a client asked too often
	Refused uint64  // TCP connections that were one too many
	Barred  uint64  // questions of clients that may not ask there
	Dropped uint64  // questions that the kernel had no room for, on the sockets that are open
}

var (
	countedTypes  = [...]zone.Type{zone.A, zone.AAAA, zone.SRV, zone.PTR} // and others
	countedRcodes = [...]uint16{dns.RcodeSuccess, dns.RcodeFormatError, dns.RcodeServerFailure, dns.RcodeNameError, dns.RcodeNotImplemented, dns.RcodeRefused, dns.RcodeBadVers}
)

// tally counts for one socket, so that no two threads write to the same memory.
type tally struct {
	_                                 [64]byte
	fast, slow                        outcomes
	ignored, limited, refused, barred atomic.Uint64
	_                                 [64]byte
}

// outcomes counts answers by type and code.
type outcomes [len(countedTypes) + 1][len(countedRcodes) + 1]atomic.Uint64

// count counts a message that was answered, or ignored.
func (t *tally) count(o outcome, answered bool) {
	if !answered {
		t.ignored.Add(1)
		return
	}
	of := &t.fast
	if o.unusual {
		of = &t.slow
	}
	of[indexOf(countedTypes[:], o.typ)][indexOf(countedRcodes[:], o.rcode)].Add(1)
}

// countBarred counts a question of a client that may not ask.
func (t *tally) countBarred(is bool) {
	if is {
		t.barred.Add(1)
	}
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

// addUDP and addTCP add what t counted to c.
func (c *Counts) addUDP(t *tally) {
	c.addOutcomes(&t.fast, PathFast)
	c.addOutcomes(&t.slow, PathSlow)
	c.addRest(t)
}

func (c *Counts) addTCP(t *tally) {
	c.addOutcomes(&t.fast, PathTCP)
	c.addOutcomes(&t.slow, PathTCP)
	c.addRest(t)
}

func (c *Counts) addRest(t *tally) {
	c.Ignored += t.ignored.Load()
	c.Limited += t.limited.Load()
	c.Refused += t.refused.Load()
	c.Barred += t.barred.Load()
}

func (c *Counts) addOutcomes(o *outcomes, path string) {
	for i := range o {
		for j := range o[i] {
			n := o[i][j].Load()
			if n == 0 {
				continue
			}
			one := Count{path, "other", "other", n}
			if i < len(countedTypes) {
				one.Type = countedTypes[i].String()
			}
			if j < len(countedRcodes) {
				one.Rcode = rcodeName(countedRcodes[j])
			}
			c.merge(one)
		}
	}
}

func (c *Counts) merge(one Count) {
	for i := range c.Answers {
		if a := &c.Answers[i]; a.Path == one.Path && a.Type == one.Type && a.Rcode == one.Rcode {
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
