package policies

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// directions are the lists of peers in the rules of all kinds that we know, by the list of rules they stand in.
var directions = map[string][]string{"ingress": {"from"}, "egress": {"to", "toServices"}}

// meaning says why what a peer selects is not the same in all clusters, by the field that selects it.
var meaning = map[string]string{
	"podSelector":            "selects pods of the cluster that enforces it",
	"pods":                   "selects pods of the cluster that enforces it",
	"namespaceSelector":      "selects namespaces of the cluster that enforces it",
	"namespaces":             "selects namespaces of the cluster that enforces it",
	"nodeSelector":           "selects nodes of the cluster that enforces it",
	"nodes":                  "selects nodes of the cluster that enforces it",
	"serviceAccount":         "selects pods of the cluster that enforces it",
	"externalEntitySelector": "selects machines that only the cluster that enforces it knows",
	"group":                  "names a group, which each cluster has for itself",
	"ipBlock":                "is an address, and says nothing of who has it in another cluster",
	"networks":               "is an address, and says nothing of who has it in another cluster",
	"fqdn":                   "is a name, which each cluster resolves for itself",
	"domainNames":            "is a name, which each cluster resolves for itself",
}

// strangers returns which peers of policy are anything but federated Services, each as the path of the field and why
// it will not mean the same in all clusters, sorted. federatedService says whether a Service is a federated one.
func strangers(policy *unstructured.Unstructured, federatedService func(namespace, name string) bool) []string {
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
						found = append(found, strangeService(at, policy.GetNamespace(), peer, federatedService)...)
						continue
					}
					found = append(found, strangePeer(at, peer)...)
				}
			}
		}
	}
	return found
}

// strangePeer says what is to be said of each selector of a peer.
func strangePeer(at string, peer map[string]any) []string {
	var found []string
	for _, selector := range slices.Sorted(maps.Keys(peer)) {
		why, ok := meaning[selector]
		if !ok {
			why = "is no federated Service"
		}
		found = append(found, at+"."+selector+" "+why)
	}
	return found
}

// strangeService says what is to be said of a peer that names a Service; a policy in a namespace means those there.
func strangeService(at, namespace string, peer map[string]any, federatedService func(namespace, name string) bool) []string {
	name, _ := peer["name"].(string)
	if given, ok := peer["namespace"].(string); ok && given != "" {
		namespace = given
	}
	if federatedService(namespace, name) {
		return nil
	}
	return []string{fmt.Sprintf("%s names Service %s/%s, which is not a federated one", at, namespace, name)}
}
