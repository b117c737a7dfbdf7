package crds

import (
	"slices"
	"strings"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
)

// Lacks returns the parts of want that have lacks: served versions, as "version v1beta1", and then, in versions that both
// serve, fields and allowed values, as "spec.leftAt" and `spec.profile "kep"`, each sorted. A definition that lacks nothing
// stores every field of objects written for the other one. It changes neither.
//
// An older definition lacks parts of a newer one, because Isthmus only adds fields.
func Lacks(have, want *apiextensionsv1.CustomResourceDefinition) []string {
	var versions, fields []string
	for _, w := range want.Spec.Versions {
		if !w.Served {
			continue
		}
		i := slices.IndexFunc(have.Spec.Versions, func(h apiextensionsv1.CustomResourceDefinitionVersion) bool { return h.Served && h.Name == w.Name })
		if i < 0 {
			versions = append(versions, "version "+w.Name)
			continue
		}
		known := survey(have.Spec.Versions[i].Schema)
		for path := range survey(w.Schema).paths {
			if !known.has(path) {
				fields = append(fields, path)
			}
		}
	}
	slices.Sort(versions)
	slices.Sort(fields)
	return append(versions, slices.Compact(fields)...)
}

// schema is the content of a definition: the paths of its fields and enumeration values, and the paths below which it keeps
// unknown fields.
type schema struct {
	paths map[string]bool
	open  []string
}

// has reports whether the schema keeps a field at path.
func (s schema) has(path string) bool {
	return s.paths[path] || slices.ContainsFunc(s.open, func(open string) bool { return strings.HasPrefix(path, open) })
}

// survey reads a schema, without type and metadata, which the API server defines.
func survey(v *apiextensionsv1.CustomResourceValidation) schema {
	found := schema{paths: map[string]bool{}}
	if v == nil || v.OpenAPIV3Schema == nil {
		return found
	}
	var walk func(at string, s *apiextensionsv1.JSONSchemaProps)
	walk = func(at string, s *apiextensionsv1.JSONSchemaProps) {
		if s.XPreserveUnknownFields != nil && *s.XPreserveUnknownFields {
			found.open = append(found.open, at)
		}
		for _, e := range s.Enum {
			found.paths[at+" "+string(e.Raw)] = true
		}
		for name := range s.Properties {
			field := at + "." + name
			if at == "" {
				field = name
				if slices.Contains([]string{"apiVersion", "kind", "metadata"}, name) {
					continue
				}
			}
			found.paths[field] = true
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
