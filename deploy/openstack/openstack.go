// Package openstack holds the access rules of application credentials: every request that Isthmus makes to OpenStack.
package openstack

import _ "embed"

// Gateways are the rules of isthmus-gateway-controller, and Machines those of isthmus-controller, for Services of machines
// and load balancers. MachinesSecurityGroups are those of Machines and those to apply policies to servers. All are JSON for `openstack application credential create --access-rules`.
var (
	//go:embed gateways.json
	Gateways []byte
	//go:embed machines.json
	Machines []byte
	//go:embed machines-security-groups.json
	MachinesSecurityGroups []byte
)
