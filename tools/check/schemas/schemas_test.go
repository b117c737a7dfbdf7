package schemas

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A Checker finds what API servers refuse, and what they drop without a word.
func TestCheck(t *testing.T) {
	t.Parallel()
	crd := filepath.Join(t.TempDir(), "crd.yaml")
	if err := os.WriteFile(crd, []byte(`
spec:
  group: example.org
  names: {kind: Note}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec: {type: object, properties: {text: {type: string}, any: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {a: {type: string}}}}}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	more := filepath.Join(t.TempDir(), "example.org_v2_note.json")
	if err := os.WriteFile(more, []byte(`{"required": ["text"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	checker, err := New(t.Context(), "../../..", t.TempDir(), []string{crd}, []string{more})
	if err != nil {
		t.Fatal(err)
	}
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n"
	for name, c := range map[string]struct{ objects, fault string }{
		"nothing":                {"---\n---\n# a comment\n", ""},
		"a pod":                  {pod + "spec: {containers: [{name: c, ports: [{containerPort: 1}], resources: {limits: {memory: 1Gi, cpu: 1}}}]}", ""},
		"a field that is none":   {pod + "spec: {containers: [{name: c, volumeMount: []}]}", "volumeMount"},
		"another type":           {pod + "spec: {hostNetwork: \"true\", containers: [{name: c}]}", "hostNetwork"},
		"a missing field":        {pod + "spec: {containers: [{image: i}]}", "name"},
		"null":                   {pod + "spec: {containers: [{name: c}], tolerations: null}", "tolerations"},
		"a key twice":            {pod + "spec: {containers: [{name: c}]}\nkind: Pod", "already set"},
		"the second of two":      {pod + "spec: {containers: [{name: c}]}\n---\napiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {port: 1}", "Service s"},
		"an unknown kind":        {"apiVersion: example.org/v1\nkind: Other\nmetadata: {name: o}", "could not find schema for Other"},
		"an old API":             {"apiVersion: policy/v1beta1\nkind: PodDisruptionBudget\nmetadata: {name: o}", "could not find schema"},
		"a port by name":         {"apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {ports: [{port: 1, targetPort: web}]}", ""},
		"a custom kind":          {"apiVersion: example.org/v1\nkind: Note\nmetadata: {name: n}\nspec: {text: t, any: {b: 1}}", ""},
		"a custom kind, a field": {"apiVersion: example.org/v1\nkind: Note\nmetadata: {name: n}\nspec: {txt: t}", "txt"},
		"a kind of the caller":   {"apiVersion: example.org/v2\nkind: Note\nmetadata: {name: n}", "text"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			switch err := checker.Check(c.objects); {
			case c.fault == "" && err != nil:
				t.Errorf("it is refused: %v", err)
			case c.fault != "" && (err == nil || !strings.Contains(err.Error(), c.fault)):
				t.Errorf("fault: %v, want one with %q", err, c.fault)
			}
		})
	}
}
