// Package reconciletest runs a Part over real API servers without elections: a test says who leads what, which members
// are away, and when to sync. What members are read by and written by is what the federation uses.
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

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/memory"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// Fleet is a Part and members that it is tried on.
type Fleet struct {
	part    reconcile.Part
	members []*Member // sorted by id
}

// New returns a Fleet of members behind API servers, all supervisors that answer. Nothing is read yet.
func New(t testing.TB, scheme *runtime.Scheme, p reconcile.Part, servers map[clusterset.ClusterID]*rest.Config) *Fleet {
	t.Helper()
	f := &Fleet{part: p}
	for id, config := range servers {
		c, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
		if err != nil {
			t.Fatal(err)
		}
		m := &Member{id: id, client: c}
		if m.Memory, err = memory.New(scheme, p.Watches(), func(reconcile.Watch, client.Object, client.Object) {}, nil); err != nil {
			t.Fatal(err)
		}
		f.members = append(f.members, m)
	}
	slices.SortFunc(f.members, func(a, b *Member) int { return strings.Compare(string(a.id), string(b.id)) })
	return f
}

// Member returns a member.
func (f *Fleet) Member(id clusterset.ClusterID) *Member {
	i := slices.IndexFunc(f.members, func(m *Member) bool { return m.id == id })
	return f.members[i]
}

// Leave takes a member out of the federation; what it knows of Services stays as it is.
func (f *Fleet) Leave(id clusterset.ClusterID) {
	f.members = slices.DeleteFunc(f.members, func(m *Member) bool { return m.id == id })
}

// Sync reads all members that are not away and calls Sync for every key that matters in a member, in an order of its own, in each of
// into, or in all members that are not away. It returns what failed.
func (f *Fleet) Sync(ctx context.Context, into ...clusterset.ClusterID) error {
	var all []reconcile.Member
	var errs []error
	for _, m := range f.members {
		if !m.away.Load() {
			errs = append(errs, m.read(ctx))
		}
		all = append(all, m)
	}
	keys, local := map[reconcile.Key]bool{}, map[*Member]map[reconcile.Key]bool{}
	for _, m := range f.members {
		local[m] = map[reconcile.Key]bool{}
		m.Each(func(w reconcile.Watch, o client.Object) {
			matter := keys
			if w.Local != nil && w.Local(o) {
				matter = local[m]
			}
			for _, key := range w.Keys(m, o) {
				matter[key] = true
			}
		})
	}
	for _, m := range f.members {
		if m.away.Load() || len(into) > 0 && !slices.Contains(into, m.id) {
			continue
		}
		leader := m.Lead(1)
		maps.Copy(local[m], keys)
		for key := range local[m] {
			if err := f.part.Sync(ctx, key, leader, all); err != nil {
				errs = append(errs, fmt.Errorf("sync %v in %s: %w", key, m.id, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Member is one member of a Fleet. It is a reconcile.Member.
type Member struct {
	*memory.Memory

	id     clusterset.ClusterID
	client client.WithWatch
	away   atomic.Bool

	mu     sync.Mutex
	events []string
}

// Client writes and reads the member's API server as a user does.
func (m *Member) Client() client.WithWatch { return m.client }

// Away makes the member silent: it is neither read nor written, and what was read of it stays.
func (m *Member) Away() { m.away.Store(true) }

// Back ends Away.
func (m *Member) Back() { m.away.Store(false) }

// ID is reconcile.Member's, as the next two.
func (m *Member) ID() clusterset.ClusterID { return m.id }

// Reachable is false while the member is away.
func (m *Member) Reachable() bool { return !m.away.Load() }

// Supervisor is true.
func (m *Member) Supervisor() bool { return true }

// Lead returns who leads the member in an epoch, and does not ask whether somebody else does.
func (m *Member) Lead(epoch int64) reconcile.Leader {
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

// read makes what is known of the member what its API server says now.
func (m *Member) read(ctx context.Context) error {
	for _, k := range m.Kinds() {
		if err := k.Load(ctx, m.client, m.client.Scheme()); err != nil {
			return fmt.Errorf("read member %s: %w", m.id, err)
		}
	}
	return nil
}

// recorder keeps events of a Member.
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
