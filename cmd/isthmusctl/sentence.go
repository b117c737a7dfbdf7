package main

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/transport"
)

// noAnswer is the failure of a request to a server. Its text is a whole sentence with the remedy, and replaces the errors
// that wrap it.
type noAnswer struct {
	text    string
	reached bool // a server answered, but with another identity or a refusal
}

func (e *noAnswer) Error() string { return e.text }

// denied is a server's refusal for missing rights. Its text is a whole sentence with the remedy, and replaces the errors
// that wrap it.
type denied struct {
	status metav1.Status
	from   origin
}

// Error names the refused verb and resource, and the credentials.
func (e *denied) Error() string {
	return fmt.Sprintf("%s; the credentials of %s do not suffice, %s", e.status.Message, e.from.credentials, e.from.fix)
}

// Status is part of apierrors.APIStatus.
func (e *denied) Status() metav1.Status { return e.status }

// origin describes, for messages, the sources of a server's address and credentials, and the remedy for wrong credentials.
type origin struct{ address, credentials, fix string }

// named bounds each request including its response, and makes errors name the server, the source of its address, and the
// remedy. http.Client's own timeout would hide the cause.
func named(server string, from origin, timeout time.Duration) transport.WrapperFunc {
	explain := func(req *http.Request, err error) error {
		if errors.Is(req.Context().Err(), context.Canceled) {
			return err // the caller gave up; the server may be fine
		}
		text, reached := why(err, timeout)
		return &noAnswer{fmt.Sprintf("API server %s of %s %s", server, from.address, text), reached}
	}
	return func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			ctx, cancel := context.WithTimeout(req.Context(), timeout)
			resp, err := next.RoundTrip(req.WithContext(ctx))
			if err != nil {
				cancel()
				return nil, explain(req, err)
			}
			resp.Body = &body{ReadCloser: resp.Body, cancel: cancel, explain: func(err error) error { return explain(req, err) }}
			switch {
			case resp.StatusCode == http.StatusUnauthorized:
				resp.Body.Close()
				return nil, &noAnswer{fmt.Sprintf("API server %s does not accept the credentials of %s; they are wrong, revoked or expired; get new ones", server, from.credentials), true}
			case resp.StatusCode == http.StatusForbidden:
				if err := refusal(resp, from); err != nil {
					return nil, err
				}
			case tooLate(ctx, resp):
				resp.Body.Close()
				return nil, &noAnswer{fmt.Sprintf("API server %s of %s is not ready; it is starting or overloaded, try again soon", server, from.address), false}
			}
			return resp, nil
		})
	}
}

// refusal returns the error of a response about missing rights. For another refusal it returns nil and restores the
// response.
func refusal(resp *http.Response, from origin) error {
	const enough = 64 << 10
	text, err := io.ReadAll(io.LimitReader(resp.Body, enough))
	if err != nil {
		return err
	}
	e := &denied{from: from}
	if json.Unmarshal(text, &e.status) == nil && e.status.Kind == "Status" && strings.Contains(e.status.Message, " cannot ") {
		resp.Body.Close()
		return e
	}
	resp.Body = &replayed{Reader: io.MultiReader(bytes.NewReader(text), resp.Body), Closer: resp.Body}
	return nil
}

// replayed is a body whose beginning was read and is prepended again.
type replayed struct {
	io.Reader
	io.Closer
}

// tooLate reports whether a starting or overloaded server asks the client to retry after the deadline of ctx, the request's. Before it
// the client retries by itself.
func tooLate(ctx context.Context, resp *http.Response) bool {
	if resp.StatusCode != http.StatusServiceUnavailable && resp.StatusCode != http.StatusTooManyRequests {
		return false
	}
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	end, limited := ctx.Deadline()
	return err == nil && limited && time.Now().Add(time.Duration(seconds)*time.Second).After(end)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// body is the body of a response, which shares the deadline of its request.
type body struct {
	io.ReadCloser
	cancel  context.CancelFunc
	explain func(error) error
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF { //nolint:errorlint // a Reader returns io.EOF as it is
		err = b.explain(err)
	}
	return n, err
}

func (b *body) Close() error {
	defer b.cancel()
	return b.ReadCloser.Close()
}

// why completes the sentence that begins with the server's name. reached means that a server with another identity
// answered.
func why(err error, timeout time.Duration) (text string, reached bool) {
	var dns *net.DNSError
	var authority x509.UnknownAuthorityError
	var host x509.HostnameError
	var expired x509.CertificateInvalidError
	switch {
	case errors.As(err, &dns):
		return fmt.Sprintf("cannot be found: no such host %s; correct the address", dns.Name), false
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refuses connections; start it, or correct the address", false
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH):
		return "cannot be reached from here: no route; correct the address or the network", false
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), isTimeout(err):
		return fmt.Sprintf("did not answer within %s; check the address and the firewalls between, or raise --timeout", timeout), false
	case errors.As(err, &authority), errors.As(err, &host), errors.As(err, &expired):
		return fmt.Sprintf("has a certificate that is not trusted (%v); correct the address or the certificate authority", rootOf(err)), true
	default:
		return fmt.Sprintf("cannot be reached: %v", rootOf(err)), false
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

// sentence turns an error of any command into one sentence for the operator: the fault and, where possible, the remedy.
func sentence(err error) string {
	var unanswered *noAnswer
	var refused *denied
	switch {
	case errors.As(err, &unanswered):
		return unanswered.text
	case errors.As(err, &refused):
		return refused.Error()
	case apierrors.IsForbidden(err):
		return err.Error() + "; use the credentials of an administrator"
	case meta.IsNoMatchError(err):
		return err.Error() + "; the cluster has not joined, see isthmusctl join --help"
	case errors.Is(err, context.Canceled):
		return "interrupted"
	}
	return strings.TrimSpace(err.Error())
}
