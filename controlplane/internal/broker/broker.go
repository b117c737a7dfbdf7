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
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/cluster"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/guard"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// The indexes of the cache: objects by the Service they are about, by its namespace, and by their member.
const (
	byService   = "service"
	byNamespace = "namespace"
	byCluster   = "cluster"
)

// Config says where the broker is, who asks, and how much is believed.
type Config struct {
	REST      *rest.Config
	Namespace string
	Self      clusterset.ClusterID
	// BrokerTime makes an export as old as its record on the broker, instead of as it claims to be.
	BrokerTime bool
	// Renewed is called with the Leases of members, whenever one is written, and Gone when one vanishes.
	Renewed func(clusterset.ClusterID, time.Time)
	Gone    func(clusterset.ClusterID)
	// Left is called with a member that left, or joined again after that.
	Left func(id clusterset.ClusterID, left bool)
	// Window, Memory and HoldFor are those of guard.Config, and Decided is told what the guards decide.
	Window, Memory, HoldFor time.Duration
	Decided                 func(guard.Decision)
	Log                     *slog.Logger
}

// Broker reads and writes the broker's objects for one member. Its cache fills while Start
// runs. Safe for concurrent use.
type Broker struct {
	cfg     Config
	cluster cluster.Cluster
	cached  client.Client // reads the cache, writes to the broker
	live    client.Reader // asks the broker

	roster    roster
	watched   watched
	changes   nudge
	exportsOf *guard.Guard[clusterset.ServiceName] // records
	slicesOf  *guard.Guard[ImportedSlice]          // slices that have endpoints
	synced    []toolscache.ResourceEventHandlerRegistration
	running   context.Context //nolint:containedctx // of Start, for event handlers, which get none
}

// New prepares a Broker. It sends nothing, so it also succeeds while the broker is away.
func New(ctx context.Context, cfg Config) (*Broker, error) {
	scheme := runtime.NewScheme()
	err := errors.Join(v1alpha1.AddToScheme(scheme), v1beta1.Install(scheme), discoveryv1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme))
	if err != nil {
		return nil, fmt.Errorf("register the broker's kinds: %w", err)
	}
	b := &Broker{cfg: cfg}
	b.roster.log = cfg.Log
	b.cluster, err = cluster.New(cfg.REST, func(o *cluster.Options) {
		o.Scheme = scheme
		o.MapperProvider = staticMapper
		o.Cache = cache.Options{
			DefaultNamespaces: map[string]cache.Config{cfg.Namespace: {}},
			DefaultTransform:  cache.TransformStripManagedFields(),
			ByObject:          map[client.Object]cache.ByObject{&discoveryv1.EndpointSlice{}: {Transform: trim}},
		}
	})
	if err != nil {
		return nil, fmt.Errorf("prepare broker %s: %w", cfg.REST.Host, err)
	}
	b.cached, b.live = b.cluster.GetClient(), b.cluster.GetAPIReader()
	for _, obj := range []client.Object{&v1alpha1.ExportRecord{}, &discoveryv1.EndpointSlice{}} {
		for index, keys := range map[string]client.IndexerFunc{byService: serviceKeys, byNamespace: namespaceKeys, byCluster: clusterKeys} {
			if err := b.cluster.GetFieldIndexer().IndexField(ctx, obj, index, keys); err != nil {
				return nil, fmt.Errorf("index broker objects by %s: %w", index, err)
			}
		}
	}
	b.exportsOf = newGuard(cfg, func(_ clusterset.ClusterID, names []clusterset.ServiceName) { b.changes.send(names...) })
	b.slicesOf = newGuard(cfg, func(_ clusterset.ClusterID, gone []ImportedSlice) {
		for _, s := range gone {
			b.changes.send(s.Service)
		}
	})
	return b, b.watch(ctx)
}

func newGuard[K comparable](cfg Config, changed func(clusterset.ClusterID, []K)) *guard.Guard[K] {
	return guard.New(guard.Config[K]{
		Window: cfg.Window, Memory: cfg.Memory, HoldFor: cfg.HoldFor,
		Changed: changed, Decided: cfg.Decided, Log: cfg.Log,
	})
}

// staticMapper knows the few kinds of a broker and their lists, so that nothing has to be discovered
// before the caches can start.
func staticMapper(*rest.Config, *http.Client) (meta.RESTMapper, error) {
	m := meta.NewDefaultRESTMapper(nil)
	for _, kind := range []schema.GroupVersionKind{
		v1alpha1.GroupVersion.WithKind("ExportRecord"),
		v1alpha1.GroupVersion.WithKind("Member"),
		v1alpha1.GroupVersion.WithKind("ClusterSetConfig"),
		v1beta1.SchemeGroupVersion.WithKind("ServiceImport"),
		discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"),
		coordinationv1.SchemeGroupVersion.WithKind("Lease"),
	} {
		m.Add(kind, meta.RESTScopeNamespace)
		m.Add(kind.GroupVersion().WithKind(kind.Kind+"List"), meta.RESTScopeNamespace)
	}
	return m, nil
}

// trim cuts down the slices that come into the cache.
func trim(obj any) (any, error) {
	if es, ok := obj.(*discoveryv1.EndpointSlice); ok {
		mcs.Trim(es)
	}
	return obj, nil
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

func clusterKeys(obj client.Object) []string { return []string{string(mcs.OwnerOf(obj))} }

// Start fills the cache and keeps it current until ctx ends. A manager runs it like any other work, not
// as one of its caches: those it waits for before anything else, and while it waits it cannot be stopped.
func (b *Broker) Start(ctx context.Context) error {
	b.running = ctx
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return b.exportsOf.Run(ctx) })
	group.Go(func() error { return b.slicesOf.Run(ctx) })
	group.Go(func() error { return b.cluster.Start(ctx) })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("watch broker %s: %w", b.cfg.REST.Host, err)
	}
	return nil
}

// Client writes to the broker.
func (b *Broker) Client() client.Client { return b.cached }

// NeedLeaderElection tells the manager that a standby fills its cache too, so that it can take over at
// once.
func (b *Broker) NeedLeaderElection() bool { return false }

// Exports returns what all members say about a Service, in no particular order. A record that cannot be
// read, or is of nobody in the roster, counts as absent and is logged once: its member harms only itself.
// Nobody's export is older than his membership.
func (b *Broker) Exports(ctx context.Context, name clusterset.ServiceName) ([]clusterset.Export, error) {
	var records v1alpha1.ExportRecordList
	if err := b.cached.List(ctx, &records, client.InNamespace(b.cfg.Namespace), client.MatchingFields{byService: name.String()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list export records of %s: %w", name, err)
	}
	var exports []clusterset.Export
	for i := range records.Items {
		r := &records.Items[i]
		if mcs.Withdrawn(r) {
			continue
		}
		e, err := b.vetted(r)
		if err != nil {
			b.roster.complain(r.Name+r.ResourceVersion, err)
			continue
		}
		exports = append(exports, e)
	}
	return exports, nil
}

// vetted reads a record and leaves of it what its member may say.
func (b *Broker) vetted(r *v1alpha1.ExportRecord) (clusterset.Export, error) {
	e, err := mcs.ParseRecord(r)
	if err != nil {
		return clusterset.Export{}, err
	}
	roster := b.Roster()
	if _, ok := roster.Member(e.Cluster); !ok {
		return clusterset.Export{}, fmt.Errorf("export record %s: cluster %s is not a member", r.Name, e.Cluster)
	}
	if b.cfg.BrokerTime {
		e.ExportedAt = r.CreationTimestamp.UTC()
	}
	e.ExportedAt = roster.ExportedAt(e.Cluster, e.ExportedAt)
	if e.Cluster == b.cfg.Self {
		return e, nil
	}
	e.IPs = slices.DeleteFunc(e.IPs, func(a netip.Addr) bool { return roster.CheckRemembered(e.Cluster, a) != nil })
	return e, nil
}

// Vet returns e, what this member is about to publish, as the others will take it.
func (b *Broker) Vet(ctx context.Context, e clusterset.Export) (clusterset.Export, error) {
	if b.cfg.BrokerTime {
		var have v1alpha1.ExportRecord
		err := b.cached.Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.RecordName(e.Cluster, e.Service)}, &have)
		switch {
		case apierrors.IsNotFound(err) || err == nil && mcs.Withdrawn(&have):
			e.ExportedAt = time.Now().UTC()
		case err != nil:
			return e, wrap("read export record", have.Name, err)
		default:
			e.ExportedAt = have.CreationTimestamp.UTC()
		}
	}
	e.ExportedAt = b.Roster().ExportedAt(e.Cluster, e.ExportedAt)
	return e, nil
}

// Services returns the Services of a namespace about which there is a record.
func (b *Broker) Services(ctx context.Context, namespace string) ([]clusterset.ServiceName, error) {
	return b.services(ctx, client.MatchingFields{byNamespace: namespace})
}

// services returns the Services of the records that match.
func (b *Broker) services(ctx context.Context, match ...client.ListOption) ([]clusterset.ServiceName, error) {
	var records v1alpha1.ExportRecordList
	if err := b.cached.List(ctx, &records, append(match, client.InNamespace(b.cfg.Namespace), client.UnsafeDisableDeepCopy)...); err != nil {
		return nil, fmt.Errorf("list export records: %w", err)
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

// Slices returns the EndpointSlices of all members for a Service, as mcs.BrokerSlice made them and as far as
// their member may speak for the addresses. They are the caller's to read.
func (b *Broker) Slices(ctx context.Context, name clusterset.ServiceName) ([]discoveryv1.EndpointSlice, error) {
	all, err := b.slices(ctx, name)
	if err != nil {
		return nil, err
	}
	roster := b.Roster()
	for i := range all {
		es := &all[i]
		owner := mcs.OwnerOf(es)
		check := func(a netip.Addr) error { return roster.CheckEndpoint(owner, a) }
		if refused := mcs.Vet(es, check); len(refused) > 0 {
			b.roster.complain(es.Name+es.ResourceVersion, fmt.Errorf("%d endpoints of broker slice %s are not believed: %w", len(refused), es.Name, refused[0]))
		}
	}
	return all, nil
}

// slices returns the EndpointSlices of all members for a Service whose names are those of their owners. The
// list of endpoints of each is a copy, what is in it is not.
func (b *Broker) slices(ctx context.Context, name clusterset.ServiceName) ([]discoveryv1.EndpointSlice, error) {
	var list discoveryv1.EndpointSliceList
	if err := b.cached.List(ctx, &list, client.InNamespace(b.cfg.Namespace), client.MatchingFields{byService: name.String()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list broker slices of %s: %w", name, err)
	}
	kept := slices.DeleteFunc(slices.Clone(list.Items), func(es discoveryv1.EndpointSlice) bool {
		return !strings.HasPrefix(es.Name, mcs.RecordName(mcs.OwnerOf(&es), name)+"-")
	})
	for i := range kept {
		kept[i].Endpoints = slices.Clone(kept[i].Endpoints)
	}
	return kept, nil
}

// foreignClaims is how many addresses of this member's blocks another member may hold by records alone,
// without an aggregate: enough for what somebody deleted by mistake, too few to use the blocks up.
const foreignClaims = 256

// Held calls hold for each Service with the addresses that an aggregate or a record says it has, tombstones
// among them: what must not be given to anybody else. A Service may be reported several times.
func (b *Broker) Held(ctx context.Context, hold func(clusterset.ServiceName, []netip.Addr)) error {
	var aggregates v1beta1.ServiceImportList
	if err := b.cached.List(ctx, &aggregates, client.InNamespace(b.cfg.Namespace)); err != nil {
		return fmt.Errorf("list aggregates: %w", err)
	}
	known := map[clusterset.ServiceName]bool{}
	for i := range aggregates.Items {
		a, err := mcs.ParseAggregate(&aggregates.Items[i])
		if err != nil {
			b.cfg.Log.Warn("aggregate ignored", "err", err)
			continue
		}
		known[a.Service] = true
		hold(a.Service, a.IPs)
	}
	var records v1alpha1.ExportRecordList
	if err := b.cached.List(ctx, &records, client.InNamespace(b.cfg.Namespace)); err != nil {
		return fmt.Errorf("list export records: %w", err)
	}
	claims := map[clusterset.ClusterID]int{}
	for i := range records.Items {
		e, err := mcs.ParseRecord(&records.Items[i])
		if err != nil {
			b.cfg.Log.Warn("export ignored", "err", err)
			continue
		}
		if known[e.Service] || len(e.IPs) == 0 {
			continue
		}
		if claims[e.Cluster]++; e.Cluster != b.cfg.Self && claims[e.Cluster] > foreignClaims {
			continue
		}
		hold(e.Service, e.IPs)
	}
	return nil
}

// Tombstone returns until when the addresses of a Service that nobody exports are kept from others, given
// how long that is after a withdrawal. It is the zero time when nobody has withdrawn it lately.
func (b *Broker) Tombstone(ctx context.Context, name clusterset.ServiceName, quarantine time.Duration) (time.Time, error) {
	var records v1alpha1.ExportRecordList
	if err := b.cached.List(ctx, &records, client.InNamespace(b.cfg.Namespace), client.MatchingFields{byService: name.String()}, client.UnsafeDisableDeepCopy); err != nil {
		return time.Time{}, fmt.Errorf("list export records of %s: %w", name, err)
	}
	var until time.Time
	for i := range records.Items {
		if r := &records.Items[i]; mcs.Withdrawn(r) {
			// Whose clock runs ahead does not keep an address for longer than anybody else.
			end := earlier(r.Spec.WithdrawnAt.Time, time.Now()).Add(quarantine)
			if end.After(until) {
				until = end
			}
		}
	}
	return until, nil
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// wrap names the action and the object in a non-nil error.
func wrap(action, name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", action, name, err)
}
