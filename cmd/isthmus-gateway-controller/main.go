// Command isthmus-gateway-controller keeps Neutron ports, floating IPs and gateways in step with Services of type
// LoadBalancer.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/cmd/internal/cli"
	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/controller"
	"github.com/isthmus-net/isthmus/gateway/openstack"
)

func main() { cli.Main(command()) }

// settings are the flags.
type settings struct {
	kubeconfig string
	namespace  string
	config     string
	imports    string
	cloud      string
	clouds     string
	timeout    time.Duration
	resync     time.Duration
	certs      certs.Files
	renewal    controller.Renewal
	listen     string
	http       httpserver.Flags
	logFormat  string
	logLevel   slog.Level
}

func command() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "isthmus-gateway-controller",
		Short: "Allocate addresses for Services of type LoadBalancer, and configure the gateways",
		Long: `isthmus-gateway-controller allocates an address for every Service of class isthmus.dev/gateway
from a pool: an OpenStack Neutron port with or without a floating IP, or an address of a list.
It also sends each gateway, registered as a GatewayNode, the VIPs to balance and announce.

The file of --config defines the pools. Of several replicas, the one with the Lease is active.
It serves /healthz, /readyz and /metrics over HTTPS; the latter needs a token of an account with the
right to the nonResourceURL /metrics. While a gateway or the API server does not answer,
everything stays as it is. While OpenStack does not, endpoints and lists of addresses are
handled as ever, and new addresses of pools with Neutron wait.`,
		Example: `  # In a pod, with the mounted configuration, certificates and clouds.yaml
  isthmus-gateway-controller

  # On a workstation
  isthmus-gateway-controller --kubeconfig=$HOME/.kube/east --config=gateways.yaml \
      --cloud=lbaas --cert=tls.crt --key=tls.key --ca=ca.crt

  # List the objects of this cluster in Neutron that no Service uses
  isthmus-gateway-controller sweep --dry-run`,
		Args:          usage.NoArgs,
		Version:       version.Long(),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), s, cmd.ErrOrStderr()) },
	}
	usage.Explain(cmd)
	p := cmd.PersistentFlags()
	p.StringVar(&s.kubeconfig, "kubeconfig", "", "kubeconfig of this cluster; default: the pod's service account")
	p.StringVar(&s.config, "config", "/etc/isthmus/gateway/config.yaml", "file with the settings: cluster, pools and defaults of Services")
	p.StringVar(&s.cloud, "cloud", "", "entry of clouds.yaml (default: OS_CLOUD)")
	p.StringVar(&s.clouds, "clouds", "", "path of clouds.yaml (default: OS_CLIENT_CONFIG_FILE, or the usual places)")
	p.DurationVar(&s.timeout, "cloud-timeout", openstack.DefaultTimeout, "timeout of a call to OpenStack")
	f := cmd.Flags()
	f.StringVar(&s.namespace, "namespace", v1alpha1.DefaultNamespace, "namespace of the Lease and of the Secrets with BGP passwords")
	f.StringVar(&s.certs.Cert, "cert", "/etc/isthmus/gateway/certs/tls.crt", "certificate that authenticates the controller to gateways; isthmusctl gateway certs makes it")
	f.StringVar(&s.certs.Key, "key", "/etc/isthmus/gateway/certs/tls.key", "private key of the certificate")
	f.StringVar(&s.certs.CA, "ca", "/etc/isthmus/gateway/certs/ca.crt", "certificates of the authority that signs the gateways' certificates")
	f.StringVar(&s.renewal.Authority, "authority-secret", "", "Secret of --namespace with the authority's tls.crt and tls.key, which renews --renew-secret; isthmusctl gateway certs writes it")
	f.StringArrayVar(&s.renewal.Certificates, "renew-secret", nil, "Secret of --namespace whose certificates the controller renews, repeatable")
	f.StringVar(&s.imports, "imports", writers.Isthmus, "EndpointSlices of ServiceImports to use: isthmus, those that controllers of Isthmus wrote, or any, those of every MCS implementation")
	f.DurationVar(&s.resync, "resync", controller.DefaultResync, "time between two full syncs, which also undo manual changes in the cloud")
	f.StringVar(&s.listen, "listen", ":"+strconv.Itoa(status.GatewayControllerPort), "address of /healthz, /readyz and /metrics")
	s.http.Bind(f)
	f.StringVar(&s.logFormat, "log-format", "text", "text or json")
	f.TextVar(&s.logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	cmd.AddCommand(sweep(&s))
	return cmd
}

// run wires the controller to its HTTP server, and runs both until ctx ends.
func run(ctx context.Context, s settings, stderr io.Writer) error {
	log, err := cli.Logger(s.logFormat, s.logLevel, stderr)
	if err != nil {
		return err
	}
	managedBy, err := writers.ManagedBy(s.imports)
	if err != nil {
		return err
	}
	local, err := cli.Cluster(s.kubeconfig)
	if err != nil {
		return err
	}
	if (s.renewal.Authority == "") != (len(s.renewal.Certificates) == 0) {
		return errors.New("--authority-secret and --renew-secret need each other; give both to renew certificates, or none")
	}
	c := controller.Config{Local: local, Namespace: s.namespace, ManagedBy: managedBy, Renewal: s.renewal, Resync: s.resync, Log: log}
	if c.Settings, err = readSettings(s.config); err != nil {
		return err
	}
	own, err := certs.Open(s.certs, log)
	if err != nil {
		return fmt.Errorf("%w; isthmusctl gateway certs makes them, --cert, --key and --ca say where they are", err)
	}
	c.TLS = own.Client
	if c.Cloud, err = cloudOf(s, c.Settings); err != nil {
		return err
	}
	is, err := controller.New(c)
	if err != nil {
		return err
	}
	server, err := newServer(ctx, s, is, log, own.Metrics()...)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Serve(ctx) })
	group.Go(func() error { return is.Run(ctx) })
	return group.Wait()
}

// readSettings reads the file of --config. An unknown field is an error.
func readSettings(path string) (controller.Settings, error) {
	var s controller.Settings
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, fmt.Errorf("--config=%s does not exist; give it the path of the settings", path)
	}
	if err != nil {
		return s, fmt.Errorf("--config=%s cannot be read: %w", path, err)
	}
	if err := yaml.UnmarshalStrict(text, &s); err != nil {
		return s, fmt.Errorf("--config=%s: %w", path, err)
	}
	if err := s.Complete(); err != nil {
		return s, fmt.Errorf("--config=%s: %w", path, err)
	}
	return s, nil
}

// cloudOf returns the cloud, or nil if none is named and no pool and no address pairs need one. It makes no request: the controller starts
// while Keystone is down.
func cloudOf(s settings, c controller.Settings) (controller.Cloud, error) {
	needed := slices.ContainsFunc(c.Pools, func(p controller.Pool) bool { return p.Neutron != nil || p.FailoverIP != nil })
	if !needed && c.AddressPairs == controller.PairNone && s.cloud == "" { // named, it serves pools that were removed
		return nil, nil
	}
	return openstack.New(openstack.Config{Cloud: s.cloud, File: s.clouds, Cluster: c.Cluster, Timeout: s.timeout})
}

// newServer returns the server of probes and metrics, with more of them.
func newServer(ctx context.Context, s settings, c *controller.Controller, log *slog.Logger, more ...prometheus.Collector) (*httpserver.Server, error) {
	local, err := cli.Cluster(s.kubeconfig)
	if err != nil {
		return nil, err
	}
	listener, err := cli.Listen(ctx, s.listen)
	if err != nil {
		return nil, err
	}
	waiting := func() []string {
		if err := c.Ready(); err != nil {
			return []string{err.Error()}
		}
		return nil
	}
	server, err := cli.NewServer(listener, s.http, local, status.GatewayControllerAudience, waiting, log, more...)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return server, nil
}
