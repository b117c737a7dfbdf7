// Package neutron runs a real Keystone and a real Neutron from Debian's packages: with SQLite, without a message queue and
// without agents, so ports stay DOWN and no packet is forwarded; every answer of the API is the real one. Where it is
// asked for, a real Nova as well, whose servers are pretended.
//
// In: a Config. Out: a cloud with an external and an internal network, a router between them, a port for each gateway
// node, two projects, and a clouds.yaml for them. Up keeps what is there, Down ends what runs and removes all of it.
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
	"time"

	"github.com/isthmus-net/isthmus/tools/deps/debian"
)

// Clouds of clouds.yaml.
const (
	Admin = "admin" // of everything
	// User is an ordinary member of the project that has the networks. The others are the same one by application credentials,
	// which may do what deploy/openstack says and nothing else.
	User               = "user"
	GatewaysCredential = "gateways"
	MachinesCredential = "machines"
	Stranger           = "stranger" // a member of another project
)

// Config says where the cloud is. The zero value, but for Dir, is one on loopback.
type Config struct {
	Dir string // holds all state, and the logs
	// Namespace is the file of the network namespace that both services are in, "" for the caller's.
	Namespace string
	Addr      netip.Addr // that both listen on; default 127.0.0.1
	// External are the networks of floating IPs and Internal those of gateways and VIPs, IPv4 and IPv6.
	External, Internal [2]netip.Prefix
	// Gateways are the addresses of gateway nodes, of Internal, each of which has a port; default the 11th and the 12th.
	Gateways      [][2]netip.Addr
	TokenLifetime time.Duration // of whole seconds; default an hour
	TrustTokens   bool          // a token is good for five minutes once it was, also if it is revoked, as in most clouds
	MaxPairs      int           // allowed address pairs a port; default 10, as Neutron's
	Compute       bool          // Nova too
	Progress      io.Writer     // gets one line a step; default: none
}

// IDs are of what the cloud begins with.
type IDs struct {
	Project         string    `json:"project"` // that User is in
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

// Cloud is a Keystone, a Neutron and perhaps a Nova that may or may not run.
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

// WithTokens returns the same cloud, whose Keystone gives tokens of another lifetime from its next start on.
func (c *Cloud) WithTokens(lifetime time.Duration) *Cloud {
	cfg := c.cfg
	cfg.TokenLifetime = lifetime
	return &Cloud{cfg}
}

// CloudsYAML is the file that has Clouds. Its addresses are reachable from the cloud's network namespace.
func (c *Cloud) CloudsYAML() string { return c.path("clouds.yaml") }

// IDs returns what the cloud begins with. There must have been an Up.
func (c *Cloud) IDs() (IDs, error) {
	b, err := os.ReadFile(c.path("ids.json"))
	if err != nil {
		return IDs{}, err
	}
	var ids IDs
	return ids, json.Unmarshal(b, &ids)
}

// Up installs and starts what is missing, and fills a cloud that is empty. All APIs answer when it returns.
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
	files := map[string]string{"keystone.conf": c.keystoneConf(), "neutron.conf": c.neutronConf(), "ml2.ini": ml2Conf}
	if c.cfg.Compute {
		files["nova.conf"], files["placement.conf"] = c.novaConf(), c.placementConf()
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
		{"what one like it began with", c.recall},
		{"identities", c.makeKeystone},
		{"Keystone", func(ctx context.Context) error { return c.Start(ctx, Keystone) }},
		{"projects", c.seedIdentities},
		{"tables of Neutron", c.makeNeutron},
		{"Neutron", func(ctx context.Context) error { return c.Start(ctx, Neutron) }},
		{"networks", c.makeNetworks},
	}
	if c.cfg.Compute {
		steps = append(steps, step{"databases of Nova", c.makeNova}, step{"Nova", func(ctx context.Context) error { return c.Start(ctx, Nova) }})
	}
	steps = append(steps, step{"what others like it begin with", func(ctx context.Context) error {
		return c.once("remembered", func() error { return c.remember(ctx) })
	}})
	for _, step := range steps {
		fmt.Fprintf(c.cfg.Progress, "[%4.0fs] cloud: %s\n", time.Since(begin).Seconds(), step.name)
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// Down ends all services and removes all state.
func (c *Cloud) Down(ctx context.Context) error {
	return errors.Join(c.Stop(ctx, Nova), c.Stop(ctx, Neutron), c.Stop(ctx, Keystone), os.RemoveAll(c.cfg.Dir))
}

// host is the nth address of a prefix.
func host(p netip.Prefix, n byte) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	b[len(b)-1] |= n
	a, _ := netip.AddrFromSlice(b)
	return a
}

func (c *Cloud) path(name string) string { return filepath.Join(c.cfg.Dir, name) }

// exists reports whether a file of the cloud is there.
func (c *Cloud) exists(name string) bool {
	_, err := os.Stat(c.path(name))
	return !errors.Is(err, fs.ErrNotExist)
}

// once calls do, unless it succeeded for this cloud before.
func (c *Cloud) once(name string, do func() error) error {
	if c.exists(name) {
		return nil
	}
	if err := do(); err != nil {
		return err
	}
	return os.WriteFile(c.path(name), nil, 0o600)
}

// packages are Keystone, Neutron and a web server for the first, and where it is asked for Nova; those bring their own. Of
// Nova and of Placement the programs are not needed.
func (c *Cloud) packages() []string {
	all := []string{"keystone", "neutron-server", "uwsgi-core", "uwsgi-plugin-python3"}
	if c.cfg.Compute {
		all = append(all, "python3-nova", "python3-placement")
	}
	return all
}

// Install installs what Up needs, which Up does too. Without answers beforehand the packages would ask where their databases are.
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
