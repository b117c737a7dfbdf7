package broker_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// Readiness, hostname, zone, node and hints of an endpoint are the same in every member, also after changes. References
// that are valid only in their own cluster are dropped.
func TestEndpointsKeepTheirProperties(t *testing.T) {
	w := newTestbed(t).run()
	svc := w.a.service("hello", dualStack)
	w.a.export("hello")
	w.b.wants("hello", expect{
		typ: v1beta1.ClusterSetIP, ips: 2, clusters: []string{"a"}, ports: []string{"http/80"},
		endpoints: []string{"10.97.0.1:8080", "fd00:97::1:8080"},
	})
	_, imported := w.b.imported("hello")
	families := map[discoveryv1.AddressType]int{}
	for _, es := range imported {
		families[es.AddressType]++
		if es.Labels[v1beta1.LabelSourceCluster] != "a" {
			t.Errorf("slice %s is from %q", es.Name, es.Labels[v1beta1.LabelSourceCluster])
		}
	}
	if diff := cmp.Diff(map[discoveryv1.AddressType]int{discoveryv1.AddressTypeIPv4: 1, discoveryv1.AddressTypeIPv6: 1}, families); diff != "" {
		t.Errorf("slices by family (-want +have):\n%s", diff)
	}
	conformance.Holds(t, "N34")

	yes, no := true, false
	source := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: svc.Name + "-ipv4-1"}}
	for _, c := range []discoveryv1.EndpointConditions{
		{Ready: &no, Serving: &no, Terminating: &no},
		{Ready: &no, Serving: &yes, Terminating: &yes},
		{Ready: &yes, Serving: &yes, Terminating: &no},
	} {
		var want discoveryv1.Endpoint
		edit(w, w.a.Client, source, func(es *discoveryv1.EndpointSlice) {
			zone := fmt.Sprintf("zone-%t-%t", *c.Ready, *c.Serving)
			e := &es.Endpoints[0]
			e.Conditions, e.Zone, e.Hints = c, &zone, &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
			want = *e.DeepCopy()
		})
		want.TargetRef = nil
		for _, m := range w.both() {
			w.eventually(func() error {
				_, imported := m.imported("hello")
				i := slices.IndexFunc(imported, func(es discoveryv1.EndpointSlice) bool { return es.AddressType == discoveryv1.AddressTypeIPv4 })
				if diff := cmp.Diff([]discoveryv1.Endpoint{want}, imported[i].Endpoints); diff != "" {
					return fmt.Errorf("endpoints in %s (-want +have):\n%s", m.id, diff)
				}
				return nil
			})
		}
	}
	conformance.Holds(t, "N36", "L38")
}

// The importer learns the region of each zone of the endpoints from the Nodes of their cluster, and each change of it. A zone
// with Nodes of two regions has none.
func TestImportedEndpointsHaveRegions(t *testing.T) {
	w := newTestbed(t)
	label := func(name, zone, region string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-%s", w.ns, name), Labels: map[string]string{corev1.LabelTopologyZone: zone, corev1.LabelTopologyRegion: region},
		}}
	}
	first, second := label("first", "zone-1", "region-1"), label("second", "zone-2", "region-2")
	for _, n := range []*corev1.Node{first, second} {
		w.create(w.a, n)
		t.Cleanup(func() { w.noError(client.IgnoreNotFound(w.a.Delete(context.WithoutCancel(t.Context()), n))) })
	}
	w.run()
	w.a.service("hello")
	w.a.export("hello")
	wants := func(regions string) {
		t.Helper()
		for _, m := range w.both() {
			w.eventually(func() error {
				_, imported := m.imported("hello")
				if len(imported) != 1 || imported[0].Annotations[v1alpha1.AnnotationRegions] != regions {
					return fmt.Errorf("in %s want the regions %q, have %+v", m.id, regions, imported)
				}
				return nil
			})
		}
	}
	wants("zone-1=region-1")
	edit(w, w.a.Client, first, func(n *corev1.Node) { n.Labels[corev1.LabelTopologyRegion] = "region-3" })
	wants("zone-1=region-3")
	edit(w, w.a.Client, second, func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = "zone-1" })
	wants("")
	w.noError(w.a.Delete(t.Context(), second))
	wants("zone-1=region-3")
	w.quiet()
	_, imported := w.b.imported("hello")
	edit(w, w.b.Client, &imported[0], func(es *discoveryv1.EndpointSlice) { es.Annotations[v1alpha1.AnnotationRegions] = "zone-1=elsewhere" })
	wants("zone-1=region-3")
}

// A controller whose rights do not include Nodes exports as before, without regions.
func TestExportsWithoutTheRightToReadNodes(t *testing.T) {
	w := newTestbed(t)
	for _, m := range w.both() {
		role := &rbacv1.ClusterRole{}
		w.noError(m.Get(t.Context(), client.ObjectKey{Name: "isthmus-controller." + m.install}, role))
		edit(w, m.Client, role, func(r *rbacv1.ClusterRole) {
			r.Rules = slices.DeleteFunc(r.Rules, func(rule rbacv1.PolicyRule) bool { return slices.Contains(rule.Resources, "nodes") })
		})
	}
	w.run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
}

// The import has the endpoints of all slices of the Service, with one imported slice for each, whatever their writer,
// and whether they are older or younger than the export.
func TestImportHasAllSlicesOfAService(t *testing.T) {
	w := newTestbed(t).run()
	headless := func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone }
	byHand := func(s *corev1.Service) {
		single := corev1.IPFamilyPolicySingleStack // without a selector, both families would be the default
		s.Spec.Selector, s.Spec.IPFamilyPolicy = nil, &single
	}
	for name, edit := range map[string]func(*corev1.Service){"ordinary": func(*corev1.Service) {}, "headless": headless, "by-hand": byHand} {
		svc := w.a.service(name, edit)
		slice := func(host int) *discoveryv1.EndpointSlice {
			es := w.a.slice(svc, corev1.IPv4Protocol, host)
			if name == "by-hand" {
				delete(es.Labels, discoveryv1.LabelManagedBy)
				w.noError(w.a.Update(t.Context(), es))
			}
			return es
		}
		wants := func(hosts ...int) {
			t.Helper()
			want := helloOfA
			if name == "headless" {
				want.typ, want.ips = v1beta1.Headless, 0
			}
			want.endpoints = nil
			for _, h := range hosts {
				want.endpoints = append(want.endpoints, w.a.address(h)+":8080")
			}
			for _, m := range w.both() {
				m.wants(name, want)
				w.eventually(func() error { // one that goes is emptied first
					if _, imported := m.imported(name); len(imported) != len(hosts) {
						return fmt.Errorf("%s in %s has %d slices, want one for each of %d", name, m.id, len(imported), len(hosts))
					}
					return nil
				})
			}
		}
		second := slice(2)
		w.a.export(name)
		wants(1, 2)
		third := slice(3)
		wants(1, 2, 3)
		second.Endpoints[0].Addresses = []string{w.a.address(22)}
		w.noError(w.a.Update(t.Context(), second))
		wants(1, 22, 3)
		w.noError(w.a.Delete(t.Context(), second))
		w.noError(w.a.Delete(t.Context(), third))
		wants(1)
	}
	conformance.Holds(t, "L39", "L40", "L41")
}

// A Service with 10,000 endpoints and one with 100 ports are imported completely, while a small one changes.
func TestLargeServicesBesideSmallOnes(t *testing.T) {
	const (
		perSlice = 1000
		slicesOf = 10
		ports    = 100
	)
	w := newTestbed(t).run()
	w.a.service("small")
	w.a.export("small")
	w.b.wants("small", helloOfA)

	svc := w.a.service("many-endpoints")
	w.noError(w.a.DeleteAllOf(t.Context(), &discoveryv1.EndpointSlice{}, client.InNamespace(w.ns), client.MatchingLabels{discoveryv1.LabelServiceName: svc.Name}))
	w.a.export("many-endpoints")
	w.a.service("many-ports", func(s *corev1.Service) {
		s.Spec.Ports = nil
		for i := range ports {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Protocol: corev1.ProtocolTCP, Port: int32(1000 + i)})
		}
	})
	w.a.export("many-ports")
	name, protocol, target := "http", corev1.ProtocolTCP, int32(8080)
	for i := range slicesOf {
		es := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: w.ns, Name: fmt.Sprint("many-", i), Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &target}},
		}
		for j := range perSlice {
			es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.97.%d.%d", 1+4*i+j/250, 1+j%250)}})
		}
		w.create(w.a, es)
	}
	w.a.editService("small", func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })
	want := helloOfA
	want.ports = []string{"http/81"}
	w.b.wants("small", want)
	w.eventually(func() error {
		si, imported := w.b.imported("many-ports")
		if si == nil || len(si.Spec.Ports) != ports || len(imported) != 1 || len(imported[0].Ports) != ports {
			return fmt.Errorf("the service of %d ports is imported as %v with %d slices", ports, si, len(imported))
		}
		_, imported = w.b.imported("many-endpoints")
		if n := len(flatten(imported)); n != slicesOf*perSlice {
			return fmt.Errorf("%d endpoints are imported of %d", n, slicesOf*perSlice)
		}
		return nil
	})
	conformance.Holds(t, "L75")
	w.a.unexport("many-endpoints")
	w.b.wantsNone("many-endpoints")
}

// The status lists the exporters and the presence of slices, and is Ready only when the import can be used.
func TestImportStatus(t *testing.T) {
	w := newTestbed(t, twoAddresses).run()
	for _, name := range []string{"first", "second"} {
		w.a.service(name)
		w.a.export(name)
		w.b.wants(name, helloOfA)
		w.b.importReady(name, metav1.ConditionTrue, "Ready")
	}
	w.a.service("third")
	w.a.export("third")
	w.b.importReady("third", metav1.ConditionFalse, "Pending")
	conformance.Holds(t, "N14")
	w.a.condition("third", "Ready", metav1.ConditionFalse, "Failed")
	if si, _ := w.b.imported("third"); si.Status.EndpointSliceObjects != v1beta1.EndpointSliceObjectsPresent || len(si.Status.Clusters) != 1 || si.Status.Clusters[0].Cluster != "a" {
		t.Errorf("status %+v", si.Status)
	}
	conformance.Holds(t, "N15", "N16")
}
