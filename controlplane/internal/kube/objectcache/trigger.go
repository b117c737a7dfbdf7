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

// Trigger has Services reconciled again by the controllers that use it as a source. The zero Trigger has no controllers.
type Trigger struct {
	mu     sync.Mutex
	queues []workqueue.TypedRateLimitingInterface[reconcile.Request]
}

// Send has names reconciled.
func (t *Trigger) Send(names ...clusterset.ServiceName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, q := range t.queues {
		for _, name := range names {
			q.Add(reconcile.Request{NamespacedName: types.NamespacedName(name)})
		}
	}
}

// Source returns a source for one more controller, which starts when all of waits have returned. The controller first
// reconciles the names that all returns, because it missed earlier calls of Send.
func (t *Trigger) Source(all func() []clusterset.ServiceName, waits ...func(context.Context) error) source.Source {
	return &triggerSource{t, all, waits}
}

type triggerSource struct {
	*Trigger

	all   func() []clusterset.ServiceName
	waits []func(context.Context) error
}

func (s *triggerSource) Start(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	s.mu.Lock()
	s.queues = append(s.queues, q)
	s.mu.Unlock()
	for _, name := range s.all() {
		q.Add(reconcile.Request{NamespacedName: types.NamespacedName(name)})
	}
	return nil
}

func (s *triggerSource) WaitForSync(ctx context.Context) error {
	for _, wait := range s.waits {
		if err := wait(ctx); err != nil {
			return err
		}
	}
	return nil
}
