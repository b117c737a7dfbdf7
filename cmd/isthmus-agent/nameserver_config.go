package main

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/dns/device"
)

// dnsConfig holds the settings of the name server.
type dnsConfig struct {
	// Listen holds addresses with an optional port. If it is empty, the server uses the node-local ones and NodeIPs.
	Listen []string
	// NodeIPs are this node's addresses. The DNS of other nodes asks there, at NeighbourPort.
	NodeIPs       []string
	NeighbourPort uint16
	// Allow holds ranges of clients that get answers at the node's addresses, besides the cluster's pods and nodes.
	Allow []string
	// ExternalListen holds addresses with an optional port for clients outside of the cluster, ExternalAllow their ranges.
	ExternalListen, ExternalAllow []string
	// Profile is kep or lighthouse. It sets the defaults of EmptyHeadless and ClusterScoped. "" means the ClusterSet's, as the
	// cluster's Member has it, and kep without a Member.
	Profile       string
	EmptyHeadless string // nxdomain or nodata; "" means as the profile
	ClusterScoped choice
	TTL           uint32 // seconds
	Reverse       []string
	ZoneFile      string
	// QueryLog logs every QueryLog-th question; 0 logs none.
	QueryLog uint64
	// FastPath holds resolver addresses from pods' resolv.conf, for which the kernel may answer.
	FastPath []string
	// Cluster is the address of the cluster's DNS, to watch it; "" means to read it from the API server, "none" not to watch.
	Cluster string
}

// Values of --dns-profile and --dns-empty-headless.
const (
	profileKEP        = "kep"
	profileLighthouse = "lighthouse"
	emptyNXDomain     = "nxdomain"
	emptyNoData       = "nodata"
)

// clusterDNSNone is the value of --cluster-dns that turns off the watch.
const clusterDNSNone = "none"

// choice is a boolean flag that may be unset. It is a pflag.Value.
type choice struct{ given, on bool }

func (c *choice) String() string {
	if !c.given {
		return ""
	}
	return strconv.FormatBool(c.on)
}

// Set accepts the values of strconv.ParseBool.
func (c *choice) Set(text string) error {
	on, err := strconv.ParseBool(text)
	if err != nil {
		return fmt.Errorf("%q is not true or false", text)
	}
	*c = choice{true, on}
	return nil
}

// Type returns the name of the type for the help text.
func (*choice) Type() string { return "bool" }

// dnsDefaults returns the settings without flags. The DaemonSet sets NODE_IPS from status.hostIPs.
func dnsDefaults() dnsConfig {
	c := dnsConfig{TTL: dns.DefaultTTL, NeighbourPort: dns.DefaultPort}
	if ips := os.Getenv("NODE_IPS"); ips != "" {
		c.NodeIPs = strings.Split(ips, ",")
	}
	return c
}

func (c *dnsConfig) bind(f *pflag.FlagSet) {
	f.StringArrayVar(&c.Listen, "dns-listen", nil, fmt.Sprintf(
		"address[:port] for DNS, repeatable; link-local and %s addresses are assigned to interface %s (default %s, %s and --node-ip)",
		netip.PrefixFrom(device.IPv6, 48).Masked(), device.Name, device.IPv4, device.IPv6))
	f.StringSliceVar(&c.NodeIPs, "node-ip", c.NodeIPs, "address of this node for DNS questions from other nodes, repeatable; env NODE_IPS")
	f.Uint16Var(&c.NeighbourPort, "dns-neighbour-port", c.NeighbourPort, "port for DNS on the addresses of --node-ip, if another program uses 53 there")
	f.StringSliceVar(&c.Allow, "dns-allow", nil, "source range of further clients allowed at the node's own addresses, repeatable; besides the known pods and nodes of the cluster, others are refused there")
	f.StringSliceVar(&c.ExternalListen, "dns-external-listen", nil, "address[:port] for DNS clients outside of the cluster, repeatable; the node that has it answers")
	f.StringSliceVar(&c.ExternalAllow, "dns-external-allow", nil, "source range of clients allowed at --dns-external-listen, repeatable; others are refused")
	f.StringVar(&c.Profile, "dns-profile", c.Profile, fmt.Sprintf("%s: names as in the MCS API; %s: names as in Lighthouse, the same as --dns-empty-headless=%s --dns-cluster-scoped (default: that of the ClusterSet, initially kep)", profileKEP, profileLighthouse, emptyNoData))
	f.StringVar(&c.EmptyHeadless, "dns-empty-headless", "", fmt.Sprintf("answer for a headless Service without ready endpoints: %s or %s (default: as --dns-profile)", emptyNXDomain, emptyNoData))
	f.VarPF(&c.ClusterScoped, "dns-cluster-scoped", "", "also answer for <cluster>.<service>.<namespace>.svc.clusterset.local, which the MCS API forbids (default: as --dns-profile)").NoOptDefVal = "true"
	f.Uint32Var(&c.TTL, "dns-ttl", c.TTL, "TTL of answers in seconds, 0 to 3600")
	f.StringSliceVar(&c.Reverse, "dns-reverse", nil, "range of ClusterSetIPs with PTR records, repeatable")
	f.StringVar(&c.ZoneFile, "dns-zone-file", "", "file that keeps the zone over a restart, to answer before the API server is reachable")
	f.Uint64Var(&c.QueryLog, "dns-query-log", 0, "log every n-th question on each CPU with its outcome: 1 logs all, 1000 one in a thousand (default: none)")
	f.StringSliceVar(&c.FastPath, "dns-fast-path", nil, "address of a resolver in pods' resolv.conf, repeatable: the kernel answers simple questions to it for ClusterSetIPs at the pod's interface")
	f.StringVar(&c.Cluster, "cluster-dns", "", fmt.Sprintf("address of the cluster's DNS, to watch whether it answers for clusterset.local, or %s (default: that of Service kube-system/kube-dns)", clusterDNSNone))
}

// nameserver returns the name server for c.
func (c *dnsConfig) nameserver(log *slog.Logger) (*nameserver, error) {
	cfg, err := c.server()
	if err != nil {
		return nil, err
	}
	neighbours, err := c.neighbours()
	if err != nil {
		return nil, err
	}
	n := newNameserver(cfg, neighbours, log)
	if n.always, err = c.allowed(); err != nil {
		return nil, err
	}
	n.restoreClients()
	n.fast.Resolvers, err = c.resolvers()
	for _, a := range slices.Concat(cfg.Guarded, neighbours) {
		n.fast.Guarded = append(n.fast.Guarded, a.Addr())
	}
	return n, err
}

// names returns the names that the specification does not ask for, given the profile of the ClusterSet.
func (c *dnsConfig) names(profile string) dns.Names {
	like := cmp.Or(c.Profile, profile) == profileLighthouse
	n := dns.Names{EmptyHeadless: like, ClusterScoped: like}
	if c.EmptyHeadless != "" {
		n.EmptyHeadless = c.EmptyHeadless == emptyNoData
	}
	if c.ClusterScoped.given {
		n.ClusterScoped = c.ClusterScoped.on
	}
	return n
}

// server returns the settings of the DNS server. The error joins all faults; each names the flag to correct.
func (c *dnsConfig) server() (dns.Config, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	cfg := dns.Config{TTL: c.TTL, Names: c.names(""), File: c.ZoneFile, Limits: dns.DefaultLimits, Sample: c.QueryLog}
	if !slices.Contains([]string{"", profileKEP, profileLighthouse}, c.Profile) {
		fault("--dns-profile=%s is unknown; use %s or %s", c.Profile, profileKEP, profileLighthouse)
	}
	if !slices.Contains([]string{"", emptyNXDomain, emptyNoData}, c.EmptyHeadless) {
		fault("--dns-empty-headless=%s is unknown; use %s or %s", c.EmptyHeadless, emptyNXDomain, emptyNoData)
	}
	if c.NeighbourPort == 0 {
		fault("--dns-neighbour-port=0 is not a port; use 1 to 65535")
	}
	if _, err := netip.ParseAddr(c.Cluster); err != nil && c.Cluster != "" && c.Cluster != clusterDNSNone {
		fault("--cluster-dns=%s is neither an address, such as 10.96.0.10, nor %s", c.Cluster, clusterDNSNone)
	}
	if _, err := c.resolvers(); err != nil {
		faults = append(faults, err)
	}
	var err error
	if cfg.Reverse, err = parseRanges(c.Reverse); err != nil {
		fault("--dns-reverse: %w", err)
	}
	if cfg.Listen, err = c.addresses(); err != nil {
		faults = append(faults, err)
	}
	cfg.Guarded = slices.DeleteFunc(slices.Clone(cfg.Listen), isNodeLocal)
	if _, err := c.allowed(); err != nil {
		faults = append(faults, err)
	}
	if cfg.ExternalClients.Listen, err = parseAddresses("--dns-external-listen", c.ExternalListen, dns.DefaultPort); err != nil {
		faults = append(faults, err)
	}
	if cfg.ExternalClients.Allow, err = parseRanges(c.ExternalAllow); err != nil {
		fault("--dns-external-allow: %w", err)
	}
	if resolver, ok := c.externalResolver(cfg.ExternalClients.Listen); ok {
		fault("--dns-fast-path=%s is an address of --dns-external-listen, which has clients of its own; leave it out", resolver)
	}
	if len(c.ExternalListen) == 0 != (len(c.ExternalAllow) == 0) {
		fault("--dns-external-listen and --dns-external-allow go together; give both or neither")
	}
	if len(faults) > 0 {
		return dns.Config{}, errors.Join(faults...)
	}
	return cfg, cfg.Validate()
}

// isNodeLocal reports whether an address is for clients on this node: the addresses of the DNS interface, and loopback.
func isNodeLocal(a netip.AddrPort) bool { return a.Addr().IsLoopback() || device.Owns(a.Addr()) }

// allowed returns the clients that get answers at the node's addresses whatever the API server says: the node itself and the
// ranges of --dns-allow.
func (c *dnsConfig) allowed() ([]netip.Prefix, error) {
	always := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	given, err := parseRanges(c.Allow)
	if err != nil {
		return nil, fmt.Errorf("--dns-allow: %w; give the range of one address as 192.0.2.7/32", err)
	}
	own, err := parseAddresses("--node-ip", c.NodeIPs, dns.DefaultPort)
	for _, a := range own {
		always = append(always, netip.PrefixFrom(a.Addr(), a.Addr().BitLen()))
	}
	return append(always, given...), err
}

// externalResolver returns a resolver of --dns-fast-path that is also an address for external clients.
func (c *dnsConfig) externalResolver(external []netip.AddrPort) (netip.Addr, bool) {
	resolvers, _ := c.resolvers() // the caller has reported the error
	for _, a := range external {
		if slices.Contains(resolvers, a.Addr()) {
			return a.Addr(), true
		}
	}
	return netip.Addr{}, false
}

// addresses returns the addresses to listen on, most local first.
func (c *dnsConfig) addresses() ([]netip.AddrPort, error) {
	if len(c.Listen) > 0 {
		return parseAddresses("--dns-listen", c.Listen, dns.DefaultPort)
	}
	neighbours, err := c.neighbours()
	own := []netip.AddrPort{netip.AddrPortFrom(device.IPv4, dns.DefaultPort), netip.AddrPortFrom(device.IPv6, dns.DefaultPort)}
	return append(own, neighbours...), err
}

// neighbours returns the addresses for questions from other nodes; none if --dns-listen is set.
func (c *dnsConfig) neighbours() ([]netip.AddrPort, error) {
	if len(c.Listen) > 0 {
		return nil, nil
	}
	return parseAddresses("--node-ip", c.NodeIPs, c.NeighbourPort)
}

// maxResolvers is the capacity of the BPF map of resolvers.
const maxResolvers = 64

// resolvers returns the resolver addresses for which the kernel may answer.
func (c *dnsConfig) resolvers() ([]netip.Addr, error) {
	var addrs []netip.Addr
	for _, text := range c.FastPath {
		addr, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil || addr.IsUnspecified() || addr.IsMulticast() {
			return nil, fmt.Errorf("--dns-fast-path=%s is not the address of a resolver, such as 10.96.0.10; use those in the resolv.conf of pods", text)
		}
		addrs = append(addrs, addr)
	}
	if len(addrs) > maxResolvers {
		return nil, fmt.Errorf("--dns-fast-path is given %d times, at most %d are possible", len(addrs), maxResolvers)
	}
	return addrs, nil
}

// parseAddresses parses addresses with an optional port.
func parseAddresses(flag string, texts []string, port uint16) ([]netip.AddrPort, error) {
	var addrs []netip.AddrPort
	var faults []error
	for _, text := range texts {
		text = strings.TrimSpace(text)
		if addr, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, netip.AddrPortFrom(addr.Unmap(), port))
			continue
		}
		ap, err := netip.ParseAddrPort(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s=%s is not an address with an optional port, such as 192.0.2.1 or [2001:db8::1]:5353", flag, text))
			continue
		}
		addrs = append(addrs, ap)
	}
	return addrs, errors.Join(faults...)
}
