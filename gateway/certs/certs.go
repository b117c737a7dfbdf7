// Package certs creates and reads the certificates by which a controller and its gateways authenticate each other. One
// private authority signs all of them. The single DNS name in a certificate is its identity.
package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"time"
)

// Controller is the default identity of a gateway controller.
const Controller = "isthmus-gateway-controller"

// authorityLife is the lifetime of an authority.
const authorityLife = 10 * 365 * 24 * time.Hour

// skew is how far the clock of a peer may be behind.
const skew = time.Hour

// certificateType is the type of a certificate's PEM block (RFC 7468 section 5.1).
const certificateType = "CERTIFICATE"

// Pair is a certificate and its private key, both PEM.
type Pair struct{ Cert, Key []byte }

// Authority signs certificates.
type Authority struct {
	Pair
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority creates an authority. name is its common name, for people.
func NewAuthority(name string, now time.Time) (*Authority, error) {
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: now.Add(-skew), NotAfter: now.Add(authorityLife),
	}
	a := &Authority{key: key}
	if a.Cert, err = sign(template, template, &key.PublicKey, key); err != nil {
		return nil, err
	}
	if a.Key, err = encodeKey(key); err != nil {
		return nil, err
	}
	a.cert, err = Parse(a.Cert)
	return a, err
}

// ReadAuthority returns the authority of a pair.
func ReadAuthority(p Pair) (*Authority, error) {
	both, err := tls.X509KeyPair(p.Cert, p.Key)
	if err != nil {
		return nil, fmt.Errorf("read the authority: %w", err)
	}
	key, ok := both.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || !both.Leaf.IsCA {
		return nil, errors.New("read the authority: it is not ours: it needs an elliptic key and must be a CA")
	}
	return &Authority{Pair: p, cert: both.Leaf, key: key}, nil
}

// Issue issues a certificate for an identity, valid for both clients and servers.
func (a *Authority) Issue(identity string, now time.Time, life time.Duration) (Pair, error) {
	return a.Sign(templateOf(identity), now, life)
}

// templateOf returns the template of an identity's certificate.
func templateOf(identity string) *x509.Certificate {
	return &x509.Certificate{Subject: pkix.Name{CommonName: identity}, DNSNames: []string{identity}, KeyUsage: x509.KeyUsageDigitalSignature}
}

// Sign returns a certificate for the subject, names, addresses and key usage of template, with a new key. It is valid for
// clients and servers, from now until life has passed or the authority expires.
func (a *Authority) Sign(template *x509.Certificate, now time.Time, life time.Duration) (Pair, error) {
	key, err := newKey()
	if err != nil {
		return Pair{}, err
	}
	cert, err := a.signKey(template, &key.PublicKey, now, life)
	if err != nil {
		return Pair{}, err
	}
	private, err := encodeKey(key)
	return Pair{Cert: cert, Key: private}, err
}

// signKey is Sign for an existing key.
func (a *Authority) signKey(template *x509.Certificate, key *ecdsa.PublicKey, now time.Time, life time.Duration) ([]byte, error) {
	end := now.Add(life)
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	template.NotBefore, template.NotAfter = now.Add(-skew), end
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	return sign(template, a.cert, key, a.key)
}

func sign(template, parent *x509.Certificate, key *ecdsa.PublicKey, signer *ecdsa.PrivateKey) ([]byte, error) {
	var err error
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)); err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, parent, key, signer)
	if err != nil {
		return nil, fmt.Errorf("sign the certificate of %s: %w", template.Subject.CommonName, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: certificateType, Bytes: cert}), nil
}

func newKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	return key, nil
}

// encodeKey returns a private key as PEM.
func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("write a private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), nil
}

// Parse returns the first certificate of a PEM file.
func Parse(b []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(b)
	if block == nil || block.Type != certificateType {
		return nil, errors.New("read a certificate: there is none in PEM")
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read a certificate: %w", err)
	}
	return c, nil
}
