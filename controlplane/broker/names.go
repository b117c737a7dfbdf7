package broker

import (
	"context"
	"log/slog"
	"time"
)

const (
	// nameInterval passes between two questions to the cluster's DNS.
	nameInterval = 20 * time.Second
	// namePatience is how many questions in a row must fail before that is said: packets get lost.
	namePatience = 2
)

// nameWatch asks the cluster's DNS for names of the ClusterSet and tells whether it answers, first of all and when that
// changes: somebody may take the block away that sends the zone to the agents, or write it over.
type nameWatch struct {
	ask      func(context.Context) error
	interval time.Duration
	tell     chan<- bool
	log      *slog.Logger
}

// Start asks until ctx ends. The manager calls it in the replica that works.
func (w *nameWatch) Start(ctx context.Context) error {
	tick := time.NewTicker(w.interval)
	defer tick.Stop()
	known, answered, failures := false, false, 0
	for {
		err := w.ask(ctx)
		if err == nil {
			failures = 0
		} else {
			failures++
		}
		answers := err == nil
		if ctx.Err() == nil && (answers || failures >= namePatience) && (!known || answers != answered) {
			if !answers {
				w.log.Warn("the cluster's DNS does not answer pods for clusterset.local; see isthmusctl dns status", "err", err)
			}
			select {
			case w.tell <- answers:
				known, answered = true, answers
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
