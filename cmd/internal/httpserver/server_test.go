package httpserver

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/certs"
)

// passwordAccess gives access to requests with the password.
type passwordAccess struct{}

func (passwordAccess) Check(r *http.Request, _ *Source) *Refusal {
	if r.Header.Get("Password") == "good" {
		return nil
	}
	return &Refusal{http.StatusUnauthorized, noToken, "no"}
}

// serve starts a server on a loopback address and returns it with its address.
func serve(t *testing.T, change func(*Server)) (s *Server, at string) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	config, err := Flags{}.Config(log)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s = New(Config{Listener: l, TLS: config, Access: passwordAccess{}, Log: log})
	s.Handle("GET /metrics", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "metrics") }))
	change(s)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(t.Context()) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Errorf("Serve returns %v", err)
		}
	})
	return s, l.Addr().String()
}

// clientAt returns a client with a source address.
func clientAt(source string) *http.Client {
	c := LocalClient()
	c.Timeout = 20 * time.Second
	c.Transport.(*http.Transport).DialContext = (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}).DialContext
	return c
}

// code returns the status code of a request, or 0.
func code(t *testing.T, c *http.Client, url string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Password", "good")
	resp, err := c.Do(r)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

// Strangers who hold all connections that a source may have, and many sources that hold all connections that there are, keep no
// client with access from connecting.
func TestConnectionLimits(t *testing.T) {
	s, at := serve(t, func(s *Server) { s.timeouts.header = time.Minute })
	url := "https://" + at + "/metrics"
	trusted := clientAt("127.0.0.2")
	trusted.Transport.(*http.Transport).DisableKeepAlives = false
	if c := code(t, trusted, url); c != http.StatusOK {
		t.Fatalf("a client with access gets %d", c)
	}
	// Each of ten sources opens more than it may have.
	for source := 10; source < 20; source++ {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(source))}}
		for range DefaultLimits.PerSource + 3 {
			c, err := d.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}
	}
	for name, source := range map[string]string{"a new client with access": "127.0.0.3", "another one": "127.0.0.4"} {
		if c := code(t, clientAt(source), url); c != http.StatusOK {
			t.Errorf("%s gets %d", name, c)
		}
	}
	// The connection of the first client was not evicted, although it is the oldest.
	before := s.listener.Open()
	if c := code(t, trusted, url); c != http.StatusOK {
		t.Errorf("the first client gets %d", c)
	}
	if before > DefaultLimits.Total || s.listener.Open() > DefaultLimits.Total {
		t.Errorf("%d connections are open, more than %d", before, DefaultLimits.Total)
	}
	if n := s.listener.Refused.Count(sourceConnections); n != 30 {
		t.Errorf("%d connections were refused because of their source, want 30", n)
	}
	if n := s.listener.Refused.Count(evicted); n < 60 {
		t.Errorf("%d connections were evicted, want 64 or some less", n)
	}
}

// A source that sends more requests, or opens more connections, than its budget allows is refused; another source is not.
func TestBudgets(t *testing.T) {
	s, at := serve(t, func(s *Server) {
		now := time.Now()
		s.listener.sources.now = func() time.Time { return now } // no budget comes back
	})
	flood := clientAt("127.0.0.5")
	flood.Transport.(*http.Transport).DisableKeepAlives = false
	var refused int
	for range 210 {
		switch c := code(t, flood, "https://"+at+"/healthz"); c {
		case http.StatusOK:
		case http.StatusTooManyRequests:
			refused++
		default:
			t.Fatalf("the probe answers %d", c)
		}
	}
	if refused != 10 || s.listener.Refused.Count(requestRate) != 10 {
		t.Errorf("%d of 210 requests were refused, want 10", refused)
	}
	var opened, closed int
	for range 60 {
		if code(t, clientAt("127.0.0.6"), "https://"+at+"/healthz") == http.StatusOK {
			opened++
		} else {
			closed++
		}
	}
	if opened != 50 || closed != 10 || s.listener.Refused.Count(connectionRate) != 10 {
		t.Errorf("%d connections were served and %d closed, want 50 and 10", opened, closed)
	}
	if c := code(t, clientAt("127.0.0.7"), "https://"+at+"/healthz"); c != http.StatusOK {
		t.Errorf("another source gets %d", c)
	}
}

// A connection that sends its request too slowly is closed, and so is one that sends none.
func TestSlowClients(t *testing.T) {
	_, at := serve(t, func(s *Server) {
		s.timeouts = timeouts{header: 200 * time.Millisecond, read: 400 * time.Millisecond, write: time.Second, idle: time.Second}
	})
	for name, send := range map[string]func(net.Conn) error{
		"no TLS handshake": func(net.Conn) error { return nil },
		"half a handshake": func(c net.Conn) error { _, err := c.Write([]byte{22, 3, 1}); return err },
		"half a header": func(c net.Conn) error {
			x := tls.Client(c, &tls.Config{InsecureSkipVerify: true})
			_, err := io.WriteString(x, "GET /healthz HTTP/1.1\r\nHost: a\r\nX: ")
			return err
		},
		"half a body": func(c net.Conn) error {
			x := tls.Client(c, &tls.Config{InsecureSkipVerify: true})
			_, err := io.WriteString(x, "POST /metrics HTTP/1.1\r\nHost: a\r\nPassword: good\r\nContent-Length: 10\r\n\r\nx")
			return err
		},
	} {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = send(c) // fails if the server was faster
		if err := c.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: the connection stays open", name)
		}
	}
}

// A stream outlives the timeouts of requests, and ends with the server.
func TestStream(t *testing.T) {
	const short = 300 * time.Millisecond
	tick, gone := make(chan struct{}), make(chan struct{})
	_, at := serve(t, func(s *Server) {
		s.timeouts = timeouts{header: short, read: short, write: short, idle: time.Second}
		s.Handle("GET /stream", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer close(gone)
			extend := Stream(w)
			for {
				extend()
				fmt.Fprintln(w, "line")
				if http.NewResponseController(w).Flush() != nil {
					return
				}
				select {
				case <-tick:
				case <-r.Context().Done():
					return
				}
			}
		}))
	})
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+at+"/stream", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Password", "good")
	resp, err := LocalClient().Do(r)
	for end := time.Now().Add(20 * time.Second); err != nil && time.Now().Before(end); { // on a busy machine the handshake takes too long
		resp, err = LocalClient().Do(r)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for i := range 4 {
		if !lines.Scan() || lines.Text() != "line" {
			t.Fatalf("line %d: %q, %v", i, lines.Text(), lines.Err())
		}
		<-time.After(short + short/2)
		select {
		case tick <- struct{}{}:
		case <-gone:
			t.Fatalf("the stream ended after line %d", i)
		}
	}
}

// The self-signed certificate is replaced before it ends, and only then.
func TestRenewal(t *testing.T) {
	now := time.Now()
	s := &selfSigned{now: func() time.Time { return now }}
	serial := func() string {
		t.Helper()
		c, err := s.certificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		if now.After(c.Leaf.NotAfter) || now.Before(c.Leaf.NotBefore) {
			t.Errorf("at %s the certificate is valid from %s to %s", now, c.Leaf.NotBefore, c.Leaf.NotAfter)
		}
		return c.Leaf.SerialNumber.String()
	}
	first := serial()
	now = now.Add(4 * 24 * time.Hour)
	if serial() != first {
		t.Error("a certificate was replaced that is valid for three days more")
	}
	now = now.Add(24 * time.Hour)
	second := serial()
	if second == first {
		t.Error("a certificate was not replaced two days before its end")
	}
	now = now.Add(-30 * 24 * time.Hour)
	if serial() == second {
		t.Error("a certificate was not replaced after the clock was set back")
	}
}

// The flags take certificates of files, whose replacement is used without a restart. A bad one is refused at the start, and ignored
// later.
func TestCertificateFiles(t *testing.T) {
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	f := Flags{CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key")}
	for name, c := range map[string]struct {
		f    Flags
		says string
	}{
		"no files":            {f, "--tls-cert-file and --tls-private-key-file must name a certificate and its key"},
		"no key":              {Flags{CertFile: "a"}, "give both --tls-cert-file and --tls-private-key-file"},
		"files for plain use": {Flags{CertFile: "a", KeyFile: "b", Insecure: true}, "--insecure-http uses no certificate"},
	} {
		if _, err := c.f.Config(log); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error %v, want %q", name, err, c.says)
		}
	}
	ca, err := certs.NewAuthority("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	write := func(identity string) {
		t.Helper()
		p, err := ca.Issue(identity, time.Now(), time.Hour)
		if err := errors.Join(err, os.WriteFile(f.CertFile, p.Cert, 0o600), os.WriteFile(f.KeyFile, p.Key, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("first")
	config, err := f.Config(log)
	if err != nil {
		t.Fatal(err)
	}
	_, at := serve(t, func(s *Server) { s.cfg.TLS = config })
	offers := func(want string) {
		t.Helper()
		c, err := tls.Dial("tcp", at, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if have := c.ConnectionState().PeerCertificates[0].DNSNames[0]; have != want {
			t.Errorf("the server has the certificate of %s, want %s", have, want)
		}
	}
	offers("first")
	write("second-one")
	offers("second-one")
	if err := os.WriteFile(f.CertFile, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	offers("second-one")
	write("third")
	offers("third")
}

// Sources are IPv4 addresses and IPv6 networks of 64 bits, and their table is bounded.
func TestSources(t *testing.T) {
	now := time.Now()
	s := newSources(func() time.Time { return now })
	at := func(addr string) *Source {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.of(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(addr)))
	}
	if at("[2001:db8::1]:1") != at("[2001:db8::ffff:1]:2") || at("[2001:db8::1]:1") == at("[2001:db8:0:1::1]:1") {
		t.Error("a source of IPv6 is not a network of 64 bits")
	}
	if at("192.0.2.1:1") != at("[::ffff:192.0.2.1]:2") || at("192.0.2.1:1") == at("192.0.2.2:1") {
		t.Error("a source of IPv4 is not an address")
	}
	for i := range maxSources + 100 {
		at(fmt.Sprintf("10.0.%d.%d:1", i/256, i%256))
	}
	if len(s.by) > maxSources || at("198.51.100.1:1") != s.rest {
		t.Errorf("the table has %d sources", len(s.by))
	}
	now = now.Add(2 * forgetAfter)
	if at("198.51.100.1:1") == s.rest || len(s.by) != 1 {
		t.Errorf("idle sources are not forgotten: %d", len(s.by))
	}
}

// HTTP/2 is not spoken, not even with a client that speaks nothing else: one connection carries one request at a time.
func TestNoHTTP2(t *testing.T) {
	_, at := serve(t, func(*Server) {})
	c, err := tls.Dial("tcp", at, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err == nil {
		t.Errorf("the server speaks %q", c.ConnectionState().NegotiatedProtocol)
		c.Close()
	}
	if c := code(t, clientAt("127.0.0.1"), "https://"+at+"/healthz"); c != http.StatusOK {
		t.Errorf("HTTP/1.1 gets %d", c)
	}
}
