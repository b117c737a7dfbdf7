package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/gateway/agent"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/ebpf"
)

// Config holds the flags of a gateway.
type Config struct {
	Cluster    string // id of the cluster whose controller it obeys
	Controller string // identity in the controller's certificate
	Listen     string // host:port for the controller and peers
	HTTPListen string // host:port of /healthz, /readyz, /metrics and /peers
	Insecure   bool   // plain HTTP at HTTPListen
	Files      certs.Files
	Renewal    bool   // the controller may renew the certificate
	StateDir   string // state that survives a reboot
	RunDir     string // state that must not survive a reboot
	Balancer   string // nftables or ebpf
	BPFFS      string // mount point of a BPF file system, for ebpf
	Devices    []string
	XDP        string // off or auto, for ebpf
	Flows      int    // capacity in connections, for ebpf; 0: by the machine's memory
	CheckEvery time.Duration
	LogFormat  string // text or json
	LogLevel   slog.Level
}

// defaults returns the values of flags that are not set.
func defaults() *Config {
	const etc = "/etc/isthmus-gateway"
	return &Config{
		Controller: certs.Controller,
		Listen:     ":9479",
		HTTPListen: "127.0.0.1:9444",
		Files:      certs.Files{Cert: etc + "/tls.crt", Key: etc + "/tls.key", CA: etc + "/ca.crt"},
		Renewal:    true,
		StateDir:   "/var/lib/isthmus-gateway",
		RunDir:     "/run/isthmus-gateway",
		Balancer:   string(desired.NFTables),
		BPFFS:      "/sys/fs/bpf",
		XDP:        string(ebpf.XDPOff),
		CheckEvery: agent.DefaultCheckEvery,
		LogFormat:  "text",
	}
}

func (c *Config) bind(f *pflag.FlagSet) {
	f.StringVar(&c.Cluster, "cluster", "", "id of the cluster whose controller this gateway obeys")
	f.StringVar(&c.Controller, "controller-identity", c.Controller, "DNS name in the controller's certificate")
	f.StringVar(&c.Listen, "listen", c.Listen, "HTTPS address for the controller and the other gateways of the group")
	f.StringVar(&c.HTTPListen, "http-listen", c.HTTPListen, "HTTPS address of /healthz, /readyz, /metrics and /peers; the latter two are for this machine, and for clients with a certificate of --ca")
	f.BoolVar(&c.Insecure, "insecure-http", c.Insecure, "serve plain HTTP on --http-listen, with /metrics open to every client that reaches it")
	f.StringVar(&c.Files.Cert, "cert", c.Files.Cert, "the gateway's certificate; replaced files are read again")
	f.StringVar(&c.Files.Key, "key", c.Files.Key, "its private key")
	f.StringVar(&c.Files.CA, "ca", c.Files.CA, "certificates of the trusted authorities")
	f.BoolVar(&c.Renewal, "accept-renewal", c.Renewal, "let the controller renew the certificate; the new one is in --state-dir, and is used while it is newer than --cert")
	f.StringVar(&c.StateDir, "state-dir", c.StateDir, "folder that keeps the last state")
	f.StringVar(&c.RunDir, "run-dir", c.RunDir, "folder for files that must not survive a reboot")
	f.StringVar(&c.Balancer, "balancer", c.Balancer, "nftables or ebpf, the same on all gateways of the group")
	f.StringVar(&c.BPFFS, "bpffs", c.BPFFS, "mount point of a BPF file system, for --balancer=ebpf")
	f.StringSliceVar(&c.Devices, "device", c.Devices, "device whose packets --balancer=ebpf balances, may be repeated; default: all Ethernet devices with an address")
	f.StringVar(&c.XDP, "xdp", c.XDP, "off or auto: with --balancer=ebpf, XDP programs send packets of known connections from drivers that support it")
	f.IntVar(&c.Flows, "flows", c.Flows, "connections for which --balancer=ebpf has room, of 1.7 KB each, the same on all gateways of the group; 0: they take a sixteenth of the machine's memory")
	f.DurationVar(&c.CheckEvery, "check-interval", c.CheckEvery, "average time between two checks for drift")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	f.TextVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
}

// Validate returns all faults of c at once, each with its flag.
func (c *Config) Validate() error {
	var faults []error
	if c.Cluster == "" {
		faults = append(faults, errors.New("no cluster; set --cluster to the id of the cluster whose controller this gateway obeys"))
	} else if err := clusterset.ClusterID(c.Cluster).Validate(); err != nil {
		faults = append(faults, fmt.Errorf("--cluster: %w", err))
	}
	if c.Controller == "" {
		faults = append(faults, errors.New("--controller-identity is empty; isthmusctl gateway certs gives it "+certs.Controller))
	}
	for flag, address := range map[string]string{"listen": c.Listen, "http-listen": c.HTTPListen} {
		if _, _, err := net.SplitHostPort(address); err != nil {
			faults = append(faults, fmt.Errorf("--%s=%s is not host:port, such as :9479", flag, address))
		}
	}
	for flag, dir := range map[string]string{"state-dir": c.StateDir, "run-dir": c.RunDir} {
		if !filepath.IsAbs(dir) {
			faults = append(faults, fmt.Errorf("--%s=%s is not an absolute path", flag, dir))
		}
	}
	if c.Balancer != string(desired.NFTables) && c.Balancer != string(desired.EBPF) {
		faults = append(faults, fmt.Errorf("--balancer=%s is unknown; use nftables or ebpf", c.Balancer))
	}
	if c.XDP != string(ebpf.XDPOff) && c.XDP != string(ebpf.XDPAuto) {
		faults = append(faults, fmt.Errorf("--xdp=%s is unknown; use off or auto", c.XDP))
	} else if c.XDP == string(ebpf.XDPAuto) && c.Balancer == string(desired.NFTables) {
		faults = append(faults, errors.New("--xdp=auto is for --balancer=ebpf; leave one of them out"))
	}
	if c.Flows != 0 && (c.Flows < ebpf.MinFlows || c.Flows > ebpf.MaxFlows) {
		faults = append(faults, fmt.Errorf("--flows=%d is not between %d and %d; leave it out to size the tables by the machine's memory", c.Flows, ebpf.MinFlows, ebpf.MaxFlows))
	} else if c.Flows != 0 && c.Balancer == string(desired.NFTables) {
		faults = append(faults, errors.New("--flows is for --balancer=ebpf; with nftables, set the sysctl net.netfilter.nf_conntrack_max"))
	}
	if c.CheckEvery <= 0 {
		faults = append(faults, fmt.Errorf("--check-interval=%s is not positive", c.CheckEvery))
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		faults = append(faults, fmt.Errorf("--log-format=%s is unknown; use text or json", c.LogFormat))
	}
	return errors.Join(faults...)
}

// vrrpDir is the folder of keepalived's files.
func (c *Config) vrrpDir() string { return filepath.Join(c.RunDir, "vrrp") }

func (c *Config) statePath() string { return filepath.Join(c.StateDir, "state.json") }

// logger returns the logger of the process, on standard error.
func logger(c *Config) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.LogLevel}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}
