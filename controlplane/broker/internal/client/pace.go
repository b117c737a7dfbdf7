package client

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

const (
	// paceInterval is the time from one release of delayed changes to the next.
	paceInterval = 100 * time.Millisecond
	// maxDelayed bounds the delayed Services of one member. Changes of further ones pass at once.
	maxDelayed = 50_000
)

var delayed = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "isthmus_controller_changes_delayed_total",
	Help: "Changes of objects on the broker that wait because their member is beyond its quota changesPerMinute; source_cluster is empty for aggregates, which all members write.",
}, []string{"source_cluster"})

func init() { metrics.Registry.MustRegister(delayed) }

// pacer lets the changes of each member through at the rate of its quota. A member that is faster delays its own Services,
// each once and in their order, however often they change meanwhile. Safe for concurrent use.
type pacer struct {
	wake signal.Signal // a change is delayed

	mu      sync.Mutex
	limit   int // changes a minute
	members map[clusterset.ClusterID]*pace
}

// pace is the state of one member.
type pace struct {
	tokens *rate.Limiter
	queue  []clusterset.ServiceName // the delayed Services, in order
	queued map[clusterset.ServiceName]struct{}
}

func newPacer() *pacer {
	return &pacer{wake: signal.New(), limit: quota.ChangesPerMinute(nil), members: map[clusterset.ClusterID]*pace{}}
}

// setLimit sets how many changes of each member pass in a minute. As many may come at once.
func (p *pacer) setLimit(perMinute int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.limit = perMinute
	for _, m := range p.members {
		m.tokens.SetLimit(perSecond(perMinute))
		m.tokens.SetBurst(perMinute)
	}
}

func perSecond(perMinute int) rate.Limit { return rate.Limit(float64(perMinute) / 60) }

// pass reports whether a change of a member's Service may be handled now. If not, due returns the Service later.
func (p *pacer) pass(id clusterset.ClusterID, name clusterset.ServiceName, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.members[id]
	if m == nil {
		m = &pace{tokens: rate.NewLimiter(perSecond(p.limit), p.limit), queued: map[clusterset.ServiceName]struct{}{}}
		p.members[id] = m
	}
	if _, waits := m.queued[name]; waits {
		return false
	}
	if len(m.queue) == 0 && m.tokens.AllowN(now, 1) || len(m.queue) >= maxDelayed {
		return true
	}
	m.queue = append(m.queue, name)
	m.queued[name] = struct{}{}
	delayed.WithLabelValues(string(id)).Inc()
	p.wake.Notify()
	return false
}

// due returns the delayed Services whose turn it is, and whether others are left.
func (p *pacer) due(now time.Time) (names []clusterset.ServiceName, left bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.members {
		n := 0
		for n < len(m.queue) && m.tokens.AllowN(now, 1) {
			delete(m.queued, m.queue[n])
			n++
		}
		names = append(names, m.queue[:n]...)
		m.queue = slices.Delete(m.queue, 0, n)
		left = left || len(m.queue) > 0
	}
	return names, left
}

// forget removes a member that left. Its delayed Services are returned, to be handled now.
func (p *pacer) forget(id clusterset.ClusterID) []clusterset.ServiceName {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.members[id]
	delete(p.members, id)
	delayed.DeleteLabelValues(string(id))
	if m == nil {
		return nil
	}
	return m.queue
}

// changed has a Service reconciled because an object of a member changed. Objects of this member, and those of a list, are
// not delayed.
func (b *Broker) changed(id clusterset.ClusterID, name clusterset.ServiceName, listed bool) {
	if listed || id == b.cfg.Self || b.pacer.pass(id, name, time.Now()) {
		b.changes.Send(name)
	}
}

// runPacer handles delayed changes until ctx ends.
func (b *Broker) runPacer(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-b.pacer.wake.C():
		}
		for left := true; left; {
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(paceInterval):
			}
			var names []clusterset.ServiceName
			names, left = b.pacer.due(time.Now())
			b.changes.Send(names...)
		}
	}
}
