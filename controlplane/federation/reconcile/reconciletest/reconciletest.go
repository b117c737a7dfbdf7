// Package reconciletest runs a Reconciler against real API servers without elections. A test sets which member is led in
// which epoch, which members are silent, and when to reconcile. It uses the federation's real cache and writer.
package reconciletest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// Federation is a Reconciler with the members that it runs against.
type Federation struct {
	reconciler reconcile.Reconciler
	watches    []reconcile.Watch
	members    []*Member // sorted by id
}

// New returns a Federation of members with the given API servers. All are reachable supervisors, and none is read yet.
func New(t testing.TB, scheme *runtime.Scheme, r reconcile.Reconciler, servers map[clusterset.ClusterID]*rest.Config) *Federation {
	t.Helper()
	f := &Federation{reconciler: r, watches: r.Watches()}
	for id, config := range servers {
		c, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
		if err != nil {
			t.Fatal(err)
		}
		m := &Member{id: id, client: c}
		if m.Cache, err = objectcache.NewCache(scheme, reconcile.Kinds(f.watches), nil, nil); err != nil {
			t.Fatal(err)
		}
		f.members = append(f.members, m)
	}
	slices.SortFunc(f.members, func(a, b *Member) int { return strings.Compare(string(a.id), string(b.id)) })
	return f
}

// Member returns a member.
func (f *Federation) Member(id clusterset.ClusterID) *Member {
	i := slices.IndexFunc(f.members, func(m *Member) bool { return m.id == id })
	return f.members[i]
}

// Leave removes a member from the federation. Its objects stay.
func (f *Federation) Leave(id clusterset.ClusterID) {
	f.members = slices.DeleteFunc(f.members, func(m *Member) bool { return m.id == id })
}

// Reconcile reads all members that are not silent. It then reconciles every key, in an arbitrary order, in each member of
// into, or in all members that are not silent. It returns all errors.
func (f *Federation) Reconcile(ctx context.Context, into ...clusterset.ClusterID) error {
	var all []reconcile.Member
	var errs []error
	for _, m := range f.members {
		if !m.silent.Load() {
			errs = append(errs, m.read(ctx))
		}
		all = append(all, m)
	}
	shared, local := f.keys()
	for _, m := range f.members {
		if m.silent.Load() || len(into) > 0 && !slices.Contains(into, m.id) {
			continue
		}
		leader := m.Lead(1)
		maps.Copy(local[m], shared)
		for key := range local[m] {
			if err := f.reconciler.Reconcile(ctx, key, leader, all); err != nil {
				errs = append(errs, fmt.Errorf("reconcile %v in %s: %w", key, m.id, err))
			}
		}
	}
	return errors.Join(errs...)
}

// keys returns the keys that matter in all members, and those that matter in one.
func (f *Federation) keys() (shared map[reconcile.Key]bool, local map[*Member]map[reconcile.Key]bool) {
	shared, local = map[reconcile.Key]bool{}, map[*Member]map[reconcile.Key]bool{}
	for _, m := range f.members {
		local[m] = map[reconcile.Key]bool{}
		m.Each(func(kind int, o client.Object) {
			w, keys := f.watches[kind], shared
			if w.Local != nil && w.Local(o) {
				keys = local[m]
			}
			for _, key := range w.Keys(m, o) {
				keys[key] = true
			}
		})
	}
	return shared, local
}

// Member is one member of a Federation. It is a reconcile.Member.
type Member struct {
	*objectcache.Cache

	id     clusterset.ClusterID
	client client.WithWatch
	silent atomic.Bool
	dead   atomic.Bool

	mu     sync.Mutex
	events []string
}

// Count returns how many objects the Reconciler counts in a member.
func (f *Federation) Count(id clusterset.ClusterID) (n int) {
	for kind, w := range f.watches {
		if w.Counted != nil {
			f.Member(id).EachOf(kind, func(o client.Object) {
				if w.Counted(o) {
					n++
				}
			})
		}
	}
	return n
}

// Client returns a client of the member's API server with a user's rights.
func (m *Member) Client() client.WithWatch { return m.client }

// Delete deletes an object as a user does while the Reconciler watches. o is its last state.
func (f *Federation) Delete(ctx context.Context, id clusterset.ClusterID, o client.Object) error {
	if err := f.Member(id).client.Delete(ctx, o); err != nil {
		return err
	}
	return f.Deleted(id, o)
}

// Deleted reports to the Reconciler that an object was deleted while it watched. o was its last state.
func (f *Federation) Deleted(id clusterset.ClusterID, o client.Object) error {
	m := f.Member(id)
	gvk, err := apiutil.GVKForObject(o, m.client.Scheme())
	if err != nil {
		return err
	}
	for kind, w := range f.watches {
		if of, err := apiutil.GVKForObject(w.Object, m.client.Scheme()); err != nil || of != gvk || w.Deleted == nil {
			continue
		}
		if err := m.Informers()[kind].Delete(o); err != nil {
			return err
		}
		w.Deleted(m, o)
	}
	return nil
}

// Silence makes the member unreachable: it is neither read nor written, and its cache stays.
func (m *Member) Silence() { m.silent.Store(true) }

// Kill makes the member unreachable, and its endpoints dead.
func (m *Member) Kill() {
	m.Silence()
	m.dead.Store(true)
}

// Back ends Silence and Kill.
func (m *Member) Back() {
	m.silent.Store(false)
	m.dead.Store(false)
}

// ID is part of reconcile.Member.
func (m *Member) ID() clusterset.ClusterID { return m.id }

// Reachable reports whether the member is not silent.
func (m *Member) Reachable() bool { return !m.silent.Load() }

// Dead reports whether the member was killed.
func (m *Member) Dead() bool { return m.dead.Load() }

// Supervisor returns true.
func (m *Member) Supervisor() bool { return true }

// Lead returns a Writer into the member for an epoch. No Lease is held.
func (m *Member) Lead(epoch int64) reconcile.Writer {
	return fenced.New(m, fenced.Term{Epoch: epoch}, m.client, (*recorder)(m))
}

// Events returns the events since the last call, as "TYPE REASON NAMESPACE/NAME: NOTE".
func (m *Member) Events() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	events := m.events
	m.events = nil
	return events
}

// read fills the cache with the current objects of the API server.
func (m *Member) read(ctx context.Context) error {
	for _, i := range m.Informers() {
		if err := i.Load(ctx, m.client, m.client.Scheme()); err != nil {
			return fmt.Errorf("read member %s: %w", m.id, err)
		}
	}
	return nil
}

// recorder records the events of a Member.
type recorder Member

var _ events.EventRecorder = (*recorder)(nil)

func (r *recorder) Eventf(regarding, _ runtime.Object, eventtype, reason, _, note string, args ...any) {
	at := ""
	if o, ok := regarding.(client.Object); ok {
		at = client.ObjectKeyFromObject(o).String()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, fmt.Sprintf("%s %s %s: %s", eventtype, reason, at, fmt.Sprintf(note, args...)))
}
