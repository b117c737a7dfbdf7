package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"text/template"

	"sigs.k8s.io/yaml"
)

// Files for package managers, which name the archives of isthmusctl and their checksums.
const (
	krewFile    = "isthmus.krew.yaml"
	formulaFile = "isthmusctl.rb"
)

// download is an archive of isthmusctl for one platform.
type download struct{ System, Architecture, URL, Sum string }

// plugins writes the krew manifest (https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/) and the Homebrew formula.
func (r *release) plugins() error {
	var all []download
	for _, platform := range r.platforms {
		system, architecture, _ := strings.Cut(platform, "/")
		sum, err := sumOf(r.path(archiveOf(platform)))
		if err != nil {
			return err
		}
		all = append(all, download{system, architecture, fmt.Sprintf("%s/releases/download/%s/%s", homepage, r.version, archiveOf(platform)), sum})
	}
	manifest, err := r.krew(all)
	if err != nil {
		return err
	}
	if err := os.WriteFile(r.path(krewFile), manifest, 0o644); err != nil {
		return err
	}
	var text bytes.Buffer
	if err := formula.Execute(&text, map[string]any{"Version": r.chartVersion(), "Homepage": homepage, "Downloads": all}); err != nil {
		return err
	}
	return os.WriteFile(r.path(formulaFile), text.Bytes(), 0o644)
}

// krew returns the manifest of the kubectl plugin "isthmus".
func (r *release) krew(all []download) ([]byte, error) {
	type object = map[string]any
	var platforms []any
	for _, d := range all {
		suffix := ""
		if d.System == "windows" {
			suffix = ".exe"
		}
		platforms = append(platforms, object{
			"selector": object{"matchLabels": object{"os": d.System, "arch": d.Architecture}},
			"uri":      d.URL, "sha256": d.Sum,
			"bin":   "kubectl-isthmus" + suffix,
			"files": []any{object{"from": "isthmusctl" + suffix, "to": "kubectl-isthmus" + suffix}, object{"from": "LICENSE", "to": "."}},
		})
	}
	return yaml.Marshal(object{
		"apiVersion": "krew.googlecontainertools.github.com/v1alpha2", "kind": "Plugin",
		"metadata": object{"name": "isthmus"},
		"spec": object{
			"version": r.version, "homepage": homepage,
			"shortDescription": "Join clusters, export Services, see and explain them",
			"description":      "Administers Isthmus, which makes Services usable from every cluster of a ClusterSet.\n",
			"platforms":        platforms,
		},
	})
}

// formula is the Homebrew formula. Homebrew knows no Windows.
var formula = template.Must(template.New("").Parse(`class Isthmusctl < Formula
  desc "Administers Isthmus: Services usable from every cluster of a ClusterSet"
  homepage "{{.Homepage}}"
  version "{{.Version}}"
  license "Apache-2.0"
{{range .Downloads}}{{if ne .System "windows"}}
  on_{{if eq .System "darwin"}}macos{{else}}linux{{end}} do
    on_{{if eq .Architecture "arm64"}}arm{{else}}intel{{end}} do
      url "{{.URL}}"
      sha256 "{{.Sum}}"
    end
  end
{{end}}{{end}}
  def install
    bin.install "isthmusctl"
    generate_completions_from_executable(bin/"isthmusctl", "completion")
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/isthmusctl version --client")
  end
end
`))
