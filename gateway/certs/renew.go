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
	verify, err := a.verifier(trusted, now)
	if err != nil {
		return nil, err
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
	if err := a.outlives(is); err != nil {
		return nil, err
	}
	renewed, err := a.Issue(both.Leaf.DNSNames[0], now, is.life()-skew)
	return &renewed, err
}

// verifier returns a function that verifies that a certificate is of an authority in trusted, if a is one of those.
func (a *Authority) verifier(trusted []byte, now time.Time) (func(*x509.Certificate) error, error) {
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
	return verify, nil
}

// CheckTrusted returns an error unless a is one of the trusted authorities (PEM).
func (a *Authority) CheckTrusted(trusted []byte, now time.Time) error {
	_, err := a.verifier(trusted, now)
	return err
}

// outlives returns an error if the authority ends before a certificate does.
func (a *Authority) outlives(is Validity) error {
	if !a.cert.NotAfter.After(is.NotAfter) {
		return fmt.Errorf("the authority ends at %s, no later than the certificate: replace it", a.cert.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}
