// Package imports gives this member what the ClusterSet offers: a ServiceImport and the EndpointSlices of
// every Service that any member exports, in each namespace of that name that exists here.
//
// It reads a complete cache of the broker or does nothing: while the broker is away, what was imported
// stays. Everything it writes carries our labels, and whoever else edits it is overruled.
package imports

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/broker"
	"github.com/isthmus-net/isthmus/controlplane/internal/propagation"
	"github.com/isthmus-net/isthmus/controlplane/internal/ssa"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// conflictRetry is when to look again after somebody else wrote the same object first. The cache needs a
// moment to learn what they wrote.
const conflictRetry = 50 * time.Millisecond

// clashRetry is when to look again at an import whose address another one has.
const clashRetry = 5 * time.Second

// The indexes of the member's EndpointSlices by the import they belong to and by the member they come from, and
// of its ServiceImports by their addresses.
const (
	byImport  = "import"
	bySource  = "source"
	byAddress = "address"
)

// keep are annotations of slices that say nothing about their content.
const keep = v1alpha1.AnnotationChangedAt

// offers is what this package needs of the broker.
type offers interface {
	Changes() []source.Source
	Services(ctx context.Context, namespace string) ([]clusterset.ServiceName, error)
	Exports(context.Context, clusterset.ServiceName) ([]clusterset.Export, error)
	Slices(context.Context, clusterset.ServiceName) ([]discoveryv1.EndpointSlice, error)
	Aggregate(context.Context, clusterset.ServiceName) (clusterset.Aggregate, bool, error)
	Baseline(context.Context, map[clusterset.ServiceName][]clusterset.ClusterID, map[broker.ImportedSlice]clusterset.ClusterID) error
	Kept(context.Context, clusterset.ServiceName, []clusterset.ClusterID) ([]clusterset.ClusterID, error)
	KeepsSlice(clusterset.ClusterID, broker.ImportedSlice) bool
	SeenAt(broker.ImportedSlice) (time.Time, bool)
}

// lives is what this package needs to know of how the other members fare.
type lives interface {
	Dead(clusterset.ClusterID) bool
	// Offset is by how much a member's clock is behind this one's, and whether that is known.
	Offset(clusterset.ClusterID) (time.Duration, bool)
}

// Reconciler imports the Services of the ClusterSet into one member. All fields are required.
type Reconciler struct {
	Cluster clusterset.ClusterID
	Client  client.Client // of the member, reading from its cache
	Broker  offers
	Members lives
	Policy  clusterset.Policy
	Shared  func(namespace string) bool
	Log     *slog.Logger

	baseline struct {
		sync.Mutex

		done bool
	}
}

// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceimports,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceimports/status,verbs=patch
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices/restricted,verbs=create

// Setup adds the reconciler to a manager of the member's cluster.
func (r *Reconciler) Setup(ctx context.Context, mgr ctrl.Manager, options controller.Options) error {
	err := mgr.GetFieldIndexer().IndexField(ctx, &discoveryv1.EndpointSlice{}, byImport, func(obj client.Object) []string {
		if !isOurSlice(obj) {
			return nil
		}
		return []string{obj.GetLabels()[v1beta1.LabelServiceName]}
	})
	if err != nil {
		return fmt.Errorf("index endpoint slices by import: %w", err)
	}
	err = mgr.GetFieldIndexer().IndexField(ctx, &discoveryv1.EndpointSlice{}, bySource, func(obj client.Object) []string {
		if !isOurSlice(obj) {
			return nil
		}
		return []string{obj.GetLabels()[v1beta1.LabelSourceCluster]}
	})
	if err != nil {
		return fmt.Errorf("index endpoint slices by source: %w", err)
	}
	err = mgr.GetFieldIndexer().IndexField(ctx, &v1beta1.ServiceImport{}, byAddress, func(obj client.Object) []string {
		if si, ok := obj.(*v1beta1.ServiceImport); ok {
			return si.Spec.IPs
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("index service imports by address: %w", err)
	}
	b := ctrl.NewControllerManagedBy(mgr).
		Named("imports").
		WithOptions(options).
		For(&v1beta1.ServiceImport{}).
		Watches(&discoveryv1.EndpointSlice{}, handler.EnqueueRequestsFromMapFunc(importOfSlice)).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.importsOfNamespace), builder.WithPredicates(created))
	for _, s := range r.Broker.Changes() {
		b = b.WatchesRawSource(s)
	}
	if err := b.Complete(r); err != nil {
		return fmt.Errorf("set up imports: %w", err)
	}
	return nil
}

// Uses reports whether anything stands here that came from a member, true while that is not known.
func (r *Reconciler) Uses(ctx context.Context, id clusterset.ClusterID) bool {
	r.baseline.Lock()
	begun := r.baseline.done
	r.baseline.Unlock()
	if !begun {
		return true
	}
	var list discoveryv1.EndpointSliceList
	err := r.Client.List(ctx, &list, client.MatchingFields{bySource: string(id)}, client.UnsafeDisableDeepCopy)
	return err != nil || len(list.Items) > 0
}

// created lets pass that a namespace came into being; nothing else about it matters here.
var created = predicate.Funcs{
	UpdateFunc: func(event.UpdateEvent) bool { return false },
	DeleteFunc: func(event.DeleteEvent) bool { return false },
}

func isOurSlice(obj client.Object) bool {
	return obj.GetLabels()[discoveryv1.LabelManagedBy] == v1alpha1.ManagedBy && obj.GetLabels()[v1beta1.LabelServiceName] != ""
}

// importOfSlice maps a slice to the import it says it belongs to. That also catches one whose manager
// label somebody has changed.
func importOfSlice(_ context.Context, obj client.Object) []reconcile.Request {
	name := obj.GetLabels()[v1beta1.LabelServiceName]
	if name == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: obj.GetNamespace(), Name: name}}}
}

func (r *Reconciler) importsOfNamespace(ctx context.Context, obj client.Object) []reconcile.Request {
	names, err := r.Broker.Services(ctx, obj.GetName())
	if err != nil {
		r.Log.Error("imports of a new namespace are not known", "namespace", obj.GetName(), "err", err)
		return nil
	}
	var requests []reconcile.Request
	for _, n := range names {
		requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName(n)})
	}
	return requests
}

// Reconcile makes one import here what the broker says it is, or removes it.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	if err := r.begin(ctx); err != nil {
		return ctrl.Result{}, err
	}
	again, err := r.reconcile(ctx, clusterset.ServiceName(req.NamespacedName))
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: conflictRetry}, nil
	}
	return ctrl.Result{RequeueAfter: again}, err
}

// begin tells the broker's side, once, what was imported before this process started.
func (r *Reconciler) begin(ctx context.Context) error {
	r.baseline.Lock()
	defer r.baseline.Unlock()
	if r.baseline.done {
		return nil
	}
	var imports v1beta1.ServiceImportList
	if err := r.Client.List(ctx, &imports, client.MatchingLabels{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy}); err != nil {
		return fmt.Errorf("list service imports: %w", err)
	}
	from := map[clusterset.ServiceName][]clusterset.ClusterID{}
	for i := range imports.Items {
		si := &imports.Items[i]
		for _, c := range si.Status.Clusters {
			name := clusterset.ServiceName{Namespace: si.Namespace, Name: si.Name}
			from[name] = append(from[name], clusterset.ClusterID(c.Cluster))
		}
	}
	var list discoveryv1.EndpointSliceList
	if err := r.Client.List(ctx, &list, client.MatchingLabels{discoveryv1.LabelManagedBy: v1alpha1.ManagedBy}); err != nil {
		return fmt.Errorf("list endpoint slices: %w", err)
	}
	imported := map[broker.ImportedSlice]clusterset.ClusterID{}
	for i := range list.Items {
		if es := &list.Items[i]; isOurSlice(es) {
			imported[importedSlice(es)] = sourceOf(es)
		}
	}
	err := r.Broker.Baseline(ctx, from, imported)
	r.baseline.done = err == nil
	return err
}

func importedSlice(es *discoveryv1.EndpointSlice) broker.ImportedSlice {
	return broker.ImportedSlice{Service: clusterset.ServiceName{Namespace: es.Namespace, Name: es.Labels[v1beta1.LabelServiceName]}, Name: es.Name}
}

func sourceOf(es *discoveryv1.EndpointSlice) clusterset.ClusterID {
	return clusterset.ClusterID(es.Labels[v1beta1.LabelSourceCluster])
}

func (r *Reconciler) reconcile(ctx context.Context, name clusterset.ServiceName) (again time.Duration, err error) {
	if !r.Shared(name.Namespace) {
		return 0, nil
	}
	var ns corev1.Namespace
	err = r.Client.Get(ctx, types.NamespacedName{Name: name.Namespace}, &ns)
	if err != nil || ns.DeletionTimestamp != nil {
		return 0, client.IgnoreNotFound(err) // it comes back here when the namespace does
	}
	have, err := r.here(ctx, name)
	if err != nil {
		return 0, err
	}
	exports, err := r.Broker.Exports(ctx, name)
	if err != nil {
		return 0, err
	}
	kept, err := r.Broker.Kept(ctx, name, have.from())
	if err != nil {
		return 0, err
	}
	if len(exports) == 0 && len(kept) == 0 {
		return 0, r.remove(ctx, name, have)
	}
	imp, again, err := r.imported(ctx, name, exports, kept, have)
	if err != nil || have.imp == nil {
		return again, err
	}
	offered, err := r.Broker.Slices(ctx, name)
	if err != nil {
		return again, err
	}
	leave := func(es *discoveryv1.EndpointSlice) bool {
		source := sourceOf(es)
		if r.Members.Dead(source) {
			return false
		}
		exporting := slices.ContainsFunc(exports, func(e clusterset.Export) bool { return e.Cluster == source })
		return slices.Contains(kept, source) ||
			exporting && slices.Contains(imp.Clusters, source) && r.Broker.KeepsSlice(source, importedSlice(es))
	}
	return again, r.applySlices(ctx, have.slices, r.wantSlices(imp, exports, offered, have.imp), leave)
}

// here is what stands in this member of one Service.
type here struct {
	imp    *v1beta1.ServiceImport // nil when there is none
	slices map[string]*discoveryv1.EndpointSlice
}

func (r *Reconciler) here(ctx context.Context, name clusterset.ServiceName) (*here, error) {
	si := &v1beta1.ServiceImport{}
	err := r.Client.Get(ctx, types.NamespacedName(name), si)
	if apierrors.IsNotFound(err) {
		si = nil
	} else if err != nil {
		return nil, fmt.Errorf("read service import %s: %w", name, err)
	}
	var list discoveryv1.EndpointSliceList
	if err := r.Client.List(ctx, &list, client.InNamespace(name.Namespace), client.MatchingFields{byImport: name.Name}); err != nil {
		return nil, fmt.Errorf("list endpoint slices of import %s: %w", name, err)
	}
	h := &here{imp: si, slices: map[string]*discoveryv1.EndpointSlice{}}
	for i := range list.Items {
		h.slices[list.Items[i].Name] = &list.Items[i]
	}
	return h, nil
}

// from returns from whom the Service has been imported, sorted.
func (h *here) from() []clusterset.ClusterID {
	var ids []clusterset.ClusterID
	for _, es := range h.slices {
		ids = append(ids, sourceOf(es))
	}
	if h.imp != nil && h.imp.Labels[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy {
		for _, c := range h.imp.Status.Clusters {
			ids = append(ids, clusterset.ClusterID(c.Cluster))
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// imported makes have.imp what the exports mean and returns that. While what some members said is missing
// and not believed to be gone, the import stays as it is.
func (r *Reconciler) imported(ctx context.Context, name clusterset.ServiceName, exports []clusterset.Export, kept []clusterset.ClusterID, have *here) (imp clusterset.Import, again time.Duration, err error) {
	if len(kept) > 0 {
		if have.imp == nil {
			return imp, 0, nil
		}
		imp, err = mcs.Import(have.imp)
		return imp, 0, err
	}
	if imp, err = r.merged(ctx, exports, have); err != nil {
		return imp, 0, err
	}
	if other, clash, err := r.clash(ctx, imp); err != nil {
		return imp, 0, err
	} else if clash {
		r.Log.Error("two services have one clusterset IP, and the one that was imported first keeps it; unexport one of them everywhere",
			"namespace", name.Namespace, "service", name.Name, "vip", imp.IPs, "other", other)
		imp, again = imp.WithIPs(nil), clashRetry
	}
	have.imp, err = r.applyImport(ctx, imp, have.imp)
	return imp, again, err
}

// merged returns what exports mean, with the address of the aggregate. While that has none, somebody having
// deleted it, the address is the one that the exporters remember, or that the Service has here.
func (r *Reconciler) merged(ctx context.Context, exports []clusterset.Export, have *here) (clusterset.Import, error) {
	agreed, _, err := r.Broker.Aggregate(ctx, exports[0].Service)
	if err != nil {
		return clusterset.Import{}, err
	}
	if decided := agreed.Decided(); decided != clusterset.Unknown {
		for i := range exports {
			exports[i].AgreedIP = decided
		}
	}
	imp, _ := r.Policy.Merge(exports)
	switch {
	case len(agreed.IPs) > 0:
		return imp.WithIPs(agreed.IPs), nil
	case len(imp.IPs) == 0 && have.imp != nil && len(have.imp.Spec.IPs) > 0:
		if before, err := mcs.Import(have.imp); err == nil {
			return imp.WithIPs(before.IPs), nil
		}
	}
	return imp.WithIPs(imp.IPs), nil
}

// clash returns another import that has an address of imp already.
func (r *Reconciler) clash(ctx context.Context, imp clusterset.Import) (other string, clash bool, err error) {
	for _, ip := range imp.IPs {
		var list v1beta1.ServiceImportList
		if err := r.Client.List(ctx, &list, client.MatchingFields{byAddress: ip.String()}, client.UnsafeDisableDeepCopy); err != nil {
			return "", false, fmt.Errorf("list service imports with address %s: %w", ip, err)
		}
		var own metav1.Time
		for i := range list.Items {
			if si := &list.Items[i]; si.Namespace == imp.Service.Namespace && si.Name == imp.Service.Name {
				own = si.CreationTimestamp
			}
		}
		for i := range list.Items {
			si := &list.Items[i]
			itself := si.Namespace == imp.Service.Namespace && si.Name == imp.Service.Name
			if !itself && si.Labels[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy && (own.IsZero() || si.CreationTimestamp.Before(&own)) {
				return si.Namespace + "/" + si.Name, true, nil
			}
		}
	}
	return "", false, nil
}

// wantSlices returns the slices that si should have: those of members that count among its exporters and
// are not dead.
func (r *Reconciler) wantSlices(imp clusterset.Import, exports []clusterset.Export, offered []discoveryv1.EndpointSlice, si *v1beta1.ServiceImport) []*discoveryv1.EndpointSlice {
	from := map[clusterset.ClusterID]clusterset.Export{}
	for _, e := range exports {
		if slices.Contains(imp.Clusters, e.Cluster) && !r.Members.Dead(e.Cluster) {
			from[e.Cluster] = e
		}
	}
	var want []*discoveryv1.EndpointSlice
	for i := range offered {
		e, ok := from[mcs.OwnerOf(&offered[i])]
		if !ok {
			continue
		}
		es := mcs.ImportedSlice(&offered[i], imp, e)
		es.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: v1beta1.SchemeGroupVersion.String(),
			Kind:       v1beta1.ServiceImportKindName,
			Name:       si.Name,
			UID:        si.UID,
		}}
		want = append(want, es)
	}
	return want
}

// applyImport writes the ServiceImport of imp and its status where they differ from have, which is nil when
// there is none, and returns it as stored.
func (r *Reconciler) applyImport(ctx context.Context, imp clusterset.Import, have *v1beta1.ServiceImport) (*v1beta1.ServiceImport, error) {
	want := mcs.ServiceImport(imp)
	log := r.Log.With("namespace", want.Namespace, "service", want.Name)
	status := want.Status
	if have == nil || !sameImport(have, want) {
		want.Status = v1beta1.ServiceImportStatus{} // written apart
		if err := ssa.Own(ctx, r.Client, want); err != nil {
			return nil, fmt.Errorf("write service import %s: %w", imp.Service, err)
		}
		log.Info(map[bool]string{true: "imported", false: "import changed"}[have == nil], "vip", want.Spec.IPs, "cluster", imp.Clusters)
		have = want
	}
	conditions := status.Conditions
	status.Conditions = nil
	for _, c := range have.Status.Conditions {
		status.Conditions = append(status.Conditions, *c.DeepCopy())
	}
	for _, c := range conditions {
		c.ObservedGeneration = have.Generation
		meta.SetStatusCondition(&status.Conditions, c)
	}
	if equality.Semantic.DeepEqual(status, have.Status) {
		return have, nil
	}
	written := &v1beta1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: have.Namespace, Name: have.Name}, Spec: have.Spec, Status: status}
	if err := ssa.ApplyStatus(ctx, r.Client, written); err != nil {
		return nil, fmt.Errorf("write status of service import %s: %w", imp.Service, err)
	}
	return written, nil
}

func sameImport(have, want *v1beta1.ServiceImport) bool {
	return equality.Semantic.DeepEqual(have.Spec, want.Spec) &&
		equality.Semantic.DeepEqual(have.Labels, want.Labels) &&
		equality.Semantic.DeepEqual(have.Annotations, want.Annotations)
}

// applySlices makes want the imported slices of a Service, of which have stand here. New ones come before old
// ones go, and those that leave reports stay as they are.
func (r *Reconciler) applySlices(ctx context.Context, have map[string]*discoveryv1.EndpointSlice, want []*discoveryv1.EndpointSlice, leave func(*discoveryv1.EndpointSlice) bool) error {
	old := maps.Clone(have)
	for _, es := range want {
		before := old[es.Name]
		delete(old, es.Name)
		if before == nil {
			// Somebody may have taken our label off it.
			stranger := &discoveryv1.EndpointSlice{}
			if err := r.Client.Get(ctx, client.ObjectKeyFromObject(es), stranger); err == nil {
				before = stranger
			}
		}
		if before != nil && mcs.SameSlice(before, es) {
			continue
		}
		named := importedSlice(es)
		changed, timed := mcs.ChangedAt(es)
		if err := ssa.Own(ctx, r.Client, es, keep); err != nil {
			return fmt.Errorf("write endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
		if seen, ok := r.Broker.SeenAt(named); ok && timed {
			r.measure(sourceOf(es), changed, seen, time.Now())
		}
	}
	for _, es := range old {
		if leave(es) {
			continue
		}
		if err := r.Client.Delete(ctx, es); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
	}
	return nil
}

// measure notes how long a change was on its way: it began at changed on its member's clock, was seen here
// and is written now.
func (r *Reconciler) measure(source clusterset.ClusterID, changed, seen, written time.Time) {
	propagation.Observe(propagation.Import, source, written.Sub(seen))
	var offset time.Duration
	if source != r.Cluster {
		var known bool
		if offset, known = r.Members.Offset(source); !known {
			return
		}
	}
	propagation.Observe(propagation.Broker, source, seen.Sub(changed)-offset)
	propagation.Observe(propagation.Total, source, written.Sub(changed)-offset)
}

// remove deletes what was imported of a Service that nobody exports any more. A ServiceImport that does
// not carry our label is somebody else's and stays.
func (r *Reconciler) remove(ctx context.Context, name clusterset.ServiceName, have *here) error {
	if si := have.imp; si != nil && si.Labels[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy {
		if err := r.Client.Delete(ctx, si); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete service import %s: %w", name, err)
		}
		r.Log.Info("import removed", "namespace", name.Namespace, "service", name.Name)
	}
	return r.applySlices(ctx, have.slices, nil, func(*discoveryv1.EndpointSlice) bool { return false })
}
