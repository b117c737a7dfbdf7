package services

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// snapshot is the state of one federated Service in all members, as it matters to the member that is reconciled.
type snapshot struct {
	name clusterset.ServiceName

	offers   []offers.Offer      // as seen from that member
	members  []*corev1.Service   // in that member
	faults   map[types.UID]error // why members offer nothing
	asksName bool                // a member Service asks for a name outside of the clusters
	away     []offers.Offer      // as seen from outside of the clusters; dead clusters included
	gateways []offers.Offer      // Services whose gateways balance it, in clusters that are not dead
	hosts    []string            // host names of load balancers

	clusters []clusterset.ClusterID                      // all members, sorted
	offering map[clusterset.ClusterID][]client.ObjectKey // clusters with a member Service, and those that offer anything
	unread   bool                                        // a cluster was never read
	taken    []clusterset.ClusterID                      // clusters in which a user's Service has the name, sorted
	lacking  []clusterset.ClusterID                      // clusters without the namespace of global Services, sorted
	foreign  []string                                    // clusters whose ServiceImport has addresses that are not the federation's, and why
	firsts   []string                                    // the marks of the first member Service on the federated Services of all clusters
	dropped  map[clusterset.ClusterID]bool               // dead clusters, if others serve
	blocked  ownAddresses                                // addresses of the members themselves, inside the ranges of ClusterSetIPs

	reach *reach // of its host name; nil without one

	// Existing objects in the reconciled member.
	service *corev1.Service // nil without one
	slices  []*discoveryv1.EndpointSlice

	// incomplete are member Services with existing slices and endpoints that this process does not know now: it has not read any
	// EndpointSlice of a Service that selects pods. The slices stay unchanged until it has.
	incomplete map[source]bool
	// held are clusters whose endpoints are not known well enough to take any away.
	held bool
	// unresolved are host names of load balancers that this process has not resolved yet, of Services of other clusters. Their slices stay
	// until it has.
	unresolved map[hostOf]bool
}

// hostOf is a host name of a member Service's load balancer.
type hostOf struct {
	source
	host string
}

// source is a member Service that a slice leads to.
type source struct {
	cluster clusterset.ClusterID
	service string // NAMESPACE/NAME
}

// sourceOf returns the source of a slice of ours.
func sourceOf(es *discoveryv1.EndpointSlice) source {
	return source{clusterset.ClusterID(es.Labels[v1alpha1.MarkCluster]), es.Annotations[offers.AnnotationSource]}
}

// read returns the snapshot of a federated Service for the member into.
func (r *Reconciler) read(ctx context.Context, name clusterset.ServiceName, into reconcile.Member, all []reconcile.Member) (*snapshot, error) {
	s := &snapshot{name: name, faults: map[types.UID]error{}, offering: map[clusterset.ClusterID][]client.ObjectKey{}}
	var err error
	if s.blocked, err = r.vips.own(ctx, name, all); err != nil {
		return nil, err
	}
	for _, m := range all {
		s.clusters = append(s.clusters, m.ID())
		if !m.Synced() {
			s.unread = true
			continue
		}
		foreign, err := r.vips.foreign(ctx, m, s)
		if err := errors.Join(err, r.readMember(ctx, s, m, m.ID() == into.ID())); err != nil {
			return nil, fmt.Errorf("read service %s in cluster %s: %w", name, m.ID(), err)
		}
		s.foreign = append(s.foreign, foreign...)
	}
	offers.KeepFirst(s.offers, s.firsts)
	s.dropDead(dead(all))
	s.incomplete, s.unresolved = map[source]bool{}, map[hostOf]bool{}
	for _, o := range s.offers {
		from := source{o.Cluster, o.Service.String()}
		for _, host := range o.Unresolved {
			s.unresolved[hostOf{from, host}] = o.Cluster != into.ID()
		}
		if o.Sliceless && slices.ContainsFunc(s.slices, func(es *discoveryv1.EndpointSlice) bool { return sourceOf(es) == from }) {
			s.incomplete[from] = true
		}
	}
	return s, nil
}

// keepFamilies adds the families of the existing federated Service to offers with unresolved addresses.
func (s *snapshot) keepFamilies() {
	if s.service == nil || !offers.IsOurs(s.service) {
		return
	}
	for i := range s.offers {
		if o := &s.offers[i]; len(o.Unresolved) > 0 {
			for _, f := range s.service.Spec.IPFamilies {
				if !slices.Contains(o.Families, familyOf(f)) {
					o.Families = append(slices.Clip(o.Families), familyOf(f))
				}
			}
		}
	}
}

// readMember adds the objects of one member; here is true for the reconciled member.
func (r *Reconciler) readMember(ctx context.Context, s *snapshot, m reconcile.Member, here bool) error {
	if s.name.Namespace == r.system {
		switch err := m.Get(ctx, client.ObjectKey{Name: r.system}, &corev1.Namespace{}); {
		case client.IgnoreNotFound(err) != nil:
			return err
		case err != nil:
			s.lacking = append(s.lacking, m.ID())
		}
	}
	var result corev1.Service
	err := m.Get(ctx, client.ObjectKey(s.name), &result)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return err
	case err == nil && !offers.IsOurs(&result):
		s.taken = append(s.taken, m.ID())
	case err == nil:
		s.firsts = append(s.firsts, result.Annotations[v1alpha1.AnnotationFirst])
	}
	if here {
		if err == nil {
			s.service = &result
		}
		if s.slices, err = slicesOf(ctx, m, s.name, true); err != nil {
			return err
		}
	}
	var members corev1.ServiceList
	if err := m.List(ctx, &members, client.MatchingLabels{labelMemberOf: memberOf(s.name)}); err != nil {
		return err
	}
	slices.SortFunc(members.Items, func(a, b corev1.Service) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	if len(members.Items) > 0 {
		s.offering[m.ID()] = []client.ObjectKey{}
	}
	for i := range members.Items {
		if err := r.readService(ctx, s, m, &members.Items[i], here); err != nil {
			return err
		}
	}
	return r.readGateways(ctx, s, m)
}

// readService adds a member Service and its offer.
func (r *Reconciler) readService(ctx context.Context, s *snapshot, m reconcile.Member, svc *corev1.Service, here bool) error {
	if here {
		s.members = append(s.members, svc)
	}
	if denial := r.grants.Service(m.ID(), svc.Namespace, s.name, s.name.Namespace == r.system); denial != nil {
		if here {
			s.faults[svc.UID] = denial
		}
		return nil // the owner is told of it
	}
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.Hostname != "" {
			s.hosts = append(s.hosts, in.Hostname)
		}
	}
	s.asksName = s.asksName || svc.Annotations[v1alpha1.AnnotationAskHostname] == "true"
	src, err := r.source(ctx, m, svc)
	if err != nil {
		return err
	}
	o, fault := offers.New(src)
	if fault != nil {
		if here {
			s.faults[svc.UID] = fault
		}
		return nil // the owner is told of it
	}
	s.away = append(s.away, o)
	if here {
		o = o.Local(src)
	}
	s.offers = append(s.offers, o)
	s.offering[m.ID()] = append(s.offering[m.ID()], client.ObjectKeyFromObject(svc))
	return nil
}

// source is the member Service that a slice leads to.
func (r *Reconciler) source(ctx context.Context, m reconcile.Member, svc *corev1.Service) (offers.Source, error) {
	src := offers.Source{Cluster: m.ID(), Service: svc, Lookup: r.hosts.Lookup, External: r.external[m.ID()]}
	var err error
	src.Slices, err = slicesOf(ctx, m, clusterset.ServiceName{Namespace: svc.Namespace, Name: svc.Name}, false)
	if err != nil || svc.Spec.Type != corev1.ServiceTypeNodePort {
		return src, err
	}
	var nodes corev1.NodeList
	if err := m.List(ctx, &nodes); err != nil {
		return src, err
	}
	for i := range nodes.Items {
		src.Nodes = append(src.Nodes, &nodes.Items[i])
	}
	return src, nil
}

// zonesOf returns the zones of a member's nodes, sorted.
func zonesOf(ctx context.Context, m reconcile.Member) ([]string, error) {
	var nodes corev1.NodeList
	if err := m.List(ctx, &nodes); err != nil {
		return nil, err
	}
	zones := map[string]bool{}
	for i := range nodes.Items {
		zones[nodes.Items[i].Labels[corev1.LabelTopologyZone]] = true
	}
	delete(zones, "")
	return slices.Sorted(maps.Keys(zones)), nil
}

// slicesOf returns the slices of a Service in a member: the federation's, or all others.
func slicesOf(ctx context.Context, m reconcile.Member, of clusterset.ServiceName, ours bool) ([]*discoveryv1.EndpointSlice, error) {
	var list discoveryv1.EndpointSliceList
	if err := m.List(ctx, &list, client.InNamespace(of.Namespace), client.MatchingLabels{discoveryv1.LabelServiceName: of.Name}, objectcache.Local(ours)); err != nil {
		return nil, err
	}
	var all []*discoveryv1.EndpointSlice
	for i := range list.Items {
		all = append(all, &list.Items[i])
	}
	return all, nil
}
