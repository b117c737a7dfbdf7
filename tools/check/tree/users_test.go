package tree

import (
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/tools/conformance"
)

// The chart lets editors of a namespace export and lets viewers read exports and imports. No user may write an import.
func TestUsersExportAndNeverWriteImports(t *testing.T) {
	t.Parallel()
	objects := render(t)
	allowed := func(role, resource string) (verbs []string) {
		for _, r := range objects["ClusterRole "+role].Rules {
			if slices.Contains(r.APIGroups, "multicluster.x-k8s.io") && slices.Contains(r.Resources, resource) {
				verbs = append(verbs, r.Verbs...)
			}
		}
		return verbs
	}
	see := []string{"get", "list", "watch"}
	for rights, c := range map[string]struct{ have, want []string }{
		"view exports": {allowed("isthmus-view", "serviceexports"), see},
		"view imports": {allowed("isthmus-view", "serviceimports"), see},
		"edit exports": {allowed("isthmus-edit", "serviceexports"), []string{"create", "update", "patch", "delete", "deletecollection"}},
		"edit imports": {allowed("isthmus-edit", "serviceimports"), nil},
	} {
		if !slices.Equal(c.have, c.want) {
			t.Errorf("%s: %v, want %v", rights, c.have, c.want)
		}
	}
	conformance.Holds(t, "N10", "N13")
	for role, label := range map[string]string{"isthmus-view": "aggregate-to-view", "isthmus-edit": "aggregate-to-edit"} {
		if objects["ClusterRole "+role].Metadata.Labels["rbac.authorization.k8s.io/"+label] != "true" {
			t.Errorf("%s is not aggregated to the built-in role", role)
		}
	}
}
