package services_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
)

// many is more than a withdrawal that the guard accepts.
const many = 6

// withoutSelector makes a Service one whose endpoints its owner writes.
func withoutSelector(s *corev1.Service) { s.Spec.Selector = nil }

// offerMany has a cluster offer shop-0 to shop-5, and returns the Services.
func (w *testbed) offerMany(change func(*corev1.Service)) (made []*corev1.Service) {
	w.t.Helper()
	for i := range many {
		made = append(made, w.offer("a", fmt.Sprint("web-", i), global, fmt.Sprint("shop-", i), change, "10.1.0.1"))
	}
	w.sync()
	w.sync() // told of what became of it
	return made
}

// deleteSlices deletes the slices of Services in cluster a.
func (w *testbed) deleteSlices(of []*corev1.Service) {
	w.t.Helper()
	for _, svc := range of {
		w.delete("a", &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, Name: svc.Name + "-1"}})
	}
}

// deleteAll deletes Services in cluster a.
func (w *testbed) deleteAll(services []*corev1.Service) {
	w.t.Helper()
	for _, svc := range services {
		w.delete("a", svc)
	}
}

// awaitHold waits until Services of cluster a are held, and returns how many.
func (w *testbed) awaitHold() int {
	w.t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		w.sync()
		if holds := w.reconciler.Holds(); len(holds) > 0 {
			return holds[0].Count
		}
	}
	w.t.Fatal("no withdrawal is held")
	return 0
}

// A cache of slices may be read again before the cache of Services. The Services that follow are held nevertheless, and keep
// their ports and their ServiceImport.
func TestServicesThatVanishAfterTheirSlicesAreHeld(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{ClusterSetIP: v1alpha1.ClusterSetIPSpec{Enabled: true, Ranges: []string{"243.0.0.0/16"}}})
	made := w.offerMany(withoutSelector)
	w.deleteSlices(made)
	w.sync()
	if got := w.slices("b", system, "shop-0"); len(got) > 0 {
		t.Fatalf("slices %q, which their owner deleted", got)
	}
	before := w.versions()
	w.deleteAll(made)
	for _, svc := range made {
		delete(before, fmt.Sprintf("a %T %s/%s", svc, svc.Namespace, svc.Name))
	}
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Fatalf("something changes before the withdrawal is judged: %s", diff)
	}
	again := w.runs()
	if n := w.awaitHold(); n != many {
		t.Errorf("%d Services are held, want %d", n, many)
	}
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("something changes while the withdrawal is held: %s", diff)
	}
	w.reconciler.Release("a")
	again()
	w.sync()
	if n := w.reconciler.Seen(); n != 0 {
		t.Errorf("%d offers are remembered", n)
	}
	for _, id := range all {
		_, there := get[corev1.Service](w, id, system, "shop-0")
		if _, imported := get[v1beta1.ServiceImport](w, id, system, "shop-0"); there || imported {
			t.Errorf("after the release it stays in %s", id)
		}
	}
}

// A Service with a selector has a slice, if only an empty one. One without any was read in part or is about to vanish, and its
// endpoints stay.
func TestServiceWithoutAnySliceKeepsItsEndpoints(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	made := w.offerMany(nil)
	before := w.versions()
	w.deleteSlices(made)
	for _, svc := range made {
		delete(before, fmt.Sprintf("a %T %s/%s-1", &discoveryv1.EndpointSlice{}, svc.Namespace, svc.Name))
	}
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Fatalf("without slices something changes: %s", diff)
	}
	w.restart(v1alpha1.FederationSpec{})
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("after a restart something changes: %s", diff)
	}
	w.runs()
	w.deleteAll(made[1:])
	for _, svc := range made[1:] {
		delete(before, fmt.Sprintf("a %T %s/%s", svc, svc.Namespace, svc.Name))
	}
	w.awaitHold()
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("something changes while the withdrawal is held: %s", diff)
	}

	w.offer("a", "web-0", global, "shop-0", nil) // scaled to zero
	w.sync()
	if got := w.slices("b", system, "shop-0"); !slices.Equal(got, nil) {
		t.Errorf("slices %q, want none after the last endpoint went", got)
	}
}

// A cluster that has no slices left withdraws its Services explicitly, or leaves, or was judged in the past.
func TestExplicitWithdrawalWithoutSlices(t *testing.T) {
	for name, withdraw := range map[string]func(w *testbed, made []*corev1.Service){
		"declined": func(w *testbed, made []*corev1.Service) {
			for _, svc := range made {
				w.edit("a", w.namespace, svc.Name, func(s *corev1.Service) { delete(s.Annotations, global) })
			}
		},
		"left": func(w *testbed, _ []*corev1.Service) { w.Leave("a") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t, v1alpha1.FederationSpec{})
			made := w.offerMany(withoutSelector)
			w.deleteSlices(made)
			w.sync()
			withdraw(w, made)
			w.sync()
			for i := range many {
				if _, there := get[corev1.Service](w, "b", system, fmt.Sprint("shop-", i)); there {
					t.Errorf("shop-%d stays", i)
				}
			}
			if n := w.reconciler.Seen(); n != 0 {
				t.Errorf("%d offers are remembered", n)
			}
		})
	}
}

// A member that is silent while a person releases a hold removes what it has of it as soon as it is back.
func TestReleasedWhileAMemberIsSilent(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	made := w.offerMany(nil)
	again := w.runs()
	w.deleteAll(made)
	w.awaitHold()
	w.Member("b").Silence()
	w.reconciler.Release("a")
	again()
	w.sync()
	w.sync() // without the slices that were removed
	if n := w.reconciler.Seen(); n != many {
		t.Errorf("%d offers are remembered, want %d, to which slices in b lead", n, many)
	}
	w.Member("b").Back()
	w.sync()
	for i := range many {
		for _, id := range all {
			if _, there := get[corev1.Service](w, id, system, fmt.Sprint("shop-", i)); there {
				t.Errorf("shop-%d stays in %s", i, id)
			}
		}
	}
	w.sync() // without the slices that were removed
	if n := w.reconciler.Seen(); n != 0 {
		t.Errorf("%d offers are remembered", n)
	}
}

// A member Service that offers nothing is deleted. The federated Service never led to it, so nothing is kept.
func TestFaultyServiceVanishes(t *testing.T) {
	w := newTestbed(t, v1alpha1.FederationSpec{})
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	outside := w.offer("b", "web", global, "shop", func(s *corev1.Service) {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "www.example.org"}
	})
	w.sync()
	w.sync() // told of what became of it
	before := w.versions()
	w.delete("b", outside)
	delete(before, fmt.Sprintf("b %T %s/%s", outside, w.namespace, outside.Name))
	w.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("something changes: %s", diff)
	}
}
