package client

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/propagation"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// registry caches the registrations. It keeps a registration that vanishes: a member leaves by setting leftAt, and a broker
// that lost its objects must not exclude every member.
type registry struct {
	log     *slog.Logger
	current atomic.Pointer[clusterset.MemberRegistry]

	mu      sync.Mutex
	ranges  []netip.Prefix
	members map[clusterset.ClusterID]clusterset.Member
	// extensions are the CIDRs to which members extended themselves. They stay while a Lease is missing, like a registration.
	extensions map[clusterset.ClusterID]extension
	// warned are the versions of each member's objects that have been logged; those of aggregates are under "".
	warned map[clusterset.ClusterID]map[string]struct{}
}

// extension is what a member's Lease states of its pod CIDRs, since a time.
type extension struct {
	cidrs []netip.Prefix
	since time.Time
}

// extendInterval is the shortest time between two extensions of a member that count. A change that comes earlier counts at a later
// renewal. Without it, a hostile member that changes its Lease at every request would have all its Services reconciled each time.
const extendInterval = 3 * time.Second

// extend takes the pod CIDRs that a member states, and reports whether other addresses are valid by that.
func (r *registry) extend(id clusterset.ClusterID, stated string, now time.Time) bool {
	cidrs := clusterset.ParsePrefixes(stated)
	r.mu.Lock()
	defer r.mu.Unlock()
	was, known := r.extensions[id]
	if slices.Equal(cidrs, was.cidrs) || known && now.Sub(was.since) < extendInterval {
		return false
	}
	if r.extensions == nil {
		r.extensions = map[clusterset.ClusterID]extension{}
	}
	r.extensions[id] = extension{cidrs, now}
	before, _ := r.members[id].Beyond(was.cidrs)
	if after, _ := r.members[id].Beyond(cidrs); slices.Equal(before, after) {
		return false
	}
	r.rebuild()
	return true
}

// maxWarned bounds warned for a member; when it is full, every warning about the member is logged once more.
const maxWarned = 1000

// warnOnce logs a warning about an object of a member once for each version of the object, and reports whether it did.
func (r *registry) warnOnce(id clusterset.ClusterID, version string, err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, warned := r.warned[id][version]; warned {
		return false
	}
	if r.warned == nil {
		r.warned = map[clusterset.ClusterID]map[string]struct{}{}
	}
	if r.warned[id] == nil || len(r.warned[id]) >= maxWarned {
		r.warned[id] = map[string]struct{}{}
	}
	r.warned[id][version] = struct{}{}
	r.log.Warn("a part of an object on the broker is ignored", "err", err)
	return true
}

// Registry returns the current members of the ClusterSet.
func (b *Broker) Registry() *clusterset.MemberRegistry {
	if r := b.registry.current.Load(); r != nil {
		return r
	}
	return &clusterset.MemberRegistry{}
}

// left reports whether id has left the ClusterSet.
func (r *registry) left(id clusterset.ClusterID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	m, ok := r.members[id]
	return ok && !m.LeftAt.IsZero()
}

func (b *Broker) member(obj *v1alpha1.Member, first bool) {
	m, err := mcs.Member(obj)
	if err != nil {
		b.cfg.Log.Error("a registration is invalid; correct it with isthmusctl member set", "err", err)
		return
	}
	r := &b.registry
	r.mu.Lock()
	if r.members == nil {
		r.members = map[clusterset.ClusterID]clusterset.Member{}
	}
	before, known := r.members[m.ID]
	r.members[m.ID] = m
	if !m.LeftAt.IsZero() {
		delete(r.warned, m.ID)
		delete(r.extensions, m.ID)
	}
	r.rebuild()
	r.mu.Unlock()

	left := !m.LeftAt.IsZero()
	switch {
	case known && !before.LeftAt.IsZero() == left:
	case left:
		b.exportsOf.Forget(m.ID)
		b.slicesOf.Forget(m.ID)
		b.sliceEvents.left(m.ID)
		b.quotas.left(m.ID)
		b.changes.Send(b.pacer.forget(m.ID)...)
		refused.DeletePartialMatch(prometheus.Labels{"source_cluster": string(m.ID)})
		propagation.Forget(m.ID)
		b.cfg.Left(m.ID, true)
		b.cfg.Log.Info("a member left", "cluster", string(m.ID))
	default:
		b.cfg.Left(m.ID, false)
	}
	if first {
		return // no import has been reconciled yet
	}
	for _, id := range b.allMembers() { // their addresses may have become valid or invalid
		b.ReconcileMember(id)
	}
}

func (b *Broker) memberDeleted(obj *v1alpha1.Member) {
	if obj.Spec.LeftAt == nil {
		b.cfg.Log.Error("the registration of a member vanished from the broker and is still used; run isthmusctl leave --force if the member has left", "cluster", obj.Name)
	}
}

func (b *Broker) config(obj *v1alpha1.ClusterSetConfig, _ bool) {
	b.quotas.setLimits(quota.Limits(obj.Spec.Quotas))
	b.pacer.setLimit(quota.ChangesPerMinute(obj.Spec.Quotas))
	ranges, err := mcs.Prefixes("spec.clustersetIPCIDRRange", obj.Spec.ClusterSetIPCIDRRange)
	if err != nil {
		b.cfg.Log.Error("the ClusterSetConfig is invalid; correct it with isthmusctl deploy-broker", "err", err)
		return
	}
	b.registry.mu.Lock()
	defer b.registry.mu.Unlock()
	b.registry.ranges = ranges
	b.registry.rebuild()
}

// rebuild replaces current. The lock is held.
func (r *registry) rebuild() {
	var members []clusterset.Member
	for _, m := range r.members {
		m.Extended = r.extensions[m.ID].cidrs
		members = append(members, m)
	}
	r.current.Store(clusterset.NewMemberRegistry(r.ranges, members))
}

// Members returns the ids of the present members, sorted.
func (b *Broker) Members() []clusterset.ClusterID {
	registry := b.Registry()
	return slices.DeleteFunc(b.allMembers(), func(id clusterset.ClusterID) bool {
		_, ok := registry.Member(id)
		return !ok
	})
}

// allMembers returns the ids of present and former members, sorted.
func (b *Broker) allMembers() []clusterset.ClusterID {
	b.registry.mu.Lock()
	defer b.registry.mu.Unlock()
	return slices.Sorted(maps.Keys(b.registry.members))
}

// Registration returns the registration of this member, and whether it exists and has not left.
func (b *Broker) Registration(ctx context.Context) (v1alpha1.MemberSpec, bool, error) {
	var m v1alpha1.Member
	err := b.cluster.GetClient().Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: string(b.cfg.Self)}, &m)
	if err != nil {
		return v1alpha1.MemberSpec{}, false, client.IgnoreNotFound(err)
	}
	return m.Spec, m.Spec.LeftAt == nil, nil
}

// Registrations returns sources that enqueue self when this member's registration or the ClusterSetConfig changes.
func (b *Broker) Registrations(self reconcile.Request) []source.Source {
	enqueue := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, obj client.Object) []reconcile.Request {
		if _, ok := obj.(*v1alpha1.Member); ok && obj.GetName() != string(b.cfg.Self) {
			return nil
		}
		return []reconcile.Request{self}
	})
	return []source.Source{
		source.Kind(b.cluster.GetCache(), client.Object(&v1alpha1.Member{}), enqueue),
		source.Kind(b.cluster.GetCache(), client.Object(&v1alpha1.ClusterSetConfig{}), enqueue),
	}
}

// Ranges returns the ranges of all ClusterSetIPs; none while the broker has no valid ClusterSetConfig.
func (b *Broker) Ranges(ctx context.Context) ([]netip.Prefix, error) {
	var config v1alpha1.ClusterSetConfig
	err := b.cluster.GetClient().Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: v1alpha1.ClusterSetConfigName}, &config)
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	ranges, err := mcs.Prefixes("spec.clustersetIPCIDRRange", config.Spec.ClusterSetIPCIDRRange)
	if err != nil {
		return nil, nil //nolint:nilerr // config has logged it
	}
	return ranges, nil
}
