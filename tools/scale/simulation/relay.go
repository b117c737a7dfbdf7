package simulation

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/apiserver"
)

// relayed is the namespace of the bare relay's objects on every server, and relayedBy their manager. Isthmus ignores both.
const (
	relayed   = "relay"
	relayedBy = "relay.scale"
)

// relays copies EndpointSlices of b to the broker as events arrive, and from there to a, and does nothing else. It shows the
// limit of the machine and its API servers.
type relays struct {
	source *exporter
}

// ChurnRelay is like Churn for the bare relay, with the same number of Services and endpoints in b. It needs the real member b.
func (w *ClusterSet) ChurnRelay(ctx context.Context, perSecond float64, duration time.Duration) (Propagation, error) {
	if w.b == nil {
		return Propagation{}, errors.New("the bare relay begins in b, which this ClusterSet lacks")
	}
	if w.relays == nil {
		if err := w.startRelays(ctx); err != nil {
			return Propagation{}, fmt.Errorf("start the bare relay: %w", err)
		}
	}
	return w.churn(ctx, w.relays.source.slices, perSecond, duration)
}

func (w *ClusterSet) startRelays(ctx context.Context) error {
	broker := &member{id: "broker", server: w.broker, client: w.admin}
	for _, m := range []*member{w.b, broker, w.a} {
		if err := m.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: relayed}}); err != nil {
			return err
		}
	}
	// The relay has separate connections, as a controller would.
	toBroker, err := newClient(w.broker.As(apiserver.Admin))
	if err != nil {
		return err
	}
	toA, err := newClient(w.a.server.As(apiserver.Admin))
	if err != nil {
		return err
	}
	only := []client.ListOption{client.InNamespace(relayed), client.MatchingLabels{discoveryv1.LabelManagedBy: relayedBy}}
	err = errors.Join(
		w.follow(ctx, w.b, &discoveryv1.EndpointSliceList{}, w.copyTo(toBroker), only...),
		w.follow(ctx, broker, &discoveryv1.EndpointSliceList{}, w.copyTo(toA), only...),
		w.follow(ctx, w.a, &discoveryv1.EndpointSliceList{}, func(at time.Time, _ watch.EventType, obj client.Object) {
			if es, ok := obj.(*discoveryv1.EndpointSlice); ok {
				w.arrived(at, es)
			}
		}, only...),
	)
	if err != nil {
		return err
	}
	// The addresses are those of the simulated member after the last one, which no controller uses.
	x := newExporter("relay", w.podBlock(len(w.ids())))
	x.write = func(ctx context.Context, _ time.Time, es *discoveryv1.EndpointSlice, version string) (string, error) {
		es.Labels = map[string]string{discoveryv1.LabelManagedBy: relayedBy}
		return write(ctx, w.b.client, es, version)
	}
	var todo []func(context.Context) error
	for i := range w.cfg.Exports {
		if err := x.add(clusterset.ServiceName{Namespace: relayed, Name: fmt.Sprintf("web-%05d", i)}, w.cfg.Endpoints); err != nil {
			return err
		}
	}
	for _, s := range x.slices {
		todo = append(todo, s.create)
	}
	w.relays = &relays{source: x}
	if err := w.inParallel(ctx, "objects written for the bare relay", todo); err != nil {
		return err
	}
	return w.await(ctx, fillTimeout, look, "the bare relay does not copy", func() (bool, error) {
		var list discoveryv1.EndpointSliceList
		err := w.a.client.List(ctx, &list, only...)
		return len(list.Items) == len(x.slices), err
	})
}

// copyTo returns a function that writes every received slice to c.
func (w *ClusterSet) copyTo(c client.Client) func(time.Time, watch.EventType, client.Object) {
	return func(_ time.Time, event watch.EventType, obj client.Object) {
		es, ok := obj.(*discoveryv1.EndpointSlice)
		if !ok || event == watch.Deleted {
			return
		}
		es.ObjectMeta = metav1.ObjectMeta{Namespace: es.Namespace, Name: es.Name, Labels: es.Labels}
		do := func() error { return c.Create(w.lifetime, es) }
		if event == watch.Modified {
			do = func() error { return c.Update(w.lifetime, es) } // without a resource version, to overwrite any version
		}
		if err := do(); err != nil && w.lifetime.Err() == nil {
			w.say("bare relay: %v", err) // its changes count as missing
		}
	}
}
