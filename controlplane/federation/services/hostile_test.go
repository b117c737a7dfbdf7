package services_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/hostile"
)

const (
	seedVariable = "ISTHMUS_HOSTILE_SEED"
	bystanders   = 4
)

// fuzz is a federation in which the administrator of child c writes hostile objects, beside federated Services of a and b.
type fuzz struct {
	*testbed

	closed bool // grants let a and b federate Services, and c none
	round  int
	vips   map[string][]string // of the bystanders
	scene  hostile.Scene
	count  int // of all objects, without hostile ones
}

var fuzzRange = netip.MustParsePrefix("243.0.0.0/24")

// Hostile objects of a child do not harm federated Services of other clusters: in these, their endpoints follow each change, their
// ClusterSetIPs stay, and no import gets an address that is not the federation's or that another one has. Objects of the child
// that are removed leave nothing behind.
//
// The test is the counterpart of e2e/bystanders for a federation. It stands here because the engine of a federation, with its
// elections, would take that test well beyond its time, and because this package alone decides what other clusters are told of a
// child's objects. [seedVariable] draws other objects than those of seed 1.
func TestHostileChild(t *testing.T) { fuzzChild(t, newFuzz(t, false), 60) }

// Where no grant names the child, it has no part in any federated Service either, nor one of its own.
func TestHostileChildWithoutGrants(t *testing.T) { fuzzChild(t, newFuzz(t, true), 60) }

// fuzzChild tries known attacks and a number of drawn objects.
func fuzzChild(t *testing.T, f *fuzz, total int) {
	t.Helper()
	attacks, err := hostile.Objects("c", "known attacks", f.attacks()...)
	if err != nil {
		t.Fatal(err)
	}
	f.try(attacks, nil)
	seed := uint64(1)
	if os.Getenv("ISTHMUS_FULL_LENGTH") != "" {
		seed, total = rand.Uint64N(1_000_000), 1000
	}
	if text := os.Getenv(seedVariable); text != "" {
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%s=%d", seedVariable, seed)
	g := hostile.Generator{Kinds: hostile.FederationKinds(), Scene: f.scene, Seed: seed}
	applied, refused := 0, 0
	for number := 0; applied < total; {
		var batch []hostile.Object
		for range 8 {
			objects, err := g.Draw(number)
			if err != nil {
				t.Fatal(err)
			}
			batch = append(batch, objects...)
			number++
		}
		f.try(batch, &refused)
		applied += len(batch)
	}
	t.Logf("%d objects, %d refused by the API server", applied, refused)
}

func newFuzz(t *testing.T, closed bool) *fuzz {
	t.Helper()
	spec := withRange(fuzzRange.String())
	if all := []v1alpha1.Pattern{"*"}; closed {
		spec.Grants = []v1alpha1.Grant{{Members: []string{"a", "b"}, Namespaces: all, GlobalServices: all, Services: all}}
	}
	f := &fuzz{testbed: newTestbed(t, spec), closed: closed, vips: map[string][]string{}}
	f.scene = hostile.Scene{
		Tenants: []hostile.Place{{Cluster: "c", Namespace: f.namespace}}, System: system, Member: "c", Others: []string{"a", "b"}, Namespace: f.namespace,
		Pods: map[string][]netip.Prefix{"c": {netip.MustParsePrefix("10.3.0.0/16")}}, Block: fuzzRange, MaxPorts: 100,
		Foreign: []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("8.8.8.8"), netip.MustParseAddr("10.1.0.1")}, Now: time.Now().UTC(),
	}
	for i := range bystanders {
		name := fmt.Sprint("bystander-", i)
		f.scene.Services = append(f.scene.Services, name)
		f.offer("a", name, global, name, nil, "10.1.0.1")
		f.offer("b", name, global, name, nil, "10.2.0.1")
	}
	f.sync()
	for _, name := range f.scene.Services {
		f.vips[name] = f.vip("a", name)
		f.scene.Foreign = append(f.scene.Foreign, netip.MustParseAddr(f.vips[name][0]))
	}
	f.sync()
	f.count = len(f.versions())
	if err := f.harm(); err != nil {
		t.Fatalf("before any hostile object: %v", err)
	}
	return f
}

// attacks returns known attempts: imports with addresses of other owners, for Services that c asks for.
func (f *fuzz) attacks() (all []client.Object) {
	for name, ips := range map[string][]string{
		"server": {"10.96.0.1"}, "public": {"8.8.8.8"}, "taken": f.vips["bystander-0"], "beside": {"243.0.0.9", "8.8.8.8"}, "bystander-1": {"243.0.0.1"},
	} {
		all = append(all, &v1beta1.ServiceImport{
			ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: name, Labels: map[string]string{"app.kubernetes.io/managed-by": "federation.isthmus.dev"}},
			Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: ips, Ports: []v1beta1.ServicePort{{Port: 80}}},
		}, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name, Annotations: map[string]string{global: name}},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
		})
	}
	return all
}

// A child claims ClusterSetIPs of others by a Node: they stay, and it alone does not get them. Services name its Node.
func TestHostileNode(t *testing.T) {
	f := newFuzz(t, false)
	vip := f.vips["bystander-0"][0]
	for name, node := range map[string]corev1.Node{
		"a pod's":        {Spec: corev1.NodeSpec{PodCIDR: vip + "/32", PodCIDRs: []string{vip + "/32"}}},
		"all pods'":      {Spec: corev1.NodeSpec{PodCIDR: "243.0.0.0/24", PodCIDRs: []string{"243.0.0.0/24"}}},
		"beyond":         {Spec: corev1.NodeSpec{PodCIDR: "243.0.0.0/8", PodCIDRs: []string{"243.0.0.0/8"}}},
		"the node's own": {Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: vip}}}},
	} {
		t.Run(name, func(t *testing.T) {
			node.Name = "hostile"
			f.create("c", &node)
			defer func() {
				f.delete("c", &node)
				if err := f.settle(f.harm); err != nil {
					t.Error(err)
				}
			}()
			f.change()
			f.sync()
			f.sync()
			if err := f.settle(f.harm); err != nil {
				t.Error(err)
			}
			if svc, _ := get[corev1.Service](f.testbed, "a", f.namespace, "bystander-0"); !strings.Contains(svc.Annotations[status], "cluster c does not get the ClusterSetIP: "+vip+" belongs to node hostile of cluster c") {
				t.Errorf("the member Service's status is %q", svc.Annotations[status])
			}
			if got := f.vip("c", "bystander-0"); slices.Contains(got, vip) {
				t.Errorf("c has %v", got)
			}
		})
	}
}

// try applies objects in c, judges, and removes them again. refused, unless nil, counts those that the API server refuses.
func (f *fuzz) try(objects []hostile.Object, refused *int) {
	f.t.Helper()
	n, harm := f.trial(objects)
	if refused != nil {
		*refused += n
	}
	if harm == nil {
		return
	}
	small, again := hostile.Smallest(f.t.Context(), time.Minute, objects, func(some []hostile.Object) error {
		_, harm := f.trial(some)
		return harm
	})
	f.t.Fatalf("hostile objects do harm: %v\nthe smallest part that does: %v\n%s", harm, again, hostile.Describe(small))
}

// trial returns how many objects the API server refuses, and the harm that the others do.
func (f *fuzz) trial(objects []hostile.Object) (refused int, harm error) {
	f.t.Helper()
	c := f.Member("c").Client()
	var written []hostile.Object
	for _, o := range objects {
		var status apierrors.APIStatus
		switch err := c.Create(f.t.Context(), o.DeepCopy()); {
		case err == nil:
			written = append(written, o)
		case apierrors.IsAlreadyExists(err):
			err := f.replace(o)
			if err == nil {
				written = append(written, o)
			} else if !errors.As(err, &status) {
				f.t.Fatalf("write %s: %v", o, err)
			}
		case errors.As(err, &status):
			refused++
		default:
			f.t.Fatalf("write %s: %v", o, err)
		}
	}
	f.change()
	harm = f.settle(f.harm)
	for _, o := range written { // as an owner withdraws a Service; a vanished one might be an accident
		f.edited(o, func(obj client.Object) error {
			return c.Patch(f.t.Context(), obj, client.RawPatch(types.MergePatchType, []byte(`{"metadata": {"finalizers": null, "annotations": null}}`)))
		})
	}
	_ = f.settle(f.harm)
	for _, o := range written {
		f.edited(o, func(obj client.Object) error { return c.Delete(f.t.Context(), obj) })
	}
	f.change()
	if err := f.settle(func() error { return errors.Join(f.harm(), f.left()) }); err != nil {
		harm = errors.Join(harm, fmt.Errorf("after the objects are removed: %w", err))
	}
	return refused, harm
}

// replace writes a hostile object over an existing one of c, such as one of the federation.
func (f *fuzz) replace(o hostile.Object) error {
	c, have, sent := f.Member("c").Client(), &unstructured.Unstructured{}, o.DeepCopy()
	have.SetGroupVersionKind(o.GroupVersionKind())
	if err := c.Get(f.t.Context(), client.ObjectKeyFromObject(o), have); err != nil {
		return err
	}
	sent.SetResourceVersion(have.GetResourceVersion())
	return c.Update(f.t.Context(), sent)
}

// edited changes or deletes a hostile object that may be gone.
func (f *fuzz) edited(o hostile.Object, edit func(client.Object) error) {
	f.t.Helper()
	obj := &unstructured.Unstructured{}
	obj.SetGroupVersionKind(o.GroupVersionKind())
	obj.SetNamespace(o.GetNamespace())
	obj.SetName(o.GetName())
	if err := edit(obj); client.IgnoreNotFound(err) != nil {
		f.t.Fatalf("remove %s: %v", o, err)
	}
}

// change replaces the endpoints of all bystanders in a and b.
func (f *fuzz) change() {
	f.t.Helper()
	f.round++
	for i, name := range f.scene.Services {
		for _, id := range []clusterset.ClusterID{"a", "b"} {
			es, _ := get[discoveryv1.EndpointSlice](f.testbed, id, f.namespace, name+"-1")
			es.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{f.endpoint(id, i)}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}}
			if err := f.Member(id).Client().Update(f.t.Context(), es); err != nil {
				f.t.Fatal(err)
			}
		}
	}
}

// endpoint returns the address of bystander i in a cluster.
func (f *fuzz) endpoint(id clusterset.ClusterID, i int) string {
	return fmt.Sprintf("10.%d.%d.%d", map[clusterset.ClusterID]int{"a": 1, "b": 2}[id], i, 1+f.round%250)
}

// settle reconciles until check returns nil, at most four times. An error of a hostile object's key is none of the test.
func (f *fuzz) settle(check func() error) (err error) {
	f.t.Helper()
	for range 4 {
		if fault := f.Reconcile(f.t.Context()); fault != nil && strings.Contains(fault.Error(), "read member") {
			f.t.Fatal(fault)
		}
		if err = check(); err == nil {
			return nil
		}
	}
	return err
}

// harm returns what is wrong in clusters a and b, which no hostile object is written to.
func (f *fuzz) harm() error {
	var errs []error
	for _, id := range []clusterset.ClusterID{"a", "b"} {
		for i, name := range f.scene.Services {
			errs = append(errs, f.harmOf(id, i, name))
		}
		var list v1beta1.ServiceImportList
		if err := f.Member(id).Client().List(f.t.Context(), &list); err != nil {
			f.t.Fatal(err)
		}
		if f.closed {
			errs = append(errs, f.strangers(id))
		}
		owners := map[string]string{}
		for _, si := range list.Items {
			for _, ip := range si.Spec.IPs {
				if a, err := netip.ParseAddr(ip); err != nil || !fuzzRange.Contains(a) {
					errs = append(errs, fmt.Errorf("in cluster %s, import %s has %s, which is not the federation's", id, si.Name, ip))
				}
				if other := owners[ip]; other != "" {
					errs = append(errs, fmt.Errorf("in cluster %s, imports %s and %s both have %s", id, other, si.Name, ip))
				}
				owners[ip] = si.Name
			}
		}
	}
	return errors.Join(errs...)
}

// strangers returns an error if a cluster has federated Services beside the bystanders.
func (f *fuzz) strangers(id clusterset.ClusterID) error {
	f.t.Helper()
	var all corev1.ServiceList
	if err := f.Member(id).Client().List(f.t.Context(), &all, client.MatchingLabels{"app.kubernetes.io/managed-by": v1alpha1.ManagedBy}); err != nil {
		f.t.Fatal(err)
	}
	var errs []error
	for _, svc := range all.Items {
		if svc.Namespace != system || !slices.Contains(f.scene.Services, svc.Name) {
			errs = append(errs, fmt.Errorf("cluster %s has the federated Service %s/%s", id, svc.Namespace, svc.Name))
		}
	}
	return errors.Join(errs...)
}

// harmOf returns what is wrong with a bystander in a cluster. A child may add endpoints of its own, if grants let it.
func (f *fuzz) harmOf(id clusterset.ClusterID, i int, name string) error {
	var errs []error
	if have := f.vip(id, name); !slices.Equal(have, f.vips[name]) {
		errs = append(errs, fmt.Errorf("in cluster %s, %s has the address %v, before %v", id, name, have, f.vips[name]))
	}
	svc, _ := get[corev1.Service](f.testbed, id, system, name)
	if len(svc.Spec.Ports) == 0 || svc.Spec.Ports[0].Port != 80 || len(svc.Spec.ExternalIPs) > 0 || svc.Spec.Type != corev1.ServiceTypeClusterIP {
		errs = append(errs, fmt.Errorf("in cluster %s, Service %s has %+v", id, name, svc.Spec))
	}
	have := slices.DeleteFunc(f.slices(id, system, name), func(line string) bool { return !f.closed && strings.HasPrefix(line, "c:") })
	want := []string{fmt.Sprintf("a: %s:8080", f.endpoint("a", i)), fmt.Sprintf("b: %s:8080", f.endpoint("b", i))}
	if f.round > 0 && !slices.Equal(have, want) {
		errs = append(errs, fmt.Errorf("in cluster %s, %s has endpoints %q, want %q", id, name, have, want))
	}
	return errors.Join(errs...)
}

// left returns an error while objects are left of hostile ones.
func (f *fuzz) left() error {
	f.t.Helper()
	if n := len(f.versions()); n != f.count {
		return fmt.Errorf("%d objects, %d before", n, f.count)
	}
	return nil
}
