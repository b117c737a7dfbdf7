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

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// answerLimit is how long an answer may be, in bytes.
const answerLimit = 4 << 20

// ErrOlder means that the gateway has a newer generation, or another state of the same one.
var ErrOlder = errors.New("the gateway has a newer generation")

// Refused is an answer of a gateway that could not, or would not, apply a state. It has what it had before.
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

// peer is one gateway's agent.
type api struct {
	url  string
	http *http.Client
}

// newPeer returns the agent at a URL.
func newAPI(url string, config *tls.Config, timeout time.Duration) *api {
	return &api{url: url, http: &http.Client{
		Timeout:       timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport:     &http.Transport{TLSClientConfig: config, TLSHandshakeTimeout: timeout, IdleConnTimeout: time.Minute, MaxIdleConns: 2},
	}}
}

func (p *api) close() { p.http.CloseIdleConnections() }

// state asks what the gateway has.
func (p *api) state(ctx context.Context) (desired.Status, error) {
	var s desired.Status
	return s, p.do(ctx, http.MethodGet, "v1/state", nil, &s)
}

// reconfigure tells the gateway what it is to have, and returns what it has then.
func (p *api) reconfigure(ctx context.Context, r desired.Request) (desired.Status, error) {
	var s desired.Status
	return s, p.do(ctx, http.MethodPost, "v1/reconfigure", r.JSON(), &s)
}

func (p *api) do(ctx context.Context, method, path string, body []byte, into any) error {
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
