package neutron

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack"
)

const octaviaPort = 19876

// octaviaRole is the role without which Octavia's default policy lets a member of a project do nothing.
const octaviaRole = "load-balancer_member"

//go:embed balancing.py
var balancing string

func (c *Cloud) octaviaURL() string { return fmt.Sprintf("http://%s:%d/", c.cfg.Addr, octaviaPort) }

// makeOctavia creates Octavia's database, without content.
func (c *Cloud) makeOctavia(ctx context.Context) error {
	return c.once("octavia.made", func() error { return c.writeAhead(ctx, c.path("octavia.db")) })
}

// Balancing returns a client of Octavia with the rights of User.
func (c *Cloud) Balancing(ctx context.Context) (*gophercloud.ServiceClient, error) {
	user, err := c.connect(ctx, User)
	if err != nil {
		return nil, err
	}
	return openstack.NewLoadBalancerV2(user, gophercloud.EndpointOpts{Region: region})
}

// octaviaConf configures the provider that does nothing.
func (c *Cloud) octaviaConf() string {
	return fmt.Sprintf(`[DEFAULT]
log_file = %s
transport_url = fake://
[api_settings]
bind_host = %s
bind_port = %d
enabled_provider_drivers = noop_driver:nothing
default_provider_driver = noop_driver
[controller_worker]
compute_driver = compute_noop_driver
[database]
connection = %s
[neutron]
region_name = %s
[service_auth]
%s[keystone_authtoken]
www_authenticate_uri = %s
service_type = load-balancer
%[6]s`, c.path("octavia.log"), c.cfg.Addr, octaviaPort, c.database("octavia"), region, c.serviceUser(), c.keystoneURL())
}
