package membership

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// configuration is a kind of objects in which installers and network plugins keep the CIDRs of a whole cluster, future nodes
// included.
type configuration struct {
	gvk schema.GroupVersionKind
	// keys are the objects; nil means all of the kind.
	keys []client.ObjectKey
	// selector chooses among all of the kind.
	selector client.MatchingLabels
	// read returns the CIDRs in an object, separated by commas or spaces.
	read func(o *unstructured.Unstructured) (pods, services string)
}

func kind(group, version, kind string) schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: group, Version: version, Kind: kind}
}

func configMaps(read func(values map[string]string) (pods, services string), keys ...client.ObjectKey) configuration {
	return configuration{gvk: kind("", "v1", "ConfigMap"), keys: keys, read: func(o *unstructured.Unstructured) (pods, services string) {
		values, _, _ := unstructured.NestedStringMap(o.Object, "data")
		return read(values)
	}}
}

func inSystem(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: name}
}

// configurations are all that configuredCIDRs reads, those of the whole cluster first.
var configurations = []configuration{
	configMaps(ofKubeadm, inSystem("kubeadm-config")),
	configMaps(ofKubeProxy, inSystem("kube-proxy")),
	configMaps(ofCilium, inSystem("cilium-config")),
	configMaps(ofFlannel, client.ObjectKey{Namespace: "kube-flannel", Name: "kube-flannel-cfg"}, inSystem("kube-flannel-cfg"), inSystem("canal-config")),
	{gvk: kind("", "v1", "Pod"), selector: client.MatchingLabels{"component": "kube-controller-manager"}, read: ofControllerManager},
	{gvk: kind("config.openshift.io", "v1", "Network"), keys: []client.ObjectKey{{Name: "cluster"}}, read: ofOpenShift},
	{gvk: kind("crd.projectcalico.org", "v1", "IPPool"), read: ofCalico},
	{gvk: kind("projectcalico.org", "v3", "IPPool"), read: ofCalico},
	{gvk: kind("cilium.io", "v2alpha1", "CiliumPodIPPool"), read: ofCiliumPool},
}

// lookedFor names for people what configuredCIDRs reads.
const lookedFor = "kubeadm's, kube-proxy's, Cilium's and Flannel's ConfigMaps, kube-controller-manager's flags, OpenShift's Network, IPPools and CiliumPodIPPools"

func ofKubeadm(values map[string]string) (pods, services string) {
	var v struct {
		Networking struct{ PodSubnet, ServiceSubnet string }
	}
	if yaml.Unmarshal([]byte(values["ClusterConfiguration"]), &v) != nil {
		return "", ""
	}
	return v.Networking.PodSubnet, v.Networking.ServiceSubnet
}

func ofKubeProxy(values map[string]string) (pods, services string) {
	var v struct{ ClusterCIDR string }
	if yaml.Unmarshal([]byte(values["config.conf"]), &v) != nil {
		return "", ""
	}
	return v.ClusterCIDR, ""
}

// ofCilium reads the pools of Cilium's own address management; in other modes its ConfigMap has values that nothing uses.
func ofCilium(values map[string]string) (pods, services string) {
	if values["ipam"] != "cluster-pool" {
		return "", ""
	}
	return values["cluster-pool-ipv4-cidr"] + " " + values["cluster-pool-ipv6-cidr"], ""
}

func ofFlannel(values map[string]string) (pods, services string) {
	var v struct{ Network, IPv6Network string }
	if json.Unmarshal([]byte(values["net-conf.json"]), &v) != nil {
		return "", ""
	}
	return v.Network + " " + v.IPv6Network, ""
}

// ofControllerManager reads the flags of kube-controller-manager, which gives nodes their pod CIDRs.
func ofControllerManager(o *unstructured.Unstructured) (pods, services string) {
	var pod corev1.Pod
	if runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &pod) != nil {
		return "", ""
	}
	for _, c := range pod.Spec.Containers {
		for _, arg := range append(c.Command, c.Args...) {
			if value, ok := strings.CutPrefix(arg, "--cluster-cidr="); ok {
				pods = value
			}
			if value, ok := strings.CutPrefix(arg, "--service-cluster-ip-range="); ok {
				services = value
			}
		}
	}
	return pods, services
}

func ofOpenShift(o *unstructured.Unstructured) (pods, services string) {
	networks, _, _ := unstructured.NestedSlice(o.Object, "spec", "clusterNetwork")
	var all []string
	for _, n := range networks {
		if fields, ok := n.(map[string]any); ok {
			cidr, _, _ := unstructured.NestedString(fields, "cidr")
			all = append(all, cidr)
		}
	}
	own, _, _ := unstructured.NestedStringSlice(o.Object, "spec", "serviceNetwork")
	return strings.Join(all, ","), strings.Join(own, ",")
}

func ofCalico(o *unstructured.Unstructured) (pods, services string) {
	if disabled, _, _ := unstructured.NestedBool(o.Object, "spec", "disabled"); disabled {
		return "", ""
	}
	pods, _, _ = unstructured.NestedString(o.Object, "spec", "cidr")
	return pods, ""
}

func ofCiliumPool(o *unstructured.Unstructured) (pods, services string) {
	var all []string
	for _, family := range []string{"ipv4", "ipv6"} {
		cidrs, _, _ := unstructured.NestedStringSlice(o.Object, "spec", family, "cidrs")
		all = append(all, cidrs...)
	}
	return strings.Join(all, ","), ""
}

// configuredCIDRs reads the pod and service CIDRs of the whole cluster. It skips objects that are missing, forbidden or not
// parseable.
func configuredCIDRs(ctx context.Context, c client.Client) (discovery, error) {
	var d discovery
	add := func(to *[]Found, from, text string) {
		cidrs := parsed(strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' }))
		if len(cidrs) > 0 {
			*to = append(*to, Found{cidrs, from})
		}
	}
	for _, config := range configurations {
		objects, err := config.objects(ctx, c)
		if err != nil {
			return d, err
		}
		for i := range objects {
			o := &objects[i]
			name := o.GetName()
			if o.GetNamespace() != "" {
				name = o.GetNamespace() + "/" + name
			}
			pods, services := config.read(o)
			add(&d.pods, o.GetKind()+" "+name, pods)
			add(&d.services, o.GetKind()+" "+name, services)
		}
	}
	return d, nil
}

// objects returns the objects of a configuration that are there and may be read.
func (config configuration) objects(ctx context.Context, c client.Client) ([]unstructured.Unstructured, error) {
	if config.keys == nil {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(config.gvk)
		opts := []client.ListOption{}
		if config.selector != nil {
			opts = append(opts, config.selector, client.InNamespace(metav1.NamespaceSystem))
		}
		if err := c.List(ctx, list, opts...); err != nil && !isHidden(err) {
			return nil, fmt.Errorf("list objects of kind %s: %w", config.gvk.Kind, err)
		}
		return list.Items, nil
	}
	var found []unstructured.Unstructured
	for _, key := range config.keys {
		o := unstructured.Unstructured{}
		o.SetGroupVersionKind(config.gvk)
		err := c.Get(ctx, key, &o)
		switch {
		case err == nil:
			found = append(found, o)
		case !isHidden(err):
			return nil, fmt.Errorf("read %s %s: %w", config.gvk.Kind, key, err)
		}
	}
	return found, nil
}

// isHidden reports whether an error says that an object or kind is missing, or may not be read.
func isHidden(err error) bool {
	return admin.IsAbsent(err) || apierrors.IsForbidden(err)
}
