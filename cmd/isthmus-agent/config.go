package main

import (
	"cmp"
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
	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	"github.com/isthmus-net/isthmus/controlplane/api/about"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Config holds all settings of the agent.
type Config struct {
	NodeName   string
	Kubeconfig string // path; "" means the ServiceAccount of the pod
	CgroupRoot string // mount point of cgroup v2, or of the hybrid hierarchy that contains it
	BPFFS      string // mount point of a BPF file system
	HTTPListen string // host:port of /healthz, /readyz, /metrics, /status and the introspection for isthmusctl
	HTTP       httpserver.Flags
	// ServiceMetrics adds metrics of each Service that clients on this node have used.
	ServiceMetrics bool
	// CheckInterval is the time between two checks of the BPF maps.
	CheckInterval time.Duration
	LogFormat     string // text or json
	LogLevel      slog.Level

	// Source is the source of snapshots: "kubernetes", or "dir:PATH" for a folder of manifests.
	Source string
	// Imports is writers.Isthmus or writers.Any; "" is writers.Isthmus in a cluster and writers.Any for a folder.
	Imports string
	// ClusterID, Zone, Region and Ranges are read from the API server if they are empty. Namespace holds the registration of
	// this member.
	ClusterID    string
	Zone, Region string
	Ranges       []string
	Namespace    string
	// ZonesSpanClusters and RegionsSpanClusters say that names mean the same in all members.
	ZonesSpanClusters, RegionsSpanClusters bool

	// Packets adds the packet path, on Devices, or on detected devices if that is empty.
	Packets bool
	Devices []string
	Order   string
	// FastPath lets the packet path bypass the node's routing and netfilter.
	FastPath bool
	// Proc and Namespaces are the mount points of the node's /proc and of its named network namespaces.
	Proc, Namespaces string

	DNS dnsConfig
}

// defaults returns the settings without flags. The DaemonSet sets NODE_NAME from spec.nodeName.
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
	f.StringVar(&c.CgroupRoot, "cgroup-root", c.CgroupRoot, "mount point of the node's cgroup file systems")
	f.StringVar(&c.BPFFS, "bpffs", c.BPFFS, "mount point of the node's BPF file system")
	f.StringVar(&c.HTTPListen, "http-listen", c.HTTPListen, "address of /healthz, /readyz, /metrics, /status and of the introspection that isthmusctl uses")
	c.HTTP.Bind(f)
	f.BoolVar(&c.ServiceMetrics, "service-metrics", c.ServiceMetrics, "add metrics of each Service that clients on this node have used")
	f.DurationVar(&c.CheckInterval, "check-interval", c.CheckInterval, "average time between two checks of the BPF maps")
	c.DNS.bind(f)
	f.StringVar(&c.Source, "source", c.Source, "source of ServiceImports and EndpointSlices: kubernetes, or dir:PATH for a folder of manifests")
	f.StringVar(&c.Imports, "imports", "", "ServiceImports and EndpointSlices to serve: isthmus, those that controllers of Isthmus wrote, or any, those of every MCS implementation inside --clusterset-ip-range; default: isthmus, or any for a folder")
	f.StringVar(&c.ClusterID, "cluster-id", "", "id of this cluster; default: its ClusterProperty "+about.ClusterID)
	f.StringVar(&c.Zone, "zone", "", "zone of this node; default: its label "+corev1.LabelTopologyZone)
	f.StringVar(&c.Region, "region", "", "region of this node; default: its label "+corev1.LabelTopologyRegion)
	f.StringSliceVar(&c.Ranges, "clusterset-ip-range", nil, "range of ClusterSetIPs, repeatable; no other address is served, and connections to an unused one are refused at once; default: the ranges of this member and of its federation, none with --imports=any")
	f.StringVar(&c.Namespace, "namespace", c.Namespace, "namespace with the registration of this member; env POD_NAMESPACE")
	f.BoolVar(&c.ZonesSpanClusters, "zones-span-clusters", false, "treat zones with the same name in different clusters as one zone")
	f.BoolVar(&c.RegionsSpanClusters, "regions-span-clusters", false, "treat regions with the same name in different clusters as one region")
	f.BoolVar(&c.Packets, "packet-path", false, "also serve clients whose sockets are not translated, by translating packets on network devices")
	f.StringSliceVar(&c.Devices, "device", nil, "device of the packet path, or a pattern such as eth*, repeatable; default: detected devices")
	f.StringVar(&c.Order, "packet-order", "", fmt.Sprintf("position of the packet path among other programs on a device: %s (the default) or %s", datapath.OrderNear, datapath.OrderFar))
	f.BoolVar(&c.FastPath, "fast-path", false, "let the packet path bypass the node's routing and netfilter, including all policies enforced there")
	f.StringVar(&c.Proc, "proc", "", "mount point of the node's /proc, to close sockets to removed backends; default /proc")
	f.StringVar(&c.Namespaces, "netns", "", "folder with the node's named network namespaces; default /run/netns")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	f.TextVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
}

// Validate returns all errors in c, joined. Each names the flag to correct.
func (c *Config) Validate() error {
	var faults []error
	folder, standalone := c.folder()
	if standalone && folder == "" || !standalone && c.Source != sourceKubernetes {
		faults = append(faults, fmt.Errorf("--source=%s is unknown; use kubernetes, or dir:PATH with the folder of the manifests", c.Source))
	}
	if _, err := writers.ManagedBy(cmp.Or(c.Imports, c.imports())); err != nil {
		faults = append(faults, err)
	} else if standalone && c.Imports == writers.Isthmus {
		faults = append(faults, errors.New("--imports=isthmus does not apply to a folder of manifests; omit it"))
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
	if _, err := c.HTTP.Config(slog.New(slog.DiscardHandler)); err != nil {
		faults = append(faults, err)
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

// agent returns the settings of the dataplane.
func (c *Config) agent() agent.Config {
	return agent.Config{
		CgroupRoot: c.CgroupRoot, BPFFS: c.BPFFS, Proc: c.Proc, Namespaces: c.Namespaces,
		Packets: c.Packets, Devices: c.Devices, Order: datapath.Order(c.Order), FastPath: c.FastPath, Topology: c.topology(),
		CheckInterval: c.CheckInterval,
	}
}

// sourceKubernetes is the source of an agent in a cluster.
const sourceKubernetes = "kubernetes"

// imports returns Imports or its default.
func (c *Config) imports() string {
	if _, standalone := c.folder(); standalone {
		return writers.Any
	}
	return cmp.Or(c.Imports, writers.Isthmus)
}

// folder returns the folder of manifests, and whether the source is one.
func (c *Config) folder() (path string, standalone bool) { return strings.CutPrefix(c.Source, "dir:") }

// logger returns the logger of the process, which writes to standard error.
func logger(c *Config) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.LogLevel}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}
