package world

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// importTimeout is how long a first import may take.
const importTimeout = 20 * time.Minute

// observer knows how much has been imported, from a watch of its own. Safe for concurrent use.
type observer struct {
	mu        sync.Mutex
	slices    map[types.NamespacedName]int // how many endpoints each has
	endpoints int                          // their sum
	imports   map[types.NamespacedName]bool
	at        time.Time // when one of the numbers changed last
}

// progress returns how many endpoints and Services have been imported, and since when.
func (o *observer) progress() (endpoints, imports int, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.endpoints, len(o.imports), o.at
}

func (o *observer) slice(at time.Time, gone bool, es *discoveryv1.EndpointSlice) {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := client.ObjectKeyFromObject(es)
	had, n := o.slices[key], len(es.Endpoints)
	if gone {
		n = 0
		delete(o.slices, key)
	} else {
		o.slices[key] = n
	}
	if n != had {
		o.endpoints, o.at = o.endpoints+n-had, at
	}
}

func (o *observer) serviceImport(at time.Time, gone bool, si *v1beta1.ServiceImport) {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := client.ObjectKeyFromObject(si)
	switch {
	case gone:
		delete(o.imports, key)
	case o.imports[key]:
		return
	default:
		o.imports[key] = true
	}
	o.at = at
}

// observe watches what is imported into a, which must be nothing yet.
func (w *World) observe(ctx context.Context) error {
	o := &observer{slices: map[types.NamespacedName]int{}, imports: map[types.NamespacedName]bool{}}
	w.seen = o
	ours := client.MatchingLabels{discoveryv1.LabelManagedBy: v1alpha1.ManagedBy}
	err := w.follow(ctx, w.a, &discoveryv1.EndpointSliceList{}, func(at time.Time, event watch.EventType, obj client.Object) {
		if es, ok := obj.(*discoveryv1.EndpointSlice); ok {
			w.arrived(at, es)
			o.slice(at, event == watch.Deleted, es)
		}
	}, ours)
	if err != nil {
		return err
	}
	return w.follow(ctx, w.a, &v1beta1.ServiceImportList{}, func(at time.Time, event watch.EventType, obj client.Object) {
		if si, ok := obj.(*v1beta1.ServiceImport); ok {
			o.serviceImport(at, event == watch.Deleted, si)
		}
	})
}

// observeExporter watches where the changes of b begin.
func (w *World) observeExporter(ctx context.Context) error {
	if w.b == nil {
		return nil
	}
	return w.follow(ctx, w.b, &discoveryv1.EndpointSliceList{}, func(at time.Time, _ watch.EventType, obj client.Object) {
		if es, ok := obj.(*discoveryv1.EndpointSlice); ok {
			eachAddress(es, func(a netip.Addr) { w.tracker.from(a, at) })
		}
	})
}

func (w *World) arrived(at time.Time, es *discoveryv1.EndpointSlice) {
	eachAddress(es, func(a netip.Addr) { w.tracker.to(a, at) })
}

func eachAddress(es *discoveryv1.EndpointSlice, do func(netip.Addr)) {
	for i := range es.Endpoints {
		for _, text := range es.Endpoints[i].Addresses {
			if a, err := netip.ParseAddr(text); err == nil {
				do(a)
			}
		}
	}
}

// follow watches the objects of list's kind in m from now on, as long as the world and m live, and calls
// each with every event and when it came.
func (w *World) follow(ctx context.Context, m *member, list client.ObjectList, each func(time.Time, watch.EventType, client.Object), only ...client.ListOption) error {
	if err := m.client.List(ctx, list, only...); err != nil {
		return fmt.Errorf("watch %s: %w", m.id, err)
	}
	options := &client.ListOptions{}
	options.ApplyOptions(only)
	lifetime, end := context.WithCancel(w.lifetime)
	m.ends = append(m.ends, end)
	watcher, err := watchtools.NewRetryWatcherWithContext(lifetime, list.GetResourceVersion(), &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			o := *options
			o.Raw = &raw
			return m.client.Watch(ctx, list, &o)
		},
	})
	if err != nil {
		return fmt.Errorf("watch %s: %w", m.id, err)
	}
	w.life.Go(func() error {
		defer watcher.Stop()
		for {
			select {
			case <-lifetime.Done():
				return nil
			case event, ok := <-watcher.ResultChan():
				now := time.Now()
				if !ok {
					if lifetime.Err() != nil {
						return nil
					}
					return fmt.Errorf("the watch of %s ended", m.id)
				}
				if event.Type == watch.Error {
					return fmt.Errorf("the watch of %s broke: %w", m.id, apierrors.FromObject(event.Object))
				}
				if obj, ok := event.Object.(client.Object); ok && event.Type != watch.Bookmark {
					each(now, event.Type, obj)
				}
			}
		}
	})
	return nil
}

// awaitImported waits until a has all Services and endpoints that anybody exports, and returns when the
// last of them was seen.
func (w *World) awaitImported(ctx context.Context) (time.Time, error) {
	var done, told time.Time
	told = time.Now()
	err := w.await(ctx, importTimeout, poll, "not everything is imported", func() (bool, error) {
		endpoints, imports, at := w.seen.progress()
		if time.Since(told) > 5*time.Second {
			told = time.Now()
			w.say("a has %d of %d services and %d of %d endpoints", imports, w.cfg.Services(), endpoints, w.cfg.RemoteEndpoints())
		}
		done = at
		return endpoints == w.cfg.RemoteEndpoints() && imports == w.cfg.Services(), nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		endpoints, imports, _ := w.seen.progress()
		err = fmt.Errorf("%w; a has %d of %d services and %d of %d endpoints", err, imports, w.cfg.Services(), endpoints, w.cfg.RemoteEndpoints())
	}
	return done, err
}
