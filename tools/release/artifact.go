package main

import (
	"bytes"
	"encoding/json"
	"fmt"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// artifact is an OCI artifact that is no container image, such as a chart (OCI image specification, "Guidelines for Artifact Usage").
type artifact struct {
	manifest v1.Manifest
	config   []byte
	layers   []v1.Layer
}

// newArtifact returns an artifact with a configuration and layers. The layers' annotations are by layer.
func newArtifact(configType types.MediaType, config []byte, annotations map[string]string, layers []v1.Layer, ofLayers ...map[string]string) (v1.Image, error) {
	digest, size, err := v1.SHA256(bytes.NewReader(config))
	if err != nil {
		return nil, err
	}
	a := &artifact{config: config, layers: layers, manifest: v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Annotations: annotations,
		Config: v1.Descriptor{MediaType: configType, Digest: digest, Size: size},
	}}
	for i, l := range layers {
		d, err := partial.Descriptor(l)
		if err != nil {
			return nil, err
		}
		if i < len(ofLayers) {
			d.Annotations = ofLayers[i]
		}
		a.manifest.Layers = append(a.manifest.Layers, *d)
	}
	return partial.CompressedToImage(a)
}

func (a *artifact) MediaType() (types.MediaType, error) { return a.manifest.MediaType, nil }
func (a *artifact) RawManifest() ([]byte, error)        { return json.Marshal(a.manifest) }
func (a *artifact) RawConfigFile() ([]byte, error)      { return a.config, nil }

func (a *artifact) LayerByDigest(want v1.Hash) (partial.CompressedLayer, error) {
	for _, l := range a.layers {
		if have, err := l.Digest(); err != nil || have == want {
			return l, err
		}
	}
	return nil, fmt.Errorf("no layer has the digest %s", want)
}
