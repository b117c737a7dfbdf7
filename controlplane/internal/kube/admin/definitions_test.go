package admin

import (
	"context"
	"errors"
	"slices"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcscrd "sigs.k8s.io/mcs-api/config/crd"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
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
	stored := func(version string) *apiextensionsv1.CustomResourceDefinition {
		crd := crd("", "")
		crd.Spec.Versions = []apiextensionsv1.CustomResourceDefinitionVersion{{Name: version, Served: true, Storage: true}}
		return crd
	}
	tests := map[string]struct {
		have, ours *apiextensionsv1.CustomResourceDefinition
		want       bool
	}{
		"the same":                     {crd("v0.5.2", "0"), crd("v0.5.2", "0"), false},
		"older":                        {crd("v0.5.1", "7"), crd("v0.5.2", "0"), false},
		"newer release":                {crd("v0.10.0", "0"), crd("v0.5.2", "0"), true},
		"newer schema":                 {crd("v0.5.2", "2"), crd("v0.5.2", "1"), true},
		"without labels":               {crd("", ""), crd("v0.5.2", "0"), false},
		"ours has none":                {crd("", ""), crd("", ""), false},
		"stored in a version of later": {stored("v1"), stored("v1beta1"), true},
		"stored in the same version":   {stored("v1beta1"), stored("v1beta1"), false},
		"a strange label":              {crd("latest", "x"), crd("v0.5.2", "0"), false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := newer(tc.have, tc.ours); got != tc.want {
				t.Errorf("newer = %t", got)
			}
		})
	}
}

// TestPlanDefinitions: definitions that others use too are left alone unless they lack something; our own are always
// brought to what they should be, and one of a later Isthmus is an error.
func TestPlanDefinitions(t *testing.T) {
	all, err := crds.All()
	if err != nil {
		t.Fatal(err)
	}
	find := func(name string) *apiextensionsv1.CustomResourceDefinition {
		for _, crd := range all {
			if crd.Name == name {
				return crd.DeepCopy()
			}
		}
		t.Fatalf("no definition %s", name)
		return nil
	}
	const properties, exports, members = "clusterproperties.about.k8s.io", "serviceexports.multicluster.x-k8s.io", "members.isthmus.dev"
	tests := map[string]struct {
		name   string
		change func(*apiextensionsv1.CustomResourceDefinition) // of what the cluster has
		write  bool
		err    error
	}{
		"a ClusterProperty of others": {name: properties, change: func(crd *apiextensionsv1.CustomResourceDefinition) { crd.Annotations["by"] = "others" }},
		"an old ClusterProperty":      {name: properties, change: func(crd *apiextensionsv1.CustomResourceDefinition) { crd.Spec.Versions = crd.Spec.Versions[:1] }, write: true},
		"a later ClusterProperty": {name: properties, change: func(crd *apiextensionsv1.CustomResourceDefinition) {
			crd.Spec.Versions[0].Name, crd.Spec.Versions[0].Storage, crd.Spec.Versions[1].Storage = "v1", true, false
		}},
		"the MCS API":        {name: exports, change: func(*apiextensionsv1.CustomResourceDefinition) {}},
		"an old MCS API":     {name: exports, change: func(crd *apiextensionsv1.CustomResourceDefinition) { crd.Labels[mcscrd.ReleaseVersionLabel] = "v0.2.0" }, write: true},
		"a nameless MCS API": {name: exports, change: func(crd *apiextensionsv1.CustomResourceDefinition) { crd.Labels = nil }, write: true},
		"a later MCS API":    {name: exports, change: func(crd *apiextensionsv1.CustomResourceDefinition) { crd.Labels[mcscrd.ReleaseVersionLabel] = "v9.0.0" }},
		"our own":            {name: members, change: func(*apiextensionsv1.CustomResourceDefinition) {}, write: true},
		"our own, of a later": {name: members, change: func(crd *apiextensionsv1.CustomResourceDefinition) {
			spec(crd).Properties["x"] = apiextensionsv1.JSONSchemaProps{}
		}, err: ErrNewerDefinitions},
		"our own, of an older":  {name: members, change: func(crd *apiextensionsv1.CustomResourceDefinition) { delete(spec(crd).Properties, "leftAt") }, write: true},
		"our own, with others'": {name: members, change: func(crd *apiextensionsv1.CustomResourceDefinition) { crd.Annotations["by"] = "others" }, write: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			have := find(tc.name)
			tc.change(have)
			plan, err := PlanDefinitions(t.Context(), &onlyDefinition{have})
			if !errors.Is(err, tc.err) {
				t.Fatalf("got %v, want %v", err, tc.err)
			}
			write := slices.ContainsFunc(plan.write, func(crd *apiextensionsv1.CustomResourceDefinition) bool { return crd.Name == tc.name })
			if err == nil && write != tc.write {
				t.Errorf("write is %t", write)
			}
		})
	}
}

func spec(crd *apiextensionsv1.CustomResourceDefinition) *apiextensionsv1.JSONSchemaProps {
	s := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
	return &s // whose maps are those of crd
}

// onlyDefinition is a cluster with one definition.
type onlyDefinition struct {
	crd *apiextensionsv1.CustomResourceDefinition
}

func (o *onlyDefinition) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	if key.Name != o.crd.Name {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}
	o.crd.DeepCopyInto(into.(*apiextensionsv1.CustomResourceDefinition))
	return nil
}

func (*onlyDefinition) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return nil
}
