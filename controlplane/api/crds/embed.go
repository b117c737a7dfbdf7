// Package crds embeds the CustomResourceDefinitions that a member and a broker need: Isthmus' own, generated from
// controlplane/api/v1alpha1 and controlplane/api/federation, ClusterProperty, and those of the MCS API.
package crds

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	mcscrd "sigs.k8s.io/mcs-api/config/crd"
	"sigs.k8s.io/yaml"
)

//go:embed *.yaml
var own embed.FS

// All returns every definition, sorted by name: ServiceExport and ServiceImport of the MCS API and
// ClusterProperty of KEP-2149 (v1beta1 stored, v1alpha1 served), and the kinds of isthmus.dev and
// federation.isthmus.dev. Each call returns new objects, which the caller may change. An error means that this build is
// broken.
func All() ([]*apiextensionsv1.CustomResourceDefinition, error) {
	files := map[string][]byte{
		"mcs-api ServiceExport": mcscrd.ServiceExportCRD,
		"mcs-api ServiceImport": mcscrd.ServiceImportCRD,
	}
	names, err := fs.Glob(own, "*.yaml")
	if err != nil {
		return nil, fmt.Errorf("list embedded definitions: %w", err)
	}
	for _, name := range names {
		if files[name], err = own.ReadFile(name); err != nil {
			return nil, fmt.Errorf("read embedded definition: %w", err)
		}
	}
	var crds []*apiextensionsv1.CustomResourceDefinition
	for name, text := range files {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(text, crd); err != nil {
			return nil, fmt.Errorf("parse definition %s: %w", name, err)
		}
		crds = append(crds, crd)
	}
	slices.SortFunc(crds, func(a, b *apiextensionsv1.CustomResourceDefinition) int {
		return strings.Compare(a.Name, b.Name)
	})
	return crds, nil
}
