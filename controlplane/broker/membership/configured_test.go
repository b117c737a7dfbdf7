package membership

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"
)

// Objects as installers and network plugins write them, cut to what is read.
func TestConfigurations(t *testing.T) {
	for name, c := range map[string]struct{ object, pods, services string }{
		"kubeadm": {
			"{apiVersion: v1, kind: ConfigMap, metadata: {namespace: kube-system, name: kubeadm-config}, data: {ClusterConfiguration: 'networking: {podSubnet: \"10.7.0.0/16,fd00:7::/48\", serviceSubnet: 10.96.0.0/12}'}}",
			"10.7.0.0/16,fd00:7::/48", "10.96.0.0/12",
		},
		"kube-proxy": {
			"{apiVersion: v1, kind: ConfigMap, metadata: {namespace: kube-system, name: kube-proxy}, data: {config.conf: 'clusterCIDR: 10.7.0.0/16'}}",
			"10.7.0.0/16", "",
		},
		"Cilium, which manages addresses": {
			"{apiVersion: v1, kind: ConfigMap, metadata: {namespace: kube-system, name: cilium-config}, data: {ipam: cluster-pool, cluster-pool-ipv4-cidr: 10.8.0.0/16 10.9.0.0/16}}",
			"10.8.0.0/16 10.9.0.0/16 ", "",
		},
		"Cilium with the CIDRs of nodes": {
			"{apiVersion: v1, kind: ConfigMap, metadata: {namespace: kube-system, name: cilium-config}, data: {ipam: kubernetes, cluster-pool-ipv4-cidr: 10.0.0.0/8}}",
			"", "",
		},
		"Flannel": {
			`{apiVersion: v1, kind: ConfigMap, metadata: {namespace: kube-flannel, name: kube-flannel-cfg}, data: {net-conf.json: '{"Network": "10.244.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:10:244::/56", "Backend": {"Type": "vxlan"}}'}}`,
			"10.244.0.0/16 fd00:10:244::/56", "",
		},
		"Flannel with a fault": {
			`{apiVersion: v1, kind: ConfigMap, metadata: {namespace: kube-system, name: kube-flannel-cfg}, data: {net-conf.json: '{"Network": "10.244'}}`,
			"", "",
		},
		"kube-controller-manager": {
			"{apiVersion: v1, kind: Pod, metadata: {namespace: kube-system, name: kube-controller-manager-n1}, spec: {containers: [{name: c, command: [kube-controller-manager, --allocate-node-cidrs=true, --cluster-cidr=10.7.0.0/16, --service-cluster-ip-range=10.96.0.0/12]}]}}",
			"10.7.0.0/16", "10.96.0.0/12",
		},
		"OpenShift": {
			"{apiVersion: config.openshift.io/v1, kind: Network, metadata: {name: cluster}, spec: {clusterNetwork: [{cidr: 10.128.0.0/14, hostPrefix: 23}, {cidr: 'fd01::/48', hostPrefix: 64}], serviceNetwork: [172.30.0.0/16, 'fd02::/112']}}",
			"10.128.0.0/14,fd01::/48", "172.30.0.0/16,fd02::/112",
		},
		"Calico": {
			"{apiVersion: crd.projectcalico.org/v1, kind: IPPool, metadata: {name: default}, spec: {cidr: 10.7.0.0/16}}", "10.7.0.0/16", "",
		},
		"Calico's API server": {
			"{apiVersion: projectcalico.org/v3, kind: IPPool, metadata: {name: default}, spec: {cidr: 10.7.0.0/16}}", "10.7.0.0/16", "",
		},
		"a pool that is off": {
			"{apiVersion: projectcalico.org/v3, kind: IPPool, metadata: {name: off}, spec: {cidr: 10.7.0.0/16, disabled: true}}", "", "",
		},
		"a pool of Cilium": {
			"{apiVersion: cilium.io/v2alpha1, kind: CiliumPodIPPool, metadata: {name: default}, spec: {ipv4: {cidrs: [10.10.0.0/16, 10.12.0.0/16], maskSize: 27}, ipv6: {cidrs: ['fd00:100::/80'], maskSize: 96}}}",
			"10.10.0.0/16,10.12.0.0/16,fd00:100::/80", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := &unstructured.Unstructured{}
			if err := yaml.Unmarshal([]byte(c.object), &o.Object); err != nil {
				t.Fatal(err)
			}
			read := 0
			for _, config := range configurations {
				if config.gvk != o.GroupVersionKind() || config.keys != nil && !slices.Contains(config.keys, client.ObjectKeyFromObject(o)) {
					continue
				}
				read++
				if pods, services := config.read(o); pods != c.pods || services != c.services {
					t.Errorf("pods %q and services %q, want %q and %q", pods, services, c.pods, c.services)
				}
			}
			if read != 1 {
				t.Errorf("%d configurations read the object", read)
			}
		})
	}
}
