package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/api/about"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/view"
)

// The agent reads its topology from these objects: the node's zone, the cluster's id and the member's ClusterSetIP ranges.
//
// +kubebuilder:rbac:groups="",resources=nodes,verbs=get
// +kubebuilder:rbac:groups=about.k8s.io,resources=clusterproperties,verbs=get
// +kubebuilder:rbac:groups=isthmus.dev,resources=members,verbs=get,namespace=isthmus-system

const (
	// topologyInterval is the time between two lookups. Topologies change seldom: a member's id when it leaves, a node's
	// zone never.
	topologyInterval = 10 * time.Minute
	topologyRetry    = 2 * time.Second // doubles up to topologyInterval
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
	log    *slog.Logger

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
	retry, logged := topologyRetry, ""
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
		if err := w.apply(ctx, topology); err != nil {
			w.log.Error("cannot apply the topology; the next snapshot will", "err", err)
		}
		wait := topologyInterval
		if l.retry || l.pending {
			wait, retry = retry, min(2*retry, topologyInterval)
		} else {
			retry = topologyRetry
		}
		if !l.retry {
			w.release()
		}
		if w.server == nil {
			<-ctx.Done()
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
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
	if w.cfg.Zone == "" {
		note("zone of the node, for trafficDistribution", w.lookZone(ctx, &node.Zone))
	}
	if w.cfg.ClusterID == "" {
		note("id of this cluster, for internalTrafficPolicy and trafficDistribution, see --cluster-id", w.lookCluster(ctx, &node.Cluster))
	}
	if len(w.cfg.Ranges) == 0 && node.Cluster != "" {
		note("ranges of the ClusterSetIPs, to refuse clients of unused ones, see --clusterset-ip-range", w.lookRanges(ctx, node.Cluster, &l.topology.Ranges))
	}
	l.missing = errors.Join(missing...)
	return l
}

// lookZone reads the zone of the node.
func (w *topologyWatcher) lookZone(ctx context.Context, zone *string) error {
	var n metav1.PartialObjectMetadata
	if err := getObject(ctx, w.server, "/api/v1/nodes/"+w.cfg.NodeName, &n); err != nil {
		return err
	}
	*zone = n.Labels[corev1.LabelTopologyZone]
	return nil
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

// lookRanges reads the ClusterSetIP ranges of this member.
func (w *topologyWatcher) lookRanges(ctx context.Context, id clusterset.ClusterID, ranges *[]netip.Prefix) error {
	var m v1alpha1.Member
	if err := getObject(ctx, w.server, fmt.Sprintf("/apis/%s/namespaces/%s/members/%s", v1alpha1.GroupVersion, w.cfg.Namespace, id), &m); err != nil {
		return err
	}
	found, err := parseRanges(m.Status.ClusterSetIPCIDRRange)
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return errNotYet
	}
	*ranges = found
	return nil
}

// getObject reads an object from the API server.
func getObject(ctx context.Context, server rest.Interface, path string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request := server.Get().AbsPath(path)
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
		Node:              lb.Node{Cluster: clusterset.ClusterID(c.ClusterID), Name: c.NodeName, Zone: c.Zone},
		ZonesSpanClusters: c.ZonesSpanClusters,
		Ranges:            ranges,
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
	slices.SortFunc(ranges, netip.Prefix.Compare)
	return slices.Compact(ranges), errors.Join(faults...)
}
