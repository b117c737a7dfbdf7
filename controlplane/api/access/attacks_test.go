package access_test

import (
	"context"
	"fmt"
	"net/http"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1alpha1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

func (b *broker) attacksOnRecords() map[string]attack {
	type record = isthmus.ExportRecord
	// new returns a record that a may write, after edit.
	fresh := func(edit func(*record)) attempt { return create(alter(b.record("a", "fresh", "demo"), edit)) }
	victim := func() *record { return b.record("b", "shop", "demo") }
	own := func() *record { return b.record("a", "own", "demo") }
	gvk := isthmus.GroupVersion.WithKind("ExportRecord")
	return map[string]attack{
		"another's, created": {do: create(b.record("b", "fresh", "demo")), because: `label isthmus.dev/cluster is "b"; member a writes only objects labelled a`},
		"another's by label alone": {
			do:      fresh(func(r *record) { r.Labels[isthmus.LabelCluster] = "b" }),
			because: `label isthmus.dev/cluster is "b"`,
		},
		"another's by name alone": {
			do:      fresh(func(r *record) { r.Name = "b.fresh.demo" }),
			because: `metadata.name is b.fresh.demo; by the spec it must be a.fresh.demo`,
		},
		"another's by spec.clusterID alone": {
			do:      fresh(func(r *record) { r.Spec.ClusterID = "b" }),
			because: `spec.clusterID is b; member a publishes only for a`,
		},
		"no owner": {
			do:      fresh(func(r *record) { delete(r.Labels, isthmus.LabelCluster) }),
			because: `label isthmus.dev/cluster is ""`,
		},
		"no labels at all": {
			do:      fresh(func(r *record) { r.Labels = nil }),
			because: `label isthmus.dev/cluster is ""`,
		},
		"a as a.b": {do: create(b.record("a.b", "fresh", "demo")), because: `label isthmus.dev/cluster is "a.b"; member a writes`},
		"a.b as a": {as: "a.b", do: create(b.record("a", "fresh", "demo")), because: `label isthmus.dev/cluster is "a"; member a.b writes`},
		"a as a.b, by a service that is called b.fresh": {
			do:      create(b.record("a", "b.fresh", "demo")), // its name is that of a.b's record of fresh
			because: `both must be RFC 1123 labels, without dots`,
		},
		"a as a.b, by a namespace with a dot": {
			do:      create(b.record("a", "b", "fresh.demo")),
			because: `both must be RFC 1123 labels, without dots`,
		},
		"a.b as a, with a's record of service b": {
			as:      "a.b",
			do:      create(alter(b.record("a.b", "fresh", "demo"), func(r *record) { r.Name = "a.b.demo" })),
			because: `metadata.name is a.b.demo; by the spec it must be a.b.fresh.demo`,
		},
		"a over a.b's record, by fields that give the same name": {
			do: update(b, b.record("a.b", "shop", "demo"), func(r *record) {
				own := b.record("a", "b.shop", "demo")
				r.Labels, r.Spec = own.Labels, own.Spec
			}),
			because: `label isthmus.dev/cluster was "a.b"; member a may not take over objects of another member`,
		},
		"a name that the server completes": {
			do:      fresh(func(r *record) { r.Name, r.GenerateName = "", "b.shop.demo-" }),
			because: `by the spec it must be a.fresh.demo`,
		},
		"an id in capitals": {
			do:      fresh(func(r *record) { r.Labels[isthmus.LabelCluster] = "A" }),
			because: `label isthmus.dev/cluster is "A"`,
		},
		"labels of another service": {
			do:      fresh(func(r *record) { r.Labels[isthmus.LabelServiceName] = "shop" }),
			because: `are "shop" and "demo"; the spec has fresh and demo`,
		},
		"labels of another namespace": {
			do:      fresh(func(r *record) { r.Labels[isthmus.LabelServiceNamespace] = "prod" }),
			because: `are "fresh" and "prod"; the spec has fresh and demo`,
		},
		"a namespace of Kubernetes": {
			do: create(b.record("a", "kube-dns", "kube-system")), because: `namespaces kube-* are not shared`,
		},
		"another's, changed":       {do: update(b, victim(), func(r *record) { r.Spec.IPs = []string{"243.0.0.7"} }), because: `label isthmus.dev/cluster is "b"`},
		"another's, buried":        {do: merge(victim(), `{"spec":{"withdrawnAt":"2026-01-01T00:00:00Z"}}`), because: `label isthmus.dev/cluster is "b"`},
		"another's, by JSON patch": {do: jsonPatch(victim(), `[{"op":"replace","path":"/spec/import/ports","value":[]}]`), because: `label isthmus.dev/cluster is "b"`},
		"another's, applied":       {do: apply(alter(victim(), func(r *record) { r.Spec.IPs = []string{"243.0.0.7"} })), because: `label isthmus.dev/cluster is "b"`},
		"another's, created by applying": {
			do: apply(b.record("b", "fresh", "demo")), because: `label isthmus.dev/cluster is "b"`,
		},
		"another's, taken over": {
			do: update(b, victim(), func(r *record) {
				r.Labels[isthmus.LabelCluster], r.Spec.ClusterID = "a", "a"
			}),
			because: `label isthmus.dev/cluster was "b"; member a may not take over objects of another member`,
		},
		"another's, taken over by label alone": {
			do:      merge(victim(), `{"metadata":{"labels":{"isthmus.dev/cluster":"a"}}}`),
			because: `label isthmus.dev/cluster was "b"`,
		},
		"one's own, given to another": {
			do: update(b, own(), func(r *record) {
				r.Labels[isthmus.LabelCluster], r.Spec.ClusterID = "b", "b"
			}),
			because: `label isthmus.dev/cluster is "b"`,
		},
		"one's own, given to another by label alone": {do: merge(own(), `{"metadata":{"labels":{"isthmus.dev/cluster":"b"}}}`), because: `label isthmus.dev/cluster is "b"`},
		"another's with a name of one's own, taken over": {
			do:      update(b, b.record("a", "odd", "demo"), func(r *record) { r.Labels[isthmus.LabelCluster], r.Spec.ClusterID = "a", "a" }),
			because: `label isthmus.dev/cluster was "b"; member a may not take over objects of another member`,
		},
		"another's by label, taken over": {
			do:      update(b, b.record("a", "odder", "demo"), func(r *record) { r.Labels[isthmus.LabelCluster] = "a" }),
			because: `label isthmus.dev/cluster was "b"`,
		},
		"another's by spec.clusterID, taken over": {
			do:      merge(b.record("a", "oddest", "demo"), `{"spec":{"clusterID":"a"}}`),
			because: `spec.clusterID was b; member a may not take over`,
		},
		"one's own, made to speak for another": {do: merge(own(), `{"spec":{"clusterID":"b"}}`), because: `spec.clusterID is b`},
		"one's own, made to be about another service": {
			do:      merge(own(), `{"spec":{"name":"shop"},"metadata":{"labels":{"isthmus.dev/service-name":"shop"}}}`),
			because: `metadata.name is a.own.demo; by the spec it must be a.shop.demo`,
		},
		"another's, deleted":                      {do: remove(victim()), because: `label isthmus.dev/cluster is "b"`},
		"a.b's, deleted by a":                     {do: remove(b.record("a.b", "shop", "demo")), because: `label isthmus.dev/cluster is "a.b"`},
		"a's, deleted by a.b":                     {as: "a.b", do: remove(own()), because: `label isthmus.dev/cluster is "a"`},
		"all, deleted by who has too many rights": {as: "careless", do: removeAll(b, &record{}), because: `member careless writes only`},
		"a stranger's":                            {as: "stranger", do: create(b.record("stranger", "fresh", "demo")), because: `cluster stranger is not a member`},
		"all, deleted":                            denied("deletecollection", "exportrecords", removeAll(b, &record{})),
		"in another namespace":                    denied("create", "exportrecords", fresh(func(r *record) { r.Namespace = "default" })),
		"in kube-system":                          denied("create", "exportrecords", fresh(func(r *record) { r.Namespace = "kube-system" })),
		"by a status that is not there":           denied("patch", "exportrecords/status", mergeStatus(victim(), `{"spec":{"ips":[]}}`)),
		"that another's object owns": {
			do:      fresh(func(r *record) { r.OwnerReferences = b.ownedBy(gvk, victim(), false) }),
			because: `metadata.ownerReferences may not be set or changed`,
		},
		"that holds up the deletion of another's object": {
			do:      fresh(func(r *record) { r.OwnerReferences = b.ownedBy(gvk, victim(), true) }),
			because: `metadata.ownerReferences may not be set or changed`,
		},
		"that gets an owner later": {
			do:      update(b, own(), func(r *record) { r.OwnerReferences = b.ownedBy(gvk, victim(), true) }),
			because: `metadata.ownerReferences may not be set or changed`,
		},
		"that cannot be deleted": {
			do:      fresh(func(r *record) { r.Finalizers = []string{"example.com/never"} }),
			because: `metadata.finalizers may not be set or changed`,
		},
		"that cannot be deleted any more": {do: merge(own(), `{"metadata":{"finalizers":["example.com/never"]}}`), because: `metadata.finalizers may not be set or changed`},
		"with a label of somebody else":   {do: merge(own(), `{"metadata":{"labels":{"app":"web"}}}`), because: `metadata.labels may have only these keys`},
		"with many field managers":        {do: update(b, own(), func(r *record) { appliers(r) }), because: `metadata.managedFields names more than 8 field managers`},
	}
}

// appliers adds the entries of nine field managers to obj.
func appliers(obj client.Object) {
	all := obj.GetManagedFields()
	for n := range 9 {
		all = append(all, metav1.ManagedFieldsEntry{
			Manager: fmt.Sprint("applier-", n), Operation: metav1.ManagedFieldsOperationApply, Time: new(metav1.Now()),
			APIVersion: all[0].APIVersion, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{"f:isthmus.dev/service-name":{}}}}`),
		})
	}
	obj.SetManagedFields(all)
}

// ownedBy returns a reference to owner, as it is stored.
func (b *broker) ownedBy(gvk schema.GroupVersionKind, owner client.Object, block bool) []metav1.OwnerReference {
	return []metav1.OwnerReference{{
		APIVersion: gvk.GroupVersion().String(), Kind: gvk.Kind, Name: owner.GetName(), UID: "0d8a1c1e-0000-4000-8000-000000000000",
		Controller: new(true), BlockOwnerDeletion: &block,
	}}
}

func jsonPatch(obj client.Object, patch string) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Patch(ctx, obj, client.RawPatch(types.JSONPatchType, []byte(patch)))
	}
}

func (b *broker) attacksOnSlices() map[string]attack {
	type slice = discoveryv1.EndpointSlice
	fresh := func(edit func(*slice)) attempt { return create(alter(b.slice("a", "fresh", "demo", "10.0.0.7"), edit)) }
	victim := func() *slice { return b.slice("b", "shop", "demo") }
	own := func() *slice { return b.slice("a", "own", "demo") }
	address := func(family discoveryv1.AddressType, a string) attempt {
		return fresh(func(s *slice) { s.AddressType, s.Endpoints[0].Addresses = family, []string{a} })
	}
	const notOne = `endpoints.addresses has a loopback, link-local, multicast`
	return map[string]attack{
		"another's, created": {do: create(b.slice("b", "fresh", "demo")), because: `label isthmus.dev/cluster is "b"`},
		"another's by label alone": {
			do: fresh(func(s *slice) { s.Labels[isthmus.LabelCluster] = "b" }), because: `label isthmus.dev/cluster is "b"`,
		},
		"another's by name alone": {
			do:      fresh(func(s *slice) { s.Name = b.slice("b", "fresh", "demo").Name }),
			because: `by the labels it must be a.fresh.demo- and 10 characters of base32`,
		},
		"no owner": {do: fresh(func(s *slice) { delete(s.Labels, isthmus.LabelCluster) }), because: `label isthmus.dev/cluster is ""`},
		"a as a.b": {do: create(b.slice("a.b", "fresh", "demo")), because: `label isthmus.dev/cluster is "a.b"`},
		"a.b as a": {as: "a.b", do: create(b.slice("a", "fresh", "demo")), because: `label isthmus.dev/cluster is "a"`},
		"a as a.b, by a service that is called b.fresh": {
			do: create(b.slice("a", "b.fresh", "demo")), because: `both must be RFC 1123 labels, without dots`,
		},
		"a.b as a, by a name that fits both": {
			as:      "a.b",
			do:      create(alter(b.slice("a.b", "fresh", "demo"), func(s *slice) { s.Name = "a.b.demo-aaaaaaaaaa" })),
			because: `by the labels it must be a.b.fresh.demo-`,
		},
		"of another service by label alone": {
			do:      fresh(func(s *slice) { s.Labels[isthmus.LabelServiceName] = "shop" }),
			because: `by the labels it must be a.shop.demo-`,
		},
		"of a namespace that only begins alike": {
			do:      fresh(func(s *slice) { s.Name = "a.fresh.demo-prod-aaaaaaaaaa" }),
			because: `by the labels it must be a.fresh.demo- and 10 characters`,
		},
		"with a name that is too short": {
			do: fresh(func(s *slice) { s.Name = "a.fresh.demo-aaaaaaaaa" }), because: `10 characters of base32`,
		},
		"with a name that is no hash": {
			do: fresh(func(s *slice) { s.Name = "a.fresh.demo-aaaa-aaaa1" }), because: `10 characters of base32`,
		},
		"with a name that the server completes": {
			do:      fresh(func(s *slice) { s.Name, s.GenerateName = "", "a.fresh.demo-" }),
			because: `10 characters of base32`,
		},
		"that says to be Kubernetes' own": {
			do:      fresh(func(s *slice) { s.Labels[discoveryv1.LabelManagedBy] = "endpointslice-controller.k8s.io" }),
			because: `label endpointslice.kubernetes.io/managed-by is "endpointslice-controller.k8s.io"; it must be isthmus.dev`,
		},
		"without managed-by": {
			do:      fresh(func(s *slice) { delete(s.Labels, discoveryv1.LabelManagedBy) }),
			because: `label endpointslice.kubernetes.io/managed-by is ""`,
		},
		"that feeds a Service of the broker's cluster": {
			do:      fresh(func(s *slice) { s.Labels[discoveryv1.LabelServiceName] = "webhook" }),
			because: `metadata.labels may have only these keys`,
		},
		"that feeds an import of the broker's cluster": {
			do:      fresh(func(s *slice) { s.Labels[v1beta1.LabelServiceName] = "shop.demo" }),
			because: `metadata.labels may have only these keys`,
		},
		"that feeds a Service of the broker's cluster, later": {
			do:      merge(own(), `{"metadata":{"labels":{"kubernetes.io/service-name":"webhook"}}}`),
			because: `metadata.labels may have only these keys`,
		},
		"of a namespace of Kubernetes": {do: create(b.slice("a", "kube-dns", "kube-system")), because: `namespaces kube-* are not shared`},
		"another's, emptied":           {do: merge(victim(), `{"endpoints":[]}`), because: `label isthmus.dev/cluster is "b"`},
		"another's, changed": {
			do:      update(b, victim(), func(s *slice) { s.Endpoints[0].Addresses = []string{"10.0.0.66"} }),
			because: `label isthmus.dev/cluster is "b"`,
		},
		"another's, applied": {
			do:      apply(b.slice("b", "shop", "demo", "10.0.0.66")),
			because: `label isthmus.dev/cluster is "b"`,
		},
		"another's, taken over": {
			do:      update(b, victim(), func(s *slice) { s.Labels[isthmus.LabelCluster] = "a" }),
			because: `label isthmus.dev/cluster was "b"; member a may not take over`,
		},
		"a over a.b's slice, by labels that give the same name": {
			do: update(b, b.slice("a.b", "shop", "demo"), func(s *slice) {
				s.Labels[isthmus.LabelCluster], s.Labels[isthmus.LabelServiceName] = "a", "b.shop"
			}),
			because: `label isthmus.dev/cluster was "a.b"`,
		},
		"one's own, given to another": {
			do: merge(own(), `{"metadata":{"labels":{"isthmus.dev/cluster":"b"}}}`), because: `label isthmus.dev/cluster is "b"`,
		},
		"another's, deleted":   {do: remove(victim()), because: `label isthmus.dev/cluster is "b"`},
		"a.b's, deleted by a":  {do: remove(b.slice("a.b", "shop", "demo")), because: `label isthmus.dev/cluster is "a.b"`},
		"all, deleted":         denied("deletecollection", "endpointslices", removeAll(b, &slice{})),
		"in another namespace": denied("create", "endpointslices", fresh(func(s *slice) { s.Namespace = "default" })),
		"with names for hosts, some day": {
			do:      create(alter(b.slice("a", "fresh", "demo"), func(s *slice) { s.AddressType = discoveryv1.AddressTypeFQDN })),
			because: `addressType is FQDN`,
		},
		"another's with a name of one's own, taken over": {
			do:      merge(b.slice("a", "odd", "demo"), `{"metadata":{"labels":{"isthmus.dev/cluster":"a"}}}`),
			because: `label isthmus.dev/cluster was "b"`,
		},
		"all, deleted by who has too many rights": {as: "careless", do: removeAll(b, &slice{}), because: `member careless writes only`},
		"with names for hosts":                    {do: address(discoveryv1.AddressTypeFQDN, "evil.example.com"), because: `addressType is FQDN; it must be IPv4 or IPv6`},
		"at the node itself":                      {do: address(discoveryv1.AddressTypeIPv4, "127.0.0.1"), because: `may not be in the loopback range`},
		"at the cloud's secrets":                  {do: address(discoveryv1.AddressTypeIPv4, "169.254.169.254"), because: `may not be in the link-local range`},
		"nowhere":                                 {do: address(discoveryv1.AddressTypeIPv4, "0.0.0.0"), because: `may not be unspecified`},
		"at everybody":                            {do: address(discoveryv1.AddressTypeIPv4, "239.1.1.1"), because: notOne},
		"at the whole network":                    {do: address(discoveryv1.AddressTypeIPv4, "255.255.255.255"), because: notOne},
		"at everybody, IPv6":                      {do: address(discoveryv1.AddressTypeIPv6, "ff0e::1"), because: notOne},
		"at a second address that is everybody": {
			do: fresh(func(s *slice) {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.0.0.8", "239.1.1.1"}})
			}),
			because: notOne,
		},
		"that another's object owns": {
			do: fresh(func(s *slice) {
				s.OwnerReferences = b.ownedBy(discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"), victim(), true)
			}),
			because: `metadata.ownerReferences may not be set or changed`,
		},
		"that cannot be deleted": {
			do: fresh(func(s *slice) { s.Finalizers = []string{"example.com/never"} }), because: `metadata.finalizers may not be set or changed`,
		},
	}
}

func (b *broker) attacksOnLeases() map[string]attack {
	type lease = coordinationv1.Lease
	renew := func(l *lease) { l.Spec.RenewTime = new(metav1.NewMicroTime(time.Now().Add(time.Hour))) }
	return map[string]attack{
		"another's, renewed":   {do: update(b, b.lease("b"), renew), because: `metadata.name is member-b; member a renews member-a`},
		"a.b's, renewed by a":  {do: update(b, b.lease("a.b"), renew), because: `metadata.name is member-a.b; member a renews member-a`},
		"a's, renewed by a.b":  {as: "a.b", do: update(b, b.lease("a"), renew), because: `metadata.name is member-a; member a.b renews member-a.b`},
		"another's, made old":  {do: merge(b.lease("b"), `{"spec":{"renewTime":"2020-01-01T00:00:00.000000Z"}}`), because: `member a renews member-a`},
		"another's, applied":   {do: apply(b.lease("b")), because: `member a renews member-a`},
		"of one to come":       {do: create(b.lease("d")), because: `metadata.name is member-d`},
		"of no member":         {do: create(&lease{ObjectMeta: b.meta("isthmus")}), because: `metadata.name is isthmus`},
		"by put where none is": {do: func(ctx context.Context, c client.Client) error { return c.Update(ctx, b.lease("d")) }, because: `metadata.name is member-d`},
		"with a name that the server completes": {
			do: create(&lease{ObjectMeta: metav1.ObjectMeta{Namespace: b.namespace, GenerateName: "member-"}}), because: `member a renews member-a`,
		},
		"one's own, deleted": denied("delete", "leases", remove(b.lease("a"))),
		"another's, deleted": denied("delete", "leases", remove(b.lease("b"))),
		"all, deleted":       denied("deletecollection", "leases", removeAll(b, &lease{})),
		"labelled another's": {do: merge(b.lease("a"), `{"metadata":{"labels":{"isthmus.dev/cluster":"b"}}}`), because: `label isthmus.dev/cluster is "b"`},
		"one's own, deleted by who has too many rights": {
			as: "careless", do: remove(b.lease("careless")), because: `a member may not delete its Lease`,
		},
		"all, deleted by who has too many rights": {as: "careless", do: removeAll(b, &lease{}), because: `member careless renews member-careless`},
		"a stranger's": {as: "stranger", do: create(b.lease("stranger")), because: `cluster stranger is not a member`},
		"that another's object owns": {
			do: update(b, b.lease("a"), func(l *lease) {
				l.OwnerReferences = b.ownedBy(coordinationv1.SchemeGroupVersion.WithKind("Lease"), b.lease("b"), true)
			}),
			because: `metadata.ownerReferences may not be set or changed`,
		},
		"with a label of somebody else": {do: merge(b.lease("a"), `{"metadata":{"labels":{"app":"web"}}}`), because: `metadata.labels may have only these keys`},
		"that cannot be deleted":        {do: merge(b.lease("a"), `{"metadata":{"finalizers":["example.com/never"]}}`), because: `metadata.finalizers may not be set or changed`},
		"of the control plane":          denied("create", "leases", create(&lease{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "member-a"}})),
		"of a node":                     denied("create", "leases", create(&lease{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-node-lease", Name: "member-a"}})),
	}
}

func (b *broker) attacksOnAggregates() map[string]attack {
	type si = v1beta1.ServiceImport
	const (
		allocator = isthmus.AnnotationAllocatedBy
		use       = isthmus.AnnotationUseClusterSetIP
	)
	fresh := func(by string, ips ...string) *si { return b.aggregate("fresh", "demo", by, ips...) }
	shop := func() *si { return b.aggregate("shop", "demo", "") }
	bare := func() *si { return b.aggregate("bare", "demo", "") }
	own := func() *si { return b.aggregate("own", "demo", "") }
	give := func(by string, ips ...string) func(*si) {
		return func(have *si) {
			want := b.aggregate("bare", "demo", by, ips...)
			have.Spec, have.Annotations = want.Spec, want.Annotations
		}
	}
	annotate := func(key, value string) func(*si) {
		return func(s *si) { metav1.SetMetaDataAnnotation(&s.ObjectMeta, key, value) }
	}
	// written has an address of a's, spelled otherwise.
	written := func(ip, otherwise string) *si {
		return alter(fresh("a", ip), func(s *si) { s.Spec.IPs[0] = otherwise })
	}
	const (
		fromOwn = `member a allocates from [243.0.0.0/16 fd00:243:0:1::/64]`
		stays   = `the ClusterSetIP of an aggregate is immutable`
		asFirst = `it must be true or false, not false with a ClusterSetIP, and is immutable once set`
		names   = `it must name the allocator of the ClusterSetIP, here "`

		createdBy = `it must name the member that created the aggregate`
	)
	return map[string]attack{
		"an address of another's block":      {do: create(fresh("a", "243.2.0.7")), because: `spec.ips is [243.2.0.7]; ` + fromOwn},
		"an address of a.b's block by a":     {do: create(fresh("a", "243.1.0.7")), because: fromOwn},
		"an address of a's block by a.b":     {as: "a.b", do: create(fresh("a.b", "243.0.0.7")), because: `member a.b allocates from [243.1.0.0/16`},
		"an address outside of all blocks":   {do: create(fresh("a", "10.0.0.7")), because: fromOwn},
		"an address of the cloud's":          {do: create(fresh("a", "169.254.169.254")), because: fromOwn},
		"an IPv6 address of another's block": {do: create(fresh("a", "fd00:243:0:3::7")), because: fromOwn},
		"one address of its own and one not": {do: create(fresh("a", "243.0.0.7", "fd00:243:0:3::7")), because: fromOwn},
		"an address in another form":         {do: create(written("fd00:243:0:1::7", "fd00:0243:0:1::7")), because: fromOwn},
		"an IPv4 address written as IPv6":    {do: create(written("243.0.0.7", "::ffff:243.0.0.7")), because: fromOwn},
		"no address but a word":              {do: create(written("243.0.0.7", "localhost")), because: fromOwn},
		"families that are not those of the ips": {
			do:      create(alter(fresh("a", "243.0.0.7"), func(s *si) { s.Spec.IPFamilies[0] = corev1.IPv6Protocol })),
			because: `it must list the families of spec.ips`,
		},
		"two addresses of a family":          {do: create(fresh("a", "243.0.0.7", "243.0.0.8")), because: `it must list the families of spec.ips`},
		"another's allocator":                {do: create(fresh("b", "243.0.0.7")), because: names + `a"`},
		"another's allocator and block":      {do: create(fresh("b", "243.2.0.7")), because: `denied request`}, // by either of two policies
		"a.b's allocator by a":               {do: create(fresh("a.b", "243.0.0.7")), because: names + `a"`},
		"no allocator":                       {do: create(alter(fresh("a", "243.0.0.7"), func(s *si) { s.Annotations = nil })), because: names + `a"`},
		"an allocator of nothing":            {do: create(alter(fresh(""), annotate(allocator, "b"))), because: names + `"`},
		"an allocator of nothing, oneself":   {do: create(alter(fresh(""), annotate(allocator, "a"))), because: names + `"`},
		"an address for who has not got one": {do: update(b, bare(), give("a", "243.2.0.7")), because: fromOwn},
		"an address in another's name":       {do: update(b, bare(), give("b", "243.0.0.7")), because: names + `a"`},
		"an allocator where no address is":   {do: update(b, bare(), annotate(allocator, "a")), because: names + `"`},
		"an address and no use for it": {
			do:      update(b, bare(), func(s *si) { give("a", "243.0.0.7")(s); annotate(use, "false")(s) }),
			because: asFirst,
		},
		"use for an address after all":        {do: update(b, b.aggregate("declined", "demo", ""), annotate(use, "true")), because: `was "false" and is "true"; ` + asFirst},
		"no choice any more":                  {do: update(b, b.aggregate("declined", "demo", ""), func(s *si) { s.Annotations = nil }), because: asFirst},
		"an address for who declined it":      {do: update(b, b.aggregate("declined", "demo", ""), give("a", "243.0.0.7")), because: asFirst},
		"a choice that is none":               {do: create(alter(fresh(""), annotate(use, "maybe"))), because: asFirst},
		"no use for an address that is there": {do: update(b, b.aggregate("old", "demo", ""), annotate(use, "false")), because: asFirst},
		"a name that is not the labels'": {
			do:      create(alter(fresh(""), func(s *si) { s.Name = "stale.demo" })),
			because: `metadata.name is stale.demo; by the labels it must be fresh.demo`,
		},
		"no labels":             {do: create(alter(fresh(""), func(s *si) { s.Labels = nil })), because: `by the labels it must be .`},
		"a name of three parts": {do: create(b.aggregate("b.fresh", "demo", "")), because: `both must be RFC 1123 labels, without dots`},
		"a name that the server completes": {
			do:      create(alter(fresh(""), func(s *si) { s.Name, s.GenerateName = "", "shop.demo" })),
			because: `by the labels it must be fresh.demo`,
		},
		"a namespace of Kubernetes": {do: create(b.aggregate("kube-dns", "kube-system", "")), because: `namespaces kube-* are not shared`},
		"an owner's label": {
			do:      create(alter(fresh(""), func(s *si) { s.Labels[isthmus.LabelCluster] = "a" })),
			because: `metadata.labels may have only these keys`,
		},
		"another address": {
			do:      update(b, shop(), func(s *si) { s.Spec.IPs = []string{"243.0.0.7"} }),
			because: `spec.ips was [243.2.0.1] and is [243.0.0.7]; ` + stays,
		},
		"another address, by patch":               {do: merge(shop(), `{"spec":{"ips":["243.0.0.2"]}}`), because: stays},
		"another address, of its own":             {do: merge(own(), `{"spec":{"ips":["243.0.0.9"]}}`), because: stays},
		"another address, applied":                {do: apply(b.aggregate("shop", "demo", "a", "243.0.0.7")), because: stays},
		"another address, by the other version":   {do: merge(b.alphaAggregate("shop", "243.2.0.1"), `{"spec":{"ips":["243.0.0.7"]}}`), because: stays},
		"a foreign address, by the other version": {do: create(b.alphaAggregate("fresh", "243.2.0.7")), because: fromOwn},
		"a second address for another's":          {do: merge(shop(), `{"spec":{"ips":["243.2.0.1","fd00:243:0:1::1"],"ipFamilies":["IPv4","IPv6"]}}`), because: `denied request`}, // by either of two policies
		"a second address before the first":       {do: merge(own(), `{"spec":{"ips":["fd00:243:0:1::1","243.0.0.1"],"ipFamilies":["IPv6","IPv4"]}}`), because: stays},
		"a second address of another's block":     {do: merge(own(), `{"spec":{"ips":["243.0.0.1","fd00:243:0:3::1"],"ipFamilies":["IPv4","IPv6"]}}`), because: fromOwn},
		"a second address of one family":          {do: merge(own(), `{"spec":{"ips":["243.0.0.1","243.0.0.2"],"ipFamilies":["IPv4","IPv4"]}}`), because: `it must list the families of spec.ips`},
		"a second address without its family":     {do: merge(own(), `{"spec":{"ips":["243.0.0.1","fd00:243:0:1::1"]}}`), because: `it must list the families of spec.ips`},
		"a second address and another first one":  {do: merge(own(), `{"spec":{"ips":["243.0.0.2","fd00:243:0:1::1"],"ipFamilies":["IPv4","IPv6"]}}`), because: stays},
		"no address any more":                     {do: merge(shop(), `{"spec":{"ips":null}}`), because: stays},
		"an empty spec": {
			do:      jsonPatch(shop(), `[{"op":"replace","path":"/spec","value":{"type":"ClusterSetIP","ports":[]}}]`),
			because: stays,
		},
		"other families":                  {do: merge(shop(), `{"spec":{"ipFamilies":["IPv6"]}}`), because: `spec.ipFamilies changes`},
		"no families any more":            {do: merge(shop(), `{"spec":{"ipFamilies":null}}`), because: `spec.ipFamilies changes`},
		"itself as allocator":             {do: update(b, shop(), annotate(allocator, "a")), because: names + `b"`},
		"no allocator any more":           {do: update(b, shop(), func(s *si) { delete(s.Annotations, allocator) }), because: names + `b"`},
		"no annotations any more":         {do: update(b, shop(), func(s *si) { s.Annotations = nil }), because: names + `b"`},
		"another as allocator of its own": {do: update(b, own(), annotate(allocator, "b")), because: names + `a"`},
		"other labels":                    {do: merge(shop(), `{"metadata":{"labels":{"isthmus.dev/service-name":"fresh"}}}`), because: `by the labels it must be fresh.demo`},
		"labels of somebody else":         {do: merge(shop(), `{"metadata":{"labels":{"app":"web"}}}`), because: `metadata.labels may have only these keys`},
		"a finalizer":                     {do: merge(shop(), `{"metadata":{"finalizers":["example.com/never"]}}`), because: `metadata.finalizers may not be set or changed`},
		"an owner": {
			do: update(b, shop(), func(s *si) {
				s.OwnerReferences = b.ownedBy(v1beta1.SchemeGroupVersion.WithKind("ServiceImport"), own(), false)
			}),
			because: `metadata.ownerReferences may not be set or changed`,
		},
		"others', deleted":        {do: remove(shop()), because: `status.clusters lists [a.b b]; member a deletes an aggregate only if no other member is listed`},
		"one that others use too": {do: remove(own()), because: `status.clusters lists [a b]`},
		"a.b's, deleted by a":     {do: remove(b.aggregate("dotted", "demo", "")), because: `status.clusters lists [a.b]; member a deletes`},
		"a's, deleted by a.b":     {as: "a.b", do: remove(b.aggregate("solo", "demo", "")), because: `status.clusters lists [a]; member a.b deletes`},
		"others', deleted softly": {do: remove(shop(), client.PropagationPolicy(metav1.DeletePropagationForeground)), because: `status.clusters lists [a.b b]`},
		"another as the creator":  {do: create(alter(fresh(""), annotate(isthmus.AnnotationCreatedBy, "b"))), because: createdBy + `, here "a"`},
		"no creator":              {do: create(alter(fresh(""), func(s *si) { s.Annotations = nil })), because: createdBy + `, here "a"`},
		"another creator later":   {do: update(b, shop(), annotate(isthmus.AnnotationCreatedBy, "a")), because: createdBy},
		"no creator later":        {do: merge(shop(), `{"metadata":{"annotations":{"isthmus.dev/created-by":null}}}`), because: createdBy},
		"a creator of an old one": {do: merge(b.aggregate("authorless", "demo", ""), `{"metadata":{"annotations":{"isthmus.dev/created-by":"a"}}}`), because: createdBy + `, here ""`},
		"many field managers":     {do: update(b, own(), func(s *si) { appliers(s) }), because: `metadata.managedFields names more than 8 field managers`},
		"all, deleted":            denied("deletecollection", "serviceimports", removeAll(b, &si{})),
		"all, deleted by who has too many rights": {
			as: "careless", do: removeAll(b, &si{}), because: `member careless deletes an aggregate only if no other member is listed`,
		},
		"all, deleted, old version": denied("deletecollection", "serviceimports", removeAll(b, &v1alpha1.ServiceImport{})),
		"in another namespace":      denied("create", "serviceimports", create(alter(fresh(""), func(s *si) { s.Namespace = "default" }))),
	}
}

// attacksOnExtensions are attacks on the second address of aggregates whose first one another member allocated.
func (b *broker) attacksOnExtensions() map[string]attack {
	type si = v1beta1.ServiceImport
	fresh := func(by string, ips ...string) *si { return b.aggregate("fresh", "demo", by, ips...) }
	own := func() *si { return b.aggregate("own", "demo", "") }
	annotate := func(key, value string) func(*si) {
		return func(s *si) { metav1.SetMetaDataAnnotation(&s.ObjectMeta, key, value) }
	}
	left := func() *si { return b.aggregate("left", "demo", "") }         // of b, which exports it no more; a and a.b do
	extended := func() *si { return b.aggregate("extended", "demo", "") } // the same, and a has added an address
	extend := func(by string, ips ...string) func(*si) {
		return func(have *si) {
			have.Spec = b.aggregate("left", "demo", "b", ips...).Spec
			annotate(isthmus.AnnotationExtendedBy, by)(have)
		}
	}
	const (
		fromOwn  = `member a allocates from [243.0.0.0/16 fd00:243:0:1::/64]`
		stays    = `the ClusterSetIP of an aggregate is immutable`
		names    = `it must name the allocator of the ClusterSetIP, here "`
		extender = `it must name the member that extended the ClusterSetIP of another, here "`
	)
	return map[string]attack{
		"an added address of another's block":    {do: update(b, left(), extend("a", "243.2.0.4", "fd00:243:0:3::4")), because: fromOwn},
		"an added address of a family it has":    {do: update(b, left(), extend("a", "243.2.0.4", "243.0.0.4")), because: `it must list the families of spec.ips`},
		"an added address before the first":      {do: update(b, left(), extend("a", "fd00:243:0:1::4", "243.2.0.4")), because: stays},
		"an added address in place of the first": {do: update(b, left(), extend("a", "243.0.0.4", "fd00:243:0:1::4")), because: stays},
		"an added address alone":                 {do: update(b, left(), extend("a", "fd00:243:0:1::4")), because: stays},
		"an added address without its family": {
			do:      update(b, left(), func(s *si) { extend("a", "243.2.0.4", "fd00:243:0:1::4")(s); s.Spec.IPFamilies = s.Spec.IPFamilies[:1] }),
			because: `it must list the families of spec.ips`,
		},
		"an added address in another's name":  {do: update(b, left(), extend("a.b", "243.2.0.4", "fd00:243:0:1::4")), because: extender + `a"`},
		"an added address in the allocator's": {do: update(b, left(), extend("b", "243.2.0.4", "fd00:243:0:1::4")), because: extender + `a"`},
		"an added address in nobody's name":   {do: merge(left(), `{"spec":{"ips":["243.2.0.4","fd00:243:0:1::4"],"ipFamilies":["IPv4","IPv6"]}}`), because: extender + `a"`},
		"an added address and another owner": {do: update(b, left(), func(s *si) {
			extend("a", "243.2.0.4", "fd00:243:0:1::4")(s)
			annotate(isthmus.AnnotationAllocatedBy, "a")(s)
		}), because: names + `b"`},
		"an added address by who does not export": {do: update(b, b.aggregate("old", "demo", ""), extend("a", "243.2.0.9", "fd00:243:0:1::9")), because: stays},
		"an added address while its allocator exports": {
			do:      update(b, b.aggregate("crowded", "demo", ""), extend("a", "243.2.0.6", "fd00:243:0:1::6")),
			because: `member b, which status.clusters lists, allocates the ClusterSetIP and has a block of the added family, so a adds no address`,
		},
		"an added address, by the other version": {
			do:      merge(b.alphaAggregate("left", "243.2.0.4"), `{"metadata":{"annotations":{"isthmus.dev/clusterset-ip-extended-by":"a"}},"spec":{"ips":["243.2.0.4","fd00:243:0:3::4"],"ipFamilies":["IPv4","IPv6"]}}`),
			because: fromOwn,
		},
		"an extender of nothing":               {do: update(b, left(), annotate(isthmus.AnnotationExtendedBy, "a")), because: extender + `"`},
		"an extender of its own address":       {do: update(b, own(), annotate(isthmus.AnnotationExtendedBy, "a")), because: extender + `"`},
		"an extender from the start":           {do: create(alter(fresh("a", "243.0.0.7", "fd00:243:0:1::7"), annotate(isthmus.AnnotationExtendedBy, "a"))), because: extender + `"`},
		"an extender of no address":            {do: create(alter(fresh(""), annotate(isthmus.AnnotationExtendedBy, "a"))), because: extender + `"`},
		"an added address, removed by another": {as: "a.b", do: update(b, extended(), extend("a", "243.2.0.5")), because: stays},
		"an added address, removed by its allocator": {
			as: "b", do: merge(extended(), `{"metadata":{"annotations":{"isthmus.dev/clusterset-ip-extended-by":null}},"spec":{"ips":["243.2.0.5"],"ipFamilies":["IPv4"]}}`), because: stays,
		},
		"an added address, taken back":            {do: merge(extended(), `{"metadata":{"annotations":{"isthmus.dev/clusterset-ip-extended-by":null}},"spec":{"ips":["243.2.0.5"],"ipFamilies":["IPv4"]}}`), because: stays},
		"an added address, replaced":              {as: "a.b", do: update(b, extended(), extend("a.b", "243.2.0.5", "fd00:243:0:2::5")), because: stays},
		"the extender, removed":                   {as: "a.b", do: merge(extended(), `{"metadata":{"annotations":{"isthmus.dev/clusterset-ip-extended-by":null}}}`), because: extender + `a"`},
		"the extender, removed by itself":         {do: merge(extended(), `{"metadata":{"annotations":{"isthmus.dev/clusterset-ip-extended-by":null}}}`), because: extender + `a"`},
		"the extender, replaced":                  {as: "a.b", do: update(b, extended(), annotate(isthmus.AnnotationExtendedBy, "a.b")), because: extender + `a"`},
		"the extender, replaced by the allocator": {as: "b", do: update(b, extended(), annotate(isthmus.AnnotationExtendedBy, "b")), because: extender + `a"`},
		"an extended one, deleted":                {do: remove(extended()), because: `status.clusters lists [a a.b]`},
	}
}

// alphaAggregate is an aggregate by a in the older version of the API.
func (b *broker) alphaAggregate(service, ip string) *v1alpha1.ServiceImport {
	beta := b.aggregate(service, "demo", "a", ip)
	return &v1alpha1.ServiceImport{
		ObjectMeta: beta.ObjectMeta,
		Spec: v1alpha1.ServiceImportSpec{
			Type: v1alpha1.ClusterSetIP, IPs: beta.Spec.IPs, IPFamilies: beta.Spec.IPFamilies, Ports: []v1alpha1.ServicePort{},
		},
	}
}

func (b *broker) attacksOnStatuses() map[string]attack {
	type si = v1beta1.ServiceImport
	shop := func() *si { return b.aggregate("shop", "demo", "") }
	own := func() *si { return b.aggregate("own", "demo", "") }
	clusters := func(ids ...string) func(*si) {
		return func(s *si) {
			s.Status.Clusters = nil
			for _, id := range ids {
				s.Status.Clusters = append(s.Status.Clusters, v1beta1.ClusterStatus{Cluster: id})
			}
		}
	}
	const only = `member a adds and removes only a`
	return map[string]attack{
		"another, removed":              {do: updateStatus(b, own(), clusters("a")), because: `status.clusters was [a b] and is [a]; ` + only},
		"another, added":                {do: updateStatus(b, b.aggregate("solo", "demo", ""), clusters("a", "b")), because: only},
		"another, replaced by oneself":  {do: updateStatus(b, shop(), clusters("a", "a.b")), because: only},
		"a.b, removed by a":             {do: updateStatus(b, shop(), clusters("b")), because: only},
		"a, removed by a.b":             {as: "a.b", do: updateStatus(b, b.aggregate("solo", "demo", ""), clusters()), because: `member a.b adds and removes only a.b`},
		"all, removed":                  {do: updateStatus(b, shop(), clusters()), because: only},
		"all, removed by a patch":       {do: mergeStatus(shop(), `{"status":{"clusters":[]}}`), because: only},
		"the status, removed":           {do: mergeStatus(shop(), `{"status":null}`), because: only},
		"an unknown member":             {do: updateStatus(b, own(), clusters("a", "b", "c")), because: only},
		"all others, by applying":       {do: applyStatus(alter(b.aggregate("applied", "demo", ""), clusters("a"))), because: `status.clusters was [a b] and is [a]`},
		"another, by the other version": {do: mergeStatus(b.alphaAggregate("shop", "243.2.0.1"), `{"status":{"clusters":[]}}`), because: only},
		"the conditions": {
			do:      mergeStatus(own(), `{"status":{"conditions":[{"type":"Ready","status":"False","reason":"Pending","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`),
			because: `status: members may write only clusters`,
		},
		"where endpoints are": {do: mergeStatus(own(), `{"status":{"endpointSliceObjects":"Absent"}}`), because: `status: members may write only clusters`},
	}
}

func (b *broker) attacksOnTheRest() map[string]attack {
	config := func() *isthmus.ClusterSetConfig {
		return &isthmus.ClusterSetConfig{ObjectMeta: b.meta(isthmus.ClusterSetConfigName)}
	}
	member := func(id string) *isthmus.Member { return &isthmus.Member{ObjectMeta: b.meta(id)} }
	account := func(name string) *corev1.ServiceAccount { return &corev1.ServiceAccount{ObjectMeta: b.meta(name)} }
	policy := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: "isthmus." + b.namespace + "." + name}
	}
	token := func(name string) attempt {
		return func(ctx context.Context, c client.Client) error {
			return c.SubResource("token").Create(ctx, account(name), &authenticationv1.TokenRequest{})
		}
	}
	get := func(obj client.Object) attempt {
		return func(ctx context.Context, c client.Client) error {
			return c.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		}
	}
	list := func(all client.ObjectList, opts ...client.ListOption) attempt {
		return func(ctx context.Context, c client.Client) error { return c.List(ctx, all, opts...) }
	}
	here := client.InNamespace(b.namespace)
	// Rights are looked at before the object is, so it may be empty.
	mine, wide, namespace := b.meta("mine"), metav1.ObjectMeta{Name: "mine"}, metav1.ObjectMeta{Name: b.namespace}
	const (
		policies = "validatingadmissionpolicies"
		bindings = "validatingadmissionpolicybindings"
		records  = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/exportrecords.isthmus.dev"
		another  = "system:serviceaccount:%s:member-b"
	)
	return map[string]attack{
		"widen one's own CIDRs":        denied("patch", "members", merge(member("a"), `{"spec":{"podCIDRs":["0.0.0.0/0"]}}`)),
		"be older":                     denied("patch", "members", merge(member("a"), `{"spec":{"joinTime":"2001-01-01T00:00:00Z"}}`)),
		"let another leave":            denied("patch", "members", merge(member("b"), `{"spec":{"leftAt":"2026-01-01T00:00:00Z"}}`)),
		"register another":             denied("create", "members", create(member("c"))),
		"delete a registration":        denied("delete", "members", remove(member("b"))),
		"delete all registrations":     denied("deletecollection", "members", removeAll(b, member(""))),
		"enlarge one's block":          denied("patch", "clustersetconfigs", merge(config(), `{"spec":{"members":[{"clusterID":"a","clustersetIPCIDR":["0.0.0.0/0"]}]}}`)),
		"replace the configuration":    denied("update", "clustersetconfigs", update(b, config(), func(c *isthmus.ClusterSetConfig) { c.Spec.Members = nil })),
		"delete the configuration":     denied("delete", "clustersetconfigs", remove(config())),
		"another configuration":        denied("create", "clustersetconfigs", create(&isthmus.ClusterSetConfig{ObjectMeta: mine})),
		"read a Secret":                denied("get", "secrets", get(&corev1.Secret{ObjectMeta: b.meta("treasure")})),
		"read all Secrets":             denied("list", "secrets", list(&corev1.SecretList{}, here)),
		"a Secret for another's token": denied("create", "secrets", create(&corev1.Secret{ObjectMeta: mine})),
		"another's token":              denied("create", "serviceaccounts/token", token(isthmus.MemberAccount("b"))),
		"one's own token, for longer":  denied("create", "serviceaccounts/token", token(isthmus.MemberAccount("a"))),
		"another account":              denied("create", "serviceaccounts", create(account(isthmus.MemberAccount("c")))),
		"delete another's account":     denied("delete", "serviceaccounts", remove(account(isthmus.MemberAccount("b")))),
		"read ConfigMaps":              denied("list", "configmaps", list(&corev1.ConfigMapList{}, here)),
		"a ConfigMap":                  denied("create", "configmaps", create(&corev1.ConfigMap{ObjectMeta: mine})),
		"more rights": denied("patch", "roles",
			merge(&rbacv1.Role{ObjectMeta: b.meta("member")}, `{"rules":[{"apiGroups":["*"],"resources":["*"],"verbs":["*"]}]}`)),
		"another role":          denied("create", "roles", create(&rbacv1.Role{ObjectMeta: mine})),
		"all rights here":       denied("create", "rolebindings", create(&rbacv1.RoleBinding{ObjectMeta: mine})),
		"all rights everywhere": denied("create", "clusterrolebindings", create(&rbacv1.ClusterRoleBinding{ObjectMeta: wide})),
		"no rights for another": denied("patch", "rolebindings", merge(&rbacv1.RoleBinding{ObjectMeta: b.meta("member-b")}, `{"subjects":[]}`)),
		"be an administrator":   {do: b.impersonating("admin", remove(b.record("b", "shop", "demo"))), because: `cannot impersonate`},
		"be another member":     {do: b.impersonating(fmt.Sprintf(another, b.namespace), remove(b.record("b", "shop", "demo"))), because: `cannot impersonate`},
		"run a pod":             denied("create", "pods", create(&corev1.Pod{ObjectMeta: mine})),
		"run a Deployment":      denied("create", "deployments", create(&appsv1.Deployment{ObjectMeta: mine})),
		"a Service":             denied("create", "services", create(&corev1.Service{ObjectMeta: mine})),
		"a ServiceExport":       denied("create", "serviceexports", create(&v1beta1.ServiceExport{ObjectMeta: mine})),
		"an event":              denied("create", "events", create(&corev1.Event{ObjectMeta: mine})),
		"delete a policy":       denied("delete", policies, remove(&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: policy("exportrecords")})),
		"let a policy ignore faults": denied("patch", policies,
			merge(&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: policy("aggregates")}, `{"spec":{"failurePolicy":"Ignore"}}`)),
		"delete a binding": denied("delete", bindings, remove(&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: policy("exportrecords")})),
		"let a binding only warn": denied("patch", bindings,
			merge(&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: policy("aggregates")}, `{"spec":{"validationActions":["Warn"]}}`)),
		"a binding more":                denied("create", bindings, create(&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: policy("mine")})),
		"a webhook":                     denied("create", "validatingwebhookconfigurations", create(&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: wide})),
		"a webhook that changes things": denied("create", "mutatingwebhookconfigurations", create(&admissionv1.MutatingWebhookConfiguration{ObjectMeta: wide})),
		"delete a definition":           denied("delete", "customresourcedefinitions", b.raw(http.MethodDelete, records)),
		"rename the namespace": denied("patch", "namespaces",
			merge(&corev1.Namespace{ObjectMeta: namespace}, `{"metadata":{"labels":{"kubernetes.io/metadata.name":"x"}}}`)),
		"delete the namespace":      denied("delete", "namespaces", remove(&corev1.Namespace{ObjectMeta: namespace})),
		"a namespace":               denied("create", "namespaces", create(&corev1.Namespace{ObjectMeta: wide})),
		"read nodes":                denied("list", "nodes", list(&corev1.NodeList{})),
		"read records everywhere":   denied("list", "exportrecords", list(&isthmus.ExportRecordList{})),
		"a certificate":             denied("create", "certificatesigningrequests", create(&certificatesv1.CertificateSigningRequest{ObjectMeta: wide})),
		"ask what others may":       denied("create", "subjectaccessreviews", create(&authorizationv1.SubjectAccessReview{})),
		"ask whose a token is":      denied("create", "tokenreviews", create(&authenticationv1.TokenReview{})),
		"read the server's metrics": {do: b.raw(http.MethodGet, "/metrics"), because: `cannot get path "/metrics"`},
	}
}

// raw is a request by member a for which there is no object.
func (b *broker) raw(verb, path string) attempt {
	return func(ctx context.Context, _ client.Client) error {
		config := b.config("a")
		config.GroupVersion, config.NegotiatedSerializer = &schema.GroupVersion{}, clientgoscheme.Codecs
		c, err := rest.UnversionedRESTClientFor(config)
		if err != nil {
			return err
		}
		return c.Verb(verb).AbsPath(path).Do(ctx).Error()
	}
}
