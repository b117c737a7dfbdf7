package engine

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/election"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// managedMember is a member with its caches and this process's candidacy for its Lease.
type managedMember struct {
	*member.Member

	views     []*view // one for each Reconciler
	candidate *election.Candidate
	unfenced  atomic.Bool // this process leads it, and it does not reject writes of former leaders
	events    *EventWriter
	cancel    context.CancelFunc
	ended     chan struct{}
}

// view is a member as one Reconciler sees it: a reconcile.Member.
type view struct {
	*member.Member
	*objectcache.Cache

	isDead  func(clusterset.ClusterID) bool
	watches []reconcile.Watch
	keys    memo[[]reconcile.Key] // sharedKeys
	count   memo[int]             // counted
}

// Dead is part of reconcile.Member.
func (v *view) Dead() bool { return v.isDead(v.ID()) }

// add starts to manage one more member. pinned is the uid of the cluster that was last seen under its id.
func (e *Engine) add(spec federationv1alpha1.MemberCluster, pinned string) (*managedMember, error) {
	m := &managedMember{ended: make(chan struct{})}
	var err error
	m.Member, err = member.New(member.Config{
		Scheme: e.cfg.Scheme, Namespace: federationv1alpha1.SecretNamespace, Interval: e.cfg.Times.Probe, Log: e.cfg.Log, Changed: e.reachabilityChanged,
		Answered: func(m *member.Member) { e.liveness.Renewed(m.ID(), time.Now()) },
	}, spec, pinned)
	if err != nil {
		return nil, err
	}
	for i, r := range e.cfg.Reconcilers {
		v, err := e.newView(i, m)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.Name(), err)
		}
		m.views = append(m.views, v)
	}
	if m.events, err = NewEventWriter(m.Config(), e.cfg.LastingReasons); err != nil {
		return nil, err
	}
	lease := types.NamespacedName{Namespace: e.cfg.Namespace, Name: spec.ClusterID}
	m.candidate = election.New(m.Leases(), lease, e.cfg.Identity, e.cfg.Times.Times)
	m.candidate.Say(func() string { return e.ownHolds().String() })
	ctx, cancel := context.WithCancel(e.ctx)
	m.cancel = cancel
	e.mu.Lock()
	e.members[m.ID()] = m
	e.mu.Unlock()
	e.liveness.Expect(m.ID())
	e.running.Go(func() { e.run(ctx, m) })
	return m, nil
}

// newView returns the view that Reconciler i has of a member. Each change of its cache is queued.
func (e *Engine) newView(i int, m *managedMember) (*view, error) {
	v := &view{Member: m.Member, isDead: e.liveness.Dead, watches: e.cfg.Reconcilers[i].Watches()}
	changed := func(kind int, was, is client.Object, listed bool) {
		w := v.watches[kind]
		if w.Deleted != nil && is == nil && !listed {
			w.Deleted(v, was)
		}
		for _, o := range []client.Object{was, is} {
			switch {
			case o == nil:
			case w.Local != nil && w.Local(o):
				e.enqueueAt(i, m.Member, w.Keys(v, o)...)
			default:
				e.enqueue(i, w.Keys(v, o)...)
			}
		}
	}
	settled := func() {
		if !v.Synced() {
			return
		}
		e.enqueue(i, v.sharedKeys()...) // keys that were reconciled before had to wait for this member
		for _, q := range e.queuesOf(m.Member) {
			if q.index == i {
				e.fill(q)
			}
		}
	}
	var err error
	v.Cache, err = objectcache.NewCache(e.cfg.Scheme, reconcile.Kinds(v.watches), changed, settled)
	return v, err
}

// run connects to a member and takes part in the election of its leader until ctx ends.
func (e *Engine) run(ctx context.Context, m *managedMember) {
	defer close(m.ended)
	defer m.events.Shutdown()
	var caches []*objectcache.Cache
	for _, v := range m.views {
		caches = append(caches, v.Cache)
	}
	connected, disconnect := context.WithCancel(context.WithoutCancel(ctx))
	var connection sync.WaitGroup
	connection.Go(func() { m.Run(connected, caches...) })
	// The candidate gives the Lease back before the connection ends.
	if err := m.candidate.Run(ctx, func(ctx context.Context, term fenced.Term) { e.lead(ctx, m, term) }); err != nil {
		e.cfg.Log.Error("no leader of the member can be elected", "member", m.ID(), "err", err)
	}
	disconnect()
	connection.Wait()
}

// sharedKeys returns the keys that have to be reconciled in every member because of this one.
func (v *view) sharedKeys() []reconcile.Key {
	return v.keys.get(v.Cache, func() []reconcile.Key { return v.keysOf(v.EachShared) })
}

// keysOf returns the keys of all objects that each visits.
func (v *view) keysOf(each func(func(kind int, o client.Object))) []reconcile.Key {
	found := map[reconcile.Key]bool{}
	each(func(kind int, o client.Object) {
		for _, key := range v.watches[kind].Keys(v, o) {
			found[key] = true
		}
	})
	return slices.Collect(maps.Keys(found))
}

// counted returns how many objects the Reconciler counts in the member.
func (v *view) counted() int {
	return v.count.get(v.Cache, func() (n int) {
		for kind, w := range v.watches {
			if w.Counted == nil {
				continue
			}
			v.EachOf(kind, func(o client.Object) {
				if w.Counted(o) {
					n++
				}
			})
		}
		return n
	})
}
