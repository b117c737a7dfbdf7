package broker_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// refuses makes m's API server refuse what a CEL expression describes, as an administrator's own policy may: 422 Invalid.
// probe is an object that it describes.
func (m *member) refuses(expression string, probe client.Object) {
	t := m.testbed.t
	t.Helper()
	name := m.testbed.ns
	rule := func(group, version, resource string) admissionv1.NamedRuleWithOperations {
		return admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update},
			Rule:       admissionv1.Rule{APIGroups: []string{group}, APIVersions: []string{version}, Resources: []string{resource}},
		}}
	}
	policy := &admissionv1.ValidatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: admissionv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &admissionv1.MatchResources{
				NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": name}},
				ResourceRules: []admissionv1.NamedRuleWithOperations{
					rule("discovery.k8s.io", "v1", "endpointslices"), rule("multicluster.x-k8s.io", "v1beta1", "serviceimports"),
				},
			},
			Validations: []admissionv1.Validation{{Expression: "!(" + expression + ")", Reason: new(metav1.StatusReasonInvalid)}},
		},
	}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
		},
	}
	m.testbed.create(m, policy, binding)
	t.Cleanup(func() {
		for _, obj := range []client.Object{policy, binding} {
			m.testbed.noError(m.Delete(context.WithoutCancel(t.Context()), obj))
		}
	})
	m.testbed.eventually(func() error {
		if err := m.Create(t.Context(), probe, client.DryRunAll); !apierrors.IsInvalid(err) {
			return fmt.Errorf("the policy is not in force yet: %w", err)
		}
		return nil
	})
}

// exportOf returns a guest's export of a Service with port http.
func (w *testbed) exportOf(id, name string, edits ...func(*clusterset.Export)) clusterset.Export {
	e := clusterset.Export{
		Cluster: clusterset.ClusterID(id), Service: clusterset.ServiceName{Namespace: w.ns, Name: name}, ExportedAt: time.Now().UTC(),
		Type: clusterset.ClusterSetIP, Families: []clusterset.Family{clusterset.IPv4}, WantsIP: clusterset.Enabled, InternalTrafficPolicy: "Cluster",
		Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
	}
	for _, edit := range edits {
		edit(&e)
	}
	return e
}

// An importer's API server refuses the labels of one member's Service, and the endpoints of another member for good. Each
// costs only itself: slices with refused labels arrive without them, other members' endpoints follow their changes, and a
// member that withdraws is removed.
func TestRefusedSliceStopsNoOther(t *testing.T) {
	w := newTestbed(t)
	w.b.refuses(
		`object.metadata.?labels[?"team"].orValue("") == "poison" || object.?endpoints.orValue([]).exists(e, e.addresses[0] == "10.100.0.66")`,
		&discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "probe"}, AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.100.0.66"}}},
		})
	w.run()
	for _, id := range []string{"c", "d", "e"} {
		w.guest(id, time.Unix(0, 0))
	}
	w.says(w.exportOf("d", "hello"), "10.100.0.66")
	w.says(w.exportOf("c", "hello", func(e *clusterset.Export) { e.ServiceLabels = map[string]string{"team": "poison"} }), "10.99.0.1")
	leaves := w.says(w.exportOf("e", "hello"), "10.101.0.1")
	svc := w.a.service("hello")
	w.a.export("hello")
	want := helloOfA
	want.clusters = []string{"a", "c", "d", "e"}
	want.endpoints = []string{"10.101.0.1:8080", "10.97.0.1:8080", "10.99.0.1:8080"}
	w.b.wants("hello", want)

	w.a.slice(svc, corev1.IPv4Protocol, 2)
	edit(w, w.broker, leaves, func(r *v1alpha1.ExportRecord) { r.Spec.WithdrawnAt = new(metav1.Now()) })
	want.clusters = []string{"a", "c", "d"}
	want.endpoints = []string{"10.97.0.1:8080", "10.97.0.2:8080", "10.99.0.1:8080"}
	w.b.wants("hello", want)
}

// The oldest export has labels and annotations that an importer's API server refuses. The import exists without them, its
// endpoints follow, and the refused content costs no write while nothing changes.
func TestRefusedMetadataOfAnImport(t *testing.T) {
	w := newTestbed(t)
	w.b.refuses(`object.metadata.?annotations[?"note"].orValue("") == "poison"`, &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "probe", Annotations: map[string]string{"note": "poison"}},
		Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.Headless, Ports: []v1beta1.ServicePort{}},
	})
	w.run()
	svc := w.a.service("hello")
	export := w.a.export("hello")
	w.b.wants("hello", helloOfA)
	edit(w, w.a.Client, export, func(e *v1beta1.ServiceExport) { e.Spec.ExportedAnnotations = map[string]string{"note": "poison"} })
	w.a.slice(svc, corev1.IPv4Protocol, 2)
	want := helloOfA
	want.endpoints = []string{"10.97.0.1:8080", "10.97.0.2:8080"}
	w.b.wants("hello", want)
	w.a.unexport("hello")
	w.b.wantsNone("hello")
	w.a.export("hello") // without the annotation, as a new import
	w.b.wants("hello", want)
	w.a.unexport("hello")
	w.b.wantsNone("hello")
	w.create(w.a, &v1beta1.ServiceExport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello"},
		Spec:       v1beta1.ServiceExportSpec{ExportedAnnotations: map[string]string{"note": "poison"}},
	})
	w.b.wants("hello", want)
	w.quiet()
	edit(w, w.a.Client, svc, func(s *corev1.Service) { s.Annotations = map[string]string{"unrelated": "x"} })
	if writes := w.changesWithin(3*settle, w.b); len(writes) > 0 {
		t.Errorf("writes although nothing changed: %v", writes)
	}
}

// The oldest export asks for a label with a space, which no object can have. A condition names the field and the remedy, and
// both clusters get the endpoints of both, without the label.
func TestInvalidExportedLabels(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	export := &v1beta1.ServiceExport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello"},
		Spec:       v1beta1.ServiceExportSpec{ExportedLabels: map[string]string{"note": "my shop", "team": "shop"}},
	}
	w.create(w.a, export)
	message := w.a.condition("hello", "Ready", metav1.ConditionTrue, "MetadataRefused")
	if !strings.Contains(message, `spec.exportedLabels[note]: the value "my shop" is not a label value; use`) {
		t.Errorf("the message is %q", message)
	}
	w.eventually(func() error {
		if reasons := w.a.eventsOn("hello"); !slices.Contains(reasons, "MetadataRefused") {
			return fmt.Errorf("events: %v", reasons)
		}
		return nil
	})
	w.laterThan(w.a, "hello")
	svc := w.b.service("hello")
	w.b.export("hello")
	w.b.slice(svc, corev1.IPv4Protocol, 2)
	want := helloOfA
	want.clusters = []string{"a", "b"}
	want.endpoints = []string{"10.97.0.1:8080", "10.98.0.1:8080", "10.98.0.2:8080"}
	for _, m := range w.both() {
		if si := m.wants("hello", want); si.Labels["team"] != "shop" || si.Labels["note"] != "" {
			t.Errorf("labels in %s: %v", m.id, si.Labels)
		}
	}
	edit(w, w.a.Client, export, func(e *v1beta1.ServiceExport) { delete(e.Spec.ExportedLabels, "note") })
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
}

// A member that does not export a Service writes its aggregate first, which declines a ClusterSetIP, and lists itself. The
// exporters do not believe it, and the broker's policies let them set an address all the same.
func TestDeclinedWithoutExport(t *testing.T) {
	w := newTestbed(t).run()
	w.guest("c", time.Unix(0, 0))
	early := mcs.Aggregate(clusterset.Aggregate{
		Service: clusterset.ServiceName{Namespace: w.ns, Name: "hello"}, Type: clusterset.ClusterSetIP, UseIP: clusterset.Disabled,
	})
	early.Namespace = w.brokerNS
	w.create(w.broker, early)
	early.Status.Clusters = []v1beta1.ClusterStatus{{Cluster: "c"}}
	w.noError(w.broker.Status().Update(t.Context(), early))

	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	if have := w.aggregate("hello"); len(have.Spec.IPs) == 0 || have.Annotations[v1alpha1.AnnotationUseClusterSetIP] != "true" {
		t.Errorf("the aggregate has addresses %v and annotations %v", have.Spec.IPs, have.Annotations)
	}
}

// A member writes poison to a broker without policies: labels that no object can have, and labels that hide an import from
// agents or give a slice to the cluster's own Service. It is the oldest exporter. The endpoints of all, and their removal,
// reach every cluster, and the importers count the poison.
func TestPoisonOnABrokerWithoutPolicies(t *testing.T) {
	w := newTestbed(t).run()
	w.guest("c", time.Unix(0, 0))
	poison := map[string]string{
		"note": "my shop", "bad key!": "x", "isthmus.dev/service-name": "x", "app.kubernetes.io/managed-by": "somebody",
		"kubernetes.io/service-name": "other", "multicluster.kubernetes.io/service-name": "other", "team": "shop",
	}
	w.says(w.exportOf("c", "hello", func(e *clusterset.Export) {
		e.ExportedAt = time.Now().Add(-time.Minute)
		e.Labels, e.ServiceLabels, e.Annotations = poison, poison, map[string]string{"a note": "x", v1alpha1.AnnotationUseClusterSetIP: "false", "team": "shop"}
	}), "10.99.0.1")
	svc := w.a.service("hello")
	w.a.export("hello")
	second := w.a.slice(svc, corev1.IPv4Protocol, 2)
	want := helloOfA
	want.clusters = []string{"a", "c"}
	want.endpoints = []string{"10.97.0.1:8080", "10.97.0.2:8080", "10.99.0.1:8080"}
	w.b.wants("hello", want)
	w.noError(w.a.Delete(t.Context(), second))
	want.endpoints = []string{"10.97.0.1:8080", "10.99.0.1:8080"}
	si := w.b.wants("hello", want)
	if len(si.Labels) != 2 || si.Labels["team"] != "shop" || len(si.Annotations) != 1 {
		t.Errorf("labels %v, annotations %v", si.Labels, si.Annotations)
	}
	_, imported := w.b.imported("hello")
	for _, es := range imported {
		if es.Labels["team"] == "shop" && (len(es.Labels) != 4 || es.Labels[v1beta1.LabelSourceCluster] != "c") {
			t.Errorf("labels of slice %s: %v", es.Name, es.Labels)
		}
	}
}
