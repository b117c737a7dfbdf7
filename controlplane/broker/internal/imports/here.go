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

// here is what stands in this member: of slices, which are ours to write and never to read, little more than
// what they come to.
type here struct {
	client  client.WithWatch
	imports *objectcache.Informer[*localImport, clusterset.ServiceName]
	slices  *objectcache.Informer[*localSlice, clusterset.ServiceName]
	changes objectcache.Trigger

	mu        sync.Mutex
	addresses map[netip.Addr][]*localImport // imports that have them
	sources   map[clusterset.ClusterID]int  // how many slices came from each member
	ahead     map[clusterset.ServiceName]*ahead
}

// ahead is what was written of a Service and is not seen yet: without it, whoever looks in between would write
// it again.
type ahead struct {
	until  time.Time // it does not count any longer: what was written may have been deleted unseen
	imp    *localImport
	slices map[string]*localSlice
}

// aheadFor is how long a write may take to be seen.
const aheadFor = 10 * time.Second

// localImport is what is kept of a ServiceImport.
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

// localSlice is what is kept of an EndpointSlice of ours.
type localSlice struct {
	service clusterset.ServiceName
	name    string
	version string
	source  clusterset.ClusterID
	digest  mcs.Digest
}

// standing is what stands here of one Service.
type standing struct {
	imp    *localImport // nil when there is none
	slices []*localSlice
}

// from returns from whom the Service has been imported, sorted.
func (s standing) from() []clusterset.ClusterID {
	var ids []clusterset.ClusterID
	for _, es := range s.slices {
		ids = append(ids, es.source)
	}
	if s.imp != nil && s.imp.ours {
		ids = append(ids, s.imp.clusters...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// watch prepares the caches of what stands here, as c reads it.
func (h *here) watch(c client.WithWatch) (err error) {
	h.client = c
	h.addresses, h.sources, h.ahead = map[netip.Addr][]*localImport{}, map[clusterset.ClusterID]int{}, map[clusterset.ServiceName]*ahead{}
	h.imports, err = objectcache.New(c.Scheme(), objectcache.Config[*localImport, clusterset.ServiceName]{
		Source:  objectcache.Source{Object: &v1beta1.ServiceImport{}},
		Compact: func(obj client.Object) *localImport { return compactImport(obj.(*v1beta1.ServiceImport)) }, //nolint:forcetypeassert // Object says so
		Index:   func(i *localImport) (clusterset.ServiceName, bool) { return i.service, i.service.Name != "" },
		Before:  h.importChanges,
		After: func(was, is *localImport, _ bool) {
			if i := objectcache.Either(was, is); !h.saw(i.service, i, nil, is == nil) {
				h.changes.Send(i.service)
			}
		},
	})
	if err != nil {
		return err
	}
	h.slices, err = objectcache.New(c.Scheme(), objectcache.Config[*localSlice, clusterset.ServiceName]{
		Source: objectcache.Source{
			Object:   &discoveryv1.EndpointSlice{},
			Selector: labels.SelectorFromSet(labels.Set{discoveryv1.LabelManagedBy: v1alpha1.ManagedBy}),
		},
		Compact: func(obj client.Object) *localSlice { return compactSlice(obj.(*discoveryv1.EndpointSlice)) }, //nolint:forcetypeassert // Object says so
		Index:   func(s *localSlice) (clusterset.ServiceName, bool) { return s.service, s.service.Name != "" },
		Before:  h.sliceChanges,
		After: func(was, is *localSlice, _ bool) {
			if s := objectcache.Either(was, is); !h.saw(s.service, nil, s, is == nil) {
				h.changes.Send(s.service)
			}
		},
	})
	return err
}

func (h *here) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return h.imports.Run(ctx, h.client) })
	group.Go(func() error { return h.slices.Run(ctx, h.client) })
	return group.Wait()
}

// known returns every Service of which anything stands here.
func (h *here) known() []clusterset.ServiceName {
	var names []clusterset.ServiceName
	for _, i := range h.imports.All() {
		names = append(names, i.service)
	}
	for _, s := range h.slices.All() {
		names = append(names, s.service)
	}
	slices.SortFunc(names, clusterset.ServiceName.Compare)
	return slices.Compact(names)
}

// of returns what stands here of a Service, what was written a moment ago included.
func (h *here) of(name clusterset.ServiceName) standing {
	s := standing{imp: h.imports.Get(name.Namespace, name.Name), slices: h.slices.Indexed(name)}
	h.mu.Lock()
	defer h.mu.Unlock()
	a := h.ahead[name]
	if a == nil {
		return s
	}
	if time.Now().After(a.until) {
		delete(h.ahead, name)
		return s
	}
	if a.imp != nil {
		s.imp = a.imp
	}
	s.slices = slices.DeleteFunc(s.slices, func(o *localSlice) bool { return a.slices[o.name] != nil })
	for _, o := range a.slices {
		s.slices = append(s.slices, o)
	}
	return s
}

// wrote notes what a write made of an import, unless that was seen already, and perhaps what became of it since.
func (h *here) wrote(i *localImport) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !newer(i.version, h.imports.Latest()) {
		return
	}
	h.aheadOf(i.service).imp = i
}

// wroteSlice notes what a write made of a slice, likewise.
func (h *here) wroteSlice(s *localSlice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !newer(s.version, h.slices.Latest()) {
		return
	}
	h.aheadOf(s.service).slices[s.name] = s
}

// aheadOf returns where to note a write. The lock is held.
func (h *here) aheadOf(name clusterset.ServiceName) *ahead {
	a := h.ahead[name]
	if a == nil {
		a = &ahead{slices: map[string]*localSlice{}}
		h.ahead[name] = a
	}
	a.until = time.Now().Add(aheadFor)
	return a
}

// saw forgets what was written of a Service as far as it is not ahead any more, and reports whether what was seen is
// just that, which asks for nothing.
func (h *here) saw(name clusterset.ServiceName, imp *localImport, slice *localSlice, gone bool) (echo bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	a := h.ahead[name]
	if a == nil {
		return false
	}
	if imp != nil && a.imp != nil && (gone || !newer(a.imp.version, imp.version)) {
		echo = !gone && a.imp.version == imp.version
		a.imp = nil
	}
	if slice != nil {
		if mine := a.slices[slice.name]; mine != nil && (gone || !newer(mine.version, slice.version)) {
			echo = !gone && mine.version == slice.version
			delete(a.slices, slice.name)
		}
	}
	if a.imp == nil && len(a.slices) == 0 {
		delete(h.ahead, name)
	}
	return echo
}

// newer reports whether resource version a is later than b (of one kind, KEP-5504). What cannot be compared is not.
func newer(a, b string) bool {
	x, err1 := strconv.ParseUint(a, 10, 64)
	y, err2 := strconv.ParseUint(b, 10, 64)
	return err1 == nil && err2 == nil && x > y
}

// importChanges follows who has which address.
func (h *here) importChanges(was, is *localImport, _ bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if was != nil {
		for _, a := range was.ips {
			h.addresses[a] = slices.DeleteFunc(h.addresses[a], func(o *localImport) bool { return o == was })
			if len(h.addresses[a]) == 0 {
				delete(h.addresses, a)
			}
		}
	}
	if is != nil && is.ours {
		for _, a := range is.ips {
			h.addresses[a] = append(h.addresses[a], is)
		}
	}
}

// sliceChanges follows what came from whom.
func (h *here) sliceChanges(was, is *localSlice, _ bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if was != nil {
		if h.sources[was.source]--; h.sources[was.source] == 0 {
			delete(h.sources, was.source)
		}
	}
	if is != nil {
		h.sources[is.source]++
	}
}

// uses reports whether any slice came from a member.
func (h *here) uses(id clusterset.ClusterID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sources[id] > 0
}

// clash returns another import that has an address of imp already, and had it first.
func (h *here) clash(imp clusterset.Import) (other clusterset.ServiceName, clash bool) {
	own := h.imports.Get(imp.Service.Namespace, imp.Service.Name)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range imp.IPs {
		for _, o := range h.addresses[a] {
			if o.service != imp.Service && (own == nil || o.created.Before(&own.created)) {
				return o.service, true
			}
		}
	}
	return clusterset.ServiceName{}, false
}

// sameStatus reports whether the statuses say the same.
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
	return &localSlice{
		service: clusterset.ServiceName{Namespace: mcs.Share(es.Namespace), Name: mcs.Share(es.Labels[v1beta1.LabelServiceName])},
		name:    strings.Clone(es.Name), version: strings.Clone(es.ResourceVersion),
		source: clusterset.ClusterID(mcs.Share(es.Labels[v1beta1.LabelSourceCluster])),
		digest: mcs.SliceDigest(es),
	}
}
