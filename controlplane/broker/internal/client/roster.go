package client

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// roster follows the registrations. One that vanishes counts on as it was: members leave by saying so, and
// a broker that lost its objects must not make strangers of everybody.
type roster struct {
	log     *slog.Logger
	current atomic.Pointer[clusterset.Roster]

	mu         sync.Mutex
	ranges     []netip.Prefix
	members    map[clusterset.ClusterID]clusterset.Member
	complaints map[string]bool // about what has been logged
}

// maxComplaints bounds what is remembered of them; then everything is said once more.
const maxComplaints = 10_000

// complain logs something about an object once for each of its versions.
func (r *roster) complain(version string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.complaints[version] {
		return
	}
	if len(r.complaints) >= maxComplaints || r.complaints == nil {
		r.complaints = map[string]bool{}
	}
	r.complaints[version] = true
	r.log.Warn("something on the broker is ignored", "err", err)
}

// Roster returns who belongs to the ClusterSet now.
func (b *Broker) Roster() *clusterset.Roster {
	if r := b.roster.current.Load(); r != nil {
		return r
	}
	return &clusterset.Roster{}
}

// left reports whether id has left.
func (r *roster) left(id clusterset.ClusterID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	m, ok := r.members[id]
	return ok && !m.LeftAt.IsZero()
}

func (b *Broker) member(obj *v1alpha1.Member, first bool) {
	m, err := mcs.Member(obj)
	if err != nil {
		b.cfg.Log.Error("a registration cannot be used; correct it by isthmusctl member set", "err", err)
		return
	}
	r := &b.roster
	r.mu.Lock()
	if r.members == nil {
		r.members = map[clusterset.ClusterID]clusterset.Member{}
	}
	before, known := r.members[m.ID]
	r.members[m.ID] = m
	r.renew()
	r.mu.Unlock()

	left := !m.LeftAt.IsZero()
	switch {
	case known && !before.LeftAt.IsZero() == left:
	case left:
		b.exportsOf.Forget(m.ID)
		b.slicesOf.Forget(m.ID)
		b.cfg.Left(m.ID, true)
		b.cfg.Log.Info("a member left", "cluster", string(m.ID))
	default:
		b.cfg.Left(m.ID, false)
	}
	if first {
		return // nothing has been considered yet
	}
	for _, id := range b.everybody() { // others' addresses may count now, or no longer
		b.Reconsider(id)
	}
}

func (b *Broker) memberGone(obj *v1alpha1.Member) {
	if obj.Spec.LeftAt == nil {
		b.cfg.Log.Error("the registration of a member vanished from the broker; it counts on as it was, run isthmusctl leave --force if it has left", "cluster", obj.Name)
	}
}

func (b *Broker) config(obj *v1alpha1.ClusterSetConfig, _ bool) {
	ranges, err := mcs.Prefixes("spec.clustersetIPCIDRRange", obj.Spec.ClusterSetIPCIDRRange)
	if err != nil {
		b.cfg.Log.Error("the ClusterSetConfig cannot be used; correct it by isthmusctl deploy-broker", "err", err)
		return
	}
	b.roster.mu.Lock()
	defer b.roster.mu.Unlock()
	b.roster.ranges = ranges
	b.roster.renew()
}

// renew makes a new roster. The lock is held.
func (r *roster) renew() {
	r.current.Store(clusterset.NewRoster(r.ranges, slices.Collect(maps.Values(r.members))))
}

// Members returns the ids of everybody who has been seen registered, those apart that left, sorted.
func (b *Broker) Members() []clusterset.ClusterID {
	roster := b.Roster()
	return slices.DeleteFunc(b.everybody(), func(id clusterset.ClusterID) bool {
		_, ok := roster.Member(id)
		return !ok
	})
}

// everybody returns the ids of members that are and were, sorted.
func (b *Broker) everybody() []clusterset.ClusterID {
	b.roster.mu.Lock()
	defer b.roster.mu.Unlock()
	return slices.Sorted(maps.Keys(b.roster.members))
}

// Registration returns what the broker says of this member, and whether it says anything.
func (b *Broker) Registration(ctx context.Context) (v1alpha1.MemberSpec, bool, error) {
	var m v1alpha1.Member
	err := b.cluster.GetClient().Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: string(b.cfg.Self)}, &m)
	if err != nil {
		return v1alpha1.MemberSpec{}, false, client.IgnoreNotFound(err)
	}
	return m.Spec, m.Spec.LeftAt == nil, nil
}

// Registrations are sources of self whenever the broker says something about this member, or about all of them.
func (b *Broker) Registrations(self reconcile.Request) []source.Source {
	ask := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, obj client.Object) []reconcile.Request {
		if _, ok := obj.(*v1alpha1.Member); ok && obj.GetName() != string(b.cfg.Self) {
			return nil
		}
		return []reconcile.Request{self}
	})
	return []source.Source{
		source.Kind(b.cluster.GetCache(), client.Object(&v1alpha1.Member{}), ask),
		source.Kind(b.cluster.GetCache(), client.Object(&v1alpha1.ClusterSetConfig{}), ask),
	}
}

// Ranges returns where the ClusterSetIPs of all members come from, nothing while the broker does not say so.
func (b *Broker) Ranges(ctx context.Context) ([]netip.Prefix, error) {
	var config v1alpha1.ClusterSetConfig
	err := b.cluster.GetClient().Get(ctx, types.NamespacedName{Namespace: b.cfg.Namespace, Name: v1alpha1.ClusterSetConfigName}, &config)
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	ranges, err := mcs.Prefixes("spec.clustersetIPCIDRRange", config.Spec.ClusterSetIPCIDRRange)
	if err != nil {
		return nil, nil //nolint:nilerr // config has said so
	}
	return ranges, nil
}
