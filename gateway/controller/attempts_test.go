package controller

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// attempt is what a tenant writes in a namespace of her own to take, read, freeze or exhaust what another tenant has.
type attempt func(a *attempts) []client.Object

// attempts are two tenants' namespaces beside each other: the one of the victims is the testbed's.
type attempts struct {
	*testbed

	tenant string // the other namespace
	round  int

	list, v6, public, floating string // addresses of the victims: of a list, and of Neutron with a floating IP
	port, floatingID           string // of the latter
	versions, annotated        map[string]string
}

var victims = []string{"list", "public"}

func newAttempts(t *testing.T) *attempts {
	t.Helper()
	a := &attempts{testbed: newAPITestbed(t), versions: map[string]string{}, annotated: map[string]string{}}
	settings := testSettings()
	settings.Pools[1].Addresses = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/28"), netip.MustParsePrefix("2001:db8::/124")}
	settings.Pools[1].AddressesPerNamespace = 4
	a.startWith(settings, nil)
	a.noError(a.Sync(t.Context()))
	a.create(a.newService("list", inList, 80), a.newService("public", nil, 80))
	for _, name := range victims {
		a.create(a.endpointSlice(name, []int32{80}, a.endpoint()))
	}
	a.refresh()
	at := addresses(a.get("list"))
	a.list, a.v6 = at[0], at[1]
	a.floating, a.port = addresses(a.get("public"))[0], a.get("public").Annotations[service.AnnotationPort]
	all, err := a.cloud.AllFloatingIPs(t.Context())
	a.noError(err)
	for _, f := range all {
		if f.Addr.String() == a.floating {
			a.floatingID, a.public = f.ID, f.Fixed.String()
		}
	}
	for _, name := range victims {
		a.versions[name], a.annotated[name] = a.get(name).ResourceVersion, fmt.Sprint(a.get(name).Annotations, addresses(a.get(name)))
	}
	a.tenant = a.addNamespace()
	return a
}

func (a *attempts) endpoint() string { return fmt.Sprintf("10.1.0.%d", 1+a.round%250) }

// service returns a Service of the hostile tenant.
func (a *attempts) service(name string, change ...func(*corev1.Service)) (s *corev1.Service) {
	a.as(a.tenant, func() { s = a.newService(name, nil, 443) })
	s.UID = ""
	for _, c := range change {
		c(s)
	}
	return s
}

// asks returns an attempt by one Service with annotations, pairs of keys and values in which {…} stands for what the victims have.
func asks(keysAndValues ...string) attempt {
	return func(a *attempts) []client.Object {
		has := strings.NewReplacer("{list}", a.list, "{v6}", a.v6, "{public}", a.public, "{floating}", a.floating, "{id}", a.floatingID, "{port}", a.port,
			"{LIST6}", strings.ToUpper(a.v6), "{namespace}", a.ns)
		return []client.Object{a.service("x", func(s *corev1.Service) {
			for i := 0; i < len(keysAndValues); i += 2 {
				annotation(keysAndValues[i], has.Replace(keysAndValues[i+1]))(s)
			}
		})}
	}
}

// edited returns an attempt by one Service.
func edited(change func(a *attempts, s *corev1.Service)) attempt {
	return func(a *attempts) []client.Object {
		return []client.Object{a.service("x", func(s *corev1.Service) { change(a, s) })}
	}
}

// sliced returns an attempt by a Service and a wrong EndpointSlice.
func sliced(change func(*discoveryv1.EndpointSlice)) attempt {
	return func(a *attempts) (all []client.Object) {
		a.as(a.tenant, func() {
			slice := a.endpointSlice("x", []int32{443}, "10.1.9.9")
			change(slice)
			all = []client.Object{a.service("x"), slice}
		})
		return all
	}
}

// many returns an attempt by many Services.
func many(n int, change func(*corev1.Service)) attempt {
	return func(a *attempts) (all []client.Object) {
		for i := range n {
			all = append(all, a.service(fmt.Sprintf("x-%d", i), change))
		}
		return all
	}
}

const (
	listPool = service.AnnotationPool
	named    = service.AnnotationAddresses
	numbered = service.AnnotationPort
	floats   = service.AnnotationFloatingIP
	shares   = service.AnnotationSharing
)

// hostileAttempts are what a tenant tries.
var hostileAttempts = map[string]attempt{
	"take an address by its port":               asks(listPool, "list", numbered, "{list}"),
	"take a pair of addresses by its port":      asks(listPool, "list", numbered, "{list}_{v6}"),
	"take an address by its port in upper case": asks(listPool, "list", numbered, "{LIST6}"),
	"take an address by name":                   asks(listPool, "list", named, "{list}"),
	"take both addresses by name":               asks(listPool, "list", named, "{list},{v6}"),
	"take an address by name with blanks":       asks(listPool, "list", named, " {list} "),
	"take an address without its pool":          asks(named, "{list}"),
	"take a floating IP by address":             asks(floats, "{floating}"),
	"take a floating IP by id":                  asks(floats, "{id}"),
	"take a floating IP as an address":          asks(named, "{floating}"),
	"take a fixed address":                      asks(named, "{public}"),
	"take a port of Neutron":                    asks(numbered, "{port}"),
	"take a port without its floating IP":       asks(numbered, "{port}", floats, "none"),
	"take a port for another pool":              asks(listPool, "list", numbered, "{port}"),
	"have a floating IP deleted":                asks(floats, "{floating}", service.AnnotationFloatingIPAfterwards, "delete"),
	"retain a floating IP":                      asks(floats, "{floating}", service.AnnotationFloatingIPAfterwards, "retain"),
	"share with an empty key":                   asks(listPool, "list", named, "{list}", shares, ""),
	"share with a guessed key":                  asks(listPool, "list", named, "{list}", shares, "{namespace}"),
	"agree to nothing":                          asks(service.AnnotationAgree, "0123abcd", named, "{list}"),
	"take the import of another namespace":      asks(service.AnnotationServiceImport, "{namespace}/list"),
	"take an address by loadBalancerIP":         edited(func(a *attempts, s *corev1.Service) { annotation(listPool, "list")(s); s.Spec.LoadBalancerIP = a.list }),
	"take a floating IP by loadBalancerIP":      edited(func(a *attempts, s *corev1.Service) { s.Spec.LoadBalancerIP = a.floating }),
	"take an address by externalIPs":            edited(func(a *attempts, s *corev1.Service) { s.Spec.ExternalIPs = []string{a.list, a.floating} }),
	"take an address by externalIPs, as ours": edited(func(a *attempts, s *corev1.Service) {
		annotation(service.AnnotationExternalIPs, "true")(s)
		s.Spec.ExternalIPs = []string{a.list}
	}),
	"take an address by a finalizer and a port": edited(func(a *attempts, s *corev1.Service) {
		s.Finalizers = []string{service.Finalizer}
		annotation(numbered, a.port)(s)
	}),
	"take an address by the name of the Service": edited(func(a *attempts, s *corev1.Service) { s.Name = "list"; annotation(numbered, a.list)(s) }),
	"take backends by the name of the Service":   edited(func(_ *attempts, s *corev1.Service) { s.Name = "public" }),
	"freeze by port 0":                           sliced(func(s *discoveryv1.EndpointSlice) { s.Ports[0].Port = new(int32(0)) }),
	"freeze by port 65536":                       sliced(func(s *discoveryv1.EndpointSlice) { s.Ports[0].Port = new(int32(65536)) }),
	"freeze by an address that is none":          sliced(func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses = []string{"10.1.0.256"} }),
	"freeze by a loopback address":               sliced(func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses = []string{"127.0.0.1"} }),
	"freeze by the label of another's Service":   sliced(func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = "list" }),
	"freeze by a thousand endpoints":             sliced(func(s *discoveryv1.EndpointSlice) { s.Endpoints = slices.Repeat(s.Endpoints, 1000) }),
	"freeze by source ranges that are none":      edited(func(_ *attempts, s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/33"} }),
	"freeze by SCTP":                             edited(func(_ *attempts, s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolSCTP }),
	"freeze by a family that the pool lacks":     edited(func(_ *attempts, s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol} }),
	"freeze by a pool that is none":              asks(listPool, strings.Repeat("x", 1<<12)),
	"freeze by a floating IP that is none":       asks(floats, "no-such-id"),
	"exhaust by addresses of the list":           many(12, annotation(listPool, "list")),
	"exhaust by ports of one address":            many(6, func(s *corev1.Service) { annotation(listPool, "list")(s); s.Spec.Ports = manyPorts(100) }),
	"exhaust by source ranges":                   edited(func(_ *attempts, s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = manyRanges(2000) }),
	"read by an event about another's Service":   asks(listPool, "list", named, "{list}", shares, "guess"),
	"read by a condition with a record of its own": edited(func(a *attempts, s *corev1.Service) {
		annotation(numbered, a.list)(s)
		s.Annotations[listPool] = "list"
	}),
}

func manyPorts(n int32) (all []corev1.ServicePort) {
	for i := range n {
		all = append(all, corev1.ServicePort{Name: fmt.Sprintf("p%d", i), Protocol: corev1.ProtocolTCP, Port: 1000 + i})
	}
	return all
}

func manyRanges(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprintf("10.%d.%d.0/24", i/250, i%250))
	}
	return all
}

// A tenant with every right on Services and EndpointSlices of one namespace takes, reads, freezes and exhausts nothing that another
// tenant has: its Services are never written, keep their addresses, ports and floating IPs, and gateways follow their endpoints.
func TestAttemptsOfAnotherTenant(t *testing.T) {
	a := newAttempts(t)
	before := a.objects()
	for name, try := range hostileAttempts {
		t.Run(name, func(t *testing.T) {
			had := a.t
			a.t = t
			defer func() { a.t = had }()
			a.events = nil
			var written []client.Object
			for _, o := range try(a) {
				var refused apierrors.APIStatus
				if err := a.api.Create(t.Context(), o); err == nil {
					written = append(written, o)
				} else if !errors.As(err, &refused) {
					t.Fatal(err)
				}
			}
			a.round++
			for _, victim := range victims {
				a.setEndpoints(victim, a.endpoint())
			}
			_ = errors.Join(a.Refresh(t.Context()), a.converge())
			a.unharmed()
			a.kept(written)
			a.silent(written)
			if strings.HasPrefix(name, "exhaust") {
				a.hasRoom()
			}
			for _, o := range written {
				a.noError(client.IgnoreNotFound(a.api.Delete(t.Context(), o)))
			}
			_ = errors.Join(a.Refresh(t.Context()), a.converge(), a.Clean(t.Context()))
			a.unharmed()
			if diff := cmp.Diff(before, a.objects()); diff != "" {
				t.Errorf("objects in Neutron afterwards (-before +now):\n%s", diff)
			}
		})
	}
}

// kept reports addresses of the victims that a Service of the hostile tenant has got.
func (a *attempts) kept(written []client.Object) {
	a.t.Helper()
	for _, o := range written {
		var s corev1.Service
		if err := a.api.Get(a.t.Context(), client.ObjectKeyFromObject(o), &s); err != nil {
			continue // another kind
		}
		for _, has := range addresses(&s) {
			if slices.Contains([]string{a.list, a.v6, a.public, a.floating}, has) {
				a.t.Errorf("%s of the tenant has %s", s.Name, has)
			}
		}
	}
}

// hasRoom reports whether another Service of the victims gets no address of the list.
func (a *attempts) hasRoom() {
	a.t.Helper()
	a.create(a.newService("later", annotation(listPool, "list"), 80))
	_ = errors.Join(a.Refresh(a.t.Context()), a.converge())
	if have := addresses(a.get("later")); len(have) != 1 {
		a.t.Errorf("a later Service of the victims has %v", have)
	}
	a.remove("later")
}

// objects returns what the victims have in Neutron.
func (a *attempts) objects() []string {
	a.t.Helper()
	ports, floating := a.fake.Objects()
	return slices.Concat(ports, floating)
}

// unharmed reports victims that are served with anything but their endpoints, or were written.
func (a *attempts) unharmed() {
	a.t.Helper()
	for _, name := range victims {
		s := a.get(name)
		if have := fmt.Sprint(s.Annotations, addresses(s)); have != a.annotated[name] || s.ResourceVersion != a.versions[name] {
			a.t.Errorf("%s has %s, before %s; version %s, before %s", name, have, a.annotated[name], s.ResourceVersion, a.versions[name])
		}
		if lines := a.served(name); len(lines) == 0 || !strings.HasSuffix(lines[0], " 80/TCP "+a.endpoint()+":8080") {
			a.t.Errorf("%s is served with %q, want the endpoint %s alone", name, lines, a.endpoint())
		}
	}
}

// silent reports what conditions and events of the hostile tenant's objects say about the other namespace.
func (a *attempts) silent(written []client.Object) {
	a.t.Helper()
	said := slices.Clone(a.events)
	for _, o := range written {
		var s corev1.Service
		if err := a.api.Get(a.t.Context(), client.ObjectKeyFromObject(o), &s); err == nil {
			for _, c := range s.Status.Conditions {
				said = append(said, c.Message)
			}
		}
	}
	for _, text := range said {
		own := strings.Contains(text, "{namespace}") || strings.Contains(text, a.ns+"/list") && strings.Contains(text, service.AnnotationServiceImport)
		if !own && (strings.Contains(text, a.ns+"/") || strings.Contains(text, "namespace "+a.ns) || strings.Contains(text, a.endpoint())) {
			a.t.Errorf("the tenant reads %q", text)
		}
	}
}
