package testbed

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func definition(plural, group string) apiextensionsv1.CustomResourceDefinition {
	return apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: plural + "." + group}, Spec: apiextensionsv1.CustomResourceDefinitionSpec{Group: group},
	}
}

func policy(name, paramVersion string, groups ...string) admissionv1.ValidatingAdmissionPolicy {
	p := admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if paramVersion != "" {
		p.Spec.ParamKind = &admissionv1.ParamKind{APIVersion: paramVersion, Kind: "K"}
	}
	rule := admissionv1.NamedRuleWithOperations{RuleWithOperations: admissionv1.RuleWithOperations{Rule: admissionv1.Rule{APIGroups: groups}}}
	p.Spec.MatchConstraints = &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{rule}}
	return p
}

func TestOutdated(t *testing.T) {
	t.Parallel()
	current, err := currentKinds()
	if err != nil {
		t.Fatal(err)
	}
	var installed []apiextensionsv1.CustomResourceDefinition
	groups := map[string]bool{}
	for _, c := range current {
		installed, groups[c.Spec.Group] = append(installed, *c), true
	}
	var policies []admissionv1.ValidatingAdmissionPolicy
	for group := range groups {
		policies = append(policies, policy("of "+group, group+"/v1alpha1", group, "discovery.k8s.io"))
	}
	others := append(installed, definition("gateways", "gateway.networking.k8s.io"), definition("crossings", "panama-isthmus.org"))
	if have := outdated(current, others, policies); len(have) > 0 {
		t.Errorf("of this build and of other products %v is outdated", have)
	}

	kinds := append(others, definition("members", "isthmus.example"), definition("shelves", "isthmus.dev"), definition("nodes", "gateway.isthmus.example"))
	policies = append(policies, policy("old-params", "isthmus.example/v1alpha1", "discovery.k8s.io"), policy("old-objects", "", "", "federation.isthmus.example"))
	want := []string{"members.isthmus.example", "nodes.gateway.isthmus.example", "old-objects", "old-params", "shelves.isthmus.dev"}
	if diff := cmp.Diff(want, outdated(current, kinds, policies)); diff != "" {
		t.Errorf("outdated (-want +have):\n%s", diff)
	}
}
