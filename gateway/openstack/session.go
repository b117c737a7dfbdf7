package openstack

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"reflect"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack"
	"github.com/gophercloud/gophercloud/v2/openstack/config"
	"github.com/gophercloud/gophercloud/v2/openstack/config/clouds"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/tokens"
)

// credentials are an entry of clouds.yaml.
type credentials struct {
	auth     gophercloud.AuthOptions
	endpoint gophercloud.EndpointOpts
	tls      *tls.Config
}

// session is an authenticated connection. It renews its token by itself.
type session struct {
	credentials

	network *gophercloud.ServiceClient
	project string
}

// readCredentials reads clouds.yaml, or what the environment names instead.
func readCredentials(c Config) (k credentials, err error) {
	var options []clouds.ParseOption
	if c.Cloud != "" {
		options = append(options, clouds.WithCloudName(c.Cloud))
	}
	if c.File != "" {
		options = append(options, clouds.WithLocations(c.File))
	}
	if k.auth, k.endpoint, k.tls, err = clouds.Parse(options...); err != nil {
		return k, fmt.Errorf("read clouds.yaml: %w", err)
	}
	k.auth.AllowReauth = true // otherwise the first token is the last
	return k, nil
}

// same reports whether two files say the same.
func (k credentials) same(o credentials) bool {
	return reflect.DeepEqual(k.auth, o.auth) && reflect.DeepEqual(k.endpoint, o.endpoint) && sameTLS(k.tls, o.tls)
}

func sameTLS(a, b *tls.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	roots := a.RootCAs == b.RootCAs || a.RootCAs != nil && b.RootCAs != nil && a.RootCAs.Equal(b.RootCAs)
	return roots && a.InsecureSkipVerify == b.InsecureSkipVerify && reflect.DeepEqual(a.Certificates, b.Certificates)
}

// open returns the session. It authenticates when there is none, or when clouds.yaml has changed: a replaced application
// credential needs no restart. A file that cannot be read now, such as one that is being replaced, changes nothing.
func (c *Client) open(ctx context.Context) (*session, error) {
	c.mu.Lock()
	is := c.session
	c.mu.Unlock()
	k, err := readCredentials(c.cfg)
	if is != nil && (err != nil || k.same(is.credentials)) {
		return is, nil
	}
	if err != nil {
		return nil, err
	}
	if is, err = c.authenticate(ctx, k); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.project != "" && c.project != is.project {
		// All ports would be missing there, and Services would be given new addresses.
		return nil, fmt.Errorf("the credentials are for project %s, and those before were for project %s; to change the project, restart", is.project, c.project)
	}
	c.project, c.session = is.project, is
	return is, nil
}

// drop makes the next call authenticate again, unless another call already did.
func (c *Client) drop(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == s {
		c.session = nil
	}
}

// authenticate opens a session by password or application credential.
func (c *Client) authenticate(ctx context.Context, k credentials) (*session, error) {
	provider, err := config.NewProviderClient(ctx, k.auth, config.WithHTTPClient(http.Client{Timeout: c.cfg.Timeout}), config.WithTLSConfig(k.tls.Clone()))
	if err != nil {
		return nil, &loginError{k.auth.IdentityEndpoint, err}
	}
	network, err := openstack.NewNetworkV2(provider, k.endpoint)
	if err != nil {
		return nil, fmt.Errorf("find the network service in the catalog: %w", err)
	}
	if c.cfg.Wrap != nil {
		to := provider.HTTPClient.Transport
		if to == nil {
			to = http.DefaultTransport
		}
		provider.HTTPClient.Transport = c.cfg.Wrap(to)
	}
	project, err := projectOf(provider)
	if err != nil {
		return nil, err
	}
	return &session{credentials: k, network: network, project: project}, nil
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
