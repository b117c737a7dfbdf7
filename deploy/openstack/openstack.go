// Package openstack holds the access rules of application credentials: every request that Isthmus makes to OpenStack.
package openstack

import _ "embed"

// Gateways are the rules of isthmus-gateway-controller, and Machines those of isthmus-controller, for Services of machines
// and load balancers. Both are JSON for `openstack application credential create --access-rules`.
var (
	//go:embed gateways.json
	Gateways []byte
	//go:embed machines.json
	Machines []byte
)
