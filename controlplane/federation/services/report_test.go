package services_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile/reconciletest"
)

// says fails unless the status of a member Service contains text.
func (w *testbed) says(id clusterset.ClusterID, service, text string) {
	w.t.Helper()
	if svc, _ := get[corev1.Service](w, id, w.namespace, service); !strings.Contains(svc.Annotations[status], text) {
		w.t.Errorf("in %s the status of %s is %q, want %q in it", id, service, svc.Annotations[status], text)
	}
}

// A member that agrees with the oldest one reports the conflicts of others too.
func TestEveryMemberReportsAConflict(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "oldest", global, "shop", nil, "10.1.0.1")
	w.offer("b", "same", global, "shop", nil, "10.2.0.1")
	w.offer("c", "other", global, "shop", func(s *corev1.Service) { s.Spec.Ports[0].Protocol = corev1.ProtocolSCTP }, "10.3.0.1")
	w.sync()
	for id, name := range map[clusterset.ClusterID]string{"a": "oldest", "b": "same", "c": "other"} {
		w.says(id, name, "is left out")
		if events := w.Member(id).Events(); !slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, "Warning PortConflict "+w.namespace+"/"+name) }) {
			t.Errorf("events in %s: %q", id, events)
		}
	}
}

func TestMissingSystemNamespace(t *testing.T) {
	const elsewhere = "global-services"
	w := newTestbed(t, v1alpha1.FederationSpec{SystemNamespace: elsewhere})
	for _, id := range []clusterset.ClusterID{"a", "b"} {
		w.create(id, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: elsewhere}})
	}
	members := []*reconciletest.Member{w.Member("a"), w.Member("b"), w.Member("c")}
	t.Cleanup(func() {
		for _, m := range members {
			for _, o := range []client.Object{&corev1.Service{}, &discoveryv1.EndpointSlice{}} {
				if err := m.Client().DeleteAllOf(context.Background(), o, client.InNamespace(elsewhere)); err != nil {
					t.Error(err)
				}
			}
		}
	})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.offer("c", "web", global, "shop", nil, "10.3.0.1")
	w.sync()
	for _, id := range []clusterset.ClusterID{"a", "c"} {
		w.says(id, "web", "clusters c lack the namespace "+elsewhere)
	}
	w.create("c", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: elsewhere}})
	w.sync()
	if got := w.slices("c", elsewhere, "shop"); len(got) != 2 {
		t.Errorf("with the namespace stands %q", got)
	}
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); strings.Contains(svc.Annotations[status], elsewhere+",") {
		t.Errorf("it still says %q", svc.Annotations[status])
	}
}

// single is a Writer into a cluster without IPv6.
type single struct{ reconcile.Writer }

func (w single) Create(ctx context.Context, o client.Object) error {
	if svc, ok := o.(*corev1.Service); ok {
		return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Service").GroupKind(), svc.Name, field.ErrorList{
			field.Invalid(field.NewPath("spec", "ipFamilies").Index(0), "IPv6", "not configured on this cluster"),
		})
	}
	return w.Writer.Create(ctx, o)
}

func TestClusterWithoutTheMembersFamily(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol} })
	w.sync("a")
	var members []reconcile.Member
	for _, id := range all {
		members = append(members, w.Member(id))
	}
	key := reconcile.Key{Kind: "Service", Namespace: system, Name: "shop"}
	if err := w.reconciler.Reconcile(t.Context(), key, single{w.Member("c").Lead(1)}, members); !apierrors.IsInvalid(err) {
		t.Fatalf("made in a cluster without IPv6: %v", err)
	}
	w.sync("a")
	w.says("a", "web", "cluster c does not get it: the cluster has no Services of IPv6")
	w.sync("c") // now it has
	w.sync("a")
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); strings.Contains(svc.Annotations[status], "does not get it") {
		t.Errorf("it still says %q", svc.Annotations[status])
	}
}

// before136 is a Writer into a cluster of an older Kubernetes, which wants a letter at the beginning of a Service's name.
type before136 struct{ reconcile.Writer }

func (w before136) Create(ctx context.Context, o client.Object) error {
	if svc, ok := o.(*corev1.Service); ok {
		if faults := validation.IsDNS1035Label(svc.Name); len(faults) > 0 {
			return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Service").GroupKind(), svc.Name, field.ErrorList{
				field.Invalid(field.NewPath("metadata", "name"), svc.Name, faults[0]),
			})
		}
	}
	return w.Writer.Create(ctx, o)
}

// A cluster that refuses a name has the other federated Services, and the member Services report the refusal.
func TestClusterRefusesAName(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "digit", global, "9shop", nil, "10.1.0.1")
	w.offer("a", "letter", global, "shop", nil, "10.1.0.2")
	w.sync("a", "b")
	var members []reconcile.Member
	for _, id := range all {
		members = append(members, w.Member(id))
	}
	older := before136{w.Member("c").Lead(1)}
	for name, refused := range map[string]bool{"9shop": true, "shop": false} {
		key := reconcile.Key{Kind: "Service", Namespace: system, Name: name}
		if err := w.reconciler.Reconcile(t.Context(), key, older, members); apierrors.IsInvalid(err) != refused || err != nil && !refused {
			t.Errorf("%s in the older cluster: %v", name, err)
		}
	}
	w.sync("a", "b")
	for _, id := range []clusterset.ClusterID{"a", "b"} {
		if got := w.slices(id, system, "9shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
			t.Errorf("cluster %s has slices %q", id, got)
		}
	}
	if got := w.slices("c", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.2:8080"}) {
		t.Errorf("the older cluster has slices %q of the other Service", got)
	}
	w.says("a", "digit", "cluster c refuses it: ")
	w.says("a", "digit", "metadata.name")
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "letter"); strings.Contains(svc.Annotations[status], "refuses") {
		t.Errorf("the other member Service says %q", svc.Annotations[status])
	}
	if events := w.Member("a").Events(); !slices.ContainsFunc(events, func(e string) bool {
		return strings.HasPrefix(e, "Warning NotEverywhere "+w.namespace+"/digit") && strings.Contains(e, "cluster c refuses it")
	}) {
		t.Errorf("events: %q", events)
	}
}

func TestRemovedMarksAreRestored(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	edit := func(change func(*discoveryv1.EndpointSlice)) {
		t.Helper()
		var list discoveryv1.EndpointSliceList
		if err := w.Member("b").Client().List(t.Context(), &list, client.InNamespace(system)); err != nil || len(list.Items) != 1 {
			t.Fatalf("%d slices in b: %v", len(list.Items), err)
		}
		es := &list.Items[0]
		change(es)
		if err := w.Member("b").Client().Update(t.Context(), es); err != nil {
			t.Fatal(err)
		}
		w.sync()
	}
	for what, change := range map[string]func(*discoveryv1.EndpointSlice){
		"the annotation with the cluster": func(es *discoveryv1.EndpointSlice) { delete(es.Annotations, markOf) },
		"the label with the cluster":      func(es *discoveryv1.EndpointSlice) { delete(es.Labels, markOf) },
	} {
		edit(change)
		if got := w.slices("b", system, "shop"); !slices.Equal(got, []string{"a: 10.1.0.1:8080"}) {
			t.Errorf("without %s stands %q", what, got)
		}
	}
}
