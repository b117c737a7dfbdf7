// Package openstack has the access rules of application credentials for Isthmus: all that each part of it asks of OpenStack.
package openstack

import _ "embed"

// Gateways are those of isthmus-gateway-controller, Machines those of isthmus-controller, whose Services may be over machines.
// Both are JSON as `openstack application credential create --access-rules` reads it.
var (
	//go:embed gateways.json
	Gateways []byte
	//go:embed machines.json
	Machines []byte
)
