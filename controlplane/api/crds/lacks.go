package crds

import (
	"slices"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// Lacks returns what have does not know and want knows, sorted: served versions, as "version v1beta1", and
// in versions that both serve, fields and allowed values, as "spec.leftAt" and `spec.profile "kep"`. So one
// that lacks nothing stores everything that was written for the other one. It changes neither.
//
// An older definition of a kind lacks something of a newer one, because fields are only ever added.
func Lacks(have, want *apiextensionsv1.CustomResourceDefinition) []string {
	var lacks []string
	for _, w := range want.Spec.Versions {
		if !w.Served {
			continue
		}
		i := slices.IndexFunc(have.Spec.Versions, func(h apiextensionsv1.CustomResourceDefinitionVersion) bool { return h.Served && h.Name == w.Name })
		if i < 0 {
			lacks = append(lacks, "version "+w.Name)
			continue
		}
		known := map[string]bool{}
		for _, path := range paths(have.Spec.Versions[i].Schema) {
			known[path] = true
		}
		for _, path := range paths(w.Schema) {
			if !known[path] {
				lacks = append(lacks, path)
			}
		}
	}
	slices.Sort(lacks)
	return slices.Compact(lacks)
}

// paths returns the path of each field, and of each value of an enumeration, in no particular order.
func paths(v *apiextensionsv1.CustomResourceValidation) []string {
	if v == nil || v.OpenAPIV3Schema == nil {
		return nil
	}
	var found []string
	var walk func(at string, s *apiextensionsv1.JSONSchemaProps)
	walk = func(at string, s *apiextensionsv1.JSONSchemaProps) {
		for _, e := range s.Enum {
			found = append(found, at+" "+string(e.Raw))
		}
		for name := range s.Properties {
			field := name
			if at != "" {
				field = at + "." + name
			}
			found = append(found, field)
			p := s.Properties[name]
			walk(field, &p)
		}
		if s.Items != nil && s.Items.Schema != nil {
			walk(at+"[]", s.Items.Schema)
		}
		if s.AdditionalProperties != nil && s.AdditionalProperties.Schema != nil {
			walk(at+".*", s.AdditionalProperties.Schema)
		}
	}
	walk("", v.OpenAPIV3Schema)
	return found
}
