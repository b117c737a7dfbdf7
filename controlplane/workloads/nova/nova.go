// Package nova lists the servers of one OpenStack project for package workloads. It changes nothing in the cloud.
package nova

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	gopher "github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/compute/v2/servers"
	"github.com/gophercloud/gophercloud/v2/pagination"

	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/controlplane/workloads/internal/openstack"
)

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
	// Timeout limits the time to list all servers; 0 means 30 s.
	Timeout time.Duration
}

// Nova is a workloads.Lister of servers. Make it with New.
type Nova struct {
	network string
	project openstack.Project[*gophercloud.ServiceClient]
}

var _ workloads.Lister = (*Nova)(nil)

// New returns a Nova. It sends nothing.
func New(cfg Config) *Nova {
	return &Nova{cfg.Network, openstack.Project[*gophercloud.ServiceClient]{Cloud: cfg.Cloud, File: cfg.File, Timeout: cfg.Timeout, Clients: clients}}
}

func clients(provider *gophercloud.ProviderClient, endpoint gophercloud.EndpointOpts) (*gophercloud.ServiceClient, error) {
	compute, err := gopher.NewComputeV2(provider, endpoint)
	if err != nil {
		return nil, fmt.Errorf("find the compute service in the catalog: %w", err)
	}
	compute.Microversion = microversion
	return compute, nil
}

// List is part of workloads.Lister. The first call opens a session, as does a call after an error.
func (n *Nova) List(ctx context.Context) ([]workloads.Resource, error) {
	return n.project.List(ctx, n.list)
}

func (n *Nova) list(ctx context.Context, compute *gophercloud.ServiceClient) ([]workloads.Resource, error) {
	var all []workloads.Resource
	err := servers.List(compute, servers.ListOpts{}).EachPage(ctx, func(_ context.Context, page pagination.Page) (bool, error) {
		var listed []server
		if err := servers.ExtractServersInto(page, &listed); err != nil {
			return false, err
		}
		for _, s := range listed {
			all = append(all, workloads.Resource{
				ID: s.ID, Name: s.Name, Created: s.Created, Running: slices.Contains(running, s.Status), Addrs: openstack.FirstOfEachFamily(s.addrs(n.network)),
				Labels: openstack.Labels(s.Tags, s.Metadata),
			})
		}
		return true, nil
	})
	if err != nil {
		return nil, fmt.Errorf("list servers: %w", err)
	}
	return all, nil
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

// addrs returns the addresses at which others reach the server, the preferred ones first: those in network, or, if that is "",
// the access addresses of the server before others. A floating address precedes the addresses of the network.
func (s server) addrs(network string) []string {
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
	return slices.Concat(all, floating, fixed)
}
