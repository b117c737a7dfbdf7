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

	"github.com/isthmus-net/isthmus/controlplane/broker/internal/propagation"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

const (
	// conflictRetry is when to look again after somebody else wrote the same object first. The cache
	// needs a moment to learn what they wrote.
	conflictRetry = 50 * time.Millisecond
	// lastRites is how long members that withdrew a Service may need to leave its aggregate, before a new export
	// takes it as it is.
	lastRites = 10 * time.Second
	// exhaustedRetry is when to ask a full pool again. Nothing tells when another Service frees one.
	exhaustedRetry = 5 * time.Second
)

// bySlices indexes the member's EndpointSlices by the Service they belong to.
const bySlices = "service"

// broker is what this package needs of the broker.
type broker interface {
	Changes() source.Source
	Roster() *clusterset.Roster
	Exports(clusterset.ServiceName) []clusterset.Export
	Held(func(clusterset.ServiceName, []netip.Addr))
	LiveAggregate(context.Context, clusterset.ServiceName) (clusterset.Aggregate, bool, error)
	Aggregate(clusterset.ServiceName) (clusterset.Aggregate, bool, error)
	Claim(context.Context, clusterset.Aggregate) (clusterset.Aggregate, error)
	Restore(context.Context, clusterset.ServiceName, []netip.Addr) error
	Kept(clusterset.ServiceName, []clusterset.ClusterID) []clusterset.ClusterID
	Tombstone(name clusterset.ServiceName, quarantine time.Duration) time.Time
	Vet(clusterset.Export) clusterset.Export
	Forgot(clusterset.ServiceName) bool
	Publish(ctx context.Context, e clusterset.Export, endpoints []*discoveryv1.EndpointSlice, since time.Time) (wrote bool, err error)
	Withdraw(ctx context.Context, name clusterset.ServiceName, life time.Duration) (again time.Duration, err error)
}

// imports is what this package needs to know of what was imported here: of a Service its addresses, whether it
// has one by choice, and who exports it; false if there is none.
type imports interface {
	Imported(clusterset.ServiceName) (clusterset.Import, bool)
}

// Settings are how a member exports.
type Settings struct {
	Policy clusterset.Policy
	// UseIP says whether a Service gets a ClusterSetIP without asking.
	UseIP bool
	// ServiceVIP exports the Service's own address instead of its pods'.
	ServiceVIP bool
	// Tombstone is for how long the broker says that a Service was withdrawn, Quarantine for how long its
	// ClusterSetIP is given to nobody else.
	Tombstone, Quarantine time.Duration
}

// Reconciler exports the Services of one member. All fields are required.
type Reconciler struct {
	Cluster  clusterset.ClusterID
	Client   client.Client // of the member, reading from its cache
	Broker   broker
	Imports  imports
	Pool     *clusterset.IPPool // owned by the Reconciler from now on
	Settings Settings
	Shared   func(namespace string) bool
	Events   events.EventRecorder
	Log      *slog.Logger

	vips  vips
	since propagation.Since
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
		Watches(&v1beta1.ServiceExport{}, r.follow(sameName)).
		Watches(&corev1.Service{}, r.follow(sameName)).
		Watches(&discoveryv1.EndpointSlice{}, r.follow(serviceOfSlice))
	if err := b.WatchesRawSource(r.Broker.Changes()).Complete(r); err != nil {
		return fmt.Errorf("set up export: %w", err)
	}
	return nil
}

// follow asks to reconcile what name says about an object, and notes when it changed.
func (r *Reconciler) follow(name func(client.Object) clusterset.ServiceName) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(_ context.Context, obj client.Object) []reconcile.Request {
		n := name(obj)
		if n.Name == "" {
			return nil
		}
		r.since.Mark(n, time.Now())
		return []reconcile.Request{{NamespacedName: types.NamespacedName(n)}}
	})
}

func sameName(obj client.Object) clusterset.ServiceName {
	return clusterset.ServiceName{Namespace: obj.GetNamespace(), Name: obj.GetName()}
}

func serviceOfSlice(obj client.Object) clusterset.ServiceName {
	return clusterset.ServiceName{Namespace: obj.GetNamespace(), Name: obj.GetLabels()[discoveryv1.LabelServiceName]}
}

// Reconcile makes the broker say what this member has to say about one Service name.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	r.vips.restore(r.Broker.Held, r.clash)
	name := clusterset.ServiceName(req.NamespacedName)
	since := r.since.Take(name)
	result, err := r.reconcile(ctx, name, since)
	if err != nil || result.RequeueAfter == conflictRetry {
		r.since.Mark(name, since) // it is still on its way
	}
	return result, err
}

func (r *Reconciler) reconcile(ctx context.Context, name clusterset.ServiceName, since time.Time) (ctrl.Result, error) {
	local, err := r.read(ctx, name)
	if err != nil {
		return ctrl.Result{}, err
	}
	if local.export == nil {
		return quiet(r.withdraw(ctx, name))
	}
	outcome := r.publish(ctx, local, since)
	if err := r.report(ctx, local.export, outcome); err != nil {
		return quiet(0, err)
	}
	return quiet(outcome.again, outcome.err)
}

// quiet turns a lost race for an object into a second look: nobody has to read about it.
func quiet(again time.Duration, err error) (ctrl.Result, error) {
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: conflictRetry}, nil
	}
	return ctrl.Result{RequeueAfter: again}, err
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

// withdraw removes everything this member says about a Service, and gives its address back, after a
// quarantine, once nobody names it any more. It returns when it has to be called again, zero for never.
func (r *Reconciler) withdraw(ctx context.Context, name clusterset.ServiceName) (again time.Duration, err error) {
	again, err = r.Broker.Withdraw(ctx, name, r.Settings.Tombstone)
	if err != nil || len(r.vips.heldBy(name)) == 0 {
		return again, err
	}
	// The cache may not know yet what this member itself created a moment ago, so ask the broker.
	a, ok, err := r.Broker.LiveAggregate(ctx, name)
	if err != nil || len(a.IPs) > 0 {
		return again, errors.Join(err, r.vips.settle(name, a.IPs))
	}
	exports := r.Broker.Exports(name)
	// Others still have the address, so somebody deleted the aggregate, or the broker lost it.
	if ok && slices.ContainsFunc(exports, func(e clusterset.Export) bool { return e.AgreedIP == clusterset.Enabled }) {
		return again, r.Broker.Restore(ctx, name, r.vips.heldBy(name))
	}
	if len(exports) > 0 {
		return again, nil
	}
	rest := r.vips.free(name, r.Broker.Tombstone(name, r.Settings.Quarantine), time.Now(), r.Settings.Quarantine)
	if again == 0 || 0 < rest && rest < again {
		again = rest
	}
	return again, nil
}

// outcome is how publishing one Service went, for the user and for the retry.
type outcome struct {
	conditions []metav1.Condition
	again      time.Duration // when to look again, zero for when something changes
	err        error         // why it is not exported; nil also when only the user can mend it
}

// publish makes the broker say what l says, or nothing when the Service cannot be exported.
func (r *Reconciler) publish(ctx context.Context, l local, since time.Time) outcome {
	name := clusterset.ServiceName{Namespace: l.export.Namespace, Name: l.export.Name}
	e, err := mcs.Export(l.service, l.export, r.Cluster)
	if !r.Shared(name.Namespace) {
		err = &mcs.InvalidError{Reason: mcs.ReasonRestrictedNamespace, Message: fmt.Sprintf("namespace %s belongs to each cluster itself; nothing is exported from it", name.Namespace)}
	}
	if invalid := (*mcs.InvalidError)(nil); errors.As(err, &invalid) {
		again, err := r.withdraw(ctx, name)
		return outcome{
			conditions: []metav1.Condition{mcs.Invalid(invalid), mcs.NotReady(v1beta1.ServiceExportReasonPending, "nothing is exported while the export is not valid")},
			again:      again, err: err,
		}
	}
	if err != nil {
		return outcome{conditions: []metav1.Condition{mcs.NotReady(v1beta1.ServiceExportReasonFailed, err.Error())}, err: err}
	}
	if _, ok := r.Broker.Roster().Member(r.Cluster); !ok {
		return outcome{conditions: []metav1.Condition{mcs.Valid(), mcs.NotReady(v1beta1.ServiceExportReasonFailed,
			fmt.Sprintf("the broker has no member %s; run isthmusctl join", r.Cluster))}}
	}
	e.WantsIP = mcs.WantsIP(l.export, e.Type, r.Settings.UseIP)
	o, err := r.offer(ctx, l, e, since)
	if err != nil {
		return failed(err)
	}
	return o
}

// offer publishes e, which is what the Service itself says.
func (r *Reconciler) offer(ctx context.Context, l local, e clusterset.Export, since time.Time) (outcome, error) {
	agreed, exists, err := r.Broker.Aggregate(e.Service)
	if err != nil {
		return outcome{}, err
	}
	// Whoever unexports a Service everywhere and exports it again decides anew, so what was agreed on goes first.
	if exists && len(r.Broker.Exports(e.Service)) == 0 && time.Now().Before(r.Broker.Tombstone(e.Service, lastRites)) {
		_, err := r.Broker.Withdraw(ctx, e.Service, r.Settings.Tombstone)
		pending := mcs.NotReady(v1beta1.ServiceExportReasonPending, "the earlier exports of the service are being withdrawn")
		return outcome{conditions: []metav1.Condition{mcs.Valid(), pending}, again: conflictRetry}, err
	}
	exports, e := r.exports(e, agreed)
	merged, conflicts := r.Settings.Policy.Merge(exports)
	ready := mcs.NotReady(mcs.ReasonExcluded, "the type of the service is not that of the older export; it is exported when they agree")
	o := outcome{}
	var endpoints []*discoveryv1.EndpointSlice
	if slices.Contains(merged.Clusters, r.Cluster) {
		ips, noIP, err := r.claim(ctx, merged, agreed)
		if err != nil {
			return outcome{}, err
		}
		var refused []error
		endpoints, refused = r.endpoints(l, e, merged)
		e.IPs, e.AgreedIP = ips, merged.UseIP
		var hosts []*discoveryv1.EndpointSlice
		if merged.Type == clusterset.Headless {
			hosts = endpoints
		}
		ready = mcs.ExportedWithout(merged.WithIPs(ips).IPs, refused, mcs.Unnamed(e, hosts))
		if noIP != nil {
			ready = mcs.NotReady(v1beta1.ServiceExportReasonFailed, noIP.Error()+"; give this cluster a larger block, or one of the family, or unexport what uses it up")
			o.again = exhaustedRetry
		}
	}
	wrote, err := r.Broker.Publish(ctx, e, endpoints, since)
	if err != nil {
		return outcome{}, err
	}
	if wrote {
		propagation.Observe(propagation.Export, r.Cluster, time.Since(since))
	}
	o.conditions = []metav1.Condition{mcs.Valid(), ready}
	// Whose record is only missing has not changed its mind: what is known of conflicts stays.
	if len(r.Broker.Kept(e.Service, agreed.Clusters)) > 0 {
		return o, nil
	}
	o.conditions = append(o.conditions, mcs.Conflicts(conflicts))
	return o, nil
}

// exports returns what all members say, with e in place of what the broker knew of this one, and e with
// what it remembers: by its record, or by its own import where the broker lost the record.
func (r *Reconciler) exports(e clusterset.Export, agreed clusterset.Aggregate) ([]clusterset.Export, clusterset.Export) {
	e = r.Broker.Vet(e)
	exports := r.Broker.Exports(e.Service)
	if e.Type == clusterset.ClusterSetIP && r.Broker.Forgot(e.Service) {
		e.IPs, e.AgreedIP = r.remember(e.Service, len(exports) > 0)
	}
	i := slices.IndexFunc(exports, func(o clusterset.Export) bool { return o.Cluster == e.Cluster })
	if i < 0 {
		exports = append(exports, e)
	} else {
		e.IPs, e.AgreedIP = exports[i].IPs, exports[i].AgreedIP
		exports[i] = e
	}
	if decided := agreed.Decided(); decided != clusterset.Unknown {
		for i := range exports {
			exports[i].AgreedIP = decided
		}
	}
	return exports, e
}

// remember returns the address of the Service as this member imports it, if others export it, or it did
// itself: then it is still the Service's.
func (r *Reconciler) remember(name clusterset.ServiceName, others bool) ([]netip.Addr, clusterset.Choice) {
	imp, ok := r.Imports.Imported(name)
	if !ok || !others && !slices.Contains(imp.Clusters, r.Cluster) {
		return nil, clusterset.Unknown
	}
	agreed := clusterset.Aggregate{UseIP: imp.UseIP, IPs: imp.IPs}
	return imp.IPs, agreed.Decided()
}

// endpoints returns the slices that the broker shall have, without the endpoints that nobody would believe,
// and why not.
func (r *Reconciler) endpoints(l local, e clusterset.Export, merged clusterset.Import) (endpoints []*discoveryv1.EndpointSlice, refused []error) {
	if e.Type == clusterset.ClusterSetIP && (r.Settings.ServiceVIP || merged.UseIP == clusterset.Disabled) {
		endpoints = mcs.ServiceSlices(l.service, mcs.AnyReady(l.slices), r.Cluster)
	} else {
		for i := range l.slices {
			if l.slices[i].AddressType != discoveryv1.AddressTypeFQDN {
				endpoints = append(endpoints, mcs.BrokerSlice(&l.slices[i], r.Cluster))
			}
		}
	}
	roster := r.Broker.Roster()
	for _, es := range endpoints {
		refused = append(refused, mcs.Vet(es, func(a netip.Addr) error { return roster.CheckEndpoint(r.Cluster, a) })...)
	}
	return endpoints, refused
}

// claim sees to it that the aggregate of the merged Service exists, lists this member and has an address if
// the Service needs one, and returns the address: the one it has, or had before somebody deleted the
// aggregate, or a new one of this member's block. noIP says why it has none although it should.
func (r *Reconciler) claim(ctx context.Context, merged clusterset.Import, agreed clusterset.Aggregate) (ips []netip.Addr, noIP, err error) {
	name := merged.Service
	want := clusterset.Aggregate{Service: name, Type: merged.Type}
	if merged.Type == clusterset.ClusterSetIP {
		want.UseIP = merged.UseIP
	}
	remembered := merged.IPs
	if len(agreed.IPs) == 0 && merged.Type == clusterset.ClusterSetIP && merged.UseIP != clusterset.Disabled {
		switch {
		case len(remembered) == 0:
			want.IPs, noIP = r.vips.allocate(name, merged.Families)
		case r.vips.owns(remembered):
			want.IPs = remembered
		}
		if len(want.IPs) > 0 {
			want.AllocatedBy = r.Cluster
		}
	}
	have, err := r.Broker.Claim(ctx, want)
	if err != nil {
		return nil, nil, err
	}
	ips = have.IPs
	if len(ips) == 0 {
		ips = remembered
	} else {
		noIP = nil // another member had one to give
	}
	if err := r.vips.settle(name, ips); err != nil {
		r.clash(name, err)
	}
	return ips, noIP, nil
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
