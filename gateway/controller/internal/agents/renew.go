package agents

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/isthmus-net/isthmus/gateway/desired"
)

// renew renews the gateway's certificate when it is due. A gateway that keeps no renewed certificate, or an older one, is left alone:
// its files are renewed otherwise.
func (l *client) renew(ctx context.Context) {
	c := l.clients.cfg
	now := time.Now()
	if c.Sign == nil || now.Before(l.renewAfter) || !l.api.certificate.RenewalDue(now) {
		return
	}
	l.renewAfter = now.Add(c.RetryRenewal)
	limited, cancel := context.WithTimeout(ctx, c.Timeout) // states wait meanwhile
	defer cancel()
	err := l.renewNow(limited)
	if no, ok := errors.AsType[*Refused](err); ok && no.Status == http.StatusNotFound || ctx.Err() != nil {
		return
	}
	c.Renewed(l.gateway, err)
}

func (l *client) renewNow(ctx context.Context) error {
	request, err := l.api.certificateRequest(ctx)
	if err != nil {
		return fmt.Errorf("ask for a request: %w", err)
	}
	cert, err := l.clients.cfg.Sign(ctx, l.identity, request, l.api.certificate)
	if err != nil {
		return err
	}
	if err := l.api.replaceCertificate(ctx, cert); err != nil {
		return fmt.Errorf("send the certificate: %w", err)
	}
	return nil
}

// certificateRequest returns a request for a certificate with a new key of the gateway.
func (p *api) certificateRequest(ctx context.Context) ([]byte, error) {
	var r desired.CertificateRequest
	err := p.do(ctx, http.MethodPost, "v1/certificate/request", []byte("{}"), &r)
	return []byte(r.Request), err
}

// replaceCertificate sends the certificate for the last request, which the next connection uses.
func (p *api) replaceCertificate(ctx context.Context, cert []byte) error {
	body, err := json.Marshal(desired.Certificate{Certificate: string(cert)})
	if err != nil {
		return err
	}
	if err := p.do(ctx, http.MethodPost, "v1/certificate", body, &struct{}{}); err != nil {
		return err
	}
	p.connected = time.Time{}
	return nil
}
