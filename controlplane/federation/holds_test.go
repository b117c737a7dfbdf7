package federation_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/bootstrap"
	"github.com/isthmus-net/isthmus/tools/await"
)

// Supervisor a leads all members, so it alone notices withdrawals. Supervisor b leads none and reports the same holds, by
// its status, a condition and events. A release reaches both. The endpoints stay until then, although they vanish before
// their Services.
func TestHoldsReachAllSupervisors(t *testing.T) {
	const many = 6
	w := newTestbed(t)
	w.superviseWith("a", "one", 2)
	w.awaitLeader("a/one")
	w.superviseWith("b", "two", 2)
	for i := range many {
		w.offer("c", fmt.Sprint("web-", i), "10.3.0.1")
	}
	for i := range many {
		w.awaitEverywhere(fmt.Sprint("web-", i), "10.3.0.1")
	}
	t.Cleanup(func() {
		for _, id := range []clusterset.ClusterID{"a", "b"} {
			if err := w.admin[id].DeleteAllOf(context.Background(), &eventsv1.Event{}, client.InNamespace("default")); err != nil {
				t.Error(err)
			}
		}
	})
	for _, kind := range []client.Object{&discoveryv1.EndpointSlice{}, &corev1.Service{}} {
		if err := w.admin["c"].DeleteAllOf(t.Context(), kind, client.InNamespace(demo)); err != nil {
			t.Fatal(err)
		}
		<-time.After(500 * time.Millisecond) // so that the supervisor acts on it
	}
	says := func(id clusterset.ClusterID, held int64, reason string) bool {
		f := &federationv1alpha1.Federation{}
		var told eventsv1.EventList
		if w.admin[id].Get(t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, f) != nil ||
			w.admin[id].List(t.Context(), &told, client.InNamespace("default")) != nil {
			return false
		}
		event := false
		for _, e := range told.Items {
			event = event || e.Reason == reason && strings.Contains(e.Note, "member c")
		}
		return w.status(id, "c").Held == held && event && (held > 0) == meta.IsStatusConditionTrue(f.Status.Conditions, federationv1alpha1.ConditionHolding)
	}
	for _, id := range []clusterset.ClusterID{"a", "b"} {
		await.True(t, fmt.Sprintf("%s reports the holds", id), func() bool { return says(id, many, "MuchVanished") })
	}
	for i := range many {
		w.leadsTo("b", fmt.Sprint("web-", i), "10.3.0.1")
	}
	clusters := []bootstrap.Cluster{{ID: "a", Supervisor: true, Client: w.admin["a"]}, {ID: "b", Supervisor: true, Client: w.admin["b"]}}
	released, err := bootstrap.Release(t.Context(), namespace, clusters, "c", time.Now())
	if err != nil || len(released) != 2 || released[0].Held != many || released[1].Held != many {
		t.Fatalf("released %+v: %v", released, err)
	}
	for i := range many {
		w.awaitEverywhere(fmt.Sprint("web-", i))
	}
	for _, id := range []clusterset.ClusterID{"a", "b"} {
		await.True(t, fmt.Sprintf("%s reports no more holds", id), func() bool { return says(id, 0, "HoldEnded") })
	}
}
