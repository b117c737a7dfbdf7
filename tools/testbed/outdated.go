package testbed

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	gatewaycrds "github.com/isthmus-net/isthmus/gateway/api/crds"
)

// renew replaces a lab on which an older build left kinds or admission policies that this build does not have. Its objects, the
// pinned maps and the devices of its nodes carry old names too, and no controller of this build would remove them.
func (tb *Testbed) renew(ctx context.Context) error {
	old, err := tb.outdated(ctx)
	if err != nil || len(old) == 0 {
		return err
	}
	tb.Step("lab %q is of an older build (%s): replace it", tb.cfg.Name, strings.Join(old, ", "))
	if err := tb.Lab.Down(ctx); err != nil {
		return err
	}
	tb.mu.Lock()
	clear(tb.clients) // of API servers that are gone
	tb.mu.Unlock()
	if err := tb.Lab.Up(ctx); err != nil {
		return fmt.Errorf("bring the lab up: %w", err)
	}
	return nil
}

// outdated lists what an older build left in the clusters of the lab, as "CLUSTER: NAME".
func (tb *Testbed) outdated(ctx context.Context) ([]string, error) {
	current, err := currentKinds()
	if err != nil {
		return nil, err
	}
	var old []string
	for _, c := range tb.Lab.Topology() {
		var kinds apiextensionsv1.CustomResourceDefinitionList
		if err := tb.Get(ctx, c.Name, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &kinds); err != nil {
			return nil, err
		}
		var policies admissionv1.ValidatingAdmissionPolicyList
		if err := tb.Get(ctx, c.Name, "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies", &policies); err != nil {
			return nil, err
		}
		for _, name := range outdated(current, kinds.Items, policies.Items) {
			old = append(old, c.Name+": "+name)
		}
	}
	return old, nil
}

// currentKinds are the definitions of this build.
func currentKinds() ([]*apiextensionsv1.CustomResourceDefinition, error) {
	all, err := crds.All()
	if err != nil {
		return nil, err
	}
	gateways, err := gatewaycrds.GatewayNodes()
	return append(slices.Clone(all), gateways), err
}

// product matches API groups of Isthmus, under whatever domain.
var product = regexp.MustCompile(`(^|\.)isthmus\.[a-z]+$`)

// outdated lists definitions of Isthmus that are not among current, and admission policies about groups of Isthmus that current
// does not have, sorted.
func outdated(current []*apiextensionsv1.CustomResourceDefinition, kinds []apiextensionsv1.CustomResourceDefinition, policies []admissionv1.ValidatingAdmissionPolicy) []string {
	names, groups := map[string]bool{}, map[string]bool{}
	for _, c := range current {
		names[c.Name], groups[c.Spec.Group] = true, true
	}
	var old []string
	for _, k := range kinds {
		if product.MatchString(k.Spec.Group) && !names[k.Name] {
			old = append(old, k.Name)
		}
	}
	for _, p := range policies {
		if slices.ContainsFunc(groupsOf(p), func(group string) bool { return product.MatchString(group) && !groups[group] }) {
			old = append(old, p.Name)
		}
	}
	slices.Sort(old)
	return old
}

// groupsOf are the API groups of a policy's parameters and of the objects that it checks.
func groupsOf(p admissionv1.ValidatingAdmissionPolicy) []string {
	var groups []string
	if kind := p.Spec.ParamKind; kind != nil {
		if gv, err := schema.ParseGroupVersion(kind.APIVersion); err == nil {
			groups = append(groups, gv.Group)
		}
	}
	if match := p.Spec.MatchConstraints; match != nil {
		for _, rule := range match.ResourceRules {
			groups = append(groups, rule.APIGroups...)
		}
	}
	return groups
}
