package federation_test

import (
	"context"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/federation/bootstrap"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// lease returns the holder of the Lease of a member, as CLUSTER/POD, and its epoch.
func (w *testbed) lease(id clusterset.ClusterID) (holder string, epoch int64) {
	w.t.Helper()
	l := &coordinationv1.Lease{}
	if err := w.admin[id].Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: string(id)}, l); client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
	if l.Spec.HolderIdentity != nil {
		holder, _, _ = strings.Cut(*l.Spec.HolderIdentity, "_")
	}
	if l.Spec.LeaseTransitions != nil {
		epoch = int64(*l.Spec.LeaseTransitions)
	}
	return holder, epoch
}

// awaitLeader waits until a process leads members, all if none is named.
func (w *testbed) awaitLeader(process string, of ...clusterset.ClusterID) {
	w.t.Helper()
	if len(of) == 0 {
		of = ids
	}
	await.True(w.t, fmt.Sprintf("%s leads %v", process, of), func() bool {
		return !slices.ContainsFunc(of, func(id clusterset.ClusterID) bool { holder, _ := w.lease(id); return holder != process })
	})
}

// edit changes the Federation of a supervisor.
func (w *testbed) edit(supervisor clusterset.ClusterID, change func(*federationv1alpha1.FederationSpec)) {
	w.t.Helper()
	await.True(w.t, "the Federation is edited", func() bool {
		f := &federationv1alpha1.Federation{}
		if err := w.admin[supervisor].Get(w.t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, f); err != nil {
			return false
		}
		change(&f.Spec)
		return w.admin[supervisor].Update(w.t.Context(), f) == nil
	})
}

// leadsTo waits until a federated Service leads to addresses in one member.
func (w *testbed) leadsTo(id clusterset.ClusterID, name string, addresses ...string) {
	w.t.Helper()
	var have []string
	await.True(w.t, fmt.Sprintf("%s leads to %v in %s", name, addresses, id), func() bool {
		have, _ = w.federated(id, name)
		return slices.Equal(have, addresses)
	})
}

// awaitRest waits until no client writes into any member for longer than a Lease.
func (w *testbed) awaitRest() {
	w.t.Helper()
	const stillness = 3 * time.Second
	var came []string
	for range 10 {
		before := w.requests()
		<-time.After(stillness)
		if came = difference(before, w.requests()); len(came) == 0 {
			return
		}
	}
	w.t.Errorf("at rest was asked for:\n%s", strings.Join(came, "\n"))
}

// At rest nothing is written but Leases. When the leader of all members is killed, another process leads after the Lease
// has expired, in the next epoch. It writes no object that is already right, and sends no request for one. It writes new
// objects once. Only objects that are deleted are first moved to its epoch.
func TestKilledLeader(t *testing.T) {
	w := newTestbed(t)
	w.switchOnVIPs()
	kill := w.spawn("a", "one")
	w.awaitLeader("a/one")
	b, _ := w.supervise("b", "two")
	for i := range 5 {
		w.offer("c", fmt.Sprint("web-", i), "10.3.0.1", "10.3.0.2")
	}
	allow, edge := networkPolicy("allow"), clusterPolicy("edge")
	w.create("c", allow)
	w.create("a", edge)
	for i := range 5 {
		w.awaitEverywhere(fmt.Sprint("web-", i), "10.3.0.1", "10.3.0.2")
	}
	w.policyStates("c", allow, policies.Applied, nil)
	w.policyStates("a", edge, policies.Applied, nil)
	await.True(t, "all owners are told", func() bool {
		return w.status("a", "c").Services == 5 && w.status("b", "c").Services == 5 && w.told("c", 5)
	})

	writes, before, reigns, asked := w.audit(), w.epochs(), w.reigns(), w.requests()
	var led []clusterset.ClusterID // all, unless this machine has no time for Leases
	for _, id := range ids {
		if holder, _ := w.lease(id); holder == "a/one" {
			led = append(led, id)
		}
	}
	kill()
	w.awaitLeader("b/two")
	after := w.epochs()
	for _, id := range led {
		if after[id] != before[id]+1 {
			t.Errorf("the epoch of %s was %d and is %d, want the next one", id, before[id], after[id])
		}
		reigns.succession(id, "a/one", "b/two")
	}
	if len(led) == 0 {
		t.Error("the killed process led no member")
	}
	await.True(t, "b reports the leader", func() bool { return w.status("b", "c").Leader == "b/two" })
	if moved := writes.take("because of a new leader", before); moved > 0 {
		t.Errorf("%d objects were stamped because of a new leader", moved)
	}
	moved := slices.DeleteFunc(difference(asked, w.requests()), func(request string) bool {
		return strings.Contains(request, `resource="federations"`) // whose status says who leads
	})
	if len(moved) > 0 {
		t.Errorf("because of a new leader was asked for:\n%s", strings.Join(moved, "\n"))
	}

	w.offer("c", "late", "10.3.1.1")
	if n := writes.take("by the new leader", after, w.came("late", "c", ids...)...); n > 0 {
		t.Errorf("%d objects were stamped for a new Service", n)
	}
	w.decline("c", "web-0")
	w.annotate("c", allow.DeepCopy(), federationv1alpha1.AnnotationPolicyAntrea, nil)
	gone := slices.Concat(w.written(watch.Deleted, "web-0", "c", ids...), copies(watch.Deleted, allow, "a", "b"))
	// Where another process had led before, it may have written the objects itself.
	foreign := slices.DeleteFunc(slices.Clone(gone), func(write string) bool {
		to, _, _ := strings.Cut(write, " ")
		return !slices.Contains(led, clusterset.ClusterID(to))
	})
	if n := writes.take("what goes", after, append(gone, "c TOLD Service web-0")...); n < len(foreign) || n > len(gone) {
		t.Errorf("%d objects were made to be of the epoch of the leader that removed them, want %d to %d", n, len(foreign), len(gone))
	}
	if state := b.State(); len(state.Members) != 3 {
		t.Errorf("b sees %+v", state.Members)
	}
	conformance.Holds(t, "F4")
}

// reigns are all states of the Leases of members, as their API servers tell them.
type reigns struct {
	testbed *testbed

	mu     sync.Mutex
	leases map[string][]coordinationv1.LeaseSpec // by CLUSTER/NAME, in their order
}

// reigns records all states of the Leases of members.
func (w *testbed) reigns() *reigns {
	w.t.Helper()
	r := &reigns{testbed: w, leases: map[string][]coordinationv1.LeaseSpec{}}
	for _, id := range ids {
		list := &coordinationv1.LeaseList{}
		if err := w.admin[id].List(w.t.Context(), list, client.InNamespace(namespace)); err != nil {
			w.t.Fatal(err)
		}
		for i := range list.Items {
			r.note(id, &list.Items[i])
		}
		since := &client.ListOptions{Namespace: namespace, Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}}
		watcher, err := w.admin[id].Watch(w.t.Context(), list, since)
		if err != nil {
			w.t.Fatal(err)
		}
		var following sync.WaitGroup
		following.Go(func() {
			for e := range watcher.ResultChan() {
				if l, ok := e.Object.(*coordinationv1.Lease); ok {
					r.note(id, l)
				}
			}
		})
		w.t.Cleanup(func() { watcher.Stop(); following.Wait() })
	}
	return r
}

func (r *reigns) note(id clusterset.ClusterID, l *coordinationv1.Lease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := string(id) + "/" + l.Name
	r.leases[key] = append(r.leases[key], l.Spec)
}

// succession checks that a process took over the Lease of a member after the Lease of the former holder expired: not
// earlier, and at most one Lease duration later. A clock goes on while the machine is suspended, so the time is counted in
// renewals of another Lease, which the process already holds and renews as often as it tries to get this one.
func (r *reigns) succession(id clusterset.ClusterID, from, to string) {
	r.testbed.t.Helper()
	held := func(l coordinationv1.LeaseSpec, by string) bool {
		return l.HolderIdentity != nil && strings.HasPrefix(*l.HolderIdentity, by+"_")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.leases[string(id)+"/"+string(id)]
	i := slices.IndexFunc(all, func(l coordinationv1.LeaseSpec) bool { return held(l, to) })
	if i < 1 || !held(all[i-1], from) {
		r.testbed.t.Errorf("the Lease of %s did not go from %s to %s: %v", id, from, to, all)
		return
	}
	last, taken := all[i-1], all[i].AcquireTime.Time
	lease := time.Duration(*last.LeaseDurationSeconds) * time.Second
	if over := last.RenewTime.Add(lease); taken.Before(over) {
		r.testbed.t.Errorf("%s took the Lease of %s at %s, and it was over at %s", to, id, taken, over)
	}
	supervisor, pod, _ := strings.Cut(to, "/")
	renewals := 0
	for _, l := range r.leases[supervisor+"/isthmus-federation"] {
		if held(l, pod) && l.RenewTime.After(last.RenewTime.Time) && !l.RenewTime.After(taken) {
			renewals++
		}
	}
	most := int(2 * federation.Scaled(factor).Lease / federation.Scaled(factor).Retry)
	if renewals == 0 || renewals > most {
		r.testbed.t.Errorf("%s took the Lease of %s, of %s, after renewing another one %d times, want %d at most", to, id, lease, renewals, most)
	}
	r.testbed.t.Logf("%s took the Lease of %s %s after it was renewed last", to, id, taken.Sub(last.RenewTime.Time))
}

// told reports whether n member Services of a cluster have a status.
func (w *testbed) told(id clusterset.ClusterID, n int) bool {
	var all corev1.ServiceList
	if err := w.admin[id].List(w.t.Context(), &all, client.InNamespace(demo)); err != nil {
		w.t.Fatal(err)
	}
	for _, svc := range all.Items {
		if svc.Annotations["federation.isthmus.dev/service-status"] != "" {
			n--
		}
	}
	return n <= 0
}

// Two supervisors that do not reach each other each lead themselves, and one of them leads c. A new Service in c reaches
// all members; one in a supervisor does not reach the other. When the network is whole again, everything reaches all
// members, written once.
func TestPartitionedSupervisors(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.supervise("b", "two")
	w.offer("a", "before", "10.1.0.1")
	w.awaitEverywhere("before", "10.1.0.1")
	writes, before := w.audit(), w.epochs()

	w.gates["a b"].Shut()
	w.gates["b a"].Shut()
	w.awaitLeader("b/two", "b")
	allow := networkPolicy("allow")
	w.create("a", allow)
	w.offer("a", "of-a", "10.1.0.2")
	w.offer("b", "of-b", "10.2.0.2")
	w.offer("c", "of-c", "10.3.0.2")
	w.awaitEverywhere("of-c", "10.3.0.2")
	w.leadsTo("a", "of-a", "10.1.0.2")
	w.leadsTo("b", "of-b", "10.2.0.2")
	for id, name := range map[clusterset.ClusterID]string{"b": "of-a", "a": "of-b"} {
		if have, _ := w.federated(id, name); len(have) > 0 {
			t.Errorf("%s has %s while its leader cannot see it: %v", id, name, have)
		}
	}

	w.policyStates("a", allow, policies.Applied, map[clusterset.ClusterID]policies.State{"b": policies.Unreachable})
	deny := networkPolicy("deny")
	w.create("b", deny)
	<-time.After(away())
	w.serve("a", "before", "10.1.0.9")
	w.leadsTo("a", "before", "10.1.0.9")

	w.gates["a b"].Open()
	w.gates["b a"].Open()
	w.policyStates("a", allow, policies.Applied, nil)
	w.policyStates("b", deny, policies.Applied, nil)
	w.awaitEverywhere("before", "10.1.0.9")
	w.awaitEverywhere("of-a", "10.1.0.2")
	w.awaitEverywhere("of-b", "10.2.0.2")
	w.offer("c", "last", "10.3.0.3")
	w.awaitEverywhere("last", "10.3.0.3")
	writes.take("through the cut", before, slices.Concat(
		w.came("of-a", "a", ids...), w.came("of-b", "b", ids...), w.came("of-c", "c", ids...), w.came("last", "c", ids...), copies(watch.Added, allow, "b", "c"),
		copies(watch.Added, deny, "a", "c"), []string{"a MODIFIED EndpointSlice before of a", "b MODIFIED EndpointSlice before of a", "c MODIFIED EndpointSlice before of a"})...)
	conformance.Holds(t, "F7")
}

// The whole cluster of a supervisor is gone. The other supervisor leads the remaining members, and the last known objects
// of the lost one stay in effect. When it is back, it gets what it missed.
func TestLostSupervisorCluster(t *testing.T) {
	w := newTestbed(t)
	_, stop := w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.supervise("b", "two")
	w.offer("a", "of-a", "10.1.0.1")
	w.awaitEverywhere("of-a", "10.1.0.1")
	writes, before := w.audit(), w.epochs()

	for _, gate := range []string{"b a", "a b", "a c"} {
		w.gates[gate].Shut() // so that a gives no Lease back
	}
	stop()
	w.awaitLeader("b/two", "b", "c")
	await.True(t, "b reports that a is unreachable", func() bool { m := w.status("b", "a"); return !m.Reachable && m.Message != "" })
	w.offer("c", "late", "10.3.0.1")
	w.leadsTo("b", "late", "10.3.0.1")
	w.leadsTo("c", "late", "10.3.0.1")
	w.offer("c", "later", "10.3.0.2")
	w.leadsTo("c", "later", "10.3.0.2")
	if have, _ := w.federated("c", "of-a"); !slices.Equal(have, []string{"10.1.0.1"}) {
		t.Errorf("c reaches of-a at %v", have)
	}

	for _, gate := range []string{"b a", "a b", "a c"} {
		w.gates[gate].Open()
	}
	w.supervise("a", "anew")
	w.awaitEverywhere("late", "10.3.0.1")
	w.awaitEverywhere("later", "10.3.0.2")
	writes.take("while a was gone and came back", before, slices.Concat(w.came("late", "c", ids...), w.came("later", "c", ids...))...)
	conformance.Holds(t, "F6")
}

// away is how long a member is silent: ten minutes, or in a daily test longer than a Lease.
func away() time.Duration {
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		return 10 * time.Minute
	}
	return 3 * time.Second
}

// While a member is silent, its last known objects stay in effect and nothing is written elsewhere. When it is back it gets
// what it missed. The loss of all its Services is held back until a person releases it.
func TestMemberComesBackEmpty(t *testing.T) {
	const many = 6
	w := newTestbed(t)
	w.superviseWith("a", "one", 1)
	w.awaitLeader("a/one")
	for i := range many {
		w.offer("c", fmt.Sprint("web-", i), "10.3.0.1")
	}
	for i := range many {
		w.awaitEverywhere(fmt.Sprint("web-", i), "10.3.0.1")
	}
	allow := networkPolicy("allow")
	w.create("a", allow)
	w.policyStates("a", allow, policies.Applied, nil)
	writes, before := w.audit(), w.epochs()
	w.gates["a c"].Shut()
	await.True(t, "a reports that c is unreachable", func() bool { return !w.status("a", "c").Reachable })
	w.policyStates("a", allow, policies.Applied, map[clusterset.ClusterID]policies.State{"c": policies.Unreachable})
	w.offer("a", "late", "10.1.0.1")
	for _, kind := range []client.Object{&corev1.Service{}, &discoveryv1.EndpointSlice{}} {
		if err := w.admin["c"].DeleteAllOf(t.Context(), kind, client.InNamespace(demo)); err != nil {
			t.Fatal(err)
		}
	}
	<-time.After(away())
	w.gates["a c"].Open()
	w.awaitEverywhere("late", "10.1.0.1")
	w.policyStates("a", allow, policies.Applied, nil)
	await.True(t, "the withdrawals of c are held", func() bool { return w.status("a", "c").Held == many })
	writes.take("with c silent, and back without its Services", before,
		append(w.came("late", "a", ids...), "a EVENT MuchVanished of Federation federation",
			"a TOLD NetworkPolicy allow", "a TOLD NetworkPolicy allow")...) // c silent, and back

	clusters := []bootstrap.Cluster{{ID: "a", Supervisor: true, Client: w.admin["a"]}, {ID: "b", Supervisor: true, Client: w.admin["b"]}}
	released, err := bootstrap.Release(t.Context(), namespace, clusters, "c", time.Now())
	if err != nil || len(released) != 2 || released[0].Held != many {
		t.Fatalf("released %+v: %v", released, err)
	}
	for i := range many {
		w.awaitEverywhere(fmt.Sprint("web-", i))
	}
	await.True(t, "nothing is held", func() bool { return w.status("a", "c").Held == 0 })
}

// The API server of a member lost all data, so it is another cluster. Its last known objects stay in effect, and nothing is
// written into it. It becomes the member only when a person removes the former cluster and adds it.
func TestWipedMember(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.supervise("b", "two")
	w.offer("c", "web", "10.3.0.1")
	w.offer("a", "shop", "10.1.0.1")
	w.awaitEverywhere("web", "10.3.0.1")
	w.awaitEverywhere("shop", "10.1.0.1")
	await.True(t, "the uid of c is known", func() bool { return w.status("a", "c").ClusterUID != "" && w.status("b", "c").ClusterUID != "" })
	was := w.status("a", "c").ClusterUID
	writes, before := w.audit("a", "b"), w.epochs()

	servers["c"].Wipe(t)
	w.furnish("c")
	for _, supervisor := range ids[:2] {
		await.True(t, string(supervisor)+" reports that c does not accept its token", func() bool {
			m := w.status(supervisor, "c")
			return !m.Reachable && strings.Contains(m.Message, "does not accept the token")
		})
	}
	w.offer("a", "late", "10.1.0.2")
	w.leadsTo("a", "late", "10.1.0.2")
	w.leadsTo("b", "late", "10.1.0.2")
	if err := w.form(w.clusters(ids...)...); err == nil || !strings.Contains(err.Error(), "another cluster is member c") {
		t.Errorf("what was wiped became the member: %v", err)
	}
	writes.take("with c wiped", before, w.came("late", "a", "a", "b")...)
	for _, id := range ids[:2] {
		w.leadsTo(id, "web", "10.3.0.1")
	}
	for _, kind := range audited {
		for _, o := range w.list("c", kind).Items {
			if isOurs(&o) || epochOf(&o) != "" {
				t.Errorf("%s was written into the other cluster", describe(&o))
			}
		}
	}

	if _, err := bootstrap.Remove(t.Context(), bootstrap.Removal{ID: "c", Namespace: namespace, Gone: true, Clusters: w.clusters("a", "b")}); err != nil {
		t.Fatal(err)
	}
	w.leadsTo("a", "web")
	w.leadsTo("b", "web")
	writes.take("when c was gone", before, w.written(watch.Deleted, "web", "c", "a", "b")...)
	writes, before = w.audit(), w.epochs()
	if err := w.form(w.clusters(ids...)...); err != nil {
		t.Fatal(err)
	}
	w.offer("c", "web", "10.3.0.1")
	w.awaitEverywhere("web", "10.3.0.1")
	w.awaitEverywhere("shop", "10.1.0.1")
	w.awaitEverywhere("late", "10.1.0.2")
	writes.take("when c was added", before, slices.Concat(
		w.came("web", "c", ids...), w.written(watch.Added, "shop", "a", "c"), w.written(watch.Added, "late", "a", "c"))...)
	await.True(t, "another cluster is c", func() bool { uid := w.status("a", "c").ClusterUID; return uid != "" && uid != was })
}

// A member Service gets external IPs, and then a type that cannot be federated.
func TestMemberServiceChangesType(t *testing.T) {
	w := newTestbed(t)
	for _, id := range ids[:2] {
		w.edit(id, func(spec *federationv1alpha1.FederationSpec) {
			for i := range spec.Members {
				spec.Members[i].ExternalCIDRs = []string{"203.0.113.0/24"}
			}
		})
	}
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.offer("b", "web", "10.2.0.1")
	w.awaitEverywhere("web", "10.2.0.1")
	w.offer("c", "web", "10.3.0.1")
	w.awaitEverywhere("web", "10.2.0.1", "10.3.0.1")
	await.True(t, "all owners are told", func() bool { return w.told("b", 1) && w.told("c", 1) })
	writes, before := w.audit(), w.epochs()
	change := func(spec string) {
		t.Helper()
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: demo, Name: "web"}}
		if err := w.admin["c"].Patch(t.Context(), svc, client.RawPatch(types.MergePatchType, []byte(`{"spec":`+spec+`}`))); err != nil {
			t.Fatal(err)
		}
	}
	change(`{"externalIPs":["203.0.113.7"]}`)
	var want []string
	for _, id := range ids[:2] { // in c itself it leads to what it led to
		w.leadsTo(id, "web", "10.2.0.1", "203.0.113.7")
		want = append(want, string(id)+" ADDED EndpointSlice web of c", string(id)+" DELETED EndpointSlice web of c")
	}
	writes.take("with an external IP", before, want...)
	w.leadsTo("c", "web", "10.2.0.1", "10.3.0.1")

	change(`{"type":"ExternalName","externalName":"www.example.org","externalIPs":null,"clusterIP":null,"clusterIPs":null,"ipFamilies":null,"ipFamilyPolicy":null}`)
	w.awaitEverywhere("web", "10.2.0.1")
	want = []string{
		"b TOLD Service web", "b EVENT Federated of Service web", // which leads to fewer clusters
		"c TOLD Service web", "c EVENT NotFederated of Service web",
	}
	for _, id := range ids {
		want = append(want, string(id)+" DELETED EndpointSlice web of c")
	}
	writes.take("as ExternalName", before, want...)
}

// A user's Service has the name of a federated one. It stays unchanged, and all owners are told.
func TestTakenName(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	own := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}},
	}
	w.create("b", own)
	writes, before := w.audit(), w.epochs()
	w.offer("c", "web", "10.3.0.1")
	w.leadsTo("a", "web", "10.3.0.1")
	w.leadsTo("c", "web", "10.3.0.1")
	writes.take("with a name that is taken", before, append(w.written(watch.Added, "web", "c", "a", "c"),
		"b EVENT NameTaken of Service web", "c TOLD Service web", "c EVENT NameTaken of Service web")...)
	now := &corev1.Service{}
	if err := w.admin["b"].Get(t.Context(), client.ObjectKeyFromObject(own), now); err != nil || now.ResourceVersion != own.ResourceVersion {
		t.Errorf("a user's Service was written: %+v (%v)", now, err)
	}
	if err := w.admin["b"].Delete(t.Context(), own); err != nil {
		t.Fatal(err)
	}
	w.awaitEverywhere("web", "10.3.0.1")
	writes.take("when it is free", before, append(w.written(watch.Added, "web", "c", "b"), "c TOLD Service web", "c EVENT Federated of Service web")...)
}

// The Services of a leaving member are removed everywhere but in itself, where nothing more is written. They return when it
// joins again.
func TestMembersJoinAndLeave(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.supervise("b", "two")
	w.offer("c", "web", "10.3.0.1")
	w.offer("a", "shop", "10.1.0.1")
	w.awaitEverywhere("web", "10.3.0.1")
	w.awaitEverywhere("shop", "10.1.0.1")
	writes, before := w.audit(), w.epochs()
	c := map[clusterset.ClusterID]federationv1alpha1.MemberCluster{}
	for _, supervisor := range []clusterset.ClusterID{"b", "a"} {
		w.edit(supervisor, func(spec *federationv1alpha1.FederationSpec) {
			c[supervisor], spec.Members = spec.Members[2], spec.Members[:2]
		})
	}
	w.leadsTo("a", "web")
	w.leadsTo("b", "web")
	writes.take("when c left", before, w.written(watch.Deleted, "web", "c", "a", "b")...)

	for _, supervisor := range []clusterset.ClusterID{"a", "b"} {
		w.edit(supervisor, func(spec *federationv1alpha1.FederationSpec) {
			spec.Members = append(spec.Members, c[supervisor])
		})
	}
	w.awaitEverywhere("web", "10.3.0.1")
	w.awaitEverywhere("shop", "10.1.0.1")
	writes.take("when c came back", before, w.written(watch.Added, "web", "c", "a", "b")...)
	conformance.Holds(t, "F9")
}

// The Services of a member take effect once all its kinds were read, whichever kind is last.
func TestSlowlyReadMember(t *testing.T) {
	w := newTestbed(t)
	w.supervise("a", "one")
	w.offer("c", "web", "10.3.0.1")
	w.awaitEverywhere("web", "10.3.0.1") // so there is nothing to write in c when it comes back, which would be news of web
	var c federationv1alpha1.MemberCluster
	w.edit("a", func(spec *federationv1alpha1.FederationSpec) { c, spec.Members = spec.Members[2], spec.Members[:2] })
	w.leadsTo("a", "web")

	to, err := url.Parse(servers["c"].Config(t).Host)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(&rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: servers["c"].Config(t).CAData}})
	if err != nil {
		t.Fatal(err)
	}
	answered, release := make(chan string, 100), make(chan struct{})
	proxy := &httputil.ReverseProxy{Transport: transport, FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }}
	slow := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/nodes") {
			<-release
		}
		select {
		case answered <- r.URL.Path:
		default: // enough came
		}
		proxy.ServeHTTP(rw, r)
	}))
	t.Cleanup(slow.CloseClientConnections)
	secret := w.secret("a", "c")
	secret.Name, c.Secret, c.Server = "federation-slow", "federation-slow", slow.URL
	secret.Data[federationv1alpha1.SecretCA] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: slow.Certificate().Raw})
	w.create("a", secret)
	w.edit("a", func(spec *federationv1alpha1.FederationSpec) { spec.Members = append(spec.Members, c) })
	unread := map[string]bool{"/api/v1/services": true, "/api/v1/namespaces": true, "/apis/discovery.k8s.io/v1/endpointslices": true}
	for len(unread) > 0 {
		delete(unread, <-answered)
	}
	<-time.After(time.Second) // so that everything was looked at, in vain
	close(release)
	w.leadsTo("a", "web", "10.3.0.1")
}

// A cluster that replaced a member is neither written into nor read until a person confirms that it is the member. A
// cluster with the id of another member never is.
func TestOtherClusterWithSameID(t *testing.T) {
	w := newTestbed(t)
	w.admit("a", "b")
	claimed := &federationv1alpha1.ClusterClaim{}
	if err := w.admin["b"].Delete(t.Context(), &federationv1alpha1.Federation{ObjectMeta: claim(federationv1alpha1.FederationName, "").ObjectMeta}); err != nil {
		t.Fatal(err)
	}
	await.True(t, "b claims to be c", func() bool {
		claimed = claim(federationv1alpha1.ClaimID, "c")
		_ = w.admin["b"].Delete(t.Context(), claim(federationv1alpha1.ClaimID, ""))
		return w.admin["b"].Create(t.Context(), claimed) == nil
	})
	var b federationv1alpha1.MemberCluster
	member := func(id string, change func(*federationv1alpha1.MemberCluster)) {
		t.Helper()
		w.edit("a", func(spec *federationv1alpha1.FederationSpec) {
			i := slices.IndexFunc(spec.Members, func(m federationv1alpha1.MemberCluster) bool { return m.ClusterID == id })
			change(&spec.Members[i])
		})
	}
	w.edit("a", func(spec *federationv1alpha1.FederationSpec) {
		b = spec.Members[1]
		spec.Members = slices.Delete(spec.Members, 1, 2)
	})
	member("c", func(m *federationv1alpha1.MemberCluster) { m.ClusterUID = "" }) // it is to be found out
	w.supervise("a", "one")
	w.awaitLeader("a/one", "a", "c")
	w.offer("c", "web", "10.3.0.1")
	w.offer("b", "other", "10.2.0.1")
	w.leadsTo("a", "web", "10.3.0.1")
	await.True(t, "c's uid is known", func() bool { return w.status("a", "c").ClusterUID != "" })
	writes, before := w.audit(), w.epochs()

	var c federationv1alpha1.MemberCluster
	member("c", func(m *federationv1alpha1.MemberCluster) {
		c = *m
		m.Server, m.Secret = b.Server, b.Secret
	})
	await.True(t, "a reports another cluster in place of c", func() bool {
		m := w.status("a", "c")
		return !m.Reachable && strings.Contains(m.Message, "it is another cluster") && strings.Contains(m.Message, "clusterUID")
	})
	w.edit("a", func(spec *federationv1alpha1.FederationSpec) {
		also := c
		also.ClusterID = "d"
		spec.Members = append(spec.Members, also)
	})
	await.True(t, "a reports that d claims to be c", func() bool { return strings.Contains(w.status("a", "d").Message, "claims to be c, not d") })
	w.offer("a", "here", "10.1.0.1")
	w.leadsTo("a", "here", "10.1.0.1")
	writes.take("with others in the place of members", before, w.came("here", "a", "a")...)

	kube := &corev1.Namespace{}
	if err := w.admin["b"].Get(t.Context(), client.ObjectKey{Name: "kube-system"}, kube); err != nil {
		t.Fatal(err)
	}
	member("c", func(m *federationv1alpha1.MemberCluster) { m.ClusterUID = string(kube.UID) })
	w.leadsTo("a", "other", "10.2.0.1")
	w.leadsTo("b", "here", "10.1.0.1")
	w.leadsTo("a", "web") // which the new c does not offer
}

// admit gives a supervisor all rights in a cluster until the test ends, as isthmusctl would for a member.
func (w *testbed) admit(supervisor, id clusterset.ClusterID) {
	w.t.Helper()
	all := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "admitted"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: federationv1alpha1.SupervisorAccount(supervisor)}},
	}
	w.create(id, all)
	w.t.Cleanup(func() {
		if err := w.admin[id].Delete(context.WithoutCancel(w.t.Context()), all); err != nil {
			w.t.Error(err)
		}
	})
}
