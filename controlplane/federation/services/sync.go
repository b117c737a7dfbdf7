package services

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
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

// Reconcile is part of reconcile.Reconciler. It writes the objects that carry traffic before the status that describes
// them.
func (r *Reconciler) Reconcile(ctx context.Context, key reconcile.Key, into reconcile.Writer, all []reconcile.Member) error {
	name := clusterset.ServiceName{Namespace: key.Namespace, Name: key.Name}
	if key.Kind == kindStatus {
		return r.reportNonMember(ctx, name, into)
	}
	var ns corev1.Namespace
	err := into.Get(ctx, client.ObjectKey{Name: name.Namespace}, &ns)
	if client.IgnoreNotFound(err) != nil || ns.DeletionTimestamp != nil || err != nil && name.Namespace != r.system {
		return client.IgnoreNotFound(err) // a new namespace brings all its keys
	}
	s, readErr := r.read(ctx, name, into, all)
	if readErr != nil {
		return readErr
	}
	r.hosts.Use(name, s.hosts)
	if err != nil { // the namespace is missing; the members of a global Service are in other namespaces
		return r.report(ctx, into, s, offers.Merge(s.offers))
	}
	kept := r.keptClusters(ctx, s, all)
	if len(kept) == 0 && len(s.offers) == 0 {
		if s.unread {
			return r.removeSlices(ctx, into, s) // an unread member may offer the Service
		}
		return errors.Join(r.remove(ctx, into, s), r.report(ctx, into, s, offers.Federated{}))
	}
	s.keepFamilies()
	fed := offers.Merge(append(keptOffers(kept, s), s.offers...))
	if slices.Contains(s.taken, into.ID()) {
		return errors.Join(r.removeSlices(ctx, into, s), r.report(ctx, into, s, fed))
	}
	r.warned.Delete(taken{into.ID(), name})
	s.held = s.held || s.unread || slices.ContainsFunc(kept, func(id clusterset.ClusterID) bool { return !s.dropped[id] }) || len(s.incomplete) > 0 || len(s.unresolved) > 0
	svc, err := r.applyService(ctx, into, s, fed)
	if r.recordRejection(into.ID(), s, fed, err) {
		r.requeue(name) // all member Services report it
	}
	if err != nil {
		return errors.Join(err, r.report(ctx, into, s, fed))
	}
	stays := func(es *discoveryv1.EndpointSlice) bool {
		from := sourceOf(es)
		return slices.Contains(kept, from.cluster) && !s.dropped[from.cluster] || s.incomplete[from] || s.unresolved[hostOf{from, es.Annotations[offers.AnnotationHost]}]
	}
	if offers.AsksForNear(s.offers, into.ID()) {
		zones, err := zonesOf(ctx, into)
		if err != nil {
			return err
		}
		offers.PreferLocal(s.offers, into.ID(), zones)
	}
	if err := r.applySlices(ctx, into, s, r.wantSlices(s, fed, svc), stays); err != nil {
		return err
	}
	return errors.Join(
		r.applyImport(ctx, into, all, s, fed),
		r.applyConditions(ctx, into, svc, fed),
		r.report(ctx, into, s, fed),
	)
}

// keptOffers returns offers for the kept clusters: the ports of the existing federated Service, which take precedence, so
// that the kept slices still serve the ports that they served.
func keptOffers(kept []clusterset.ClusterID, s *snapshot) []offers.Offer {
	if s.service == nil || !offers.IsOurs(s.service) {
		return nil
	}
	var all []offers.Offer
	for _, cluster := range kept {
		o, err := offers.New(offers.Source{Cluster: cluster, Service: s.service})
		if err != nil {
			continue // a user changed the Service to another type, which the next write corrects
		}
		o.ExportedAt = time.Time{}
		all = append(all, o)
	}
	return all
}

// wantSlices returns the wanted slices for the offers of a snapshot. It makes them one offer at a time: with many clusters,
// all of them together would stay in memory until the last one is written.
func (r *Reconciler) wantSlices(s *snapshot, fed offers.Federated, svc *corev1.Service) iter.Seq[*discoveryv1.EndpointSlice] {
	return func(yield func(*discoveryv1.EndpointSlice) bool) {
		for _, o := range s.offers {
			if s.incomplete[source{o.Cluster, o.Service.String()}] {
				continue // the existing slices have addresses that this process does not know now
			}
			for _, es := range fed.Slices(s.name, o) {
				es.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: svc.Name, UID: svc.UID}}
				if r.vips.on() { // the ServiceImport has the same slices
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
	wrote, err := slicesync.Sync[*discoveryv1.EndpointSlice]{
		Existing: s.slices, Wanted: want,
		Name:     func(es *discoveryv1.EndpointSlice) string { return es.Name },
		UpToDate: func(have, want *discoveryv1.EndpointSlice) bool { return have.GenerateName == digest(want) },
		Keep:     stays,
		// A slice that was written a moment ago and is not in the cache yet already exists; the engine tries again.
		Create: func(ctx context.Context, es *discoveryv1.EndpointSlice) error { return into.Create(ctx, es) },
		Update: func(ctx context.Context, es *discoveryv1.EndpointSlice) error { return into.Apply(ctx, es) },
		Delete: func(ctx context.Context, es *discoveryv1.EndpointSlice) error { return into.Delete(ctx, es) },
	}.Run(ctx)
	if wrote {
		r.noteChanged(into, s.name)
	}
	return err
}

// noteChanged says that endpoints or ports of a federated Service changed in a member.
func (r *Reconciler) noteChanged(in reconcile.Member, name clusterset.ServiceName) {
	if r.changed != nil {
		r.changed(in.ID(), name)
	}
}

// removeSlices deletes all slices of a federated Service.
func (r *Reconciler) removeSlices(ctx context.Context, into reconcile.Writer, s *snapshot) error {
	return r.applySlices(ctx, into, s, func(func(*discoveryv1.EndpointSlice) bool) {}, nil)
}

// remove deletes the objects of a federated Service that no member offers.
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
