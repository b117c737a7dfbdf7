// Package view turns the ServiceImports and EndpointSlices of one cluster, or of a folder of manifests, into the world as a node needs
// to know it: a [clusterset.Snapshot], handed to each [Sink] whenever something changed.
//
// Objects are translated and cut down as they enter the caches, once a change. Nothing is handed out
// before all caches have synced, for half a world looks like mass deletion. When the API server goes
// away the last world stays, and with it whatever the sinks made of it.
package view

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/tools/cache"
	mcsv1beta1 "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned/typed/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Sink takes the whole world. Sync may be called with a Snapshot it has seen, and must then be cheap;
// it may keep the Snapshot and must not change it. An error makes the view call again, later. Calls do
// not overlap.
type Sink interface {
	Sync(ctx context.Context, s *clusterset.Snapshot) error
}

// Config says who gets the world and how often. The zero value of a duration means its default.
type Config struct {
	// Sinks take the world, each at its own pace: one that fails or hangs does not hold up the others.
	// The key names the sink in logs and in Status.
	Sinks map[string]Sink
	// MinInterval passes at least between two Syncs of one sink. Default 50 ms: a burst of changes
	// becomes one Sync, and a single change waits for nothing.
	MinInterval time.Duration
	// MaxInterval passes at most between two Syncs of one sink, even in silence. Default 1 min.
	MaxInterval time.Duration
	// RetryInterval passes after the first failed Sync; it doubles up to MaxInterval. Default 200 ms.
	RetryInterval time.Duration
	Log           *slog.Logger
}

// Validate reports all faults of c at once.
func (c Config) Validate() error {
	var faults []error
	if len(c.Sinks) == 0 {
		faults = append(faults, errors.New("view: no sink"))
	}
	if c.Log == nil {
		faults = append(faults, errors.New("view: no logger"))
	}
	for name, d := range map[string]time.Duration{"min": c.MinInterval, "max": c.MaxInterval, "retry": c.RetryInterval} {
		if d <= 0 {
			faults = append(faults, fmt.Errorf("view: %s interval %s is not positive", name, d))
		}
	}
	if c.MinInterval > c.MaxInterval {
		faults = append(faults, fmt.Errorf("view: min interval %s is above max interval %s", c.MinInterval, c.MaxInterval))
	}
	return errors.Join(faults...)
}

func (c Config) withDefaults() Config {
	defaultTo := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	defaultTo(&c.MinInterval, 50*time.Millisecond)
	defaultTo(&c.MaxInterval, time.Minute)
	defaultTo(&c.RetryInterval, 200*time.Millisecond)
	return c
}

// Status is where a View stands.
type Status struct {
	Synced   bool      // all caches have been filled once
	Built    time.Time // when the last Snapshot was made; zero before
	Services int       // in the last Snapshot
	WatchErr error     // why objects cannot be read now, or nil
	Sinks    map[string]SinkStatus
}

// SinkStatus is how one sink fares.
type SinkStatus struct {
	Synced time.Time // when Sync last succeeded; zero before
	Err    error     // of the last Sync
}

// View watches one cluster, or the manifests of one. Make it with New or NewFolder.
type View struct {
	cfg      Config
	sources  []source
	read     func() *clusterset.Snapshot // of all there is, once all sources have synced
	dirty    chan struct{}
	wake     map[string]chan struct{}
	mu       sync.Mutex // guards what follows
	snapshot *clusterset.Snapshot
	status   Status
	watchErr map[string]error // by kind of object, or by file
}

// source is where objects come from.
type source struct {
	run       func(ctx context.Context) // until ctx is done
	hasSynced func() bool               // all that it had at the start has been read
}

// New returns a View that reads through the given clients, in all namespaces. It talks to nobody
// before Run.
func New(cfg Config, imports mcsclient.ServiceImportsGetter, slices discoveryclient.EndpointSlicesGetter) (*View, error) {
	v, err := newView(cfg)
	if err != nil {
		return nil, err
	}
	w := newJoined()
	err = watchKind(v, "ServiceImport", &mcsv1beta1.ServiceImport{}, cachedImport, w.replaceImport, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = notAggregate
			return imports.ServiceImports(metav1.NamespaceAll).List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = notAggregate
			w, err := imports.ServiceImports(metav1.NamespaceAll).Watch(ctx, o)
			v.noteWatch("ServiceImport", err)
			return w, err
		},
	})
	if err != nil {
		return nil, err
	}
	err = watchKind(v, "EndpointSlice", &discoveryv1.EndpointSlice{}, cachedSlice, w.replaceSlice, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = mcsv1beta1.LabelServiceName
			return slices.EndpointSlices(metav1.NamespaceAll).List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = mcsv1beta1.LabelServiceName
			w, err := slices.EndpointSlices(metav1.NamespaceAll).Watch(ctx, o)
			v.noteWatch("EndpointSlice", err)
			return w, err
		},
	})
	if err != nil {
		return nil, err
	}
	v.read = w.snapshot
	return v, nil
}

// newView returns a View without sources.
func newView(cfg Config) (*View, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	v := &View{
		cfg:      cfg,
		dirty:    make(chan struct{}, 1),
		wake:     map[string]chan struct{}{},
		status:   Status{Sinks: map[string]SinkStatus{}},
		watchErr: map[string]error{},
	}
	for name := range cfg.Sinks {
		v.wake[name] = make(chan struct{}, 1)
		v.status.Sinks[name] = SinkStatus{}
	}
	return v, nil
}

// notAggregate selects the imports of this cluster: where the broker is a member itself, the aggregates of
// the whole ClusterSet stand beside them.
const notAggregate = "!" + v1alpha1.LabelServiceName

// watchKind adds a kind of object to v. replace hears of each change: what it was and what it is, nil for what
// was not, is not, or cannot be understood.
func watchKind[T any](v *View, kind string, example runtime.Object, transform cache.TransformFunc, replace func(was, is *T), lw cache.ListerWatcher) error {
	informer := cache.NewSharedIndexInformer(lw, example, 0, nil)
	changed := func(was, is any) {
		old, fresh := cachedIn[T](was), cachedIn[T](is)
		if old != nil && fresh != nil && old.version == fresh.version {
			return // a new list of what we have
		}
		if fresh != nil && fresh.err != nil {
			v.cfg.Log.Error("skip an object that cannot be understood", "kind", kind,
				"namespace", fresh.namespace, "name", fresh.name, "err", fresh.err)
		}
		replace(old.understood(), fresh.understood())
		v.markDirty()
	}
	handler, errHandler := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { changed(nil, obj) },
		UpdateFunc: changed,
		DeleteFunc: func(obj any) { changed(obj, nil) },
	})
	err := errors.Join(errHandler, informer.SetTransform(transform),
		informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
			// A watch that ended or got too old is renewed; that is no failure.
			if !errors.Is(err, io.EOF) && !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
				v.noteWatch(kind, err)
			}
		}))
	if err != nil {
		return fmt.Errorf("watch %ss: %w", kind, err)
	}
	v.sources = append(v.sources, source{informer.RunWithContext, handler.HasSynced})
	return nil
}

// Run watches and feeds the sinks until ctx is done; then it returns nil. No goroutine outlives it.
// An API server that cannot be reached is tried again for ever.
func (v *View) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, s := range v.sources {
		wg.Go(func() { s.run(ctx) })
	}
	for name, sink := range v.cfg.Sinks {
		wg.Go(func() { v.feed(ctx, name, sink) })
	}
	for _, s := range v.sources {
		if !cache.WaitForCacheSync(ctx.Done(), s.hasSynced) {
			return nil
		}
	}
	v.mu.Lock()
	v.status.Synced = true
	v.mu.Unlock()

	v.markDirty()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-v.dirty:
		}
		v.build()
		if !pause(ctx, v.cfg.MinInterval) {
			return nil
		}
	}
}

// Status says where the view stands now. The result belongs to the caller.
func (v *View) Status() Status {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := v.status
	s.Sinks = maps.Clone(v.status.Sinks)
	var errs []error
	for _, kind := range slices.Sorted(maps.Keys(v.watchErr)) {
		errs = append(errs, v.watchErr[kind])
	}
	s.WatchErr = errors.Join(errs...)
	return s
}

// build makes the Snapshot of now and wakes all sinks.
func (v *View) build() {
	s := v.read()
	v.mu.Lock()
	v.snapshot, v.status.Built, v.status.Services = s, time.Now(), len(s.Services)
	v.mu.Unlock()
	for _, wake := range v.wake {
		raise(wake)
	}
}

// feed hands the newest Snapshot to one sink: after each change, after MaxInterval of silence, and
// again after an error, until ctx is done.
func (v *View) feed(ctx context.Context, name string, sink Sink) {
	timer := time.NewTimer(v.cfg.MaxInterval)
	defer timer.Stop()
	retry := v.cfg.RetryInterval
	for {
		select {
		case <-ctx.Done():
			return
		case <-v.wake[name]:
		case <-timer.C:
		}
		v.mu.Lock()
		s := v.snapshot
		v.mu.Unlock()
		if s == nil {
			timer.Reset(v.cfg.MaxInterval)
			continue
		}
		err := sink.Sync(ctx, s)
		if ctx.Err() != nil {
			return
		}
		v.noteSync(name, err)
		if err != nil {
			timer.Reset(retry)
			retry = min(2*retry, v.cfg.MaxInterval)
		} else {
			timer.Reset(v.cfg.MaxInterval)
			retry = v.cfg.RetryInterval
		}
		if !pause(ctx, v.cfg.MinInterval) {
			return
		}
	}
}

// noteSync records the outcome of a Sync, and logs it when it differs from the one before.
func (v *View) noteSync(name string, err error) {
	v.mu.Lock()
	was := v.status.Sinks[name]
	is := SinkStatus{Synced: was.Synced, Err: err}
	if err == nil {
		is.Synced = time.Now()
	}
	v.status.Sinks[name] = is
	v.mu.Unlock()

	switch {
	case err != nil && (was.Err == nil || was.Err.Error() != err.Error()):
		v.cfg.Log.Error("sync failed; will try again", "sink", name, "err", err)
	case err == nil && was.Err != nil:
		v.cfg.Log.Info("sync works again", "sink", name)
	case err == nil && was.Synced.IsZero():
		v.cfg.Log.Info("first sync done", "sink", name)
	}
}

// noteWatch records why objects of a kind, or a file, cannot be read, or nil when they can, and logs what is
// new. The source tries again by itself.
func (v *View) noteWatch(kind string, err error) {
	v.mu.Lock()
	was := v.watchErr[kind]
	v.watchErr[kind] = err
	v.mu.Unlock()
	switch {
	case err != nil && (was == nil || was.Error() != err.Error()):
		v.cfg.Log.Warn("watch failed; the last world stays, will try again", "kind", kind, "err", err)
	case err == nil && was != nil:
		v.cfg.Log.Info("watch works again", "kind", kind)
	}
}

func (v *View) markDirty() { raise(v.dirty) }

// raise sets a flag that stays up until somebody receives from it.
func raise(flag chan struct{}) {
	select {
	case flag <- struct{}{}:
	default:
	}
}

// pause waits for d, and reports false when ctx was done before.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
