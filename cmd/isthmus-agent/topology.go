package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	"github.com/isthmus-net/isthmus/controlplane/api/about"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/view"
)

// The agent reads its topology from these objects and from those of addresses: the node's zone and region, and the cluster's
// id.
//
// +kubebuilder:rbac:groups="",resources=nodes,verbs=get
// +kubebuilder:rbac:groups=about.k8s.io,resources=clusterproperties,verbs=get

const (
	// topologyInterval is the time between two lookups. Topologies change seldom: a member's id when it leaves, a node's
	// zone and region never. A VIP outside of the known ranges causes a lookup of its own.
	topologyInterval = 10 * time.Minute
	topologyRetry    = 2 * time.Second // doubles up to topologyInterval
	// topologyHurry is the least time between two lookups that refused VIPs cause. Anyone who may create a ServiceImport can
	// make every node look.
	topologyHurry = 5 * time.Minute
	// topologyTimeout is how long the dataplane waits for the topology before it applies snapshots without one. It allows
	// for a few lookups; a node that applies no snapshot for longer would do more harm.
	topologyTimeout = 20 * time.Second
)

var errNotYet = errors.New("the controller has not written them yet")

// topologyWatcher looks up the node's topology and sets it in the dataplane. It holds back snapshots until then: without its
// cluster's id and zone a node has no near backends, and would send clients of a Service with trafficDistribution to other
// clusters.
type topologyWatcher struct {
	cfg    Config
	server rest.Interface // nil without an API server: the flags hold the whole topology
	apply  func(context.Context, agent.Topology) error
	// clients takes the clients of the name server after each lookup, profile that of the ClusterSet; both may be nil.
	clients func(dnsClients)
	profile func(string)
	log     *slog.Logger
	// refused is notified when the dataplane begins to refuse a VIP because of the ranges: they may have grown.
	refused signal.Signal

	addresses addresses
	retry     time.Duration // the next wait while something is missing; 0 is topologyRetry
	searching bool          // VIPs are refused, and one of the next lookups may find their range
	hurried   time.Time     // when a refused VIP last caused a lookup

	once  sync.Once
	ready chan struct{} // closed when the first lookup is complete, or after topologyTimeout
}

// lookupResult is the outcome of one attempt to look up the topology.
type lookupResult struct {
	topology agent.Topology
	missing  error // the unknown parts, and why
	retry    bool  // the API server did not answer properly
	pending  bool  // a part will be known later; snapshots need not wait for it
}

// Run looks up the topology until ctx is done; then it returns nil.
func (w *topologyWatcher) Run(ctx context.Context) error {
	timeout := time.AfterFunc(topologyTimeout, w.release)
	defer timeout.Stop()
	logged := ""
	topology := w.cfg.topology()
	for {
		l := w.lookup(ctx, topology)
		if ctx.Err() != nil {
			return nil
		}
		topology = l.topology
		if text := fmt.Sprint(l.missing); l.missing != nil && text != logged {
			w.log.Warn("part of this node's topology is unknown; features that need it are off", "err", l.missing)
			logged = text
		}
		if w.clients != nil && w.server != nil {
			found := w.addresses.clients()
			found.partial = l.retry
			w.clients(found)
		}
		if w.profile != nil {
			w.profile(w.addresses.profile)
		}
		if err := w.apply(ctx, topology); err != nil {
			w.log.Error("cannot apply the topology; the next snapshot will", "err", err)
		}
		if !l.retry {
			w.release()
		}
		if w.server == nil {
			<-ctx.Done()
			return nil
		}
		if !w.pause(ctx, l.retry || l.pending) {
			return nil
		}
	}
}

// pause waits until the next lookup. It reports false if there is none, because ctx is done.
func (w *topologyWatcher) pause(ctx context.Context, incomplete bool) bool {
	wait := topologyInterval
	if w.retry == 0 || !incomplete && !w.searching {
		w.retry = topologyRetry
	}
	if incomplete || w.searching {
		wait, w.retry = w.retry, min(2*w.retry, topologyInterval)
		w.searching = w.searching && wait < topologyInterval
	}
	var refused <-chan struct{}
	if time.Since(w.hurried) >= topologyHurry {
		refused = w.refused.C()
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(wait):
		return true
	case <-refused:
	}
	w.searching, w.retry, w.hurried = true, topologyRetry, time.Now()
	select {
	case <-ctx.Done():
		return false
	case <-time.After(rand.N(topologyRetry)): // all nodes refuse the VIP at once, and need not ask at once
		return true
	}
}

// release lets snapshots pass from now on.
func (w *topologyWatcher) release() { w.once.Do(func() { close(w.ready) }) }

// lookup looks up the parts of the topology that no flag sets. A part that cannot be found keeps its last value.
func (w *topologyWatcher) lookup(ctx context.Context, last agent.Topology) lookupResult {
	l := lookupResult{topology: last}
	if w.server == nil {
		return l
	}
	var missing []error
	note := func(part string, err error) {
		if err == nil {
			return
		}
		missing = append(missing, fmt.Errorf("%s: %w", part, err))
		switch {
		case errors.Is(err, errNotYet):
			l.pending = true
		case !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err):
			l.retry = true
		}
	}
	node := &l.topology.Node
	note("zone and region of the node, for trafficDistribution and isthmus.dev/prefer", w.lookNode(ctx, node))
	if w.cfg.ClusterID == "" {
		note("id of this cluster, for internalTrafficPolicy and trafficDistribution, see --cluster-id", w.lookCluster(ctx, &node.Cluster))
	}
	w.lookAddresses(ctx, &l.topology, note)
	l.missing = errors.Join(missing...)
	return l
}

// lookNode reads the node: its zone and its region, unless flags set them, and its addresses.
func (w *topologyWatcher) lookNode(ctx context.Context, node *lb.Node) error {
	var n corev1.Node
	if err := getObject(ctx, w.server, "/api/v1/nodes/"+w.cfg.NodeName, &n); err != nil {
		return err
	}
	if w.cfg.Zone == "" {
		node.Zone = n.Labels[corev1.LabelTopologyZone]
	}
	if w.cfg.Region == "" {
		node.Region = n.Labels[corev1.LabelTopologyRegion]
	}
	return w.addresses.noteNode(&n)
}

// lookAddresses reads the ranges of ClusterSetIPs, unless a flag sets them, and the cluster's own addresses.
func (w *topologyWatcher) lookAddresses(ctx context.Context, t *agent.Topology, note func(string, error)) {
	const agents = "addresses of other nodes, whose questions DNS answers while their own agent is down, see --dns-allow"
	const ranges, own = "ranges of the ClusterSetIPs, outside of which none is served, see --clusterset-ip-range", "addresses of this cluster, where no ClusterSetIP is served"
	note(own, w.addresses.readServices(ctx, w.server))
	note(agents, w.addresses.readAgents(ctx, w.server, w.cfg.Namespace))
	var err error
	if t.Node.Cluster != "" { // or else the missing id has been noted
		err = w.addresses.readMember(ctx, w.server, w.cfg.Namespace, t.Node.Cluster)
	}
	t.Own = w.addresses.own()
	if len(w.cfg.Ranges) > 0 || w.cfg.imports() == writers.Any {
		if !errors.Is(err, errNotYet) && !apierrors.IsNotFound(err) {
			note(own, err)
		}
		return
	}
	note(ranges, w.addresses.readFederation(ctx, w.server))
	t.Ranges = w.addresses.ranges()
	if len(t.Ranges) == 0 || !apierrors.IsNotFound(err) { // a cluster in a federation alone has no registration
		note(ranges, err)
	}
}

// lookCluster reads the id of this cluster.
func (w *topologyWatcher) lookCluster(ctx context.Context, id *clusterset.ClusterID) error {
	var p about.ClusterProperty
	if err := getObject(ctx, w.server, "/apis/"+about.GroupVersion.String()+"/clusterproperties/"+about.ClusterID, &p); err != nil {
		return err
	}
	if err := clusterset.ClusterID(p.Spec.Value).Validate(); err != nil {
		return err
	}
	*id = clusterset.ClusterID(p.Spec.Value)
	return nil
}

// getObject reads an object from the API server. path may have a query.
func getObject(ctx context.Context, server rest.Interface, path string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request := server.Get().RequestURI(path)
	// Ask for the metadata alone only where that is all the caller reads: for other kinds, a server that supports it would
	// leave out the rest.
	if _, ok := into.(*metav1.PartialObjectMetadata); ok {
		request = request.SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json")
	}
	text, err := request.Do(ctx).Raw()
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// gate is a view.Sink that passes snapshots to next once ready is closed.
type gate struct {
	next  view.Sink
	ready <-chan struct{}
}

// Sync waits for ready and passes s on.
func (g gate) Sync(ctx context.Context, s *clusterset.Snapshot) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-g.ready:
		return g.next.Sync(ctx, s)
	}
}

// objectServer returns a client that reads single objects.
func objectServer(cluster *rest.Config) (rest.Interface, error) {
	cfg := rest.CopyConfig(cluster)
	cfg.NegotiatedSerializer = scheme.Codecs.WithoutConversion() // decodes errors; callers decode objects
	c, err := rest.UnversionedRESTClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client for single objects: %w", err)
	}
	return c, nil
}

// topology returns the parts of the topology that flags set.
func (c *Config) topology() agent.Topology {
	ranges, _ := parseRanges(c.Ranges) // Validate has reported the error
	return agent.Topology{
		Node:                lb.Node{Cluster: clusterset.ClusterID(c.ClusterID), Name: c.NodeName, Zone: c.Zone, Region: c.Region},
		ZonesSpanClusters:   c.ZonesSpanClusters,
		RegionsSpanClusters: c.RegionsSpanClusters,
		Ranges:              ranges,
	}
}

// parseRanges parses CIDRs. It returns them sorted and without duplicates.
func parseRanges(texts []string) ([]netip.Prefix, error) {
	var ranges []netip.Prefix
	var faults []error
	for _, text := range texts {
		r, err := netip.ParsePrefix(text)
		if err != nil {
			faults = append(faults, fmt.Errorf("%q is not a range, such as 243.0.0.0/8", text))
			continue
		}
		ranges = append(ranges, r.Masked())
	}
	return sortedPrefixes(ranges), errors.Join(faults...)
}
