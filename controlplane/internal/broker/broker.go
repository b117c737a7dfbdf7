// Package broker is a member's view of the broker: one namespace of a Kubernetes API server that all
// members reach. What goes in are the domain's Exports and Aggregates, what comes out is the same, of all
// members; the kinds and names that carry them stay inside.
//
// Reads come from a cache that keeps its last content while the broker is away and is never asked before
// it is complete. Writes go to the broker and are only made where something differs.
package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// The indexes of the cache: objects by the Service they are about, and by its namespace.
const (
	byService   = "service"
	byNamespace = "namespace"
)

// Config says where the broker is and who asks.
type Config struct {
	REST      *rest.Config
	Namespace string
	Self      clusterset.ClusterID
	Log       *slog.Logger
}

// Broker reads and writes the broker's objects for one member. Its cache fills while Start
// runs. Safe for concurrent use.
type Broker struct {
	cfg     Config
	cluster cluster.Cluster
	cached  client.Client // reads the cache, writes to the broker
	live    client.Reader // asks the broker
}

// New prepares a Broker. It sends nothing, so it also succeeds while the broker is away.
func New(ctx context.Context, cfg Config) (*Broker, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(v1alpha1.AddToScheme(scheme), v1beta1.Install(scheme), discoveryv1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("register the broker's kinds: %w", err)
	}
	c, err := cluster.New(cfg.REST, func(o *cluster.Options) {
		o.Scheme = scheme
		o.MapperProvider = staticMapper
		o.Cache = cache.Options{
			DefaultNamespaces: map[string]cache.Config{cfg.Namespace: {}},
			DefaultTransform:  cache.TransformStripManagedFields(),
		}
	})
	if err != nil {
		return nil, fmt.Errorf("prepare broker %s: %w", cfg.REST.Host, err)
	}
	b := &Broker{cfg: cfg, cluster: c, cached: c.GetClient(), live: c.GetAPIReader()}
	for _, obj := range []client.Object{&v1alpha1.ExportRecord{}, &discoveryv1.EndpointSlice{}} {
		if err := c.GetFieldIndexer().IndexField(ctx, obj, byService, serviceKeys); err != nil {
			return nil, fmt.Errorf("index broker objects by service: %w", err)
		}
	}
	if err := c.GetFieldIndexer().IndexField(ctx, &v1alpha1.ExportRecord{}, byNamespace, namespaceKeys); err != nil {
		return nil, fmt.Errorf("index broker objects by namespace: %w", err)
	}
	return b, nil
}

// staticMapper knows the few kinds of a broker and their lists, so that nothing has to be discovered
// before the caches can start.
func staticMapper(*rest.Config, *http.Client) (meta.RESTMapper, error) {
	m := meta.NewDefaultRESTMapper(nil)
	for _, kind := range []schema.GroupVersionKind{
		v1alpha1.GroupVersion.WithKind("ExportRecord"),
		v1beta1.SchemeGroupVersion.WithKind("ServiceImport"),
		discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"),
	} {
		m.Add(kind, meta.RESTScopeNamespace)
		m.Add(kind.GroupVersion().WithKind(kind.Kind+"List"), meta.RESTScopeNamespace)
	}
	return m, nil
}

func serviceKeys(obj client.Object) []string {
	name, ok := mcs.ServiceOf(obj)
	if !ok {
		return nil
	}
	return []string{name.String()}
}

func namespaceKeys(obj client.Object) []string {
	name, ok := mcs.ServiceOf(obj)
	if !ok {
		return nil
	}
	return []string{name.Namespace}
}

// Start fills the cache and keeps it current until ctx ends. A manager runs it like any other work, not
// as one of its caches: those it waits for before anything else, and while it waits it cannot be stopped.
func (b *Broker) Start(ctx context.Context) error {
	if err := b.cluster.Start(ctx); err != nil {
		return fmt.Errorf("watch broker %s: %w", b.cfg.REST.Host, err)
	}
	return nil
}

// NeedLeaderElection tells the manager that a standby fills its cache too, so that it can take over at
// once.
func (b *Broker) NeedLeaderElection() bool { return false }

// Changes returns sources that ask to reconcile a Service, as namespace and name, whenever something about
// it changes on the broker. A controller that has all of them works only when the cache is complete.
func (b *Broker) Changes() []source.Source {
	var sources []source.Source
	for _, obj := range []client.Object{&v1alpha1.ExportRecord{}, &v1beta1.ServiceImport{}, &discoveryv1.EndpointSlice{}} {
		sources = append(sources, source.Kind(b.cluster.GetCache(), obj, handler.EnqueueRequestsFromMapFunc(request)))
	}
	return sources
}

func request(_ context.Context, obj client.Object) []reconcile.Request {
	name, ok := mcs.ServiceOf(obj)
	if !ok {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName(name)}}
}

// Exports returns what all members say about a Service, in no particular order. A record that cannot be
// read counts as absent and is logged: its member harms only itself.
func (b *Broker) Exports(ctx context.Context, name clusterset.ServiceName) ([]clusterset.Export, error) {
	var records v1alpha1.ExportRecordList
	if err := b.cached.List(ctx, &records, client.InNamespace(b.cfg.Namespace), client.MatchingFields{byService: name.String()}); err != nil {
		return nil, fmt.Errorf("list export records of %s: %w", name, err)
	}
	var exports []clusterset.Export
	for i := range records.Items {
		e, err := mcs.ParseRecord(&records.Items[i])
		if err != nil {
			b.cfg.Log.Warn("export ignored", "namespace", name.Namespace, "service", name.Name, "err", err)
			continue
		}
		exports = append(exports, e)
	}
	return exports, nil
}

// Services returns the Services of a namespace that any member exports.
func (b *Broker) Services(ctx context.Context, namespace string) ([]clusterset.ServiceName, error) {
	var records v1alpha1.ExportRecordList
	if err := b.cached.List(ctx, &records, client.InNamespace(b.cfg.Namespace), client.MatchingFields{byNamespace: namespace}); err != nil {
		return nil, fmt.Errorf("list export records of namespace %s: %w", namespace, err)
	}
	var names []clusterset.ServiceName
	for i := range records.Items {
		if name, ok := mcs.ServiceOf(&records.Items[i]); ok {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, clusterset.ServiceName.Compare)
	return slices.Compact(names), nil
}

// Slices returns the EndpointSlices of all members for a Service, as mcs.BrokerSlice made them. They are
// the caller's.
func (b *Broker) Slices(ctx context.Context, name clusterset.ServiceName) ([]discoveryv1.EndpointSlice, error) {
	var list discoveryv1.EndpointSliceList
	if err := b.cached.List(ctx, &list, client.InNamespace(b.cfg.Namespace), client.MatchingFields{byService: name.String()}); err != nil {
		return nil, fmt.Errorf("list broker slices of %s: %w", name, err)
	}
	return list.Items, nil
}

// Held calls hold for each Service with the addresses that an aggregate or a record says it has: what must
// not be given to anybody else. A Service may be reported several times.
func (b *Broker) Held(ctx context.Context, hold func(clusterset.ServiceName, []netip.Addr)) error {
	var aggregates v1beta1.ServiceImportList
	if err := b.cached.List(ctx, &aggregates, client.InNamespace(b.cfg.Namespace)); err != nil {
		return fmt.Errorf("list aggregates: %w", err)
	}
	for i := range aggregates.Items {
		a, err := mcs.ParseAggregate(&aggregates.Items[i])
		if err != nil {
			b.cfg.Log.Warn("aggregate ignored", "err", err)
			continue
		}
		hold(a.Service, a.IPs)
	}
	var records v1alpha1.ExportRecordList
	if err := b.cached.List(ctx, &records, client.InNamespace(b.cfg.Namespace)); err != nil {
		return fmt.Errorf("list export records: %w", err)
	}
	for i := range records.Items {
		e, err := mcs.ParseRecord(&records.Items[i])
		if err != nil {
			b.cfg.Log.Warn("export ignored", "err", err)
			continue
		}
		hold(e.Service, e.IPs)
	}
	return nil
}

// Publish makes the broker say what this member says: e, and endpoints as mcs.BrokerSlice made them.
// Nothing is written where the broker says so already.
func (b *Broker) Publish(ctx context.Context, e clusterset.Export, endpoints []*discoveryv1.EndpointSlice) error {
	if err := b.publishSlices(ctx, e.Service, endpoints); err != nil {
		return err
	}
	want := mcs.ExportRecord(e)
	want.Namespace = b.cfg.Namespace
	var have v1alpha1.ExportRecord
	err := b.cached.Get(ctx, client.ObjectKeyFromObject(want), &have)
	if apierrors.IsNotFound(err) {
		return wrap("create export record", want.Name, b.cached.Create(ctx, want))
	}
	if err != nil {
		return wrap("read export record", want.Name, err)
	}
	if equality.Semantic.DeepEqual(have.Spec, want.Spec) && equality.Semantic.DeepEqual(have.Labels, want.Labels) {
		return nil
	}
	have.Spec, have.Labels = want.Spec, want.Labels
	return wrap("update export record", want.Name, b.cached.Update(ctx, &have))
}

// publishSlices makes endpoints this member's slices for a Service. New ones come before old ones go, so
// a pod that moves between slices is never missing.
func (b *Broker) publishSlices(ctx context.Context, name clusterset.ServiceName, endpoints []*discoveryv1.EndpointSlice) error {
	all, err := b.Slices(ctx, name)
	if err != nil {
		return err
	}
	have := map[string]*discoveryv1.EndpointSlice{}
	for i := range all {
		if mcs.OwnerOf(&all[i]) == b.cfg.Self {
			have[all[i].Name] = &all[i]
		}
	}
	for _, want := range endpoints {
		old, ok := have[want.Name]
		delete(have, want.Name)
		if !ok {
			created := want.DeepCopy()
			created.Namespace = b.cfg.Namespace
			if err := b.cached.Create(ctx, created); err != nil {
				return wrap("create broker slice", want.Name, err)
			}
			continue
		}
		if mcs.SameSlice(old, want) {
			continue
		}
		old.Labels, old.Endpoints, old.Ports = want.Labels, want.Endpoints, want.Ports
		if err := b.cached.Update(ctx, old); err != nil {
			return wrap("update broker slice", want.Name, err)
		}
	}
	for _, old := range have {
		if err := b.cached.Delete(ctx, old); client.IgnoreNotFound(err) != nil {
			return wrap("delete broker slice", old.Name, err)
		}
	}
	return nil
}

// Withdraw removes everything this member says about a Service: first its record, by which the others
// import, then its slices, then its place on the aggregate, and the aggregate itself when nobody else
// is listed there. Withdrawing what is not there succeeds and writes nothing.
func (b *Broker) Withdraw(ctx context.Context, name clusterset.ServiceName) error {
	record := &v1alpha1.ExportRecord{}
	record.Namespace, record.Name = b.cfg.Namespace, mcs.RecordName(b.cfg.Self, name)
	err := b.cached.Get(ctx, client.ObjectKeyFromObject(record), record)
	if err == nil {
		err = b.cached.Delete(ctx, record)
	}
	if client.IgnoreNotFound(err) != nil {
		return wrap("delete export record", record.Name, err)
	}
	if err := b.publishSlices(ctx, name, nil); err != nil {
		return err
	}
	return b.leave(ctx, name)
}

// Aggregate returns what the members agreed on about a Service, and whether there is an aggregate.
func (b *Broker) Aggregate(ctx context.Context, name clusterset.ServiceName) (clusterset.Aggregate, bool, error) {
	a, _, err := b.aggregate(ctx, b.cached, name)
	if apierrors.IsNotFound(err) {
		return clusterset.Aggregate{}, false, nil
	}
	return a, err == nil, err
}

// LiveAggregate is Aggregate, asked from the broker and not from the cache.
func (b *Broker) LiveAggregate(ctx context.Context, name clusterset.ServiceName) (clusterset.Aggregate, bool, error) {
	a, _, err := b.aggregate(ctx, b.live, name)
	if apierrors.IsNotFound(err) {
		return clusterset.Aggregate{}, false, nil
	}
	return a, err == nil, err
}

func (b *Broker) aggregate(ctx context.Context, from client.Reader, name clusterset.ServiceName) (clusterset.Aggregate, *v1beta1.ServiceImport, error) {
	si := &v1beta1.ServiceImport{}
	key := types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.AggregateName(name)}
	if err := from.Get(ctx, key, si); err != nil {
		return clusterset.Aggregate{}, nil, wrap("read aggregate", key.Name, err)
	}
	a, err := mcs.ParseAggregate(si)
	return a, si, err
}

// Claim makes sure that there is an aggregate for want.Service, that it lists this member, and that it has
// want.IPs if it has none yet. It returns the aggregate as it stands, whose IPs are another member's when
// that one was faster: creating the object, and giving addresses to one without, succeed for one member
// alone. An error leaves open what was done.
func (b *Broker) Claim(ctx context.Context, want clusterset.Aggregate) (clusterset.Aggregate, error) {
	have, si, err := b.aggregate(ctx, b.cached, want.Service)
	if apierrors.IsNotFound(err) {
		have, si, err = b.create(ctx, want)
	}
	if err != nil {
		return clusterset.Aggregate{}, err
	}
	if len(have.IPs) == 0 && len(want.IPs) > 0 {
		fresh := mcs.Aggregate(want)
		si.Spec.IPs, si.Spec.IPFamilies, si.Spec.Type = fresh.Spec.IPs, fresh.Spec.IPFamilies, fresh.Spec.Type
		metav1.SetMetaDataAnnotation(&si.ObjectMeta, v1alpha1.AnnotationAllocatedBy, string(want.AllocatedBy))
		if err := b.cached.Update(ctx, si); err != nil {
			return clusterset.Aggregate{}, wrap("update aggregate", si.Name, err)
		}
		have.IPs, have.AllocatedBy = want.IPs, want.AllocatedBy
	}
	if slices.Contains(have.Clusters, b.cfg.Self) {
		return have, nil
	}
	si.Status.Clusters = append(si.Status.Clusters, v1beta1.ClusterStatus{Cluster: string(b.cfg.Self)})
	slices.SortFunc(si.Status.Clusters, func(x, y v1beta1.ClusterStatus) int { return strings.Compare(x.Cluster, y.Cluster) })
	if err := b.cached.Status().Update(ctx, si); err != nil {
		return clusterset.Aggregate{}, wrap("join aggregate", si.Name, err)
	}
	have.Clusters = append(have.Clusters, b.cfg.Self)
	slices.Sort(have.Clusters)
	return have, nil
}

// create creates the aggregate, or reads the one that somebody else has just created.
func (b *Broker) create(ctx context.Context, want clusterset.Aggregate) (clusterset.Aggregate, *v1beta1.ServiceImport, error) {
	si := mcs.Aggregate(want)
	si.Namespace = b.cfg.Namespace
	si.Status = v1beta1.ServiceImportStatus{}
	err := b.cached.Create(ctx, si)
	if apierrors.IsAlreadyExists(err) {
		return b.aggregate(ctx, b.live, want.Service)
	}
	if err != nil {
		return clusterset.Aggregate{}, nil, wrap("create aggregate", si.Name, err)
	}
	want.Clusters = nil
	return want, si, nil
}

// leave takes this member off the aggregate and deletes it when nobody else is listed. Both carry the
// version that was read, so a member that joins meanwhile is never run over.
func (b *Broker) leave(ctx context.Context, name clusterset.ServiceName) error {
	a, si, err := b.aggregate(ctx, b.cached, name)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	listed := slices.Contains(a.Clusters, b.cfg.Self)
	others := len(a.Clusters) > 1 || len(a.Clusters) == 1 && !listed
	switch {
	case !others && (listed || a.AllocatedBy == b.cfg.Self):
		err := b.cached.Delete(ctx, si, client.Preconditions{UID: &si.UID, ResourceVersion: &si.ResourceVersion})
		return wrap("delete aggregate", si.Name, client.IgnoreNotFound(err))
	case listed:
		si.Status.Clusters = slices.DeleteFunc(si.Status.Clusters, func(c v1beta1.ClusterStatus) bool { return c.Cluster == string(b.cfg.Self) })
		return wrap("leave aggregate", si.Name, b.cached.Status().Update(ctx, si))
	default:
		return nil
	}
}

// wrap names the action and the object in a non-nil error.
func wrap(action, name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", action, name, err)
}
