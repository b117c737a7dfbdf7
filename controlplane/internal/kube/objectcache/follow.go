package objectcache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// status states whether a kind can be read.
type status struct {
	mu        sync.Mutex
	err       error // why the kind cannot be read: ErrNotSynced at first
	forbidden bool  // the API server denied the last attempt
	skipped   bool  // SkipIfForbidden is set, and the API server denied the first attempt
	listing   bool  // the Informer holds a slot of listings
}

// listings has one slot for each kind that may be listed at the same time, over all members of a federation: until it is
// packed, an object takes a multiple of its final memory.
var listings = make(chan struct{}, 4)

// listingWait limits how long a kind waits for a slot, so that a member that answers slowly does not delay the others.
const listingWait = 5 * time.Second

// acquire waits for a slot of listings.
func (s *status) acquire(ctx context.Context) {
	if s.isListing() {
		return
	}
	late := time.NewTimer(listingWait)
	defer late.Stop()
	select {
	case listings <- struct{}{}:
	case <-late.C:
		return
	case <-ctx.Done():
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() != nil || s.listing { // the caller has ended, and would not release the slot
		<-listings
		return
	}
	s.listing = true
}

func (s *status) isListing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listing
}

// release frees the slot of listings, if the kind holds one.
func (s *status) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listing {
		s.listing = false
		<-listings
	}
}

// Err returns why the kind cannot be read: ErrNotSynced, ErrKindMissing, or nil.
func (i *Informer[T, K]) Err() error {
	i.status.mu.Lock()
	defer i.status.mu.Unlock()
	return i.status.err
}

// Skipped reports whether the API server denies the kind, which was never read, and SkipIfForbidden accepts that.
func (i *Informer[T, K]) Skipped() bool {
	i.status.mu.Lock()
	defer i.status.mu.Unlock()
	return i.status.skipped && i.status.forbidden && errors.Is(i.status.err, ErrNotSynced)
}

// Pending reports whether the kind was never read and is still expected. A kind that is missing or skipped is not.
func (i *Informer[T, K]) Pending() bool {
	i.status.mu.Lock()
	defer i.status.mu.Unlock()
	return errors.Is(i.status.err, ErrNotSynced) && !i.status.skipped
}

// Forbidden reports whether the API server denied the last attempt to read the kind. Items that were read before stay.
func (i *Informer[T, K]) Forbidden() bool {
	i.status.mu.Lock()
	defer i.status.mu.Unlock()
	return i.status.forbidden
}

// WaitForSync waits until the Informer has been complete once, and After has been called for all its items.
func (i *Informer[T, K]) WaitForSync(ctx context.Context) error {
	select {
	case <-i.synced:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for %s: %w", i.gvk.Kind, ctx.Err())
	}
}

// Load reads the kind once. A missing optional kind is recorded and is not an error.
func (i *Informer[T, K]) Load(ctx context.Context, c client.Reader, scheme *runtime.Scheme) error {
	list := i.newList(scheme)
	if err := c.List(ctx, list, i.options(nil)); err != nil {
		return i.explain(err)
	}
	var objects []any
	err := meta.EachListItem(list, func(o runtime.Object) error {
		objects = append(objects, o)
		return nil
	})
	if err != nil {
		return err
	}
	return i.Replace(objects, list.GetResourceVersion())
}

// Run follows the API server until ctx ends. It retries for as long as the server does not answer.
func (i *Informer[T, K]) Run(ctx context.Context, c client.WithWatch) error {
	i.reflector(i.source(c, func(context.Context) {}), nil).RunWithContext(ctx)
	return nil
}

// retry is the backoff of a Follower while its API server does not answer.
var retry = wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 5 * time.Second}

// Follower returns a function that reads the kind and watches it until its ctx ends, or until a request fails, whose error
// it returns. The next call resumes from the last seen state. A missing optional kind is recorded and is not an error.
func (i *Informer[T, K]) Follower(c client.WithWatch) func(context.Context) error {
	var failed atomic.Pointer[error] // a Reflector sends requests from goroutines of its own
	source := i.source(c, i.status.acquire)
	list, watched := source.ListWithContextFunc, source.WatchFuncWithContext
	source.ListWithContextFunc = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		l, err := list(ctx, o)
		failed.Store(&err)
		return l, err
	}
	source.WatchFuncWithContext = func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
		w, err := watched(ctx, o)
		failed.Store(&err)
		return w, err
	}
	reflector := i.reflector(source, &retry)
	return func(ctx context.Context) error {
		defer i.status.release()
		err := reflector.ListAndWatchWithContext(ctx)
		if last := failed.Load(); err == nil && last != nil {
			err = *last // a Reflector does not return every error
		}
		if err != nil && ctx.Err() == nil {
			return i.explain(err)
		}
		return nil
	}
}

// source returns the requests of a Reflector. It calls acquire before objects stream in.
func (i *Informer[T, K]) source(c client.WithWatch, acquire func(context.Context)) *toolscache.ListWatch {
	return &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list := i.newList(c.Scheme())
			acquire(ctx)
			return list, c.List(ctx, list, i.options(&o))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := c.Watch(ctx, i.newList(c.Scheme()), i.options(&o))
			if err == nil && o.SendInitialEvents != nil && *o.SendInitialEvents {
				acquire(ctx) // the server answers; its events wait
			}
			return w, err
		},
	}
}

// reflector returns a Reflector that fills the Informer. A nil backoff is the library's.
func (i *Informer[T, K]) reflector(source *toolscache.ListWatch, backoff *wait.Backoff) *toolscache.Reflector {
	return toolscache.NewReflectorWithOptions(source, i.cfg.Object, i, toolscache.ReflectorOptions{Name: i.gvk.Kind, Backoff: backoff})
}

// options are the list options that Source asks for.
func (i *Informer[T, K]) options(raw *metav1.ListOptions) client.ListOption {
	return &client.ListOptions{Raw: raw, Namespace: i.cfg.Namespace, LabelSelector: i.cfg.Selector}
}

// newList returns an empty list whose items have the type of Source.Object.
func (i *Informer[T, K]) newList(scheme *runtime.Scheme) client.ObjectList {
	gvk := i.gvk
	gvk.Kind += "List"
	switch i.cfg.Object.(type) {
	case *unstructured.Unstructured:
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(gvk)
		return list
	case *metav1.PartialObjectMetadata:
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(gvk)
		return list
	}
	list, err := scheme.New(gvk)
	if err != nil {
		panic(err) // New found the kind in the same scheme, and every kind has a list
	}
	return list.(client.ObjectList) //nolint:forcetypeassert // every list is one
}

// explain records a missing optional kind, for which it returns nil, and a missing right. It adds the kind to any other
// error.
func (i *Informer[T, K]) explain(err error) error {
	s := &i.status
	s.mu.Lock()
	s.forbidden = apierrors.IsForbidden(err)
	skip := s.forbidden && i.cfg.SkipIfForbidden && !s.skipped && errors.Is(s.err, ErrNotSynced)
	s.skipped = s.skipped || skip
	s.mu.Unlock()
	if skip {
		i.cfg.Settled()
	}
	if i.cfg.Optional && (meta.IsNoMatchError(err) || apierrors.IsNotFound(err)) {
		i.settle(fmt.Errorf("%s: %w", i.gvk, ErrKindMissing))
		return nil
	}
	return fmt.Errorf("watch %s: %w", i.gvk.Kind, err)
}

// settle sets why the kind cannot be read, nil if it can.
func (i *Informer[T, K]) settle(err error) {
	s := &i.status
	s.mu.Lock()
	changed := (err == nil) != (s.err == nil) || errors.Is(err, ErrKindMissing) != errors.Is(s.err, ErrKindMissing)
	s.err, s.forbidden = err, false
	s.mu.Unlock()
	if changed {
		i.cfg.Settled()
	}
}
