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
	// perSlice is how many endpoints an EndpointSlice holds at most, as the EndpointSlice controller has it
	// (--max-endpoints-per-slice).
	perSlice = 100
	// namespaces is over how many the Services are spread.
	namespaces = 10
	// spare is how many addresses each member has beyond those it starts with: one a change.
	spare = 1 << 16
	// writers is how many objects are written at a time while a ClusterSet is filled.
	writers = 16
)

// The real members.
const (
	importerID clusterset.ClusterID = "a"
	exporterID clusterset.ClusterID = "b"
)

// pods is where the addresses of all endpoints are.
var pods = netip.MustParsePrefix("10.0.0.0/8")

// Config describes a ClusterSet.
type Config struct {
	// Assets is a folder with kube-apiserver and etcd, Controller the program isthmus-controller.
	Assets, Controller string
	// Storage is where etcd's files are; Close removes them.
	Storage string
	// Members is how many members are simulated.
	Members int
	// Exports is how many Services each member exports, Endpoints how many each of them has.
	Exports, Endpoints int
	// Distinct makes the Services of every member its own. Else all members export the same ones, and
	// every import has endpoints of all.
	Distinct bool
	// Exporter adds the real member b, which exports like the simulated ones.
	Exporter bool
	// Progress gets one line a step.
	Progress io.Writer
}

// Validate reports everything that is wrong with c.
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
		errs = append(errs, errors.New("nobody exports: there must be simulated members, or the real member b"))
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

// blockBits is how many bits count a member's addresses.
func (c Config) blockBits() int { return bits.Len(uint(c.Exports*c.Endpoints + spare)) }

// exporters is how many members export.
func (c Config) exporters() int {
	if c.Exporter {
		return c.Members + 1
	}
	return c.Members
}

// Services is how many imports the ClusterSet has.
func (c Config) Services() int {
	if c.Distinct {
		return c.exporters() * c.Exports
	}
	return c.Exports
}

// RemoteEndpoints is how many endpoints a imports.
func (c Config) RemoteEndpoints() int { return c.exporters() * c.Exports * c.Endpoints }

// ClusterSet is one that was made. Its methods are to be called one at a time.
type ClusterSet struct {
	cfg    Config
	dir    string
	began  time.Time
	broker *apiserver.Server
	admin  client.WithWatch // of the broker
	a, b   *member
	seen   *observer // of a

	federated []*member // all, of a federation

	exporters []*exporter
	tracker   *tracker
	relays    *relays // nil before the first ChurnRelay
	// life is what goes on by itself until Close: Leases, watches.
	life     *errgroup.Group
	lifetime context.Context
	end      context.CancelFunc

	mu   sync.Mutex // guards undo
	undo []func() error
}

// NewClusterSet starts the servers, registers the members, and fills the broker with all exports. The
// controller of a does not run yet. Nothing of it outlives Close.
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
		err = nil // that was us
	}
	errs := []error{err}
	for _, undo := range slices.Backward(w.undo) {
		errs = append(errs, undo())
	}
	return errors.Join(errs...)
}

// say reports a step, with the time since the beginning.
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
	users := []string{accountOf(importerID), accountOf(exporterID)}
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

// onClose makes Close call undo, before what it was told earlier.
func (w *ClusterSet) onClose(undo ...func() error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.undo = append(w.undo, undo...)
}

// startServer starts an API server whose files are in a folder of the ClusterSet.
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

// poll is how often to ask for what costs nothing.
const poll = 20 * time.Millisecond

// await asks done now and then until it says so, at most for the given time; then what is the
// error's subject. It also ends when the controller of a real member has ended.
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
