// Package simulation builds a ClusterSet to measure: one real broker, simulated members, a real member a that imports, and
// optionally a real member b that exports. Real means kube-apiserver, etcd and the isthmus-controller that users run, as
// processes of this machine whose cost is measured one by one.
//
// A simulated member writes to the broker what a real one would write, renews its Lease, and watches what a member watches, so
// that the load of the broker is real. Its exports change at a chosen rate, and a watch on a's API server measures how long
// each change takes.
package simulation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/apiserver"
)

const (
	// perSlice is the largest number of endpoints in an EndpointSlice, the default of --max-endpoints-per-slice.
	perSlice = 100
	// namespaces is the number of namespaces that the Services are spread over.
	namespaces = 10
	// spare is the number of additional addresses of each member. Each change needs one.
	spare = 1 << 16
	// writers is the number of concurrent writes while a ClusterSet is filled.
	writers = 16
)

// The real members.
const (
	importerID clusterset.ClusterID = "a"
	exporterID clusterset.ClusterID = "b"
)

// pods contains the addresses of all endpoints.
var pods = netip.MustParsePrefix("10.0.0.0/8")

// Config describes a ClusterSet.
type Config struct {
	// Assets is a folder with kube-apiserver and etcd, Controller the path of isthmus-controller.
	Assets, Controller string
	// Storage is the folder for etcd's files, which Close removes.
	Storage string
	// Members is the number of simulated members.
	Members int
	// Exports is the number of Services that each member exports, Endpoints the number of endpoints of each.
	Exports, Endpoints int
	// Distinct gives every member its own Services. Otherwise all members export the same ones, and every import has endpoints
	// of all members.
	Distinct bool
	// Exporter adds the real member b, which exports like the simulated members.
	Exporter bool
	// Progress receives one line per step.
	Progress io.Writer
}

// Validate reports all faults of c.
func (c Config) Validate() error {
	var errs []error
	for name, value := range map[string]string{"Assets": c.Assets, "Controller": c.Controller, "Storage": c.Storage} {
		if value == "" {
			errs = append(errs, fmt.Errorf("%s is missing", name))
		}
	}
	if c.Progress == nil {
		errs = append(errs, errors.New("progress has nowhere to go: Progress is missing"))
	}
	if c.Members < 0 || c.Members > 1000 {
		errs = append(errs, fmt.Errorf("%d members; 0 to 1000 can be simulated", c.Members))
	}
	if c.Members == 0 && !c.Exporter {
		errs = append(errs, errors.New("no member exports: simulate members, or add the real member b"))
	}
	if c.Exports < 1 || c.Exports > 10_000 {
		errs = append(errs, fmt.Errorf("%d exports; a member can have 1 to 10000", c.Exports))
	}
	if c.Endpoints < 1 || c.Endpoints > 10_000 {
		errs = append(errs, fmt.Errorf("%d endpoints; a Service can have 1 to 10000", c.Endpoints))
	}
	if room := 1 << (32 - pods.Bits()); len(errs) == 0 && (c.Members+3)<<c.blockBits() > room {
		errs = append(errs, fmt.Errorf("%d members with %d exports of %d endpoints do not fit into %s", c.Members, c.Exports, c.Endpoints, pods))
	}
	return errors.Join(errs...)
}

// blockBits is the number of bits of the addresses within a member's block.
func (c Config) blockBits() int { return bits.Len(uint(c.Exports*c.Endpoints + spare)) }

// exporters is the number of exporting members.
func (c Config) exporters() int {
	if c.Exporter {
		return c.Members + 1
	}
	return c.Members
}

// Services is the number of imports in the ClusterSet.
func (c Config) Services() int {
	if c.Distinct {
		return c.exporters() * c.Exports
	}
	return c.Exports
}

// RemoteEndpoints is the number of endpoints that a imports.
func (c Config) RemoteEndpoints() int { return c.exporters() * c.Exports * c.Endpoints }

// ClusterSet is a running ClusterSet. Its methods must not be called concurrently.
type ClusterSet struct {
	cfg    Config
	dir    string
	began  time.Time
	broker *apiserver.Server
	admin  client.WithWatch // of the broker
	a, b   *member
	seen   *observer // of a

	federated []*member // of a federation: all members

	exporters []*exporter
	tracker   *tracker
	relays    *relays // life is the background work, which consists of Leases and watches; lifetime is its context, and end stops it.
	// lifetime is the context of the background work, which are Leases and watches. Close ends it.
	life     *errgroup.Group
	lifetime context.Context
	end      context.CancelFunc

	mu   sync.Mutex // guards undo
	undo []func() error
}

// NewClusterSet starts the servers, registers the members, and fills the broker with all exports. The controller of a does not
// run yet. Close ends everything.
func NewClusterSet(ctx context.Context, cfg Config) (*ClusterSet, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("simulate a ClusterSet: %w", err)
	}
	w := &ClusterSet{cfg: cfg, began: time.Now(), tracker: newTracker()}
	lifetime, end := context.WithCancel(ctx)
	w.end = end
	w.life, w.lifetime = errgroup.WithContext(lifetime)
	for _, step := range []func(context.Context) error{w.startServers, w.register, w.fill, w.fillExporter, w.live, w.observe, w.observeExporter} {
		if err := step(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("simulate a ClusterSet: %w", err), w.Close())
		}
	}
	return w, nil
}

// Close ends every process of the ClusterSet and removes its files.
func (w *ClusterSet) Close() error {
	w.end()
	err := w.life.Wait()
	if errors.Is(err, context.Canceled) {
		err = nil // Close itself ended the background work
	}
	errs := []error{err}
	for _, undo := range slices.Backward(w.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// say reports a step, with the time since the start.
func (w *ClusterSet) say(format string, args ...any) {
	fmt.Fprintf(w.cfg.Progress, "[%4.0fs] %s\n", time.Since(w.began).Seconds(), fmt.Sprintf(format, args...))
}

// startServers starts the API servers of the broker and of the real members.
func (w *ClusterSet) startServers(ctx context.Context) error {
	dir, err := os.MkdirTemp(w.cfg.Storage, "isthmus-scale-")
	if err != nil {
		return err
	}
	w.dir = dir
	w.onClose(func() error { return os.RemoveAll(dir) })

	w.say("start API servers, with their data in %s", w.cfg.Storage)
	users := []string{accountOf(importerID), accountOf(exporterID), quotaControllerUser}
	for i := range w.cfg.Members {
		users = append(users, accountOf(simulatedID(i)))
	}
	starting, startCtx := errgroup.WithContext(ctx)
	starting.Go(func() (err error) {
		if w.broker, err = w.startServer(startCtx, "broker", users...); err != nil {
			return err
		}
		w.admin, err = newClient(w.broker.As(apiserver.Admin))
		return err
	})
	starting.Go(func() (err error) {
		w.a, err = w.newMember(startCtx, importerID, "a")
		return err
	})
	if w.cfg.Exporter {
		starting.Go(func() (err error) {
			w.b, err = w.newMember(startCtx, exporterID, "b")
			return err
		})
	}
	return starting.Wait()
}

// onClose registers undo with Close, which calls the last one first.
func (w *ClusterSet) onClose(undo ...func() error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.undo = append(w.undo, undo...)
}

// startServer starts an API server with its files in a folder of the ClusterSet.
func (w *ClusterSet) startServer(ctx context.Context, name string, users ...string) (*apiserver.Server, error) {
	dir := filepath.Join(w.dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	s, err := apiserver.Start(ctx, apiserver.Config{Assets: w.cfg.Assets, Dir: dir, Users: users})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	w.onClose(func() error { s.Stop(); return nil })
	return s, nil
}

// poll is the interval of cheap checks.
const poll = 20 * time.Millisecond

// await calls done repeatedly until it returns true, for at most the given time. The error names what is awaited. It also
// returns if the controller of a real member exits.
func (w *ClusterSet) await(ctx context.Context, atMost, every time.Duration, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		for _, m := range append([]*member{w.a, w.b}, w.federated...) {
			if err := m.failure(); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, ctx.Err())
		case <-w.lifetime.Done():
			return fmt.Errorf("%s: %w", what, context.Cause(w.lifetime))
		case <-tick.C:
		}
	}
}
