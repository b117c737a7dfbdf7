package policies

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/tools/conformance"
)

func TestLocalPeers(t *testing.T) {
	tests := map[string]struct {
		text string
		want []string
	}{
		"core": {`
spec:
  podSelector: {}
  ingress:
  - from:
    - {podSelector: {matchLabels: {app: shop}}, namespaceSelector: {}}
    - ipBlock: {cidr: 192.0.2.0/24}
  - {}
  egress:
  - to: []
`, []string{
			"spec.ingress[0].from[0].namespaceSelector selects namespaces of the cluster that enforces it",
			"spec.ingress[0].from[0].podSelector selects pods of the cluster that enforces it",
			"spec.ingress[0].from[1].ipBlock is an address, which may belong to another workload in another cluster",
		}},
		"Antrea": {`
metadata: {namespace: demo}
spec:
  appliedTo: [{podSelector: {}}]
  egress:
  - toServices: [{name: shop, namespace: isthmus-system}, {name: own, namespace: isthmus-system}]
  - toServices: [{name: near}]
  - to: [{group: g}, {fqdn: "*.example.org"}]
`, []string{
			"spec.egress[0].toServices[1] names Service isthmus-system/own, which is not federated",
			"spec.egress[2].to[0].group names a group, which each cluster defines for itself",
			"spec.egress[2].to[1].fqdn is a name, which each cluster resolves for itself",
		}},
		"AdminNetworkPolicy": {`
spec:
  egress:
  - to: [{networks: [192.0.2.0/24]}, {somethingLater: x}]
`, []string{
			"spec.egress[0].to[0].networks is an address, which may belong to another workload in another cluster",
			"spec.egress[0].to[1].somethingLater is not a federated Service",
		}},
		"no shape that we know": {"spec: {ingress: [1, {from: 7}, {from: [x]}]}", nil},
	}
	services := map[string]bool{"isthmus-system/shop": true, "demo/near": true}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			o := &unstructured.Unstructured{}
			if err := yaml.Unmarshal([]byte(tc.text), &o.Object); err != nil {
				t.Fatal(err)
			}
			have := localPeers(o, func(namespace, name string) bool { return services[namespace+"/"+name] })
			if diff := cmp.Diff(tc.want, have); diff != "" {
				t.Errorf("peers (-want +have):\n%s", diff)
			}
		})
	}
	conformance.Holds(t, "F27")
}
