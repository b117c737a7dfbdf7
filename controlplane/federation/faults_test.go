package federation_test

import (
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/formation"
)

// lease returns who holds the Lease of a member, as CLUSTER/POD, and its epoch.
func (w *world) lease(id clusterset.ClusterID) (holder string, epoch int64) {
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
func (w *world) awaitLeader(process string, of ...clusterset.ClusterID) {
	w.t.Helper()
	if len(of) == 0 {
		of = ids
	}
	eventually(w.t, fmt.Sprintf("%s leads %v", process, of), func() bool {
		return !slices.ContainsFunc(of, func(id clusterset.ClusterID) bool { holder, _ := w.lease(id); return holder != process })
	})
}

// edit changes the Federation of a supervisor.
func (w *world) edit(supervisor clusterset.ClusterID, change func(*federationv1alpha1.FederationSpec)) {
	w.t.Helper()
	eventually(w.t, "the Federation is edited", func() bool {
		f := &federationv1alpha1.Federation{}
		if err := w.admin[supervisor].Get(w.t.Context(), client.ObjectKey{Name: federationv1alpha1.FederationName}, f); err != nil {
			return false
		}
		change(&f.Spec)
		return w.admin[supervisor].Update(w.t.Context(), f) == nil
	})
}

// leadsTo waits until a federated Service leads to addresses in one member.
func (w *world) leadsTo(id clusterset.ClusterID, name string, addresses ...string) {
	w.t.Helper()
	var have []string
	eventually(w.t, fmt.Sprintf("%s leads to %v in %s", name, addresses, id), func() bool {
		have, _ = w.federated(id, name)
		return slices.Equal(have, addresses)
	})
}

// awaitRest waits until nobody asks any member to change anything for longer than a Lease.
func (w *world) awaitRest() {
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

// TestALeaderIsKilled: at rest nothing is written but Leases; when the leader of all members is killed, another one
// leads after the Lease, of the next epoch, and writes nothing that is right already, and what is new once.
func TestALeaderIsKilled(t *testing.T) {
	w := newWorld(t)
	kill := w.spawn("a", "one")
	w.awaitLeader("a/one")
	b, _ := w.supervise("b", "two")
	for i := range 5 {
		w.offer("c", fmt.Sprint("web-", i), "10.3.0.1", "10.3.0.2")
	}
	for i := range 5 {
		w.awaitEverywhere(fmt.Sprint("web-", i), "10.3.0.1", "10.3.0.2")
	}
	eventually(t, "all is told", func() bool {
		return w.status("a", "c").Services == 5 && w.status("b", "c").Services == 5 && w.told("c", 5)
	})

	w.awaitRest()

	writes, before := w.audit(), w.epochs()
	var led []clusterset.ClusterID // all, unless this machine has no time for Leases
	for _, id := range ids {
		if holder, _ := w.lease(id); holder == "a/one" {
			led = append(led, id)
		}
	}
	killed := time.Now()
	kill()
	w.awaitLeader("b/two")
	t.Logf("another leader of %v after %v", led, time.Since(killed))
	after := w.epochs()
	for _, id := range led {
		if after[id] != before[id]+1 {
			t.Errorf("the epoch of %s was %d and is %d, want the next one", id, before[id], after[id])
		}
	}
	if len(led) == 0 {
		t.Error("nobody was led by the one that was killed")
	}
	w.offer("c", "late", "10.3.1.1")
	writes.take("by the new leader", after, added("late", "c", ids...)...)
	if state := b.State(); len(state.Members) != 3 {
		t.Errorf("b sees %+v", state.Members)
	}
}

// told reports whether as many member Services of a cluster say where they lead.
func (w *world) told(id clusterset.ClusterID, n int) bool {
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

// TestSupervisorsThatDoNotReachEachOther: each leads itself, and one of them c; what is new in c gets everywhere, and
// what is new in one supervisor not into the other. When the network is whole again everything is everywhere, written
// once.
func TestSupervisorsThatDoNotReachEachOther(t *testing.T) {
	w := newWorld(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	w.supervise("b", "two")
	w.offer("a", "before", "10.1.0.1")
	w.awaitEverywhere("before", "10.1.0.1")
	writes, before := w.audit(), w.epochs()

	w.gates["a b"].Shut()
	w.gates["b a"].Shut()
	w.awaitLeader("b/two", "b")
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

	w.gates["a b"].Open()
	w.gates["b a"].Open()
	w.awaitEverywhere("of-a", "10.1.0.2")
	w.awaitEverywhere("of-b", "10.2.0.2")
	w.offer("c", "last", "10.3.0.3")
	w.awaitEverywhere("last", "10.3.0.3")
	writes.take("through the cut", before, slices.Concat(
		added("of-a", "a", ids...), added("of-b", "b", ids...), added("of-c", "c", ids...), added("last", "c", ids...))...)
}

// TestASupervisorClusterIsGone: with all that was in it. The other supervisor leads the rest, and what the one that is
// gone said last counts on; when it is back it gets what it missed.
func TestASupervisorClusterIsGone(t *testing.T) {
	w := newWorld(t)
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
	eventually(t, "b says that a is away", func() bool { m := w.status("b", "a"); return !m.Reachable && m.Message != "" })
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
	writes.take("while a was gone and came back", before, slices.Concat(added("late", "c", ids...), added("later", "c", ids...))...)
}

// away is how long a member is away: ten minutes, or in a test of every day longer than a Lease.
func away() time.Duration {
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		return 10 * time.Minute
	}
	return 3 * time.Second
}

// TestAMemberIsAwayAndComesBackEmpty: while it is away what it said counts on and nothing is written elsewhere; it gets
// what it missed. That all it offered is lost meanwhile is not believed before a person says so.
func TestAMemberIsAwayAndComesBackEmpty(t *testing.T) {
	const many = 6
	w := newWorld(t)
	w.supervise("a", "one")
	w.awaitLeader("a/one")
	for i := range many {
		w.offer("c", fmt.Sprint("web-", i), "10.3.0.1")
	}
	for i := range many {
		w.awaitEverywhere(fmt.Sprint("web-", i), "10.3.0.1")
	}
	writes, before := w.audit(), w.epochs()
	w.gates["a c"].Shut()
	eventually(t, "a says that c is away", func() bool { return !w.status("a", "c").Reachable })
	w.offer("a", "late", "10.1.0.1")
	for _, kind := range []client.Object{&corev1.Service{}, &discoveryv1.EndpointSlice{}} {
		if err := w.admin["c"].DeleteAllOf(t.Context(), kind, client.InNamespace(demo)); err != nil {
			t.Fatal(err)
		}
	}
	<-time.After(away())
	w.gates["a c"].Open()
	w.awaitEverywhere("late", "10.1.0.1")
	eventually(t, "what c lost is held", func() bool { return w.status("a", "c").Held == many })
	writes.take("with c away, and back without what it offered", before, added("late", "a", ids...)...)

	clusters := []formation.Cluster{{ID: "a", Supervisor: true, Client: w.admin["a"]}, {ID: "b", Supervisor: true, Client: w.admin["b"]}}
	released, err := formation.Release(t.Context(), namespace, clusters, "c", time.Now())
	if err != nil || len(released) != 2 || released[0].Held != many {
		t.Fatalf("released %+v: %v", released, err)
	}
	for i := range many {
		w.awaitEverywhere(fmt.Sprint("web-", i))
	}
	eventually(t, "nothing is held", func() bool { return w.status("a", "c").Held == 0 })
}

// TestMembersComeAndGo: what a member offers goes when it leaves, everywhere but in itself, where nothing is written any
// more; and comes again when it does.
func TestMembersComeAndGo(t *testing.T) {
	w := newWorld(t)
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
	var want []string
	for _, line := range added("web", "c", "a", "b") {
		want = append(want, strings.Replace(line, "ADDED", "DELETED", 1))
	}
	writes.take("when c left", before, want...)

	for _, supervisor := range []clusterset.ClusterID{"a", "b"} {
		w.edit(supervisor, func(spec *federationv1alpha1.FederationSpec) {
			spec.Members = append(spec.Members, c[supervisor])
		})
	}
	w.awaitEverywhere("web", "10.3.0.1")
	w.awaitEverywhere("shop", "10.1.0.1")
	writes.take("when c came back", before, added("web", "c", "a", "b")...)
}

// TestAMemberIsReadSlowly: what a member offers is believed once all of it was read, whichever kind comes last.
func TestAMemberIsReadSlowly(t *testing.T) {
	w := newWorld(t)
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

// TestAnotherClusterUnderTheSameID: a cluster that stands where a member was is not written into, nor believed, until a
// person says that it is the member now; and one that has the id of another member never.
func TestAnotherClusterUnderTheSameID(t *testing.T) {
	w := newWorld(t)
	claimed := &federationv1alpha1.ClusterClaim{}
	if err := w.admin["b"].Delete(t.Context(), &federationv1alpha1.Federation{ObjectMeta: claim(federationv1alpha1.FederationName, "").ObjectMeta}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "b calls itself c", func() bool {
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
	w.supervise("a", "one")
	w.awaitLeader("a/one", "a", "c")
	w.offer("c", "web", "10.3.0.1")
	w.offer("b", "other", "10.2.0.1")
	w.leadsTo("a", "web", "10.3.0.1")
	eventually(t, "c's uid is known", func() bool { return w.status("a", "c").ClusterUID != "" })
	writes, before := w.audit(), w.epochs()

	var c federationv1alpha1.MemberCluster
	member("c", func(m *federationv1alpha1.MemberCluster) {
		c = *m
		m.Server, m.Secret = b.Server, b.Secret
	})
	eventually(t, "a says that another cluster is in the place of c", func() bool {
		m := w.status("a", "c")
		return !m.Reachable && strings.Contains(m.Message, "it is another cluster") && strings.Contains(m.Message, "clusterUID")
	})
	w.edit("a", func(spec *federationv1alpha1.FederationSpec) {
		also := c
		also.ClusterID = "d"
		spec.Members = append(spec.Members, also)
	})
	eventually(t, "a says that d calls itself c", func() bool { return strings.Contains(w.status("a", "d").Message, "claims to be c, not d") })
	w.offer("a", "here", "10.1.0.1")
	w.leadsTo("a", "here", "10.1.0.1")
	writes.take("with others in the place of members", before, added("here", "a", "a")...)

	kube := &corev1.Namespace{}
	if err := w.admin["b"].Get(t.Context(), client.ObjectKey{Name: "kube-system"}, kube); err != nil {
		t.Fatal(err)
	}
	member("c", func(m *federationv1alpha1.MemberCluster) { m.ClusterUID = string(kube.UID) })
	w.leadsTo("a", "other", "10.2.0.1")
	w.leadsTo("b", "here", "10.1.0.1")
	w.leadsTo("a", "web") // which the new c does not offer
}
