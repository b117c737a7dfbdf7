package grants_test

import (
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
)

func TestRules(t *testing.T) {
	type grant = v1alpha1.Grant
	names := func(texts string) (all []v1alpha1.Pattern) {
		for text := range strings.FieldsSeq(texts) {
			all = append(all, v1alpha1.Pattern(text))
		}
		return all
	}
	shop := grant{Members: []string{"a", "b"}, Namespaces: names("shop"), GlobalServices: names("cart pay-*"), Services: names("web"), Policies: names("*")}
	clusterWide := grant{Members: []string{"a"}, ClusterPolicies: names("baseline")}
	for name, tc := range map[string]struct {
		grants []grant
		allows bool
		what   string // g: a global Service, s: a Service, p: a policy; of MEMBER/NAMESPACE/NAME
	}{
		"open":                              {nil, true, "g c/other/cart"},
		"open, a policy":                    {nil, true, "p c/other/deny"},
		"open, a policy of kube-system":     {nil, false, "p c/kube-system/deny"},
		"closed":                            {[]grant{}, false, "g a/shop/cart"},
		"closed, a policy without one":      {[]grant{}, false, "p a//baseline"},
		"granted":                           {[]grant{clusterWide, shop}, true, "g b/shop/cart"},
		"by the beginning of the name":      {[]grant{shop}, true, "g b/shop/pay-card"},
		"the beginning is not all":          {[]grant{shop}, false, "g b/shop/payroll"},
		"a name is not a beginning":         {[]grant{shop}, false, "g b/shop/cart-2"},
		"another member":                    {[]grant{shop}, false, "g c/shop/cart"},
		"every member":                      {[]grant{{Namespaces: names("shop"), GlobalServices: names("*")}}, true, "g c/shop/cart"},
		"another namespace":                 {[]grant{shop}, false, "g a/shop-2/cart"},
		"every namespace":                   {[]grant{{Namespaces: names("*"), Services: names("web")}}, true, "s c/any/web"},
		"in the namespace itself":           {[]grant{shop}, true, "s a/shop/web"},
		"a global name is no other":         {[]grant{shop}, false, "s a/shop/cart"},
		"a policy":                          {[]grant{shop}, true, "p a/shop/deny"},
		"a policy without namespace":        {[]grant{shop, clusterWide}, true, "p a//baseline"},
		"of another member":                 {[]grant{shop, clusterWide}, false, "p b//baseline"},
		"by a grant for namespaces":         {[]grant{{Namespaces: names("*"), Policies: names("*")}}, false, "p a//baseline"},
		"of kube-system, whatever they say": {[]grant{{Namespaces: names("*"), Policies: names("*")}}, false, "p a/kube-system/deny"},
	} {
		t.Run(name, func(t *testing.T) {
			kind, of, _ := strings.Cut(tc.what, " ")
			parts := strings.Split(of, "/")
			rules := grants.New(v1alpha1.FederationSpec{Grants: tc.grants})
			member, namespace, name := clusterset.ClusterID(parts[0]), parts[1], parts[2]
			var err error
			switch kind {
			case "g":
				err = rules.Service(member, namespace, clusterset.ServiceName{Namespace: "isthmus-system", Name: name}, true)
			case "s":
				err = rules.Service(member, namespace, clusterset.ServiceName{Namespace: namespace, Name: name}, false)
			default:
				err = rules.Policy(member, namespace, name)
			}
			if (err == nil) != tc.allows {
				t.Fatalf("%s: %v", tc.what, err)
			}
			if err != nil && (!strings.Contains(err.Error(), namespace) || !strings.Contains(err.Error(), name) && !strings.HasPrefix(namespace, "kube-")) {
				t.Errorf("the error names neither namespace nor name: %v", err)
			}
		})
	}
}
