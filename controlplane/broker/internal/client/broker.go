// Package client reads and writes a broker: one namespace of a Kubernetes API server that all members reach. It takes
// this member's Exports and Aggregates, and returns those of all members; the Kubernetes kinds and names that carry them
// stay inside.
//
// Reads come from caches that keep their content while the broker is away, and that no caller reads before they are
// complete. Writes go to the broker, and only where something differs.
package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
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
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/statement"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// Config identifies the broker and this member.
type Config struct {
	REST      *rest.Config
	Namespace string
	Self      clusterset.ClusterID
	// BrokerTime dates an export by the creation of its record on the broker instead of by its own claim.
	BrokerTime bool
	// Remembered returns the places in the order of precedence that this member believed before, as recorded on the imports of
	// a Service.
	Remembered func(clusterset.ServiceName) map[clusterset.ClusterID]time.Time
	// LeaseRenewed receives the renewTime of each Lease that a member writes, LeaseDeleted a member whose Lease is gone.
	LeaseRenewed func(clusterset.ClusterID, time.Time)
	LeaseDeleted func(clusterset.ClusterID)
	// Left receives a member that left, or that joined again after that.
	Left func(id clusterset.ClusterID, left bool)
	// CredentialEnded returns why the broker refuses a token that has expired, and the remedy; "" if it has not. Nil means none.
	CredentialEnded func() string
	// Hold are the times of the withdrawal guards, and Decided receives their decisions.
	Hold    withdrawal.Times
	Decided func(withdrawal.Decision)
	Log     *slog.Logger
}

// Broker reads and writes the broker's objects for one member. Start fills its caches. Safe for concurrent use.
type Broker struct {
	cfg     Config
	cluster cluster.Cluster // caches the small kinds
	client  client.WithWatch

	records    *objectcache.Informer[*record, clusterset.ServiceName]
	slices     *objectcache.Informer[*mcs.Packed, clusterset.ServiceName]
	aggregates *objectcache.Informer[*aggregate, clusterset.ServiceName]

	registry    registry
	sliceEvents sliceEvents
	quotas      *quotas
	tombstones  atomic.Int64 // of this member
	bareUntil   atomic.Int64 // until when slices are written without regions, in nanoseconds since 1970
	pacer       *pacer
	changes     objectcache.Trigger
	exportsOf   *withdrawal.Guard[clusterset.ServiceName] // records
	slicesOf    *withdrawal.Guard[ImportedSlice]          // slices that have endpoints
	statements  statement.Tracker                         // of members about both
	synced      []toolscache.ResourceEventHandlerRegistration
}

// record is the cached form of an ExportRecord.
type record struct {
	owner     clusterset.ClusterID
	service   clusterset.ServiceName
	uid       types.UID
	created   time.Time
	withdrawn time.Time // zero unless it is a tombstone
	export    clusterset.Export
	omitted   []mcs.Omission // the parts that export lacks
	err       error          // the reason why export is not valid
	digest    mcs.Digest

	ports  int  // of the export
	bytes  int  // of its labels and annotations
	labels int  // the bytes of its Service's labels
	stub   bool // export has only names, times and IPs
}

func (r *record) isWithdrawn() bool { return r != nil && !r.withdrawn.IsZero() }

// aggregate is the cached form of a ServiceImport on the broker.
type aggregate struct {
	clusterset.Aggregate

	omitted []mcs.Omission // the parts that Aggregate lacks
	err     error          // the reason why Aggregate is not valid
}

// New prepares a Broker. It sends no request, so it succeeds while the broker is away.
func New(ctx context.Context, cfg Config) (*Broker, error) {
	scheme := runtime.NewScheme()
	err := errors.Join(v1alpha1.AddToScheme(scheme), v1beta1.Install(scheme), discoveryv1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme))
	if err != nil {
		return nil, fmt.Errorf("register the broker's kinds: %w", err)
	}
	b := &Broker{cfg: cfg, quotas: newQuotas(cfg.Self), pacer: newPacer()}
	b.registry.log = cfg.Log
	b.cluster, err = cluster.New(cfg.REST, func(o *cluster.Options) {
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
	b.client, err = client.NewWithWatch(cfg.REST, client.Options{HTTPClient: b.cluster.GetHTTPClient(), Scheme: scheme, Mapper: b.cluster.GetRESTMapper()})
	if err != nil {
		return nil, fmt.Errorf("prepare broker %s: %w", cfg.REST.Host, err)
	}
	b.exportsOf = newGuard(cfg, func(_ clusterset.ClusterID, names []clusterset.ServiceName) { b.changes.Send(names...) })
	b.slicesOf = newGuard(cfg, func(id clusterset.ClusterID, gone []ImportedSlice) {
		for _, s := range gone {
			if !b.slicesOf.Keeps(id, s) { // it may have vanished again
				b.sliceEvents.settled(id, s)
			}
			b.changes.Send(s.Service)
		}
	})
	if err := b.createCaches(scheme); err != nil {
		return nil, err
	}
	return b, b.watch(ctx)
}

// createCaches prepares the caches of the large kinds.
func (b *Broker) createCaches(scheme *runtime.Scheme) error {
	var errs [3]error
	b.records, errs[0] = objectcache.New(scheme, objectcache.Config[*record, clusterset.ServiceName]{
		Source:  objectcache.Source{Object: &v1alpha1.ExportRecord{}, Namespace: b.cfg.Namespace},
		Compact: func(obj client.Object) *record { return b.arriveRecord(obj.(*v1alpha1.ExportRecord)) }, //nolint:forcetypeassert // Object says so
		Index:   func(r *record) (clusterset.ServiceName, bool) { return r.service, r.service.Name != "" },
		Before:  b.recordChanges,
		After: func(was, is *record, listed bool) {
			r := objectcache.Either(was, is)
			b.changed(r.owner, r.service, listed)
		},
	})
	b.slices, errs[1] = objectcache.New(scheme, objectcache.Config[*mcs.Packed, clusterset.ServiceName]{
		Source:  objectcache.Source{Object: &discoveryv1.EndpointSlice{}, Namespace: b.cfg.Namespace},
		Compact: func(obj client.Object) *mcs.Packed { return b.arriveSlice(obj.(*discoveryv1.EndpointSlice)) }, //nolint:forcetypeassert // Object says so
		Index:   func(p *mcs.Packed) (clusterset.ServiceName, bool) { return p.Service, p.Service.Name != "" },
		Before:  b.sliceChanges,
		After: func(was, is *mcs.Packed, listed bool) {
			p := objectcache.Either(was, is)
			b.changed(p.Owner, p.Service, listed)
		},
	})
	b.aggregates, errs[2] = objectcache.New(scheme, objectcache.Config[*aggregate, clusterset.ServiceName]{
		Source:  objectcache.Source{Object: &v1beta1.ServiceImport{}, Namespace: b.cfg.Namespace},
		Compact: func(obj client.Object) *aggregate { return compactAggregate(obj.(*v1beta1.ServiceImport)) }, //nolint:forcetypeassert // Object says so
		After:   func(was, is *aggregate, listed bool) { b.changed("", objectcache.Either(was, is).Service, listed) },
	})
	return errors.Join(errs[:]...)
}

func compactRecord(r *v1alpha1.ExportRecord) *record {
	c := &record{owner: mcs.OwnerOf(r), uid: r.UID, created: r.CreationTimestamp.UTC(), digest: mcs.RecordDigest(r)}
	c.service, _ = mcs.ServiceOf(r)
	if r.Spec.WithdrawnAt != nil {
		c.withdrawn = r.Spec.WithdrawnAt.UTC()
	}
	if c.export, c.omitted, c.err = mcs.ParseRecord(r); c.err == nil {
		c.export.Cluster, c.export.Service = c.owner, c.service // share the strings
		size := quota.RecordOf(c.export, c.created)
		c.ports, c.bytes, c.labels = size.Ports, size.Bytes, size.Labels
	}
	return c
}

func compactAggregate(si *v1beta1.ServiceImport) *aggregate {
	a := &aggregate{}
	a.Aggregate, a.omitted, a.err = mcs.ParseAggregate(si)
	if a.err != nil {
		a.Service, _ = mcs.ServiceOf(si)
	}
	return a
}

func newGuard[K comparable](cfg Config, changed func(clusterset.ClusterID, []K)) *withdrawal.Guard[K] {
	return withdrawal.New(withdrawal.Config[K]{
		Times: cfg.Hold, Changed: changed, Decided: cfg.Decided, Log: cfg.Log,
	})
}

// staticMapper maps the kinds that this package uses to their resources, so that the caches start without API discovery.
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

// Start fills the caches and keeps them current until ctx ends. A manager runs it as a runnable rather than as a cache: it
// waits for its caches before anything else, and cannot be stopped while it waits.
func (b *Broker) Start(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return b.exportsOf.Run(ctx) })
	group.Go(func() error { return b.slicesOf.Run(ctx) })
	group.Go(func() error { return b.cluster.Start(ctx) })
	group.Go(func() error { return b.runQuotas(ctx) })
	group.Go(func() error { return b.runPacer(ctx) })
	group.Go(func() error { return b.records.Run(ctx, b.client) })
	group.Go(func() error { return b.slices.Run(ctx, b.client) })
	group.Go(func() error { return b.aggregates.Run(ctx, b.client) })
	if err := group.Wait(); err != nil {
		return fmt.Errorf("watch broker %s: %w", b.cfg.REST.Host, err)
	}
	return nil
}

// Client returns the client of the broker.
func (b *Broker) Client() client.Client { return b.client }

// NeedLeaderElection tells the manager that a standby fills its caches too, so that it can take over at once.
func (b *Broker) NeedLeaderElection() bool { return false }

// Exports returns the exports of a Service by all members, in no particular order. It logs an invalid record once and
// treats it as absent, so that its member harms only itself. It ignores records of clusters outside of the member
// registry, and those that wait for a quota of their member. clusterset.MemberRegistry.Place tells from when each one counts.
func (b *Broker) Exports(name clusterset.ServiceName) []clusterset.Export {
	registry, place := b.Registry(), b.places(name)
	var exports []clusterset.Export
	for _, r := range b.recordsOf(name) {
		if _, ok := registry.Member(r.owner); !ok || r.isWithdrawn() {
			continue
		}
		if r.err != nil {
			b.refuse(r.owner, kindRecord, string(r.uid)+r.err.Error(), r.err)
			continue
		}
		if r.stub || !b.quotas.admits(r.owner, r.service) {
			continue
		}
		for _, o := range r.omitted {
			b.refuse(r.owner, o.Kind(), fmt.Sprint(r.uid, r.digest, o.Field), fmt.Errorf("export record of %s by %s: %w", name, r.owner, o))
		}
		exports = append(exports, b.vetExport(registry, r, place))
	}
	return exports
}

// recordsOf returns the records of present and former members about a Service. A record's name contains its owner, which
// the broker's admission policies and mcs.ParseRecord enforce.
func (b *Broker) recordsOf(name clusterset.ServiceName) []*record {
	var all []*record
	for _, id := range b.allMembers() {
		if r := b.record(id, name); r != nil {
			all = append(all, r)
		}
	}
	return all
}

// record returns the record of member id about a Service, or nil.
func (b *Broker) record(id clusterset.ClusterID, name clusterset.ServiceName) *record {
	return b.records.Get(b.cfg.Namespace, mcs.RecordName(id, name))
}

// vetExport returns the export of a record without claims that its member may not make.
func (b *Broker) vetExport(registry *clusterset.MemberRegistry, r *record, place placeFunc) clusterset.Export {
	e := r.export
	e.ExportedAt = place(registry, e.Cluster, e.ExportedAt, r.created)
	if e.Cluster != b.cfg.Self {
		e.IPs = slices.DeleteFunc(slices.Clone(e.IPs), func(a netip.Addr) bool { return registry.CheckRemembered(e.Cluster, a) != nil })
	}
	return e
}

// placeFunc returns the time from which an export counts that claims a time, and whose record the broker first had at
// another.
type placeFunc func(registry *clusterset.MemberRegistry, id clusterset.ClusterID, claimed, written time.Time) time.Time

// places returns the placeFunc of a Service. It looks into the memory of this member only for an export whose record is not
// as old as its claim.
func (b *Broker) places(name clusterset.ServiceName) placeFunc {
	remembered := sync.OnceValue(func() map[clusterset.ClusterID]time.Time { return b.cfg.Remembered(name) })
	return func(registry *clusterset.MemberRegistry, id clusterset.ClusterID, claimed, written time.Time) time.Time {
		claim := clusterset.Claim{Exported: claimed, Written: written}
		if b.cfg.BrokerTime {
			claim.Exported = time.Time{}
		}
		if written.Sub(claim.Exported) > clusterset.PrecedenceWindow {
			claim.Remembered = remembered()[id]
		}
		return registry.Place(id, claim)
	}
}

// Vet returns e, which this member is about to publish, as the other members will read it.
func (b *Broker) Vet(e clusterset.Export) clusterset.Export {
	written := time.Now().UTC()
	if r := b.record(e.Cluster, e.Service); r != nil && !r.isWithdrawn() {
		written = r.created
	}
	e.ExportedAt = b.places(e.Service)(b.Registry(), e.Cluster, e.ExportedAt, written)
	return e
}

// Services returns the Services of a namespace that have a record.
func (b *Broker) Services(namespace string) []clusterset.ServiceName {
	return b.services(func(r *record) bool { return r.service.Namespace == namespace })
}

// services returns the Services of the matching records, sorted.
func (b *Broker) services(match func(*record) bool) []clusterset.ServiceName {
	var names []clusterset.ServiceName
	for _, r := range b.records.All() {
		if match(r) && r.service.Name != "" {
			names = append(names, r.service)
		}
	}
	slices.SortFunc(names, clusterset.ServiceName.Compare)
	return slices.Compact(names)
}

// Slices returns the EndpointSlices of all members for a Service, as made by mcs.BrokerSlice, without endpoints that this
// member must not use, and without slices that wait for a quota of their member. declined tells that the Service declined a
// ClusterSetIP. The caller owns the slices.
func (b *Broker) Slices(name clusterset.ServiceName, declined bool) []*discoveryv1.EndpointSlice {
	registry := b.Registry()
	var all []*discoveryv1.EndpointSlice
	for _, p := range b.packed(name) {
		if p.IsStub() || !b.quotas.admits(p.Owner, p.Name) {
			continue
		}
		es := p.Unpack()
		for _, o := range p.Omitted {
			b.refuse(p.Owner, o.Kind(), fmt.Sprint(p.Name, p.Digest, o.Field), fmt.Errorf("broker slice %s: %w", p.Name, o))
		}
		check := func(a netip.Addr) error { return registry.CheckEndpointFor(b.cfg.Self, p.Owner, a, declined) }
		if refused := mcs.Vet(es, check); len(refused) > 0 {
			b.refuse(p.Owner, kindAddress, fmt.Sprint(p.Name, p.Digest), fmt.Errorf("%d endpoints of broker slice %s are ignored: %w", len(refused), p.Name, refused[0]))
		}
		all = append(all, es)
	}
	return all
}

// packed returns the slices of all members for a Service, without those whose name does not match their owner.
func (b *Broker) packed(name clusterset.ServiceName) []*mcs.Packed {
	return slices.DeleteFunc(b.slices.Indexed(name), func(p *mcs.Packed) bool {
		return !strings.HasPrefix(p.Name, mcs.RecordName(p.Owner, name)+"-")
	})
}

// foreignClaims is how many addresses of this member's blocks another member may hold by records alone, without an
// aggregate: enough to restore aggregates deleted by mistake, too few to exhaust the blocks.
const foreignClaims = 256

// ReservedIPs calls reserve for each Service with the addresses that its aggregate or a record names, tombstones included:
// no other Service may get them. It may report a Service several times.
func (b *Broker) ReservedIPs(reserve func(clusterset.ServiceName, []netip.Addr)) {
	known := map[clusterset.ServiceName]bool{}
	for _, a := range b.aggregates.All() {
		if a.err != nil {
			b.cfg.Log.Warn("aggregate ignored", "err", a.err)
			continue
		}
		known[a.Service] = true
		reserve(a.Service, a.IPs)
	}
	claims := map[clusterset.ClusterID]int{}
	for _, r := range b.records.All() {
		if r.err != nil || known[r.service] || len(r.export.IPs) == 0 {
			continue
		}
		if claims[r.owner]++; r.owner != b.cfg.Self && claims[r.owner] > foreignClaims {
			continue
		}
		reserve(r.service, r.export.IPs)
	}
}

// Tombstone returns the end of the quarantine of a Service's addresses, given the quarantine after a withdrawal. It is zero
// if the Service has no tombstone.
func (b *Broker) Tombstone(name clusterset.ServiceName, quarantine time.Duration) time.Time {
	var until time.Time
	for _, r := range b.recordsOf(name) {
		if !r.isWithdrawn() {
			continue
		}
		// A member whose clock is ahead must not extend the quarantine.
		if end := earlier(r.withdrawn, time.Now()).Add(quarantine); end.After(until) {
			until = end
		}
	}
	return until
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// wrap adds the action and the object to a non-nil error.
func wrap(action, name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", action, name, err)
}
