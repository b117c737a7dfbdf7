// Package nova lists the servers of one OpenStack project for package workloads. It changes nothing in the cloud.
package nova

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/compute/v2/servers"
	"github.com/gophercloud/gophercloud/v2/openstack/config"
	"github.com/gophercloud/gophercloud/v2/openstack/config/clouds"
	"github.com/gophercloud/gophercloud/v2/pagination"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
)

// DefaultTimeout limits the time to list all servers.
const DefaultTimeout = 30 * time.Second

// microversion is the first one that lists servers with their tags:
// https://docs.openstack.org/nova/latest/reference/api-microversion-history.html
const microversion = "2.26"

// Config describes the project.
type Config struct {
	// Cloud is the name of an entry of clouds.yaml, whose credentials are for one project.
	Cloud string
	// File is a clouds.yaml; "" means the file that the environment names, or the usual places. It is read for each new
	// session, so that new credentials take effect.
	File string
	// Network is the only network whose addresses are used; "" means all.
	Network string
	// Timeout limits the time to list all servers; 0 means DefaultTimeout.
	Timeout time.Duration
}

// Nova is a workloads.Cloud. Make it with New.
type Nova struct {
	cfg     Config
	compute *gophercloud.ServiceClient // nil without a session
}

var _ workloads.Cloud = (*Nova)(nil)

// New returns a Nova. It sends nothing.
func New(cfg Config) *Nova {
	cfg.Timeout = cmp.Or(cfg.Timeout, DefaultTimeout)
	return &Nova{cfg: cfg}
}

// Servers is part of workloads.Cloud. The first call opens a session, as does a call after an error.
func (n *Nova) Servers(ctx context.Context) ([]workloads.Server, error) {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Timeout)
	defer cancel()
	all, err := n.list(ctx)
	if err != nil {
		n.compute = nil
		return nil, fmt.Errorf("cloud %s: %w", n.cfg.Cloud, err)
	}
	return all, nil
}

func (n *Nova) list(ctx context.Context) ([]workloads.Server, error) {
	if n.compute == nil {
		if err := n.signIn(ctx); err != nil {
			return nil, err
		}
	}
	var all []workloads.Server
	err := servers.List(n.compute, servers.ListOpts{}).EachPage(ctx, func(_ context.Context, page pagination.Page) (bool, error) {
		var listed []server
		if err := servers.ExtractServersInto(page, &listed); err != nil {
			return false, err
		}
		for _, s := range listed {
			all = append(all, workloads.Server{
				ID: s.ID, Name: s.Name, Created: s.Created, Running: slices.Contains(running, s.Status), Addrs: s.addrs(n.cfg.Network), Labels: s.labels(),
			})
		}
		return true, nil
	})
	if err != nil {
		return nil, fmt.Errorf("list servers: %w", err)
	}
	return all, nil
}

// signIn opens a session by password or application credential. The session renews its tokens.
func (n *Nova) signIn(ctx context.Context) error {
	options := []clouds.ParseOption{clouds.WithCloudName(n.cfg.Cloud)}
	if n.cfg.File != "" {
		options = append(options, clouds.WithLocations(n.cfg.File))
	}
	auth, endpoint, tls, err := clouds.Parse(options...)
	if err != nil {
		return fmt.Errorf("read clouds.yaml: %w", err)
	}
	auth.AllowReauth = true
	provider, err := config.NewProviderClient(ctx, auth, config.WithHTTPClient(http.Client{Timeout: n.cfg.Timeout}), config.WithTLSConfig(tls))
	if err != nil {
		return fmt.Errorf("sign in at %s: %w", auth.IdentityEndpoint, err)
	}
	compute, err := openstack.NewComputeV2(provider, endpoint)
	if err != nil {
		return fmt.Errorf("find the compute service in the catalog: %w", err)
	}
	compute.Microversion = microversion
	n.compute = compute
	return nil
}

// running are the states in which a server continues to serve: https://docs.openstack.org/api-guide/compute/server_concepts.html
var running = []string{"ACTIVE", "MIGRATING", "PASSWORD", "VERIFY_RESIZE"}

// server has the fields of a server that are read.
type server struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	Status     string            `json:"status"`
	Created    time.Time         `json:"created"`
	AccessIPv4 string            `json:"accessIPv4"`
	AccessIPv6 string            `json:"accessIPv6"`
	Metadata   map[string]string `json:"metadata"`
	Tags       []string          `json:"tags"`
	Addresses  map[string][]struct {
		Addr string `json:"addr"`
		Type string `json:"OS-EXT-IPS:type"`
	} `json:"addresses"` // by the network's name
}

// labels returns the server's metadata and tags. Nova does not allow slashes in them, so a colon stands for a slash.
func (s server) labels() map[string]string {
	labels := map[string]string{}
	for _, tag := range s.Tags {
		key, value, _ := strings.Cut(tag, "=")
		labels[strings.ReplaceAll(key, ":", "/")] = value
	}
	for key, value := range s.Metadata {
		labels[strings.ReplaceAll(key, ":", "/")] = value
	}
	return labels
}

// addrs returns the addresses at which others reach the server, one of each family: those in network, or, if that is "",
// the access addresses of the server before others. A floating address precedes the addresses of the network.
func (s server) addrs(network string) []netip.Addr {
	var floating, fixed, all []string
	for _, name := range slices.Sorted(maps.Keys(s.Addresses)) {
		for _, a := range s.Addresses[name] {
			switch {
			case network != "" && network != name:
			case a.Type == "floating":
				floating = append(floating, a.Addr)
			default:
				fixed = append(fixed, a.Addr)
			}
		}
	}
	if network == "" {
		all = []string{s.AccessIPv4, s.AccessIPv6}
	}
	slices.Sort(floating)
	slices.Sort(fixed)
	var addrs []netip.Addr
	for _, text := range slices.Concat(all, floating, fixed) {
		a, err := netip.ParseAddr(text)
		known := func(b netip.Addr) bool { return clusterset.FamilyOf(a) == clusterset.FamilyOf(b) }
		if err == nil && clusterset.IsUnicast(a) && !slices.ContainsFunc(addrs, known) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}
