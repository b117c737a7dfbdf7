package imports

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// localCache caches the ServiceImports of this cluster, and of the EndpointSlices that Isthmus writes little more than their
// digests. It includes writes that the watch has not delivered yet.
type localCache struct {
	client  client.WithWatch
	imports *objectcache.Informer[*localImport, clusterset.ServiceName]
	slices  *objectcache.Informer[*localSlice, clusterset.ServiceName]
	changes objectcache.Trigger

	mu          sync.Mutex
	addresses   map[netip.Addr][]*localImport // the imports that have an address
	sliceCounts map[clusterset.ClusterID]int  // how many slices each member is the source of
	pending     map[clusterset.ServiceName]*pendingWrites
}

// pendingWrites are the writes of a Service that the watch has not delivered yet. Without them, a reconcile in between
// would write the same again.
type pendingWrites struct {
	until  time.Time // they expire then, because the objects may have been deleted unseen
	imp    *localImport
	slices map[string]*localSlice
}

// pendingTimeout is how long the watch may take to deliver a write.
const pendingTimeout = 10 * time.Second

// localImport is the cached form of a ServiceImport.
type localImport struct {
	service    clusterset.ServiceName
	uid        types.UID
	version    string
	generation int64
	created    metav1.Time
	ours       bool
	digest     mcs.Digest
	ips        []netip.Addr
	useIP      clusterset.Choice
	clusters   []clusterset.ClusterID
	objects    v1beta1.EndpointSliceObjectsStatus
	conditions []metav1.Condition
}

// localSlice is the cached form of an EndpointSlice that Isthmus writes.
type localSlice struct {
	service clusterset.ServiceName
	name    string
	version string
	source  clusterset.ClusterID
	digest  mcs.Digest

	exported int64 // the place of the export, in seconds since 1970; 0 if unknown
}

// observed are the objects of one Service in this cluster, pending writes included.
type observed struct {
	imp    *localImport // nil without one
	slices []*localSlice
}

// sources returns the members from which the Service is imported, sorted.
func (o observed) sources() []clusterset.ClusterID {
	var ids []clusterset.ClusterID
	for _, es := range o.slices {
		ids = append(ids, es.source)
	}
	if o.imp != nil && o.imp.ours {
		ids = append(ids, o.imp.clusters...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// init creates the caches, which read through cl.
func (c *localCache) init(cl client.WithWatch) (err error) {
	c.client = cl
	c.addresses, c.sliceCounts, c.pending = map[netip.Addr][]*localImport{}, map[clusterset.ClusterID]int{}, map[clusterset.ServiceName]*pendingWrites{}
	c.imports, err = objectcache.New(cl.Scheme(), objectcache.Config[*localImport, clusterset.ServiceName]{
		Source:  objectcache.Source{Object: &v1beta1.ServiceImport{}},
		Compact: func(obj client.Object) *localImport { return compactImport(obj.(*v1beta1.ServiceImport)) }, //nolint:forcetypeassert // Object says so
		Index:   func(i *localImport) (clusterset.ServiceName, bool) { return i.service, i.service.Name != "" },
		Before:  c.importChanges,
		After: func(was, is *localImport, _ bool) {
			if i := objectcache.Either(was, is); !c.isEcho(i.service, i, nil, is == nil) {
				c.changes.Send(i.service)
			}
		},
	})
	if err != nil {
		return err
	}
	c.slices, err = objectcache.New(cl.Scheme(), objectcache.Config[*localSlice, clusterset.ServiceName]{
		Source: objectcache.Source{
			Object:   &discoveryv1.EndpointSlice{},
			Selector: labels.SelectorFromSet(labels.Set{discoveryv1.LabelManagedBy: v1alpha1.ManagedBy}),
		},
		Compact: func(obj client.Object) *localSlice { return compactSlice(obj.(*discoveryv1.EndpointSlice)) }, //nolint:forcetypeassert // Object says so
		Index:   func(s *localSlice) (clusterset.ServiceName, bool) { return s.service, s.service.Name != "" },
		Before:  c.sliceChanges,
		After: func(was, is *localSlice, _ bool) {
			if s := objectcache.Either(was, is); !c.isEcho(s.service, nil, s, is == nil) {
				c.changes.Send(s.service)
			}
		},
	})
	return err
}

func (c *localCache) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.imports.Run(ctx, c.client) })
	group.Go(func() error { return c.slices.Run(ctx, c.client) })
	return group.Wait()
}

// known returns every Service that has an object in this cluster.
func (c *localCache) known() []clusterset.ServiceName {
	var names []clusterset.ServiceName
	for _, i := range c.imports.All() {
		names = append(names, i.service)
	}
	for _, s := range c.slices.All() {
		names = append(names, s.service)
	}
	slices.SortFunc(names, clusterset.ServiceName.Compare)
	return slices.Compact(names)
}

// of returns the objects of a Service, pending writes included.
func (c *localCache) of(name clusterset.ServiceName) observed {
	s := observed{imp: c.imports.Get(name.Namespace, name.Name), slices: c.slices.Indexed(name)}
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pending[name]
	if p == nil {
		return s
	}
	if time.Now().After(p.until) {
		delete(c.pending, name)
		return s
	}
	if p.imp != nil {
		s.imp = p.imp
	}
	s.slices = slices.DeleteFunc(s.slices, func(o *localSlice) bool { return p.slices[o.name] != nil })
	for _, o := range p.slices {
		s.slices = append(s.slices, o)
	}
	return s
}

// wroteImport records the result of a write, unless the watch has delivered it or a later version.
func (c *localCache) wroteImport(i *localImport) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !newer(i.version, c.imports.Latest()) {
		return
	}
	c.pendingOf(i.service).imp = i
}

// wroteSlice records the result of a write of a slice likewise.
func (c *localCache) wroteSlice(s *localSlice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !newer(s.version, c.slices.Latest()) {
		return
	}
	c.pendingOf(s.service).slices[s.name] = s
}

// pendingOf returns the pending writes of a Service, and creates them if there are none. The lock is held.
func (c *localCache) pendingOf(name clusterset.ServiceName) *pendingWrites {
	p := c.pending[name]
	if p == nil {
		p = &pendingWrites{slices: map[string]*localSlice{}}
		c.pending[name] = p
	}
	p.until = time.Now().Add(pendingTimeout)
	return p
}

// isEcho removes the pending writes of a Service that the delivered object replaces, and reports whether that object is
// exactly such a write, which needs no reconcile.
func (c *localCache) isEcho(name clusterset.ServiceName, imp *localImport, slice *localSlice, gone bool) (echo bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pending[name]
	if p == nil {
		return false
	}
	if imp != nil && p.imp != nil && (gone || !newer(p.imp.version, imp.version)) {
		echo = !gone && p.imp.version == imp.version
		p.imp = nil
	}
	if slice != nil {
		if mine := p.slices[slice.name]; mine != nil && (gone || !newer(mine.version, slice.version)) {
			echo = !gone && mine.version == slice.version
			delete(p.slices, slice.name)
		}
	}
	if p.imp == nil && len(p.slices) == 0 {
		delete(c.pending, name)
	}
	return echo
}

// newer reports whether resource version a is later than b, of the same kind (KEP-5504); false if they are not comparable.
func newer(a, b string) bool {
	x, err1 := strconv.ParseUint(a, 10, 64)
	y, err2 := strconv.ParseUint(b, 10, 64)
	return err1 == nil && err2 == nil && x > y
}

// importChanges updates the index of addresses. An import stays Isthmus' own when another client removes its label.
func (c *localCache) importChanges(was, is *localImport, _ bool) {
	if was != nil && is != nil && was.uid == is.uid {
		is.ours = is.ours || was.ours
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if was != nil {
		for _, a := range was.ips {
			c.addresses[a] = slices.DeleteFunc(c.addresses[a], func(o *localImport) bool { return o == was })
			if len(c.addresses[a]) == 0 {
				delete(c.addresses, a)
			}
		}
	}
	if is != nil && is.ours {
		for _, a := range is.ips {
			c.addresses[a] = append(c.addresses[a], is)
		}
	}
}

// sliceChanges updates the number of slices of each source.
func (c *localCache) sliceChanges(was, is *localSlice, _ bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if was != nil {
		if c.sliceCounts[was.source]--; c.sliceCounts[was.source] == 0 {
			delete(c.sliceCounts, was.source)
		}
	}
	if is != nil {
		c.sliceCounts[is.source]++
	}
}

// uses reports whether a member is the source of any slice.
func (c *localCache) uses(id clusterset.ClusterID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sliceCounts[id] > 0
}

// clash returns an older import that already has an address of imp.
func (c *localCache) clash(imp clusterset.Import) (other clusterset.ServiceName, clash bool) {
	own := c.imports.Get(imp.Service.Namespace, imp.Service.Name)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range imp.IPs {
		for _, o := range c.addresses[a] {
			if o.service != imp.Service && (own == nil || o.created.Before(&own.created)) {
				return o.service, true
			}
		}
	}
	return clusterset.ServiceName{}, false
}

// sameStatus reports whether two imports have the same status.
func (i *localImport) sameStatus(o *localImport) bool {
	return slices.Equal(i.clusters, o.clusters) && i.objects == o.objects && equality.Semantic.DeepEqual(i.conditions, o.conditions)
}

func compactImport(si *v1beta1.ServiceImport) *localImport {
	i := &localImport{
		service: clusterset.ServiceName{Namespace: mcs.Share(si.Namespace), Name: strings.Clone(si.Name)},
		uid:     si.UID, version: strings.Clone(si.ResourceVersion), generation: si.Generation, created: si.CreationTimestamp,
		ours:    si.Labels[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy,
		digest:  mcs.ImportDigest(si),
		objects: v1beta1.EndpointSliceObjectsStatus(mcs.Share(string(si.Status.EndpointSliceObjects))),
	}
	for _, text := range si.Spec.IPs {
		if a, err := netip.ParseAddr(text); err == nil {
			i.ips = append(i.ips, a)
		}
	}
	agreed := clusterset.Aggregate{IPs: i.ips}
	if si.Annotations[v1alpha1.AnnotationUseClusterSetIP] == clusterset.Disabled.String() {
		agreed.UseIP = clusterset.Disabled
	}
	i.useIP = agreed.Decided()
	for _, c := range si.Status.Clusters {
		i.clusters = append(i.clusters, clusterset.ClusterID(mcs.Share(c.Cluster)))
	}
	for _, c := range si.Status.Conditions {
		c.Type, c.Reason, c.Message = mcs.Share(c.Type), mcs.Share(c.Reason), mcs.Share(c.Message)
		i.conditions = append(i.conditions, c)
	}
	return i
}

func compactSlice(es *discoveryv1.EndpointSlice) *localSlice {
	s := &localSlice{
		service: clusterset.ServiceName{Namespace: mcs.Share(es.Namespace), Name: mcs.Share(es.Labels[v1beta1.LabelServiceName])},
		name:    strings.Clone(es.Name), version: strings.Clone(es.ResourceVersion),
		source: clusterset.ClusterID(mcs.Share(es.Labels[v1beta1.LabelSourceCluster])),
		digest: mcs.SliceDigest(es),
	}
	if at := mcs.ExportedAt(es); !at.IsZero() {
		s.exported = at.Unix()
	}
	return s
}
