// Package imports imports the Services of the ClusterSet into this cluster: it writes a ServiceImport and EndpointSlices for
// every Service that a member exports and whose namespace exists here.
//
// It starts only when its cache of the broker is complete: while the broker is away, imports stay. All its objects carry
// Isthmus' labels, and it reverts edits of those by other clients. It leaves a ServiceImport or an EndpointSlice of another
// controller alone, and reports it: two implementations that wrote the same object would do so for ever.
package imports

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
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
	brokerclient "github.com/isthmus-net/isthmus/controlplane/broker/internal/client"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/propagation"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/apply"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/slicesync"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// conflictRetry is the delay after another client wrote the same object first: the cache needs a moment to see it.
const conflictRetry = 50 * time.Millisecond

// clashRetry is the delay of an import whose address another one has.
const clashRetry = 5 * time.Second

// statusLater requeues a Service behind all others. Objects that carry traffic are written first; the status, half of the
// work of an import, by a later pass.
var statusLater = ctrl.Result{RequeueAfter: time.Millisecond, Priority: new(handler.LowPriority)}

// keptAnnotations may differ on a slice that is up to date, because they are not part of the content.
var keptAnnotations = []string{v1alpha1.AnnotationChangedAt, v1alpha1.AnnotationExportedAt}

// brokerReader is the part of the broker client that this package uses.
type brokerReader interface {
	Changes() source.Source
	Services(namespace string) []clusterset.ServiceName
	Exports(clusterset.ServiceName) []clusterset.Export
	Slices(name clusterset.ServiceName, declined bool) []*discoveryv1.EndpointSlice
	Aggregate(clusterset.ServiceName) (clusterset.Aggregate, bool, error)
	Baseline(map[clusterset.ServiceName][]clusterset.ClusterID, map[brokerclient.ImportedSlice]clusterset.ClusterID)
	Kept(clusterset.ServiceName, []clusterset.ClusterID) []clusterset.ClusterID
	KeepsSlice(clusterset.ClusterID, brokerclient.ImportedSlice) bool
	SeenAt(clusterset.ClusterID, brokerclient.ImportedSlice) (time.Time, bool)
}

// liveness tells the state of other members.
type liveness interface {
	Dead(clusterset.ClusterID) bool
	// Offset is this cluster's clock minus a member's, and whether it is known.
	Offset(clusterset.ClusterID) (time.Duration, bool)
}

// Config configures a Reconciler. All fields are required.
type Config struct {
	Cluster clusterset.ClusterID
	Client  client.WithWatch // of the member, without a cache
	Broker  brokerReader
	Members liveness
	Policy  clusterset.Policy
	Shared  func(namespace string) bool
	Events  events.EventRecorder
	Log     *slog.Logger
}

// Reconciler imports the Services of the ClusterSet into one member.
type Reconciler struct {
	Config

	namespaces client.Reader // from a cache
	local      localCache
	refused    refusals
	foreign    foreignImports
	baseline   struct {
		sync.Mutex

		done bool
	}
}

// New returns a Reconciler. After Setup, the manager runs it.
func New(cfg Config) (*Reconciler, error) {
	r := &Reconciler{Config: cfg}
	return r, r.local.init(cfg.Client)
}

// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceimports,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceimports/status,verbs=patch
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=get;list;watch;create;patch;delete
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices/restricted,verbs=create

// Setup adds the reconciler to a manager of the member's cluster.
func (r *Reconciler) Setup(mgr ctrl.Manager, options controller.Options) error {
	r.namespaces = mgr.GetClient()
	err := ctrl.NewControllerManagedBy(mgr).
		Named("imports").
		WithOptions(options).
		Watches(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.importsOfNamespace), builder.WithPredicates(created)).
		WatchesRawSource(r.local.changes.Source(r.local.known, r.local.imports.WaitForSync, r.local.slices.WaitForSync)).
		WatchesRawSource(r.Broker.Changes()).
		Complete(r)
	if err != nil {
		return fmt.Errorf("set up imports: %w", err)
	}
	return nil
}

// Start fills the cache of this cluster and keeps it current until ctx ends.
func (r *Reconciler) Start(ctx context.Context) error { return r.local.run(ctx) }

// NeedLeaderElection tells the manager that a standby fills its cache too, so that it can take over at once.
func (r *Reconciler) NeedLeaderElection() bool { return false }

// Imported returns the addresses, the choice of a ClusterSetIP and the exporters of a Service as imported here; false if
// Isthmus has not imported it.
func (r *Reconciler) Imported(name clusterset.ServiceName) (clusterset.Import, bool) {
	si := r.local.imports.Get(name.Namespace, name.Name)
	if si == nil || !si.ours {
		return clusterset.Import{}, false
	}
	return clusterset.Import{Service: name, IPs: si.ips, UseIP: si.useIP, Clusters: si.clusters}, true
}

// Remembered returns the places of members in the order of precedence of a Service, as they are recorded on its imported
// slices. A member's place is forgotten with its slices, when it withdraws the Service or leaves.
func (r *Reconciler) Remembered(name clusterset.ServiceName) map[clusterset.ClusterID]time.Time {
	places := map[clusterset.ClusterID]time.Time{}
	for _, s := range r.local.of(name).slices {
		if s.exported == 0 {
			continue
		}
		at := time.Unix(s.exported, 0).UTC()
		if have, ok := places[s.source]; !ok || at.Before(have) {
			places[s.source] = at
		}
	}
	return places
}

// Uses reports whether this cluster imports a slice of a member, and true while that is unknown.
func (r *Reconciler) Uses(id clusterset.ClusterID) bool {
	r.baseline.Lock()
	defer r.baseline.Unlock()
	return !r.baseline.done || r.local.uses(id)
}

// created passes only the creation of a namespace.
var created = predicate.Funcs{
	UpdateFunc: func(event.UpdateEvent) bool { return false },
	DeleteFunc: func(event.DeleteEvent) bool { return false },
}

func (r *Reconciler) importsOfNamespace(_ context.Context, obj client.Object) []reconcile.Request {
	var requests []reconcile.Request
	for _, n := range r.Broker.Services(obj.GetName()) {
		requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName(n)})
	}
	return requests
}

// Reconcile writes the import of one Service according to the broker, or removes it.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	r.begin()
	result, err := r.reconcile(ctx, clusterset.ServiceName(req.NamespacedName))
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: conflictRetry}, nil
	}
	return result, err
}

// begin reports to the broker client, once, what was imported before this process started.
func (r *Reconciler) begin() {
	r.baseline.Lock()
	defer r.baseline.Unlock()
	if r.baseline.done {
		return
	}
	from := map[clusterset.ServiceName][]clusterset.ClusterID{}
	for _, si := range r.local.imports.All() {
		if si.ours {
			from[si.service] = si.clusters
		}
	}
	imported := map[brokerclient.ImportedSlice]clusterset.ClusterID{}
	for _, s := range r.local.slices.All() {
		imported[brokerclient.ImportedSlice{Service: s.service, Name: s.name}] = s.source
	}
	r.Broker.Baseline(from, imported)
	r.baseline.done = true
}

func (r *Reconciler) reconcile(ctx context.Context, name clusterset.ServiceName) (ctrl.Result, error) {
	none := ctrl.Result{}
	if !r.Shared(name.Namespace) {
		// The namespace may have been shared before.
		return none, r.remove(ctx, name, r.local.of(name))
	}
	var ns corev1.Namespace
	err := r.namespaces.Get(ctx, types.NamespacedName{Name: name.Namespace}, &ns)
	if err != nil || ns.DeletionTimestamp != nil {
		return none, client.IgnoreNotFound(err) // the creation of the namespace enqueues it again
	}
	have := r.local.of(name)
	exports := r.Broker.Exports(name)
	kept := r.Broker.Kept(name, have.sources())
	if len(exports) == 0 && len(kept) == 0 {
		return none, r.remove(ctx, name, have)
	}
	if have.imp != nil && !have.imp.ours {
		r.foreign.found(name, have.imp.uid, r.reportForeign)
		return none, r.removeSlices(ctx, name, have)
	}
	r.foreign.resolved(name)
	imp, current, other, err := r.imported(ctx, name, exports, kept, have)
	if current == nil {
		return none, err
	}
	keep := func(s *localSlice) bool {
		if r.Members.Dead(s.source) {
			return false
		}
		exporting := slices.ContainsFunc(exports, func(e clusterset.Export) bool { return e.Cluster == s.source })
		return slices.Contains(kept, s.source) ||
			exporting && slices.Contains(imp.Clusters, s.source) && r.Broker.KeepsSlice(s.source, brokerclient.ImportedSlice{Service: name, Name: s.name})
	}
	wrote, slicesErr := r.syncSlices(ctx, name, have.slices, r.wantSlices(imp, exports, current.uid), keep)
	err = errors.Join(err, slicesErr)
	switch {
	case len(kept) > 0:
		return none, err
	case (wrote || current != have.imp) && err == nil:
		return statusLater, nil
	}
	err = errors.Join(err, r.applyStatus(ctx, imp, current, other))
	if other.Name != "" {
		return ctrl.Result{RequeueAfter: clashRetry}, err
	}
	return none, err
}

// imported writes the ServiceImport that the exports merge to, without its status. It returns the merged import and the
// written object, nil without one; with an error, the object that exists, so that its endpoints follow all the same. While
// exports of the members kept are held, the import stays as it is. other is an older import that has its address.
func (r *Reconciler) imported(ctx context.Context, name clusterset.ServiceName, exports []clusterset.Export, kept []clusterset.ClusterID, have observed) (imp clusterset.Import, current *localImport, other clusterset.ServiceName, err error) {
	if len(kept) > 0 {
		si := &v1beta1.ServiceImport{}
		if err := r.Client.Get(ctx, types.NamespacedName(name), si); err != nil {
			return imp, nil, other, client.IgnoreNotFound(err)
		}
		imp, err = mcs.Import(si)
		return imp, compactImport(si), other, err
	}
	if imp, err = r.merged(exports, have); err != nil {
		return imp, nil, other, err
	}
	other, clash := r.local.clash(imp)
	if clash {
		r.Log.Error("two services have the same ClusterSetIP; the older import keeps it, unexport one of them in every cluster",
			"namespace", name.Namespace, "service", name.Name, "vip", imp.IPs, "other", other.String())
		imp = imp.WithIPs(nil)
	}
	current, err = r.applyImport(ctx, imp, have.imp)
	return imp, current, other, err
}

// merged merges exports, with the address of the aggregate. If the aggregate was deleted, the address is the one that the
// exporters remember, or that the import has here.
func (r *Reconciler) merged(exports []clusterset.Export, have observed) (clusterset.Import, error) {
	agreed, _, err := r.Broker.Aggregate(exports[0].Service)
	if err != nil {
		return clusterset.Import{}, err
	}
	agreed.Settle(exports)
	imp, _ := r.Policy.Merge(exports)
	switch {
	case len(agreed.IPs) > 0:
		return imp.WithIPs(agreed.Served(exports)), nil
	case have.imp != nil:
		return imp.WithIPs(clusterset.Recalled(have.imp.ips, imp.IPs)), nil
	}
	return imp.WithIPs(imp.IPs), nil
}

// wantSlices returns the wanted slices of the import with a UID: those of its exporters that are not dead.
func (r *Reconciler) wantSlices(imp clusterset.Import, exports []clusterset.Export, uid types.UID) []*discoveryv1.EndpointSlice {
	from := map[clusterset.ClusterID]clusterset.Export{}
	for _, e := range exports {
		if slices.Contains(imp.Clusters, e.Cluster) && !r.Members.Dead(e.Cluster) {
			from[e.Cluster] = e
		}
	}
	var want []*discoveryv1.EndpointSlice
	for _, offered := range r.Broker.Slices(imp.Service, imp.UseIP == clusterset.Disabled) {
		e, ok := from[mcs.OwnerOf(offered)]
		if !ok {
			continue
		}
		es := mcs.ImportedSlice(offered, imp, e)
		es.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: v1beta1.SchemeGroupVersion.String(),
			Kind:       v1beta1.ServiceImportKindName,
			Name:       imp.Service.Name,
			UID:        uid,
		}}
		want = append(want, es)
	}
	return want
}

// applyImport writes the ServiceImport of imp, without its status, if it differs from have, which is nil if there is none.
// It returns the resulting object, which is have if it wrote nothing. If the API server refuses the object, applyImport
// writes it without the exported labels and annotations.
func (r *Reconciler) applyImport(ctx context.Context, imp clusterset.Import, have *localImport) (*localImport, error) {
	want := mcs.ServiceImport(imp)
	key := refusalKey{service: imp.Service}
	if r.refused.has(key, mcs.ImportDigest(want)) {
		want = mcs.ServiceImport(withoutMetadata(imp))
	}
	if have != nil && have.digest == mcs.ImportDigest(want) {
		return have, nil
	}
	err := r.writeImport(ctx, want, have)
	if isRefused(err) && len(imp.Labels)+len(imp.Annotations) > 0 {
		r.refused.add(key, mcs.ImportDigest(mcs.ServiceImport(imp)))
		r.Log.Error("this cluster refuses the labels and annotations of an import, which is written without them; correct exportedLabels and exportedAnnotations of its oldest export",
			"namespace", imp.Service.Namespace, "service", imp.Service.Name, "err", err)
		want = mcs.ServiceImport(withoutMetadata(imp))
		err = r.writeImport(ctx, want, have)
	}
	if err != nil {
		return have, fmt.Errorf("write service import %s: %w", imp.Service, err)
	}
	r.Log.Info(map[bool]string{true: "imported", false: "import changed"}[have == nil],
		"namespace", want.Namespace, "service", want.Name, "vip", want.Spec.IPs, "cluster", imp.Clusters)
	current := compactImport(want)
	r.local.wroteImport(current)
	return current, nil
}

// writeImport writes a ServiceImport without its status over have, which is nil if there is none. It writes over no other
// object than have: another controller may have created one of the same name that the cache lacks.
func (r *Reconciler) writeImport(ctx context.Context, want *v1beta1.ServiceImport, have *localImport) error {
	want.Status = v1beta1.ServiceImportStatus{}
	if have == nil {
		return r.Client.Create(ctx, want, client.FieldOwner(v1alpha1.FieldOwner)) // the cache shows an existing one soon
	}
	spec := want.Spec.DeepCopy()
	want.UID = have.uid
	if err := apply.Own(ctx, r.Client, want); err != nil || apiequality.Semantic.DeepEqual(want.Spec, *spec) {
		return err
	}
	// The server keeps fields of its creation that an apply omits.
	stored := want.DeepCopy()
	want.Spec = *spec
	return r.Client.Patch(ctx, want, client.MergeFrom(stored), client.FieldOwner(v1alpha1.FieldOwner))
}

// withoutMetadata returns imp without its exported labels and annotations.
func withoutMetadata(imp clusterset.Import) clusterset.Import {
	imp.Labels, imp.Annotations = nil, nil
	return imp
}

// applyStatus writes the status of imp if it differs from that of current.
func (r *Reconciler) applyStatus(ctx context.Context, imp clusterset.Import, current *localImport, other clusterset.ServiceName) error {
	want := mcs.ServiceImport(imp)
	if other.Name != "" {
		want.Status.Conditions = []metav1.Condition{mcs.AddressInUse(other)}
	}
	written := *current
	written.conditions = slices.Clone(current.conditions)
	for _, c := range want.Status.Conditions {
		c.ObservedGeneration = current.generation
		meta.SetStatusCondition(&written.conditions, c)
	}
	written.clusters, written.objects = imp.Clusters, want.Status.EndpointSliceObjects
	if written.sameStatus(current) {
		return nil
	}
	want.Status.Conditions = written.conditions
	si := &v1beta1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: want.Namespace, Name: want.Name}, Spec: want.Spec, Status: want.Status}
	if err := apply.Status(ctx, r.Client, si); err != nil {
		return fmt.Errorf("write status of service import %s: %w", imp.Service, err)
	}
	r.local.wroteImport(compactImport(si))
	return nil
}

// syncSlices makes want the imported slices of a Service, except that existing slices which keep reports stay. It first
// removes the slices of members that want no longer names. wrote reports whether it wrote anything.
func (r *Reconciler) syncSlices(ctx context.Context, name clusterset.ServiceName, existing []*localSlice, want []*discoveryv1.EndpointSlice, keep func(*localSlice) bool) (wrote bool, err error) {
	write := func(how writeFunc) func(context.Context, *discoveryv1.EndpointSlice) error {
		return func(ctx context.Context, es *discoveryv1.EndpointSlice) error {
			return r.writeSlice(ctx, name, es, how)
		}
	}
	sources := map[clusterset.ClusterID]bool{}
	for _, es := range want {
		sources[sourceOf(es)] = true
	}
	return slicesync.Sync[*localSlice]{
		Existing: existing, Wanted: slices.Values(want),
		Name:      func(s *localSlice) string { return s.name },
		UpToDate:  func(s *localSlice, es *discoveryv1.EndpointSlice) bool { return r.upToDate(name, s, es) },
		Keep:      keep,
		Withdrawn: func(s *localSlice) bool { return !sources[s.source] },
		Create:    write(createSlice), Update: write(apply.Own),
		Delete: func(ctx context.Context, s *localSlice) error {
			r.refused.remove(refusalKey{name, s.name})
			es := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: s.name}}
			return client.IgnoreNotFound(r.Client.Delete(ctx, es))
		},
	}.Run(ctx)
}

func sourceOf(es *discoveryv1.EndpointSlice) clusterset.ClusterID {
	return clusterset.ClusterID(es.Labels[v1beta1.LabelSourceCluster])
}

// upToDate reports whether s has the content of es. If this cluster refused es with the labels of its Service, upToDate
// removes them from es first.
func (r *Reconciler) upToDate(name clusterset.ServiceName, s *localSlice, es *discoveryv1.EndpointSlice) bool {
	digest := mcs.SliceDigest(es)
	if r.refused.has(refusalKey{name, es.Name}, digest) {
		mcs.DropServiceLabels(es)
		digest = mcs.SliceDigest(es)
	}
	return s.digest == digest
}

// writeFunc is createSlice or apply.Own.
type writeFunc func(ctx context.Context, c client.Client, obj client.Object, keep ...string) error

// writeSlice writes an imported slice of a Service, and measures how long its content was on its way. If the API server
// refuses the slice, writeSlice writes it without the labels of its Service.
func (r *Reconciler) writeSlice(ctx context.Context, name clusterset.ServiceName, es *discoveryv1.EndpointSlice, write writeFunc) error {
	changed, timed := mcs.ChangedAt(es)
	bare := es.DeepCopy()
	err := write(ctx, r.Client, es, keptAnnotations...)
	if isRefused(err) && mcs.DropServiceLabels(bare) {
		r.refused.add(refusalKey{name, es.Name}, mcs.SliceDigest(es))
		r.Log.Error("this cluster refuses the labels of an imported slice, which is written without them; correct the labels of the Service in its cluster",
			"namespace", name.Namespace, "service", name.Name, "slice", es.Name, "cluster", string(sourceOf(es)), "err", err)
		es = bare
		err = write(ctx, r.Client, es, keptAnnotations...)
	}
	if err != nil {
		r.reportForeignSlice(es, err)
		return err
	}
	r.local.wroteSlice(compactSlice(es))
	if seen, ok := r.Broker.SeenAt(sourceOf(es), brokerclient.ImportedSlice{Service: name, Name: es.Name}); ok && timed {
		r.measure(sourceOf(es), changed, seen, time.Now())
	}
	return nil
}

// measure records the travel time of a change: it began at changed on its member's clock, arrived here at seen, and was
// written at written.
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

// remove deletes the import of a Service without exporters. It keeps a ServiceImport without Isthmus' label, which belongs
// to another controller.
func (r *Reconciler) remove(ctx context.Context, name clusterset.ServiceName, have observed) error {
	r.refused.forget(name)
	r.foreign.resolved(name)
	if have.imp != nil && have.imp.ours {
		si := &v1beta1.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}}
		if err := r.Client.Delete(ctx, si, client.Preconditions{UID: &have.imp.uid}); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete service import %s: %w", name, err)
		}
		r.Log.Info("import removed", "namespace", name.Namespace, "service", name.Name)
	}
	return r.removeSlices(ctx, name, have)
}

// removeSlices deletes the imported slices of a Service.
func (r *Reconciler) removeSlices(ctx context.Context, name clusterset.ServiceName, have observed) error {
	_, err := r.syncSlices(ctx, name, have.slices, nil, nil)
	return err
}
