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
	"sync"
	"time"

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
	// Wrap wraps the transport of all requests but those that authenticate first; nil: no wrapping.
	Wrap func(http.RoundTripper) http.RoundTripper
}

// Client talks to Neutron on behalf of one cluster. It is safe for concurrent use.
type Client struct {
	cfg Config

	mu      sync.Mutex // never held during a request
	session *session   // nil: the next call authenticates
	project string     // of the first session; "" before
	pause   time.Time  // end of the pause that the cloud asked for
}

// New returns a client without any request: its first call authenticates. A clouds.yaml that cannot be read is an error.
func New(c Config) (*Client, error) {
	if c.Cluster == "" {
		return nil, errors.New("the cluster id is empty: it distinguishes the ports and floating IPs of this cluster from those of others")
	}
	if _, err := readCredentials(c); err != nil {
		return nil, err
	}
	c.Timeout = cmp.Or(c.Timeout, DefaultTimeout)
	return &Client{cfg: c}, nil
}

// Connect is New, and authenticates.
func Connect(ctx context.Context, c Config) (*Client, error) {
	client, err := New(c)
	if err != nil {
		return nil, err
	}
	return client, client.call(ctx, "connect", func(context.Context, *session) error { return nil })
}

// Paused is the error of calls while the cloud asks for a pause by Retry-After (429 or 503). No request is sent before
// Until.
type Paused struct {
	Until time.Time

	cause error
}

// Error implements error. The text does not depend on the time, so that it can be a condition's message.
func (p *Paused) Error() string { return "OpenStack asks for a pause: " + p.cause.Error() }

// Unwrap returns the error of the request that was refused.
func (p *Paused) Unwrap() error { return p.cause }

// call calls f with a session and a deadline, and explains its error.
func (c *Client) call(ctx context.Context, what string, f func(context.Context, *session) error) error {
	if p := c.paused(); p != nil {
		return fmt.Errorf("%s: %w", what, p)
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	s, err := c.open(ctx)
	if err == nil {
		if err = f(ctx, s); err == nil {
			return nil
		}
	}
	if refusesCredentials(err) {
		c.drop(s)
	}
	if until, ok := retryAfter(err, time.Now()); ok {
		err = c.setPause(until, explain(err))
	}
	return fmt.Errorf("%s: %w", what, explain(err))
}

// paused returns the error of a call during a pause, nil without one.
func (c *Client) paused() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !time.Now().Before(c.pause) {
		return nil
	}
	return &Paused{Until: c.pause, cause: errPause}
}

var errPause = errors.New("no request is sent before it ends")

func (c *Client) setPause(until time.Time, cause error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if until.After(c.pause) {
		c.pause = until
	}
	return &Paused{Until: c.pause, cause: cause}
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
