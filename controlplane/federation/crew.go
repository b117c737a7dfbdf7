package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/election"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/fenced"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/memory"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// crew is one set of Parts and the members that they work on. Another spec gets another crew.
type crew struct {
	cfg     Config
	parts   []reconcile.Part
	fleet   member.Config
	changed func() // something that the status says may have changed
	looks   looks

	running sync.WaitGroup
	ctx     context.Context //nolint:containedctx // members come and go while it runs
	cancel  context.CancelFunc

	mu     sync.Mutex
	sites  map[clusterset.ClusterID]*site
	queues map[*queue]bool
}

// site is one member, as a crew works on it.
type site struct {
	*member.Member

	views     []*view // one for each Part
	candidate *election.Candidate
	events    *diary
	cancel    context.CancelFunc
	ended     chan struct{}
}

// view is a member as one Part sees it: a reconcile.Member.
type view struct {
	*member.Member
	*memory.Memory

	keys  lasting[[]reconcile.Key] // what the Part has to look at in every member because of this one
	count lasting[int]        // what the Part counts in it
}

// lasting is what follows from a memory, which lasts until that changes.
type lasting[T any] struct {
	mu    sync.Mutex
	found bool
	at    uint64
	what  T
}

// of returns what find finds. The caller does not change it.
func (l *lasting[T]) of(m *memory.Memory, find func() T) T {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now := m.Changes(); !l.found || l.at != now {
		l.what, l.at, l.found = find(), now, true
	}
	return l.what
}

// newCrew starts a crew without members.
func newCrew(ctx context.Context, cfg Config, parts []reconcile.Part, changed func()) *crew {
	c := &crew{cfg: cfg, parts: parts, changed: changed, looks: newLooks(), sites: map[clusterset.ClusterID]*site{}, queues: map[*queue]bool{}}
	c.ctx, c.cancel = context.WithCancel(ctx)
	c.fleet = member.Config{Scheme: scheme, Namespace: cfg.Namespace, Interval: cfg.Times.Probe, Log: cfg.Log, Changed: c.answered}
	for i, p := range parts {
		if runner, ok := p.(reconcile.Runner); ok {
			c.running.Go(func() {
				if err := runner.Run(c.ctx, func(key reconcile.Key) { c.enqueue(i, key) }); err != nil && c.ctx.Err() == nil {
					cfg.Log.Error("a part of the federation ended", "part", p.Name(), "err", err)
				}
			})
		}
	}
	return c
}

// stop ends the crew, and returns when nothing of it runs any more. What it wrote stays.
func (c *crew) stop() {
	c.cancel()
	c.mu.Lock()
	sites := slices.Collect(maps.Values(c.sites))
	c.mu.Unlock()
	for _, s := range sites {
		<-s.ended
	}
	c.running.Wait()
}

// set makes the members be those of the Federation. targets are how they are reached, pinned the uids of clusters that
// were seen under their ids.
func (c *crew) set(members []federationv1alpha1.MemberCluster, targets map[string]*member.Target, pinned map[string]string) error {
	var gone []*site
	want := map[clusterset.ClusterID]bool{}
	for _, m := range members {
		want[clusterset.ClusterID(m.ClusterID)] = true
	}
	c.mu.Lock()
	for id, s := range c.sites {
		if !want[id] {
			gone = append(gone, s)
			delete(c.sites, id)
		}
	}
	c.mu.Unlock()
	for _, s := range gone {
		s.cancel()
		<-s.ended
		memberReachable.DeleteLabelValues(string(s.ID()))
		memberLed.DeleteLabelValues(string(s.ID()))
		for i := range c.parts {
			c.enqueue(i, c.keys(i, s)...)
		}
	}
	var errs []error
	for _, m := range members {
		c.mu.Lock()
		s := c.sites[clusterset.ClusterID(m.ClusterID)]
		c.mu.Unlock()
		if s == nil {
			var err error
			if s, err = c.add(m, pinned[m.ClusterID]); err != nil {
				errs = append(errs, fmt.Errorf("spec.members[clusterID=%s]: %w", m.ClusterID, err))
				continue
			}
		}
		s.Set(m, targets[m.ClusterID])
	}
	return errors.Join(errs...)
}

// add starts to work on one more member.
func (c *crew) add(m federationv1alpha1.MemberCluster, pinned string) (*site, error) {
	s := &site{ended: make(chan struct{})}
	var err error
	if s.Member, err = member.NewMember(c.fleet, m, pinned); err != nil {
		return nil, err
	}
	var memories []*memory.Memory
	for i, p := range c.parts {
		v := &view{Member: s.Member}
		v.Memory, err = memory.New(scheme, p.Watches(), func(w reconcile.Watch, was, is client.Object) {
			for _, o := range []client.Object{was, is} {
				switch {
				case o == nil:
				case w.Local != nil && w.Local(o):
					c.enqueueAt(i, s.Member, w.Keys(v, o)...)
				default:
					c.enqueue(i, w.Keys(v, o)...)
				}
			}
		}, func() {
			if v.Read() { // what was looked at before was put off until now
				c.enqueue(i, c.keys(i, s)...)
				for _, q := range c.queuesOf(s.Member) {
					if q.index == i {
						c.fill(q)
					}
				}
			}
		})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.Name(), err)
		}
		s.views, memories = append(s.views, v), append(memories, v.Memory)
	}
	if s.events, err = newDiary(s.Config()); err != nil {
		return nil, err
	}
	lease := types.NamespacedName{Namespace: c.cfg.Namespace, Name: m.ClusterID}
	s.candidate = election.New(s.Leases(), lease, c.cfg.identity, c.cfg.Times.Times)
	s.candidate.Say(func() string { return c.own().String() })
	ctx, cancel := context.WithCancel(c.ctx)
	s.cancel = cancel
	c.mu.Lock()
	c.sites[s.ID()] = s
	c.mu.Unlock()
	c.running.Go(func() {
		defer close(s.ended)
		defer s.events.Shutdown()
		connected, disconnect := context.WithCancel(context.WithoutCancel(ctx))
		var connection sync.WaitGroup
		connection.Go(func() { s.Run(connected, memories...) })
		// The Lease is given back before the connection ends.
		if err := s.candidate.Run(ctx, func(ctx context.Context, term fenced.Term) { c.lead(ctx, s, term) }); err != nil {
			c.cfg.Log.Error("a member can have no leader", "member", s.ID(), "err", err)
		}
		disconnect()
		connection.Wait()
	})
	return s, nil
}

// all returns the members as Part i sees them, sorted by id.
func (c *crew) all(i int) []reconcile.Member {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []reconcile.Member
	for _, s := range c.sites {
		all = append(all, s.views[i])
	}
	slices.SortFunc(all, func(a, b reconcile.Member) int { return cmp.Compare(a.ID(), b.ID()) })
	return all
}

// keys returns everything that Part i has to look at in every member because of one.
func (c *crew) keys(i int, s *site) []reconcile.Key {
	v := s.views[i]
	return v.keys.of(v.Memory, func() []reconcile.Key { return v.keysOf(v.EachShared) })
}

// keysOf returns the keys of all objects that each has.
func (v *view) keysOf(each func(func(reconcile.Watch, client.Object))) []reconcile.Key {
	found := map[reconcile.Key]bool{}
	each(func(w reconcile.Watch, o client.Object) {
		for _, key := range w.Keys(v, o) {
			found[key] = true
		}
	})
	return slices.Collect(maps.Keys(found))
}

// release believes all that is held of a member.
func (c *crew) release(id clusterset.ClusterID) {
	for _, p := range c.parts {
		if g, ok := p.(reconcile.Guarded); ok {
			g.Release(id)
		}
	}
}

// enqueue asks to look at keys of Part i in every member that is led here.
func (c *crew) enqueue(i int, keys ...reconcile.Key) { c.enqueueAt(i, nil, keys...) }

// enqueueAt does so in one member, if it is led here; nil is all.
func (c *crew) enqueueAt(i int, m *member.Member, keys ...reconcile.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for q := range c.queues {
		if q.index == i && (m == nil || q.site.Member == m) {
			q.add(keys...)
		}
	}
}

// answered looks at everything again in a member that has come back, and elsewhere at what tells whether it answers.
func (c *crew) answered(m *member.Member) {
	c.changed()
	memberReachable.WithLabelValues(string(m.ID())).Set(number(m.Reachable()))
	c.mu.Lock()
	s := c.sites[m.ID()]
	c.mu.Unlock()
	for i, p := range c.parts {
		if _, ok := p.(reconcile.Attentive); ok && s != nil {
			c.enqueue(i, c.keys(i, s)...)
		}
	}
	if !m.Reachable() {
		return
	}
	for _, q := range c.queuesOf(m) {
		c.fill(q)
	}
}

// queuesOf returns the queues of a member, one a Part, which there are while it is led here.
func (c *crew) queuesOf(m *member.Member) (queues []*queue) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for q := range c.queues {
		if q.site.Member == m {
			queues = append(queues, q)
		}
	}
	return queues
}

// fill puts everything into a queue.
func (c *crew) fill(q *queue) {
	c.mu.Lock()
	sites := slices.Collect(maps.Values(c.sites))
	c.mu.Unlock()
	for _, s := range sites {
		if s == q.site {
			v := s.views[q.index]
			q.add(v.keysOf(v.Each)...)
		} else {
			q.add(c.keys(q.index, s)...)
		}
	}
}

// settleTimeout is how long a new leader waits for members that answer and still are being read.
const settleTimeout = 10 * time.Second

// lead works on a member until ctx ends.
func (c *crew) lead(ctx context.Context, s *site, term fenced.Term) {
	log := c.cfg.Log.With("member", s.ID(), "epoch", term.Epoch)
	log.Info("this process leads the member")
	defer log.Info("this process leads the member no more")
	led := memberLed.WithLabelValues(string(s.ID()))
	led.Set(1)
	defer led.Set(0)
	recording, stopRecording := context.WithCancel(ctx)
	defer stopRecording()
	if err := s.events.write(recording, log); err != nil {
		log.Error("events cannot be written", "err", err)
	}
	recorder := s.events.NewRecorder(scheme, "isthmus-federation")
	var working sync.WaitGroup
	for i, p := range c.parts {
		working.Go(func() {
			if !c.await(ctx, i, s) {
				return
			}
			q := newQueue(c, i, s, fenced.New(s.views[i], term, s.Client(), recorder), log.With("part", p.Name()))
			c.mu.Lock()
			c.queues[q] = true
			c.mu.Unlock()
			c.fill(q)
			q.run(ctx)
			c.mu.Lock()
			defer c.mu.Unlock()
			delete(c.queues, q)
		})
	}
	working.Wait()
	<-ctx.Done()
}

// await waits until Part i knows the member that it is to work on, and of the others what there is to know for now. It
// returns false if ctx ends before. One Part does not wait for what another one reads: a right may be missing there.
func (c *crew) await(ctx context.Context, i int, s *site) bool {
	began := time.Now()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !s.views[i].Read() || time.Since(began) < settleTimeout && !c.settled(i) {
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
	return true
}

// settled reports whether everything that Part i can know of the members is known.
func (c *crew) settled(i int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.sites {
		state, v := s.State(), s.views[i]
		if !state.Asked || state.Problem == "" && !v.Read() && len(v.Denied()) == 0 {
			return false
		}
	}
	return true
}
