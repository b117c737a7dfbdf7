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

// Config is everything an operator can say to a gateway.
type Config struct {
	Cluster    string // id of the cluster whose controller is obeyed
	Controller string // its identity
	Listen     string // host:port of the controller's endpoint
	HTTPListen string // host:port of /healthz, /readyz and /metrics
	Files      certs.Files
	StateDir   string // what was applied last; it outlives the machine's restart
	RunDir     string // what must not
	Balancer   string // nftables or ebpf
	BPFFS      string // where a BPF filesystem is mounted, for ebpf
	Devices    []string
	XDP        string // off or auto, for ebpf
	CheckEvery time.Duration
	LogFormat  string // text or json
	LogLevel   slog.Level
}

// defaults returns what holds where no flag says otherwise.
func defaults() *Config {
	const etc = "/etc/isthmus-gateway"
	return &Config{
		Controller: certs.Controller,
		Listen:     ":9479",
		HTTPListen: "127.0.0.1:9444",
		Files:      certs.Files{Cert: etc + "/tls.crt", Key: etc + "/tls.key", CA: etc + "/ca.crt"},
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
	f.StringVar(&c.Cluster, "cluster", "", "id of the cluster whose controller is obeyed")
	f.StringVar(&c.Controller, "controller-identity", c.Controller, "DNS name in the certificate of that controller")
	f.StringVar(&c.Listen, "listen", c.Listen, "address of the endpoint for the controller, HTTPS")
	f.StringVar(&c.HTTPListen, "http-listen", c.HTTPListen, "address of /healthz, /readyz and /metrics")
	f.StringVar(&c.Files.Cert, "cert", c.Files.Cert, "the gateway's certificate; files that are replaced are read anew")
	f.StringVar(&c.Files.Key, "key", c.Files.Key, "its private key")
	f.StringVar(&c.Files.CA, "ca", c.Files.CA, "certificates of the authorities that are believed")
	f.StringVar(&c.StateDir, "state-dir", c.StateDir, "folder in which the last state is kept")
	f.StringVar(&c.RunDir, "run-dir", c.RunDir, "folder for what a restart of the machine takes away")
	f.StringVar(&c.Balancer, "balancer", c.Balancer, "nftables or ebpf, as all gateways of the group have it")
	f.StringVar(&c.BPFFS, "bpffs", c.BPFFS, "where a BPF filesystem is mounted, for --balancer=ebpf")
	f.StringSliceVar(&c.Devices, "device", c.Devices, "device whose packets --balancer=ebpf takes, may be repeated; default: all with Ethernet and an address")
	f.StringVar(&c.XDP, "xdp", c.XDP, "off, or auto: with --balancer=ebpf, drivers that have XDP send packets of known connections themselves")
	f.DurationVar(&c.CheckEvery, "check-interval", c.CheckEvery, "how long, on average, between two looks for what somebody else changed")
	f.StringVar(&c.LogFormat, "log-format", c.LogFormat, "text or json")
	f.TextVar(&c.LogLevel, "log-level", c.LogLevel, "debug, info, warn or error")
}

// Validate reports all faults of c at once, each with the flag to mend.
func (c *Config) Validate() error {
	var faults []error
	if c.Cluster == "" {
		faults = append(faults, errors.New("no cluster; set --cluster to the id of the cluster whose controller is to be obeyed"))
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
	if c.CheckEvery <= 0 {
		faults = append(faults, fmt.Errorf("--check-interval=%s is not more than 0", c.CheckEvery))
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		faults = append(faults, fmt.Errorf("--log-format=%s is unknown; use text or json", c.LogFormat))
	}
	return errors.Join(faults...)
}

func (c *Config) statePath() string { return filepath.Join(c.StateDir, "state.json") }

// logger returns the one handler of the process, on standard error.
func logger(c *Config) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.LogLevel}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}
