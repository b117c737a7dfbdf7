package membership

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// service is a name in namespace demo.
func service(name string) clusterset.ServiceName {
	return clusterset.ServiceName{Namespace: "demo", Name: name}
}

// publish writes the objects of exporters of a Service: records and slices, and an aggregate that the first of them has
// allocated. listed are the clusters in its status.
func publish(t *testing.T, broker client.Client, namespace, name string, ip string, clusters, listed []clusterset.ClusterID) {
	t.Helper()
	for _, c := range clusters {
		record := mcs.ExportRecord(clusterset.Export{Cluster: c, Service: service(name), ExportedAt: time.Now(), Type: clusterset.ClusterSetIP})
		record.Namespace = namespace
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: mcs.BrokerSliceName(c, service(name), "x", discoveryv1.AddressTypeIPv4),
				Labels: map[string]string{v1alpha1.LabelCluster: string(c), discoveryv1.LabelManagedBy: v1alpha1.ManagedBy},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}}},
		}
		if err := errors.Join(broker.Create(t.Context(), record), broker.Create(t.Context(), slice)); err != nil {
			t.Fatal(err)
		}
	}
	aggregate := mcs.Aggregate(clusterset.Aggregate{
		Service: service(name), Type: clusterset.ClusterSetIP, IPs: []netip.Addr{netip.MustParseAddr(ip)}, AllocatedBy: "a", Clusters: listed,
	})
	aggregate.Namespace = namespace
	status := aggregate.Status
	if err := broker.Create(t.Context(), aggregate); err != nil {
		t.Fatal(err)
	}
	aggregate.Status = status
	if err := broker.Status().Update(t.Context(), aggregate); err != nil {
		t.Fatal(err)
	}
}

// contents lists the objects of the kinds of Isthmus in some namespaces of a cluster.
func contents(t *testing.T, c client.Client, namespaces ...string) []string {
	t.Helper()
	var found []string
	for kind, l := range map[string]client.ObjectList{
		"Member": &v1alpha1.MemberList{}, "ExportRecord": &v1alpha1.ExportRecordList{}, "ServiceImport": &mcsv1beta1.ServiceImportList{},
		"ServiceExport": &mcsv1beta1.ServiceExportList{}, "EndpointSlice": &discoveryv1.EndpointSliceList{}, "Lease": &coordinationv1.LeaseList{},
		"ServiceAccount": &corev1.ServiceAccountList{}, "Secret": &corev1.SecretList{}, "RoleBinding": &rbacv1.RoleBindingList{},
	} {
		for _, namespace := range namespaces {
			if err := c.List(t.Context(), l, client.InNamespace(namespace)); err != nil {
				t.Fatal(err)
			}
			err := meta.EachListItem(l, func(o runtime.Object) error {
				obj := o.(client.Object)
				line := kind + " " + obj.GetNamespace() + "/" + obj.GetName()
				switch o := o.(type) {
				case *mcsv1beta1.ServiceImport:
					var clusters []string
					for _, c := range o.Status.Clusters {
						clusters = append(clusters, c.Cluster)
					}
					line += fmt.Sprint(" ", clusters)
				case *v1alpha1.Member:
					if o.Spec.LeftAt != nil {
						line += " left"
					}
				case *v1alpha1.ExportRecord:
					if o.Spec.WithdrawnAt != nil {
						line += " withdrawn"
					}
				}
				found = append(found, line)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	slices.Sort(found)
	return found
}

// cutAfter returns clients of which only the first n writes succeed.
func cutAfter(n int, clients ...client.Client) []client.Client {
	budget := &budget{left: n}
	var cut []client.Client
	for _, c := range clients {
		cut = append(cut, &dying{c, budget})
	}
	return cut
}

// budget is the number of remaining writes of several clients.
type budget struct {
	mu   sync.Mutex
	left int
}

func (b *budget) spend() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left == 0 {
		return errCut
	}
	b.left--
	return nil
}

// dying is a client whose writes fail after the budget is used up.
type dying struct {
	client.Client
	budget *budget
}

func (d *dying) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	if err := d.budget.spend(); err != nil {
		return err
	}
	return d.Client.Create(ctx, obj, opts...)
}

func (d *dying) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	if err := d.budget.spend(); err != nil {
		return err
	}
	return d.Client.Update(ctx, obj, opts...)
}

func (d *dying) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
	if err := d.budget.spend(); err != nil {
		return err
	}
	return d.Client.Patch(ctx, obj, patch, opts...)
}

func (d *dying) Apply(ctx context.Context, obj runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
	if err := d.budget.spend(); err != nil {
		return err
	}
	return d.Client.Apply(ctx, obj, opts...)
}

func (d *dying) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	if err := d.budget.spend(); err != nil {
		return err
	}
	return d.Client.Delete(ctx, obj, opts...)
}

func (d *dying) Status() client.SubResourceWriter { return &dyingStatus{d.Client.Status(), d.budget} }

type dyingStatus struct {
	client.SubResourceWriter
	budget *budget
}

func (d *dyingStatus) Update(ctx context.Context, obj client.Object, opts ...client.SubResourceUpdateOption) error {
	if err := d.budget.spend(); err != nil {
		return err
	}
	return d.SubResourceWriter.Update(ctx, obj, opts...)
}

// A member that leaves removes its own objects, in its cluster and on the broker, and no others. An interrupted run is
// completed by the next one, wherever it was interrupted.
func TestLeave(t *testing.T) {
	const ns = "leave"
	info, asAdmin := deploy(t, Broker{Namespace: ns, ClusterSetID: "prod", Ranges: cidrs("243.0.0.0/8")})
	member := cluster(t, &memberServer)
	r := request(info, "a", 1)
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	if _, err := reserve(t, asAdmin, "uid of b", request(info, "b", 2)); err != nil {
		t.Fatal(err)
	}

	a, b := clusterset.ClusterID("a"), clusterset.ClusterID("b")
	publish(t, asAdmin, ns, "both", "243.0.0.1", []clusterset.ClusterID{a, b}, []clusterset.ClusterID{a, b})
	publish(t, asAdmin, ns, "mine", "243.0.0.2", []clusterset.ClusterID{a}, []clusterset.ClusterID{a})
	publish(t, asAdmin, ns, "begun", "243.0.0.3", []clusterset.ClusterID{a}, nil)
	publish(t, asAdmin, ns, "soon", "243.0.0.4", []clusterset.ClusterID{a, b}, []clusterset.ClusterID{a})
	publish(t, asAdmin, ns, "theirs", "243.0.0.5", []clusterset.ClusterID{b}, []clusterset.ClusterID{b})
	for _, id := range []string{"a", "b"} {
		if err := asAdmin.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: named(ns, v1alpha1.MemberLease(id), id)}); err != nil {
			t.Fatal(err)
		}
	}
	somebodys := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: ns, Name: "somebodys", Labels: map[string]string{v1alpha1.LabelCluster: "a"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	if err := asAdmin.Create(t.Context(), somebodys); err != nil {
		t.Fatal(err)
	}

	// The member has imports of Isthmus, foreign objects, an export, and a broker of other clusters.
	here := []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "leave-demo"}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "leave-inner"}},
		&v1alpha1.ClusterSetConfig{ObjectMeta: metav1.ObjectMeta{Namespace: "leave-inner", Name: "clusterset"}, Spec: v1alpha1.ClusterSetConfigSpec{ClusterSetID: "inner"}},
	}
	for _, own := range []bool{true, false} {
		name, by := "theirs", "another.example.org"
		if own {
			name, by = "ours", v1alpha1.ManagedBy
		}
		for _, in := range []string{"leave-demo", "leave-inner"} {
			here = append(here,
				&mcsv1beta1.ServiceImport{
					ObjectMeta: metav1.ObjectMeta{Namespace: in, Name: name, Labels: map[string]string{v1alpha1.LabelManagedBy: by}},
					Spec:       mcsv1beta1.ServiceImportSpec{Type: mcsv1beta1.Headless, Ports: []mcsv1beta1.ServicePort{}},
				},
				&discoveryv1.EndpointSlice{
					ObjectMeta:  metav1.ObjectMeta{Namespace: in, Name: name, Labels: map[string]string{discoveryv1.LabelManagedBy: by}},
					AddressType: discoveryv1.AddressTypeIPv4,
				})
		}
	}
	for _, o := range here {
		put(t, member, o)
	}
	exported := &mcsv1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "leave-demo", Name: "hello"}}
	put(t, member, exported)
	exported.Status.Conditions = []metav1.Condition{
		mcsv1beta1.NewServiceExportCondition(mcsv1beta1.ServiceExportConditionReady, metav1.ConditionTrue, mcsv1beta1.ServiceExportReasonExported, ""),
		mcsv1beta1.NewServiceExportCondition(mcsv1beta1.ServiceExportConditionValid, metav1.ConditionTrue, mcsv1beta1.ServiceExportReasonValid, ""),
	}
	if err := member.Status().Update(t.Context(), exported); err != nil {
		t.Fatal(err)
	}
	replicas := int32(2)
	put(t, member, controller(r.Namespace, replicas))

	// Each run completes as few further writes as possible.
	cuts, allowed, before := 0, 1, ""
	for ; ; cuts++ {
		if now := strings.Join(append(contents(t, asAdmin, ns), contents(t, member, r.Namespace, "leave-demo")...), "\n"); now == before {
			allowed++
		} else {
			before = now
		}
		c := cutAfter(allowed, asAdmin, member)
		left, err := Leave(t.Context(), c[0], c[1], r.Namespace)
		if err == nil {
			if left.ClusterID != "a" || left.ClusterSetID != "prod" || !left.AlreadyLeft {
				t.Errorf("left: %+v", left)
			}
			break
		}
		if !errors.Is(err, errCut) {
			t.Fatal(err)
		}
		if have := contents(t, asAdmin, ns); slices.Contains(have, "Member "+ns+"/a left") {
			// Once it has left, nothing says otherwise: no live record, no rights.
			for _, line := range have {
				if strings.HasPrefix(line, "ExportRecord "+ns+"/a.") && !strings.HasSuffix(line, "withdrawn") || line == "RoleBinding "+ns+"/member-a" {
					t.Errorf("after %d cuts it has left, and there is %s", cuts, line)
				}
			}
		}
	}
	if cuts < 20 {
		t.Errorf("it was cut off %d times; this test cuts nothing", cuts)
	}

	want := []string{
		"EndpointSlice leave/b.both.demo-*", "EndpointSlice leave/b.soon.demo-*", "EndpointSlice leave/b.theirs.demo-*", "EndpointSlice leave/somebodys",
		"ExportRecord leave/b.both.demo", "ExportRecord leave/b.soon.demo", "ExportRecord leave/b.theirs.demo",
		"Lease leave/member-b", "Member leave/a left", "Member leave/b",
		"RoleBinding leave/isthmus-join", "RoleBinding leave/isthmus-quota-controller", "RoleBinding leave/member-b", "RoleBinding leave/member-b-token",
		"Secret leave/" + brokerConfig(t, asAdmin, ns).Spec.Credential("b"), "ServiceAccount leave/isthmus-join", "ServiceAccount leave/isthmus-quota-controller", "ServiceAccount leave/member-b",
		"ServiceImport leave/both.demo [b]", "ServiceImport leave/soon.demo []", "ServiceImport leave/theirs.demo [b]",
	}
	have := contents(t, asAdmin, ns)
	for i := range have {
		if head, _, ok := strings.Cut(have[i], "demo-"); ok && strings.HasPrefix(have[i], "EndpointSlice") {
			have[i] = head + "demo-*"
		}
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("on the broker (-want +have):\n%s", diff)
	}
	if config := brokerConfig(t, asAdmin, ns); len(config.Spec.Members) != 1 || config.Spec.Members[0].ClusterID != "b" {
		t.Errorf("members with blocks: %+v", config.Spec.Members)
	}
	if texts := blocksOnBroker(t, asAdmin, ns); texts != `[{"cluster_id":"b","global_cidr":["243.1.0.0/16"]}]` {
		t.Errorf("the ConfigMap says %s", texts)
	}
	want = []string{
		"EndpointSlice leave-demo/theirs", "EndpointSlice leave-inner/ours", "EndpointSlice leave-inner/theirs", "ServiceExport leave-demo/hello",
		"ServiceImport leave-demo/theirs []", "ServiceImport leave-inner/ours []", "ServiceImport leave-inner/theirs []",
	}
	if diff := cmp.Diff(want, contents(t, member, r.Namespace, "leave-demo", "leave-inner")); diff != "" {
		t.Errorf("in the member (-want +have):\n%s", diff)
	}
	conformance.Holds(t, "L49")
	if err := member.Get(t.Context(), client.ObjectKeyFromObject(exported), exported); err != nil {
		t.Fatal(err)
	}
	if c := exported.Status.Conditions; len(c) != 1 || c[0].Type != "Ready" || c[0].Status != metav1.ConditionFalse || !strings.Contains(c[0].Message, "cluster a has left ClusterSet prod") {
		t.Errorf("the export says %+v", c)
	}
	stopped := &appsv1.Deployment{}
	if err := member.Get(t.Context(), client.ObjectKey{Namespace: r.Namespace, Name: controllerDeployment}, stopped); err != nil || *stopped.Spec.Replicas != 0 {
		t.Errorf("the controller has %d replicas, %v", *stopped.Spec.Replicas, err)
	}
	if _, err := Leave(t.Context(), asAdmin, member, r.Namespace); !errors.Is(err, ErrNotJoined) {
		t.Errorf("left once more: %v", err)
	}

	// The cluster may join again as a new member, whose controller then runs again.
	again, err := Join(t.Context(), asAdmin, member, r)
	if err != nil || again.Rejoined || again.Member.Spec.LeftAt != nil || firstBlock(again) != "243.0.0.0/16" {
		t.Fatalf("joined again: %+v, %v", again.Member, err)
	}
	if have := contents(t, asAdmin, ns); !slices.Contains(have, "Member "+ns+"/a") {
		t.Errorf("the tombstone stays: %v", have)
	}
	if err := member.Get(t.Context(), client.ObjectKeyFromObject(stopped), stopped); err != nil || *stopped.Spec.Replicas != replicas {
		t.Errorf("the controller has %d replicas, %v", *stopped.Spec.Replicas, err)
	}
}

// controllerDeployment is the name that the chart gives the controller's Deployment with fullnameOverride=net.
const controllerDeployment = "net-controller"

// controller returns the Deployment of a member's controller.
func controller(namespace string, replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app.kubernetes.io/name": "isthmus-controller"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: controllerDeployment, Labels: labels},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "controller", Image: "isthmus/controller"}}},
			},
		},
	}
}

// A member whose cluster is gone is removed without it, and its id is free at once. If the cluster comes back, it does
// no harm.
func TestForceLeave(t *testing.T) {
	const ns = "force"
	info, asAdmin := deploy(t, Broker{Namespace: ns, ClusterSetID: "prod", Ranges: cidrs("243.0.0.0/8")})
	member := cluster(t, &memberServer)
	r := request(info, "a", 1)
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	publish(t, asAdmin, ns, "mine", "243.0.0.2", []clusterset.ClusterID{"a"}, []clusterset.ClusterID{"a"})
	// One that no member exports any more, with an address that a added to another's.
	extended := mcs.Aggregate(clusterset.Aggregate{
		Service: service("extended"), Type: clusterset.ClusterSetIP, AllocatedBy: "x", ExtendedBy: "a",
		IPs: []netip.Addr{netip.MustParseAddr("fd00:243::2"), netip.MustParseAddr("243.0.0.3")},
	})
	extended.Namespace = ns
	if err := asAdmin.Create(t.Context(), extended); err != nil {
		t.Fatal(err)
	}
	if _, err := ForceLeave(t.Context(), asAdmin, ns, "nobody"); !errors.Is(err, ErrNoMember) || !strings.Contains(err.Error(), "no such member: nobody; the members are a") {
		t.Errorf("nobody left: %v", err)
	}
	left, err := ForceLeave(t.Context(), asAdmin, ns, "a")
	if err != nil || left.AlreadyLeft || left.Exports != 1 || left.Aggregates != 2 {
		t.Fatalf("left: %+v, %v", left, err)
	}
	want := []string{
		"Member force/a left", "RoleBinding force/isthmus-join", "RoleBinding force/isthmus-quota-controller",
		"ServiceAccount force/isthmus-join", "ServiceAccount force/isthmus-quota-controller",
	}
	if diff := cmp.Diff(want, contents(t, asAdmin, ns)); diff != "" {
		t.Errorf("on the broker (-want +have):\n%s", diff)
	}

	// Another cluster takes the id. The first one can still clean up its own cluster, without changing the broker.
	if _, err := reserve(t, asAdmin, "another", request(info, "a", 1)); err != nil {
		t.Fatal(err)
	}
	before := contents(t, asAdmin, ns)
	left, err = Leave(t.Context(), asAdmin, member, r.Namespace)
	if err != nil || len(left.Notes) != 1 || !strings.Contains(left.Notes[0], "another cluster is member a now, so the broker was not changed") {
		t.Errorf("left: %+v, %v", left, err)
	}
	if diff := cmp.Diff(before, contents(t, asAdmin, ns)); diff != "" {
		t.Errorf("on the broker (-before +after):\n%s", diff)
	}
	if have := contents(t, member, r.Namespace); len(have) > 0 {
		t.Errorf("in the member: %v", have)
	}
}

// A former registration stays for an hour and reserves nothing. Afterwards any command deletes it.
func TestTombstones(t *testing.T) {
	const ns = "tombs"
	info, asAdmin := deploy(t, Broker{Namespace: ns, Ranges: cidrs("243.0.0.0/8")})
	for i, id := range []clusterset.ClusterID{"old", "new"} {
		if _, err := reserve(t, asAdmin, "uid", request(info, id, 1+i)); err != nil {
			t.Fatal(err)
		}
		if _, err := ForceLeave(t.Context(), asAdmin, ns, string(id)); err != nil {
			t.Fatal(err)
		}
	}
	m, err := readMember(t.Context(), asAdmin, ns, "old")
	if err != nil {
		t.Fatal(err)
	}
	m.Spec.LeftAt = new(metav1.NewTime(time.Now().Add(-61 * time.Minute)))
	if err := applyMember(t.Context(), asAdmin, m); err != nil {
		t.Fatal(err)
	}
	if _, err := DeployBroker(t.Context(), asAdmin, Broker{Namespace: ns, TokenTTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	list := &v1alpha1.MemberList{}
	if err := asAdmin.List(t.Context(), list, client.InNamespace(ns)); err != nil || len(list.Items) != 1 || list.Items[0].Name != "new" {
		t.Errorf("tombstones: %+v, %v", list.Items, err)
	}
}

// TestInheritedBlock: when the member that gave a ClusterSetIP has left, its block is free for another one,
// the address stays with the Service, and everybody can see that it is taken.
func TestInheritedBlock(t *testing.T) {
	const ns = "inherit"
	info, asAdmin := deploy(t, Broker{Namespace: ns, Ranges: cidrs("243.0.0.0/15")})
	a, b := clusterset.ClusterID("a"), clusterset.ClusterID("b")
	for i, id := range []clusterset.ClusterID{a, b} {
		if _, err := reserve(t, asAdmin, "uid", request(info, id, 1+i)); err != nil {
			t.Fatal(err)
		}
	}
	publish(t, asAdmin, ns, "both", "243.0.255.254", []clusterset.ClusterID{a, b}, []clusterset.ClusterID{a, b})
	if _, err := ForceLeave(t.Context(), asAdmin, ns, "a"); err != nil {
		t.Fatal(err)
	}
	c, err := reserve(t, asAdmin, "uid", request(info, "c", 3))
	if err != nil || firstBlock(c) != "243.0.0.0/16" {
		t.Fatalf("c got %+v, %v; want the block of a", c.Member, err)
	}
	aggregate := &mcsv1beta1.ServiceImport{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "both.demo"}, aggregate); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(aggregate.Spec.IPs, []string{"243.0.255.254"}) || aggregate.Annotations[v1alpha1.AnnotationAllocatedBy] != "a" {
		t.Errorf("the aggregate has %v of %s", aggregate.Spec.IPs, aggregate.Annotations[v1alpha1.AnnotationAllocatedBy])
	}
	// The controller of c reserves the addresses of aggregates in its block at its start.
	pool, err := clusterset.NewIPPool(parsed(c.Member.Spec.ClusterSetIPCIDR)...)
	if err != nil {
		t.Fatal(err)
	}
	parsedAggregate, _, err := mcs.ParseAggregate(aggregate)
	if err != nil {
		t.Fatal(err)
	}
	if err := pool.Reserve(parsedAggregate.Service, parsedAggregate.IPs...); err != nil {
		t.Fatal(err)
	}
	got, err := pool.Allocate(service("next"), []clusterset.Family{clusterset.IPv4})
	if err != nil || slices.Contains(got, parsedAggregate.IPs[0]) {
		t.Errorf("the next Service gets %v, %v", got, err)
	}
	conformance.Holds(t, "L33")

	// A new cluster with the id a cannot get the old block, so the addresses of aggregates would not be valid for it.
	if _, err := reserve(t, asAdmin, "another", request(info, "a", 4)); err == nil {
		t.Error("a joined into a full range")
	}
	if _, err := ForceLeave(t.Context(), asAdmin, ns, "b"); err != nil { // its block is free; both.demo is c's now
		t.Fatal(err)
	}
	publish(t, asAdmin, ns, "kept", "243.0.0.9", []clusterset.ClusterID{"c"}, []clusterset.ClusterID{"c"}) // says that a allocated it
	if _, err := reserve(t, asAdmin, "another", request(info, "a", 4)); !errors.Is(err, ErrIDTaken) || !strings.Contains(err.Error(), "a former member a allocated ClusterSetIPs that are in use, to demo/kept") {
		t.Errorf("a joined: %v", err)
	}
	// The same holds for an address that a former member added to another's.
	edited := &mcsv1beta1.ServiceImport{}
	if err := asAdmin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "kept.demo"}, edited); err != nil {
		t.Fatal(err)
	}
	extended := mcs.Aggregate(clusterset.Aggregate{
		Service: service("kept"), Type: clusterset.ClusterSetIP, AllocatedBy: "c", ExtendedBy: "a",
		IPs: []netip.Addr{netip.MustParseAddr("243.0.0.9"), netip.MustParseAddr("fd00:243::9")},
	})
	edited.Spec, edited.Annotations = extended.Spec, extended.Annotations
	if err := asAdmin.Update(t.Context(), edited); err != nil {
		t.Fatal(err)
	}
	if _, err := reserve(t, asAdmin, "another", request(info, "a", 4)); !errors.Is(err, ErrIDTaken) || !strings.Contains(err.Error(), "in use, to demo/kept") {
		t.Errorf("a joined although it extended a ClusterSetIP: %v", err)
	}
	if d, err := reserve(t, asAdmin, "another", request(info, "d", 4)); err != nil || firstBlock(d) != "243.1.0.0/16" {
		t.Errorf("d got %+v, %v", d.Member, err)
	}
}
