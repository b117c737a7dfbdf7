package main

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// freePort finds a port without a listener. Another program may take it meanwhile.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func TestClientCountsWhoAnswers(t *testing.T) {
	s := Server{
		Identity: Identity{Cluster: "a", Node: "a1", Pod: "hello-1"},
		HTTP:     freePort(t), TCP: freePort(t), UDP: freePort(t),
		Log: slog.New(slog.DiscardHandler),
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("server: %v", err)
		}
	}()
	for name, tc := range map[string]struct {
		client Client
		peer   string
	}{
		"http": {Client{URL: "http://" + s.HTTP}, s.HTTP},
		"tcp":  {Client{TCP: s.TCP}, s.TCP},
		"udp":  {Client{UDP: s.UDP}, s.UDP},
		"kept": {Client{UDP: s.UDP, Keep: true}, s.UDP},

		"multipath":       {Client{TCP: s.TCP, Multipath: true}, s.TCP},
		"multipath, http": {Client{URL: "http://" + s.HTTP, Multipath: true}, s.HTTP},
		"mapped":          {Client{TCP: s.TCP, Mapped: true}, s.TCP},
		"mapped, udp":     {Client{UDP: s.UDP, Mapped: true}, s.UDP},
	} {
		t.Run(name, func(t *testing.T) {
			c := tc.client
			c.Connections, c.Concurrency, c.Timeout = 20, 3, time.Second
			awaitServer(t, c)
			r := c.Run(t.Context())
			if r.Connections != 20 || r.Failures != 0 {
				t.Errorf("have %d connections, %d failures %v, want 20 and 0", r.Connections, r.Failures, r.Errors)
			}
			if diff := cmp.Diff(map[string]int{"a/hello-1": 20}, r.Backends); diff != "" {
				t.Errorf("backends (-want +have):\n%s", diff)
			}
			if at := r.LastAnswer["a/hello-1"]; time.Since(at) > time.Minute || !r.LastFailure.IsZero() {
				t.Errorf("last answer %s, last failure %s", at, r.LastFailure)
			}
			if diff := cmp.Diff(map[string]int{tc.peer: 20}, r.Peers); diff != "" {
				t.Errorf("peers (-want +have):\n%s", diff)
			}
		})
	}
}

// All requests go over one connection, and those after its end fail.
func TestClientHoldsItsConnection(t *testing.T) {
	for name, tc := range map[string]struct {
		ends int64 // the connection ends with this request
		lost int
	}{"stays": {0, 0}, "ends": {8, 12}} {
		t.Run(name, func(t *testing.T) {
			var asked, connections atomic.Int64
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if asked.Add(1) == tc.ends {
					w.Header().Set("Connection", "close")
				}
				_, _ = io.WriteString(w, "cluster=a pod=p\n")
			}))
			s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
				if state == http.StateNew {
					connections.Add(1)
				}
			}
			s.Start()
			defer s.Close()
			var first []string
			c := Client{
				URL: s.URL, Connections: 20, Concurrency: 1, Timeout: time.Second,
				Hold: true, First: func(backend string) { first = append(first, backend) },
			}
			r := c.Run(t.Context())
			if diff := cmp.Diff([]string{"a/p"}, first); diff != "" {
				t.Errorf("told of the first answer (-want +have):\n%s", diff)
			}
			if n := connections.Load(); n != 1 || r.Failures != tc.lost || r.Errors[errLost.Error()] != tc.lost {
				t.Errorf("%d connections, %d failures %v, want 1 connection and %d failures", n, r.Failures, r.Errors, tc.lost)
			}
		})
	}
}

func awaitServer(t *testing.T, c Client) {
	t.Helper()
	c.Connections, c.Concurrency = 1, 1
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); c.Run(t.Context()).Failures > 0; <-tick.C {
		if time.Now().After(deadline) {
			t.Fatal("the server does not answer")
		}
	}
}

func TestClientCountsFailures(t *testing.T) {
	c := Client{TCP: freePort(t), Connections: 3, Concurrency: 1, Timeout: time.Second}
	r := c.Run(t.Context())
	if r.Connections != 3 || r.Failures != 3 || r.Errors["connection refused"] != 3 || r.FirstFailure.IsZero() || r.LastFailure.Before(r.FirstFailure) {
		t.Errorf("have %+v, want 3 refused connections", r)
	}
}

// A client that keeps its socket has another one only after that failed.
func TestClientKeepsItsSocket(t *testing.T) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ports := make(chan int, 1)
	go func() {
		seen := map[string]bool{}
		defer func() { ports <- len(seen) }()
		for n := 0; ; n++ {
			_, from, err := server.ReadFrom(make([]byte, 10))
			if err != nil {
				return // the test closed it
			}
			seen[from.String()] = true
			if n != 7 { // one answer is lost
				_, _ = server.WriteTo([]byte("pod=p\n"), from)
			}
		}
	}()
	r := (&Client{UDP: server.LocalAddr().String(), Keep: true, Connections: 20, Concurrency: 1, Timeout: time.Second}).Run(t.Context())
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	if n := <-ports; n != 2 || r.Failures != 1 || r.Backends["/p"] != 19 {
		t.Errorf("%d sockets for %+v, want 2 and one failure", n, r)
	}
}

// A server that speaks plain TCP is a failure when Multipath TCP is asked for.
func TestClientWantsMultipath(t *testing.T) {
	var plain net.ListenConfig
	plain.SetMultipathTCP(false)
	l, err := plain.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := Client{TCP: l.Addr().String(), Connections: 1, Concurrency: 1, Timeout: time.Second, Multipath: true}
	if r := c.Run(t.Context()); r.Errors["plain TCP instead of Multipath TCP"] != 1 {
		t.Errorf("have %+v, want plain TCP told", r)
	}
}

func TestIdentityLine(t *testing.T) {
	local := net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[fd00:201:1::5]:8080"))
	client := net.TCPAddrFromAddrPort(netip.MustParseAddrPort("10.202.1.7:40000"))
	for name, tc := range map[string]struct {
		identity Identity
		want     string
	}{
		"full":           {Identity{"a", "a1", "p", "10.201.1.5"}, "cluster=a node=a1 pod=p ip=10.201.1.5 client=10.202.1.7:40000\n"},
		"without POD_IP": {Identity{Cluster: "a"}, "cluster=a node= pod= ip=fd00:201:1::5 client=10.202.1.7:40000\n"},
	} {
		t.Run(name, func(t *testing.T) {
			if have := tc.identity.line(local, client); have != tc.want {
				t.Errorf("have %q, want %q", have, tc.want)
			}
		})
	}
}

func TestClientValidate(t *testing.T) {
	good := Client{URL: "http://x", Connections: 1, Concurrency: 1, Timeout: time.Second}
	for name, tc := range map[string]struct {
		change func(*Client)
		ok     bool
	}{
		"good":              {func(*Client) {}, true},
		"kept URL":          {func(c *Client) { c.Keep = true }, false},
		"two targets":       {func(c *Client) { c.TCP = "x:1" }, false},
		"no target":         {func(c *Client) { c.URL = "" }, false},
		"no end":            {func(c *Client) { c.Connections = 0 }, false},
		"https":             {func(c *Client) { c.URL = "https://x" }, false},
		"hold of UDP":       {func(c *Client) { c.URL, c.UDP, c.Hold = "", "x:1", true }, false},
		"multipath, mapped": {func(c *Client) { c.Multipath, c.Mapped = true, true }, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := good
			tc.change(&c)
			if err := c.Validate(); (err == nil) != tc.ok {
				t.Errorf("have %v, want ok=%v", err, tc.ok)
			}
		})
	}
}

// A run whose time is over still makes the minimum of connections.
func TestMinimum(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, minimum := range []int{0, 7} {
		c := Client{TCP: freePort(t), Duration: time.Hour, Minimum: minimum, Concurrency: 1, Rate: 1000, Timeout: time.Minute}
		if r := c.Run(ended); r.Connections != minimum || r.Errors["connection refused"] != minimum {
			t.Errorf("minimum %d: %d connections, errors %v", minimum, r.Connections, r.Errors)
		}
	}
}
