package quotacontroller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const (
	// sweepInterval is the time from one look for superfluous objects to the next. An object is deleted when two looks in a row
	// find it superfluous.
	sweepInterval = time.Second
	// maxDeleted bounds the deletions of one look, for each member and for orphans. Every deletion is a change for all members.
	maxDeleted = 100
	// deleters is how many objects are deleted at a time.
	deleters = 4
)

var deleted = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "isthmus_controller_stored_deleted_total",
	Help: "Objects that the quota controller deleted from the broker: those of a member beyond twice its quota, and aggregates without records.",
}, []string{"cluster", "reason"})

func init() { metrics.Registry.MustRegister(deleted) }

// sweep deletes superfluous objects until ctx ends.
func (c *Controller) sweep(ctx context.Context) error {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := c.sweepOnce(ctx, time.Now()); err != nil && ctx.Err() == nil {
			c.cfg.Log.Warn("superfluous objects of the broker are not deleted yet, retrying", "err", err)
		}
	}
}

func (c *Controller) sweepOnce(ctx context.Context, now time.Time) error {
	config := c.config()
	if config == nil {
		return nil
	}
	limits := quota.StorageLimits(config.Spec.Quotas)
	marked := map[types.UID]struct{}{}
	var errs []error
	for _, m := range config.Spec.Members {
		id := clusterset.ClusterID(m.ClusterID)
		if len(c.storedBy(id).Over(limits, quota.StorageFactor)) == 0 {
			continue
		}
		excess := c.excess(id, limits)
		for _, o := range excess {
			marked[o.uid] = struct{}{}
		}
		excess = slices.DeleteFunc(excess, func(o *object) bool {
			_, ok := c.marked[o.uid]
			return !ok
		})
		n, err := c.deleteAll(ctx, excess[:min(len(excess), maxDeleted)], "quota")
		if n > 0 {
			c.events.Eventf(config, nil, corev1.EventTypeWarning, "QuotaObjectsDeleted", "Delete",
				"member %s has more than twice its quota on the broker; its youngest objects that no member imports are deleted", m.ClusterID)
		}
		errs = append(errs, err)
	}
	c.marked = marked
	orphans := c.orphansBefore(now.Add(-c.cfg.Grace))
	slices.SortFunc(orphans, func(a, b *object) int {
		return cmp.Or(cmp.Compare(a.created, b.created), strings.Compare(a.name, b.name))
	})
	_, err := c.deleteAll(ctx, orphans[:min(len(orphans), maxDeleted)], "orphan")
	return errors.Join(append(errs, err)...)
}

// excess returns the objects of a member beyond quota.StorageFactor times its quota, youngest first.
func (c *Controller) excess(id clusterset.ClusterID, limits amounts) []*object {
	var all []*object
	for _, o := range slices.Concat(c.records.All(), c.slices.All()) {
		if o.owner == id {
			all = append(all, o)
		}
	}
	var records []quota.Record
	var sizes []quota.Slice
	for _, o := range all {
		switch {
		case o.class == quota.RecordClass && o.valid:
			records = append(records, o.record())
		case o.class == quota.SliceClass:
			sizes = append(sizes, o.slice())
		}
	}
	verdict := quota.Judge(limits.Amounts, records, sizes)
	objects := make([]quota.Object, 0, len(all))
	for _, o := range all {
		judged := quota.Object{Class: o.class, Name: o.name, Created: o.createdAt(), Uses: o.uses()}
		switch {
		case o.class == quota.RecordClass && o.valid:
			_, judged.Admitted = verdict.Records[o.service]
		case o.class == quota.SliceClass:
			_, judged.Admitted = verdict.Slices[o.name]
		}
		objects = append(objects, judged)
	}
	for _, o := range c.orphansOf(id) {
		objects = append(objects, quota.Object{Class: o.class, Name: o.name, Created: o.createdAt(), Uses: amounts{Aggregates: 1}})
		all = append(all, o)
	}
	var excess []*object
	for _, i := range quota.Excess(limits, objects) {
		excess = append(excess, all[i])
	}
	return excess
}

// deleteAll deletes objects, and returns how many it deleted.
func (c *Controller) deleteAll(ctx context.Context, all []*object, reason string) (int, error) {
	var group errgroup.Group
	group.SetLimit(deleters)
	done := make([]bool, len(all))
	for i, o := range all {
		group.Go(func() (err error) {
			done[i], err = c.delete(ctx, o)
			return err
		})
	}
	err := group.Wait()
	n := 0
	for i, ok := range done {
		if ok {
			n++
			deleted.WithLabelValues(string(all[i].owner), reason).Inc()
		}
	}
	if n > 0 {
		c.cfg.Log.Info("superfluous objects of the broker are deleted", "reason", reason, "cluster", string(all[0].owner), "count", n)
	}
	return n, err
}

// delete deletes an object unless another one has its name by now, and reports whether it did.
func (c *Controller) delete(ctx context.Context, o *object) (bool, error) {
	meta := metav1.ObjectMeta{Namespace: c.cfg.Namespace, Name: o.name}
	if o.class == quota.AggregateClass {
		return c.deleteAggregate(ctx, o)
	}
	var victim client.Object = &v1alpha1.ExportRecord{ObjectMeta: meta}
	if o.class == quota.SliceClass {
		victim = &discoveryv1.EndpointSlice{ObjectMeta: meta}
	}
	return gone(o, c.client.Delete(ctx, victim, client.Preconditions{UID: &o.uid}))
}

// deleteAggregate deletes an aggregate if the broker has no record beside it. A member that joins the aggregate meanwhile changes
// its version, so that the deletion fails.
func (c *Controller) deleteAggregate(ctx context.Context, o *object) (bool, error) {
	si := &v1beta1.ServiceImport{}
	err := c.client.Get(ctx, client.ObjectKey{Namespace: c.cfg.Namespace, Name: o.name}, si)
	if err != nil || si.UID != o.uid {
		return false, client.IgnoreNotFound(err)
	}
	var records v1alpha1.ExportRecordList
	err = c.client.List(ctx, &records, client.InNamespace(c.cfg.Namespace), client.Limit(1),
		client.MatchingLabels{v1alpha1.LabelServiceName: o.service.Name, v1alpha1.LabelServiceNamespace: o.service.Namespace})
	if err != nil || len(records.Items) > 0 {
		return false, err
	}
	return gone(o, c.client.Delete(ctx, si, client.Preconditions{UID: &si.UID, ResourceVersion: &si.ResourceVersion}))
}

// gone returns whether the deletion of an object succeeded. It is no error that the object has changed or vanished.
func gone(o *object, err error) (bool, error) {
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return err == nil, nil
	}
	return false, fmt.Errorf("delete %s: %w", o.name, err)
}
