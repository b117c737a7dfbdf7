package simulation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/tools/apiserver"
	"github.com/isthmus-net/isthmus/tools/process"
	"github.com/isthmus-net/isthmus/tools/scrape"
)

const (
	// quietTimeout is the time that a ClusterSet has to become quiet.
	quietTimeout = 5 * time.Minute
	// look is the interval of requests to a controller's metrics, which cost it a few milliseconds each.
	look = 100 * time.Millisecond
)

// Load is the cost of a period.
type Load struct {
	Took       time.Duration
	Broker     Server
	Importer   Server        // a's
	Controller time.Duration // CPU time of a's controller
	RSS, Peak  int64         // its resident memory in bytes: at the end, and the peak
	Sent       int64         // bytes from it to the broker
	Received   int64         // bytes from the broker to it
	Machine    time.Duration // CPU time of all processes on this machine, unrelated ones included
}

// Server is the cost of an API server.
type Server struct {
	API, Etcd time.Duration      // CPU time
	Requests  map[string]float64 // answered, by "VERB resource"
}

// Writes returns the number of requests that change an object. It excludes Leases, which are renewed forever.
func Writes(requests map[string]float64) float64 {
	var n float64
	for what, count := range requests {
		verb, resource, _ := strings.Cut(what, " ")
		if slices.Contains([]string{"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}, verb) && resource != "leases" {
			n += count
		}
	}
	return n
}

// Load measures the cost while do runs. It excludes the CPU time of this program.
func (w *ClusterSet) Load(ctx context.Context, do func(context.Context) error) (Load, error) {
	if w.a.controller == nil {
		return Load{}, errors.New("the controller of a does not run")
	}
	if err := w.a.controller.ResetPeak(); err != nil {
		return Load{}, err
	}
	before, err := w.costs(ctx)
	if err != nil {
		return Load{}, err
	}
	begin := time.Now()
	if err := do(ctx); err != nil {
		return Load{}, err
	}
	took := time.Since(begin)
	after, err := w.costs(ctx)
	if err != nil {
		return Load{}, err
	}
	return Load{
		Took:   took,
		Broker: after.Broker.since(before.Broker), Importer: after.Importer.since(before.Importer),
		Controller: after.Controller - before.Controller, RSS: after.RSS, Peak: after.Peak,
		Sent: after.Sent - before.Sent, Received: after.Received - before.Received, Machine: after.Machine - before.Machine,
	}, nil
}

func (s Server) since(before Server) Server {
	return Server{API: s.API - before.API, Etcd: s.Etcd - before.Etcd, Requests: difference(s.Requests, before.Requests)}
}

// costs returns the total cost since the start.
func (w *ClusterSet) costs(ctx context.Context) (Load, error) {
	l := Load{Sent: w.a.meter.Sent(), Received: w.a.meter.Received()}
	var errs [4]error
	l.Broker, errs[0] = costsOf(ctx, w.broker)
	l.Importer, errs[1] = costsOf(ctx, w.a.server)
	l.Machine, errs[2] = process.MachineCPU()
	usage, err := w.a.controller.Usage()
	errs[3] = err
	l.Controller, l.RSS, l.Peak = usage.CPU, usage.RSS, usage.Peak
	return l, errors.Join(errs[:]...)
}

func costsOf(ctx context.Context, server *apiserver.Server) (s Server, err error) {
	if s.Requests, err = server.Requests(ctx); err != nil {
		return s, err
	}
	s.API, s.Etcd, err = server.CPU()
	return s, err
}

// difference returns after minus before, without unchanged entries.
func difference(after, before map[string]float64) map[string]float64 {
	d := maps.Clone(after)
	for what, n := range before {
		d[what] -= n
	}
	maps.DeleteFunc(d, func(_ string, n float64) bool { return n == 0 })
	return d
}

// queues are the controller's work queue metrics.
type queues struct {
	added   float64 // items added since the start
	waiting float64 // items in the queues
	working float64 // busy workers
}

// plain disables compression, which would cost the server more than the page itself.
var plain = &http.Client{Transport: &http.Transport{DisableCompression: true}}

func (w *ClusterSet) queues(ctx context.Context) (queues, error) {
	const added, depth, active = "workqueue_adds_total", "workqueue_depth", "controller_runtime_active_workers"
	samples, err := scrape.Get(ctx, plain, "http://"+w.a.listen+"/metrics", added, depth, active)
	if err != nil {
		return queues{}, err
	}
	return queues{added: scrape.Sum(samples, added), waiting: scrape.Sum(samples, depth), working: scrape.Sum(samples, active)}, nil
}

// awaitQuiet waits until the controller of a has nothing to do and nothing has been written to a for a second.
func (w *ClusterSet) awaitQuiet(ctx context.Context) error {
	const still = time.Second
	const uncounted = -1.0
	since, last := time.Now(), uncounted
	return w.await(ctx, quietTimeout, look, "the controller of a does not come to rest", func() (bool, error) {
		q, err := w.queues(ctx)
		if err != nil {
			return false, err
		}
		if q.waiting+q.working > 0 {
			last = uncounted
			return false, nil
		}
		if last != uncounted && time.Since(since) < still {
			return false, nil
		}
		requests, err := w.a.server.Requests(ctx)
		if err != nil {
			return false, err
		}
		writes := Writes(requests)
		if writes == last {
			return true, nil
		}
		since, last = time.Now(), writes
		return false, nil
	})
}

// Restart is the cost of a controller's restart with nothing to write.
type Restart struct {
	Synced    time.Duration // from the start of its process until it was ready and had reconciled every Service
	Writes    float64       // to a and to the broker, Leases excluded
	RSS, Peak int64         // bytes
}

// Restart ends the controller of a and starts another one.
func (w *ClusterSet) Restart(ctx context.Context) (Restart, error) {
	w.say("restart the controller of a")
	if err := w.a.stop(); err != nil {
		return Restart{}, err
	}
	before, err := w.writes(ctx)
	if err != nil {
		return Restart{}, err
	}
	begin, err := w.startImporter(ctx)
	if err != nil {
		return Restart{}, err
	}
	var r Restart
	err = w.await(ctx, quietTimeout, look, "the controller of a does not become ready", func() (bool, error) {
		r.Synced = time.Since(begin)
		if !w.a.ready(ctx) {
			return false, nil
		}
		q, err := w.queues(ctx)
		if err != nil {
			return false, fmt.Errorf("the controller is ready and serves no metrics: %w", err)
		}
		return q.added >= float64(w.cfg.Services()) && q.waiting+q.working == 0, nil
	})
	if err != nil {
		return r, err
	}
	usage, err := w.a.controller.Usage()
	if err != nil {
		return r, err
	}
	r.RSS, r.Peak = usage.RSS, usage.Peak
	// Wait for late writes.
	if err := w.awaitQuiet(ctx); err != nil {
		return r, err
	}
	after, err := w.writes(ctx)
	r.Writes = after - before
	w.say("synced after %.1f s", r.Synced.Seconds())
	return r, err
}

// writes returns the number of writes to a and to the broker so far.
func (w *ClusterSet) writes(ctx context.Context) (float64, error) {
	a, errA := w.a.server.Requests(ctx)
	b, errB := w.broker.Requests(ctx)
	return Writes(a) + Writes(b), errors.Join(errA, errB)
}

// FirstImport is the cost of the first import into an empty member.
type FirstImport struct {
	// Usable is the time until every Service had its import and its endpoints, and Reported the time until the statuses were
	// written too. Both count from the start of the controller.
	Usable, Reported time.Duration
	Load             Load // of the whole import
}

// FirstImport starts the controller of a, which is empty, and waits for the import of everything. The ClusterSet is quiet
// afterwards.
func (w *ClusterSet) FirstImport(ctx context.Context) (FirstImport, error) {
	w.say("start the controller of a; it has %d services with %d endpoints to import", w.cfg.Services(), w.cfg.RemoteEndpoints())
	begin, err := w.startImporter(ctx)
	if err != nil {
		return FirstImport{}, err
	}
	var f FirstImport
	f.Load, err = w.Load(ctx, func(ctx context.Context) error {
		usable, told, err := w.awaitImported(ctx)
		f.Usable = usable.Sub(begin)
		f.Reported = max(f.Usable, told.Sub(begin)) // a Service may receive endpoints after its status
		return err
	})
	if err != nil {
		return FirstImport{}, err
	}
	w.say("everything can be used after %.1f s, and the statuses say so after %.1f s", f.Usable.Seconds(), f.Reported.Seconds())
	return f, w.awaitQuiet(ctx)
}

// Rest measures the cost of a period without changes.
func (w *ClusterSet) Rest(ctx context.Context, d time.Duration) (Load, error) {
	w.say("let everything rest for %s", d)
	return w.Load(ctx, func(ctx context.Context) error {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.lifetime.Done():
			return context.Cause(w.lifetime)
		case <-timer.C:
			return w.a.failure()
		}
	})
}
