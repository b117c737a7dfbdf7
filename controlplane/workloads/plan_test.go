package workloads

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

func TestPorts(t *testing.T) {
	for text, want := range map[string]string{
		"80":                        "tcp-80:80/TCP=80",
		"http:80":                   "http:80/TCP=80",
		"http:80/tcp=8080":          "http:80/TCP=8080",
		" 53/UDP , dns-tcp:53/TCP ": "udp-53:53/UDP=53 dns-tcp:53/TCP=53",
		"9/SCTP":                    "sctp-9:9/SCTP=9",
		"":                          "not a port from 1 to 65535",
		"0":                         "not a port from 1 to 65535",
		"80=65536":                  `"65536"`,
		"80/ICMP":                   "not TCP, UDP or SCTP",
		"Web:80":                    `"Web" is not a name`,
		":80":                       `"" is not a name`,
		"80,http:80":                "make them different",
		"x:80,x:81":                 "make them different",
	} {
		ports, err := parsePorts(text)
		if got := strings.Trim(fmt.Sprint(ports), "[]"); err == nil && got != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %s, %v; want %s", text, got, err, want)
		}
	}
}

func TestServerLabels(t *testing.T) {
	cloud := CloudSettings{Name: "east", Namespace: "demo", Namespaces: []string{"shop"}, Ports: DefaultPorts}
	for name, tc := range map[string]struct {
		labels string // KEY=VALUE, with blanks between
		server string
		want   string // the Service, or what is in the error; "" if it asks for none
	}{
		"nothing":              {"role=web", "web-1", ""},
		"a Service":            {"svc.antreaplus.vmware.com=web", "web-1", "demo/web"},
		"by our own word":      {"federation.isthmus.dev/machine=web", "web-1", "demo/web"},
		"one of its own":       {"svc.antreaplus.vmware.com=", "web-1", "demo/vm-id-1"},
		"a digit first":        {"svc.antreaplus.vmware.com=9web", "web-1", "demo/9web"},
		"a number":             {"svc.antreaplus.vmware.com=42", "web-1", "demo/42"},
		"a hyphen first":       {"svc.antreaplus.vmware.com=-web", "web-1", "cannot name a Service"},
		"no name of a Service": {"svc.antreaplus.vmware.com=Web", "web-1", "cannot name a Service"},
		"a namespace it may":   {"svc.antreaplus.vmware.com=web svc.antreaplus.vmware.com/namespace=shop", "web-1", "shop/web"},
		"another namespace":    {"svc.antreaplus.vmware.com=web federation.isthmus.dev/machine-namespace=kube-system", "web-1", "may not choose"},
		"ports":                {"svc.antreaplus.vmware.com=web svc.antreaplus.vmware.com/ports=many", "web-1", "svc.antreaplus.vmware.com/ports"},
	} {
		s := Resource{ID: "id-1", Name: tc.server, Labels: map[string]string{}}
		for word := range strings.FieldsSeq(tc.labels) {
			key, value, _ := strings.Cut(word, "=")
			s.Labels[key] = value
		}
		m, ok, err := ofResource(s, source{cloud: "east"}, cloud)
		switch {
		case !ok && tc.want == "":
		case err != nil && tc.want != "" && strings.Contains(err.Error(), tc.want):
		case err != nil || !ok || m.service.String() != tc.want:
			t.Errorf("%s: %s, %t, %v; want %q", name, m.service, ok, err, tc.want)
		}
	}
	conformance.Holds(t, "F10")
}

func TestLoadBalancerLabels(t *testing.T) {
	cloud := CloudSettings{Name: "east", Namespace: "demo", Namespaces: []string{"shop"}, Ports: DefaultPorts}
	for name, tc := range map[string]struct {
		labels map[string]string
		want   string // the Service and its ports, or what is in the error; "" if it asks for none
	}{
		"nothing":            {nil, ""},
		"a Service":          {map[string]string{v1alpha1.MachineServiceAntrea: "web"}, "demo/web [http:81/TCP=81]"},
		"one of its own":     {map[string]string{v1alpha1.MachineService: ""}, "demo/lb-id-1 [http:81/TCP=81]"},
		"a namespace it may": {map[string]string{v1alpha1.MachineServiceAntrea: "web", v1alpha1.MachineNamespace: "shop"}, "shop/web [http:81/TCP=81]"},
		"another namespace":  {map[string]string{v1alpha1.MachineServiceAntrea: "web", v1alpha1.MachineNamespace: "default"}, "load balancers of cloud east may not choose"},
		"ports":              {map[string]string{v1alpha1.MachineServiceAntrea: "web", v1alpha1.MachinePorts: "81=80"}, "are those of its listeners"},
	} {
		r := Resource{ID: "ID-1", Labels: tc.labels, Listeners: []Listener{{Name: "http", Port: 81, Protocol: "TCP"}}}
		m, ok, err := ofResource(r, source{cloud: "east", loadBalancers: true}, cloud)
		switch {
		case !ok && tc.want == "":
		case err != nil && tc.want != "" && strings.Contains(err.Error(), tc.want):
		case err != nil || !ok || fmt.Sprint(m.service, " ", m.ports) != tc.want:
			t.Errorf("%s: %s %v, %t, %v; want %q", name, m.service, m.ports, ok, err, tc.want)
		}
	}
}

func TestListenerPorts(t *testing.T) {
	for name, tc := range map[string]struct {
		listeners []Listener
		want      string
		refused   string // what each reason begins with
	}{
		"none":                      {nil, "[]", "no listener"},
		"by number":                 {[]Listener{{"b", 443, "TCP"}, {"a", 53, "UDP"}, {"c", 53, "TCP"}}, "[c:53/TCP=53 a:53/UDP=53 b:443/TCP=443]", ""},
		"no name of a port":         {[]Listener{{"", 80, "TCP"}, {"Über alles", 81, "TCP"}}, "[tcp-80:80/TCP=80 tcp-81:81/TCP=81]", ""},
		"one name twice":            {[]Listener{{"web", 81, "TCP"}, {"web", 80, "TCP"}}, "[web:80/TCP=80 tcp-81:81/TCP=81]", ""},
		"the name of another":       {[]Listener{{"tcp-81", 80, "TCP"}, {"", 81, "TCP"}}, "[tcp-81:80/TCP=80]", `listener "" is left out: another one has the name tcp-81`},
		"one number twice":          {[]Listener{{"a", 80, "TCP"}, {"b", 80, "TCP"}}, "[a:80/TCP=80]", `listener "b" is left out: another one`},
		"SCTP":                      {[]Listener{{"calls", 5060, "SCTP"}, {"web", 80, "TCP"}}, "[web:80/TCP=80]", `listener "calls" is left out: its protocol is SCTP`},
		"a protocol of the future":  {[]Listener{{"q", 443, "QUIC"}}, "[]", `listener "q" is left out: its protocol is QUIC`},
		"no number of a port":       {[]Listener{{"a", 0, "TCP"}, {"b", 65536, "TCP"}}, "[]", `listener "a" is left out: 0 is not a port; listener "b" is left out: 65536 is not a port`},
		"the first and last number": {[]Listener{{"a", 1, "TCP"}, {"b", 65535, "TCP"}}, "[a:1/TCP=1 b:65535/TCP=65535]", ""},
	} {
		ports, refused := listenerPorts(tc.listeners)
		begins := slices.DeleteFunc(strings.Split(tc.refused, "; "), func(text string) bool { return text == "" })
		if fmt.Sprint(ports) != tc.want || !slices.EqualFunc(refused, begins, strings.HasPrefix) {
			t.Errorf("%s: %v, %q; want %s, %q", name, ports, refused, tc.want, begins)
		}
		other := slices.Clone(tc.listeners)
		slices.Reverse(other)
		if again, _ := listenerPorts(other); fmt.Sprint(again) != tc.want {
			t.Errorf("%s, in another order: %v", name, again)
		}
	}
}

// at returns a machine of the Service demo/web, created that many seconds after an arbitrary time.
func at(second int, addr, ports string) machine {
	parsed, err := parsePorts(ports)
	if err != nil {
		panic(err)
	}
	return machine{
		id: addr, since: time.Unix(int64(second), 0), service: clusterset.ServiceName{Namespace: "demo", Name: "web"}, ports: parsed,
		addrs: []netip.Addr{netip.MustParseAddr(addr)}, ready: true,
	}
}

// The older machine defines a port of the Service. A younger one serves it where it agrees, and reports a problem where it
// does not.
func TestOlderMachineTakesPrecedence(t *testing.T) {
	old, young := at(1, "10.0.0.1", "http:80"), at(2, "10.0.0.2", "web:80=8080,http:81")
	old.annotations = map[string]string{v1alpha1.AnnotationGlobalService: "one"}
	young.annotations = map[string]string{v1alpha1.AnnotationGlobalService: "two"}
	offers := build([]machine{young, old}, nil)
	if len(offers) != 1 || len(offers[0].slices) != 2 || len(offers[0].problems) != 2 {
		t.Fatalf("%+v", offers)
	}
	o := offers[0]
	if diff := cmp.Diff("[http:80/TCP=80]", fmt.Sprint(o.ports)); diff != "" {
		t.Error(diff)
	}
	for _, p := range o.problems {
		if p.of.id != young.id {
			t.Errorf("%s is told %s", p.of, p.text)
		}
	}
	if o.annotations[v1alpha1.AnnotationGlobalService] != "one" {
		t.Errorf("annotations %v", o.annotations)
	}
}

// A name that one owner has by default is not shared with another owner: the younger one's machines are refused, each with a problem. Names that all
// of them chose are.
func TestNamesOfTwoOwners(t *testing.T) {
	byDefault := func(m machine) machine { m.byDefault = true; return m }
	of := func(cloud string, m machine) machine { m.source.cloud = cloud; return m }
	balancer := func(cloud string, m machine) machine { m.source = source{cloud, true}; return m }
	first, second, third := at(1, "10.0.0.1", "80"), at(2, "10.0.0.2", "80"), at(3, "10.0.0.3", "80")
	for name, tc := range map[string]struct {
		machines []machine
		served   string
		refused  string
	}{
		"chosen by all":                 {[]machine{first, of("east", second), of("west", third)}, "10.0.0.1 10.0.0.2 10.0.0.3", ""},
		"by default in one namespace":   {[]machine{byDefault(first), second, third}, "10.0.0.1 10.0.0.2 10.0.0.3", ""},
		"by default, then a cloud's":    {[]machine{byDefault(first), of("east", second), third}, "10.0.0.1 10.0.0.3", "10.0.0.2"},
		"a cloud's, then by default":    {[]machine{of("east", first), byDefault(second), of("east", third)}, "10.0.0.1 10.0.0.3", "10.0.0.2"},
		"a cloud's, then some":          {[]machine{of("east", first), second, byDefault(third)}, "10.0.0.1 10.0.0.2", "10.0.0.3"},
		"with load balancers":           {[]machine{of("east", first), balancer("east", second), balancer("west", third)}, "10.0.0.1 10.0.0.2 10.0.0.3", ""},
		"a balancer's by default":       {[]machine{balancer("east", byDefault(first)), of("east", second), balancer("east", third)}, "10.0.0.1 10.0.0.3", "10.0.0.2"},
		"a server's by default":         {[]machine{of("east", byDefault(first)), balancer("east", second)}, "10.0.0.1", "10.0.0.2"},
		"by default in a cloud, others": {[]machine{of("east", byDefault(first)), of("west", second), of("west", third)}, "10.0.0.1", "10.0.0.2 10.0.0.3"},
	} {
		o := build(tc.machines, nil)[0]
		var served, refused []string
		for _, es := range o.slices {
			for _, e := range es.Endpoints {
				served = append(served, e.Addresses...)
			}
		}
		for _, p := range o.problems {
			if !strings.Contains(p.text, "choose another name") {
				t.Errorf("%s: %s is told %q", name, p.of, p.text)
			}
			refused = append(refused, p.of.id)
		}
		slices.Sort(served)
		if got := strings.Join(served, " "); got != tc.served || strings.Join(refused, " ") != tc.refused {
			t.Errorf("%s: %q are served, %v refused, want %q and %q", name, got, refused, tc.served, tc.refused)
		}
	}
}

// The slices are the same for any order of the machines, and have every address once.
func TestBuildIgnoresOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var machines []machine
		for i := range rapid.IntRange(1, 250).Draw(t, "machines") {
			m := at(rapid.IntRange(1, 3).Draw(t, "second"), fmt.Sprintf("10.0.%d.%d", i/250, i%250+1), rapid.SampledFrom([]string{"80", "http:80=8080", "81"}).Draw(t, "ports"))
			m.source.cloud = rapid.SampledFrom([]string{"", "east"}).Draw(t, "cloud")
			machines = append(machines, m)
		}
		want := build(machines, nil)
		got := build(rapid.Permutation(machines).Draw(t, "order"), nil)
		if diff := cmp.Diff(want[0].slices, got[0].slices); diff != "" {
			t.Fatal(diff)
		}
		addresses := map[string]bool{}
		for _, es := range want[0].slices {
			for _, e := range es.Endpoints {
				addresses[e.Addresses[0]] = true
			}
		}
		if len(addresses) != len(machines) {
			t.Fatalf("%d of %d machines are in slices", len(addresses), len(machines))
		}
	})
}

func TestSlicesAreSmall(t *testing.T) {
	var machines []machine
	for i := range 250 {
		machines = append(machines, at(1, fmt.Sprintf("10.0.0.%d", i+1), "80"))
	}
	var sizes []int
	for _, es := range build(machines, nil)[0].slices {
		sizes = append(sizes, len(es.Endpoints))
	}
	if diff := cmp.Diff([]int{100, 100, 50}, sizes); diff != "" {
		t.Error(diff)
	}
}

func TestInvalidSettings(t *testing.T) {
	s := Settings{Clouds: []CloudSettings{{Name: "east", Namespace: "demo"}, {Name: "east", Namespaces: []string{"Shop"}, Ports: "many"}}}
	err := s.Complete()
	for _, want := range []string{"clouds[1].name", "clouds[1].namespace:", "clouds[1].namespaces:", "clouds[1].ports:"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %s", err, want)
		}
	}
	if s.Clouds[0].Ports != DefaultPorts || s.Clouds[0].Interval.Duration != DefaultInterval {
		t.Errorf("%+v", s.Clouds[0])
	}
}
