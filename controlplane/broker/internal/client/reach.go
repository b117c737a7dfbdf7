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

// The interval of the probes, and the timeout of one.
const (
	probeInterval = 5 * time.Second
	probeTimeout  = 4 * time.Second
)

var reachable = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "isthmus_controller_broker_reachable",
	Help: "1 while the broker answers and accepts this member's credentials, else 0.",
})

func init() { metrics.Registry.MustRegister(reachable) }

// Reach describes the connection of a member to the broker.
type Reach struct {
	Seen time.Time // the last successful answer; zero without one
	Err  error     // the current fault and its remedy; nil while the broker answers

	remedy string // the part of Err that is equal from probe to probe
}

// Probe sends a request to the broker at an interval, keeps the result for Reach, and logs changes. It needs no
// leadership: a standby also reports whether it could take over.
type Probe struct {
	broker  *Broker
	current atomic.Pointer[Reach]
}

// NewProbe returns a Probe without a result.
func NewProbe(b *Broker) *Probe {
	p := &Probe{broker: b}
	p.current.Store(&Reach{Err: fmt.Errorf("broker %s has not been probed yet", b.cfg.REST.Host)})
	return p
}

// Reach returns the last result.
func (p *Probe) Reach() Reach { return *p.current.Load() }

// NeedLeaderElection tells the manager to start the probe at once.
func (p *Probe) NeedLeaderElection() bool { return false }

// Start probes until ctx ends, and always returns nil: an unreachable broker is no reason to stop.
func (p *Probe) Start(ctx context.Context) error {
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	for first := true; ; first = false {
		p.probe(ctx, first)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (p *Probe) probe(ctx context.Context, first bool) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var one v1alpha1.ExportRecordList
	err := p.broker.client.List(ctx, &one, client.InNamespace(p.broker.cfg.Namespace), client.Limit(1))
	before := p.Reach()
	now := Reach{Seen: before.Seen}
	if err != nil {
		now.remedy = p.explain(err)
		now.Err = fmt.Errorf("%s: %w", now.remedy, err)
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
		if first || before.remedy != now.remedy {
			log.Error("the broker does not serve this member; imports stay as they are, retrying", "err", now.Err)
		}
	}
	p.current.Store(&now)
}

// explain returns a sentence about the error of a probe that names the broker and the remedy.
func (p *Probe) explain(err error) string {
	where := fmt.Sprintf("broker %s, namespace %s,", p.broker.cfg.REST.Host, p.broker.cfg.Namespace)
	again := fmt.Sprintf("run isthmusctl invite %[1]s there, and isthmusctl join with its file in cluster %[1]s", p.broker.cfg.Self)
	switch {
	case apierrors.IsUnauthorized(err):
		if ended := p.broker.cfg.CredentialEnded; ended != nil && ended() != "" {
			return ended()
		}
		return where + " does not accept this member's credentials; " + again
	case apierrors.IsForbidden(err):
		return where + " denies this member its rights; " + again
	case apierrors.IsNotFound(err):
		return where + " is not a broker yet; run isthmusctl deploy-broker there"
	default:
		return where + " does not answer; check its address and the network"
	}
}
