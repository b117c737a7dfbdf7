// Command isthmus-controller is the control plane of one member cluster.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/cmd/internal/cli"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/cmd/internal/zoneask"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "isthmus-controller:", err)
		os.Exit(1)
	}
}

// gcPercent makes the heap grow by half before it is collected, where Go lets it double: memory is what a
// controller costs all day, processor time only while something changes. GOGC overrules it.
const gcPercent = 50

// federationGCPercent is that of a supervisor, who keeps what all members of the federation have.
const federationGCPercent = 25

// settings are the flags.
type settings struct {
	kubeconfig       string
	brokerKubeconfig string
	namespace        string
	listen           string
	logFormat        string
	logLevel         slog.Level
	federation       bool
	machines, clouds string
	plane            broker.Settings
}

func command() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "isthmus-controller",
		Short: "Export this cluster's Services to the ClusterSet and import everybody's",
		Long: `isthmus-controller runs in every member of a ClusterSet. It tells the broker which
Services this cluster exports, and creates a ServiceImport and EndpointSlices here for
every Service that any member exports. isthmusctl join installs it.

With --federation it also does this cluster's part in a federation, which needs no broker:
where the cluster's Federation names members, it takes part in the election of a leader
for each, and a leader brings federated Services and policies in line there. It makes
Services of machines outside of the cluster, too: of ExternalWorkloads, and of servers of
the clouds that --machines names. Without the kubeconfig of a broker it does nothing else.
isthmusctl federation forms one.

It serves /healthz, /readyz, /metrics and /status as JSON. While the broker is away it
changes nothing, is not ready, and keeps trying.`,
		Example: `  # In a pod: the cluster's own API server, and the broker by the mounted secret
  isthmus-controller

  # On a desk
  isthmus-controller --kubeconfig=$HOME/.kube/east --broker-kubeconfig=broker.kubeconfig

  # A cluster of a federation
  isthmus-controller --federation

  # The same, with virtual machines of OpenStack as Services
  isthmus-controller --federation --machines=machines.yaml --clouds=clouds.yaml`,
		Args:          usage.NoArgs,
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), s, cmd.ErrOrStderr()) },
	}
	usage.Explain(cmd)
	f := cmd.Flags()
	f.StringVar(&s.kubeconfig, "kubeconfig", "", "kubeconfig of this cluster; without it, that of the pod")
	f.StringVar(&s.brokerKubeconfig, "broker-kubeconfig", "/etc/isthmus/broker/kubeconfig", "kubeconfig of the broker; its context names the broker's namespace")
	f.StringVar(&s.namespace, "namespace", v1alpha1.DefaultNamespace, "namespace Isthmus is installed in, with this cluster's Member")
	f.StringVar(&s.listen, "listen", ":"+strconv.Itoa(status.ControllerPort), "address of /healthz, /readyz, /metrics and /status")
	f.BoolVar(&s.federation, "federation", false, "do this cluster's part in the federation that its Federation describes")
	f.StringVar(&s.machines, "machines", "", "file that names the clouds whose servers may be Services, with --federation (default: no clouds)")
	f.StringVar(&s.clouds, "clouds", "", "clouds.yaml with the entries that --machines names (default: as OpenStack's own clients find it)")
	p := &s.plane
	f.StringVar(&p.Profile, "profile", "", "kep or lighthouse: what the settings below are where they are not given (default: as registered, at first kep)")
	f.StringVar(&p.ClusterSetIP, "clusterset-ip", "", "enabled or disabled: whether a Service gets a ClusterSetIP without asking (default: as registered)")
	f.StringVar(&p.PortMerge, "port-merge", "", "union or intersection of the ports of all exporters (default: the profile's)")
	f.StringVar(&p.TypeConflict, "type-conflict", "", "merge or exclude exporters whose type is not the import's (default: the profile's)")
	f.StringVar(&p.Endpoints, "endpoints", "", "pods or service-vip: what this cluster exports; use service-vip where others cannot reach its pods (default: the profile's)")
	f.StringVar(&p.ConflictPrecedence, "conflict-precedence", "", "export-time or broker-time: which export is the oldest (default: export-time, never before the member joined)")
	f.StringVar(&p.Liveness, "liveness", "", "evidence or lease: whether a member whose Lease is old is dead only if its endpoints do not answer either (default: evidence)")
	f.StringSliceVar(&p.RestrictedNamespaces, "restricted-namespaces", broker.DefaultRestrictedNamespaces, "patterns of namespaces that are neither exported nor imported")
	f.DurationVar(&p.Quarantine, "clusterset-ip-quarantine", 0, "how long a ClusterSetIP that nobody uses any more is given to nobody else (default: 5m times --time-scale)")
	f.Float64Var(&p.TimeScale, "time-scale", 1, "multiply every Lease, time to live and window, for drills: 0.1 is ten times as fast; the same in all clusters")
	f.StringVar(&s.logFormat, "log-format", "text", "text or json")
	f.TextVar(&s.logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	return cmd
}

// run wires the control plane to its HTTP door and runs both until ctx ends.
func run(ctx context.Context, s settings, stderr io.Writer) error {
	if os.Getenv("GOGC") == "" {
		percent := gcPercent
		if s.federation {
			percent = federationGCPercent
		}
		debug.SetGCPercent(percent)
	}
	log, err := cli.Logger(s.logFormat, s.logLevel, stderr)
	if err != nil {
		return err
	}
	local, err := cli.Cluster(s.kubeconfig)
	if err != nil {
		return err
	}
	var parts parts
	if s.federation {
		if parts.machines, err = newMachines(s, local, log); err != nil {
			return err
		}
		if parts.federation, err = newFederation(s, local, parts.machines.Run, log); err != nil {
			return err
		}
	} else if s.machines != "" {
		return errors.New("--machines is given without --federation, which makes Services of them; give both")
	}
	if parts.plane, err = newPlane(ctx, s, local, log); err != nil {
		return err
	}
	listener, err := cli.Listen(ctx, s.listen)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return cli.Serve(ctx, listener, routes(parts.describe)) })
	if parts.plane != nil {
		group.Go(func() error { return parts.plane.Run(ctx) })
	}
	if parts.federation != nil {
		group.Go(func() error { return parts.federation.Run(ctx) })
	}
	return group.Wait()
}

// newPlane returns the control plane of a member of a broker, nil for a cluster that has none and does its part in a
// federation.
func newPlane(ctx context.Context, s settings, local *rest.Config, log *slog.Logger) (*broker.Controller, error) {
	if _, err := os.Stat(s.brokerKubeconfig); s.federation && errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // that there is none is the answer
	}
	cfg := broker.Config{Local: local, Namespace: s.namespace, Settings: s.plane, Log: log}
	if s.kubeconfig == "" { // in a pod, whose resolver is that of all pods
		cfg.CheckDNS = func(ctx context.Context) error { return zoneask.Ask(ctx, net.DefaultResolver) }
	}
	var err error
	if cfg.Broker, cfg.BrokerNamespace, err = broker.LoadBroker(s.brokerKubeconfig); err != nil {
		return nil, err
	}
	return broker.New(ctx, cfg)
}

// newFederation returns the cluster's part in a federation, of which machines is one.
func newFederation(s settings, local *rest.Config, machines func(context.Context) error, log *slog.Logger) (*federation.Federation, error) {
	pod, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("name this process: %w", err)
	}
	return federation.New(federation.Config{
		Local: local, Namespace: s.namespace, Pod: pod, Times: federation.Scaled(s.plane.TimeScale),
		Reconcilers: federation.Reconcilers(s.namespace, s.plane.TimeScale, log), Machines: machines, Log: log,
	})
}

func routes(current func() status.Controller) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+status.Path, status.Handler(current))
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		s := current()
		if !s.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
			for _, reason := range s.Waiting {
				_, _ = io.WriteString(w, reason+"\n")
			}
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	})
	return mux
}

// parts are what runs in this process; one of plane and federation may be nil, and machines are with the latter.
type parts struct {
	plane      *broker.Controller
	federation *federation.Federation
	machines   *workloads.Controller
}

// describe says how all parts are.
func (p parts) describe() status.Controller {
	c := status.Controller{Version: version.String(), Ready: true}
	if p.plane != nil {
		c = describe(p.plane.State())
	}
	if p.federation == nil {
		return c
	}
	s := p.federation.State()
	c.Federation = &status.Federation{Cluster: string(s.Cluster), Problem: s.Problem}
	if s.Problem != "" && (p.plane == nil || s.Problem != federation.NotFormed) { // a member of a broker may wait for a federation
		c.Ready, c.Waiting = false, append(c.Waiting, s.Problem)
	}
	for _, m := range s.Members {
		c.Federation.Members = append(c.Federation.Members, status.FederationMember{
			ID: string(m.ID), Leader: m.Leader, Leading: m.Leading, Epoch: m.Epoch, Reachable: m.Reachable, Problem: m.Problem,
		})
	}
	describeMachines(c.Federation, p.machines.State())
	return c
}

// describe turns the control plane's state into the shape that isthmusctl reads.
func describe(s broker.State) status.Controller {
	c := status.Controller{
		Version: version.String(),
		Cluster: string(s.Cluster),
		Leader:  s.Leader,
		Ready:   s.Broker.Err == nil,
		Broker: status.Broker{
			Server: s.Broker.Server, Namespace: s.Broker.Namespace,
			Reachable: s.Broker.Err == nil, Seen: s.Broker.Seen,
		},
	}
	for _, m := range s.Members {
		c.Members = append(c.Members, status.Member{ID: string(m.ID), State: status.MemberState(m.State.String()), Since: m.Since, Held: m.Held})
	}
	if s.Broker.Err != nil {
		c.Broker.Error = s.Broker.Err.Error()
		c.Waiting = append(c.Waiting, c.Broker.Error)
	}
	return c
}
