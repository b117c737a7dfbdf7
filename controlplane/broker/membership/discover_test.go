package membership

import (
	"context"
	"maps"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// put creates obj until the end of the test.
func put(t *testing.T, c client.Client, obj client.Object) {
	t.Helper()
	if err := c.Create(t.Context(), obj); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(c.Delete(context.Background(), obj)); err != nil {
			t.Error(err)
		}
	})
}

func TestDiscover(t *testing.T) {
	c := newClient(t, memberServer.Config(t))
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1"},
		Spec:       corev1.NodeSpec{PodCIDR: "10.7.0.0/24", PodCIDRs: []string{"10.7.0.0/24", "fd00:7:1::/64"}},
	}
	put(t, c, node)
	node.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: "192.0.2.7"},
		{Type: corev1.NodeInternalIP, Address: "2001:db8::7"},
		{Type: corev1.NodeHostName, Address: "n1"},
		{Type: corev1.NodeExternalIP, Address: "198.51.100.7"},
	}
	if err := c.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	put(t, c, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n2"},
		Spec:       corev1.NodeSpec{PodCIDR: "10.7.1.0/24", PodCIDRs: []string{"10.7.1.0/24", "fd00:7:3::/64"}},
	})
	check := func(want discovery) {
		t.Helper()
		var have discovery
		err := admin.Await(t.Context(), "no ServiceCIDR", func() (bool, error) {
			var err error
			have, err = discover(t.Context(), c)
			return len(have.services) > 0, err
		})
		if err != nil {
			t.Fatal(err)
		}
		same := cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
		if diff := cmp.Diff(want, have, same, cmp.AllowUnexported(discovery{})); diff != "" {
			t.Errorf("found (-want +have):\n%s", diff)
		}
	}
	want := discovery{
		pods:     []Found{{cidrs("10.7.0.0/23", "fd00:7:1::/64", "fd00:7:3::/64"), "its nodes"}},
		nodes:    []Found{{cidrs("192.0.2.7/32", "2001:db8::7/128"), "its nodes"}},
		services: []Found{{cidrs("10.96.0.0/16", "fd00:96::/112"), "its ServiceCIDRs"}},
	}
	check(want)

	// The configuration of the whole cluster covers later nodes. CIDRs of nodes outside of it are added.
	configure := func(name string, values map[string]string) {
		t.Helper()
		put(t, c, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: name}, Data: maps.Clone(values)})
	}
	configure("kubeadm-config", map[string]string{"ClusterConfiguration": "networking:\n  podSubnet: 10.7.0.0/16,fd00:7:1::/48\n  serviceSubnet: 10.96.0.0/16\n"})
	configure("kube-proxy", map[string]string{"config.conf": "clusterCIDR: 10.7.0.0/16\n"})
	configure("cilium-config", map[string]string{"ipam": "kubernetes", "cluster-pool-ipv4-cidr": "10.0.0.0/8"})
	want.pods = []Found{
		{cidrs("10.7.0.0/16", "fd00:7:1::/48"), "ConfigMap kube-system/kubeadm-config"},
		{cidrs("fd00:7:3::/64"), "its nodes"},
	}
	check(want)

	cilium := &corev1.ConfigMap{}
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "cilium-config"}, cilium); err != nil {
		t.Fatal(err)
	}
	cilium.Data["ipam"], cilium.Data["cluster-pool-ipv4-cidr"] = "cluster-pool", "10.8.0.0/16 10.9.0.0/16"
	if err := c.Update(t.Context(), cilium); err != nil {
		t.Fatal(err)
	}
	calico(t, c)
	want.pods = []Found{
		{cidrs("10.7.0.0/16"), "ConfigMap kube-system/kubeadm-config"},
		{cidrs("10.8.0.0/15"), "ConfigMap kube-system/cilium-config"},
		{cidrs("fd00:7::/32"), "IPPool default"},
	}
	check(want)
}

// calico installs the part of Calico that has the pod CIDRs.
func calico(t *testing.T, c client.Client) {
	t.Helper()
	preserve := true
	put(t, c, &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "ippools.crd.projectcalico.org"},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "crd.projectcalico.org", Scope: apiextensionsv1.ClusterScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Kind: "IPPool", ListKind: "IPPoolList", Plural: "ippools", Singular: "ippool"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: &preserve}},
			}},
		},
	})
	for name, spec := range map[string]map[string]any{
		"default": {"cidr": "fd00:7::/32"}, "off": {"cidr": "10.0.0.0/8", "disabled": true},
	} {
		pool := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
		pool.SetAPIVersion("crd.projectcalico.org/v1")
		pool.SetKind("IPPool")
		pool.SetName(name)
		err := admin.Await(t.Context(), "no IPPools are served", func() (bool, error) {
			return c.Create(t.Context(), pool) == nil, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
