package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

// Files are where a program's own certificate and key stand, and the certificates of the authorities that it believes,
// all PEM.
type Files struct{ Cert, Key, CA string }

// Source has the certificates of Files as they are now: who replaces the files replaces what is used, from the next
// connection or request on. Files that cannot be read leave what was read before. Any goroutine may use it.
type Source struct {
	files Files
	log   *slog.Logger

	mu     sync.Mutex // guards what follows
	stamps [3]fileStamp
	have   material
}

// stamp tells whether a file is another one than before.
type fileStamp struct {
	modified time.Time
	size     int64
}

// material is what was read.
type material struct {
	own         tls.Certificate
	authorities *x509.CertPool
}

// Open reads the files, which must be good.
func Open(files Files, log *slog.Logger) (*Source, error) {
	s := &Source{files: files, log: log}
	var err error
	if s.stamps, err = s.stat(); err == nil {
		s.have, err = read(files)
	}
	if err != nil {
		return nil, fmt.Errorf("read certificates: %w", err)
	}
	return s, nil
}

func read(f Files) (material, error) {
	own, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return material{}, fmt.Errorf("%s, %s: %w", f.Cert, f.Key, err)
	}
	ca, err := os.ReadFile(f.CA)
	if err != nil {
		return material{}, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return material{}, fmt.Errorf("%s: no certificate in PEM", f.CA)
	}
	return material{own, pool}, nil
}

func (s *Source) stat() (stamps [3]fileStamp, err error) {
	for i, name := range []string{s.files.Cert, s.files.Key, s.files.CA} {
		info, err := os.Stat(name)
		if err != nil {
			return stamps, err
		}
		stamps[i] = fileStamp{info.ModTime(), info.Size()}
	}
	return stamps, nil
}

// current returns what the files say, or said when they could be read last.
func (s *Source) current() material {
	s.mu.Lock()
	defer s.mu.Unlock()
	stamps, err := s.stat()
	if err == nil && stamps == s.stamps {
		return s.have
	}
	if err == nil {
		// A certificate without its key yet is no news: it is looked at again when the next file changes.
		s.stamps = stamps
		var have material
		if have, err = read(s.files); err == nil {
			s.have = have
			s.log.Info("certificates read anew", "file", s.files.Cert)
		}
	}
	if err != nil {
		s.log.Warn("certificates are used as they were", "err", err)
	}
	return s.have
}

// Server returns the configuration of a listener: only clients with a certificate of the authorities get in.
func (s *Source) Server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			m := s.current()
			return &tls.Config{
				MinVersion:   tls.VersionTLS13,
				Certificates: []tls.Certificate{m.own},
				ClientAuth:   tls.RequireAndVerifyClientCert,
				ClientCAs:    m.authorities,
				// A session that goes on would not be checked against authorities that changed.
				SessionTicketsDisabled: true,
				NextProtos:             []string{"http/1.1"},
			}, nil
		},
	}
}

// Client returns the configuration to connect to the server with an identity, wherever it is.
func (s *Source) Client(server string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: server,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			m := s.current()
			return &m.own, nil
		},
		InsecureSkipVerify: true, // VerifyConnection does, against the authorities of this moment
		VerifyConnection:   func(c tls.ConnectionState) error { return s.Verify(&c, server) },
	}
}

// Verify returns nil when the other end of a connection has an identity, by a certificate that is valid now: a connection
// may be older than what is believed.
func (s *Source) Verify(c *tls.ConnectionState, identity string) error {
	if c == nil || len(c.PeerCertificates) == 0 {
		return errors.New("there is no certificate")
	}
	cert := c.PeerCertificates[0]
	_, err := cert.Verify(x509.VerifyOptions{Roots: s.current().authorities, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	if err != nil {
		return err
	}
	if !slices.Contains(cert.DNSNames, identity) {
		return fmt.Errorf("the certificate is of %q, and must be of %q", cert.DNSNames, identity)
	}
	return nil
}
