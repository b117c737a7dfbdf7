package simulation

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

// importTimeout is the time limit of a first import.
const importTimeout = 20 * time.Minute

// observer counts the imports, based on its own watch. It is safe for concurrent use.
type observer struct {
	mu      sync.Mutex
	slices  map[types.NamespacedName]int  // the number of endpoints of each
	imports map[types.NamespacedName]bool // whether the status names an exporter
	seen    progress
}

// progress counts the imported objects, and records the last change of usable objects and of statuses.
type progress struct {
	endpoints, imports, reported int
	usable, told                 time.Time
}

func (o *observer) progress() progress {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.seen
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
		o.seen.endpoints, o.seen.usable = o.seen.endpoints+n-had, at
	}
}

func (o *observer) serviceImport(at time.Time, gone bool, si *v1beta1.ServiceImport) {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := client.ObjectKeyFromObject(si)
	told, had := o.imports[key]
	if gone {
		delete(o.imports, key)
	} else {
		o.imports[key] = len(si.Status.Clusters) > 0
	}
	if had == gone { // it was created or deleted
		o.seen.imports, o.seen.usable = len(o.imports), at
	}
	if told != o.imports[key] {
		o.seen.told = at
		if told {
			o.seen.reported--
		} else {
			o.seen.reported++
		}
	}
}

// observe watches the imports into a, which has none yet.
func (w *ClusterSet) observe(ctx context.Context) error {
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

// observeExporter watches the starts of b's changes.
func (w *ClusterSet) observeExporter(ctx context.Context) error {
	if w.b == nil {
		return nil
	}
	return w.follow(ctx, w.b, &discoveryv1.EndpointSliceList{}, func(at time.Time, _ watch.EventType, obj client.Object) {
		if es, ok := obj.(*discoveryv1.EndpointSlice); ok {
			eachAddress(es, func(a netip.Addr) { w.tracker.from(a, at) })
		}
	})
}

func (w *ClusterSet) arrived(at time.Time, es *discoveryv1.EndpointSlice) {
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

// follow watches the objects of list's kind in m from now on, until Close or the end of m. It calls each with every event and
// the time of its arrival.
func (w *ClusterSet) follow(ctx context.Context, m *member, list client.ObjectList, each func(time.Time, watch.EventType, client.Object), only ...client.ListOption) error {
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

// awaitImported waits until a has all exported Services and endpoints, and all statuses. It returns the times of the last
// change of either.
func (w *ClusterSet) awaitImported(ctx context.Context) (usable, told time.Time, err error) {
	services, endpoints := w.cfg.Services(), w.cfg.RemoteEndpoints()
	how := func(p progress) string {
		return fmt.Sprintf("a has %d of %d services, %d of %d endpoints and %d statuses", p.imports, services, p.endpoints, endpoints, p.reported)
	}
	said := time.Now()
	err = w.await(ctx, importTimeout, poll, "not everything is imported", func() (bool, error) {
		p := w.seen.progress()
		if time.Since(said) > 5*time.Second {
			said = time.Now()
			w.say("%s", how(p))
		}
		if usable.IsZero() && p.endpoints == endpoints && p.imports == services {
			usable = p.usable
			w.say("everything can be used")
		}
		told = p.told
		return !usable.IsZero() && p.reported == services, nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w; %s", err, how(w.seen.progress()))
	}
	return usable, told, err
}
