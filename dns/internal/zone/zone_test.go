package zone

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const soaLine = "clusterset.local. 5 IN SOA ns.dns.clusterset.local. hostmaster.clusterset.local. 7 7200 1800 86400 5"

// world holds one service of each kind that answers differently.
func world() *clusterset.Snapshot {
	addrs := func(list ...string) (out []netip.Addr) {
		for _, s := range list {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	vip := func(namespace, name string, ips ...string) clusterset.Service {
		return clusterset.Service{Import: clusterset.Import{
			Service: clusterset.ServiceName{Namespace: namespace, Name: name},
			Type:    clusterset.ClusterSetIP,
			IPs:     addrs(ips...),
			Ports:   []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
		}}
	}
	headless := func(namespace, name string, slices ...clusterset.Slice) clusterset.Service {
		return clusterset.Service{
			Import: clusterset.Import{
				Service: clusterset.ServiceName{Namespace: namespace, Name: name},
				Type:    clusterset.Headless,
			},
			Slices: slices,
		}
	}
	slice := func(cluster clusterset.ClusterID, ready bool, ips ...string) clusterset.Slice {
		s := clusterset.Slice{Cluster: cluster}
		for _, a := range addrs(ips...) {
			s.Family = clusterset.FamilyOf(a)
			s.Endpoints = append(s.Endpoints, clusterset.Endpoint{Addrs: []netip.Addr{a}, Ready: ready})
		}
		return s
	}
	noPorts := vip("demo", "portless", "243.0.0.9")
	noPorts.Ports = nil
	return &clusterset.Snapshot{Services: []clusterset.Service{
		headless("db", "asleep", slice("a", false, "10.1.0.1")),
		headless("db", "pg", slice("a", true, "10.1.0.2", "10.1.0.1"), slice("b", true, "10.2.0.1", "10.1.0.1"), slice("b", false, "10.2.0.2")),
		headless("db", "six", slice("a", true, "fd00:1::1")),
		vip("demo", "hello", "243.0.0.1", "fd00:243::1"),
		noPorts,
		vip("demo", "v4", "243.0.0.2"),
		vip("demo", "waiting"),
		vip("lonely", "waiting"),
	}}
}

// show writes an answer the way dig would: the rcode, the answer's lines, the authority's line.
func show(a Answer) string {
	lines := []string{a.Rcode.String()}
	for _, r := range a.Records {
		lines = append(lines, r.String())
	}
	if a.Authority != nil {
		lines = append(lines, "authority: "+a.Authority.String())
	}
	return strings.Join(lines, "\n")
}

func TestLookup(t *testing.T) {
	t.Parallel()
	z, problems := Build(world(), 7, []netip.Addr{netip.MustParseAddr("169.254.20.53"), netip.MustParseAddr("fd00::53")})
	if len(problems) != 0 {
		t.Fatalf("problems: %v", problems)
	}
	noData := "NOERROR\nauthority: " + soaLine
	nxDomain := "NXDOMAIN\nauthority: " + soaLine
	const hello = "hello.demo.svc.clusterset.local."
	tests := map[string]struct {
		name string
		typ  Type
		want string
	}{
		"apex SOA":                     {Origin, SOA, "NOERROR\n" + soaLine},
		"apex NS":                      {Origin, NS, "NOERROR\nclusterset.local. 5 IN NS ns.dns.clusterset.local."},
		"apex other type":              {Origin, TXT, noData},
		"name server v4":               {"ns.dns." + Origin, A, "NOERROR\nns.dns.clusterset.local. 5 IN A 169.254.20.53"},
		"name server v6":               {"ns.dns." + Origin, AAAA, "NOERROR\nns.dns.clusterset.local. 5 IN AAAA fd00::53"},
		"name server other type":       {"ns.dns." + Origin, TXT, noData},
		"schema version":               {"dns-version." + Origin, TXT, "NOERROR\n" + `dns-version.clusterset.local. 28800 IN TXT "1.0.0"`},
		"schema version other type":    {"dns-version." + Origin, A, noData},
		"empty dns":                    {"dns." + Origin, A, noData},
		"empty svc":                    {"svc." + Origin, A, noData},
		"empty namespace":              {"demo.svc." + Origin, AAAA, noData},
		"namespace of unready only":    {"lonely.svc." + Origin, A, noData},
		"unknown namespace":            {"nobody.svc." + Origin, A, nxDomain},
		"vip v4":                       {hello, A, "NOERROR\n" + hello + " 5 IN A 243.0.0.1"},
		"vip v6":                       {hello, AAAA, "NOERROR\n" + hello + " 5 IN AAAA fd00:243::1"},
		"vip without that family":      {"v4.demo.svc." + Origin, AAAA, noData},
		"vip without ports":            {"portless.demo.svc." + Origin, A, "NOERROR\nportless.demo.svc.clusterset.local. 5 IN A 243.0.0.9"},
		"import without an IP yet":     {"waiting.demo.svc." + Origin, A, noData},
		"other type of a service":      {hello, 15, noData},
		"unknown service":              {"nobody.demo.svc." + Origin, A, nxDomain},
		"below a service":              {"a." + hello, A, nxDomain},
		"cluster-named form is absent": {"a.hello.demo.svc." + Origin, A, nxDomain},
		"any of a name":                {hello, ANY, "NOERROR\n" + hello + ` 5 IN HINFO "RFC8482" ""`},
		"any of no name":               {"nobody.demo.svc." + Origin, ANY, nxDomain},
		"headless, deduplicated": {"pg.db.svc." + Origin, A, "NOERROR\npg.db.svc.clusterset.local. 5 IN A 10.1.0.1\n" +
			"pg.db.svc.clusterset.local. 5 IN A 10.1.0.2\npg.db.svc.clusterset.local. 5 IN A 10.2.0.1"},
		"headless other family":       {"pg.db.svc." + Origin, AAAA, noData},
		"headless v6":                 {"six.db.svc." + Origin, AAAA, "NOERROR\nsix.db.svc.clusterset.local. 5 IN AAAA fd00:1::1"},
		"headless with none ready":    {"asleep.db.svc." + Origin, A, nxDomain},
		"zone transfer":               {Origin, AXFR, "REFUSED"},
		"incremental zone transfer":   {Origin, IXFR, "REFUSED"},
		"outside the zone":            {"hello.demo.svc.cluster.local.", A, "REFUSED"},
		"the root":                    {".", A, "REFUSED"},
		"parent":                      {"local.", SOA, "REFUSED"},
		"sibling with the same end":   {"xclusterset.local.", A, "REFUSED"},
		"label with a dot inside":     {`x\.clusterset.local.`, A, "REFUSED"},
		"label ending in a backslash": {`x\\.clusterset.local.`, A, nxDomain},
		"escaped service dot":         {`hello\.demo.svc.clusterset.local.`, A, nxDomain},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, show(z.Lookup(tc.name, tc.typ))); diff != "" {
				t.Errorf("%s %s (-want +have):\n%s", tc.name, tc.typ, diff)
			}
		})
	}
}

// Two worlds are the same exactly when their zones are.
func TestSame(t *testing.T) {
	t.Parallel()
	changes := map[string]func(w *clusterset.Snapshot){
		"nothing":                        func(*clusterset.Snapshot) {},
		"a port of a VIP":                func(w *clusterset.Snapshot) { w.Services[3].Ports[0].Port++ },
		"an endpoint of a VIP":           func(w *clusterset.Snapshot) { w.Services[3].Slices = w.Services[1].Slices },
		"the VIP":                        func(w *clusterset.Snapshot) { w.Services[3].IPs[0] = w.Services[3].IPs[0].Next() },
		"one VIP less":                   func(w *clusterset.Snapshot) { w.Services[3].IPs = w.Services[3].IPs[:1] },
		"a name":                         func(w *clusterset.Snapshot) { w.Services[3].Service.Name = "hi" },
		"a type":                         func(w *clusterset.Snapshot) { w.Services[0].Type = clusterset.ClusterSetIP },
		"a Service less":                 func(w *clusterset.Snapshot) { w.Services = w.Services[:7] },
		"an endpoint that becomes ready": func(w *clusterset.Snapshot) { w.Services[0].Slices[0].Endpoints[0].Ready = true },
		"an endpoint's address":          func(w *clusterset.Snapshot) { w.Services[2].Slices[0].Endpoints[0].Addrs = w.Services[3].IPs[1:] },
		"one that is not ready":          func(w *clusterset.Snapshot) { w.Services[0].Slices[0].Endpoints = nil },
	}
	text := func(w *clusterset.Snapshot) string {
		z, _ := Build(w, 1, nil)
		return z.String()
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before, after := world(), world()
			change(after)
			if have, want := Same(before, after), text(before) == text(after); have != want {
				t.Errorf("Same says %t, the zones are equal: %t", have, want)
			}
		})
	}
}

func TestBuildSkipsWhatCannotBeNamed(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 64)
	s := &clusterset.Snapshot{}
	for _, n := range []clusterset.ServiceName{
		{Namespace: "demo", Name: "a.b"},
		{Namespace: "demo", Name: "hello"},
		{Namespace: "demo", Name: long},
		{Namespace: "", Name: "nowhere"},
		{Namespace: "demo", Name: `back\slash`},
	} {
		s.Services = append(s.Services, clusterset.Service{Import: clusterset.Import{
			Service: n, Type: clusterset.ClusterSetIP, IPs: []netip.Addr{netip.MustParseAddr("243.0.0.1")},
		}})
	}
	z, problems := Build(s, 1, nil)
	var have []string
	for _, p := range problems {
		have = append(have, p.Service.String())
	}
	want := []string{"demo/a.b", "demo/" + long, "/nowhere", `demo/back\slash`}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("services left out (-want +have):\n%s", diff)
	}
	if got := show(z.Lookup("hello.demo.svc."+Origin, A)); !strings.Contains(got, "243.0.0.1") {
		t.Errorf("a bad neighbour cost hello its record: %s", got)
	}
}

func TestZoneString(t *testing.T) {
	t.Parallel()
	s := world()
	s.Services = s.Services[3:4] // demo/hello
	z, _ := Build(s, 7, nil)
	want := soaZone + `; demo.svc.clusterset.local.
dns-version.clusterset.local. 28800 IN TXT "1.0.0"
; dns.clusterset.local.
hello.demo.svc.clusterset.local. 5 IN A 243.0.0.1
hello.demo.svc.clusterset.local. 5 IN AAAA fd00:243::1
; ns.dns.clusterset.local.
; svc.clusterset.local.
`
	if diff := cmp.Diff(want, z.String()); diff != "" {
		t.Errorf("zone file (-want +have):\n%s", diff)
	}
	if z.Len() != 5 || z.Serial() != 7 {
		t.Errorf("have %d records, serial %d; want 5 and 7", z.Len(), z.Serial())
	}
}

const soaZone = "clusterset.local. 5 IN NS ns.dns.clusterset.local.\n" + soaLine + "\n"

// TestParentsExist holds the law of RFC 8020: a name below which something exists does exist.
func TestParentsExist(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		label := rapid.StringMatching(`[a-z]{1,2}`)
		s := &clusterset.Snapshot{}
		for i := range rapid.IntRange(0, 20).Draw(t, "services") {
			s.Services = append(s.Services, clusterset.Service{Import: clusterset.Import{
				Service: clusterset.ServiceName{Namespace: label.Draw(t, "namespace"), Name: label.Draw(t, "name")},
				Type:    clusterset.ServiceType(rapid.IntRange(1, 2).Draw(t, "type")),
				IPs:     []netip.Addr{netip.AddrFrom4([4]byte{243, 0, 0, byte(i)})},
			}})
		}
		z, _ := Build(s, 1, nil)
		for name := range z.names {
			for parent := name; parent != Origin; {
				_, parent, _ = strings.Cut(parent, ".")
				if a := z.Lookup(parent, TXT); a.Rcode != NoError {
					t.Fatalf("%s exists, its parent %s is %s", name, parent, a.Rcode)
				}
			}
		}
	})
}

func TestStrings(t *testing.T) {
	t.Parallel()
	want := "A NS SOA HINFO TXT AAAA IXFR AXFR ANY TYPE65 NOERROR NXDOMAIN REFUSED RCODE9"
	have := fmt.Sprint(A, NS, SOA, HINFO, TXT, AAAA, IXFR, AXFR, ANY, Type(65), NoError, NameError, Refused, Rcode(9))
	if have != want {
		t.Errorf("have %s, want %s", have, want)
	}
}
