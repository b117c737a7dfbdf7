package gateways

import (
	"context"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
)

// Objects counts the controller's ports and floating IPs in Neutron.
type Objects struct{ Ports, FloatingIPs int }

// Objects asks the real Neutron directly, as its administrator.
func (e *Edge) Objects(ctx context.Context) (n Objects, err error) {
	made, err := ports.List(e.network, ports.ListOpts{DeviceOwner: "isthmus:gateway", DeviceID: ClusterID}).AllPages(ctx)
	if err != nil {
		return n, err
	}
	all, err := ports.ExtractPorts(made)
	if err != nil {
		return n, err
	}
	reserved, err := floatingips.List(e.network, floatingips.ListOpts{}).AllPages(ctx)
	if err != nil {
		return n, err
	}
	floating, err := floatingips.ExtractFloatingIPs(reserved) // no other client has any
	return Objects{len(all), len(floating)}, err
}
