package bystanders

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/hostile"
)

const managedBy = v1alpha1.ManagedBy

// foreign is the name of a Service that another MCS implementation has imported into west.
const foreign = "theirs"

// key identifies an object; cluster is empty on the broker.
type key struct{ cluster, kind, namespace, name string }

func keyOf(cluster string, obj client.Object) key {
	kind := obj.GetObjectKind().GroupVersionKind().Kind
	switch obj.(type) {
	case *corev1.Service:
		kind = "Service"
	case *v1beta1.ServiceExport:
		kind = v1beta1.ServiceExportKindName
	case *v1beta1.ServiceImport:
		kind = v1beta1.ServiceImportKindName
	case *coordinationv1.Lease:
		kind = "Lease"
	}
	return key{cluster, kind, obj.GetNamespace(), obj.GetName()}
}

// admin and author return the clients for an object of a place: the administrator's, and that of its author.
func (w *testbed) admin(cluster string) client.Client {
	if cluster == "" {
		return w.broker
	}
	return w.cluster(cluster)
}

func (w *testbed) author(o hostile.Object) client.Client {
	if o.Actor == hostile.Member {
		return w.crook
	}
	return w.cluster(o.Cluster).tenant
}

// outcome is what became of a hostile object.
type outcome struct {
	hostile.Object

	refused error // by the API server
}

// apply writes hostile objects with the credentials of their authors: each is created, or replaces an object of theirs. A
// refusal is an outcome; any other failure is one of the test.
func (w *testbed) apply(objects []hostile.Object) []outcome {
	w.t.Helper()
	var outcomes []outcome
	for _, o := range objects {
		err := w.write(o)
		if err != nil && !isRefusal(err) {
			w.t.Fatalf("write %s: %v", o, err)
		}
		outcomes = append(outcomes, outcome{o, err})
	}
	return outcomes
}

// write writes a hostile object, again if a busy API server does not say in time whether it did.
func (w *testbed) write(o hostile.Object) error {
	err := w.writeOnce(o)
	for range 3 {
		if !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) {
			break
		}
		if k := keyOf(o.Cluster, o.Unstructured); w.originals[k] == nil {
			w.owned[k] = true
		}
		err = w.writeOnce(o)
	}
	return err
}

func (w *testbed) writeOnce(o hostile.Object) error {
	ctx, sent, k := w.t.Context(), o.DeepCopy(), keyOf(o.Cluster, o.Unstructured)
	err := w.author(o).Create(ctx, sent)
	if apierrors.IsAlreadyExists(err) && (w.owned[k] || w.originals[k] != nil) {
		return retry.RetryOnConflict(retry.DefaultBackoff, func() error { return w.replace(o) }) // a controller may write its status
	}
	if err == nil {
		w.owned[k] = true
	}
	return err
}

// replace writes a hostile object over an existing one.
func (w *testbed) replace(o hostile.Object) error {
	have := &unstructured.Unstructured{}
	have.SetGroupVersionKind(o.GroupVersionKind())
	if err := w.admin(o.Cluster).Get(w.t.Context(), client.ObjectKeyFromObject(o), have); err != nil {
		return err
	}
	sent := o.DeepCopy()
	sent.SetResourceVersion(have.GetResourceVersion())
	return w.author(o).Update(w.t.Context(), sent)
}

// isRefusal reports whether an API server refused a request and said why.
func isRefusal(err error) bool {
	return err != nil && (apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsAlreadyExists(err) ||
		apierrors.IsRequestEntityTooLargeError(err) || apierrors.IsNotFound(err) || apierrors.IsInternalError(err) || strings.Contains(err.Error(), "request is too large"))
}

// remove removes hostile objects, and brings those that belong to the testbed back to their original form.
func (w *testbed) remove(objects []hostile.Object) {
	w.t.Helper()
	for _, o := range slices.Backward(objects) {
		k := keyOf(o.Cluster, o.Unstructured)
		switch original := w.originals[k]; {
		case original != nil:
			w.restore(o.Cluster, original)
		case w.owned[k]:
			w.removeOne(o)
			delete(w.owned, k)
		}
	}
	w.renew()
	w.restoreForeign()
}

// removeOne removes an object as its author would who withdraws it, or as an administrator who cleans up.
func (w *testbed) removeOne(o hostile.Object) {
	w.t.Helper()
	ctx, c := w.t.Context(), w.admin(o.Cluster)
	obj := &unstructured.Unstructured{}
	obj.SetGroupVersionKind(o.GroupVersionKind())
	obj.SetNamespace(o.GetNamespace())
	obj.SetName(o.GetName())
	patch := `{"metadata": {"finalizers": null}}`
	if o.GetKind() == "ExportRecord" { // a tombstone, or the guard against mass withdrawal would hold it
		patch = fmt.Sprintf(`{"metadata": {"finalizers": null}, "spec": {"withdrawnAt": %q}}`, time.Now().UTC().Format(time.RFC3339))
	}
	err := c.Patch(ctx, obj, client.RawPatch(types.MergePatchType, []byte(patch)))
	w.noError(client.IgnoreNotFound(err))
	w.noError(client.IgnoreNotFound(c.Delete(ctx, obj)))
}

func (w *testbed) restore(cluster string, original client.Object) {
	w.t.Helper()
	ctx, c := w.t.Context(), w.admin(cluster)
	w.noError(retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		have := original.DeepCopyObject().(client.Object)
		err := c.Get(ctx, client.ObjectKeyFromObject(original), have)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		want := original.DeepCopyObject().(client.Object)
		want.SetResourceVersion("")
		if err != nil {
			want.SetUID("")
			return c.Create(ctx, want)
		}
		want.SetResourceVersion(have.GetResourceVersion())
		return c.Update(ctx, want)
	}))
}

// restoreForeign makes the import of the other implementation what it was.
func (w *testbed) restoreForeign() {
	w.t.Helper()
	if w.foreignHarm() == nil {
		return
	}
	c, want := w.cluster("west"), foreignImport()
	w.eventually("the foreign import is back", func() error {
		have := &v1beta1.ServiceImport{}
		err := c.Get(w.t.Context(), client.ObjectKeyFromObject(want), have)
		if apierrors.IsNotFound(err) {
			return c.Create(w.t.Context(), foreignImport())
		}
		if err != nil {
			return err
		}
		if w.foreignHarm() == nil {
			return nil
		}
		return errors.Join(c.Delete(w.t.Context(), have), errors.New("it was replaced"))
	})
}

func foreignImport() *v1beta1.ServiceImport {
	return &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: foreign, Labels: map[string]string{v1alpha1.LabelManagedBy: "example.org"}},
		Spec: v1beta1.ServiceImportSpec{
			Type: v1beta1.ClusterSetIP, IPs: []string{"198.51.100.1"}, Ports: []v1beta1.ServicePort{{Name: "theirs", Protocol: corev1.ProtocolTCP, Port: 4242}},
		},
	}
}

// foreignHarm returns how the import of the other implementation differs from its author's, or nil.
func (w *testbed) foreignHarm() error {
	have, want := &v1beta1.ServiceImport{}, foreignImport()
	if err := w.cluster("west").Get(w.t.Context(), client.ObjectKeyFromObject(want), have); err != nil {
		return fmt.Errorf("the import of another implementation in west: %w", err)
	}
	if have.Labels[v1alpha1.LabelManagedBy] != want.Labels[v1alpha1.LabelManagedBy] || !slices.Equal(have.Spec.IPs, want.Spec.IPs) || len(have.Spec.Ports) != 1 || have.Spec.Ports[0].Name != "theirs" {
		return fmt.Errorf("the import of another implementation in west was rewritten: labels %v, spec %+v", have.Labels, have.Spec)
	}
	return nil
}

// judge changes the bystanders beside the hostile objects that were applied, and returns the harm that these do. late is set
// if the only harm is a delay.
func (w *testbed) judge() (late, harm error) {
	w.t.Helper()
	w.client.reset()
	w.change()
	if _, err := w.arrive(time.Now(), w.wants(), w.allowed()); err != nil {
		took, again := w.arrive(time.Now(), w.wants(), w.stuckAfter())
		if again != nil {
			return nil, fmt.Errorf("a change of the bystanders does not arrive: %w", again)
		}
		late = fmt.Errorf("a change arrived after %s; without hostile objects %s", w.allowed()+took, w.baseline)
	}
	if err := w.client.tried(w.t.Context()); err != nil {
		return nil, err
	}
	if err := w.client.failure(); err != nil {
		return nil, fmt.Errorf("a connection failed: %w", err)
	}
	if harm = errors.Join(w.foreignHarm(), w.servedHarm()); harm != nil {
		return nil, harm
	}
	return late, nil
}

// stuckAfter is how long a late change may take until it counts as one that never arrives.
func (w *testbed) stuckAfter() time.Duration {
	if w.expectHarm {
		return 0
	}
	return 5 * w.allowed()
}

// servedHarm returns what is wrong with the imports, and what clusters and their nodes serve that they must not.
func (w *testbed) servedHarm() error {
	harm := w.importHarm()
	for _, c := range w.clusters {
		harm = errors.Join(harm, w.mapHarm(c), w.sliceHarm(c), w.quotaHarm(c))
	}
	return harm
}

// importHarm returns how an import of a bystander differs from what its oldest exporter asked for.
func (w *testbed) importHarm() error {
	for _, c := range w.clusters {
		for _, b := range w.bystanders {
			if b.elder {
				if si := (&v1beta1.ServiceImport{}); c.mirror.Get(w.t.Context(), types.NamespacedName{Namespace: shop, Name: b.name}, si) == nil && weighsExporters(si.Annotations) {
					return fmt.Errorf("the import of %s in %s has weights that its exporters did not state: %.200q", b.name, c.id, fmt.Sprint(si.Annotations))
				}
				continue
			}
			si, err := w.imported(c, b.name)
			if err != nil {
				return err
			}
			if si.Spec.Type != v1beta1.ClusterSetIP || !slices.Equal(si.Spec.IPs, texts(b.vips)) || len(si.Spec.Ports) == 0 ||
				!slices.ContainsFunc(si.Spec.Ports, func(p v1beta1.ServicePort) bool { return p.Name == "http" && p.Port == 80 }) ||
				si.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
				return fmt.Errorf("the import of %s in %s changed: %+v", b.name, c.id, si.Spec)
			}
			if !harmless(si.Annotations) {
				return fmt.Errorf("the import of %s in %s has annotations of another member: %.200q", b.name, c.id, fmt.Sprint(si.Annotations))
			}
		}
	}
	return nil
}

// harmless reports whether the annotations of a bystander's import say nothing about its exporters: another member may drain
// itself by a weight.
func harmless(annotations map[string]string) bool {
	for key, value := range annotations {
		if _, _, err := clusterset.ParseWeights(value); key != clusterset.AnnotationClusterWeights || err != nil {
			return false
		}
	}
	return !weighsExporters(annotations)
}

// weighsExporters reports whether the annotations of an import have weights of the bystanders' exporters, which state none.
func weighsExporters(annotations map[string]string) bool {
	groups, _, err := clusterset.ParseWeights(annotations[clusterset.AnnotationClusterWeights])
	return err == nil && slices.ContainsFunc(groups, func(group clusterset.Weights) bool {
		return slices.ContainsFunc(exporters, func(id string) bool { _, named := group[clusterset.ClusterID(id)]; return named })
	})
}

// mapHarm returns what a node serves that it must not.
func (w *testbed) mapHarm(c *cluster) error {
	state, err := c.maps.Load(w.t.Context())
	if err != nil {
		return err
	}
	for a, fe := range state.Frontends {
		if c.id == "west" && state.Services[fe.Service].Name == foreign {
			continue // a node may serve the imports of another implementation
		}
		if !slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a.AddrPort.Addr()) }) {
			return fmt.Errorf("the node of %s serves %s of %s, outside of the ClusterSet's ranges", c.id, a, state.Services[fe.Service])
		}
	}
	for _, be := range state.Backends {
		id := string(state.Clusters[be.Cluster])
		if numbers[id] == 0 || !slices.ContainsFunc(append(pods(id), nodes(id)), func(p netip.Prefix) bool { return p.Contains(be.AddrPort.Addr()) }) {
			return fmt.Errorf("the node of %s sends clients to %s of %q, which is an address of neither its pods nor its nodes", c.id, be.AddrPort, id)
		}
	}
	return nil
}

// sliceHarm returns an endpoint of another cluster that is a Service of the cluster itself: a name would lead its clients there.
func (w *testbed) sliceHarm(c *cluster) error {
	var list discoveryv1.EndpointSliceList
	err := c.mirror.List(w.t.Context(), &list, client.MatchingLabels{discoveryv1.LabelManagedBy: managedBy}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return err
	}
	for i := range list.Items {
		es := &list.Items[i]
		if es.Labels[v1beta1.LabelSourceCluster] == c.id {
			continue // a Service of its own may decline a ClusterSetIP
		}
		for _, e := range es.Endpoints {
			for _, text := range e.Addresses {
				a, err := netip.ParseAddr(text)
				if err != nil || slices.ContainsFunc(serviceCIDRs, func(p netip.Prefix) bool { return p.Contains(a) }) {
					return fmt.Errorf("slice %s of %s has the endpoint %s, which is a Service of %s itself", es.Name, c.id, text, c.id)
				}
			}
		}
	}
	return nil
}

// quotaHarm returns which quota the imports of a cluster exceed, as far as only the hostile member exports them.
func (w *testbed) quotaHarm(c *cluster) error {
	var list v1beta1.ServiceImportList
	if err := c.mirror.List(w.t.Context(), &list, client.MatchingLabels{v1alpha1.LabelManagedBy: managedBy}, client.UnsafeDisableDeepCopy); err != nil {
		return err
	}
	services, ports := 0, 0
	for i := range list.Items {
		if si := &list.Items[i]; len(si.Status.Clusters) == 1 && si.Status.Clusters[0].Cluster == crook {
			services++
			ports += len(si.Spec.Ports)
		}
	}
	if int64(services) > quotas.Services || int64(ports) > quotas.Ports {
		return fmt.Errorf("%s imports %d Services with %d ports that only %s exports, more than its quotas of %d and %d", c.id, services, ports, crook, quotas.Services, quotas.Ports)
	}
	return nil
}

// trial applies objects, judges them and removes them. It returns the harm, after the bystanders have recovered. If there is
// none, further may find another fault before the removal.
func (w *testbed) trial(objects []hostile.Object, further func([]outcome) error) (harm error) {
	w.t.Helper()
	w.warnings.take()
	outcomes := w.apply(objects)
	late, harm := w.judge()
	w.running()
	w.checkSize(len(objects))
	var fault error
	if harm == nil && late == nil && further != nil {
		fault = further(outcomes)
	}
	w.remove(objects)
	if harm == nil && late == nil {
		return fault
	}
	w.recover(objects)
	for range 2 { // a busy machine is late once, a harmful object every time
		if harm != nil {
			break
		}
		w.t.Logf("%v; trying again", late)
		w.measureBaseline()
		w.apply(objects)
		var again error
		again, harm = w.judge()
		w.remove(objects)
		w.recover(objects)
		if again == nil && harm == nil {
			return nil
		}
		late = again
	}
	return errors.Join(harm, late)
}

// recover waits until the bystanders are well again after hostile objects were removed.
func (w *testbed) recover(objects []hostile.Object) {
	w.t.Helper()
	w.change()
	w.eventually("the bystanders do not recover after these objects were removed:\n"+describe(objects), func() error { return w.missing(w.wants()) })
	w.client.reset()
	w.eventually("connections fail after these objects were removed:\n"+describe(objects), func() error {
		w.client.reset()
		return errors.Join(w.client.tried(w.t.Context()), w.client.failure())
	})
	w.eventually("nodes do not recover after these objects were removed:\n"+describe(objects), func() error {
		return w.servedHarm()
	})
}

// describe prints objects, and how to replay them.
func describe(objects []hostile.Object) string {
	text := hostile.Describe(objects)
	var origins []string
	for _, o := range objects {
		if strings.Contains(o.Origin, "/") && !slices.Contains(origins, o.Origin) { // not that of a known attack
			origins = append(origins, o.Origin)
		}
	}
	if len(origins) == 0 {
		return text
	}
	return fmt.Sprintf("%sreplay: %s=%s", text, replayVariable, strings.Join(origins, ","))
}

// size counts the objects of Isthmus in each cluster and on the broker, tombstones apart.
func (w *testbed) size(ctx context.Context) (map[string]int, error) {
	counts := map[string]int{}
	for _, c := range w.clusters {
		var imports v1beta1.ServiceImportList
		var list discoveryv1.EndpointSliceList
		err := errors.Join(
			c.mirror.List(ctx, &imports, client.MatchingLabels{v1alpha1.LabelManagedBy: managedBy}, client.UnsafeDisableDeepCopy),
			c.mirror.List(ctx, &list, client.MatchingLabels{discoveryv1.LabelManagedBy: managedBy}, client.UnsafeDisableDeepCopy),
		)
		if err != nil {
			return nil, err
		}
		counts[c.id+" imports"], counts[c.id+" slices"] = len(imports.Items), len(list.Items)
	}
	var records v1alpha1.ExportRecordList
	var list discoveryv1.EndpointSliceList
	var aggregates v1beta1.ServiceImportList
	in := client.InNamespace(brokerNamespace)
	if err := errors.Join(w.broker.List(ctx, &records, in), w.broker.List(ctx, &list, in), w.broker.List(ctx, &aggregates, in)); err != nil {
		return nil, err
	}
	counts["broker slices"], counts["broker aggregates"] = len(list.Items), len(aggregates.Items)
	for i := range records.Items {
		if records.Items[i].Spec.WithdrawnAt == nil {
			counts["broker records"]++
		}
	}
	return counts, nil
}

// checkSize fails the test if the hostile objects have multiplied.
func (w *testbed) checkSize(applied int) {
	w.t.Helper()
	have, err := w.size(w.t.Context())
	w.noError(err)
	for what, n := range have {
		if most := w.counts[what] + 2*applied + len(w.bystanders); n > most {
			w.t.Errorf("%s: %d objects, want at most %d: %d without the %d hostile objects", what, n, most, w.counts[what], applied)
		}
	}
}
