package zone

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

func addrs(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func vip(namespace, name string, ips ...string) clusterset.Service {
	return clusterset.Service{Import: clusterset.Import{
		Service:  clusterset.ServiceName{Namespace: namespace, Name: name},
		Type:     clusterset.ClusterSetIP,
		IPs:      addrs(ips...),
		Clusters: []clusterset.ClusterID{"a", "b.eu"},
		Ports:    []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
	}}
}

func headless(namespace, name string, slices ...clusterset.Slice) clusterset.Service {
	return clusterset.Service{
		Import: clusterset.Import{Service: clusterset.ServiceName{Namespace: namespace, Name: name}, Type: clusterset.Headless},
		Slices: slices,
	}
}

// slice returns a slice with port pg, 5432, and endpoints such as "10.1.0.1", "pod-0=10.1.0.1" (with a hostname) or
// "!10.1.0.1" (not ready).
func slice(cluster clusterset.ClusterID, endpoints ...string) clusterset.Slice {
	s := clusterset.Slice{Cluster: cluster, Ports: []clusterset.EndpointPort{{Name: "pg", Protocol: clusterset.TCP, Port: 5432}}}
	for _, text := range endpoints {
		text, unready := strings.CutPrefix(text, "!")
		host, addr, named := strings.Cut(text, "=")
		if !named {
			host, addr = "", text
		}
		s.Family = clusterset.FamilyOf(netip.MustParseAddr(addr))
		s.Endpoints = append(s.Endpoints, clusterset.Endpoint{Addrs: addrs(addr), Ready: !unready, Hostname: host})
	}
	return s
}

// allKinds returns a snapshot with one Service of every kind.
func allKinds() *clusterset.Snapshot {
	asleep := vip("demo", "v4", "243.0.0.2")
	asleep.Slices = []clusterset.Slice{slice("a", "!10.1.0.9")} // health does not matter with an address
	portless := vip("demo", "portless", "243.0.0.9")
	portless.Ports = nil
	twoPorts := vip("demo", "two", "243.0.0.3")
	twoPorts.Ports = []clusterset.Port{
		{Name: "dns", Protocol: clusterset.UDP, Port: 42}, {Name: "dns-tcp", Protocol: clusterset.TCP, Port: 42}, {Protocol: clusterset.SCTP, Port: 43},
	}
	hello := vip("demo", "hello", "243.0.0.1", "fd00:243::1")
	hello.Slices = []clusterset.Slice{slice("a", "10.1.1.1", "!10.1.1.2"), slice("b.eu", "!10.2.1.1")}
	byCluster := vip("demo", "plain")
	byCluster.UseIP = clusterset.Disabled
	byCluster.Slices = []clusterset.Slice{slice("a", "10.101.0.1"), slice("b.eu", "10.102.0.1"), slice("c", "!10.103.0.1")}
	return &clusterset.Snapshot{Services: []clusterset.Service{
		headless("db", "asleep", slice("a", "!10.1.0.1")),
		headless("db", "pg",
			slice("a", "pg-0=10.1.0.2", "pg-1=10.1.0.1"), slice("a", "pg-0=fd00:1::2"),
			slice("b.eu", "10.2.0.1", "!10.2.0.2", "pg-0=10.1.0.1")),
		headless("db", "six", slice("a", "fd00:1::1")),
		hello,
		byCluster,
		portless,
		twoPorts,
		asleep,
		vip("demo", "waiting"),
		vip("lonely", "waiting"),
	}}
}

// The configurations of the two profiles.
var (
	kep        = Config{TTL: DefaultTTL, Nameservers: addrs("169.254.20.53", "fd00::53")}
	lighthouse = Config{
		TTL: DefaultTTL, Nameservers: kep.Nameservers, EmptyHeadless: true, ClusterScoped: true,
		Reverse: []netip.Prefix{netip.MustParsePrefix("243.0.0.0/8"), netip.MustParsePrefix("fd00:243::/32")},
	}
)

func build(t testing.TB, s *clusterset.Snapshot, c Config) *Zone {
	t.Helper()
	b := new(Builder)
	z, changed := b.Build(s, c, 7)
	if !changed {
		t.Error("the first zone is not reported as changed")
	}
	return z
}

// ask returns an answer as its code and the lines of a zone file. Lines of the authority and the additional section begin
// with the name of the section.
func ask(t testing.TB, z *Zone, name string, typ Type, rotation uint32, limit int) string {
	t.Helper()
	m := new(dns.Msg).SetQuestion(name, uint16(typ))
	wire, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	wire[2] = 0x80
	lower := []byte(strings.ToLower(string(wire[HeaderLen : len(wire)-4])))
	wire, code := z.Append(wire, Question{lower, typ}, rotation, limit)
	var resp dns.Msg
	if err := resp.Unpack(wire); err != nil {
		t.Fatalf("%s %s: %v", name, typ, err)
	}
	if int(code) != resp.Rcode || len(wire) > limit || resp.Authoritative != (code != Refused) {
		t.Errorf("%s %s: code %s and %d, %d bytes of %d, authoritative: %t", name, typ, code, resp.Rcode, len(wire), limit, resp.Authoritative)
	}
	lines := []string{code.String()}
	if resp.Truncated {
		lines[0] += " truncated"
	}
	for section, rrs := range map[string][]dns.RR{"": resp.Answer, "authority: ": resp.Ns, "glue: ": resp.Extra} {
		for _, rr := range rrs {
			lines = append(lines, section+strings.ReplaceAll(rr.String(), "\t", " "))
		}
	}
	slices.Sort(lines[1:])
	return strings.Join(lines, "\n")
}

const soaLine = "clusterset.local. 5 IN SOA ns.dns.clusterset.local. hostmaster.clusterset.local. 7 7200 1800 86400 5"

// The test asks for each row of the record schema of the specification, under each profile.
func TestSchema(t *testing.T) {
	t.Parallel()
	const (
		hello = "hello.demo.svc.clusterset.local."
		two   = "two.demo.svc.clusterset.local."
		plain = "plain.demo.svc.clusterset.local."
		pg    = "pg.db.svc.clusterset.local."
	)
	noData, nxDomain := "NOERROR\nauthority: "+soaLine, "NXDOMAIN\nauthority: "+soaLine
	both := map[string]struct {
		name string
		typ  Type
		want string
	}{
		"apex SOA":                 {Origin, SOA, "NOERROR\n" + soaLine},
		"apex NS":                  {Origin, NS, "NOERROR\nclusterset.local. 5 IN NS ns.dns.clusterset.local."},
		"apex other type":          {Origin, TXT, noData},
		"name server v4":           {"ns.dns." + Origin, A, "NOERROR\nns.dns.clusterset.local. 5 IN A 169.254.20.53"},
		"name server v6":           {"ns.dns." + Origin, AAAA, "NOERROR\nns.dns.clusterset.local. 5 IN AAAA fd00::53"},
		"name server other type":   {"ns.dns." + Origin, TXT, noData},
		"schema version":           {"dns-version." + Origin, TXT, "NOERROR\n" + `dns-version.clusterset.local. 28800 IN TXT "1.0.0"`},
		"schema version other":     {"dns-version." + Origin, A, noData},
		"empty dns":                {"dns." + Origin, A, noData},
		"empty svc":                {"svc." + Origin, A, noData},
		"empty namespace":          {"demo.svc." + Origin, AAAA, noData},
		"namespace of the unready": {"lonely.svc." + Origin, A, noData},
		"unknown namespace":        {"unknown.svc." + Origin, A, nxDomain},

		"vip v4":                                       {hello, A, "NOERROR\n" + hello + " 5 IN A 243.0.0.1"},
		"vip v6":                                       {hello, AAAA, "NOERROR\n" + hello + " 5 IN AAAA fd00:243::1"},
		"vip without that family":                      {"v4.demo.svc." + Origin, AAAA, noData},
		"vip of endpoints that are not ready":          {"v4.demo.svc." + Origin, A, "NOERROR\nv4.demo.svc.clusterset.local. 5 IN A 243.0.0.2"},
		"vip without ports":                            {"portless.demo.svc." + Origin, A, "NOERROR\nportless.demo.svc.clusterset.local. 5 IN A 243.0.0.9"},
		"vip without ports, SRV":                       {"portless.demo.svc." + Origin, SRV, noData},
		"import without an IP yet":                     {"waiting.demo.svc." + Origin, A, noData},
		"other type of a service":                      {hello, 15, noData},
		"unknown service":                              {"unknown.demo.svc." + Origin, A, nxDomain},
		"unknown service SRV":                          {"_http._tcp.unknown.demo.svc." + Origin, SRV, nxDomain},
		"any of a name":                                {hello, ANY, "NOERROR\n" + hello + ` 5 IN HINFO "RFC8482" ""`},
		"ANY for an unknown service":                   {"unknown.demo.svc." + Origin, ANY, nxDomain},
		"SRV at the name, one port":                    {hello, SRV, "NOERROR\nglue: " + hello + " 5 IN A 243.0.0.1\nglue: " + hello + " 5 IN AAAA fd00:243::1\n" + hello + " 5 IN SRV 0 100 80 " + hello},
		"SRV at the name, ports of one number are one": {two, SRV, "NOERROR\nglue: " + two + " 5 IN A 243.0.0.3\n" + two + " 5 IN SRV 0 50 42 " + two + "\n" + two + " 5 IN SRV 0 50 43 " + two},
		"SRV of a named port":                          {"_http._tcp." + hello, SRV, "NOERROR\n_http._tcp." + hello + " 5 IN SRV 0 100 80 " + hello + "\nglue: " + hello + " 5 IN A 243.0.0.1\nglue: " + hello + " 5 IN AAAA fd00:243::1"},
		"SRV of another port's proto":                  {"_dns._tcp." + two, SRV, nxDomain},
		"SRV of a port over UDP":                       {"_dns._udp." + two, SRV, "NOERROR\n_dns._udp." + two + " 5 IN SRV 0 100 42 " + two + "\nglue: " + two + " 5 IN A 243.0.0.3"},
		"SRV of an unknown port":                       {"_smtp._tcp." + hello, SRV, nxDomain},
		"SRV of the port without name":                 {"_._sctp." + two, SRV, nxDomain},
		"A of a port":                                  {"_http._tcp." + hello, A, noData},
		"empty protocol":                               {"_tcp." + hello, SRV, noData},

		"headless, deduplicated":                   {pg, A, "NOERROR\n" + pg + " 5 IN A 10.1.0.1\n" + pg + " 5 IN A 10.1.0.2\n" + pg + " 5 IN A 10.2.0.1"},
		"headless v6":                              {pg, AAAA, "NOERROR\n" + pg + " 5 IN AAAA fd00:1::2"},
		"headless other family":                    {"six.db.svc." + Origin, A, noData},
		"headless host":                            {"pg-0.a." + pg, A, "NOERROR\npg-0.a." + pg + " 5 IN A 10.1.0.2"},
		"headless host v6":                         {"pg-0.a." + pg, AAAA, "NOERROR\npg-0.a." + pg + " 5 IN AAAA fd00:1::2"},
		"headless host of a cluster of two labels": {"pg-0.b.eu." + pg, A, "NOERROR\npg-0.b.eu." + pg + " 5 IN A 10.1.0.1"},
		"headless host without hostname":           {"10-2-0-1.b.eu." + pg, A, "NOERROR\n10-2-0-1.b.eu." + pg + " 5 IN A 10.2.0.1"},
		"headless host v6 without hostname":        {"fd00-1--1.a.six.db.svc." + Origin, AAAA, "NOERROR\nfd00-1--1.a.six.db.svc.clusterset.local. 5 IN AAAA fd00:1::1"},
		"headless host other family":               {"pg-1.a." + pg, AAAA, noData},
		"headless host not ready":                  {"10-2-0-2.b.eu." + pg, A, nxDomain},
		"headless unknown host":                    {"pg-9.a." + pg, A, nxDomain},
		"headless host of an unknown cluster":      {"pg-0.c." + pg, A, nxDomain},
		"half a cluster id":                        {"eu." + pg, A, noData},
		"headless SRV": {"_pg._tcp.six.db.svc." + Origin, SRV, "NOERROR\n_pg._tcp.six.db.svc.clusterset.local. 5 IN SRV 0 100 5432 fd00-1--1.a.six.db.svc.clusterset.local.\n" +
			"glue: fd00-1--1.a.six.db.svc.clusterset.local. 5 IN AAAA fd00:1::1"},
		"headless SRV at the name": {pg, SRV, "NOERROR\n" +
			"glue: 10-2-0-1.b.eu." + pg + " 5 IN A 10.2.0.1\nglue: pg-0.a." + pg + " 5 IN A 10.1.0.2\nglue: pg-0.a." + pg + " 5 IN AAAA fd00:1::2\n" +
			"glue: pg-0.b.eu." + pg + " 5 IN A 10.1.0.1\nglue: pg-1.a." + pg + " 5 IN A 10.1.0.1\n" +
			pg + " 5 IN SRV 0 25 5432 10-2-0-1.b.eu." + pg + "\n" + pg + " 5 IN SRV 0 25 5432 pg-0.a." + pg + "\n" +
			pg + " 5 IN SRV 0 25 5432 pg-0.b.eu." + pg + "\n" + pg + " 5 IN SRV 0 25 5432 pg-1.a." + pg},

		"no IP by choice":        {plain, SRV, "NOERROR\nglue: " + plain + " 5 IN A 10.101.0.1\n" + plain + " 5 IN SRV 0 100 80 " + plain},
		"no IP by choice, v6":    {plain, AAAA, noData},
		"zone transfer":          {Origin, AXFR, "REFUSED"},
		"incremental transfer":   {Origin, IXFR, "REFUSED"},
		"outside the zone":       {"hello.demo.svc.cluster.local.", A, "REFUSED"},
		"the root":               {".", A, "REFUSED"},
		"parent":                 {"local.", SOA, "REFUSED"},
		"suffix within a label":  {"xclusterset.local.", A, "REFUSED"},
		"label with a dot":       {`x\.clusterset.local.`, A, "REFUSED"},
		"label with a backslash": {`x\\.clusterset.local.`, A, nxDomain},
		"escaped service dot":    {`hello\.demo.svc.clusterset.local.`, A, nxDomain},
	}
	byProfile := map[string]struct {
		name      string
		typ       Type
		kep, lght string
	}{
		"headless with none ready":     {"asleep.db.svc." + Origin, A, nxDomain, noData},
		"cluster of a vip":             {"a." + hello, A, nxDomain, "NOERROR\na." + hello + " 5 IN A 10.1.1.1"},
		"one of two labels, asleep":    {"b.eu." + hello, A, nxDomain, "NOERROR\nb.eu." + hello + " 5 IN A 10.2.1.1"},
		"a family that it lacks":       {"b.eu." + hello, AAAA, nxDomain, noData},
		"a cluster of none yet":        {"a.waiting.demo.svc." + Origin, A, nxDomain, noData},
		"unknown cluster":              {"c." + hello, A, nxDomain, nxDomain},
		"port of a cluster":            {"_pg._tcp.a." + hello, SRV, nxDomain, "NOERROR\n_pg._tcp.a." + hello + " 5 IN SRV 0 100 5432 a." + hello + "\nglue: a." + hello + " 5 IN A 10.1.1.1"},
		"port of the import only":      {"_http._tcp.a." + hello, SRV, nxDomain, nxDomain},
		"cluster of a headless one":    {"a." + pg, A, noData, "NOERROR\na." + pg + " 5 IN A 10.1.0.1\na." + pg + " 5 IN A 10.1.0.2"},
		"ports of a headless cluster":  {"_pg._tcp.b.eu." + pg, SRV, nxDomain, "NOERROR\n_pg._tcp.b.eu." + pg + " 5 IN SRV 0 100 5432 10-2-0-1.b.eu." + pg + "\n_pg._tcp.b.eu." + pg + " 5 IN SRV 0 100 5432 pg-0.b.eu." + pg + "\nglue: 10-2-0-1.b.eu." + pg + " 5 IN A 10.2.0.1\nglue: pg-0.b.eu." + pg + " 5 IN A 10.1.0.1"},
		"cluster of one without IP":    {"b.eu." + plain, A, nxDomain, "NOERROR\nb.eu." + plain + " 5 IN A 10.102.0.1"},
		"cluster that does not serve":  {"c." + plain, A, nxDomain, "NOERROR\nc." + plain + " 5 IN A 10.103.0.1"},
		"its own ports":                {"_pg._tcp.c." + plain, SRV, nxDomain, "NOERROR\n_pg._tcp.c." + plain + " 5 IN SRV 0 100 5432 c." + plain + "\nglue: c." + plain + " 5 IN A 10.103.0.1"},
		"a port without underscores":   {"http.tcp." + hello, SRV, nxDomain, "NOERROR\nglue: " + hello + " 5 IN A 243.0.0.1\nglue: " + hello + " 5 IN AAAA fd00:243::1\nhttp.tcp." + hello + " 5 IN SRV 0 100 80 " + hello},
		"another protocol without":     {"http.udp." + hello, SRV, nxDomain, nxDomain},
		"a protocol without":           {"tcp." + hello, SRV, nxDomain, noData},
		"a cluster's port without":     {"pg.tcp.c." + plain, SRV, nxDomain, "NOERROR\nglue: c." + plain + " 5 IN A 10.103.0.1\npg.tcp.c." + plain + " 5 IN SRV 0 100 5432 c." + plain},
		"reverse of a vip":             {"1.0.0.243.in-addr.arpa.", PTR, "REFUSED", "NOERROR\n1.0.0.243.in-addr.arpa. 5 IN PTR " + hello},
		"reverse of a vip v6":          {dns.Fqdn(must(dns.ReverseAddr("fd00:243::1"))), PTR, "REFUSED", "NOERROR\n" + must(dns.ReverseAddr("fd00:243::1")) + " 5 IN PTR " + hello},
		"unused address":               {"77.0.0.243.in-addr.arpa.", PTR, "REFUSED", "NXDOMAIN\nauthority: 243.in-addr.arpa." + strings.TrimPrefix(soaLine, "clusterset.local.")},
		"reverse between":              {"0.0.243.in-addr.arpa.", PTR, "REFUSED", "NOERROR\nauthority: 243.in-addr.arpa." + strings.TrimPrefix(soaLine, "clusterset.local.")},
		"reverse of a strange network": {"1.0.0.10.in-addr.arpa.", PTR, "REFUSED", "REFUSED"},
		"the top of the reverse names": {"243.in-addr.arpa.", NS, "REFUSED", "NOERROR\n243.in-addr.arpa. 5 IN NS ns.dns.clusterset.local."},
		"the SOA of the reverse names": {"243.in-addr.arpa.", SOA, "REFUSED", "NOERROR\n243.in-addr.arpa." + strings.TrimPrefix(soaLine, "clusterset.local.")},
	}
	for profile, c := range map[string]Config{"kep": kep, "lighthouse": lighthouse} {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			c.Local = "a"
			z := build(t, allKinds(), c)
			for name, tc := range both {
				if diff := cmp.Diff(tc.want, ask(t, z, tc.name, tc.typ, 0, 4096)); diff != "" {
					t.Errorf("%s: %s %s (-want +have):\n%s", name, tc.name, tc.typ, diff)
				}
			}
			conformance.Holds(t, "N38", "N39", "N40", "N41", "N42", "N43", "N44", "C19", "C21", "C22", "C23", "L53", "L54", "L58", "L61")
			for name, tc := range byProfile {
				want := tc.kep
				if profile == "lighthouse" {
					want = tc.lght
				}
				if diff := cmp.Diff(want, ask(t, z, tc.name, tc.typ, 0, 4096)); diff != "" {
					t.Errorf("%s: %s %s (-want +have):\n%s", name, tc.name, tc.typ, diff)
				}
			}
			conformance.Holds(t, "N45", "N46", "L59", "L60")
		})
	}
}

func must(s string, err error) string {
	if err != nil {
		panic(err)
	}
	return s
}

// A Service without a ClusterSetIP resolves to the local cluster while that serves, and otherwise to each serving cluster in
// turn.
func TestServiceWithoutIPByChoice(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		local   clusterset.ClusterID
		drained map[clusterset.ClusterID]bool
		want    []string // of four successive answers
	}{
		"own cluster":              {"a", nil, []string{"10.101.0.1", "10.101.0.1", "10.101.0.1", "10.101.0.1"}},
		"own cluster has none":     {"c", nil, []string{"10.101.0.1", "10.102.0.1", "10.101.0.1", "10.102.0.1"}},
		"own cluster is no member": {"x", nil, []string{"10.101.0.1", "10.102.0.1", "10.101.0.1", "10.102.0.1"}},
		"own cluster drained":      {"a", map[clusterset.ClusterID]bool{"a": true}, []string{"10.102.0.1", "10.102.0.1", "10.102.0.1", "10.102.0.1"}},
		"other cluster drained":    {"c", map[clusterset.ClusterID]bool{"b.eu": true}, []string{"10.101.0.1", "10.101.0.1", "10.101.0.1", "10.101.0.1"}},
		"all are drained: no data": {"c", map[clusterset.ClusterID]bool{"a": true, "b.eu": true}, []string{"", "", "", ""}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := kep
			c.Local, c.Drained = tc.local, tc.drained
			z := build(t, allKinds(), c)
			var have []string
			for rotation := range uint32(4) {
				answer := ask(t, z, "plain.demo.svc.clusterset.local.", A, rotation, 512)
				_, addr, _ := strings.Cut(answer, " IN A ")
				have = append(have, addr)
				if addr == "" && !strings.HasPrefix(answer, "NOERROR\nauthority:") {
					t.Errorf("no cluster serves: %s", answer)
				}
			}
			if diff := cmp.Diff(tc.want, have); diff != "" {
				t.Errorf("addresses (-want +have):\n%s", diff)
			}
		})
	}
	conformance.Holds(t, "N21", "L57")
}

// Clusters have equal weights and take turns smoothly: of as many successive answers as there are clusters, each cluster
// gets one, wherever the sequence begins and whichever clusters were drained before. Of 100 answers each gets its share.
func TestClustersTakeTurnsSmoothly(t *testing.T) {
	t.Parallel()
	rotating := vip("demo", "plain")
	rotating.UseIP = clusterset.Disabled
	for i := range 5 {
		rotating.Slices = append(rotating.Slices, slice(clusterset.ClusterID('a'+rune(i)), fmt.Sprintf("10.10%d.0.1", i)))
	}
	s := &clusterset.Snapshot{Services: []clusterset.Service{rotating}}
	b := new(Builder)
	rotation := uint32(0)
	for _, drained := range []map[clusterset.ClusterID]bool{nil, {"b": true}, {"b": true, "e": true}, nil} {
		c := kep
		c.Local, c.Drained = "x", drained
		z, _ := b.Build(s, c, 7)
		live := len(rotating.Slices) - len(drained)
		var row []string
		all := map[string]int{}
		for range 100 {
			_, addr, _ := strings.Cut(ask(t, z, "plain.demo.svc.clusterset.local.", A, rotation, 512), " IN A ")
			rotation++
			all[addr]++
			row = append(row, addr)
			if len(row) < live {
				continue
			}
			row = row[len(row)-live:]
			if sorted := slices.Sorted(slices.Values(row)); len(slices.Compact(sorted)) != live {
				t.Fatalf("without %v: %v in a row", drained, row)
			}
		}
		for addr, n := range all {
			if len(all) != live || n < 100/live || n > 100/live+1 {
				t.Errorf("without %v: %s has %d answers of 100, with %d others", drained, addr, n, len(all)-1)
			}
		}
	}
	conformance.Holds(t, "L57")
}

// A drained member's endpoints leave the names that several members share, and keep their own names.
func TestDrainedMemberOfHeadlessService(t *testing.T) {
	t.Parallel()
	c := kep
	c.Drained = map[clusterset.ClusterID]bool{"a": true}
	z := build(t, allKinds(), c)
	const pg = "pg.db.svc.clusterset.local."
	for name, want := range map[string]string{
		pg:             "NOERROR\n" + pg + " 5 IN A 10.1.0.1\n" + pg + " 5 IN A 10.2.0.1",
		"pg-1.a." + pg: "NOERROR\npg-1.a." + pg + " 5 IN A 10.1.0.1",
	} {
		if diff := cmp.Diff(want, ask(t, z, name, A, 0, 512)); diff != "" {
			t.Errorf("%s (-want +have):\n%s", name, diff)
		}
	}
	conformance.Holds(t, "L61")
}

func TestTruncation(t *testing.T) {
	t.Parallel()
	var many clusterset.Slice
	many.Cluster, many.Ports = "a", []clusterset.EndpointPort{{Name: "x", Protocol: clusterset.TCP, Port: 80}}
	for i := range 40 {
		many.Endpoints = append(many.Endpoints, clusterset.Endpoint{Ready: true, Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}})
	}
	z := build(t, &clusterset.Snapshot{Services: []clusterset.Service{headless("db", "many", many)}}, kep)
	const name = "many.db.svc.clusterset.local."
	for limit := 512; limit < 1300; limit += 7 {
		for rotation := range uint32(41) {
			for _, typ := range []Type{A, SRV} {
				answer := strings.Split(ask(t, z, name, typ, rotation, limit), "\n")
				records := map[string]bool{}
				glue := 0
				for _, l := range answer[1:] {
					if strings.HasPrefix(l, "glue:") {
						glue++
					}
					records[l] = true
				}
				if len(records) != len(answer)-1 {
					t.Fatalf("limit %d, rotation %d, %s: a record appears twice", limit, rotation, typ)
				}
				if truncated := strings.HasSuffix(answer[0], "truncated"); truncated == (len(records)-glue == 40) || truncated && glue > 0 {
					t.Fatalf("limit %d, rotation %d, %s: %s with %d records and %d of glue", limit, rotation, typ, answer[0], len(records)-glue, glue)
				}
			}
		}
	}
}

func TestBuildReportsServicesWithoutName(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 64)
	deep := headless("demo", "deep", slice(clusterset.ClusterID(strings.Repeat("c", 31)+"."+strings.Repeat("d", 31)), strings.Repeat("h", 63)+"=10.0.0.1"))
	deep.Service.Name, deep.Service.Namespace = strings.Repeat("s", 63), strings.Repeat("n", 63)
	odd := headless("demo", "odd", slice("a", "Up=10.0.0.1", "down=10.0.0.2"))
	s := &clusterset.Snapshot{Services: []clusterset.Service{
		vip("", "nowhere", "243.0.0.1"), vip("demo", `back\slash`, "243.0.0.2"), vip("demo", "a.b", "243.0.0.3"), vip("demo", "hello", "243.0.0.4"),
		odd, vip("demo", long, "243.0.0.5"), deep,
	}}
	b := new(Builder)
	z, _ := b.Build(s, kep, 1)
	var have []string
	for _, p := range b.Problems() {
		have = append(have, p.Service.String()+": "+p.Reason)
	}
	want := []string{
		`/nowhere: "" is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'`,
		`demo/a.b: "a.b" is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'`,
		`demo/back\slash: "back\\slash" is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'`,
		`demo/odd: "Up" is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'`,
		`demo/` + long + `: "` + long + `" is not a DNS label: 1 to 63 of a-z, 0-9, '-' and '_'`,
	}
	if n := len(have); n != 6 || !strings.Contains(have[5], "is longer than 253 characters") {
		t.Fatalf("problems: %q", have)
	}
	if diff := cmp.Diff(want, have[:5]); diff != "" {
		t.Errorf("problems (-want +have):\n%s", diff)
	}
	conformance.Holds(t, "L53", "N48")
	for name, addr := range map[string]string{"hello.demo.svc.clusterset.local.": "243.0.0.4", "odd.demo.svc.clusterset.local.": "10.0.0.1", "down.a.odd.demo.svc.clusterset.local.": "10.0.0.2"} {
		if got := ask(t, z, name, A, 0, 512); !strings.Contains(got, addr) {
			t.Errorf("an invalid Service removed the record of %s: %s", name, got)
		}
	}
	if z, _ = b.Build(&clusterset.Snapshot{}, kep, 2); len(b.Problems()) != 0 {
		t.Errorf("problems of removed Services: %v", b.Problems())
	}
	if z.Len() != build(t, &clusterset.Snapshot{}, kep).Len() {
		t.Errorf("records of removed Services:\n%s", z)
	}
}

func TestZoneAsFile(t *testing.T) {
	t.Parallel()
	s := allKinds()
	s.Services = s.Services[3:4] // demo/hello
	want := soaLine + `
clusterset.local. 5 IN NS ns.dns.clusterset.local.
; dns.clusterset.local.
ns.dns.clusterset.local. 5 IN A 169.254.20.53
ns.dns.clusterset.local. 5 IN AAAA fd00::53
dns-version.clusterset.local. 28800 IN TXT "1.0.0"
; svc.clusterset.local.
; demo.svc.clusterset.local.
hello.demo.svc.clusterset.local. 5 IN A 243.0.0.1
hello.demo.svc.clusterset.local. 5 IN AAAA fd00:243::1
hello.demo.svc.clusterset.local. 5 IN SRV 0 100 80 hello.demo.svc.clusterset.local.
; _tcp.hello.demo.svc.clusterset.local.
_http._tcp.hello.demo.svc.clusterset.local. 5 IN SRV 0 100 80 hello.demo.svc.clusterset.local.
`
	z := build(t, s, kep)
	if diff := cmp.Diff(want, z.String()); diff != "" {
		t.Errorf("zone file (-want +have):\n%s", diff)
	}
	if z.Len() != 8 || z.Names() != 9 || z.Serial() != 7 {
		t.Errorf("have %d records of %d names, serial %d; want 8, 9 and 7", z.Len(), z.Names(), z.Serial())
	}
	if have := z.Records("_tcp.HELLO.demo.svc.clusterset.local"); len(have) != 2 || have[1].Name != "_http._tcp.hello.demo.svc.clusterset.local." {
		t.Errorf("records below a name: %v", have)
	}
}

// anyService draws a Service whose names may collide with other Services' names in every possible way.
func anyService(t *rapid.T, i int) clusterset.Service {
	label := rapid.StringMatching(`[a-c]`)
	s := clusterset.Service{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: label.Draw(t, "namespace"), Name: label.Draw(t, "name")},
		Type:    clusterset.ServiceType(rapid.IntRange(1, 2).Draw(t, "type")),
		UseIP:   clusterset.Choice(rapid.IntRange(0, 2).Draw(t, "use IP")),
		IPs:     []netip.Addr{netip.AddrFrom4([4]byte{243, 0, 0, byte(i)})},
		Ports:   []clusterset.Port{{Name: rapid.StringMatching(`[xy]?`).Draw(t, "port"), Protocol: clusterset.TCP, Port: 80}},
	}}
	for range rapid.IntRange(0, 2).Draw(t, "slices") {
		cluster := clusterset.ClusterID(rapid.SampledFrom([]string{"a", "b", "a.b", "b.a"}).Draw(t, "cluster"))
		slice := clusterset.Slice{Cluster: cluster, Ports: []clusterset.EndpointPort{{Name: "x", Protocol: clusterset.UDP, Port: 53}}}
		for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
			slice.Endpoints = append(slice.Endpoints, clusterset.Endpoint{
				Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, rapid.Byte().Draw(t, "address")})},
				Ready: rapid.Bool().Draw(t, "ready"), Hostname: rapid.StringMatching(`[ab]?`).Draw(t, "hostname"),
			})
		}
		s.Slices = append(s.Slices, slice)
		s.Clusters = append(s.Clusters, cluster)
	}
	return s
}

func anySnapshot(t *rapid.T) *clusterset.Snapshot {
	s := &clusterset.Snapshot{}
	for i := range rapid.IntRange(0, 8).Draw(t, "services") {
		s.Services = append(s.Services, anyService(t, i))
	}
	slices.SortFunc(s.Services, func(a, b clusterset.Service) int { return a.Service.Compare(b.Service) })
	s.Services = slices.CompactFunc(s.Services, func(a, b clusterset.Service) bool { return a.Service == b.Service })
	return s
}

// A zone built by updates equals the zone built from its last snapshot alone. Build reports whether it changed, and every
// parent of a name exists (RFC 8020).
func TestIncrementalBuildEqualsFullBuild(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		b := new(Builder)
		var last *Zone
		taken := map[string][2]netip.Addr{}
		for range rapid.IntRange(1, 4).Draw(rt, "steps") {
			s, c := anySnapshot(rt), rapid.SampledFrom([]Config{kep, lighthouse}).Draw(rt, "config")
			z, changed := b.Build(s, c, 7)
			fresh, _ := new(Builder).Build(s, c, z.Serial())
			if diff := cmp.Diff(fresh.String(), z.String()); diff != "" {
				rt.Fatalf("-built at once +built by updates:\n%s", diff)
			}
			if z.Len() != fresh.Len() || z.Names() != fresh.Names() {
				rt.Fatalf("%d records of %d names, want %d of %d", z.Len(), z.Names(), fresh.Len(), fresh.Names())
			}
			if last != nil && changed == (last == z) || last != nil && !changed && last.String() != z.String() {
				rt.Fatalf("changed: %t", changed)
			}
			if last != nil && changed && z.Serial() <= last.Serial() {
				rt.Fatalf("serial %d after %d", z.Serial(), last.Serial())
			}
			last = z
			for name, addrs := range b.TakeAddresses() {
				if taken[name] = addrs; addrs == [2]netip.Addr{} {
					delete(taken, name)
				}
			}
			if diff := cmp.Diff(onlyAddresses(fresh), taken, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				rt.Fatalf("taken addresses (-want +got):\n%s", diff)
			}
			for e := range z.entries() {
				if !isWellFormed(string(e)) {
					rt.Fatalf("entry %q", e)
				}
				name := e.name()
				for a, _ := z.apexOf([]byte(name)); name != a.name; {
					name = parent(name)
					if _, code := z.Append(make([]byte, HeaderLen, 512), Question{[]byte(name), TXT}, 0, 512); code != NoError {
						rt.Fatalf("%s exists and its parent %s does not", Text(e.name()), Text(name))
					}
				}
			}
		}
	})
}

// onlyAddresses returns the names below clusterset.local with at most one address of each family, read from the zone's
// presentation format.
func onlyAddresses(z *Zone) map[string][2]netip.Addr {
	all := map[string][2]netip.Addr{}
	many := map[string]bool{}
	for _, r := range z.Records("clusterset.local") {
		if r.Type != A && r.Type != AAAA {
			continue
		}
		name := wireName(strings.Split(strings.TrimSuffix(r.Name, "."), ".")...)
		addrs, i := all[name], 0
		if r.Type == AAAA {
			i = 1
		}
		many[name] = many[name] || addrs[i].IsValid()
		addrs[i] = netip.MustParseAddr(r.Data)
		all[name] = addrs
	}
	maps.DeleteFunc(all, func(name string, _ [2]netip.Addr) bool { return many[name] })
	return all
}

// Updating a zone leaves the previous one unchanged, as questions are still answered from it.
func TestZoneIsImmutable(t *testing.T) {
	t.Parallel()
	b := new(Builder)
	z, _ := b.Build(allKinds(), kep, 7)
	before := z.String()
	if _, changed := b.Build(&clusterset.Snapshot{}, kep, 8); !changed {
		t.Error("an emptied snapshot is not reported as changed")
	}
	if diff := cmp.Diff(before, z.String()); diff != "" {
		t.Errorf("the previous zone (-want +have):\n%s", diff)
	}
}

func TestStrings(t *testing.T) {
	t.Parallel()
	want := `A NS SOA PTR HINFO TXT AAAA SRV IXFR AXFR ANY TYPE65 NOERROR NXDOMAIN REFUSED RCODE09 . a\.b\\.\000\032.c.`
	have := fmt.Sprint(A, " ", NS, " ", SOA, " ", PTR, " ", HINFO, " ", TXT, " ", AAAA, " ", SRV, " ", IXFR, " ", AXFR, " ", ANY, " ", Type(65), " ",
		NoError, " ", NameError, " ", Refused, " ", Rcode(9), " ", Text("\x00"), " ", Text(wireName(`a.b\`, "\x00 ", "c")))
	if have != want {
		t.Errorf("have %s, want %s", have, want)
	}
}
