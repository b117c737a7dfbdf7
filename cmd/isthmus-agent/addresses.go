package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/bpf/lb"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// The agent reads the ranges of ClusterSetIPs and the addresses that the cluster itself uses from these objects.
//
// +kubebuilder:rbac:groups="",resources=nodes,verbs=get
// +kubebuilder:rbac:groups=isthmus.dev,resources=members,verbs=get,namespace=isthmus-system
// +kubebuilder:rbac:groups=federation.isthmus.dev,resources=federations,resourceNames=federation,verbs=get
// +kubebuilder:rbac:groups=networking.k8s.io,resources=servicecidrs,verbs=list

// The users of the cluster's own addresses, in messages.
const (
	useServices = "Services"
	usePods     = "pods"
	useNodes    = "nodes"
	useExtra    = "further endpoints"
)

// addresses holds what objects of the API server say about addresses, by object, and the profile of the ClusterSet. An object that
// cannot be read, or that was deleted, keeps its last values. The zero value is ready.
type addresses struct {
	member, federation        []netip.Prefix // ranges of ClusterSetIPs
	ownMember, ownNode, cidrs []lb.Own       // the cluster's own
	agents                    []netip.Prefix // of all nodes with an agent
	profile                   string         // of the ClusterSet; "" is the default
}

// ranges returns the ranges of all ClusterSetIPs, sorted.
func (a *addresses) ranges() []netip.Prefix {
	return sortedPrefixes(slices.Concat(a.member, a.federation))
}

// sortedPrefixes sorts all in place and returns it without duplicates.
func sortedPrefixes(all []netip.Prefix) []netip.Prefix {
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// own returns the cluster's own addresses. The address of the API server's Service counts before any object has been read.
func (a *addresses) own() []lb.Own {
	all := slices.Concat(a.cidrs, a.ownMember, a.ownNode)
	return append(all, ownAddresses(useServices, os.Getenv("KUBERNETES_SERVICE_HOST"))...)
}

// readMember reads the registration of this cluster: the ranges of the ClusterSetIPs, if wanted, its own addresses, and the profile.
func (a *addresses) readMember(ctx context.Context, server rest.Interface, namespace string, id clusterset.ClusterID) error {
	var m v1alpha1.Member
	if err := getObject(ctx, server, fmt.Sprintf("/apis/%s/namespaces/%s/members/%s", v1alpha1.GroupVersion, namespace, id), &m); err != nil {
		return err
	}
	var own []lb.Own
	var faults []error
	for use, texts := range map[string][]string{
		useServices: m.Spec.ServiceCIDRs, usePods: slices.Concat(m.Spec.PodCIDRs, m.Spec.PodSupernets), useNodes: m.Spec.NodeCIDRs, useExtra: m.Spec.ExtraCIDRs,
	} {
		more, err := ownRanges(use, texts)
		own, faults = append(own, more...), append(faults, err)
	}
	slices.SortFunc(own, compareOwn)
	a.ownMember, a.profile = own, m.Spec.Profile
	ranges, err := parseRanges(m.Status.ClusterSetIPCIDRRange)
	if len(ranges) > 0 {
		a.member = ranges
	} else if err == nil {
		err = errNotYet
	}
	return errors.Join(append(faults, err)...)
}

// readFederation reads the ranges of the federation, if the cluster is in one.
func (a *addresses) readFederation(ctx context.Context, server rest.Interface) error {
	var f federationv1alpha1.Federation
	err := getObject(ctx, server, fmt.Sprintf("/apis/%s/federations/%s", federationv1alpha1.GroupVersion, federationv1alpha1.FederationName), &f)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ranges, err := parseRanges(f.Spec.ClusterSetIP.Ranges)
	if len(ranges) > 0 {
		a.federation = ranges
	}
	return err
}

// readServices reads the ranges of the cluster's Services, which an API server before Kubernetes 1.33 does not tell.
func (a *addresses) readServices(ctx context.Context, server rest.Interface) error {
	var list networkingv1.ServiceCIDRList
	err := getObject(ctx, server, "/apis/networking.k8s.io/v1/servicecidrs", &list)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	var texts []string
	for _, c := range list.Items {
		texts = append(texts, c.Spec.CIDRs...)
	}
	own, err := ownRanges(useServices, texts)
	if len(own) > 0 {
		slices.SortFunc(own, compareOwn)
		a.cidrs = own
	}
	return err
}

// noteNode notes the addresses of this node and of its pods.
func (a *addresses) noteNode(n *corev1.Node) error {
	own, err := ownRanges(usePods, n.Spec.PodCIDRs)
	for _, at := range n.Status.Addresses {
		own = append(own, ownAddresses(useNodes, at.Address)...)
	}
	slices.SortFunc(own, compareOwn)
	a.ownNode = own
	return err
}

// ownRanges parses ranges of the cluster's own addresses.
func ownRanges(use string, texts []string) ([]lb.Own, error) {
	ranges, err := parseRanges(texts)
	var own []lb.Own
	for _, r := range ranges {
		own = append(own, lb.Own{Prefix: r, Use: use})
	}
	return own, err
}

// ownAddresses returns the range of one address; none if text is a host name or empty.
func ownAddresses(use, text string) []lb.Own {
	at, err := netip.ParseAddr(text)
	if err != nil {
		return nil
	}
	at = at.Unmap().WithZone("")
	return []lb.Own{{Prefix: netip.PrefixFrom(at, at.BitLen()), Use: use}}
}

// compareOwn makes equal addresses an equal topology.
func compareOwn(a, b lb.Own) int { return a.Prefix.Compare(b.Prefix) }
