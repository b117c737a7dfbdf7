package lighthouse

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	brokerclient "github.com/isthmus-net/isthmus/controlplane/broker/internal/client"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// marked on an EndpointSlice of Submariner's broker says that the Bridge writes it, and may delete it.
const marked = "isthmus.dev/bridge"

// markedCluster plus the id of a cluster is the same on an aggregate, for what it says about that cluster.
const markedCluster = "bridge.isthmus.dev/"

// mirror writes what the clusters of Isthmus export into Submariner's broker.
type mirror struct {
	client    client.Client
	namespace string // Submariner's broker
	store     *store
	broker    *brokerclient.Broker
	bridged   func(clusterset.ClusterID) bool
	log       *slog.Logger
	told      sync.Map // clusterset.ServiceName -> the refusals last logged
}

// refusal is why an export is not mirrored.
type refusal struct {
	cluster clusterset.ClusterID
	why     string
}

// report logs the exports of a Service that are not mirrored, if they or the reasons have changed.
func (m *mirror) report(name clusterset.ServiceName, refused []refusal) {
	if len(refused) == 0 {
		m.told.Delete(name)
		return
	}
	if was, ok := m.told.Swap(name, refused); ok && slices.Equal(was.([]refusal), refused) { //nolint:forcetypeassert // nothing else is stored
		return
	}
	for _, r := range refused {
		m.log.Warn("an export is not mirrored: "+r.why, "namespace", name.Namespace, "service", name.Name, "cluster", string(r.cluster))
	}
}

// mirror mirrors what p sees of the ClusterSet until ctx ends.
func (b *Bridge) mirror(ctx context.Context, p *proxy) error {
	options := b.options()
	options.Reconciler = &mirror{client: b.client, namespace: b.cfg.Lighthouse, store: b.store, broker: p.broker, bridged: b.isBridgedID, log: b.cfg.Log}
	c, err := controller.NewUnmanaged("mirror", options)
	if err != nil {
		return fmt.Errorf("prepare the mirror: %w", err)
	}
	for _, s := range []source.Source{b.store.source(), p.broker.Changes()} {
		if err := c.Watch(s); err != nil {
			return fmt.Errorf("watch for the mirror: %w", err)
		}
	}
	return c.Start(ctx)
}

// exporter is a cluster of Isthmus that exports a Service, in Lighthouse's form.
type exporter struct {
	export clusterset.Export
	slices []*discoveryv1.EndpointSlice // never empty
}

// Reconcile mirrors one Service.
func (m *mirror) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	name := clusterset.ServiceName(req.NamespacedName)
	have := m.store.slices.Indexed(name)
	exporters := m.exporters(name, m.store.aggregate(name), have)
	err := m.sync(ctx, name, exporters, have)
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return ctrl.Result{RequeueAfter: firstRetry}, nil
	}
	return ctrl.Result{}, err
}

// sync makes the objects of a Service those of the exporters and of the clusters that run Lighthouse.
func (m *mirror) sync(ctx context.Context, name clusterset.ServiceName, exporters map[clusterset.ClusterID]exporter, have []*discoveryv1.EndpointSlice) error {
	if len(exporters) > 0 && m.store.aggregate(name) == nil {
		if err := m.createAggregate(ctx, name, exporters); err != nil {
			return err
		}
	}
	byCluster := map[clusterset.ClusterID][]*discoveryv1.EndpointSlice{}
	for id := range exporters {
		byCluster[id] = nil
	}
	for _, es := range have {
		byCluster[clusterOf(es)] = append(byCluster[clusterOf(es)], es)
	}
	var after []*discoveryv1.EndpointSlice
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(byCluster)) {
		own, err := m.syncSlices(ctx, id, byCluster[id], exporters[id].slices)
		after, errs = append(after, own...), append(errs, err)
	}
	return errors.Join(append(errs, m.updateAggregate(ctx, name, exporters, after))...)
}

// exporters returns the clusters of Isthmus whose export of a Service Lighthouse can express. have are the slices on Submariner's
// broker.
func (m *mirror) exporters(name clusterset.ServiceName, aggregate *v1beta1.ServiceImport, have []*discoveryv1.EndpointSlice) map[clusterset.ClusterID]exporter {
	all := m.broker.Slices(name, true)
	found := map[clusterset.ClusterID]exporter{}
	var refused []refusal
	for _, e := range m.broker.Exports(name) {
		if m.bridged(e.Cluster) {
			continue
		}
		if aggregate != nil && aggregate.Spec.Type != typeOf(e) {
			refused = append(refused, refusal{e.Cluster, "the clusters that run Lighthouse have a Service of another type"})
			continue
		}
		x := exporter{export: e}
		for _, es := range all {
			if mcs.OwnerOf(es) == e.Cluster {
				x.slices = append(x.slices, es)
			}
		}
		var pods bool
		if x.slices, pods = convert(e, x.slices, have); len(x.slices) > 0 {
			found[e.Cluster] = x
		}
		if pods {
			refused = append(refused, refusal{e.Cluster, "Lighthouse cannot express the addresses of pods; give the cluster the setting --endpoints=service-vip"})
		}
	}
	m.report(name, refused)
	return found
}

// convert returns the slices of an export in Lighthouse's form, without a namespace, and whether some are left out because they have
// the addresses of pods.
func convert(e clusterset.Export, offered, have []*discoveryv1.EndpointSlice) (converted []*discoveryv1.EndpointSlice, pods bool) {
	for _, es := range offered {
		c := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: es.Name,
				Labels: map[string]string{
					discoveryv1.LabelManagedBy: managedBy, labelNamespace: e.Service.Namespace, v1beta1.LabelServiceName: e.Service.Name,
					v1beta1.LabelSourceCluster: string(e.Cluster), labelHeadless: strconv.FormatBool(e.Type == clusterset.Headless),
				},
				Annotations: map[string]string{annotationNotReady: "false", annotationGlobalIP: "false", marked: ""},
			},
			AddressType: es.AddressType, Endpoints: es.Endpoints, Ports: es.Ports,
		}
		switch {
		case e.Type == clusterset.Headless:
			c.Labels[labelSourceName] = es.Name
		case !mcs.IsServiceSlice(es, e.Cluster, e.Service):
			pods = true
			continue
		case len(es.Endpoints) == 0:
			if c.Endpoints = notReady(e.Cluster, es.AddressType, have); c.Endpoints == nil {
				continue // its address was never known
			}
		}
		converted = append(converted, c)
	}
	if e.Type != clusterset.Headless && len(converted) > 1 {
		// Lighthouse has one address for each Service of a cluster.
		slices.SortFunc(converted, func(a, b *discoveryv1.EndpointSlice) int {
			return strings.Compare(string(a.AddressType), string(b.AddressType))
		})
		converted = converted[:1]
	}
	return converted, pods
}

// notReady returns the endpoint of a Service without ready pods, with the address that the cluster's slice has; nil without one.
func notReady(id clusterset.ClusterID, family discoveryv1.AddressType, have []*discoveryv1.EndpointSlice) []discoveryv1.Endpoint {
	for _, es := range have {
		if clusterOf(es) == id && es.AddressType == family && len(es.Endpoints) > 0 {
			return []discoveryv1.Endpoint{{Addresses: es.Endpoints[0].Addresses, Conditions: discoveryv1.EndpointConditions{Ready: new(false)}}}
		}
	}
	return nil
}

func typeOf(e clusterset.Export) v1beta1.ServiceImportType {
	if e.Type == clusterset.Headless {
		return v1beta1.Headless
	}
	return v1beta1.ClusterSetIP
}

// syncSlices makes want the slices of one cluster, and returns those that there are afterwards. It takes over slices of the cluster's
// Lighthouse instead of writing others beside them. Without want it deletes the slices that it has written.
func (m *mirror) syncSlices(ctx context.Context, id clusterset.ClusterID, have, want []*discoveryv1.EndpointSlice) (after []*discoveryv1.EndpointSlice, err error) {
	if len(want) == 0 {
		return m.leave(ctx, id, have)
	}
	rest := slices.Clone(have)
	var errs []error
	for _, w := range want {
		i := matching(rest, w)
		if i < 0 {
			w.Namespace = m.namespace
			errs = append(errs, wrap("create", w.Name, m.client.Create(ctx, w, client.FieldOwner(v1alpha1.FieldOwner))))
			after = append(after, w)
			continue
		}
		errs = append(errs, m.update(ctx, rest[i], w))
		after = append(after, w)
		rest = slices.Delete(rest, i, i+1)
	}
	for _, es := range rest {
		errs = append(errs, m.remove(ctx, es))
	}
	return after, errors.Join(errs...)
}

// matching returns the index of the slice that can become want with the least change; -1 without one.
func matching(have []*discoveryv1.EndpointSlice, want *discoveryv1.EndpointSlice) int {
	fits := func(test func(*discoveryv1.EndpointSlice) bool) int {
		return slices.IndexFunc(have, func(es *discoveryv1.EndpointSlice) bool { return es.AddressType == want.AddressType && test(es) })
	}
	if i := fits(func(es *discoveryv1.EndpointSlice) bool { return es.Name == want.Name }); i >= 0 {
		return i
	}
	if i := fits(func(es *discoveryv1.EndpointSlice) bool { return sameEndpoints(es, want) }); i >= 0 {
		return i
	}
	return fits(func(es *discoveryv1.EndpointSlice) bool { return !isMarked(es) })
}

// sameEndpoints reports whether two slices say the same, as Lighthouse's name server reads them.
func sameEndpoints(a, b *discoveryv1.EndpointSlice) bool {
	return equality.Semantic.DeepEqual(a.Ports, b.Ports) && slices.EqualFunc(a.Endpoints, b.Endpoints, func(x, y discoveryv1.Endpoint) bool {
		return slices.Equal(x.Addresses, y.Addresses) && isReady(x) == isReady(y) && hostOf(x) == hostOf(y)
	})
}

func isReady(e discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready }

// hostOf returns the name of an endpoint in DNS.
func hostOf(e discoveryv1.Endpoint) string {
	switch {
	case e.Hostname != nil && *e.Hostname != "":
		return *e.Hostname
	case e.TargetRef != nil && e.TargetRef.Kind == "Pod":
		return e.TargetRef.Name
	}
	return ""
}

func isMarked(es *discoveryv1.EndpointSlice) bool {
	_, ok := es.Annotations[marked]
	return ok
}

// update gives have the mark and the content of want.
func (m *mirror) update(ctx context.Context, have, want *discoveryv1.EndpointSlice) error {
	if isMarked(have) && sameEndpoints(have, want) {
		return nil
	}
	is := have.DeepCopy()
	metav1.SetMetaDataAnnotation(&is.ObjectMeta, marked, "")
	if !sameEndpoints(have, want) {
		is.Endpoints, is.Ports = want.Endpoints, want.Ports
	}
	return wrap("update", is.Name, m.client.Update(ctx, is, client.FieldOwner(v1alpha1.FieldOwner)))
}

// leave deletes the slices of a cluster that the Bridge has written and no longer writes: all of them if the cluster is one of
// Isthmus, or else those beside which its Lighthouse has written its own.
func (m *mirror) leave(ctx context.Context, id clusterset.ClusterID, have []*discoveryv1.EndpointSlice) (after []*discoveryv1.EndpointSlice, err error) {
	goes := !m.bridged(id) || slices.ContainsFunc(have, func(es *discoveryv1.EndpointSlice) bool { return !isMarked(es) })
	var errs []error
	for _, es := range have {
		if !isMarked(es) || !goes {
			after = append(after, es)
			continue
		}
		errs = append(errs, m.remove(ctx, es))
	}
	return after, errors.Join(errs...)
}

func (m *mirror) remove(ctx context.Context, es *discoveryv1.EndpointSlice) error {
	// Lighthouse may have taken it back since it was read.
	err := m.client.Delete(ctx, es.DeepCopy(), client.Preconditions{UID: &es.UID, ResourceVersion: &es.ResourceVersion})
	return wrap("delete", es.Name, client.IgnoreNotFound(err))
}

func wrap(verb, name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s EndpointSlice %s of Submariner's broker: %w", verb, name, err)
}

// createAggregate creates the aggregate of a Service that no cluster of Lighthouse exports.
func (m *mirror) createAggregate(ctx context.Context, name clusterset.ServiceName, exporters map[clusterset.ClusterID]exporter) error {
	oldest := slices.MinFunc(slices.Collect(maps.Values(exporters)), func(a, b exporter) int { return a.export.ExportedAt.Compare(b.export.ExportedAt) }).export
	si := &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: m.namespace, Name: aggregateName(name),
			Annotations: map[string]string{v1beta1.LabelServiceName: name.Name, labelNamespace: name.Namespace},
		},
		Spec: v1beta1.ServiceImportSpec{Type: typeOf(oldest), Ports: []v1beta1.ServicePort{}},
	}
	for id, x := range exporters {
		maps.Copy(si.Annotations, annotationsOf(id, x))
	}
	if si.Spec.Type == v1beta1.ClusterSetIP {
		si.Annotations[v1alpha1.AnnotationUseClusterSetIP] = "false"
		si.Spec.SessionAffinity, si.Spec.SessionAffinityConfig = affinityOf(oldest)
	}
	err := m.client.Create(ctx, si, client.FieldOwner(v1alpha1.FieldOwner))
	if apierrors.IsAlreadyExists(err) {
		// Services b-c of namespace d and b of namespace c-d have one name here.
		there := &v1beta1.ServiceImport{}
		if getErr := m.client.Get(ctx, client.ObjectKeyFromObject(si), there); getErr == nil {
			if of, ok := serviceOfAggregate(there); ok && of != name {
				err = fmt.Errorf("Lighthouse has the same name for Service %s; rename one of them", of) //nolint:staticcheck // a name
			}
		}
	}
	return describe(name, err)
}

// annotationsOf returns what an aggregate says about an exporter.
func annotationsOf(id clusterset.ClusterID, x exporter) map[string]string {
	return map[string]string{markedCluster + string(id): "", timestampPrefix + string(id): strconv.FormatInt(x.export.ExportedAt.UnixNano(), 10)}
}

func affinityOf(e clusterset.Export) (corev1.ServiceAffinity, *corev1.SessionAffinityConfig) {
	si := mcs.ServiceImport(clusterset.Import{Service: e.Service, Type: e.Type, SessionAffinity: e.SessionAffinity})
	return si.Spec.SessionAffinity, si.Spec.SessionAffinityConfig
}

// updateAggregate lists the exporters in the aggregate of a Service with the ports of all slices. It removes clusters that it has
// listed and that have no slice any more, and the aggregate after the last one.
func (m *mirror) updateAggregate(ctx context.Context, name clusterset.ServiceName, exporters map[clusterset.ClusterID]exporter, all []*discoveryv1.EndpointSlice) error {
	have := m.store.aggregate(name)
	if have == nil {
		return nil // the cache shows a new one soon
	}
	want := have.DeepCopy()
	changed := false
	for id, x := range exporters {
		for key, value := range annotationsOf(id, x) {
			if v, ok := want.Annotations[key]; !ok || v != value {
				metav1.SetMetaDataAnnotation(&want.ObjectMeta, key, value)
				changed = true
			}
		}
		if !lists(want, id) {
			want.Status.Clusters = append(want.Status.Clusters, v1beta1.ClusterStatus{Cluster: string(id)})
			changed = true
		}
	}
	for key := range have.Annotations {
		id, ok := strings.CutPrefix(key, markedCluster)
		if _, exports := exporters[clusterset.ClusterID(id)]; !ok || exports {
			continue
		}
		changed = true
		delete(want.Annotations, key)
		if slices.ContainsFunc(all, func(es *discoveryv1.EndpointSlice) bool { return string(clusterOf(es)) == id }) {
			continue // its Lighthouse says so
		}
		delete(want.Annotations, timestampPrefix+id)
		want.Status.Clusters = slices.DeleteFunc(want.Status.Clusters, func(c v1beta1.ClusterStatus) bool { return c.Cluster == id })
	}
	if !changed && len(exporters) == 0 {
		return nil // the clusters of Lighthouse keep it
	}
	if want.Spec.Type == v1beta1.ClusterSetIP {
		want.Spec.Ports = mergedPorts(want.Annotations, all)
	}
	return describe(name, m.writeAggregate(ctx, have, want))
}

func (m *mirror) writeAggregate(ctx context.Context, have, want *v1beta1.ServiceImport) error {
	if len(want.Status.Clusters) == 0 {
		return client.IgnoreNotFound(m.client.Delete(ctx, want, client.Preconditions{UID: &have.UID, ResourceVersion: &have.ResourceVersion}))
	}
	// The status comes first: the annotations say which of its clusters are still to be removed.
	is := have.DeepCopy()
	if !equality.Semantic.DeepEqual(have.Status, want.Status) {
		is.Status = want.Status
		if err := m.client.Status().Update(ctx, is, client.FieldOwner(v1alpha1.FieldOwner)); err != nil {
			return err
		}
	}
	if maps.Equal(have.Annotations, want.Annotations) && equality.Semantic.DeepEqual(have.Spec, want.Spec) {
		return nil
	}
	is.Annotations, is.Spec = want.Annotations, want.Spec
	return m.client.Update(ctx, is, client.FieldOwner(v1alpha1.FieldOwner))
}

func describe(name clusterset.ServiceName, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("write the aggregate of %s on Submariner's broker: %w", name, err)
}
