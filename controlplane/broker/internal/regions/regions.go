// Package regions derives the region of each zone of this cluster from the labels of its Nodes.
//
// For example, all Nodes with the label topology.kubernetes.io/zone=eu-west-1a have topology.kubernetes.io/region=eu-west-1:
// endpoints in zone eu-west-1a are in region eu-west-1. Kubernetes puts the zone into an EndpointSlice, but not the region.
package regions

import (
	"context"
	"iter"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// nodesTimeout is how long a controller waits at its start for the Nodes. Without the wait, a restarted controller would publish
// every slice twice, first without regions. After it, exports go on without: a chart of an older version grants no right to
// read Nodes.
const nodesTimeout = 10 * time.Second

// Regions watches the Nodes of a cluster. Create one with New. A manager runs it, also while it is not the leader, so that
// another replica can take over at once.
type Regions struct {
	client  client.WithWatch
	nodes   *objectcache.Informer[place, string]
	timeout time.Duration
	log     *slog.Logger

	changes  objectcache.Trigger
	affected func() []clusterset.ServiceName
	started  atomic.Bool // a controller uses the regions

	mu     sync.Mutex
	count  map[place]int     // how many Nodes are there
	byZone map[string]string // what InZone returns
}

// place is the zone and the region of a Node. The zero place stands for a Node that names neither.
type place struct{ zone, region string }

// New returns Regions that read the Nodes through c.
func New(c client.WithWatch, log *slog.Logger) (*Regions, error) {
	r := &Regions{client: c, timeout: nodesTimeout, log: log, count: map[place]int{}}
	node := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}} // its other fields change all the time
	var err error
	r.nodes, err = objectcache.New(c.Scheme(), objectcache.Config[place, string]{
		Source: objectcache.Source{Object: node},
		Compact: func(obj client.Object) place {
			labels := obj.GetLabels()
			return place{mcs.Share(labels[corev1.LabelTopologyZone]), mcs.Share(labels[corev1.LabelTopologyRegion])}
		},
		After:   func(was, is place, _ bool) { r.moved(was, is) },
		Settled: r.notify,
	})
	return r, err
}

// +kubebuilder:rbac:groups="",resources=nodes,verbs=list;watch

// Start watches the Nodes until ctx ends.
func (r *Regions) Start(ctx context.Context) error { return r.nodes.Run(ctx, r.client) }

// NeedLeaderElection tells the manager to run Regions on a standby too.
func (r *Regions) NeedLeaderElection() bool { return false }

// Source returns a source that has the Services that affected lists reconciled whenever the region of a zone changes. The
// controller that uses it starts when the regions are known, or after nodesTimeout.
func (r *Regions) Source(affected func() []clusterset.ServiceName) source.Source {
	r.affected = affected
	return r.changes.Source(func() []clusterset.ServiceName { return nil }, r.wait)
}

// wait returns when the regions are known, or after the timeout.
func (r *Regions) wait(ctx context.Context) error {
	defer r.started.Store(true)
	bounded, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	if err := r.nodes.WaitForSync(bounded); err != nil && ctx.Err() == nil {
		r.log.Warn("the Nodes of this cluster cannot be read; endpoints are exported without their regions until they can", "err", err)
	}
	return ctx.Err()
}

// InZone returns the region of a zone, "" if no Node of the zone names one, or if its Nodes name several. InZone("") is the only region
// that Nodes name, "" if there are several.
func (r *Regions) InZone(zone string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byZone[zone]
}

// moved counts a Node at is instead of was.
func (r *Regions) moved(was, is place) {
	if r.recount(was, is) && r.nodes.Err() == nil {
		r.notify()
	}
}

// recount reports whether the region of a zone changes with a Node.
func (r *Regions) recount(was, is place) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.count[was]--; r.count[was] <= 0 {
		delete(r.count, was)
	}
	if is != (place{}) {
		r.count[is]++
	}
	before := r.byZone
	r.byZone = derive(maps.Keys(r.count))
	return !maps.Equal(before, r.byZone)
}

// notify has the affected Services reconciled, unless no controller has used the regions yet.
func (r *Regions) notify() {
	if r.started.Load() {
		r.changes.Send(r.affected()...)
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
