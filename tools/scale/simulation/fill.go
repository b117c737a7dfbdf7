package simulation

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const (
	// fillTimeout is the time that the real member b has to publish its exports.
	fillTimeout = 10 * time.Minute
	// admissionTimeout is the time that the broker has to recognize a new member.
	admissionTimeout = 30 * time.Second
)

// fill writes the exports of the simulated members to the broker. The administrator writes the objects that all members share.
func (w *ClusterSet) fill(ctx context.Context) error {
	var ids []clusterset.ClusterID
	for i := range w.cfg.Members {
		x := newExporter(simulatedID(i), w.podBlock(i+2))
		c, err := newClient(w.broker.As(accountOf(x.id)))
		if err != nil {
			return err
		}
		x.write, x.self = writeToBroker(c, x.id), true
		w.exporters = append(w.exporters, x)
		ids = append(ids, x.id)
	}
	var todo []func(context.Context) error
	for i, x := range w.exporters {
		for k, name := range w.names(i) {
			if err := x.add(name, w.cfg.Endpoints); err != nil {
				return err
			}
			ip, by := w.vip(k, i), ids
			if w.cfg.Distinct {
				by = ids[i : i+1]
			}
			todo = append(todo, func(ctx context.Context) error { return w.fillRecord(ctx, x.id, name, ip) })
			if i == 0 || w.cfg.Distinct {
				todo = append(todo, func(ctx context.Context) error { return w.fillAggregate(ctx, by, name, ip) })
			}
		}
		for _, s := range x.slices {
			todo = append(todo, func(ctx context.Context) error { return w.onceKnown(ctx, s.create) })
		}
	}
	return w.inParallel(ctx, "objects written to the broker", todo)
}

// onceKnown retries an operation of a member while the broker denies it: admission policies recognize a member shortly after
// its registration.
func (w *ClusterSet) onceKnown(ctx context.Context, do func(context.Context) error) error {
	var refused error
	err := w.await(ctx, admissionTimeout, look, "the broker does not take a new member's word", func() (bool, error) {
		refused = do(ctx)
		if apierrors.IsForbidden(refused) {
			return false, nil
		}
		return true, refused
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return errors.Join(err, refused)
	}
	return err
}

// vip returns the ClusterSetIP of the k-th Service, from the block of its allocator. With Config.Distinct that is the exporter
// at index x.
func (w *ClusterSet) vip(k, x int) netip.Addr {
	if !w.cfg.Distinct {
		x = 0
	}
	return nth(vips.Addr(), (x+2)<<blockOfVIPs+k+1)
}

func (w *ClusterSet) fillRecord(ctx context.Context, id clusterset.ClusterID, name clusterset.ServiceName, ip netip.Addr) error {
	r, err := record(id, name, ip)
	if err != nil {
		return err
	}
	if err := w.admin.Create(ctx, r); err != nil {
		return fmt.Errorf("create export record %s: %w", r.Name, err)
	}
	return nil
}

func (w *ClusterSet) fillAggregate(ctx context.Context, ids []clusterset.ClusterID, name clusterset.ServiceName, ip netip.Addr) error {
	si := aggregate(ids, name, ip)
	status := si.Status
	if err := w.admin.Create(ctx, si); err != nil {
		return fmt.Errorf("create aggregate %s: %w", si.Name, err)
	}
	si.Status = status
	if err := w.admin.Status().Update(ctx, si); err != nil {
		return fmt.Errorf("join aggregate %s: %w", si.Name, err)
	}
	return nil
}

// fillExporter creates the exports of the real member b, and waits until the broker has them.
func (w *ClusterSet) fillExporter(ctx context.Context) error {
	if w.b == nil {
		return nil
	}
	x := newExporter(exporterID, w.podBlock(1))
	x.write = writeToMember(w.b.client)
	w.exporters = append(w.exporters, x)
	var todo []func(context.Context) error
	for _, name := range w.names(len(w.exporters) - 1) {
		if err := x.add(name, w.cfg.Endpoints); err != nil {
			return err
		}
		for _, obj := range []client.Object{service(name), export(name)} {
			todo = append(todo, func(ctx context.Context) error { return w.b.client.Create(ctx, obj) })
		}
	}
	for _, s := range x.slices {
		todo = append(todo, s.create)
	}
	if err := w.inParallel(ctx, "objects written to b", todo); err != nil {
		return err
	}
	if err := w.b.start(ctx, w.cfg.Controller); err != nil {
		return err
	}
	w.say("wait until the broker knows what b exports")
	return w.await(ctx, fillTimeout, look, "b does not tell the broker what it exports", func() (bool, error) {
		var list discoveryv1.EndpointSliceList
		err := w.admin.List(ctx, &list, client.InNamespace(v1alpha1.DefaultBrokerNamespace), client.MatchingLabels{v1alpha1.LabelCluster: string(x.id)})
		return len(list.Items) == len(x.slices), err
	})
}

// inParallel runs todo, several at a time, and reports its progress.
func (w *ClusterSet) inParallel(ctx context.Context, what string, todo []func(context.Context) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(writers)
	var done atomic.Int64
	step := max(1, len(todo)/5)
	for _, do := range todo {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error {
			if err := do(ctx); err != nil {
				return err
			}
			if n := int(done.Add(1)); n%step == 0 || n == len(todo) {
				w.say("%d of %d %s", n, len(todo), what)
			}
			return nil
		})
	}
	return group.Wait()
}
