// Command isthmus-controller is the controller of one member cluster.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/cli"
	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/cmd/internal/zoneask"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/broker/quotacontroller"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/controlplane/workloads"
)

func main() { cli.Main(command()) }

// gcPercent lets the heap grow by half before a collection, where Go's default doubles it: a controller needs its memory all
// day, and CPU time only at changes. GOGC overrides it.
const gcPercent = 50

// federationGCPercent is gcPercent for a supervisor, which caches objects of all members of the federation.
const federationGCPercent = 25

// settings are the flags.
type settings struct {
	kubeconfig       string
	brokerKubeconfig string
	namespace        string
	listen           string
	http             httpserver.Flags
	logFormat        string
	logLevel         slog.Level
	federation       bool
	probes           bool
	machines, clouds string
	quotaController  bool
	aggregateGrace   time.Duration
	lighthouse       string
	broker           broker.Settings
}

func command() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "isthmus-controller",
		Short: "Export this cluster's Services to the ClusterSet and import those of all members",
		Long: `isthmus-controller runs in every member of a ClusterSet. It publishes the Services that
this cluster exports to the broker, and creates a ServiceImport and EndpointSlices here for
every Service that a member exports. isthmusctl join prepares a cluster for it.

With --federation it also runs this cluster's part of a federation, which needs no broker.
If the cluster's Federation names members, it takes part in the election of a leader for
each; the leader writes federated Services and policies there. It also creates Services for
machines outside of the cluster: for ExternalWorkloads, and for servers of the clouds that
--machines names. Without a broker kubeconfig it runs the federation alone. isthmusctl
federation creates one.

With --quota-controller it runs beside a broker instead, and needs no membership: it refuses new
objects of members that exceed their quotas, deletes what a member has beyond twice its quota, and
deletes aggregates without exporters. isthmusctl deploy-broker grants its rights.

With --lighthouse-bridge it runs beside the brokers of Isthmus and of Submariner, while a ClusterSet
moves over: it exports for clusters that still run Lighthouse, and shows them what members of Isthmus
export. isthmusctl lighthouse bridge grants its rights.

It serves /healthz, /readyz, /metrics and /status (JSON) over HTTPS; the latter two need a token of
an account with the right to that nonResourceURL. While the broker is away it
changes nothing, is not ready, and retries.`,
		Example: `  # In a pod: the cluster's own API server, and the broker of the mounted Secret
  isthmus-controller

  # On a workstation
  isthmus-controller --kubeconfig=$HOME/.kube/east --broker-kubeconfig=broker.kubeconfig

  # A cluster of a federation
  isthmus-controller --federation

  # The same, with virtual machines of OpenStack as Services
  isthmus-controller --federation --machines=machines.yaml --clouds=clouds.yaml

  # The quota controller of a broker, outside of its cluster
  isthmus-controller --quota-controller --namespace=isthmus-broker --kubeconfig=broker.kubeconfig

  # The bridge to clusters that run Lighthouse
  isthmus-controller --lighthouse-bridge=submariner-k8s-broker --namespace=isthmus-broker --kubeconfig=broker.kubeconfig`,
		Args:          usage.NoArgs,
		Version:       version.Long(),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), s, cmd.ErrOrStderr()) },
	}
	usage.Explain(cmd)
	bindFlags(cmd.Flags(), &s)
	return cmd
}

// bindFlags adds all flags.
func bindFlags(f *pflag.FlagSet, s *settings) {
	f.StringVar(&s.kubeconfig, "kubeconfig", "", "kubeconfig of this cluster (default: that of the pod)")
	f.StringVar(&s.brokerKubeconfig, "broker-kubeconfig", "/etc/isthmus/broker/kubeconfig", "kubeconfig of the broker; its context names the broker's namespace")
	f.StringVar(&s.namespace, "namespace", v1alpha1.DefaultNamespace, "installation namespace of Isthmus, which contains this cluster's Member; with --quota-controller or --lighthouse-bridge, the broker's namespace")
	f.StringVar(&s.listen, "listen", ":"+strconv.Itoa(status.ControllerPort), "address of /healthz, /readyz, /metrics and /status")
	s.http.Bind(f)
	f.BoolVar(&s.federation, "federation", false, "also run the federation's controller, configured by this cluster's Federation object")
	f.BoolVar(&s.probes, "federation-probes", true, "try now and then, and when a member is silent, whether a few endpoints of each member accept connections; without, only agents tell that a silent member's endpoints are dead, or five minutes")
	f.BoolVar(&s.quotaController, "quota-controller", false, "run the quota controller of the broker in --namespace, and nothing else")
	f.DurationVar(&s.aggregateGrace, "aggregate-grace", quotacontroller.DefaultGrace, "how long the quota controller keeps an aggregate without an export record")
	f.StringVar(&s.lighthouse, "lighthouse-bridge", "", "namespace of Submariner's broker: run the bridge between it and the broker in --namespace, and nothing else")
	f.StringVar(&s.machines, "machines", "", "file that lists the clouds whose servers may be endpoints of Services; requires --federation (default: no clouds)")
	f.StringVar(&s.clouds, "clouds", "", "clouds.yaml with the entries that --machines names (default: that of OpenStack's own clients)")
	bindBroker(f, &s.broker)
	f.StringVar(&s.logFormat, "log-format", "text", "text or json")
	f.TextVar(&s.logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
}

// bindBroker adds the flags of the controller of a broker's member.
func bindBroker(f *pflag.FlagSet, p *broker.Settings) {
	f.StringVar(&p.Profile, "profile", "", "kep or lighthouse: the defaults of the settings below (default: the registered one, initially kep)")
	f.StringVar(&p.ClusterSetIP, "clusterset-ip", "", "enabled or disabled: whether a Service gets a ClusterSetIP by default (default: as registered)")
	f.StringVar(&p.PortMerge, "port-merge", "", "union or intersection of the ports of all exporters (default: the profile's)")
	f.StringVar(&p.TypeConflict, "type-conflict", "", "merge or exclude exporters whose type differs from the import's (default: the profile's)")
	f.StringVar(&p.Endpoints, "endpoints", "", "pods or service-vip: the endpoints that this cluster exports; use service-vip if others cannot reach its pods (default: the profile's)")
	f.StringVar(&p.ConflictPrecedence, "conflict-precedence", "", "export-time or broker-time: the time by which the oldest export is determined (default: export-time, never before the member joined)")
	f.StringVar(&p.Liveness, "liveness", "", "evidence or lease: with evidence, a member with an old Lease is dead only if its endpoints do not answer either (default: evidence)")
	f.StringSliceVar(&p.RestrictedNamespaces, "restricted-namespaces", broker.DefaultRestrictedNamespaces, "patterns of namespaces that are neither exported nor imported")
	f.DurationVar(&p.Quarantine, "clusterset-ip-quarantine", 0, "how long a released ClusterSetIP is not allocated again (default: 5m times --time-scale)")
	f.Float64Var(&p.TimeScale, "time-scale", 1, "factor of every Lease, TTL and window, for drills: 0.1 is ten times as fast; use the same in all clusters")
}

// run runs the controller, its part of the federation and the HTTP server until ctx ends.
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
	if s.lighthouse != "" {
		return runBridge(ctx, s, local, log)
	}
	if s.quotaController {
		return runQuotaController(ctx, s, local, log)
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
		return errors.New("--machines requires --federation; give both")
	}
	if parts.broker, err = newBroker(ctx, s, local, log); err != nil {
		return err
	}
	server, err := newServer(ctx, s, local, parts.describe, log)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Serve(ctx) })
	if parts.broker != nil {
		group.Go(func() error { return parts.broker.Run(ctx) })
	}
	if parts.federation != nil {
		group.Go(func() error { return parts.federation.Run(ctx) })
	}
	return group.Wait()
}

// newBroker returns the controller of a member of a broker; nil for a cluster of a federation without a broker.
func newBroker(ctx context.Context, s settings, local *rest.Config, log *slog.Logger) (*broker.Controller, error) {
	if _, err := os.Stat(s.brokerKubeconfig); s.federation && errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // nil means none
	}
	cfg := broker.Config{Local: local, Namespace: s.namespace, Settings: s.broker, Log: log}
	if s.kubeconfig == "" { // in a pod, which has the resolver of all pods
		cfg.CheckDNS = func(ctx context.Context) error { return zoneask.Ask(ctx, net.DefaultResolver) }
	}
	var err error
	if cfg.Broker, cfg.BrokerNamespace, err = broker.LoadBroker(s.brokerKubeconfig); err != nil {
		return nil, err
	}
	return broker.New(ctx, cfg)
}

// newFederation returns the cluster's part of a federation, which also runs machines.
func newFederation(s settings, local *rest.Config, machines func(context.Context) error, log *slog.Logger) (*federation.Federation, error) {
	pod, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("name this process: %w", err)
	}
	var probe federation.Probe // nil tries handshakes
	if !s.probes {
		probe = federation.NoProbe
	}
	return federation.New(federation.Config{
		Local: local, Namespace: s.namespace, Pod: pod, Times: federation.Scaled(s.broker.TimeScale),
		Reconcilers: federation.Reconcilers(s.namespace, s.broker.TimeScale, probe, log), Machines: machines, Log: log,
	})
}

// newServer returns the server of status, probes and metrics.
func newServer(ctx context.Context, s settings, local *rest.Config, current func() status.Controller, log *slog.Logger) (*httpserver.Server, error) {
	listener, err := cli.Listen(ctx, s.listen)
	if err != nil {
		return nil, err
	}
	server, err := cli.NewServer(listener, s.http, local, status.ControllerAudience, func() []string { return current().Waiting }, log)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	server.Handle("GET "+status.Path, status.Handler(current))
	return server, nil
}

// parts are the controllers of this process. broker and federation may be nil; machines exists with the latter.
type parts struct {
	broker     *broker.Controller
	federation *federation.Federation
	machines   *workloads.Controller
}

// describe returns the status of all parts.
func (p parts) describe() status.Controller {
	c := status.Controller{Version: version.String(), Ready: true}
	if p.broker != nil {
		c = describe(p.broker.State())
	}
	if p.federation == nil {
		return c
	}
	s := p.federation.State()
	c.Federation = &status.Federation{Cluster: string(s.Cluster), Problem: s.Problem}
	if s.Problem != "" && (p.broker == nil || s.Problem != federation.NotFormed) { // a member of a broker is ready without a federation
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

// describe converts a State into the status that isthmusctl reads.
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
	if t := s.Broker.Credential; t.Renewed {
		c.Broker.Credential = &status.Credential{Expires: t.Expires}
		if t.Err != nil {
			c.Broker.Credential.Error = t.Err.Error()
		}
	}
	if s.Broker.Err != nil {
		c.Broker.Error = s.Broker.Err.Error()
		c.Waiting = append(c.Waiting, c.Broker.Error)
	}
	return c
}
