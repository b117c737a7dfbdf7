package server

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns/internal/mutate"
	"github.com/isthmus-net/isthmus/dns/internal/zone"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// hostile returns messages that make careless parsers loop, read out of bounds or allocate without limit.
func hostile(tb testing.TB) map[string][]byte {
	tb.Helper()
	head := func(counts ...byte) []byte {
		return append([]byte{0x12, 0x34, 1, 0}, 0, counts[0], 0, counts[1], 0, counts[2], 0, counts[3])
	}
	type16 := []byte{0, 1, 0, 1}
	whole := ask(tb, helloName, dns.TypeA, withOPT(1232, 0, false))
	long := append(head(1, 0, 0, 0), bytes.Repeat(append([]byte{63}, bytes.Repeat([]byte{'a'}, 63)...), 5)...)
	return map[string][]byte{
		"pointer to itself":              append(append(head(1, 0, 0, 0), 0xc0, 0x0c), type16...),
		"two pointers to each other":     append(append(head(1, 0, 0, 0), 0xc0, 0x0e, 0xc0, 0x0c), type16...),
		"forward pointer":                append(append(head(1, 0, 0, 0), 0xc0, 0x40), type16...),
		"pointer into the header":        append(append(head(1, 0, 0, 0), 0xc0, 0x00), type16...),
		"reserved label type":            append(append(head(1, 0, 0, 0), 0x80, 'a', 0), type16...),
		"a label of 64 characters":       append(append(append(head(1, 0, 0, 0), 64), bytes.Repeat([]byte{'a'}, 64)...), append([]byte{0}, type16...)...),
		"unterminated label":             append(head(1, 0, 0, 0), 63, 'a'),
		"name too long":                  append(append(long, 0), type16...),
		"QDCOUNT without questions":      head(0xff, 0, 0, 0),
		"option longer than the message": append(bytes.Clone(whole[:len(whole)-2]), 0xff, 0xff),
		"two OPT records": func() []byte {
			b := append(bytes.Clone(whole), whole[len(whole)-optLen:]...)
			b[11] = 2
			return b
		}(),
	}
}

// A malformed message gets FORMERR in an answer the size of a header.
func TestHostileMessages(t *testing.T) {
	t.Parallel()
	z := testZone(1)
	for name, query := range hostile(t) {
		for _, via := range []transport{overUDP, overTCP} {
			answer := respond(z, query, via, 0)
			if len(answer) != headerLen || answer[3]&rcodeMask != dns.RcodeFormatError {
				t.Errorf("%s: %s", name, hex.Dump(answer))
			}
		}
	}
}

// Names match in any case, and answers repeat the case of the question (DNS 0x20).
func TestCaseIsRepeated(t *testing.T) {
	t.Parallel()
	z := testZone(1)
	for seed := range uint64(64) {
		caps := seed * 0x9e3779b97f4a7c15 // pseudo-random bits
		query := ask(t, helloName, dns.TypeA, nil)
		for i := range query[headerLen : len(query)-4] {
			if c := &query[headerLen+i]; 'a' <= *c && *c <= 'z' && caps>>i&1 == 1 {
				*c -= 'a' - 'A'
			}
		}
		answer := respond(z, query, overUDP, 0)
		if !bytes.Equal(answer[headerLen:len(query)], query[headerLen:]) || binary.BigEndian.Uint16(answer[6:]) != 1 {
			t.Errorf("have %s", show(t, answer))
		}
	}
	conformance.Holds(t, "L56")
}

// parseSeeds returns messages of every kind that a parser distinguishes.
func parseSeeds(tb testing.TB) [][]byte {
	tb.Helper()
	seeds := slices.Collect(maps.Values(hostile(tb)))
	widest := strings.Repeat("w", 63) + "."
	longest := strings.Repeat(widest, 3) + strings.Repeat("l", 61) + "."
	for _, name := range []string{helloName, "MANY.demo.svc.clusterset.local.", ".", "unknown.demo.svc.clusterset.local.", "1.0.0.10.in-addr.arpa.", widest, longest} {
		for _, edit := range []func(*dns.Msg){nil, withOPT(1232, 0, true), withOPT(100, 1, false), withNSID} {
			for _, qtype := range []uint16{dns.TypeA, dns.TypeSRV, dns.TypeANY, dns.TypeAXFR, dns.TypeCAA} {
				seeds = append(seeds, ask(tb, name, qtype, edit))
			}
		}
	}
	return seeds
}

// FuzzParse is TestParseAnyBytes without a time limit:
//
//	go test -run '^$' -fuzz FuzzParse -fuzztime 10m ./dns/internal/server
func FuzzParse(f *testing.F) {
	for _, q := range parseSeeds(f) {
		f.Add(q)
	}
	z := testZone(100)
	var r responder
	f.Fuzz(func(t *testing.T, query []byte) { checkAgainstLibrary(t, z, &r, query) })
}

func TestParseAnyBytes(t *testing.T) {
	t.Parallel()
	z := testZone(100)
	var r responder
	mutate.Each(t, mutate.Rounds, parseSeeds(t), func(query []byte) { checkAgainstLibrary(t, z, &r, query) })
}

// checkAgainstLibrary compares the fast parser with miekg/dns: both read a message alike if the fast parser accepts it, and
// the answer has the code that follows. Neither the answer nor the responder's buffer exceeds the size of a message.
func checkAgainstLibrary(t *testing.T, z *zone.Zone, r *responder, query []byte) {
	t.Helper()
	answer := r.respond(z, query, overUDP, 1)
	if cap(r.out) > 2*maxTCP {
		t.Fatalf("the responder holds %d bytes", cap(r.out))
	}
	if answer == nil {
		if len(query) >= headerLen && query[2]&response == 0 {
			t.Fatal("no answer")
		}
		return
	}
	have := int(r.last.rcode)
	if want := oracle(z, query); have != want {
		t.Fatalf("code %d, want %d, to\n%s", have, want, hex.Dump(query))
	}
	if len(query) < headerLen || binary.BigEndian.Uint16(query[4:]) != 1 {
		return
	}
	fast, ok := new(responder).parse(query)
	if !ok {
		return
	}
	library, ok := new(responder).parseUnusual(query)
	if !ok {
		t.Fatalf("only the fast parser accepts\n%s", hex.Dump(query))
	}
	if !bytes.EqualFold(fast.wire, library.wire) || !bytes.Equal(fast.lower, library.lower) || fast.typ != library.typ || fast.class != library.class || fast.edns != library.edns {
		t.Fatalf("the fast parser reads %+v, the library %+v, of\n%s", fast, library, hex.Dump(query))
	}
}

// oracle returns the expected response code of a message, as parsed by miekg/dns.
func oracle(z *zone.Zone, query []byte) int {
	var m dns.Msg
	err := m.Unpack(query)
	switch {
	case query[2]&opcodeMask != 0:
		return dns.RcodeNotImplemented
	case err != nil || len(m.Question) != 1:
		return dns.RcodeFormatError
	}
	opts := 0
	for _, rr := range m.Extra {
		if rr.Header().Rrtype == dns.TypeOPT {
			opts++
		}
	}
	q := m.Question[0]
	name := make([]byte, 2*maxName)
	n, err := dns.PackDomainName(dns.CanonicalName(q.Name), name, 0, nil, false)
	switch {
	case opts > 1 || err != nil:
		return dns.RcodeFormatError
	case opts == 1 && m.IsEdns0().Version() != 0:
		return dns.RcodeBadVers
	case q.Qclass != dns.ClassINET:
		return dns.RcodeRefused
	}
	head := make([]byte, headerLen, maxTCP)
	_, code := z.Append(append(head, 0, 0, 0, 0, 0), zone.Question{Name: name[:n], Type: zone.Type(q.Qtype)}, 0, maxTCP)
	return int(code)
}
