// Package neutron runs a real Keystone and a real Neutron from Debian's packages, and optionally a real Nova with fake servers
// and the real API of Octavia with fake load balancers. It uses SQLite, and neither a message queue nor agents. Ports therefore
// stay DOWN and no packet is forwarded, but all responses are those of the real API. With Config.Engine, OVN forwards packets
// between devices that Plug connects, and drops those that security groups do not admit.
//
// In: a Config. Out: a cloud with an external and an internal network, a router between them, a port for each gateway
// node, two projects, and a clouds.yaml for them. Up completes an existing cloud; Down stops its services and removes all state.
package neutron

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
)

// Clouds of clouds.yaml.
const (
	Admin = "admin" // of everything
	// User is an ordinary member of the project that owns the networks. The next three are the same user with application
	// credentials, restricted to the access rules in deploy/openstack.
	User                     = "user"
	GatewaysCredential       = "gateways"
	MachinesCredential       = "machines"
	SecurityGroupsCredential = "machines-security-groups"
	Stranger                 = "stranger" // a member of another project
)

// Config configures a cloud. With only Dir set, the cloud listens on loopback.
type Config struct {
	Dir string // holds all state, and the logs
	// Namespace is the file of the services' network namespace; empty means the caller's.
	Namespace string
	Addr      netip.Addr // listening address of all services; default 127.0.0.1
	// External are the IPv4 and IPv6 networks of floating IPs, Internal those of gateways and VIPs.
	External, Internal [2]netip.Prefix
	// Gateways are the gateways' addresses in Internal, each with a port; default: the 11th and the 12th.
	Gateways      [][2]netip.Addr
	TokenLifetime time.Duration // of whole seconds; default an hour
	TrustTokens   bool          // cache a valid token for five minutes, even if it is revoked meanwhile, as most clouds do
	MaxPairs      int           // allowed address pairs per port; default 10, as in Neutron
	Compute       bool          // run Nova, too
	Balancing     bool          // run Octavia, too
	Engine        bool          // run OVN and Open vSwitch, too, so that ports of Host are bound and packets judged
	Progress      io.Writer     // receives one line per step; default: none
}

// IDs are the ids of the objects in a new cloud.
type IDs struct {
	Project         string    `json:"project"` // project of User
	External        string    `json:"external"`
	Network         string    `json:"network"` // internal
	ExternalSubnets [2]string `json:"externalSubnets"`
	Subnets         [2]string `json:"subnets"` // of the internal network, IPv4 and IPv6
	Router          string    `json:"router"`
	Gateways        []Gateway `json:"gateways"`
}

// Gateway is the port of a gateway node.
type Gateway struct {
	Port  string        `json:"port"`
	Addrs [2]netip.Addr `json:"addrs"`
}

// Cloud is a Keystone, a Neutron, and optionally a Nova and an Octavia, running or not.
type Cloud struct{ cfg Config }

// Open returns the cloud that cfg describes. It starts nothing.
func Open(cfg Config) *Cloud {
	if !cfg.Addr.IsValid() {
		cfg.Addr = netip.MustParseAddr("127.0.0.1")
	}
	if !cfg.External[0].IsValid() {
		cfg.External = [2]netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:f::/64")}
	}
	if !cfg.Internal[0].IsValid() {
		cfg.Internal = [2]netip.Prefix{netip.MustParsePrefix("10.77.0.0/24"), netip.MustParsePrefix("fd77::/64")}
	}
	for i := range 2 {
		if len(cfg.Gateways) > i {
			break
		}
		cfg.Gateways = append(cfg.Gateways, [2]netip.Addr{host(cfg.Internal[0], 11+byte(i)), host(cfg.Internal[1], 17+byte(i))})
	}
	cfg.TokenLifetime = cmp.Or(cfg.TokenLifetime, time.Hour)
	cfg.MaxPairs = cmp.Or(cfg.MaxPairs, 10)
	if cfg.Progress == nil {
		cfg.Progress = io.Discard
	}
	return &Cloud{cfg: cfg}
}

// WithTokens returns the same cloud with another token lifetime, which applies from Keystone's next start on.
func (c *Cloud) WithTokens(lifetime time.Duration) *Cloud {
	cfg := c.cfg
	cfg.TokenLifetime = lifetime
	return &Cloud{cfg}
}

// CloudsYAML returns the path of the clouds.yaml with all entries. Its URLs are reachable from the cloud's network namespace.
func (c *Cloud) CloudsYAML() string { return c.path("clouds.yaml") }

// IDs returns the ids of the objects that Up created. Call Up first.
func (c *Cloud) IDs() (IDs, error) {
	b, err := os.ReadFile(c.path("ids.json"))
	if err != nil {
		return IDs{}, err
	}
	var ids IDs
	return ids, json.Unmarshal(b, &ids)
}

// Up installs missing packages, starts the services that do not run, and fills an empty cloud. All APIs answer when it returns.
func (c *Cloud) Up(ctx context.Context) error {
	begin := time.Now()
	if err := c.Install(ctx); err != nil {
		return err
	}
	for _, dir := range []string{c.cfg.Dir, c.path("lock"), c.path("fernet"), c.path("credential")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	files := map[string]string{"keystone.conf": c.keystoneConf(), "neutron.conf": c.neutronConf(), "ml2.ini": c.ml2Conf()}
	if c.cfg.Compute {
		files["nova.conf"], files["placement.conf"] = c.novaConf(), c.placementConf()
	}
	if c.cfg.Balancing {
		files["octavia.conf"] = c.octaviaConf()
	}
	for file, text := range files {
		if err := os.WriteFile(c.path(file), []byte(text), 0o600); err != nil {
			return err
		}
	}
	type step struct {
		name string
		do   func(context.Context) error
	}
	steps := []step{
		{"copy of the template", c.fromTemplate},
		{"identities", c.makeKeystone},
		{"Keystone", func(ctx context.Context) error { return c.Start(ctx, Keystone) }},
		{"projects", c.seedIdentities},
		{"tables of Neutron", c.makeNeutron},
		{"Neutron", func(ctx context.Context) error { return c.Start(ctx, Neutron) }},
		{"networks", c.makeNetworks},
	}
	if c.cfg.Engine { // the template has one of its databases, and Neutron needs it
		steps = slices.Insert(steps, 1, step{"engine", c.startEngine})
	}
	if c.cfg.Compute {
		steps = append(steps, step{"databases of Nova", c.makeNova}, step{"Nova", func(ctx context.Context) error { return c.Start(ctx, Nova) }})
	}
	if c.cfg.Balancing {
		steps = append(steps, step{"database of Octavia", c.makeOctavia}, step{"Octavia", func(ctx context.Context) error { return c.Start(ctx, Octavia) }})
	}
	steps = append(steps, step{"template", func(ctx context.Context) error {
		return c.once("template.made", func() error { return c.toTemplate(ctx) })
	}})
	for _, step := range steps {
		fmt.Fprintf(c.cfg.Progress, "[%4.0fs] cloud: %s\n", time.Since(begin).Seconds(), step.name)
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// Down stops all services and removes all state.
func (c *Cloud) Down(ctx context.Context) error {
	var errs []error
	for _, s := range []Service{Octavia, Nova, Neutron, Keystone, controller, northd, vswitch, actual, wanted} {
		errs = append(errs, c.Stop(ctx, s))
	}
	return errors.Join(append(errs, os.RemoveAll(c.cfg.Dir))...)
}

// host returns the nth address of a prefix.
func host(p netip.Prefix, n byte) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	b[len(b)-1] |= n
	a, _ := netip.AddrFromSlice(b)
	return a
}

func (c *Cloud) path(name string) string { return filepath.Join(c.cfg.Dir, name) }

// exists reports whether the cloud has a file of that name.
func (c *Cloud) exists(name string) bool {
	_, err := os.Stat(c.path(name))
	return !errors.Is(err, fs.ErrNotExist)
}

// once calls do, unless an earlier call for this cloud succeeded.
func (c *Cloud) once(name string, do func() error) error {
	if c.exists(name) {
		return nil
	}
	if err := do(); err != nil {
		return err
	}
	return os.WriteFile(c.path(name), nil, 0o600)
}

// packages lists the packages of Keystone, its web server, Neutron, and with Config.Compute Nova, with Config.Balancing
// Octavia, with Config.Engine OVN. Nova, Placement and Octavia need only their Python modules, because they bring their own web
// servers.
func (c *Cloud) packages() []string {
	all := []string{"keystone", "neutron-server", "uwsgi-core", "uwsgi-plugin-python3"}
	if c.cfg.Compute {
		all = append(all, "python3-nova", "python3-placement")
	}
	if c.cfg.Balancing {
		all = append(all, "python3-octavia")
	}
	if c.cfg.Engine {
		all = append(all, "openvswitch-switch", "ovn-central", "ovn-host")
	}
	return all
}

// Install installs the packages that Up needs; Up calls it, too. It preseeds debconf, because the packages would otherwise ask
// for the locations of their databases.
func (c *Cloud) Install(ctx context.Context) error {
	missing, err := debian.Missing(ctx, c.packages()...)
	if err != nil || len(missing) == 0 {
		return err
	}
	if err := debian.Preseed(ctx,
		"keystone keystone/configure_db boolean false",
		"keystone keystone/register-endpoint boolean false",
		"keystone keystone/create-admin-tenant boolean false",
		"neutron-common neutron/configure_db boolean false",
		"neutron-common neutron/configure_rabbit boolean false",
		"neutron-common neutron/configure_ksat boolean false",
		"neutron-api neutron/register-endpoint boolean false",
	); err != nil {
		return err
	}
	return debian.Ensure(ctx, c.cfg.Progress, c.packages()...)
}
