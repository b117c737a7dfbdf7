package server

import (
	"sync/atomic"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/zone"
)

// The paths that a message can take through the server.
const (
	PathFast = "fast" // over UDP, read by the fast parser
	PathSlow = "slow" // over UDP, read by miekg/dns
	PathTCP  = "tcp"
)

// Count counts messages with the same path, type and outcome.
type Count struct {
	Path     string // PathFast, PathSlow or PathTCP
	Type     string // A, AAAA, SRV or PTR; "other" for all others
	Rcode    string // the mnemonic; "other" for codes that the server never sends
	Messages uint64
}

// Counts holds the counters of a server.
type Counts struct {
	Answers    []Count               // those that are not zero
	Ignored    uint64                // messages that are not questions and got no answer
	Limited    uint64                // answers dropped or truncated by the rate limit
	Refused    map[string]uint64     // TCP connections closed by a limit, by one of ConnReasons; those that are not zero
	ACLRefused map[ACLRefusal]uint64 // questions of strangers; those that are not zero
	Dropped    uint64                // questions that the kernel dropped because a receive buffer was full, on the open sockets
}

// The reasons why the server closes a TCP connection.
const (
	refusedClient = iota // the client has its share
	refusedPods          // pods have all of theirs, as the next two for other classes
	refusedNeighbours
	refusedStrangers
	refusedSize   // a question is too long
	refusedUnread // the client does not read its answer in time, or too many clients do not
)

// ConnReasons are the reasons why the server closes a TCP connection.
var ConnReasons = [...]string{"client", "pods", "neighbours", "strangers", "oversized", "unread"}

// refusal returns the reason why a connection of a class is refused. each says that the client has its share.
func refusal(c connClass, each bool) int {
	if each {
		return refusedClient
	}
	return refusedPods + int(c)
}

// ACLRefusal is how a question of a stranger was refused.
type ACLRefusal struct {
	Listener string // node, an address for the clients of the cluster, or external
	Outcome  string // refused, with a REFUSED answer, or dropped
}

// The outcomes of questions of strangers.
const (
	aclRefused = iota
	aclDropped
	aclOutcomes
)

// ACLRefusals are all kinds of refusals of strangers.
var ACLRefusals = [...]ACLRefusal{{"pods", "refused"}, {"pods", "dropped"}, {"node", "refused"}, {"node", "dropped"}, {"external", "refused"}, {"external", "dropped"}}

var (
	countedTypes  = [...]zone.Type{zone.A, zone.AAAA, zone.SRV, zone.PTR} // index len(countedTypes) is all others
	countedRcodes = [...]uint16{dns.RcodeSuccess, dns.RcodeFormatError, dns.RcodeServerFailure, dns.RcodeNameError, dns.RcodeNotImplemented, dns.RcodeRefused, dns.RcodeBadVers}
)

// tally holds the counters of one UDP socket, or of all TCP connections. Padding keeps the sockets of two CPUs off the
// same cache line.
type tally struct {
	_                [64]byte
	fast, slow       outcomes
	ignored, limited atomic.Uint64
	refused          [len(ConnReasons)]atomic.Uint64
	acl              [audiences][aclOutcomes]atomic.Uint64
	_                [64]byte
}

// outcomes counts answers by type and code.
type outcomes [len(countedTypes) + 1][len(countedRcodes) + 1]atomic.Uint64

// count counts a message that was answered or ignored.
func (t *tally) count(o outcome, answered bool) {
	if !answered {
		t.ignored.Add(1)
		return
	}
	outcomes := &t.fast
	if o.unusual {
		outcomes = &t.slow
	}
	outcomes[indexOf(countedTypes[:], o.typ)][indexOf(countedRcodes[:], o.rcode)].Add(1)
}

// indexOf returns the index of v in list, or len(list).
func indexOf[T comparable](list []T, v T) int {
	for i := range list {
		if list[i] == v {
			return i
		}
	}
	return len(list)
}

// addUDP adds the counters of a UDP socket to c.
func (c *Counts) addUDP(t *tally) {
	c.addOutcomes(&t.fast, PathFast)
	c.addOutcomes(&t.slow, PathSlow)
	c.addRest(t)
}

// addTCP adds the counters of TCP connections to c.
func (c *Counts) addTCP(t *tally) {
	c.addOutcomes(&t.fast, PathTCP)
	c.addOutcomes(&t.slow, PathTCP)
	c.addRest(t)
}

func (c *Counts) addRest(t *tally) {
	c.Ignored += t.ignored.Load()
	c.Limited += t.limited.Load()
	for i := range t.refused {
		c.Refused = added(c.Refused, ConnReasons[i], t.refused[i].Load())
	}
	for i, kind := range ACLRefusals {
		to, how := audience(i/aclOutcomes), i%aclOutcomes
		c.ACLRefused = added(c.ACLRefused, kind, t.acl[to][how].Load())
	}
}

// added adds n to a counter of a map, which it makes for the first one that is not zero.
func added[K comparable](m map[K]uint64, key K, n uint64) map[K]uint64 {
	if n == 0 {
		return m
	}
	if m == nil {
		m = map[K]uint64{}
	}
	m[key] += n
	return m
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

// rcodeName returns the mnemonic of a response code. Code 16 is BADVERS in EDNS and BADSIG in TSIG; the library's table
// has only the latter.
func rcodeName(code uint16) string {
	if code == dns.RcodeBadVers {
		return "BADVERS"
	}
	return dns.RcodeToString[int(code)]
}
