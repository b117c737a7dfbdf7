package services

import (
	"context"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/liveness"
)

// knownEndpoints is how many endpoints of a cluster a probe chooses from.
const knownEndpoints = 32

// Probe tells whether any of a few endpoints of a cluster answers.
type Probe func(ctx context.Context, endpoints []netip.AddrPort) liveness.Verdict

// Answers is part of reconcile.Witness. The nodes of any member that receive answers of the cluster's endpoints are believed first, then a
// probe from here, then nodes that receive none.
func (r *Reconciler) Answers(ctx context.Context, id clusterset.ClusterID, all []reconcile.Member) liveness.Verdict {
	reported := reports(ctx, all)[id]
	if reported == liveness.Answering {
		return reported
	}
	verdict := r.try(ctx, id, all)
	if _, ever := r.reached.Load(id); verdict == liveness.Answering || verdict == liveness.Silent && ever {
		return verdict
	}
	return reported
}

// Reach is part of reconcile.Witness.
func (r *Reconciler) Reach(ctx context.Context, id clusterset.ClusterID, all []reconcile.Member) {
	r.try(ctx, id, all)
}

// try probes endpoints of a cluster.
func (r *Reconciler) try(ctx context.Context, id clusterset.ClusterID, all []reconcile.Member) liveness.Verdict {
	i := slices.IndexFunc(all, func(m reconcile.Member) bool { return m.ID() == id })
	if i < 0 {
		return liveness.Unknown
	}
	endpoints := r.endpoints(ctx, all[i])
	if len(endpoints) == 0 {
		return liveness.Unknown
	}
	verdict := r.probe(ctx, endpoints)
	if verdict == liveness.Answering {
		r.reached.Store(id, true)
	}
	return verdict
}

// handshakes tries TCP handshakes with a few of endpoints.
func handshakes(ctx context.Context, endpoints []netip.AddrPort) liveness.Verdict {
	probe := liveness.Probe{Endpoints: func(clusterset.ClusterID) []netip.AddrPort { return endpoints }}
	return probe.Answers(ctx, "")
}

// endpoints returns TCP endpoints that a member offers to others: ready ones, or others if none is ready. A cluster that is cut off may
// still get out that its own control plane takes its endpoints for dead, and would never be judged without them.
func (r *Reconciler) endpoints(ctx context.Context, m reconcile.Member) []netip.AddrPort {
	var found, unready []netip.AddrPort
	r.wanted.Range(func(key, _ any) bool {
		name := key.(clusterset.ServiceName) //nolint:forcetypeassert // nothing else is in there
		var members corev1.ServiceList
		if err := m.List(ctx, &members, client.MatchingLabels{labelMemberOf: memberOf(name)}); err != nil {
			return false
		}
		for i := range members.Items {
			svc := &members.Items[i]
			if r.grants.Service(m.ID(), svc.Namespace, name, name.Namespace == r.system) != nil {
				continue // anybody may make one, with endpoints of any address
			}
			src, err := r.source(ctx, m, svc)
			if err != nil {
				continue
			}
			if o, err := offers.New(src); err == nil {
				accept, others := o.Endpoints(clusterset.TCP)
				found, unready = append(found, accept...), append(unready, others...)
			}
		}
		return len(found) < knownEndpoints
	})
	if len(found) == 0 {
		found = unready
	}
	return found[:min(len(found), knownEndpoints)]
}

// reports returns what the agents of reachable members say about other clusters. One node that receives answers outweighs all others.
func reports(ctx context.Context, all []reconcile.Member) map[clusterset.ClusterID]liveness.Verdict {
	verdicts := map[clusterset.ClusterID]liveness.Verdict{}
	for _, m := range all {
		if !m.Reachable() {
			continue // what it says is old
		}
		var list isthmus.NodeReportList
		if err := m.List(ctx, &list); err != nil {
			continue // it has no agents, or does not let leaders read their reports
		}
		for i := range list.Items {
			for _, id := range list.Items[i].Spec.Silent {
				if verdicts[clusterset.ClusterID(id)] == liveness.Unknown {
					verdicts[clusterset.ClusterID(id)] = liveness.Silent
				}
			}
			for _, id := range list.Items[i].Spec.Answering {
				verdicts[clusterset.ClusterID(id)] = liveness.Answering
			}
		}
	}
	return verdicts
}

// dead returns the clusters whose endpoints are not used.
func dead(all []reconcile.Member) map[clusterset.ClusterID]bool {
	clusters := map[clusterset.ClusterID]bool{}
	for _, m := range all {
		if m.Dead() {
			clusters[m.ID()] = true
		}
	}
	return clusters
}

// dropDead removes the endpoints of dead clusters from the offers. The properties of the federated Service stay. If no other endpoint would
// be left that clients can use, it removes none: a wrong endpoint is no worse than none.
func (s *snapshot) dropDead(clusters map[clusterset.ClusterID]bool) {
	if len(clusters) == 0 || !slices.ContainsFunc(s.offers, func(o offers.Offer) bool { return !clusters[o.Cluster] && o.IsReady() }) {
		return
	}
	s.dropped = clusters
	for i := range s.offers {
		if o := &s.offers[i]; clusters[o.Cluster] {
			o.Groups, o.Unresolved, o.Sliceless = nil, nil, false
		}
	}
}

// noKeys is for kinds whose changes are read when they are needed.
func noKeys(reconcile.Member, client.Object) []reconcile.Key { return nil }

// trimReport keeps what a node says about other clusters.
func trimReport(obj any) (any, error) {
	report, ok := obj.(*isthmus.NodeReport)
	if !ok {
		return obj, nil
	}
	kept := &isthmus.NodeReport{}
	kept.Namespace, kept.Name, kept.UID, kept.ResourceVersion = report.Namespace, report.Name, report.UID, report.ResourceVersion
	kept.Spec.Answering, kept.Spec.Silent = report.Spec.Answering, report.Spec.Silent
	return kept, nil
}
