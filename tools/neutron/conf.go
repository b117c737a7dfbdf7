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

// neutronConf has no message queue, so that casts to agents, which do not exist, are dropped. It has no workers, except with
// Config.Engine: the driver of OVN does not answer in a process that forks others afterwards. It caches
// tokens only with Config.TrustTokens, so that a revoked token is otherwise refused at once. Without service_type, application
// credentials with access rules would get 401.
func (c *Cloud) neutronConf() string {
	remember := -1
	if c.cfg.TrustTokens {
		remember = 300
	}
	router, workers := "router", 0
	if c.cfg.Engine {
		router, workers = "ovn-router", 1
	}
	return fmt.Sprintf(`[DEFAULT]
log_file = %s
bind_host = %s
bind_port = %d
core_plugin = ml2
service_plugins = %s
auth_strategy = keystone
transport_url = fake://
api_workers = %d
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
`, c.path("neutron.log"), c.cfg.Addr, neutronPort, router, workers, c.cfg.MaxPairs, c.cfg.Dir, c.database("neutron"),
		c.keystoneURL(), c.serviceUser(), remember, c.path("lock"))
}

// ml2Conf configures the driver of the engine, or one whose agents do not exist.
func (c *Cloud) ml2Conf() string {
	networks, driver := "local", "openvswitch"
	if c.cfg.Engine {
		networks, driver = "geneve", "ovn"
	}
	conf := fmt.Sprintf(`[ml2]
type_drivers = flat,%s
tenant_network_types = %[1]s
mechanism_drivers = %s
extension_drivers = port_security
[ml2_type_flat]
flat_networks = public
[securitygroup]
enable_security_group = true
`, networks, driver)
	if !c.cfg.Engine {
		return conf
	}
	return conf + fmt.Sprintf(`[ml2_type_geneve]
vni_ranges = 1:1000
max_header_size = 38
[ovn]
ovn_nb_connection = %s
ovn_sb_connection = %s
`, c.socket(wanted), c.socket(actual))
}
