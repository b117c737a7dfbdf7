package offers_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

var fed = clusterset.ServiceName{Namespace: "demo", Name: "fed"}

// offer returns an offer of a cluster, created age after born, with ports such as "http 80/TCP" or "80/TCP".
func offer(cluster string, age time.Duration, ports ...string) offers.Offer {
	o := offers.Offer{Export: clusterset.Export{
		Cluster: clusterset.ClusterID(cluster), Service: clusterset.ServiceName{Namespace: "demo", Name: "web-" + cluster},
		ExportedAt: born.Add(age), Families: []clusterset.Family{clusterset.IPv4},
	}}
	protocols := map[string]clusterset.Protocol{"TCP": clusterset.TCP, "UDP": clusterset.UDP, "SCTP": clusterset.SCTP}
	for _, text := range ports {
		var p clusterset.Port
		name, number, ok := strings.Cut(text, " ")
		if !ok {
			name, number = "", text
		}
		n, protocol, _ := strings.Cut(number, "/")
		if _, err := fmt.Sscan(n, &p.Port); err != nil {
			panic(err)
		}
		p.Name, p.Protocol = name, protocols[protocol]
		o.Ports = append(o.Ports, p)
	}
	return o
}

// The first offer stays first until it goes. Ages are by the clocks of other clusters.
func TestKeepFirst(t *testing.T) {
	a, b, late := offer("a", 5, "http 80/TCP"), offer("b", 6, "web 80/TCP"), offer("c", -3600, "evil 80/TCP")
	for name, tc := range map[string]struct {
		all   []offers.Offer
		marks []string
		want  string
	}{
		"no Service yet":             {[]offers.Offer{a, b}, nil, "a/demo/web-a"},
		"a clock that is behind":     {[]offers.Offer{a, b, late}, []string{"a/demo/web-a", "a/demo/web-a", ""}, "a/demo/web-a"},
		"and nothing was first":      {[]offers.Offer{a, b, late}, []string{"", ""}, "c/demo/web-c"},
		"the first one is gone":      {[]offers.Offer{b, late}, []string{"a/demo/web-a"}, "c/demo/web-c"},
		"after a partition":          {[]offers.Offer{a, b, late}, []string{"a/demo/web-a", "b/demo/web-b", "b/demo/web-b"}, "b/demo/web-b"},
		"after one, as often":        {[]offers.Offer{a, b, late}, []string{"b/demo/web-b", "a/demo/web-a"}, "a/demo/web-a"},
		"marks of what is not there": {[]offers.Offer{a, b}, []string{"x/demo/web-x", "x/demo/web-x", "b/demo/web-b"}, "b/demo/web-b"},
	} {
		t.Run(name, func(t *testing.T) {
			all := slices.Clone(tc.all)
			offers.KeepFirst(all, tc.marks)
			if got := offers.Merge(all).First; got != tc.want {
				t.Errorf("%s is first, want %s", got, tc.want)
			}
			kept := offer("z", 0, "kept 80/TCP") // of a cluster that is held back: its slices serve these ports
			kept.ExportedAt = time.Time{}
			if got := offers.Merge(append(all, kept)).Ports[0].Name; got != "kept" {
				t.Errorf("port %s, want that of the kept slices", got)
			}
		})
	}
}

func TestMergePorts(t *testing.T) {
	a := offer("a", 0, "http 80/TCP")
	for name, tc := range map[string]struct {
		all       []offers.Offer
		want      []string
		conflicts []string // "cluster port"
	}{
		"one":                             {[]offers.Offer{a}, []string{"http 80/TCP"}, nil},
		"the same":                        {[]offers.Offer{a, offer("b", 1, "http 80/TCP")}, []string{"http 80/TCP"}, nil},
		"another name for the same port":  {[]offers.Offer{a, offer("b", 1, "web 80/TCP")}, []string{"http 80/TCP"}, nil},
		"no name for the same port":       {[]offers.Offer{offer("b", -1, "80/TCP"), a}, []string{"80/TCP"}, nil},
		"one more port":                   {[]offers.Offer{a, offer("b", 1, "http 80/TCP", "metrics 9090/TCP")}, []string{"http 80/TCP", "metrics 9090/TCP"}, nil},
		"several ports all have names":    {[]offers.Offer{offer("a", 0, "80/TCP"), offer("b", 1, "tcp-80 81/TCP")}, []string{"tcp-80x 80/TCP", "tcp-80 81/TCP"}, nil},
		"both protocols of one Service":   {[]offers.Offer{offer("a", 0, "dns 53/UDP", "dns-tcp 53/TCP")}, []string{"dns 53/UDP", "dns-tcp 53/TCP"}, nil},
		"another protocol for a number":   {[]offers.Offer{offer("b", 1, "web 80/UDP"), a}, []string{"http 80/TCP"}, []string{"b 80/UDP"}},
		"another protocol for a name":     {[]offers.Offer{a, offer("b", 1, "http 81/UDP")}, []string{"http 80/TCP"}, []string{"b 81/UDP"}},
		"another number for a name":       {[]offers.Offer{a, offer("b", 1, "http 81/TCP")}, []string{"http 80/TCP"}, []string{"b 81/TCP"}},
		"the older one wins":              {[]offers.Offer{a, offer("b", -1, "http 80/UDP")}, []string{"http 80/UDP"}, []string{"a 80/TCP"}},
		"of the same age, the lower id":   {[]offers.Offer{offer("b", 0, "http 80/UDP"), a}, []string{"http 80/TCP"}, []string{"b 80/UDP"}},
		"the rest of a member in dispute": {[]offers.Offer{a, offer("b", 1, "http 80/UDP", "metrics 9090/TCP")}, []string{"http 80/TCP", "metrics 9090/TCP"}, []string{"b 80/UDP"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := offers.Merge(tc.all)
			var ports, conflicts []string
			for _, p := range got.Ports {
				ports = append(ports, strings.TrimSpace(fmt.Sprintf("%s %d/%s", p.Name, p.Port, p.Protocol)))
			}
			for _, c := range got.Conflicts {
				conflicts = append(conflicts, fmt.Sprintf("%s %d/%s", c.Cluster, c.Port.Port, c.Port.Protocol))
				if m := c.Message(); !strings.Contains(m, string(c.Cluster)) || !strings.Contains(m, c.Service.String()) || !strings.Contains(m, c.By.String()) {
					t.Errorf("message %q names not both sides", m)
				}
			}
			if diff := cmp.Diff(tc.want, ports); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(tc.conflicts, conflicts); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func genOffers(t *rapid.T) []offers.Offer {
	var all []offers.Offer
	for i := range rapid.IntRange(1, 4).Draw(t, "offers") {
		var ports []string
		for j, n := range rapid.SliceOfNDistinct(rapid.IntRange(1, 4), 1, 3, rapid.ID).Draw(t, "ports") {
			name := rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "name")
			ports = append(ports, fmt.Sprintf("%s%d %d/%s", name, j, n, rapid.SampledFrom([]string{"TCP", "UDP"}).Draw(t, "protocol")))
		}
		o := offer(string(rune('a'+i)), time.Duration(rapid.IntRange(0, 2).Draw(t, "age")), ports...)
		o.Families = rapid.SampledFrom([][]clusterset.Family{{clusterset.IPv4}, {clusterset.IPv6}, {clusterset.IPv6, clusterset.IPv4}}).Draw(t, "families")
		all = append(all, o)
	}
	return all
}

func TestMergeIgnoresOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := genOffers(t)
		want := offers.Merge(all)
		if diff := cmp.Diff(want, offers.Merge(rapid.Permutation(all).Draw(t, "order"))); diff != "" {
			t.Fatal(diff)
		}
		names, numbers := map[string]bool{}, map[string]bool{}
		for _, p := range want.Ports {
			number := fmt.Sprint(p.Port, p.Protocol)
			if names[p.Name] || numbers[number] {
				t.Fatalf("%v repeats a name or a number", want.Ports)
			}
			names[p.Name], numbers[number] = true, true
		}
		for _, o := range all {
			for _, p := range o.Ports { // a port is served, or a conflict reports it
				lost := slices.ContainsFunc(want.Conflicts, func(c offers.Conflict) bool { return c.Cluster == o.Cluster && c.Port == p })
				if served := numbers[fmt.Sprint(p.Port, p.Protocol)]; !served && !lost {
					t.Fatalf("port %v of %s is neither served nor in conflict", p, o.Cluster)
				}
			}
		}
	})
}

// crowd returns an offer of n endpoints.
func crowd(n int) offers.Offer {
	o := offer("a", 0, "http 80/TCP")
	g := offers.Group{Name: "s", Family: clusterset.IPv4, Targets: []offers.Target{{Port: o.Ports[0], Number: 8080}}}
	for i := range n {
		g.Endpoints = append(g.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)}})
	}
	o.Groups = []offers.Group{g}
	return o
}

// contents returns the name and the addresses of each slice.
func contents(o offers.Offer) map[string][]string {
	got := map[string][]string{}
	for _, es := range offers.Merge([]offers.Offer{o}).Slices(fed, o) {
		var addresses []string
		for _, e := range es.Endpoints {
			addresses = append(addresses, e.Addresses[0])
		}
		got[es.Name] = addresses
	}
	return got
}

func TestSlicesAreSmallCompleteAndStable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 600).Draw(t, "endpoints")
		o := crowd(n)
		slices.Reverse(o.Groups[0].Endpoints)
		before, total := contents(crowd(n)), 0
		if diff := cmp.Diff(before, contents(o)); diff != "" {
			t.Fatalf("the order of endpoints matters: %s", diff)
		}
		for name, addresses := range before {
			if total += len(addresses); len(addresses) > 100 || len(addresses) == 0 {
				t.Fatalf("slice %s has %d endpoints", name, len(addresses))
			}
		}
		if total != n {
			t.Fatalf("%d of %d endpoints are in a slice", total, n)
		}
		after, same := contents(crowd(n+1)), 0
		for name, addresses := range after {
			if slices.Equal(before[name], addresses) {
				same++
			}
		}
		if same < len(before)-1 {
			t.Fatalf("one more endpoint leaves %d of %d slices alone", same, len(before))
		}
	})
}

func TestSliceNamesItsSource(t *testing.T) {
	o := crowd(3)
	all := offers.Merge([]offers.Offer{o}).Slices(fed, o)
	if len(all) != 1 {
		t.Fatalf("%d slices", len(all))
	}
	es := all[0]
	want := map[string]string{
		"kubernetes.io/service-name": "fed", "endpointslice.kubernetes.io/managed-by": "federation.isthmus.dev",
		"cluster.federated.antreaplus.vmware-tanzu.com": "a",
	}
	if !maps.Equal(es.Labels, want) || es.Annotations["cluster.federated.antreaplus.vmware-tanzu.com"] != "a" || es.Namespace != "demo" {
		t.Errorf("it is %s/%s with labels %v and annotations %v", es.Namespace, es.Name, es.Labels, es.Annotations)
	}
	conformance.Holds(t, "F21")
}

func TestConflictingPortHasNoEndpoints(t *testing.T) {
	old, young := offer("a", 0, "http 80/TCP"), crowd(1)
	young.Cluster, young.ExportedAt = "b", born.Add(1)
	young.Ports[0].Protocol = clusterset.UDP
	young.Groups[0].Targets[0].Port = young.Ports[0]
	if all := offers.Merge([]offers.Offer{old, young}).Slices(fed, young); len(all) > 0 {
		t.Errorf("UDP endpoints stand behind a TCP port: %v", all)
	}
}
