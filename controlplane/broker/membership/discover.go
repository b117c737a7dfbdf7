package membership

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Addresses are the CIDRs of a cluster's endpoints. The other members ignore endpoints outside of them.
type Addresses struct {
	// Pods, Nodes and Services are discovered in the cluster if they are nil.
	Pods, Nodes, Services []netip.Prefix
	// Extra are further CIDRs, such as those of virtual machines.
	Extra []netip.Prefix
	// Supernets are CIDRs of this cluster alone, inside of which its controller adds the pod CIDRs of new nodes.
	Supernets []netip.Prefix
}

// Found is discovered CIDRs with their source.
type Found struct {
	CIDRs []netip.Prefix
	From  string // for people, such as "ConfigMap kube-system/kubeadm-config"
}

// discovery is the discovered addresses of a cluster, by kind.
type discovery struct{ pods, nodes, services []Found }

// fromNodes is the source of addresses that only the present nodes tell.
const fromNodes = "its nodes"

// discover discovers a cluster's addresses: the pod CIDRs of the cluster's configuration, where it is known, and of all
// nodes; the internal addresses of nodes; and the ServiceCIDRs. Each address is in one Found only.
func discover(ctx context.Context, c client.Client) (discovery, error) {
	var d discovery
	nodes := &corev1.NodeList{}
	if err := c.List(ctx, nodes); err != nil {
		return d, fmt.Errorf("list nodes: %w", err)
	}
	var podsOfNodes, internal []netip.Prefix
	for _, n := range nodes.Items {
		podsOfNodes = append(podsOfNodes, parsed(n.Spec.PodCIDRs)...)
		for _, a := range n.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
				internal = append(internal, netip.PrefixFrom(ip, ip.BitLen()))
			}
		}
	}
	services, err := serviceCIDRs(ctx, c)
	if err != nil {
		return d, err
	}
	configured, err := configuredCIDRs(ctx, c)
	if err != nil {
		return d, err
	}
	d.pods = distinct(append(configured.pods, Found{podsOfNodes, fromNodes})...)
	d.nodes = distinct(Found{internal, fromNodes})
	d.services = distinct(append([]Found{{services, "its ServiceCIDRs"}}, configured.services...)...)
	return d, nil
}

// serviceCIDRs returns the cluster's ServiceCIDRs; none on a Kubernetes without the kind.
func serviceCIDRs(ctx context.Context, c client.Client) ([]netip.Prefix, error) {
	list := &networkingv1.ServiceCIDRList{}
	err := c.List(ctx, list)
	if err != nil && !admin.IsAbsent(err) {
		return nil, fmt.Errorf("list ServiceCIDRs: %w", err)
	}
	var cidrs []netip.Prefix
	for _, s := range list.Items {
		cidrs = append(cidrs, parsed(s.Spec.CIDRs)...)
	}
	return cidrs, nil
}

// distinct keeps each address in one of found only: the first one with the widest prefix around it. It drops empty ones.
func distinct(found ...Found) []Found {
	var kept []Found
	for i, f := range found {
		f.CIDRs = slices.DeleteFunc(clusterset.CompactPrefixes(f.CIDRs), func(p netip.Prefix) bool {
			for j, other := range found {
				wider := func(q netip.Prefix) bool { return clusterset.Within(p, q) && (p != q || j < i) }
				if j != i && slices.ContainsFunc(clusterset.CompactPrefixes(other.CIDRs), wider) {
					return true
				}
			}
			return false
		})
		if len(f.CIDRs) > 0 {
			kept = append(kept, f)
		}
	}
	return kept
}

// prefixes returns all addresses of found.
func prefixes(found []Found) []netip.Prefix {
	var all []netip.Prefix
	for _, f := range found {
		all = append(all, f.CIDRs...)
	}
	return all
}
