package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/dns/device"
)

// dnsConfig is what an operator can say about the name server.
type dnsConfig struct {
	// Listen holds addresses with an optional port. Where it is empty they are the node-local ones and NodeIPs.
	Listen []string
	// NodeIPs are this node's addresses, where its neighbours ask, at NeighbourPort.
	NodeIPs       []string
	NeighbourPort uint16
	// GuestListen are addresses with an optional port where machines that are no nodes may ask, those in GuestAllow.
	GuestListen, GuestAllow []string
	// Profile is kep or lighthouse: what EmptyHeadless and ClusterScoped are where they are not given.
	Profile       string
	EmptyHeadless string // nxdomain or nodata; "" is what the profile says
	ClusterScoped choice
	TTL           uint32 // seconds
	Reverse       []string
	ZoneFile      string
	// QueryLog logs one of so many questions; 0 none.
	QueryLog uint64
	// FastPath holds the addresses that pods' resolv.conf name, for which the kernel may answer.
	FastPath []string
	// Cluster is the address of the cluster's DNS, which is watched; "" asks the API server, "none" does not watch.
	Cluster string
}

// What --dns-profile and --dns-empty-headless take.
const (
	profileKEP        = "kep"
	profileLighthouse = "lighthouse"
	emptyNXDomain     = "nxdomain"
	emptyNoData       = "nodata"
)

// clusterDNSNone is the value of --cluster-dns that switches off what it is for.
const clusterDNSNone = "none"

// choice is a switch that may be left alone. It is a pflag.Value.
type choice struct{ given, on bool }

func (c *choice) String() string {
	if !c.given {
		return ""
	}
	return strconv.FormatBool(c.on)
}

// Set takes what strconv.ParseBool does.
func (c *choice) Set(text string) error {
	on, err := strconv.ParseBool(text)
	if err != nil {
		return fmt.Errorf("%q is not true or false", text)
	}
	*c = choice{true, on}
	return nil
}

// Type is what help calls the value.
func (*choice) Type() string { return "bool" }

// dnsDefaults returns what holds where no flag says otherwise. NODE_IPS comes from the DaemonSet (status.hostIPs).
func dnsDefaults() dnsConfig {
	c := dnsConfig{TTL: dns.DefaultTTL, NeighbourPort: dns.DefaultPort, Profile: profileKEP}
	if ips := os.Getenv("NODE_IPS"); ips != "" {
		c.NodeIPs = strings.Split(ips, ",")
	}
	return c
}

func (c *dnsConfig) bind(f *pflag.FlagSet) {
	f.StringArrayVar(&c.Listen, "dns-listen", nil, fmt.Sprintf(
		"address[:port] to answer DNS on, repeatable; link-local and %s addresses are assigned to interface %s (default %s, %s and --node-ip)",
		netip.PrefixFrom(device.IPv6, 48).Masked(), device.Name, device.IPv4, device.IPv6))
	f.StringSliceVar(&c.NodeIPs, "node-ip", c.NodeIPs, "addresses of this node for DNS questions of its neighbours, repeatable; env NODE_IPS")
	f.Uint16Var(&c.NeighbourPort, "dns-neighbour-port", c.NeighbourPort, "port for DNS on the addresses of --node-ip, where something else has 53")
	f.StringSliceVar(&c.GuestListen, "dns-guest-listen", nil, "address[:port] at which machines outside of the cluster ask, repeatable; the node that has it answers")
	f.StringSliceVar(&c.GuestAllow, "dns-guest-allow", nil, "range of machines that may ask at --dns-guest-listen, repeatable; others are refused")
	f.StringVar(&c.Profile, "dns-profile", c.Profile, fmt.Sprintf("%s: names as the MCS API specifies them; %s: as Lighthouse has them, which is --dns-empty-headless=%s --dns-cluster-scoped", profileKEP, profileLighthouse, emptyNoData))
	f.StringVar(&c.EmptyHeadless, "dns-empty-headless", "", fmt.Sprintf("what the name of a headless Service without ready endpoints is answered with: %s or %s (default: as --dns-profile)", emptyNXDomain, emptyNoData))
	f.VarPF(&c.ClusterScoped, "dns-cluster-scoped", "", "also answer for <cluster>.<service>.<namespace>.svc.clusterset.local, which the MCS API's specification forbids (default: as --dns-profile)").NoOptDefVal = "true"
	f.Uint32Var(&c.TTL, "dns-ttl", c.TTL, "seconds for which clients may remember an answer, 0 to 3600")
	f.StringSliceVar(&c.Reverse, "dns-reverse", nil, "range of ClusterSetIPs whose addresses have names (PTR), repeatable")
	f.StringVar(&c.ZoneFile, "dns-zone-file", "", "file that keeps the names over a restart, so that they are answered before the API server is")
	f.Uint64Var(&c.QueryLog, "dns-query-log", 0, "log one of so many questions with its answer: 1 all, 1000 one of a thousand on each CPU (default: none)")
	f.StringSliceVar(&c.FastPath, "dns-fastpath", nil, "address of a resolver that pods ask, as in their resolv.conf, repeatable: plain questions to it for ClusterSetIPs are answered by the kernel where they leave the pod")
	f.StringVar(&c.Cluster, "cluster-dns", "", fmt.Sprintf("address of the cluster's DNS, of which is told whether it answers for clusterset.local, or %s (default: that of Service kube-system/kube-dns)", clusterDNSNone))
}

// server is what c says to the server. The error joins all faults, each with the flag to mend.
func (c *dnsConfig) server() (dns.Config, error) {
	var faults []error
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	cfg := dns.Config{TTL: c.TTL, File: c.ZoneFile, Limits: dns.DefaultLimits, Sample: c.QueryLog}
	switch c.Profile {
	case profileKEP:
	case profileLighthouse:
		cfg.EmptyHeadless, cfg.ClusterScoped = true, true
	default:
		fault("--dns-profile=%s is unknown; use %s or %s", c.Profile, profileKEP, profileLighthouse)
	}
	switch c.EmptyHeadless {
	case "":
	case emptyNXDomain, emptyNoData:
		cfg.EmptyHeadless = c.EmptyHeadless == emptyNoData
	default:
		fault("--dns-empty-headless=%s is unknown; use %s or %s", c.EmptyHeadless, emptyNXDomain, emptyNoData)
	}
	if c.ClusterScoped.given {
		cfg.ClusterScoped = c.ClusterScoped.on
	}
	if c.NeighbourPort == 0 {
		fault("--dns-neighbour-port=0 is no port; use 1 to 65535")
	}
	if _, err := netip.ParseAddr(c.Cluster); err != nil && c.Cluster != "" && c.Cluster != clusterDNSNone {
		fault("--cluster-dns=%s is no address, such as 10.96.0.10, nor %s", c.Cluster, clusterDNSNone)
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
	if cfg.Guests.Listen, err = parseAddresses("--dns-guest-listen", c.GuestListen, dns.DefaultPort); err != nil {
		faults = append(faults, err)
	}
	if cfg.Guests.Allow, err = parseRanges(c.GuestAllow); err != nil {
		fault("--dns-guest-allow: %w", err)
	}
	if len(c.GuestListen) == 0 != (len(c.GuestAllow) == 0) {
		fault("--dns-guest-listen and --dns-guest-allow need each other; give both, or none")
	}
	if len(faults) > 0 {
		return dns.Config{}, errors.Join(faults...)
	}
	return cfg, cfg.Validate()
}

// addresses returns where to answer, most local first.
func (c *dnsConfig) addresses() ([]netip.AddrPort, error) {
	if len(c.Listen) > 0 {
		return parseAddresses("--dns-listen", c.Listen, dns.DefaultPort)
	}
	neighbours, err := c.neighbours()
	own := []netip.AddrPort{netip.AddrPortFrom(device.IPv4, dns.DefaultPort), netip.AddrPortFrom(device.IPv6, dns.DefaultPort)}
	return append(own, neighbours...), err
}

// neighbours returns where the agents of other nodes' stubs find this one, unless --dns-listen says it.
func (c *dnsConfig) neighbours() ([]netip.AddrPort, error) {
	if len(c.Listen) > 0 {
		return nil, nil
	}
	return parseAddresses("--node-ip", c.NodeIPs, c.NeighbourPort)
}

// maxResolvers is how many the kernel's map has room for.
const maxResolvers = 64

// resolvers returns the addresses for which the kernel may answer.
func (c *dnsConfig) resolvers() ([]netip.Addr, error) {
	var addrs []netip.Addr
	for _, text := range c.FastPath {
		addr, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil || addr.IsUnspecified() || addr.IsMulticast() {
			return nil, fmt.Errorf("--dns-fastpath=%s is no address of a resolver, such as 10.96.0.10; use those in the resolv.conf of pods", text)
		}
		addrs = append(addrs, addr)
	}
	if len(addrs) > maxResolvers {
		return nil, fmt.Errorf("--dns-fastpath is given %d times; %d addresses have room", len(addrs), maxResolvers)
	}
	return addrs, nil
}

// parseAddresses reads addresses with an optional port.
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
