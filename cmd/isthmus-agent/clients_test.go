package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	wire "github.com/miekg/dns"

	"github.com/isthmus-net/isthmus/dns"
)

const agentsPath = "/apis/discovery.k8s.io/v1/namespaces/isthmus-system/endpointslices"

// The clients of the name server are the pods and nodes of the cluster: those of its registration, of the node and of all agents.
func TestClientsLookup(t *testing.T) {
	all := map[string]string{
		nodePath:     `{"spec":{"podCIDRs":["10.201.3.0/24"]},"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.11"}]}}`,
		propertyPath: `{"spec":{"value":"a"}}`,
		memberPath: `{"spec":{"podCIDRs":["10.201.0.0/16"],"nodeCIDRs":["192.0.2.12/32"],"serviceCIDRs":["10.96.0.0/12"],"extraCIDRs":["198.51.100.0/24"],"podSupernets":["10.128.0.0/10"]},
			"status":{"clustersetIPCIDRRange":["243.1.0.0/16"]}}`,
		agentsPath: `{"items":[{"endpoints":[{"addresses":["192.0.2.11"]},{"addresses":["192.0.2.13"]}]},{"endpoints":[{"addresses":["fd73::d"]}]}]}`,
	}
	for name, tc := range map[string]struct {
		without          []string
		error            string
		want             string
		pods, nodes, try bool
	}{
		"all":             {want: "10.128.0.0/10 10.201.0.0/16 10.201.3.0/24 192.0.2.11/32 192.0.2.12/32 192.0.2.13/32 fd73::d/128", pods: true, nodes: true},
		"no registration": {without: []string{memberPath}, error: "404", want: "10.201.3.0/24 192.0.2.11/32 192.0.2.13/32 fd73::d/128", pods: true, nodes: true},
		"the node alone":  {without: []string{memberPath, agentsPath}, error: "403", want: "10.201.3.0/24 192.0.2.11/32", pods: true},
		"no agents":       {without: []string{agentsPath}, error: "500", want: "10.128.0.0/10 10.201.0.0/16 10.201.3.0/24 192.0.2.11/32 192.0.2.12/32", pods: true, nodes: true, try: true},
		"nothing":         {without: []string{memberPath, agentsPath, nodePath, propertyPath}, error: "500", try: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := &apiServer{objects: map[string]string{}}
			for path, object := range all {
				s.objects[path] = object
				if slices.Contains(tc.without, path) {
					s.objects[path] = tc.error
				}
			}
			w := newTopologyWatcher(t, s, Config{})
			l := w.lookup(t.Context(), w.cfg.topology())
			have := w.addresses.clients()
			if diff := cmp.Diff(prefixes(strings.Fields(tc.want)...), have.known, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("clients (-want +have):\n%s", diff)
			}
			if have.pods != tc.pods || have.nodes != tc.nodes || l.retry != tc.try {
				t.Errorf("pods %v, other nodes %v, retry %v", have.pods, have.nodes, l.retry)
			}
		})
	}
}

// guardedNameserver serves at an address for pods and at a guarded one. Loopback addresses count as others.
func guardedNameserver(t *testing.T, file string) (n *nameserver, guarded netip.AddrPort, stop func()) {
	t.Helper()
	local, node := netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("127.0.0.2:0")
	n = newNameserver(dns.Config{Listen: []netip.AddrPort{local, node}, Guarded: []netip.AddrPort{node}, File: file}, nil, slog.New(slog.DiscardHandler))
	n.always = prefixes("127.0.7.0/24")
	n.restoreClients()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { n.Run(ctx) })
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(stop)
	await(t, func() error {
		s, _ := n.Status()
		if len(s.Listening) != 2 {
			return fmt.Errorf("it listens on %v: %s", s.Listening, s.Error)
		}
		guarded = netip.MustParseAddrPort(s.Listening[1])
		return nil
	})
	if err := n.Sync(t.Context(), vip()); err != nil {
		t.Fatal(err)
	}
	return n, guarded, stop
}

// rcodeFrom asks from a source address.
func rcodeFrom(t *testing.T, from string, at netip.AddrPort) int {
	t.Helper()
	c := &wire.Client{Timeout: 20 * time.Second, Dialer: &net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}}
	resp, _, err := c.ExchangeContext(t.Context(), new(wire.Msg).SetQuestion("hello.demo.svc.clusterset.local.", wire.TypeA), at.String())
	if err != nil {
		t.Fatal(err)
	}
	return resp.Rcode
}

// Guarded addresses answer the clients that are known, and those that a former process knew until the API server has said all.
func TestClientsOfGuardedAddresses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "zone")
	n, at, stop := guardedNameserver(t, file)
	want := func(step string, ok ...string) {
		t.Helper()
		for _, from := range []string{"127.0.5.1", "127.0.6.1", "127.0.7.1", "127.0.8.1"} {
			code := wire.RcodeRefused
			if slices.Contains(ok, from) {
				code = wire.RcodeSuccess
			}
			if have := rcodeFrom(t, from, at); have != code {
				t.Errorf("%s: %s gets code %d, want %d", step, from, have, code)
			}
		}
	}
	missing := func(want int) {
		t.Helper()
		if _, have := n.Status(); len(have) != want {
			t.Errorf("missing %q, want %d", have, want)
		}
	}
	want("nothing known", "127.0.7.1")
	missing(0) // nor is it known whether anything is missing
	n.SetClients(dnsClients{known: prefixes("127.0.5.0/24")})
	want("a part known", "127.0.5.1", "127.0.7.1")
	missing(2)
	n.SetClients(dnsClients{known: prefixes("127.0.5.0/24", "127.0.6.1/32"), pods: true, nodes: true})
	want("all known", "127.0.5.1", "127.0.6.1", "127.0.7.1")
	missing(0)
	if have := gathered(t, n); have["acl_refused_total node refused"] != 3+2+1 {
		t.Errorf("%v", have)
	}
	stop()
	n, at, stop = guardedNameserver(t, file)
	want("restarted", "127.0.5.1", "127.0.6.1", "127.0.7.1")
	n.SetClients(dnsClients{known: prefixes("127.0.8.1/32"), partial: true})
	want("a part read", "127.0.5.1", "127.0.6.1", "127.0.7.1", "127.0.8.1")
	n.SetClients(dnsClients{known: prefixes("127.0.8.1/32"), pods: true, nodes: true})
	want("all read", "127.0.7.1", "127.0.8.1")
	stop()
	if err := os.WriteFile(file+".clients", []byte("127.0.5.0/24\nrubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, at, _ = guardedNameserver(t, file)
	want("an unreadable file", "127.0.7.1")
}

// The node's own addresses are guarded; node-local ones are not. The node itself is always a client.
func TestGuardedAddresses(t *testing.T) {
	for name, tc := range map[string]struct {
		args            []string
		guarded, always string
	}{
		"by default": {[]string{"--node-ip=192.0.2.1,2001:db8::1"}, "192.0.2.1:53 [2001:db8::1]:53", "127.0.0.0/8 ::1/128 192.0.2.1/32 2001:db8::1/128"},
		"given":      {[]string{"--dns-listen=192.0.2.1:5353", "--dns-listen=127.0.0.1", "--dns-listen=169.254.20.53", "--dns-allow=192.0.2.0/24,2001:db8::/64"}, "192.0.2.1:5353", "127.0.0.0/8 ::1/128 192.0.2.0/24 2001:db8::/64"},
		"bad range":  {[]string{"--dns-allow=192.0.2.7"}, `--dns-allow: "192.0.2.7" is not a range, such as 243.0.0.0/8; give the range of one address as 192.0.2.7/32`, ""},
		"fast path for external clients": {
			[]string{"--dns-fast-path=192.0.2.53", "--dns-external-listen=192.0.2.53", "--dns-external-allow=198.51.100.0/24"},
			"--dns-fast-path=192.0.2.53 is an address of --dns-external-listen", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("NODE_IPS", "")
			c := parsedDNS(t, tc.args)
			cfg, err := c.server()
			if err != nil {
				if !strings.Contains(err.Error(), tc.guarded) {
					t.Errorf("%v, want %s", err, tc.guarded)
				}
				return
			}
			always, err := c.allowed()
			if have := strings.Trim(fmt.Sprint(cfg.Guarded), "[]"); err != nil || strings.Trim(tc.guarded, "[]") != have {
				t.Errorf("guarded %s, error %v, want %s", have, err, tc.guarded)
			}
			if have := strings.Trim(fmt.Sprint(always), "[]"); have != tc.always {
				t.Errorf("always allowed %s, want %s", have, tc.always)
			}
		})
	}
}
