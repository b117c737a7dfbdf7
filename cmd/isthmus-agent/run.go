package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sync/errgroup"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	mcsclient "sigs.k8s.io/mcs-api/pkg/client/clientset/versioned/typed/apis/v1beta1"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/view"
	"github.com/isthmus-net/isthmus/dns/device"
)

// run connects the API server, the dataplane, the name server and HTTP, and blocks until ctx is done. An error at the start
// leaves a running dataplane unchanged. The end removes nothing from the node.
func run(ctx context.Context, cfg Config, log *slog.Logger) error {
	api, err := connect(cfg, log)
	if err != nil {
		return err
	}
	names, err := cfg.DNS.nameserver(log.With("component", "dns"))
	if err != nil {
		return err
	}
	plane := cfg.agent()
	names.fast.Order = plane.Order
	plane.Report = func(known map[clusterset.ClusterID]evidence.State) {
		names.SetEvidence(known)
		if api.reports != nil {
			api.reports.SetEvidence(known)
		}
	}
	refused := signal.New()
	plane.Refused = refused.Notify
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", cfg.HTTPListen)
	if err != nil {
		return fmt.Errorf("serve HTTP: %w; another agent or process uses the port, see --http-listen", err)
	}
	defer listener.Close()

	dnsCtx, stopDNS := context.WithCancel(ctx)
	var serving sync.WaitGroup
	startDNS := sync.OnceFunc(func() { serving.Go(func() { names.Run(dnsCtx) }) })
	defer serving.Wait()
	defer stopDNS()
	if names.cfg.File != "" { // answer from the zone file while the BPF programs are loaded, which takes a second or two
		startDNS()
	}

	dataplane, err := agent.New(ctx, plane, log.With("component", "dataplane"))
	switch {
	case err == nil:
	case ctx.Err() != nil:
		log.Info("isthmus-agent was stopped before it had started", "err", err)
		return nil
	default:
		return err
	}
	defer func() {
		if err := dataplane.Close(); err != nil {
			log.Error("close the dataplane; programs and maps stay in the kernel", "err", err)
		}
	}()
	startDNS()
	c := components{cfg: &cfg, log: log, api: api, dataplane: dataplane, refused: refused, names: names, listener: listener}
	return c.run(ctx)
}

// apiAccess is the agent's access to the API server. All fields are nil in a standalone agent.
type apiAccess struct {
	config  *rest.Config
	objects rest.Interface // reads single objects
	reports *reporter
}

// connect makes the clients of the API server. It sends no request.
func connect(cfg Config, log *slog.Logger) (apiAccess, error) {
	if _, standalone := cfg.folder(); standalone {
		return apiAccess{}, nil
	}
	config, err := clusterConfig(cfg.Kubeconfig)
	if err != nil {
		return apiAccess{}, err
	}
	objects, err := objectServer(config)
	if err != nil {
		return apiAccess{}, err
	}
	return apiAccess{config, objects, newReporter(objects, cfg, log.With("component", "report"))}, nil
}

// components are the parts of a started agent.
type components struct {
	cfg       *Config
	log       *slog.Logger
	api       apiAccess
	dataplane *agent.Agent
	refused   signal.Signal // the dataplane begins to refuse a VIP because of the ranges
	names     *nameserver
	listener  net.Listener
}

// run feeds snapshots to the dataplane and the name server and serves HTTP, until ctx is done or a component fails.
func (c components) run(ctx context.Context) error {
	topology := &topologyWatcher{
		cfg: *c.cfg, server: c.api.objects, apply: c.setTopology, clients: c.names.SetClients, refused: c.refused, log: c.log.With("component", "topology"), ready: make(chan struct{}),
		profile: func(profile string) { c.names.SetNames(c.cfg.DNS.names(profile)) },
	}
	var names view.Sink = c.names
	if c.cfg.DNS.Profile == "" { // names of the former profile stay until the present one is known
		names = gate{c.names, topology.ready}
	}
	source, err := c.newView(map[string]view.Sink{"dataplane": gate{c.dataplane, topology.ready}, "dns": names})
	if err != nil {
		return err
	}
	clusterDNS := newClusterDNS(c.cfg.DNS.Cluster, c.api.objects, c.log.With("component", "dns"))
	reserved := newReservedLabels(c.cfg, c.api.objects, c.log.With("component", "view"))
	current := func() status.Agent {
		s := agentStatus(*c.cfg, source.Status(), c.dataplane.Status(), c.names)
		s.DNS.Cluster = clusterDNS.Status()
		reportReserved(&s, reserved)
		return s
	}
	in := &introspection{cfg: c.cfg, dataplane: c.dataplane, names: c.names, current: current}

	c.log.Info("isthmus-agent starts", "version", version.String(), "node", c.cfg.NodeName, "http", c.listener.Addr().String())
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.serveHTTP(ctx, c.listener, c.metrics(current), in) })
	group.Go(func() error { return topology.Run(ctx) })
	group.Go(func() error { return c.dataplane.Run(ctx) })
	if c.api.reports != nil {
		group.Go(func() error { return c.api.reports.Run(ctx) })
	}
	if reserved != nil {
		group.Go(func() error { return reserved.Run(ctx) })
	}
	if clusterDNS != nil {
		group.Go(func() error { return clusterDNS.Run(ctx) })
	}
	group.Go(func() error { return source.Run(ctx) })
	err = group.Wait()
	c.log.Info("isthmus-agent ends; programs, maps and addresses stay", "err", err)
	return err
}

// setTopology sets the topology of the name server and the dataplane.
func (c components) setTopology(ctx context.Context, t agent.Topology) error {
	c.names.SetLocal(t.Node.Cluster)
	return c.dataplane.SetTopology(ctx, t)
}

// newView returns the source of snapshots: the API server, or a folder of manifests.
func (c components) newView(sinks map[string]view.Sink) (*view.View, error) {
	managedBy, err := writers.ManagedBy(c.cfg.imports())
	if err != nil {
		return nil, err
	}
	cfg := view.Config{Sinks: sinks, ManagedBy: managedBy, Log: c.log.With("component", "view")}
	if folder, standalone := c.cfg.folder(); standalone {
		return view.NewFolder(cfg, folder)
	}
	return newClusterView(c.api.config, cfg)
}

// metrics returns the collector of the agent's own metrics.
func (c components) metrics(current func() status.Agent) metrics {
	m := metrics{current: current, evicted: c.dataplane.EvictedUDPVIPs, log: c.log}
	if c.cfg.ServiceMetrics {
		m.counters = c.dataplane.Counters
	}
	return m
}

// cleanup removes everything that agents left on this node.
func cleanup(cfg *Config) error {
	return errors.Join(agent.Cleanup(cfg.agent()), device.Remove([]netip.Addr{device.IPv4, device.IPv6}))
}

// The agent reads the standard objects of the MCS API: those of Isthmus, or of any implementation with --imports=any.
//
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceimports,verbs=get;list;watch
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=get;list;watch

// newClusterView returns a view of the cluster. It reads EndpointSlices as protobuf, which is smaller than JSON.
func newClusterView(cluster *rest.Config, cfg view.Config) (*view.View, error) {
	imports, err := mcsclient.NewForConfig(cluster)
	if err != nil {
		return nil, fmt.Errorf("make a client for ServiceImports: %w", err)
	}
	compact := rest.CopyConfig(cluster)
	compact.AcceptContentTypes, compact.ContentType = "application/vnd.kubernetes.protobuf,application/json", "application/vnd.kubernetes.protobuf"
	slices, err := discoveryclient.NewForConfig(compact)
	if err != nil {
		return nil, fmt.Errorf("make a client for EndpointSlices: %w", err)
	}
	return view.New(cfg, imports, slices)
}

// clusterConfig returns the client configuration of the cluster. It does not connect.
func clusterConfig(kubeconfig string) (*rest.Config, error) {
	var cfg *rest.Config
	if kubeconfig == "" {
		var err error
		if cfg, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("find the API server: %w; outside of a pod, give --kubeconfig", err)
		}
	} else {
		file, err := clientcmd.LoadFromFile(kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("read --kubeconfig=%s: %w", kubeconfig, err)
		}
		cfg, err = clientcmd.NewDefaultClientConfig(*file, nil).ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("use --kubeconfig=%s: %w", kubeconfig, err)
		}
	}
	cfg.UserAgent = "isthmus-agent/" + version.String()
	return cfg, nil
}

// agentStatus combines the status of the components. The agent is ready once each of them has applied the last snapshot. An
// API server that becomes unreachable later does not change that.
func agentStatus(cfg Config, source view.Status, dataplane agent.Status, names *nameserver) status.Agent {
	s := status.Agent{
		Version:   version.String(),
		Node:      cfg.NodeName,
		View:      status.View{Synced: source.Synced, Built: source.Built, Services: source.Services},
		Dataplane: dataplaneStatus(dataplane),
	}
	s.MissingCapabilities = append(s.MissingCapabilities, dataplane.Missing...)
	for _, f := range dataplane.Findings {
		s.MissingCapabilities = append(s.MissingCapabilities, f.Message+"; "+f.Fix)
	}
	var missing []string
	s.DNS, missing = names.Status()
	s.MissingCapabilities = append(s.MissingCapabilities, missing...)
	if source.WatchErr != nil {
		s.View.Error = source.WatchErr.Error()
	}
	if !source.Synced { // then no component has applied a snapshot either
		s.Waiting = append(s.Waiting, join("not all ServiceImports and EndpointSlices have been read", source.WatchErr))
	} else {
		for _, component := range []struct {
			name string
			err  error
		}{{"dataplane", dataplane.Ready()}, {"dns", source.Sinks["dns"].Err}} {
			if component.err != nil || source.Sinks[component.name].Synced.IsZero() {
				s.Waiting = append(s.Waiting, join("the "+component.name+" has not applied the last snapshot", component.err))
			}
		}
	}
	s.Ready = len(s.Waiting) == 0
	return s
}

// reportReserved adds to s whether the labels of Isthmus are reserved, if that is known.
func reportReserved(s *status.Agent, r *reservedLabels) {
	known, fault := r.Status()
	if !known {
		return
	}
	s.View.LabelsReserved = new(fault == nil)
	if fault != nil {
		s.MissingCapabilities = append(s.MissingCapabilities, oneLine(fault))
	}
}

// dataplaneStatus converts the status of the dataplane.
func dataplaneStatus(is agent.Status) status.Dataplane {
	s := status.Dataplane{
		Frontends: is.Frontends, Backends: is.Backends, Writes: is.Writes, Synced: is.LastSync,
		Differences: is.Differences, Checked: is.Checked, Refusals: map[string]uint64{},
	}
	for _, h := range is.Hooks {
		s.Hooks = append(s.Hooks, status.Hook{Name: h.Name, Attached: h.Attached})
	}
	s.ProblemReasons = map[string]int{}
	for _, r := range lb.Reasons() {
		s.ProblemReasons[string(r)] = 0
	}
	for _, p := range is.Problems {
		s.Problems = append(s.Problems, p.String())
		s.ProblemReasons[string(p.Reason)]++
	}
	for _, id := range is.Drained {
		s.Drained = append(s.Drained, string(id))
	}
	for reason, n := range is.Refusals {
		s.Refusals[reason.String()] = n
	}
	if is.LastError != nil {
		s.Error = is.LastError.Error()
	}
	return s
}

// join appends the reason, if any, to a sentence, on the same line.
func join(sentence string, reason error) string {
	if reason == nil {
		return sentence
	}
	return sentence + ": " + oneLine(reason)
}
