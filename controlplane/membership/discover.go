package membership

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Addresses is where a cluster's endpoints may be. Nobody in the ClusterSet believes an address of the
// cluster outside of them.
type Addresses struct {
	Pods, Nodes, Services []netip.Prefix
}

// orElse returns a with what it leaves open taken from found.
func (a Addresses) orElse(found Addresses) Addresses {
	if a.Pods == nil {
		a.Pods = found.Pods
	}
	if a.Nodes == nil {
		a.Nodes = found.Nodes
	}
	if a.Services == nil {
		a.Services = found.Services
	}
	return a
}

// discover finds a cluster's addresses: the pod CIDRs of its nodes, their internal addresses, and its
// ServiceCIDRs (none on a Kubernetes that has no such kind). Nodes that come later are not covered.
func discover(ctx context.Context, c client.Client) (Addresses, error) {
	var found Addresses
	nodes := &corev1.NodeList{}
	if err := c.List(ctx, nodes); err != nil {
		return found, fmt.Errorf("list nodes: %w", err)
	}
	for _, n := range nodes.Items {
		found.Pods = append(found.Pods, parsed(n.Spec.PodCIDRs)...)
		for _, a := range n.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == corev1.NodeInternalIP {
				found.Nodes = append(found.Nodes, netip.PrefixFrom(ip, ip.BitLen()))
			}
		}
	}
	services := &networkingv1.ServiceCIDRList{}
	err := c.List(ctx, services)
	switch {
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err):
	case err != nil:
		return found, fmt.Errorf("list ServiceCIDRs: %w", err)
	}
	for _, s := range services.Items {
		found.Services = append(found.Services, parsed(s.Spec.CIDRs)...)
	}
	return found, nil
}
