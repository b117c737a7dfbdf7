package access_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// attempt is a request, with the credentials of the client.
type attempt func(context.Context, client.Client) error

// attack is an attempt that must be refused.
type attack struct {
	as      string // the member that tries, a when empty
	do      attempt
	because string // part of what the API server says
}

// denied is an attempt for which a member lacks the right, whatever the object.
func denied(verb, resource string, do attempt) attack {
	return attack{do: do, because: fmt.Sprintf("cannot %s resource %q", verb, resource)}
}

func create(obj client.Object) attempt {
	return func(ctx context.Context, c client.Client) error { return c.Create(ctx, obj) }
}

// update writes obj as it is stored after edit.
func update[T client.Object](b *broker, obj T, edit func(T)) attempt {
	return func(ctx context.Context, c client.Client) error {
		if err := b.admin.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil {
			return err
		}
		edit(obj)
		return c.Update(ctx, obj)
	}
}

// updateStatus is update by way of the subresource.
func updateStatus[T client.Object](b *broker, obj T, edit func(T)) attempt {
	return func(ctx context.Context, c client.Client) error {
		if err := b.admin.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil {
			return err
		}
		edit(obj)
		return c.Status().Update(ctx, obj)
	}
}

func merge(obj client.Object, patch string) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Patch(ctx, obj, client.RawPatch(types.MergePatchType, []byte(patch)))
	}
}

func mergeStatus(obj client.Object, patch string) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.Status().Patch(ctx, obj, client.RawPatch(types.MergePatchType, []byte(patch)))
	}
}

// apply is a server-side apply under the field owner that all members have, by force.
func apply(obj client.Object) attempt {
	return func(ctx context.Context, c client.Client) error {
		config, err := configuration(obj)
		if err != nil {
			return err
		}
		return c.Apply(ctx, config, client.FieldOwner(isthmus.FieldOwner), client.ForceOwnership)
	}
}

func applyStatus(obj client.Object) attempt {
	return func(ctx context.Context, c client.Client) error {
		config, err := configuration(obj)
		if err != nil {
			return err
		}
		return c.Status().Apply(ctx, config, client.FieldOwner(isthmus.FieldOwner), client.ForceOwnership)
	}
}

func configuration(obj client.Object) (runtime.ApplyConfiguration, error) {
	gvk, err := apiutil.GVKForObject(obj, scheme)
	if err != nil {
		return nil, err
	}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, err
	}
	u := &unstructured.Unstructured{Object: fields}
	u.SetGroupVersionKind(gvk)
	return client.ApplyConfigurationFromUnstructured(u), nil
}

func remove(obj client.Object, opts ...client.DeleteOption) attempt {
	return func(ctx context.Context, c client.Client) error { return c.Delete(ctx, obj, opts...) }
}

func removeAll(b *broker, obj client.Object) attempt {
	return func(ctx context.Context, c client.Client) error {
		return c.DeleteAllOf(ctx, obj, client.InNamespace(b.namespace))
	}
}

// impersonating makes the attempt as member a who says to be somebody else.
func (b *broker) impersonating(user string, do attempt) attempt {
	return func(ctx context.Context, _ client.Client) error {
		config := b.config("a")
		config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:masters"}}
		c, err := client.New(config, client.Options{Scheme: scheme, Mapper: b.admin.RESTMapper()})
		if err != nil {
			return err
		}
		return do(ctx, c)
	}
}

// Members attempt requests on foreign objects. Every attempt is refused for the expected reason, and the broker does
// not change.
func TestHostileMember(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	b.exporting("shop", "243.2.0.1", "b", "a.b") // of others alone
	b.exporting("own", "243.0.0.1", "a", "b")    // a's address, and b relies on it
	b.exporting("solo", "243.0.0.2", "a")        // a's alone
	b.exporting("dotted", "243.1.0.1", "a.b")    // that of one whose name begins like a's
	bare := b.aggregate("bare", "demo", "")      // one without an address, which b exports
	b.write(bare)
	b.list(bare, "b")
	b.write(alter(b.aggregate("authorless", "demo", ""), func(s *v1beta1.ServiceImport) { s.Annotations = nil })) // by an older member
	declined := b.aggregate("declined", "demo", "")                                                               // one for which b wants none
	metav1.SetMetaDataAnnotation(&declined.ObjectMeta, isthmus.AnnotationUseClusterSetIP, "false")
	b.write(declined)
	old := b.aggregate("old", "demo", "b", "243.2.0.9") // one that says nothing of use-clusterset-ip
	b.write(old)
	// The address of "left" is b's, which exports it no more; a has added one to "extended"; and b still exports "crowded".
	for name, clusters := range map[string][]string{"left": {"a", "a.b"}, "extended": {"a", "a.b"}, "crowded": {"a", "b"}} {
		ips := map[string][]string{"left": {"243.2.0.4"}, "extended": {"243.2.0.5", "fd00:243:0:1::5"}, "crowded": {"243.2.0.6"}}[name]
		si := b.aggregate(name, "demo", "b", ips...)
		if len(ips) > 1 {
			metav1.SetMetaDataAnnotation(&si.ObjectMeta, isthmus.AnnotationExtendedBy, "a")
		}
		b.write(si)
		b.list(si, clusters...)
	}
	// One whose clusters were applied under the one field owner of all members: who applies less then takes away
	// what others applied.
	applied := b.aggregate("applied", "demo", "")
	b.write(applied)
	applied.Status.Clusters = []v1beta1.ClusterStatus{{Cluster: "a"}, {Cluster: "b"}}
	applied.ManagedFields = nil
	b.noError(applyStatus(applied)(t.Context(), b.admin))
	// Objects with a's names that belong to b, as only an administrator can leave them.
	b.write(alter(b.record("b", "odd", "demo"), func(r *isthmus.ExportRecord) { r.Name = "a.odd.demo" }))
	b.write(alter(b.record("a", "odder", "demo"), func(r *isthmus.ExportRecord) { r.Labels[isthmus.LabelCluster] = "b" }))
	b.write(alter(b.record("a", "oddest", "demo"), func(r *isthmus.ExportRecord) { r.Spec.ClusterID = "b" }))
	b.write(alter(b.slice("a", "odd", "demo"), func(s *discoveryv1.EndpointSlice) { s.Labels[isthmus.LabelCluster] = "b" }))
	for id := range blocks {
		b.write(b.lease(id))
	}
	b.write(&corev1.Secret{ObjectMeta: b.meta("treasure"), StringData: map[string]string{"token": "x"}})

	all := map[string]map[string]attack{
		"fields":     b.attacksOnFields(),
		"records":    b.attacksOnRecords(),
		"slices":     b.attacksOnSlices(),
		"leases":     b.attacksOnLeases(),
		"aggregates": b.attacksOnAggregates(),
		"extensions": b.attacksOnExtensions(),
		"statuses":   b.attacksOnStatuses(),
		"the rest":   b.attacksOnTheRest(),
	}
	clients := map[string]client.Client{"stranger": b.member("stranger")}
	for id := range blocks {
		clients[id] = b.member(id)
	}
	before := b.state()
	count := 0
	for part, attacks := range all {
		t.Run(part, func(t *testing.T) {
			for name, a := range attacks {
				count++
				t.Run(name, func(t *testing.T) {
					c := clients["a"]
					if a.as != "" {
						c = clients[a.as]
					}
					if err := refused(a.do(t.Context(), c), a.because); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
	if diff := cmp.Diff(before, b.state()); diff != "" {
		t.Errorf("what was attacked has changed (-before +after):\n%s", diff)
	}
	if count < 150 {
		t.Errorf("%d attempts, want at least 150", count)
	}
	conformance.Holds(t, "L73")
	t.Logf("%d attempts were refused", count)
}

// state returns the versions of all that an attack might change.
func (b *broker) state() map[string]string {
	b.t.Helper()
	versions := map[string]string{}
	for _, list := range []client.ObjectList{
		&isthmus.ExportRecordList{}, &discoveryv1.EndpointSliceList{}, &coordinationv1.LeaseList{}, &v1beta1.ServiceImportList{},
		&isthmus.MemberList{}, &isthmus.ClusterSetConfigList{}, &corev1.SecretList{}, &corev1.ConfigMapList{}, &corev1.ServiceAccountList{},
		&corev1.PodList{}, &corev1.ServiceList{}, &rbacv1.RoleList{}, &rbacv1.RoleBindingList{},
	} {
		b.versions(list, versions)
	}
	// A controller of another test writes the status of policies, so theirs is the version of the spec.
	policies := &admissionv1.ValidatingAdmissionPolicyList{}
	b.noError(b.admin.List(b.t.Context(), policies))
	bindings := &admissionv1.ValidatingAdmissionPolicyBindingList{}
	b.noError(b.admin.List(b.t.Context(), bindings))
	for _, p := range policies.Items {
		if strings.Contains(p.Name, "."+b.namespace+".") {
			versions["policy "+p.Name] = fmt.Sprint(p.UID, p.Generation)
		}
	}
	for _, p := range bindings.Items {
		if strings.Contains(p.Name, "."+b.namespace+".") {
			versions["binding "+p.Name] = fmt.Sprint(p.UID, p.Generation)
		}
	}
	namespace := &corev1.Namespace{}
	b.noError(b.admin.Get(b.t.Context(), client.ObjectKey{Name: b.namespace}, namespace))
	versions["namespace"] = namespace.ResourceVersion
	return versions
}

// versions adds those of all objects of the broker's namespace that list is a list of.
func (b *broker) versions(list client.ObjectList, versions map[string]string) {
	b.t.Helper()
	b.noError(b.admin.List(b.t.Context(), list, client.InNamespace(b.namespace)))
	b.noError(meta.EachListItem(list, func(item runtime.Object) error {
		o, err := meta.Accessor(item)
		if err == nil {
			versions[fmt.Sprintf("%T %s", item, o.GetName())] = o.GetResourceVersion()
		}
		return err
	}))
}
