package bootstrap

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
)

// The proposed grants are for what takes part, and for nothing else. A refusal of them writes nothing, a second run does not
// ask, and a new supervisor gets them.
func TestProposedGrants(t *testing.T) {
	a, b, c := newTestbed(t)
	a, b = supervisor(a), supervisor(b)
	joined := func(in Cluster, namespace, name, annotation, value string) {
		t.Helper()
		s := service(name, nil, map[string]string{annotation: value})
		s.Namespace = namespace
		put(t, in, s)
	}
	for _, in := range []Cluster{a, c} {
		put(t, in, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
		joined(in, "shop", "web", federationv1alpha1.AnnotationGlobalService, "cart")
		joined(in, "shop", "own", federationv1alpha1.AnnotationService, "own")
	}
	joined(c, "default", "db", federationv1alpha1.AnnotationGlobalService, "db")
	joined(c, "kube-system", "dns", federationv1alpha1.AnnotationGlobalService, "dns")
	put(t, c, service("other", nil, nil))
	put(t, a, &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "deny", Annotations: map[string]string{federationv1alpha1.AnnotationPolicy: "true"}}})
	put(t, a, &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "local"}})

	balanced := service("balanced", nil, map[string]string{federationv1alpha1.AnnotationService: "balanced"})
	balanced.Spec.ExternalIPs = []string{"203.0.113.9"}
	put(t, c, balanced)

	var proposed []federationv1alpha1.Grant
	no := errors.New("no")
	answer := no
	var formed Formed
	form := func(clusters ...Cluster) error {
		var err error
		formed, err = Form(t.Context(), Formation{ClusterSet: "prod", Namespace: namespace, Clusters: clusters, Grants: func(grants []federationv1alpha1.Grant) error {
			proposed = grants
			return answer
		}})
		return err
	}
	if err := form(a, c); !errors.Is(err, no) {
		t.Fatal(err)
	}
	if err := a.Client.Get(t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, &federationv1alpha1.Federation{}); err == nil {
		t.Error("a refused proposal was written")
	}
	type patterns = []federationv1alpha1.Pattern
	want := []federationv1alpha1.Grant{
		{Members: []string{"c"}, Namespaces: patterns{"default"}, GlobalServices: patterns{"db"}, Services: patterns{"balanced"}},
		{Members: []string{"a"}, Namespaces: patterns{"shop"}, GlobalServices: patterns{"cart"}, Services: patterns{"own"}, Policies: patterns{"deny"}},
		{Members: []string{"c"}, Namespaces: patterns{"shop"}, GlobalServices: patterns{"cart"}, Services: patterns{"own"}},
	}
	if diff := cmp.Diff(want, proposed); diff != "" {
		t.Errorf("proposed (-want +have):\n%s", diff)
	}
	answer = nil
	if err := form(a, c); err != nil {
		t.Fatal(err)
	}
	if left := formed.LeftOut; len(left) != 1 || left[0].Member != "c" || left[0].Service.Name != "balanced" || !strings.Contains(left[0].Why.Error(), "spec.externalIPs: 203.0.113.9: not in an external network of cluster c") {
		t.Errorf("left out: %v", left)
	}
	c.ExternalCIDRs = []string{"203.0.113.0/24"}
	if err := form(a, c); err != nil || len(formed.LeftOut) > 0 {
		t.Errorf("left out with the network of c: %v, %v", formed.LeftOut, err)
	}
	t.Cleanup(func() {
		for _, id := range []string{"c", "b", "a"} {
			if _, err := Remove(context.Background(), Removal{ID: clusterID(id), Namespace: namespace, Clusters: map[string][]Cluster{"c": {a, b, c}, "b": {a, b}, "a": {a}}[id]}); err != nil {
				t.Error(err)
			}
		}
	})
	answer = no
	if err := form(a, b, c); err != nil {
		t.Fatalf("a federation with grants was asked about again: %v", err)
	}
	for _, in := range []Cluster{a, b} {
		f := &federationv1alpha1.Federation{}
		if err := in.Client.Get(t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, f); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, f.Spec.Grants); diff != "" {
			t.Errorf("grants of %s (-want +have):\n%s", in.ID, diff)
		}
	}
}

// Where nothing takes part yet, nothing does, until an administrator grants it.
func TestNothingToGrant(t *testing.T) {
	_, b, _ := newTestbed(t) // a and c have what the test above made
	b = supervisor(b)
	if _, err := Form(t.Context(), Formation{ClusterSet: "prod", Namespace: namespace, Clusters: []Cluster{b}, Grants: func([]federationv1alpha1.Grant) error { return nil }}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := Remove(context.Background(), Removal{ID: "b", Namespace: namespace, Clusters: []Cluster{b}}); err != nil {
			t.Error(err)
		}
	})
	f := &federationv1alpha1.Federation{}
	if err := b.Client.Get(t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, f); err != nil {
		t.Fatal(err)
	}
	if f.Spec.Grants == nil || len(f.Spec.Grants) > 0 {
		t.Errorf("grants are %v, want an empty list", f.Spec.Grants)
	}
}
