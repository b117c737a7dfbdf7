package certs

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// folder is the folder of a program's certificates.
type folder struct{ Files }

func newFolder(t *testing.T) folder {
	t.Helper()
	dir := t.TempDir()
	return folder{Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}}
}

// write writes a certificate of an identity, issued by an authority, and the trusted authorities.
func (f folder) write(t *testing.T, identity string, by *Authority, life time.Duration, believed ...*Authority) {
	t.Helper()
	p, err := by.Issue(identity, time.Now(), life)
	if err != nil {
		t.Fatal(err)
	}
	var ca []byte
	for _, a := range believed {
		ca = append(ca, a.Cert...)
	}
	if err := errors.Join(os.WriteFile(f.Cert, p.Cert, 0o600), os.WriteFile(f.Key, p.Key, 0o600), os.WriteFile(f.CA, ca, 0o600)); err != nil {
		t.Fatal(err)
	}
}

func (f folder) open(t *testing.T) *Source {
	t.Helper()
	s, err := Open(f.Files, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newAuthority(t *testing.T) *Authority {
	t.Helper()
	a, err := NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// shake returns the errors of both ends of a connection.
func shake(server, client *tls.Config) (atServer, atClient error) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	done := make(chan error, 1)
	go func() {
		c := tls.Server(a, server)
		err := c.Handshake()
		_ = c.Close() // notifies the client, which completes the TLS 1.3 handshake first
		done <- err
	}()
	c := tls.Client(b, client)
	atClient = c.Handshake()
	_, _ = c.Read(make([]byte, 1))
	_ = b.Close()
	return <-done, atClient
}

// Replaced files are used from the next connection on. Incomplete files leave the previous ones in use.
func TestFilesChange(t *testing.T) {
	first, next := newAuthority(t), newAuthority(t)
	server, client := newFolder(t), newFolder(t)
	server.write(t, "gw-1", first, time.Hour, first)
	client.write(t, Controller, first, time.Hour, first)
	s, c := server.open(t), client.open(t)
	check := func(step string, good bool) {
		t.Helper()
		atServer, atClient := shake(s.Server(), c.Client("gw-1"))
		if (atServer == nil && atClient == nil) != good {
			t.Errorf("%s: %v at the server, %v at the client", step, atServer, atClient)
		}
	}
	check("one authority", true)
	client.write(t, Controller, next, time.Hour, first, next)
	check("the client has one of another authority", false)
	server.write(t, "gw-1", first, time.Hour, first, next)
	check("both are believed", true)
	server.write(t, "gw-1", next, time.Hour, next)
	check("the old one was replaced", true)
	if err := os.WriteFile(server.Cert, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("half a certificate", true)
	if err := os.Remove(server.CA); err != nil {
		t.Fatal(err)
	}
	check("a file is missing", true)
}

// The metrics name the ends of the own certificate and of the last authority, also of files that were replaced.
func TestExpiry(t *testing.T) {
	next := newAuthority(t)
	first, err := NewAuthority("first", time.Now().Add(-24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	f := newFolder(t)
	f.write(t, "gw-1", first, time.Hour, first)
	s := f.open(t)
	for step, life := range []time.Duration{time.Hour, 2 * time.Hour} {
		if step == 1 {
			f.write(t, "gw-1", next, life, first, next)
		}
		registry := prometheus.NewRegistry()
		registry.MustRegister(s.Metrics()...)
		found, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		ends := map[string]time.Time{}
		for _, m := range found[0].GetMetric() {
			ends[m.GetLabel()[0].GetValue()] = time.Unix(int64(m.GetGauge().GetValue()), 0)
		}
		if left := time.Until(ends["own"]); left > life || left < life-time.Minute {
			t.Errorf("the certificate of %s ends in %s", life, left)
		}
		if want := []*Authority{first, next}[step].cert.NotAfter; !ends["authority"].Equal(want) {
			t.Errorf("the authority ends at %s, want %s", ends["authority"], want)
		}
	}
}

// Wrong identities and expired certificates are refused.
func TestVerify(t *testing.T) {
	ca := newAuthority(t)
	f := newFolder(t)
	f.write(t, "gw-1", ca, time.Hour, ca)
	s := f.open(t)
	issue := func(by *Authority, life time.Duration) *tls.ConnectionState {
		t.Helper()
		p, err := by.Issue("gw-2", time.Now(), life)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Parse(p.Cert)
		if err != nil {
			t.Fatal(err)
		}
		state := new(tls.ConnectionState)
		state.PeerCertificates = append(state.PeerCertificates, c)
		return state
	}
	for name, tt := range map[string]struct {
		state    *tls.ConnectionState
		identity string
		want     string
	}{
		"the right identity":     {issue(ca, time.Hour), "gw-2", ""},
		"another identity":       {issue(ca, time.Hour), "gw-3", `for ["gw-2"]`},
		"of another authority":   {issue(newAuthority(t), time.Hour), "gw-2", "unknown authority"},
		"an expired certificate": {issue(ca, -time.Minute), "gw-2", "expired"},
		"nothing":                {nil, "gw-2", "no certificate"},
	} {
		err := s.Verify(tt.state, tt.identity)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want %q", name, err, tt.want)
		}
	}
}

// certManagerFiles writes what a Secret of cert-manager holds: an RSA key in PKCS #1, the certificate with that of an intermediate
// authority, and the root in ca.crt.
func (f folder) certManagerFiles(t *testing.T, identity string, root *Authority) {
	t.Helper()
	newKey := func() *rsa.PrivateKey {
		key, err := rsa.GenerateKey(rand.Reader, 2048)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	issue := func(template, parent *x509.Certificate, key *rsa.PrivateKey, signer crypto.Signer) *x509.Certificate {
		template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
		if err != nil {
			t.Fatal(err)
		}
		c, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	between, own := newKey(), newKey()
	intermediate := issue(&x509.Certificate{Subject: pkix.Name{CommonName: "intermediate"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, root.cert, between, root.key)
	leaf := issue(&x509.Certificate{
		DNSNames: []string{identity}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, intermediate, own, between)
	var crt []byte
	for _, c := range []*x509.Certificate{leaf, intermediate} {
		crt = append(crt, pem.EncodeToMemory(&pem.Block{Type: certificateType, Bytes: c.Raw})...)
	}
	key := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(own)})
	if err := errors.Join(os.WriteFile(f.Cert, crt, 0o600), os.WriteFile(f.Key, key, 0o600), os.WriteFile(f.CA, root.Cert, 0o600)); err != nil {
		t.Fatal(err)
	}
}

// Both ends accept what cert-manager writes into a Secret.
func TestCertManagerFiles(t *testing.T) {
	root := unlimitedAuthority(t)
	server, client := newFolder(t), newFolder(t)
	server.certManagerFiles(t, "gw-1", root)
	client.certManagerFiles(t, Controller, root)
	if atServer, atClient := shake(server.open(t).Server(), client.open(t).Client("gw-1")); atServer != nil || atClient != nil {
		t.Errorf("%v at the server, %v at the client", atServer, atClient)
	}
}

// unlimitedAuthority returns an authority that may sign authorities.
func unlimitedAuthority(t *testing.T) *Authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "root"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	cert, err := sign(template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := encodeKey(key)
	if err != nil {
		t.Fatal(err)
	}
	a, err := ReadAuthority(Pair{Cert: cert, Key: private})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// ReadAuthority returns an authority that can issue certificates, and refuses any pair that is not an authority.
func TestReadAuthority(t *testing.T) {
	ca := newAuthority(t)
	same, err := ReadAuthority(ca.Pair)
	if err != nil || !bytes.Equal(same.Cert, ca.Cert) {
		t.Fatal(err)
	}
	leaf, err := same.Issue("gw-1", time.Now(), 100*365*24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Parse(leaf.Cert)
	if err != nil || !c.NotAfter.Equal(ca.cert.NotAfter) {
		t.Errorf("a certificate until %v by an authority until %v, %v", c.NotAfter, ca.cert.NotAfter, err)
	}
	for name, p := range map[string]Pair{"a gateway's": leaf, "another key": {ca.Cert, leaf.Key}, "nothing": {}} {
		if _, err := ReadAuthority(p); err == nil {
			t.Errorf("%s is an authority", name)
		}
	}
}
