// Package crds holds the CustomResourceDefinitions of the gateways, generated from gateway/api/v1alpha1. Clusters without
// gateways do not need them.
package crds

import (
	_ "embed"
	"fmt"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

//go:embed gateway.isthmus.dev_gatewaynodes.yaml
var gatewayNodes []byte

// GatewayNodes returns a new copy of the definition of GatewayNode. An error means that this build is broken.
func GatewayNodes() (*apiextensionsv1.CustomResourceDefinition, error) {
	crd := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.UnmarshalStrict(gatewayNodes, crd); err != nil {
		return nil, fmt.Errorf("parse definition of GatewayNode: %w", err)
	}
	return crd, nil
}
