package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/tools/netlab/connect"
)

const defaultTimeout = 5 * time.Second

// Client makes new connections, one request each, unless it keeps them.
type Client struct {
	Connections   int
	Minimum       int // connections that are made even when the duration is over or the run is interrupted
	Duration      time.Duration
	Concurrency   int
	Rate          float64 // connections a second at most; 0: as fast as they go
	Timeout       time.Duration
	URL, TCP, UDP string // exactly one of these and Lookup is set
	Lookup        string // a name whose addresses are the answer, each time asked anew, of both families at once
	Keep          bool   // each worker keeps its UDP socket until that fails

	// Hold makes all requests go over one connection; once it is lost they fail. For URL, one at a time.
	Hold bool
	// First is called with the first backend that answers; it may be nil.
	First func(backend string)
	// Multipath asks for Multipath TCP; a connection that becomes one of plain TCP is a failure.
	Multipath bool
	// Mapped connects to IPv4 addresses by sockets of IPv6.
	Mapped bool

	held *heldConn // nil unless Hold
}

// Report is the outcome of a run.
type Report struct {
	Connections int            `json:"connections"` // attempted
	Failures    int            `json:"failures"`
	Errors      map[string]int `json:"errors"`   // failures by reason
	Backends    map[string]int `json:"backends"` // answers by "cluster/pod"
	Peers       map[string]int `json:"peers"`    // connections by what getpeername(2) said
	// LastAnswer is when each backend answered last; FirstFailure and LastFailure are when the first and the last of the
	// connections that failed began. Failed are the first of them.
	LastAnswer   map[string]time.Time `json:"lastAnswer"`
	FirstFailure time.Time            `json:"firstFailure,omitzero"`
	LastFailure  time.Time            `json:"lastFailure,omitzero"`
	Failed       []Failure            `json:"failed,omitempty"`
	Seconds      float64              `json:"seconds"`
	P50Ms        float64              `json:"p50Ms"` // of successful connections, from the name to the answer
	P99Ms        float64              `json:"p99Ms"`
}

// maxFailed is how many failures a Report tells one by one.
const maxFailed = 50

// Failure is one connection that failed.
type Failure struct {
	Began  time.Time `json:"began"`
	TookMs float64   `json:"tookMs"`
	Error  string    `json:"error"` // with the addresses, as far as the connection got
}

// Validate joins all faults of the configuration.
func (c *Client) Validate() error {
	var errs []error
	targets := 0
	for _, t := range []string{c.URL, c.TCP, c.UDP, c.Lookup} {
		if t != "" {
			targets++
		}
	}
	if targets != 1 {
		errs = append(errs, errors.New("give exactly one of --url, --tcp, --udp and --lookup"))
	}
	if u, err := url.Parse(c.URL); c.URL != "" && (err != nil || u.Scheme != "http" || u.Host == "") {
		errs = append(errs, fmt.Errorf("%q is not an http URL", c.URL))
	}
	if c.Keep && c.UDP == "" {
		errs = append(errs, errors.New("--keep is for --udp"))
	}
	if c.Connections <= 0 && c.Duration <= 0 {
		errs = append(errs, errors.New("give --connections or --duration: a run must end"))
	}
	if c.Minimum < 0 || c.Connections > 0 && c.Minimum > c.Connections {
		errs = append(errs, errors.New("--minimum is from 0 to --connections"))
	}
	if c.Concurrency < 1 {
		errs = append(errs, errors.New("--concurrency is at least 1"))
	}
	if c.Rate < 0 {
		errs = append(errs, errors.New("--rate is connections a second, or 0 for as fast as they go"))
	}
	if c.Timeout <= 0 {
		errs = append(errs, errors.New("--timeout is more than 0"))
	}
	if c.Hold && (c.URL == "" || c.Concurrency > 1) {
		errs = append(errs, errors.New("--hold is for --url, with --concurrency 1"))
	}
	if c.Multipath && (c.UDP != "" || c.Mapped) {
		errs = append(errs, errors.New("--multipath is for --url and --tcp, without --mapped"))
	}
	return errors.Join(errs...)
}

// Run makes the connections. It returns when all are done, or after the duration or the end of ctx, once Minimum are done.
// Connections that are under way then are finished.
func (c *Client) Run(ctx context.Context) Report {
	if c.Duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.Duration)
		defer cancel()
	}
	if c.Hold {
		c.held = &heldConn{dial: c.dial}
		defer c.held.close()
	}
	r := newRun(c)
	pace, stop := c.pacer()
	defer stop()
	var workers sync.WaitGroup
	began := time.Now()
	for range c.Concurrency {
		workers.Go(func() { r.work(ctx, pace) })
	}
	workers.Wait()
	return r.result(time.Since(began))
}

// pacer returns a function that waits until the next connection may begin.
func (c *Client) pacer() (pace func(ctx context.Context), stop func()) {
	if c.Rate <= 0 {
		return func(context.Context) {}, func() {}
	}
	ticker := time.NewTicker(time.Duration(float64(time.Second) / c.Rate))
	return func(ctx context.Context) {
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}, ticker.Stop
}

// run is one run of a client.
type run struct {
	client  *Client
	started atomic.Int64 // connections

	mu     sync.Mutex // guards what follows
	report Report
	took   []time.Duration // by the connections that succeeded
}

func newRun(c *Client) *run {
	return &run{client: c, report: Report{
		Errors: map[string]int{}, Backends: map[string]int{}, Peers: map[string]int{}, LastAnswer: map[string]time.Time{},
	}}
}

// work makes one connection after the other.
func (r *run) work(ctx context.Context, pace func(context.Context)) {
	var kept net.Conn
	defer func() {
		if kept != nil {
			_ = kept.Close()
		}
	}()
	lasting := context.WithoutCancel(ctx)
	for r.next(ctx) {
		if ctx.Err() != nil {
			pace(lasting) // the minimum keeps the rate
		} else {
			pace(ctx)
		}
		start := time.Now()
		answer, peer, err := r.client.once(lasting, &kept)
		r.note(start, answer, peer, err)
	}
}

// next reports whether another connection is to be made.
func (r *run) next(ctx context.Context) bool {
	if ctx.Err() != nil && r.started.Load() >= int64(r.client.Minimum) {
		return false
	}
	n := r.started.Add(1)
	return r.client.Connections == 0 || n <= int64(r.client.Connections)
}

// note adds the outcome of one connection to the report.
func (r *run) note(start time.Time, answer string, peer netip.AddrPort, err error) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Connections++
	if peer.IsValid() {
		r.report.Peers[peer.String()]++
	}
	if err != nil {
		r.report.Failures++
		r.report.Errors[reason(err)]++
		if len(r.report.Failed) < maxFailed {
			r.report.Failed = append(r.report.Failed, Failure{Began: start, TookMs: float64(now.Sub(start).Microseconds()) / 1000, Error: err.Error()})
		}
		if r.report.FirstFailure.IsZero() || start.Before(r.report.FirstFailure) {
			r.report.FirstFailure = start
		}
		if start.After(r.report.LastFailure) {
			r.report.LastFailure = start
		}
		return
	}
	from := backend(answer)
	if len(r.report.Backends) == 0 && r.client.First != nil {
		r.client.First(from)
	}
	r.report.Backends[from]++
	r.report.LastAnswer[from] = now
	r.took = append(r.took, now.Sub(start))
}

// result completes the report. All workers must have ended.
func (r *run) result(elapsed time.Duration) Report {
	slices.Sort(r.took)
	r.report.Seconds = elapsed.Seconds()
	r.report.P50Ms, r.report.P99Ms = percentile(r.took, 0.50), percentile(r.took, 0.99)
	return r.report
}

// once makes one connection, or uses the kept one, and returns the line that came back and the peer's address.
func (c *Client) once(ctx context.Context, kept *net.Conn) (answer string, peer netip.AddrPort, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	switch {
	case c.Lookup != "":
		answer, err = lookup(ctx, c.Lookup)
		return answer, peer, err
	case c.held != nil:
		answer, err = c.held.get(ctx, c.URL)
		return answer, peer, err
	case c.URL != "":
		return c.get(ctx)
	}
	conn := *kept
	*kept = nil
	if conn == nil {
		network, address := "tcp", c.TCP
		if c.UDP != "" {
			network, address = "udp", c.UDP
		}
		if conn, err = c.dial(ctx, network, address); err != nil {
			return "", peer, err
		}
	}
	deadline, _ := ctx.Deadline()
	answer, peer, err = c.exchange(conn, deadline)
	if c.Keep && err == nil {
		*kept = conn
	} else {
		_ = conn.Close() // what there is to say is said
	}
	return answer, peer, err
}

// lookup asks the name server of the resolver's configuration, and returns the addresses as one word.
func lookup(ctx context.Context, name string) (string, error) {
	addrs, err := (&net.Resolver{PreferGo: true}).LookupNetIP(ctx, "ip", name)
	texts := make([]string, len(addrs))
	for i, a := range addrs {
		texts[i] = a.Unmap().String()
	}
	slices.Sort(texts)
	return strings.Join(texts, ","), err
}

// exchange asks, if it must, and reads a line.
func (c *Client) exchange(conn net.Conn, deadline time.Time) (answer string, peer netip.AddrPort, err error) {
	if peer, err = getpeername(conn); err != nil {
		return "", peer, err
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return "", peer, err
	}
	if c.UDP != "" {
		if _, err := io.WriteString(conn, "?\n"); err != nil {
			return "", peer, err
		}
	}
	answer, err = bufio.NewReader(conn).ReadString('\n')
	return answer, peer, err
}

func (c *Client) get(ctx context.Context) (answer string, peer netip.AddrPort, err error) {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := c.dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			peer, err = getpeername(conn)
			return conn, err
		},
	}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL, nil)
	if err != nil {
		return "", peer, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return "", peer, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", peer, fmt.Errorf("status %d", resp.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	return string(body), peer, err
}

// errLost is the error of requests over a lost connection.
var errLost = errors.New("the connection was lost")

// heldConn sends requests over one connection. An http.Transport would make another one when it thinks fit.
type heldConn struct {
	dial    func(ctx context.Context, network, address string) (net.Conn, error)
	conn    net.Conn // nil before the first request
	answers *bufio.Reader
	lost    bool
}

// get returns what a URL with a port, or of port 80, answers. ctx has a deadline.
func (h *heldConn) get(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	if h.lost {
		return "", errLost
	}
	text, err := h.exchange(req)
	if err != nil {
		h.lost = true
		h.close()
	}
	return text, err
}

func (h *heldConn) exchange(req *http.Request) (string, error) {
	if h.conn == nil {
		address := req.URL.Host
		if req.URL.Port() == "" {
			address = net.JoinHostPort(req.URL.Hostname(), "80")
		}
		var err error
		if h.conn, err = h.dial(req.Context(), "tcp", address); err != nil {
			return "", err
		}
		h.answers = bufio.NewReader(h.conn)
	}
	deadline, _ := req.Context().Deadline()
	if err := h.conn.SetDeadline(deadline); err != nil {
		return "", err
	}
	if err := req.Write(h.conn); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(h.answers, req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	h.lost = resp.Close
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

func (h *heldConn) close() {
	if h.conn != nil {
		_ = h.conn.Close() // what there is to say is said
	}
}

// dial connects with the kind of socket that c asks for.
func (c *Client) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if c.Mapped {
		return dialMapped(ctx, network, address)
	}
	var d net.Dialer
	if c.Multipath {
		d.SetMultipathTCP(true)
	}
	conn, err := d.DialContext(ctx, network, address)
	if err != nil || !c.Multipath {
		return conn, err
	}
	multipath, err := conn.(*net.TCPConn).MultipathTCP()
	if err == nil && !multipath {
		err = errors.New("plain TCP instead of Multipath TCP")
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

// dialMapped connects a socket of IPv6 to an IPv4 address, which package net never does.
func dialMapped(ctx context.Context, network, address string) (net.Conn, error) {
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	kind := unix.SOCK_STREAM
	if network == "udp" {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), address)
	defer f.Close()
	patience := defaultTimeout
	if deadline, ok := ctx.Deadline(); ok {
		patience = max(time.Until(deadline), time.Millisecond)
	}
	timeout := unix.NsecToTimeval(patience.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil { // bounds a connect, too
		return nil, os.NewSyscallError("setsockopt", err)
	}
	if err := connect.Socket(fd, &unix.SockaddrInet6{Addr: ap.Addr().As16(), Port: int(ap.Port())}, patience); err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	return net.FileConn(f)
}

// getpeername asks the kernel, where socket hooks may answer, and not what was dialled.
func getpeername(conn net.Conn) (netip.AddrPort, error) {
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var sa unix.Sockaddr
	if ctlErr := raw.Control(func(fd uintptr) { sa, err = unix.Getpeername(int(fd)) }); ctlErr != nil {
		return netip.AddrPort{}, ctlErr
	}
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("getpeername: %w", err)
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port)), nil
	}
	return netip.AddrPort{}, fmt.Errorf("getpeername: unexpected %T", sa)
}

// backend names the server of an answer: "cluster/pod" from an echo server's line, otherwise the start of the text.
func backend(answer string) string {
	fields := map[string]string{}
	for f := range strings.FieldsSeq(answer) {
		if k, v, ok := strings.Cut(f, "="); ok {
			fields[k] = v
		}
	}
	if fields["pod"] != "" {
		return fields["cluster"] + "/" + fields["pod"]
	}
	text := strings.TrimSpace(answer)
	return text[:min(len(text), 80)]
}

// reason groups errors that differ in addresses and ports only.
func reason(err error) string {
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		return "lookup: " + dns.Err
	}
	if number, ok := errors.AsType[syscall.Errno](err); ok {
		return number.Error()
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return "timeout"
	}
	return err.Error()
}

// percentile is in milliseconds; sorted may be empty.
func percentile(sorted []time.Duration, p float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := min(int(p*float64(len(sorted))), len(sorted)-1)
	return float64(sorted[at].Microseconds()) / 1000
}
