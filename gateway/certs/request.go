package certs

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"
)

// requestType is the type of a request's PEM block (RFC 7468 section 7).
const requestType = "CERTIFICATE REQUEST"

// SignRequest returns a certificate for the key in a request (PKCS #10, PEM), with an identity and the lifetime of the certificate that
// the other end has now. The names in the request are ignored: the caller knows from the connection who sent it.
func (a *Authority) SignRequest(request []byte, identity string, has Validity, now time.Time) ([]byte, error) {
	if err := a.outlives(has); err != nil {
		return nil, err
	}
	block, _ := pem.Decode(request)
	if block == nil || block.Type != requestType {
		return nil, errors.New("read a request: there is none in PEM")
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read a request: %w", err)
	}
	if err := r.CheckSignature(); err != nil {
		return nil, fmt.Errorf("the request is not signed with its key: %w", err)
	}
	key, ok := r.PublicKey.(*ecdsa.PublicKey)
	if !ok {
		return nil, fmt.Errorf("the request has a key of type %T; it needs an elliptic one", r.PublicKey)
	}
	return a.signKey(templateOf(identity), key, now, has.life()-skew)
}

// ErrNotRenewed means that a source has no file for a renewed certificate.
var ErrNotRenewed = errors.New("this program's certificate is renewed by replacing its files")

// Request makes a key, and returns a request for a certificate with it (PKCS #10, PEM). The key waits for Accept. A second request
// replaces the first one.
func (s *Source) Request() ([]byte, error) {
	if s.files.Renewed == "" {
		return nil, ErrNotRenewed
	}
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{DNSNames: s.current().own.Leaf.DNSNames}, key)
	if err != nil {
		return nil, fmt.Errorf("make a request: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requested = key
	return pem.EncodeToMemory(&pem.Block{Type: requestType, Bytes: request}), nil
}

// Accept stores the certificate for the last request, which is used from then on. It must be of a trusted authority, for the same
// identity, and valid for longer than the present one.
func (s *Source) Accept(cert []byte) error {
	if s.files.Renewed == "" {
		return ErrNotRenewed
	}
	has := s.current()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.requested == nil {
		return errors.New("no certificate was requested since this program started")
	}
	key, err := encodeKey(s.requested)
	if err != nil {
		return err
	}
	renewed, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return err
	}
	if err := has.replaceableBy(renewed.Leaf, time.Now()); err != nil {
		return err
	}
	if !renewed.Leaf.NotAfter.After(has.own.Leaf.NotAfter) {
		return fmt.Errorf("it ends at %s, no later than the present one", renewed.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	if err := write(s.files.Renewed, slices.Concat(cert, key), 0o600); err != nil {
		return fmt.Errorf("write the renewed certificate: %w", err)
	}
	s.requested = nil
	return nil
}

// replaceableBy reports whether a certificate may take the place of the own one: it is of a trusted authority and for the same identity.
func (m *material) replaceableBy(c *x509.Certificate, now time.Time) error {
	if !slices.Equal(c.DNSNames, m.own.Leaf.DNSNames) {
		return fmt.Errorf("it is for %q, and must be for %q", c.DNSNames, m.own.Leaf.DNSNames)
	}
	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if _, err := c.Verify(x509.VerifyOptions{Roots: m.authorities, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
			return err
		}
	}
	return nil
}

// useRenewed makes the renewed certificate in a file the own one, unless that was issued later, if it may take its place. An administrator
// who replaces the files, as after a leak of a key, so replaces the renewed certificate too.
func (m *material) useRenewed(path string, now time.Time) error {
	both, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	renewed, err := tls.X509KeyPair(both, both)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if renewed.Leaf.NotBefore.Before(m.own.Leaf.NotBefore) {
		return nil
	}
	if err := m.replaceableBy(renewed.Leaf, now); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	m.own = renewed
	return nil
}
