package policies

import (
	"fmt"
	"maps"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// directions are the lists of peers in a rule, by the field of spec that holds the rules, for all known kinds.
var directions = map[string][]string{"ingress": {"from"}, "egress": {"to", "toServices"}}

// meaning explains why a peer is not the same in all clusters, by the field that selects it.
var meaning = map[string]string{
	"podSelector":            "selects pods of the cluster that enforces it",
	"pods":                   "selects pods of the cluster that enforces it",
	"namespaceSelector":      "selects namespaces of the cluster that enforces it",
	"namespaces":             "selects namespaces of the cluster that enforces it",
	"nodeSelector":           "selects nodes of the cluster that enforces it",
	"nodes":                  "selects nodes of the cluster that enforces it",
	"serviceAccount":         "selects pods of the cluster that enforces it",
	"externalEntitySelector": "selects machines that only the cluster that enforces it knows",
	"group":                  "names a group, which each cluster defines for itself",
	"ipBlock":                "is an address, which may belong to another workload in another cluster",
	"networks":               "is an address, which may belong to another workload in another cluster",
	"fqdn":                   "is a name, which each cluster resolves for itself",
	"domainNames":            "is a name, which each cluster resolves for itself",
}

// localPeers returns the peers of policy that are not federated Services, each as the path of its field and the reason why
// it differs by cluster, sorted. federatedService reports whether a Service is federated.
func localPeers(policy *unstructured.Unstructured, federatedService func(namespace, name string) bool) []string {
	var found []string
	for _, list := range slices.Sorted(maps.Keys(directions)) {
		rules, _, _ := unstructured.NestedSlice(policy.Object, "spec", list)
		for i, r := range rules {
			rule, _ := r.(map[string]any)
			for _, field := range directions[list] {
				peers, _ := rule[field].([]any)
				for j, p := range peers {
					peer, _ := p.(map[string]any)
					at := fmt.Sprintf("spec.%s[%d].%s[%d]", list, i, field, j)
					if field == "toServices" {
						found = append(found, explainService(at, policy.GetNamespace(), peer, federatedService)...)
						continue
					}
					if policy.GroupVersionKind().GroupKind() == core {
						if name, ok := namedInCore(policy.GetNamespace(), peer); ok {
							found = append(found, explainNamed(at, name, federatedService)...)
							continue
						}
					}
					found = append(found, explainPeer(at, peer)...)
				}
			}
		}
	}
	return found
}

// explainPeer explains each selector of a peer.
func explainPeer(at string, peer map[string]any) []string {
	var found []string
	for _, selector := range slices.Sorted(maps.Keys(peer)) {
		why, ok := meaning[selector]
		if !ok {
			why = "is not a federated Service"
		}
		found = append(found, at+"."+selector+" "+why)
	}
	return found
}

// explainService explains a peer that names a Service. Without a namespace it means the policy's own.
func explainService(at, namespace string, peer map[string]any, federatedService func(namespace, name string) bool) []string {
	name, _ := peer["name"].(string)
	if given, ok := peer["namespace"].(string); ok && given != "" {
		namespace = given
	}
	return explainNamed(at, clusterset.ServiceName{Namespace: namespace, Name: name}, federatedService)
}

func explainNamed(at string, name clusterset.ServiceName, federatedService func(namespace, name string) bool) []string {
	if federatedService(name.Namespace, name.Name) {
		return nil
	}
	return []string{fmt.Sprintf("%s names Service %s, which is not federated", at, name)}
}

// core is the kind of Kubernetes' own policies.
var core = schema.GroupKind{Group: "networking.k8s.io", Kind: "NetworkPolicy"}

// namedInCore is namedService for a peer that is not decoded.
func namedInCore(namespace string, peer map[string]any) (name clusterset.ServiceName, ok bool) {
	var decoded networkingv1.NetworkPolicyPeer
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(peer, &decoded); err != nil {
		return name, false
	}
	return namedService(namespace, &decoded)
}
