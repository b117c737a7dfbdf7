package crds_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
)

// definition returns a definition with the given versions, each served with a schema in YAML.
func definition(t *testing.T, versions map[string]string) *apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	crd := &apiextensionsv1.CustomResourceDefinition{}
	for name, text := range versions {
		v := apiextensionsv1.CustomResourceDefinitionVersion{Name: name, Served: true, Schema: &apiextensionsv1.CustomResourceValidation{}}
		if err := yaml.UnmarshalStrict([]byte(text), &v.Schema.OpenAPIV3Schema); err != nil {
			t.Fatal(err)
		}
		crd.Spec.Versions = append(crd.Spec.Versions, v)
	}
	return crd
}

func TestLacks(t *testing.T) {
	const small = `{properties: {spec: {properties: {a: {type: string}}}}}`
	tests := map[string]struct {
		have, want map[string]string
		lacks      []string
	}{
		"the same":                    {map[string]string{"v1": small}, map[string]string{"v1": small}, nil},
		"the installed one has more":  {map[string]string{"v1": small, "v2": small}, map[string]string{"v1": `{properties: {spec: {}}}`}, nil},
		"a version":                   {map[string]string{"v1": small}, map[string]string{"v1": small, "v2": small}, []string{"version v2"}},
		"a field":                     {map[string]string{"v1": small}, map[string]string{"v1": `{properties: {spec: {properties: {a: {}, b: {}}}}}`}, []string{"spec.b"}},
		"in a list":                   {map[string]string{"v1": `{properties: {l: {items: {properties: {}}}}}`}, map[string]string{"v1": `{properties: {l: {items: {properties: {x: {}}}}}}`}, []string{"l[].x"}},
		"in a map":                    {map[string]string{"v1": `{properties: {m: {}}}`}, map[string]string{"v1": `{properties: {m: {additionalProperties: {properties: {x: {}}}}}}`}, []string{"m.*.x"}},
		"a value":                     {map[string]string{"v1": `{properties: {e: {enum: [p]}}}`}, map[string]string{"v1": `{properties: {e: {enum: [p, q]}}}`}, []string{`e "q"`}},
		"metadata":                    {map[string]string{"v1": `{}`}, map[string]string{"v1": `{properties: {metadata: {}, kind: {}, apiVersion: {}}}`}, nil},
		"keeps all":                   {map[string]string{"v1": `{properties: {s: {x-kubernetes-preserve-unknown-fields: true}}}`}, map[string]string{"v1": `{properties: {s: {properties: {x: {}}}, t: {}}}`}, []string{"t"}},
		"first versions, then fields": {map[string]string{"v1": `{}`}, map[string]string{"v1": small, "v2": small}, []string{"version v2", "spec", "spec.a"}},
		"has no schema":               {map[string]string{"v1": `{}`}, map[string]string{"v1": small}, []string{"spec", "spec.a"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.lacks, crds.Lacks(definition(t, tc.have), definition(t, tc.want))); diff != "" {
				t.Errorf("lacks (-want +have):\n%s", diff)
			}
		})
	}
}

// TestDefinitionsLackNothingOfThemselves: what we install is never taken for older than what we want.
func TestDefinitionsLackNothingOfThemselves(t *testing.T) {
	one, err := crds.All()
	if err != nil {
		t.Fatal(err)
	}
	two, err := crds.All()
	if err != nil {
		t.Fatal(err)
	}
	for i := range one {
		if lacks := crds.Lacks(one[i], two[i]); len(lacks) > 0 {
			t.Errorf("%s lacks %v", one[i].Name, lacks)
		}
		if len(crds.Lacks(&apiextensionsv1.CustomResourceDefinition{}, one[i])) == 0 {
			t.Errorf("nothing lacks nothing of %s", one[i].Name)
		}
	}
}
