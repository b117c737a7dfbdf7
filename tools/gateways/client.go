package gateways

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// Client sends requests to a gateway's agent, as its controller does. The caller closes it.
type Client struct {
	name, endpoint string
	transport      *http.Transport
	http           http.Client
}

// NewClient returns a client in a network namespace, with the controller's certificate. The endpoint is an address and port, and timeout
// bounds a request.
func NewClient(from *netlab.Namespace, own *certs.Source, name, endpoint string, timeout time.Duration) *Client {
	transport := &http.Transport{TLSClientConfig: own.Client(name), DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		err = from.Do(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, addr)
			return err
		})
		return c, err
	}}
	return &Client{name, endpoint, transport, http.Client{Transport: transport, Timeout: timeout}}
}

// Ask sends a request and decodes the JSON of its answer. Every status but 200 is an error.
func (c *Client) Ask(ctx context.Context, method, path string, body []byte, answer any) error {
	request, err := http.NewRequestWithContext(ctx, method, "https://"+c.endpoint+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", c.name, response.Status, said)
	}
	return json.Unmarshal(said, answer)
}

// Close closes the connections.
func (c *Client) Close() { c.transport.CloseIdleConnections() }
