package membership

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func TestSet(t *testing.T) {
	const ns = "set"
	info, asAdmin := deploy(t, Broker{Namespace: ns, Ranges: cidrs("243.0.0.0/8", "fd00:1:2::/48")})
	for i, id := range []clusterset.ClusterID{"a", "b"} {
		r := request(info, id, 1+i)
		r.Addresses.Nodes = nil
		if _, err := reserve(t, asAdmin, "uid", r); err != nil {
			t.Fatal(err)
		}
	}
	before, err := readMember(t.Context(), asAdmin, ns, "a")
	if err != nil {
		t.Fatal(err)
	}
	m, err := Set(t.Context(), asAdmin, ns, "a", Addresses{Nodes: cidrs("192.0.2.0/25"), Extra: cidrs("198.51.100.0/24")}, cidrs("243.9.0.0/16"))
	if err != nil {
		t.Fatal(err)
	}
	want := before.Spec
	want.NodeCIDRs, want.ExtraCIDRs, want.ClusterSetIPCIDR = []string{"192.0.2.0/25"}, []string{"198.51.100.0/24"}, []string{"243.9.0.0/16", "fd00:1:2::/64"}
	if diff := cmp.Diff(want, m.Spec); diff != "" {
		t.Errorf("registration (-want +have):\n%s", diff)
	}
	if given := m.Annotations[annotationGiven]; given != "extra-cidr,node-cidr,pod-cidr,service-cidr" {
		t.Errorf("given: %s", given)
	}
	if have := brokerConfig(t, asAdmin, ns).Spec.Members[0].ClusterSetIPCIDR; !slices.Equal(have, want.ClusterSetIPCIDR) {
		t.Errorf("policies allow %v", have)
	}
	// An empty kind removes the addresses of that kind.
	if m, err = Set(t.Context(), asAdmin, ns, "a", Addresses{Extra: []netip.Prefix{}}, nil); err != nil || m.Spec.ExtraCIDRs != nil || len(m.Spec.NodeCIDRs) != 1 {
		t.Errorf("registration %+v, %v", m, err)
	}

	if m, err := Set(t.Context(), asAdmin, ns, "b", Addresses{Supernets: cidrs("10.128.0.0/10")}, nil); err != nil || !slices.Equal(m.Spec.PodSupernets, []string{"10.128.0.0/10"}) {
		t.Errorf("registration %+v, %v", m, err)
	}
	publish(t, asAdmin, ns, "hello", "243.9.0.1", []clusterset.ClusterID{"a"}, []clusterset.ClusterID{"a"})
	for name, tc := range map[string]struct {
		id        string
		addresses Addresses
		blocks    []netip.Prefix
		want      error
		text      string
	}{
		"pods of another member":                    {"a", Addresses{Pods: cidrs("10.2.0.0/24")}, nil, ErrOverlap, "pod CIDR 10.2.0.0/24 of this cluster and 10.2.0.0/16 of member b"},
		"a supernet around another member":          {"a", Addresses{Supernets: cidrs("10.0.0.0/8")}, nil, ErrOverlap, "supernet CIDR 10.0.0.0/8 of this cluster and 10.2.0.0/16 of member b"},
		"pods in another member's supernet":         {"a", Addresses{Pods: cidrs("10.129.0.0/16")}, nil, ErrOverlap, "pod CIDR 10.129.0.0/16 of this cluster and 10.128.0.0/10 of member b"},
		"no pod CIDR":                               {"a", Addresses{Pods: []netip.Prefix{}}, nil, nil, "a member needs a pod CIDR; give --pod-cidr"},
		"a block of another member":                 {"a", Addresses{}, cidrs("243.1.0.0/17"), ErrOverlap, "block 243.1.0.0/16 of member b"},
		"a block outside the ranges":                {"a", Addresses{}, cidrs("10.0.0.0/16"), nil, "lies outside of the ClusterSet's ranges"},
		"a block without an allocated ClusterSetIP": {"a", Addresses{}, cidrs("243.8.0.0/16"), nil, "member a has allocated addresses outside of 243.8.0.0/16, fd00:1:2::/64, to demo/hello; unexport these in every cluster first"},
		"an unknown member":                         {"c", Addresses{Pods: cidrs("10.3.0.0/16")}, nil, ErrNoMember, "no such member: c; the members are a, b"},
	} {
		t.Run(name, func(t *testing.T) {
			before := state(t, asAdmin, ns)
			_, err := Set(t.Context(), asAdmin, ns, tc.id, tc.addresses, tc.blocks)
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("got %v", err)
			}
			if diff := cmp.Diff(before, state(t, asAdmin, ns)); diff != "" {
				t.Errorf("it wrote (-before +after):\n%s", diff)
			}
		})
	}
	if _, err := ForceLeave(t.Context(), asAdmin, ns, "b"); err != nil {
		t.Fatal(err)
	}
	if _, err := Set(t.Context(), asAdmin, ns, "b", Addresses{Pods: cidrs("10.3.0.0/16")}, nil); !errors.Is(err, ErrNoMember) || !strings.Contains(err.Error(), "b has left") {
		t.Errorf("changed one that has left: %v", err)
	}
}

func TestList(t *testing.T) {
	const ns = "list"
	info, asAdmin := deploy(t, Broker{Namespace: ns})
	for i, id := range []clusterset.ClusterID{"b", "a", "c"} {
		if _, err := reserve(t, asAdmin, "uid", request(info, id, 1+i)); err != nil {
			t.Fatal(err)
		}
	}
	seen := metav1.NowMicro()
	lease := &coordinationv1.Lease{ObjectMeta: named(ns, v1alpha1.MemberLease("a"), "a"), Spec: coordinationv1.LeaseSpec{RenewTime: &seen}}
	lease.Annotations = map[string]string{v1alpha1.AnnotationPodCIDRs: "10.128.7.0/24,10.9.0.0/24,\x1b[31m", v1alpha1.AnnotationRefusedServices: "3"}
	if err := asAdmin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	if _, err := Set(t.Context(), asAdmin, ns, "a", Addresses{Supernets: cidrs("10.128.0.0/10")}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := ForceLeave(t.Context(), asAdmin, ns, "b"); err != nil {
		t.Fatal(err)
	}
	if err := Revoke(t.Context(), asAdmin, ns, "c"); err != nil {
		t.Fatal(err)
	}
	list, err := List(t.Context(), asAdmin, ns)
	if err != nil {
		t.Fatal(err)
	}
	type line struct {
		id                  string
		seen, left, revoked bool
	}
	if a := list[0]; !slices.Equal(a.Extended, cidrs("10.128.7.0/24")) || !slices.Equal(a.Outside, cidrs("10.9.0.0/24")) || a.RefusedServices != 3 {
		t.Errorf("a has pods in %v, and outside in %v; %d services are refused", a.Extended, a.Outside, a.RefusedServices)
	}
	var have []line
	for _, r := range list {
		have = append(have, line{r.Spec.ClusterID, !r.Seen.IsZero(), r.Spec.LeftAt != nil, r.Revoked})
	}
	if diff := cmp.Diff([]line{{"a", true, false, false}, {"b", false, true, false}, {"c", false, false, true}}, have, cmp.AllowUnexported(line{})); diff != "" {
		t.Errorf("members (-want +have):\n%s", diff)
	}
}

func TestReleaseHold(t *testing.T) {
	c := newClient(t, memberServer.Config(t))
	const ns = "kube-public" // any that exists
	if _, _, err := ReleaseHold(t.Context(), c, ns, "b", time.Now()); !errors.Is(err, ErrNotJoined) {
		t.Errorf("released in a cluster that has not joined: %v", err)
	}
	m := &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "a"}, Spec: v1alpha1.MemberSpec{ClusterID: "a", ClusterSetID: "s", JoinTime: metav1.Now()}}
	put(t, c, m)
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for i, source := range []clusterset.ClusterID{"b", "a.b", "b"} {
		if i == 1 { // from now on the controller says that it holds something
			meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionWithdrawalsHeld, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonMassWithdrawal})
			patched := &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "a"}, Status: m.Status}
			if err := c.Status().Patch(t.Context(), patched, client.MergeFrom(&v1alpha1.Member{ObjectMeta: patched.ObjectMeta})); err != nil {
				t.Fatal(err)
			}
		}
		self, held, err := ReleaseHold(t.Context(), c, ns, source, now)
		if err != nil || self != "a" || held != (i > 0) {
			t.Fatalf("released by %q, held: %v, %v", self, held, err)
		}
		now = now.Add(time.Minute)
	}
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(m), m); err != nil {
		t.Fatal(err)
	}
	if have, want := m.Annotations[v1alpha1.AnnotationReleaseHold], "a.b=2026-01-02T03:05:05Z,b=2026-01-02T03:06:05Z"; have != want {
		t.Errorf("the annotation is %s, want %s", have, want)
	}
	if _, _, err := ReleaseHold(t.Context(), c, ns, "B", now); err == nil {
		t.Error("an id that is none was taken")
	}
}
