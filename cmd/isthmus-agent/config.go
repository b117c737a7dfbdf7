package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
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

	DNS dnsConfig
}

// defaults returns what holds where no flag says otherwise. NODE_NAME comes from the DaemonSet (spec.nodeName).
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
		DNS:            dnsDefaults(),
	}
	if ns := os.Getenv("POD_NAMESPACE"); ns != "" {
		c.Namespace = ns
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
	c.DNS.bind(f)
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
	if _, err := c.DNS.server(); err != nil {
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
		Packets: c.Packets, Devices: c.Devices, Order: datapath.Order(c.Order), FastPath: c.FastRoad, Topology: c.place(),
		CheckInterval: c.CheckInterval,
	}
}

// sourceKubernetes is the source of an agent in a cluster.
const sourceKubernetes = "kubernetes"

// folder returns the folder of manifests, if that is the source.
func (c *Config) folder() (path string, standalone bool) { return strings.CutPrefix(c.Source, "dir:") }

// logger returns the one handler of the process, on standard error.
func logger(c *Config) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.LogLevel}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}
