package httpserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/gateway/certs"
)

// Flags are the flags of a program's HTTP server.
type Flags struct {
	CertFile, KeyFile string
	Insecure          bool
}

// Bind adds the flags.
func (f *Flags) Bind(set *pflag.FlagSet) {
	set.StringVar(&f.CertFile, "tls-cert-file", "", "certificate of the HTTPS server, PEM; a replaced file is read again (default: a self-signed one in memory)")
	set.StringVar(&f.KeyFile, "tls-private-key-file", "", "private key of --tls-cert-file")
	f.BindInsecure(set)
}

// BindInsecure adds --insecure-http alone.
func (f *Flags) BindInsecure(set *pflag.FlagSet) {
	set.BoolVar(&f.Insecure, "insecure-http", false, "serve plain HTTP, with /metrics and /status open to every client that reaches the address")
}

// Open returns the paths that --insecure-http opens.
func (f Flags) Open() []string {
	if f.Insecure {
		return []string{"/metrics", "/status"}
	}
	return nil
}

// Config returns the TLS configuration of a server, or nil for plain HTTP.
func (f Flags) Config(log *slog.Logger) (*tls.Config, error) {
	switch {
	case f.Insecure && f.CertFile+f.KeyFile != "":
		return nil, errors.New("--insecure-http uses no certificate; omit it, or --tls-cert-file and --tls-private-key-file")
	case f.Insecure:
		return nil, nil
	case (f.CertFile == "") != (f.KeyFile == ""):
		return nil, errors.New("give both --tls-cert-file and --tls-private-key-file, or neither")
	case f.CertFile != "":
		s, err := certs.Open(certs.Files{Cert: f.CertFile, Key: f.KeyFile}, log)
		if err != nil {
			return nil, fmt.Errorf("--tls-cert-file and --tls-private-key-file must name a certificate and its key: %w", err)
		}
		return s.Server(), nil
	}
	own := &selfSigned{now: time.Now}
	if _, err := own.certificate(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: own.certificate}, nil
}

// Lifetime of a self-signed certificate, and how much of it is left when the next one replaces it.
const (
	lifetime  = 7 * 24 * time.Hour
	renewLeft = lifetime / 3
	skew      = time.Hour // how far the clock of a client may be behind
)

// selfSigned makes certificates that no client verifies. They encrypt, and let clients that insist on TLS connect.
type selfSigned struct {
	now func() time.Time

	mu   sync.Mutex
	have *tls.Certificate
}

// certificate returns the current certificate, and replaces it before it ends.
func (s *selfSigned) certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if s.have != nil && now.Add(renewLeft).Before(s.have.Leaf.NotAfter) && now.After(s.have.Leaf.NotBefore) {
		return s.have, nil
	}
	made, err := newCertificate(now)
	if err != nil {
		return nil, fmt.Errorf("make a self-signed certificate: %w", err)
	}
	s.have = made
	return made, nil
}

func newCertificate(now time.Time) (*tls.Certificate, error) {
	name, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, DNSNames: []string{name, "localhost"},
		NotBefore: now.Add(-skew), NotAfter: now.Add(lifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}
