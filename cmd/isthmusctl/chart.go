package main

import (
	"bytes"
	"fmt"
	"strings"

	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/cli"
	"helm.sh/helm/v4/pkg/registry"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/isthmus-net/isthmus/cmd/internal/version"
)

// loadChart reads a chart from a file, a folder, or a registry (oci://REPOSITORY[:TAG]); the default tag is that of this version.
func loadChart(from string, plain bool) (*chart.Chart, error) {
	repository, ok := strings.CutPrefix(from, "oci://")
	if !ok {
		return loader.Load(from)
	}
	c, err := pullChart(repository, plain)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	return c, nil
}

// pullChart reads a chart from a registry as helm does, with the credentials of `helm registry login` or else of `docker login`.
func pullChart(repository string, plain bool) (*chart.Chart, error) {
	ref, err := name.ParseReference(repository, name.WithDefaultTag(strings.TrimPrefix(version.String(), "v")))
	if err != nil {
		return nil, err
	}
	how := []registry.ClientOption{registry.ClientOptCredentialsFile(cli.New().RegistryConfig)}
	if plain {
		how = append(how, registry.ClientOptPlainHTTP())
	}
	client, err := registry.NewClient(how...)
	if err != nil {
		return nil, err
	}
	pulled, err := client.Pull(ref.Name())
	if err != nil {
		return nil, err
	}
	return loader.LoadArchive(bytes.NewReader(pulled.Chart.Data))
}
