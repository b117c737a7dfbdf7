package controller

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/isthmus-net/isthmus/gateway/openstack"
)

// lanes make the calls to OpenStack, for which the worker never waits. A lane is for the objects of one kind, such as the
// ports or the address pairs of a gateway, and makes one call after another: the port of an address is deleted after its
// floating IP was moved, not meanwhile. Lanes have no state of Services. The worker gives them values, and stores their
// results.
type lanes struct {
	ctx context.Context
	// wake makes the worker handle a key.
	wake func(types.NamespacedName)
	// spawn runs a function beside the worker.
	spawn func(func())
	// later runs a function after a pause.
	later func(time.Duration, func())
	now   func() time.Time
	log   *slog.Logger

	mu      sync.Mutex // not held during calls
	byName  map[string]*lane
	results []result
}

// lane makes the calls about the objects of one kind.
type lane struct {
	busySince    time.Time // zero: it makes no call
	failingSince time.Time // zero: the last call succeeded
	pause        time.Duration
	next         time.Time // no call before
	waiting      []types.NamespacedName
}

// calls are made in a lane. store puts the result into the worker's state; nil: there is none. An error makes the lane
// pause, so it is about the cloud, not about one Service.
type calls func(ctx context.Context) (store func(), err error)

type result struct {
	lane  string
	store func()
	err   error
}

// The lanes. Each gateway has one of its own for the address pairs of its port, and each pool with a failover IP has one
// for the moves of it, below laneFailoverIP.
const (
	lanePorts      = "ports"
	laneFailoverIP = "failover-ips"
	lanePairs      = "pairs/"
	laneQuota      = "quota"
)

// resultsKey makes the worker store the results of lanes.
var resultsKey = types.NamespacedName{Name: "results"}

// newLanes returns lanes whose calls end with ctx.
func newLanes(ctx context.Context, wake func(types.NamespacedName), spawn func(func()), log *slog.Logger) *lanes {
	later := func(d time.Duration, f func()) { time.AfterFunc(d, f) }
	return &lanes{ctx: ctx, wake: wake, spawn: spawn, later: later, now: time.Now, log: log, byName: map[string]*lane{}}
}

// start makes a lane make calls, and reports whether it did. It does not while the lane is busy, or pauses after a
// failure. In any case the worker handles key again when the lane is free.
func (l *lanes) start(name string, key types.NamespacedName, do calls) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	of := l.lane(name)
	if !slices.Contains(of.waiting, key) {
		of.waiting = append(of.waiting, key)
	}
	if !of.free(l.now()) {
		return false
	}
	of.busySince = l.now()
	l.spawn(func() {
		store, err := do(l.ctx)
		l.mu.Lock()
		l.results = append(l.results, result{name, store, err})
		l.mu.Unlock()
		l.wake(resultsKey)
	})
	return true
}

// free reports whether a lane can make calls now.
func (l *lane) free(now time.Time) bool { return l.busySince.IsZero() && !now.Before(l.next) }

func (l *lanes) lane(name string) *lane {
	if l.byName[name] == nil {
		l.byName[name] = &lane{}
	}
	return l.byName[name]
}

// wait makes the worker handle key when no lane with a prefix is busy, and reports whether one is.
func (l *lanes) wait(prefix string, key types.NamespacedName) (busy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, of := range l.byName {
		if strings.HasPrefix(name, prefix) && !of.busySince.IsZero() {
			busy = true
			if !slices.Contains(of.waiting, key) {
				of.waiting = append(of.waiting, key)
			}
		}
	}
	return busy
}

// collect stores the results of lanes, which are free then. Only the worker calls it.
func (l *lanes) collect() error {
	l.mu.Lock()
	results := l.results
	l.results = nil
	l.mu.Unlock()
	var errs []error
	for _, r := range results {
		if r.store != nil {
			r.store()
		}
		if pause := l.release(r); pause > 0 {
			l.later(pause, func() { l.wakeWaiting(r.lane) })
		} else {
			l.wakeWaiting(r.lane)
		}
		errs = append(errs, r.err)
	}
	return errors.Join(errs...)
}

// release frees a lane, and returns the pause before its next call.
func (l *lanes) release(r result) (pause time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	of, now := l.lane(r.lane), l.now()
	of.busySince = time.Time{}
	if r.err == nil {
		if !of.failingSince.IsZero() {
			l.log.Info("OpenStack works again", "calls", r.lane)
		}
		of.failingSince, of.pause, of.next = time.Time{}, 0, time.Time{}
		return 0
	}
	if of.failingSince.IsZero() {
		of.failingSince = now
		l.log.Warn("OpenStack fails", "calls", r.lane, "err", r.err)
	}
	of.pause = min(max(firstRetry, 2*of.pause), lastRetry)
	of.next = now.Add(of.pause)
	if p, ok := errors.AsType[*openstack.Paused](r.err); ok {
		of.next = p.Until
	}
	return max(of.next.Sub(now), time.Millisecond)
}

// wakeWaiting wakes the keys that wait for a lane.
func (l *lanes) wakeWaiting(name string) {
	l.mu.Lock()
	waiting := l.lane(name).waiting
	l.lane(name).waiting = nil
	l.mu.Unlock()
	for _, key := range waiting {
		l.wake(key)
	}
}

// age returns how long the work of a lane has been outstanding; 0 for none.
func (l *lanes) age(name string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if of := l.byName[name]; of != nil {
		return of.age(l.now())
	}
	return 0
}

func (l *lane) age(now time.Time) time.Duration {
	switch {
	case !l.failingSince.IsZero() && (len(l.waiting) > 0 || !l.busySince.IsZero()):
		return now.Sub(l.failingSince)
	case !l.busySince.IsZero():
		return now.Sub(l.busySince)
	}
	return 0
}

// ages returns the greatest age of each kind of lane.
func (l *lanes) ages() map[string]time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := map[string]time.Duration{}
	for name, of := range l.byName {
		kind, _, _ := strings.Cut(name, "/")
		all[kind] = max(all[kind], of.age(l.now()))
	}
	return all
}
