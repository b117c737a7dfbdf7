// Package octavia lists the load balancers of one OpenStack project for package workloads. It changes nothing in the cloud.
package octavia

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	gopher "github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/loadbalancer/v2/listeners"
	"github.com/gophercloud/gophercloud/v2/openstack/loadbalancer/v2/loadbalancers"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/extensions/layer3/floatingips"

	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/controlplane/workloads/internal/openstack"
)

// Config describes the project.
type Config struct {
	// Cloud is the name of an entry of clouds.yaml, whose credentials are for one project.
	Cloud string
	// File is a clouds.yaml; "" means the file that the environment names, or the usual places. It is read for each new
	// session, so that new credentials take effect.
	File string
	// Timeout limits the time to list all load balancers; 0 means 30 s.
	Timeout time.Duration
}

// Octavia is a workloads.Lister of load balancers. Make it with New.
type Octavia struct{ project openstack.Project[clients] }

var _ workloads.Lister = (*Octavia)(nil)

// New returns an Octavia. It sends nothing.
func New(cfg Config) *Octavia {
	return &Octavia{openstack.Project[clients]{Cloud: cfg.Cloud, File: cfg.File, Timeout: cfg.Timeout, Clients: newClients}}
}

// clients are the clients of one session.
type clients struct {
	balancing, network *gophercloud.ServiceClient
	projectID          string
}

func newClients(provider *gophercloud.ProviderClient, endpoint gophercloud.EndpointOpts) (c clients, err error) {
	if c.projectID, err = openstack.ProjectOf(provider); err != nil {
		return c, err
	}
	c.balancing, err = gopher.NewLoadBalancerV2(provider, endpoint)
	if absent := new(gophercloud.ErrEndpointNotFound); errors.As(err, &absent) {
		return c, errors.New("the catalog has no load-balancer service (Octavia) in this region; remove loadBalancers from the settings of the cloud, or install Octavia")
	}
	if err != nil {
		return c, fmt.Errorf("find the load-balancer service in the catalog: %w", err)
	}
	if c.network, err = gopher.NewNetworkV2(provider, endpoint); err != nil {
		return c, fmt.Errorf("find the network service in the catalog: %w", err)
	}
	return c, nil
}

// List is part of workloads.Lister. It omits load balancers without tags, because these cannot ask for a Service. The first
// call opens a session, as does a call after an error.
func (o *Octavia) List(ctx context.Context) ([]workloads.Resource, error) {
	return o.project.List(ctx, func(ctx context.Context, c clients) ([]workloads.Resource, error) { return c.list(ctx) })
}

// list reads the load balancers of the session's project, also for an administrator, who may list those of every project. It
// reads listeners and floating IPs only if there are load balancers with tags. Any error is an error of the whole list: without
// the floating IPs, for example, clients would be sent to the VIP, which they may not reach.
func (c clients) list(ctx context.Context) ([]workloads.Resource, error) {
	pages, err := loadbalancers.List(c.balancing, loadbalancers.ListOpts{ProjectID: c.projectID}).AllPages(ctx)
	if err != nil {
		return nil, fmt.Errorf("list load balancers: %w", err)
	}
	balancers, err := loadbalancers.ExtractLoadBalancers(pages)
	if err != nil {
		return nil, fmt.Errorf("list load balancers: %w", err)
	}
	balancers = slices.DeleteFunc(balancers, func(b loadbalancers.LoadBalancer) bool { return len(b.Tags) == 0 })
	if len(balancers) == 0 {
		return nil, nil
	}
	ports, err := c.listeners(ctx)
	if err != nil {
		return nil, fmt.Errorf("list listeners: %w", err)
	}
	floating, err := c.floating(ctx)
	if err != nil {
		return nil, fmt.Errorf("list floating ips: %w", err)
	}
	var all []workloads.Resource
	for _, b := range balancers {
		addrs := append(slices.Sorted(slices.Values(floating[b.VipPortID])), b.VipAddress)
		for _, vip := range b.AdditionalVips {
			addrs = append(addrs, vip.IPAddress)
		}
		all = append(all, workloads.Resource{
			ID: b.ID, Name: b.Name, Created: b.CreatedAt, Running: running(b), Addrs: openstack.FirstOfEachFamily(addrs),
			Labels: openstack.Labels(b.Tags, nil), Listeners: ports[b.ID],
		})
	}
	return all, nil
}

// listeners returns the listeners in use, by the ids of their load balancers.
func (c clients) listeners(ctx context.Context) (map[string][]workloads.Listener, error) {
	pages, err := listeners.List(c.balancing, listeners.ListOpts{ProjectID: c.projectID}).AllPages(ctx)
	if err != nil {
		return nil, err
	}
	listed, err := listeners.ExtractListeners(pages)
	if err != nil {
		return nil, err
	}
	all := map[string][]workloads.Listener{}
	for _, l := range listed {
		if !configured(l.AdminStateUp, l.ProvisioningStatus) {
			continue
		}
		for _, of := range l.Loadbalancers {
			all[of.ID] = append(all[of.ID], workloads.Listener{Name: l.Name, Port: l.ProtocolPort, Protocol: transport(l.Protocol)})
		}
	}
	return all, nil
}

// floating returns the floating addresses of the project by their ports.
func (c clients) floating(ctx context.Context) (map[string][]string, error) {
	pages, err := floatingips.List(c.network, floatingips.ListOpts{ProjectID: c.projectID}).AllPages(ctx)
	if err != nil {
		return nil, err
	}
	listed, err := floatingips.ExtractFloatingIPs(pages)
	if err != nil {
		return nil, err
	}
	all := map[string][]string{}
	for _, f := range listed {
		if f.PortID != "" {
			all[f.PortID] = append(all[f.PortID], f.FloatingIP)
		}
	}
	return all, nil
}

// configured reports whether a load balancer or a listener is enabled and its configuration is in effect, if only a former one:
// https://docs.openstack.org/api-ref/load-balancer/v2/#status-codes
func configured(enabled bool, provisioning string) bool {
	return enabled && (provisioning == "ACTIVE" || provisioning == "PENDING_UPDATE")
}

// running reports whether a load balancer serves. DEGRADED, DRAINING and NO_MONITOR do; ERROR means that no member does. The
// operating status of a single listener does not count, because the ports of a Service must not change with the health of
// members.
func running(b loadbalancers.LoadBalancer) bool {
	return configured(b.AdminStateUp, b.ProvisioningStatus) && b.OperatingStatus != "ERROR" && b.OperatingStatus != "OFFLINE"
}

// transport returns the protocol of a listener's packets.
func transport(protocol string) string {
	switch protocol {
	case "HTTP", "HTTPS", "TERMINATED_HTTPS", "PROMETHEUS":
		return "TCP"
	default:
		return protocol
	}
}
