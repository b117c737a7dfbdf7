// Package schemas validates Kubernetes objects in YAML with kubeconform, without a server. The schemas are the OpenAPI documents of
// the Kubernetes that the tests run (tools/lab/components/kubernetes), those of CRDs, and JSON schemas that the caller gives. Fields
// without a schema are faults, and so are duplicate keys and kinds without a schema.
//
// For example, a DaemonSet whose container has `volumeMount` in place of `volumeMounts` is rendered, packed and installed without a
// warning of Helm. Here it is a fault that names the field.
package schemas

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/yannh/kubeconform/pkg/validator"
	"sigs.k8s.io/yaml"
)

// kubernetes is the folder of the module that pins Kubernetes.
const kubernetes = "tools/lab/components/kubernetes"

// template is the path of the schema of a kind, as kubeconform computes it. The group of the core is its version.
const template = "{{.Group}}_{{.ResourceAPIVersion}}_{{.ResourceKind}}.json"

// Checker validates objects. Its methods may run at the same time.
type Checker struct{ conform validator.Validator }

// New writes the schemas into the folder dir, which the Checker reads from then on: those of the Kubernetes that the repository at
// root pins, and of the CRDs in the files crds. The files more, whose names are as template says, add kinds.
func New(ctx context.Context, root, dir string, crds, more []string) (*Checker, error) {
	apis, err := documents(ctx, root)
	if err != nil {
		return nil, err
	}
	for _, path := range apis {
		if err := writeAPI(path, dir); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	for _, path := range crds {
		if err := writeCRD(path, dir); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	for _, path := range more {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(path)), content, 0o600); err != nil {
			return nil, err
		}
	}
	conform, err := validator.New([]string{filepath.Join(dir, template)}, validator.Opts{Strict: true})
	if err != nil {
		return nil, fmt.Errorf("start kubeconform: %w", err)
	}
	return &Checker{conform}, nil
}

// Check returns the faults of all objects in a stream of YAML documents.
func (c *Checker) Check(stream string) error {
	var faults []error
	for _, r := range c.conform.Validate("", io.NopCloser(strings.NewReader(stream))) {
		if r.Status == validator.Valid || r.Status == validator.Empty {
			continue
		}
		name := "object"
		if s, err := r.Resource.Signature(); err == nil {
			name = s.Kind + " " + s.Name
		}
		faults = append(faults, fmt.Errorf("%s: %w", name, r.Err))
	}
	return errors.Join(faults...)
}

// documents returns the paths of the OpenAPI documents of the stable APIs.
func documents(ctx context.Context, root string) ([]string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", "k8s.io/kubernetes")
	cmd.Dir = filepath.Join(root, kubernetes)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("find Kubernetes: %w", err)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(out, &module); err != nil {
		return nil, fmt.Errorf("find Kubernetes: %w", err)
	}
	pattern := filepath.Join(module.Dir, "api/openapi-spec/v3/api*__v1_openapi.json")
	paths, err := filepath.Glob(pattern)
	if err == nil && len(paths) == 0 {
		err = fmt.Errorf("there is no %s", pattern)
	}
	return paths, err
}

// writeAPI writes the schemas of an OpenAPI document, and for each kind a file that refers to its schema.
func writeAPI(path, dir string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var api struct {
		Components struct {
			Schemas map[string]map[string]any `json:"schemas"`
		} `json:"components"`
	}
	if err := json.Unmarshal(text, &api); err != nil {
		return err
	}
	file := filepath.Base(path)
	for name, schema := range api.Components.Schemas {
		closeObjects(schema)
		kinds, _ := schema["x-kubernetes-group-version-kind"].([]any)
		if len(kinds) != 1 { // DeleteOptions and the like have all groups
			continue
		}
		kind, _ := kinds[0].(map[string]any)
		ref := map[string]any{"$ref": file + "#/components/schemas/" + name}
		if err := writeSchema(dir, fmt.Sprint(kind["group"]), fmt.Sprint(kind["version"]), fmt.Sprint(kind["kind"]), ref); err != nil {
			return err
		}
	}
	return writeJSON(filepath.Join(dir, file), api)
}

// writeCRD writes the schemas of the versions of a kind.
func writeCRD(path, dir string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var crd struct {
		Spec struct {
			Group    string
			Names    struct{ Kind string }
			Versions []struct {
				Name   string
				Schema struct{ OpenAPIV3Schema map[string]any }
			}
		}
	}
	if err := yaml.Unmarshal(text, &crd); err != nil {
		return err
	}
	for _, v := range crd.Spec.Versions {
		closeObjects(v.Schema.OpenAPIV3Schema)
		if err := writeSchema(dir, crd.Spec.Group, v.Name, crd.Spec.Names.Kind, v.Schema.OpenAPIV3Schema); err != nil {
			return err
		}
	}
	return nil
}

func writeSchema(dir, group, version, kind string, schema map[string]any) error {
	if group == "" {
		group = version
	}
	return writeJSON(filepath.Join(dir, fmt.Sprintf("%s_%s_%s.json", group, version, strings.ToLower(kind))), schema)
}

func writeJSON(path string, content any) error {
	text, err := json.Marshal(content)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

// closeObjects makes every object in a schema that names properties refuse others, as API servers do with strict validation. The
// branches of allOf, anyOf and oneOf name only some of the properties, so they stay open.
func closeObjects(schema map[string]any) {
	if properties, ok := schema["properties"].(map[string]any); ok {
		for _, p := range properties {
			if inner, ok := p.(map[string]any); ok {
				closeObjects(inner)
			}
		}
		if _, open := schema["x-kubernetes-preserve-unknown-fields"]; !open && schema["additionalProperties"] == nil {
			schema["additionalProperties"] = false
		}
	}
	for _, key := range []string{"items", "additionalProperties"} {
		if inner, ok := schema[key].(map[string]any); ok {
			closeObjects(inner)
		}
	}
}
