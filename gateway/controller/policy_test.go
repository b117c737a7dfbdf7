package controller

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// has fails the test unless a Service has exactly some addresses.
func (w *testbed) has(name string, want ...string) {
	w.t.Helper()
	if have := addresses(w.get(name)); !slices.Equal(have, want) {
		w.t.Errorf("%s has %v, want %v", name, have, want)
	}
}

// A Service gets the address that it asks for, by either field, unless it can not have it: then it is refused, and its
// condition and an event say why.
func TestRequestedAddress(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.Sync(t.Context()))
	ask := func(text string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			annotation(service.AnnotationPool, "list")(s)
			annotation(service.AnnotationAddresses, text)(s)
		}
	}
	w.create(
		w.newService("a", func(s *corev1.Service) {
			annotation(service.AnnotationPool, "list")(s)
			s.Spec.LoadBalancerIP = "192.0.2.10"
		}, 80),
		w.newService("b", ask("192.0.2.10"), 443), w.newService("c", ask("192.0.2.10"), 80), w.newService("d", ask("198.51.100.1"), 25),
		w.newService("e", ask("192.0.2"), 26), w.newService("f", ask("2001:db8::9"), 27),
		w.newService("kept", annotation(service.AnnotationFloatingIPAfterwards, "retain"), 80),
	)
	w.refresh()
	w.has("a", "192.0.2.10")
	w.has("b", "192.0.2.10")
	w.refused("c", service.ReasonInvalid, w.ns+"/a has 192.0.2.10, with one of the same ports")
	w.refused("d", service.ReasonInvalid, "pool list does not have 198.51.100.1")
	w.refused("e", service.ReasonInvalid, `"192.0.2" is not an IP address`)
	w.refused("f", service.ReasonInvalid, "2001:db8::9 is IPv6, which spec.ipFamilies lacks")
	for _, name := range []string{"c", "d", "e", "f"} {
		w.has(name)
	}
	floating := addresses(w.get("kept"))[0]
	w.remove("kept")
	w.create(w.newService("pair", func(s *corev1.Service) { inList(s); ask("2001:db8::a, 192.0.2.9")(s) }, 80))
	w.create(w.newService("floating", func(s *corev1.Service) { s.Spec.LoadBalancerIP = floating }, 80))
	w.refresh()
	w.has("pair", "192.0.2.9", "2001:db8::a")
	w.has("floating", floating)
	w.edit("b", annotation(service.AnnotationAddresses, "192.0.2.9"))
	w.as(w.addNamespace(), func() {
		w.create(w.newService("tenant", ask("192.0.2.10"), 8080))
		w.refresh()
		w.refused("tenant", service.ReasonInvalid, "Services of another namespace have 192.0.2.10")
		w.has("tenant")
	})
	w.has("b", "192.0.2.9")
	w.create(w.newService("both", func(s *corev1.Service) { inList(s); ask("192.0.2.10,2001:db8::9")(s) }, 81))
	w.refresh()
	w.refused("both", service.ReasonInvalid, w.ns+"/a has 192.0.2.10")
	w.recover()
	w.has("a", "192.0.2.10")
	w.has("b", "192.0.2.9")
	w.has("floating", floating)
}

// A Service gets the address of a subnet that it asks for. Addresses which Neutron would not allocate by itself, such as the router's, and
// those of others are refused.
func TestRequestedAddressOfNeutron(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.Sync(t.Context()))
	ask := func(text string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			annotation(service.AnnotationFloatingIP, "none")(s)
			annotation(service.AnnotationAddresses, text)(s)
		}
	}
	dual := func(s *corev1.Service) {
		s.Spec.IPFamilyPolicy, s.Spec.IPFamilies = new(corev1.IPFamilyPolicyRequireDualStack), []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	}
	w.create(
		w.newService("a", ask("10.9.77.7"), 80), w.newService("b", ask("10.9.77.7"), 443),
		w.newService("pair", func(s *corev1.Service) { dual(s); ask("fd09::7707, 10.9.77.8")(s) }, 80),
		w.newService("router", ask(openstacktest.GatewayIP.String()), 80), w.newService("far", ask("203.0.113.9"), 80),
		w.newService("vm", ask(openstacktest.GatewayAddrs[0].String()), 80),
	)
	w.refresh()
	ports, _ := w.fake.Objects()
	w.has("a", "10.9.77.7")
	w.has("b", "10.9.77.7")
	w.has("pair", "10.9.77.8", "fd09::7707")
	w.refused("router", service.ReasonInvalid, "annotation gateway.isthmus.dev/addresses: pool public does not have it: ")
	w.refused("far", service.ReasonInvalid, "203.0.113.9 is not in its allocation pools, 10.9.0.2-10.9.255.254")
	w.refused("vm", service.ReasonInvalid, "10.9.255.1 already allocated")
	if len(ports) != 2 {
		t.Errorf("ports %v", ports)
	}
	w.as(w.addNamespace(), func() {
		w.create(w.newService("tenant", ask("10.9.77.7"), 8080))
		w.refresh()
		w.refused("tenant", service.ReasonInvalid, "Services of another namespace have 10.9.77.7")
		w.remove("tenant")
	})
	w.recover()
	w.has("a", "10.9.77.7")
	w.edit("a", annotation(service.AnnotationAddresses, "10.9.77.9"))
	w.refresh()
	w.has("a", "10.9.77.9")
	w.has("b", "10.9.77.7")
	w.remove("b")
	w.create(w.newService("again", ask("10.9.77.7"), 80))
	w.refresh()
	w.has("again", "10.9.77.7")
}

// A Service that OpenStack refuses keeps saying why, however often and late it is asked for again.
func TestRefusalStays(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("taken", func(s *corev1.Service) {
		annotation(service.AnnotationFloatingIP, "none")(s)
		annotation(service.AnnotationAddresses, openstacktest.GatewayAddrs[0].String())(s)
	}, 80))
	w.refresh()
	w.refused("taken", service.ReasonInvalid, "already allocated")
	w.now = func() time.Time { return time.Now().Add(waitingNotice) }
	before := w.writes.Load()
	w.refresh()
	w.refused("taken", service.ReasonInvalid, "already allocated")
	if n := w.writes.Load() - before; n > 0 {
		t.Errorf("%d writes for nothing new", n)
	}
}

// gold returns settings with a pool for some namespaces and Services before the others.
func gold() Settings {
	s := testSettings()
	s.Pools = append([]Pool{{
		Name: "gold", Announce: desired.ByBGP, Return: desired.SNAT, Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/29")},
		Namespaces: &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "gold"}}, AddressesPerNamespace: 1,
		Services: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "internal", Operator: metav1.LabelSelectorOpDoesNotExist}}},
	}}, s.Pools[1])
	return s
}

// A pool gives addresses to the namespaces and Services that it selects. The others get the next pool, or are refused if they
// name it. Changed labels take nothing.
func TestPoolSelectors(t *testing.T) {
	w := newAPITestbed(t)
	w.startWith(gold(), nil)
	w.noError(w.Sync(t.Context()))
	named := annotation(service.AnnotationPool, "gold")
	w.create(w.newService("default", nil, 80), w.newService("named", named, 443))
	w.refresh()
	w.has("default", "192.0.2.9")
	w.refused("named", service.ReasonInvalid, "pool gold does not select this Service")
	w.has("named")
	w.as(w.addNamespace(), func() {
		label := func(tier string) {
			ns := &corev1.Namespace{}
			ns.Name = w.ns
			ns.Labels = map[string]string{"tier": tier}
			w.noError(w.api.Update(t.Context(), ns))
		}
		label("gold")
		w.create(w.newService("default", nil, 80), w.newService("named", named, 443), w.newService("internal", func(s *corev1.Service) { s.Labels = map[string]string{"internal": ""} }, 80))
		w.refresh()
		check := func() {
			t.Helper()
			w.has("default", "198.51.100.1")
			w.has("named", "198.51.100.1")
			w.has("internal", "192.0.2.10")
		}
		check()
		label("silver")
		w.recoverWith(gold())
		check()
	})
}

// A namespace has no more addresses of a pool than the pool gives it. Its Services share them; another namespace has its own.
func TestNamespaceQuota(t *testing.T) {
	w := newAPITestbed(t)
	settings := gold()
	settings.Pools[0].Namespaces = nil
	w.startWith(settings, nil)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", nil, 80), w.newService("b", nil, 443), w.newService("c", nil, 80))
	_ = w.converge()
	w.has("a", "198.51.100.1")
	w.has("b", "198.51.100.1")
	w.has("c")
	w.refused("c", service.ReasonQuotaExceeded, "its Services have 1 addresses, and may have 1")
	w.as(w.addNamespace(), func() {
		w.create(w.newService("a", nil, 80))
		_ = w.converge()
		w.has("a", "198.51.100.2")
	})
	w.remove("a")
	_ = w.converge()
	w.refresh()
	w.has("c", "198.51.100.1")
}

// The settings refuse selectors and quotas that are none.
func TestInvalidPolicies(t *testing.T) {
	s := gold()
	s.Pools[0].Namespaces.MatchLabels = map[string]string{"a b": ""}
	s.Pools[0].Services.MatchExpressions[0].Operator = "Like"
	s.Pools[0].AddressesPerNamespace = -1
	s.Pools = append(s.Pools, Pool{Name: "vrrp", Announce: desired.ByBGP, VRRP: &VRRPPool{RouterID: 255}})
	s.Pools[0].Announce, s.Pools[0].BGP = desired.ByVRRP, &desired.Route{Communities: []string{"no-export", "70000:1"}}
	err := s.Complete()
	for _, text := range []string{
		"pools[0].namespaces: ", "pools[0].services: ", "pools[0].addressesPerNamespace is -1", `pools[0].bgp is set, but announce is "vrrp"`,
		`pools[0].bgp.communities[1] is "70000:1"`, `vrrp is set, but announce is "bgp"`, "vrrp.routerID is 255",
	} {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%v does not say %q", err, text)
		}
	}
}
