package bpf_test

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// redirected is the return value for a packet that is redirected (TC_ACT_REDIRECT).
const redirected = 7

const both, only4, only6 = "hello.demo.svc.clusterset.local.", "lazy.demo.svc.clusterset.local.", "six.demo.svc.clusterset.local."

var (
	pod4, pod6           = netip.MustParseAddrPort("10.200.1.5:40000"), netip.MustParseAddrPort("[fd00:1::5]:40000")
	resolver4, resolver6 = netip.MustParseAddrPort("10.96.0.10:53"), netip.MustParseAddrPort("[fd00:96::a]:53")
	vip4, vip6           = netip.MustParseAddr("243.1.0.7"), netip.MustParseAddr("fd99::7")
)

const zoneSOA = "clusterset.local." + dataSOA

const dataSOA = " 5 IN SOA ns.dns.clusterset.local. hostmaster.clusterset.local. 1790000000 7200 1800 86400 5"

var loadNames = sync.OnceValues(func() (*ebpf.Collection, error) {
	spec, err := bpf.LoadNamesSpec()
	if err != nil {
		return nil, err
	}
	return ebpf.NewCollection(spec)
})

// wireOf returns a name in uncompressed wire format.
func wireOf(t testing.TB, name string) []byte {
	t.Helper()
	b := make([]byte, 256)
	n, err := dns.PackDomainName(name, b, 0, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n]
}

// newNames returns the program with three names and both resolvers.
func newNames(t testing.TB) *path {
	t.Helper()
	netlab.Privileged(t)
	coll, err := loadNames()
	if err != nil {
		t.Fatalf("load: %+v", err)
	}
	p := &path{t: t, coll: coll}
	for _, r := range []netip.AddrPort{resolver4, resolver6} {
		p.put(bpf.MapResolvers, bpf.DNSResolver{Addr: bpf.Addr16(r.Addr())}, uint8(1))
	}
	for name, families := range map[string]uint32{both: bpf.NamesIPv4 | bpf.NamesIPv6, only4: bpf.NamesIPv4, only6: bpf.NamesIPv6} {
		var key bpf.DNSName
		copy(key.Wire[:], wireOf(t, name))
		p.put(bpf.MapNames, key, bpf.DNSAddresses{Ipv4: vip4.As4(), Ipv6: vip6.As16(), Families: families})
	}
	rr, err := dns.NewRR(zoneSOA)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 256)
	n, err := dns.PackRR(rr, b, 0, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	s := bpf.NamesSettings{Ttl: binary.NativeEndian.Uint32([]byte{0, 0, 0, 5})}
	if got := copy(s.Soa[:], b[len(wireOf(t, "clusterset.local.")):n]); got != len(s.Soa) {
		t.Fatalf("a SOA of %d bytes, want %d", got, len(s.Soa))
	}
	p.put(bpf.MapNamesSettings, uint32(0), s)
	return p
}

// question returns a query as resolvers of C libraries send it.
func question(name string, typ uint16) *dns.Msg {
	m := new(dns.Msg).SetQuestion(name, typ)
	m.Id = 0x1234
	return m
}

func (p *path) pack(m *dns.Msg) []byte {
	p.t.Helper()
	b, err := m.Pack()
	if err != nil {
		p.t.Fatal(err)
	}
	return b
}

// ask returns a frame with a query.
func (p *path) ask(m *dns.Msg, from, to netip.AddrPort) frame {
	p.t.Helper()
	return frame{src: from, dst: to, proto: udp, payload: p.pack(m), hops: 63}
}

// nameTypes holds all plain queries for the names of newNames, and their answers.
var nameTypes = []struct {
	name   string
	typ    uint16
	answer string // "" means no data
}{
	{both, dns.TypeA, both + " 5 IN A 243.1.0.7"},
	{both, dns.TypeAAAA, both + " 5 IN AAAA fd99::7"},
	{only4, dns.TypeA, only4 + " 5 IN A 243.1.0.7"},
	{only4, dns.TypeAAAA, ""},
	{only6, dns.TypeA, ""},
	{only6, dns.TypeAAAA, only6 + " 5 IN AAAA fd99::7"},
	{"HeLLo.deMo.SVC.clusterSET.locaL.", dns.TypeA, "HeLLo.deMo.SVC.clusterSET.locaL. 5 IN A 243.1.0.7"},
	{"LAZY.demo.svc.CLUSTERSET.local.", dns.TypeAAAA, ""},
}

// Whole packets are compared: the program's reply is what a correct resolver would have sent, including checksums and
// addresses.
func TestNamesAnswered(t *testing.T) {
	p := newNames(t)
	for _, ends := range [][2]netip.AddrPort{{pod4, resolver4}, {pod6, resolver6}} {
		for _, q := range nameTypes {
			for _, noCheck := range []bool{false, true} {
				if noCheck && ends[0].Addr().Is6() {
					continue // RFC 8200 section 8.1
				}
				asked := p.ask(question(q.name, q.typ), ends[0], ends[1])
				asked.noCheck = noCheck
				verdict, out := p.run(bpf.ProgAnswerNames, asked.bytes())
				if verdict != redirected {
					t.Fatalf("%s %s from %s: verdict %d, want %d", dns.TypeToString[q.typ], q.name, ends[0], int32(verdict), redirected)
				}
				l4 := 14 + 20
				if ends[0].Addr().Is6() {
					l4 = 14 + 40
				}
				want := asked.back()
				want.hops, want.payload = 64, out[min(len(out), l4+8):]
				if diff := cmp.Diff(want.bytes(), out); diff != "" {
					t.Errorf("%s %s from %s: frame (-want +got):\n%s", dns.TypeToString[q.typ], q.name, ends[0], diff)
				}
				wantAnswer(t, want.payload, q.name, q.typ, q.answer)
			}
		}
	}
}

func wantAnswer(t *testing.T, payload []byte, name string, typ uint16, answer string) {
	t.Helper()
	want := question(name, typ)
	want.Response, want.Authoritative, want.RecursionAvailable = true, true, true
	text, section := name[len(name)-len("clusterset.local."):]+dataSOA, &want.Ns // the SOA's owner is part of the query's name
	if answer != "" {
		text, section = answer, &want.Answer
	}
	rr, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	*section = []dns.RR{rr}
	var got dns.Msg
	if err := got.Unpack(payload); err != nil {
		t.Errorf("%s: %v", name, err)
	} else if got.String() != want.String() {
		t.Errorf("answer\n%swant\n%s", &got, want)
	}
}

// A guarded resolver is answered for its clients only; what others send passes unchanged.
func TestNamesGuarded(t *testing.T) {
	p := newNames(t)
	clients := map[netip.AddrPort][]netip.AddrPort{
		resolver4: {pod4, netip.MustParseAddrPort("192.0.2.9:40000"), netip.MustParseAddrPort("10.200.2.5:40000")},
		resolver6: {pod6, netip.MustParseAddrPort("[2001:db8::9]:40000"), netip.MustParseAddrPort("[fd00:2::5]:40000")},
	}
	wants := func(step string, to netip.AddrPort, want ...bool) {
		t.Helper()
		for i, from := range clients[to] {
			asked := p.ask(question(both, dns.TypeA), from, to).bytes()
			verdict, out := p.run(bpf.ProgAnswerNames, asked)
			if answered := verdict == redirected; answered != want[i] || !answered && !slices.Equal(asked, out) {
				t.Errorf("%s: %s asks %s: verdict %d, answered %v, want %v", step, from, to, int32(verdict), answered, want[i])
			}
		}
	}
	for to, prefix := range map[netip.AddrPort]bpf.DNSClient{
		resolver4: {Bits: 96 + 24, Addr: bpf.Addr16(netip.MustParseAddr("10.200.1.0"))},
		resolver6: {Bits: 64, Addr: bpf.Addr16(netip.MustParseAddr("fd00:1::"))},
	} {
		wants("open", to, true, true, true)
		p.put(bpf.MapResolvers, bpf.DNSResolver{Addr: bpf.Addr16(to.Addr())}, bpf.NamesGuarded)
		wants("guarded, without clients", to, false, false, false)
		p.put(bpf.MapDNSClients, prefix, uint8(1))
		wants("guarded", to, true, false, false)
		if err := p.coll.Maps[bpf.MapDNSClients].Delete(prefix); err != nil {
			t.Fatal(err)
		}
		wants("the client is gone", to, false, false, false)
	}
}

// Every other packet passes unchanged.
func TestNamesPassed(t *testing.T) {
	p := newNames(t)
	good := func() frame { return p.ask(question(both, dns.TypeA), pod4, resolver4) }
	good6 := func() frame { return p.ask(question(both, dns.TypeA), pod6, resolver6) }
	for name, f := range map[string]frame{"IPv4": good(), "IPv6": good6()} {
		if verdict, _ := p.run(bpf.ProgAnswerNames, f.bytes()); verdict != redirected {
			t.Fatalf("%s: the unmodified query is not answered: verdict %d", name, int32(verdict))
		}
	}
	asks := func(edit func(*dns.Msg)) frame {
		m := question(both, dns.TypeA)
		edit(m)
		return p.ask(m, pod4, resolver4)
	}
	raw := func(edit func(b []byte) []byte) frame {
		f := good()
		f.payload = edit(slices.Clone(f.payload))
		return f
	}
	with := func(f frame, edit func(*frame)) frame { edit(&f); return f }
	long := strings.Repeat(strings.Repeat("a", 20)+".", 5) + "svc.clusterset.local."
	for name, f := range map[string]frame{
		"another resolver":      good().to(netip.MustParseAddrPort("10.96.0.11:53")),
		"another IPv6 resolver": good6().to(netip.MustParseAddrPort("[fd00:96::b]:53")),
		"another port":          good().to(netip.AddrPortFrom(resolver4.Addr(), 5353)),
		"TCP":                   with(good(), func(f *frame) { f.proto = tcp }),
		"a tag":                 with(good(), func(f *frame) { f.vlan = []int{7} }),
		"IP options":            with(good(), func(f *frame) { f.options = []byte{1, 1, 1, 0} }),
		"an extension header":   with(good6(), func(f *frame) { f.exts = []ext{{kind: 60, body: make([]byte, 6)}} }),
		"a first fragment":      with(good(), func(f *frame) { f.more = true }),
		"a later fragment":      with(good(), func(f *frame) { f.offset = 8 }),
		"an IPv6 fragment":      with(good6(), func(f *frame) { f.more = true }),
		"unknown":               p.ask(question("unknown.demo.svc.clusterset.local.", dns.TypeA), pod4, resolver4),
		"below a name":          p.ask(question("a."+both, dns.TypeA), pod4, resolver4),
		"another zone":          p.ask(question("hello.demo.svc.cluster.local.", dns.TypeA), pod4, resolver4),
		"the root":              p.ask(question(".", dns.TypeA), pod4, resolver4),
		"a long name":           p.ask(question(long, dns.TypeA), pod4, resolver4),
		"SRV":                   p.ask(question(both, dns.TypeSRV), pod4, resolver4),
		"ANY":                   p.ask(question(both, dns.TypeANY), pod4, resolver4),
		"class CHAOS":           asks(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }),
		"EDNS":                  asks(func(m *dns.Msg) { m.SetEdns0(1232, false) }),
		"an answer":             asks(func(m *dns.Msg) { m.Response = true }),
		"NOTIFY":                asks(func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }),
		"truncated flag":        asks(func(m *dns.Msg) { m.Truncated = true }),
		"two questions":         asks(func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }),
		"no question":           asks(func(m *dns.Msg) { m.Question = nil }),
		"an additional record": asks(func(m *dns.Msg) {
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: ".", Rrtype: 1, Class: 1}, A: vip4.AsSlice()}}
		}),
		"trailing bytes":        raw(func(b []byte) []byte { return append(b, 0) }),
		"one byte missing":      raw(func(b []byte) []byte { return b[:len(b)-1] }),
		"a letter as a length":  raw(func(b []byte) []byte { b[12] |= 0x40; return b }),
		"a pointer":             raw(func(b []byte) []byte { b[12] = 0xc0; return b }),
		"a count of answers":    raw(func(b []byte) []byte { b[7] = 1; return b }),
		"a count of authority":  raw(func(b []byte) []byte { b[9] = 1; return b }),
		"a count of additional": raw(func(b []byte) []byte { b[11] = 1; return b }),
		"bytes after UDP":       with(good(), func(f *frame) { f.payload, f.bare = append(f.transport(), 0), true }),
		"only a header":         raw(func(b []byte) []byte { return b[:12] }),
		"nothing":               raw(func([]byte) []byte { return nil }),
	} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			p.untouched(bpf.ProgAnswerNames, f.bytes())
		})
	}
	p.t = t
	claims := good().bytes()
	claims[14]++ // the first bytes of the UDP header become options
	p.untouched(bpf.ProgAnswerNames, claims)
	for shortest, f := range map[int]frame{14 + 20: good(), 14 + 40: good6()} { // the kernel runs no shorter frames
		whole := f.bytes()
		for n := shortest; n < len(whole); n++ {
			if verdict, out := p.run(bpf.ProgAnswerNames, whole[:n]); verdict != passed || len(out) != n {
				t.Errorf("the first %d of %d bytes: verdict %d, %d bytes", n, len(whole), int32(verdict), len(out))
			}
		}
	}
}

// The program converts every byte to lower case as Go does.
func TestNamesLower(t *testing.T) {
	p := newNames(t)
	for c := range 256 {
		for at := range len("lazy") {
			f := p.ask(question(only4, dns.TypeA), pod4, resolver4)
			i := 12 + 1 + at
			was := f.payload[i]
			f.payload[i] = byte(c)
			same := byte(c) == was || 'A' <= c && c <= 'Z' && byte(c)+'a'-'A' == was
			verdict, _ := p.run(bpf.ProgAnswerNames, f.bytes())
			if (verdict == redirected) != same {
				t.Fatalf("byte %#x for %q: verdict %d", c, was, int32(verdict))
			}
		}
	}
}

// Every answer is counted by query type.
func TestNamesCounted(t *testing.T) {
	p := newNames(t)
	counts := func(index uint32) (sum uint64) {
		var each []uint64
		if err := p.coll.Maps[bpf.MapNamesCounts].Lookup(index, &each); err != nil {
			t.Fatal(err)
		}
		for _, n := range each {
			sum += n
		}
		return sum
	}
	a, aaaa := counts(bpf.NamesA), counts(bpf.NamesAAAA)
	p.run(bpf.ProgAnswerNames, p.ask(question(only4, dns.TypeA), pod4, resolver4).bytes())
	p.run(bpf.ProgAnswerNames, p.ask(question(only4, dns.TypeAAAA), pod4, resolver4).bytes())
	p.run(bpf.ProgAnswerNames, p.ask(question(only4, dns.TypeMX), pod4, resolver4).bytes())
	p.run(bpf.ProgAnswerNames, p.ask(question(only6, dns.TypeA), pod4, resolver4).bytes())
	if a, aaaa := counts(bpf.NamesA)-a, counts(bpf.NamesAAAA)-aaaa; a != 2 || aaaa != 1 {
		t.Errorf("%d queries for A and %d for AAAA counted, want 2 and 1", a, aaaa)
	}
}
