package broker

import (
	"context"
	"log/slog"
	"time"
)

const (
	// dnsInterval passes between two queries to the cluster's DNS.
	dnsInterval = 20 * time.Second
	// dnsFailures is how many queries in a row must fail before the watch reports it: packets get lost.
	dnsFailures = 2
)

// dnsWatch queries the cluster's DNS for a ClusterSet name, and reports the first result and each change. For example,
// an upgrade of CoreDNS may overwrite the block that forwards clusterset.local to the agents.
type dnsWatch struct {
	check    func(context.Context) error
	interval time.Duration
	results  chan<- bool
	log      *slog.Logger
}

// Start queries until ctx ends. The manager calls it in the active replica.
func (w *dnsWatch) Start(ctx context.Context) error {
	tick := time.NewTicker(w.interval)
	defer tick.Stop()
	known, last, failures := false, false, 0
	for {
		err := w.check(ctx)
		if err == nil {
			failures = 0
		} else {
			failures++
		}
		answers := err == nil
		if ctx.Err() == nil && (answers || failures >= dnsFailures) && (!known || answers != last) {
			if !answers {
				w.log.Warn("the cluster's DNS does not answer pods for clusterset.local; see isthmusctl dns status", "err", err)
			}
			select {
			case w.results <- answers:
				known, last = true, answers
			case <-ctx.Done():
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
