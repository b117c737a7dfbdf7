package crds_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/controlplane/api/crds"
)

func TestAllServesEveryKindWeUse(t *testing.T) {
	all, err := crds.All()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string][]string{}
	for _, crd := range all {
		for _, v := range crd.Spec.Versions {
			if v.Served {
				have[crd.Name] = append(have[crd.Name], v.Name)
			}
			if v.Storage {
				have[crd.Name] = append(have[crd.Name], "stored "+v.Name)
			}
		}
	}
	want := map[string][]string{
		"clusterproperties.about.k8s.io":           {"v1alpha1", "v1beta1", "stored v1beta1"},
		"clustersetconfigs.isthmus.dev":            {"v1alpha1", "stored v1alpha1"},
		"externalworkloads.federation.isthmus.dev": {"v1alpha1", "stored v1alpha1"},
		"clusterclaims.federation.isthmus.dev":     {"v1alpha1", "stored v1alpha1"},
		"exportrecords.isthmus.dev":                {"v1alpha1", "stored v1alpha1"},
		"federations.federation.isthmus.dev":       {"v1alpha1", "stored v1alpha1"},
		"members.isthmus.dev":                      {"v1alpha1", "stored v1alpha1"},
		"nodereports.isthmus.dev":                  {"v1alpha1", "stored v1alpha1"},
		"serviceexports.multicluster.x-k8s.io":     {"v1alpha1", "v1beta1", "stored v1beta1"},
		"serviceimports.multicluster.x-k8s.io":     {"v1alpha1", "v1beta1", "stored v1beta1"},
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("definitions (-want +have):\n%s", diff)
	}
}
