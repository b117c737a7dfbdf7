package neutron

import "fmt"

// Ports of the two APIs, and the password of all users. Only the tests' own network reaches the APIs.
const (
	keystonePort = 15000
	neutronPort  = 19696
	password     = "laboratory"
	region       = "Lab"
)

func (c *Cloud) keystoneURL() string {
	return fmt.Sprintf("http://%s:%d/v3", c.cfg.Addr, keystonePort)
}

func (c *Cloud) neutronURL() string {
	return fmt.Sprintf("http://%s:%d/", c.cfg.Addr, neutronPort)
}

func (c *Cloud) database(name string) string {
	return "sqlite:///" + c.path(name+".db")
}

// keystoneConf caches token validation in memory. Without the cache a request takes 300 ms.
func (c *Cloud) keystoneConf() string {
	return fmt.Sprintf(`[DEFAULT]
log_file = %s
[database]
connection = %s
sqlite_synchronous = false
[token]
provider = fernet
expiration = %.0f
[fernet_tokens]
key_repository = %s
[fernet_receipts]
key_repository = %[4]s
[credential]
key_repository = %[5]s
[cache]
enabled = true
backend = dogpile.cache.memory
`, c.path("keystone.log"), c.database("keystone"), c.cfg.TokenLifetime.Seconds(), c.path("fernet"), c.path("credential"))
}

// neutronConf has no message queue, so that casts to agents, which do not exist, are dropped. It has no workers. It caches
// tokens only with Config.TrustTokens, so that a revoked token is otherwise refused at once. Without service_type, application
// credentials with access rules would get 401.
func (c *Cloud) neutronConf() string {
	remember := -1
	if c.cfg.TrustTokens {
		remember = 300
	}
	return fmt.Sprintf(`[DEFAULT]
log_file = %s
bind_host = %s
bind_port = %d
core_plugin = ml2
service_plugins = router
auth_strategy = keystone
transport_url = fake://
api_workers = 0
rpc_workers = 0
rpc_state_report_workers = 0
notify_nova_on_port_status_changes = false
notify_nova_on_port_data_changes = false
dhcp_agent_notification = false
max_allowed_address_pair = %d
api_paste_config = /usr/share/neutron-common/api-paste.ini
state_path = %s
[database]
connection = %s
sqlite_synchronous = false
[keystone_authtoken]
www_authenticate_uri = %s
%sservice_type = network
token_cache_time = %d
[oslo_concurrency]
lock_path = %s
[oslo_messaging_notifications]
driver = noop
`, c.path("neutron.log"), c.cfg.Addr, neutronPort, c.cfg.MaxPairs, c.cfg.Dir, c.database("neutron"),
		c.keystoneURL(), c.serviceUser(), remember, c.path("lock"))
}

const ml2Conf = `[ml2]
type_drivers = flat,local
tenant_network_types = local
mechanism_drivers = openvswitch
extension_drivers = port_security
[ml2_type_flat]
flat_networks = public
[securitygroup]
enable_security_group = true
`
