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
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/version"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/view"
	"github.com/isthmus-net/isthmus/dns/device"
)

// run wires API server, dataplane, name server and HTTP together and blocks until ctx is done. An
// error at the start leaves a running dataplane as it was; ending removes nothing from the node.
func run(ctx context.Context, cfg Config, log *slog.Logger) error {
	folder, standalone := cfg.folder()
	var cluster *rest.Config
	var server rest.Interface
	var reports *reporter
	plane := cfg.agent()
	if !standalone {
		var err error
		if cluster, err = clusterConfig(cfg.Kubeconfig); err != nil {
			return err
		}
		if server, err = objectServer(cluster); err != nil {
			return err
		}
		reports = newReporter(server, cfg, log.With("component", "report"))
	}
	zone, err := cfg.DNS.server()
	if err != nil {
		return err
	}
	neighbours, err := cfg.DNS.neighbours()
	if err != nil {
		return err
	}
	names := newNameserver(zone, neighbours, log.With("component", "dns"))
	if names.fast.Resolvers, err = cfg.DNS.resolvers(); err != nil {
		return err
	}
	names.fast.Order = plane.Order
	plane.Report = func(known map[clusterset.ClusterID]evidence.State) {
		names.Drain(known)
		if reports != nil {
			reports.Tell(known)
		}
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", cfg.HTTPListen)
	if err != nil {
		return fmt.Errorf("serve HTTP: %w; another agent or process uses the port, see --http-listen", err)
	}
	defer listener.Close()

	naming, endNaming := context.WithCancel(ctx)
	var answering sync.WaitGroup
	beginNaming := sync.OnceFunc(func() { answering.Go(func() { names.Run(naming) }) })
	defer answering.Wait()
	defer endNaming()
	if zone.File != "" { // names that were kept are answered while the programs are loaded, which takes a second or two
		beginNaming()
	}

	dataplane, err := agent.New(ctx, plane, log.With("component", "dataplane"))
	switch {
	case err == nil:
	case ctx.Err() != nil:
		log.Info("isthmus-agent ends before it began", "err", err)
		return nil
	default:
		return err
	}
	defer func() {
		if err := dataplane.Close(); err != nil {
			log.Error("close the dataplane; what is in the kernel stays", "err", err)
		}
	}()
	beginNaming()
	settle := func(ctx context.Context, p agent.Topology) error {
		names.Place(p.Node.Cluster)
		return dataplane.SetTopology(ctx, p)
	}
	where := &locator{cfg: cfg, server: server, settle: settle, log: log.With("component", "place"), known: make(chan struct{})}
	viewed := view.Config{
		Sinks: map[string]view.Sink{"dataplane": gate{dataplane, where.known}, "dns": names}, Log: log.With("component", "view"),
	}
	var world *view.View
	if standalone {
		world, err = view.NewFolder(viewed, folder)
	} else {
		world, err = newView(cluster, viewed)
	}
	if err != nil {
		return err
	}
	watched := newClusterDNS(cfg.DNS.Cluster, server, log.With("component", "dns"))
	current := func() status.Agent {
		is := agentStatus(cfg, world.Status(), dataplane.Status(), names)
		is.DNS.Cluster = watched.Status()
		return is
	}

	may, err := newAccess(cluster, cfg.Namespace)
	if err != nil {
		return err
	}
	see := &sight{cfg: &cfg, access: may, dataplane: dataplane, names: names, current: current}
	count := metrics{current: current, evicted: dataplane.EvictedUDPVIPs, log: log}
	if cfg.ServiceMetrics {
		count.counters = dataplane.Counters
	}

	log.Info("isthmus-agent starts", "version", version.String(), "node", cfg.NodeName, "http", listener.Addr().String())
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return serveHTTP(ctx, listener, count, see) })
	group.Go(func() error { return where.Run(ctx) })
	group.Go(func() error { return dataplane.Run(ctx) })
	if reports != nil {
		group.Go(func() error { return reports.Run(ctx) })
	}
	if watched != nil {
		group.Go(func() error { return watched.Run(ctx) })
	}
	group.Go(func() error { return world.Run(ctx) })
	err = group.Wait()
	log.Info("isthmus-agent ends; programs, maps and addresses stay", "err", err)
	return err
}

// cleanup removes all that agents left on this node.
func cleanup(cfg *Config) error {
	return errors.Join(agent.Cleanup(cfg.agent()), device.Remove([]netip.Addr{device.IPv4, device.IPv6}))
}

// The agent reads what it needs from any MCS implementation.
//
// +kubebuilder:rbac:groups=multicluster.x-k8s.io,resources=serviceimports,verbs=get;list;watch
// +kubebuilder:rbac:groups=discovery.k8s.io,resources=endpointslices,verbs=get;list;watch

// newView watches the cluster in as few bytes as it offers.
func newView(cluster *rest.Config, cfg view.Config) (*view.View, error) {
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

// clusterConfig says how to reach the cluster's API server. It does not try to.
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

// agentStatus puts together what the parts say. The agent is ready when each of them serves the last
// world that it was told of; an API server that went away later does not change that.
func agentStatus(cfg Config, world view.Status, dataplane agent.Status, names *nameserver) status.Agent {
	s := status.Agent{
		Version:   version.String(),
		Node:      cfg.NodeName,
		View:      status.View{Synced: world.Synced, Built: world.Built, Services: world.Services},
		Dataplane: dataplaneStatus(dataplane),
	}
	s.MissingCapabilities = append(s.MissingCapabilities, dataplane.Missing...)
	for _, f := range dataplane.Findings {
		s.MissingCapabilities = append(s.MissingCapabilities, f.Message+"; "+f.Fix)
	}
	var lacks []string
	s.DNS, lacks = names.Status()
	s.MissingCapabilities = append(s.MissingCapabilities, lacks...)
	if world.WatchErr != nil {
		s.View.Error = world.WatchErr.Error()
	}
	if !world.Synced { // nor has any part, then
		s.Waiting = append(s.Waiting, join("ServiceImports and EndpointSlices have not all been read", world.WatchErr))
	} else {
		for _, part := range []struct {
			name string
			err  error
		}{{"dataplane", dataplane.Ready()}, {"dns", world.Sinks["dns"].Err}} {
			if part.err != nil || world.Sinks[part.name].Synced.IsZero() {
				s.Waiting = append(s.Waiting, join("the "+part.name+" does not follow the cluster", part.err))
			}
		}
	}
	s.Ready = len(s.Waiting) == 0
	return s
}

// dataplaneStatus spells out what the dataplane says.
func dataplaneStatus(is agent.Status) status.Dataplane {
	s := status.Dataplane{
		Frontends: is.Frontends, Backends: is.Backends, Writes: is.Writes, Synced: is.LastSync,
		Differences: is.Differences, Checked: is.Checked, Refusals: map[string]uint64{},
	}
	for _, h := range is.Hooks {
		s.Hooks = append(s.Hooks, status.Hook{Name: h.Name, Attached: h.Attached})
	}
	for _, p := range is.Problems {
		s.Problems = append(s.Problems, p.String())
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

// join appends the reason to a sentence, if there is one, on the same line.
func join(sentence string, reason error) string {
	if reason == nil {
		return sentence
	}
	return sentence + ": " + oneLine(reason)
}
