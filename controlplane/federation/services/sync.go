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
)

// Sync is part of reconcile.Part. What carries traffic is written before what tells of it.
func (p *Part) Sync(ctx context.Context, key reconcile.Key, into reconcile.Leader, all []reconcile.Member) error {
	name := clusterset.ServiceName{Namespace: key.Namespace, Name: key.Name}
	if key.Kind == kindStatus {
		return p.tellStray(ctx, name, into)
	}
	var ns corev1.Namespace
	err := into.Get(ctx, client.ObjectKey{Name: name.Namespace}, &ns)
	if client.IgnoreNotFound(err) != nil || ns.DeletionTimestamp != nil || err != nil && name.Namespace != p.system {
		return client.IgnoreNotFound(err) // its coming brings all keys of it
	}
	w, readErr := p.read(ctx, name, into, all)
	if readErr != nil {
		return readErr
	}
	p.hosts.Use(name, w.hosts)
	if err != nil { // there is no such namespace, and members of a global Service are in others
		return p.tell(ctx, into, w, offers.Merge(w.offers))
	}
	kept := p.judge(ctx, w, all)
	if len(kept) == 0 && len(w.offers) == 0 {
		if w.unread {
			return p.removeSlices(ctx, into, w) // and perhaps somebody offers it, with nothing behind it yet
		}
		return errors.Join(p.remove(ctx, into, w), p.tell(ctx, into, w, offers.Federated{}))
	}
	w.keepFamilies()
	fed := offers.Merge(append(keptOffers(kept, w), w.offers...))
	if slices.Contains(w.taken, into.ID()) {
		return errors.Join(p.removeSlices(ctx, into, w), p.tell(ctx, into, w, fed))
	}
	p.told.Delete(taken{into.ID(), name})
	svc, err := p.applyService(ctx, into, w, fed)
	if p.suits(into.ID(), w, fed, err) {
		p.lookAgain(name) // so that all are told
	}
	if err != nil {
		return errors.Join(err, p.tell(ctx, into, w, fed))
	}
	stays := func(es *discoveryv1.EndpointSlice) bool {
		from := sourceOf(es)
		return slices.Contains(kept, from.cluster) || w.unresolved[from]
	}
	if err := p.applySlices(ctx, into, w, p.wantSlices(w, fed, svc), stays); err != nil {
		return err
	}
	return errors.Join(
		p.applyImport(ctx, into, all, w, fed),
		p.applyConditions(ctx, into, svc, fed),
		p.tell(ctx, into, w, fed),
	)
}

// offered is a federated Service that a cluster offers.
type offered struct {
	cluster clusterset.ClusterID
	name    clusterset.ServiceName
}

// judge returns the clusters that offer nothing now, and whose slices stay nevertheless, sorted: those of which nothing
// is known, and those whose member Services vanished so that the guard does not believe it.
func (p *Part) judge(ctx context.Context, w *world, all []reconcile.Member) []clusterset.ClusterID {
	for cluster := range w.offering {
		p.seen.Store(offered{cluster, w.name}, true)
		p.guard.Offered(cluster, w.name)
	}
	var kept []clusterset.ClusterID
	for _, es := range w.slices {
		cluster := sourceOf(es).cluster
		if w.offering[cluster] || slices.Contains(kept, cluster) {
			continue
		}
		i := slices.IndexFunc(all, func(m reconcile.Member) bool { return m.ID() == cluster })
		switch {
		case i < 0 || declined(ctx, all[i], es):
			p.guard.Withdrawn(cluster, w.name)
		case !all[i].Read() || p.keeps(cluster, w.name):
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
func (p *Part) keeps(cluster clusterset.ClusterID, name clusterset.ServiceName) bool {
	if _, known := p.seen.LoadOrStore(offered{cluster, name}, true); known {
		p.guard.Vanished(cluster, name)
	} else { // it is offered as far as anybody here knows, and went while nobody looked
		p.guard.Offered(cluster, name)
		p.guard.VanishedUnseen(cluster, name)
	}
	return p.guard.Keeps(cluster, name)
}

// keptOffers returns what clusters offer whose word is missing: the ports that the federated Service has, before all
// others, so that what stays leads to what it led to.
func keptOffers(kept []clusterset.ClusterID, w *world) []offers.Offer {
	if w.service == nil || !offers.IsOurs(w.service) {
		return nil
	}
	var all []offers.Offer
	for _, cluster := range kept {
		o, err := offers.Of(offers.Source{Cluster: cluster, Service: w.service})
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
func (p *Part) wantSlices(w *world, fed offers.Federated, svc *corev1.Service) iter.Seq[*discoveryv1.EndpointSlice] {
	return func(yield func(*discoveryv1.EndpointSlice) bool) {
		for _, o := range w.offers {
			if w.unresolved[source{o.Cluster, o.Service.String()}] {
				continue // what was known of it when they were written is more than what is known now
			}
			for _, es := range fed.Slices(w.name, o) {
				es.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: svc.Name, UID: svc.UID}}
				if p.vips.on() { // the same slices serve both
					es.Labels[v1beta1.LabelServiceName] = w.name.Name
					es.Labels[v1beta1.LabelSourceCluster] = es.Labels[v1alpha1.MarkCluster]
				}
				if !yield(es) {
					return
				}
			}
		}
	}
}

// applySlices makes want the slices of a federated Service. New ones come before old ones go, of which some stay.
func (p *Part) applySlices(ctx context.Context, into reconcile.Leader, w *world, want iter.Seq[*discoveryv1.EndpointSlice], stays func(*discoveryv1.EndpointSlice) bool) error {
	old := map[string]*discoveryv1.EndpointSlice{}
	for _, es := range w.slices {
		old[es.Name] = es
	}
	for es := range want {
		before := old[es.Name]
		delete(old, es.Name)
		if before != nil && before.GenerateName == digest(es) {
			continue
		}
		write := into.Create // it is there when it was written a moment ago, and not seen yet: another look comes
		if before != nil {
			write = func(ctx context.Context, o client.Object) error { return into.Own(ctx, o) }
		}
		if err := write(ctx, es); err != nil {
			return fmt.Errorf("write endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
	}
	for _, es := range w.slices {
		if old[es.Name] == nil || stays(es) {
			continue
		}
		if err := into.Delete(ctx, es); err != nil {
			return fmt.Errorf("delete endpoint slice %s/%s: %w", es.Namespace, es.Name, err)
		}
	}
	return nil
}

// removeSlices deletes all slices of a federated Service.
func (p *Part) removeSlices(ctx context.Context, into reconcile.Leader, w *world) error {
	none := func(*discoveryv1.EndpointSlice) bool { return false }
	return p.applySlices(ctx, into, w, slices.Values([]*discoveryv1.EndpointSlice{}), none)
}

// remove deletes what stands in the member of a federated Service that nobody offers.
func (p *Part) remove(ctx context.Context, into reconcile.Leader, w *world) error {
	p.vips.forget(w.name)
	if err := p.removeImport(ctx, into, w.name); err != nil {
		return err
	}
	if w.service != nil && offers.IsOurs(w.service) {
		if err := into.Delete(ctx, w.service); err != nil {
			return fmt.Errorf("delete service %s: %w", w.name, err)
		}
		p.log.Info("federated service removed", "cluster", into.ID(), "namespace", w.name.Namespace, "service", w.name.Name)
	}
	return p.removeSlices(ctx, into, w)
}
