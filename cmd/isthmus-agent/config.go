package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/dns/device"
)

// Config is everything an operator can say to the agent.
type Config struct {
	NodeName   string
	Kubeconfig string // path; "" means the ServiceAccount of the pod
	CgroupRoot string // where cgroup v2, or the hybrid tree that holds it, is mounted
	BPFFS      string // a mounted BPF file system
	HTTPListen string // host:port of /healthz, /readyz, /metrics and /status
	LogFormat  string // text or json
	LogLevel   slog.Level

	// DNSListen holds addresses with an optional port; NodeIPs are added to it, where it is not given.
	DNSListen []string
	NodeIPs   []string
}

// defaults returns what holds where no flag says otherwise. NODE_NAME and NODE_IPS come from the
// DaemonSet (spec.nodeName and status.hostIPs).
func defaults() *Config {
	c := &Config{
		NodeName:   os.Getenv("NODE_NAME"),
		CgroupRoot: "/sys/fs/cgroup",
		BPFFS:      "/sys/fs/bpf",
		HTTPListen: fmt.Sprintf(":%d", status.AgentPort),
		LogFormat:  "text",
	}
	if ips := os.Getenv("NODE_IPS"); ips != "" {
		c.NodeIPs = strings.Split(ips, ",")
	}
	return c
}

func (c *Config) bind(f *pflag.FlagSet) {
	f.StringVar(&c.NodeName, "node-name", c.NodeName, "name of this node in Kubernetes; env NODE_NAME")
	f.StringVar(&c.Kubeconfig, "kubeconfig", c.Kubeconfig, "path of a kubeconfig; default: the pod's ServiceAccount")
	f.StringVar(&c.CgroupRoot, "cgroup-root", c.CgroupRoot, "where the node's cgroup file systems are mounted")
	f.StringVar(&c.BPFFS, "bpffs", c.BPFFS, "where the node's BPF file system is mounted")
	f.StringVar(&c.HTTPListen, "http-listen", c.HTTPListen, "address of /healthz, /readyz, /metrics and /status")
	f.StringArrayVar(&c.DNSListen, "dns-listen", nil, fmt.Sprintf(
		"address[:port] to answer DNS on, repeatable; link-local and %s addresses are assigned to interface %s (default %s, %s and --node-ip)",
		netip.PrefixFrom(device.IPv6, 48).Masked(), device.Name, device.IPv4, device.IPv6))
	f.StringSliceVar(&c.NodeIPs, "node-ip", c.NodeIPs, "addresses of this node for DNS questions of its neighbours, repeatable; env NODE_IPS")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	f.TextVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
}

// Validate reports all faults of c at once, each with the flag to mend.
func (c *Config) Validate() error {
	var faults []error
	if c.NodeName == "" {
		faults = append(faults, errors.New("no node name; set --node-name or the environment variable NODE_NAME"))
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		faults = append(faults, fmt.Errorf("--log-format=%s is unknown; use text or json", c.LogFormat))
	}
	if _, _, err := net.SplitHostPort(c.HTTPListen); err != nil {
		faults = append(faults, fmt.Errorf("--http-listen=%s is not host:port, such as :%d", c.HTTPListen, status.AgentPort))
	}
	if _, err := c.dnsAddresses(); err != nil {
		faults = append(faults, err)
	}
	if err := c.agent().Validate(); err != nil {
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

// agent is the dataplane's part of c.
func (c *Config) agent() agent.Config {
	return agent.Config{CgroupRoot: c.CgroupRoot, BPFFS: c.BPFFS}
}

// dnsAddresses returns where to answer DNS, most local first.
func (c *Config) dnsAddresses() ([]netip.AddrPort, error) {
	flag, texts := "--dns-listen", c.DNSListen
	if len(texts) == 0 {
		flag, texts = "--node-ip", append([]string{device.IPv4.String(), device.IPv6.String()}, c.NodeIPs...)
	}
	var addrs []netip.AddrPort
	var faults []error
	for _, text := range texts {
		text = strings.TrimSpace(text)
		if addr, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, netip.AddrPortFrom(addr.Unmap(), dns.DefaultPort))
			continue
		}
		ap, err := netip.ParseAddrPort(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s=%s is not an address with an optional port, such as 192.0.2.1 or [2001:db8::1]:5353", flag, text))
			continue
		}
		addrs = append(addrs, ap)
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	if err := (dns.Config{Listen: addrs}).Validate(); err != nil {
		return nil, err
	}
	return addrs, nil
}

// logger returns the one handler of the process, on standard error.
func logger(c *Config) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.LogLevel}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}
