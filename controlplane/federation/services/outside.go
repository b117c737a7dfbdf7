package services

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/federation/services/internal/offers"
)

// outsideTTL is the TTL of a host name's records in seconds: clients follow a change of its addresses within it.
const outsideTTL = "30"

// balanced returns the ServiceImport that gateways balance for a Service, and whether it names one.
func balanced(o client.Object) (clusterset.ServiceName, bool) {
	name := o.GetAnnotations()[v1alpha1.AnnotationServiceImport]
	return clusterset.ServiceName{Namespace: o.GetNamespace(), Name: name}, name != ""
}

// balances reports whether svc is a Service whose gateways balance a ServiceImport. Without a class it may be, because a cluster can have
// gateways for all such Services.
func balances(svc *corev1.Service) bool {
	_, named := balanced(svc)
	class := svc.Spec.LoadBalancerClass
	return named && svc.Spec.Type == corev1.ServiceTypeLoadBalancer && (class == nil || *class == v1alpha1.GatewayClass)
}

// readGateways adds the Services of a member whose gateways balance the federated Service.
func (r *Reconciler) readGateways(ctx context.Context, s *snapshot, m reconcile.Member) error {
	if m.Dead() {
		return nil
	}
	var list corev1.ServiceList
	if err := m.List(ctx, &list, client.MatchingLabels{labelMemberOf: gatewayOf(s.name)}); err != nil {
		return err
	}
	for i := range list.Items {
		svc := &list.Items[i]
		global := s.name.Namespace == r.system // its namespace is the administrators' own
		if !global && r.grants.Service(m.ID(), svc.Namespace, s.name, false) != nil {
			continue
		}
		if o, err := offers.New(offers.Source{Cluster: m.ID(), Service: svc, Lookup: r.hosts.Lookup}); err == nil {
			s.gateways = append(s.gateways, o)
			s.held = s.held || len(o.Unresolved) > 0
		}
		for _, in := range svc.Status.LoadBalancer.Ingress {
			if in.Hostname != "" {
				s.hosts = append(s.hosts, in.Hostname)
			}
		}
	}
	return nil
}

// shapeHostname sets the host name of a federated Service outside of the clusters, if a member Service asks for one, and the addresses
// of a host name, also of one that a user gave it.
func (r *Reconciler) shapeHostname(svc *corev1.Service, s *snapshot, fed offers.Federated) error {
	given, ours := "", []string{"", svc.Annotations[v1alpha1.AnnotationHostnameGiven]}
	if r.hostname != nil {
		name, err := r.outsideName(s.name)
		if err != nil {
			return fmt.Errorf("spec.hostnameTemplate of the Federation, for service %s: %w", s.name, err)
		}
		ours = append(ours, name)
		if s.asksName {
			given = name
		}
	}
	named := false
	for _, prefix := range v1alpha1.ExternalDNSPrefixes() {
		name := prefix + v1alpha1.ExternalDNSHostname
		if given != "" || slices.Contains(ours, svc.Annotations[name]) { // another value is a user's
			annotate(svc, name, given)
		}
		named = named || svc.Annotations[name] != ""
	}
	annotate(svc, v1alpha1.AnnotationHostnameGiven, given)
	var outside reach
	if named {
		outside = s.outside(svc, fed)
		s.reach = &outside
	}
	for _, prefix := range v1alpha1.ExternalDNSPrefixes() {
		annotate(svc, prefix+v1alpha1.ExternalDNSTarget, joinAddrs(outside.addrs))
		switch ttl := prefix + v1alpha1.ExternalDNSTTL; {
		case len(outside.addrs) > 0 && svc.Annotations[ttl] == "":
			annotate(svc, ttl, outsideTTL)
		case len(outside.addrs) == 0 && svc.Annotations[ttl] == outsideTTL: // another value is a user's
			annotate(svc, ttl, "")
		}
	}
	annotate(svc, v1alpha1.AnnotationHostnamePorts, outside.ports)
	return nil
}

// reach is where the host name of a Service leads.
type reach struct {
	addrs []netip.Addr // sorted
	ports string       // v1alpha1.AnnotationHostnamePorts
}

// outside returns where the host name of svc leads. While endpoints of a cluster are not known well enough to take any away, the addresses
// that svc has stay, as far as there is room for them, except for those of dead clusters.
func (s *snapshot) outside(svc *corev1.Service, fed offers.Federated) reach {
	dead := func(o offers.Offer) bool { return s.dropped[o.Cluster] }
	now := offers.Reach(fed.Ports, s.gateways, slices.DeleteFunc(slices.Clone(s.away), dead))
	is := reach{now.Addrs, portsText(now.Ports)}
	if !s.held {
		return is
	}
	gone := offers.Addresses(slices.DeleteFunc(slices.Clone(s.away), func(o offers.Offer) bool { return !dead(o) }))
	have := reach{slices.DeleteFunc(parseTargets(svc), func(a netip.Addr) bool { return gone[a] }), svc.Annotations[v1alpha1.AnnotationHostnamePorts]}
	switch {
	case len(have.addrs) == 0:
		return is
	case len(is.addrs) == 0 || is.ports != have.ports:
		return have
	}
	return reach{now.Keep(have.addrs), is.ports}
}

// hostnameProblems returns the problems of the host name that a member Service asks for.
func (r *Reconciler) hostnameProblems(s *snapshot) []string {
	switch {
	case !s.asksName:
		return nil
	case r.hostname == nil:
		return []string{fmt.Sprintf("it gets no host name: %s asks for one, and the Federation has no spec.hostnameTemplate; an administrator sets it", v1alpha1.AnnotationAskHostname)}
	case s.reach == nil: // the federated Service was not shaped, for another reason
		return nil
	case len(s.reach.addrs) == 0:
		return []string{"its host name has no address: no endpoint is ready"}
	case s.reach.ports != "":
		return []string{fmt.Sprintf("its host name leads to other ports (%s): no gateway balances it, and no endpoint serves all of its ports; annotate a Service of type LoadBalancer with %s, or use these ports",
			s.reach.ports, v1alpha1.AnnotationServiceImport)}
	}
	return nil
}

// parseTargets returns the addresses of a federated Service's host name.
func parseTargets(svc *corev1.Service) (addrs []netip.Addr) {
	for text := range strings.SplitSeq(svc.Annotations[v1alpha1.ExternalDNSPrefixes()[0]+v1alpha1.ExternalDNSTarget], ",") {
		if a, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// annotate sets an annotation, or removes it if value is empty.
func annotate(svc *corev1.Service, key, value string) {
	if value == "" {
		delete(svc.Annotations, key)
		return
	}
	metav1.SetMetaDataAnnotation(&svc.ObjectMeta, key, value)
}

func joinAddrs(addrs []netip.Addr) string {
	var texts []string
	for _, a := range addrs {
		texts = append(texts, a.String())
	}
	return strings.Join(texts, ",")
}

// portsText returns the value of v1alpha1.AnnotationHostnamePorts.
func portsText(ports []offers.Target) string {
	var texts []string
	for _, t := range ports {
		number := "none"
		if t.Number != 0 {
			number = fmt.Sprint(t.Number)
		}
		texts = append(texts, fmt.Sprintf("%d/%s=%s", t.Port.Port, t.Port.Protocol, number))
	}
	return strings.Join(texts, ",")
}
