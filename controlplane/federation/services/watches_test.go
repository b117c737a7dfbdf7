package services_test

import (
	"log/slog"
	"slices"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
)

// A slice of the federation follows from the objects of all members, so it matters only in its own cluster. Other slices
// matter everywhere.
func TestOwnSlicesAreLocal(t *testing.T) {
	t.Parallel()
	p, err := services.New(services.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	watches := p.Watches()
	i := slices.IndexFunc(watches, func(w reconcile.Watch) bool { _, ok := w.Object.(*discoveryv1.EndpointSlice); return ok })
	for manager, want := range map[string]bool{v1alpha1.ManagedBy: true, "endpointslice-controller.k8s.io": false, "": false} {
		es := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{discoveryv1.LabelManagedBy: manager}}}
		if have := watches[i].Local(es); have != want {
			t.Errorf("a slice managed by %q is local: %t, want %t", manager, have, want)
		}
	}
}
