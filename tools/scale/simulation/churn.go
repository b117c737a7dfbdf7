package simulation

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// inFlight is the number of concurrent writes if the API server is slower than the rate.
	inFlight = 64
	// arrivalTimeout is the time that the last changes have to arrive.
	arrivalTimeout = 30 * time.Second
)

// Churn changes endpoints of all exporters for a while, one at a time and perSecond times per second. It returns the latencies
// until a has the changes: from b's own watch event, or from the write to the broker for a simulated exporter. Changes are due
// by the clock, so a slow API server delays them but does not reduce their number.
func (w *ClusterSet) Churn(ctx context.Context, perSecond float64, duration time.Duration) (Propagation, error) {
	var all []*source
	for _, x := range w.exporters {
		all = append(all, x.slices...)
	}
	return w.churn(ctx, all, perSecond, duration)
}

func (w *ClusterSet) churn(ctx context.Context, all []*source, perSecond float64, duration time.Duration) (Propagation, error) {
	if perSecond <= 0 || duration <= 0 {
		return Propagation{}, errors.New("churn needs a rate and a duration")
	}
	w.say("change %.0f endpoints a second for %s", perSecond, duration)
	w.tracker.take()
	group, changing := errgroup.WithContext(ctx)
	group.SetLimit(inFlight)
	begin := time.Now()
	// The slices and their order are the same in every run. Consecutive changes are of different members.
	order := rand.New(rand.NewPCG(1, 1)).Perm(len(all))
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range int(perSecond * duration.Seconds()) {
		timer.Reset(time.Until(begin.Add(time.Duration(float64(i) / perSecond * float64(time.Second)))))
		select {
		case <-timer.C:
		case <-changing.Done():
		}
		if changing.Err() != nil {
			break
		}
		group.Go(func() error { return all[order[i%len(order)]].change(changing, w.tracker) })
	}
	if err := group.Wait(); err != nil {
		return Propagation{}, fmt.Errorf("change endpoints: %w", err)
	}
	took := time.Since(begin)
	err := w.await(ctx, arrivalTimeout, poll, "changes are missing", func() (bool, error) { return w.tracker.evaluate() == 0, nil })
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return Propagation{}, err
	}
	times, missing := w.tracker.take()
	p := propagation(times, missing, took)
	w.say("%s", p)
	return p, ctx.Err()
}
