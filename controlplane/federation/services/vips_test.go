package services_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

func withRange(ranges ...string) v1alpha1.FederationSpec {
	return v1alpha1.FederationSpec{ClusterSetIP: v1alpha1.ClusterSetIPSpec{Enabled: true, Ranges: ranges}}
}

// vip returns the ClusterSetIPs of a global Service in a cluster, nil without an import.
func (w *testbed) vip(id clusterset.ClusterID, name string) []string {
	w.t.Helper()
	si, _ := get[v1beta1.ServiceImport](w, id, system, name)
	return si.Spec.IPs
}

func TestClusterSetIP(t *testing.T) {
	w := newTestbed(t, withRange("243.0.0.0/24", "fd00:243::/120"))
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	w.sync() // and its status
	want := w.vip("a", "shop")
	if len(want) != 2 || !netip.MustParsePrefix("243.0.0.0/24").Contains(netip.MustParseAddr(want[0])) {
		t.Fatalf("addresses %v", want)
	}
	for _, id := range all {
		if diff := cmp.Diff(want, w.vip(id, "shop")); diff != "" {
			t.Errorf("in cluster %s: %s", id, diff)
		}
		si, _ := get[v1beta1.ServiceImport](w, id, system, "shop")
		imp, err := mcs.Import(si)
		if err != nil || len(imp.Ports) != 1 || len(imp.Clusters) != 1 || len(si.Status.Conditions) != 1 {
			t.Errorf("nodes read %+v, %v; status %+v", imp, err, si.Status)
		}
		var list discoveryv1.EndpointSliceList
		if err := w.Member(id).Client().List(t.Context(), &list, client.InNamespace(system), client.MatchingLabels{v1beta1.LabelServiceName: "shop"}); err != nil {
			t.Fatal(err)
		}
		if len(list.Items) != 1 {
			t.Fatalf("in cluster %s nodes read %d slices", id, len(list.Items))
		}
		slice, name, err := mcs.Slice(&list.Items[0])
		if err != nil || slice.Cluster != "a" || name != (clusterset.ServiceName{Namespace: system, Name: "shop"}) || len(slice.Endpoints) != 1 {
			t.Errorf("nodes read %+v of %v, %v", slice, name, err)
		}
	}
	before := w.versions()
	w.restart(withRange("243.0.0.0/24", "fd00:243::/120"))
	w.sync()
	w.succeed("shop")
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("something is written with nothing changed: %s", diff)
	}
	w.restart(withRange("243.9.0.0/24", "fd00:249::/120"))
	w.sync()
	if moved := w.vip("b", "shop"); len(moved) != 2 || !netip.MustParsePrefix("243.9.0.0/24").Contains(netip.MustParseAddr(moved[0])) {
		t.Errorf("in another range it has %v", moved)
	}
	w.restart(v1alpha1.FederationSpec{})
	w.sync()
	if _, there := get[v1beta1.ServiceImport](w, "b", system, "shop"); there {
		t.Error("an import stays after it was switched off")
	}
}

func TestUsedAddressIsNotAllocated(t *testing.T) {
	w := newTestbed(t, withRange("243.0.0.0/30")) // two addresses
	other := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "other"},
		Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: []string{first(t, "shop")}, Ports: []v1beta1.ServicePort{{Port: 80}}},
	}
	w.create("c", other)
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	for _, id := range all {
		if got := w.vip(id, "shop"); len(got) != 1 || got[0] == first(t, "shop") {
			t.Errorf("in cluster %s it has %v, and %v is another one's", id, got, other.Spec.IPs)
		}
	}
}

// first returns the address that a global Service takes in 243.0.0.0/30 while all are free.
func first(t *testing.T, name string) string {
	t.Helper()
	pool, err := clusterset.NewIPPool(netip.MustParsePrefix("243.0.0.0/30"))
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := pool.Allocate(clusterset.ServiceName{Namespace: system, Name: name}, []clusterset.Family{clusterset.IPv4})
	if err != nil {
		t.Fatal(err)
	}
	return addrs[0].String()
}

func TestDuplicateAddressesConverge(t *testing.T) {
	ranges := withRange("243.0.0.0/30")
	w := newTestbed(t, ranges)
	// Two names that want the same address.
	var names []string
	for i := 0; len(names) < 2; i++ {
		if name := fmt.Sprint("shop-", i); first(t, name) == first(t, "shop-0") {
			names = append(names, name)
		}
	}
	w.offer("a", "here", global, names[0], nil, "10.1.0.1")
	w.offer("c", "there", global, names[1], nil, "10.3.0.1")
	other := &testbed{t: t, namespace: w.namespace}
	other.restart(ranges)
	w.Member("b").Silence()
	w.Member("c").Silence()
	_ = w.Reconcile(t.Context(), "a")
	other.Member("a").Silence()
	other.Member("b").Silence()
	_ = other.Reconcile(t.Context(), "c")
	if x, y := w.vip("a", names[0]), w.vip("c", names[1]); len(x) != 1 || !cmp.Equal(x, y) {
		t.Fatalf("apart, they give %v and %v; want one address to both", x, y)
	}
	for _, one := range []*testbed{w, other} {
		for _, id := range all {
			one.Member(id).Back()
		}
	}
	for range 2 {
		other.sync("c")
		w.sync("a", "b")
	}
	x, y := w.vip("a", names[0]), w.vip("a", names[1])
	if len(x) != 1 || len(y) != 1 || x[0] == y[0] {
		t.Fatalf("together, they give %v and %v", x, y)
	}
	for _, id := range all {
		if diff := cmp.Diff([][]string{x, y}, [][]string{w.vip(id, names[0]), w.vip(id, names[1])}); diff != "" {
			t.Errorf("cluster %s differs: %s", id, diff)
		}
	}
	before := w.versions()
	w.sync()
	other.sync()
	if diff := cmp.Diff(before, w.versions()); diff != "" {
		t.Errorf("they do not come to rest: %s", diff)
	}
}

func TestLowestAddressWins(t *testing.T) {
	w := newTestbed(t, withRange("243.0.0.0/24"))
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync("a")
	for id, ip := range map[clusterset.ClusterID]string{"b": "243.0.0.200", "c": "243.0.0.1"} {
		w.create(id, &v1beta1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "shop", Labels: map[string]string{"app.kubernetes.io/managed-by": "federation.isthmus.dev"}},
			Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: []string{ip}, Ports: []v1beta1.ServicePort{{Port: 80}}},
		})
	}
	w.sync()
	for _, id := range all {
		if diff := cmp.Diff([]string{"243.0.0.1"}, w.vip(id, "shop")); diff != "" {
			t.Errorf("in cluster %s: %s", id, diff)
		}
	}
}

// The import of one member, for example changed with a stolen token, moves no address that more members have.
func TestOneMemberMovesNoAddress(t *testing.T) {
	w := newTestbed(t, withRange("243.0.0.0/24"))
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	before := w.vip("a", "shop")
	if len(before) != 1 || before[0] == "243.0.0.1" {
		t.Fatalf("it has %v, which has to be one that is not the lowest", before)
	}
	forged, _ := get[v1beta1.ServiceImport](w, "b", system, "shop")
	forged.Spec.IPs = []string{"243.0.0.1"}
	if err := w.Member("b").Client().Update(t.Context(), forged); err != nil {
		t.Fatal(err)
	}
	w.sync("a", "c")
	w.sync()
	for _, id := range all {
		if diff := cmp.Diff(before, w.vip(id, "shop")); diff != "" {
			t.Errorf("in cluster %s: %s", id, diff)
		}
	}
}

func TestUsersServiceImportIsNotChanged(t *testing.T) {
	w := newTestbed(t, withRange("243.0.0.0/24"))
	own := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "shop"},
		Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: []string{"243.7.0.1"}, Ports: []v1beta1.ServicePort{{Port: 80}}},
	}
	w.create("a", own)
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	if now, _ := get[v1beta1.ServiceImport](w, "a", system, "shop"); now.ResourceVersion != own.ResourceVersion {
		t.Errorf("it is written: %+v", now)
	}
	if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); svc.Annotations[status] == "" {
		t.Error("the conflict is not reported")
	}
}

// A child writes an import for a name that is new, with the federation's label and an address that is not the federation's. No
// member gets the address, the import is replaced, and an event and the member Services name it.
func TestForeignAddressIsNotBelieved(t *testing.T) {
	for name, ips := range map[string][]string{
		"the API server's":       {"10.96.0.1"},
		"a public one":           {"8.8.8.8"},
		"of another family":      {"2001:db8::1"},
		"beside a good one":      {"243.0.0.9", "8.8.8.8"},
		"mapped":                 {"::ffff:8.8.8.8"},
		"the range itself":       {"243.0.0.0"},
		"the broadcast of it":    {"243.0.0.255"},
		"just behind the range":  {"243.0.1.0"},
		"just before the range":  {"242.255.255.255"},
		"of the same length, v6": {"fd00:243::1"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestbed(t, withRange("243.0.0.0/24"))
			foreign := &v1beta1.ServiceImport{
				ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "shop", Labels: map[string]string{"app.kubernetes.io/managed-by": "federation.isthmus.dev"}},
				Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: ips, Ports: []v1beta1.ServicePort{{Port: 80}}},
			}
			w.create("c", foreign)
			w.offer("a", "web", global, "shop", nil, "10.1.0.1")
			w.sync("a", "b")
			bad := netip.MustParseAddr(ips[len(ips)-1]).Unmap().String()
			if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); !strings.Contains(svc.Annotations[status], "cluster c") || !strings.Contains(svc.Annotations[status], bad) {
				t.Errorf("the member Service's status is %q; it does not name cluster c and %s", svc.Annotations[status], bad)
			}
			w.sync()
			for _, id := range all {
				got := w.vip(id, "shop")
				if len(got) != 1 || got[0] == bad || !netip.MustParsePrefix("243.0.0.0/24").Contains(netip.MustParseAddr(got[0])) {
					t.Errorf("in cluster %s it has %v", id, got)
				}
			}
			if events := strings.Join(w.Member("c").Events(), "\n"); !strings.Contains(events, services.ReasonForeignAddress) || !strings.Contains(events, bad) {
				t.Errorf("events in c: %s", events)
			}
			w.sync()
			if svc, _ := get[corev1.Service](w, "a", w.namespace, "web"); strings.Contains(svc.Annotations[status], bad) {
				t.Errorf("the status still is %q", svc.Annotations[status])
			}
		})
	}
}

// An address of a family that the range has, twice.
func TestTwoAddressesOfAFamily(t *testing.T) {
	w := newTestbed(t, withRange("243.0.0.0/24", "fd00:243::/120"))
	for _, id := range all {
		w.create(id, &v1beta1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "shop", Labels: map[string]string{"app.kubernetes.io/managed-by": "federation.isthmus.dev"}},
			Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: []string{"243.0.0.9", "243.0.0.10"}, Ports: []v1beta1.ServicePort{{Port: 80}}},
		})
	}
	w.offer("a", "web", global, "shop", nil, "10.1.0.1")
	w.sync()
	for _, id := range all {
		got := w.vip(id, "shop")
		if len(got) != 2 || got[0] != "243.0.0.9" || !netip.MustParsePrefix("fd00:243::/120").Contains(netip.MustParseAddr(got[1])) {
			t.Errorf("in cluster %s it has %v", id, got)
		}
	}
}

// The range overlaps addresses of one member, which no Service of the federation takes: neither by allocation, nor because an
// import has one.
func TestMembersOwnAddressIsNotTaken(t *testing.T) {
	w := newTestbed(t, withRange("10.96.0.200/29"))
	taken := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "own"},
		Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.201", Ports: []corev1.ServicePort{{Port: 80}}}, // in the band that no Service gets unasked
	}
	w.create("b", taken)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "own"}, Spec: corev1.NodeSpec{PodCIDR: "10.96.0.204/31", PodCIDRs: []string{"10.96.0.204/31"}}}
	w.create("c", node)
	t.Cleanup(func() { _ = w.Member("c").Client().Delete(context.Background(), node) })
	for _, ip := range []string{"10.96.0.201", "10.96.0.204"} {
		name := "shop-" + ip[len(ip)-1:]
		w.create("a", &v1beta1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: name, Labels: map[string]string{"app.kubernetes.io/managed-by": "federation.isthmus.dev"}},
			Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: []string{ip}, Ports: []v1beta1.ServicePort{{Port: 80}}},
		})
		w.offer("a", "web-"+name, global, name, nil, "10.1.0.1")
	}
	w.offer("b", "third", global, "third", nil, "10.2.0.1")
	w.sync()
	w.sync()
	given := map[string]bool{}
	for _, name := range []string{"shop-1", "shop-4", "third"} {
		want := w.vip("a", name)
		for _, id := range all {
			if got := w.vip(id, name); len(got) != 1 || !cmp.Equal(got, want) || given[string(id)+got[0]] || slices.Contains([]string{"10.96.0.201", "10.96.0.204", "10.96.0.205"}, got[0]) {
				t.Errorf("in cluster %s, %s has %v", id, name, got)
			} else {
				given[string(id)+got[0]] = true
			}
		}
	}
	if err := w.Member("b").Client().Delete(t.Context(), taken); err != nil {
		t.Fatal(err)
	}
	w.offer("b", "fourth", global, "fourth", nil, "10.2.0.1")
	w.sync()
	if got := w.vip("b", "fourth"); len(got) != 1 {
		t.Errorf("the address of a deleted Service is not given: %v", got)
	}
}
