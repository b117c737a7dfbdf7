// Package openstack holds what the clients of a project's servers, load balancers and security groups share: the session, labels
// and addresses.
package openstack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/gophercloud/gophercloud/v2"
	"github.com/gophercloud/gophercloud/v2/openstack/config"
	"github.com/gophercloud/gophercloud/v2/openstack/config/clouds"
	"github.com/gophercloud/gophercloud/v2/openstack/identity/v3/tokens"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
)

// DefaultTimeout limits the time of a list, or of other work in a session.
const DefaultTimeout = 30 * time.Second

// Project is one project of a cloud, with a session whose clients are a C. It is not safe for concurrent use.
type Project[C any] struct {
	// Cloud is the name of an entry of clouds.yaml, whose credentials are for one project.
	Cloud string
	// File is a clouds.yaml; "" means the file that the environment names, or the usual places. It is read for each new
	// session, so that new credentials take effect.
	File string
	// Timeout limits the time of a call; 0 means DefaultTimeout.
	Timeout time.Duration
	// Clients returns the clients of a new session.
	Clients func(*gophercloud.ProviderClient, gophercloud.EndpointOpts) (C, error)

	clients *C // nil without a session
}

// List calls list with the clients of the session, as Do does.
func (p *Project[C]) List(ctx context.Context, list func(context.Context, C) ([]workloads.Resource, error)) (all []workloads.Resource, err error) {
	err = p.Do(ctx, func(ctx context.Context, clients C) error {
		all, err = list(ctx, clients)
		return err
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// Do calls do with the clients of the session. The first call opens a session, as does a call after an error.
func (p *Project[C]) Do(ctx context.Context, do func(context.Context, C) error) error {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(p.Timeout, DefaultTimeout))
	defer cancel()
	var err error
	if p.clients == nil {
		err = p.signIn(ctx)
	}
	if err == nil {
		err = do(ctx, *p.clients)
	}
	if err != nil {
		p.clients = nil
		return fmt.Errorf("cloud %s: %w", p.Cloud, err)
	}
	return nil
}

// ProjectOf returns the ID of the project of a session. An administrator's session may read other projects, too.
func ProjectOf(provider *gophercloud.ProviderClient) (string, error) {
	token, ok := provider.GetAuthResult().(tokens.CreateResult)
	if !ok {
		return "", errors.New("the session is not one of Keystone's API version 3")
	}
	project, err := token.ExtractProject()
	if err != nil {
		return "", fmt.Errorf("read the project of the session: %w", err)
	}
	if project == nil {
		return "", errors.New("the credentials are not for a project; use those of the project with the resources")
	}
	return project.ID, nil
}

// signIn opens a session by password or application credential. The session renews its tokens.
func (p *Project[C]) signIn(ctx context.Context) error {
	options := []clouds.ParseOption{clouds.WithCloudName(p.Cloud)}
	if p.File != "" {
		options = append(options, clouds.WithLocations(p.File))
	}
	auth, endpoint, tls, err := clouds.Parse(options...)
	if err != nil {
		return fmt.Errorf("read clouds.yaml: %w", err)
	}
	auth.AllowReauth = true
	client := http.Client{Timeout: cmp.Or(p.Timeout, DefaultTimeout)}
	provider, err := config.NewProviderClient(ctx, auth, config.WithHTTPClient(client), config.WithTLSConfig(tls))
	if err != nil {
		return fmt.Errorf("sign in at %s: %w", auth.IdentityEndpoint, err)
	}
	clients, err := p.Clients(provider, endpoint)
	if err != nil {
		return err
	}
	p.clients = &clients
	return nil
}

// Labels returns the labels that tags of the form KEY=VALUE stand for, added to those in metadata. Nova does not allow slashes
// in either, so a colon stands for a slash.
func Labels(tags []string, metadata map[string]string) map[string]string {
	labels := map[string]string{}
	for _, tag := range tags {
		key, value, _ := strings.Cut(tag, "=")
		labels[strings.ReplaceAll(key, ":", "/")] = value
	}
	for key, value := range metadata {
		labels[strings.ReplaceAll(key, ":", "/")] = value
	}
	return labels
}

// FirstOfEachFamily returns the first usable address of each family.
func FirstOfEachFamily(texts []string) (addrs []netip.Addr) {
	for _, text := range texts {
		a, err := netip.ParseAddr(text)
		known := func(b netip.Addr) bool { return clusterset.FamilyOf(a) == clusterset.FamilyOf(b) }
		if err == nil && clusterset.IsUnicast(a) && !slices.ContainsFunc(addrs, known) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}
