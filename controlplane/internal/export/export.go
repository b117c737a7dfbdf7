// Package export makes the broker say what this member exports: it follows every ServiceExport, its
// Service and its EndpointSlices, and tells the user on the ServiceExport how that went.
//
// When the broker is away, what was published stays, and everything is tried again until it works.
package export

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

const (
	// conflictRetry is when to look again after somebody else wrote the same object first. The cache
	// needs a moment to learn what they wrote.
	conflictRetry = 50 * time.Millisecond
	// exhaustedRetry is when to ask a full pool again. Nothing tells when another Service frees one.
	exhaustedRetry = 5 * time.Second
)

// bySlices indexes the member's EndpointSlices by the Service they belong to.
const bySlices = "service"

// broker is what this package needs of the broker.
type broker interface {
	Changes() []source.Source
	Exports(context.Context, clusterset.ServiceName) ([]clusterset.Export, error)
	Held(context.Context, func(clusterset.ServiceName, []netip.Addr)) error
	LiveAggregate(context.Context, clusterset.ServiceName) (clusterset.Aggregate, bool, error)
	Aggregate(context.Context, clusterset.ServiceName) (clusterset.Aggregate, bool, error)
	Claim(context.Context, clusterset.Aggregate) (clusterset.Aggregate, error)
	Publish(context.Context, clusterset.Export, []*discoveryv1.EndpointSlice) error
	Withdraw(context.Context, clusterset.ServiceName) error
}

// Reconciler exports the Services of one member. All fields are required.
type Reconciler struct {
	Cluster clusterset.ClusterID
	Client  client.Client // of the member, reading from its cache
	Broker  broker
	Pool    *clusterset.IPPool // owned by the Reconciler from now on
	Shared  func(namespace string) bool
	Events  events.EventRecorder
	Log     *slog.Logger

	vips vips
}

// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceexports,verbs=get;list;watch
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceexports/status,verbs=update
// +kubebuilder:rbac:groups="",resources=services,verbs=get;list;watch
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=get;list;watch
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Setup adds the reconciler to a manager of the member's cluster.
func (r *Reconciler) Setup(ctx context.Context, mgr ctrl.Manager, options controller.Options) error {
	r.vips.pool = r.Pool
	err := mgr.GetFieldIndexer().IndexField(ctx, &discoveryv1.EndpointSlice{}, bySlices, func(obj client.Object) []string {
		if name := obj.GetLabels()[discoveryv1.LabelServiceName]; name != "" {
			return []string{name}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("index endpoint slices by service: %w", err)
	}
	b := ctrl.NewControllerManagedBy(mgr).
		Named("export").
		WithOptions(options).
		For(&v1beta1.ServiceExport{}).
		Watches(&corev1.Service{}, &handler.EnqueueRequestForObject{}).
		Watches(&discoveryv1.EndpointSlice{}, handler.EnqueueRequestsFromMapFunc(serviceOfSlice))
	for _, s := range r.Broker.Changes() {
		b = b.WatchesRawSource(s)
	}
	if err := b.Complete(r); err != nil {
		return fmt.Errorf("set up export: %w", err)
	}
	return nil
}

func serviceOfSlice(_ context.Context, obj client.Object) []reconcile.Request {
	name := obj.GetLabels()[discoveryv1.LabelServiceName]
	if name == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: obj.GetNamespace(), Name: name}}}
}

// Reconcile makes the broker say what this member has to say about one Service name.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	if err := r.vips.restore(ctx, r.Broker.Held, r.clash); err != nil {
		return ctrl.Result{}, err
	}
	name := clusterset.ServiceName(req.NamespacedName)
	local, err := r.read(ctx, name)
	if err != nil {
		return ctrl.Result{}, err
	}
	if local.export == nil {
		return quiet(r.withdraw(ctx, name))
	}
	outcome := r.publish(ctx, local)
	if err := r.report(ctx, local.export, outcome); err != nil {
		return quiet(err)
	}
	if outcome.noIP {
		return ctrl.Result{RequeueAfter: exhaustedRetry}, nil
	}
	return quiet(outcome.err)
}

// quiet turns a lost race for an object into a second look: nobody has to read about it.
func quiet(err error) (ctrl.Result, error) {
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: conflictRetry}, nil
	}
	return ctrl.Result{}, err
}

// clash reports that a Service has an address which belongs to another one as well.
func (r *Reconciler) clash(name clusterset.ServiceName, err error) {
	r.Log.Error("two services have one clusterset IP; unexport one of them everywhere", "namespace", name.Namespace, "service", name.Name, "err", err)
}

// local is what the member itself says about one Service name.
type local struct {
	export  *v1beta1.ServiceExport // nil when there is none
	service *corev1.Service        // nil when there is none
	slices  []discoveryv1.EndpointSlice
}

func (r *Reconciler) read(ctx context.Context, name clusterset.ServiceName) (local, error) {
	var l local
	export, err := get[v1beta1.ServiceExport](ctx, r.Client, name)
	if err != nil || export == nil || export.DeletionTimestamp != nil {
		return l, err
	}
	l.export = export
	l.service, err = get[corev1.Service](ctx, r.Client, name)
	if err != nil || l.service == nil {
		return l, err
	}
	var list discoveryv1.EndpointSliceList
	err = r.Client.List(ctx, &list, client.InNamespace(name.Namespace), client.MatchingFields{bySlices: name.Name})
	if err != nil {
		return l, fmt.Errorf("list endpoint slices of %s: %w", name, err)
	}
	l.slices = list.Items
	return l, nil
}

// get reads an object of the member, nil when there is none.
func get[T any, P interface {
	*T
	client.Object
}](ctx context.Context, c client.Client, name clusterset.ServiceName) (*T, error) {
	obj := P(new(T))
	err := c.Get(ctx, types.NamespacedName(name), obj)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %T %s: %w", obj, name, err)
	}
	return obj, nil
}

// withdraw removes everything this member says about a Service, and gives its address back once nobody
// names it any more.
func (r *Reconciler) withdraw(ctx context.Context, name clusterset.ServiceName) error {
	if err := r.Broker.Withdraw(ctx, name); err != nil {
		return err
	}
	if !r.vips.holds(name) {
		return nil
	}
	// The cache may not know yet what this member itself created a moment ago, so ask the broker.
	a, ok, err := r.Broker.LiveAggregate(ctx, name)
	if err != nil || ok {
		return errors.Join(err, r.vips.settle(name, a.IPs))
	}
	exports, err := r.Broker.Exports(ctx, name)
	if err != nil {
		return err
	}
	remembered, _ := clusterset.Merge(exports)
	return r.vips.settle(name, remembered.IPs)
}

// outcome is how publishing one Service went, for the user and for the retry.
type outcome struct {
	conditions []metav1.Condition
	noIP       bool  // it is exported without the address it should have
	err        error // why it is not exported; nil also when only the user can mend it
}

// publish makes the broker say what l says, or nothing when the Service cannot be exported.
func (r *Reconciler) publish(ctx context.Context, l local) outcome {
	name := clusterset.ServiceName{Namespace: l.export.Namespace, Name: l.export.Name}
	e, err := mcs.Export(l.service, l.export, r.Cluster)
	if !r.Shared(name.Namespace) {
		err = &mcs.InvalidError{Reason: "RestrictedNamespace", Message: fmt.Sprintf("namespace %s belongs to each cluster itself; nothing is exported from it", name.Namespace)}
	}
	if invalid := (*mcs.InvalidError)(nil); errors.As(err, &invalid) {
		return outcome{
			conditions: []metav1.Condition{mcs.Invalid(invalid), mcs.NotReady(v1beta1.ServiceExportReasonPending, "nothing is exported while the export is not valid")},
			err:        r.withdraw(ctx, name),
		}
	}
	if err != nil {
		return outcome{conditions: []metav1.Condition{mcs.NotReady(v1beta1.ServiceExportReasonFailed, err.Error())}, err: err}
	}
	exports, err := r.Broker.Exports(ctx, name)
	if err != nil {
		return failed(err)
	}
	merged, conflicts := clusterset.Merge(withOwn(exports, &e))
	agreed, noIP, err := r.claim(ctx, merged)
	if err != nil {
		return failed(err)
	}
	e.IPs = agreed.IPs
	var endpoints []*discoveryv1.EndpointSlice
	for i := range l.slices {
		if l.slices[i].AddressType != discoveryv1.AddressTypeFQDN {
			endpoints = append(endpoints, mcs.BrokerSlice(&l.slices[i], r.Cluster))
		}
	}
	if err := r.Broker.Publish(ctx, e, endpoints); err != nil {
		return failed(err)
	}
	ready := mcs.Exported(merged.WithIPs(agreed.IPs).IPs)
	if noIP != nil {
		ready = mcs.NotReady(v1beta1.ServiceExportReasonFailed, noIP.Error()+"; give this cluster a larger block, or one of the family, or unexport what uses it up")
	}
	return outcome{conditions: []metav1.Condition{mcs.Valid(), ready, mcs.Conflicts(conflicts)}, noIP: noIP != nil}
}

// withOwn returns exports with own in place of what the broker knew of this member, and own with the
// address that the broker remembered.
func withOwn(exports []clusterset.Export, own *clusterset.Export) []clusterset.Export {
	i := slices.IndexFunc(exports, func(e clusterset.Export) bool { return e.Cluster == own.Cluster })
	if i < 0 {
		return append(exports, *own)
	}
	own.IPs = exports[i].IPs
	exports[i] = *own
	return exports
}

// claim returns the aggregate of the merged Service and sees to it that it exists, lists this member and
// has an address if the Service needs one: the one it has, or had before somebody deleted the aggregate,
// or a new one of this member's block. noIP says why it has none although it should.
func (r *Reconciler) claim(ctx context.Context, merged clusterset.Import) (have clusterset.Aggregate, noIP, err error) {
	name := merged.Service
	want, _, err := r.Broker.Aggregate(ctx, name)
	if err != nil {
		return want, nil, err
	}
	if len(want.IPs) == 0 && merged.Type == clusterset.ClusterSetIP {
		want.IPs = merged.IPs
		if len(want.IPs) == 0 {
			want.IPs, noIP = r.vips.allocate(name, merged.Families)
		}
		if len(want.IPs) > 0 {
			want.AllocatedBy = r.Cluster
		}
	}
	want.Service, want.Type = name, merged.Type
	have, err = r.Broker.Claim(ctx, want)
	if err != nil {
		return have, nil, err
	}
	if err := r.vips.settle(name, have.IPs); err != nil {
		r.clash(name, err)
	}
	if len(have.IPs) > 0 {
		noIP = nil // another member had one to give
	}
	return have, noIP, nil
}

// failed is the outcome of a Service that can be exported but that the broker did not take.
func failed(err error) outcome {
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return outcome{err: err} // looked at again in a moment; nothing to tell
	}
	ready := mcs.NotReady(v1beta1.ServiceExportReasonFailed, err.Error())
	var (
		status  apierrors.APIStatus
		network *url.Error
	)
	switch {
	case errors.As(err, &status):
		ready = mcs.NotReady(v1beta1.ServiceExportReasonFailed, "the broker refused: "+status.Status().Message)
	case errors.As(err, &network), errors.Is(err, context.DeadlineExceeded):
		ready = mcs.NotReady(v1beta1.ServiceExportReasonPending, "the broker does not answer; trying again")
	}
	return outcome{conditions: []metav1.Condition{mcs.Valid(), ready}, err: err}
}
