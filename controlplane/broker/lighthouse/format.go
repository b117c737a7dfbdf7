package lighthouse

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/export"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Keys of Lighthouse's objects (pkg/constants of Lighthouse 0.16 to 0.22).
const (
	managedBy          = "lighthouse-agent.submariner.io"
	labelNamespace     = "lighthouse.submariner.io/sourceNamespace"
	labelHeadless      = "lighthouse.submariner.io/is-headless"
	labelSourceName    = "lighthouse.submariner.io/source-name"
	annotationNotReady = "lighthouse.submariner.io/publish-not-ready-addresses"
	annotationGlobalIP = "lighthouse.submariner.io/globalnet-enabled"
	// timestampPrefix plus the id of a cluster is the annotation of an aggregate with the age of that cluster's ServiceExport,
	// in nanoseconds since 1970.
	timestampPrefix = "timestamp.submariner.io/"
)

// aggregateName returns the name of a Service's aggregate. Two Services may have the same one.
func aggregateName(name clusterset.ServiceName) string { return name.Name + "-" + name.Namespace }

// serviceOfAggregate returns the Service of an aggregate, and false for another ServiceImport.
func serviceOfAggregate(si *v1beta1.ServiceImport) (clusterset.ServiceName, bool) {
	name := clusterset.ServiceName{Namespace: si.Annotations[labelNamespace], Name: si.Annotations[v1beta1.LabelServiceName]}
	return name, name.Namespace != "" && name.Name != ""
}

// serviceOfSlice returns the Service of an EndpointSlice of Submariner's broker, and false for another one.
func serviceOfSlice(es *discoveryv1.EndpointSlice) (clusterset.ServiceName, bool) {
	name := clusterset.ServiceName{Namespace: es.Labels[labelNamespace], Name: es.Labels[v1beta1.LabelServiceName]}
	return name, name.Namespace != "" && name.Name != ""
}

// clusterOf returns the cluster of an EndpointSlice of Submariner's broker.
func clusterOf(es *discoveryv1.EndpointSlice) clusterset.ClusterID {
	return clusterset.ClusterID(es.Labels[v1beta1.LabelSourceCluster])
}

// lists reports whether an aggregate names a cluster among its exporters.
func lists(si *v1beta1.ServiceImport, id clusterset.ClusterID) bool {
	return slices.ContainsFunc(si.Status.Clusters, func(c v1beta1.ClusterStatus) bool { return c.Cluster == string(id) })
}

// byAge returns the clusters that an aggregate has a timestamp of, the oldest export first.
func byAge(annotations map[string]string) []clusterset.ClusterID {
	type aged struct {
		id clusterset.ClusterID
		at int64
	}
	var all []aged
	for key, text := range annotations {
		id, ok := strings.CutPrefix(key, timestampPrefix)
		if at, err := strconv.ParseInt(text, 10, 64); ok && err == nil {
			all = append(all, aged{clusterset.ClusterID(id), at})
		}
	}
	slices.SortFunc(all, func(a, b aged) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.id, b.id)) })
	ids := make([]clusterset.ClusterID, len(all))
	for i, a := range all {
		ids[i] = a.id
	}
	return ids
}

// inputsOf returns the objects that cluster id has of a Service, as far as its aggregate and its EndpointSlices on Submariner's broker
// tell. They are empty if the cluster does not export the Service: then it has no slice, the first object that Lighthouse deletes. The
// aggregate is missing without a reason when a Lighthouse before lighthouse#1675 starts in the cluster of the broker. Times in the
// future count as unknown.
func inputsOf(id clusterset.ClusterID, name clusterset.ServiceName, aggregate *v1beta1.ServiceImport, all []*discoveryv1.EndpointSlice, now time.Time) export.Inputs {
	own := slices.DeleteFunc(slices.Clone(all), func(es *discoveryv1.EndpointSlice) bool { return clusterOf(es) != id })
	if len(own) == 0 {
		return export.Inputs{}
	}
	if aggregate == nil {
		aggregate = &v1beta1.ServiceImport{Spec: v1beta1.ServiceImportSpec{Type: typeOfSlice(own[0])}}
	}
	slices.SortFunc(own, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	meta := metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}
	in := export.Inputs{Export: &v1beta1.ServiceExport{ObjectMeta: meta}, Service: &corev1.Service{ObjectMeta: meta}}
	in.Export.CreationTimestamp = exportedAt(id, aggregate, own, now)
	// A cluster of Lighthouse has no block of Isthmus, and another cluster's ClusterSetIP is not its choice.
	in.Export.Annotations = map[string]string{v1alpha1.AnnotationUseClusterSetIP: strconv.FormatBool(aggregate.Annotations[v1alpha1.AnnotationUseClusterSetIP] == "true")}
	in.Service.Spec = serviceSpec(aggregate.Spec, own)
	for _, es := range own {
		es = es.DeepCopy()
		es.Namespace = name.Namespace
		es.Labels = map[string]string{discoveryv1.LabelServiceName: name.Name}
		if aggregate.Spec.Type == v1beta1.Headless {
			es.Labels[corev1.IsHeadlessService] = ""
		}
		in.Slices = append(in.Slices, *es)
	}
	return in
}

// typeOfSlice returns the type of the Service of a slice on Submariner's broker.
func typeOfSlice(es *discoveryv1.EndpointSlice) v1beta1.ServiceImportType {
	if es.Labels[labelHeadless] == "true" {
		return v1beta1.Headless
	}
	return v1beta1.ClusterSetIP
}

// exportedAt returns the age of a cluster's ServiceExport, or else that of the oldest of its slices.
func exportedAt(id clusterset.ClusterID, aggregate *v1beta1.ServiceImport, own []*discoveryv1.EndpointSlice, now time.Time) metav1.Time {
	if ns, err := strconv.ParseInt(aggregate.Annotations[timestampPrefix+string(id)], 10, 64); err == nil && ns > 0 && ns < now.UnixNano() {
		return metav1.Unix(0, ns)
	}
	return slices.MinFunc(own, func(a, b *discoveryv1.EndpointSlice) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	}).CreationTimestamp
}

// serviceSpec returns the spec of the Service of which own are the slices. A Service with an address of its own has one slice for each
// family, whose endpoint is that address and whose ports are those of the Service. The ports of a headless one are not known, and
// nobody uses them; those of its pods stand for them.
func serviceSpec(aggregate v1beta1.ServiceImportSpec, own []*discoveryv1.EndpointSlice) corev1.ServiceSpec {
	spec := corev1.ServiceSpec{
		Type: corev1.ServiceTypeClusterIP, SessionAffinity: aggregate.SessionAffinity, SessionAffinityConfig: aggregate.SessionAffinityConfig,
		InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyCluster), // the default; Lighthouse does not tell it
	}
	if aggregate.Type == v1beta1.Headless {
		spec.ClusterIPs = []string{corev1.ClusterIPNone}
	}
	for _, es := range own {
		if family := corev1.IPFamily(es.AddressType); !slices.Contains(spec.IPFamilies, family) {
			spec.IPFamilies = append(spec.IPFamilies, family)
			if aggregate.Type != v1beta1.Headless && len(es.Endpoints) > 0 && len(es.Endpoints[0].Addresses) > 0 {
				spec.ClusterIPs = append(spec.ClusterIPs, es.Endpoints[0].Addresses[0])
			}
		}
		for _, p := range es.Ports {
			q := servicePort(p)
			known := func(o corev1.ServicePort) bool { return o.Name == q.Name && o.Protocol == q.Protocol }
			if q.Port != 0 && !slices.ContainsFunc(spec.Ports, known) {
				spec.Ports = append(spec.Ports, q)
			}
		}
	}
	if len(spec.ClusterIPs) > 0 {
		spec.ClusterIP = spec.ClusterIPs[0]
	}
	return spec
}

func servicePort(p discoveryv1.EndpointPort) corev1.ServicePort {
	q := corev1.ServicePort{AppProtocol: p.AppProtocol, Protocol: corev1.ProtocolTCP}
	if p.Name != nil {
		q.Name = *p.Name
	}
	if p.Protocol != nil {
		q.Protocol = *p.Protocol
	}
	if p.Port != nil {
		q.Port = *p.Port
	}
	return q
}

// mergedPorts returns the ports of an aggregate: those of all clusters' slices, of the oldest export for each name. Clusters without a
// timestamp, which are those of Lighthouse before version 0.19, come last.
func mergedPorts(annotations map[string]string, all []*discoveryv1.EndpointSlice) []v1beta1.ServicePort {
	merged := []v1beta1.ServicePort{}
	ids := byAge(annotations)
	for _, es := range all {
		if id := clusterOf(es); !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	for _, id := range ids {
		i := slices.IndexFunc(all, func(es *discoveryv1.EndpointSlice) bool { return clusterOf(es) == id })
		if i < 0 {
			continue
		}
		for _, p := range all[i].Ports {
			q := servicePort(p)
			if !slices.ContainsFunc(merged, func(o v1beta1.ServicePort) bool { return o.Name == q.Name }) {
				merged = append(merged, v1beta1.ServicePort{Name: q.Name, Protocol: q.Protocol, Port: q.Port, AppProtocol: q.AppProtocol})
			}
		}
	}
	return merged
}
