// Package openstack manages the ports and floating IPs of one cluster in Neutron.
//
// The request that creates an object also records its owner, so a crash leaves no unknown object: a port has device_owner
// and device_id, a floating IP a description. (Neutron drops the tags of a request that creates a port unless it has the
// extension driver tag_ports_during_bulk_creation.) Objects of other owners are never changed, except the allowed address
// pairs of gateway ports and floating IPs that a user named.
package openstack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/config"
	"github.com/gophercloud/gophercloud/v2/openstack/config/clouds"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/tokens"
	"github.com/gophercloud/gophercloud/v2/pagination"
)

// DefaultTimeout bounds a call. Without Keystone, Neutron does not answer at all.
const DefaultTimeout = 30 * time.Second

// Config names the cloud and the cluster that owns the objects.
type Config struct {
	// Cloud is the name of an entry of clouds.yaml; "" uses the environment (OS_CLOUD, OS_CLIENT_CONFIG_FILE and the
	// rest, as python-openstackclient reads them).
	Cloud string
	// File is a clouds.yaml; "" uses the environment or the usual places.
	File string
	// Cluster is the id of this cluster. Objects of other clusters are never changed.
	Cluster string
	// Timeout bounds a call; 0 is DefaultTimeout.
	Timeout time.Duration
	// Wrap wraps the transport of all requests but those of Connect; nil: no wrapping.
	Wrap func(http.RoundTripper) http.RoundTripper
}

// Client talks to Neutron on behalf of one cluster. It is safe for concurrent use.
type Client struct {
	network *gophercloud.ServiceClient
	project string
	cluster string
	timeout time.Duration
}

// Connect authenticates by password or application credential. The client renews its token by itself.
func Connect(ctx context.Context, c Config) (*Client, error) {
	if c.Cluster == "" {
		return nil, errors.New("the cluster id is empty: it distinguishes the ports and floating IPs of this cluster from those of others")
	}
	var options []clouds.ParseOption
	if c.Cloud != "" {
		options = append(options, clouds.WithCloudName(c.Cloud))
	}
	if c.File != "" {
		options = append(options, clouds.WithLocations(c.File))
	}
	auth, endpoint, tls, err := clouds.Parse(options...)
	if err != nil {
		return nil, fmt.Errorf("read clouds.yaml: %w", err)
	}
	auth.AllowReauth = true // otherwise the first token is the last
	timeout := cmp.Or(c.Timeout, DefaultTimeout)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	provider, err := config.NewProviderClient(ctx, auth, config.WithHTTPClient(http.Client{Timeout: timeout}), config.WithTLSConfig(tls))
	if err != nil {
		return nil, fmt.Errorf("authenticate at %s: %w", auth.IdentityEndpoint, explain(err))
	}
	network, err := openstack.NewNetworkV2(provider, endpoint)
	if err != nil {
		return nil, fmt.Errorf("find the network service in the catalog: %w", err)
	}
	if c.Wrap != nil {
		to := provider.HTTPClient.Transport
		if to == nil {
			to = http.DefaultTransport
		}
		provider.HTTPClient.Transport = c.Wrap(to)
	}
	project, err := projectOf(provider)
	if err != nil {
		return nil, err
	}
	return &Client{network: network, project: project, cluster: c.Cluster, timeout: timeout}, nil
}

// projectOf returns the id of the token's project.
func projectOf(provider *gophercloud.ProviderClient) (string, error) {
	auth, ok := provider.GetAuthResult().(tokens.CreateResult)
	if !ok {
		return "", errors.New("the identity service did not issue a token by its API version 3")
	}
	project, err := auth.ExtractProject()
	if err != nil {
		return "", fmt.Errorf("read the token's project: %w", err)
	}
	if project == nil {
		return "", errors.New("the credentials are for no project: set project_name, or project_id, in clouds.yaml")
	}
	return project.ID, nil
}

// call calls f with a deadline, and explains its error.
func (c *Client) call(ctx context.Context, what string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	if err := f(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, explain(err))
	}
	return nil
}

// list reads all pages of objects, converts the objects with of, and sorts them by id.
func list[From, To any](
	ctx context.Context, pages pagination.Pager, extract func(pagination.Page) ([]From, error), of func(*From) (To, error), id func(To) string,
) (all []To, err error) {
	page, err := pages.AllPages(ctx)
	if err != nil {
		return nil, err
	}
	objects, err := extract(page)
	if err != nil {
		return nil, err
	}
	for i := range objects {
		o, err := of(&objects[i])
		if err != nil {
			return nil, err
		}
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b To) int { return strings.Compare(id(a), id(b)) })
	return all, nil
}
