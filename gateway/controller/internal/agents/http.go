package agents

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// answerLimit bounds an answer, in bytes.
const answerLimit = 4 << 20

// ErrOlder means that the gateway has a newer generation, or another state with the same one.
var ErrOlder = errors.New("the gateway has a newer generation")

// Refused is the answer of a gateway that did not apply a state. The gateway keeps its previous one.
type Refused struct {
	Status int
	desired.Refusal
}

func (r *Refused) Error() string {
	if len(r.Faults) > 0 {
		return fmt.Sprintf("refused with status %d: %s", r.Status, desired.Faults(r.Faults).Error())
	}
	return fmt.Sprintf("refused with status %d: %s", r.Status, r.Message)
}

// api is the HTTP API of one agent. It is for one goroutine.
type api struct {
	url  string
	http *http.Client
	// Connections older than maxAge are replaced. Otherwise a renewed certificate of either end would not be used while the old
	// connection is open, and the agent would refuse requests once the old certificate has expired.
	maxAge    time.Duration
	connected time.Time
	// certificate is the validity of the agent's certificate, as of the last answer.
	certificate certs.Validity
}

// newAPI returns the API at a URL.
func newAPI(url string, config *tls.Config, timeout, maxAge time.Duration) *api {
	return &api{url: url, maxAge: maxAge, http: &http.Client{
		Timeout:       timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport:     &http.Transport{TLSClientConfig: config, TLSHandshakeTimeout: timeout, IdleConnTimeout: time.Minute, MaxIdleConns: 2},
	}}
}

func (p *api) close() { p.http.CloseIdleConnections() }

// state reads the status of the gateway.
func (p *api) state(ctx context.Context) (desired.Status, error) {
	var s desired.Status
	return s, p.do(ctx, http.MethodGet, "v1/state", nil, &s)
}

// reconfigure sends a state, and returns the resulting status.
func (p *api) reconfigure(ctx context.Context, r desired.Request) (desired.Status, error) {
	var s desired.Status
	return s, p.do(ctx, http.MethodPost, "v1/reconfigure", r.JSON(), &s)
}

func (p *api) do(ctx context.Context, method, path string, body []byte, into any) error {
	if time.Since(p.connected) >= p.maxAge {
		p.http.CloseIdleConnections()
		p.connected = time.Now()
	}
	where, err := url.JoinPath(p.url, path)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, where, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := p.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.TLS != nil && len(resp.TLS.PeerCertificates) > 0 {
		p.certificate = certs.ValidityOf(resp.TLS.PeerCertificates[0])
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerLimit))
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, where, err)
	}
	if resp.StatusCode != http.StatusOK {
		refused := &Refused{Status: resp.StatusCode}
		if json.Unmarshal(answer, &refused.Refusal) != nil || refused.Message == "" {
			refused.Message = http.StatusText(resp.StatusCode)
		}
		if resp.StatusCode == http.StatusConflict {
			return fmt.Errorf("%w: %s", ErrOlder, refused.Message)
		}
		return refused
	}
	if err := json.Unmarshal(answer, into); err != nil {
		return fmt.Errorf("%s %s: %w", method, where, err)
	}
	return nil
}
