package openstack_test

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/openstack/openstacktest"
	"github.com/isthmus-net/isthmus/tools/await"
)

func connect(t testing.TB, f *openstacktest.Fake, c openstack.Config) *openstack.Client {
	t.Helper()
	c.Cloud, c.File = "test", f.CloudsYAML(t)
	client, err := openstack.Connect(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestContract(t *testing.T) {
	f := openstacktest.NewFake(t)
	openstacktest.Contract(t, openstacktest.Cloud{
		Connect: func(t testing.TB, cluster string) *openstack.Client {
			t.Helper()
			return connect(t, f, openstack.Config{Cluster: cluster})
		},
		Network: openstacktest.Network, Subnets: []string{openstacktest.Subnet4, openstacktest.Subnet6}, External: openstacktest.External,
		Gateway: openstacktest.Gateway1, Second: openstacktest.Gateway2, GatewayAddrs: openstacktest.GatewayAddrs, GatewayIP: openstacktest.GatewayIP, MaxPairs: 10, Discard: func(_ testing.TB, id string) { f.Remove(id) },
	})
}

// The transport is wrapped from New on, however many requests Connect makes.
func TestWrap(t *testing.T) {
	f := openstacktest.NewFake(t)
	var seen atomic.Int32
	c := connect(t, f, openstack.Config{Cluster: "a", Wrap: func(to http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			seen.Add(1)
			return to.RoundTrip(r)
		})
	}})
	if n := seen.Load(); n != 0 {
		t.Errorf("%d requests of Connect went through", n)
	}
	if _, err := c.Ports(t.Context()); err != nil || seen.Load() != 1 {
		t.Errorf("%d requests went through, want that for the ports; %v", seen.Load(), err)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

var request = openstack.PortRequest{Network: openstacktest.Network, Subnets: []string{openstacktest.Subnet4}, Purpose: "uid-1"}

// once breaks the first request with a method.
func once(method string, fault openstacktest.Fault) func(*http.Request) openstacktest.Fault {
	var done atomic.Bool
	return func(r *http.Request) openstacktest.Fault {
		if r.Method == method && done.CompareAndSwap(false, true) {
			return fault
		}
		return openstacktest.None
	}
}

// A lost response leaves no unknown object: a port is found by its purpose, and a second attempt finds a floating IP.
func TestLostAnswers(t *testing.T) {
	f := openstacktest.NewFake(t)
	c := connect(t, f, openstack.Config{Cluster: "a"})
	f.Fault = once(http.MethodPost, openstacktest.Lose)
	if _, err := c.CreatePort(t.Context(), request); err == nil {
		t.Fatal("no error without an answer")
	}
	all, err := c.Ports(t.Context())
	if err != nil || len(all) != 1 || all[0].Purpose != request.Purpose {
		t.Fatalf("ports %v, %v", all, err)
	}
	p := all[0]
	f.Fault = once(http.MethodPost, openstacktest.Lose)
	if _, err := c.CreateFloatingIP(t.Context(), openstacktest.External, p.ID, p.Addrs[0]); err == nil {
		t.Fatal("no error without an answer")
	}
	if _, err := c.CreateFloatingIP(t.Context(), openstacktest.External, p.ID, p.Addrs[0]); err != nil {
		t.Fatal(err)
	}
	if all, err := c.FloatingIPs(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("floating IPs %v, %v", all, err)
	}
	f.Fault = once(http.MethodDelete, openstacktest.Lose)
	if err := c.DeletePort(t.Context(), p.ID); err == nil {
		t.Fatal("no error without an answer")
	}
	if err := c.DeletePort(t.Context(), p.ID); err != nil {
		t.Error(err)
	}
}

func TestClouds(t *testing.T) {
	for name, tc := range map[string]struct {
		fault openstacktest.Fault
		want  func(error) bool
	}{
		"hangs":             {openstacktest.Hang, func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }},
		"does not answer":   {openstacktest.Refuse, func(err error) bool { return err != nil && strings.Contains(err.Error(), "status 503") }},
		"has it in use":     {openstacktest.Taken, func(err error) bool { return errors.Is(err, openstack.ErrTaken) && !errors.Is(err, openstack.ErrQuota) }},
		"expires the token": {openstacktest.Expire, func(err error) bool { return err == nil }},
	} {
		t.Run(name, func(t *testing.T) {
			f := openstacktest.NewFake(t)
			c := connect(t, f, openstack.Config{Cluster: "a", Timeout: 500 * time.Millisecond})
			f.Fault = once(http.MethodGet, tc.fault)
			if _, err := c.Ports(t.Context()); !tc.want(err) {
				t.Errorf("%v", err)
			}
			if _, err := c.Ports(t.Context()); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

func TestQuotaExhausted(t *testing.T) {
	f := openstacktest.NewFake(t)
	c := connect(t, f, openstack.Config{Cluster: "a"})
	f.SetQuota("port", 2) // of the gateways
	if _, err := c.CreatePort(t.Context(), request); !errors.Is(err, openstack.ErrQuota) {
		t.Errorf("port: %v", err)
	}
	f.SetQuota("port", -1)
	p, err := c.CreatePort(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	f.SetQuota("floatingip", 0)
	if _, err := c.CreateFloatingIP(t.Context(), openstacktest.External, p.ID, p.Addrs[0]); !errors.Is(err, openstack.ErrQuota) {
		t.Errorf("floating IP: %v", err)
	}
	if q, err := c.Quota(t.Context()); err != nil || q.FloatingIPs.Limit != 0 || q.Ports.Limit != -1 || q.Ports.Used != 3 {
		t.Errorf("quota %+v, %v", q, err)
	}
}

// Concurrent writers of a gateway's port lose no pairs.
func TestConcurrentPairs(t *testing.T) {
	f := openstacktest.NewFake(t)
	c := connect(t, f, openstack.Config{Cluster: "a"})
	var puts atomic.Int32
	f.Fault = func(r *http.Request) openstacktest.Fault {
		if r.Method == http.MethodPut && puts.Add(1) == 1 {
			f.Edit(openstacktest.Gateway1, func(o map[string]any) {
				o["allowed_address_pairs"] = []any{map[string]any{"ip_address": "198.51.100.7", "mac_address": "fa:16:3e:99:99:99"}}
			})
		}
		return openstacktest.None
	}
	if err := c.SetAddressPairs(t.Context(), openstacktest.Gateway1, nil, prefixes("192.0.2.1/32")); err != nil {
		t.Fatal(err)
	}
	got, err := c.AddressPairs(t.Context(), openstacktest.Gateway1)
	if err != nil || len(got) != 2 || puts.Load() != 2 {
		t.Errorf("pairs %v after %d writes, %v", got, puts.Load(), err)
	}
	if err := c.SetAddressPairs(t.Context(), openstacktest.Gateway1, nil, prefixes("192.0.2.1/32")); err != nil || puts.Load() != 2 {
		t.Errorf("the same once more took %d writes, %v", puts.Load()-2, err)
	}
}

// Few requests find out how many pairs fit, and no existing pair is displaced.
func TestMorePairsThanFit(t *testing.T) {
	f := openstacktest.NewFake(t)
	c := connect(t, f, openstack.Config{Cluster: "a"})
	var many []netip.Prefix
	for i := range 100 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 32))
	}
	last := many[len(many)-1:]
	if err := c.SetAddressPairs(t.Context(), openstacktest.Gateway1, nil, last); err != nil {
		t.Fatal(err)
	}
	puts := 0
	f.Fault = func(r *http.Request) openstacktest.Fault {
		if r.Method == http.MethodPut {
			puts++
		}
		return openstacktest.None
	}
	for range 2 {
		err := c.SetAddressPairs(t.Context(), openstacktest.Gateway1, last, many)
		if room, ok := errors.AsType[*openstack.PairsExhausted](err); !ok || !slices.Equal(room.Missing, many[9:99]) {
			t.Errorf("%v", err)
		}
		if got, err := c.AddressPairs(t.Context(), openstacktest.Gateway1); err != nil || !slices.Equal(got, append(slices.Clone(last), many[:9]...)) {
			t.Errorf("pairs %v, %v", got, err)
		}
	}
	if puts > 20 {
		t.Errorf("it took %d requests", puts)
	}
	t.Logf("%d requests", puts)
}

func TestConnectErrors(t *testing.T) {
	f := openstacktest.NewFake(t)
	file := f.CloudsYAML(t)
	for want, c := range map[string]openstack.Config{
		"the cluster id is empty": {Cloud: "test", File: file},
		"read clouds.yaml":        {Cloud: "nowhere", File: file, Cluster: "a"},
	} {
		if _, err := openstack.New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q in it", c, err, want)
		}
	}
	f.SetSecret("another")
	_, err := openstack.Connect(t.Context(), openstack.Config{Cloud: "test", File: file, Cluster: "a"})
	if !errors.Is(err, openstack.ErrCredentials) || !strings.Contains(err.Error(), "authenticate at http://") {
		t.Errorf("a wrong secret: %v", err)
	}
}

// A client starts while Keystone is down, and works as soon as it answers.
func TestKeystoneAway(t *testing.T) {
	f := openstacktest.NewFake(t)
	f.AuthFault = func(*http.Request) openstacktest.Fault { return openstacktest.Refuse }
	c, err := openstack.New(openstack.Config{Cloud: "test", File: f.CloudsYAML(t), Cluster: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Ports(t.Context()); err == nil || !strings.Contains(err.Error(), "authenticate at http://") || !strings.Contains(err.Error(), "status 503") {
		t.Errorf("without Keystone: %v", err)
	}
	f.AuthFault = nil
	if _, err := c.Ports(t.Context()); err != nil {
		t.Errorf("with Keystone: %v", err)
	}
}

// A replaced application credential is used without a restart, whether clouds.yaml changes before or after the former
// credential is revoked. A file that cannot be read changes nothing.
func TestChangedCredentials(t *testing.T) {
	f := openstacktest.NewFake(t)
	path := f.CloudsYAML(t)
	c, err := openstack.Connect(t.Context(), openstack.Config{Cloud: "test", File: path, Cluster: "a"})
	if err != nil {
		t.Fatal(err)
	}
	tokens := 0
	f.AuthFault = func(*http.Request) openstacktest.Fault { tokens++; return openstacktest.None }
	works := func(when string, want int) {
		t.Helper()
		tokens = 0
		if _, err := c.Ports(t.Context()); err != nil || tokens != want {
			t.Errorf("%s: %v, after %d requests of a token, want %d", when, err, tokens, want)
		}
	}
	if err := os.WriteFile(path, []byte("clouds: ["), 0o600); err != nil {
		t.Fatal(err)
	}
	works("with half a file", 0)
	f.SetSecret("second")
	f.WriteClouds(t, path, "second")
	works("when the file and Keystone changed", 1)
	works("a call later", 0)
	f.SetSecret("third")
	for range 2 {
		if _, err := c.Ports(t.Context()); !errors.Is(err, openstack.ErrCredentials) {
			t.Errorf("with a revoked credential: %v", err)
		}
	}
	f.WriteClouds(t, path, "third")
	works("when the file changed later", 1)
}

// After 429 with Retry-After no request is sent before the pause ends, of Neutron and of Keystone.
func TestRetryAfter(t *testing.T) {
	throttle := func(asked *atomic.Int32) func(*http.Request) openstacktest.Fault {
		return func(*http.Request) openstacktest.Fault {
			if asked.Add(1) == 1 {
				return openstacktest.Throttle
			}
			return openstacktest.None
		}
	}
	for name, set := range map[string]func(*openstacktest.Fake, func(*http.Request) openstacktest.Fault){
		"Neutron":  func(f *openstacktest.Fake, fault func(*http.Request) openstacktest.Fault) { f.Fault = fault },
		"Keystone": func(f *openstacktest.Fake, fault func(*http.Request) openstacktest.Fault) { f.AuthFault = fault },
	} {
		t.Run(name, func(t *testing.T) {
			f := openstacktest.NewFake(t)
			var asked atomic.Int32
			set(f, throttle(&asked))
			c, err := openstack.New(openstack.Config{Cloud: "test", File: f.CloudsYAML(t), Cluster: "a"})
			if err != nil {
				t.Fatal(err)
			}
			var until time.Time
			await.True(t, "the pause ends", func() bool {
				before := time.Now()
				_, err := c.Ports(t.Context())
				if err == nil {
					return true
				}
				p, ok := errors.AsType[*openstack.Paused](err)
				if !ok || asked.Load() != 1 || !until.IsZero() && p.Until != until || p.Until.Before(before) {
					t.Fatalf("%v after %d requests, want a pause", err, asked.Load())
				}
				until = p.Until
				return false
			})
			if time.Now().Before(until) || until.IsZero() {
				t.Errorf("a request was sent before %v", until)
			}
		})
	}
}

func prefixes(all ...string) []netip.Prefix {
	var parsed []netip.Prefix
	for _, s := range all {
		parsed = append(parsed, netip.MustParsePrefix(s))
	}
	return parsed
}
