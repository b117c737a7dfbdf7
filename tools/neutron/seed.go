package neutron

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/applicationcredentials"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/endpoints"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/projects"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/roles"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/services"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/tokens"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/users"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/external"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/routers"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/provider"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/networks"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/subnets"
	"sigs.k8s.io/yaml"

	deployed "github.com/isthmus-net/isthmus/deploy/openstack"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// transport connects from the cloud's network namespace.
func (c *Cloud) transport() http.RoundTripper {
	if c.cfg.Namespace == "" {
		return &http.Transport{DisableKeepAlives: true}
	}
	return &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		ns, err := netlab.OpenNamespace(c.cfg.Namespace)
		if err != nil {
			return nil, err
		}
		defer ns.Close()
		err = ns.Do(func() error {
			conn, err = new(net.Dialer).DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}}
}

// connect returns a client with the password of a user, in the project of the same name.
func (c *Cloud) connect(ctx context.Context, user string) (*gophercloud.ProviderClient, error) {
	p, err := openstack.NewClient(c.keystoneURL())
	if err != nil {
		return nil, err
	}
	p.HTTPClient = http.Client{Transport: c.transport(), Timeout: time.Minute}
	return p, openstack.Authenticate(ctx, p, gophercloud.AuthOptions{
		IdentityEndpoint: c.keystoneURL(), Username: user, Password: password, TenantName: user, DomainName: "Default", AllowReauth: true,
	})
}

// Networking returns a client of Neutron with an administrator's rights.
func (c *Cloud) Networking(ctx context.Context) (*gophercloud.ServiceClient, error) {
	admin, err := c.connect(ctx, "admin")
	if err != nil {
		return nil, err
	}
	return openstack.NewNetworkV2(admin, gophercloud.EndpointOpts{Region: region})
}

// identities returns a user's authenticated client, and a client of Keystone with that user's rights.
func (c *Cloud) identities(ctx context.Context, user string) (*gophercloud.ProviderClient, *gophercloud.ServiceClient, error) {
	p, err := c.connect(ctx, user)
	if err != nil {
		return nil, nil, err
	}
	identity, err := openstack.NewIdentityV3(p, gophercloud.EndpointOpts{Region: region})
	return p, identity, err
}

// seedIdentities creates the projects, the users, the entries of the catalog, and clouds.yaml.
func (c *Cloud) seedIdentities(ctx context.Context) error {
	return c.once("identities.made", func() error {
		_, identity, err := c.identities(ctx, "admin")
		if err != nil {
			return err
		}
		role, err := rolesOf(ctx, identity)
		if err != nil {
			return err
		}
		members := []string{"member", octaviaRole}
		for _, u := range []struct {
			user, project string
			roles         []string
		}{{"neutron", "service", []string{"admin"}}, {User, User, members}, {Stranger, Stranger, members}} {
			project, err := projects.Create(ctx, identity, projects.CreateOpts{Name: u.project, DomainID: "default"}).Extract()
			if err != nil {
				return fmt.Errorf("project %s: %w", u.project, err)
			}
			user, err := users.Create(ctx, identity, users.CreateOpts{Name: u.user, Password: password, DomainID: "default"}).Extract()
			if err != nil {
				return fmt.Errorf("user %s: %w", u.user, err)
			}
			for _, name := range u.roles {
				if err := roles.Assign(ctx, identity, role[name], roles.AssignOpts{UserID: user.ID, ProjectID: project.ID}).ExtractErr(); err != nil {
					return fmt.Errorf("role of %s: %w", u.user, err)
				}
			}
		}
		for _, s := range []struct{ kind, name, url string }{{"network", "neutron", c.neutronURL()}, {"compute", "nova", c.novaURL()}, {"load-balancer", "octavia", c.octaviaURL()}} {
			service, err := services.Create(ctx, identity, services.CreateOpts{Type: s.kind, Extra: map[string]any{"name": s.name}}).Extract()
			if err != nil {
				return err
			}
			_, err = endpoints.Create(ctx, identity, endpoints.CreateOpts{
				Availability: gophercloud.AvailabilityPublic, Name: s.name, Region: region, ServiceID: service.ID, URL: s.url,
			}).Extract()
			if err != nil {
				return err
			}
		}
		return c.writeClouds(ctx)
	})
}

// rolesOf creates the role of Octavia's users, and returns the ids of all roles by name.
func rolesOf(ctx context.Context, identity *gophercloud.ServiceClient) (map[string]string, error) {
	if _, err := roles.Create(ctx, identity, roles.CreateOpts{Name: octaviaRole}).Extract(); err != nil {
		return nil, fmt.Errorf("role %s: %w", octaviaRole, err)
	}
	pages, err := roles.List(identity, roles.ListOpts{}).AllPages(ctx)
	if err != nil {
		return nil, err
	}
	all, err := roles.ExtractRoles(pages)
	ids := map[string]string{}
	for _, r := range all {
		ids[r.Name] = r.ID
	}
	return ids, err
}

// credentials are the application credentials of User, each with its access rules.
var credentials = map[string][]byte{
	GatewaysCredential: deployed.Gateways, MachinesCredential: deployed.Machines, SecurityGroupsCredential: deployed.MachinesSecurityGroups,
}

// writeClouds creates the application credentials and writes clouds.yaml.
func (c *Cloud) writeClouds(ctx context.Context) error {
	user, identity, err := c.identities(ctx, User)
	if err != nil {
		return err
	}
	id, err := userOf(user)
	if err != nil {
		return err
	}
	clouds := map[string]any{}
	for name, rules := range credentials {
		opts := applicationcredentials.CreateOpts{Name: name, Secret: password}
		if err := json.Unmarshal(rules, &opts.AccessRules); err != nil {
			return fmt.Errorf("access rules of %s: %w", name, err)
		}
		credential, err := applicationcredentials.Create(ctx, identity, id, opts).Extract()
		if err != nil {
			return fmt.Errorf("application credential %s: %w", name, err)
		}
		clouds[name] = map[string]any{
			"auth_type": "v3applicationcredential", "region_name": region, "identity_api_version": 3,
			"auth": map[string]string{"auth_url": c.keystoneURL(), "application_credential_id": credential.ID, "application_credential_secret": password},
		}
	}
	for _, name := range []string{Admin, User, Stranger} {
		clouds[name] = map[string]any{
			"region_name": region, "identity_api_version": 3,
			"auth": map[string]string{
				"auth_url": c.keystoneURL(), "username": name, "password": password, "project_name": name,
				"user_domain_name": "Default", "project_domain_name": "Default",
			},
		}
	}
	b, err := yaml.Marshal(map[string]any{"clouds": clouds})
	if err != nil {
		return err
	}
	return os.WriteFile(c.CloudsYAML(), b, 0o600)
}

// warm lists Neutron's networks. Otherwise a new process whose first request lists ports answers 500, because it has not loaded
// the relations of its tables yet (neutron 21, get_ports).
func (c *Cloud) warm(ctx context.Context) error {
	if !c.exists("networks.made") { // makeNetworks will send enough requests
		return nil
	}
	network, err := c.Networking(ctx)
	if err != nil {
		return err
	}
	_, err = networks.List(network, networks.ListOpts{}).AllPages(ctx)
	return err
}

// makeNetworks creates the networks, the router between them and the gateways' ports.
func (c *Cloud) makeNetworks(ctx context.Context) error {
	return c.once("networks.made", func() error {
		_, identity, err := c.identities(ctx, "admin")
		if err != nil {
			return err
		}
		network, err := c.Networking(ctx)
		if err != nil {
			return err
		}
		pages, err := projects.List(identity, projects.ListOpts{Name: User}).AllPages(ctx)
		if err != nil {
			return err
		}
		found, err := projects.ExtractProjects(pages)
		if err != nil || len(found) != 1 {
			return fmt.Errorf("find project %s: %d found: %w", User, len(found), err)
		}
		s := seeder{network: network, ids: IDs{Project: found[0].ID}}
		if err := s.seed(ctx, c.cfg); err != nil {
			return err
		}
		b, err := json.MarshalIndent(s.ids, "", "  ")
		if err != nil {
			return err
		}
		return os.WriteFile(c.path("ids.json"), b, 0o600)
	})
}

type seeder struct {
	network *gophercloud.ServiceClient
	ids     IDs
}

func (s *seeder) seed(ctx context.Context, cfg Config) (err error) {
	ext, err := networks.Create(ctx, s.network, provider.CreateOptsExt{
		CreateOptsBuilder: external.CreateOptsExt{CreateOptsBuilder: networks.CreateOpts{Name: "external"}, External: new(true)},
		Segments:          []provider.Segment{{NetworkType: "flat", PhysicalNetwork: "public"}},
	}).Extract()
	if err != nil {
		return fmt.Errorf("external network: %w", err)
	}
	internal, err := networks.Create(ctx, s.network, networks.CreateOpts{Name: "gateways", ProjectID: s.ids.Project}).Extract()
	if err != nil {
		return fmt.Errorf("internal network: %w", err)
	}
	s.ids.External, s.ids.Network = ext.ID, internal.ID
	if s.ids.ExternalSubnets, err = s.subnets(ctx, subnets.CreateOpts{NetworkID: ext.ID, EnableDHCP: new(false)}, cfg.External); err != nil {
		return err
	}
	if s.ids.Subnets, err = s.subnets(ctx, subnets.CreateOpts{NetworkID: internal.ID, ProjectID: s.ids.Project, EnableDHCP: new(false)}, cfg.Internal); err != nil {
		return err
	}
	router, err := routers.Create(ctx, s.network, routers.CreateOpts{
		Name: "edge", ProjectID: s.ids.Project, GatewayInfo: &routers.GatewayInfo{NetworkID: ext.ID},
	}).Extract()
	if err != nil {
		return fmt.Errorf("router: %w", err)
	}
	s.ids.Router = router.ID
	for _, id := range s.ids.Subnets {
		if _, err := routers.AddInterface(ctx, s.network, router.ID, routers.AddInterfaceOpts{SubnetID: id}).Extract(); err != nil {
			return fmt.Errorf("router's interface: %w", err)
		}
	}
	for i, addrs := range cfg.Gateways {
		if err := s.gateway(ctx, fmt.Sprintf("gateway-%d", i+1), addrs); err != nil {
			return err
		}
	}
	return nil
}

// subnets creates a subnet of each family.
func (s *seeder) subnets(ctx context.Context, o subnets.CreateOpts, of [2]netip.Prefix) (ids [2]string, err error) {
	for i, p := range of {
		o.CIDR, o.IPVersion, o.Name = p.String(), gophercloud.IPv4, "four"
		if p.Addr().Is6() {
			o.IPVersion, o.Name = gophercloud.IPv6, "six"
		}
		subnet, err := subnets.Create(ctx, s.network, o).Extract()
		if err != nil {
			return ids, fmt.Errorf("subnet %s: %w", p, err)
		}
		ids[i] = subnet.ID
	}
	return ids, nil
}

// gateway creates the port of a gateway node.
func (s *seeder) gateway(ctx context.Context, name string, addrs [2]netip.Addr) error {
	port, err := ports.Create(ctx, s.network, ports.CreateOpts{
		Name: name, NetworkID: s.ids.Network, ProjectID: s.ids.Project,
		FixedIPs: []ports.IP{{SubnetID: s.ids.Subnets[0], IPAddress: addrs[0].String()}, {SubnetID: s.ids.Subnets[1], IPAddress: addrs[1].String()}},
	}).Extract()
	if err != nil {
		return fmt.Errorf("port %s: %w", name, err)
	}
	s.ids.Gateways = append(s.ids.Gateways, Gateway{Port: port.ID, Addrs: addrs})
	return nil
}

// userOf returns the id of a client's user.
func userOf(p *gophercloud.ProviderClient) (string, error) {
	token, ok := p.GetAuthResult().(tokens.CreateResult)
	if !ok {
		return "", errors.New("no token of Keystone's API version 3")
	}
	user, err := token.ExtractUser()
	if err != nil {
		return "", err
	}
	return user.ID, nil
}
