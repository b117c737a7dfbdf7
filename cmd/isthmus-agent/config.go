package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/api/about"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/dns"
	"github.com/isthmus-net/isthmus/dns/device"
)

// Config is everything an operator can say to the agent.
type Config struct {
	NodeName   string
	Kubeconfig string // path; "" means the ServiceAccount of the pod
	CgroupRoot string // where cgroup v2, or the hybrid tree that holds it, is mounted
	BPFFS      string // a mounted BPF file system
	HTTPListen string // host:port of /healthz, /readyz, /metrics, /status and what isthmusctl asks for
	// ServiceMetrics adds metrics of each Service that clients on this node asked for.
	ServiceMetrics bool
	// CheckInterval passes between two checks of the maps.
	CheckInterval time.Duration
	LogFormat     string // text or json
	LogLevel      slog.Level

	// Source is where the world comes from: "kubernetes", or "dir:PATH" for a folder of manifests.
	Source string
	// ClusterID, Zone and Ranges are asked of the API server where they are not given. Namespace is where the
	// member's registration is.
	ClusterID         string
	Zone              string
	Ranges            []string
	Namespace         string
	ZonesSpanClusters bool

	// Packets adds the packet path, on Devices, or on those that are found.
	Packets bool
	Devices []string
	Order   string
	// FastRoad lets the packet path pass by the node's routing and netfilter.
	FastRoad bool
	// Proc and Namespaces are where the node's processes and network namespaces are seen.
	Proc, Namespaces string

	// DNSListen holds addresses with an optional port; NodeIPs are added to it, where it is not given.
	DNSListen []string
	NodeIPs   []string
	// The zone: see dns.Config. DNSEmptyHeadless is what a headless Service without ready endpoints gets, nxdomain or
	// nodata.
	DNSTTL           uint32
	DNSEmptyHeadless string
	DNSClusterScoped bool
	DNSReverse       []string
	DNSZoneFile      string
}

// What --dns-empty-headless takes.
const (
	emptyNXDomain = "nxdomain"
	emptyNoData   = "nodata"
)

// defaults returns what holds where no flag says otherwise. NODE_NAME and NODE_IPS come from the
// DaemonSet (spec.nodeName and status.hostIPs).
func defaults() *Config {
	c := &Config{
		NodeName:   os.Getenv("NODE_NAME"),
		CgroupRoot: "/sys/fs/cgroup",
		BPFFS:      "/sys/fs/bpf",
		HTTPListen: fmt.Sprintf(":%d", status.AgentPort),
		LogFormat:  "text",

		ServiceMetrics: true,
		CheckInterval:  agent.DefaultCheckInterval,
		Source:         sourceKubernetes,
		Namespace:      v1alpha1.DefaultNamespace,

		DNSTTL:           dns.DefaultTTL,
		DNSEmptyHeadless: emptyNXDomain,
	}
	if ns := os.Getenv("POD_NAMESPACE"); ns != "" {
		c.Namespace = ns
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
	f.StringVar(&c.HTTPListen, "http-listen", c.HTTPListen, "address of /healthz, /readyz, /metrics, /status, and what isthmusctl asks for")
	f.BoolVar(&c.ServiceMetrics, "service-metrics", c.ServiceMetrics, "count clients by Service in /metrics, for each Service that clients on this node asked for")
	f.DurationVar(&c.CheckInterval, "check-interval", c.CheckInterval, "how long, on average, between two comparisons of the kernel's maps with what they should hold")
	f.StringArrayVar(&c.DNSListen, "dns-listen", nil, fmt.Sprintf(
		"address[:port] to answer DNS on, repeatable; link-local and %s addresses are assigned to interface %s (default %s, %s and --node-ip)",
		netip.PrefixFrom(device.IPv6, 48).Masked(), device.Name, device.IPv4, device.IPv6))
	f.StringSliceVar(&c.NodeIPs, "node-ip", c.NodeIPs, "addresses of this node for DNS questions of its neighbours, repeatable; env NODE_IPS")
	f.Uint32Var(&c.DNSTTL, "dns-ttl", c.DNSTTL, "seconds for which clients may remember an answer, 0 to 3600")
	f.StringVar(&c.DNSEmptyHeadless, "dns-empty-headless", c.DNSEmptyHeadless, fmt.Sprintf("what the name of a headless Service without ready endpoints is answered with: %s, or %s as with Lighthouse", emptyNXDomain, emptyNoData))
	f.BoolVar(&c.DNSClusterScoped, "dns-cluster-scoped", false, "also answer for <cluster>.<service>.<namespace>.svc.clusterset.local, as with Lighthouse; the MCS API's specification forbids it")
	f.StringSliceVar(&c.DNSReverse, "dns-reverse", nil, "range of ClusterSetIPs whose addresses have names (PTR), repeatable")
	f.StringVar(&c.DNSZoneFile, "dns-zone-file", "", "file that keeps the names over a restart, so that they are answered before the API server is")
	f.StringVar(&c.Source, "source", c.Source, "where ServiceImports and EndpointSlices come from: kubernetes, or dir:PATH for a folder of manifests")
	f.StringVar(&c.ClusterID, "cluster-id", "", "id of this cluster; default: its ClusterProperty "+about.ClusterID)
	f.StringVar(&c.Zone, "zone", "", "zone of this node; default: its label "+corev1.LabelTopologyZone)
	f.StringSliceVar(&c.Ranges, "clusterset-ip-range", nil, "range of ClusterSetIPs, repeatable: an address in it that nobody serves is refused at once; default: this member's own")
	f.StringVar(&c.Namespace, "namespace", c.Namespace, "where the registration of this member is; env POD_NAMESPACE")
	f.BoolVar(&c.ZonesSpanClusters, "zones-span-clusters", false, "zones of one name are one zone, in whatever cluster")
	f.BoolVar(&c.Packets, "packet-path", false, "also serve clients whose sockets are not translated, by the packets on their devices")
	f.StringSliceVar(&c.Devices, "device", nil, "device of the packet path, or a pattern such as eth*, repeatable; default: those that are found")
	f.StringVar(&c.Order, "packet-order", "", fmt.Sprintf("place of the packet path among the programs of others on a device: %s (the default) or %s", datapath.OrderNear, datapath.OrderFar))
	f.BoolVar(&c.FastRoad, "fast-road", false, "let the packet path pass by the node's routing and netfilter, and whatever policies others enforce there")
	f.StringVar(&c.Proc, "proc", "", "where the node's processes are seen, to close sockets of backends that went; default /proc")
	f.StringVar(&c.Namespaces, "netns", "", "where the node's named network namespaces are seen; default /run/netns")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	f.TextVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
}

// Validate reports all faults of c at once, each with the flag to mend.
func (c *Config) Validate() error {
	var faults []error
	folder, standalone := c.folder()
	if standalone && folder == "" || !standalone && c.Source != sourceKubernetes {
		faults = append(faults, fmt.Errorf("--source=%s is unknown; use kubernetes, or dir:PATH with the folder of the manifests", c.Source))
	}
	if c.NodeName == "" && !standalone {
		faults = append(faults, errors.New("no node name; set --node-name or the environment variable NODE_NAME"))
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		faults = append(faults, fmt.Errorf("--log-format=%s is unknown; use text or json", c.LogFormat))
	}
	if _, _, err := net.SplitHostPort(c.HTTPListen); err != nil {
		faults = append(faults, fmt.Errorf("--http-listen=%s is not host:port, such as :%d", c.HTTPListen, status.AgentPort))
	}
	if c.CheckInterval <= 0 {
		faults = append(faults, fmt.Errorf("--check-interval=%s is not more than 0", c.CheckInterval))
	}
	if c.DNSEmptyHeadless != emptyNXDomain && c.DNSEmptyHeadless != emptyNoData {
		faults = append(faults, fmt.Errorf("--dns-empty-headless=%s is unknown; use %s or %s", c.DNSEmptyHeadless, emptyNXDomain, emptyNoData))
	}
	if _, err := c.zone(); err != nil {
		faults = append(faults, err)
	}
	if c.ClusterID != "" {
		if err := clusterset.ClusterID(c.ClusterID).Validate(); err != nil {
			faults = append(faults, fmt.Errorf("--cluster-id: %w", err))
		}
	}
	if _, err := parseRanges(c.Ranges); err != nil {
		faults = append(faults, fmt.Errorf("--clusterset-ip-range: %w", err))
	}
	if err := c.agent().Validate(); err != nil {
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

// agent is the dataplane's part of c.
func (c *Config) agent() agent.Config {
	return agent.Config{
		CgroupRoot: c.CgroupRoot, BPFFS: c.BPFFS, Proc: c.Proc, Namespaces: c.Namespaces,
		Packets: c.Packets, Devices: c.Devices, Order: datapath.Order(c.Order), FastRoad: c.FastRoad, Place: c.place(),
		CheckInterval: c.CheckInterval,
	}
}

// sourceKubernetes is the source of an agent in a cluster.
const sourceKubernetes = "kubernetes"

// folder returns the folder of manifests, if that is the source.
func (c *Config) folder() (path string, standalone bool) { return strings.CutPrefix(c.Source, "dir:") }

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
	return addrs, nil
}

// zone is the name server's part of c.
func (c *Config) zone() (dns.Config, error) {
	listen, err := c.dnsAddresses()
	if err != nil {
		return dns.Config{}, err
	}
	reverse, err := parseRanges(c.DNSReverse)
	if err != nil {
		return dns.Config{}, fmt.Errorf("--dns-reverse: %w", err)
	}
	cfg := dns.Config{
		Listen: listen, TTL: c.DNSTTL, EmptyHeadless: c.DNSEmptyHeadless == emptyNoData, ClusterScoped: c.DNSClusterScoped,
		Reverse: reverse, File: c.DNSZoneFile, Limits: dns.DefaultLimits,
	}
	return cfg, cfg.Validate()
}

// logger returns the one handler of the process, on standard error.
func logger(c *Config) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.LogLevel}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}
