package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// How often the broker is asked whether it is there, and how long it may take to answer.
const (
	probeInterval = 5 * time.Second
	probeTimeout  = 4 * time.Second
)

var reachable = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "isthmus_controller_broker_reachable",
	Help: "1 while the broker answers and accepts this member's credentials, else 0.",
})

func init() { metrics.Registry.MustRegister(reachable) }

// Reach says how a member gets on with the broker.
type Reach struct {
	Seen time.Time // the last time it answered as it should; zero if never
	Err  error     // why it does not answer now, and what to do; nil while it does

	fix string // the part of Err that does not change from one try to the next
}

// Probe asks the broker again and again until ctx ends, keeps the answer for Reach, and logs when it
// changes. It needs no leadership: a standby says too whether it could take over.
type Probe struct {
	broker  *Broker
	current atomic.Pointer[Reach]
}

// NewProbe returns a Probe that has not asked yet.
func NewProbe(b *Broker) *Probe {
	p := &Probe{broker: b}
	p.current.Store(&Reach{Err: fmt.Errorf("broker %s has not been asked yet", b.cfg.REST.Host)})
	return p
}

// Reach returns the last answer.
func (p *Probe) Reach() Reach { return *p.current.Load() }

// NeedLeaderElection tells the manager to start the probe at once.
func (p *Probe) NeedLeaderElection() bool { return false }

// Start probes until ctx ends. It always returns nil: an unreachable broker is a state, not an end.
func (p *Probe) Start(ctx context.Context) error {
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	for first := true; ; first = false {
		p.ask(ctx, first)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (p *Probe) ask(ctx context.Context, first bool) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var one v1alpha1.ExportRecordList
	err := p.broker.client.List(ctx, &one, client.InNamespace(p.broker.cfg.Namespace), client.Limit(1))
	before := p.Reach()
	now := Reach{Seen: before.Seen}
	if err != nil {
		now.fix = p.explain(err)
		now.Err = fmt.Errorf("%s: %w", now.fix, err)
	}
	log := p.broker.cfg.Log.With("server", p.broker.cfg.REST.Host)
	if now.Err == nil {
		now.Seen = time.Now()
		reachable.Set(1)
		if first || before.Err != nil {
			log.Info("the broker answers")
		}
	} else {
		reachable.Set(0)
		if first || before.fix != now.fix {
			log.Error("the broker does not work for this member; what is imported stays as it is, and trying goes on", "err", now.Err)
		}
	}
	p.current.Store(&now)
}

// explain returns one sentence about the error of a probe that names the thing and the fix.
func (p *Probe) explain(err error) string {
	where := fmt.Sprintf("broker %s, namespace %s,", p.broker.cfg.REST.Host, p.broker.cfg.Namespace)
	switch {
	case apierrors.IsUnauthorized(err):
		return where + " does not know this member's credentials; run isthmusctl join again"
	case apierrors.IsForbidden(err):
		return where + " denies this member what it needs; run isthmusctl join again"
	case apierrors.IsNotFound(err):
		return where + " is no broker yet; run isthmusctl deploy-broker there"
	default:
		return where + " does not answer; check its address and the network"
	}
}
