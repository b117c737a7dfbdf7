package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"

	"github.com/isthmus-net/isthmus/cmd/internal/version"
)

// chartMediaType is that of a chart in a registry: https://helm.sh/docs/topics/registries/.
const chartMediaType = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"

// loadChart reads a chart from a file, a folder, or a registry (oci://REPOSITORY[:TAG]); the default tag is that of this version.
func loadChart(ctx context.Context, from string, plain bool) (*chart.Chart, error) {
	repository, ok := strings.CutPrefix(from, "oci://")
	if !ok {
		return loader.Load(from)
	}
	layer, err := pullChart(ctx, repository, plain)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	c, err := loader.LoadArchive(layer)
	return c, errors.Join(err, layer.Close())
}

// pullChart returns the archive of a chart in a registry.
func pullChart(ctx context.Context, repository string, plain bool) (io.ReadCloser, error) {
	how := []name.Option{name.WithDefaultTag(strings.TrimPrefix(version.String(), "v"))}
	if plain {
		how = append(how, name.Insecure)
	}
	ref, err := name.ParseReference(repository, how...)
	if err != nil {
		return nil, err
	}
	image, err := remote.Image(ref, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		return nil, err
	}
	layers, err := image.Layers()
	if err != nil {
		return nil, err
	}
	for _, l := range layers {
		if kind, err := l.MediaType(); err == nil && kind == chartMediaType {
			return l.Compressed()
		}
	}
	return nil, errors.New("it is not a chart")
}
