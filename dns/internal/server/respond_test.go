package server

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns/internal/mutate"
	"github.com/isthmus-net/isthmus/dns/internal/zone"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// respond answers one message.
func respond(z *zone.Zone, query []byte, via transport, turn uint32) []byte {
	return new(responder).respond(z, query, via, turn)
}

// testZone returns a zone with hello.demo, which has a VIP of each family, and many.demo, which is headless with n endpoints
// of each family.
func testZone(n int) *zone.Zone {
	var v4, v6 clusterset.Slice
	for i := range n {
		v4.Endpoints = append(v4.Endpoints, clusterset.Endpoint{
			Ready: true, Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})},
		})
		v6.Endpoints = append(v6.Endpoints, clusterset.Endpoint{
			Ready: true, Addrs: []netip.Addr{netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})},
		})
	}
	z, _ := new(zone.Builder).Build(&clusterset.Snapshot{Services: []clusterset.Service{
		{Import: clusterset.Import{
			Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"},
			Type:    clusterset.ClusterSetIP,
			IPs:     []netip.Addr{netip.MustParseAddr("243.0.0.1"), netip.MustParseAddr("fd00:243::1")},
		}},
		{
			Import: clusterset.Import{Service: clusterset.ServiceName{Namespace: "demo", Name: "many"}, Type: clusterset.Headless},
			Slices: []clusterset.Slice{v4, v6},
		},
	}}, zone.Config{TTL: zone.DefaultTTL}, 7)
	return z
}

// ask packs one question after edit, if any, has changed it.
func ask(tb testing.TB, name string, qtype uint16, edit func(*dns.Msg)) []byte {
	tb.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	m.Id = 0x1234
	if edit != nil {
		edit(m)
	}
	wire, err := m.Pack()
	if err != nil {
		tb.Fatalf("pack the question: %v", err)
	}
	return wire
}

func withOPT(size uint16, version uint8, do bool) func(*dns.Msg) {
	return func(m *dns.Msg) {
		m.SetEdns0(size, do)
		m.IsEdns0().SetVersion(version)
	}
}

// show formats a response as its header, then one line for each record.
func show(tb testing.TB, wire []byte) string {
	tb.Helper()
	if wire == nil {
		return "no answer"
	}
	var m dns.Msg
	if err := m.Unpack(wire); err != nil {
		tb.Fatalf("unpack the response: %v\n%s", err, hex.Dump(wire))
	}
	var b strings.Builder
	rcode := dns.RcodeToString[m.Rcode]
	if m.Rcode == dns.RcodeBadVers {
		rcode = "BADVERS" // the library has only the other name of 16, BADSIG
	}
	fmt.Fprintf(&b, "id=%#x %s", m.Id, rcode)
	for _, flag := range []struct {
		set  bool
		name string
	}{
		{m.Response, "qr"},
		{m.Authoritative, "aa"},
		{m.Truncated, "tc"},
		{m.RecursionDesired, "rd"},
		{m.RecursionAvailable, "ra"},
		{m.CheckingDisabled, "cd"},
		{m.AuthenticatedData, "ad"},
	} {
		if flag.set {
			b.WriteString(" " + flag.name)
		}
	}
	for _, q := range m.Question {
		fmt.Fprintf(&b, "\n? %s %s %s", q.Name, dns.Class(q.Qclass), dns.Type(q.Qtype))
	}
	for _, rr := range append(m.Answer, m.Ns...) {
		b.WriteString("\n" + strings.ReplaceAll(rr.String(), "\t", " "))
	}
	for _, rr := range m.Extra {
		if opt, ok := rr.(*dns.OPT); ok {
			fmt.Fprintf(&b, "\nopt version=%d size=%d do=%t", opt.Version(), opt.UDPSize(), opt.Do())
		}
	}
	return b.String()
}

func TestRespond(t *testing.T) {
	t.Parallel()
	const (
		name = "hello.demo.svc.clusterset.local."
		soa  = "clusterset.local. 5 IN SOA ns.dns.clusterset.local. hostmaster.clusterset.local. 7 7200 1800 86400 5"
	)
	tests := map[string]struct {
		query    []byte
		unsynced bool
		want     string
	}{
		"address": {
			query: ask(t, name, dns.TypeA, nil),
			want:  "id=0x1234 NOERROR qr aa rd\n? " + name + " IN A\n" + name + " 5 IN A 243.0.0.1",
		},
		"address v6": {
			query: ask(t, name, dns.TypeAAAA, nil),
			want:  "id=0x1234 NOERROR qr aa rd\n? " + name + " IN AAAA\n" + name + " 5 IN AAAA fd00:243::1",
		},
		"case is repeated": {
			query: ask(t, "hElLo.DEMO.svc.ClusterSet.LOCAL.", dns.TypeA, nil),
			want: "id=0x1234 NOERROR qr aa rd\n? hElLo.DEMO.svc.ClusterSet.LOCAL. IN A\n" +
				"hElLo.DEMO.svc.ClusterSet.LOCAL. 5 IN A 243.0.0.1",
		},
		"no data": {
			query: ask(t, name, dns.TypeMX, nil),
			want:  "id=0x1234 NOERROR qr aa rd\n? " + name + " IN MX\n" + soa,
		},
		"no name": {
			query: ask(t, "x."+name, dns.TypeA, nil),
			want:  "id=0x1234 NXDOMAIN qr aa rd\n? x." + name + " IN A\n" + soa,
		},
		"version": {
			query: ask(t, "dns-version.clusterset.local.", dns.TypeTXT, nil),
			want: "id=0x1234 NOERROR qr aa rd\n? dns-version.clusterset.local. IN TXT\n" +
				`dns-version.clusterset.local. 28800 IN TXT "1.0.0"`,
		},
		"name server": {
			query: ask(t, "clusterset.local.", dns.TypeNS, nil),
			want:  "id=0x1234 NOERROR qr aa rd\n? clusterset.local. IN NS\nclusterset.local. 5 IN NS ns.dns.clusterset.local.",
		},
		"any": {
			query: ask(t, name, dns.TypeANY, nil),
			want:  "id=0x1234 NOERROR qr aa rd\n? " + name + " IN ANY\n" + name + ` 5 IN HINFO "RFC8482" ""`,
		},
		"outside the zone": {
			query: ask(t, "example.org.", dns.TypeA, nil),
			want:  "id=0x1234 REFUSED qr rd\n? example.org. IN A",
		},
		"zone transfer": {
			query: ask(t, "clusterset.local.", dns.TypeAXFR, nil),
			want:  "id=0x1234 REFUSED qr rd\n? clusterset.local. IN AXFR",
		},
		"class CHAOS": {
			query: ask(t, name, dns.TypeTXT, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }),
			want:  "id=0x1234 REFUSED qr rd\n? " + name + " CH TXT",
		},
		"before the first snapshot": {
			query: ask(t, name, dns.TypeA, nil), unsynced: true,
			want: "id=0x1234 SERVFAIL qr rd\n? " + name + " IN A",
		},
		"outside the zone before the first snapshot": {
			query: ask(t, "example.org.", dns.TypeA, nil), unsynced: true,
			want: "id=0x1234 REFUSED qr rd\n? example.org. IN A",
		},
		"CD bit is not repeated": {
			query: ask(t, name, dns.TypeA, func(m *dns.Msg) { m.CheckingDisabled, m.RecursionDesired = true, false }),
			want:  "id=0x1234 NOERROR qr aa\n? " + name + " IN A\n" + name + " 5 IN A 243.0.0.1",
		},
		"EDNS": {
			query: ask(t, name, dns.TypeA, withOPT(4096, 0, true)),
			want:  "id=0x1234 NOERROR qr aa rd\n? " + name + " IN A\n" + name + " 5 IN A 243.0.0.1\nopt version=0 size=1232 do=true",
		},
		"EDNS version 1": {
			query: ask(t, name, dns.TypeA, withOPT(4096, 1, false)),
			want:  "id=0x1234 BADVERS qr rd\n? " + name + " IN A\nopt version=0 size=1232 do=false",
		},
		"two OPT records": {
			query: ask(t, name, dns.TypeA, func(m *dns.Msg) { m.SetEdns0(512, false); m.SetEdns0(512, false) }),
			want:  "id=0x1234 FORMERR qr rd",
		},
		"NOTIFY": {
			query: ask(t, name, dns.TypeSOA, func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }),
			want:  "id=0x1234 NOTIMP qr rd",
		},
		"two questions": {
			query: ask(t, name, dns.TypeA, func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }),
			want:  "id=0x1234 FORMERR qr rd",
		},
		"no question": {
			query: ask(t, name, dns.TypeA, func(m *dns.Msg) { m.Question = nil }),
			want:  "id=0x1234 FORMERR qr rd",
		},
		"an answer":            {query: ask(t, name, dns.TypeA, func(m *dns.Msg) { m.Response = true }), want: "no answer"},
		"half a header":        {query: make([]byte, headerLen-1), want: "no answer"},
		"nothing":              {query: nil, want: "no answer"},
		"truncated name":       {query: ask(t, name, dns.TypeA, nil)[:20], want: "id=0x1234 FORMERR qr rd"},
		"compression loop":     {query: append(ask(t, ".", dns.TypeA, nil)[:headerLen], 0xc0, headerLen, 0, 1, 0, 1), want: "id=0x1234 FORMERR qr rd"},
		"pointer past the end": {query: append(ask(t, ".", dns.TypeA, nil)[:headerLen], 0xff, 0xff, 0, 1, 0, 1), want: "id=0x1234 FORMERR qr rd"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			z := testZone(3)
			if tc.unsynced {
				z = nil
			}
			if diff := cmp.Diff(tc.want, show(t, respond(z, tc.query, overUDP, 0))); diff != "" {
				t.Errorf("response (-want +have):\n%s", diff)
			}
		})
	}
	conformance.Holds(t, "L54", "L56")
}

func TestRespondSize(t *testing.T) {
	t.Parallel()
	z := testZone(3000)
	const name = "many.demo.svc.clusterset.local."
	tests := map[string]struct {
		query     []byte
		via       transport
		limit     int
		record    int // bytes of one answer: pointer, type, class, TTL, length, address
		truncated bool
	}{
		"UDP without EDNS":   {ask(t, name, dns.TypeA, nil), overUDP, 512, 16, true},
		"UDP with EDNS 900":  {ask(t, name, dns.TypeA, withOPT(900, 0, false)), overUDP, 900, 16, true},
		"UDP with EDNS 4096": {ask(t, name, dns.TypeAAAA, withOPT(4096, 0, false)), overUDP, 1232, 28, true},
		"UDP with EDNS 0":    {ask(t, name, dns.TypeA, withOPT(0, 0, false)), overUDP, 512, 16, true},
		"TCP":                {ask(t, name, dns.TypeA, nil), overTCP, 65535, 16, false},
		"TCP above 64 KiB":   {ask(t, name, dns.TypeAAAA, nil), overTCP, 65535, 28, true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wire := respond(z, tc.query, tc.via, 0)
			var m dns.Msg
			if err := m.Unpack(wire); err != nil {
				t.Fatalf("unpack: %v", err)
			}
			if m.Truncated != tc.truncated {
				t.Errorf("truncated = %t with %d answers", m.Truncated, len(m.Answer))
			}
			if len(wire) > tc.limit || tc.truncated && len(wire)+tc.record <= tc.limit {
				t.Errorf("response has %d bytes; want as many answers of %d bytes as fit into %d", len(wire), tc.record, tc.limit)
			}
			if !tc.truncated && len(m.Answer) != 3000 {
				t.Errorf("have %d answers, want all 3000", len(m.Answer))
			}
		})
	}
}

func TestOwnerIsAPointerAtTheQuestion(t *testing.T) {
	t.Parallel()
	for name, via := range map[string]transport{"UDP": overUDP, "TCP": overTCP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			query := ask(t, "hello.demo.svc.clusterset.LOCAL.", dns.TypeA, nil)
			wire := respond(testZone(1), query, via, 0)
			if have := fmt.Sprintf("%x", wire[len(query):len(query)+2]); have != "c00c" {
				t.Errorf("owner begins with %s, want c00c\n%s", have, hex.Dump(wire))
			}
		})
	}
}

func TestAnswersTakeTurns(t *testing.T) {
	t.Parallel()
	z, first := testZone(4), map[string]int{}
	for turn := range uint32(8) {
		var m dns.Msg
		if err := m.Unpack(respond(z, ask(t, "many.demo.svc.clusterset.local.", dns.TypeA, nil), overUDP, turn)); err != nil {
			t.Fatal(err)
		}
		first[m.Answer[0].(*dns.A).A.String()]++
	}
	want := map[string]int{"10.1.0.0": 2, "10.1.0.1": 2, "10.1.0.2": 2, "10.1.0.3": 2}
	if diff := cmp.Diff(want, first); diff != "" {
		t.Errorf("first records (-want +have):\n%s", diff)
	}
}

// respondSeeds returns messages with answers of every kind, and truncated ones.
func respondSeeds(tb testing.TB) [][]byte {
	tb.Helper()
	seeds := [][]byte{[]byte("\x124\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01")}
	for _, name := range []string{"hello.demo.svc.clusterset.local.", "MANY.demo.svc.clusterset.local.", ".", `a\.b\000.clusterset.local.`} {
		for _, edit := range []func(*dns.Msg){nil, withOPT(1232, 0, true), withOPT(100, 1, false)} {
			wire := ask(tb, name, dns.TypeA, edit)
			seeds = append(seeds, wire, wire[:len(wire)/2])
		}
	}
	return seeds
}

// FuzzRespond is TestRespondToAnyBytes without a time limit.
func FuzzRespond(f *testing.F) {
	for i, query := range respondSeeds(f) {
		f.Add(query, i%2 == 1, uint32(i))
	}
	z := testZone(100)
	f.Fuzz(func(t *testing.T, query []byte, tcp bool, turn uint32) {
		via := overUDP
		if tcp {
			via = overTCP
		}
		checkAnswer(t, z, query, via, turn)
	})
}

func TestRespondToAnyBytes(t *testing.T) {
	t.Parallel()
	z, turn := testZone(100), uint32(0)
	mutate.Each(t, mutate.Rounds, respondSeeds(t), func(query []byte) {
		turn++
		checkAnswer(t, z, query, [...]transport{overUDP, overTCP}[turn%2], turn)
	})
}

// checkAnswer checks that any bytes get either no answer or a well-formed answer to that message: same id, QR set, the
// question repeated bit for bit if the answer has one, and within the size limit.
func checkAnswer(t *testing.T, z *zone.Zone, query []byte, via transport, turn uint32) {
	t.Helper()
	wire := respond(z, query, via, turn)
	if wire == nil {
		return
	}
	var m dns.Msg
	if err := m.Unpack(wire); err != nil {
		t.Fatalf("answer does not parse: %v\nquery:\n%s\nanswer:\n%s", err, hex.Dump(query), hex.Dump(wire))
	}
	if string(wire[:2]) != string(query[:2]) || !m.Response {
		t.Errorf("not an answer to this message: %s", m.String())
	}
	if limit := map[transport]int{overUDP: maxUDP, overTCP: maxTCP}[via]; len(wire) > limit {
		t.Errorf("%d bytes, at most %d allowed", len(wire), limit)
	}
	if len(m.Question) == 1 {
		end := headerLen
		for query[end] != 0 && query[end] < 0xc0 {
			end += int(query[end]) + 1
		}
		if string(wire[headerLen:end]) != string(query[headerLen:end]) {
			t.Errorf("question not repeated:\n%s\n%s", hex.Dump(query), hex.Dump(wire))
		}
	}
}
