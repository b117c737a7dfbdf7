package httpserver

import (
	"crypto/tls"
	"net/http"
	"net/netip"
	"slices"
)

// IsLocal reports whether a request comes from a process of this machine, over a loopback address.
func IsLocal(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && from.Addr().Unmap().IsLoopback()
}

// Local gives access to processes of this machine.
type Local struct{}

// Check implements Access.
func (Local) Check(r *http.Request, _ *Source) *Refusal {
	if IsLocal(r) {
		return nil
	}
	return &Refusal{http.StatusForbidden, notLocal, "only processes of this machine have access, over a loopback address"}
}

// Certificates gives access to processes of this machine, and to clients whose certificate the function accepts.
type Certificates func(*tls.ConnectionState) error

// Check implements Access.
func (verify Certificates) Check(r *http.Request, _ *Source) *Refusal {
	if IsLocal(r) {
		return nil
	}
	if err := verify(r.TLS); err != nil {
		return &Refusal{http.StatusForbidden, noCertificate, "only processes of this machine and clients with a certificate of its authority have access: " + err.Error()}
	}
	return nil
}

// LocalPaths gives processes of this machine access to some paths, and leaves other requests to Access.
type LocalPaths struct {
	Paths []string
	Access
}

// Check implements Access.
func (l LocalPaths) Check(r *http.Request, from *Source) *Refusal {
	if IsLocal(r) && slices.Contains(l.Paths, r.URL.Path) {
		return nil
	}
	return l.Access.Check(r, from)
}

// LocalClient returns a client for a server on this machine, whose certificate it does not verify.
func LocalClient() *http.Client {
	unverified := &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true} //nolint:gosec // the server is self-signed, and on this machine
	return &http.Client{Transport: &http.Transport{TLSClientConfig: unverified, DisableKeepAlives: true}}
}
