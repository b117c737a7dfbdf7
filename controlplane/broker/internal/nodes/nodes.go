// Package nodes follows the Nodes of this cluster: what their labels tell about regions, and their pod CIDRs.
//
// For example, all Nodes with the label topology.kubernetes.io/zone=eu-west-1a have topology.kubernetes.io/region=eu-west-1:
// endpoints in zone eu-west-1a are in region eu-west-1. Kubernetes puts the zone into an EndpointSlice, but not the region.
//
// It does not use a manager's cache, whose controllers wait for all that it reads: a chart of an older version grants no right to
// read Nodes.
package nodes

import (
	"context"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// readTimeout is how long a controller waits at its start for the Nodes. Without the wait, a restarted controller would publish
// every slice twice, first without regions. After it, exports go on without them.
const readTimeout = 10 * time.Second

// Nodes watches the Nodes of a cluster. Create one with New. A manager runs it, also while it is not the leader, so that
// another replica can take over at once.
type Nodes struct {
	client  client.WithWatch
	cache   *objectcache.Informer[node, string]
	timeout time.Duration
	log     *slog.Logger

	podCIDRsChanged func()

	changes  objectcache.Trigger
	affected func() []clusterset.ServiceName
	started  atomic.Bool // a controller uses the regions

	mu     sync.Mutex
	count  map[place]int     // how many Nodes are there
	byZone map[string]string // what RegionOf returns
}

// node is what is kept of a Node.
type node struct {
	place    place
	podCIDRs string // joined by commas
}

// place is the zone and the region of a Node. The zero place stands for a Node that names neither.
type place struct{ zone, region string }

// New returns Nodes that are read through c. podCIDRsChanged is called when the result of PodCIDRs may have changed. It does not
// block.
func New(c client.WithWatch, podCIDRsChanged func(), log *slog.Logger) (*Nodes, error) {
	n := &Nodes{client: c, timeout: readTimeout, log: log, podCIDRsChanged: podCIDRsChanged, count: map[place]int{}}
	var err error
	n.cache, err = objectcache.New(c.Scheme(), objectcache.Config[node, string]{
		Source:  objectcache.Source{Object: &corev1.Node{}},
		Compact: compact,
		After:   func(was, is node, _ bool) { n.changed(was, is) },
		Settled: func() { n.notify(); podCIDRsChanged() },
	})
	return n, err
}

func compact(obj client.Object) node {
	n, ok := obj.(*corev1.Node)
	if !ok {
		return node{}
	}
	return node{
		place:    place{mcs.Share(n.Labels[corev1.LabelTopologyZone]), mcs.Share(n.Labels[corev1.LabelTopologyRegion])},
		podCIDRs: strings.Join(n.Spec.PodCIDRs, ","),
	}
}

// +kubebuilder:rbac:groups="",resources=nodes,verbs=list;watch

// Start watches the Nodes until ctx ends. Without the right to read them nothing is known, and all else works.
func (n *Nodes) Start(ctx context.Context) error { return n.cache.Run(ctx, n.client) }

// NeedLeaderElection tells the manager to run Nodes on a standby too.
func (n *Nodes) NeedLeaderElection() bool { return false }

// Source returns a source that has the Services that affected lists reconciled whenever the region of a zone changes. The
// controller that uses it starts when the regions are known, or after readTimeout.
func (n *Nodes) Source(affected func() []clusterset.ServiceName) source.Source {
	n.affected = affected
	return n.changes.Source(func() []clusterset.ServiceName { return nil }, n.wait)
}

// wait returns when the Nodes are known, or after the timeout.
func (n *Nodes) wait(ctx context.Context) error {
	defer n.started.Store(true)
	bounded, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	if err := n.cache.WaitForSync(bounded); err != nil && ctx.Err() == nil {
		n.log.Warn("the Nodes of this cluster cannot be read; endpoints are exported without their regions until they can", "err", err)
	}
	return ctx.Err()
}

// RegionOf returns the region of a zone, "" if no Node of the zone names one, or if its Nodes name several. RegionOf("") is the only
// region that Nodes name, "" if there are several.
func (n *Nodes) RegionOf(zone string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.byZone[zone]
}

// PodCIDRs returns the pod CIDRs of all Nodes, and false until they have been read.
func (n *Nodes) PodCIDRs() (all []netip.Prefix, known bool) {
	if n.cache.Err() != nil {
		return nil, false
	}
	for _, is := range n.cache.All() {
		all = append(all, clusterset.ParsePrefixes(is.podCIDRs)...)
	}
	return all, true
}

// changed notes that a Node is now instead of was.
func (n *Nodes) changed(was, is node) {
	if was.place != is.place && n.recount(was.place, is.place) && n.cache.Err() == nil {
		n.notify()
	}
	if was.podCIDRs != is.podCIDRs {
		n.podCIDRsChanged()
	}
}

// recount reports whether the region of a zone changes with a Node.
func (n *Nodes) recount(was, is place) (changed bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.count[was]--; n.count[was] <= 0 {
		delete(n.count, was)
	}
	if is != (place{}) {
		n.count[is]++
	}
	before := n.byZone
	n.byZone = derive(maps.Keys(n.count))
	return !maps.Equal(before, n.byZone)
}

// notify has the affected Services reconciled, unless no controller has used the regions yet.
func (n *Nodes) notify() {
	if n.started.Load() {
		n.changes.Send(n.affected()...)
	}
}

// derive returns the region of each zone of places, and that of "". The region of a zone in several is "".
func derive(places iter.Seq[place]) map[string]string {
	byZone := map[string]string{}
	for p := range places {
		if p.region == "" {
			continue
		}
		for _, zone := range []string{p.zone, ""} {
			if have, ok := byZone[zone]; ok && have != p.region {
				byZone[zone] = ""
				continue
			}
			byZone[zone] = p.region
		}
	}
	return byZone
}
