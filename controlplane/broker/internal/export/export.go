// Package export publishes this member's exports to the broker. It watches every ServiceExport with its Service and
// EndpointSlices, and reports the result in the conditions of the ServiceExport.
//
// While the broker is away, published objects stay, and the reconciler retries until it succeeds.
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

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/propagation"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

const (
	// conflictRetry is the delay after another client wrote the same object first: the cache needs a moment to see it.
	conflictRetry = 50 * time.Millisecond
	// withdrawalGrace is how long members that withdrew a Service have to leave its aggregate, before a new export
	// adopts it.
	withdrawalGrace = 10 * time.Second
	// exhaustedRetry is the delay after a full pool. No event tells when another Service frees an address.
	exhaustedRetry = 5 * time.Second
	// refusedRetry is the delay after the broker refused a new object because this member has too many.
	refusedRetry = 5 * time.Second
)

// bySlices indexes the member's EndpointSlices by the Service they belong to.
const bySlices = "service"

// broker is the part of the broker client that this package uses.
type broker interface {
	Changes() source.Source
	Registry() *clusterset.MemberRegistry
	Exports(clusterset.ServiceName) []clusterset.Export
	ReservedIPs(func(clusterset.ServiceName, []netip.Addr))
	LiveAggregate(context.Context, clusterset.ServiceName) (clusterset.Aggregate, bool, error)
	Aggregate(clusterset.ServiceName) (clusterset.Aggregate, bool, error)
	Claim(context.Context, clusterset.Aggregate) (clusterset.Aggregate, error)
	Restore(context.Context, clusterset.ServiceName, []netip.Addr) error
	Kept(clusterset.ServiceName, []clusterset.ClusterID) []clusterset.ClusterID
	Tombstone(name clusterset.ServiceName, quarantine time.Duration) time.Time
	Vet(clusterset.Export) clusterset.Export
	HasNoRecord(clusterset.ServiceName) bool
	Waiting(clusterset.ServiceName) (record, slices *quota.Overrun, count int)
	Publish(ctx context.Context, e clusterset.Export, endpoints []*discoveryv1.EndpointSlice, since time.Time) (wrote bool, err error)
	Withdraw(ctx context.Context, name clusterset.ServiceName, life time.Duration) (again time.Duration, err error)
}

// imports tells the addresses, the choice of a ClusterSetIP and the exporters of a Service as imported here; false if it
// is not imported.
type imports interface {
	Imported(clusterset.ServiceName) (clusterset.Import, bool)
}

// regions are the regions of the member's zones.
type regions interface {
	// Source has the Services of affected reconciled when a region changes.
	Source(affected func() []clusterset.ServiceName) source.Source
	RegionOf(zone string) string
}

// Settings configure the exports of a member.
type Settings struct {
	Policy clusterset.Policy
	// UseIP gives a Service a ClusterSetIP by default.
	UseIP bool
	// ServiceVIP exports the address of the Service instead of those of its pods.
	ServiceVIP bool
	// Tombstone is how long a withdrawn record stays on the broker, Quarantine how long a released ClusterSetIP is not
	// allocated again.
	Tombstone, Quarantine time.Duration
}

// Reconciler exports the Services of one member. All fields are required.
type Reconciler struct {
	Cluster  clusterset.ClusterID
	Source   Source
	Broker   broker
	Imports  imports
	Regions  regions
	Pool     *clusterset.IPPool // owned by the Reconciler from now on
	Settings Settings
	Shared   func(namespace string) bool
	Events   events.EventRecorder
	Log      *slog.Logger

	vips   vips
	since  propagation.Since
	stated stated
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
		Watches(&v1beta1.ServiceExport{}, r.enqueue(sameName)).
		Watches(&corev1.Service{}, r.enqueue(sameName)).
		Watches(&discoveryv1.EndpointSlice{}, r.enqueue(serviceOfSlice))
	b = b.WatchesRawSource(r.Broker.Changes()).WatchesRawSource(r.Regions.Source(func() []clusterset.ServiceName { return r.exported(ctx) }))
	if err := b.Complete(r); err != nil {
		return fmt.Errorf("set up export: %w", err)
	}
	return nil
}

// Follow returns a controller for a Source that no manager watches. It reconciles a Service when changes says so, or when the
// Service changes on the broker. Use it instead of Setup.
func (r *Reconciler) Follow(changes source.Source, options controller.Options) (controller.Controller, error) {
	r.vips.pool = r.Pool
	options.Reconciler = r
	c, err := controller.NewUnmanaged("export", options)
	if err != nil {
		return nil, fmt.Errorf("prepare the exports of %s: %w", r.Cluster, err)
	}
	for _, s := range []source.Source{changes, r.Broker.Changes()} {
		if err := c.Watch(s); err != nil {
			return nil, fmt.Errorf("watch the exports of %s: %w", r.Cluster, err)
		}
	}
	return c, nil
}

// exported returns the Services that have a ServiceExport.
func (r *Reconciler) exported(ctx context.Context) []clusterset.ServiceName {
	names, err := r.Source.Exported(ctx)
	if err != nil {
		r.Log.Warn("cannot list the ServiceExports after a change of a zone's region; their endpoints keep the former one until they change", "err", err)
	}
	return names
}

// enqueue enqueues the Service that name returns for an object, and records the time of the change.
func (r *Reconciler) enqueue(name func(client.Object) clusterset.ServiceName) handler.EventHandler {
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

// Reconcile publishes or withdraws this member's export of one Service.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	r.vips.restore(r.Broker.ReservedIPs, r.reportClash)
	name := clusterset.ServiceName(req.NamespacedName)
	since := r.since.Take(name)
	result, err := r.reconcile(ctx, name, since)
	if err != nil || result.RequeueAfter == conflictRetry {
		r.since.Mark(name, since) // it is not published yet
	}
	return result, err
}

func (r *Reconciler) reconcile(ctx context.Context, name clusterset.ServiceName, since time.Time) (ctrl.Result, error) {
	in, err := r.Source.Read(ctx, name)
	if err != nil {
		return ctrl.Result{}, err
	}
	if in.Export == nil {
		again, err := r.withdraw(ctx, name)
		if err == nil {
			r.stated.forget(name)
			r.stated.setRefused(name, false)
		}
		return requeueOnConflict(again, err)
	}
	outcome := r.publish(ctx, in, since)
	if err := r.report(ctx, in.Export, outcome); err != nil {
		return requeueOnConflict(0, err)
	}
	return requeueOnConflict(outcome.again, outcome.err)
}

// requeueOnConflict turns a lost race for an object into a retry without an error.
func requeueOnConflict(again time.Duration, err error) (ctrl.Result, error) {
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: conflictRetry}, nil
	}
	return ctrl.Result{RequeueAfter: again}, err
}

// reportClash logs that two Services have the same address.
func (r *Reconciler) reportClash(name clusterset.ServiceName, err error) {
	r.Log.Error("two services have the same ClusterSetIP; unexport one of them in every cluster", "namespace", name.Namespace, "service", name.Name, "err", err)
}

// withdraw removes this member's export of a Service, and frees its address after the quarantine, when no member refers to
// it. It returns the time after which it must be called again; zero for never.
func (r *Reconciler) withdraw(ctx context.Context, name clusterset.ServiceName) (again time.Duration, err error) {
	again, err = r.Broker.Withdraw(ctx, name, r.Settings.Tombstone)
	if err != nil || len(r.vips.heldBy(name)) == 0 {
		return again, err
	}
	// The cache may lack an aggregate that this member has just created, so read it from the broker.
	a, ok, err := r.Broker.LiveAggregate(ctx, name)
	if err != nil || len(a.IPs) > 0 {
		return again, errors.Join(err, r.vips.hold(name, a.IPs))
	}
	exports := r.Broker.Exports(name)
	// Other exporters still use the address, so the aggregate was deleted by mistake, or the broker lost it.
	if ok && slices.ContainsFunc(exports, func(e clusterset.Export) bool { return e.AgreedIP == clusterset.Enabled }) {
		return again, r.restore(ctx, name)
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

// restore adds the addresses of name that this member holds to an aggregate that has lost its addresses. It leaves that to the
// owner of the import's first address if that is another member.
func (r *Reconciler) restore(ctx context.Context, name clusterset.ServiceName) error {
	addrs := r.vips.heldBy(name)
	if imp, ok := r.Imports.Imported(name); ok && len(imp.IPs) > 0 {
		addrs = r.vips.leading(imp.IPs)
	}
	if len(addrs) == 0 {
		return nil
	}
	return r.Broker.Restore(ctx, name, addrs)
}

// outcome is the result of publishing one Service.
type outcome struct {
	conditions []metav1.Condition
	again      time.Duration // the delay of the next reconcile; zero waits for a change
	err        error         // nil also for faults that only the user can correct
}

// publish publishes the Service of in, or withdraws it if it cannot be exported.
func (r *Reconciler) publish(ctx context.Context, in Inputs, since time.Time) outcome {
	name := clusterset.ServiceName{Namespace: in.Export.Namespace, Name: in.Export.Name}
	e, omitted, err := mcs.Export(in.Service, in.Export, r.Cluster)
	if !r.Shared(name.Namespace) {
		err = &mcs.InvalidError{Reason: mcs.ReasonRestrictedNamespace, Message: fmt.Sprintf("namespace %s is restricted and is not exported; see --restricted-namespaces", name.Namespace)}
	}
	if invalid := (*mcs.InvalidError)(nil); errors.As(err, &invalid) {
		again, err := r.withdraw(ctx, name)
		if err == nil {
			r.stated.setInvalid(name)
		}
		return outcome{
			conditions: []metav1.Condition{mcs.Invalid(invalid), mcs.NotReady(v1beta1.ServiceExportReasonPending, "the service is not exported while the export is not valid")},
			again:      again, err: err,
		}
	}
	if err != nil {
		return outcome{conditions: []metav1.Condition{mcs.NotReady(v1beta1.ServiceExportReasonFailed, err.Error())}, err: err}
	}
	if _, ok := r.Broker.Registry().Member(r.Cluster); !ok {
		return outcome{conditions: []metav1.Condition{mcs.Valid(), mcs.NotReady(v1beta1.ServiceExportReasonFailed,
			fmt.Sprintf("the broker has no member %s; run isthmusctl join", r.Cluster))}}
	}
	e.WantsIP = mcs.WantsIP(in.Export, e.Type, r.Settings.UseIP)
	o, err := r.publishExport(ctx, in, e, omitted, since)
	if refusal := (*quota.Refusal)(nil); errors.As(err, &refusal) {
		waits := mcs.NotReady(mcs.ReasonQuotaExceeded, "the broker refuses the export: "+refusal.Reason)
		return outcome{conditions: []metav1.Condition{mcs.Valid(), waits}, again: refusedRetry}
	}
	if err != nil {
		return failed(err)
	}
	return o
}

// publishExport publishes e, the export of the Service itself, which lacks what omitted lists.
func (r *Reconciler) publishExport(ctx context.Context, in Inputs, e clusterset.Export, omitted []mcs.Omission, since time.Time) (outcome, error) {
	agreed, exists, err := r.Broker.Aggregate(e.Service)
	if err != nil {
		return outcome{}, err
	}
	// A Service that was unexported everywhere and is exported again gets a new agreement, so the old aggregate goes first.
	if exists && r.isUnexported(e.Service) && time.Now().Before(r.Broker.Tombstone(e.Service, withdrawalGrace)) {
		_, err := r.Broker.Withdraw(ctx, e.Service, r.Settings.Tombstone)
		pending := mcs.NotReady(v1beta1.ServiceExportReasonPending, "the earlier exports of the service are being withdrawn")
		return outcome{conditions: []metav1.Condition{mcs.Valid(), pending}, again: conflictRetry}, err
	}
	exports, e := r.exports(e, agreed)
	merged, conflicts := r.Settings.Policy.Merge(exports)
	ready := mcs.NotReady(mcs.ReasonExcluded, "the type of the service differs from that of the oldest export; the service is exported when they agree")
	var o outcome
	var lacks mcs.Shortcomings
	var endpoints, hosts []*discoveryv1.EndpointSlice
	if slices.Contains(merged.Clusters, r.Cluster) {
		ips, noIP, err := r.claim(ctx, e, exports, merged, agreed)
		if err != nil {
			return outcome{}, err
		}
		lacks = mcs.Shortcomings{Ignored: mcs.Ignored(in.Export, in.Slices), Omitted: omitted, NotLocal: len(ips) > 0 && r.isNotLocal(merged)}
		lacks.Unserved, lacks.Extender = unserved(e.Families, ips), r.extender(agreed, exports, merged, ips)
		endpoints, lacks.Refused, lacks.Overlap = r.endpoints(in, e, merged)
		e.IPs, e.AgreedIP = ips, merged.UseIP
		if lacks.Extender == r.Cluster && r.vips.haveBlock(unserved(merged.Families, ips)) {
			o.again = exhaustedRetry // its block is full
		}
		if merged.Type == clusterset.Headless {
			hosts = endpoints
		}
		lacks.Unnamed = mcs.Unnamed(e, hosts)
		ready = r.ready(e, merged.WithIPs(ips).IPs, lacks)
		if noIP != nil {
			ready = mcs.NotReady(v1beta1.ServiceExportReasonFailed, noIP.Error()+"; give this cluster a larger block, or one of the missing family, or unexport other services")
			o.again = exhaustedRetry
		}
	}
	r.stated.setRefused(e.Service, len(lacks.Refused) > 0)
	wrote, err := r.Broker.Publish(ctx, e, endpoints, since)
	r.stated.published(e.Service, endpoints, err)
	if refusal := (*quota.Refusal)(nil); errors.As(err, &refusal) && !refusal.Unpublished {
		ready.Reason, ready.Message = string(mcs.ReasonQuotaExceeded), ready.Message+", without EndpointSlices that the broker refuses: "+refusal.Reason
		return outcome{conditions: []metav1.Condition{mcs.Valid(), ready}, again: refusedRetry}, nil
	}
	if err != nil {
		return outcome{}, err
	}
	if wrote {
		propagation.Observe(propagation.Export, r.Cluster, time.Since(since))
	}
	o.conditions = []metav1.Condition{mcs.Valid(), ready}
	// A member whose record vanished may still disagree, so the condition Conflict stays as it is.
	if len(r.Broker.Kept(e.Service, agreed.Clusters)) > 0 {
		return o, nil
	}
	o.conditions = append(o.conditions, mcs.Conflicts(conflicts))
	return o, nil
}

// isNotLocal reports whether an import keeps clients from all endpoints of this member, which are on no node.
func (r *Reconciler) isNotLocal(merged clusterset.Import) bool {
	return r.Settings.ServiceVIP && merged.InternalTrafficPolicy == string(corev1.ServiceInternalTrafficPolicyLocal)
}

// unserved returns the families of which ips has no address; none if there is no address at all.
func unserved(families []clusterset.Family, ips []netip.Addr) []clusterset.Family {
	if len(ips) == 0 {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(families), func(f clusterset.Family) bool {
		return slices.ContainsFunc(ips, func(a netip.Addr) bool { return clusterset.FamilyOf(a) == f })
	})
}

// extender returns the member that adds an address of the family that ips, those of the aggregate, lack; "" for none.
func (r *Reconciler) extender(agreed clusterset.Aggregate, exports []clusterset.Export, merged clusterset.Import, ips []netip.Addr) clusterset.ClusterID {
	missing := unserved([]clusterset.Family{clusterset.IPv4, clusterset.IPv6}, ips)
	if len(missing) == 0 {
		return ""
	}
	var exporters []clusterset.ClusterID
	for _, e := range clusterset.ByAge(exports) {
		if slices.Contains(merged.Clusters, e.Cluster) {
			exporters = append(exporters, e.Cluster)
		}
	}
	return agreed.Extender(missing[0], exporters, r.Broker.Registry().HasBlock)
}

// isUnexported reports whether no member exports a Service. An export of this member that waits for a quota is one.
func (r *Reconciler) isUnexported(name clusterset.ServiceName) bool {
	waiting, _, _ := r.Broker.Waiting(name)
	return waiting == nil && len(r.Broker.Exports(name)) == 0
}

// ready returns the condition Ready of a published export, which lacks what s lists and may wait for a quota.
func (r *Reconciler) ready(e clusterset.Export, ips []netip.Addr, s mcs.Shortcomings) metav1.Condition {
	record, slices, count := r.Broker.Waiting(e.Service)
	if record != nil {
		return mcs.NotReady(mcs.ReasonQuotaExceeded, "the export waits: "+record.Error())
	}
	if count > 0 {
		s.Waiting, s.Quota = count, slices
	}
	return mcs.ExportedWithout(ips, s)
}

// exports returns the exports of all members, with e as that of this one. It also returns e with the remembered address and
// choice: those of its record, or of its own import if the broker lost the record.
func (r *Reconciler) exports(e clusterset.Export, agreed clusterset.Aggregate) ([]clusterset.Export, clusterset.Export) {
	e = r.Broker.Vet(e)
	exports := r.Broker.Exports(e.Service)
	if e.Type == clusterset.ClusterSetIP && r.Broker.HasNoRecord(e.Service) {
		e.IPs, e.AgreedIP = r.remember(e.Service, len(exports) > 0)
	}
	i := slices.IndexFunc(exports, func(o clusterset.Export) bool { return o.Cluster == e.Cluster })
	if i < 0 {
		exports = append(exports, e)
	} else {
		e.IPs, e.AgreedIP = exports[i].IPs, exports[i].AgreedIP
		exports[i] = e
	}
	if !agreed.Settle(exports) {
		r.Log.Warn(clusterset.ChoiceIgnored,
			"namespace", e.Service.Namespace, "service", e.Service.Name, "annotation", v1alpha1.AnnotationUseClusterSetIP, "value", agreed.Decided().String())
	}
	return exports, e
}

// remember returns the address and the choice of the Service as imported here, if it still has an exporter or this member
// was one.
func (r *Reconciler) remember(name clusterset.ServiceName, others bool) ([]netip.Addr, clusterset.Choice) {
	imp, ok := r.Imports.Imported(name)
	if !ok || !others && !slices.Contains(imp.Clusters, r.Cluster) {
		return nil, clusterset.Unknown
	}
	agreed := clusterset.Aggregate{UseIP: imp.UseIP, IPs: imp.IPs}
	return imp.IPs, agreed.Decided()
}

// endpoints returns the slices to publish, with the regions of their zones and without the endpoints that all other members would
// refuse, and the reasons for those. overlaps are the addresses of Services that some of them refuse.
func (r *Reconciler) endpoints(in Inputs, e clusterset.Export, merged clusterset.Import) (endpoints []*discoveryv1.EndpointSlice, refused []error, overlaps []mcs.Overlap) {
	registry, declined := r.Broker.Registry(), merged.UseIP == clusterset.Disabled
	byService := e.Type == clusterset.ClusterSetIP && (r.Settings.ServiceVIP || declined)
	if byService {
		endpoints = mcs.ServiceSlices(in.Service, mcs.AnyReady(in.Slices), r.Cluster)
	} else {
		for i := range in.Slices {
			if in.Slices[i].AddressType != discoveryv1.AddressTypeFQDN {
				endpoints = append(endpoints, mcs.BrokerSlice(&in.Slices[i], r.Cluster))
			}
		}
	}
	for _, es := range endpoints {
		refused = append(refused, mcs.Vet(es, func(a netip.Addr) error {
			if err := registry.CheckEndpointFor(r.Cluster, r.Cluster, a, declined); err != nil || !byService {
				return err
			}
			if ids := registry.Refusing(r.Cluster, a, declined); len(ids) > 0 {
				overlaps = append(overlaps, mcs.Overlap{Address: a, Clusters: ids})
			}
			return nil
		})...)
		mcs.SetRegions(es, r.Regions.RegionOf)
	}
	return endpoints, refused, overlaps
}

// claim ensures that the aggregate of the merged Service exists, lists this member and has an address if the Service needs
// one, of each family if this member is the extender. It returns the addresses: the present ones, the remembered ones if the
// aggregate was deleted, or new ones of this member's block. noIP is the reason why a needed address is missing.
func (r *Reconciler) claim(ctx context.Context, e clusterset.Export, exports []clusterset.Export, merged clusterset.Import, agreed clusterset.Aggregate) (ips []netip.Addr, noIP, err error) {
	name := merged.Service
	want := clusterset.Aggregate{Service: name, Type: merged.Type}
	if merged.Type == clusterset.ClusterSetIP {
		want.UseIP = merged.UseIP
	}
	remembered := merged.IPs
	if len(remembered) > 0 {
		remembered = clusterset.Recalled(e.IPs, remembered)
	}
	if merged.Type == clusterset.ClusterSetIP && merged.UseIP != clusterset.Disabled {
		switch {
		case len(agreed.IPs) > 0:
			if r.extender(agreed, exports, merged, agreed.IPs) == r.Cluster {
				want.IPs = r.vips.extend(name, agreed.IPs, merged.Families)
			}
			if len(want.IPs) > 0 && agreed.AllocatedBy != r.Cluster {
				want.AllocatedBy, want.ExtendedBy = agreed.AllocatedBy, r.Cluster
			}
		case len(remembered) == 0:
			want.IPs, noIP = r.vips.allocate(name, merged.Families)
		default:
			want.IPs = r.vips.leading(remembered)
		}
		if len(want.IPs) > 0 && want.ExtendedBy == "" {
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
		noIP = nil // another member allocated one
	}
	if err := r.vips.hold(name, ips); err != nil {
		r.reportClash(name, err)
	}
	return ips, noIP, nil
}

// failed returns the outcome of a valid export that the broker did not accept.
func failed(err error) outcome {
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return outcome{err: err} // retried in a moment without a condition
	}
	ready := mcs.NotReady(v1beta1.ServiceExportReasonFailed, err.Error())
	var (
		status  apierrors.APIStatus
		network *url.Error
	)
	switch {
	case errors.As(err, &status):
		ready = mcs.NotReady(v1beta1.ServiceExportReasonFailed, "the broker refused it: "+status.Status().Message)
	case errors.As(err, &network), errors.Is(err, context.DeadlineExceeded):
		ready = mcs.NotReady(v1beta1.ServiceExportReasonPending, "the broker does not answer; retrying")
	}
	return outcome{conditions: []metav1.Condition{mcs.Valid(), ready}, err: err}
}
