package tree

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// valuesFiles returns the files with values for linters, and "", which stands for the defaults. Their names are those that
// chart-testing (ct) finds.
func valuesFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, chart, "ci/*-values.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("there are no values for linters: %v", err)
	}
	all := []string{""}
	for _, f := range files {
		path, err := filepath.Abs(f)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, path)
	}
	return all
}

// The chart passes helm lint and kubeconform with the defaults and with all values for linters. The check `yaml` runs yamllint.
func TestChartLints(t *testing.T) {
	t.Parallel()
	for _, file := range valuesFiles(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			var args []string
			if file != "" {
				args = []string{"--values", file}
			}
			if stdout, stderr, err := helm(t, append([]string{"lint", "--strict", chart}, args...)...); err != nil {
				t.Errorf("helm lint: %v\n%s%s", err, stdout, stderr)
			}
			rendered(t, args...)
		})
	}
}

// A packed chart contains what users need, and no values for linters.
func TestChartPacks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if stdout, stderr, err := helm(t, "package", chart, "--destination", dir); err != nil {
		t.Fatalf("helm package: %v\n%s%s", err, stdout, stderr)
	}
	packed, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
	if err != nil || len(packed) != 1 {
		t.Fatalf("packages: %v, %v", packed, err)
	}
	list, err := exec.CommandContext(t.Context(), "tar", "--list", "--gzip", "--file", packed[0]).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Chart.yaml", "README.md", "values.yaml", "values.schema.json", "templates/agent.yaml", "crds/isthmus.dev_members.yaml", "files/policies/controller.yaml"} {
		if !strings.Contains(string(list), "isthmus/"+want+"\n") {
			t.Errorf("it lacks %s:\n%s", want, list)
		}
	}
	if strings.Contains(string(list), "isthmus/ci/") {
		t.Errorf("it has values for linters:\n%s", list)
	}
}

// kubeconform accepts the CRDs of the chart.
func TestChartDefinitionsConform(t *testing.T) {
	t.Parallel()
	kubeconform, err := checker()
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root, chart, "crds/*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("there are no CRDs: %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := kubeconform.Check(string(text)); err != nil {
			t.Errorf("%s:\n%v", filepath.Base(file), err)
		}
	}
}

// Chart.yaml meets the schema of chart-testing (etc/chart_schema.yaml), which wants maintainers too, and names what Helm and
// Artifact Hub show.
func TestChartMetadata(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(root, chart, "Chart.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var meta struct {
		Name        string `json:"name"`
		Home        string `json:"home"`
		Version     string `json:"version"`
		APIVersion  string `json:"apiVersion"`
		AppVersion  string `json:"appVersion"`
		Description string `json:"description"`
		KubeVersion string `json:"kubeVersion"`
		Type        string `json:"type"`

		Keywords    []string          `json:"keywords"`
		Sources     []string          `json:"sources"`
		Annotations map[string]string `json:"annotations"`
		Maintainers []struct {
			Name  string `json:"name"`
			Email string `json:"email"`
			URL   string `json:"url"`
		} `json:"maintainers"`
	}
	asJSON, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		t.Fatal(err)
	}
	strict := json.NewDecoder(bytes.NewReader(asJSON))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&meta); err != nil {
		t.Fatal(err)
	}
	for field, ok := range map[string]bool{
		"name":        meta.Name == filepath.Base(chart),
		"apiVersion":  meta.APIVersion == "v2",
		"version":     regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`).MatchString(meta.Version),
		"appVersion":  meta.AppVersion != "",
		"description": meta.Description != "",
		"type":        meta.Type == "application",
		"home":        strings.HasPrefix(meta.Home, "https://"),
		"sources":     len(meta.Sources) > 0,
		"keywords":    len(meta.Keywords) > 0,
		"kubeVersion": meta.KubeVersion != "",
		"annotations": meta.Annotations["artifacthub.io/license"] != "",
	} {
		if !ok {
			t.Errorf("Chart.yaml: %s: %+v", field, meta)
		}
	}
	if len(meta.Maintainers) == 0 {
		t.Error("Chart.yaml names no maintainers")
	}
	for _, m := range meta.Maintainers {
		if !regexp.MustCompile(`^[A-Za-z0-9-]{1,39}$`).MatchString(m.Name) { // ct looks for an account of that name
			t.Errorf("Chart.yaml: %q is no name of an account", m.Name)
		}
	}
}
