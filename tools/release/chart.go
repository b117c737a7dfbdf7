package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/static"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/tools/compile"
)

// chartSource is the folder of the chart in the repository.
const chartSource = "deploy/helm/isthmus"

// digestsFile is the chart's file with the digests of its images. Only the chart of a release has it.
const digestsFile = "files/digests.yaml"

// Files that are rendered from the chart.
const (
	manifestsFile = "isthmus.yaml"
	crdsFile      = "isthmus-crds.yaml"
)

// chart packs the chart, adds it to the images as an OCI artifact, and renders the manifests from it.
func (r *release) chart(ctx context.Context, tmp string, to layout.Path, digests map[string]string) error {
	staged := filepath.Join(tmp, "isthmus")
	if err := r.stage(staged, digests); err != nil {
		return err
	}
	if _, err := r.helm(ctx, "package", staged, "--destination", r.output); err != nil {
		return err
	}
	if err := r.render(ctx, staged); err != nil {
		return err
	}
	packed, err := os.ReadFile(r.path("isthmus-" + r.chartVersion() + ".tgz"))
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(staged, "Chart.yaml"))
	if err != nil {
		return err
	}
	metadata, err := yaml.YAMLToJSON(text)
	if err != nil {
		return err
	}
	var about struct{ Description string }
	if err := json.Unmarshal(metadata, &about); err != nil {
		return err
	}
	// The media types and annotations are Helm's: https://helm.sh/docs/topics/registries/
	img, err := newArtifact("application/vnd.cncf.helm.config.v1+json", metadata, r.annotations(map[string]string{
		ocispec.AnnotationTitle:       "isthmus",
		ocispec.AnnotationVersion:     r.chartVersion(),
		ocispec.AnnotationDescription: about.Description,
		ocispec.AnnotationLicenses:    "Apache-2.0",
	}), []v1.Layer{static.NewLayer(packed, "application/vnd.cncf.helm.chart.content.v1.tar+gzip")})
	if err != nil {
		return err
	}
	digest, err := img.Digest()
	if err != nil {
		return err
	}
	if err := to.AppendImage(img, named("charts/isthmus", r.chartVersion())); err != nil {
		return err
	}
	return r.signImage(to, "charts/isthmus", digest)
}

// chartVersion is the version of the chart: Helm's have no v.
func (r *release) chartVersion() string { return strings.TrimPrefix(r.version, "v") }

// stage writes the chart of this release into a folder. Its files are of the commit's date, so that it is packed into the same bytes.
func (r *release) stage(to string, digests map[string]string) error {
	if err := os.CopyFS(to, os.DirFS(filepath.Join(r.root, chartSource))); err != nil {
		return err
	}
	pins, err := yaml.Marshal(digests)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(to, digestsFile), pins, 0o644); err != nil {
		return err
	}
	for _, edit := range []struct{ file, line, now string }{
		{"Chart.yaml", "version: 0.0.0-dev", "version: " + r.chartVersion()},
		{"Chart.yaml", "appVersion: dev", "appVersion: " + r.version},
		{"Chart.yaml", `  artifacthub.io/prerelease: "true"`, fmt.Sprintf(`  artifacthub.io/prerelease: "%t"`, strings.Contains(r.version, "-"))},
	} {
		path := filepath.Join(to, edit.file)
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		before, after, found := bytes.Cut(text, []byte("\n"+edit.line+"\n"))
		if !found {
			return fmt.Errorf("%s/%s has no line %q", chartSource, edit.file, edit.line)
		}
		if err := os.WriteFile(path, slices.Concat(before, []byte("\n"+edit.now+"\n"), after), 0o644); err != nil {
			return err
		}
	}
	return filepath.Walk(to, func(path string, _ os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		return os.Chtimes(path, r.stamp.Date, r.stamp.Date)
	})
}

// render writes the manifests of the chart with its defaults, and its CRDs.
func (r *release) render(ctx context.Context, staged string) error {
	note := fmt.Sprintf("# Isthmus %s, with the default values of its chart.\n", r.version)
	rendered, err := r.helm(ctx, "template", "isthmus", staged, "--namespace", "isthmus-system", "--skip-tests")
	if err != nil {
		return err
	}
	crds, err := r.helm(ctx, "show", "crds", staged)
	if err != nil {
		return err
	}
	for name, text := range map[string]string{manifestsFile: rendered, crdsFile: crds} {
		if err := os.WriteFile(r.path(name), []byte(note+text+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// helm runs the pinned Helm.
func (r *release) helm(ctx context.Context, args ...string) (string, error) {
	if r.helmProgram == "" {
		var err error
		if r.helmProgram, err = compile.Helm(ctx, r.root); err != nil {
			return "", err
		}
	}
	return said(ctx, r.root, r.helmProgram, args...)
}
