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

// maxTargets is how many backends of a member one probe tries.
const maxTargets = 3

const (
	readInterval  = 250 * time.Millisecond // between two reads of the counters
	probeInterval = time.Second            // at least, between two probes of one member
	probeTimeout  = time.Second            // of a handshake
)

// Source reads the counters of the kernel. A datapath is one.
type Source interface {
	Clusters() (map[clusterset.ClusterID]datapath.Evidence, error)
}

// Watcher reads the counters regularly and drains silent members. All fields but Report, Dial and Now must be set.
type Watcher struct {
	Source Source
	// Targets returns up to limit TCP addresses of ready backends of a member, others on each call.
	Targets func(c clusterset.ClusterID, limit int) []netip.AddrPort
	// Drain is called with all members to drain whenever they change, and again after an error. It is called from the
	// goroutine of Run and owns the map.
	Drain func(ctx context.Context, drained map[clusterset.ClusterID]bool) error
	// Report is called with the state of each known member after the first read and after each change. It is called from
	// the goroutine of Run, must not block, and owns the map. May be nil.
	Report func(map[clusterset.ClusterID]State)
	Log    *slog.Logger

	// Dial makes a TCP handshake and returns nil when the other end answers, be it by a refusal. nil dials the network.
	Dial func(ctx context.Context, to netip.AddrPort) error
	// Now is the clock of the counters; nil is datapath.SinceBoot.
	Now func() time.Duration
}

// probeResult is the result of a probe of one member.
type probeResult struct {
	id       clusterset.ClusterID
	began    time.Duration
	answered bool
}

// watch is one run of a Watcher.
type watch struct {
	Watcher

	detector Detector
	results  chan probeResult
	running  map[clusterset.ClusterID]bool          // members with a probe under way
	probedAt map[clusterset.ClusterID]time.Duration // the start of each member's last probe
	drained  map[clusterset.ClusterID]bool          // that Drain has accepted; also without a Change, when a member is removed
	reported map[clusterset.ClusterID]State         // nil before the first report

	readErr, drainErr error // the last errors, as logged
}

// Run watches until ctx ends; then it returns nil. No goroutine outlives it. A failed read of the counters changes
// nothing.
func (w Watcher) Run(ctx context.Context) error {
	if w.Dial == nil {
		w.Dial = handshake
	}
	if w.Now == nil {
		w.Now = datapath.SinceBoot
	}
	run := &watch{
		Watcher: w, results: make(chan probeResult),
		running: map[clusterset.ClusterID]bool{}, probedAt: map[clusterset.ClusterID]time.Duration{},
	}
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		for range run.running {
			<-run.results
		}
	}()
	tick := time.NewTicker(readInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-run.results:
			delete(run.running, r.id)
			run.detector.ProbeResult(r.id, r.began, r.answered)
		case <-tick.C:
		}
		run.read(ctx)
	}
}

// read evaluates the counters, and drains, reports and probes as that demands.
func (w *watch) read(ctx context.Context) {
	seen, err := w.Source.Clusters()
	w.logNew(&w.readErr, err)
	if err != nil {
		return
	}
	now := w.Now()
	drained, changes, probe := w.detector.Evaluate(now, seen)
	for _, c := range changes {
		w.Log.Warn("member drained or restored on this node", "cluster", c.Cluster, "drained", c.Drained, "reason", c.Reason)
	}
	w.drain(ctx, drained)
	w.report(states(now, seen, drained))
	for _, id := range probe {
		w.probe(ctx, id, now)
	}
}

// drain passes changed members on to Drain, until that succeeds.
func (w *watch) drain(ctx context.Context, drained map[clusterset.ClusterID]bool) {
	if maps.Equal(w.drained, drained) {
		return
	}
	err := w.Drain(ctx, maps.Clone(drained))
	w.logNew(&w.drainErr, err)
	if err == nil {
		w.drained = drained
	}
}

func (w *watch) report(known map[clusterset.ClusterID]State) {
	if w.Report != nil && (w.reported == nil || !maps.Equal(w.reported, known)) {
		w.reported = known
		w.Report(maps.Clone(known))
	}
}

// probe starts a probe of a member, unless one is under way or the last one was just now.
func (w *watch) probe(ctx context.Context, id clusterset.ClusterID, now time.Duration) {
	if at, ok := w.probedAt[id]; w.running[id] || ok && now-at < probeInterval {
		return
	}
	w.running[id], w.probedAt[id] = true, now
	targets := w.Targets(id, maxTargets)
	go func() { w.results <- probeResult{id, now, w.anyAnswers(ctx, targets)} }()
}

// logNew logs an error unless it equals the last one.
func (w *watch) logNew(last *error, err error) {
	before := *last
	*last = err
	if err != nil && (before == nil || before.Error() != err.Error()) {
		w.Log.Error("watch the members' packets; will try again", "err", err)
	}
}

// anyAnswers reports whether any of targets answers.
func (w Watcher) anyAnswers(ctx context.Context, targets []netip.AddrPort) bool {
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

// handshake opens and closes a TCP connection.
func handshake(ctx context.Context, to netip.AddrPort) error {
	var dialer net.Dialer
	dialer.SetMultipathTCP(false) // a plain handshake works with every backend
	c, err := dialer.DialContext(ctx, "tcp", to.String())
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil
	case err != nil:
		return fmt.Errorf("probe %s: %w", to, err)
	}
	return c.Close()
}
