package membership

import (
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	mcscrd "sigs.k8s.io/mcs-api/config/crd"
)

func TestNewerDefinitionsStay(t *testing.T) {
	crd := func(release, schema string) *apiextensionsv1.CustomResourceDefinition {
		labels := map[string]string{}
		if release != "" {
			labels[mcscrd.ReleaseVersionLabel] = release
		}
		if schema != "" {
			labels[mcscrd.CustomResourceDefinitionSchemaRevisionLabel] = schema
		}
		return &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Labels: labels}}
	}
	tests := map[string]struct {
		have, ours *apiextensionsv1.CustomResourceDefinition
		want       bool
	}{
		"the same":        {crd("v0.5.2", "0"), crd("v0.5.2", "0"), false},
		"older":           {crd("v0.5.1", "7"), crd("v0.5.2", "0"), false},
		"newer release":   {crd("v0.10.0", "0"), crd("v0.5.2", "0"), true},
		"newer schema":    {crd("v0.5.2", "2"), crd("v0.5.2", "1"), true},
		"without labels":  {crd("", ""), crd("v0.5.2", "0"), false},
		"ours has none":   {crd("", ""), crd("", ""), false},
		"a strange label": {crd("latest", "x"), crd("v0.5.2", "0"), false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := newer(tc.have, tc.ours); got != tc.want {
				t.Errorf("newer = %t", got)
			}
		})
	}
}
