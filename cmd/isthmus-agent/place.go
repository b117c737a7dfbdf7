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

// Where the node is: its zone, which cluster this one is, and which ClusterSetIPs are this member's.
//
// +kubebuilder:rbac:groups="",resources=nodes,verbs=get
// +kubebuilder:rbac:groups=about.k8s.io,resources=clusterproperties,verbs=get
// +kubebuilder:rbac:groups=isthmus.dev,resources=members,verbs=get,namespace=isthmus-system

const (
	// Places change seldom: a node's zone never, a member's id when it leaves.
	placeInterval = 10 * time.Minute
	placeRetry    = 2 * time.Second // doubles up to placeInterval
	// placePatience is how long the dataplane waits for the node's place before it is served without: time
	// enough to ask, and short beside a node that serves nothing new.
	placePatience = 20 * time.Second
)

var errNotYet = errors.New("the controller has not written them yet")

// locator finds out where the node is, tells the dataplane, and holds worlds back until it has: a world seen from
// nowhere would send clients of local Services away.
type locator struct {
	cfg    Config
	server rest.Interface // nil: there is none to ask, the flags say it all
	settle func(context.Context, agent.Topology) error
	log    *slog.Logger

	once  sync.Once
	known chan struct{} // closed when the place is as known as it will be soon
}

// findings says which lookups failed, and whether asking again soon may help.
type findings struct {
	place  agent.Topology
	lacks  error // what is not known and why
	asking bool  // the API server did not answer for itself
	soon   bool  // something will be known later that nobody has to wait for
}

// Run asks until ctx is done; then it returns nil.
func (l *locator) Run(ctx context.Context) error {
	giveUp := time.AfterFunc(placePatience, l.release)
	defer giveUp.Stop()
	retry, said := placeRetry, ""
	place := l.cfg.place()
	for {
		a := l.ask(ctx, place)
		if ctx.Err() != nil {
			return nil
		}
		place = a.place
		if text := fmt.Sprint(a.lacks); a.lacks != nil && text != said {
			l.log.Warn("this node does not know all of its place; what needs it is done without", "err", a.lacks)
			said = text
		}
		if err := l.settle(ctx, place); err != nil {
			l.log.Error("follow the node's place; the next world does", "err", err)
		}
		wait := placeInterval
		if a.asking || a.soon {
			wait, retry = retry, min(2*retry, placeInterval)
		} else {
			retry = placeRetry
		}
		if !a.asking {
			l.release()
		}
		if l.server == nil {
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

func (l *locator) release() { l.once.Do(func() { close(l.known) }) }

// ask looks up what no flag says. What cannot be found stays as it was.
func (l *locator) ask(ctx context.Context, last agent.Topology) findings {
	a := findings{place: last}
	if l.server == nil {
		return a
	}
	var lacks []error
	note := func(what string, err error) {
		if err == nil {
			return
		}
		lacks = append(lacks, fmt.Errorf("%s: %w", what, err))
		switch {
		case errors.Is(err, errNotYet):
			a.soon = true
		case !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err):
			a.asking = true
		}
	}
	node := &a.place.Node
	if l.cfg.Zone == "" {
		var n metav1.PartialObjectMetadata
		if err := l.get(ctx, "/api/v1/nodes/"+l.cfg.NodeName, &n); err != nil {
			note("zone of the node, for trafficDistribution", err)
		} else {
			node.Zone = n.Labels[corev1.LabelTopologyZone]
		}
	}
	if l.cfg.ClusterID == "" {
		var p about.ClusterProperty
		err := l.get(ctx, "/apis/"+about.GroupVersion.String()+"/clusterproperties/"+about.ClusterID, &p)
		if id := clusterset.ClusterID(p.Spec.Value); err == nil {
			if err = id.Validate(); err == nil {
				node.Cluster = id
			}
		}
		note("id of this cluster, for internalTrafficPolicy and trafficDistribution, see --cluster-id", err)
	}
	if len(l.cfg.Ranges) == 0 && node.Cluster != "" {
		var m v1alpha1.Member
		err := l.get(ctx, fmt.Sprintf("/apis/%s/namespaces/%s/members/%s", v1alpha1.GroupVersion, l.cfg.Namespace, node.Cluster), &m)
		if err == nil {
			var ranges []netip.Prefix
			if ranges, err = parseRanges(m.Status.ClusterSetIPCIDRRange); err == nil && len(ranges) > 0 {
				a.place.Ranges = ranges
			} else if err == nil {
				err = errNotYet
			}
		}
		note("ranges of the ClusterSetIPs, to refuse those of nobody, see --clusterset-ip-range", err)
	}
	a.lacks = errors.Join(lacks...)
	return a
}

func (l *locator) get(ctx context.Context, path string, into any) error {
	return getObject(ctx, l.server, path, into)
}

// getObject reads an object of the API.
func getObject(ctx context.Context, server rest.Interface, path string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	// Of a node, only its metadata travels; of other kinds, servers that can do so alone would send too little.
	request := server.Get().AbsPath(path)
	if _, ok := into.(*metav1.PartialObjectMetadata); ok {
		request = request.SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json")
	}
	text, err := request.Do(ctx).Raw()
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// gate holds worlds back from next until the place is known.
type gate struct {
	next  view.Sink
	known <-chan struct{}
}

// Sync hands s on, once the place is known.
func (g gate) Sync(ctx context.Context, s *clusterset.Snapshot) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-g.known:
		return g.next.Sync(ctx, s)
	}
}

// objectServer returns how to ask an API server for single objects.
func objectServer(cluster *rest.Config) (rest.Interface, error) {
	cfg := rest.CopyConfig(cluster)
	cfg.NegotiatedSerializer = scheme.Codecs.WithoutConversion() // for errors; objects are read as they come
	c, err := rest.UnversionedRESTClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client for single objects: %w", err)
	}
	return c, nil
}

// place is what the flags say of it.
func (c *Config) place() agent.Topology {
	ranges, _ := parseRanges(c.Ranges) // Validate has looked
	return agent.Topology{
		Node:              lb.Node{Cluster: clusterset.ClusterID(c.ClusterID), Name: c.NodeName, Zone: c.Zone},
		ZonesSpanClusters: c.ZonesSpanClusters,
		Ranges:            ranges,
	}
}

// parseRanges reads CIDRs. They are sorted, each once.
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
