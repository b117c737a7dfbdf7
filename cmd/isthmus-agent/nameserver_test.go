package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/bpf/datapath/names"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/tools/conformance"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// startNameserver runs a name server on a free port of the loopback address, and returns it and its address.
func startNameserver(t *testing.T) (*nameserver, string) {
	t.Helper()
	n := newNameserver(dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}}, nil, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { n.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	var at string
	await(t, func() error {
		s, _ := n.Status()
		if len(s.Listening) != 1 {
			return fmt.Errorf("it listens on %v: %s", s.Listening, s.Error)
		}
		at = s.Listening[0]
		return nil
	})
	return n, at
}

// await calls check until it returns nil, for at most 10 seconds.
func await(t *testing.T, check func() error) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	giveUp := time.After(time.Minute)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-giveUp:
			t.Fatal(err)
		case <-tick.C:
		}
	}
}

// pods returns a snapshot with the headless Service pods.demo, which has one endpoint in each of clusters.
func pods(clusters map[clusterset.ClusterID]string) *clusterset.Snapshot {
	s := clusterset.Service{Import: clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "demo", Name: "pods"}, Type: clusterset.Headless,
	}}
	for id, addr := range clusters {
		s.Slices = append(s.Slices, clusterset.Slice{
			Cluster:   id,
			Endpoints: []clusterset.Endpoint{{Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Ready: true}},
		})
	}
	return &clusterset.Snapshot{Services: []clusterset.Service{s}}
}

// The name of a headless Service leaves out silent members until they answer again.
func TestAnswersOmitSilentMembers(t *testing.T) {
	n, at := startNameserver(t)
	if err := n.Sync(t.Context(), pods(map[clusterset.ClusterID]string{"a": "10.0.0.1", "b": "10.0.0.2"})); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		known map[clusterset.ClusterID]evidence.State
		want  []string
	}{
		{nil, []string{"10.0.0.1", "10.0.0.2"}}, // without evidence all members count as connected
		{map[clusterset.ClusterID]evidence.State{"a": evidence.Answering, "b": evidence.Silent}, []string{"10.0.0.1"}},
		{map[clusterset.ClusterID]evidence.State{"a": evidence.Answering, "b": evidence.Answering}, []string{"10.0.0.1", "10.0.0.2"}},
		{map[clusterset.ClusterID]evidence.State{"b": evidence.Silent}, []string{"10.0.0.1"}},
		{map[clusterset.ClusterID]evidence.State{}, []string{"10.0.0.1", "10.0.0.2"}},
	} {
		if step.known != nil {
			n.SetEvidence(step.known)
		}
		await(t, func() error {
			have := resolve(t.Context(), at, "pods.demo.svc.clusterset.local")
			texts := make([]string, len(have.addrs))
			for i, a := range have.addrs {
				texts[i] = a.String()
			}
			if have.err != nil || !slices.Equal(texts, step.want) {
				return fmt.Errorf("with evidence %v: answer %v, %w, want %v", step.known, texts, have.err, step.want)
			}
			return nil
		})
	}
	conformance.Holds(t, "L61", "L63")
}

// A server that opens its sockets later also leaves out silent members.
func TestSilentMemberBeforeTheServerListens(t *testing.T) {
	// not 127.0.0.1, where a TCP connection of another program may use the port that is free for UDP
	blocker, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", "127.0.0.4:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(blocker.LocalAddr().String())
	n := newNameserver(dns.Config{Listen: []netip.AddrPort{at}}, nil, slog.New(slog.DiscardHandler))
	n.retry = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { n.Run(ctx) })
	n.SetEvidence(map[clusterset.ClusterID]evidence.State{"b": evidence.Silent})
	_ = n.Sync(ctx, pods(map[clusterset.ClusterID]string{"a": "10.0.0.1", "b": "10.0.0.2"})) // fails, as the server does not listen
	await(t, func() error {
		if s, _ := n.Status(); s.Error == "" {
			return fmt.Errorf("no error yet")
		}
		return nil
	})
	if err := blocker.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, func() error {
		have := resolve(t.Context(), at.String(), "pods.demo.svc.clusterset.local")
		if have.err != nil || len(have.addrs) != 1 || have.addrs[0].String() != "10.0.0.1" {
			s, _ := n.Status()
			return fmt.Errorf("answer %v, %w; the server: %s", have.addrs, have.err, s.Error)
		}
		return nil
	})
	cancel()
	running.Wait()
}

// A port in use at an address for neighbours or external clients does not affect the node-local addresses.
func TestOptionalPortInUse(t *testing.T) {
	blocker, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer blocker.Close()
	own, free, taken := netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("127.0.0.3:0"), netip.MustParseAddrPort(blocker.LocalAddr().String())
	tests := map[string]struct {
		listen, neighbours, external []netip.AddrPort
		flags                        string // in the missing capabilities; "" if the server does not listen
	}{
		"for neighbours":       {[]netip.AddrPort{own, taken}, []netip.AddrPort{taken}, []netip.AddrPort{free}, "--dns-neighbour-port"},
		"for external clients": {[]netip.AddrPort{own}, nil, []netip.AddrPort{taken}, "--dns-external-listen"},
		"both":                 {[]netip.AddrPort{own, taken}, []netip.AddrPort{taken}, []netip.AddrPort{taken}, "--dns-external-listen --dns-neighbour-port"},
		"node-local":           {[]netip.AddrPort{own, taken}, nil, []netip.AddrPort{free}, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := dns.Config{Listen: tc.listen, ExternalClients: dns.ExternalClients{Listen: tc.external, Allow: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}
			n := newNameserver(cfg, tc.neighbours, slog.New(slog.DiscardHandler))
			server, missing, err := n.listen(n.cfg.Listen, nil)
			flags := strings.Fields(tc.flags)
			if (err == nil) != (tc.flags != "") || len(missing) != len(flags) {
				t.Fatalf("missing %q, error %v", missing, err)
			}
			if err != nil {
				return
			}
			want := len(tc.listen) + len(tc.external) - len(flags) // all but those in use
			if have := server.Status().Listen; len(have) != want {
				t.Errorf("listens on %v, want %d addresses", have, want)
			}
			for i, flag := range flags {
				if !strings.Contains(missing[i], flag) {
					t.Errorf("missing %q, want %s in it", missing[i], flag)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := server.Run(ctx); err != nil { // closes the sockets
				t.Error(err)
			}
		})
	}
}

// parsedDNS returns the configuration that args lead to.
func parsedDNS(t *testing.T, args []string) dnsConfig {
	t.Helper()
	c := dnsDefaults()
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.bind(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return c
}

// The profile of the ClusterSet decides where no flag does.
func TestNamesOfProfile(t *testing.T) {
	all := dns.Names{EmptyHeadless: true, ClusterScoped: true}
	for name, tc := range map[string]struct {
		args    []string
		profile string
		want    dns.Names
	}{
		"none":                   {nil, "", dns.Names{}},
		"kep":                    {nil, "kep", dns.Names{}},
		"lighthouse":             {nil, "lighthouse", all},
		"a profile of its own":   {[]string{"--dns-profile=kep"}, "lighthouse", dns.Names{}},
		"the other way":          {[]string{"--dns-profile=lighthouse"}, "kep", all},
		"a flag for one setting": {[]string{"--dns-cluster-scoped=false"}, "lighthouse", dns.Names{EmptyHeadless: true}},
		"a flag for the other":   {[]string{"--dns-empty-headless=nxdomain"}, "lighthouse", dns.Names{ClusterScoped: true}},
	} {
		t.Run(name, func(t *testing.T) {
			c := parsedDNS(t, tc.args)
			if have := c.names(tc.profile); have != tc.want {
				t.Errorf("%+v, want %+v", have, tc.want)
			}
		})
	}
}

func TestDNSConfig(t *testing.T) {
	tests := map[string]struct {
		args []string
		want string // ClusterScoped and EmptyHeadless, or a part of the error
	}{
		"the specification":            {nil, "false false"},
		"Lighthouse":                   {[]string{"--dns-profile=lighthouse"}, "true true"},
		"each flag by itself":          {[]string{"--dns-empty-headless=nodata", "--dns-cluster-scoped"}, "true true"},
		"a flag overrides the profile": {[]string{"--dns-profile=lighthouse", "--dns-cluster-scoped=false", "--dns-empty-headless=nxdomain"}, "false false"},
		"unknown profile":              {[]string{"--dns-profile=submariner"}, "--dns-profile=submariner is unknown; use kep or lighthouse"},
		"unknown answer":               {[]string{"--dns-empty-headless=servfail"}, "--dns-empty-headless=servfail is unknown"},
		"no port":                      {[]string{"--dns-neighbour-port=0"}, "--dns-neighbour-port=0 is not a port"},
		"no range":                     {[]string{"--dns-reverse=243.0.0.0"}, "--dns-reverse: "},
		"no address":                   {[]string{"--cluster-dns=kube-dns"}, "--cluster-dns=kube-dns is neither an address"},
		"fast path for a name":         {[]string{"--dns-fast-path=kube-dns"}, "--dns-fast-path=kube-dns is not the address of a resolver, such as 10.96.0.10"},
		"too long":                     {[]string{"--dns-ttl=3601"}, "3601 s is too long"},
		"external clients":             {[]string{"--dns-external-listen=192.0.2.53", "--dns-external-allow=198.51.100.0/24"}, "false false"},
		"no external range":            {[]string{"--dns-external-listen=192.0.2.53"}, "--dns-external-listen and --dns-external-allow go together"},
		"bad external range":           {[]string{"--dns-external-listen=192.0.2.53", "--dns-external-allow=all"}, "--dns-external-allow: "},
		"bad external address":         {[]string{"--dns-external-listen=vms", "--dns-external-allow=198.51.100.0/24"}, "--dns-external-listen=vms is not an address"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c := parsedDNS(t, tc.args)
			cfg, err := c.server()
			have := fmt.Sprint(cfg.ClusterScoped, cfg.EmptyHeadless)
			if err != nil {
				have = err.Error()
			}
			if !strings.Contains(have, tc.want) {
				t.Errorf("%v: %s, want %s", tc.args, have, tc.want)
			}
		})
	}
	conformance.Holds(t, "L56")
}

// Other nodes use the neighbour port, and the node's own pods use 53.
func TestNeighbourPort(t *testing.T) {
	c := dnsDefaults()
	c.NodeIPs, c.NeighbourPort = []string{"192.0.2.1", "2001:db8::1"}, 5353
	have, err := c.addresses()
	if err != nil {
		t.Fatal(err)
	}
	want := "[169.254.20.53:53 [fd47:2d53:7698::53]:53 192.0.2.1:5353 [2001:db8::1]:5353]"
	if fmt.Sprint(have) != want {
		t.Errorf("listens on %v, want %s", have, want)
	}
}

// The kernel gets the addresses of the server, and its answers are counted besides those of the server.
func TestKernelAnswers(t *testing.T) {
	netlab.Privileged(t)
	n := newNameserver(dns.Config{Listen: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:0")}}, nil, slog.New(slog.DiscardHandler))
	n.fast = names.Config{Resolvers: []netip.Addr{netip.MustParseAddr("10.96.0.10")}}
	kernel, missing := n.newKernel()
	if len(missing) > 0 {
		t.Fatal(missing)
	}
	defer kernel.Close()
	ctx, cancel := context.WithCancel(t.Context())
	server, err := n.open(ctx, kernel, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Sync(ctx, pods(map[clusterset.ClusterID]string{"a": "10.1.0.1"})); err != nil {
		t.Fatal(err)
	}
	s, _ := n.dnsStatus()
	var paths []string
	for _, a := range s.Counts.Answers {
		paths = append(paths, a.Path+" "+a.Type)
	}
	slices.Sort(paths)
	if want := []string{"kernel A", "kernel AAAA"}; !slices.Equal(paths, want) {
		t.Errorf("counts %v, want %v", paths, want)
	}
	cancel()
	if err := server.Run(ctx); err != nil { // closes the sockets
		t.Error(err)
	}
}
