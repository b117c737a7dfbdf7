package membership

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Addresses are the CIDRs of a cluster's endpoints. The other members ignore endpoints outside of them.
type Addresses struct {
	// Pods, Nodes and Services are discovered in the cluster if they are nil.
	Pods, Nodes, Services []netip.Prefix
	// Extra are further CIDRs, such as those of virtual machines.
	Extra []netip.Prefix
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

// configuredCIDRs reads the pod and service CIDRs, which cover future nodes, from the objects of common installers and
// network plugins. It skips objects that are missing, forbidden or not parseable.
func configuredCIDRs(ctx context.Context, c client.Client) (discovery, error) {
	var d discovery
	add := func(to *[]Found, from, text string) {
		cidrs := parsed(strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' }))
		if len(cidrs) > 0 {
			*to = append(*to, Found{cidrs, from})
		}
	}
	for _, config := range []struct {
		name string
		read func(from string, values map[string]string)
	}{
		{"kubeadm-config", func(from string, values map[string]string) {
			var v struct {
				Networking struct{ PodSubnet, ServiceSubnet string }
			}
			if yaml.Unmarshal([]byte(values["ClusterConfiguration"]), &v) == nil {
				add(&d.pods, from, v.Networking.PodSubnet)
				add(&d.services, from, v.Networking.ServiceSubnet)
			}
		}},
		{"kube-proxy", func(from string, values map[string]string) {
			var v struct{ ClusterCIDR string }
			if yaml.Unmarshal([]byte(values["config.conf"]), &v) == nil {
				add(&d.pods, from, v.ClusterCIDR)
			}
		}},
		{"cilium-config", func(from string, values map[string]string) {
			if values["ipam"] == "cluster-pool" {
				add(&d.pods, from, values["cluster-pool-ipv4-cidr"]+" "+values["cluster-pool-ipv6-cidr"])
			}
		}},
	} {
		m := &corev1.ConfigMap{}
		err := c.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: config.name}, m)
		switch {
		case apierrors.IsNotFound(err), apierrors.IsForbidden(err):
		case err != nil:
			return d, fmt.Errorf("read ConfigMap %s/%s: %w", metav1.NamespaceSystem, config.name, err)
		default:
			config.read(fmt.Sprintf("ConfigMap %s/%s", m.Namespace, m.Name), m.Data)
		}
	}

	pools := &unstructured.UnstructuredList{}
	pools.SetGroupVersionKind(schema.GroupVersionKind{Group: "crd.projectcalico.org", Version: "v1", Kind: "IPPoolList"})
	err := c.List(ctx, pools)
	if err != nil && !admin.IsAbsent(err) && !apierrors.IsForbidden(err) {
		return d, fmt.Errorf("list IPPools: %w", err)
	}
	for _, p := range pools.Items {
		cidr, _, _ := unstructured.NestedString(p.Object, "spec", "cidr")
		if disabled, _, _ := unstructured.NestedBool(p.Object, "spec", "disabled"); !disabled {
			add(&d.pods, "IPPool "+p.GetName(), cidr)
		}
	}
	return d, nil
}

// distinct keeps each address in one of found only: the first one with the widest prefix around it. It drops empty ones.
func distinct(found ...Found) []Found {
	var kept []Found
	for i, f := range found {
		f.CIDRs = slices.DeleteFunc(compact(f.CIDRs), func(p netip.Prefix) bool {
			for j, other := range found {
				wider := func(q netip.Prefix) bool { return within(p, q) && (p != q || j < i) }
				if j != i && slices.ContainsFunc(compact(other.CIDRs), wider) {
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
