package broker_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/tools/conformance"
)

// The Service is exported exactly while it and its ServiceExport exist and it can be exported, in whatever order they
// appear and change.
func TestServiceAndExportInAnyOrder(t *testing.T) {
	w := newTestbed(t).run()
	exported := func(name string) {
		t.Helper()
		w.a.condition(name, "Valid", metav1.ConditionTrue, "Valid")
		w.a.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		for _, m := range w.both() {
			m.wants(name, helloOfA)
		}
	}
	withdrawn := func(name, reason string) {
		t.Helper()
		w.a.condition(name, "Valid", metav1.ConditionFalse, reason)
		w.a.condition(name, "Ready", metav1.ConditionFalse, "Pending")
		for _, m := range w.both() {
			m.wantsNone(name)
		}
	}
	external := func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.org"
	}
	ordinary := func(s *corev1.Service) { s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeClusterIP, "" }

	// The export first.
	w.a.export("early")
	withdrawn("early", "NoService")
	conformance.Holds(t, "N8")
	w.a.service("early")
	exported("early")
	conformance.Holds(t, "L1", "L2")

	// A type that cannot be exported, then corrected.
	bad := w.a.service("bad", external)
	w.a.export("bad")
	withdrawn("bad", "InvalidServiceType")
	conformance.Holds(t, "N7", "C12")
	w.a.slice(bad, corev1.IPv4Protocol, 1)
	w.a.editService("bad", ordinary)
	exported("bad")
	conformance.Holds(t, "L6")

	// The same, under a Service that was exported.
	w.a.editService("early", external)
	withdrawn("early", "InvalidServiceType")
	w.a.editService("early", ordinary)
	exported("early")
	conformance.Holds(t, "L5")

	// Without the Service, and with it again.
	w.a.deleteService("early")
	withdrawn("early", "NoService")
	w.a.service("early")
	exported("early")
	conformance.Holds(t, "L4")

	// Without the exports.
	for _, name := range []string{"early", "bad"} {
		w.a.unexport(name)
		for _, m := range w.both() {
			m.wantsNone(name)
		}
	}
	conformance.Holds(t, "N2", "L3")
	w.brokerEmpty()
}

// Member b has a Service of the same name and does not export it, and both members have slices of unexported Services.
// None of them is exported, imported or changed.
func TestUnexportedServicesStayUntouched(t *testing.T) {
	w := newTestbed(t)
	local := w.b.service("hello")
	plain := w.a.service("not-exported")
	foreign := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "of-another-implementation", Labels: map[string]string{
			v1beta1.LabelServiceName: "hello", v1beta1.LabelSourceCluster: "elsewhere", discoveryv1.LabelManagedBy: "another.example.org",
		}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.55.0.1"}}},
	}
	unlabelled := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: w.ns, Name: "of-nobody"},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.55.0.2"}}},
	}
	w.create(w.b, foreign, unlabelled)
	objects := []client.Object{local, plain, foreign, unlabelled}
	of := map[client.Object]*member{local: w.b, plain: w.a, foreign: w.b, unlabelled: w.b}
	for _, m := range w.both() {
		var list discoveryv1.EndpointSliceList
		w.noError(m.List(t.Context(), &list, client.InNamespace(w.ns)))
		for i := range list.Items {
			objects = append(objects, &list.Items[i])
			of[&list.Items[i]] = m
		}
	}

	w.run()
	w.a.service("hello")
	w.a.export("hello")
	want := helloOfA
	w.a.wants("hello", want)
	want.endpoints = append(slices.Clone(want.endpoints), "10.55.0.1:") // of the other implementation
	w.b.wants("hello", want)
	w.quiet()

	var published discoveryv1.EndpointSliceList
	w.noError(w.broker.List(t.Context(), &published, client.InNamespace(w.brokerNS)))
	if have := flatten(published.Items); !slices.Equal(have, helloOfA.endpoints) {
		t.Errorf("the broker has the endpoints %v", have)
	}
	conformance.Holds(t, "N1", "L11")
	for _, before := range objects {
		after := before.DeepCopyObject().(client.Object)
		w.noError(of[before].Get(t.Context(), client.ObjectKeyFromObject(before), after))
		if after.GetResourceVersion() != before.GetResourceVersion() {
			t.Errorf("%T %s changed: %v", before, before.GetName(), after)
		}
	}
	conformance.Holds(t, "N3")
}

// They are two Services, with addresses and endpoints of their own; one may be removed without the other.
func TestSameNameInTwoNamespaces(t *testing.T) {
	w := newTestbed(t)
	other := w.ns + "-other"
	for _, m := range w.both() {
		w.create(m, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: other}})
	}
	w.run()
	w.a.service("hello")
	w.a.export("hello")
	elsewhere := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: other, Name: "hello"}}
	w.create(w.b, &corev1.Service{ObjectMeta: elsewhere.ObjectMeta, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}}}, elsewhere)
	vip := w.b.wants("hello", helloOfA).Spec.IPs
	for _, m := range w.both() {
		w.eventually(func() error {
			si, imported := m.importedIn(other, "hello")
			if si == nil || len(si.Spec.IPs) == 0 || len(si.Status.Clusters) == 0 {
				return fmt.Errorf("the import of the other namespace in %s is %+v", m.id, si)
			}
			if slices.Equal(si.Spec.IPs, vip) || si.Status.Clusters[0].Cluster != "b" || si.Spec.Ports[0].Port != 443 || len(imported) > 0 {
				t.Errorf("the import of the other namespace in %s: %+v %+v", m.id, si.Spec, si.Status)
			}
			return nil
		})
	}
	conformance.Holds(t, "N4")
	w.a.unexport("hello")
	w.b.wantsNone("hello")
	w.quiet()
	if si, _ := w.a.importedIn(other, "hello"); si == nil {
		t.Error("the import of the other namespace went too")
	}
	w.noError(w.b.Delete(t.Context(), elsewhere))
	w.eventually(func() error {
		if si, _ := w.a.importedIn(other, "hello"); si != nil {
			return fmt.Errorf("a still has it")
		}
		return nil
	})
	conformance.Holds(t, "L10")
}

// Changes of an exported Service appear in the import.
// The server does not remove fields that a creation wrote when an apply omits them.
func TestImportLosesFieldsOfItsCreation(t *testing.T) {
	w := newTestbed(t).run()
	timeout, near := int32(77), corev1.ServiceTrafficDistributionPreferSameZone
	w.a.service("hello", func(s *corev1.Service) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
		s.Spec.TrafficDistribution = &near
	})
	w.a.export("hello")
	affinity := func(want corev1.ServiceAffinity, configured bool) {
		t.Helper()
		w.eventually(func() error {
			si, _ := w.b.imported("hello")
			if si == nil || si.Spec.SessionAffinity != want || (si.Spec.SessionAffinityConfig != nil) != configured || (si.Spec.TrafficDistribution != nil) != configured {
				return fmt.Errorf("the import is %+v", si)
			}
			return nil
		})
	}
	affinity(corev1.ServiceAffinityClientIP, true)
	w.a.editService("hello", func(s *corev1.Service) {
		s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig, s.Spec.TrafficDistribution = corev1.ServiceAffinityNone, nil, nil
	})
	affinity(corev1.ServiceAffinityNone, false)
	w.quiet()
	if writes := w.changesWithin(3*settle, w.b); len(writes) > 0 {
		t.Errorf("writes at rest: %v", writes)
	}
}

func TestImportFollowsTheService(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)

	protocol := "example.org/echo"
	w.a.editService("hello", func(s *corev1.Service) {
		s.Spec.Ports[0].Port = 81
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "echo", Protocol: corev1.ProtocolUDP, Port: 7, AppProtocol: &protocol})
	})
	name, udp, target := "echo", corev1.ProtocolUDP, int32(9007)
	edit(w, w.a.Client, &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello-ipv4-1"}}, func(es *discoveryv1.EndpointSlice) {
		es.Ports = append(es.Ports, discoveryv1.EndpointPort{Name: &name, Protocol: &udp, Port: &target})
	})
	want := helloOfA
	want.ports, want.endpoints = []string{"http/81", "echo/7"}, []string{"10.97.0.1:8080,9007"}
	for _, m := range w.both() {
		si := m.wants("hello", want)
		if p := si.Spec.Ports[1]; p.Protocol != udp || p.AppProtocol == nil || *p.AppProtocol != protocol {
			t.Errorf("port echo is imported as %+v", p)
		}
	}
	conformance.Holds(t, "L7")

	timeout := int32(77)
	w.a.editService("hello", func(s *corev1.Service) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
	})
	w.eventually(func() error {
		si, _ := w.b.imported("hello")
		if si.Spec.SessionAffinity != corev1.ServiceAffinityClientIP || si.Spec.SessionAffinityConfig == nil ||
			*si.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds != timeout {
			return fmt.Errorf("affinity is imported as %s %+v", si.Spec.SessionAffinity, si.Spec.SessionAffinityConfig)
		}
		return nil
	})
	w.a.editService("hello", func(s *corev1.Service) {
		s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
	})
	w.eventually(func() error {
		if si, _ := w.b.imported("hello"); si.Spec.SessionAffinity != corev1.ServiceAffinityNone || si.Spec.SessionAffinityConfig != nil {
			return fmt.Errorf("affinity is still imported as %s %+v", si.Spec.SessionAffinity, si.Spec.SessionAffinityConfig)
		}
		return nil
	})
	conformance.Holds(t, "L9")
}

// Imported slices have the Service's labels, without those of Kubernetes. Changed labels update the slices in place.
func TestServiceLabelsReachSlices(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello", func(s *corev1.Service) {
		s.Labels = map[string]string{"tier": "web", "app.kubernetes.io/name": "hello", "service.kubernetes.io/headless": "", v1beta1.LabelServiceName: "liar"}
	})
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	labels := func(want map[string]string) types.UID {
		t.Helper()
		var uid types.UID
		w.eventually(func() error {
			_, imported := w.b.imported("hello")
			have := map[string]string{}
			for _, key := range []string{"tier", "app.kubernetes.io/name", "service.kubernetes.io/headless", v1beta1.LabelServiceName} {
				if value, ok := imported[0].Labels[key]; ok {
					have[key] = value
				}
			}
			uid = imported[0].UID
			if diff := cmp.Diff(want, have); diff != "" {
				return fmt.Errorf("labels (-want +have):\n%s", diff)
			}
			return nil
		})
		return uid
	}
	before := labels(map[string]string{"tier": "web", v1beta1.LabelServiceName: "hello"})
	conformance.Holds(t, "L44")
	w.a.editService("hello", func(s *corev1.Service) { s.Labels["tier"] = "db" })
	if after := labels(map[string]string{"tier": "db", v1beta1.LabelServiceName: "hello"}); after != before {
		t.Errorf("the slice was made anew")
	}
	conformance.Holds(t, "L8")
	w.a.editService("hello", func(s *corev1.Service) { s.Labels = nil })
	labels(map[string]string{v1beta1.LabelServiceName: "hello"})
}

// An export with a port whose SRV record would be too long gets one event, and works.
func TestPortNameTooLongForDNS(t *testing.T) {
	w := newTestbed(t)
	w.run(w.a)
	long := strings.Repeat("p", 63)
	w.a.service("hello", func(s *corev1.Service) { s.Spec.Ports[0].Name = long })
	w.a.export("hello")
	if message := w.a.condition("hello", "Ready", metav1.ConditionTrue, "NamesTooLong"); !strings.Contains(message, long) {
		t.Errorf("the condition does not name the port: %s", message)
	}
	w.quiet(w.a)
	if n := len(slices.DeleteFunc(w.a.eventsOn("hello"), func(reason string) bool { return reason != "NamesTooLong" })); n != 1 {
		t.Errorf("%d events, want one", n)
	}
	conformance.Holds(t, "N48")
	w.a.editService("hello", func(s *corev1.Service) { s.Spec.Ports[0].Name = "http" })
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
}

// TestOlderVersionOfTheAPI: exports written and imports read as v1alpha1 are the same as in v1beta1.
func TestOlderVersionOfTheAPI(t *testing.T) {
	w := newTestbed(t).run()
	older := func(kind string) *unstructured.Unstructured {
		obj := &unstructured.Unstructured{}
		obj.SetAPIVersion("multicluster.x-k8s.io/v1alpha1")
		obj.SetKind(kind)
		obj.SetNamespace(w.ns)
		obj.SetName("hello")
		return obj
	}
	w.a.service("hello")
	w.create(w.a, older("ServiceExport"))
	si := w.b.wants("hello", helloOfA)

	export, imported := older("ServiceExport"), older("ServiceImport")
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	w.noError(w.a.Get(t.Context(), client.ObjectKeyFromObject(export), export))
	if conditions, _, err := unstructured.NestedSlice(export.Object, "status", "conditions"); err != nil || len(conditions) != 3 {
		t.Errorf("conditions in v1alpha1: %v, %v", conditions, err)
	}
	w.noError(w.b.Get(t.Context(), client.ObjectKeyFromObject(imported), imported))
	ips, _, err := unstructured.NestedStringSlice(imported.Object, "spec", "ips")
	if err != nil || !slices.Equal(ips, si.Spec.IPs) {
		t.Errorf("addresses in v1alpha1: %v, %v, want %v", ips, err, si.Spec.IPs)
	}
	if present, _, err := unstructured.NestedString(imported.Object, "status", "endpointSliceObjects"); err != nil || present != "Present" {
		t.Errorf("endpointSliceObjects in v1alpha1: %q, %v", present, err)
	}
	conformance.Holds(t, "N16")
	w.noError(w.a.Delete(t.Context(), export))
	w.b.wantsNone("hello")
	conformance.Holds(t, "N50")
}

// The controller writes a status again after a concurrent write of another client.
func TestConditionsSurviveConcurrentWrites(t *testing.T) {
	w := newTestbed(t)
	name := types.NamespacedName{Namespace: w.ns, Name: "hello"}
	const interruptions = 3
	var done atomic.Int32
	w.a.config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			if req.Method != http.MethodGet && strings.HasSuffix(req.URL.Path, "/serviceexports/hello/status") && done.Load() < interruptions {
				try := done.Add(1)
				e := &v1beta1.ServiceExport{}
				if err := w.a.Get(req.Context(), name, e); err != nil {
					return nil, err
				}
				meta.SetStatusCondition(&e.Status.Conditions, metav1.Condition{Type: "Foreign", Status: metav1.ConditionTrue, Reason: fmt.Sprintf("Try%d", try)})
				if err := w.a.Status().Update(req.Context(), e); err != nil {
					return nil, err
				}
			}
			return next.RoundTrip(req)
		})
	})
	w.run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.a.condition("hello", "Valid", metav1.ConditionTrue, "Valid")
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	if n := done.Load(); n < interruptions {
		t.Errorf("the status was written only %d times", n)
	}
	conformance.Holds(t, "L14")
}

// The controller removes a condition that an old Lighthouse left on an export.
func TestConditionOfLighthouseIsRemoved(t *testing.T) {
	w := newTestbed(t)
	w.a.service("hello")
	export := w.a.export("hello")
	export.Status.Conditions = []metav1.Condition{{Type: "Synced", Status: metav1.ConditionTrue, Reason: "Old", LastTransitionTime: metav1.Now()}}
	w.noError(w.a.Status().Update(t.Context(), export))
	w.run()
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	w.eventually(func() error {
		w.noError(w.a.Get(t.Context(), client.ObjectKeyFromObject(export), export))
		if c := meta.FindStatusCondition(export.Status.Conditions, "Synced"); c != nil {
			return fmt.Errorf("the export still has the condition %+v", c)
		}
		return nil
	})
	conformance.Holds(t, "L15")
}
