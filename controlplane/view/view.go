// Package view turns the ServiceImports and EndpointSlices of one cluster, or of a folder of manifests, into a
// [clusterset.Snapshot], and passes it to each [Sink] after every change.
//
// For example, an agent's dataplane and its name server are two sinks: when a pod of an imported Service starts, each
// receives one Snapshot with the new endpoint.
//
// Each change translates and trims an object once, as it enters its cache. No sink receives a Snapshot before all caches
// have synced, because an incomplete one looks like mass deletion. While the API server is away, the last Snapshot stays.
package view

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
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
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

// Sink receives Snapshots. Sync may be called with a Snapshot that it has seen, and must then be cheap. It may keep the
// Snapshot and must not change it. After an error the view calls again, later. Calls do not overlap.
type Sink interface {
	Sync(ctx context.Context, s *clusterset.Snapshot) error
}

// Config configures a View. The zero value of a duration means its default.
type Config struct {
	// Sinks receive Snapshots, each at its own pace: one that fails or hangs does not delay the others. The key names the
	// sink in logs and in Status.
	Sinks map[string]Sink
	// MinInterval is the least time between two Syncs of one sink. Default 50 ms: a burst of changes becomes one Sync, and a
	// single change has no delay.
	MinInterval time.Duration
	// MaxInterval is the most time between two Syncs of one sink, even without changes. Default 1 min.
	MaxInterval time.Duration
	// RetryInterval is the delay after the first failed Sync; it doubles up to MaxInterval. Default 200 ms.
	RetryInterval time.Duration
	// ManagedBy selects objects by the controllers that wrote them, for New: the values of the label
	// endpointslice.kubernetes.io/managed-by on EndpointSlices and of app.kubernetes.io/managed-by on ServiceImports. The View
	// ignores the objects of others. Empty selects the objects of any MCS implementation.
	ManagedBy []string
	Log       *slog.Logger
}

// Validate reports every fault of c.
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

// Status is the state of a View.
type Status struct {
	Synced   bool      // all caches have been filled once
	Built    time.Time // when the last Snapshot was built; zero before the first
	Services int       // in the last Snapshot
	WatchErr error     // the current fault of reading objects, or nil
	Sinks    map[string]SinkStatus
}

// SinkStatus is the state of one sink.
type SinkStatus struct {
	Synced time.Time // when Sync last succeeded; zero before the first
	Err    error     // of the last Sync
}

// View watches one cluster, or the manifests of one. Make it with New or NewFolder.
type View struct {
	cfg      Config
	sources  []source
	read     func() *clusterset.Snapshot // called once all sources have synced
	dirty    signal.Signal
	wake     map[string]signal.Signal // by sink
	mu       sync.Mutex               // guards what follows
	snapshot *clusterset.Snapshot
	status   Status
	watchErr map[string]error // by kind of object, or by file
}

// source delivers objects.
type source struct {
	run       func(ctx context.Context) // until ctx is done
	hasSynced func() bool               // all objects of the start have been read
}

// New returns a View that reads through the given clients, in all namespaces. It sends no request before Run.
func New(cfg Config, imports mcsclient.ServiceImportsGetter, slices discoveryclient.EndpointSlicesGetter) (*View, error) {
	v, err := newView(cfg)
	if err != nil {
		return nil, err
	}
	w := newJoined()
	ofImports, ofSlices := cfg.selectors()
	err = watchKind(v, "ServiceImport", &mcsv1beta1.ServiceImport{}, cachedImport, w.replaceImport, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = ofImports
			return imports.ServiceImports(metav1.NamespaceAll).List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = ofImports
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
			o.LabelSelector = ofSlices
			return slices.EndpointSlices(metav1.NamespaceAll).List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = ofSlices
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
		dirty:    signal.New(),
		wake:     map[string]signal.Signal{},
		status:   Status{Sinks: map[string]SinkStatus{}},
		watchErr: map[string]error{},
	}
	for name := range cfg.Sinks {
		v.wake[name] = signal.New()
		v.status.Sinks[name] = SinkStatus{}
	}
	return v, nil
}

// selectors returns the label selectors of ServiceImports and of EndpointSlices.
func (c Config) selectors() (imports, slices string) {
	slices = mcsv1beta1.LabelServiceName
	if len(c.ManagedBy) > 0 {
		writers := " in (" + strings.Join(c.ManagedBy, ",") + ")"
		imports, slices = v1alpha1.LabelManagedBy+writers, slices+","+discoveryv1.LabelManagedBy+writers
	}
	return imports, slices
}

// watchKind adds a kind of object to v. replace receives the old and the new form at each change; nil if the object did not
// exist, does not exist, or is not valid.
func watchKind[T any](v *View, kind string, example runtime.Object, transform cache.TransformFunc, replace func(was, is *T), lw cache.ListerWatcher) error {
	informer := cache.NewSharedIndexInformer(lw, example, 0, nil)
	changed := func(was, is any) {
		old, fresh := cachedIn[T](was), cachedIn[T](is)
		if old != nil && fresh != nil && old.version == fresh.version {
			return // a new list with the same version
		}
		if fresh != nil && fresh.err != nil && !errors.Is(fresh.err, errAggregate) {
			v.cfg.Log.Error("object ignored: it is not valid", "kind", kind,
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
			// The reflector renews a watch that ended or expired; that is no failure.
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

// Run watches and feeds the sinks until ctx ends; then it returns nil. No goroutine outlives it. It retries without limit
// while the API server is away.
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
		case <-v.dirty.C():
		}
		v.build()
		if !pause(ctx, v.cfg.MinInterval) {
			return nil
		}
	}
}

// Status returns the current state. The caller owns the result.
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

// build builds a Snapshot and wakes all sinks.
func (v *View) build() {
	s := v.read()
	v.mu.Lock()
	v.snapshot, v.status.Built, v.status.Services = s, time.Now(), len(s.Services)
	v.mu.Unlock()
	for _, wake := range v.wake {
		wake.Notify()
	}
}

// feed passes the newest Snapshot to one sink after each change, after MaxInterval without one, and after an error, until ctx
// ends.
func (v *View) feed(ctx context.Context, name string, sink Sink) {
	timer := time.NewTimer(v.cfg.MaxInterval)
	defer timer.Stop()
	retry := v.cfg.RetryInterval
	for {
		select {
		case <-ctx.Done():
			return
		case <-v.wake[name].C():
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

// noteSync records the result of a Sync, and logs it if it differs from the one before.
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
		v.cfg.Log.Error("sync failed; retrying", "sink", name, "err", err)
	case err == nil && was.Err != nil:
		v.cfg.Log.Info("sync succeeds again", "sink", name)
	case err == nil && was.Synced.IsZero():
		v.cfg.Log.Info("first sync done", "sink", name)
	}
}

// noteWatch records the fault of reading a kind of objects or a file, nil without one, and logs changes. The source retries
// by itself.
func (v *View) noteWatch(kind string, err error) {
	v.mu.Lock()
	was := v.watchErr[kind]
	v.watchErr[kind] = err
	v.mu.Unlock()
	switch {
	case err != nil && (was == nil || was.Error() != err.Error()):
		v.cfg.Log.Warn("watch failed; the last snapshot stays, retrying", "kind", kind, "err", err)
	case err == nil && was != nil:
		v.cfg.Log.Info("watch works again", "kind", kind)
	}
}

func (v *View) markDirty() { v.dirty.Notify() }

// pause waits for d, and reports false if ctx ended before.
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
