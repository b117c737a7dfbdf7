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
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// conflictRetry is when to look again after somebody else wrote the same object first. The cache needs a
// moment to learn what they wrote.
const conflictRetry = 50 * time.Millisecond

// byImport indexes the member's EndpointSlices by the import they belong to.
const byImport = "import"

// broker is what this package needs of the broker.
type broker interface {
	Changes() []source.Source
	Services(ctx context.Context, namespace string) ([]clusterset.ServiceName, error)
	Exports(context.Context, clusterset.ServiceName) ([]clusterset.Export, error)
	Slices(context.Context, clusterset.ServiceName) ([]discoveryv1.EndpointSlice, error)
	Aggregate(context.Context, clusterset.ServiceName) (clusterset.Aggregate, bool, error)
}

// Reconciler imports the Services of the ClusterSet into one member. All fields are required.
type Reconciler struct {
	Client client.Client // of the member, reading from its cache
	Broker broker
	Shared func(namespace string) bool
	Log    *slog.Logger
}

// +kubebuilder:rbac:groups="",resources=namespaces,verbs=get;list;watch
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceimports,verbs=get;list;watch;create;update;delete
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceimports/status,verbs=update
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=get;list;watch;create;update;delete
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
	err := r.reconcile(ctx, clusterset.ServiceName(req.NamespacedName))
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: conflictRetry}, nil
	}
	return ctrl.Result{}, err
}

func (r *Reconciler) reconcile(ctx context.Context, name clusterset.ServiceName) error {
	if !r.Shared(name.Namespace) {
		return nil
	}
	var ns corev1.Namespace
	err := r.Client.Get(ctx, types.NamespacedName{Name: name.Namespace}, &ns)
	if err != nil || ns.DeletionTimestamp != nil {
		return client.IgnoreNotFound(err) // it comes back here when the namespace does
	}
	exports, err := r.Broker.Exports(ctx, name)
	if err != nil {
		return err
	}
	if len(exports) == 0 {
		return r.remove(ctx, name)
	}
	imp, err := r.merged(ctx, exports)
	if err != nil {
		return err
	}
	si, err := r.applyImport(ctx, imp)
	if err != nil {
		return err
	}
	offered, err := r.Broker.Slices(ctx, name)
	if err != nil {
		return err
	}
	return r.applySlices(ctx, name, wantSlices(imp, exports, offered, si))
}

// merged returns what exports mean, with the address of the aggregate. While there is no aggregate, the
// address is the one that the exporters remember.
func (r *Reconciler) merged(ctx context.Context, exports []clusterset.Export) (clusterset.Import, error) {
	imp, _ := clusterset.Merge(exports)
	agreed, ok, err := r.Broker.Aggregate(ctx, imp.Service)
	if err != nil {
		return clusterset.Import{}, err
	}
	if ok && len(agreed.IPs) > 0 {
		return imp.WithIPs(agreed.IPs), nil
	}
	return imp.WithIPs(imp.IPs), nil
}

// wantSlices returns the slices that si should have: those of members that export the Service.
func wantSlices(imp clusterset.Import, exports []clusterset.Export, offered []discoveryv1.EndpointSlice, si *v1beta1.ServiceImport) []*discoveryv1.EndpointSlice {
	from := map[clusterset.ClusterID]clusterset.Export{}
	for _, e := range exports {
		from[e.Cluster] = e
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

// applyImport writes the ServiceImport of imp and its status where they differ, and returns it as stored.
func (r *Reconciler) applyImport(ctx context.Context, imp clusterset.Import) (*v1beta1.ServiceImport, error) {
	want := mcs.ServiceImport(imp)
	log := r.Log.With("namespace", want.Namespace, "service", want.Name)
	have := &v1beta1.ServiceImport{}
	err := r.Client.Get(ctx, client.ObjectKeyFromObject(want), have)
	switch {
	case apierrors.IsNotFound(err):
		have = want.DeepCopy()
		have.Status = v1beta1.ServiceImportStatus{} // a creation does not write it
		if err := r.Client.Create(ctx, have); err != nil {
			return nil, fmt.Errorf("create service import %s: %w", imp.Service, err)
		}
		log.Info("imported", "vip", want.Spec.IPs, "cluster", imp.Clusters)
	case err != nil:
		return nil, fmt.Errorf("read service import %s: %w", imp.Service, err)
	case !sameImport(have, want):
		have.Labels, have.Annotations, have.Spec = want.Labels, want.Annotations, want.Spec
		if err := r.Client.Update(ctx, have); err != nil {
			return nil, fmt.Errorf("update service import %s: %w", imp.Service, err)
		}
		log.Info("import changed", "vip", want.Spec.IPs, "cluster", imp.Clusters)
	}
	status := have.Status.DeepCopy()
	have.Status.Clusters, have.Status.EndpointSliceObjects = want.Status.Clusters, want.Status.EndpointSliceObjects
	for _, c := range want.Status.Conditions {
		meta.SetStatusCondition(&have.Status.Conditions, c)
	}
	if equality.Semantic.DeepEqual(*status, have.Status) {
		return have, nil
	}
	if err := r.Client.Status().Update(ctx, have); err != nil {
		return nil, fmt.Errorf("update status of service import %s: %w", imp.Service, err)
	}
	return have, nil
}

func sameImport(have, want *v1beta1.ServiceImport) bool {
	return equality.Semantic.DeepEqual(have.Spec, want.Spec) &&
		equality.Semantic.DeepEqual(have.Labels, want.Labels) &&
		equality.Semantic.DeepEqual(have.Annotations, want.Annotations)
}

// applySlices makes want the imported slices of a Service. New ones come before old ones go.
func (r *Reconciler) applySlices(ctx context.Context, name clusterset.ServiceName, want []*discoveryv1.EndpointSlice) error {
	old, err := r.slices(ctx, name)
	if err != nil {
		return err
	}
	for _, es := range want {
		delete(old, es.Name)
		have := &discoveryv1.EndpointSlice{}
		err := r.Client.Get(ctx, client.ObjectKeyFromObject(es), have)
		switch {
		case apierrors.IsNotFound(err):
			err = r.Client.Create(ctx, es)
		case err == nil && !mcs.SameSlice(have, es):
			have.Labels, have.OwnerReferences, have.Endpoints, have.Ports = es.Labels, es.OwnerReferences, es.Endpoints, es.Ports
			err = r.Client.Update(ctx, have)
		}
		if err != nil {
			return fmt.Errorf("write endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
	}
	for _, es := range old {
		if err := r.Client.Delete(ctx, es); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("delete endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
	}
	return nil
}

// slices returns the imported slices of a Service that stand here, by name.
func (r *Reconciler) slices(ctx context.Context, name clusterset.ServiceName) (map[string]*discoveryv1.EndpointSlice, error) {
	var list discoveryv1.EndpointSliceList
	if err := r.Client.List(ctx, &list, client.InNamespace(name.Namespace), client.MatchingFields{byImport: name.Name}); err != nil {
		return nil, fmt.Errorf("list endpoint slices of import %s: %w", name, err)
	}
	byName := map[string]*discoveryv1.EndpointSlice{}
	for i := range list.Items {
		byName[list.Items[i].Name] = &list.Items[i]
	}
	return byName, nil
}

// remove deletes what was imported of a Service that nobody exports any more. A ServiceImport that does
// not carry our label is somebody else's and stays.
func (r *Reconciler) remove(ctx context.Context, name clusterset.ServiceName) error {
	si := &v1beta1.ServiceImport{}
	err := r.Client.Get(ctx, types.NamespacedName(name), si)
	if err == nil && si.Labels[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy {
		if err = r.Client.Delete(ctx, si); err == nil {
			r.Log.Info("import removed", "namespace", name.Namespace, "service", name.Name)
		}
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete service import %s: %w", name, err)
	}
	return r.applySlices(ctx, name, nil)
}
