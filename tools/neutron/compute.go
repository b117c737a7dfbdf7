package neutron

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack"
)

// The only image and flavour of Nova servers.
const (
	Image  = "22222222-2222-2222-2222-222222222222"
	Flavor = "1"
)

// Ports of Nova, and of Placement and images, which only Nova calls.
const (
	novaPort  = 18774
	innerPort = 18778
)

//go:embed compute.py
var compute string

// novaDatabases are the databases of Nova's cells, Nova's API and Placement.
var novaDatabases = []string{"nova.db", "nova0.db", "nova_api.db", "placement.db"}

func (c *Cloud) novaURL() string { return fmt.Sprintf("http://%s:%d/v2.1/", c.cfg.Addr, novaPort) }

// makeNova creates Nova's databases, without content.
func (c *Cloud) makeNova(ctx context.Context) error {
	return c.once("nova.made", func() error {
		for _, db := range novaDatabases {
			if err := c.writeAhead(ctx, c.path(db)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Computing returns a client of Nova with the rights of User, at the first microversion that creates a server with tags.
func (c *Cloud) Computing(ctx context.Context) (*gophercloud.ServiceClient, error) {
	user, err := c.connect(ctx, User)
	if err != nil {
		return nil, err
	}
	nova, err := openstack.NewComputeV2(user, gophercloud.EndpointOpts{Region: region})
	if err != nil {
		return nil, err
	}
	nova.Microversion = "2.52"
	return nova, nil
}

// serviceUser returns the options with which one service authenticates to another: as neutron, the only service user.
func (c *Cloud) serviceUser() string {
	return fmt.Sprintf(`auth_url = %s
auth_type = password
project_domain_name = Default
user_domain_name = Default
project_name = service
username = neutron
password = %s
region_name = %s
`, c.keystoneURL(), password, region)
}

// novaConf configures an in-memory message queue and the fake compute driver, and does not wait for an agent to plug devices.
func (c *Cloud) novaConf() string {
	inner := fmt.Sprintf("http://%s:%d", c.cfg.Addr, innerPort)
	return fmt.Sprintf(`[DEFAULT]
log_file = %s
host = %s
compute_driver = fake.SmallFakeDriver
transport_url = fake://
state_path = %s
instances_path = %[3]s
my_ip = %s
vif_plugging_is_fatal = false
vif_plugging_timeout = 0
[database]
connection = %s
[api_database]
connection = %s
[glance]
endpoint_override = %s/image
[placement]
endpoint_override = %[7]s/placement
%s[neutron]
endpoint_override = %s
%[8]s[keystone_authtoken]
www_authenticate_uri = %[10]s
service_type = compute
%[8]s[oslo_concurrency]
lock_path = %[11]s
[oslo_messaging_notifications]
driver = noop
`, c.path("nova.log"), Host, c.cfg.Dir, c.cfg.Addr, c.database("nova"), c.database("nova_api"),
		inner, c.serviceUser(), c.neutronURL(), c.keystoneURL(), c.path("lock"))
}

func (c *Cloud) placementConf() string {
	return fmt.Sprintf(`[DEFAULT]
log_file = %s
[placement_database]
connection = %s
[keystone_authtoken]
www_authenticate_uri = %s
%s`, c.path("placement.log"), c.database("placement"), c.keystoneURL(), c.serviceUser())
}
