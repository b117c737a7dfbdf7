package services

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
)

// seen remembers which clusters had member Services of a federated Service, and those that offered anything. It does so from
// the moment that this process reads them until the withdrawal is final. The guard knows those clusters. The zero seen is
// empty.
type seen struct {
	mu sync.Mutex
	of map[clusterset.ServiceName]map[clusterset.ClusterID][]client.ObjectKey
}

// offered records the member Services of a cluster.
func (n *seen) offered(name clusterset.ServiceName, cluster clusterset.ClusterID, members []client.ObjectKey) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.put(name, cluster, members)
}

// missed reports whether a cluster was seen. It records the former member Services of one that was not.
func (n *seen) missed(name clusterset.ServiceName, cluster clusterset.ClusterID, members []client.ObjectKey) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, known := n.of[name][cluster]
	if !known {
		n.put(name, cluster, members)
	}
	return known
}

// put requires the lock.
func (n *seen) put(name clusterset.ServiceName, cluster clusterset.ClusterID, members []client.ObjectKey) {
	if n.of == nil {
		n.of = map[clusterset.ServiceName]map[clusterset.ClusterID][]client.ObjectKey{}
	}
	if n.of[name] == nil {
		n.of[name] = map[clusterset.ClusterID][]client.ObjectKey{}
	}
	n.of[name][cluster] = members
}

// clusters returns the clusters that were seen, with their last member Services. The caller owns the map.
func (n *seen) clusters(name clusterset.ServiceName) map[clusterset.ClusterID][]client.ObjectKey {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := map[clusterset.ClusterID][]client.ObjectKey{}
	maps.Copy(all, n.of[name])
	return all
}

// inNamespace returns the federated Services with member Services in a namespace of a cluster.
func (n *seen) inNamespace(cluster clusterset.ClusterID, namespace string) (names []clusterset.ServiceName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, of := range n.of {
		if slices.ContainsFunc(of[cluster], func(key client.ObjectKey) bool { return key.Namespace == namespace }) {
			names = append(names, name)
		}
	}
	return names
}

func (n *seen) forget(name clusterset.ServiceName, cluster clusterset.ClusterID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.of[name], cluster)
	if len(n.of[name]) == 0 {
		delete(n.of, name)
	}
}

// keptClusters returns the clusters that offer nothing now and keep what they have in the reconciled member, sorted: unread
// clusters, and clusters whose withdrawal the guard holds back.
//
// A cluster needs no slice for that. For example, the pods of a namespace go before its Services: the slices of c are gone
// when the Service vanishes, and its federated Service stays until the guard accepts that.
func (r *Reconciler) keptClusters(ctx context.Context, s *snapshot, all []reconcile.Member) []clusterset.ClusterID {
	for cluster, members := range s.offering {
		r.seen.offered(s.name, cluster, members)
		r.guard.Offered(cluster, s.name)
	}
	formerly, withSlices := r.seen.clusters(s.name), s.sources()
	for cluster, members := range withSlices {
		if _, known := formerly[cluster]; !known {
			formerly[cluster] = members
		}
	}
	exists := s.service != nil && offers.IsOurs(s.service)
	var kept []clusterset.ClusterID
	for cluster, members := range formerly {
		if _, member := s.offering[cluster]; member {
			continue
		}
		i := slices.IndexFunc(all, func(m reconcile.Member) bool { return m.ID() == cluster })
		switch {
		case i < 0 || isDeclined(ctx, all[i], members) || r.haveEnded(cluster, members):
			r.guard.Withdrawn(cluster, s.name)
		case !all[i].Synced() || r.isHeld(cluster, s.name, members):
			if exists || len(withSlices[cluster]) > 0 {
				kept = append(kept, cluster)
			}
			continue
		}
		if i < 0 || !hasSlices(ctx, all, s.name, cluster) {
			r.seen.forget(s.name, cluster)
		}
	}
	slices.Sort(kept)
	return kept
}

// sources returns the clusters that the existing slices lead to, with their member Services.
func (s *snapshot) sources() map[clusterset.ClusterID][]client.ObjectKey {
	found := map[clusterset.ClusterID][]client.ObjectKey{}
	for _, es := range s.slices {
		from := sourceOf(es)
		namespace, name, _ := strings.Cut(from.service, "/")
		if key := (client.ObjectKey{Namespace: namespace, Name: name}); !slices.Contains(found[from.cluster], key) {
			found[from.cluster] = append(found[from.cluster], key)
		}
	}
	return found
}

// isDeclined reports whether a former member Service still exists, so that its owner withdrew it explicitly. Likewise if none
// offered anything: there is nothing to hold.
func isDeclined(ctx context.Context, m reconcile.Member, members []client.ObjectKey) bool {
	exists := func(key client.ObjectKey) bool { return m.Get(ctx, key, &corev1.Service{}) == nil }
	return m.Synced() && (len(members) == 0 || slices.ContainsFunc(members, exists))
}

// haveEnded reports whether former member Services of a cluster went with their namespaces.
func (r *Reconciler) haveEnded(cluster clusterset.ClusterID, members []client.ObjectKey) bool {
	return len(members) > 0 && !slices.ContainsFunc(members, func(key client.ObjectKey) bool { return !r.endings.Ended(cluster, key.Namespace) })
}

// isHeld tells the guard that a cluster no longer offers a Service, and reports whether the guard holds that back.
func (r *Reconciler) isHeld(cluster clusterset.ClusterID, name clusterset.ServiceName, members []client.ObjectKey) bool {
	if r.seen.missed(name, cluster, members) {
		r.guard.Vanished(cluster, name)
	} else { // the Service vanished before this process watched it
		r.guard.Offered(cluster, name)
		r.guard.VanishedUnseen(cluster, name)
	}
	return r.guard.Keeps(cluster, name)
}

// hasSlices reports whether slices of a federated Service lead to a cluster, in any member. It returns true if a member was
// not read. While slices are left, such as in a silent member, a final withdrawal must not become unseen: the guard would
// judge it once more, and hold again what a person has released.
func hasSlices(ctx context.Context, all []reconcile.Member, name clusterset.ServiceName, cluster clusterset.ClusterID) bool {
	return slices.ContainsFunc(all, func(m reconcile.Member) bool {
		found, err := slicesOf(ctx, m, name, true)
		return err != nil || slices.ContainsFunc(found, func(es *discoveryv1.EndpointSlice) bool { return sourceOf(es).cluster == cluster })
	})
}
