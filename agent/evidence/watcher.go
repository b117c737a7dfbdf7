package evidence

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Targets is how many backends of a member a probe asks at most.
const Targets = 3

const (
	lookInterval  = 250 * time.Millisecond // between two looks at the counters
	probeInterval = time.Second            // between two probes of one member at least
	probeTimeout  = time.Second            // a handshake may take
)

// Source is where the counters are read, a datapath.
type Source interface {
	Clusters() (map[clusterset.ClusterID]datapath.Evidence, error)
}

// Watcher looks at the counters and tells who is to be drained. All fields but Report, Dial and Now must be set.
type Watcher struct {
	Source Source
	// Targets returns up to so many TCP addresses of ready backends of a member, others each time.
	Targets func(c clusterset.ClusterID, limit int) []netip.AddrPort
	// Drain is called with all members to drain whenever these change, and again with the same after an error,
	// from the goroutine of Run. The map is the callee's.
	Drain func(ctx context.Context, drained map[clusterset.ClusterID]bool) error
	// Report is told what is known of each member, at the first look and whenever that changes, from the goroutine of
	// Run: it must not wait. The map is the callee's, without those of which nothing is known. May be nil.
	Report func(map[clusterset.ClusterID]State)
	Log    *slog.Logger

	// Dial makes a TCP handshake; nil is the network's. It returns nil when somebody answered, by refusing too.
	Dial func(ctx context.Context, to netip.AddrPort) error
	// Now is the clock of the counters; nil is datapath.SinceBoot.
	Now func() time.Duration
}

// outcome is how a probe ended.
type outcome struct {
	id       clusterset.ClusterID
	began    time.Duration
	answered bool
}

// Run watches until ctx is done; then it returns nil. No goroutine outlives it. Counters that cannot be read
// change nothing.
func (w Watcher) Run(ctx context.Context) error {
	if w.Dial == nil {
		w.Dial = handshake
	}
	if w.Now == nil {
		w.Now = datapath.SinceBoot
	}
	var (
		judge    Judge
		outcomes = make(chan outcome)
		probing  = map[clusterset.ClusterID]bool{}
		last     = map[clusterset.ClusterID]time.Duration{}
		running  int
		told     map[clusterset.ClusterID]bool  // what Drain has taken; a member that is no more goes without a change
		reported map[clusterset.ClusterID]State // nil before the first look
		failed   error
	)
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		for ; running > 0; running-- {
			<-outcomes
		}
	}()
	tick := time.NewTicker(lookInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case o := <-outcomes:
			running--
			delete(probing, o.id)
			judge.Probed(o.id, o.began, o.answered)
		case <-tick.C:
		}
		seen, err := w.Source.Clusters()
		if w.news(&failed, err) || err != nil {
			continue
		}
		now := w.Now()
		drained, changes, probe := judge.Weigh(now, seen)
		for _, c := range changes {
			w.Log.Warn("member drained or taken back on this node", "cluster", c.Cluster, "drained", c.Drained, "reason", c.Reason)
		}
		if !maps.Equal(told, drained) {
			if err := w.Drain(ctx, maps.Clone(drained)); err != nil {
				w.news(&failed, err)
			} else {
				told = drained
			}
		}
		if known := states(now, seen, drained); w.Report != nil && (reported == nil || !maps.Equal(reported, known)) {
			reported = known
			w.Report(maps.Clone(known))
		}
		for _, id := range probe {
			if at, ok := last[id]; probing[id] || ok && now-at < probeInterval {
				continue
			}
			probing[id], last[id] = true, now
			running++
			targets := w.Targets(id, Targets)
			go func() { outcomes <- outcome{id, now, w.ask(ctx, targets)} }()
		}
	}
}

// news logs an error when it is not the one before, and reports whether it did.
func (w Watcher) news(before *error, err error) bool {
	was := *before
	*before = err
	if err == nil || was != nil && was.Error() == err.Error() {
		return false
	}
	w.Log.Error("look at the members' packets; will try again", "err", err)
	return true
}

// ask reports whether any of targets answers.
func (w Watcher) ask(ctx context.Context, targets []netip.AddrPort) bool {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	answers := make(chan bool, len(targets))
	for _, t := range targets {
		go func() { answers <- w.Dial(ctx, t) == nil }()
	}
	answered := false
	for range targets {
		if <-answers {
			answered = true
			cancel() // the others need not go on
		}
	}
	return answered
}

// handshake connects and hangs up.
func handshake(ctx context.Context, to netip.AddrPort) error {
	var dialer net.Dialer
	dialer.SetMultipathTCP(false) // the plain handshake that every backend knows
	c, err := dialer.DialContext(ctx, "tcp", to.String())
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil
	case err != nil:
		return fmt.Errorf("probe %s: %w", to, err)
	}
	return c.Close()
}
