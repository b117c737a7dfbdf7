package services

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/slicesync"
)

// Sync is part of reconcile.Reconciler. What carries traffic is written before what tells of it.
func (r *Reconciler) Reconcile(ctx context.Context, key reconcile.Key, into reconcile.Writer, all []reconcile.Member) error {
	name := clusterset.ServiceName{Namespace: key.Namespace, Name: key.Name}
	if key.Kind == kindStatus {
		return r.tellStray(ctx, name, into)
	}
	var ns corev1.Namespace
	err := into.Get(ctx, client.ObjectKey{Name: name.Namespace}, &ns)
	if client.IgnoreNotFound(err) != nil || ns.DeletionTimestamp != nil || err != nil && name.Namespace != r.system {
		return client.IgnoreNotFound(err) // its coming brings all keys of it
	}
	s, readErr := r.read(ctx, name, into, all)
	if readErr != nil {
		return readErr
	}
	r.hosts.Use(name, s.hosts)
	if err != nil { // there is no such namespace, and members of a global Service are in others
		return r.tell(ctx, into, s, offers.Merge(s.offers))
	}
	kept := r.judge(ctx, s, all)
	if len(kept) == 0 && len(s.offers) == 0 {
		if s.unread {
			return r.removeSlices(ctx, into, s) // and perhaps somebody offers it, with nothing behind it yet
		}
		return errors.Join(r.remove(ctx, into, s), r.tell(ctx, into, s, offers.Federated{}))
	}
	s.keepFamilies()
	fed := offers.Merge(append(keptOffers(kept, s), s.offers...))
	if slices.Contains(s.taken, into.ID()) {
		return errors.Join(r.removeSlices(ctx, into, s), r.tell(ctx, into, s, fed))
	}
	r.told.Delete(taken{into.ID(), name})
	svc, err := r.applyService(ctx, into, s, fed)
	if r.suits(into.ID(), s, fed, err) {
		r.lookAgain(name) // so that all are told
	}
	if err != nil {
		return errors.Join(err, r.tell(ctx, into, s, fed))
	}
	stays := func(es *discoveryv1.EndpointSlice) bool {
		from := sourceOf(es)
		return slices.Contains(kept, from.cluster) || s.unresolved[from]
	}
	if err := r.applySlices(ctx, into, s, r.wantSlices(s, fed, svc), stays); err != nil {
		return err
	}
	return errors.Join(
		r.applyImport(ctx, into, all, s, fed),
		r.applyConditions(ctx, into, svc, fed),
		r.tell(ctx, into, s, fed),
	)
}

// offered is a federated Service that a cluster offers.
type offered struct {
	cluster clusterset.ClusterID
	name    clusterset.ServiceName
}

// judge returns the clusters that offer nothing now, and whose slices stay nevertheless, sorted: those of which nothing
// is known, and those whose member Services vanished so that the guard does not believe it.
func (r *Reconciler) judge(ctx context.Context, s *snapshot, all []reconcile.Member) []clusterset.ClusterID {
	for cluster := range s.offering {
		r.seen.Store(offered{cluster, s.name}, true)
		r.guard.Has(cluster, s.name)
	}
	var kept []clusterset.ClusterID
	for _, es := range s.slices {
		cluster := sourceOf(es).cluster
		if s.offering[cluster] || slices.Contains(kept, cluster) {
			continue
		}
		i := slices.IndexFunc(all, func(m reconcile.Member) bool { return m.ID() == cluster })
		switch {
		case i < 0 || declined(ctx, all[i], es):
			r.guard.Withdrew(cluster, s.name)
		case !all[i].Synced() || r.keeps(cluster, s.name):
			kept = append(kept, cluster)
		}
	}
	slices.Sort(kept)
	return kept
}

// declined reports whether the Service that a slice leads to is there still, and is no member any more: somebody has
// said so.
func declined(ctx context.Context, m reconcile.Member, es *discoveryv1.EndpointSlice) bool {
	namespace, name, _ := strings.Cut(sourceOf(es).service, "/")
	return m.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &corev1.Service{}) == nil
}

// keeps tells the guard that a cluster offers a Service no more, and returns what it says.
func (r *Reconciler) keeps(cluster clusterset.ClusterID, name clusterset.ServiceName) bool {
	if _, known := r.seen.LoadOrStore(offered{cluster, name}, true); known {
		r.guard.Lost(cluster, name)
	} else { // it is offered as far as anybody here knows, and went while nobody looked
		r.guard.Has(cluster, name)
		r.guard.Missed(cluster, name)
	}
	return r.guard.Keeps(cluster, name)
}

// keptOffers returns what clusters offer whose word is missing: the ports that the federated Service has, before all
// others, so that what stays leads to what it led to.
func keptOffers(kept []clusterset.ClusterID, s *snapshot) []offers.Offer {
	if s.service == nil || !offers.IsOurs(s.service) {
		return nil
	}
	var all []offers.Offer
	for _, cluster := range kept {
		o, err := offers.Of(offers.Source{Cluster: cluster, Service: s.service})
		if err != nil {
			continue // a person made it something else, which is put right
		}
		o.ExportedAt = time.Time{}
		all = append(all, o)
	}
	return all
}

// wantSlices returns the slices of w's offers as they are to stand in the member. They are made one offer at a time: where many
// clusters offer, all of them together would stay in memory until the last one is written.
func (r *Reconciler) wantSlices(s *snapshot, fed offers.Federated, svc *corev1.Service) iter.Seq[*discoveryv1.EndpointSlice] {
	return func(yield func(*discoveryv1.EndpointSlice) bool) {
		for _, o := range s.offers {
			if s.unresolved[source{o.Cluster, o.Service.String()}] {
				continue // what was known of it when they were written is more than what is known now
			}
			for _, es := range fed.Slices(s.name, o) {
				es.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: svc.Name, UID: svc.UID}}
				if r.vips.on() { // the same slices serve both
					es.Labels[v1beta1.LabelServiceName] = s.name.Name
					es.Labels[v1beta1.LabelSourceCluster] = es.Labels[v1alpha1.MarkCluster]
				}
				if !yield(es) {
					return
				}
			}
		}
	}
}

// applySlices makes want the slices of a federated Service. It writes new slices before it deletes old ones, and keeps those
// that stays reports.
func (r *Reconciler) applySlices(ctx context.Context, into reconcile.Writer, s *snapshot, want iter.Seq[*discoveryv1.EndpointSlice], stays func(*discoveryv1.EndpointSlice) bool) error {
	_, err := slicesync.Sync[*discoveryv1.EndpointSlice]{
		Existing: s.slices, Wanted: want,
		Name:     func(es *discoveryv1.EndpointSlice) string { return es.Name },
		UpToDate: func(have, want *discoveryv1.EndpointSlice) bool { return have.GenerateName == digest(want) },
		Keep:     stays,
		// A slice that was written a moment ago and is not in the cache yet already exists; the engine tries again.
		Create: func(ctx context.Context, es *discoveryv1.EndpointSlice) error { return into.Create(ctx, es) },
		Update: func(ctx context.Context, es *discoveryv1.EndpointSlice) error { return into.Apply(ctx, es) },
		Delete: func(ctx context.Context, es *discoveryv1.EndpointSlice) error { return into.Delete(ctx, es) },
	}.Run(ctx)
	return err
}

// removeSlices deletes all slices of a federated Service.
func (r *Reconciler) removeSlices(ctx context.Context, into reconcile.Writer, s *snapshot) error {
	return r.applySlices(ctx, into, s, func(func(*discoveryv1.EndpointSlice) bool) {}, nil)
}

// remove deletes what stands in the member of a federated Service that nobody offers.
func (r *Reconciler) remove(ctx context.Context, into reconcile.Writer, s *snapshot) error {
	r.vips.forget(s.name)
	if err := r.removeImport(ctx, into, s.name); err != nil {
		return err
	}
	if s.service != nil && offers.IsOurs(s.service) {
		if err := into.Delete(ctx, s.service); err != nil {
			return fmt.Errorf("delete service %s: %w", s.name, err)
		}
		r.log.Info("federated service removed", "cluster", into.ID(), "namespace", s.name.Namespace, "service", s.name.Name)
	}
	return r.removeSlices(ctx, into, s)
}
