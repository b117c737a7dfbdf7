package policies

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
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

// lead reconciles members until the statuses describe the copies.
func lead(t *testing.T, f *reconciletest.Federation, into ...clusterset.ClusterID) {
	t.Helper()
	for range 2 {
		if err := f.Reconcile(t.Context(), into...); err != nil {
			t.Fatal(err)
		}
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

// Users take a removal back while it waits for a silent cluster of the origin: they create the copy again, or annotate the origin anew.
func TestRemovalTakenBack(t *testing.T) {
	for name, takeBack := range map[string]func(t *testing.T, f *reconciletest.Federation, copied, origin *unstructured.Unstructured){
		"by the copy": func(t *testing.T, f *reconciletest.Federation, copied, _ *unstructured.Unstructured) {
			t.Helper()
			copied.SetUID("")
			copied.SetResourceVersion("")
			if err := f.Member("b").Client().Create(t.Context(), copied); err != nil {
				t.Fatal(err)
			}
			settle(t, f)
			if left := removalsIn(t, f.Member("b")); len(left) > 0 {
				t.Errorf("records of %v stayed", left)
			}
		},
		"by the copy, which the leader of the origin sees first": func(t *testing.T, f *reconciletest.Federation, copied, _ *unstructured.Unstructured) {
			t.Helper()
			copied.SetUID("")
			copied.SetResourceVersion("")
			if err := f.Member("b").Client().Create(t.Context(), copied); err != nil {
				t.Fatal(err)
			}
		},
		"by the origin": func(t *testing.T, f *reconciletest.Federation, _, origin *unstructured.Unstructured) {
			t.Helper()
			change(t, f.Member("a"), origin, func(o *unstructured.Unstructured) {
				o.SetAnnotations(map[string]string{federationv1alpha1.AnnotationPolicy: "true"})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, _, origin := replicated(t, time.Millisecond)
			copied := get(t, f.Member("b"), origin)
			f.Member("a").Silence()
			deleted(t, f, "b", origin)
			await.True(t, "the removal is recorded", func() bool {
				settle(t, f)
				return len(removalsIn(t, f.Member("b"))) > 0
			})
			takeBack(t, f, copied, origin)
			f.Member("a").Back()
			for range 3 {
				settle(t, f)
			}
			if have := states(t, f.Member("a"), origin); have != "b applied, c applied" {
				t.Errorf("status: %q", have)
			}
			if left := removalsIn(t, f.Member("b")); len(left) > 0 {
				t.Errorf("records of %v stayed", left)
			}
		})
	}
}

// undeletable is a member whose API server lets leaders delete nothing.
type undeletable struct{ reconcile.Writer }

func (undeletable) Delete(context.Context, client.Object) error {
	return apierrors.NewForbidden(schema.GroupResource{Resource: "networkpolicies"}, "allow", errors.New("not by leaders"))
}

// Leaders that may not delete the origin say so once.
func TestNotRemovedOnce(t *testing.T) {
	f, r, origin := replicated(t, time.Millisecond)
	a := f.Member("a")
	deleted(t, f, "b", origin)
	await.True(t, "the removal is recorded", func() bool {
		lead(t, f, "b")
		return len(removalsIn(t, f.Member("b"))) > 0
	})
	a.Events()
	for range 3 {
		lead(t, f, "c") // reads a and the record in b
		if err := r.Reconcile(t.Context(), keyOfObject(origin), undeletable{a.Lead(1)}, []reconcile.Member{a, f.Member("b"), f.Member("c")}); err != nil {
			t.Fatal(err)
		}
	}
	told := slices.DeleteFunc(a.Events(), func(e string) bool { return !strings.Contains(e, "NotRemoved") })
	if len(told) != 1 || !strings.Contains(told[0], "leaders may not delete this object") {
		t.Errorf("events: %q", told)
	}
	gone(t, f, f.Member("c"), origin)
	settle(t, f)
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

// policiesOf creates policies in a, with copies in b and c, as led by two processes: f leads a and b, late leads c.
func policiesOf(t *testing.T, n int, f, late *reconciletest.Federation) (all []*unstructured.Unstructured) {
	t.Helper()
	for _, id := range []clusterset.ClusterID{"a", "b", "c"} {
		namespace(t, f.Member(id), "demo")
	}
	for i := range n {
		all = append(all, put(t, f.Member("a"), strings.Replace(allow, "name: allow", fmt.Sprintf("name: allow-%d", i), 1)))
	}
	for range 2 {
		lead(t, f, "a", "b")
		lead(t, late, "c")
	}
	for _, o := range all {
		if get(t, f.Member("b"), o) == nil || get(t, f.Member("c"), o) == nil {
			t.Fatalf("b or c has no copy of %s", o.GetName())
		}
	}
	return all
}

// Users remove policies one after the other in b. The leader of c sees so many origins vanish, and holds none of their copies back, whether it
// sees the records of the removals before or after.
func TestRemovalsAreNoAccident(t *testing.T) {
	for name, first := range map[string]func(*testing.T, *reconciletest.Federation, *Reconciler){
		"records first": func(*testing.T, *reconciletest.Federation, *Reconciler) {},
		"origins first": func(t *testing.T, late *reconciletest.Federation, r *Reconciler) {
			t.Helper()
			late.Member("b").Silence()
			await.True(t, "the copies are held", func() bool {
				lead(t, late, "c")
				return len(r.Holds()) > 0
			})
			late.Member("b").Back()
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, _, _ := guarded(t, time.Millisecond)
			late, r, _ := guarded(t, time.Millisecond)
			all := policiesOf(t, 7, f, late)
			for _, o := range all {
				deleted(t, f, "b", o)
				await.True(t, "the origin is removed", func() bool {
					lead(t, f, "a", "b")
					return get(t, f.Member("a"), o) == nil
				})
			}
			lead(t, f, "a", "b")
			first(t, late, r)
			lead(t, late, "c")
			for _, o := range all {
				if get(t, late.Member("c"), o) != nil {
					t.Errorf("the copy of %s is still in c", o.GetName())
				}
			}
			if holds := r.Holds(); len(holds) > 0 {
				t.Errorf("held: %v", holds)
			}
			lead(t, f, "a", "b")
			if left := removalsIn(t, f.Member("b")); len(left) > 0 {
				t.Errorf("records of %v stayed", left)
			}
		})
	}
}

// A standby sees every deletion and none of the records that count them. When it leads, it does not take the next deletion for a loss.
func TestStandbyHoldsNoRemovals(t *testing.T) {
	f, _, _ := guarded(t, time.Millisecond)
	standby, r, _ := guarded(t, time.Millisecond)
	all := policiesOf(t, 8, f, standby)
	last := len(all) - 1
	for _, o := range all[:last] {
		copied := get(t, f.Member("b"), o)
		deleted(t, f, "b", o)
		if err := standby.Deleted("b", copied); err != nil {
			t.Fatal(err)
		}
		await.True(t, "the origin is removed", func() bool {
			lead(t, f, "a", "b")
			lead(t, standby, "c")
			return get(t, f.Member("a"), o) == nil
		})
	}
	await.True(t, "the standby holds the removals", func() bool { return len(r.removals.guard.Holds()) > 0 })
	settle(t, standby)
	deleted(t, standby, "b", all[last])
	decided(t, standby, r)
	if get(t, f.Member("a"), all[last]) != nil {
		t.Error("the last policy was not removed")
	}
}

// antreaPolicy is a cluster-scoped policy NAME with more METADATA.
const antreaPolicy = "{apiVersion: crd.antrea.io/v1beta1, kind: ClusterNetworkPolicy, metadata: {name: NAME, METADATA}, spec: {priority: 5}}"

// undefine deletes the definition of Antrea's kind in a member, and waits until the API server has deleted its objects, but for one with a
// finalizer, which keeps the definition. finish removes the finalizer, and waits until the definition is gone.
func undefine(t *testing.T, m *reconciletest.Member, copies ...*unstructured.Unstructured) (finish func()) {
	t.Helper()
	stays := put(t, m, strings.NewReplacer("NAME", "stays", "METADATA", "finalizers: [example.org/stays]").Replace(antreaPolicy))
	definition := &unstructured.Unstructured{}
	definition.SetAPIVersion("apiextensions.k8s.io/v1")
	definition.SetKind("CustomResourceDefinition")
	definition.SetName("clusternetworkpolicies.crd.antrea.io")
	if err := m.Client().Delete(t.Context(), definition.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	finish = sync.OnceFunc(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := m.Client().Patch(ctx, stays.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
			t.Error(err)
		}
		if err := admin.Await(ctx, "the definition is still there", func() (bool, error) {
			err := m.Client().Get(ctx, client.ObjectKeyFromObject(definition), definition.DeepCopy())
			return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
		}); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(finish)
	for _, o := range copies {
		await.True(t, "the copy is deleted", func() bool { return get(t, m, o) == nil })
	}
	return finish
}

// The API server deletes the objects of a kind before the kind. Users who uninstall a policy engine in one cluster remove nothing elsewhere,
// and what they delete later is still removed everywhere.
func TestDefinitionGoes(t *testing.T) {
	for _, n := range []int{1, 6} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			f, r, other := replicated(t, time.Millisecond)
			a, b := f.Member("a"), f.Member("b")
			var origins, copies []*unstructured.Unstructured
			for i := range n {
				origins = append(origins, put(t, a, strings.NewReplacer("NAME", fmt.Sprint("edge-", i), "METADATA", `annotations: {federation.isthmus.dev/policy: "true"}`).Replace(antreaPolicy)))
			}
			settle(t, f)
			for _, o := range origins {
				copies = append(copies, get(t, b, o))
			}
			finish := undefine(t, b, origins...)
			for _, o := range copies {
				if err := f.Deleted("b", o); err != nil {
					t.Fatal(err)
				}
			}
			decided(t, f, r)
			finish()
			for range 3 {
				settle(t, f)
			}
			for _, o := range origins {
				if have := states(t, a, o); have != "b kind missing, c kind missing" {
					t.Errorf("status of %s: %q", o.GetName(), have)
				}
			}
			if left := removalsIn(t, b); len(left) > 0 {
				t.Errorf("removals of %v are recorded", left)
			}
			deleted(t, f, "b", other)
			decided(t, f, r)
			gone(t, f, a, other)
		})
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
		f, _, _ := replicated(t, 2*time.Second)
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
		"asked": federationv1alpha1.AnnotationPolicyAntrea,
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
