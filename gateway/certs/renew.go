package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"
)

// Renew returns a new certificate with the identity and the lifetime of p, or nil while p is not due. It never extends rights: p
// must be valid, of an authority in trusted, and have its key. Otherwise, whoever may write a Secret would get the key of any
// identity, such as the controller's, by a copy of its public certificate. Trusted must also contain the authority a, or the
// peers of the new certificate would refuse it.
func (a *Authority) Renew(p Pair, trusted []byte, now time.Time) (*Pair, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(trusted) {
		return nil, errors.New("no trusted authority in PEM")
	}
	verify := func(c *x509.Certificate) error {
		_, err := c.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		return err
	}
	if err := verify(a.cert); err != nil {
		return nil, fmt.Errorf("the signing authority is not one of the trusted authorities: %w", err)
	}
	both, err := tls.X509KeyPair(p.Cert, p.Key)
	if err != nil {
		return nil, err
	}
	if err := verify(both.Leaf); err != nil {
		return nil, err
	}
	if len(both.Leaf.DNSNames) != 1 {
		return nil, fmt.Errorf("the certificate has %d DNS names; it needs one, its identity", len(both.Leaf.DNSNames))
	}
	is := ValidityOf(both.Leaf)
	if !is.RenewalDue(now) {
		return nil, nil //nolint:nilnil // nothing to renew
	}
	if !a.cert.NotAfter.After(is.NotAfter) {
		return nil, fmt.Errorf("the authority ends at %s, no later than the certificate: replace it", a.cert.NotAfter.UTC().Format(time.RFC3339))
	}
	renewed, err := a.Issue(both.Leaf.DNSNames[0], now, is.life()-skew)
	return &renewed, err
}
