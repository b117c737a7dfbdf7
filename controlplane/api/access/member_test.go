package access_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/await"
)

// Members do their regular work with every kind of request, and no request is refused.
func TestMemberAtWork(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	shared := func(name string) *v1beta1.ServiceImport { return b.aggregate(name, "demo", "") }
	clusters := func(ids ...string) func(*v1beta1.ServiceImport) {
		return func(s *v1beta1.ServiceImport) {
			s.Status.Clusters = nil
			for _, id := range ids {
				s.Status.Clusters = append(s.Status.Clusters, v1beta1.ClusterStatus{Cluster: id})
			}
		}
	}
	for i, name := range []string{"joined", "left", "last", "typed", "chosen", "only", "unlisted"} {
		si := b.aggregate(name, "demo", "b", fmt.Sprintf("243.2.0.%d", i+1))
		b.write(si)
		switch name {
		case "only":
			b.list(si, "a")
		case "unlisted":
		default:
			b.list(si, "a.b", "b")
		}
	}
	empty := shared("empty")
	b.write(empty)
	b.list(empty, "b")
	address := func(ip string) func(*v1beta1.ServiceImport) {
		return func(have *v1beta1.ServiceImport) {
			want := b.aggregate("any", "demo", "a", ip)
			have.Spec, have.Annotations = want.Spec, want.Annotations
		}
	}
	// The first addresses of b, which no longer exports, and of careless, which does and has no block.
	for name, by := range map[string]string{"widened": "b", "halved": "b", "helped": "careless"} {
		si := b.aggregate(name, "demo", by, "243.2.0.7")
		b.write(si)
		b.list(si, slices.Sorted(slices.Values([]string{"a", map[bool]string{true: "careless", false: "a.b"}[name == "helped"]}))...)
	}
	extend := func(by, added string) func(*v1beta1.ServiceImport) {
		return func(have *v1beta1.ServiceImport) {
			have.Spec = b.aggregate("any", "demo", by, have.Spec.IPs[0], added).Spec
			metav1.SetMetaDataAnnotation(&have.ObjectMeta, isthmus.AnnotationExtendedBy, by)
		}
	}
	kept := b.record("a", "kept", "demo") // an administrator's marks do not stop its owner
	kept.Finalizers, kept.OwnerReferences = []string{"example.com/kept"}, b.ownedBy(isthmus.GroupVersion.WithKind("ExportRecord"), kept, false)
	b.write(kept)
	t.Cleanup(func() {
		b.noError(merge(kept, `{"metadata":{"finalizers":null}}`)(context.WithoutCancel(t.Context()), b.admin))
	})

	tests := map[string]struct {
		as string // a when empty
		do []attempt
	}{
		"a record, from creation to deletion": {do: []attempt{
			create(b.record("a", "shop", "demo")),
			merge(b.record("a", "shop", "demo"), `{"spec":{"ips":["243.0.0.1"]},"metadata":{"annotations":{"isthmus.dev/changed-at":"1"}}}`),
			update(b, b.record("a", "shop", "demo"), func(r *isthmus.ExportRecord) { r.Spec.WithdrawnAt = new(metav1.Now()) }),
			remove(b.record("a", "shop", "demo")),
		}},
		"a record by server-side apply": {do: []attempt{apply(b.record("a", "applied", "demo")), apply(b.record("a", "applied", "demo"))}},
		"a record of a member with two labels": {as: "a.b", do: []attempt{
			create(b.record("a.b", "shop", "demo")), apply(b.record("a.b", "shop", "demo")), remove(b.record("a.b", "shop", "demo")),
		}},
		"a record that an administrator has marked": {do: []attempt{merge(kept, `{"spec":{"ips":["243.0.0.1"]}}`)}},
		"records with similar names": {do: []attempt{
			create(b.record("a", "a-b", "c")), create(b.record("a", "a", "b-c")), create(b.record("a", "b", "shop")),
		}},
		"a record with the longest names": {do: []attempt{create(b.record("a", strings.Repeat("s", 63), strings.Repeat("n", 63)))}},
		"a slice, from its first endpoint to its deletion": {do: []attempt{
			create(b.slice("a", "shop", "demo", "10.0.0.1")),
			apply(b.slice("a", "shop", "demo", "10.0.0.1", "10.0.0.2")),
			update(b, b.slice("a", "shop", "demo"), func(s *discoveryv1.EndpointSlice) { s.Endpoints = []discoveryv1.Endpoint{} }),
			remove(b.slice("a", "shop", "demo")),
		}},
		"a slice without endpoints": {do: []attempt{
			create(b.slice("a", "idle", "demo")),
			create(alter(b.slice("a", "idler", "demo"), func(s *discoveryv1.EndpointSlice) { s.Endpoints = nil })),
		}},
		"a slice of a member with two labels": {as: "a.b", do: []attempt{
			create(b.slice("a.b", "shop", "demo", "10.0.0.1")), remove(b.slice("a.b", "shop", "demo")),
		}},
		"an IPv6 slice": {do: []attempt{create(alter(b.slice("a", "six", "demo", "fd00::1"), func(s *discoveryv1.EndpointSlice) {
			s.AddressType = discoveryv1.AddressTypeIPv6
		}))}},
		"its own Lease": {do: []attempt{
			create(b.lease("a")),
			update(b, b.lease("a"), func(l *coordinationv1.Lease) { l.Spec.RenewTime = new(metav1.NowMicro()) }),
			apply(b.lease("a")),
		}},
		"its own Lease, with a label": {as: "a.b", do: []attempt{create(alter(b.lease("a.b"), func(l *coordinationv1.Lease) {
			l.Labels = map[string]string{isthmus.LabelCluster: "a.b"}
		}))}},
		"an aggregate with both families, and its deletion": {do: []attempt{
			create(alter(b.aggregate("both", "demo", "a", "243.0.0.2", "fd00:243:0:1::2"), func(s *v1beta1.ServiceImport) {
				metav1.SetMetaDataAnnotation(&s.ObjectMeta, isthmus.AnnotationUseClusterSetIP, "true")
			})),
			updateStatus(b, shared("both"), clusters("a")),
			remove(shared("both")),
		}},
		"an aggregate of IPv6 alone":        {do: []attempt{create(b.aggregate("six", "demo", "a", "fd00:243:0:1::3"))}},
		"an aggregate in the older version": {do: []attempt{create(b.alphaAggregate("older", "243.0.0.3"))}},
		"an aggregate by server-side apply": {do: []attempt{
			apply(b.aggregate("applied", "demo", "a", "243.0.0.4")), apply(b.aggregate("applied", "demo", "a", "243.0.0.4")),
		}},
		"an aggregate without an address, which gets one": {do: []attempt{
			create(shared("later")), updateStatus(b, shared("later"), clusters("a")),
			update(b, shared("later"), address("243.0.0.5")),
		}},
		"an address for another member's aggregate without one": {do: []attempt{update(b, shared("empty"), address("243.0.0.6"))}},
		"an address where an aggregate without exporters declines one": {do: []attempt{
			create(alter(shared("turned"), func(s *v1beta1.ServiceImport) {
				metav1.SetMetaDataAnnotation(&s.ObjectMeta, isthmus.AnnotationUseClusterSetIP, "false")
			})),
			update(b, shared("turned"), func(s *v1beta1.ServiceImport) {
				address("243.0.0.7")(s)
				metav1.SetMetaDataAnnotation(&s.ObjectMeta, isthmus.AnnotationUseClusterSetIP, "true")
			}),
		}},
		"a second family for an address whose allocator left, and other writes then": {do: []attempt{
			update(b, shared("widened"), extend("a", "fd00:243:0:1::7")),
			merge(shared("widened"), `{"spec":{"type":"Headless"},"metadata":{"annotations":{"lighthouse.submariner.io/use-clusterset-ip":"true"}}}`),
			updateStatus(b, shared("widened"), clusters("a.b")),
		}},
		"a second family, by a member with two labels":         {as: "a.b", do: []attempt{update(b, shared("halved"), extend("a.b", "fd00:243:0:2::7"))}},
		"a second family for which the allocator has no block": {do: []attempt{update(b, shared("helped"), extend("a", "fd00:243:0:1::8"))}},
		"adding itself to another member's aggregate":          {do: []attempt{updateStatus(b, shared("joined"), clusters("a", "a.b", "b"))}},
		"removing itself from another member's aggregate":      {as: "a.b", do: []attempt{updateStatus(b, shared("left"), clusters("b"))}},
		"removing itself from an aggregate, and deleting one as the last member": {as: "b", do: []attempt{
			func(ctx context.Context, _ client.Client) error {
				return updateStatus(b, shared("last"), clusters("b"))(ctx, b.member("a.b"))
			},
			remove(shared("last")),
		}},
		"deleting an aggregate that lists no member":                   {do: []attempt{remove(shared("unlisted"))}},
		"deleting an aggregate whose address another member allocated": {do: []attempt{remove(shared("only"))}},
		"another type of a shared aggregate": {do: []attempt{
			merge(shared("typed"), `{"spec":{"type":"Headless","ports":[{"port":80,"protocol":"TCP"}],"sessionAffinity":"ClientIP"}}`),
		}},
		"setting an address once": {do: []attempt{
			merge(shared("chosen"), `{"metadata":{"annotations":{"lighthouse.submariner.io/use-clusterset-ip":"true"}}}`),
		}},
		"reading the objects of all members": {do: []attempt{
			lists(b, &isthmus.MemberList{}), lists(b, &isthmus.ClusterSetConfigList{}), lists(b, &isthmus.ExportRecordList{}),
			lists(b, &discoveryv1.EndpointSliceList{}), lists(b, &v1beta1.ServiceImportList{}), lists(b, &coordinationv1.LeaseList{}),
		}},
	}
	members := map[string]client.Client{}
	for id := range blocks {
		members[id] = b.member(id)
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := members["a"]
			if tt.as != "" {
				c = members[tt.as]
			}
			for i, do := range tt.do {
				if err := do(t.Context(), c); err != nil {
					t.Fatalf("step %d: %v", i+1, err)
				}
			}
		})
	}
}

func lists(b *broker, all client.ObjectList) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.List(ctx, all, client.InNamespace(b.namespace))
	}
}

// The API server drops the status of a create, so no policy needs to check it.
func TestStatusOfACreateIsDropped(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	si := b.aggregate("shop", "demo", "")
	si.Status.Clusters = []v1beta1.ClusterStatus{{Cluster: "b"}}
	b.noError(b.member("a").Create(t.Context(), si))
	b.noError(b.admin.Get(t.Context(), client.ObjectKeyFromObject(si), si))
	if len(si.Status.Clusters) > 0 {
		t.Errorf("a create has set status.clusters to %v", si.Status.Clusters)
	}
}

// A Service without pods has a slice without ports, which the API server writes as null.
func TestSliceWithoutPorts(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	a := b.member("a")
	empty := b.slice("a", "shop", "demo")
	empty.Ports, empty.Endpoints = nil, nil
	b.noError(create(empty)(t.Context(), a))
	full := b.slice("a", "shop", "demo", "10.1.0.7")
	full.ResourceVersion = empty.ResourceVersion
	b.noError(a.Update(t.Context(), full))
	full.Ports, full.Endpoints = nil, nil
	b.noError(a.Update(t.Context(), full))
}

// Two accounts have the rights of members without being members: one never was, and one no longer is. Their writes are
// refused, and their objects can be removed.
func TestFormerAndForeignAccounts(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	b.exporting("shop", "243.0.0.1", "a")
	a := b.member("a")
	b.noError(create(b.lease("a"))(t.Context(), a))

	config := &isthmus.ClusterSetConfig{ObjectMeta: b.meta(isthmus.ClusterSetConfigName)}
	b.noError(b.admin.Get(t.Context(), client.ObjectKeyFromObject(config), config))
	config.Spec.Members = slices.DeleteFunc(config.Spec.Members, func(m isthmus.MemberBlocks) bool { return m.ClusterID == "a" })
	b.noError(b.admin.Update(t.Context(), config))
	left := func() error { return refused(b.dryRun(a, b.lease("a")), "cluster a is not a member") }
	await.NoError(b.t, "a has left", left)

	for id, attempts := range map[string]map[string]attempt{
		"a": {
			"record":            create(b.record("a", "fresh", "demo")),
			"tombstone":         merge(b.record("a", "shop", "demo"), `{"spec":{"withdrawnAt":"2026-01-01T00:00:00Z"}}`),
			"deleted record":    remove(b.record("a", "shop", "demo")),
			"slice":             create(b.slice("a", "fresh", "demo")),
			"changed slice":     merge(b.slice("a", "shop", "demo"), `{"endpoints":[]}`),
			"deleted slice":     remove(b.slice("a", "shop", "demo")),
			"aggregate":         create(b.aggregate("fresh", "demo", "")),
			"changed aggregate": merge(b.aggregate("shop", "demo", ""), `{"spec":{"type":"Headless"}}`),
			"status":            mergeStatus(b.aggregate("shop", "demo", ""), `{"status":{"clusters":[]}}`),
			"deleted aggregate": remove(b.aggregate("shop", "demo", "")),
			"lease":             merge(b.lease("a"), `{"spec":{"leaseDurationSeconds":60}}`),
		},
		"stranger": {
			"record":    create(b.record("stranger", "fresh", "demo")),
			"slice":     create(b.slice("stranger", "fresh", "demo")),
			"aggregate": create(b.aggregate("fresh", "demo", "stranger")),
			"status":    mergeStatus(b.aggregate("shop", "demo", ""), `{"status":{"clusters":[{"cluster":"a"},{"cluster":"stranger"}]}}`),
			"lease":     create(b.lease("stranger")),
		},
	} {
		c := b.member(id)
		for name, do := range attempts {
			t.Run(id+"/"+name, func(t *testing.T) {
				if err := refused(do(t.Context(), c), "cluster "+id+" is not a member: ClusterSetConfig clusterset does not list it"); err != nil {
					t.Error(err)
				}
			})
		}
	}

	// Without a configuration nobody writes, and what is there can still be removed.
	remaining := b.member("b")
	b.noError(b.admin.Delete(t.Context(), config))
	await.NoError(b.t, "the missing configuration is noticed", func() error {
		return refused(b.dryRun(remaining, b.lease("b")), "no params found")
	})
	for _, obj := range []client.Object{&isthmus.ExportRecord{}, &discoveryv1.EndpointSlice{}, &v1beta1.ServiceImport{}, &coordinationv1.Lease{}} {
		b.noError(b.admin.DeleteAllOf(t.Context(), obj, client.InNamespace(b.namespace)))
	}
}

// The policies of a broker do not apply to administrators, other namespaces, and another broker in the same API server
// whose members may have the same ids.
func TestPoliciesApplyToOneBroker(t *testing.T) {
	t.Parallel()
	one, two := newBroker(t), newBroker(t)
	for _, b := range []*broker{one, two} {
		b.write(b.record("b", "shop", "demo"))
		b.noError(create(b.record("a", "shop", "demo"))(t.Context(), b.member("a")))
	}
	odd := one.record("b", "odd", "kube-system")
	odd.Labels["app"], odd.Finalizers = "web", []string{"example.com/kept"}
	one.write(odd)
	one.noError(merge(odd, `{"metadata":{"finalizers":null}}`)(t.Context(), one.admin))

	elsewhere := one.slice("b", "shop", "demo")
	elsewhere.Namespace, elsewhere.Labels = "default", map[string]string{discoveryv1.LabelServiceName: "shop"}
	one.write(elsewhere)
	one.noError(one.admin.Delete(t.Context(), elsewhere))

	err := create(two.record("a", "fresh", "demo"))(t.Context(), one.member("a"))
	if err := refused(err, `cannot create resource "exportrecords"`); err != nil {
		t.Errorf("a of the first broker, on the second one: %v", err)
	}
	err = create(two.record("b", "fresh", "demo"))(t.Context(), two.member("a"))
	if err := refused(err, "isthmus."+two.namespace+".exportrecords"); err != nil {
		t.Errorf("a of the second broker: %v", err)
	}
}

// The test checks every verb on every kind that the API server serves: a member has the rights of the table in the
// broker's namespace, and elsewhere only those of all accounts.
func TestRightsOfAMember(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	own := map[string][]string{
		"clustersetconfigs.isthmus.dev":               {"get", "list", "watch"},
		"members.isthmus.dev":                         {"get", "list", "watch"},
		"exportrecords.isthmus.dev":                   {"create", "delete", "get", "list", "patch", "update", "watch"},
		"endpointslices.discovery.k8s.io":             {"create", "delete", "get", "list", "patch", "update", "watch"},
		"endpointslices/restricted.discovery.k8s.io":  {"create"},
		"serviceimports.multicluster.x-k8s.io":        {"create", "delete", "get", "list", "patch", "update", "watch"},
		"serviceimports/status.multicluster.x-k8s.io": {"patch", "update"},
		"leases.coordination.k8s.io":                  {"create", "get", "list", "patch", "update", "watch"},
	}
	everybody := map[string][]string{ // about themselves: system:basic-user; since Kubernetes 1.37 also public certificates
		"clustertrustbundles.certificates.k8s.io":       {"get", "list", "watch"},
		"selfsubjectreviews.authentication.k8s.io":      {"create"},
		"selfsubjectaccessreviews.authorization.k8s.io": {"create"},
		"selfsubjectrulesreviews.authorization.k8s.io":  {"create"},
	}
	both := maps.Clone(own)
	maps.Copy(both, everybody)
	for where, tt := range map[string]struct {
		namespace string
		want      map[string][]string
	}{
		"the broker's namespace": {b.namespace, both},
		"another namespace":      {"kube-system", everybody}, // a right outside of namespaces would be one here
	} {
		t.Run(where, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, b.rights("a", tt.namespace)); diff != "" {
				t.Errorf("rights (-want +have):\n%s", diff)
			}
		})
	}
}

// rights returns the verbs that member id may use in namespace, by resource.group, of all resources that the
// API server serves and some that it does not.
func (b *broker) rights(id, namespace string) map[string][]string {
	b.t.Helper()
	d, err := discovery.NewDiscoveryClientForConfig(server.Config(b.t))
	b.noError(err)
	_, lists, err := d.ServerGroupsAndResources()
	b.noError(err)
	resources := []schema.GroupResource{
		{Group: "*", Resource: "*"},
		{Resource: "users"},
		{Resource: "groups"},
		{Group: "authentication.k8s.io", Resource: "userextras/scopes"},
		{Group: "discovery.k8s.io", Resource: "endpointslices/restricted"},
		{Group: "certificates.k8s.io", Resource: "signers"},
		{Group: "policy", Resource: "podsecuritypolicies"},
	}
	for _, l := range lists {
		gv, err := schema.ParseGroupVersion(l.GroupVersion)
		b.noError(err)
		for _, r := range l.APIResources {
			resources = append(resources, schema.GroupResource{Group: gv.Group, Resource: r.Name})
		}
	}
	slices.SortFunc(resources, func(x, y schema.GroupResource) int { return strings.Compare(x.String(), y.String()) })
	rights := map[string][]string{}
	for _, r := range slices.Compact(resources) {
		name, sub, _ := strings.Cut(r.Resource, "/")
		for _, verb := range []string{
			"approve", "bind", "create", "delete", "deletecollection", "escalate", "get", "impersonate", "list", "patch", "sign", "update", "use", "watch",
		} {
			review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User:   "system:serviceaccount:" + b.namespace + ":" + isthmus.MemberAccount(id),
				Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + b.namespace, "system:authenticated"},
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Namespace: namespace, Verb: verb, Group: r.Group, Resource: name, Subresource: sub,
				},
			}}
			b.noError(b.admin.Create(b.t.Context(), review))
			if review.Status.Allowed {
				rights[r.String()] = append(rights[r.String()], verb)
			}
		}
	}
	return rights
}

// The test writes slices of the largest allowed size, and reports the time with and without the policies.
func TestLargeSlice(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	large := func(id string, addresses int) *discoveryv1.EndpointSlice {
		es := b.slice(id, "large", "demo")
		for i := range 1000 {
			e := discoveryv1.Endpoint{NodeName: new(fmt.Sprintf("node-%d", i)), Zone: new("z1"), Hostname: new(fmt.Sprintf("web-%d", i))}
			for j := range addresses {
				e.Addresses = append(e.Addresses, fmt.Sprintf("10.%d.%d.%d", j+1, i/250, i%250+1))
			}
			es.Endpoints = append(es.Endpoints, e)
		}
		return es
	}
	for name, tt := range map[string]struct {
		c         client.Client
		id        string
		addresses int
	}{
		"a member, one address each":     {b.member("a"), "a", 1},
		"an administrator, unrestricted": {b.admin, "b", 1},
		"a member, ten each":             {b.member("a.b"), "a.b", 10},
	} {
		t.Run(name, func(t *testing.T) {
			es := large(tt.id, tt.addresses)
			start := time.Now()
			if err := tt.c.Create(t.Context(), es); err != nil {
				t.Fatal(err)
			}
			created := time.Since(start)
			const updates = 10
			for i := range updates {
				es.Endpoints[i].Zone = new("z2")
				if err := tt.c.Update(t.Context(), es); err != nil {
					t.Fatal(err)
				}
			}
			t.Logf("1000 endpoints of %d addresses: created in %s, updated in %s", tt.addresses, created, (time.Since(start)-created)/updates)
		})
	}
}
