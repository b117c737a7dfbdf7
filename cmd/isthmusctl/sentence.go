package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/transport"
)

// noAnswer is why a server could not be asked. Its text is a whole sentence with the fix, however deep
// it lies in other errors.
type noAnswer struct{ text string }

func (e *noAnswer) Error() string { return e.text }

// named makes failures of requests tell which server failed, where its address came from, and what to do.
func named(server, source string, timeout time.Duration) transport.WrapperFunc {
	return func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			resp, err := next.RoundTrip(req)
			if err != nil {
				return nil, &noAnswer{fmt.Sprintf("API server %s of %s %s", server, source, why(err, timeout))}
			}
			if resp.StatusCode == http.StatusUnauthorized {
				resp.Body.Close()
				return nil, &noAnswer{fmt.Sprintf("API server %s does not accept the credentials of %s; they are wrong, revoked or expired, get new ones", server, source)}
			}
			return resp, nil
		})
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// why completes the sentence that begins with the server's name.
func why(err error, timeout time.Duration) string {
	var dns *net.DNSError
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var expired x509.CertificateInvalidError
	switch {
	case errors.As(err, &dns):
		return fmt.Sprintf("cannot be found: no such host %s; correct the address", dns.Name)
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refuses connections; start it, or correct the address"
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH):
		return "cannot be reached from here: no route; correct the address or the network"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), isTimeout(err):
		return fmt.Sprintf("did not answer within %s; check the address and the firewalls between, or raise --timeout", timeout)
	case errors.As(err, &authority), errors.As(err, &host), errors.As(err, &expired):
		return fmt.Sprintf("shows a certificate that is not trusted (%v); correct the address or the certificate authority", rootOf(err))
	default:
		return fmt.Sprintf("cannot be asked: %v", rootOf(err))
	}
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.As(err, &n) && n.Timeout()
}

// rootOf returns the innermost error of a simple chain.
func rootOf(err error) error {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err
		}
		err = inner
	}
}

// sentence turns an error of any command into what the operator reads: one thing that is wrong, and
// where possible what to do.
func sentence(err error) string {
	var unanswered *noAnswer
	switch {
	case errors.As(err, &unanswered):
		return unanswered.text
	case apierrors.IsForbidden(err):
		return err.Error() + "; use the credentials of an administrator"
	case meta.IsNoMatchError(err):
		return err.Error() + "; the cluster has not joined, see isthmusctl join --help"
	case errors.Is(err, context.Canceled):
		return "interrupted"
	}
	return strings.TrimSpace(err.Error())
}
