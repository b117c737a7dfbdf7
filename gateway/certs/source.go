package certs

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Files are the PEM files of a program: its certificate and key, and the certificates of trusted authorities. Without CA, the
// program trusts no client certificate.
type Files struct {
	Cert, Key, CA string
	// Renewed has a certificate and its key that Accept wrote. They are used instead of Cert and Key while they are the newer ones.
	// Empty: there is none.
	Renewed string
}

// Source provides the certificates of Files. Replaced files take effect with the next connection or request. If they
// cannot be read, the previous certificates stay in use. Any goroutine may use it.
type Source struct {
	files Files
	log   *slog.Logger

	mu     sync.Mutex // guards what follows
	stamps [4]fileStamp
	have   material
	// requested is the key of the last request that no certificate has answered.
	requested *ecdsa.PrivateKey
}

// fileStamp detects a changed file.
type fileStamp struct {
	modified time.Time
	size     int64
}

// material is the content of the files.
type material struct {
	own         tls.Certificate
	authorities *x509.CertPool
	until       time.Time // the end of the last authority
}

// Open reads the files, which must be valid.
func Open(files Files, log *slog.Logger) (*Source, error) {
	s := &Source{files: files, log: log}
	var err error
	if s.stamps, err = s.stat(); err == nil {
		s.have, err = s.read()
	}
	if err != nil {
		return nil, fmt.Errorf("read certificates: %w", err)
	}
	return s, nil
}

// read reads the files. A renewed certificate that cannot be used is left out.
func (s *Source) read() (material, error) {
	have, err := read(s.files)
	if err == nil && s.files.Renewed != "" {
		if err := have.useRenewed(s.files.Renewed, time.Now()); err != nil {
			s.log.Warn("the renewed certificate cannot be used; the program's files are", "err", err)
		}
	}
	return have, err
}

func read(f Files) (material, error) {
	own, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return material{}, fmt.Errorf("%s, %s: %w", f.Cert, f.Key, err)
	}
	if f.CA == "" {
		return material{own: own}, nil
	}
	ca, err := os.ReadFile(f.CA)
	if err != nil {
		return material{}, err
	}
	have := material{own: own, authorities: x509.NewCertPool()}
	for block, rest := pem.Decode(ca); block != nil; block, rest = pem.Decode(rest) {
		authority, err := x509.ParseCertificate(block.Bytes)
		if block.Type != certificateType || err != nil {
			continue // as AppendCertsFromPEM does
		}
		have.authorities.AddCert(authority)
		if authority.NotAfter.After(have.until) {
			have.until = authority.NotAfter
		}
	}
	if have.until.IsZero() {
		return material{}, fmt.Errorf("%s: no certificate in PEM", f.CA)
	}
	return have, nil
}

// Metrics returns gauges of the time at which the own certificate and the last trusted authority end.
func (s *Source) Metrics() []prometheus.Collector {
	gauge := func(certificate string, end func(material) time.Time) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name:        "isthmus_gateway_certificate_expiry_timestamp_seconds",
			Help:        "Time at which the program's certificate, or the last authority that it trusts, is no longer valid.",
			ConstLabels: prometheus.Labels{"certificate": certificate},
		}, func() float64 { return float64(end(s.current()).Unix()) })
	}
	return []prometheus.Collector{
		gauge("own", func(m material) time.Time { return m.own.Leaf.NotAfter }),
		gauge("authority", func(m material) time.Time { return m.until }),
	}
}

func (s *Source) stat() (stamps [4]fileStamp, err error) {
	for i, name := range []string{s.files.Cert, s.files.Key, s.files.CA, s.files.Renewed} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if name == s.files.Renewed && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return stamps, err
		}
		stamps[i] = fileStamp{info.ModTime(), info.Size()}
	}
	return stamps, nil
}

// current returns the content of the files, or the last valid content.
func (s *Source) current() material {
	s.mu.Lock()
	defer s.mu.Unlock()
	stamps, err := s.stat()
	if err == nil && stamps == s.stamps {
		return s.have
	}
	if err == nil {
		// A new certificate may not have its key yet. The files are read again when the next one changes.
		s.stamps = stamps
		var have material
		if have, err = s.read(); err == nil {
			s.have = have
			s.log.Info("certificates read again", "file", s.files.Cert)
		}
	}
	if err != nil {
		s.log.Warn("certificates cannot be read; the previous ones stay in use", "err", err)
	}
	return s.have
}

// Server returns the configuration of a listener that accepts only clients with a certificate of the authorities. Without
// authorities it accepts all clients.
func (s *Source) Server() *tls.Config { return s.server(tls.RequireAndVerifyClientCert) }

// OpenServer returns the configuration of a listener that accepts clients without a certificate too. A certificate must be of
// the authorities.
func (s *Source) OpenServer() *tls.Config { return s.server(tls.VerifyClientCertIfGiven) }

func (s *Source) server(auth tls.ClientAuthType) *tls.Config {
	if s.files.CA == "" {
		auth = tls.NoClientCert
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			m := s.current()
			return &tls.Config{
				MinVersion:   tls.VersionTLS13,
				Certificates: []tls.Certificate{m.own},
				ClientAuth:   auth,
				ClientCAs:    m.authorities,
				// A resumed session would skip verification against changed authorities.
				SessionTicketsDisabled: true,
				NextProtos:             []string{"http/1.1"},
			}, nil
		},
	}
}

// Client returns the configuration for connecting to the server with an identity, at any address.
func (s *Source) Client(server string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: server,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			m := s.current()
			return &m.own, nil
		},
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies it against the current authorities
		VerifyConnection:   func(c tls.ConnectionState) error { return s.Verify(&c, server) },
	}
}

// Verify checks that the other end of a connection has a currently valid certificate of an identity. The connection may
// be older than the current authorities.
func (s *Source) Verify(c *tls.ConnectionState, identity string) error {
	if err := s.VerifyAny(c); err != nil {
		return err
	}
	if cert := c.PeerCertificates[0]; !slices.Contains(cert.DNSNames, identity) {
		return fmt.Errorf("the certificate is for %q, and must be for %q", cert.DNSNames, identity)
	}
	return nil
}

// VerifyAny is Verify for every identity.
func (s *Source) VerifyAny(c *tls.ConnectionState) error {
	if c == nil || len(c.PeerCertificates) == 0 {
		return errors.New("there is no certificate")
	}
	chain := x509.NewCertPool() // of a certificate that an intermediate authority signed, as cert-manager's issuers may do
	for _, intermediate := range c.PeerCertificates[1:] {
		chain.AddCert(intermediate)
	}
	_, err := c.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots: s.current().authorities, Intermediates: chain, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	return err
}
