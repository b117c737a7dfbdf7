// Command isthmus-gateway-controller keeps ports, floating IPs and gateways in step with Services of type LoadBalancer.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/cmd/internal/program"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/controller"
	"github.com/isthmus-net/isthmus/gateway/openstack"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "isthmus-gateway-controller:", err)
		os.Exit(1)
	}
}

// settings are the flags.
type settings struct {
	kubeconfig string
	namespace  string
	config     string
	cloud      string
	clouds     string
	timeout    time.Duration
	resync     time.Duration
	certs      certs.Files
	listen     string
	logFormat  string
	logLevel   slog.Level
}

func command() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "isthmus-gateway-controller",
		Short: "Give Services of type LoadBalancer addresses, and tell the gateways",
		Long: `isthmus-gateway-controller gives every Service of class isthmus.dev/gateway an address
of a pool: a port of OpenStack's Neutron with or without a floating IP, or one of a list.
It tells the gateways, which are the cluster's GatewayNodes, what to balance and to announce.

The pools stand in the file of --config. Of several replicas the one with the Lease works.
It serves /healthz, /readyz and /metrics. While OpenStack, a gateway or the API server is
away, all stays as it is.`,
		Example: `  # In a pod, with the mounted configuration, certificates and clouds.yaml
  isthmus-gateway-controller

  # On a desk
  isthmus-gateway-controller --kubeconfig=$HOME/.kube/east --config=gateways.yaml \
      --cloud=lbaas --cert=tls.crt --key=tls.key --ca=ca.crt

  # What of this cluster is in Neutron and needed by nobody
  isthmus-gateway-controller sweep --dry-run`,
		Args:          usage.NoArgs,
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), s, cmd.ErrOrStderr()) },
	}
	usage.Explain(cmd)
	p := cmd.PersistentFlags()
	p.StringVar(&s.kubeconfig, "kubeconfig", "", "kubeconfig of this cluster; without it, that of the pod")
	p.StringVar(&s.config, "config", "/etc/isthmus/gateway/config.yaml", "the settings: cluster, pools and what counts for Services that do not say")
	p.StringVar(&s.cloud, "cloud", "", "entry of clouds.yaml (default: what OS_CLOUD says)")
	p.StringVar(&s.clouds, "clouds", "", "path of clouds.yaml (default: what OS_CLIENT_CONFIG_FILE says, or the usual places)")
	p.DurationVar(&s.timeout, "cloud-timeout", openstack.DefaultTimeout, "how long a call of OpenStack may take")
	f := cmd.Flags()
	f.StringVar(&s.namespace, "namespace", v1alpha1.DefaultNamespace, "namespace of the Lease, and of Secrets with the passwords of BGP peers")
	f.StringVar(&s.certs.Cert, "cert", "/etc/isthmus/gateway/certs/tls.crt", "certificate by which gateways know the controller; isthmusctl gateway certs makes it")
	f.StringVar(&s.certs.Key, "key", "/etc/isthmus/gateway/certs/tls.key", "its key")
	f.StringVar(&s.certs.CA, "ca", "/etc/isthmus/gateway/certs/ca.crt", "certificates of the authority that signs those of gateways")
	f.DurationVar(&s.resync, "resync", controller.DefaultResync, "how often everything is looked at again, also what somebody did to the cloud by hand")
	f.StringVar(&s.listen, "listen", ":"+strconv.Itoa(status.GatewayControllerPort), "address of /healthz, /readyz and /metrics")
	f.StringVar(&s.logFormat, "log-format", "text", "text or json")
	f.TextVar(&s.logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	cmd.AddCommand(sweep(&s))
	return cmd
}

// run wires the controller to its HTTP door and runs both until ctx ends.
func run(ctx context.Context, s settings, stderr io.Writer) error {
	log, err := program.Logger(s.logFormat, s.logLevel, stderr)
	if err != nil {
		return err
	}
	local, err := program.Cluster(s.kubeconfig)
	if err != nil {
		return err
	}
	c := controller.Config{Local: local, Namespace: s.namespace, Resync: s.resync, Log: log}
	if c.Settings, err = readSettings(s.config); err != nil {
		return err
	}
	own, err := certs.Open(s.certs, log)
	if err != nil {
		return fmt.Errorf("%w; isthmusctl gateway certs makes them, --cert, --key and --ca say where they are", err)
	}
	c.TLS = own.Client
	if c.Cloud, err = connect(ctx, s, c.Settings); err != nil {
		return err
	}
	is, err := controller.New(c)
	if err != nil {
		return err
	}
	listener, err := program.Listen(ctx, s.listen)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return program.Serve(ctx, listener, routes(is)) })
	group.Go(func() error { return is.Run(ctx) })
	return group.Wait()
}

// readSettings reads the file of --config. What it does not know is an error, by its name.
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

// connect returns the cloud, nil where no pool needs one and none is named.
func connect(ctx context.Context, s settings, c controller.Settings) (controller.Cloud, error) {
	needed := slices.ContainsFunc(c.Pools, func(p controller.Pool) bool { return p.Neutron != nil || p.FailoverIP != nil })
	if !needed && c.AddressPairs == controller.PairNone {
		return nil, nil
	}
	return openstack.Connect(ctx, openstack.Config{Cloud: s.cloud, File: s.clouds, Cluster: c.Cluster, Timeout: s.timeout})
}

func routes(c *controller.Controller) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := c.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	})
	return mux
}
