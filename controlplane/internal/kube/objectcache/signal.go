package objectcache

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Signal asks controllers to look at Services again. The zero Signal asks nobody.
type Signal struct {
	mu     sync.Mutex
	queues []workqueue.TypedRateLimitingInterface[reconcile.Request]
}

// Send asks for names.
func (s *Signal) Send(names ...clusterset.ServiceName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range s.queues {
		for _, name := range names {
			q.Add(reconcile.Request{NamespacedName: types.NamespacedName(name)})
		}
	}
}

// Source returns s for one more controller, which starts when all of waits have returned. It is asked for what
// all returns first, because what was sent before it began is lost on it.
func (s *Signal) Source(all func() []clusterset.ServiceName, waits ...func(context.Context) error) source.Source {
	return &signalSource{s, all, waits}
}

type signalSource struct {
	*Signal

	all   func() []clusterset.ServiceName
	waits []func(context.Context) error
}

func (s *signalSource) Start(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	s.mu.Lock()
	s.queues = append(s.queues, q)
	s.mu.Unlock()
	for _, name := range s.all() {
		q.Add(reconcile.Request{NamespacedName: types.NamespacedName(name)})
	}
	return nil
}

func (s *signalSource) WaitForSync(ctx context.Context) error {
	for _, wait := range s.waits {
		if err := wait(ctx); err != nil {
			return err
		}
	}
	return nil
}
