package policies

import (
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile/reconciletest"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
	"github.com/isthmus-net/isthmus/tools/await"
)

// replicated returns a federation in which all members have the policy allow of a in the namespace demo.
func replicated(t *testing.T, window time.Duration) (*reconciletest.Federation, *Reconciler, *unstructured.Unstructured) {
	t.Helper()
	f, r, _ := guarded(t, window)
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		namespace(t, f.Member(id), "demo")
	}
	origin := put(t, f.Member("a"), allow)
	settle(t, f)
	if have := states(t, f.Member("a"), origin); have != "b applied, c applied" {
		t.Fatalf("status: %s", have)
	}
	return f, r, origin
}

// deleted deletes the copy of a policy in a member as a user does while leaders watch.
func deleted(t *testing.T, f *reconciletest.Federation, id clusterset.ClusterID, origin *unstructured.Unstructured) {
	t.Helper()
	if err := f.Delete(t.Context(), id, get(t, f.Member(id), origin)); err != nil {
		t.Fatal(err)
	}
}

// decided reconciles until all deletions that a process saw are recorded, or are losses, and members follow.
func decided(t *testing.T, f *reconciletest.Federation, r *Reconciler) {
	t.Helper()
	await.True(t, "the deletions are decided", func() bool {
		settle(t, f)
		r.removals.mu.Lock()
		defer r.removals.mu.Unlock()
		return len(r.removals.deleted) == 0
	})
	settle(t, f)
}

// removalsIn returns the names of the records of removed copies in a member.
func removalsIn(t *testing.T, m *reconciletest.Member) (names []string) {
	t.Helper()
	var list corev1.ConfigMapList
	if err := m.Client().List(t.Context(), &list, client.InNamespace(installed), client.MatchingLabels{labelReport: reportRemoval}); err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		names = append(names, list.Items[i].Data["namespace"]+"/"+list.Items[i].Data["name"])
	}
	return names
}

// Whoever deletes the copy of a policy in any member removes the policy in all of them. A new one of that name is replicated.
func TestRemovalInAnyMember(t *testing.T) {
	f, _, origin := replicated(t, time.Millisecond)
	a := f.Member("a")
	a.Events()
	deleted(t, f, "b", origin)
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		gone(t, f, f.Member(id), origin)
	}
	if events := a.Events(); !slices.Contains(events, "Normal Removed demo/allow: a user deleted its copy in cluster b, so it is removed in all clusters") {
		t.Errorf("events in a: %q", events)
	}
	settle(t, f)
	if left := removalsIn(t, f.Member("b")); len(left) > 0 {
		t.Errorf("records of %v stayed", left)
	}
	again := put(t, a, allow)
	settle(t, f)
	if have := states(t, a, again); have != "b applied, c applied" {
		t.Errorf("status of a new policy: %s", have)
	}
}

// A removal waits for a silent cluster of the origin: the copy does not come back, and the others stay until the origin goes.
func TestRemovalWaitsForOrigin(t *testing.T) {
	f, _, origin := replicated(t, time.Millisecond)
	f.Member("a").Silence()
	deleted(t, f, "b", origin)
	err := admin.Await(t.Context(), "the removal is not recorded", func() (bool, error) {
		settle(t, f)
		return len(removalsIn(t, f.Member("b"))) > 0, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	settle(t, f)
	if get(t, f.Member("b"), origin) != nil || get(t, f.Member("c"), origin) == nil {
		t.Error("while a is silent, b has the copy again, or c lost it")
	}
	f.Member("a").Back()
	gone(t, f, f.Member("a"), origin)
	gone(t, f, f.Member("c"), origin)
}

// A copy that is deleted after it was read is deleted.
func TestRemovalWhileReading(t *testing.T) {
	f, r, origin := replicated(t, time.Millisecond)
	copied := get(t, f.Member("b"), origin)
	deleted(t, f, "b", origin)
	r.removals.there("b", keyOfObject(origin), copied.GetUID())
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		gone(t, f, f.Member(id), origin)
	}
}

// A user who creates a policy again after a copy of the former one was deleted wants the new one.
func TestRemovalIsOfOneOrigin(t *testing.T) {
	f, r, origin := replicated(t, time.Millisecond)
	deleted(t, f, "b", origin)
	if err := f.Member("a").Client().Delete(t.Context(), origin); err != nil {
		t.Fatal(err)
	}
	again := put(t, f.Member("a"), allow)
	decided(t, f, r)
	if have := states(t, f.Member("a"), again); have != "b applied, c applied" {
		t.Errorf("status of the new policy: %q", have)
	}
}

// A copy that is merely missing was lost, as were many that go at a time, those of a namespace, and those that leaders delete
// themselves. The policies stay, and so do their copies where there is a place for them.
func TestLostCopies(t *testing.T) {
	t.Run("unseen", func(t *testing.T) {
		f, _, origin := replicated(t, time.Millisecond)
		if err := f.Member("b").Client().Delete(t.Context(), get(t, f.Member("b"), origin)); err != nil {
			t.Fatal(err)
		}
		settle(t, f)
		if have := states(t, f.Member("a"), origin); have != "b applied, c applied" {
			t.Errorf("status: %s", have)
		}
	})
	t.Run("by a leader, another one", func(t *testing.T) {
		f, r, origin := replicated(t, time.Millisecond)
		r.removals.own("b", keyOfObject(origin), "of an earlier copy")
		settle(t, f)
		deleted(t, f, "b", origin)
		for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
			gone(t, f, f.Member(id), origin)
		}
	})
	t.Run("many", func(t *testing.T) {
		f, _, _ := replicated(t, 500*time.Millisecond)
		for i := range 20 { // which are none of the federation's
			put(t, f.Member("b"), strings.NewReplacer("name: allow", fmt.Sprintf("name: local-%d", i), `annotations: {federated.anp.antreaplus.vmware.com: "true"}`, "").Replace(allow))
		}
		var all []*unstructured.Unstructured
		for i := range 6 {
			all = append(all, put(t, f.Member("a"), strings.Replace(allow, "name: allow", fmt.Sprintf("name: allow-%d", i), 1)))
		}
		settle(t, f)
		settle(t, f)
		for _, o := range all {
			deleted(t, f, "b", o)
		}
		err := admin.Await(t.Context(), "the copies do not come back", func() (bool, error) {
			settle(t, f)
			return !slices.ContainsFunc(all, func(o *unstructured.Unstructured) bool { return get(t, f.Member("b"), o) == nil }), nil
		})
		if err != nil {
			t.Error(err)
		}
		if have := removalsIn(t, f.Member("b")); len(have) > 0 {
			t.Errorf("removals of %v are recorded", have)
		}
	})
	t.Run("without an origin", func(t *testing.T) { // the next origin of that name is another one
		f, _, origin := replicated(t, time.Millisecond)
		if err := f.Member("a").Client().Delete(t.Context(), get(t, f.Member("a"), origin)); err != nil {
			t.Fatal(err)
		}
		deleted(t, f, "b", origin)
		settle(t, f)
		next := put(t, f.Member("a"), allow)
		for range 3 {
			settle(t, f)
		}
		if have := states(t, f.Member("a"), next); have != "b applied, c applied" {
			t.Errorf("status: %q", have)
		}
	})
	t.Run("by a leader", func(t *testing.T) {
		f, r, origin := replicated(t, time.Millisecond)
		r.removals.own("b", keyOfObject(origin), get(t, f.Member("b"), origin).GetUID())
		deleted(t, f, "b", origin)
		settle(t, f)
		if have := states(t, f.Member("a"), origin); have != "b applied, c applied" {
			t.Errorf("status: %s", have)
		}
	})
	t.Run("before this process led", func(t *testing.T) {
		f, r, origin := replicated(t, time.Millisecond)
		deleted(t, f, "b", origin)
		r.removals.terms["b"] = term{1, time.Now()}
		settle(t, f)
		if have := states(t, f.Member("a"), origin); have != "b applied, c applied" {
			t.Errorf("status: %s", have)
		}
	})
	t.Run("with the namespace", func(t *testing.T) {
		f := federation(t)
		demo := "demo-" + strings.ToLower(rand.Text())
		namespace(t, f.Member("a"), demo)
		namespace(t, f.Member("b"), demo)
		origin := put(t, f.Member("a"), strings.Replace(allow, "demo", demo, 1))
		settle(t, f)
		ns := &corev1.Namespace{}
		ns.Name = demo
		if err := f.Member("b").Client().Delete(t.Context(), ns); err != nil { // without a controller-manager it stays, marked
			t.Fatal(err)
		}
		deleted(t, f, "b", origin)
		settle(t, f)
		settle(t, f)
		if get(t, f.Member("a"), origin) == nil || len(removalsIn(t, f.Member("b"))) > 0 {
			t.Error("a namespace of b took the policy with it")
		}
	})
}

// Only a member that may replicate a policy may remove it. In another one the copy is written again, and its user told.
func TestRemovalNeedsGrant(t *testing.T) {
	f, r, origin := replicated(t, time.Millisecond)
	r.config.Grants = grants.New(federationv1alpha1.FederationSpec{Grants: []federationv1alpha1.Grant{{
		Members: []string{"a"}, Namespaces: []federationv1alpha1.Pattern{"*"}, Policies: []federationv1alpha1.Pattern{"*"},
	}}})
	b := f.Member("b")
	b.Events()
	deleted(t, f, "b", origin)
	settle(t, f)
	if have := states(t, f.Member("a"), origin); have != "b applied, c applied" {
		t.Errorf("status: %s", have)
	}
	if events := b.Events(); !slices.ContainsFunc(events, func(e string) bool {
		return strings.HasPrefix(e, "Warning RemovalUndone demo/allow: the copy was deleted in this cluster, and is written again: no grant")
	}) {
		t.Errorf("events in b: %q", events)
	}
	// A record that somebody writes there is not believed either.
	forged := &corev1.ConfigMap{Data: map[string]string{
		"kind": keyOfObject(origin).Kind, "namespace": "demo", "name": "allow", "origin": "a", "uid": string(get(t, f.Member("a"), origin).GetUID()),
	}}
	forged.Namespace, forged.Name, forged.Labels = installed, removalName(keyOfObject(origin)), map[string]string{labelReport: reportRemoval}
	if err := b.Client().Create(t.Context(), forged); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Client().Delete(t.Context(), forged) })
	settle(t, f)
	if get(t, f.Member("a"), origin) == nil {
		t.Error("a record of a member without a grant removed the policy")
	}
}
